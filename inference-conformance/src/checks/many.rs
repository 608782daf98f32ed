//! Checks of conversations and batches.

use inference::{BatchResult, ErrorKind, FinishReason, Message, Prompt};

use super::errors::{bad_options, interrupted};
use crate::context::{Context, Stop, Verdict, ensure, fail, skip};
use crate::probe::{LONG, N, Reply, greedy, read, refused, reply, same, usable};

fn conversation() -> Vec<Message> {
    vec![
        Message::user("What is the capital of France?"),
        Message::assistant("Paris."),
        Message::user("And of Italy?"),
    ]
}

fn answer(context: &Context, messages: &[Message], n: usize) -> Result<Reply, Stop> {
    match context.model()?.chat(messages, &greedy(n)) {
        Ok(stream) => Ok(read(stream)?.0),
        Err(e) => fail(format!("chat was refused: {e}")),
    }
}

fn with_template(context: &Context) -> Verdict {
    if context.model()?.info().has_chat_template {
        return Ok(());
    }
    skip("the model has no chat template; check with one that has")
}

pub(crate) fn chat(context: &Context) -> Verdict {
    with_template(context)?;
    let messages = conversation();
    let first = answer(context, &messages, N)?;
    ensure!(!first.ids.is_empty(), "the answer has no token");
    same(
        "the second greedy answer",
        &answer(context, &messages, N)?,
        &first,
    )?;
    let short = answer(context, &messages, 2)?;
    ensure!(
        short.ids.len() == 2
            && short.finish == Some(FinishReason::Length)
            && first.ids.starts_with(&short.ids),
        "with max_tokens 2 the answer is {:?} and ended with {:?}, with {N} it is {:?}",
        short.ids,
        short.finish,
        first.ids
    );
    Ok(())
}

pub(crate) fn chat_errors(context: &Context) -> Verdict {
    with_template(context)?;
    let model = context.model()?;
    let before = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    for (what, options) in bad_options() {
        let answer = model.chat(&conversation(), &options);
        refused(
            &format!("chat with {what}"),
            answer,
            &[ErrorKind::InvalidOption],
        )?;
    }
    // A template may accept or reject these conversations, but must not panic.
    for messages in [
        Vec::new(),
        vec![Message::new("no such role", "hello")],
        vec![Message::user("")],
        vec![Message::assistant("a"), Message::assistant("b")],
    ] {
        if let Ok(stream) = model.chat(&messages, &greedy(2)) {
            let _ = read(stream);
        }
    }
    usable(model.as_ref(), &context.prompt(), &before)
}

fn as_reply(result: &BatchResult) -> Result<Reply, Stop> {
    if let Some(e) = &result.error {
        return fail(format!("a good prompt of a batch failed: {e}"));
    }
    Ok(Reply {
        ids: result.tokens.iter().map(|t| t.id).collect(),
        texts: result.tokens.iter().map(|t| t.text.clone()).collect(),
        finish: result.finish_reason,
    })
}

pub(crate) fn batch(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompts = context.all_prompts();
    for options in [greedy(N), greedy(0)] {
        let results = match model.batch_generate(&prompts, &options) {
            Ok(results) => results,
            Err(e) => return fail(format!("batch_generate: {e}")),
        };
        ensure!(
            results.len() == prompts.len(),
            "{} prompts gave {} results",
            prompts.len(),
            results.len()
        );
        for (i, (prompt, result)) in prompts.iter().zip(&results).enumerate() {
            let alone = reply(model.as_ref(), prompt, &options)?;
            same(&format!("reply {i} of a batch"), &as_reply(result)?, &alone)?;
        }
    }
    match model.batch_generate(&[], &greedy(N)) {
        Ok(results) => ensure!(
            results.is_empty(),
            "no prompts gave {} results",
            results.len()
        ),
        Err(e) => return fail(format!("no prompts: {e}")),
    }
    Ok(())
}

pub(crate) fn batch_errors(context: &Context) -> Verdict {
    let model = context.model()?;
    let good = context.prompt();
    let before = reply(model.as_ref(), &good, &greedy(N))?;
    for (what, options) in bad_options() {
        let results = model.batch_generate(std::slice::from_ref(&good), &options);
        let what = format!("batch_generate with {what}");
        refused(&what, results, &[ErrorKind::InvalidOption])?;
    }
    let prompts = [good.clone(), Prompt::Tokens(Vec::new()), good.clone()];
    let results = match model.batch_generate(&prompts, &greedy(N)) {
        Ok(results) => results,
        Err(e) => return fail(format!("one bad prompt failed the whole batch: {e}")),
    };
    ensure!(
        results.len() == 3,
        "3 prompts gave {} results",
        results.len()
    );
    for i in [0, 2] {
        let what = format!("reply {i}, beside a bad prompt,");
        same(&what, &as_reply(&results[i])?, &before)?;
    }
    let error = results[1].error.as_ref().map(inference::Error::kind);
    ensure!(
        matches!(
            error,
            Some(ErrorKind::InvalidOption | ErrorKind::Unsupported)
        ) && results[1].finish_reason == Some(FinishReason::Error),
        "the result of a bad prompt has the error {error:?} and ended with {:?}",
        results[1].finish_reason
    );
    usable(model.as_ref(), &good, &before)
}

pub(crate) fn batch_interrupted(context: &Context) -> Verdict {
    let model = context.model()?;
    let good = context.prompt();
    let before = reply(model.as_ref(), &good, &greedy(N))?;
    let prompts = context.all_prompts();
    for (what, kind, options) in interrupted(LONG) {
        let results = match model.batch_generate(&prompts, &options) {
            Ok(results) => results,
            Err(e) => {
                let what = format!("batch_generate, {what},");
                refused::<()>(&what, Err(e), &[kind])?;
                continue;
            }
        };
        ensure!(
            results.len() == prompts.len(),
            "{} prompts gave {} results",
            prompts.len(),
            results.len()
        );
        for (i, result) in results.iter().enumerate() {
            let error = result.error.as_ref().map(inference::Error::kind);
            ensure!(
                error == Some(kind),
                "reply {i} of a batch that is {what} has {} tokens and the error {error:?}, \
                 expected one of kind {kind}",
                result.tokens.len()
            );
        }
    }
    usable(model.as_ref(), &good, &before)
}
