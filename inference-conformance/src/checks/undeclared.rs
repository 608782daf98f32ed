//! Checks that the use of an undeclared capability returns an error of kind `Unsupported`.

use inference::{
    EmbedOptions, ErrorKind, Grammar, Interrupt, LoraConfig, Message, Numbers, Prompt,
    RerankOptions, Split, TextModel,
};

use super::edits::silenced;
use super::load::Scratch;
use crate::context::{Context, Verdict, ensure};
use crate::probe::{first_item, greedy, refused};

const UNSUPPORTED: &[ErrorKind] = &[ErrorKind::Unsupported];

pub(crate) fn undeclared(context: &Context) -> Verdict {
    let model = context.model()?;
    requests(context, model.as_ref())?;
    traits(context, model.as_ref())?;
    parts_of_a_model(context)
}

/// Checks calls of [`TextModel`] and options of requests.
fn requests(context: &Context, model: &dyn TextModel) -> Verdict {
    let declared = context.capabilities;
    let prompts: [Prompt; 1] = [context.prompt()];
    let kind = UNSUPPORTED;
    if !declared.chat {
        let chat = model.chat(&[Message::user("hello")], &greedy(1));
        refused("chat, which is not declared,", first_item(chat), kind)?;
    }
    if !declared.classify {
        let classified = model.classify(&prompts, &greedy(1), false);
        refused("classify, which is not declared,", classified, kind)?;
    }
    if !declared.logprobs {
        let stream = model.generate(&prompts[0], &greedy(1).with_logprobs(1));
        refused(
            "logprobs, which are not declared,",
            first_item(stream),
            kind,
        )?;
    }
    if !declared.grammars {
        let options = greedy(1).with_ignore_eos(false);
        let options = options.with_grammar(Grammar::Regex("yes|no".into()));
        let stream = model.generate(&prompts[0], &options);
        refused(
            "a grammar, which is not declared,",
            first_item(stream),
            kind,
        )?;
    }
    if !declared.batch_sessions {
        let session = model.batch_session().map(drop);
        refused("batch_session, which is not declared,", session, kind)?;
    }
    if !declared.batch_generate {
        let batch = model.batch_generate(&prompts, &greedy(1));
        refused("batch_generate, which is not declared,", batch, kind)?;
    }
    if !declared.steering {
        let options = greedy(1).with_steering(silenced(Numbers::All)?);
        let stream = model.generate(&prompts[0], &options);
        let what = "an edit of activations, which is not declared,";
        refused(what, first_item(stream), kind)?;
    }
    if !declared.named_adapters {
        let added = model.add_adapter("undeclared", &context.path);
        refused("add_adapter, which is not declared,", added, kind)?;
        let options = greedy(1).with_adapter(String::from("undeclared"));
        let stream = model.generate(&prompts[0], &options);
        let what = "an adapter of a request, which is not declared,";
        refused(what, first_item(stream), kind)?;
    }
    Ok(())
}

/// Checks calls of traits that a model may implement although they are not declared.
fn traits(context: &Context, model: &dyn TextModel) -> Verdict {
    let declared = context.capabilities;
    let prompts: [Prompt; 1] = [context.prompt()];
    let (kind, none) = (UNSUPPORTED, Interrupt::new());
    if let (false, Some(tokens)) = (declared.logits, model.as_token_model()) {
        let logits = tokens.logits(&prompts[0], false, &none);
        refused("logits, which are not declared,", logits, kind)?;
    }
    if let (false, Some(trainable)) = (declared.training, model.as_trainable()) {
        let adapter = trainable.apply_lora(&LoraConfig::new());
        refused("apply_lora, which is not declared,", adapter, kind)?;
    }
    if let (false, Some(inspector)) = (
        declared.attention_inspection,
        model.as_attention_inspector(),
    ) {
        let attention = inspector.inspect_attention(&prompts[0], &none);
        refused("inspect_attention, which is not declared,", attention, kind)?;
    }
    if let (false, Some(embedder)) = (declared.embeddings, model.as_embedding_model()) {
        let vectors = embedder.embed(&prompts, &EmbedOptions::new(), &none);
        refused("embed, which is not declared,", vectors, kind)?;
    }
    if let (false, Some(ranker)) = (declared.reranking, model.as_rerank_model()) {
        let documents = [String::from("water")];
        let options = RerankOptions::new();
        let ranking = ranker.rerank("What is wet?", &documents, &options, &none);
        refused("rerank, which is not declared,", ranking, kind)?;
    }
    if let (false, Some(inspector)) = (declared.hidden_states, model.as_attention_inspector()) {
        let states = inspector.hidden_states(&prompts[0], &[0], &none);
        refused("hidden_states, which is not declared,", states, kind)?;
    }
    if let (false, Some(cache)) = (declared.prompt_cache, model.as_prompt_cache()) {
        let scratch = Scratch::new("undeclared")?;
        let path = scratch.0.join("prompt");
        let saved = cache.save_prompt_cache(&prompts[0], &path, &none);
        refused("save_prompt_cache, which is not declared,", saved, kind)?;
        ensure!(!path.exists(), "a refused save_prompt_cache wrote a file");
    }
    Ok(())
}

/// Checks loading one process's part of a model.
fn parts_of_a_model(context: &Context) -> Verdict {
    let declared = context.capabilities;
    for (what, declared, split) in [
        ("tensor", declared.tensor_parallel, Split::Tensor),
        ("pipeline", declared.pipeline_parallel, Split::Pipeline),
    ] {
        if !declared {
            let mut options = context.load.clone().with_split(split);
            // No backend supports both options, so the adapter is removed.
            options.adapter_path = None;
            let answer = context.backend.load_model(&context.path, &options);
            let what = format!("split {what}, which is not declared,");
            refused(&what, answer, UNSUPPORTED)?;
        }
    }
    Ok(())
}
