//! Requests that do not run to their end: cancelled, out of time, dropped.

use std::time::{Duration, Instant};

use inference::{CancelToken, ErrorKind, GenerateOptions, TokenStream};

use super::errors::interrupted;
use crate::context::{Context, Verdict, ensure, fail};
use crate::probe::{GROWTH, LONG, N, ends_with, greedy, read, reply, same, start, usable};

/// A request that must end before its first token, at the call or in the stream.
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

/// Reads a first token, if one comes before the request is stopped.
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
        // A slow model: the deadline was the first to come, and the end is told.
        Some(Err(e)) if e.kind() == ErrorKind::DeadlineExceeded => {}
        Some(Err(e)) => return fail(format!("the first token: {e}")),
        None => return fail("the reply has no token"),
        Some(Ok(_)) => {
            // The reader is late, so that it does not depend on the model's speed when it ends.
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            ends_with(&mut stream, ErrorKind::DeadlineExceeded)?;
        }
    }
    drop(stream);
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
    // Other work in the process moves the figure both ways; a leak moves it up each time.
    let grows = memory.windows(2).all(|w| w[0] < w[1]);
    let growth = memory[memory.len() - 1].saturating_sub(memory[0]);
    ensure!(
        !(grows && growth > GROWTH),
        "memory in use grows with each few dropped streams: {memory:?} bytes"
    );
    Ok(())
}
