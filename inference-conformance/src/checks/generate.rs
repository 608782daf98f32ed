//! Checks of a single reply: the arrival and number of its tokens, its end, and its metrics.

use std::time::{Duration, Instant};

use inference::{ErrorKind, FinishReason, GenerateMetrics};

use crate::context::{Context, Verdict, ensure, fail};
use crate::probe::{LONG, N, greedy, read, reply, same, start};

/// Number of tokens that a backend may compute ahead of the reader.
const AHEAD: usize = 1000;

/// Requests far more tokens than can be computed within the time limit. A backend that completes
/// the reply before it returns the first token fails.
pub(crate) fn streaming(context: &Context) -> Verdict {
    let model = context.model()?;
    let patience = (context.timeout / 4).min(Duration::from_secs(20));
    let options = greedy(LONG).with_deadline(Instant::now() + patience);
    let mut stream = start(model.as_ref(), &context.prompt(), &options)?;
    for i in 0..3 {
        match stream.next() {
            Some(Ok(_)) => {}
            Some(Err(e)) if e.kind() == ErrorKind::DeadlineExceeded => {
                return fail(format!(
                    "token {i} of a reply of {LONG} did not come within {} seconds: it waits for \
                     the whole reply, or is very slow",
                    patience.as_secs_f64()
                ));
            }
            Some(Err(e)) => return fail(format!("token {i} of {LONG}: {e}")),
            None => return fail(format!("the reply ended after {i} tokens of {LONG}")),
        }
        let produced = stream.metrics().generated_tokens;
        ensure!(
            produced <= AHEAD,
            "{produced} tokens were produced when token {i} was handed out"
        );
    }
    Ok(())
}

pub(crate) fn stream_text(context: &Context) -> Verdict {
    let model = context.model()?;
    let stream = start(model.as_ref(), &context.prompt(), &greedy(N))?;
    let output = match stream.collect_output() {
        Ok(output) => output,
        Err(e) => return fail(format!("the reply failed: {e}")),
    };
    ensure!(!output.tokens.is_empty(), "the reply has no token");
    let again = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    ensure!(
        again.text() == output.text,
        "the tokens' texts make {:?} once and {:?} the other time",
        output.text,
        again.text()
    );
    // If the model can decode ids, the decoded text must be equal. Tokenizers may differ in white
    // space at the start of a text, and in an incomplete character at the end.
    let Some(tokens) = model.as_token_model() else {
        return Ok(());
    };
    let decoded = match tokens.decode(&output.tokens) {
        Ok(text) => text,
        Err(e) => return fail(format!("the reply's own tokens cannot be decoded: {e}")),
    };
    let plain = |text: &str| text.trim_start().trim_end_matches('\u{fffd}').to_owned();
    ensure!(
        plain(&decoded) == plain(&output.text),
        "the stream's text is {:?}, its tokens decode to {decoded:?}",
        output.text
    );
    Ok(())
}

pub(crate) fn stream_end(context: &Context) -> Verdict {
    let model = context.model()?;
    let mut stream = start(model.as_ref(), &context.prompt(), &greedy(N))?;
    ensure!(
        stream.finish_reason().is_none(),
        "finish_reason is {:?} before the first token",
        stream.finish_reason()
    );
    let mut count = 0;
    while let Some(token) = stream.next() {
        if let Err(e) = token {
            return fail(format!("the reply failed after {count} tokens: {e}"));
        }
        count += 1;
        // The reason may be known as soon as the last token was returned.
        ensure!(
            stream.finish_reason().is_none() || count == N,
            "finish_reason is {:?} after {count} tokens of {N}",
            stream.finish_reason()
        );
    }
    let finish = stream.finish_reason();
    ensure!(finish.is_some(), "finish_reason is None after the end");
    for _ in 0..3 {
        ensure!(stream.next().is_none(), "the stream goes on after its end");
    }
    ensure!(
        stream.finish_reason() == finish,
        "finish_reason changed after the end, from {finish:?} to {:?}",
        stream.finish_reason()
    );
    Ok(())
}

pub(crate) fn max_tokens(context: &Context) -> Verdict {
    let model = context.model()?;
    let mut longest: Vec<u32> = Vec::new();
    for n in [0, 1, 2, 5] {
        let got = reply(model.as_ref(), &context.prompt(), &greedy(n))?;
        ensure!(
            got.ids.len() == n && got.finish == Some(FinishReason::Length),
            "max_tokens {n} gave {} tokens and ended with {:?}",
            got.ids.len(),
            got.finish
        );
        ensure!(
            got.ids.starts_with(&longest),
            "max_tokens {n} gave {:?}, a smaller one {longest:?}",
            got.ids
        );
        longest = got.ids;
    }
    Ok(())
}

