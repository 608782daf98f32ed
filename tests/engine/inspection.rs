//! Tests of inspection: attention weights, hidden states, embeddings, and the probabilities of a
//! text.

use std::time::{Duration, Instant};

use crate::common::{fixture, floats, max_difference, tiny};
use inference::{
    CancelToken, EmbedOptions, EmbeddingModel, ErrorKind, Interrupt, LoadOptions, Pooling,
    Precision, Prompt, Result,
};

fn ids(n: u32) -> Prompt {
    Prompt::Tokens((0..n).map(|i| 5 + (i * 7 + i * i % 11) % 90).collect())
}

fn near(a: &[f32], b: &[f32], tolerance: f32) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= tolerance)
}

#[test]
fn attention_has_every_layer_head_and_position_and_does_not_look_ahead() {
    for name in ["llama", "qwen3", "gemma3", "mistral-window", "gemma4-small"] {
        let model = tiny(name);
        let inspector = model.as_attention_inspector().unwrap();
        let info = model.info();
        let long = inspector
            .inspect_attention(&ids(40), &Interrupt::new())
            .unwrap();
        let short = inspector
            .inspect_attention(&ids(25), &Interrupt::new())
            .unwrap();
        assert_eq!((long.seq_len, short.seq_len), (40, 25));
        assert_eq!(
            (long.num_layers, long.keys.len()),
            (info.num_layers, info.num_layers)
        );
        let queries = (
            long.queries.as_ref().unwrap(),
            short.queries.as_ref().unwrap(),
        );
        for layer in 0..info.num_layers {
            let (keys, before) = (&long.keys[layer], &short.keys[layer]);
            let (q, q_before) = (&queries.0[layer], &queries.1[layer]);
            assert_eq!(q.len(), info.num_heads, "{name}");
            assert!(info.num_heads.is_multiple_of(keys.len()), "{name}");
            let width = keys[0].len() / 40;
            for (a, b) in keys.iter().chain(q).zip(before.iter().chain(q_before)) {
                assert_eq!((a.len(), b.len()), (40 * width, 25 * width), "{name}");
                assert!(near(&a[..b.len()], b, 1e-4), "{name}, layer {layer}");
                assert!(a.iter().any(|v| *v != 0.0));
            }
        }
    }
}

#[test]
fn keys_turn_with_their_position() {
    // The prompt repeats one token, so all keys of the first layer are equal before rotation.
    let model = tiny("llama");
    let prompt = Prompt::Tokens(vec![42; 12]);
    let seen = model
        .as_attention_inspector()
        .unwrap()
        .inspect_attention(&prompt, &Interrupt::new())
        .unwrap();
    let head = &seen.keys[0][0];
    let (d, at) = (seen.head_dim, |p: usize| {
        &head[p * seen.head_dim..(p + 1) * seen.head_dim]
    });
    assert!(!near(at(0), at(5), 1e-3));
    // Rotation preserves the length of each rotated pair of elements.
    for p in 1..12 {
        for i in 0..d / 2 {
            let length = |v: &[f32]| v[i].hypot(v[i + d / 2]);
            assert!((length(at(0)) - length(at(p))).abs() < 1e-4);
        }
    }
}

#[test]
fn keys_are_those_in_the_caches_of_mlx_lm() {
    // The models have grouped heads, sliding windows shorter than the prompt, and packed weights.
    let golden = reference("keys.json");
    let tokens = crate::common::ids(&golden["tokens"]);
    let positions = crate::common::ids(&golden["positions"]);
    let (mut grouped, mut sliding) = (0, 0);
    for case in golden["cases"].as_array().unwrap() {
        let name = case["model"].as_str().unwrap();
        let step = usize::try_from(case["step"].as_u64().unwrap()).unwrap();
        // Inspection must return every position in full precision, even with options that save
        // cache memory.
        let packed = LoadOptions::new().with_kv_bits(4).with_kv_group_size(32);
        for options in [
            LoadOptions::new(),
            LoadOptions::new().with_context_len(8),
            packed,
        ] {
            let options = options.with_backend("cpu").with_precision(Precision::Exact);
            let path = fixture("tiny").join(name);
            let model = match inference::load_model(path, &options) {
                Ok(model) => model,
                // The head sizes of most tiny models allow no quantized cache.
                Err(e) if e.to_string().contains("kv_group_size") => continue,
                Err(e) => panic!("{name}: {e}"),
            };
            let inspector = model.as_attention_inspector().unwrap();
            let prompt = Prompt::Tokens(tokens.clone());
            let seen = inspector
                .inspect_attention(&prompt, &Interrupt::new())
                .unwrap();
            let layers = case["keys"].as_array().unwrap();
            assert_eq!(
                (seen.keys.len(), seen.seq_len),
                (layers.len(), tokens.len())
            );
            for (keys, expected) in seen.keys.iter().zip(layers) {
                let expected = expected.as_array().unwrap();
                assert_eq!(keys.len(), expected.len(), "{name}");
                assert_eq!(keys.len(), seen.num_kv_heads, "{name}");
                for (head, expected) in keys.iter().zip(expected) {
                    assert_eq!(head.len(), tokens.len() * seen.head_dim, "{name}");
                    let picked: Vec<f32> = positions
                        .iter()
                        .flat_map(|&p| {
                            let at = p as usize * seen.head_dim;
                            head[at..at + seen.head_dim].iter().step_by(step).copied()
                        })
                        .collect();
                    let expected = floats(expected);
                    let difference = max_difference(&picked, &expected);
                    // mlx-lm rounds Gemma 3's embedding factor to bfloat16, so results differ more.
                    let tolerance = if name == "gemma3-text" { 5e-4 } else { 1e-5 };
                    let size = expected.iter().fold(1f32, |size, v| size.max(v.abs()));
                    assert!(
                        difference < tolerance * size,
                        "{name}, {options:?}: {difference} of {size}"
                    );
                }
            }
            grouped += usize::from(seen.num_kv_heads < seen.num_heads);
            sliding += usize::from(name == "gemma3-text");
        }
    }
    assert!(grouped >= 6 && sliding == 2, "{grouped} {sliding}");
}

