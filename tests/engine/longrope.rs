//! Tests of LongRoPE. When a sequence exceeds a limit, the rotation of all its positions changes.
//! However a sequence is divided into passes, the reply must be that of a single pass, which the
//! reference computed (`tools/golden/longrope.py`).

use crate::common::{fixture, golden, greedy, ids, max_difference, tiny};
use inference::{
    BatchEvent, EmbedOptions, GenerateOptions, Interrupt, LoadOptions, Prompt, TextModel,
    TokenStream,
};

struct Case {
    prompt: Vec<u32>,
    reply: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(fixture("longrope.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let cases = golden["prompts"].as_array().unwrap();
    let cases: Vec<Case> = cases
        .iter()
        .map(|case| Case {
            prompt: ids(&case["tokens"]),
            reply: ids(&case["greedy"]),
        })
        .collect();
    let switch = golden["switch"].as_u64().unwrap() as usize;
    let ends = |c: &Case| c.prompt.len() + c.reply.len();
    assert!(
        cases
            .iter()
            .any(|c| c.prompt.len() < switch && ends(c) > switch)
    );
    assert!(cases.iter().any(|c| c.prompt.len() == switch + 1));
    cases
}

fn model(options: &LoadOptions) -> Box<dyn TextModel> {
    let options = options.clone().with_backend("cpu");
    inference::load_model(fixture("tiny/phi3"), &options).unwrap()
}

fn tokens(stream: TokenStream) -> Vec<u32> {
    stream.collect_output().unwrap().tokens
}

fn reply(model: &dyn TextModel, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    tokens(
        model
            .generate(&Prompt::from(prompt.to_vec()), options)
            .unwrap(),
    )
}

const STEPS: [usize; 4] = [1, 7, 16, 512];

#[test]
fn steps_of_the_prompt_change_nothing() {
    let model = model(&LoadOptions::new());
    for case in cases() {
        for step in STEPS {
            let options = greedy(case.reply.len())
                .with_cache_prompt(false)
                .with_prefill_step_size(step);
            let got = reply(model.as_ref(), &case.prompt, &options);
            assert_eq!(got, case.reply, "{} tokens, step {step}", case.prompt.len());
        }
    }
}

#[test]
fn earlier_requests_change_nothing() {
    if crate::alone::ran_elsewhere("longrope::earlier_requests_change_nothing") {
        return;
    }
    for case in cases() {
        for step in STEPS {
            let options = greedy(case.reply.len()).with_prefill_step_size(step);
            let n = case.prompt.len();
            for before in [n / 2, 17, n - 1] {
                let what = format!("{n} tokens after {before}, step {step}");
                let model = model(&LoadOptions::new().with_parallel_slots(2));
                // The prompt is shorter than the switch, and the reply ends before or after the
                // switch.
                for longer in [1, 20] {
                    let options = greedy(longer).with_prefill_step_size(step);
                    reply(model.as_ref(), &case.prompt[..before], &options);
                    let got = reply(model.as_ref(), &case.prompt, &options.with_max_tokens(16));
                    assert_eq!(got, case.reply, "{what}");
                }
                // This prompt is longer than the switch length.
                let long = [case.prompt.as_slice(), &case.reply].concat();
                reply(model.as_ref(), &long, &options);
                assert_eq!(
                    reply(model.as_ref(), &case.prompt, &options),
                    case.reply,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn a_conversation_beyond_the_switch_is_reused() {
    let model = model(&LoadOptions::new());
    let case = &cases()[5];
    reply(model.as_ref(), &case.prompt, &greedy(1));
    let longer = [case.prompt.as_slice(), &case.reply[..4]].concat();
    let stream = model.generate(&Prompt::from(longer), &greedy(4)).unwrap();
    let output = stream.collect_output().unwrap();
    assert_eq!(output.tokens, case.reply[4..8]);
    assert_eq!(output.metrics.cached_tokens, 50);
}

#[test]
fn rows_of_a_batch_change_nothing_for_each_other() {
    let cases = cases();
    // The prompts share prefixes that end before and after the switch.
    let long = &cases[5].prompt;
    let mut prompts: Vec<Vec<u32>> = cases.iter().map(|c| c.prompt.clone()).collect();
    prompts.extend([20, 24, 31, 33, 40].map(|n| long[..n].to_vec()));
    let model = model(&LoadOptions::new());
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| reply(model.as_ref(), prompt, &greedy(16).with_cache_prompt(false)))
        .collect();
    for step in STEPS {
        for cached in [false, true] {
            let options = greedy(16)
                .with_prefill_step_size(step)
                .with_cache_prompt(cached);
            let mut session = model.batch_session().unwrap();
            let mut rows = Vec::new();
            let mut got = vec![Vec::new(); prompts.len()];
            // Requests arrive one after another, so some rows decode while others prefill.
            while rows.len() < prompts.len() || !session.is_empty() {
                if let Some(prompt) = prompts.get(rows.len()) {
                    let prompt = Prompt::from(prompt.clone());
                    rows.push(session.add(&prompt, &options).unwrap());
                }
                for event in session.step().unwrap() {
                    let at = rows.iter().position(|row| *row == event.row()).unwrap();
                    match event {
                        BatchEvent::Token { token, .. } => got[at].push(token.id),
                        BatchEvent::Done { .. } => {}
                        other => panic!("{other:?}"),
                    }
                }
            }
            assert_eq!(got, alone, "step {step}, cached: {cached}");
        }
    }
    for (case, alone) in cases.iter().zip(&alone) {
        assert_eq!(alone, &case.reply);
    }
}

#[test]
fn guesses_change_nothing() {
    if crate::alone::ran_elsewhere("longrope::guesses_change_nothing") {
        return;
    }
    let drafted = LoadOptions::new().with_draft_model(fixture("tiny/phi3"));
    let ways = [
        (&drafted, greedy(16).with_num_draft_tokens(5)),
        (
            &LoadOptions::new(),
            greedy(16).with_num_draft_tokens(4).with_prompt_lookup(1),
        ),
    ];
    for (load, options) in ways {
        let model = model(load);
        for case in cases() {
            for step in STEPS {
                for cached in [false, true, true] {
                    let options = options
                        .clone()
                        .with_prefill_step_size(step)
                        .with_cache_prompt(cached);
                    let stream = model.generate(&Prompt::from(case.prompt.clone()), &options);
                    let output = stream.unwrap().collect_output().unwrap();
                    let n = case.prompt.len();
                    assert_eq!(
                        output.tokens, case.reply,
                        "{n} tokens, step {step}, {cached}"
                    );
                    let metrics = &output.metrics;
                    if load.draft_model.is_some() {
                        // The model drafts for itself, so all drafted tokens are accepted.
                        assert_eq!(metrics.draft_tokens, metrics.accepted_draft_tokens, "{n}");
                        assert!(metrics.draft_tokens >= 10, "{n}: {}", metrics.draft_tokens);
                    }
                }
            }
        }
    }
}

#[test]
fn progress_is_of_the_prompt_alone() {
    let model = model(&LoadOptions::new());
    let case = &cases()[1];
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let told = std::sync::Arc::clone(&seen);
    let progress = inference::Progress::new(move |done, total| {
        told.lock().unwrap().push((done, total));
    });
    let options = greedy(16)
        .with_prefill_step_size(16)
        .with_progress(progress);
    assert_eq!(reply(model.as_ref(), &case.prompt, &options), case.reply);
    assert_eq!(*seen.lock().unwrap(), [(0, 28), (16, 28), (28, 28)]);
}

#[test]
fn prompt_files_hold_one_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompt.safetensors");
    for case in cases() {
        let n = case.prompt.len();
        for saved in [n / 2, n - 1, n] {
            let made = model(&LoadOptions::new());
            let prompt = Prompt::from(case.prompt[..saved].to_vec());
            let cache = made.as_prompt_cache().unwrap();
            cache
                .save_prompt_cache(&prompt, &path, &Interrupt::new())
                .unwrap();
            let other = model(&LoadOptions::new());
            let cache = other.as_prompt_cache().unwrap();
            cache.load_prompt_cache(&path).unwrap();
            let got = reply(other.as_ref(), &case.prompt, &greedy(16));
            assert_eq!(got, case.reply, "{saved} of {n}");
        }
    }
}

/// With the default step size, 600 tokens need two steps. The switch at position 550 is in the
/// second.
#[test]
fn logits_and_vectors_of_long_prompts_are_of_one_pass() {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("tiny/phi3")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut config = golden_config(dir.path());
    config["max_position_embeddings"] = 2048.into();
    let open = |config: &serde_json::Value| {
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        crate::common::load(dir.path())
    };
    let set = |config: &mut serde_json::Value, switch: u32| {
        config["original_max_position_embeddings"] = switch.into();
        config["rope_parameters"]["original_max_position_embeddings"] = switch.into();
        // The configuration may set the amplitude; otherwise the engine computes it from the
        // switch.
        config["rope_parameters"]["attention_factor"] = 1.1.into();
    };
    set(&mut config, 550);
    let switching = open(&config);
    // An equivalent configuration: the long factors at all positions.
    set(&mut config, 2048);
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"].clone();
    let long = open(&config);
    let prompt = Prompt::from(
        (0..600u32)
            .map(|i| 5 + (i * i + 7 * i) % 290)
            .collect::<Vec<_>>(),
    );
    let all = |model: &dyn TextModel| {
        let tokens = model.as_token_model().unwrap();
        let mut actual = tokens
            .logits(&prompt, true, &Interrupt::new())
            .unwrap()
            .logits;
        actual.extend(
            tokens
                .logits(&prompt, false, &Interrupt::new())
                .unwrap()
                .logits,
        );
        actual.extend(tokens.token_logprobs(&prompt, &Interrupt::new()).unwrap());
        let vectors = model.as_embedding_model().unwrap();
        actual.extend(
            vectors
                .embed(
                    std::slice::from_ref(&prompt),
                    &EmbedOptions::new().with_normalize(false),
                    &Interrupt::new(),
                )
                .unwrap()
                .concat(),
        );
        let inside = model.as_attention_inspector().unwrap();
        actual.extend(
            inside
                .hidden_states(&prompt, &[0, 300, 599], &Interrupt::new())
                .unwrap()
                .blocks
                .concat(),
        );
        actual.extend(
            inside
                .inspect_attention(&prompt, &Interrupt::new())
                .unwrap()
                .keys
                .concat()
                .concat(),
        );
        actual
    };
    let difference = max_difference(&all(switching.as_ref()), &all(long.as_ref()));
    assert!(difference < 1e-4, "{difference}");
}

fn golden_config(dir: &std::path::Path) -> serde_json::Value {
    let text = std::fs::read(dir.join("config.json")).unwrap();
    inference_formats::python_json::from_slice(&text).unwrap()
}

/// Only Phi-3 has LongRoPE with two sets of factors, so in the other families the division of a
/// prompt may change only roundings. InternLM 3's rotation also depends on the length, but its
/// cache knows the length of the whole prompt.
#[test]
fn only_phi3_depends_on_the_length() {
    if crate::alone::ran_elsewhere("longrope::only_phi3_depends_on_the_length") {
        return;
    }
    for name in crate::common::tiny_names() {
        let dir = fixture("tiny").join(&name);
        // GGUF files have no config.json.
        if dir.join("config.json").is_file() {
            let config = golden_config(&dir).to_string();
            // MiniCPM 3 has the same factors at all lengths.
            let long = ["phi3", "minicpm3"].contains(&name.as_str());
            assert_eq!(config.contains("longrope"), long, "{name}");
        }
        let model = tiny(&name);
        let longest = golden(&fixture("tiny").join(&name));
        let case = &longest["prompts"].as_array().unwrap()[1];
        let (prompt, expected) = (ids(&case["tokens"]), ids(&case["greedy"]));
        for step in [1, 7, 16] {
            let options = greedy(expected.len())
                .with_cache_prompt(false)
                .with_prefill_step_size(step);
            assert_eq!(
                reply(model.as_ref(), &prompt, &options),
                expected,
                "{name}, step {step}"
            );
        }
    }
}
