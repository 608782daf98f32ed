//! Compares edits of activations with PyTorch hooks in transformers (`tools/golden/steering.py`),
//! and with TransformerLens and nnsight (`tools/golden/steering_libraries.py`). Also tests caches,
//! and batches that mix edited and plain requests.

use std::sync::Arc;

use inference::{
    BatchEvent, Edit, EditOperation, EditPositions, ErrorKind, GenerateOptions, Hook, Interrupt,
    LoadOptions, Numbers, Precision, Prompt, Steering, TextModel,
};
use serde_json::{Value, json};

use crate::common::{fixture, floats, greedy, ids, max_difference, tiny};

fn golden_of(name: &str) -> Value {
    let text = std::fs::read_to_string(fixture(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn steering(edits: Value) -> Steering {
    serde_json::from_value(json!({ "edits": edits })).unwrap()
}

/// Multiplies the residual stream after block 0 by `factor`, at all positions.
fn louder(factor: f32) -> Steering {
    steering(json!([{"layers": 0, "hook": "resid_post", "op": "scale", "factor": factor}]))
}

fn reply(model: &dyn TextModel, prompt: &Prompt, options: &GenerateOptions) -> Vec<u32> {
    let stream = model.generate(prompt, options).unwrap();
    stream.collect_output().unwrap().tokens
}

fn logits(model: &dyn TextModel, prompt: &Prompt, steering: &Steering) -> Vec<f32> {
    let steerable = model.as_steerable().unwrap();
    let steered = steerable.steered_logits(prompt, false, steering, &Interrupt::new());
    steered.unwrap().logits
}

fn plain(model: &dyn TextModel, prompt: &Prompt) -> Vec<f32> {
    model
        .as_token_model()
        .unwrap()
        .logits(prompt, false, &Interrupt::new())
        .unwrap()
        .logits
}

/// Compares the logits, the greedy reply, and the reply with speculative decoding.
#[test]
fn edits_give_what_hooks_in_transformers_give() {
    let golden = golden_of("steering.json");
    let (prompt, stride) = (Prompt::Tokens(ids(&golden["prompt"])), &golden["stride"]);
    let stride = stride.as_u64().unwrap() as usize;
    let mut cases = 0;
    for (name, all) in golden["models"].as_object().unwrap() {
        let model = tiny(name);
        for (case, golden) in all.as_object().unwrap() {
            let what = format!("{name}, {case}");
            let steering: Steering = serde_json::from_value(golden["steering"].clone()).unwrap();
            let wanted = floats(&golden["logits"]);
            let ours = logits(model.as_ref(), &prompt, &steering);
            let ours: Vec<f32> = ours.into_iter().step_by(stride).collect();
            let greatest = wanted.iter().fold(1.0f32, |most, v| most.max(v.abs()));
            let difference = max_difference(&ours, &wanted) / greatest;
            assert!(difference < 1e-4, "{what}: {difference}");
            let options = greedy(4).with_ignore_eos(true).with_steering(steering);
            let wanted = ids(&golden["reply"]);
            assert_eq!(reply(model.as_ref(), &prompt, &options), wanted, "{what}");
            // With prefill steps of two tokens, the edits must reach the same positions.
            let small = options
                .clone()
                .with_prefill_step_size(2)
                .with_cache_prompt(false);
            assert_eq!(reply(model.as_ref(), &prompt, &small), wanted, "{what}");
            let guessed = options.with_num_draft_tokens(3).with_prompt_lookup(2);
            assert_eq!(reply(model.as_ref(), &prompt, &guessed), wanted, "{what}");
            cases += 1;
        }
    }
    assert!(cases >= 50, "{cases}");
}

#[test]
fn captured_states_put_back_change_nothing() {
    for name in [
        "llama",
        "gemma2",
        "gpt2",
        "cohere2",
        "qwen2-moe",
        "falcon-h1",
        "gemma4-small",
        "gemma4-large",
        "llama --ffn 0=sparse:8,2=attention-only",
        "gpt2 --ffn 1=sparse:8",
    ] {
        let model = match name.split_once(" --ffn ") {
            None => tiny(name),
            Some((name, plan)) => {
                let plan: inference::FeedForwardPlan = plan.parse().unwrap();
                let options = LoadOptions::new()
                    .with_feed_forward(plan)
                    .with_precision(Precision::Exact);
                let path = fixture("tiny").join(name);
                inference::load_model(path, &options.with_backend("cpu")).unwrap()
            }
        };
        let steerable = model.as_steerable().unwrap();
        let tokens = vec![5, 17, 42, 99, 7, 63];
        let prompt = Prompt::Tokens(tokens.clone());
        let (expected, shape) = (plain(model.as_ref(), &prompt), steerable.steering_shape());
        let shape = shape.unwrap();
        let mut places = 0;
        for hook in Hook::ALL {
            for layer in 0..shape.layers.len() {
                let Ok(width) = shape.width(layer, hook) else {
                    continue;
                };
                let states = steerable.hook_states(&prompt, &[(layer, hook)], &Interrupt::new());
                let states = states.unwrap().remove(0);
                assert_eq!(states.states.len(), tokens.len() * width, "{name}, {hook}");
                let edits = states.rows().enumerate().map(|(at, row)| Edit {
                    layers: Numbers::List(vec![layer]),
                    hook,
                    positions: EditPositions::At(Numbers::List(vec![at])),
                    units: None,
                    operation: EditOperation::Replace(Arc::from(row)),
                });
                let back = Steering::new(edits.collect()).unwrap();
                let difference = max_difference(&logits(model.as_ref(), &prompt, &back), &expected);
                assert!(difference < 1e-4, "{name}, {hook} of {layer}: {difference}");
                // A patch with states of the same prompt changes nothing. States of another prompt
                // must change the logits.
                let patch = |tokens: &[u32]| {
                    steering(json!([{"layers": layer, "hook": hook.name(), "op": "patch",
                                     "tokens": tokens}]))
                };
                let same = logits(model.as_ref(), &prompt, &patch(&tokens));
                assert!(
                    max_difference(&same, &expected) < 1e-4,
                    "{name}, {hook} of {layer}"
                );
                let other = logits(model.as_ref(), &prompt, &patch(&[8, 21, 4, 77, 130, 12]));
                assert!(
                    max_difference(&other, &expected) > 2e-5,
                    "{name}, {hook} of {layer}"
                );
                places += 1;
            }
        }
        assert!(places > 8, "{name}: {places}");
    }
}

/// The values at Gemma 4's hooks are the hidden states that transformers returns
/// (`tools/golden/trace.py`).
#[test]
fn the_places_of_gemma4_are_those_of_the_trace() {
    for name in ["gemma4-small", "gemma4-large"] {
        let model = tiny(name);
        let steerable = model.as_steerable().unwrap();
        let inspector = model.as_attention_inspector().unwrap();
        let prompt = Prompt::Tokens(vec![5, 17, 42, 99, 7, 63]);
        let interrupt = Interrupt::new();
        let trace = inspector
            .trace_residuals(&prompt, &[5], &interrupt)
            .unwrap();
        let last = |layer: usize, hook: Hook| -> Vec<f32> {
            let states = steerable.hook_states(&prompt, &[(layer, hook)], &interrupt);
            let states = states.unwrap().remove(0);
            states.rows().last().unwrap().to_vec()
        };
        let mut before = trace.embedding.clone();
        for (layer, parts) in trace.layers.iter().enumerate() {
            let close = |hook: Hook, expected: &[f32]| {
                let difference = max_difference(&last(layer, hook), expected);
                assert!(difference < 2e-5, "{name}, {hook} of {layer}: {difference}");
            };
            close(Hook::ResidPre, &before);
            close(Hook::AttnOut, &parts.mixer);
            close(Hook::ResidMid, &trace.between(layer).unwrap());
            close(Hook::ResidPost, &parts.residual);
            before.clone_from(&parts.residual);
        }
    }
}

/// The prompt is long enough to be cached. A second request with equal edits reuses the cache. A
/// request with other edits or without edits must not.
#[test]
fn computed_prompts_are_of_the_same_edits_alone() {
    // With several slots, the model caches several sequences.
    let slots = LoadOptions::new()
        .with_backend("cpu")
        .with_parallel_slots(4);
    let model = inference::load_model(fixture("tiny").join("llama"), &slots).unwrap();
    let prompt = Prompt::Tokens((0..40).map(|i| 5 + i * 7 % 90).collect());
    let run = |steering: Option<Steering>, salt: Option<&str>| {
        let options = greedy(6).with_ignore_eos(true).with_steering(steering);
        let options = options.with_cache_salt(salt.map(String::from));
        let stream = model.generate(&prompt, &options).unwrap();
        let output = stream.collect_output().unwrap();
        (output.tokens, output.metrics.cached_tokens)
    };
    let (first, cached) = run(None, None);
    assert_eq!(cached, 0);
    let (edited, cached) = run(Some(louder(-2.0)), None);
    assert_eq!(cached, 0, "a plain request's caches");
    assert_ne!(first, edited);
    let (again, cached) = run(None, None);
    assert_eq!(again, first);
    assert!(cached > 30, "{cached}");
    assert_eq!(run(Some(louder(0.1)), None).1, 0, "caches of other edits");
    assert_eq!(
        run(Some(louder(-2.0)), Some("s")).1,
        0,
        "caches of another salt"
    );
    let (again, cached) = run(Some(louder(-2.0)), None);
    assert_eq!(again, edited);
    assert!(cached > 30, "{cached}");
    // If an edit selects positions relative to the prompt's end, the engine must not cache its keys
    // and values.
    let last = || {
        steering(
            json!([{"layers": 1, "hook": "resid_post", "positions": "last", "op": "scale",
                         "factor": -3}]),
        )
    };
    let (edited, _) = run(Some(last()), None);
    assert_eq!(run(Some(last()), None), (edited, 0));
}

/// The tokens and logits of each request in a batch.
fn batch(
    model: &dyn TextModel,
    requests: &[(Prompt, GenerateOptions)],
) -> Vec<Vec<(u32, Vec<u32>)>> {
    let mut session = model.batch_session().unwrap();
    let rows: Vec<_> = requests
        .iter()
        .map(|(prompt, options)| session.add(prompt, options).unwrap())
        .collect();
    let mut results = vec![Vec::new(); rows.len()];
    while !session.is_empty() {
        for event in session.step().unwrap() {
            let at = rows.iter().position(|row| *row == event.row()).unwrap();
            match event {
                BatchEvent::Token { token, .. } => {
                    let bits = token.logits.unwrap().iter().map(|v| v.to_bits()).collect();
                    results[at].push((token.id, bits));
                }
                BatchEvent::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    results
}

#[test]
fn plain_requests_of_a_batch_keep_their_bits_beside_edited_ones() {
    for name in ["llama", "llama-q4", "gemma3-text", "gpt2"] {
        let model = tiny(name);
        let options = greedy(8)
            .with_ignore_eos(true)
            .with_logits(true)
            .with_cache_prompt(false);
        let prompt = |from: u32| Prompt::Tokens((0..24).map(|i| 5 + (from + i * 7) % 90).collect());
        let last = json!([{"layers": "0-1", "hook": "mlp_post", "neurons": [1, 4, 9],
                           "positions": "last", "op": "scale", "factor": -6}]);
        let edits = [louder(-1.5), steering(last)];
        let simple: Vec<_> = [1, 2].map(|n| (prompt(n), options.clone())).into();
        let steered: Vec<_> = [(1, 0), (2, 1), (1, 1)]
            .map(|(n, at): (u32, usize)| {
                let edited = options.clone().with_steering(edits[at].clone());
                (prompt(n), edited)
            })
            .into();
        let alone = batch(model.as_ref(), &simple);
        // Edited requests are the first, the middle and the last row.
        let mixed = batch(
            model.as_ref(),
            &[
                steered[0].clone(),
                simple[0].clone(),
                steered[1].clone(),
                simple[1].clone(),
                steered[2].clone(),
            ],
        );
        assert_eq!([&mixed[1], &mixed[3]], [&alone[0], &alone[1]], "{name}");
        // An edited request's reply equals its reply alone, and differs from the plain reply.
        for (row, edit_index) in [(0, 0), (2, 1), (4, 2)] {
            let tokens: Vec<u32> = mixed[row].iter().map(|(id, _)| *id).collect();
            let (prompt, options) = &steered[edit_index];
            assert_eq!(tokens, reply(model.as_ref(), prompt, options), "{name}");
        }
        assert_ne!(mixed[0], mixed[1], "{name}");
        assert_ne!(mixed[4], mixed[1], "{name}");
    }
}

#[test]
fn what_does_not_fit_the_model_is_said() {
    let model = tiny("llama");
    let prompt = Prompt::Tokens(vec![5, 6, 7]);
    let refused = |model: &dyn TextModel, edits: Value| {
        let options = greedy(1).with_steering(steering(edits));
        let error = model.generate(&prompt, &options).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        error.to_string()
    };
    for (edits, wanted) in [
        (
            json!([{"layers": 3, "hook": "z", "op": "zero"}]),
            "edits[0].layers names layer 3; the model has layers 0 to 2",
        ),
        (
            json!([{"layers": 0, "hook": "z", "op": "zero"},
                   {"layers": "1-7", "hook": "z", "op": "zero"}]),
            "edits[1].layers names layer 7",
        ),
        (
            json!([{"layers": 0, "hook": "z", "heads": [4], "op": "zero"}]),
            "edits[0].heads names 4; layer 0 has heads 0 to 3",
        ),
        (
            json!([{"layers": 2, "hook": "mlp_post", "neurons": [64], "op": "zero"}]),
            "edits[0].neurons names 64; layer 2 has neurons 0 to 63",
        ),
        (
            json!([{"layers": 0, "hook": "resid_pre", "op": "add", "vector": [1, 2]}]),
            "edits[0].vector has 2 numbers; resid_pre of layer 0 needs 32",
        ),
        (
            json!([{"layers": 0, "hook": "z", "heads": [1], "op": "replace", "vector": [1]}]),
            "edits[0].vector has 1 numbers; z of layer 0 needs 8",
        ),
        (
            json!([{"layers": 0, "hook": "resid_post", "positions": [1], "op": "patch",
                    "tokens": [5, 6], "from": [2]}]),
            "edits[0] patches in position 2 of its prompt, which has positions 0 to 1",
        ),
    ] {
        let message = refused(model.as_ref(), edits);
        assert!(message.contains(wanted), "{message}");
    }
    let parallel = refused(
        tiny("cohere2").as_ref(),
        json!([{"layers": 1, "hook": "resid_mid", "op": "zero"}]),
    );
    assert!(parallel.contains("layer 1 does not have"), "{parallel}");
    assert!(parallel.contains("attn_out"), "{parallel}");
    let experts = refused(
        tiny("mixtral").as_ref(),
        json!([{"layers": 0, "hook": "mlp_post", "op": "zero"}]),
    );
    assert!(experts.contains("edits[0].hook is mlp_post"), "{experts}");
    // This block adds a mixture of experts to a dense part, so an edit of the dense part's neurons
    // alone is refused.
    let beside = refused(
        tiny("gemma4-large").as_ref(),
        json!([{"layers": 0, "hook": "mlp_post", "op": "zero"}]),
    );
    assert!(beside.contains("edits[0].hook is mlp_post"), "{beside}");
    // The plan replaces this layer's feed-forward part by a factor, so the layer has no neurons to
    // edit.
    let plan = LoadOptions::new()
        .with_feed_forward("1=gain:1.5".parse::<inference::FeedForwardPlan>().unwrap());
    let model = inference::load_model(fixture("tiny").join("llama"), &plan.with_backend("cpu"));
    let gain = refused(
        model.unwrap().as_ref(),
        json!([{"layers": 1, "hook": "attn_out", "op": "zero"}]),
    );
    assert!(gain.contains("it has resid_pre, resid_post"), "{gain}");
}

/// The trace of an edited model ends with the edited logits, and shows the effect of each edit at
/// its hook.
#[test]
fn a_trace_shows_the_edited_model() {
    let model = tiny("llama");
    let prompt = Prompt::Tokens(vec![5, 17, 42, 99, 7, 63]);
    let inspector = model.as_attention_inspector().unwrap();
    let steerable = model.as_steerable().unwrap();
    let interrupt = Interrupt::new();
    let width = model.info().hidden_size;
    let vector: Vec<f32> = (0..width).map(|i| (i % 7) as f32 * 0.1 - 0.3).collect();
    let edits = steering(json!([
        {"layers": 1, "hook": "resid_post", "op": "add", "vector": vector, "coefficient": 2},
        {"layers": 1, "hook": "mlp_post", "neurons": [3], "op": "zero"},
        {"layers": 2, "hook": "z", "heads": [0], "op": "scale", "factor": 3},
    ]));
    let trace = |steering: Option<&Steering>| match steering {
        Some(edit) => steerable.steered_residuals(&prompt, &[0, 5], edit, &interrupt),
        None => inspector.trace_residuals(&prompt, &[0, 5], &interrupt),
    };
    let (edited, before) = (trace(Some(&edits)).unwrap(), trace(None).unwrap());
    let last = &edited.layers.last().unwrap().residual[width..];
    let ended = inspector.unembed(last).unwrap().remove(0);
    let wanted = logits(model.as_ref(), &prompt, &edits);
    assert!(max_difference(&ended, &wanted) < 1e-4);
    assert!(max_difference(&ended, &plain(model.as_ref(), &prompt)) > 1e-2);
    assert_eq!(edited.embedding, before.embedding);
    assert_eq!(edited.layers[0].residual, before.layers[0].residual);
    assert!(max_difference(&edited.layers[1].mixer, &before.layers[1].mixer) < 1e-6);
    // With the neuron set to zero, the remaining difference is the added vector.
    let silent = steering(json!([
        {"layers": 1, "hook": "mlp_post", "neurons": [3], "op": "zero"},
    ]));
    let silent = trace(Some(&silent)).unwrap();
    for (edited, silent) in (edited.layers[1].feed_forward.chunks(width))
        .zip(silent.layers[1].feed_forward.chunks(width))
    {
        let added: Vec<f32> = edited
            .iter()
            .zip(silent)
            .map(|(a, b)| (a - b) / 2.0)
            .collect();
        assert!(max_difference(&added, &vector) < 1e-5, "{added:?}");
    }
    assert!(max_difference(&edited.layers[2].mixer, &before.layers[2].mixer) > 1e-3);

    let seen = steerable.steered_activations(&prompt, &[5], &edits, &interrupt);
    let (seen, plain) = (
        seen.unwrap(),
        inspector
            .feed_forward_activations(&prompt, &[5], &interrupt)
            .unwrap(),
    );
    assert_eq!(seen.layers[0], plain.layers[0]);
    assert!(seen.layers[1][3] == 0.0 && plain.layers[1][3] != 0.0);
    assert!(max_difference(&seen.layers[2], &plain.layers[2]) > 1e-3);

    let weights = steerable.steered_attention_weights(&prompt, None, &edits, &interrupt);
    let (weights, plain) = (
        weights.unwrap().weights,
        inspector
            .attention_weights(&prompt, None, &interrupt)
            .unwrap()
            .weights,
    );
    assert_eq!(weights[..2], plain[..2]);
    // The edits change the states that layer 2 reads, and so its attention weights.
    assert_ne!(weights[2], plain[2]);

    let outside = steering(json!([{"layers": 9, "hook": "z", "op": "zero"}]));
    let refused = trace(Some(&outside)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidOption);
}

const LIBRARIES: [&str; 2] = ["transformer_lens", "nnsight"];

/// Two other libraries compute equal results for these edits
/// (`tools/golden/steering_libraries.py`).
#[test]
fn edits_give_what_transformer_lens_and_nnsight_give() {
    let golden = golden_of("steering_libraries.json");
    let prompt = Prompt::Tokens(ids(&golden["prompt"]));
    let stride = golden["stride"].as_u64().unwrap() as usize;
    let mut cases = 0;
    for (name, all) in golden["models"].as_object().unwrap() {
        let model = tiny(name);
        for (case, golden) in all.as_object().unwrap() {
            let steering: Steering = serde_json::from_value(golden["steering"].clone()).unwrap();
            let ours = logits(model.as_ref(), &prompt, &steering);
            let ours: Vec<f32> = ours.into_iter().step_by(stride).collect();
            for library in LIBRARIES {
                let wanted = floats(&golden[library]);
                let greatest = wanted.iter().fold(1.0f32, |most, v| most.max(v.abs()));
                let difference = max_difference(&ours, &wanted) / greatest;
                assert!(difference < 1e-4, "{name}, {case}, {library}: {difference}");
            }
            let options = greedy(4).with_ignore_eos(true).with_steering(steering);
            let wanted = ids(&golden["reply"]);
            assert_eq!(
                reply(model.as_ref(), &prompt, &options),
                wanted,
                "{name}, {case}"
            );
            cases += 1;
        }
    }
    assert!(cases >= 50, "{cases}");
}

/// Each run patches one head at one position (hook `z`). `tests/cli/steer.rs` patches all heads in
/// one run.
#[test]
fn patched_heads_bring_back_what_transformer_lens_and_nnsight_say() {
    let golden = &golden_of("steering_libraries.json")["patching"];
    let model = tiny(golden["model"].as_str().unwrap());
    let corrupted = Prompt::Tokens(ids(&golden["corrupted"]));
    let [answer, against] =
        ["answer", "against"].map(|name| golden[name].as_u64().unwrap() as usize);
    let ends = floats(&golden["differences"]);
    let mut cells = 0;
    for library in LIBRARIES {
        let layers = golden[library]["z by head"].as_array().unwrap();
        for (layer, positions) in layers.iter().enumerate() {
            for (position, heads) in positions.as_array().unwrap().iter().enumerate() {
                for (head, wanted) in floats(heads).into_iter().enumerate() {
                    let patch = steering(json!([{"layers": layer, "hook": "z", "heads": [head],
                        "positions": [position], "op": "patch", "tokens": golden["tokens"]}]));
                    let actual = logits(model.as_ref(), &corrupted, &patch);
                    let difference = actual[answer] - actual[against];
                    let recovered = (difference - ends[1]) / (ends[0] - ends[1]);
                    let what = format!("{library}, layer {layer}, head {head} at {position}");
                    assert!((recovered - wanted).abs() < 1e-4, "{what}: {recovered}");
                    cells += usize::from(wanted.abs() > 1e-3);
                }
            }
        }
    }
    assert!(cells > 50, "{cells}");
}
