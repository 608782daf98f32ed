//! Checks of sampling: some results must be reproducible, and others must vary.

use std::collections::BTreeSet;

use crate::context::{Context, Verdict, ensure, skip};
use crate::probe::{N, greedy, reply, reply_if_supported, same, sampled};

pub(crate) fn greedy_replies(context: &Context) -> Verdict {
    let model = context.model()?;
    let first = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    for prompt in context.all_prompts() {
        // A request in between must not affect the next one.
        reply(model.as_ref(), &prompt, &greedy(3))?;
        let seeded = greedy(N).with_seed(7);
        for options in [greedy(N), seeded] {
            let again = reply(model.as_ref(), &context.prompt(), &options)?;
            same("a second greedy reply", &again, &first)?;
        }
    }
    Ok(())
}

pub(crate) fn filters(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompt = context.prompt();
    let first = reply(model.as_ref(), &prompt, &greedy(N))?;
    let mut honored = 0;
    for (name, options) in [
        ("top_k 1", sampled(N, Some(3)).with_top_k(1)),
        ("top_p 0.000001", sampled(N, Some(3)).with_top_p(1e-6)),
        ("min_p 1", sampled(N, Some(3)).with_min_p(1.0)),
    ] {
        // A backend may reject a filter as unsupported, but must not ignore it.
        if let Some(got) = reply_if_supported(model.as_ref(), &prompt, &options)? {
            same(&format!("the reply with {name}"), &got, &first)?;
            honored += 1;
        }
    }
    if honored == 0 {
        return skip("the backend supports none of top_k, top_p and min_p");
    }
    Ok(())
}

pub(crate) fn seeds(context: &Context) -> Verdict {
    let model = context.model()?;
    for seed in [0, 1, u64::MAX] {
        let options = sampled(N, Some(seed));
        let first = reply(model.as_ref(), &context.prompt(), &options)?;
        // Other requests in between must not change this reply.
        reply(model.as_ref(), &context.prompt(), &sampled(3, Some(99)))?;
        let again = reply(model.as_ref(), &context.prompt(), &options)?;
        same(
            &format!("the second reply with seed {seed}"),
            &again,
            &first,
        )?;
    }
    Ok(())
}

/// Number of replies to compare. If all are equal, this is not a coincidence.
const DRAWS: u64 = 8;

fn distinct(
    context: &Context,
    seed: impl Fn(u64) -> Option<u64>,
) -> Result<usize, crate::context::Stop> {
    let model = context.model()?;
    let mut replies = BTreeSet::new();
    for i in 0..DRAWS {
        let options = sampled(N, seed(i));
        replies.insert(reply(model.as_ref(), &context.prompt(), &options)?.ids);
    }
    Ok(replies.len())
}

pub(crate) fn seeds_differ(context: &Context) -> Verdict {
    let distinct = distinct(context, |i| Some(1000 + i))?;
    ensure!(
        distinct > 1,
        "{DRAWS} seeds at temperature 1.5 gave one and the same reply of {N} tokens"
    );
    Ok(())
}

pub(crate) fn unseeded(context: &Context) -> Verdict {
    let distinct = distinct(context, |_| None)?;
    ensure!(
        distinct > 1,
        "{DRAWS} requests without a seed at temperature 1.5 gave one and the same reply of {N} tokens"
    );
    Ok(())
}
