//! Checks of options that change which tokens are sampled: penalties, biases, bans, forced tokens,
//! XTC, processors. A backend may reject an option as unsupported, but must not ignore it.

use std::collections::{BTreeMap, BTreeSet};

use inference::{
    Error, ErrorKind, FinishReason, GenerateOptions, Interrupt, LogitsProcessorFactory, Prompt,
    TextModel,
};

use crate::context::{Context, Stop, Verdict, ensure, fail, skip};
use crate::probe::{N, Reply, greedy, read, reply, reply_if_supported, start, usable};

/// Larger than any difference between logits.
const HUGE: f32 = 1e6;

fn unsupported<T>(what: &str) -> Result<T, Stop> {
    skip(format!("the backend says that it does not have {what}"))
}

/// A greedy reply in which a token occurs twice, with its prompt.
fn repeating(context: &Context) -> Result<Option<(Prompt, Reply)>, Stop> {
    let model = context.model()?;
    for prompt in context.all_prompts() {
        let free = reply(model.as_ref(), &prompt, &greedy(2 * N))?;
        let different: BTreeSet<u32> = free.ids.iter().copied().collect();
        if different.len() < free.ids.len() {
            return Ok(Some((prompt, free)));
        }
    }
    Ok(None)
}

pub(crate) fn repeat_penalty(context: &Context) -> Verdict {
    let Some((prompt, free)) = repeating(context)? else {
        return skip("no reply repeats a token; give other prompts");
    };
    // With this strong penalty, a token that has occurred is almost never the most probable.
    let options = greedy(2 * N).with_repeat_penalty(1e4);
    match reply_if_supported(context.model()?.as_ref(), &prompt, &options)? {
        None => unsupported("a repeat penalty"),
        Some(bound) if bound.ids != free.ids => Ok(()),
        Some(_) => fail("a reply that repeats itself is the same with the repeat penalty 10000"),
    }
}

/// Checks a penalty that exceeds any difference between logits, so no token may occur twice.
fn never_twice(context: &Context, what: &str, options: &GenerateOptions) -> Verdict {
    let Some((prompt, _)) = repeating(context)? else {
        return skip("no reply repeats a token; give other prompts");
    };
    let model = context.model()?;
    if model.info().vocab_size < 4 * N {
        return skip("the vocabulary is too small to tell");
    }
    let Some(bound) = reply_if_supported(model.as_ref(), &prompt, options)? else {
        return unsupported(what);
    };
    let different: BTreeSet<u32> = bound.ids.iter().copied().collect();
    ensure!(
        different.len() == bound.ids.len(),
        "with a {what} of {HUGE} a token comes twice in {:?}",
        bound.ids
    );
    Ok(())
}

pub(crate) fn presence_penalty(context: &Context) -> Verdict {
    let options = greedy(2 * N).with_presence_penalty(HUGE);
    never_twice(context, "presence penalty", &options)
}

pub(crate) fn frequency_penalty(context: &Context) -> Verdict {
    let options = greedy(2 * N).with_frequency_penalty(HUGE);
    never_twice(context, "frequency penalty", &options)
}

/// The greedy reply to the first prompt, which must have at least one token.
fn plain(context: &Context) -> Result<(Prompt, Reply), Stop> {
    let prompt = context.prompt();
    let free = reply(context.model()?.as_ref(), &prompt, &greedy(N))?;
    if free.ids.is_empty() {
        return fail("the reply has no token");
    }
    Ok((prompt, free))
}

/// The greedy reply with `options`; `None` if the backend does not support them.
fn bound(
    context: &Context,
    what: &str,
    prompt: &Prompt,
    options: &GenerateOptions,
) -> Result<Reply, Stop> {
    match reply_if_supported(context.model()?.as_ref(), prompt, options)? {
        Some(bound) => Ok(bound),
        None => unsupported(what),
    }
}

pub(crate) fn logit_bias(context: &Context) -> Verdict {
    let (prompt, free) = plain(context)?;
    let first = free.ids[0];
    // Any token except the one that is chosen without the option.
    let wanted = if first == 1 { 2 } else { 1 };
    for (bias, says) in [
        (BTreeMap::from([(wanted, HUGE)]), "all of it"),
        (BTreeMap::from([(first, -HUGE)]), "none of it"),
    ] {
        let options = greedy(N).with_logit_bias(bias.clone());
        let got = bound(context, "a logit bias", &prompt, &options)?;
        let fine = match says {
            "all of it" => got.ids.iter().all(|id| *id == wanted),
            _ => !got.ids.contains(&first),
        };
        ensure!(
            fine && got.ids.len() == N,
            "with the bias {bias:?} the reply is {:?}, expected {N} tokens, {says}",
            got.ids
        );
    }
    Ok(())
}

pub(crate) fn banned_tokens(context: &Context) -> Verdict {
    let (prompt, free) = plain(context)?;
    let banned: Vec<u32> = free.ids.clone();
    let options = greedy(N).with_banned_tokens(banned.clone());
    let got = bound(context, "banned tokens", &prompt, &options)?;
    ensure!(
        got.ids.len() == N && got.ids.iter().all(|id| !banned.contains(id)),
        "with {banned:?} banned the reply is {:?}",
        got.ids
    );
    Ok(())
}

