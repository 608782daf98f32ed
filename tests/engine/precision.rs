//! Tests of the option for the precision of prefill. It must reach the kernels, and the model must
//! report it.

use crate::common::{fixture, has_amx, max_difference};
use inference::{ComputeType, Interrupt, LoadOptions, Precision, Prompt, TextModel};

/// Number of positions in the prompt. It is large enough for the kernels for many rows.
const PROMPT: u32 = 37;

/// Quantized models: 4 bits, 8 bits, a mixture of experts, and a mixture of quantization modes.
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
        // The kernels round each input by 0.5 %. After a few layers of random weights, the error is
        // a few percent of the norm of all logits.
        let square = |all: &mut dyn Iterator<Item = f32>| all.map(|v| v * v).sum::<f32>().sqrt();
        let both = exact_logits.iter().zip(&fast_logits);
        let off = square(&mut both.map(|(a, b)| a - b)) / square(&mut exact_logits.iter().copied());
        assert!(off < 0.05, "{name}: {off}");
        match fast.info().prompts.as_deref() {
            // Any difference shows that the option reached the kernels.
            Some("int8") => assert!(difference > 0.0, "{name}"),
            // If the CPU has matrix tiles, they take precedence. int8 remains possible for matrices
            // of other widths.
            Some("bfloat16x2") if tiles => {}
            Some("float32") => assert!(difference == 0.0, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
        // Kernels for few rows ignore the option.
        let few = [&exact, &fast].map(|model| logits(model.as_ref(), 9));
        assert!(max_difference(&few[0], &few[1]) == 0.0, "{name}");
    }
}

/// Without the option, prefill is as precise as decode if the instruction set supports it.
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

/// The kernels accumulate in float32, whatever the compute type. Only dense weights are stored in
/// the 16-bit type, so only their rounding may change the logits.
#[test]
fn half_types_keep_weights_and_compute_by_the_kernels() {
    let load = |name: &str, dtype| {
        let options = LoadOptions::new().with_backend("cpu").with_dtype(dtype);
        inference::load_model(fixture("tiny").join(name), &options).unwrap()
    };
    // The three models store weights in float32, in bfloat16 and in 4 bits.
    for name in ["llama", "llama-bf16", "llama-q4"] {
        let plain = load(name, ComputeType::Float32);
        let wanted = logits(plain.as_ref(), PROMPT);
        let largest = wanted.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        // float16 has 11 significant bits, and bfloat16 has 8. The bounds allow a few roundings.
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
