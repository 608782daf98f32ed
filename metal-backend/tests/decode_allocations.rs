//! Counts Rust's heap allocations for each token of a reply, in all threads, for one request and
//! for a batch. The number must not exceed a bound, and must not grow with the position. MLX's
//! allocations in C++ (graph nodes, arrays) do not use Rust's allocator and are not counted.
//!
//! The test is a separate binary, because it counts the allocations of the whole process.

#![forbid(unsafe_code)]

use std::path::Path;

use inference::{BatchEvent, GenerateOptions, LoadOptions, Prompt, TextModel};
use metal_backend as _;
use mlx_cpu_kernels::testing::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const PROMPT: u32 = 12;
/// The number of tokens in a reply. Together with the prompt, they fill most of the test models'
/// context of 256 tokens.
const TOKENS: usize = 224;
/// The number of sampled replies.
const SAMPLED: u64 = 8;

fn open(name: &str) -> Box<dyn TextModel> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let load = LoadOptions::new().with_backend("cpu");
    inference::load_model(path.join(name), &load).unwrap()
}

fn prompt(row: u32) -> Prompt {
    Prompt::Tokens((0..PROMPT).map(|i| 5 + (i * 7 + row) % 90).collect())
}

fn greedy() -> GenerateOptions {
    GenerateOptions::new()
        .with_max_tokens(TOKENS)
        .with_ignore_eos(true)
}

fn sampled(seed: u64) -> GenerateOptions {
    greedy()
        .with_temperature(0.8)
        .with_top_k(40)
        .with_top_p(0.9)
        .with_repeat_penalty(1.1)
        .with_seed(seed)
}

/// Returns the number of allocations of the process after each token of a reply.
fn of_stream(model: &dyn TextModel, options: &GenerateOptions) -> Vec<usize> {
    let mut at = Vec::with_capacity(TOKENS);
    for token in model.generate(&prompt(0), options).unwrap() {
        drop(token.unwrap());
        at.push(CountingAllocator::of_process());
    }
    assert_eq!(at.len(), TOKENS);
    at
}

/// Returns the number of allocations of the process after each step, for a batch of `rows` rows.
fn of_batch(model: &dyn TextModel, rows: u32) -> Vec<usize> {
    let mut session = model.batch_session().unwrap();
    for row in 0..rows {
        session.add(&prompt(row), &greedy()).unwrap();
    }
    let mut at = Vec::with_capacity(2 * TOKENS);
    while !session.is_empty() {
        for event in session.step().unwrap() {
            if let BatchEvent::Failed { error, .. } = event {
                panic!("{error}");
            }
        }
        at.push(CountingAllocator::of_process());
    }
    assert!(at.len() >= TOKENS);
    at
}

/// Returns the mean number of allocations per step in one third (0, 1 or 2) of the reply.
fn mean(at: &[usize], third: usize) -> f64 {
    let (first, last) = (third * TOKENS / 3, (third + 1) * TOKENS / 3 - 2);
    (at[last] - at[first]) as f64 / (last - first) as f64
}

/// The bounds are a few percent above the measured numbers, which are 142, 151 and 336 for the
/// first model. The measured numbers are equal for 1, 2 and 8 threads and for every instruction
/// set.
#[test]
fn a_token_takes_few_allocations_at_every_position() {
    for (name, one, batch_of_one, batch_of_four) in [
        ("llama-q4", 150.0, 160.0, 355.0),
        ("qwen3", 162.0, 171.0, 365.0),
        ("xlstm-q4", 373.0, 382.0, 715.0),
    ] {
        let model = open(name);
        let model = model.as_ref();
        // The first reply fills the caches of each thread, so its allocations are not counted.
        of_stream(model, &greedy());
        // The text of a token also needs allocations, whose number varies. So several sampled
        // replies are averaged.
        let replies = (1..=SAMPLED).map(|seed| of_stream(model, &sampled(seed)));
        for (what, runs, most) in [
            ("one reply", vec![of_stream(model, &greedy())], one),
            ("sampled replies", replies.collect(), one),
            ("a batch of 1", vec![of_batch(model, 1)], batch_of_one),
            ("a batch of 4", vec![of_batch(model, 4)], batch_of_four),
        ] {
            // Attention over few keys is not divided among threads, so the first third needs fewer
            // allocations and is not compared.
            let of = |third| runs.iter().map(|at| mean(at, third)).sum::<f64>() / runs.len() as f64;
            let [_, middle, late] = [0, 1, 2].map(of);
            println!("{name}, {what}: {middle:.1}, later {late:.1}");
            assert!(
                late <= 1.01 * middle + 3.0,
                "{name}, {what}: a step allocates {middle:.1} times, and later {late:.1} times"
            );
            // Without the CPU kernels, MLX computes each operation separately, which needs more
            // allocations.
            if mlx_rs_core::cpu::enabled() {
                assert!(
                    middle <= most,
                    "{name}, {what}: a step allocates {middle:.1} times, more than {most}"
                );
            }
        }
    }
}
