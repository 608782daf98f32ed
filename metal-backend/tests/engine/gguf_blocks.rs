//! Tests that models with matrices in GGUF block formats compute the same as models with the
//! dequantized values in float32.

use std::path::PathBuf;

use inference::{Interrupt, LoadOptions, LoraConfig, Prompt, TextModel};
use inference_formats::Gguf;
use inference_formats::gguf::testing::Writer;
use inference_formats::quantization::dequantize;
use metal_backend::model_report::ModelReport;
use metal_backend::train::{AdapterKind, Sequence, Trainer, Tuning};

const WIDTH: usize = 256;
pub const VOCAB: usize = 64;

/// A block type: its number, the number of bytes and of weights in a block, and the byte positions
/// and values of the block's float16 numbers.
pub struct Kind(u32, usize, usize, &'static [(usize, f32)]);

const Q1_0: Kind = Kind(41, 18, 128, &[(0, 0.1)]);
pub const Q4_0: Kind = Kind(2, 18, 32, &[(0, 0.012)]);
pub const Q4_1: Kind = Kind(3, 20, 32, &[(0, 0.012), (2, -0.09)]);
pub const Q8_0: Kind = Kind(8, 34, 32, &[(0, 8e-4)]);
pub const Q4_K: Kind = Kind(12, 144, 256, &[(0, 4e-4), (2, 3e-3)]);
const Q5_0: Kind = Kind(6, 22, 32, &[(0, 0.006)]);
const Q5_1: Kind = Kind(7, 24, 32, &[(0, 0.006), (2, -0.095)]);
pub const Q5_K: Kind = Kind(13, 176, 256, &[(0, 2e-4), (2, 3e-3)]);
pub const Q6_K: Kind = Kind(14, 210, 256, &[(208, 1e-4)]);
const Q3_K: Kind = Kind(11, 110, 256, &[(108, 3e-3)]);
pub const TQ2_0: Kind = Kind(35, 66, 256, &[(64, 0.1)]);
pub const MXFP4: Kind = Kind(39, 17, 32, &[]);
const IQ4_NL: Kind = Kind(20, 18, 32, &[(0, 1.5e-3)]);
const IQ4_XS: Kind = Kind(23, 136, 256, &[(0, 1e-4)]);
const IQ3_S: Kind = Kind(21, 110, 256, &[(0, 8e-4)]);
const IQ2_XXS: Kind = Kind(16, 66, 256, &[(0, 2e-3)]);
const IQ1_S: Kind = Kind(19, 50, 256, &[(0, 2e-2)]);

impl Kind {
    /// Returns arbitrary blocks whose weights have magnitudes of about 0.1.
    fn blocks(&self, rows: usize, seed: usize) -> Vec<u8> {
        let Kind(_, block, weights, halves) = *self;
        let mut bytes: Vec<u8> = (0..rows * WIDTH / weights * block)
            .map(|i| ((i + seed * 7919).wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        for block in bytes.chunks_mut(block) {
            for &(at, value) in halves {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            }
            // The scale of this type is a byte with an exponent. The value makes the weights small.
            if halves.is_empty() {
                block[0] = 122;
            }
        }
        bytes
    }
}

/// Writes two equal llama models of one layer with a tied output. All matrices of the first are
/// blocks of this type; those of the second are float32.
pub fn twins(kind: &Kind) -> [(tempfile::TempDir, PathBuf); 2] {
    let names: Vec<String> = (0..VOCAB).map(|i| format!("t{i}")).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names[..3].copy_from_slice(&["a", "b", "ab"]);
    let mut head = Writer::default()
        .str("general.architecture", "llama")
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "default")
        .strings("tokenizer.ggml.tokens", &names)
        .strings("tokenizer.ggml.merges", &["a b"]);
    for (key, value) in [
        ("embedding_length", WIDTH),
        ("block_count", 1),
        ("feed_forward_length", WIDTH),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 4),
        ("context_length", 256),
    ] {
        head = head.u32(&format!("llama.{key}"), value as u32);
    }
    let ones: Vec<u8> = (0..WIDTH).flat_map(|_| 1f32.to_le_bytes()).collect();
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        head = head.tensor(&format!("{name}.weight"), &[WIDTH as u64], 0, &ones);
    }
    let (mut packed, mut plain) = (head.clone(), head);
    let layer = [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ];
    let layer = layer.map(|name| (format!("blk.0.{name}.weight"), WIDTH));
    let all = layer
        .into_iter()
        .chain([("token_embd.weight".to_owned(), VOCAB)]);
    for (seed, (name, rows)) in all.enumerate() {
        let dims = [WIDTH as u64, rows as u64];
        let bytes = kind.blocks(rows, seed);
        packed = packed.tensor(&name, &dims, kind.0, &bytes);
        let (_dir, path) = Writer::default().tensor("w", &dims, kind.0, &bytes).file();
        let stored = Gguf::open(&path).unwrap().tensors()["w"].kind;
        let floats = dequantize(stored, &bytes).unwrap();
        let floats: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
        plain = plain.tensor(&name, &dims, 0, &floats);
    }
    [packed.file(), plain.file()]
}