pub(crate) fn forced_tokens(context: &Context) -> Verdict {
    let (prompt, free) = plain(context)?;
    // Options that force the tokens of the plain reply must change nothing, including text and
    // token count.
    let options = greedy(N).with_forced_tokens(&free.ids[..2.min(free.ids.len())]);
    let got = bound(context, "forced tokens", &prompt, &options)?;
    ensure!(
        got.ids == free.ids && got.text() == free.text(),
        "with its own first tokens forced the reply is {:?} ({:?}), without {:?} ({:?})",
        got.ids,
        got.text(),
        free.ids,
        free.text()
    );
    let mut forced = vec![if free.ids[0] == 1 { 2 } else { 1 }];
    forced.extend(free.ids.iter().rev().take(2));
    for n in [N, 2] {
        let options = greedy(n).with_forced_tokens(&forced[..]);
        let got = bound(context, "forced tokens", &prompt, &options)?;
        ensure!(
            got.ids.len() == n && got.ids.iter().zip(&forced).all(|(a, b)| a == b),
            "with {forced:?} forced the reply of {n} tokens is {:?}",
            got.ids
        );
    }
    Ok(())
}

pub(crate) fn min_tokens(context: &Context) -> Verdict {
    let (prompt, free) = plain(context)?;
    // Each of these tokens would end the reply immediately.
    let ends = greedy(N).with_stop_tokens([free.ids[0]]);
    let least = N / 2;
    let got = bound(
        context,
        "a least number of tokens",
        &prompt,
        &ends.with_min_tokens(least),
    )?;
    ensure!(
        got.ids.len() >= least,
        "with min_tokens {least} the reply has {} tokens and ended with {:?}",
        got.ids.len(),
        got.finish
    );
    // The end-of-text token must not end the reply either.
    let prompts = context.all_prompts();
    for prompt in &prompts {
        let options = greedy(4 * N).with_ignore_eos(false).with_min_tokens(4 * N);
        let got = bound(context, "a least number of tokens", prompt, &options)?;
        ensure!(
            got.ids.len() == 4 * N && got.finish == Some(FinishReason::Length),
            "with min_tokens {} the reply has {} tokens and ended with {:?}",
            4 * N,
            got.ids.len(),
            got.finish
        );
    }
    Ok(())
}

pub(crate) fn xtc(context: &Context) -> Verdict {
    let (prompt, mut free) = plain(context)?;
    let model = context.model()?;
    // XTC never removes a token that ends a reply. Such a token may be the most probable one, so it
    // is banned.
    let enders = model
        .as_token_model()
        .map(inference::TokenModel::eos_tokens)
        .unwrap_or_default();
    let mut banned = Vec::new();
    if free.ids.first().is_some_and(|id| enders.contains(id)) {
        banned = enders;
        let options = greedy(N).with_banned_tokens(banned.clone());
        free = bound(context, "XTC with banned tokens", &prompt, &options)?;
    }
    for seed in 1..=4 {
        // At this low temperature, only the greedy token is chosen without XTC. XTC itself uses the
        // probabilities of temperature 1.
        let cold = greedy(1)
            .with_temperature(0.001)
            .with_seed(seed)
            .with_banned_tokens(banned.clone());
        let usual = reply(model.as_ref(), &prompt, &cold)?;
        if usual.ids[..] != free.ids[..1] {
            return skip("two tokens are about as probable; give other prompts");
        }
        // Almost all tokens reach this threshold. Of these, XTC removes all but the least probable.
        let options = cold.with_xtc_probability(1.0).with_xtc_threshold(1e-6);
        let got = bound(context, "XTC", &prompt, &options)?;
        ensure!(
            got.ids[..] != free.ids[..1],
            "with XTC always on, the most probable token {:?} came all the same",
            got.ids
        );
    }
    let options = greedy(N)
        .with_xtc_probability(1.0)
        .with_xtc_threshold(1e-6)
        .with_banned_tokens(banned);
    let got = bound(context, "XTC", &prompt, &options)?;
    ensure!(
        got.ids == free.ids,
        "at temperature 0 nothing is filtered, but with XTC the reply is {:?}, without {:?}",
        got.ids,
        free.ids
    );
    Ok(())
}

