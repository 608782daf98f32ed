//! Tests of truncated, corrupted and contradictory model files. The program must exit with code 1
//! and an error that contains the file's name, and must not crash.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use inference::{ErrorKind, LoadOptions};
use metal_backend as _;

fn mlx(model: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args([
            "generate",
            "--backend",
            "cpu",
            "--raw",
            "--tokens",
            "40,41",
            "--max-tokens",
            "2",
            "--model",
        ])
        .arg(model)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// A copy of a tiny checkpoint that the test may damage.
fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(crate::common::fixture("tiny").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// Expects loading to fail with an error about the model's files that names a file.
fn refused(path: &Path, what: &str) {
    let loaded = inference::load_model(path, &LoadOptions::new().with_backend("cpu"));
    let e = loaded.err().unwrap_or_else(|| panic!("{what}: it loaded"));
    let fault = matches!(
        e.kind(),
        ErrorKind::InvalidModel
            | ErrorKind::Unsupported
            | ErrorKind::Io
            | ErrorKind::ModelNotFound
            | ErrorKind::OutOfMemory
    );
    assert!(fault, "{what}: {e:?}");
    assert!(e.path().is_some(), "{what}: no file is named: {e}");
}

fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let original = fs::read(path).unwrap();
    let mut bytes = original.clone();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
    original
}

#[test]
fn truncation_anywhere_is_an_error() {
    for (name, file) in [
        ("llama-q4", "model.safetensors"),
        ("llama-gguf", "model.gguf"),
    ] {
        let dir = copy(name);
        let path = dir.path().join(file);
        let length = fs::metadata(&path).unwrap().len() as usize;
        // The cuts cover each of the first 64 bytes, where the header starts, and then steps
        // through the data.
        let cuts = (0..64)
            .chain((64..length).step_by(1009))
            .chain([length - 1]);
        for cut in cuts {
            let damaged = damage(&path, |b| b.truncate(cut));
            refused(
                if name.ends_with("gguf") {
                    &path
                } else {
                    dir.path()
                },
                &format!("{name} cut to {cut}"),
            );
            fs::write(&path, damaged).unwrap();
        }
        let extended = damage(&path, |b| b.extend([0; 64]));
        if name == "llama-q4" {
            refused(dir.path(), "bytes after the end");
        }
        fs::write(&path, extended).unwrap();
    }
}

#[test]
fn configurations_that_lie_are_errors() {
    for (from, to) in [
        ("\"num_attention_heads\": 4", "\"num_attention_heads\": 0"),
        ("\"num_attention_heads\": 4", "\"num_attention_heads\": 8"),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"),
        (
            "\"num_hidden_layers\": 2",
            "\"num_hidden_layers\": 4000000000",
        ),
        ("\"hidden_size\": 64", "\"hidden_size\": 128"),
        ("\"hidden_size\": 64", "\"hidden_size\": -1"),
        ("\"vocab_size\": 300", "\"vocab_size\": 299"),
        (
            "\"vocab_size\": 300",
            "\"vocab_size\": 99999999999999999999",
        ),
        ("\"model_type\": \"llama\"", "\"model_type\": \"lama\""),
        ("\"bits\": 4", "\"bits\": 8"),
        ("\"group_size\": 64", "\"group_size\": 32"),
        ("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": -1"),
        ("{", "["),
    ] {
        let dir = copy("llama-q4");
        let path = dir.path().join("config.json");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replace(from, to)).unwrap();
        refused(dir.path(), to);
    }
}

#[test]
fn broken_companions_are_errors() {
    for (file, bytes) in [
        ("tokenizer.json", &b"{"[..]),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", br#"{"version":"1.0","model":{"type":"BPE","vocab":{"a":4294967295},"merges":["q z"]}}"#),
        ("model.safetensors.index.json", br#"{"weight_map":{"x":"../../etc/passwd"}}"#),
        ("model.safetensors.index.json", br#"{"weight_map":{"x":"/etc/passwd"}}"#),
        ("model.safetensors.index.json", br#"{"weight_map":{"x":"none.safetensors"}}"#),
        ("model.safetensors.index.json", b"[]"),
        ("generation_config.json", br#"{"eos_token_id":"%n%s"}"#),
    ] {
        let dir = copy("llama-q4");
        fs::write(dir.path().join(file), bytes).unwrap();
        refused(dir.path(), file);
    }
    let dir = copy("llama-q4");
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    refused(dir.path(), "no tokenizer");
}

#[test]
fn flipped_bytes_of_a_header_never_crash() {
    for (name, file) in [("llama", "model.safetensors"), ("llama-gguf", "model.gguf")] {
        let dir = copy(name);
        let path = dir.path().join(file);
        let target = if name.ends_with("gguf") {
            path.clone()
        } else {
            dir.path().to_owned()
        };
        for at in (0..2000).step_by(13) {
            let damaged = damage(&path, |b| b[at] ^= 0x55);
            // The model may still load if the changed byte is in a comment or an unused name.
            drop(inference::load_model(
                &target,
                &LoadOptions::new().with_backend("cpu"),
            ));
            fs::write(&path, damaged).unwrap();
        }
    }
}

#[test]
fn the_program_names_the_file_and_exits_with_one() {
    let dir = copy("llama-gguf");
    let path = dir.path().join("model.gguf");
    assert!(mlx(&path).status.success(), "the whole file runs");
    damage(&path, |b| b.truncate(b.len() / 2));
    let output = mlx(&path);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("model.gguf") && stderr.contains("truncated"),
        "{stderr}"
    );
    assert!(output.stdout.is_empty());

    // Format specifiers in a name have no effect.
    let evil = dir.path().join("%n%s%p.gguf");
    fs::write(&evil, b"GGUF").unwrap();
    let output = mlx(&evil);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("%n%s%p.gguf"));
}

#[test]
fn nothing_is_written_to_the_temporary_directory() {
    // MLX's CPU compiler would write sources to this directory, compile them, and load the
    // resulting library.
    let empty = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args([
            "generate",
            "--backend",
            "cpu",
            "--raw",
            "--tokens",
            "40,41",
            "--max-tokens",
            "4",
        ])
        .args([
            "--temp",
            "1",
            "--top-p",
            "0.9",
            "--repeat-penalty",
            "1.1",
            "--model",
        ])
        .arg(crate::common::fixture("tiny/qwen3-q4"))
        .env("TMPDIR", empty.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(fs::read_dir(empty.path()).unwrap().count(), 0);
}
