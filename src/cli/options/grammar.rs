//! The flags for structured output.

use std::path::{Path, PathBuf};

use inference::Grammar;

use crate::cli::terminal::bounded;
use crate::cli::terminal::failure::Failure;

/// Maximum size of a grammar or schema file in bytes.
const MAX_FILE: u64 = 4 << 20;

/// The structure of the reply. Only one flag may be given. If `--max-tokens` or `--stop` truncates
/// a reply, it is the start of a valid reply.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Structured output")]
#[group(multiple = false)]
pub struct GrammarArgs {
    /// The reply is JSON that this JSON schema allows; `{}` allows any JSON
    #[arg(long, short = 'j', value_name = "SCHEMA")]
    pub json_schema: Option<String>,
    /// A file with the JSON schema
    #[arg(long, value_name = "FILE")]
    pub json_schema_file: Option<PathBuf>,
    /// The reply matches this regular expression completely
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub regex: Option<String>,
    /// The reply matches this context-free grammar in Lark's syntax, from the rule `start`
    #[arg(long, value_name = "LARK", allow_hyphen_values = true)]
    pub grammar: Option<String>,
    /// A file with the Lark grammar
    #[arg(long, value_name = "FILE")]
    pub grammar_file: Option<PathBuf>,
}

impl GrammarArgs {
    /// The grammar of the flags, checked as far as possible without a model.
    pub fn grammar(&self) -> Result<Option<Grammar>, Failure> {
        let grammar = if let Some(text) = &self.json_schema {
            schema("--json-schema", text)?
        } else if let Some(path) = &self.json_schema_file {
            schema("--json-schema-file", &read("--json-schema-file", path)?)?
        } else if let Some(regex) = &self.regex {
            Grammar::Regex(regex.clone())
        } else if let Some(text) = &self.grammar {
            Grammar::Lark(text.clone())
        } else if let Some(path) = &self.grammar_file {
            Grammar::Lark(read("--grammar-file", path)?)
        } else {
            return Ok(None);
        };
        grammar
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))?;
        Ok(Some(grammar))
    }
}

fn schema(flag: &str, text: &str) -> Result<Grammar, Failure> {
    Grammar::from_json_schema(text).map_err(|e| Failure::usage(format!("{flag}: {e:#}")))
}

fn read(flag: &str, path: &Path) -> Result<String, Failure> {
    bounded::read_text(path, MAX_FILE)
        .map_err(|why| Failure::usage(format!("{flag} {}: {why}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        grammar: GrammarArgs,
    }

    fn grammar(args: &[&str]) -> Result<Option<Grammar>, Failure> {
        let args = std::iter::once(&"mlx").chain(args);
        let parsed = Program::try_parse_from(args).map_err(|e| Failure::usage(e.to_string()))?;
        parsed.grammar.grammar()
    }

    #[test]
    fn each_flag_makes_its_grammar() {
        assert_eq!(grammar(&[]).unwrap(), None);
        assert_eq!(
            grammar(&["-j", r#"{"type": "object"}"#]).unwrap(),
            Some(Grammar::json_object())
        );
        assert_eq!(
            grammar(&["--regex", "-?[0-9]+"]).unwrap(),
            Some(Grammar::Regex("-?[0-9]+".into()))
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("g");
        let file = path.to_str().unwrap();
        std::fs::write(&path, r#"{"type": "object"}"#).unwrap();
        assert_eq!(
            grammar(&["--json-schema-file", file]).unwrap(),
            Some(Grammar::json_object())
        );
        std::fs::write(&path, "start: \"a\"").unwrap();
        let lark = Some(Grammar::Lark("start: \"a\"".into()));
        assert_eq!(grammar(&["--grammar-file", file]).unwrap(), lark);
        assert_eq!(grammar(&["--grammar", "start: \"a\""]).unwrap(), lark);
    }

    #[test]
    fn what_cannot_be_is_a_usage_error() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("none");
        let missing = missing.to_str().unwrap();
        for args in [
            &["--json-schema", "{"][..],
            &["--json-schema", "[]"],
            &["--json-schema-file", missing],
            &["--grammar-file", missing],
            &["--grammar", " "],
            &["--regex", "a", "--json-schema", "{}"],
        ] {
            let failure = grammar(args).map(|_| ()).expect_err(&args.join(" "));
            assert_eq!(failure.exit_code(), 2, "{args:?}");
        }
        // Deep schemas must be refused, because they overflow the stack of the grammar library.
        let deep = format!("{}{{}}{}", "{\"items\":".repeat(5000), "}".repeat(5000));
        let refer = |i: usize| format!("\"d{i}\": {{\"$ref\": \"#/$defs/d{}\"}}", i + 1);
        let chain: Vec<String> = (0..20_000).map(refer).collect();
        let chain = format!(
            "{{\"$ref\": \"#/$defs/d0\", \"$defs\": {{{}}}}}",
            chain.join(", ")
        );
        let path = dir.path().join("hostile.json");
        for (text, says) in [(deep, "recursion limit"), (chain, "members of one object")] {
            std::fs::write(&path, text).unwrap();
            let args = ["--json-schema-file", path.to_str().unwrap()];
            let failure = grammar(&args).map(|_| ()).unwrap_err();
            assert_eq!(failure.exit_code(), 2);
            let said = failure.report().unwrap();
            assert!(said.contains(says), "{said}");
        }
    }
}
