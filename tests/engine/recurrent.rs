//! Tests requests of models with a recurrent state of fixed size, with and without attention
//! layers. `golden.rs` checks logits, `generation.rs` batches of every architecture, and
//! `layouts.rs` file layouts. Unit tests check the recurrences.

use crate::common::{fixture, greedy, max_difference, tiny};
use inference::{
    ComputeType, Error, ErrorKind, GenerateOptions, Interrupt, LoadOptions, Prompt, TextModel,
};

/// Token ids of the tiny vocabulary.
fn ids(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 61) % 260 + 16).collect()
}

fn reply(model: &dyn TextModel, prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, usize) {
    let prompt = Prompt::Tokens(prompt.to_vec());
    let output = model.generate(&prompt, options).unwrap();
    let output = output.collect_output().unwrap();
    (output.tokens, output.metrics.cached_tokens)
}

fn fresh(n: usize) -> GenerateOptions {
    greedy(n).with_cache_prompt(false)
}

#[test]
fn a_prompt_in_pieces_equals_one_pass() {
    if crate::alone::ran_elsewhere("recurrent::a_prompt_in_pieces_equals_one_pass") {
        return;
    }
    for name in [
        "xlstm",
        "xlstm-q4",
        "xlstm-slstm",
        "lfm2",
        "lfm2-moe",
        "qwen3-next",
        "qwen3-5",
        "mamba",
        "falcon-mamba",
        "rwkv7",
        "jamba",
        "kimi-linear",
        "mamba2",
        "granitemoehybrid",
        "falcon-h1",
        "falcon-h1-norm",
        "nemotron-h",
        "nemotron-h-moe",
    ] {
        let model = tiny(name);
        let prompt = ids(1, 100);
        let (expected, _) = reply(model.as_ref(), &prompt, &fresh(12));
        // A step of one token uses the recurrent form. A longer step uses the chunked form.
        for step in [1, 7, 16, 33, 99] {
            let options = fresh(12).with_prefill_step_size(step);
            let (actual, _) = reply(model.as_ref(), &prompt, &options);
            assert_eq!(actual, expected, "{name}, steps of {step}");
        }
        // The logits of all positions in one pass must equal the last logits of each prefix.
        let tokens = model.as_token_model().unwrap();
        let all = tokens
            .logits(&Prompt::Tokens(prompt.clone()), true, &Interrupt::new())
            .unwrap();
        let width = model.info().vocab_size;
        for n in [1, 2, 16, 17, 64, 99] {
            let part = Prompt::Tokens(prompt[..n].to_vec());
            let last = tokens.logits(&part, false, &Interrupt::new()).unwrap();
            let last_row = &all.logits[(n - 1) * width..n * width];
            let difference = max_difference(&last.logits, last_row);
            assert!(difference < 1e-3, "{name}, {n}: {difference}");
        }
    }
}

#[test]
fn a_prefix_is_used_again_as_a_whole_or_not_at_all() {
    for name in [
        "xlstm",
        "lfm2",
        "qwen3-5",
        "mamba",
        "falcon-mamba",
        "rwkv7",
        "jamba",
        "kimi-linear",
        "mamba2",
        "granitemoehybrid",
        "falcon-h1",
        "nemotron-h",
    ] {
        let model = tiny(name);
        let first = ids(2, 12);
        let (answer, cached) = reply(model.as_ref(), &first, &greedy(5).with_ignore_eos(true));
        assert_eq!(cached, 0);
        let mut second = [first.as_slice(), &answer, &[20, 21, 22]].concat();
        let (expected, _) = reply(model.as_ref(), &second, &fresh(8));
        let (actual, cached) = reply(model.as_ref(), &second, &greedy(8));
        assert_eq!(actual, expected, "{name}");
        // The last token of a reply is never fed to the model, so it is not cached.
        assert_eq!(cached, 16, "{name}");
        // The engine cannot trim a state to a shorter prefix.
        second.truncate(9);
        second.push(30);
        let (expected, _) = reply(model.as_ref(), &second, &fresh(8));
        let (actual, cached) = reply(model.as_ref(), &second, &greedy(8));
        assert_eq!((actual, cached), (expected, 0), "{name}");
    }
}

