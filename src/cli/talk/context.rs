//! How long a prompt is beside what the model was made for.

use inference::{ErrorKind, Message, ModelInfo, TextModel};

use crate::cli::terminal::failure::Failure;

/// A prompt as the model counts it.
pub enum Counted<'a> {
    /// A text, unchanged.
    Text(&'a str),
    /// Token ids.
    Tokens(&'a [u32]),
    /// A conversation.
    Chat(&'a [Message]),
}

/// The tokens of a prompt; `None` where the backend does not tell.
///
/// # Errors
/// When the template refuses the conversation, which is no fault of the command line.
pub fn tokens(model: &dyn TextModel, prompt: &Counted<'_>) -> Result<Option<usize>, Failure> {
    let Some(tokens) = model.as_token_model() else {
        return Ok(None);
    };
    Ok(match prompt {
        Counted::Tokens(ids) => Some(ids.len()),
        Counted::Text(text) => tokens.encode(text, true).ok().map(|ids| ids.len()),
        Counted::Chat(messages) => match tokens.encode_chat(messages, true) {
            Ok(ids) => Some(ids.len()),
            Err(e) if e.kind() == ErrorKind::InvalidOption => return Err(e.into()),
            Err(_) => None,
        },
    })
}

/// Refuses a prompt that is longer than the model's context, where the cache is not bounded.
///
/// # Errors
/// With both counts.
pub fn check(info: &ModelInfo, prompt: usize, ctx_size: Option<usize>) -> Result<(), Failure> {
    match (ctx_size, info.context_length) {
        (None, Some(context)) if prompt > context => Err(Failure::failed(format!(
            "the prompt has {prompt} tokens, the model's context {context}; --ctx-size N remembers the last N \
             and goes on"
        ))),
        _ => Ok(()),
    }
}

/// What to say where prompt and reply went beyond the model's context.
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
    use crate::cli::mock::Mock;

    #[test]
    fn both_counts_are_told() {
        let mut info = Mock::instruct(&[]).info();
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
