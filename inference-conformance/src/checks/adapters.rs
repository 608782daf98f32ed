//! The check of adapters that requests name.

use inference::{ErrorKind, LoraConfig, Prompt, TextModel};

use super::load::Scratch;
use super::sessions::Driver;
use crate::context::{Context, Verdict, ensure, fail, skip};
use crate::probe::{N, first_item, greedy, refused, reply, same};

const MISSING: [ErrorKind; 4] = [
    ErrorKind::ModelNotFound,
    ErrorKind::InvalidModel,
    ErrorKind::InvalidOption,
    ErrorKind::Io,
];

/// Checks that a request with an adapter gets the same reply alone and beside requests without an
/// adapter or with another one. A new adapter does not change replies, so only errors for unknown
/// names show that names are read.
pub(crate) fn named(context: &Context) -> Verdict {
    let scratch = Scratch::new("named")?;
    let dir = scratch.0.join("adapter");
    let model = context.own_model()?;
    let model: &dyn TextModel = model.as_ref();
    {
        let other = context.own_model()?;
        let Some(trainable) = other.as_trainable() else {
            return skip("the model cannot be trained, so there is no adapter");
        };
        let saved = trainable
            .apply_lora(&LoraConfig::new())
            .and_then(|adapter| adapter.save(&dir));
        if let Err(e) = saved {
            return fail(format!("an adapter cannot be saved: {e}"));
        }
    }
    let missing = model.add_adapter("missing", &scratch.0.join("nothing"));
    refused("an adapter that is not there", missing, &MISSING)?;
    for name in ["a", "b"] {
        if let Err(e) = model.add_adapter(name, &dir) {
            return fail(format!("add_adapter: {e}"));
        }
    }
    let bad = [ErrorKind::InvalidOption];
    refused("a second adapter a", model.add_adapter("a", &dir), &bad)?;
    refused(
        "an adapter without a name",
        model.add_adapter("", &dir),
        &bad,
    )?;
    let mut prompts = context.all_prompts();
    if let Some(tokens) = model.as_token_model() {
        for (prompt, text) in prompts.iter_mut().zip(&context.prompts) {
            match tokens.encode(text, true) {
                Ok(ids) => *prompt = Prompt::Tokens(ids),
                Err(e) => return fail(format!("encode: {e}")),
            }
        }
    }
    let with = |name: Option<&str>| greedy(N).with_adapter(name.map(str::to_owned));
    let names = [None, Some("a"), Some("b")];
    let mut session = Driver::of(model)?;
    let mut rows = Vec::new();
    for name in names {
        for prompt in &prompts {
            let mut alone = Driver::of(model)?;
            let row = alone.add(prompt, &with(name))?;
            alone.finish()?;
            let expected = alone.reply(row)?;
            rows.push((name, expected, session.add(prompt, &with(name))?));
        }
    }
    session.finish()?;
    for (name, expected, row) in rows {
        let what = format!("a reply with the adapter {name:?} beside others");
        same(&what, &session.reply(row)?, &expected)?;
    }
    let unknown = |name: &str, prompt: &Prompt| {
        let answer = first_item(model.generate(prompt, &with(Some(name))));
        refused("a request with an unknown adapter", answer, &bad)
    };
    unknown("c", &prompts[0])?;
    match model.drop_adapter("a") {
        Ok(there) => ensure!(there, "the adapter a was not there"),
        Err(e) => return fail(format!("drop_adapter: {e}")),
    }
    ensure!(
        matches!(model.drop_adapter("a"), Ok(false)),
        "an adapter can be dropped twice"
    );
    unknown("a", &prompts[0])?;
    let other = reply(model, &prompts[0], &with(Some("b")))?;
    ensure!(other.ids.len() == N, "the other adapter is gone, too");
    Ok(())
}
