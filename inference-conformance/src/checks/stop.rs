//! Checks of the conditions that end a reply before `max_tokens`.

use inference::{BatchEvent, FinishReason, GenerateOptions, Prompt, StopCause};

use crate::context::{Context, Stop, Verdict, ensure, fail, skip};
use crate::probe::{N, Reply, greedy, reply, sampled, start};

const STOP: Option<FinishReason> = Some(FinishReason::Stop);

/// Searches for a reply that ends on its own: first greedy, then with a high temperature.
pub(crate) fn eos(context: &Context) -> Verdict {
    let model = context.model()?;
    let n = 8 * N;
    let mut tried = 0;
    let mut attempts = Vec::new();
    for prompt in context.all_prompts() {
        attempts.push((prompt.clone(), greedy(n)));
    }
    for seed in 1..=4 {
        attempts.push((
            context.prompt(),
            sampled(n, Some(seed)).with_temperature(4.0),
        ));
    }
    for (prompt, on) in attempts {
        let ended = reply(model.as_ref(), &prompt, &on.clone().with_ignore_eos(false))?;
        tried += ended.ids.len();
        if ended.finish != STOP {
            ensure!(
                ended.finish == Some(FinishReason::Length) && ended.ids.len() == n,
                "a reply of {} tokens out of {n} ended with {:?}",
                ended.ids.len(),
                ended.finish
            );
            continue;
        }
        ensure!(
            ended.ids.len() < n,
            "a reply of all {n} tokens ended with stop, expected length"
        );
        let Some(tokens) = model.as_token_model() else {
            return Ok(());
        };
        let ends = tokens.eos_tokens();
        if let Some(id) = ended.ids.iter().find(|id| ends.contains(id)) {
            return fail(format!("the end-of-text token {id} is part of the reply"));
        }
        let full = reply(model.as_ref(), &prompt, &on)?;
        // Without a seed, replies are comparable only if they are greedy or the backend supports
        // seeds.
        if on.sampling.seed.is_none() || context.capabilities.seeds {
            let next = full.ids.get(ended.ids.len());
            ensure!(
                full.ids.starts_with(&ended.ids) && next.is_some_and(|id| ends.contains(id)),
                "the reply ended with stop after {:?}; with ignore_eos it is {:?}, where no \
                 end-of-text token ({ends:?}) follows",
                ended.ids,
                full.ids
            );
        }
        return Ok(());
    }
    skip(format!("no end-of-text token came in {tried} tokens"))
}

/// The first prompt whose greedy reply satisfies `usable`, with this reply.
fn find(
    context: &Context,
    usable: impl Fn(&Reply) -> bool,
) -> Result<Option<(inference::Prompt, Reply)>, crate::context::Stop> {
    let model = context.model()?;
    for prompt in context.all_prompts() {
        let uncut = reply(model.as_ref(), &prompt, &greedy(2 * N))?;
        if usable(&uncut) {
            return Ok(Some((prompt, uncut)));
        }
    }
    Ok(None)
}

/// The index of the last token that does not occur earlier.
fn last_new(ids: &[u32]) -> Option<usize> {
    (0..ids.len()).rev().find(|&i| !ids[..i].contains(&ids[i]))
}

pub(crate) fn tokens(context: &Context) -> Verdict {
    let varied = |r: &Reply| last_new(&r.ids).is_some_and(|i| i > 0);
    let Some((prompt, uncut)) = find(context, varied)? else {
        return skip("each reply repeats one token; give other prompts");
    };
    let model = context.model()?;
    let at = last_new(&uncut.ids).unwrap_or_default();
    let stop = uncut.ids[at];
    let options = greedy(2 * N).with_stop_tokens([stop]);
    let got = reply(model.as_ref(), &prompt, &options)?;
    ensure!(
        got.ids == uncut.ids[..at] && got.finish == STOP,
        "with the stop token {stop} the reply is {:?} and ended with {:?}, expected {:?} and stop",
        got.ids,
        got.finish,
        &uncut.ids[..at]
    );
    // Also tests the first token, and several stop tokens.
    let options = greedy(2 * N).with_stop_tokens([stop, uncut.ids[0]]);
    let got = reply(model.as_ref(), &prompt, &options)?;
    ensure!(
        got.ids.is_empty() && got.finish == STOP,
        "with the first token as stop token the reply is {:?} and ended with {:?}",
        got.ids,
        got.finish
    );
    Ok(())
}