/// Rows of different ages share a prefix only if both the state and the KV cache cover the prefix.
#[test]
fn a_batch_of_a_hybrid_gives_what_each_gets_alone() {
    let start = ids(11, 40);
    for name in [
        "lfm2",
        "lfm2-moe",
        "qwen3-next",
        "mamba",
        "falcon-mamba",
        "rwkv7",
        "jamba",
        "kimi-linear",
        "mamba2",
        "granitemoehybrid",
        "falcon-h1",
        "nemotron-h",
        "nemotron-h-moe",
    ] {
        let options = LoadOptions::new()
            .with_backend("cpu")
            .with_parallel_slots(4);
        let model = inference::load_model(fixture("tiny").join(name), &options).unwrap();
        let prompts: Vec<Prompt> = ([3, 40, 21, 40].into_iter().zip([50u32, 60, 70, 80]))
            .map(|(n, last)| Prompt::Tokens([&start[..n], &[last]].concat()))
            .collect();
        let expected: Vec<Vec<u32>> = (prompts.iter())
            .map(|prompt| {
                let stream = model.generate(prompt, &fresh(12)).unwrap();
                stream.collect_output().unwrap().tokens
            })
            .collect();
        let outputs = model.batch_generate(&prompts, &fresh(12)).unwrap();
        let actual: Vec<Vec<u32>> = (outputs.iter())
            .map(|output| output.tokens.iter().map(|t| t.id).collect())
            .collect();
        assert_eq!(actual, expected, "{name}");
    }
}

#[test]
fn a_state_survives_a_file_and_serves_many_prompts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompt.safetensors");
    let start = ids(9, 30);
    let writer = tiny("xlstm");
    let writer_cache = writer.as_prompt_cache().unwrap();
    let prompt = Prompt::Tokens(start.clone());
    assert_eq!(
        writer_cache
            .save_prompt_cache(&prompt, &path, &Interrupt::new())
            .unwrap(),
        30
    );
    // Two blocks have four heads each. A head's state has C (16 x 32), n (16) and m (1) in float32,
    // whatever the length.
    let state = 2 * 4 * (16 * 32 + 16 + 1) * 4;
    let bytes = std::fs::metadata(&path).unwrap().len();
    assert!(
        (state..state + 4096).contains(&bytes),
        "{bytes} for {state}"
    );

    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_parallel_slots(4);
    let reader = inference::load_model(fixture("tiny/xlstm"), &options).unwrap();
    let file = dir.path().join("prompt.safetensors");
    let reader_cache = reader.as_prompt_cache().unwrap();
    assert_eq!(reader_cache.load_prompt_cache(&file).unwrap(), start);
    for more in [[33, 34], [50, 51]] {
        let full_prompt = [start.as_slice(), &more].concat();
        let (expected, _) = reply(writer.as_ref(), &full_prompt, &fresh(10));
        let (actual, cached) = reply(reader.as_ref(), &full_prompt, &greedy(10));
        assert_eq!((actual, cached), (expected, 30), "{more:?}");
    }
    // A prompt cache file stores both recurrent states and keys with values.
    for name in [
        "lfm2",
        "qwen3-next",
        "granitemoehybrid",
        "falcon-h1",
        "nemotron-h",
    ] {
        let hybrid = tiny(name);
        let hybrid_cache = hybrid.as_prompt_cache().unwrap();
        assert_eq!(
            hybrid_cache
                .save_prompt_cache(&prompt, &path, &Interrupt::new())
                .unwrap(),
            30
        );
        let reader = tiny(name);
        let second_cache = reader.as_prompt_cache().unwrap();
        assert_eq!(second_cache.load_prompt_cache(&path).unwrap(), start);
        let second_prompt = [start.as_slice(), &[33, 34]].concat();
        let (expected, _) = reply(hybrid.as_ref(), &second_prompt, &fresh(10));
        let (second_reply, cached) = reply(reader.as_ref(), &second_prompt, &greedy(10));
        assert_eq!((second_reply, cached), (expected, 30), "{name}");
    }
    let other = tiny("llama");
    let error = other
        .as_prompt_cache()
        .unwrap()
        .load_prompt_cache(&file)
        .unwrap_err();
    assert!(error.to_string().contains("another model"), "{error}");
}

