//! Checks of the information that the backend and the model report about themselves.

use crate::context::{Context, Verdict, ensure, fail};

pub(crate) fn identity(context: &Context) -> Verdict {
    let backend = &context.backend;
    let name = backend.name().to_owned();
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-.".contains(c);
    ensure!(
        !name.is_empty() && name.chars().all(plain),
        "the name {name:?} must be lower case letters, digits, `_`, `-` or `.`"
    );
    ensure!(
        !backend.device().trim().is_empty(),
        "the device is empty; say what it runs on"
    );
    if !backend.available() {
        let reason = backend.unavailable_reason();
        return fail(format!(
            "the backend is not available here ({}); nothing can be checked",
            reason.as_deref().unwrap_or("it gives no reason")
        ));
    }
    ensure!(
        backend.name() == name && backend.capabilities() == context.capabilities,
        "name and capabilities change from call to call"
    );
    Ok(())
}

pub(crate) fn info(context: &Context) -> Verdict {
    let model = context.model()?;
    let info = model.info();
    ensure!(!model.model_type().is_empty(), "model_type is empty");
    ensure!(
        info.architecture == model.model_type(),
        "info says architecture {:?}, model_type is {:?}",
        info.architecture,
        model.model_type()
    );
    ensure!(info.vocab_size > 0, "vocab_size is 0");
    ensure!(
        info.num_kv_heads == 0 || info.num_heads.is_multiple_of(info.num_kv_heads),
        "{} query heads cannot share {} key heads",
        info.num_heads,
        info.num_kv_heads
    );
    ensure!(
        info.quantization_bits.is_some() == info.quantization_group.is_some(),
        "quantization has bits {:?} but group {:?}; both or none",
        info.quantization_bits,
        info.quantization_group
    );
    ensure!(
        info.context_length != Some(0),
        "context_length is 0; None means unknown"
    );
    ensure!(model.info() == info, "info changes from call to call");
    Ok(())
}

pub(crate) fn declared_traits(context: &Context) -> Verdict {
    let (model, declared) = (context.model()?, context.capabilities);
    for (name, declared, there) in [
        ("logits", declared.logits, model.as_token_model().is_some()),
        (
            "training",
            declared.training,
            model.as_trainable().is_some(),
        ),
        (
            "attention_inspection",
            declared.attention_inspection,
            model.as_attention_inspector().is_some(),
        ),
        (
            "embeddings",
            declared.embeddings,
            model.as_embedding_model().is_some(),
        ),
        (
            "prompt_cache",
            declared.prompt_cache,
            model.as_prompt_cache().is_some(),
        ),
        (
            "hidden_states",
            declared.hidden_states,
            model.as_attention_inspector().is_some(),
        ),
        (
            "steering",
            declared.steering,
            model.as_steerable().is_some(),
        ),
    ] {
        ensure!(
            there || !declared,
            "`{name}` is declared, but the model does not have its trait"
        );
    }
    Ok(())
}
