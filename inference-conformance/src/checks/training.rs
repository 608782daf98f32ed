//! Checks of models that can be trained, and of models whose attention can be inspected.

use inference::{ErrorKind, Interrupt, LoraConfig, Prompt};

use super::load::Scratch;
use crate::context::{Context, Verdict, ensure, fail, skip};
use crate::probe::{N, greedy, refused, reply};

pub(crate) fn training(context: &Context) -> Verdict {
    // An adapter changes the model, so the check loads a separate one.
    let model = context.own_model()?;
    let Some(trainable) = model.as_trainable() else {
        return skip("the model cannot be trained");
    };
    ensure!(trainable.num_layers() > 0, "the model has no layers");
    let bad = trainable.apply_lora(&LoraConfig::new().with_rank(0));
    refused("LoRA of rank 0", bad, &[ErrorKind::InvalidOption])?;
    let bad = trainable.apply_lora(&LoraConfig::new().with_targets(["no_such_projection"]));
    refused(
        "LoRA that matches nothing",
        bad,
        &[ErrorKind::InvalidOption],
    )?;
    let adapter = match trainable.apply_lora(&LoraConfig::new()) {
        Ok(adapter) => adapter,
        Err(e) => return fail(format!("apply_lora: {e}")),
    };
    let names = adapter.parameter_names();
    ensure!(
        !names.is_empty() && names.is_sorted() && adapter.num_parameters() >= names.len(),
        "the adapter has {} numbers in {names:?}; expected some, sorted",
        adapter.num_parameters()
    );
    let scratch = Scratch::new("adapter")?;
    let dir = scratch.0.join("adapter");
    if let Err(e) = adapter.save(&dir) {
        return fail(format!("save: {e}"));
    }
    ensure!(dir.is_dir(), "save wrote no directory");
    Ok(())
}

pub(crate) fn adapter_saved(context: &Context) -> Verdict {
    let scratch = Scratch::new("saved")?;
    let dir = scratch.0.join("adapter");
    {
        let model = context.own_model()?;
        let Some(trainable) = model.as_trainable() else {
            return skip("the model cannot be trained");
        };
        let adapter = match trainable.apply_lora(&LoraConfig::new()) {
            Ok(adapter) => adapter,
            Err(e) => return fail(format!("apply_lora: {e}")),
        };
        if let Err(e) = adapter.save(&dir) {
            return fail(format!("save: {e}"));
        }
    }
    let options = context.load.clone().with_adapter_path(&dir);
    let model = match context.backend.load_model(&context.path, &options) {
        Ok(model) => model,
        Err(e) => return fail(format!("the adapter that was saved cannot be loaded: {e}")),
    };
    let got = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    ensure!(
        got.ids.len() == N,
        "with the adapter the reply has {} tokens of {N}",
        got.ids.len()
    );
    Ok(())
}

pub(crate) fn attention(context: &Context) -> Verdict {
    let model = context.model()?;
    let Some(inspector) = model.as_attention_inspector() else {
        return skip("the model does not show its attention");
    };
    let s = match inspector.inspect_attention(&context.prompt(), &Interrupt::new()) {
        Ok(s) => s,
        Err(e) => return fail(format!("inspect_attention: {e}")),
    };
    ensure!(
        s.num_layers > 0 && s.num_kv_heads > 0 && s.seq_len > 0 && s.head_dim > 0,
        "the snapshot has {} layers, {} key heads, {} positions and {} elements per head",
        s.num_layers,
        s.num_kv_heads,
        s.seq_len,
        s.head_dim
    );
    let shaped = |heads: usize, values: &Vec<Vec<Vec<f32>>>| {
        values.len() == s.num_layers
            && values.iter().all(|layer| {
                layer.len() == heads
                    && layer
                        .iter()
                        .all(|head| head.len() == s.seq_len * s.head_dim)
            })
    };
    ensure!(
        shaped(s.num_kv_heads, &s.keys),
        "the keys do not have the shapes that the snapshot says"
    );
    if let Some(queries) = &s.queries {
        ensure!(
            shaped(s.num_heads, queries),
            "the queries do not have the shapes that the snapshot says"
        );
    }
    let empty = Prompt::Tokens(Vec::new());
    let answer = inspector.inspect_attention(&empty, &Interrupt::new());
    refused("attention of no ids", answer, &[ErrorKind::InvalidOption])?;
    Ok(())
}
