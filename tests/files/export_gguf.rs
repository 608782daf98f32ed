//! Tests of `mlx fuse --export-gguf`. Our reader and the `gguf` package must read the file, and its
//! logits must equal the model's.

use std::path::Path;

use crate::common::{fixture, load, max_difference, order_bound};
use inference::{ChatPrompt, Interrupt, Prompt, TextModel};
use rust_mlx::export::{GgufType, export_gguf};

const IDS: [u32; 12] = [5, 17, 99, 4, 200, 31, 7, 120, 64, 250, 12, 3];

fn logits(model: &dyn TextModel) -> Vec<f32> {
    let model = model.as_token_model().unwrap();
    model
        .logits(&Prompt::Tokens(IDS.to_vec()), true, &Interrupt::new())
        .unwrap()
        .logits
}

/// The test covers every family, with tied and untied embeddings, grouped heads, biases and scaled
/// positions.
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

#[test]
fn what_gguf_cannot_hold_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, why) in [
        ("llama-q4", "--dequantize"),
        ("gemma3-text", "not exported"),
        ("gpt2", "not exported"),
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
