//! Checks of requests that end early: cancelled, past the deadline, or dropped.

use std::time::{Duration, Instant};

use inference::{
    CancelToken, EmbedOptions, Error, ErrorKind, GenerateOptions, Interrupt, RerankOptions,
    TextModel, TokenStream,
};

use super::errors::interrupted;
use crate::context::{Context, Verdict, ensure, fail, skip};
use crate::probe::{GROWTH, LONG, N, ends_with, greedy, read, reply, same, start, usable};

/// Checks a request that must fail before its first token, either in the call or in the stream.
fn stillborn(context: &Context, options: &GenerateOptions, kind: ErrorKind) -> Verdict {
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    match model.generate(&context.prompt(), options) {
        Err(e) if e.kind() == kind => {}
        Err(e) => {
            return fail(format!(
                "the call failed with kind {}, expected {kind}: {e}",
                e.kind()
            ));
        }
        Ok(mut stream) => match stream.next() {
            Some(Err(e)) => {
                ensure!(
                    e.kind() == kind,
                    "the stream ended with kind {}, expected {kind}: {e}",
                    e.kind()
                );
                ensure!(
                    stream.next().is_none(),
                    "the stream went on after its error"
                );
                let finish = stream.finish_reason();
                let expected = inference::FinishReason::of_error(&e);
                ensure!(
                    finish == Some(expected),
                    "finish_reason is {finish:?}, expected {expected}"
                );
            }
            Some(Ok(_)) => return fail("a token came"),
            None => {
                return fail(format!(
                    "the stream is empty, expected an error of kind {kind}"
                ));
            }
        },
    }
    usable(model.as_ref(), &context.prompt(), &before)
}

pub(crate) fn cancel_before(context: &Context) -> Verdict {
    let [(_, kind, options), _] = interrupted(LONG);
    stillborn(context, &options, kind)
}

pub(crate) fn deadline_past(context: &Context) -> Verdict {
    let [_, (_, kind, options)] = interrupted(LONG);
    stillborn(context, &options, kind)
}

/// Reads the first token, unless the request ends before it.
fn first(stream: &mut TokenStream) -> Verdict {
    match stream.next() {
        Some(Ok(_)) => Ok(()),
        Some(Err(e)) => fail(format!("the first token: {e}")),
        None => fail("the reply has no token"),
    }
}

pub(crate) fn cancel_during(context: &Context) -> Verdict {
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    let cancel = CancelToken::new();
    let options = greedy(LONG).with_cancel(cancel.clone());
    let mut stream = start(model.as_ref(), &context.prompt(), &options)?;
    first(&mut stream)?;
    first(&mut stream)?;
    if std::thread::spawn(move || cancel.cancel()).join().is_err() {
        return fail("the thread that cancels panicked");
    }
    ends_with(&mut stream, ErrorKind::Cancelled)?;
    drop(stream);
    usable(model.as_ref(), &context.prompt(), &before)
}

pub(crate) fn deadline_during(context: &Context) -> Verdict {
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    let deadline = Instant::now() + Duration::from_millis(400);
    let options = greedy(LONG).with_deadline(deadline);
    let mut stream = start(model.as_ref(), &context.prompt(), &options)?;
    match stream.next() {
        // A slow model may reach the deadline first. The error then reports the deadline.
        Some(Err(e)) if e.kind() == ErrorKind::DeadlineExceeded => {}
        Some(Err(e)) => return fail(format!("the first token: {e}")),
        None => return fail("the reply has no token"),
        Some(Ok(_)) => {
            // Waits until the deadline has passed, so that the result does not depend on the
            // model's speed.
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            ends_with(&mut stream, ErrorKind::DeadlineExceeded)?;
        }
    }
    drop(stream);
    usable(model.as_ref(), &context.prompt(), &before)
}

/// The result of a call; `None` if the model lacks this call.
type Ended = Option<Result<(), Error>>;

/// A call that has no generation options.
type Call = fn(&dyn TextModel, &Context, &Interrupt) -> Ended;