/// A string that spans two tokens: it starts with the end of one and ends with the start of the
/// next.
fn across(r: &Reply) -> Option<String> {
    let texts: Vec<&str> = r
        .texts
        .iter()
        .map(String::as_str)
        .filter(|t| !t.is_empty())
        .collect();
    // A later string is a better test, because more text must be returned before it.
    texts.windows(2).rev().find_map(|pair| {
        let (end, begin) = (pair[0].chars().next_back()?, pair[1].chars().next()?);
        let stop = String::from_iter([end, begin]);
        // U+FFFD replaces an incomplete character, and disappears when the model completes the
        // character.
        let usable = !stop.contains('\u{fffd}') && r.text().find(&stop)? > 0;
        usable.then_some(stop)
    })
}

pub(crate) fn strings(context: &Context) -> Verdict {
    let Some((prompt, uncut)) = find(context, |r| across(r).is_some())? else {
        return skip("no reply has text in two tokens; give other prompts");
    };
    let model = context.model()?;
    let text = uncut.text();
    let stop = across(&uncut).unwrap_or_default();
    let expected = &text[..text.find(&stop).unwrap_or_default()];
    for stops in [
        vec![stop.clone()],
        vec![String::from("\u{1}never\u{2}"), stop.clone()],
    ] {
        let options = greedy(2 * N).with_stop(stops.clone());
        let got = reply(model.as_ref(), &prompt, &options)?;
        ensure!(
            got.text() == expected && got.finish == STOP,
            "with the stop strings {stops:?} the text is {:?} and ended with {:?}, expected \
             {expected:?} and stop",
            got.text(),
            got.finish
        );
    }
    Ok(())
}

pub(crate) fn held_back(context: &Context) -> Verdict {
    let last = |r: &Reply| r.text().chars().next_back();
    let Some((prompt, uncut)) = find(context, |r| last(r).is_some())? else {
        return skip("no reply has any text; give other prompts");
    };
    let model = context.model()?;
    // The end of the text may be the start of this string, which never completes.
    let never = format!("{}\u{1}never\u{2}", last(&uncut).unwrap_or_default());
    let options = greedy(2 * N).with_stop([never.clone()]);
    let got = reply(model.as_ref(), &prompt, &options)?;
    ensure!(
        got.text() == uncut.text() && got.finish == uncut.finish,
        "with the stop string {never:?}, which does not come, the text is {:?} ({:?}), without it \
         {:?} ({:?})",
        got.text(),
        got.finish,
        uncut.text(),
        uncut.finish
    );
    Ok(())
}

/// Returns the stop cause that a stream reports and, if supported, the one of a batch session.
fn causes(
    context: &Context,
    prompt: &Prompt,
    options: &GenerateOptions,
) -> Result<Vec<Option<StopCause>>, Stop> {
    let model = context.model()?;
    let mut stream = start(model.as_ref(), prompt, options)?;
    for token in stream.by_ref() {
        if let Err(e) = token {
            return fail(format!("the reply failed: {e}"));
        }
    }
    let mut causes = vec![stream.stop_cause()];
    if !context.capabilities.batch_sessions {
        return Ok(causes);
    }
    let failed = |e: inference::Error| Stop::Failed(format!("a session failed: {e}"));
    let mut session = model.batch_session().map_err(failed)?;
    session.add(prompt, options).map_err(failed)?;
    while !session.is_empty() {
        for event in session.step().map_err(failed)? {
            match event {
                BatchEvent::Done { stop, .. } => causes.push(stop),
                BatchEvent::Failed { error, .. } => return Err(failed(error)),
                _ => {}
            }
        }
    }
    Ok(causes)
}

pub(crate) fn cause(context: &Context) -> Verdict {
    let varied = |r: &Reply| last_new(&r.ids).is_some_and(|i| i > 0);
    let Some((prompt, uncut)) = find(context, varied)? else {
        return skip("each reply repeats one token; give other prompts");
    };
    let token = uncut.ids[last_new(&uncut.ids).unwrap_or_default()];
    let mut cases = vec![
        (greedy(N), None),
        (
            greedy(2 * N).with_stop_tokens([token]),
            Some(StopCause::Token(token)),
        ),
    ];
    if let Some(text) = across(&uncut) {
        let options = greedy(2 * N).with_stop([text.clone()]);
        cases.push((options, Some(StopCause::String(text))));
    }
    let mut reported = 0;
    for (options, expected) in cases {
        for cause in causes(context, &prompt, &options)? {
            reported += usize::from(cause.is_some());
            ensure!(
                cause.is_none() || cause == expected,
                "a reply says that it was stopped by {cause:?}, expected {expected:?}"
            );
        }
    }
    if reported == 0 {
        return skip("the backend does not say what stops a reply");
    }
    Ok(())
}
