//! Tests of the profile of a decode step. The times of the parts must add up to the step's time,
//! and a profiled step must compute what a plain step computes.

use std::collections::BTreeSet;

use crate::common::{fixture, greedy, tiny, tiny_names};
use crate::program::{output, stdout, text};
use inference::{CancelToken, ErrorKind, Interrupt, Prompt, StepPart, StepProfile};
use serde_json::Value;

const STEPS: usize = 3;

#[test]
fn the_parts_are_the_step_in_every_family() {
    if crate::alone::ran_elsewhere("profile::the_parts_are_the_step_in_every_family") {
        return;
    }
    let mut mixers = 0;
    for name in tiny_names() {
        let model = tiny(&name);
        let prompt = Prompt::Tokens(vec![5, 1, 7, 2, 9]);
        let options = greedy(STEPS);
        let profiled = model.as_profiled().unwrap();
        let measure = || {
            let profile = profiled.profile_steps(&prompt, &options, &Interrupt::new());
            profile.unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        let mut profile = measure();
        // The step's clock also includes time of other processes that ran between the parts.
        let apart = |profile: &StepProfile| profile.step_seconds - profile.sum();
        let allowed = |profile: &StepProfile| 0.05 * profile.step_seconds + 1e-4;
        for _ in 0..9 {
            if apart(&profile) < allowed(&profile) {
                break;
            }
            profile = measure();
        }
        let (difference, most) = (apart(&profile), allowed(&profile));
        assert!(
            (0.0..most).contains(&difference),
            "{name}: {difference} of {}",
            profile.step_seconds
        );
        assert!(profile.plain_step_seconds > 0.0, "{name}");
        assert_eq!(profile.steps, STEPS, "{name}");
        // The expected tokens: one for the prompt, two for warm-up steps, then two per measured
        // step.
        let tokens: Vec<u32> = model
            .generate(&prompt, &greedy(3 + 2 * STEPS))
            .unwrap()
            .map(|token| token.unwrap().id)
            .collect();
        assert_eq!(profile.tokens, tokens, "{name}");
        let layers = model.info().num_layers;
        let timed_layers: BTreeSet<usize> = profile.parts.iter().filter_map(|p| p.layer).collect();
        assert!(timed_layers.into_iter().eq(0..layers), "{name}");
        for layer in 0..layers {
            let has = |part| {
                let mut times = profile.parts.iter();
                times.any(|p| p.layer == Some(layer) && p.part == part && p.seconds > 0.0)
            };
            let attention = [StepPart::Qkv, StepPart::Attention, StepPart::Output].map(has);
            let mixer = has(StepPart::Mixer);
            mixers += usize::from(mixer);
            assert!(
                attention == [true; 3] || mixer,
                "{name}, layer {layer}: {:?}",
                profile.parts
            );
            // The time of a recurrent mixer includes the norm before the mixer.
            assert!(has(StepPart::Norm) || mixer, "{name}, layer {layer}");
        }
        for part in [StepPart::Embedding, StepPart::Head, StepPart::Sampling] {
            assert!(profile.total(part) > 0.0, "{name}: {part}");
        }
    }
    assert!(mixers > 0, "no recurrent layer was seen");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let model = tiny("llama");
    let profiled = model.as_profiled().unwrap();
    let prompt = Prompt::Tokens(vec![1, 2, 3]);
    let kind = |prompt: &Prompt, options, interrupt: &Interrupt| {
        let error = profiled.profile_steps(prompt, &options, interrupt);
        error.unwrap_err().kind()
    };
    let free = Interrupt::new();
    assert_eq!(kind(&prompt, greedy(0), &free), ErrorKind::InvalidOption);
    let empty = Prompt::Tokens(Vec::new());
    assert_eq!(kind(&empty, greedy(1), &free), ErrorKind::InvalidOption);
    let beyond = Prompt::Tokens(vec![u32::MAX]);
    assert_eq!(kind(&beyond, greedy(1), &free), ErrorKind::InvalidOption);
    let mut options = greedy(1);
    options.speculative.prompt_lookup = 2;
    assert_eq!(kind(&prompt, options, &free), ErrorKind::Unsupported);
    let cancel = CancelToken::new();
    cancel.cancel();
    let cancelled = Interrupt::new().with_cancel(cancel);
    assert_eq!(kind(&prompt, greedy(1), &cancelled), ErrorKind::Cancelled);
    model.close().unwrap();
    assert_eq!(kind(&prompt, greedy(1), &free), ErrorKind::Closed);
}

#[test]
fn the_program_says_the_parts_beside_a_plain_step() {
    let model = fixture("tiny/llama");
    let path = model.to_string_lossy();
    let flags = [
        "bench",
        "--model",
        &path,
        "--backend",
        "cpu",
        "--prompt-tokens",
        "8",
        "--generate-tokens",
        "6",
        "--repeat",
        "1",
        "--warmup",
        "0",
        "--profile",
    ];
    let output = output(&flags);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let profile = &report["profile"];
    assert_eq!(profile["steps"], 3);
    assert_eq!(profile["context"], 8 + 2);
    let layers = profile["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 3);
    let number = |value: &Value| value.as_f64().unwrap();
    let parts = profile["parts"].as_object().unwrap();
    let sum: f64 = parts.values().map(number).sum();
    assert!((sum - number(&profile["sum_seconds"])).abs() < 1e-9);
    for part in ["norm", "qkv", "attention", "mlp", "head", "sampling"] {
        assert!(number(&parts[part]) > 0.0, "{part}: {profile}");
    }
    let err = text(&output.stderr);
    assert!(err.contains("a plain one"), "{err}");
}
