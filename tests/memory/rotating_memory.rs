//! A bounded cache must not use more bytes or handles after 5,000 tokens than after 1,000. The
//! process must not grow either, because then a graph would be retained. A request must report its
//! own peak.
//!
//! The counters cover the whole process, so the test runs in a separate process.

use crate::common::{fixture, greedy};
use inference::{LoadOptions, Prompt};
use mlx_rs_core::memory;

/// The resident bytes of this process; 0 if the system does not report them.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<usize>().ok());
    kib.unwrap_or(0) << 10
}

#[test]
fn five_thousand_steps_in_a_circle_leave_memory_handles_and_graph_flat() {
    crate::alone::alone(
        "rotating_memory::five_thousand_steps_in_a_circle_leave_memory_handles_and_graph_flat",
        five_thousand_steps_in_a_circle_leave_memory_handles_and_graph_flat_alone,
    );
}

fn five_thousand_steps_in_a_circle_leave_memory_handles_and_graph_flat_alone() {
    let options = LoadOptions::new().with_backend("cpu").with_context_len(64);
    let model = inference::load_model(fixture("tiny").join("llama"), &options).unwrap();
    let mut stream = model
        .generate(&Prompt::Tokens((40..140).collect()), &greedy(5000))
        .unwrap();
    // The next step may already be computed in the background, and its temporary arrays count as
    // used. The smallest of several readings has none of them.
    let mut at = |n: usize| {
        let mut least = (i64::MAX, usize::MAX);
        for step in 0..n {
            drop(stream.next().unwrap().unwrap());
            if step + 50 >= n {
                least.0 = least.0.min(memory::live_arrays());
                least.1 = least.1.min(memory::active().unwrap());
            }
        }
        (least.0, least.1, resident())
    };
    let (handles, bytes, process) = at(1000);
    for step in 1..5 {
        let (now, used, all) = at(1000);
        assert!(
            (now - handles).abs() <= 8,
            "{handles} handles grew to {now} at {step}"
        );
        // An unbounded cache would need 3 layers * 2 * 32 values * 4 bytes = 768 bytes more per
        // token, which is 768 KB for 1,000 tokens.
        assert!(
            used <= bytes + (64 << 10),
            "{bytes} bytes grew to {used} at {step}"
        );
        // A step's graph has more than 50 nodes of about 400 bytes. If graphs were retained, 1,000
        // steps would need 20 MB.
        println!("{step}: {} KB more", all.saturating_sub(process) >> 10);
        assert!(
            all <= process + (8 << 20),
            "{process} bytes of the process grew to {all} at {step}"
        );
    }
    assert_eq!(stream.metrics().generated_tokens, 5000);
    drop(stream);

    let peak = |n: u32| {
        let prompt = Prompt::Tokens((0..n).map(|i| 5 + i % 90).collect());
        let options = greedy(2).with_cache_prompt(false);
        let stream = model.generate(&prompt, &options).unwrap();
        let metrics = stream.collect_output().unwrap().metrics;
        assert!(metrics.peak_memory_bytes >= metrics.active_memory_bytes);
        assert!(metrics.active_memory_bytes >= model.info().weight_bytes);
        let decode = metrics.decode_peak_memory_bytes;
        assert!((model.info().weight_bytes..=metrics.peak_memory_bytes).contains(&decode));
        (metrics.peak_memory_bytes, decode)
    };
    let ((before, _), (long, decode), (after, _)) = (peak(3), peak(500), peak(3));
    assert!(
        before < long && after < long,
        "{before}, {long}, then {after}: the peak of another request is reported"
    );
    assert!(
        decode < long,
        "the decode of a long prompt has its prefill's peak: {decode} and {long}"
    );
}
