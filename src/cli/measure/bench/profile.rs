//! `mlx bench --profile`: the time of a decode step by part and by layer.

use std::collections::BTreeMap;

use inference::{
    CancelToken, GenerateOptions, Interrupt, Prompt, StepPart, StepProfile, TextModel,
};
use serde_json::{Value, json};

use crate::cli::terminal::console::{Console, table};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// Number of unmeasured steps: the warm-up steps, and one for the prompt's token.
const BESIDE: usize = 3;

/// Number of profiled steps when `tokens` tokens are generated. As many steps run without
/// profiling.
fn steps(tokens: usize) -> usize {
    (tokens / 2).max(1)
}

/// Number of positions after the prompt that the profile needs.
pub fn positions(tokens: usize) -> usize {
    steps(tokens).saturating_mul(2).saturating_add(BESIDE)
}

/// Measures the steps after `prompt`, prints the result and returns it as JSON.
pub fn run(
    model: &dyn TextModel,
    prompt: &Prompt,
    tokens: usize,
    console: &mut Console<'_>,
) -> Result<Value, Failure> {
    let profiled = model.as_profiled().ok_or_else(|| {
        Failure::usage(
            "--profile needs a backend that measures the parts of a step, and a model that is \
             whole in this process: metal, cuda or cpu without `mlx launch`",
        )
    })?;
    let cancel = CancelToken::new();
    let _watch = cancel_on_interrupt(&cancel);
    let interrupt = Interrupt::new().with_cancel(cancel);
    let mut options = GenerateOptions::default();
    options.max_tokens = steps(tokens);
    let profile = profiled.profile_steps(prompt, &options, &interrupt)?;
    for line in lines(&profile) {
        console.note(&line);
    }
    Ok(report(&profile))
}

/// The seconds of each part of one layer, or of the parts outside layers.
fn of_layer(profile: &StepProfile, layer: Option<usize>) -> BTreeMap<StepPart, f64> {
    let of_this_layer = profile.parts.iter().filter(|time| time.layer == layer);
    of_this_layer
        .map(|time| (time.part, time.seconds))
        .collect()
}

fn layers(profile: &StepProfile) -> usize {
    let numbers = profile.parts.iter().filter_map(|time| time.layer);
    numbers.max().map_or(0, |last| last + 1)
}

/// The parts whose time is not zero.
fn parts(profile: &StepProfile) -> Vec<StepPart> {
    let used = |part: &StepPart| profile.parts.iter().any(|time| time.part == *part);
    StepPart::ALL.into_iter().filter(used).collect()
}

fn report(profile: &StepProfile) -> Value {
    let named = |times: BTreeMap<StepPart, f64>| -> BTreeMap<&str, f64> {
        (times.into_iter())
            .map(|(part, seconds)| (part.name(), seconds))
            .collect()
    };
    let totals = parts(profile);
    let totals = totals.into_iter().map(|part| (part, profile.total(part)));
    let layers: Vec<_> = (0..layers(profile))
        .map(|layer| named(of_layer(profile, Some(layer))))
        .collect();
    json!({
        "steps": profile.steps,
        "context": profile.context,
        "step_seconds": profile.step_seconds,
        "plain_step_seconds": profile.plain_step_seconds,
        "sum_seconds": profile.sum(),
        "parts": named(totals.collect()),
        "shared": named(of_layer(profile, None)),
        "layers": layers,
    })
}

/// Microseconds as text.
fn micros(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}

