//! Tests of `mlx fuse --export-gguf`. Our reader and the `gguf` package must read the file, and its
//! logits must equal the model's.

use std::path::Path;

use crate::common::{fixture, load, max_difference, order_bound};
use inference::{ChatPrompt, Interrupt, Prompt, TextModel};
use inference_formats::gguf::{Gguf, GgufValue};
use inference_formats::quantization::dequantize;
use rust_mlx::export::{GgufType, export_gguf};
use serde_json::{Value, json};

const IDS: [u32; 12] = [5, 17, 99, 4, 200, 31, 7, 120, 64, 250, 12, 3];

fn logits(model: &dyn TextModel) -> Vec<f32> {
    let model = model.as_token_model().unwrap();
    model
        .logits(&Prompt::Tokens(IDS.to_vec()), true, &Interrupt::new())
        .unwrap()
        .logits
}

/// The families that can be exported, with tied and untied embeddings, grouped heads, biases,
/// scaled positions, windows and mixtures of experts.
#[test]
fn files_have_the_logits_of_their_models() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "llama",
        "llama-tied-gqa",
        "llama-bf16",
        "llama-rope3",
        "llama-linear",
        "llama-yarn",
        "mistral",
        "qwen2",
        "qwen3",
        "olmo2",
        "smollm3",
        "granite",
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "olmoe",
        "gemma",
        "gemma2",
        "gemma3-text",
        "phi",
        "phi3",
        "seed-oss",
        "glm4",
        "exaone",
        "hunyuan-v1-dense",
        "ernie4-5",
        "stablelm",
        "stablelm-parallel",
        "starcoder2",
        "cohere",
        "olmo",
        "nemotron",
    ] {
        let source = fixture("tiny").join(name);
        let expected = logits(load(&source).as_ref());
        let scale = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (kind, error) in [
            (GgufType::F32, order_bound(2e-5)),
            (GgufType::F16, 5e-3),
            // A tiny model with random weights sums too few rounding errors for them to average
            // out.
            (GgufType::Q8_0, 0.15),
        ] {
            let path = dir.path().join(format!("{name}-{kind:?}.gguf"));
            let exported = export_gguf(&source, &path, kind)
                .unwrap_or_else(|e| panic!("{name} as {kind:?}: {e}"));
            assert_eq!(exported.bytes, std::fs::metadata(&path).unwrap().len());
            let model = load(&path);
            let difference = max_difference(&logits(model.as_ref()), &expected);
            assert!(
                difference <= error * scale,
                "{name} as {kind:?}: {difference} of {scale}"
            );
        }
    }
}

/// Fixtures of another converter have the same names, shapes, values and sizes.
#[test]
fn files_equal_those_of_another_converter() {
    const KEYS: [&str; 29] = [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.clamp_kqv",
        "attention.scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "use_parallel_residual",
    ];
    let dir = tempfile::tempdir().unwrap();
    let number = |value: &GgufValue| match value {
        GgufValue::U32(n) => Some(f64::from(*n)),
        GgufValue::I32(n) => Some(f64::from(*n)),
        GgufValue::F32(x) => Some(f64::from(*x)),
        GgufValue::U64(n) => Some(*n as f64),
        _ => None,
    };
    for name in [
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "olmoe",
        "gemma",
        "gemma2",
        "gemma3-text",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "llama-yarn",
        "seed-oss",
        "glm4",
        "exaone",
        "hunyuan-v1-dense",
        "ernie4-5",
        "stablelm",
        "stablelm-parallel",
        "starcoder2",
        "cohere",
        "olmo",
        "nemotron",
        "phi",
    ] {
        let path = dir.path().join(format!("{name}.gguf"));
        export_gguf(&fixture("tiny").join(name), &path, GgufType::F32).unwrap();
        let written = Gguf::open(&path).unwrap();
        let expected = Gguf::open(&fixture("gguf").join(format!("{name}.gguf"))).unwrap();
        let architecture = "general.architecture";
        let architecture = expected.metadata().str(architecture).unwrap().unwrap();
        for key in KEYS.map(|key| format!("{architecture}.{key}")) {
            let none = GgufValue::String(String::from("none"));
            let value = expected.metadata().get(&key);
            let Some(value) = value.filter(|value| **value != none) else {
                continue;
            };
            let own = written.metadata().get(&key);
            let own = own.unwrap_or_else(|| panic!("{name} has no {key}"));
            match (number(own), number(value)) {
                (Some(own), Some(value)) => assert_eq!(own, value, "{name}: {key}"),
                _ => assert_eq!(own, value, "{name}: {key}"),
            }
        }
        let names = |file: &Gguf| Vec::from_iter(file.tensors().keys().cloned());
        assert_eq!(names(&written), names(&expected), "{name}");
        for (tensor, expected_tensor) in expected.tensors() {
            let own = &written.tensors()[tensor];
            assert_eq!(own.shape, expected_tensor.shape, "{name}: {tensor}");
            let values = |file: &Gguf, tensor| {
                let bytes = file.read(tensor).unwrap();
                dequantize(tensor.kind, &bytes).unwrap()
            };
            assert_eq!(
                values(&written, own),
                values(&expected, expected_tensor),
                "{name}: {tensor}"
            );
        }
    }
}

