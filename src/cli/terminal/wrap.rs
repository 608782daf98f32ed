//! Wraps the program's own messages on a narrow terminal. Lines break between words. A continued
//! last column keeps its indentation. `screen` wraps replies instead.

use textwrap::{Options, WordSeparator, WordSplitter};

/// The spaces between the columns of a table.
const GAP: &str = "  ";
/// The indentation of continued lines in text without columns.
const INDENT: usize = 0;

/// Wraps `text` for a terminal of `width` columns. Lines that fit are unchanged, and long words
/// such as paths are not divided.
pub fn wrapped(text: &str, width: usize) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| one(line, width)).collect();
    lines.join("\n")
}

fn one(line: &str, width: usize) -> String {
    if width == 0 || textwrap::core::display_width(line) <= width {
        return line.to_owned();
    }
    // The text before the last column keeps its spaces.
    let (names, rest) = line.split_at(last_column(line));
    let column = textwrap::core::display_width(names);
    let (names, hanging) = match column {
        // A last column that has too little space goes to the next line.
        n if n * 2 > width && names.trim().is_empty() => (String::from("    "), 4),
        n if n * 2 > width => (format!("{}\n    ", one(names.trim_end(), width)), 4),
        n if n > 0 => (names.to_owned(), n),
        _ => (String::new(), INDENT),
    };
    let first = column.min(hanging);
    let (first, hanging) = (" ".repeat(first), " ".repeat(hanging));
    let options = Options::new(width)
        .initial_indent(&first)
        .subsequent_indent(&hanging)
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation)
        .break_words(false);
    let text = textwrap::fill(rest, options);
    names + text.get(first.len()..).unwrap_or_default()
}

/// The byte at which the last column of a table begins; 0 in a line without columns.
fn last_column(line: &str) -> usize {
    let text = line.trim_end();
    let after_indent = text.len() - text.trim_start().len();
    match text.get(after_indent..).and_then(|text| text.rfind(GAP)) {
        Some(at) => after_indent + at + GAP.len(),
        None => after_indent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_only() {
        assert_eq!(wrapped("one two three", 8), "one two\nthree");
        assert_eq!(wrapped("fits", 4), "fits");
        assert_eq!(wrapped("one two three", 0), "one two three");
        // Flags and paths are not divided.
        let text = "give --max-tokens or /a/very-long/path-of/a/file";
        assert_eq!(
            wrapped(text, 16),
            "give\n--max-tokens or\n/a/very-long/path-of/a/file"
        );
        assert_eq!(wrapped("a b c d\n\ne f g h", 3), "a b\nc d\n\ne f\ng h");
    }

    #[test]
    fn a_column_of_text_hangs_below_its_beginning() {
        let line = "/set NAME  one of many words here";
        assert_eq!(
            wrapped(line, 24),
            "/set NAME  one of many\n           words here"
        );
        // The last column has too little space beside the names.
        let line = "cpu (default)  yes  a device  streaming chat";
        assert_eq!(
            wrapped(line, 20),
            "cpu (default)  yes\n    a device\n    streaming chat"
        );
        assert_eq!(
            wrapped("cpu  a device of many words  streaming chat", 20),
            "cpu  a device of\n     many words\n    streaming chat"
        );
        // A line with only a wide indentation gets an indentation of four columns.
        assert_eq!(wrapped("            one two", 16), "    one two");
        // A narrow indentation stays.
        assert_eq!(wrapped("    a b c", 7), "    a b\n    c");
    }
}