/// The calls that a model may have.
const CALLS: [(&str, Call); 7] = [
    ("logits", |model, context, interrupt| {
        let tokens = model.as_token_model()?;
        let answer = tokens.logits(&context.prompt(), false, interrupt);
        Some(answer.map(|_| ()))
    }),
    ("logits of all positions", |model, context, interrupt| {
        let tokens = model.as_token_model()?;
        let answer = tokens.logits(&context.prompt(), true, interrupt);
        Some(answer.map(|_| ()))
    }),
    ("token_logprobs", |model, context, interrupt| {
        let tokens = model.as_token_model()?;
        let answer = tokens.token_logprobs(&context.prompt(), interrupt);
        Some(answer.map(|_| ()))
    }),
    ("embed", |model, context, interrupt| {
        let vectors = model.as_embedding_model()?;
        let prompts = [context.prompt(), context.prompt()];
        let answer = vectors.embed(&prompts, &EmbedOptions::new(), interrupt);
        Some(answer.map(|_| ()))
    }),
    ("rerank", |model, context, interrupt| {
        let ranker = model.as_rerank_model()?;
        let options = RerankOptions::new();
        let answer = ranker.rerank("What is wet?", &context.prompts, &options, interrupt);
        Some(answer.map(|_| ()))
    }),
    ("hidden_states", |model, context, interrupt| {
        let inspector = model.as_attention_inspector()?;
        let answer = inspector.hidden_states(&context.prompt(), &[0], interrupt);
        Some(answer.map(|_| ()))
    }),
    ("inspect_attention", |model, context, interrupt| {
        let inspector = model.as_attention_inspector()?;
        let answer = inspector.inspect_attention(&context.prompt(), interrupt);
        Some(answer.map(|_| ()))
    }),
];

pub(crate) fn calls(context: &Context) -> Verdict {
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    let later = Instant::now() + Duration::from_secs(3600);
    let never = Interrupt::new()
        .with_cancel(CancelToken::new())
        .with_deadline(later);
    let mut checked = 0;
    for (what, call) in CALLS {
        match call(model.as_ref(), context, &never) {
            None => continue,
            Some(Err(e)) if e.kind() == ErrorKind::Unsupported => continue,
            Some(Err(e)) => return fail(format!("{what}, which nothing interrupts: {e}")),
            Some(Ok(())) => checked += 1,
        }
        for (why, kind, options) in interrupted(N) {
            match call(model.as_ref(), context, &options.interrupt) {
                Some(Err(e)) => ensure!(
                    e.kind() == kind,
                    "{what}, {why}, failed with kind {}, expected {kind}: {e}",
                    e.kind()
                ),
                _ => return fail(format!("{what}, {why}, did not fail")),
            }
        }
        let Some(Ok(())) = call(model.as_ref(), context, &never) else {
            return fail(format!("{what} does not work after it was interrupted"));
        };
    }
    if checked == 0 {
        return skip("the model has none of these calls");
    }
    usable(model.as_ref(), &context.prompt(), &before)
}

pub(crate) fn drop_stream(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompt = context.prompt();
    let before = reply(model.as_ref(), &prompt, &greedy(N))?;
    let mut memory = Vec::new();
    for _ in 0..4 {
        for read_first in [0, 1, 2, 3, 5] {
            let mut stream = start(model.as_ref(), &prompt, &greedy(LONG))?;
            for _ in 0..read_first {
                first(&mut stream)?;
            }
            drop(stream);
        }
        let (after, metrics) = read(start(model.as_ref(), &prompt, &greedy(N))?)?;
        same("the reply after dropped streams", &after, &before)?;
        memory.push(metrics.active_memory_bytes);
    }
    // Other work in the process changes the memory in both directions. A leak increases it in each
    // round.
    let grows = memory.windows(2).all(|w| w[0] < w[1]);
    let growth = memory[memory.len() - 1].saturating_sub(memory[0]);
    ensure!(
        !(grows && growth > GROWTH),
        "memory in use grows with each few dropped streams: {memory:?} bytes"
    );
    Ok(())
}
