//! Measures the time per token without the model, on the best device of this machine. Compares
//! greedy sampling with all sampling filters together, for small and large vocabularies. Run it
//! with `cargo bench -p rust-mlx-metal-backend --bench sampling`.
//!
//! The difference from `greedy` is the cost of the filters and of the draw.

use divan::Bencher;
use inference::GenerateOptions;
use metal_backend::sample::{self, Context, Sampler, allow};
use mlx_rs_core::{Array, Device, DeviceKind, Stream};

fn main() {
    divan::main();
}

const VOCABULARIES: [usize; 3] = [32_000, 49_152, 151_936];

fn stream() -> Stream {
    let device = if Device::gpu().is_available() {
        Device::gpu()
    } else {
        Device::cpu()
    };
    Stream::default_of(device).unwrap()
}

/// Returns logits that are distributed like a model's: a few probable tokens and a long tail.
fn logits(vocabulary: usize) -> Array {
    let mut state = 1u64;
    let values: Vec<f32> = (0..vocabulary)
        .map(|_| {
            // The sum of twelve uniform numbers approximates a normal distribution.
            let sum: f32 = (0..12)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    (state >> 40) as f32 / (1u64 << 24) as f32
                })
                .sum();
            (sum - 6.0) * 3.0
        })
        .collect();
    let logits = Array::from_slice(&values, &[1, vocabulary as i32]).unwrap();
    logits.eval().unwrap();
    logits
}

fn run(bencher: Bencher<'_, '_>, vocabulary: usize, options: &GenerateOptions) {
    let stream = stream();
    let context = Context {
        vocabulary,
        eos: &[2],
        newline: &[13],
        grammars: None,
        on_cpu: stream.device().kind() == DeviceKind::Cpu,
    };
    let prompt: Vec<u32> = (0..64).collect();
    stream.scope(|| {
        let logits = logits(vocabulary);
        let mut sampler = Sampler::new(options, &prompt, &context).unwrap();
        bencher.bench_local(|| {
            let drawn = sample::sample(&mut [&mut sampler], &logits).unwrap();
            mlx_rs_core::eval(drawn.arrays().chain(sampler.state())).unwrap();
            drawn.tokens.item::<u32>().unwrap()
        });
    });
}

fn options() -> GenerateOptions {
    GenerateOptions::new().with_temperature(0.8).with_seed(1)
}

#[divan::bench(args = VOCABULARIES)]
fn greedy(bencher: Bencher<'_, '_>, vocabulary: usize) {
    run(bencher, vocabulary, &GenerateOptions::new());
}

#[divan::bench(args = VOCABULARIES)]
fn temperature(bencher: Bencher<'_, '_>, vocabulary: usize) {
    run(bencher, vocabulary, &options());
}

#[divan::bench(args = VOCABULARIES)]
fn top_p(bencher: Bencher<'_, '_>, vocabulary: usize) {
    run(bencher, vocabulary, &options().with_top_p(0.9));
}

#[divan::bench(args = VOCABULARIES)]
fn top_p_min_p_top_k(bencher: Bencher<'_, '_>, vocabulary: usize) {
    let options = options().with_top_p(0.9).with_min_p(0.02).with_top_k(40);
    run(bencher, vocabulary, &options);
}

#[divan::bench(args = VOCABULARIES)]
fn everything(bencher: Bencher<'_, '_>, vocabulary: usize) {
    let options = options()
        .with_top_p(0.9)
        .with_min_p(0.02)
        .with_top_k(40)
        .with_repeat_penalty(1.1)
        .with_presence_penalty(0.2)
        .with_frequency_penalty(0.2)
        .with_logit_bias([(5, 1.0), (6, -1.0)])
        .with_banned_tokens([7, 8, 9])
        .with_logprobs(5);
    run(bencher, vocabulary, &options);
}

/// Measures a grammar's mask: copying its bits to the device, and the choice among the allowed
/// tokens. Computing the bits is not included.
#[divan::bench(args = VOCABULARIES)]
fn mask(bencher: Bencher<'_, '_>, vocabulary: usize) {
    stream().scope(|| {
        let logits = logits(vocabulary);
        let words = vec![0x5555_5555u32; vocabulary.div_ceil(32)];
        bencher.bench_local(|| {
            let chosen = allow(&logits, &words).unwrap().argmax(-1, false).unwrap();
            chosen.item::<u32>().unwrap()
        });
    });
}
