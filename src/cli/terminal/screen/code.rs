//! Colors comments, strings, numbers and keywords in lines of code. Other words stay unchanged. It
//! uses no grammars, because grammar libraries would add megabytes to the program.

/// Languages whose comments go from `#` to the end of the line.
const HASH: [&str; 14] = [
    "python",
    "py",
    "sh",
    "bash",
    "zsh",
    "shell",
    "console",
    "yaml",
    "yml",
    "toml",
    "ruby",
    "rb",
    "r",
    "dockerfile",
];
const SLASHES: [&str; 23] = [
    "rust",
    "rs",
    "c",
    "h",
    "cpp",
    "c++",
    "cc",
    "java",
    "javascript",
    "js",
    "jsx",
    "typescript",
    "ts",
    "tsx",
    "go",
    "golang",
    "swift",
    "kotlin",
    "kt",
    "php",
    "csharp",
    "cs",
    "json",
];
const DASHES: [&str; 4] = ["sql", "lua", "haskell", "hs"];

/// The keywords of all supported languages together. A keyword of another language may be colored,
/// which is harmless.
const WORDS: &str = " abstract and as async await begin break by case catch char class const continue create crate \
    def default defer del delete do done double drop elif else elsif end enum esac except export extends \
    false False fi final finally float fn for foreach from func function go group having if impl implements \
    import in include insert instanceof int interface into is join key lambda let limit local long loop match \
    mod module move mut new nil None not null nullptr of on or order package pass primary private protected pub \
    public raise ref require return select self Self set short static struct super switch table template then \
    this throw throws trait true True try type typedef typeof union unless unsafe unsigned until update use using \
    values var virtual void volatile where while with yield ";

const COMMENT: &str = "\u{1b}[2m";
const STRING: &str = "\u{1b}[32m";
const NUMBER: &str = "\u{1b}[33m";
const WORD: &str = "\u{1b}[35m";
const RESET: &str = "\u{1b}[0m";

/// A block of code in a language.
pub struct Code {
    comment: &'static str,
    /// Whether keywords are case-insensitive.
    any_case: bool,
    /// Whether a single quote may start a lifetime, as in Rust.
    is_rust: bool,
    in_comment: bool,
}

impl Code {
    /// A block of code in the language that the fence names; `None` for an unknown language.
    pub fn new(language: &str) -> Option<Self> {
        let name = language.split([' ', ',', '{']).next()?.to_ascii_lowercase();
        let name = name.as_str();
        let comment = if HASH.contains(&name) {
            "#"
        } else if SLASHES.contains(&name) {
            "//"
        } else if DASHES.contains(&name) {
            "--"
        } else {
            return None;
        };
        Some(Self {
            comment,
            any_case: name == "sql",
            is_rust: matches!(name, "rust" | "rs"),
            in_comment: false,
        })
    }

    /// Returns the next line with colors.
    pub fn line(&mut self, line: &str) -> String {
        let mut out = String::with_capacity(line.len() * 2);
        let mut rest = line;
        let mut color = |color: &str, text: &str| {
            if color.is_empty() {
                out.push_str(text);
            } else {
                out.push_str(&format!("{color}{text}{RESET}"));
            }
        };
        let mut before = ' ';
        while let Some(first) = rest.chars().next() {
            let (kind, len) = if self.in_comment {
                let end = rest.find("*/").map(|n| n + 2);
                self.in_comment = end.is_none();
                (COMMENT, end.unwrap_or(rest.len()))
            } else if self.comment == "//" && rest.starts_with("/*") {
                let end = rest[2..].find("*/").map(|n| n + 4);
                self.in_comment = end.is_none();
                (COMMENT, end.unwrap_or(rest.len()))
            } else if rest.starts_with(self.comment)
                && (self.comment != "#" || before.is_whitespace())
            {
                (COMMENT, rest.len())
            } else if let Some(len) = self.string(rest, first) {
                (STRING, len)
            } else if first.is_alphanumeric() || first == '_' {
                let inside = |c: char| !(c.is_alphanumeric() || c == '_');
                let len = rest.find(inside).unwrap_or(rest.len());
                (self.name(&rest[..len], first), len)
            } else {
                ("", first.len_utf8())
            };
            let (text, after) = rest.split_at(len);
            color(kind, text);
            before = text.chars().next_back().unwrap_or(' ');
            rest = after;
        }
        out
    }

    /// Length of a string that starts at `text` and ends on this line.
    fn string(&self, text: &str, quote: char) -> Option<usize> {
        if !matches!(quote, '"' | '\'' | '`') {
            return None;
        }
        let mut escaped = false;
        for (at, c) in text.char_indices().skip(1) {
            if escaped {
                escaped = false;
            } else if c == '\\' {
                escaped = true;
            } else if c == quote {
                let is_lifetime =
                    self.is_rust && quote == '\'' && at > 2 && !text.starts_with("'\\");
                return (!is_lifetime).then_some(at + 1);
            }
        }
        None
    }

    fn name(&self, name: &str, first: char) -> &'static str {
        let lower = name.to_ascii_lowercase();
        let name = if self.any_case { &lower } else { name };
        if first.is_ascii_digit() {
            NUMBER
        } else if WORDS.split_whitespace().any(|word| word == name) {
            WORD
        } else {
            ""
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn colored(language: &str, line: &str) -> String {
        Code::new(language).unwrap().line(line)
    }

    #[test]
    fn parts_have_their_colors_and_nothing_is_lost() {
        let line = colored("rust", "let a: &'a str = \"x // y\"; // 1 + 'b'");
        assert!(line.starts_with(&format!("{WORD}let{RESET} a")), "{line:?}");
        assert!(
            line.contains(&format!("{STRING}\"x // y\"{RESET}")),
            "{line:?}"
        );
        assert!(
            line.ends_with(&format!("{COMMENT}// 1 + 'b'{RESET}")),
            "{line:?}"
        );
        assert!(line.contains("&'a str"), "{line:?}");
        assert!(colored("SQL", "SELECT 1 -- x").starts_with(WORD));
        assert_eq!(colored("bash", "echo a#b"), "echo a#b");
        for text in ["é = 'ü", "\\\"", "/* a", "日本 1e5", ""] {
            let plain = colored("js", text);
            let plain = [COMMENT, STRING, NUMBER, WORD, RESET]
                .iter()
                .fold(plain, |text, code| text.replace(code, ""));
            assert_eq!(plain, text);
        }
    }

    #[test]
    fn comments_go_on_over_lines() {
        let mut code = Code::new("c").unwrap();
        assert_eq!(code.line("/* a"), format!("{COMMENT}/* a{RESET}"));
        assert_eq!(
            code.line("b */ int"),
            format!("{COMMENT}b */{RESET} {WORD}int{RESET}")
        );
        assert!(Code::new("").is_none() && Code::new("brainfuck").is_none());
    }
}
