//! Tests that sampling does not copy logits to the host. With any options that the device can
//! compute, a call only builds the graph. It must not compute or copy an array with an element for
//! each token of a large vocabulary.
//!
//! The memory counter applies to the whole process, so this test runs in a separate process.

use inference::{GenerateOptions, LogitsProcessorFactory};
use metal_backend::sample::{self, Context, Sampler};
use mlx_rs_core::random::{Key, normal};
use mlx_rs_core::{Device, Dtype, Stream, memory};

const VOCABULARY: usize = 151_936;

/// Returns the number of bytes that one call of sampling allocates before its result is evaluated.
fn allocated(options: &GenerateOptions, on_cpu: bool) -> usize {
    let context = Context {
        vocabulary: VOCABULARY,
        eos: &[2],
        newline: &[13],
        grammars: None,
        on_cpu,
    };
    let mut sampler = Sampler::new(options, &[1, 2, 3], &context).unwrap();
    let key = Key::new(1).unwrap();
    let logits = normal(0.0, 3.0, &[1, VOCABULARY as i32], Dtype::Float32, &key).unwrap();
    let before = memory::active().unwrap();
    let drawn = sample::sample(&mut [&mut sampler], &logits).unwrap();
    let after = memory::active().unwrap();
    // The graph must be valid, so the result is computed.
    let token: u32 = drawn.tokens.item().unwrap();
    assert!((token as usize) < VOCABULARY);
    if options.output.logprobs.is_some() {
        assert_eq!(drawn.logprobs.unwrap().row(0, 5).unwrap().1.len(), 5);
    }
    after.saturating_sub(before)
}

#[test]
fn a_large_vocabulary_is_neither_computed_nor_copied() {
    crate::alone::alone(
        "sampling_stays_lazy::a_large_vocabulary_is_neither_computed_nor_copied",
        a_large_vocabulary_is_neither_computed_nor_copied_alone,
    );
}

fn a_large_vocabulary_is_neither_computed_nor_copied_alone() {
    let options = GenerateOptions::new()
        .with_temperature(0.8)
        .with_seed(1)
        .with_top_p(0.9)
        .with_min_p(0.01)
        .with_repeat_penalty(1.1)
        .with_presence_penalty(0.5)
        .with_frequency_penalty(0.5)
        .with_logit_bias([(5, 1.0)])
        .with_banned_tokens([6, 7])
        .with_min_tokens(4)
        .with_logprobs(5);
    let cpu = Stream::default_of(Device::cpu()).unwrap();
    cpu.scope(|| {
        for on_cpu in [false, true] {
            for options in [
                options.clone(),
                options.clone().with_top_k(40),
                options.clone().with_xtc_probability(1.0),
                GenerateOptions::new(),
            ] {
                let bytes = allocated(&options, on_cpu);
                assert!(bytes < 1 << 16, "{bytes} bytes by {options:?}");
            }
            // A processor that copies the logits must raise the counter. This shows that the
            // counter works.
            let copying = LogitsProcessorFactory::new(|| {
                |_: &[u32], _: &[u32], logits: &mut [f32]| {
                    logits[0] = 1.0;
                    Ok(())
                }
            });
            let options = GenerateOptions::new().with_logits_processors([copying]);
            let bytes = allocated(&options, on_cpu);
            assert!(bytes >= 4 * VOCABULARY, "{bytes} bytes");
        }
    });
}