#[test]
fn hidden_states_are_those_of_the_positions_asked_for() {
    let model = tiny("gemma2");
    let inspector = model.as_attention_inspector().unwrap();
    let info = model.info();
    let some = inspector
        .hidden_states(&ids(30), &[29, 0, 7], &Interrupt::new())
        .unwrap();
    assert_eq!(some.positions, [29, 0, 7]);
    assert_eq!(some.blocks.len(), info.num_layers);
    let prefix = inspector
        .hidden_states(&ids(8), &[7], &Interrupt::new())
        .unwrap();
    for (block, one) in some.blocks.iter().zip(&prefix.blocks) {
        assert_eq!(block.len(), 3 * info.hidden_size);
        assert!(near(&block[2 * info.hidden_size..], one, 1e-3));
    }
    let error = inspector
        .hidden_states(&ids(8), &[8], &Interrupt::new())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
}

#[test]
fn hidden_states_of_many_prompts_are_those_of_each() {
    for name in ["llama", "gemma3", "gemma4-small", "gpt2"] {
        let model = tiny(name);
        let inspector = model.as_attention_inspector().unwrap();
        let info = model.info();
        let prompts = [9, 3, 600, 1, 12].map(ids);
        let positions: Vec<Vec<usize>> =
            vec![vec![8, 2], vec![0], vec![599, 0, 511, 512], vec![0], vec![]];
        let many = inspector
            .hidden_states_many(&prompts, &positions, &Interrupt::new())
            .unwrap();
        assert_eq!(many.len(), prompts.len());
        for ((prompt, positions), states) in prompts.iter().zip(&positions).zip(&many) {
            let one = inspector
                .hidden_states(prompt, positions, &Interrupt::new())
                .unwrap();
            assert_eq!(states.tokens, one.tokens);
            assert_eq!(&states.positions, positions);
            assert_eq!(states.blocks.len(), info.num_layers, "{name}");
            let size = positions.len() * info.hidden_size;
            assert_eq!(states.embedding.len(), size, "{name}");
            assert!(near(&states.embedding, &one.embedding, 1e-6), "{name}");
            for (a, b) in states.blocks.iter().zip(&one.blocks) {
                assert_eq!(a.len(), size);
                assert!(near(a, b, 2e-3), "{name}: {}", max_difference(a, b));
            }
        }
        let e = inspector
            .hidden_states_many(&prompts, &positions[..2], &Interrupt::new())
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption);
    }
}

#[test]
fn the_last_hidden_states_become_the_logits() {
    for name in ["llama", "gemma2", "gemma4-small", "cohere2", "gpt2"] {
        let model = tiny(name);
        let inspector = model.as_attention_inspector().unwrap();
        let prompt = ids(20);
        let states = inspector
            .hidden_states(&prompt, &[4, 19], &Interrupt::new())
            .unwrap();
        let lens = inspector.unembed(states.blocks.last().unwrap()).unwrap();
        let tokens = model.as_token_model().unwrap();
        let logits = tokens
            .logits(&prompt, true, &Interrupt::new())
            .unwrap()
            .logits;
        let vocab = model.info().vocab_size;
        for (lens_logits, position) in lens.iter().zip([4, 19]) {
            let expected = &logits[position * vocab..][..vocab];
            assert!(
                near(lens_logits, expected, 1e-3),
                "{name}: {}",
                max_difference(lens_logits, expected)
            );
        }
        // 70 times the states: more rows than one pass computes.
        let many = states.blocks[0].repeat(70);
        let all = inspector.unembed(&many).unwrap();
        assert_eq!(all.len(), 140);
        assert!(near(&all[139], &all[1], 1e-5), "{name}");
        let e = inspector.unembed(&many[1..]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption);
    }
}