pub(crate) fn ignore_eos(context: &Context) -> Verdict {
    let model = context.model()?;
    let n = 4 * N;
    for prompt in context.all_prompts() {
        let got = reply(model.as_ref(), &prompt, &greedy(n))?;
        ensure!(
            got.ids.len() == n && got.finish == Some(FinishReason::Length),
            "{prompt:?} was continued by {} tokens of {n} and ended with {:?}",
            got.ids.len(),
            got.finish
        );
    }
    Ok(())
}

/// Metrics that a backend cannot measure are 0. All others must match the reply.
pub(crate) fn metrics(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompt = context.prompt();
    let mut stream = start(model.as_ref(), &prompt, &greedy(N))?;
    let mut before = stream.metrics();
    let mut count = 0;
    while let Some(token) = stream.next() {
        if let Err(e) = token {
            return fail(format!("the reply failed after {count} tokens: {e}"));
        }
        count += 1;
        let now = stream.metrics();
        plausible(&now)?;
        ensure!(
            now.generated_tokens >= before.generated_tokens && now.total_time >= before.total_time,
            "figures went down during the reply: {before:?}, then {now:?}"
        );
        before = now;
    }
    let m = stream.metrics();
    plausible(&m)?;
    ensure!(
        m.total_time >= before.total_time,
        "total_time went down at the end, from {:?} to {:?}",
        before.total_time,
        m.total_time
    );
    ensure!(
        m.generated_tokens == count || m.generated_tokens == 0,
        "generated_tokens is {} for a reply of {count}",
        m.generated_tokens
    );
    if let (Some(tokens), true) = (model.as_token_model(), m.prompt_tokens > 0) {
        let ids = tokens.encode(&context.prompts[0], true);
        let expected = ids.map_or(m.prompt_tokens, |ids| ids.len());
        ensure!(
            m.prompt_tokens == expected,
            "prompt_tokens is {} for a prompt of {expected}",
            m.prompt_tokens
        );
    }
    std::thread::sleep(Duration::from_millis(5));
    ensure!(
        stream.metrics() == m,
        "figures change after the end: {m:?}, then {:?}",
        stream.metrics()
    );
    Ok(())
}

fn plausible(m: &GenerateMetrics) -> Verdict {
    let slack = Duration::from_millis(1);
    ensure!(
        m.prefill_time + m.decode_time <= m.total_time + slack,
        "prefill {:?} and decoding {:?} take longer than all, {:?}",
        m.prefill_time,
        m.decode_time,
        m.total_time
    );
    ensure!(
        m.time_to_first_token <= m.total_time + slack,
        "the first token came after {:?}, the end after {:?}",
        m.time_to_first_token,
        m.total_time
    );
    for (name, rate) in [
        ("prefill", m.prefill_tokens_per_second()),
        ("decode", m.decode_tokens_per_second()),
    ] {
        ensure!(
            rate.is_finite() && rate >= 0.0,
            "the rate of {name} is {rate} tokens per second"
        );
    }
    ensure!(
        m.active_memory_bytes <= m.peak_memory_bytes || m.peak_memory_bytes == 0,
        "{} bytes are active, more than the peak of {}",
        m.active_memory_bytes,
        m.peak_memory_bytes
    );
    ensure!(
        m.decode_peak_memory_bytes <= m.peak_memory_bytes,
        "the peak of the decode is {} bytes, more than that of the request: {}",
        m.decode_peak_memory_bytes,
        m.peak_memory_bytes
    );
    Ok(())
}

pub(crate) fn model_metrics(context: &Context) -> Verdict {
    let model = context.model()?;
    for n in [N, 3] {
        let stream = start(model.as_ref(), &context.prompt(), &greedy(n))?;
        let (got, of_stream) = read(stream)?;
        let of_model = model.metrics();
        ensure!(
            of_model.generated_tokens == of_stream.generated_tokens
                && of_model.prompt_tokens == of_stream.prompt_tokens,
            "after a reply of {} tokens the model's figures are {of_model:?}, the stream's {of_stream:?}",
            got.ids.len()
        );
    }
    // A dropped stream must also end.
    let uncut = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    let mut stream = start(model.as_ref(), &context.prompt(), &greedy(LONG))?;
    let _ = stream.next();
    drop(stream);
    let after = model.metrics();
    ensure!(
        after.generated_tokens <= AHEAD,
        "after a dropped reply the model's figures are {after:?}"
    );
    let again = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    same("the reply after a dropped one", &again, &uncut)
}
