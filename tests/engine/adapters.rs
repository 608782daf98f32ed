//! Adapters that requests name: batches of requests with different adapters of one model.

use std::path::{Path, PathBuf};

use crate::common::{fixture, greedy};
use inference::{
    BatchEvent, BatchSession, ErrorKind, GenerateOptions, LoadOptions, Prompt, TextModel, Token,
};

/// A copy of an adapter with another factor.
fn scaled(name: &str, scale: f32, to: &Path) -> PathBuf {
    let from = fixture("training").join(name);
    std::fs::create_dir(to).unwrap();
    let config = std::fs::read_to_string(from.join("adapter_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["lora_parameters"]["scale"] = scale.into();
    std::fs::write(to.join("adapter_config.json"), config.to_string()).unwrap();
    let weights = "adapters.safetensors";
    std::fs::copy(from.join(weights), to.join(weights)).unwrap();
    to.to_owned()
}

fn load(model: &str, options: &LoadOptions) -> Box<dyn TextModel> {
    inference::load_model(fixture("tiny").join(model), options).unwrap()
}

fn cpu() -> LoadOptions {
    LoadOptions::new().with_backend("cpu")
}

/// A reply: its tokens, and the bits of the logits of each.
type Reply = Vec<(u32, Vec<u32>)>;

fn of(token: &Token) -> (u32, Vec<u32>) {
    let logits = token.logits.as_deref().unwrap_or_default();
    (token.id, logits.iter().map(|x| x.to_bits()).collect())
}

fn alone(model: &dyn TextModel, prompt: &Prompt, options: &GenerateOptions) -> Reply {
    let stream = model.generate(prompt, options).unwrap();
    stream.map(|token| of(&token.unwrap())).collect()
}

/// Returns the replies of a session. Each request starts `apart` steps after the previous request.
fn together(
    model: &dyn TextModel,
    requests: &[(Prompt, GenerateOptions)],
    apart: usize,
) -> Vec<Reply> {
    let mut session: Box<dyn BatchSession> = model.batch_session().unwrap();
    let mut rows = Vec::new();
    let mut replies = vec![Reply::new(); requests.len()];
    let mut step = |session: &mut Box<dyn BatchSession>, rows: &[inference::RequestId]| {
        for event in session.step().unwrap() {
            let at = rows.iter().position(|row| *row == event.row()).unwrap();
            match event {
                BatchEvent::Token { token, .. } => replies[at].push(of(&token)),
                BatchEvent::Failed { error, .. } => panic!("request {at}: {error}"),
                _ => {}
            }
        }
    };
    for (prompt, options) in requests {
        rows.push(session.add(prompt, options).unwrap());
        for _ in 0..apart {
            step(&mut session, &rows);
        }
    }
    while !session.is_empty() {
        step(&mut session, &rows);
    }
    replies
}

fn prompt(seed: u32) -> Prompt {
    let length = 5 + seed * 9;
    Prompt::Tokens((0..length).map(|i| 3 + (i * 7 + seed * 5) % 60).collect())
}

fn with(adapter: Option<&str>, cached: bool) -> GenerateOptions {
    greedy(12)
        .with_logits(true)
        .with_cache_prompt(cached)
        .with_adapter(adapter.map(str::to_owned))
}

/// Requests with different adapters of one model, and without one, run in one session. Each gets,
/// to the bit, the reply that it gets alone from a model that was loaded with its adapter.
#[test]
fn replies_in_a_batch_are_those_of_the_adapter_alone() {
    let dir = tempfile::tempdir().unwrap();
    let training = |name: &str| fixture("training").join(name);
    let other = |name: &str, scale: f32| {
        let to = dir.path().join(format!("{name}{scale}"));
        scaled(name, scale, &to)
    };
    let sets: [(&str, Vec<PathBuf>); 5] = [
        // The first three share passes; the others change other layers.
        (
            "llama",
            vec![
                training("llama-1"),
                other("llama-1", -9.0),
                other("llama-1", 20.0),
                training("llama-4"),
                training("llama-dora"),
            ],
        ),
        // Whole weights and an embedding.
        ("llama", vec![training("llama-full"), training("llama-1")]),
        (
            "gemma3-text",
            vec![training("gemma3-1"), other("gemma3-1", -9.0)],
        ),
        // Experts cannot share passes.
        (
            "qwen3-moe",
            vec![training("qwen3-moe-1"), other("qwen3-moe-1", -9.0)],
        ),
        ("llama-tied-gqa", vec![training("llama-tied-table")]),
    ];
    for (name, adapters) in sets {
        let model = load(name, &cpu());
        let names: Vec<String> = (0..adapters.len()).map(|i| format!("a{i}")).collect();
        let mut requests = Vec::new();
        let mut expected = Vec::new();
        for (i, adapter) in adapters.iter().enumerate() {
            model.add_adapter(&names[i], adapter).unwrap();
            let own = load(name, &cpu().with_adapter_path(adapter));
            for seed in [i as u32, 3] {
                requests.push((prompt(seed), with(Some(&names[i]), true)));
                expected.push(alone(own.as_ref(), &prompt(seed), &with(None, false)));
            }
        }
        for seed in [0, 3] {
            requests.push((prompt(seed), with(None, true)));
            expected.push(alone(model.as_ref(), &prompt(seed), &with(None, false)));
        }
        let differ = |i: usize| expected[1] != expected[i];
        assert!(
            differ(3) && differ(expected.len() - 1),
            "{name}: an adapter changes nothing"
        );
        // In the second round, the prompts come from the caches of the first.
        for apart in [0, 2] {
            let replies = together(model.as_ref(), &requests, apart);
            for (i, (reply, expected)) in replies.iter().zip(&expected).enumerate() {
                let (got, expected_ids): (Vec<u32>, Vec<u32>) = (
                    reply.iter().map(|t| t.0).collect(),
                    expected.iter().map(|t| t.0).collect(),
                );
                assert_eq!(got, expected_ids, "{name}, {apart} apart, request {i}");
                let same = reply == expected;
                assert!(same, "{name}, {apart} apart, request {i}: other bits");
            }
        }
        for (i, (prompt, options)) in requests.iter().enumerate() {
            let reply = alone(model.as_ref(), prompt, options);
            assert!(reply == expected[i], "{name}, alone, request {i}");
        }
    }
}

/// An adapter that a request names replaces the model's own adapter for this request.
#[test]
fn a_named_adapter_replaces_the_models_own() {
    let own = fixture("training/llama-4");
    let other = fixture("training/llama-1");
    let model = load("llama", &cpu().with_adapter_path(&own));
    model.add_adapter("other", &other).unwrap();
    let expected = |adapter: &Path| {
        let model = load("llama", &cpu().with_adapter_path(adapter));
        alone(model.as_ref(), &prompt(2), &with(None, false))
    };
    let requests = [
        (prompt(2), with(None, true)),
        (prompt(2), with(Some("other"), true)),
    ];
    let expected = vec![expected(&own), expected(&other)];
    assert_ne!(expected[0], expected[1]);
    assert!(together(model.as_ref(), &requests, 0) == expected);
}

/// Drafts of the prompt lookup are checked with the request's adapter.
#[test]
fn adapters_speculate() {
    let dir = tempfile::tempdir().unwrap();
    let model = load("llama", &cpu());
    let other = scaled("llama-1", -9.0, &dir.path().join("other"));
    model
        .add_adapter("a", &fixture("training/llama-1"))
        .unwrap();
    model.add_adapter("b", &other).unwrap();
    let ids = |replies: &[Reply]| -> Vec<Vec<u32>> {
        let ids = |reply: &Reply| reply.iter().map(|token| token.0).collect();
        replies.iter().map(ids).collect()
    };
    let request = |name: Option<&str>, lookup: usize| {
        let options = with(name, false)
            .with_max_tokens(40)
            .with_prompt_lookup(lookup);
        (prompt(3), options.with_logits(false))
    };
    let names = [Some("a"), Some("b"), None, Some("a")];
    let plain = names.map(|name| request(name, 0));
    let guessed = names.map(|name| request(name, 2));
    let expected = ids(&together(model.as_ref(), &plain, 0));
    assert_eq!(ids(&together(model.as_ref(), &guessed, 1)), expected);
}

#[test]
fn bad_adapters_are_refused() {
    let model = load("llama", &cpu());
    let good = fixture("training/llama-1");
    model.add_adapter("a", &good).unwrap();
    let kind = |name: &str, path: &Path| model.add_adapter(name, path).unwrap_err().kind();
    assert_eq!(kind("a", &good), ErrorKind::InvalidOption);
    assert_eq!(kind("", &good), ErrorKind::InvalidOption);
    let gemma = fixture("training/gemma3-1");
    assert_eq!(kind("b", &gemma), ErrorKind::InvalidModel);
    let options = with(Some("b"), true);
    let error = model.generate(&prompt(1), &options).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(error.to_string().contains("there are: a"), "{error}");
    assert!(model.drop_adapter("a").unwrap());
    assert!(!model.drop_adapter("a").unwrap());
    assert!(model.generate(&prompt(1), &with(Some("a"), true)).is_err());
    model.close().unwrap();
    assert_eq!(kind("a", &good), ErrorKind::Closed);
}
