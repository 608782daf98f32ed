//! Checks of models with access to ids and logits.

use inference::{
    ChatEnd, ChatPrompt, ErrorKind, Interrupt, LogitsOutput, Message, Prompt, TextModel,
    TokenModel, TokenStream,
};

use super::errors::foreign_ids;
use crate::context::{Context, Stop, Verdict, ensure, fail, skip};
use crate::probe::{N, greedy, is_greatest, refused, reply, same, start};

/// The model's token interface. The check `declared_traits` tests that it exists.
fn tokens(model: &dyn TextModel) -> Result<&dyn TokenModel, Stop> {
    match model.as_token_model() {
        Some(tokens) => Ok(tokens),
        None => skip("the model does not show its tokens"),
    }
}

fn encode(tokens: &dyn TokenModel, text: &str, special: bool) -> Result<Vec<u32>, Stop> {
    let ids = tokens.encode(text, special);
    ids.or_else(|e| fail(format!("{text:?} cannot be encoded: {e}")))
}

pub(crate) fn encode_decode(context: &Context) -> Verdict {
    let model = context.model()?;
    let tokens = tokens(model.as_ref())?;
    let vocab = model.info().vocab_size;
    let mut texts = context.prompts.clone();
    texts.extend(["a", "Hello, world! 12345", "two\nlines  and  spaces"].map(String::from));
    for text in &texts {
        let ids = encode(tokens, text, false)?;
        ensure!(!ids.is_empty(), "{text:?} has no tokens");
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return fail(format!(
                "{text:?} has the token {id}, the vocabulary {vocab}"
            ));
        }
        match tokens.decode(&ids) {
            // Some tokenizers add white space at the start of a text, and others remove it.
            Ok(back) => ensure!(back.trim() == text.trim(), "{text:?} came back as {back:?}"),
            Err(e) => return fail(format!("the tokens of {text:?} cannot be decoded: {e}")),
        }
        ensure!(
            encode(tokens, text, false)? == ids,
            "{text:?} has other tokens each time"
        );
        // Special tokens may be before and after a text, but not inside it.
        let special = encode(tokens, text, true)?;
        ensure!(
            special.windows(ids.len()).any(|w| w == ids),
            "{text:?} is {ids:?}, but with special tokens {special:?}"
        );
    }
    if let Err(e) = tokens.encode("", false) {
        return fail(format!("an empty text cannot be encoded: {e}"));
    }
    match tokens.decode(&[]) {
        Ok(text) => ensure!(text.is_empty(), "no tokens are decoded to {text:?}"),
        Err(e) => return fail(format!("no tokens cannot be decoded: {e}")),
    }
    for id in [u32::MAX, i32::MAX as u32] {
        let what = format!("decoding the token {id}");
        refused(&what, tokens.decode(&[id]), &[ErrorKind::InvalidOption])?;
    }
    if let Some(id) = tokens.eos_tokens().iter().find(|id| **id as usize >= vocab) {
        return fail(format!(
            "the end-of-text token {id} is outside the vocabulary of {vocab}"
        ));
    }
    Ok(())
}

pub(crate) fn prompt_forms(context: &Context) -> Verdict {
    let model = context.model()?;
    let tokens = tokens(model.as_ref())?;
    for text in &context.prompts {
        let ids = encode(tokens, text, true)?;
        let by_text = reply(model.as_ref(), &Prompt::from(text), &greedy(N))?;
        let by_ids = reply(model.as_ref(), &Prompt::Tokens(ids), &greedy(N))?;
        same(
            &format!("the reply to the ids of {text:?}"),
            &by_ids,
            &by_text,
        )?;
    }
    Ok(())
}

fn logits_of(tokens: &dyn TokenModel, prompt: &Prompt, all: bool) -> Result<LogitsOutput, Stop> {
    let output = tokens.logits(prompt, all, &Interrupt::new());
    output.or_else(|e| fail(format!("logits of {prompt:?}: {e}")))
}

/// Maximum difference between logits that one pass computes and logits that several passes compute,
/// relative to the range of the logits.
const SPREAD: f32 = 0.02;

