//! Checks of vectors that a model computes from texts: embeddings, hidden states, and scores of
//! documents.

use inference::{
    AttentionInspector, EmbedOptions, EmbedPrompt, EmbeddingModel, ErrorKind, HiddenStates,
    Interrupt, Prompt, RerankOptions,
};

use super::errors::foreign_ids;
use crate::context::{Context, Stop, Verdict, ensure, fail, skip};
use crate::probe::refused;

/// Maximum distance between two vectors of one text, relative to their lengths. A text alone and a
/// text in a batch may be computed by different kernels.
const SPREAD: f64 = 0.02;

fn norm(vector: &[f32]) -> f64 {
    vector
        .iter()
        .map(|x| f64::from(*x).powi(2))
        .sum::<f64>()
        .sqrt()
}

/// Whether both vectors have equal lengths and almost equal elements.
fn close(one: &[f32], other: &[f32]) -> bool {
    let apart: Vec<f32> = one.iter().zip(other).map(|(a, b)| a - b).collect();
    let bound = SPREAD * norm(one).max(norm(other)) + f64::from(f32::EPSILON);
    one.len() == other.len() && norm(&apart) <= bound
}

fn embed(
    embedder: &dyn EmbeddingModel,
    prompts: &[Prompt],
    options: &EmbedOptions,
) -> Result<Vec<Vec<f32>>, Stop> {
    match embedder.embed(prompts, options, &Interrupt::new()) {
        Ok(vectors) if vectors.len() == prompts.len() => Ok(vectors),
        Ok(vectors) => fail(format!(
            "{} prompts gave {} vectors",
            prompts.len(),
            vectors.len()
        )),
        Err(e) => fail(format!("embed of {} prompts: {e}", prompts.len())),
    }
}

pub(crate) fn embeddings(context: &Context) -> Verdict {
    let model = context.model()?;
    let Some(embedder) = model.as_embedding_model() else {
        return skip("the model has no embeddings");
    };
    let (info, usual) = (embedder.embedding_info(), EmbedOptions::new());
    ensure!(
        info.dimensions > 0,
        "embedding_info has vectors without elements"
    );
    let prompts = context.all_prompts();
    let together = embed(embedder, &prompts, &usual)?;
    for (i, (prompt, vector)) in prompts.iter().zip(&together).enumerate() {
        ensure!(
            vector.len() == info.dimensions,
            "vector {i} has {} elements, and embedding_info says {}",
            vector.len(),
            info.dimensions
        );
        let alone = embed(embedder, std::slice::from_ref(prompt), &usual)?;
        ensure!(
            close(&alone[0], vector),
            "the vector of prompt {i} differs alone and among {}",
            prompts.len()
        );
    }
    ensure!(
        together[0] != together[1],
        "two different prompts have the same vector"
    );
    ensure!(
        embed(embedder, &[], &usual)?.is_empty(),
        "no prompts have vectors"
    );
    for (i, vector) in embed(embedder, &prompts, &usual.clone().with_normalize(true))?
        .iter()
        .enumerate()
    {
        ensure!(
            (norm(vector) - 1.0).abs() < 1e-2,
            "the normalized vector {i} has the length {}",
            norm(vector)
        );
    }
    let plain = usual.clone().with_normalize(false);
    let half = info.dimensions.div_ceil(2);
    let long = embed(embedder, &prompts, &plain)?;
    let short = embed(embedder, &prompts, &plain.with_dimensions(half))?;
    for (i, (long, short)) in long.iter().zip(&short).enumerate() {
        ensure!(
            close(&long[..half], short),
            "{half} dimensions of vector {i} are not its first elements"
        );
    }
    tokens_of_embeddings(embedder, context, &together[0])?;
    embedding_errors(embedder, model.info().vocab_size, info.dimensions)
}