fn lines(profile: &StepProfile) -> Vec<String> {
    let all = parts(profile);
    let mut rows = vec![
        [String::from("microseconds")]
            .into_iter()
            .chain(all.iter().map(|part| part.name().to_owned()))
            .collect::<Vec<_>>(),
    ];
    let row = |name: String, seconds: &dyn Fn(StepPart) -> Option<f64>| {
        let cells = all.iter().map(|part| seconds(*part));
        let cells = cells.map(|cell| cell.map_or_else(|| String::from("-"), micros));
        [name].into_iter().chain(cells).collect::<Vec<_>>()
    };
    for layer in 0..layers(profile) {
        let times = of_layer(profile, Some(layer));
        rows.push(row(format!("layer {layer}"), &|part| {
            times.get(&part).copied()
        }));
    }
    let shared = of_layer(profile, None);
    rows.push(row("shared".into(), &|part| shared.get(&part).copied()));
    rows.push(row("all".into(), &|part| Some(profile.total(part))));
    let sum = profile.sum();
    let share = |part: StepPart| match sum > 0.0 {
        true => format!("{:.1} %", 100.0 * profile.total(part) / sum),
        false => String::from("-"),
    };
    rows.push(
        [String::from("share")]
            .into_iter()
            .chain(all.iter().map(|part| share(*part)))
            .collect(),
    );
    let mut lines = table(&rows);
    lines.push(format!(
        "a step in parts takes {} us (the parts together {} us), a plain one {} us; means of {} \
         steps after {} tokens",
        micros(profile.step_seconds),
        micros(sum),
        micros(profile.plain_step_seconds),
        profile.steps,
        profile.context,
    ));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::{self, Streams};
    use inference::PartTime;

    fn profile() -> StepProfile {
        let mut profile = StepProfile::default();
        profile.steps = 4;
        profile.context = 9;
        profile.step_seconds = 8e-6;
        profile.plain_step_seconds = 5e-6;
        profile.parts = vec![
            PartTime::new(None, StepPart::Head, 2e-6),
            PartTime::new(Some(0), StepPart::Qkv, 1e-6),
            PartTime::new(Some(0), StepPart::Mlp, 2e-6),
            PartTime::new(Some(1), StepPart::Mlp, 3e-6),
        ];
        profile
    }

    #[test]
    fn a_row_a_layer_and_the_shares_of_the_sum() {
        let lines = lines(&profile());
        let cells = |line: &str| {
            line.split_whitespace()
                .map(String::from)
                .collect::<Vec<_>>()
        };
        assert_eq!(cells(&lines[0]), ["microseconds", "qkv", "mlp", "head"]);
        assert_eq!(cells(&lines[1]), ["layer", "0", "1.0", "2.0", "-"]);
        assert_eq!(cells(&lines[2]), ["layer", "1", "-", "3.0", "-"]);
        assert_eq!(cells(&lines[3]), ["shared", "-", "-", "2.0"]);
        assert_eq!(cells(&lines[4]), ["all", "1.0", "5.0", "2.0"]);
        assert_eq!(
            cells(&lines[5]),
            ["share", "12.5", "%", "62.5", "%", "25.0", "%"]
        );
        assert!(lines[6].contains("takes 8.0 us (the parts together 8.0 us)"));
        assert!(lines[6].contains("a plain one 5.0 us; means of 4 steps after 9 tokens"));
    }

    #[test]
    fn the_report_has_layers_in_order() {
        let report = report(&profile());
        assert_eq!(report["layers"].as_array().unwrap().len(), 2);
        assert_eq!(report["layers"][1], json!({"mlp": 3e-6}));
        assert_eq!(report["shared"], json!({"head": 2e-6}));
        let near = |value: &Value, expected: f64| {
            assert!(
                (value.as_f64().unwrap() - expected).abs() < 1e-15,
                "{value}"
            );
        };
        near(&report["parts"]["mlp"], 5e-6);
        near(&report["sum_seconds"], 8e-6);
    }

    #[test]
    fn a_backend_that_measures_nothing_is_refused() {
        let model = mock::base(&["a"]);
        let mut streams = Streams::new("");
        let prompt = Prompt::Tokens(vec![1]);
        let failure = run(&model, &prompt, 4, &mut streams.console()).map(|_| ());
        let failure = failure.unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.report().unwrap().contains("--profile"));
    }

    #[test]
    fn half_of_the_tokens_are_measured() {
        assert_eq!((steps(1), steps(2), steps(128)), (1, 1, 64));
        assert_eq!(positions(128), 131);
        assert_eq!(positions(usize::MAX), usize::MAX);
    }
}