/// Pooled vectors, normalized to length 1 if requested.
fn embed(
    embedder: &dyn EmbeddingModel,
    prompts: &[Prompt],
    pooling: Pooling,
    normalize: bool,
) -> Result<Vec<Vec<f32>>> {
    let options = EmbedOptions::new()
        .with_pooling(pooling)
        .with_normalize(normalize);
    embedder.embed(prompts, &options, &Interrupt::new())
}

#[test]
fn embeddings_do_not_depend_on_who_else_is_there() {
    for name in ["qwen3", "gemma3"] {
        let model = tiny(name);
        let embedder = model.as_embedding_model().unwrap();
        let prompts: Vec<Prompt> = [20, 3, 600, 1].map(ids).to_vec();
        for pooling in [Pooling::Mean, Pooling::Last] {
            let all = embed(embedder, &prompts, pooling, true).unwrap();
            for (prompt, vector) in prompts.iter().zip(&all) {
                assert_eq!(vector.len(), model.info().hidden_size);
                let length: f32 = vector.iter().map(|v| v * v).sum();
                assert!((length - 1.0).abs() < 1e-4, "{length}");
                let one = embed(embedder, std::slice::from_ref(prompt), pooling, true).unwrap();
                assert!(near(&one[0], vector, 1e-4), "{name}");
            }
            let raw = embed(embedder, &prompts[..1], pooling, false).unwrap();
            let length = raw[0].iter().map(|v| v * v).sum::<f32>().sqrt();
            let scaled: Vec<f32> = raw[0].iter().map(|v| v / length).collect();
            assert!(near(&scaled, &all[0], 1e-5));
        }
        let (mean, last) = (
            embed(embedder, &prompts[3..], Pooling::Mean, false).unwrap(),
            embed(embedder, &prompts[3..], Pooling::Last, false).unwrap(),
        );
        assert_eq!(mean, last, "one token has one state");
        let empty = [Prompt::Tokens(Vec::new())];
        assert!(embed(embedder, &empty, Pooling::Mean, false).is_err());
    }
}

#[test]
fn probabilities_of_a_text_are_those_of_its_logits() {
    let model = tiny("llama");
    let tokens = model.as_token_model().unwrap();
    let prompt = ids(700);
    let Prompt::Tokens(list) = &prompt else {
        unreachable!()
    };
    let scores = tokens.token_logprobs(&prompt, &Interrupt::new()).unwrap();
    assert_eq!(scores.len(), list.len() - 1);
    let logits = tokens.logits(&prompt, true, &Interrupt::new()).unwrap();
    let vocab = logits.shape[1];
    for (i, score) in scores.iter().enumerate() {
        let row: Vec<f64> = logits.logits[i * vocab..(i + 1) * vocab]
            .iter()
            .map(|v| f64::from(*v))
            .collect();
        let total = row.iter().map(|v| v.exp()).sum::<f64>().ln();
        let expected = row[list[i + 1] as usize] - total;
        assert!((f64::from(*score) - expected).abs() < 1e-4, "{i}");
    }
    assert!(
        tokens
            .token_logprobs(&Prompt::Tokens(vec![5]), &Interrupt::new())
            .unwrap()
            .is_empty()
    );
}

fn reference(file: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(file)).unwrap()).unwrap()
}

#[test]
fn perplexity_is_that_of_mlx_lm() {
    let golden = reference("perplexity.json");
    let cases = golden["tiny"].as_array().unwrap();
    assert!(cases.len() >= 4);
    for case in cases {
        let name = case["model"].as_str().unwrap();
        let model = tiny(name);
        let tokens = model.as_token_model().unwrap();
        let ids = crate::common::ids(&case["tokens"]);
        let length = usize::try_from(case["sequence_length"].as_u64().unwrap()).unwrap();
        assert!(ids.len() >= 2 * length && ids.len().is_multiple_of(length));
        let mut scores = Vec::new();
        for piece in ids.chunks(length) {
            let prompt = Prompt::Tokens(piece.to_vec());
            scores.extend(tokens.token_logprobs(&prompt, &Interrupt::new()).unwrap());
        }
        let mean = scores.iter().map(|s| -f64::from(*s)).sum::<f64>() / scores.len() as f64;
        let expected = case["perplexity"].as_f64().unwrap();
        let difference = (mean.exp() - expected).abs();
        // Random models have perplexities of several hundred, which float32 represents with six
        // digits.
        assert!(
            difference < 1e-5 * expected,
            "{name}: {} is not {expected}",
            mean.exp()
        );
    }
}

