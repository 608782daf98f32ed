//! The information that the backend and the model give about themselves.

use inference::{EmbedOptions, ErrorKind, Grammar, Interrupt, Message, Prompt, RerankOptions};

use crate::context::{Context, Verdict, ensure, fail};
use crate::probe::{first_item, greedy, refused};

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
    ] {
        ensure!(
            there || !declared,
            "`{name}` is declared, but the model does not have its trait"
        );
    }
    let prompt = context.prompt();
    if let (true, Some(inspector)) = (declared.hidden_states, model.as_attention_inspector()) {
        match inspector.hidden_states(&prompt, &[0], &Interrupt::new()) {
            Ok(states) => ensure!(
                states.positions == [0]
                    && states.hidden_size > 0
                    && !states.blocks.is_empty()
                    && states.blocks.iter().all(|b| b.len() == states.hidden_size),
                "the hidden states of one position are {} blocks of {} elements, of a size of {}",
                states.blocks.len(),
                states.blocks.first().map_or(0, Vec::len),
                states.hidden_size
            ),
            Err(e) => return fail(format!("hidden_states, which is declared: {e}")),
        }
        let two = [prompt.clone(), prompt.clone()];
        match inspector.hidden_states_many(&two, &[vec![0], vec![]], &Interrupt::new()) {
            Ok(states) => ensure!(
                states.len() == 2
                    && states[0].positions == [0]
                    && states[0]
                        .blocks
                        .iter()
                        .all(|b| b.len() == states[0].hidden_size)
                    && states[1].blocks.iter().all(Vec::is_empty),
                "hidden_states_many of two prompts, one without positions, gave {} states",
                states.len()
            ),
            Err(e) => return fail(format!("hidden_states_many: {e}")),
        }
    }
    if let (true, Some(embedder)) = (declared.embeddings, model.as_embedding_model()) {
        let (info, none) = (embedder.embedding_info(), Interrupt::new());
        ensure!(
            info.dimensions > 0,
            "embedding_info has vectors without elements"
        );
        let options = EmbedOptions::new().with_normalize(true);
        match embedder.embed(std::slice::from_ref(&prompt), &options, &none) {
            Ok(vectors) => {
                let square: f32 = vectors.iter().flatten().map(|v| v * v).sum();
                ensure!(
                    vectors.len() == 1 && (square - 1.0).abs() < 1e-2,
                    "one prompt gave {} vectors, with the squared length {square}",
                    vectors.len()
                );
                ensure!(
                    vectors[0].len() == info.dimensions,
                    "a vector has {} elements, and embedding_info says {}",
                    vectors[0].len(),
                    info.dimensions
                );
            }
            Err(e) => return fail(format!("embed, which is declared: {e}")),
        }
        let wide = options.clone().with_dimensions(info.dimensions + 1);
        let kind = &[ErrorKind::InvalidOption];
        let vectors = embedder.embed(&[prompt], &wide, &none);
        refused("embed with more dimensions than there are", vectors, kind)?;
    }
    if let (true, Some(ranker)) = (declared.reranking, model.as_rerank_model()) {
        let documents = ["water", "bread"].map(String::from);
        let options = RerankOptions::new();
        match ranker.rerank("What is wet?", &documents, &options, &Interrupt::new()) {
            Ok(ranking) => ensure!(
                ranking.scores.len() == 2
                    && ranking
                        .scores
                        .iter()
                        .all(|score| (0.0..=1.0).contains(score)),
                "two documents have the scores {:?}, which are not two from 0 to 1",
                ranking.scores
            ),
            Err(e) => return fail(format!("rerank, which is declared: {e}")),
        }
    }
    Ok(())
}

pub(crate) fn undeclared(context: &Context) -> Verdict {
    let (model, declared) = (context.model()?, context.capabilities);
    let prompts: [Prompt; 1] = [context.prompt()];
    let kind = &[ErrorKind::Unsupported];
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
    if let (false, Some(embedder)) = (declared.embeddings, model.as_embedding_model()) {
        let vectors = embedder.embed(&prompts, &EmbedOptions::new(), &Interrupt::new());
        refused("embed, which is not declared,", vectors, kind)?;
    }
    if let (false, Some(ranker)) = (declared.reranking, model.as_rerank_model()) {
        let documents = [String::from("water")];
        let options = RerankOptions::new();
        let ranking = ranker.rerank("What is wet?", &documents, &options, &Interrupt::new());
        refused("rerank, which is not declared,", ranking, kind)?;
    }
    if let (false, Some(inspector)) = (declared.hidden_states, model.as_attention_inspector()) {
        let states = inspector.hidden_states(&prompts[0], &[0], &Interrupt::new());
        refused("hidden_states, which is not declared,", states, kind)?;
    }
    if !declared.batch_generate {
        let batch = model.batch_generate(&prompts, &greedy(1));
        refused("batch_generate, which is not declared,", batch, kind)?;
    }
    Ok(())
}
