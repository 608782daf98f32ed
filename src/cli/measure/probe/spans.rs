//! Maps the tokens of a prompt to byte ranges of its text.

use std::ops::Range;

use inference::TokenModel;

/// The ids of a text, and the byte range of each token, in order.
///
/// # Errors
/// If the decoded ids differ from the text, so that byte ranges are undefined.
pub fn tokens_with_spans(
    model: &dyn TokenModel,
    text: &str,
) -> inference::Result<(Vec<u32>, Vec<Range<usize>>)> {
    let ids = model.encode(text, true)?;
    let decoded = model.decode(&ids)?;
    // Some tokenizers add a space before the first word, which the text does not have.
    let added = decoded.len() - decoded.trim_start().len();
    let leading = text.len() - text.trim_start().len();
    if decoded[added..] != text[leading..] {
        return Err(inference::Error::new(
            inference::ErrorKind::Unsupported,
            format!(
                "the tokenizer gives {decoded:?} for {text:?}, so that no token can be found by its \
                 text; use --position last or mean"
            ),
        ));
    }
    let mut spans = Vec::with_capacity(ids.len());
    let mut start = 0;
    for end in 1..=ids.len() {
        let part = model.decode(&ids[..end])?;
        // If a character consists of several tokens, only its last token completes the character.
        let common = part
            .bytes()
            .zip(decoded.bytes())
            .take_while(|(a, b)| a == b)
            .count();
        let stop = (common.max(added) - added + leading).clamp(start, text.len());
        spans.push(start..stop);
        start = stop;
    }
    Ok((ids, spans))
}

/// The tokens that overlap the byte range `wanted`.
pub fn tokens_in(spans: &[Range<usize>], wanted: &Range<usize>) -> Vec<usize> {
    (0..spans.len())
        // A token without text, such as the start token, overlaps no range.
        .filter(|i| {
            let span = &spans[*i];
            !span.is_empty() && span.start < wanted.end && span.end > wanted.start
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_touch_a_part_are_found() {
        let spans = [0..0, 0..3, 3..5, 5..5, 5..9];
        assert_eq!(tokens_in(&spans, &(3..5)), [2]);
        assert_eq!(tokens_in(&spans, &(2..6)), [1, 2, 4]);
        assert!(tokens_in(&spans, &(9..9)).is_empty());
    }
}
