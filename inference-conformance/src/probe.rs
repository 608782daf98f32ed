//! How the checks ask a model: replies read to the end, and refusals of the right kind.

use inference::{
    Error, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Prompt, Result as Answer,
    TextModel, TokenStream,
};

use crate::context::{Stop, Verdict, ensure, fail};

/// Tokens of an ordinary reply.
pub(crate) const N: usize = 16;
/// Tokens that may still come after a request was stopped: those whose text was ready or held back.
pub(crate) const LAG: usize = 32;
/// A reply that is never read to its end.
pub(crate) const LONG: usize = 100_000;

/// Growth of memory that is too much to be noise: tiny models count, too.
pub(crate) const GROWTH: u64 = 1 << 18;

/// Greedy, to the last token asked for.
pub(crate) fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions::new()
        .with_max_tokens(max_tokens)
        .with_ignore_eos(true)
}

/// Drawn from a flat distribution.
pub(crate) fn sampled(max_tokens: usize, seed: Option<u64>) -> GenerateOptions {
    greedy(max_tokens).with_temperature(1.5).with_seed(seed)
}

/// A reply read to its end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reply {
    pub(crate) ids: Vec<u32>,
    pub(crate) texts: Vec<String>,
    pub(crate) finish: Option<FinishReason>,
}

impl Reply {
    pub(crate) fn text(&self) -> String {
        self.texts.concat()
    }
}

/// Reads a stream to its end; an error in it fails the check.
pub(crate) fn read(mut stream: TokenStream) -> Result<(Reply, GenerateMetrics), Stop> {
    let (mut ids, mut texts) = (Vec::new(), Vec::new());
    for token in stream.by_ref() {
        match token {
            Ok(token) => {
                ids.push(token.id);
                texts.push(token.text);
            }
            Err(e) => return fail(format!("the reply failed after {} tokens: {e}", ids.len())),
        }
    }
    let reply = Reply {
        ids,
        texts,
        finish: stream.finish_reason(),
    };
    let metrics = stream.metrics();
    Ok((reply, metrics))
}

/// A stream of `prompt`; a refusal fails the check.
pub(crate) fn start(
    model: &dyn TextModel,
    prompt: &Prompt,
    options: &GenerateOptions,
) -> Result<TokenStream, Stop> {
    let started = model.generate(prompt, options);
    started.or_else(|e| fail(format!("generate was refused: {e}")))
}

/// The reply to `prompt`.
pub(crate) fn reply(
    model: &dyn TextModel,
    prompt: &Prompt,
    options: &GenerateOptions,
) -> Result<Reply, Stop> {
    Ok(read(start(model, prompt, options)?)?.0)
}

/// The reply, or `None` where the backend answers that it lacks the feature.
pub(crate) fn reply_if_supported(
    model: &dyn TextModel,
    prompt: &Prompt,
    options: &GenerateOptions,
) -> Result<Option<Reply>, Stop> {
    match model.generate(prompt, options) {
        Ok(stream) => Ok(Some(read(stream)?.0)),
        Err(e) if e.kind() == ErrorKind::Unsupported => Ok(None),
        Err(e) => fail(format!("generate was refused: {e}")),
    }
}

/// The error of a call that must fail with one of `kinds`.
pub(crate) fn refused<T>(
    what: &str,
    answer: Answer<T>,
    kinds: &[ErrorKind],
) -> Result<Error, Stop> {
    let expected = kinds
        .iter()
        .map(|k| k.as_str())
        .collect::<Vec<_>>()
        .join(" or ");
    match answer {
        Ok(_) => fail(format!(
            "{what} was accepted; expected an error of kind {expected}"
        )),
        Err(e) if kinds.contains(&e.kind()) => {
            ensure!(
                !e.message().trim().is_empty(),
                "{what}: the error says nothing"
            );
            Ok(e)
        }
        Err(e) => fail(format!(
            "{what} failed with kind {}, expected {expected}: {e}",
            e.kind()
        )),
    }
}

/// A call whose fault may show when its stream is first read.
pub(crate) fn first_item(started: Answer<TokenStream>) -> Answer<()> {
    match started?.next() {
        Some(Err(e)) => Err(e),
        _ => Ok(()),
    }
}

/// Reads on until the stream ends. It must do so with an error of `kind` after few tokens, and say
/// so.
pub(crate) fn ends_with(stream: &mut TokenStream, kind: ErrorKind) -> Verdict {
    for _ in 0..=LAG {
        match stream.next() {
            Some(Ok(_)) => {}
            Some(Err(e)) => {
                ensure!(
                    e.kind() == kind,
                    "the stream ended with kind {}, expected {kind}: {e}",
                    e.kind()
                );
                let finish = stream.finish_reason();
                let expected = FinishReason::of_error(&e);
                ensure!(
                    finish == Some(expected),
                    "finish_reason is {finish:?} after an error of kind {kind}, expected {expected}"
                );
                ensure!(
                    stream.next().is_none(),
                    "the stream went on after its error"
                );
                return Ok(());
            }
            None => {
                return fail(format!(
                    "the stream ended without an error, expected one of kind {kind}"
                ));
            }
        }
    }
    fail(format!(
        "{LAG} more tokens came, expected an error of kind {kind}"
    ))
}

/// The model answers as it did before.
pub(crate) fn usable(model: &dyn TextModel, prompt: &Prompt, before: &Reply) -> Verdict {
    let after = reply(model, prompt, &greedy(N))?;
    same("the model's reply afterwards", &after, before)
}

/// Two replies are one.
pub(crate) fn same(what: &str, got: &Reply, expected: &Reply) -> Verdict {
    ensure!(
        got.ids == expected.ids,
        "{what} has the tokens {:?}, expected {:?}",
        got.ids,
        expected.ids
    );
    ensure!(
        got.text() == expected.text() && got.finish == expected.finish,
        "{what} is {:?} ({:?}), expected {:?} ({:?})",
        got.text(),
        got.finish,
        expected.text(),
        expected.finish
    );
    Ok(())
}

/// Whether no logit is greater than that of `id`, and all are numbers.
pub(crate) fn is_greatest(what: &str, logits: &[f32], id: u32) -> Verdict {
    ensure!(
        logits.iter().all(|l| !l.is_nan()),
        "{what}: a logit is not a number"
    );
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let chosen = logits.get(id as usize).copied();
    ensure!(
        chosen == Some(greatest),
        "{what}: token {id} was taken with the logit {chosen:?}, the greatest is {greatest}"
    );
    Ok(())
}