fn logits(model: &dyn TextModel, tokens: usize) -> Vec<f32> {
    let prompt = Prompt::Tokens((0..tokens as u32).map(|i| i * 7 % VOCAB as u32).collect());
    let model = model.as_token_model().unwrap();
    model
        .logits(&prompt, true, &Interrupt::new())
        .unwrap()
        .logits
}

#[test]
fn logits_are_those_of_the_expanded_numbers() {
    let options = LoadOptions::new().with_backend("cpu");
    for kind in [
        Q4_0, Q4_1, Q8_0, Q4_K, Q1_0, Q5_0, Q5_1, Q5_K, Q6_K, Q3_K, TQ2_0, MXFP4, IQ4_NL, IQ4_XS,
        IQ3_S, IQ2_XXS, IQ1_S,
    ] {
        let [packed, plain] = twins(&kind);
        let [ours, floats] = [&packed, &plain].map(|(_, path)| {
            inference::load_model(path, &options).unwrap_or_else(|e| panic!("{}: {e}", kind.0))
        });
        for tokens in [1, 5, 40] {
            let (ours, floats) = (logits(&*ours, tokens), logits(&*floats, tokens));
            assert_eq!(ours.len(), floats.len());
            let largest = floats.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(largest > 0.5, "{}: {largest}", kind.0);
            let pairs = ours.iter().zip(&floats);
            let off = pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            // The bound is relative to the largest logit, as in the tests of other formats.
            assert!(
                off < 2e-3 * largest.max(1.0),
                "{} {tokens}: {off} of {largest}",
                kind.0
            );
        }
        let report = ModelReport::read(&packed.1, Some("cpu"), None).unwrap();
        let (loaded, said) = (
            ours.info().weight_bytes as f64,
            report.memory.weights as f64,
        );
        assert!(
            (loaded / said - 1.0).abs() < 0.01,
            "{}: {loaded} and {said}",
            kind.0
        );
    }
}

#[test]
fn an_adapter_is_trained_on_six_bits() {
    let options = LoadOptions::new().with_backend("cpu");
    let batch = [Sequence::new(
        (0..20).map(|i| i * 7 % VOCAB as u32).collect(),
    )];
    let losses = twins(&Q6_K).map(|(_dir, path)| {
        let (lora, tuning) = (LoraConfig::new(), Tuning::default());
        let mut trainer = Trainer::load(&path, &options, &lora, AdapterKind::Lora, tuning).unwrap();
        for _ in 0..3 {
            trainer.step(&batch).unwrap();
        }
        let evaluation = trainer.evaluate(&batch).unwrap();
        evaluation.loss / evaluation.tokens as f64
    });
    let [packed, plain] = losses;
    assert!(
        (packed - plain).abs() < 1e-2 * plain.abs(),
        "{packed} and {plain}"
    );
}