pub(crate) fn logits(context: &Context) -> Verdict {
    let model = context.model()?;
    let tokens = tokens(model.as_ref())?;
    let vocab = model.info().vocab_size;
    for text in &context.prompts {
        let ids = encode(tokens, text, true)?;
        let last = logits_of(tokens, &Prompt::from(text), false)?;
        let all = logits_of(tokens, &Prompt::Tokens(ids.clone()), true)?;
        for (output, rows) in [(&last, 1), (&all, ids.len())] {
            ensure!(
                output.tokens == ids,
                "the tokens are {:?}, expected {ids:?}",
                output.tokens
            );
            ensure!(
                output.shape == [rows, vocab] && output.logits.len() == rows * vocab,
                "the shape is {:?} with {} logits, expected [{rows}, {vocab}]",
                output.shape,
                output.logits.len()
            );
            ensure!(
                output.logits.iter().all(|l| !l.is_nan()),
                "a logit of {text:?} is not a number"
            );
        }
        let (one, other) = (&last.logits[..], &all.logits[all.logits.len() - vocab..]);
        let finite = one.iter().copied().filter(|l| l.is_finite());
        let (low, high) = finite.fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(x), h.max(x)));
        let bound = SPREAD * (high - low).max(1.0);
        // Two equal infinities have no difference, so they are compared first.
        let close = |a: f32, b: f32| a == b || (a - b).abs() <= bound;
        let apart = one.iter().zip(other).find(|(a, b)| !close(**a, **b));
        if let Some((a, b)) = apart {
            return fail(format!(
                "the logits after the last token are {a} alone and {b} among all"
            ));
        }
    }
    for prompt in foreign_ids(vocab)
        .into_iter()
        .chain([Prompt::Tokens(Vec::new())])
    {
        let what = format!("logits of {prompt:?}");
        refused(
            &what,
            tokens.logits(&prompt, false, &Interrupt::new()),
            &[ErrorKind::InvalidOption],
        )?;
    }
    Ok(())
}

pub(crate) fn logits_greedy(context: &Context) -> Verdict {
    let model = context.model()?;
    let tokens = tokens(model.as_ref())?;
    for text in &context.prompts {
        let last = logits_of(tokens, &Prompt::from(text), false)?;
        let first = reply(model.as_ref(), &Prompt::from(text), &greedy(1))?;
        let Some(id) = first.ids.first() else {
            return fail(format!("the reply to {text:?} has no token"));
        };
        is_greatest(&format!("greedy after {text:?}"), &last.logits, *id)?;
    }
    Ok(())
}

pub(crate) fn token_logits(context: &Context) -> Verdict {
    let model = context.model()?;
    let vocab = model.info().vocab_size;
    let options = greedy(4).with_logits(true);
    for token in start(model.as_ref(), &context.prompt(), &options)? {
        let token = token.or_else(|e| fail(format!("the reply failed: {e}")))?;
        let Some(logits) = &token.logits else {
            return fail(format!(
                "token {} has no logits, though asked for",
                token.id
            ));
        };
        ensure!(
            logits.len() == vocab,
            "token {} has {} logits for a vocabulary of {vocab}",
            token.id,
            logits.len()
        );
        is_greatest("a greedy reply", logits, token.id)?;
    }
    for token in start(model.as_ref(), &context.prompt(), &greedy(2))? {
        let unasked = token.is_ok_and(|t| t.logits.is_some());
        ensure!(!unasked, "tokens have logits, though not asked for");
    }
    Ok(())
}

pub(crate) fn prepare_chat(context: &Context) -> Verdict {
    let model = context.model()?;
    let tokens = tokens(model.as_ref())?;
    if !context.capabilities.chat || !model.info().has_chat_template {
        return skip("the model has no chat template");
    }
    let messages = [Message::user("What is the capital of France?")];
    let prepare = |end| {
        let prepared = tokens.prepare_chat(&ChatPrompt::new(messages.clone()).with_end(end));
        prepared.or_else(|e| fail(format!("prepare_chat: {e}")))
    };
    let (plain, prompted) = (prepare(ChatEnd::Messages)?, prepare(ChatEnd::Reply)?);
    let text = &prompted.text;
    ensure!(
        plain.text.contains(&messages[0].content) && text.contains(&messages[0].content),
        "what the user said is not in {text:?}"
    );
    ensure!(
        text.len() >= plain.text.len(),
        "with the generation prompt the conversation is {text:?}, shorter than {:?}",
        plain.text
    );
    let ids = |stream: inference::Result<TokenStream>| -> Result<Vec<u32>, Stop> {
        let tokens = stream.and_then(|stream| stream.map(|t| Ok(t?.id)).collect());
        tokens.or_else(|e| fail(format!("the reply to the conversation: {e}")))
    };
    let by_ids = ids(model.generate(&prompted.into(), &greedy(4)))?;
    // Whether `chat` honors the limit is tested by the check `chat`.
    let mut by_chat = ids(model.chat(&messages, &greedy(4)))?;
    by_chat.truncate(by_ids.len());
    ensure!(
        by_ids == by_chat,
        "the reply to the ids of prepare_chat is {by_ids:?}, but chat answers {by_chat:?}"
    );
    Ok(())
}