/// The exported tokenizer returns equal ids for a text, and an equal prompt for a conversation.
#[test]
fn files_have_the_tokenizer_of_their_models() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture("tiny/llama");
    let path = dir.path().join("model.gguf");
    export_gguf(&source, &path, GgufType::F16).unwrap();
    let (expected, theirs) = (load(&source), load(&path));
    let (expected, theirs) = (
        expected.as_token_model().unwrap(),
        theirs.as_token_model().unwrap(),
    );
    for text in [
        "the quick fox",
        "12345 don't",
        "naïve 漢字 🙂",
        "<|im_end|> x",
    ] {
        assert_eq!(
            expected.encode(text, true).unwrap(),
            theirs.encode(text, true).unwrap(),
            "{text}"
        );
    }
    let chat = ChatPrompt::new([inference::Message::user("hi")]);
    assert_eq!(
        expected.prepare_chat(&chat).unwrap(),
        theirs.prepare_chat(&chat).unwrap()
    );
    // A reader of GGUF adds tokens that usually end a text, so its list may be longer.
    let ends = theirs.eos_tokens();
    assert!(
        expected.eos_tokens().iter().all(|id| ends.contains(id)),
        "{ends:?}"
    );
    let error = export_gguf(&source, &path, GgufType::F16).unwrap_err();
    assert!(error.to_string().contains("there already"), "{error}");
    // Other users may read the file, as with any new file.
    let other = dir.path().join("other");
    std::fs::write(&other, "").unwrap();
    let permissions = |path: &Path| std::fs::metadata(path).unwrap().permissions();
    assert_eq!(permissions(&path), permissions(&other));
}

