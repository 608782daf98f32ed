//! `classify`: the next token of many prompts.

use inference::{ClassifyResult, ErrorKind, Prompt};

use super::errors::{bad_options, interrupted as interruptions};
use crate::context::{Context, Stop, Verdict, ensure, fail};
use crate::probe::{N, greedy, is_greatest, refused, reply, usable};

fn classified(context: &Context, logits: bool) -> Result<Vec<ClassifyResult>, Stop> {
    let prompts = context.all_prompts();
    match context.model()?.classify(&prompts, &greedy(1), logits) {
        Ok(results) if results.len() == prompts.len() => Ok(results),
        Ok(results) => fail(format!(
            "{} prompts gave {} results",
            prompts.len(),
            results.len()
        )),
        Err(e) => fail(format!("classify: {e}")),
    }
}

pub(crate) fn equals_solo(context: &Context) -> Verdict {
    let model = context.model()?;
    let results = classified(context, false)?;
    for (i, (prompt, result)) in context.all_prompts().iter().zip(&results).enumerate() {
        let alone = reply(model.as_ref(), prompt, &greedy(1))?.ids;
        ensure!(
            alone == [result.token.id],
            "the token of prompt {i} is {}, generate alone gives {alone:?}",
            result.token.id
        );
    }
    Ok(())
}

pub(crate) fn logits(context: &Context) -> Verdict {
    let vocab = context.model()?.info().vocab_size;
    for (i, result) in classified(context, true)?.iter().enumerate() {
        let Some(logits) = &result.logits else {
            return fail(format!("result {i} has no logits, though asked for"));
        };
        ensure!(
            logits.len() == vocab,
            "result {i} has {} logits for a vocabulary of {vocab}",
            logits.len()
        );
        is_greatest(&format!("result {i}"), logits, result.token.id)?;
    }
    for (i, result) in classified(context, false)?.iter().enumerate() {
        ensure!(
            result.logits.is_none(),
            "result {i} has logits, though not asked for"
        );
    }
    Ok(())
}

pub(crate) fn errors(context: &Context) -> Verdict {
    let model = context.model()?;
    let good = context.prompt();
    let before = reply(model.as_ref(), &good, &greedy(N))?;
    for (what, options) in bad_options() {
        // Classification generates no text, so stop strings are not tested.
        if options.stop.stop_strings.is_empty() {
            let answer = model.classify(std::slice::from_ref(&good), &options, false);
            let what = format!("classify with {what}");
            refused(&what, answer, &[ErrorKind::InvalidOption])?;
        }
    }
    let prompts = [good.clone(), Prompt::Tokens(Vec::new())];
    let answer = model.classify(&prompts, &greedy(1), false);
    let kinds = [ErrorKind::InvalidOption, ErrorKind::Unsupported];
    refused("classify with a prompt of no ids", answer, &kinds)?;
    match model.classify(&[], &greedy(1), false) {
        Ok(results) => ensure!(
            results.is_empty(),
            "no prompts gave {} results",
            results.len()
        ),
        Err(e) => return fail(format!("no prompts: {e}")),
    }
    usable(model.as_ref(), &good, &before)
}

pub(crate) fn interrupted(context: &Context) -> Verdict {
    let model = context.model()?;
    let good = context.prompt();
    let before = reply(model.as_ref(), &good, &greedy(N))?;
    for (what, kind, options) in interruptions(1) {
        let answer = model.classify(&context.all_prompts(), &options, false);
        refused(&format!("classify, {what},"), answer, &[kind])?;
    }
    usable(model.as_ref(), &good, &before)
}
