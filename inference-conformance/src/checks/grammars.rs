//! Checks of replies that a grammar constrains.

use inference::{ErrorKind, FinishReason, Grammar};

use crate::context::{Context, Stop, Verdict, ensure};
use crate::probe::{N, first_item, greedy, refused, reply, usable};

const STOP: Option<FinishReason> = Some(FinishReason::Stop);

pub(crate) fn grammars(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompt = context.prompt();
    let before = reply(model.as_ref(), &prompt, &greedy(N))?;
    let colors = serde_json::json!({"enum": ["red", "green"]});
    for (grammar, allowed) in [
        (Grammar::Regex("yes|no".into()), ["yes", "no"]),
        (Grammar::JsonSchema(colors), ["\"red\"", "\"green\""]),
    ] {
        let options = greedy(4 * N)
            .with_ignore_eos(false)
            .with_grammar(grammar.clone());
        for options in [
            options.clone(),
            options.clone().with_temperature(1.5).with_seed(3),
        ] {
            let got = reply(model.as_ref(), &prompt, &options)?;
            ensure!(
                allowed.contains(&got.text().trim()) && got.finish == STOP,
                "with the grammar {grammar:?} the reply is {:?} and ended with {:?}",
                got.text(),
                got.finish
            );
        }
        // `prepare` must not change the reply.
        let prepared = model.prepare(&options);
        let prepared = prepared.map_err(|e| Stop::Failed(format!("prepare: {e}")))?;
        let again = reply(model.as_ref(), &prompt, &options)?;
        drop(prepared);
        let first = reply(model.as_ref(), &prompt, &options)?;
        ensure!(
            again.ids == first.ids,
            "with the grammar {grammar:?} the reply is {:?} after prepare, else {:?}",
            again.text(),
            first.text()
        );
        // A truncated reply must be the start of an allowed one.
        let cut = reply(model.as_ref(), &prompt, &options.with_max_tokens(1))?;
        ensure!(
            allowed.iter().any(|a| a.starts_with(cut.text().trim())),
            "with the grammar {grammar:?} and max_tokens 1 the reply is {:?}",
            cut.text()
        );
    }
    // The error must be returned before or at the start of the request.
    let broken = greedy(N)
        .with_ignore_eos(false)
        .with_grammar(Grammar::Regex("(".into()));
    let answer = first_item(model.generate(&prompt, &broken));
    refused(
        "a broken regular expression",
        answer,
        &[ErrorKind::InvalidOption],
    )?;
    // A backend must not pass a deeply nested or recursive schema to a library that recurses.
    let deep = (0..1000).fold(serde_json::Value::Bool(true), |inner, _| {
        serde_json::Value::Object([(String::from("items"), inner)].into_iter().collect())
    });
    let refer = |i: usize| serde_json::json!({"$ref": format!("#/$defs/{i}")});
    let definitions = (0..3000).map(|i| (i.to_string(), refer(i + 1)));
    let definitions: serde_json::Map<_, _> = definitions.collect();
    let chain = serde_json::json!({"$defs": definitions, "$ref": "#/$defs/0"});
    for (what, schema) in [("too deep", deep), ("a chain of references", chain)] {
        let options = greedy(N)
            .with_ignore_eos(false)
            .with_grammar(Grammar::JsonSchema(schema));
        let answer = first_item(model.generate(&prompt, &options));
        let what = format!("a schema that is {what}");
        refused(&what, answer, &[ErrorKind::InvalidOption])?;
    }
    usable(model.as_ref(), &prompt, &before)
}
