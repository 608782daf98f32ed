//! Long generations use no more handles and bytes at their end than at their start.
//!
//! The counters cover the whole process, so the test runs in a separate one.

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
    // With one block, the growing cache is small compared with a retained graph.
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
        // Keys and values in float32 may grow by a chunk of 256 positions, and exist twice while
        // growing.
        let row = 2 * info.num_layers * info.num_kv_heads * info.head_dim * 4;
        let allowed = bytes + 2 * row * (step * 1000 + 512) + (1 << 20);
        assert!(
            used < allowed,
            "{bytes} bytes grew to {used}, more than {allowed}, at {step}"
        );
    }
    assert_eq!(stream.metrics().generated_tokens, 5000);
}