pub(crate) fn processors(context: &Context) -> Verdict {
    let (prompt, free) = plain(context)?;
    let model = context.model()?;
    let wanted = if free.ids[0] == 1 { 2 } else { 1 };
    // The processor forbids all tokens but one, and after four tokens allows a second one. It
    // counts the tokens itself.
    let factory = LogitsProcessorFactory::new(move || {
        let mut calls = 0;
        move |prompt: &[u32], reply: &[u32], logits: &mut [f32]| {
            let failed = |what: String| Err(Error::new(ErrorKind::Engine, what));
            if prompt.is_empty() || reply.len() != calls {
                let n = (prompt.len(), reply.len());
                return failed(format!("call {calls} got prompt and reply of {n:?} tokens"));
            }
            if reply.iter().any(|id| *id != wanted) {
                return failed(format!(
                    "the reply is {reply:?} though only {wanted} is allowed"
                ));
            }
            calls += 1;
            for (id, logit) in (0u32..).zip(logits.iter_mut()) {
                if id != wanted {
                    *logit = f32::NEG_INFINITY;
                }
            }
            Ok(())
        }
    });
    let options = greedy(N).with_logits_processors([factory]);
    // Two replies are generated, because each must get its own processor.
    for _ in 0..2 {
        let got = bound(context, "logits processors", &prompt, &options)?;
        ensure!(
            got.ids == vec![wanted; N],
            "a processor that allows only the token {wanted} gave {:?}",
            got.ids
        );
    }
    let failing = LogitsProcessorFactory::new(|| {
        |_: &[u32], reply: &[u32], _: &mut [f32]| match reply.len() {
            3 => Err(Error::new(ErrorKind::Engine, "the processor had enough")),
            _ => Ok(()),
        }
    });
    let options = greedy(N).with_logits_processors([failing]);
    let mut stream = start(model.as_ref(), &prompt, &options)?;
    let error = stream.by_ref().find_map(Result::err);
    let said = error.map(|e| e.to_string()).unwrap_or_default();
    ensure!(
        said.contains("the processor had enough")
            && stream.finish_reason() == Some(FinishReason::Error),
        "a processor that failed ended the reply with {:?} and the error {said:?}",
        stream.finish_reason()
    );
    drop(stream);
    usable(model.as_ref(), &prompt, &free)
}

/// The log-probabilities of the tokens, and their consistency.
pub(crate) fn logprobs(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompt = context.prompt();
    let (vocab, asked) = (model.info().vocab_size, 3);
    for k in [asked, 0] {
        let options = greedy(4).with_logprobs(k);
        for token in start(model.as_ref(), &prompt, &options)? {
            let token = token.or_else(|e| fail(format!("the reply failed: {e}")))?;
            let Some(l) = &token.logprobs else {
                return fail(format!(
                    "token {} has no logprobs, though asked for",
                    token.id
                ));
            };
            let falls = l.top.windows(2).all(|w| w[0].logprob >= w[1].logprob);
            ensure!(
                l.top.len() == k && falls && l.top.iter().all(|t| (t.id as usize) < vocab),
                "asked for {k} alternatives, falling, got {:?}",
                l.top
            );
            ensure!(
                l.logprob <= 1e-4 && l.logprob.is_finite(),
                "the log-probability of token {} is {}",
                token.id,
                l.logprob
            );
            if let Some(best) = l.top.first() {
                // If several tokens have equal logits, any of them may have been chosen.
                ensure!(
                    (best.logprob - l.logprob).abs() < 1e-3,
                    "greedy took token {} with the log-probability {}, the best is {best:?}",
                    token.id,
                    l.logprob
                );
            }
            let sum: f32 = l.top.iter().map(|t| t.logprob.exp()).sum();
            ensure!(
                sum < 1.001,
                "the alternatives' probabilities add up to {sum}"
            );
        }
    }
    let (_, _) = read(start(model.as_ref(), &prompt, &greedy(2))?)?;
    for token in start(model.as_ref(), &prompt, &greedy(2))? {
        let unasked = token.is_ok_and(|t| t.logprobs.is_some());
        ensure!(!unasked, "tokens have logprobs, though not asked for");
    }
    fits_logits(model.as_ref(), context, asked)
}

/// Log-probabilities must match the model's own logits.
fn fits_logits(model: &dyn TextModel, context: &Context, asked: usize) -> Verdict {
    let Some(tokens) = model.as_token_model() else {
        return Ok(());
    };
    let prompt = context.prompt();
    let logits = match tokens.logits(&prompt, false, &Interrupt::new()) {
        Ok(output) => output.logits,
        Err(e) => return fail(format!("logits: {e}")),
    };
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - greatest).exp()).sum();
    // Neither a ban nor the temperature may change the model's own distribution.
    let first = reply(model, &prompt, &greedy(1))?.ids;
    let options = greedy(1).with_logprobs(asked).with_banned_tokens(first);
    let options = match model.generate(&prompt, &options) {
        Err(e) if e.kind() == ErrorKind::Unsupported => greedy(1).with_logprobs(asked),
        _ => options,
    };
    for token in start(model, &prompt, &options)? {
        let token = token.or_else(|e| fail(format!("the reply failed: {e}")))?;
        let Some(l) = token.logprobs else {
            return fail("a token beside a ban has no logprobs");
        };
        let drawn = std::iter::once((token.id, l.logprob));
        for (id, reported) in drawn.chain(l.top.iter().map(|t| (t.id, t.logprob))) {
            let Some(logit) = logits.get(id as usize) else {
                return fail(format!("there is no token {id}"));
            };
            let expected = (f64::from(logit - greatest) - sum.ln()) as f32;
            ensure!(
                (reported - expected).abs() < 0.05,
                "the log-probability of token {id} is {reported}, by the logits it is {expected}"
            );
        }
    }
    Ok(())
}
