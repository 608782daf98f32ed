//! Tests of KV caches in 16 bits and of packed ones (`--kv-bits`), on the CPU. For each cache type,
//! `same_bits.rs` tests that a reply does not depend on the other rows of its batch.

use std::path::Path;

use crate::common::{fixture, greedy, max_difference};
use inference::{Interrupt, LoadOptions, Precision, Prompt, TextModel};
use inference_formats::safetensors::SafetensorsCheckpoint;

/// Models with each kind of attention: fused, in separate operations, with windows, latent, or
/// computed by MLX. Also models with both recurrent and attention layers.
const MODELS: &[&str] = &[
    "llama",
    "qwen3-q8",
    "gemma3",
    "mistral-window",
    "gpt2",
    "deepseek",
    "olmo3",
    "phi3",
    "jamba",
    "falcon-h1",
    "gemma4-small",
    "llama4",
];

fn load(name: &str, options: LoadOptions) -> Box<dyn TextModel> {
    inference::load_model(fixture("tiny").join(name), &options.with_backend("cpu")).unwrap()
}

fn prompt(n: u32) -> Prompt {
    Prompt::Tokens((0..n).map(|i| 5 + (i * i * 7 + i * 13) % 90).collect())
}

fn logits(model: &dyn TextModel) -> Vec<f32> {
    let tokens = model.as_token_model().unwrap();
    let output = tokens.logits(&prompt(70), true, &Interrupt::new());
    output.unwrap().logits
}

/// The continuation of a prompt cache, and the number of its cached tokens.
fn continued(model: &dyn TextModel, file: &Path) -> (Vec<u32>, usize) {
    let caches = model.as_prompt_cache().unwrap();
    let stream = caches.continue_prompt_cache(file, &Prompt::Tokens(vec![9, 12]), &greedy(12));
    let output = stream.unwrap().collect_output().unwrap();
    (output.tokens, output.metrics.cached_tokens)
}

#[test]
fn logits_with_16_bits_are_near_those_with_32() {
    for name in MODELS {
        let plain = LoadOptions::new().with_precision(Precision::Exact);
        let wide = logits(load(name, plain.clone()).as_ref());
        let same = logits(load(name, plain.clone().with_kv_bits(32)).as_ref());
        assert_eq!(same, wide, "{name}");
        let half = load(name, plain.with_kv_bits(16));
        assert_eq!(half.info().cache.as_deref(), Some("float16"));
        let half = logits(half.as_ref());
        let difference = max_difference(&half, &wide);
        let largest = wide.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        // Gemma 4 does not scale its scores, so it differs most: 0.4 %.
        assert!(
            difference < 0.01 * largest,
            "{name}: {difference} of {largest}"
        );
        // Another cache type must change the logits.
        assert!(difference > 0.0, "{name}");
    }
}

#[test]
fn a_bounded_cache_has_16_bits_too() {
    let bounded = LoadOptions::new().with_context_len(24);
    let reply = |options: &LoadOptions| {
        let model = load("qwen3", options.clone());
        let stream = model.generate(&prompt(40), &greedy(12)).unwrap();
        stream.collect_output().unwrap().tokens
    };
    assert_eq!(reply(&bounded.clone().with_kv_bits(16)), reply(&bounded));
}

