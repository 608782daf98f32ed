//! Tests of the backend `mlx_lm` with the real Python package. It must reply like the native
//! engine, honor the options, refuse invalid models, and end with its program. `mlxlm-backend`
//! tests faults of the protocol with a mock.
//!
//! They run with `MLX_TEST_PYTHON=1`, which `.ci/run` sets. The first run installs pinned Python
//! packages into a separate environment: see `common/python.rs`.
#![cfg(all(unix, feature = "mlxlm"))]

mod adapters;
mod harness;
mod options;
mod program;
mod prompt_caches;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{fixture, golden, greedy, ids, load, max_difference};
use inference::{
    Backend, CancelToken, ChatPrompt, ComputeType, ErrorKind, FinishReason, GenerateOptions,
    Interrupt, LoadOptions, Message, Prompt, TextModel,
};
use inference_conformance::{Check, Suite};
use rust_mlx::mlxlm_backend::{MlxLmBackend, Settings};
use serde_json::Value;

fn backend() -> MlxLmBackend {
    MlxLmBackend::new(Settings::new().with_python(crate::python::with_mlx_lm()))
}

/// Loads with the backend `mlx_lm` in float32, the type in which the backend `cpu` computes.
fn theirs(path: &Path) -> Box<dyn TextModel> {
    let options = LoadOptions::new().with_dtype(ComputeType::Float32);
    backend()
        .load_model(path, &options)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn tiny(name: &str) -> PathBuf {
    fixture("tiny").join(name)
}

fn refused(path: &Path) -> inference::Error {
    let loaded = backend().load_model(path, &LoadOptions::new());
    loaded.map(|_| ()).unwrap_err()
}

/// A copy of a tiny model that the test may damage.
fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(tiny(name)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    dir
}

/// Changes a JSON file of a model directory.
fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = dir.join(file);
    let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn it_keeps_the_contract() {
    let report = Suite::new(Arc::new(backend()), tiny("llama"))
        .require(Check::Eos)
        .run();
    println!("{report}");
    report.assert_passed();
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn greedy_tokens_text_and_logits_equal_those_of_cpu() {
    let names = [
        "llama",
        "llama-q4",
        "qwen3",
        "mistral",
        "mixtral",
        "qwen2",
        "granite",
        "olmo2",
        "olmo3",
        "exaone4",
        "exaone4-full",
        "glm4",
    ];
    for name in names {
        let (ours, theirs) = (load(&tiny(name)), theirs(&tiny(name)));
        let (our_tokens, their_tokens) = (
            ours.as_token_model().unwrap(),
            theirs.as_token_model().unwrap(),
        );
        let golden = golden(&tiny(name));
        for case in golden["prompts"].as_array().unwrap() {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let expected = ids(&case["greedy"]);
            let run = |model: &dyn TextModel| {
                let stream = model.generate(&prompt, &greedy(expected.len())).unwrap();
                stream.collect_output().unwrap()
            };
            let (a, b) = (run(ours.as_ref()), run(theirs.as_ref()));
            assert_eq!(a.tokens, b.tokens, "{name}");
            assert_eq!(b.tokens, expected, "{name}: not what the reference says");
            assert_eq!(a.text, b.text, "{name}");
            assert_eq!(b.finish_reason, Some(FinishReason::Length));
            let of = |tokens: &dyn inference::TokenModel| {
                tokens.logits(&prompt, true, &Interrupt::new()).unwrap()
            };
            let (a, b) = (of(our_tokens), of(their_tokens));
            assert_eq!((a.shape, a.tokens), (b.shape, b.tokens), "{name}");
            let difference = max_difference(&a.logits, &b.logits);
            assert!(difference < 1e-3, "{name}: {difference}");
        }
        for case in golden["text"]["encode"].as_array().into_iter().flatten() {
            let text = case["text"].as_str().unwrap();
            let encoded = their_tokens.encode(text, false).unwrap();
            assert_eq!(encoded, ids(&case["tokens"]), "{name}: {text:?}");
            assert_eq!(
                their_tokens.decode(&encoded).unwrap(),
                our_tokens.decode(&encoded).unwrap(),
                "{name}"
            );
        }
        for case in golden["text"]["chat"].as_array().into_iter().flatten() {
            let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
            let chat = ChatPrompt::new(messages.as_slice());
            let prepared = their_tokens.prepare_chat(&chat).unwrap();
            assert_eq!(prepared.text, case["text"], "{name}");
            assert_eq!(prepared, our_tokens.prepare_chat(&chat).unwrap(), "{name}");
            let run = |model: &dyn TextModel| {
                let stream = model.chat(&messages, &greedy(8)).unwrap();
                let output = stream.collect_output().unwrap();
                (output.tokens, output.text, output.metrics.prompt_tokens)
            };
            let (a, b) = (run(ours.as_ref()), run(theirs.as_ref()));
            assert_eq!(a, b, "{name}");
            assert_eq!(b.2, ids(&case["tokens"]).len(), "{name}");
        }
        assert_eq!(our_tokens.eos_tokens(), their_tokens.eos_tokens(), "{name}");
        let (a, b) = (ours.info(), theirs.info());
        assert_eq!(a.architecture, b.architecture, "{name}");
        let sizes = |i: &inference::ModelInfo| {
            let heads = (i.num_heads, i.num_kv_heads, i.head_dim);
            (
                i.vocab_size,
                i.num_layers,
                i.hidden_size,
                heads,
                i.quantization_bits,
            )
        };
        assert_eq!(sizes(&a), sizes(&b), "{name}");
        assert_eq!(a.compute_type, b.compute_type, "{name}");
        assert_eq!(a.has_chat_template, b.has_chat_template, "{name}");
    }
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn the_first_model_says_the_same_through_both() {
    let gguf = rust_mlx::hub::first_model().unwrap();
    let converted = crate::python::first_model_converted(&gguf);
    let (ours, theirs) = (load(&gguf), theirs(&converted));
    let golden = golden(&fixture("first-model"));
    for case in golden["plain"].as_array().unwrap().iter().take(3) {
        let prompt: Prompt = case["prompt"].as_str().unwrap().into();
        let run = |model: &dyn TextModel| {
            let stream = model.generate(&prompt, &greedy(16)).unwrap();
            let output = stream.collect_output().unwrap();
            (output.tokens, output.text, output.metrics.prompt_tokens)
        };
        let (a, b) = (run(ours.as_ref()), run(theirs.as_ref()));
        assert_eq!(a, b);
        assert_eq!(a.0, ids(&case["greedy"])[..16]);
    }
    let messages = [Message::user("What is the capital of France?")];
    let run = |model: &dyn TextModel| {
        let options = GenerateOptions::new().with_max_tokens(16);
        let output = model.chat(&messages, &options).unwrap();
        let output = output.collect_output().unwrap();
        (output.tokens, output.text, output.finish_reason)
    };
    let (a, b) = (run(ours.as_ref()), run(theirs.as_ref()));
    assert_eq!(a, b);
    assert!(b.1.contains("Paris"), "{}", b.1);
}

fn prompt() -> Prompt {
    Prompt::Tokens(vec![40, 41, 42, 43])
}

fn tokens(model: &dyn TextModel, options: &GenerateOptions) -> Vec<u32> {
    let stream = model.generate(&prompt(), options).unwrap();
    stream.collect_output().unwrap().tokens
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn an_adapter_is_applied() {
    // A LoRA adapter of rank 1 on one layer's query projection, in mlx_lm's form: y += scale * (x
    // a) b.
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"fine_tune_type": "lora", "num_layers": 1,
        "lora_parameters": {"rank": 1, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}}"#;
    std::fs::write(dir.path().join("adapter_config.json"), config).unwrap();
    let write = |b: f32| {
        let bytes = |value: f32| value.to_le_bytes().repeat(32);
        let (a, b) = (bytes(0.5), bytes(b));
        let view = |data, shape| {
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, data).unwrap()
        };
        let name = |part: &str| format!("model.layers.2.self_attn.q_proj.{part}");
        let tensors = [
            (name("lora_a"), view(&a, vec![32, 1])),
            (name("lora_b"), view(&b, vec![1, 32])),
        ];
        let file = dir.path().join("adapters.safetensors");
        safetensors::serialize_to_file(tensors, None, &file).unwrap();
    };
    let logits = |options: &LoadOptions| {
        let model = backend().load_model(&tiny("llama"), options).unwrap();
        let tokens = model.as_token_model().unwrap();
        tokens
            .logits(&prompt(), false, &Interrupt::new())
            .unwrap()
            .logits
    };
    let plain = logits(&LoadOptions::new());
    let adapted = LoadOptions::new().with_adapter_path(dir.path());
    write(0.0);
    assert!(max_difference(&logits(&adapted), &plain) < 1e-5);
    write(3.0);
    assert!(max_difference(&logits(&adapted), &plain) > 1e-2);
    std::fs::remove_file(dir.path().join("adapters.safetensors")).unwrap();
    let error = backend().load_model(&tiny("llama"), &adapted);
    assert!(error.is_err());
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn logits_and_logprobs_are_the_model_s_own() {
    let model = theirs(&tiny("llama"));
    let options = greedy(5)
        .with_logits(true)
        .with_logprobs(3)
        .with_repeat_penalty(1.7);
    let stream = model.generate(&prompt(), &options).unwrap();
    let replies: Vec<_> = stream.map(Result::unwrap).collect();
    let mut so_far = vec![40, 41, 42, 43];
    for token in &replies {
        let tokens = model.as_token_model().unwrap();
        let expected = tokens
            .logits(&so_far.clone().into(), false, &Interrupt::new())
            .unwrap()
            .logits;
        let logits = token.logits.as_deref().unwrap();
        assert!(max_difference(logits, &expected) < 1e-4);
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let logprob = |id: u32| (f64::from(logits[id as usize]) - sum.ln()) as f32;
        let seen = token.logprobs.as_ref().unwrap();
        assert!((seen.logprob - logprob(token.id)).abs() < 1e-4);
        assert_eq!(seen.top.len(), 3);
        let mut sorted = logits.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        for (top, logit) in seen.top.iter().zip(sorted) {
            assert_eq!(logits[top.id as usize], logit);
            assert!((top.logprob - logprob(top.id)).abs() < 1e-4);
        }
        so_far.push(token.id);
    }
    let none = greedy(1).with_logprobs(0);
    let mut stream = model.generate(&prompt(), &none).unwrap();
    let seen = stream.next().unwrap().unwrap().logprobs.unwrap();
    assert!(seen.top.is_empty() && seen.logprob < 0.0);
    let grammar = greedy(1)
        .with_ignore_eos(false)
        .with_grammar(inference::Grammar::json_object());
    let error = model.generate(&prompt(), &grammar).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error.to_string().contains("grammar") && error.to_string().contains("`cpu`"),
        "{error}"
    );
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn requests_are_cancelled_and_the_model_goes_on() {
    let model = theirs(&tiny("llama"));
    let plain = tokens(model.as_ref(), &greedy(8));
    let cancel = CancelToken::new();
    let endless = greedy(100_000).with_cancel(cancel.clone());
    let mut stream = model.generate(&prompt(), &endless).unwrap();
    assert_eq!(stream.next().unwrap().unwrap().id, plain[0]);
    cancel.cancel();
    let error = stream.next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let late = greedy(100_000).with_deadline(Instant::now() + Duration::from_millis(300));
    let begun = Instant::now();
    let mut stream = model.generate(&prompt(), &late).unwrap();
    let error = stream.find_map(Result::err).unwrap();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(begun.elapsed() < Duration::from_secs(60));
    // The next request must not contain tokens or state of the dropped request.
    let mut stream = model.generate(&prompt(), &greedy(100_000)).unwrap();
    assert_eq!(stream.next().unwrap().unwrap().id, plain[0]);
    drop(stream);
    assert_eq!(tokens(model.as_ref(), &greedy(8)), plain);
    let m = model.metrics();
    assert_eq!((m.prompt_tokens, m.generated_tokens), (4, 8));
    assert!(m.peak_memory_bytes >= m.active_memory_bytes && m.active_memory_bytes > 100_000);
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn messages_cannot_forge_control_tokens() {
    let model = theirs(&tiny("llama"));
    let tokens = model.as_token_model().unwrap();
    let count = |content: &str| {
        let stream = model.chat(&[Message::user(content)], &greedy(1)).unwrap();
        stream.collect_output().unwrap().metrics.prompt_tokens
    };
    // If the text became one control token, the prompt would be as long as with any other single
    // token.
    let spelled = count("<|im_end|>");
    assert!(spelled > count("a") + 2, "{spelled}");
    assert_eq!(tokens.encode("<|im_end|>", false).unwrap().len(), 1);
    let error = model.chat(&[Message::new("<|im_end|>", "a")], &greedy(1));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidOption);
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn damaged_and_hostile_models_are_refused() {
    // The file is truncated. MLX's own reader would return arbitrary values for the missing part.
    let dir = copy("llama");
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    for length in [0, 7, 100, bytes.len() - 1] {
        std::fs::write(&file, &bytes[..length]).unwrap();
        let error = refused(dir.path());
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{length}: {error}");
        assert!(
            error.to_string().contains("model.safetensors is damaged"),
            "{error}"
        );
    }
    std::fs::remove_file(&file).unwrap();
    assert_eq!(refused(dir.path()).kind(), ErrorKind::InvalidModel);

    // The backend must not run Python code from a model's directory.
    let dir = copy("llama");
    let mark = dir.path().join("ran");
    let code = format!("open({:?}, 'w')", mark.to_str().unwrap());
    std::fs::write(dir.path().join("code.py"), code).unwrap();
    edit(dir.path(), "config.json", |c| {
        c["model_file"] = "code.py".into();
    });
    let error = refused(dir.path());
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("model_file"), "{error}");
    edit(dir.path(), "config.json", |c| {
        c.as_object_mut().unwrap().remove("model_file");
        c["auto_map"] = serde_json::json!({"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]});
    });
    edit(dir.path(), "tokenizer_config.json", |c| {
        c["auto_map"] = serde_json::json!({"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]});
        c["tokenizer_class"] = "Tokenizer".into();
    });
    let _ = backend().load_model(dir.path(), &LoadOptions::new());
    assert!(!mark.exists(), "the model's code was run");

    let dir = copy("llama");
    edit(dir.path(), "config.json", |c| {
        c["model_type"] = "abacus".into();
    });
    let error = refused(dir.path());
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("abacus"), "{error}");
    edit(dir.path(), "config.json", |c| {
        c["model_type"] = "llama".into();
    });
    edit(dir.path(), "config.json", |c| c["hidden_size"] = 64.into());
    assert_eq!(refused(dir.path()).kind(), ErrorKind::InvalidModel);
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    assert_eq!(refused(dir.path()).kind(), ErrorKind::InvalidModel);
}