fn refused(result: inference::Result<impl Sized>, word: &str) {
    let error: Error = match result {
        Ok(_) => panic!("{word} was accepted"),
        Err(error) => error,
    };
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn what_needs_keys_is_refused_with_the_reason() {
    let path = fixture("tiny/xlstm");
    let with = |options: LoadOptions| inference::load_model(&path, &options.with_backend("cpu"));
    refused(
        with(LoadOptions::new().with_context_len(Some(64))),
        "context_len",
    );
    let packed = LoadOptions::new()
        .with_kv_bits(Some(8))
        .with_kv_group_size(32);
    refused(with(packed), "kv_bits");
    let drafted = LoadOptions::new().with_draft_model(Some(path.clone()));
    refused(with(drafted), "recurrent");
    // The drafter's state cannot be rolled back either, so this model cannot draft for an attention
    // model.
    let drafted = LoadOptions::new()
        .with_backend("cpu")
        .with_draft_model(Some(path.clone()));
    refused(
        inference::load_model(fixture("tiny/qwen3"), &drafted),
        "draft_model",
    );
    let model = tiny("xlstm");
    let prompt = Prompt::Tokens(ids(3, 8));
    refused(
        model.generate(&prompt, &greedy(4).with_prompt_lookup(2)),
        "recurrent",
    );
    let inspector = model.as_attention_inspector().unwrap();
    refused(
        inspector.inspect_attention(&prompt, &Interrupt::new()),
        "attention",
    );
    let states = inspector
        .hidden_states(&prompt, &[0, 7], &Interrupt::new())
        .unwrap();
    assert_eq!(states.blocks.len(), 2);
    assert_eq!(states.blocks[1].len(), 2 * 128);
}

/// Attention with an output gate can be inspected like plain attention.
#[test]
fn gated_attention_shows_its_queries() {
    let model = tiny("qwen3-5");
    let inspector = model.as_attention_inspector().unwrap();
    let prompt = Prompt::Tokens(ids(3, 40));
    let seen = inspector
        .inspect_attention(&prompt, &Interrupt::new())
        .unwrap();
    let heads = |lists: &[Vec<Vec<f32>>]| -> Vec<usize> { lists.iter().map(Vec::len).collect() };
    assert_eq!(heads(&seen.keys), [0, 0, 0, 2]);
    assert_eq!(heads(seen.queries.as_ref().unwrap()), [0, 0, 0, 4]);
    assert_eq!(seen.queries.unwrap()[3][0].len(), 40 * 16);
}

/// A block with both mixers returns the keys of its attention. A block with only one part returns
/// none.
#[test]
fn blocks_of_two_mixers_and_of_one_part_show_the_keys_they_have() {
    let prompt = Prompt::Tokens(ids(3, 40));
    for (name, expected) in [
        ("falcon-h1", &[2, 2, 2][..]),
        ("nemotron-h", &[0, 0, 2, 0, 0]),
    ] {
        let model = tiny(name);
        let inspector = model.as_attention_inspector().unwrap();
        let seen = inspector
            .inspect_attention(&prompt, &Interrupt::new())
            .unwrap();
        let heads: Vec<usize> = seen.keys.iter().map(Vec::len).collect();
        assert_eq!(heads, expected, "{name}");
        refused(
            model.generate(&prompt, &greedy(4).with_prompt_lookup(2)),
            "recurrent",
        );
    }
}

/// The attention layers have keys, which a bound limits and inspection returns. The convolution
/// layers have none.
#[test]
fn a_hybrid_has_keys_in_its_layers_of_attention() {
    let path = fixture("tiny/lfm2");
    let load = |options: LoadOptions| inference::load_model(&path, &options.with_backend("cpu"));
    let model = load(LoadOptions::new()).unwrap();
    let prompt = Prompt::Tokens(ids(3, 40));
    refused(
        model.generate(&prompt, &greedy(4).with_prompt_lookup(2)),
        "recurrent",
    );
    let drafted = LoadOptions::new().with_draft_model(Some(path.clone()));
    refused(load(drafted), "recurrent");
    let inspector = model.as_attention_inspector().unwrap();
    let seen = inspector
        .inspect_attention(&prompt, &Interrupt::new())
        .unwrap();
    let heads = |lists: &[Vec<Vec<f32>>]| -> Vec<usize> { lists.iter().map(Vec::len).collect() };
    assert_eq!(heads(&seen.keys), [0, 0, 2, 0, 2]);
    assert_eq!(heads(seen.queries.as_ref().unwrap()), [0, 0, 4, 0, 4]);
    assert_eq!(seen.keys[2][0].len(), 40 * 8);
    // A bound above the length does not change the reply; a smaller bound does.
    let free = reply(model.as_ref(), &ids(3, 40), &fresh(12)).0;
    let bounded = |n| {
        let model = load(LoadOptions::new().with_context_len(Some(n))).unwrap();
        reply(model.as_ref(), &ids(3, 40), &fresh(12)).0
    };
    assert_eq!(bounded(64), free);
    assert_ne!(bounded(8), free);
}

/// Weights have 16 bits, but the state is float32, so that long sums do not lose small values.
#[test]
fn bfloat16_stays_finite_over_two_thousand_tokens() {
    if crate::alone::ran_elsewhere("recurrent::bfloat16_stays_finite_over_two_thousand_tokens") {
        return;
    }
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_dtype(Some(ComputeType::BFloat16));
    let prompt = Prompt::Tokens(ids(4, 2000));
    let logits = |model: &dyn TextModel| {
        let tokens = model.as_token_model().unwrap();
        tokens
            .logits(&prompt, false, &Interrupt::new())
            .unwrap()
            .logits
    };
    let names = [
        "xlstm",
        "lfm2",
        "qwen3-5",
        "mamba",
        "falcon-mamba",
        "rwkv7",
        "jamba",
        "kimi-linear",
        "mamba2",
        "granitemoehybrid-dense",
        "falcon-h1",
        "nemotron-h",
    ];
    for name in names {
        let half = inference::load_model(fixture("tiny").join(name), &options).unwrap();
        let (half, full) = (logits(half.as_ref()), logits(tiny(name).as_ref()));
        assert!(half.iter().chain(&full).all(|x| x.is_finite()), "{name}");
        let spread = full.iter().fold(0f32, |most, x| most.max(x.abs()));
        let difference = max_difference(&half, &full);
        assert!(
            difference < 0.2 * spread,
            "{name}: {difference} of {spread}"
        );
    }
}

/// The test measures memory of the whole process, so it runs in a separate process.
#[test]
fn memory_does_not_grow_with_the_length() {
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "recurrent::alone_memory_does_not_grow",
            "--ignored",
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "a process of its own, started by memory_does_not_grow_with_the_length"]
fn alone_memory_does_not_grow() {
    let model = tiny("xlstm");
    let prompt = Prompt::Tokens(ids(5, 20));
    let mut stream = model.generate(&prompt, &fresh(1200)).unwrap();
    let live_bytes: Vec<usize> = (0..1000)
        .map(|_| {
            stream.next().unwrap().unwrap();
            mlx_rs_core::memory::active().unwrap()
        })
        .collect();
    // A step in progress owns more memory: two states of 17 KiB, and outputs. Therefore the test
    // compares the minimum.
    let least = |live_bytes: &[usize]| live_bytes.iter().min().copied().unwrap();
    let (first, last) = (least(&live_bytes[..500]), least(&live_bytes[500..]));
    // A KV cache of 500 tokens would need about 100 KB.
    assert!(last < first + 8192, "{first} grew to {last}");
}

#[test]
fn converted_to_four_bits_it_answers_and_its_gates_stay_whole() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("q4");
    let run = std::process::Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(["convert", "-q", "--q-group-size", "32", "--model"])
        .arg(fixture("tiny/xlstm"))
        .arg("--output")
        .arg(&made)
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}");
    let bytes = std::fs::read(made.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let block = "backbone.blocks.0.mlstm_layer";
    assert!(file.tensor(&format!("{block}.q.scales")).is_ok());
    assert!(
        file.tensor(&format!("{block}.igate_preact.scales"))
            .is_err()
    );
    let model = crate::common::load(&made);
    assert_eq!(model.info().quantization_bits, Some(4));
    let (tokens, _) = reply(model.as_ref(), &ids(6, 40), &fresh(24));
    assert_eq!(tokens.len(), 24);
}

/// Compares xLSTM's `use_bias` with numpy (`tools/golden/xlstm_bias.py`), in prefill and token by
/// token.
#[test]
fn biases_of_xlstm_are_those_of_numpy() {
    let dir = fixture("xlstm_bias");
    let golden = crate::common::golden(&dir);
    let options = LoadOptions::new().with_backend("cpu");
    let model = inference::load_model(&dir, &options).unwrap();
    let tokens = model.as_token_model().unwrap();
    for case in golden["prompts"].as_array().unwrap() {
        let prompt = crate::common::ids(&case["tokens"]);
        let all = Prompt::Tokens(prompt.clone());
        let ours = tokens.logits(&all, true, &Interrupt::new()).unwrap();
        let rows = case["logits_all"].as_array().unwrap();
        let expected: Vec<f32> = rows.iter().flat_map(crate::common::floats).collect();
        let difference = max_difference(&ours.logits, &expected);
        assert!(difference < 1e-3, "{difference}");
        let said = crate::common::ids(&case["greedy"]);
        let actual = reply(model.as_ref(), &prompt, &fresh(said.len()));
        assert_eq!(actual.0, said);
    }
}
