//! Requests that the checks send to a model: complete replies, and calls that must be rejected with
//! an error of a certain kind.

use inference::{
    Error, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Prompt, Result as Answer,
    TextModel, TokenStream,
};

use crate::context::{Stop, Verdict, ensure, fail};

/// The number of tokens of an ordinary reply.
pub(crate) const N: usize = 16;
/// After a request was stopped, this number of tokens may still arrive, because their text was
/// ready or withheld.
pub(crate) const LAG: usize = 32;
/// Length of a reply that no check reads to its end.
pub(crate) const LONG: usize = 100_000;

/// An increase in memory that exceeds noise. Even a leaked tiny model exceeds it.
pub(crate) const GROWTH: u64 = 1 << 18;

/// A greedy request with exactly this number of tokens.
pub(crate) fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions::new()
        .with_max_tokens(max_tokens)
        .with_ignore_eos(true)
}

/// A request that samples from a flat distribution.
pub(crate) fn sampled(max_tokens: usize, seed: Option<u64>) -> GenerateOptions {
    greedy(max_tokens).with_temperature(1.5).with_seed(seed)
}

/// A complete reply.
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

/// Reads a stream to its end. An error in the stream fails the check.
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

/// Starts a stream for `prompt`; an error fails the check.
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

/// The reply; `None` if the backend reports the feature as unsupported.
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

/// The error of a call. The call must fail with one of `kinds`.
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

/// The first result of a request. Its error may be returned by the call or by the first read of the
/// stream.
pub(crate) fn first_item(started: Answer<TokenStream>) -> Answer<()> {
    match started?.next() {
        Some(Err(e)) => Err(e),
        _ => Ok(()),
    }
}

/// Reads until the stream ends. It must end after a few tokens with an error of `kind`, and its
/// metrics must be consistent.
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

/// Checks that the model replies as before.
pub(crate) fn usable(model: &dyn TextModel, prompt: &Prompt, before: &Reply) -> Verdict {
    let after = reply(model, prompt, &greedy(N))?;
    same("the model's reply afterwards", &after, before)
}

/// Checks that two replies are equal.
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

/// Checks that no logit exceeds that of `id`, and that no logit is NaN.
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