/// Checks that the reported ids are those that `embed` uses, and that a maximum length truncates
/// them.
fn tokens_of_embeddings(
    embedder: &dyn EmbeddingModel,
    context: &Context,
    vector: &[f32],
) -> Verdict {
    let usual = EmbedOptions::new();
    let tokens = |options: &EmbedOptions| {
        let ids = embedder.embedding_tokens(&context.prompt(), options);
        ids.or_else(|e| fail(format!("embedding_tokens: {e}")))
    };
    let ids = tokens(&usual)?;
    ensure!(!ids.is_empty(), "a prompt has no tokens to embed");
    let by_ids = embed(embedder, &[Prompt::Tokens(ids.clone())], &usual)?;
    ensure!(
        close(&by_ids[0], vector),
        "a prompt and its embedding_tokens have different vectors"
    );
    if ids.len() > 3 {
        let most = ids.len() - 1;
        let bounded = usual.with_max_length(most);
        let long = embedder.embed(&[context.prompt()], &bounded, &Interrupt::new());
        let kind = &[ErrorKind::InvalidOption];
        refused("embed of a text beyond max_length", long, kind)?;
        let cut = tokens(&bounded.with_truncate(true))?;
        ensure!(
            (1..=most).contains(&cut.len()),
            "truncated to {most} tokens, a text has {}",
            cut.len()
        );
    }
    Ok(())
}

fn embedding_errors(
    embedder: &dyn EmbeddingModel,
    vocab_size: usize,
    dimensions: usize,
) -> Verdict {
    let kind = &[ErrorKind::InvalidOption];
    let usual = EmbedOptions::new;
    let unknown = EmbedPrompt::Named(String::from("no such prompt"));
    for (what, options) in [
        (
            "more dimensions than there are",
            usual().with_dimensions(dimensions + 1),
        ),
        ("no dimensions", usual().with_dimensions(0)),
        ("max_length 0", usual().with_max_length(0)),
        ("an unknown prompt", usual().with_prompt(unknown)),
    ] {
        let vectors = embedder.embed(&["a".into()], &options, &Interrupt::new());
        refused(&format!("embed with {what}"), vectors, kind)?;
    }
    let none = Prompt::Tokens(Vec::new());
    for prompt in foreign_ids(vocab_size).into_iter().chain([none]) {
        let what = format!("embed of {prompt:?}");
        let prompts = [Prompt::from("a"), prompt];
        let vectors = embedder.embed(&prompts, &usual(), &Interrupt::new());
        refused(&what, vectors, kind)?;
    }
    Ok(())
}

pub(crate) fn reranking(context: &Context) -> Verdict {
    let model = context.model()?;
    let Some(ranker) = model.as_rerank_model() else {
        return skip("the model does not rank documents");
    };
    let (query, none) = ("What is the capital of France?", Interrupt::new());
    let rerank = |documents: &[String]| match ranker.rerank(
        query,
        documents,
        &RerankOptions::new(),
        &none,
    ) {
        Ok(ranking) if ranking.scores.len() == documents.len() => Ok(ranking.scores),
        Ok(ranking) => fail(format!(
            "{} documents have {} scores",
            documents.len(),
            ranking.scores.len()
        )),
        Err(e) => fail(format!("rerank: {e}")),
    };
    let together = rerank(&context.prompts)?;
    for (document, score) in context.prompts.iter().zip(&together) {
        ensure!(
            (0.0..=1.0).contains(score),
            "{document:?} has the score {score}, which is not from 0 to 1"
        );
        let alone = rerank(std::slice::from_ref(document))?[0];
        ensure!(
            f64::from((alone - score).abs()) <= SPREAD,
            "{document:?} has the score {alone} alone and {score} among others"
        );
    }
    ensure!(rerank(&[])?.is_empty(), "no documents have scores");
    let bad = RerankOptions::new().with_max_length(0);
    let answer = ranker.rerank(query, &context.prompts, &bad, &none);
    refused(
        "rerank with max_length 0",
        answer,
        &[ErrorKind::InvalidOption],
    )?;
    Ok(())
}

