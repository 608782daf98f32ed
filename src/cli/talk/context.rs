//! Checks of a prompt's length against the model's context.

use inference::ModelInfo;

use crate::cli::terminal::failure::Failure;

/// Refuses a prompt longer than the model's context, unless the cache is bounded.
///
/// # Errors
/// If the prompt is too long. The message contains both lengths.
pub fn check(info: &ModelInfo, prompt: usize, ctx_size: Option<usize>) -> Result<(), Failure> {
    match (ctx_size, info.context_length) {
        (None, Some(context)) if prompt > context => Err(Failure::failed(format!(
            "the prompt has {prompt} tokens, the model's context {context}; --ctx-size N remembers the last N \
             and goes on"
        ))),
        _ => Ok(()),
    }
}

/// A message if prompt and reply together exceed the model's context.
pub fn beyond(info: &ModelInfo, all: usize, ctx_size: Option<usize>) -> Option<String> {
    let context = info.context_length?;
    (ctx_size.is_none() && all > context).then(|| {
        format!(
            "warning: prompt and reply have {all} tokens, the model's context {context}; what it says beyond may \
             make no sense (--ctx-size N remembers the last N)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use inference::TextModel;

    use crate::cli::mock;

    #[test]
    fn both_counts_are_told() {
        let mut info = mock::instruct(&[]).info();
        info.context_length = Some(100);
        check(&info, 100, None).unwrap();
        check(&info, 101, Some(50)).unwrap();
        let told = check(&info, 101, None).unwrap_err().report().unwrap();
        assert!(
            told.contains("101") && told.contains("100; --ctx-size"),
            "{told}"
        );
        assert_eq!(beyond(&info, 100, None), None);
        assert_eq!(beyond(&info, 101, Some(50)), None);
        assert!(beyond(&info, 101, None).unwrap().contains("101 tokens"));
        info.context_length = None;
        check(&info, 1 << 40, None).unwrap();
    }
}
