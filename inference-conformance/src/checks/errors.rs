//! Checks of requests that `generate` must reject, and of options that other calls must reject.

use std::time::{Duration, Instant};

use inference::{CancelToken, ErrorKind, GenerateOptions, Prompt};

use crate::context::{Context, Verdict, fail};
use crate::probe::{N, first_item, greedy, read, refused, reply, usable};

/// Options that end a request before any work, with a description and the error that must result.
pub(super) fn interrupted(n: usize) -> [(&'static str, ErrorKind, GenerateOptions); 2] {
    let cancel = CancelToken::new();
    cancel.cancel();
    let now = Instant::now();
    let past = now.checked_sub(Duration::from_millis(1)).unwrap_or(now);
    [
        (
            "cancelled",
            ErrorKind::Cancelled,
            greedy(n).with_cancel(cancel),
        ),
        (
            "out of time",
            ErrorKind::DeadlineExceeded,
            greedy(n).with_deadline(past),
        ),
    ]
}

const INVALID: &[ErrorKind] = &[ErrorKind::InvalidOption];

/// Options that every backend must reject, each with a description.
pub(super) fn bad_options() -> Vec<(&'static str, GenerateOptions)> {
    let with = || greedy(4);
    vec![
        ("temperature NaN", with().with_temperature(f32::NAN)),
        ("temperature -1", with().with_temperature(-1.0)),
        (
            "temperature infinite",
            with().with_temperature(f32::INFINITY),
        ),
        ("top_p 0", with().with_top_p(0.0)),
        ("top_p NaN", with().with_top_p(f32::NAN)),
        ("top_p 2", with().with_top_p(2.0)),
        ("min_p -0.5", with().with_min_p(-0.5)),
        ("min_p 2", with().with_min_p(2.0)),
        ("repeat_penalty 0", with().with_repeat_penalty(0.0)),
        ("repeat_penalty NaN", with().with_repeat_penalty(f32::NAN)),
        (
            "presence_penalty infinite",
            with().with_presence_penalty(f32::INFINITY),
        ),
        (
            "frequency_penalty NaN",
            with().with_frequency_penalty(f32::NAN),
        ),
        ("xtc_probability 2", with().with_xtc_probability(2.0)),
        ("xtc_threshold 0.9", with().with_xtc_threshold(0.9)),
        ("a logit bias NaN", with().with_logit_bias([(0, f32::NAN)])),
        ("min_tokens above max_tokens", with().with_min_tokens(5)),
        ("an empty stop string", with().with_stop([String::new()])),
    ]
}

pub(crate) fn options(context: &Context) -> Verdict {
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    for (what, options) in bad_options() {
        refused(what, model.generate(&context.prompt(), &options), INVALID)?;
    }
    usable(model.as_ref(), &context.prompt(), &before)
}

/// Prompts with ids outside the model's vocabulary.
pub(super) fn foreign_ids(vocab_size: usize) -> Vec<Prompt> {
    let mut ids = vec![u32::MAX, i32::MAX as u32];
    ids.extend(u32::try_from(vocab_size));
    ids.into_iter().map(|id| Prompt::from([0, id])).collect()
}

pub(crate) fn prompts(context: &Context) -> Verdict {
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    // A backend without access to ids may reject all prompts that consist of ids.
    let kinds: &[ErrorKind] = if context.capabilities.logits {
        INVALID
    } else {
        &[ErrorKind::InvalidOption, ErrorKind::Unsupported]
    };
    let empty = Prompt::Tokens(Vec::new());
    refused(
        "a prompt of no ids",
        first_item(model.generate(&empty, &greedy(4))),
        kinds,
    )?;
    for prompt in foreign_ids(model.info().vocab_size) {
        let what = format!("{prompt:?}");
        refused(
            &what,
            first_item(model.generate(&prompt, &greedy(4))),
            kinds,
        )?;
    }
    usable(model.as_ref(), &context.prompt(), &before)
}

pub(crate) fn empty_text(context: &Context) -> Verdict {
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    // With a tokenizer that adds a start token, an empty text becomes a valid prompt.
    match model.generate(&Prompt::from(""), &greedy(4)) {
        Ok(stream) => {
            read(stream)?;
        }
        Err(e) if e.kind() == ErrorKind::InvalidOption => {}
        Err(e) => {
            return fail(format!(
                "an empty text failed with kind {}, expected {}: {e}",
                e.kind(),
                ErrorKind::InvalidOption
            ));
        }
    }
    usable(model.as_ref(), &context.prompt(), &before)
}
