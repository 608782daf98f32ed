//! Parses Einstein subscripts. Ellipses become letters, and the subscripts of the result are
//! written out. Every letter is checked against the shapes, because MLX reads out of bounds if they
//! are inconsistent. MLX then computes the sum.

use std::collections::HashMap;
use std::ffi::CString;

use crate::error::{Error, ErrorKind, Result};

const OP: &str = "einsum";
const ELLIPSIS: char = '.';

fn bad(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, OP, message)
}

/// The letters of one operand. An ellipsis becomes a single `.`.
fn term(text: &str) -> Result<Vec<char>> {
    let folded = text.replace("...", "\u{1}");
    let letters: Vec<char> = folded
        .chars()
        .map(|c| if c == '\u{1}' { ELLIPSIS } else { c })
        .collect();
    let dots = folded.matches('\u{1}').count();
    let fine = !text.contains('\u{1}')
        && dots <= 1
        && folded
            .chars()
            .all(|c| c == '\u{1}' || c.is_ascii_alphabetic());
    if fine {
        Ok(letters)
    } else {
        Err(bad(
            ErrorKind::Value,
            format!("'{text}' is not made of letters and at most one '...'"),
        ))
    }
}

/// The subscripts with letters only, and with an explicit result.
pub(super) fn explicit(subscripts: &str, shapes: &[&[i32]]) -> Result<CString> {
    let text: String = subscripts.chars().filter(|c| *c != ' ').collect();
    let (left, right) = match text.split_once("->") {
        Some((left, right)) => (left, Some(term(right)?)),
        None => (text.as_str(), None),
    };
    let terms: Vec<Vec<char>> = left.split(',').map(term).collect::<Result<_>>()?;
    if terms.len() != shapes.len() || shapes.is_empty() {
        return Err(bad(
            ErrorKind::Shape,
            format!(
                "'{subscripts}' is for {} operands, not {}",
                terms.len(),
                shapes.len()
            ),
        ));
    }
    // The number of axes of the widest ellipsis.
    let mut wide = 0usize;
    for (t, shape) in terms.iter().zip(shapes) {
        let named = t.iter().filter(|c| **c != ELLIPSIS).count();
        let has = t.contains(&ELLIPSIS);
        match shape.len().checked_sub(named) {
            Some(rest) if has => wide = wide.max(rest),
            Some(0) => {}
            _ => {
                return Err(bad(
                    ErrorKind::Shape,
                    format!(
                        "'{}' names {named} axes of an operand with {}",
                        t.iter().collect::<String>(),
                        shape.len()
                    ),
                ));
            }
        }
    }
    let used: Vec<char> = terms.iter().flatten().copied().collect();
    let free: Vec<char> = ('a'..='z')
        .chain('A'..='Z')
        .filter(|c| !used.contains(c))
        .take(wide)
        .collect();
    if free.len() < wide {
        return Err(bad(
            ErrorKind::Value,
            "more axes than there are letters for",
        ));
    }
    let expand = |t: &[char], axes: usize| -> Vec<char> {
        let named = t.iter().filter(|c| **c != ELLIPSIS).count();
        t.iter()
            .flat_map(|&c| {
                if c == ELLIPSIS {
                    // Letters of ellipses are aligned at the end, as in broadcasting.
                    free[wide - (axes - named)..].to_vec()
                } else {
                    vec![c]
                }
            })
            .collect()
    };
    let inputs: Vec<Vec<char>> = terms
        .iter()
        .zip(shapes)
        .map(|(t, shape)| expand(t, shape.len()))
        .collect();
    let mut lengths: HashMap<char, i32> = HashMap::new();
    for (letters, shape) in inputs.iter().zip(shapes) {
        let mut operand_sizes: HashMap<char, i32> = HashMap::new();
        for (&c, &d) in letters.iter().zip(*shape) {
            // A letter that occurs twice in an operand means a diagonal, which does not broadcast.
            if *operand_sizes.entry(c).or_insert(d) != d {
                return Err(bad(
                    ErrorKind::Shape,
                    format!("'{c}' names axes of different lengths of one operand"),
                ));
            }
            let known = lengths.entry(c).or_insert(d);
            if *known == 1 {
                *known = d;
            } else if d != 1 && *known != d {
                return Err(bad(
                    ErrorKind::Shape,
                    format!("'{c}' names axes of lengths {known} and {d}"),
                ));
            }
        }
    }
    let output = match right {
        Some(t) => {
            let named = t.iter().filter(|c| **c != ELLIPSIS).count();
            expand(&t, named + if t.contains(&ELLIPSIS) { wide } else { 0 })
        }
        None => {
            let all: Vec<char> = inputs.iter().flatten().copied().collect();
            let mut once: Vec<char> = all
                .iter()
                .copied()
                .filter(|c| !free.contains(c) && all.iter().filter(|d| *d == c).count() == 1)
                .collect();
            once.sort_unstable();
            free.iter().copied().chain(once).collect()
        }
    };
    for (i, c) in output.iter().enumerate() {
        if output[..i].contains(c) || !lengths.contains_key(c) {
            return Err(bad(
                ErrorKind::Value,
                format!("the result names '{c}' twice, or no operand has it"),
            ));
        }
    }
    let mut joined: Vec<String> = inputs.iter().map(|t| t.iter().collect()).collect();
    let last = joined.pop().unwrap_or_default();
    let mut spelled = joined.iter().map(|t| format!("{t},")).collect::<String>();
    spelled.push_str(&last);
    spelled.push_str("->");
    spelled.extend(&output);
    // Letters, commas and an arrow contain no NUL.
    CString::new(spelled).map_err(|_| bad(ErrorKind::Value, "the subscripts contain a NUL"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str, shapes: &[&[i32]]) -> Result<String> {
        explicit(text, shapes).map(|c| c.to_string_lossy().into_owned())
    }

    #[test]
    fn subscripts_are_spelled_out() {
        assert_eq!(run("ij,jk", &[&[2, 3], &[3, 4]]).unwrap(), "ij,jk->ik");
        assert_eq!(run("ba", &[&[2, 3]]).unwrap(), "ba->ab");
        assert_eq!(
            run("...ij, ...jk -> ...ik", &[&[5, 2, 3], &[7, 1, 3, 4]]).unwrap(),
            "bij,abjk->abik"
        );
        assert_eq!(run("ii->", &[&[2, 2]]).unwrap(), "ii->");
        assert_eq!(run("i,->i", &[&[2], &[]]).unwrap(), "i,->i");
    }

    #[test]
    fn contradictions_are_refused() {
        for (text, shapes) in [
            ("ii->i", &[&[2, 3][..]][..]),
            ("ii->i", &[&[1, 3]]),
            ("ij,jk", &[&[2, 3], &[4, 4]]),
            ("ij", &[&[2]]),
            ("ij", &[&[2, 2, 2]]),
            ("ij,jk", &[&[2, 2]]),
            ("i->ii", &[&[2]]),
            ("i->j", &[&[2]]),
            ("i-j", &[&[2]]),
            ("i->j->k", &[&[2]]),
            ("i..", &[&[2]]),
            ("......", &[&[2]]),
            ("\u{1}", &[&[2]]),
            ("i\0", &[&[2]]),
            ("%n", &[&[2, 2]]),
            ("", &[]),
        ] {
            assert!(run(text, shapes).is_err(), "{text:?} {shapes:?}");
        }
    }
}
