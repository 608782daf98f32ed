//! Tests of wrapping and Markdown. The output must not depend on how the text is divided into
//! pieces.

use super::*;

/// Returns the output for `text`. Asserts that `text` gives the same output as one piece and as
/// single characters.
#[track_caller]
fn drawn(text: &str, width: usize, markdown: bool) -> String {
    let mut screen = Screen::new(width, markdown);
    let output = screen.push(text) + &screen.end();
    let mut screen = Screen::new(width, markdown);
    let mut pieces = String::new();
    for c in text.chars() {
        pieces.push_str(&screen.push(&c.to_string()));
    }
    pieces.push_str(&screen.end());
    assert_eq!(output, pieces, "{text:?}");
    output
}

/// The text without control sequences.
fn plain(shown: &str) -> String {
    let mut text = String::new();
    let mut rest = shown.chars();
    while let Some(c) = rest.next() {
        if c == '\u{1b}' {
            rest.by_ref().find(|c| *c == 'm');
        } else {
            text.push(c);
        }
    }
    text
}

const LONG: &str =
    "The quick brown fox jumps over the lazy dog and over everything else that lies about.";

#[test]
fn words_stay_whole_at_every_width() {
    for width in [10, 20, 40, 80] {
        for markdown in [false, true] {
            let shown = plain(&drawn(LONG, width, markdown));
            let lines: Vec<&str> = shown.lines().collect();
            assert!(
                lines.iter().all(|line| line.chars().count() <= width),
                "{shown}"
            );
            assert!(lines.iter().all(|line| !line.ends_with(' ')), "{shown:?}");
            assert_eq!(lines.join(" "), LONG);
        }
    }
    assert_eq!(drawn(LONG, 0, false), format!("{LONG}\n"));
}

#[test]
fn a_word_that_fits_exactly_is_not_wrapped() {
    assert_eq!(drawn("12345 7890 x", 10, false), "12345 7890\nx\n");
    assert_eq!(drawn("12345 78901", 10, false), "12345\n78901\n");
}

#[test]
fn what_fits_nowhere_breaks_at_the_margin() {
    let word = "x".repeat(95);
    let shown = drawn(&format!("a {word}"), 40, false);
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!((lines[0], lines[1..].concat()), ("a", word));
    assert!(
        shown.lines().all(|line| line.chars().count() <= 40),
        "{shown}"
    );
    // Wide characters take two columns, and a line may break between them.
    let shown = drawn(&"漢".repeat(30), 40, false);
    let widths: Vec<usize> = shown.lines().map(|line| line.chars().count()).collect();
    assert_eq!(widths, [20, 10]);
}

#[test]
fn without_markdown_the_text_is_as_it_is() {
    for text in [
        "# No heading\n\n- *no* item\n1. `one`\n",
        "  indented\n\ttab\n",
        "a  b\n\n\nc \\* d\n",
        "```rust\nfn main() {}\n```\n",
        "---\n|a|b|\n",
    ] {
        let want = text.replace('\t', "    ");
        assert_eq!(drawn(text, 80, false), want);
    }
    let code = format!("```\n{LONG}\n```\n");
    assert_eq!(drawn(&code, 20, false), code);
}

#[test]
fn a_model_does_not_drive_the_terminal() {
    for markdown in [false, true] {
        let shown = drawn(
            "a\u{1b}[2Jb\u{9b}c\r\n```\n\u{1b}[2J\n```\n|\u{7}|\n",
            80,
            markdown,
        );
        assert!(!plain(&shown).contains(char::from(27)), "{shown:?}");
        assert!(
            !shown.contains("\u{1b}[2J") && !shown.contains('\u{7}'),
            "{shown:?}"
        );
        assert!(
            plain(&shown).starts_with("a\u{fffd}[2Jb\u{fffd}c\n"),
            "{shown:?}"
        );
    }
}