#[test]
fn prompt_caches_of_16_bits_are_written_and_read_again() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bound) in [
        ("llama", None),
        ("gemma3", None),
        ("qwen3", Some(24)),
        // Files of Falcon-H1 have our own format.
        ("falcon-h1", None),
    ] {
        let options = LoadOptions::new().with_context_len(bound);
        let [wide, half] = [32, 16].map(|bits| load(name, options.clone().with_kv_bits(bits)));
        let file = |bits: u32| dir.path().join(format!("{name}-{bits}.safetensors"));
        for (model, bits, dtype) in [(&wide, 32, "F32"), (&half, 16, "F16")] {
            let caches = model.as_prompt_cache().unwrap();
            let saved = caches.save_prompt_cache(&prompt(40), &file(bits), &Interrupt::new());
            assert_eq!(saved.unwrap(), 40);
            let tensors = SafetensorsCheckpoint::open_file(&file(bits)).unwrap();
            let mut keys = tensors
                .names()
                .filter(|n| n.ends_with("keys") || *n == "0.0");
            let key = keys.next().unwrap();
            let info = tensors.info(key).unwrap();
            assert_eq!(info.dtype.to_string(), dtype, "{name}: {key}");
        }
        let Prompt::Tokens(mut whole) = prompt(40) else {
            panic!("tokens");
        };
        whole.extend([9, 12]);
        let fresh = greedy(12).with_cache_prompt(false);
        for (model, bits) in [(&wide, 32), (&half, 16)] {
            let stream = model
                .generate(&Prompt::Tokens(whole.clone()), &fresh)
                .unwrap();
            let reply = stream.collect_output().unwrap().tokens;
            assert_eq!(
                continued(model.as_ref(), &file(bits)),
                (reply, 40),
                "{name}"
            );
        }
        // Files of the other type are converted.
        assert_eq!(continued(wide.as_ref(), &file(16)).1, 40);
        assert_eq!(continued(half.as_ref(), &file(32)).1, 40);
    }
}

#[test]
fn the_reported_size_of_a_token_is_that_in_prompt_cache_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cache.safetensors");
    for name in ["llama", "qwen3", "deepseek-v3"] {
        for bits in [32, 16, 8] {
            let options = LoadOptions::new().with_kv_bits(bits).with_kv_group_size(32);
            let model = match inference::load_model(
                fixture("tiny").join(name),
                &options.with_backend("cpu"),
            ) {
                Ok(model) => model,
                // The heads of this model are narrower than the groups.
                Err(e) if e.message().contains("kv_group_size") && bits == 8 => continue,
                Err(e) => panic!("{name}, {bits}: {e}"),
            };
            let caches = model.as_prompt_cache().unwrap();
            (caches.save_prompt_cache(&prompt(40), &file, &Interrupt::new())).unwrap();
            let tensors = SafetensorsCheckpoint::open_file(&file).unwrap();
            let stored: u64 = (tensors.names().filter(|name| name.contains('.')))
                .map(|name| tensors.info(name).unwrap().nbytes as u64)
                .sum();
            let reported = model.info().cache_bytes_per_token;
            assert_eq!(reported, Some(stored / 40), "{name}, {bits} bits");
        }
    }
    // The layers of Mamba have states of fixed size.
    let model = load("mamba", LoadOptions::new());
    assert_eq!(model.info().cache_bytes_per_token, Some(0));
}

#[test]
fn logits_with_packed_caches_are_near_those_with_32_bits() {
    let wide = logits(load("qwen3-q8", LoadOptions::new()).as_ref());
    let largest = wide.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    let mut before = 0.0;
    for (bits, most) in [(8, 0.02), (6, 0.08), (5, 0.15), (4, 0.3), (3, 0.6)] {
        let packed = |start| {
            let options = LoadOptions::new().with_kv_bits(bits).with_kv_group_size(32);
            let model = load("qwen3-q8", options.with_quantized_kv_start(start));
            logits(model.as_ref())
        };
        let off = max_difference(&packed(0), &wide);
        assert!(off < most * largest, "{bits} bits: {off} of {largest}");
        assert!(
            off > before,
            "fewer bits cause a greater error: {off}, {before}"
        );
        before = off;
        // No position is packed before the start.
        assert_eq!(packed(1000), wide);
    }
}

/// Rows of a batch begin to pack their positions at different times.
#[test]
fn a_batch_of_packed_and_unpacked_rows_equals_single_requests() {
    let options = LoadOptions::new().with_kv_bits(8).with_kv_group_size(32);
    let model = load("qwen3-q8", options.with_quantized_kv_start(24));
    let prompts = [40, 10, 22].map(prompt);
    let options = greedy(12).with_cache_prompt(false);
    let together = model.batch_generate(&prompts, &options).unwrap();
    for (prompt, result) in prompts.iter().zip(together) {
        let alone = model.generate(prompt, &options).unwrap();
        let alone = alone.collect_output().unwrap().tokens;
        let ids: Vec<u32> = result.tokens.iter().map(|token| token.id).collect();
        assert_eq!(ids, alone);
    }
}