/// Copies a fixture, with changes of its `config.json`.
fn changed(name: &str, dir: &Path, change: impl FnOnce(&mut Value)) {
    std::fs::create_dir(dir).unwrap();
    let source = fixture("tiny").join(name);
    for file in [
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(source.join(file), dir.join(file)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    change(&mut config);
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// The text part of a multimodal model is exported.
#[test]
fn text_parts_are_exported() {
    let dir = tempfile::tempdir().unwrap();
    let (source, path) = (dir.path().join("gemma3"), dir.path().join("model.gguf"));
    changed("gemma3", &source, |config| {
        let text = &mut config["text_config"];
        // GGUF has the usual pattern of layers, and the usual scale of scores.
        text["layer_types"][2] = "sliding_attention".into();
        text["query_pre_attn_scalar"] = 16.into();
    });
    export_gguf(&source, &path, GgufType::F32).unwrap();
    let (own, read) = (logits(load(&source).as_ref()), logits(load(&path).as_ref()));
    let scale = own.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(max_difference(&own, &read) <= order_bound(2e-5) * scale);
}

/// Each of these changes makes another network, and GGUF has no key for it.
#[test]
fn what_readers_of_the_file_would_not_know_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (n, (name, field, value, why)) in [
        (
            "gemma3-text",
            "use_bidirectional_attention",
            json!(true),
            "is true",
        ),
        (
            "gemma3-text",
            "query_pre_attn_scalar",
            json!(24),
            "query_pre_attn_scalar is 24",
        ),
        (
            "qwen2-moe",
            "norm_topk_prob",
            json!(true),
            "norm_topk_prob is true",
        ),
        (
            "qwen3-moe",
            "decoder_sparse_step",
            json!(2),
            "only decoder_sparse_step 1",
        ),
        (
            "qwen3-moe",
            "mlp_only_layers",
            json!([1]),
            "mlp_only_layers is [1]",
        ),
        (
            "smollm3",
            "no_rope_layers",
            json!([1, 0, 1, 0]),
            "no_rope_layers is [1,0,1,0]",
        ),
        (
            "starcoder2",
            "hidden_act",
            json!("gelu"),
            "the activation is gelu",
        ),
        (
            "llama",
            "max_position_embeddings",
            Value::Null,
            "is missing",
        ),
        (
            "olmoe",
            "norm_topk_prob",
            json!(true),
            "norm_topk_prob is true",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let (source, path) = (
            dir.path().join(n.to_string()),
            dir.path().join("model.gguf"),
        );
        changed(name, &source, |config| config[field] = value);
        let error = export_gguf(&source, &path, GgufType::F16).unwrap_err();
        assert!(error.to_string().contains(why), "{name}: {error}");
        assert!(!path.exists());
    }
    // A missing factor of Granite is 1.
    let (source, path) = (dir.path().join("granite"), dir.path().join("granite.gguf"));
    changed("granite", &source, |config| {
        config
            .as_object_mut()
            .unwrap()
            .remove("residual_multiplier");
    });
    export_gguf(&source, &path, GgufType::F16).unwrap();
}

#[test]
fn what_gguf_cannot_hold_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, why) in [
        ("llama-q4", "--dequantize"),
        ("gemma3n", "not exported"),
        ("gemma3", "the sliding window of layer 2 is"),
        ("gpt2", "not exported"),
        ("mistral-window", "the sliding window of layer 0 is"),
        ("qwen2-window", "the sliding window of layer"),
    ] {
        let path = dir.path().join("model.gguf");
        let error = export_gguf(&fixture("tiny").join(name), &path, GgufType::F16).unwrap_err();
        assert!(error.to_string().contains(why), "{name}: {error}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Exports a fused adapter through the program.
#[test]
fn an_adapter_is_in_the_file() {
    let home = tempfile::tempdir().unwrap();
    let (model, adapter) = (fixture("tiny/llama"), fixture("training/llama-1"));
    let output = home.path().join("fused");
    let [model, adapter, to] = [&model, &adapter, &output].map(|path| path.to_str().unwrap());
    let args = ["fuse", "-m", model, "--adapter-path", adapter, "-o", to];
    let more = [
        "--export-gguf",
        "--gguf-path",
        "m.gguf",
        "--gguf-type",
        "f32",
        "--json",
    ];
    let all = [&args[..], &more].concat();
    let said = crate::program::stdout(&crate::program::mlx(home.path(), &all).output().unwrap());
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let file = output.join("m.gguf");
    assert_eq!(said["gguf"], file.to_str().unwrap());
    let (fused, read) = (logits(load(&output).as_ref()), logits(load(&file).as_ref()));
    assert!(max_difference(&fused, &read) < 1e-4);
    let plain = logits(load(Path::new(model)).as_ref());
    assert!(max_difference(&fused, &plain) > 1e-2);
    let alone = [&args[..], &["--gguf-type", "f32"]].concat();
    let alone = crate::program::mlx(home.path(), &alone).output().unwrap();
    crate::program::refused(&alone, 2);
}

/// `mlx convert --gguf-type` writes the same file. With `--dequantize`, it makes dense files of
/// quantized models and of GGUF files.
#[test]
fn convert_writes_gguf_files() {
    let home = tempfile::tempdir().unwrap();
    let make = |model: &str, file: &str, more: &[&str]| {
        let (model, file) = (fixture(model), home.path().join(file));
        let [model, to] = [&model, &file].map(|path| path.to_str().unwrap());
        let args = ["convert", "-m", model, "-o", to, "--gguf-type", "f32"];
        let all = [&args[..], more].concat();
        (
            crate::program::mlx(home.path(), &all).output().unwrap(),
            file,
        )
    };
    let (output, mixtral) = make("tiny/mixtral", "mixtral.gguf", &["--json"]);
    let said: Value = serde_json::from_str(&crate::program::stdout(&output)).unwrap();
    assert_eq!(said["bytes"], std::fs::metadata(&mixtral).unwrap().len());
    let again = home.path().join("again.gguf");
    let exported = export_gguf(&fixture("tiny/mixtral"), &again, GgufType::F32).unwrap();
    assert_eq!(said["tensors"], exported.tensors);
    assert_eq!(
        std::fs::read(&mixtral).unwrap(),
        std::fs::read(&again).unwrap()
    );
    for (model, file, bound) in [
        ("tiny/qwen3-q8", "quantized.gguf", 1e-3),
        ("tiny/mixtral-q4", "experts.gguf", 1e-3),
        ("tiny/granitemoe", "joined.gguf", 0.0),
        ("gguf/gemma2.gguf", "dense.gguf", 1e-4),
    ] {
        let (output, path) = make(model, file, &["--dequantize"]);
        if bound == 0.0 {
            let error = crate::program::refused(&output, 1);
            assert!(error.contains("not exported"), "{error}");
            continue;
        }
        crate::program::stdout(&output);
        let (own, read) = (
            logits(load(&fixture(model)).as_ref()),
            logits(load(&path).as_ref()),
        );
        let scale = own.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let difference = max_difference(&own, &read);
        assert!(
            difference <= bound * scale,
            "{model}: {difference} of {scale}"
        );
    }
    let (output, _) = make("gguf/gemma2.gguf", "no.gguf", &[]);
    assert!(crate::program::refused(&output, 2).contains("--dequantize"));
    let (output, _) = make("tiny/llama", "no.gguf", &["--quantize"]);
    crate::program::refused(&output, 2);
    let (output, _) = make("tiny/gemma3n", "no.gguf", &["--dequantize"]);
    assert!(crate::program::refused(&output, 1).contains("not exported"));
    let (output, _) = make("tiny/mixtral-q4", "mixtral.gguf", &["--dequantize"]);
    assert!(crate::program::refused(&output, 1).contains("there already"));
    // No work directories stay.
    let unfinished = std::fs::read_dir(home.path()).unwrap();
    let unfinished = unfinished.filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_string_lossy().starts_with(".unfinished")
    });
    assert_eq!(unfinished.count(), 0);
}

/// The `gguf` package must read the file's names, shapes, types and values.
#[test]
#[ignore = "needs Python with gguf (tools/golden/requirements.txt): set MLX_LM_PYTHON to it"]
fn the_gguf_package_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture("tiny/llama-tied-gqa");
    let path = dir.path().join("model.gguf");
    export_gguf(&source, &path, GgufType::Q8_0).unwrap();
    let script = r"
import json, sys, numpy as np
from gguf import GGUFReader, dequantize
reader = GGUFReader(sys.argv[1])
fields = {name: field.contents() for name, field in reader.fields.items()}
tensors = {t.name: [list(map(int, t.shape)), t.tensor_type.name, float(np.abs(dequantize(t.data, t.tensor_type)).sum())] for t in reader.tensors}
print(json.dumps({'architecture': fields['general.architecture'], 'tokens': len(fields['tokenizer.ggml.tokens']),
    'pre': fields['tokenizer.ggml.pre'], 'tensors': tensors}))
";
    let python = std::env::var("MLX_LM_PYTHON").unwrap_or_else(|_| String::from("python3"));
    let output = std::process::Command::new(python)
        .args(["-c", script, path.to_str().unwrap()])
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    let read: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(read["architecture"], "llama");
    assert_eq!(
        (&read["tokens"], &read["pre"]),
        (&300.into(), &"smollm".into())
    );
    let embedding = &read["tensors"]["token_embd.weight"];
    assert_eq!(embedding[0], serde_json::json!([32, 300]));
    assert_eq!(embedding[1], "Q8_0");
    // The sum of all weights in the checkpoint.
    let checkpoint = inference_formats::safetensors::SafetensorsCheckpoint::open(&source).unwrap();
    let info = checkpoint.info("model.embed_tokens.weight").unwrap();
    let sum: f32 = checkpoint
        .read::<f32>(info)
        .unwrap()
        .iter()
        .map(|x| x.abs())
        .sum();
    let actual = embedding[2].as_f64().unwrap() as f32;
    assert!((actual - sum).abs() < 1e-2 * sum, "{actual} {sum}");
}
