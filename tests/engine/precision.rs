//! Tests of the precision of prompts: the option reaches the kernels, and the model reports it.

use crate::common::{fixture, has_amx, max_difference};
use inference::{ComputeType, Interrupt, LoadOptions, Precision, Prompt, TextModel};

/// The number of positions in the prompt, enough for products of many rows.
const PROMPT: u32 = 37;

/// Quantized models: 4 and 8 bits, a mixture of experts, and several modes.
const QUANTIZED: [&str; 4] = ["llama-q4", "qwen3-q8", "mixtral-q4", "llama-modes"];

fn load(name: &str, precision: Precision) -> Box<dyn TextModel> {
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_precision(precision);
    inference::load_model(fixture("tiny").join(name), &options).unwrap()
}

fn logits(model: &dyn TextModel, count: u32) -> Vec<f32> {
    let vocab = u32::try_from(model.info().vocab_size).unwrap();
    let ids = (0..count).map(|i| (i * i * 7 + i * 13 + 5) % vocab);
    let model = model.as_token_model().unwrap();
    (model
        .logits(&Prompt::Tokens(ids.collect()), true, &Interrupt::new())
        .unwrap())
    .logits
}

#[test]
fn fast_prompts_are_near_exact_ones_and_named() {
    for name in QUANTIZED {
        let [exact, fast] = [Precision::Exact, Precision::Fast].map(|p| load(name, p));
        let tiles = has_amx() && matches!(exact.info().quantization_bits, Some(4 | 8));
        let usual = if tiles { "bfloat16x2" } else { "float32" };
        assert_eq!(exact.info().prompts.as_deref(), Some(usual), "{name}");
        let (exact_logits, fast_logits) = (
            logits(exact.as_ref(), PROMPT),
            logits(fast.as_ref(), PROMPT),
        );
        let difference = max_difference(&exact_logits, &fast_logits);
        // Each input is rounded by 0.5 %. Through a few layers of random weights, that is a few
        // percent of all logits together.
        let square = |all: &mut dyn Iterator<Item = f32>| all.map(|v| v * v).sum::<f32>().sqrt();
        let both = exact_logits.iter().zip(&fast_logits);
        let off = square(&mut both.map(|(a, b)| a - b)) / square(&mut exact_logits.iter().copied());
        assert!(off < 0.05, "{name}: {off}");
        match fast.info().prompts.as_deref() {
            // A different rounding shows that the option reached the kernels.
            Some("int8") => assert!(difference > 0.0, "{name}"),
            // Tiles take precedence; matrices of other widths may use integers.
            Some("bfloat16x2") if tiles => {}
            Some("float32") => assert!(difference == 0.0, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
        // Products of few rows do not depend on the option.
        let few = [&exact, &fast].map(|model| logits(model.as_ref(), 9));
        assert!(max_difference(&few[0], &few[1]) == 0.0, "{name}");
    }
}

/// Without the option, prompts are as precise as decode, if the instruction set supports that.
#[test]
fn prompts_are_integers_of_16_bits_by_default() {
    for name in QUANTIZED {
        let exact = load(name, Precision::Exact);
        let options = LoadOptions::new().with_backend("cpu");
        let usual = inference::load_model(fixture("tiny").join(name), &options).unwrap();
        let (wanted, actual) = (
            logits(exact.as_ref(), PROMPT),
            logits(usual.as_ref(), PROMPT),
        );
        let difference = max_difference(&wanted, &actual);
        let largest = wanted.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        assert!(
            difference < 2e-3 * largest,
            "{name}: {difference} {largest}"
        );
        match usual.info().prompts.as_deref() {
            Some("int16") => assert!(difference > 0.0, "{name}"),
            Some("bfloat16x2") if has_amx() => {}
            Some("float32") => assert!(difference == 0.0, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// The kernels compute in float32. Dense weights are in the half type, so only their rounding
/// differs.
#[test]
fn half_types_keep_weights_and_compute_by_the_kernels() {
    let load = |name: &str, dtype| {
        let options = LoadOptions::new().with_backend("cpu").with_dtype(dtype);
        inference::load_model(fixture("tiny").join(name), &options).unwrap()
    };
    // The models are stored in float32, in bfloat16 and in 4 bits.
    for name in ["llama", "llama-bf16", "llama-q4"] {
        let plain = load(name, ComputeType::Float32);
        let wanted = logits(plain.as_ref(), PROMPT);
        let largest = wanted.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        // The errors are a few roundings to 11 and to 8 bits.
        for (dtype, allowed) in [(ComputeType::Float16, 4e-3), (ComputeType::BFloat16, 3e-2)] {
            let half = load(name, dtype);
            assert_eq!(half.info().compute_type, Some(ComputeType::Float32));
            assert!(half.info().weight_bytes <= plain.info().weight_bytes);
            let actual = logits(half.as_ref(), PROMPT);
            let difference = max_difference(&actual, &wanted);
            assert!(
                difference <= allowed * largest,
                "{name} {dtype}: {difference} {largest}"
            );
        }
    }
}
