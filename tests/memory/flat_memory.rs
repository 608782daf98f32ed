//! A long generation must not use more handles or bytes at its end than at its start.
//!
//! The counters cover the whole process, so the test runs in a separate process.

use crate::common::{greedy, tiny};
use inference::Prompt;
use mlx_rs_core::memory;

#[test]
fn five_thousand_steps_leave_memory_and_handles_flat() {
    crate::alone::alone(
        "flat_memory::five_thousand_steps_leave_memory_and_handles_flat",
        five_thousand_steps_leave_memory_and_handles_flat_alone,
    );
}

fn five_thousand_steps_leave_memory_and_handles_flat_alone() {
    // A model with one block has a small KV cache, so a leaked graph would be visible beside it.
    let model = tiny("llama");
    let mut stream = model
        .generate(&Prompt::Tokens((40..60).collect()), &greedy(5000))
        .unwrap();
    let mut at = |n: usize| {
        stream.by_ref().take(n).for_each(|t| drop(t.unwrap()));
        (memory::live_arrays(), memory::active().unwrap())
    };
    let (handles, bytes) = at(1000);
    let info = model.info();
    for step in 1..5 {
        let (now, used) = at(1000);
        assert!(
            (now - handles).abs() <= 8,
            "{handles} handles grew to {now} at {step}"
        );
        // The float32 KV cache may grow by one chunk of 256 positions. While it grows, the old and
        // the new chunk exist.
        let row = 2 * info.num_layers * info.num_kv_heads * info.head_dim * 4;
        let allowed = bytes + 2 * row * (step * 1000 + 512) + (1 << 20);
        assert!(
            used < allowed,
            "{bytes} bytes grew to {used}, more than {allowed}, at {step}"
        );
    }
    assert_eq!(stream.metrics().generated_tokens, 5000);
}