#[test]
fn embeddings_are_means_of_transformers_last_hidden_states() {
    let golden = reference("embeddings.json");
    let mut seen = std::collections::BTreeSet::new();
    for case in golden["cases"].as_array().unwrap() {
        let name = case["model"].as_str().unwrap();
        seen.insert(name);
        let model = tiny(name);
        let embedder = model.as_embedding_model().unwrap();
        let prompt = [Prompt::Tokens(crate::common::ids(&case["tokens"]))];
        for (pooling, key) in [(Pooling::Mean, "mean"), (Pooling::Last, "last")] {
            let ours = embed(embedder, &prompt, pooling, false).unwrap();
            let difference = max_difference(&ours[0], &floats(&case[key]));
            assert!(difference < 2e-4, "{name}, {key}: {difference}");
        }
    }
    assert!(seen.len() >= 3, "{seen:?}");
}

#[test]
fn a_closed_model_shows_nothing() {
    let model = tiny("llama");
    model.close().unwrap();
    let closed = |kind: ErrorKind| assert_eq!(kind, ErrorKind::Closed);
    let inspector = model.as_attention_inspector().unwrap();
    closed(
        inspector
            .inspect_attention(&ids(3), &Interrupt::new())
            .unwrap_err()
            .kind(),
    );
    closed(
        inspector
            .hidden_states(&ids(3), &[0], &Interrupt::new())
            .unwrap_err()
            .kind(),
    );
    let embedder = model.as_embedding_model().unwrap();
    let refused = embed(embedder, &[ids(3)], Pooling::Mean, false);
    closed(refused.unwrap_err().kind());
    closed(
        model
            .as_token_model()
            .unwrap()
            .token_logprobs(&ids(3), &Interrupt::new())
            .unwrap_err()
            .kind(),
    );
    closed(model.batch_session().err().unwrap().kind());
}

/// Calls without generation options must end at their deadline, between two steps of a long prompt.
#[test]
fn calls_end_between_the_steps_of_a_prompt() {
    if crate::alone::ran_elsewhere("inspection::calls_end_between_the_steps_of_a_prompt") {
        return;
    }
    let model = tiny("llama");
    let prompt = Prompt::Tokens((0..2300u32).map(|i| 5 + i * i % 290).collect());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompt.safetensors");
    type Call<'a> = Box<dyn Fn(&Interrupt) -> inference::Result<()> + 'a>;
    let tokens = model.as_token_model().unwrap();
    let vectors = model.as_embedding_model().unwrap();
    let inside = model.as_attention_inspector().unwrap();
    let files = model.as_prompt_cache().unwrap();
    let prompts = std::slice::from_ref(&prompt);
    let calls: [(&str, Call<'_>); 7] = [
        (
            "logits",
            Box::new(|i| tokens.logits(&prompt, false, i).map(drop)),
        ),
        (
            "all logits",
            Box::new(|i| tokens.logits(&prompt, true, i).map(drop)),
        ),
        (
            "logprobs",
            Box::new(|i| tokens.token_logprobs(&prompt, i).map(drop)),
        ),
        (
            "embed",
            Box::new(|i| vectors.embed(prompts, &EmbedOptions::new(), i).map(drop)),
        ),
        (
            "attention",
            Box::new(|i| inside.inspect_attention(&prompt, i).map(drop)),
        ),
        (
            "hidden",
            Box::new(|i| inside.hidden_states(&prompt, &[9], i).map(drop)),
        ),
        (
            "file",
            Box::new(|i| files.save_prompt_cache(&prompt, &path, i).map(drop)),
        ),
    ];
    for (name, call) in &calls {
        let mut total = Duration::ZERO;
        // A busy machine may delay one step past the deadline, but not all eight.
        let ended_early = (0..8).any(|_| {
            let start = Instant::now();
            call(&Interrupt::new()).unwrap();
            total = start.elapsed();
            std::fs::remove_file(&path).ok();
            let start = Instant::now();
            let error = call(&Interrupt::new().with_deadline(start + total / 10)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{name}");
            let took = start.elapsed();
            assert!(took >= total / 10, "{name}");
            took < total * 7 / 10
        });
        assert!(ended_early, "{name}: the prompt was computed to its end");
        // Another thread cancels the call.
        let cancel = CancelToken::new();
        let interrupt = Interrupt::new().with_cancel(cancel.clone());
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(total / 10);
                cancel.cancel();
            });
            call(&interrupt).unwrap_err()
        });
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{name}");
        assert!(!path.exists(), "{name}");
    }
}