#[test]
fn emphasis_is_drawn_and_its_marks_are_not() {
    for (text, shows) in [
        ("a **b c** d", "a b c d\n"),
        ("*a* _b_ __c__ ***d***", "a b c d\n"),
        ("`x * y` and ``a ` b``", "x * y and a ` b\n"),
        (
            "2 * 3 and snake_case_name and 5 ** 2",
            "2 * 3 and snake_case_name and 5 ** 2\n",
        ),
        ("\\*not\\* \\a", "*not* \\a\n"),
        ("## A *b*", "A b\n"),
        ("#hashtag", "#hashtag\n"),
        (
            "- one\n  * two\n10. ten\n> said",
            "• one\n  • two\n10. ten\n│ said\n",
        ),
        ("-5 and 1.5\n**b**\n1984", "-5 and 1.5\nb\n1984\n"),
        ("| a | **b** |\n|---|---|", "a │ b\n──┼──\n"),
        ("| a |\n| *b* |\nc", "| a |\n| *b* |\nc\n"),
        (
            "[a *b*](https://c.d/e_(f)) g",
            "a b (https://c.d/e_(f)) g\n",
        ),
        ("[https://a.b](https://a.b)", "https://a.b\n"),
        ("[a](<b> \"c\").", "a (b).\n"),
        (
            "[ ] x[1] [a][b] [*c*] (d) [e",
            "[ ] x[1] [a][b] [c] (d) [e\n",
        ),
        ("`[a](b)` \\[a](b)", "[a](b) [a](b)\n"),
        ("trailing `", "trailing `\n"),
    ] {
        assert_eq!(plain(&drawn(text, 80, true)), shows, "{text:?}");
    }
    let bold = drawn("a **b** c", 80, true);
    assert_eq!(bold, "a \u{1b}[0;1mb\u{1b}[0m c\n");
    // An open emphasis mark ends with its line, where the terminal's style must be reset.
    let open = drawn("**a\nb", 80, true);
    assert_eq!(open, "\u{1b}[0;1ma\u{1b}[0m\nb\n");
    assert_eq!(
        plain(&drawn("---", 80, true)),
        format!("{}\n", "─".repeat(40))
    );
}

#[test]
fn a_table_is_shown_once_it_ends() {
    let text = "before\n| a | b |\n|---|:-:|\n| **long** | x |\n\nafter";
    let mut screen = Screen::new(80, true);
    let rows = screen.push(&text[..text.len() - 6]);
    assert_eq!(plain(&rows), "before\n");
    let rest = plain(&(screen.push("\nafter") + &screen.end()));
    assert_eq!(rest, "a    │ b\n─────┼──\nlong │ x\n\nafter\n");
    drawn(text, 80, true);
}

#[test]
fn lists_and_quotes_hang() {
    let shown = plain(&drawn(
        "- one two three four\n> five six seven eight",
        12,
        true,
    ));
    assert_eq!(
        shown,
        "• one two\n  three four\n│ five six\n│ seven\n│ eight\n"
    );
}

#[test]
fn code_is_colored_and_never_wrapped() {
    let text = format!("```python\ndef f(): # {LONG}\n    return \"a\" + 1\n```\nafter **it**");
    let shown = drawn(&text, 40, true);
    assert_eq!(plain(&shown), text.replace("**", "") + "\n");
    for colored in [
        "\u{1b}[35mdef\u{1b}[0m",
        "\u{1b}[32m\"a\"\u{1b}[0m",
        "\u{1b}[33m1\u{1b}[0m",
    ] {
        assert!(shown.contains(colored), "{shown:?}");
    }
    // A shorter fence does not end a longer one.
    let nested = "````\n```\n**a**\n````\n";
    assert_eq!(plain(&drawn(nested, 80, true)), nested);
}

#[test]
fn the_end_is_one_newline() {
    for (text, shows) in [
        ("", ""),
        ("a", "a\n"),
        ("a\n", "a\n"),
        ("a\n\n", "a\n\n"),
        ("```", "```\n"),
    ] {
        assert_eq!(plain(&drawn(text, 80, true)), shows, "{text:?}");
    }
}
