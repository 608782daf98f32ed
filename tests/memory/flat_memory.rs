//! Long generations hold no more handles and bytes at their end than at their start.
//!
//! The counters belong to the whole process, so the test runs in one of its own.

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
    // One block keeps the cache, which must grow, small beside what a retained graph would be.
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
        // Keys and values in float32, a chunk of 256 positions ahead, twice while growing.
        let row = 2 * info.num_layers * info.num_kv_heads * info.head_dim * 4;
        let allowed = bytes + 2 * row * (step * 1000 + 512) + (1 << 20);
        assert!(
            used < allowed,
            "{bytes} bytes grew to {used}, more than {allowed}, at {step}"
        );
    }
    assert_eq!(stream.metrics().generated_tokens, 5000);
}