/// The states at `positions`, after a check of their shapes.
fn states_at(
    inspector: &dyn AttentionInspector,
    prompt: &Prompt,
    positions: &[usize],
) -> Result<HiddenStates, Stop> {
    match inspector.hidden_states(prompt, positions, &Interrupt::new()) {
        Ok(states) => shaped(states, positions),
        Err(e) => fail(format!("hidden_states at {positions:?}: {e}")),
    }
}

fn shaped(states: HiddenStates, positions: &[usize]) -> Result<HiddenStates, Stop> {
    ensure!(
        states.positions == positions,
        "the states are of the positions {:?}, expected {positions:?}",
        states.positions
    );
    let size = positions.len() * states.hidden_size;
    ensure!(
        states.hidden_size > 0 && !states.blocks.is_empty(),
        "there are {} blocks of states with {} elements",
        states.blocks.len(),
        states.hidden_size
    );
    let lists = states.blocks.iter().chain(match states.embedding.len() {
        0 => None,
        _ => Some(&states.embedding),
    });
    for list in lists {
        ensure!(
            list.len() == size && list.iter().all(|x| x.is_finite()),
            "{} positions have {} elements, expected {size} numbers",
            positions.len(),
            list.len()
        );
    }
    Ok(states)
}

/// Whether, in each block, row `i` of `all` equals the only row of `one`.
fn row_is(all: &HiddenStates, i: usize, one: &HiddenStates) -> bool {
    let row = |block: &[f32]| block[i * all.hidden_size..(i + 1) * all.hidden_size].to_vec();
    all.hidden_size == one.hidden_size
        && all.blocks.len() == one.blocks.len()
        && all
            .blocks
            .iter()
            .zip(&one.blocks)
            .all(|(all, one)| close(&row(all), one))
}

pub(crate) fn hidden_states(context: &Context) -> Verdict {
    let model = context.model()?;
    let Some(inspector) = model.as_attention_inspector() else {
        return skip("the model does not show its states");
    };
    let prompt = context.prompt();
    let first = states_at(inspector, &prompt, &[0])?;
    let end = first.tokens.len();
    ensure!(end > 0, "the states have no tokens");
    let last = states_at(inspector, &prompt, &[end - 1])?;
    let both = states_at(inspector, &prompt, &[end - 1, 0])?;
    ensure!(
        row_is(&both, 0, &last) && row_is(&both, 1, &first),
        "two positions have other states together than alone, or in another order"
    );
    ensure!(
        end == 1 || last.blocks != first.blocks,
        "the first and the last position have the same states"
    );
    let none = Interrupt::new();
    let beyond = inspector.hidden_states(&prompt, &[end], &none);
    let kind = &[ErrorKind::InvalidOption];
    refused("hidden_states beyond the prompt", beyond, kind)?;

    let prompts = [
        prompt.clone(),
        Prompt::from(&context.prompts[1]),
        prompt.clone(),
    ];
    let positions = [vec![end - 1], vec![0], Vec::new()];
    let many = match inspector.hidden_states_many(&prompts, &positions, &none) {
        Ok(many) if many.len() == prompts.len() => many,
        Ok(many) => return fail(format!("three prompts have {} states", many.len())),
        Err(e) => return fail(format!("hidden_states_many: {e}")),
    };
    for (i, (states, positions)) in many.into_iter().zip(&positions).enumerate() {
        let states = shaped(states, positions)?;
        if !positions.is_empty() {
            let alone = states_at(inspector, &prompts[i], positions)?;
            ensure!(
                states.tokens == alone.tokens && row_is(&states, 0, &alone),
                "prompt {i} has other states among others than alone"
            );
        }
    }
    let fewer = inspector.hidden_states_many(&prompts, &positions[..2], &none);
    refused(
        "hidden_states_many with fewer positions than prompts",
        fewer,
        kind,
    )?;
    Ok(())
}
