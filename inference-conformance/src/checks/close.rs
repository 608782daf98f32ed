//! Checks of closing a model, and of loading a model twice.

use std::sync::Arc;
use std::time::Duration;

use inference::{EmbedOptions, ErrorKind, Interrupt, Message, Prompt, RerankOptions, TextModel};

use super::load::Scratch;
use crate::context::{Context, Verdict, ensure, fail, skip};
use crate::probe::{
    GROWTH, LONG, N, ends_with, first_item, greedy, read, refused, reply, same, start,
};

fn close(model: &dyn TextModel) -> Verdict {
    model.close().or_else(|e| fail(format!("close: {e}")))
}

pub(crate) fn reload(context: &Context) -> Verdict {
    let (one, other) = (context.own_model()?, context.own_model()?);
    let first = reply(one.as_ref(), &context.prompt(), &greedy(N))?;
    let second = reply(other.as_ref(), &context.prompt(), &greedy(N))?;
    same("the reply of the model loaded again", &second, &first)?;
    close(one.as_ref())?;
    drop(one);
    let after = reply(other.as_ref(), &context.prompt(), &greedy(N))?;
    same("the reply after the other model was closed", &after, &first)?;
    close(other.as_ref())?;
    drop(other);
    let third = context.own_model()?;
    let anew = reply(third.as_ref(), &context.prompt(), &greedy(N))?;
    same("the reply of the model loaded after closing", &anew, &first)
}

/// Number of models that are loaded one after another.
const LOADS: usize = 6;

pub(crate) fn dropped_models(context: &Context) -> Verdict {
    let mut memory = Vec::new();
    for _ in 0..LOADS {
        let model = context.own_model()?;
        let (_, metrics) = read(start(model.as_ref(), &context.prompt(), &greedy(2))?)?;
        memory.push(metrics.active_memory_bytes);
    }
    if memory.iter().all(|bytes| *bytes == 0) {
        return skip("the backend does not tell how much memory is in use");
    }
    // Other work in the process changes the memory in both directions. A leak increases it each
    // time by the size of a model.
    let grows = memory.windows(2).all(|w| w[0] < w[1]);
    let growth = memory[LOADS - 1].saturating_sub(memory[0]);
    ensure!(
        !(grows && growth > GROWTH),
        "memory in use grows with each model that was loaded and dropped: {memory:?} bytes"
    );
    Ok(())
}

pub(crate) fn twice(context: &Context) -> Verdict {
    let model = context.own_model()?;
    reply(model.as_ref(), &context.prompt(), &greedy(1))?;
    for _ in 0..3 {
        close(model.as_ref())?;
    }
    Ok(())
}

pub(crate) fn calls(context: &Context) -> Verdict {
    let model = context.own_model()?;
    let before = model.info();
    close(model.as_ref())?;
    let prompts: [Prompt; 1] = [context.prompt()];
    let closed = &[ErrorKind::Closed];
    let declared = context.capabilities;
    refused(
        "generate after close",
        first_item(model.generate(&prompts[0], &greedy(1))),
        closed,
    )?;
    if declared.chat && before.has_chat_template {
        let chat = model.chat(&[Message::user("hello")], &greedy(1));
        refused("chat after close", first_item(chat), closed)?;
    }
    if declared.classify {
        let classified = model.classify(&prompts, &greedy(1), false);
        refused("classify after close", classified, closed)?;
    }
    if declared.batch_generate {
        let batch = model.batch_generate(&prompts, &greedy(1));
        refused("batch_generate after close", batch, closed)?;
    }
    if declared.batch_sessions {
        let session = model.batch_session().map(drop);
        refused("batch_session after close", session, closed)?;
    }
    if let (true, Some(tokens)) = (declared.logits, model.as_token_model()) {
        refused(
            "logits after close",
            tokens.logits(&prompts[0], false, &Interrupt::new()),
            closed,
        )?;
    }
    closed_traits(context, model.as_ref())?;
    // These calls cannot return an error, but they must not panic.
    let _ = (model.model_type(), model.info(), model.metrics());
    Ok(())
}

/// Checks that the methods of declared optional traits fail after the model is closed.
fn closed_traits(context: &Context, model: &dyn TextModel) -> Verdict {
    let (declared, prompt) = (context.capabilities, context.prompt());
    let (closed, none) = (&[ErrorKind::Closed], Interrupt::new());
    if let (true, Some(embedder)) = (declared.embeddings, model.as_embedding_model()) {
        let vectors = embedder.embed(std::slice::from_ref(&prompt), &EmbedOptions::new(), &none);
        refused("embed after close", vectors, closed)?;
    }
    if let (true, Some(ranker)) = (declared.reranking, model.as_rerank_model()) {
        let ranking = ranker.rerank("a", &context.prompts, &RerankOptions::new(), &none);
        refused("rerank after close", ranking, closed)?;
    }
    if let (true, Some(inspector)) = (declared.hidden_states, model.as_attention_inspector()) {
        let states = inspector.hidden_states(&prompt, &[0], &none);
        refused("hidden_states after close", states, closed)?;
    }
    if let (true, Some(cache)) = (declared.prompt_cache, model.as_prompt_cache()) {
        let scratch = Scratch::new("closed")?;
        let saved = cache.save_prompt_cache(&prompt, &scratch.0.join("prompt"), &none);
        refused("save_prompt_cache after close", saved, closed)?;
    }
    Ok(())
}

pub(crate) fn streams(context: &Context) -> Verdict {
    let model = context.own_model()?;
    let mut running = start(model.as_ref(), &context.prompt(), &greedy(LONG))?;
    match running.next() {
        Some(Ok(_)) => {}
        other => return fail(format!("the first token is {other:?}")),
    }
    // `close` may wait until running requests notice it, so another thread calls it.
    let closing = Arc::clone(&model);
    let closer = std::thread::spawn(move || closing.close());
    for _ in 0..2000 {
        if closer.is_finished() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    ends_with(&mut running, ErrorKind::Closed)?;
    drop(running);
    match closer.join() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => fail(format!("close: {e}")),
        Err(_) => fail("close panicked"),
    }
}

pub(crate) fn drop_model(context: &Context) -> Verdict {
    let model = context.own_model()?;
    let expected = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    let mut stream = start(model.as_ref(), &context.prompt(), &greedy(N))?;
    let mut ids = Vec::new();
    if let Some(Ok(token)) = stream.next() {
        ids.push(token.id);
    }
    drop(model);
    for token in stream {
        match token {
            Ok(token) => ids.push(token.id),
            // The backend reported the close, which is allowed.
            Err(_) => return Ok(()),
        }
    }
    ensure!(
        ids == expected.ids,
        "the reply is {ids:?} after the model was dropped, {:?} before",
        expected.ids
    );
    Ok(())
}
