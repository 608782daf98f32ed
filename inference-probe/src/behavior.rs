//! Checks whether a model continues a stimulus as expected.

use serde::{Deserialize, Serialize};

/// How a continuation compares with the expected text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Correctness {
    /// Whether the first word of the continuation is the expected one.
    pub exact: bool,
    /// Whether the expected text occurs in the continuation.
    pub contains: bool,
}

/// Returns the text in lower case, without white space and punctuation at its ends.
fn normalized(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_whitespace())
        .flat_map(char::to_lowercase)
        .collect::<String>()
        .trim_matches(|c: char| !c.is_alphanumeric())
        .to_owned()
}

/// Compares a continuation with `expected`. An empty expected text never matches.
pub fn correctness(continuation: &str, expected: &str) -> Correctness {
    let expected = normalized(expected);
    if expected.is_empty() {
        return Correctness {
            exact: false,
            contains: false,
        };
    }
    let all_text = normalized(continuation);
    // The expected text may have several words. So words of the continuation are joined until they
    // have as many characters as the expected text.
    let mut text = String::new();
    let mut exact = false;
    for word in continuation.split_whitespace() {
        text.push_str(word);
        let here = normalized(&text);
        exact = here == expected;
        if exact || here.len() >= expected.len() {
            break;
        }
    }
    Correctness {
        exact,
        contains: all_text.contains(&expected),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn punctuation_case_and_white_space_do_not_count() {
        for (continuation, expected, exact, contains) in [
            (" Paris.", "paris", true, true),
            (" Paris, the capital", "Paris", true, true),
            (" the city of Paris", "Paris", false, true),
            ("\"New  York\" is", "New York", true, true),
            ("Parisian", "Paris", false, true),
            ("", "Paris", false, false),
            ("anything", "", false, false),
        ] {
            let actual = correctness(continuation, expected);
            assert_eq!(
                (actual.exact, actual.contains),
                (exact, contains),
                "{continuation:?}"
            );
        }
    }
}
