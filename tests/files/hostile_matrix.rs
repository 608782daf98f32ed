//! A matrix of malformed files: model directories and GGUF files that contradict themselves, opened
//! by the program. The system limits the program to three gigabytes of address space. The program
//! must exit by itself with code 1 and an error that names the fault. A signal, a panic or a
//! timeout is a failure.
//!
//! Only Linux enforces the limit, which `ulimit -v` sets.
//!
//! `tests/files/hostile.rs` damages files byte by byte. Unit tests cover the errors of each reader.

#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Runs the program on a model with limited memory, for at most a minute.
fn run(model: &Path, arguments: &[&str]) -> Output {
    let mut child = Command::new("sh")
        .args(["-c", "ulimit -v 3000000 && exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_mlx"))
        .args(arguments)
        .args(["--backend", "cpu", "--model"])
        .arg(model)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("{}: still running after two minutes", model.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

const TOKENS: [&str; 6] = [
    "generate",
    "--raw",
    "--tokens",
    "40,41",
    "--max-tokens",
    "2",
];
const CHAT: [&str; 5] = ["generate", "--prompt", "Hi", "--max-tokens", "1"];

fn ends_with_an_error(hazard: u32, what: &str, output: &Output, says: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let what = format!("hazard {hazard}, {what}: {stderr}");
    assert_eq!(output.status.code(), Some(1), "{what}");
    assert!(!stderr.contains("panicked"), "{what}");
    for word in says {
        assert!(stderr.contains(word), "{word:?} is not said: {what}");
    }
}

/// A copy of a tiny checkpoint that the test may damage.
fn copy(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(crate::common::fixture("tiny").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    (dir, model)
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
}

#[test]
fn the_limit_leaves_room_for_an_honest_model() {
    for (name, file) in [("llama-q4", ""), ("llama-gguf", "model.gguf")] {
        let output = run(
            &crate::common::fixture("tiny").join(name).join(file),
            &TOKENS,
        );
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {stderr}");
    }
}

#[test]
fn configurations_that_ask_for_the_world() {
    let rows: [(&str, Value, &[&str]); 13] = [
        (
            "no heads",
            json!({"num_attention_heads": 0}),
            &["num_attention_heads"],
        ),
        (
            "no key heads",
            json!({"num_key_value_heads": 0}),
            &["num_key_value_heads"],
        ),
        (
            "heads that do not divide",
            json!({"num_key_value_heads": 3}),
            &["num_key_value_heads"],
        ),
        ("as wide as can be", json!({"hidden_size": 131_072}), &[]),
        (
            "too wide",
            json!({"hidden_size": 1u64 << 40}),
            &["hidden_size"],
        ),
        (
            "all tokens there are",
            json!({"vocab_size": 4_194_304}),
            &[],
        ),
        (
            "too many tokens",
            json!({"vocab_size": u64::MAX}),
            &["vocab_size"],
        ),
        ("as deep as can be", json!({"num_hidden_layers": 4096}), &[]),
        (
            "everything at its limit",
            json!({"hidden_size": 131_072, "num_hidden_layers": 4096, "intermediate_size": 1_048_576,
                "num_attention_heads": 4096, "num_key_value_heads": 4096, "vocab_size": 4_194_304}),
            &[],
        ),
        ("a head wider than all", json!({"head_dim": 4096}), &[]),
        (
            "negative",
            json!({"intermediate_size": -1}),
            &["intermediate_size"],
        ),
        (
            "a window without end",
            json!({"model_type": "mistral", "sliding_window": 1u64 << 60}),
            &["sliding_window"],
        ),
        (
            "bits that MLX lacks",
            json!({"quantization": {"bits": 7, "group_size": 64}}),
            &["bits"],
        ),
    ];
    for (what, changes, says) in rows {
        let (_dir, model) = copy("llama-q4");
        edit(&model.join("config.json"), |config| {
            for (name, value) in changes.as_object().unwrap() {
                config[name] = value.clone();
            }
        });
        ends_with_an_error(13, what, &run(&model, &TOKENS), says);
    }
    // The JSON files contain deeply nested brackets, or have no end.
    let (_dir, model) = copy("llama-q4");
    let path = model.join("config.json");
    fs::write(&path, "[".repeat(1 << 20)).unwrap();
    ends_with_an_error(13, "nested", &run(&model, &TOKENS), &["config.json"]);
    fs::write(&path, " ".repeat(5 << 20)).unwrap();
    ends_with_an_error(13, "long", &run(&model, &TOKENS), &["config.json"]);
}

/// A GGUF header that announces these counts, followed by `rest`.
fn gguf(tensors: u64, keys: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(tensors.to_le_bytes());
    out.extend(keys.to_le_bytes());
    rest.iter().for_each(|part| out.extend(*part));
    out
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [text(name).as_slice(), &kind.to_le_bytes(), value].concat()
}

/// The description of a tensor in a GGUF header.
fn info(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = text(name);
    out.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

#[test]
fn gguf_headers_that_lie() {
    let huge = u64::MAX.to_le_bytes();
    let nested: Vec<u8> = std::iter::repeat_n(
        [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes()].concat(),
        4000,
    )
    .flatten()
    .collect();
    let list =
        |kind: u32, count: u64| [kind.to_le_bytes().as_slice(), &count.to_le_bytes()].concat();
    let data = [0u8; 256];
    let rows: [(&str, Vec<u8>); 19] = [
        ("no tensors at all", gguf(0, 0, &[])),
        ("more tensors than atoms", gguf(u64::MAX, 0, &[])),
        ("more keys than atoms", gguf(0, u64::MAX, &[])),
        ("a billion of both", gguf(1 << 30, 1 << 30, &[&data])),
        ("a name without end", gguf(0, 1, &[&huge])),
        (
            "a text without end",
            gguf(0, 1, &[&key("general.name", 8, &huge)]),
        ),
        (
            "a list without end",
            gguf(0, 1, &[&key("a", 9, &list(4, u64::MAX))]),
        ),
        (
            "a list that wraps around",
            gguf(0, 1, &[&key("a", 9, &list(12, 1 << 61))]),
        ),
        (
            "a list of empty lists",
            gguf(0, 1, &[&key("a", 9, &list(9, 1 << 40)), &data]),
        ),
        ("lists in lists", gguf(0, 1, &[&key("a", 9, &nested)])),
        (
            "an unknown type of value",
            gguf(0, 1, &[&key("a", 77, &huge)]),
        ),
        (
            "no alignment",
            gguf(0, 1, &[&key("general.alignment", 4, &[0; 4])]),
        ),
        (
            "an odd alignment",
            gguf(0, 1, &[&key("general.alignment", 4, &[3, 0, 0, 0])]),
        ),
        (
            "the same key twice",
            gguf(0, 2, &[&key("a", 0, &[1]), &key("a", 0, &[1])]),
        ),
        (
            "a tensor with too many axes",
            gguf(1, 0, &[&info("t", &[1; 200], 0, 0), &data]),
        ),
        (
            "sizes that wrap around",
            gguf(
                1,
                0,
                &[&info("t", &[1 << 32, 1 << 32, 1 << 32], 0, 0), &data],
            ),
        ),
        (
            "a tensor beyond the end",
            gguf(1, 0, &[&info("t", &[64], 0, 1 << 40), &data]),
        ),
        (
            "tensors that overlap",
            gguf(
                2,
                0,
                &[&info("t", &[32], 0, 0), &info("u", &[32], 0, 32), &data],
            ),
        ),
        (
            "one tensor twice",
            gguf(
                2,
                0,
                &[&info("t", &[8], 0, 0), &info("t", &[8], 0, 32), &data],
            ),
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (what, bytes) in rows {
        let path = dir.path().join("lie.gguf");
        fs::write(&path, bytes).unwrap();
        ends_with_an_error(14, what, &run(&path, &TOKENS), &["lie.gguf"]);
    }
    for version in [0u32, 1, 4, 0x0300_0000] {
        let mut bytes = gguf(0, 0, &[]);
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        let path = dir.path().join("lie.gguf");
        fs::write(&path, bytes).unwrap();
        ends_with_an_error(14, "another version", &run(&path, &TOKENS), &["lie.gguf"]);
    }
}

#[test]
fn safetensors_headers_that_lie() {
    let one = |offsets: &str, shape: &str| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let rows: [(&str, String); 16] = [
        ("not JSON", "{".into()),
        ("a list", "[]".into()),
        ("names twice", format!("{},{}", one("[0,4]", "[1]").trim_end_matches('}'), r#""data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#)),
        ("data in the past", one("[8,4]", "[1]")),
        ("data beyond the end", one("[0,4000000000000]", "[1000000000000]")),
        ("sizes that wrap around", one("[0,0]", "[4294967296,4294967296,4294967296]")),
        ("a shape that is not the data's", one("[0,16]", "[1]")),
        ("a hole", r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#.into()),
        ("overlap", r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#.into()),
        ("an unknown type", r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#.into()),
        ("a negative size", one("[0,4]", "[-1]")),
        ("a fraction", one("[0,4]", "[1.5]")),
        ("very many axes", one("[0,4]", &format!("[{}1]", "1,".repeat(100_000)))),
        ("nesting", format!(r#"{{"a":{}"#, "[".repeat(200_000))),
        ("a long name", format!(r#"{{"{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#, "n".repeat(100_000))),
        ("metadata that is no text", r#"{"__metadata__":{"a":[1,2]},"a":7}"#.into()),
    ];
    let (_dir, model) = copy("llama");
    let path = model.join("model.safetensors");
    for (what, header) in rows {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 16]);
        fs::write(&path, bytes).unwrap();
        ends_with_an_error(15, what, &run(&model, &TOKENS), &["model.safetensors"]);
    }
    for length in [0u64, 1, 16, 1 << 20, 1 << 40, i64::MAX as u64, u64::MAX] {
        let bytes = [length.to_le_bytes().as_slice(), b"{}"].concat();
        fs::write(&path, bytes).unwrap();
        ends_with_an_error(
            15,
            "a header of another length",
            &run(&model, &TOKENS),
            &["model.safetensors"],
        );
    }
}

/// A change of a JSON file.
type Change = fn(&mut Value);

#[test]
fn tokenizers_and_templates_that_do_not_end() {
    for template in [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('aaaaaaaa') }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'a' * 9999999999 }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('only on Sundays') }}",
        "{% if %}",
    ] {
        let (_dir, model) = copy("llama");
        edit(&model.join("tokenizer_config.json"), |config| {
            config["chat_template"] = template.into();
        });
        ends_with_an_error(19, template, &run(&model, &CHAT), &["line 1"]);
    }
    let tokenizers: [(&str, Change); 5] = [
        ("a merge of what is not there", |t| {
            t["model"]["merges"] = json!(["q zz"]);
        }),
        ("two tokens with one id", |t| {
            t["model"]["vocab"]["h"] = json!(5);
        }),
        ("a very long token", |t| {
            t["model"]["vocab"]["x".repeat(1 << 20)] = json!(299);
        }),
        ("a pattern that is none", |t| {
            t["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false});
        }),
        ("no model", |t| {
            t["model"] = json!({"type": "None"});
        }),
    ];
    for (what, change) in tokenizers {
        let (_dir, model) = copy("llama");
        edit(&model.join("tokenizer.json"), change);
        ends_with_an_error(19, what, &run(&model, &CHAT), &["tokenizer.json"]);
    }
    // A regular expression with exponentially many ways to split a text. It may fail or match, but
    // within the time limit.
    let (_dir, model) = copy("llama");
    edit(&model.join("tokenizer.json"), |t| {
        t["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(?=(a+)+$)(a|a)*b"}, "behavior": "Isolated", "invert": false});
    });
    let many = "a".repeat(5000);
    let output = run(
        &model,
        &["generate", "--raw", "--prompt", &many, "--max-tokens", "1"],
    );
    assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
}

#[test]
fn names_that_lead_out_of_the_directory() {
    let secret = tempfile::tempdir().unwrap();
    let outside = secret.path().join("outside.safetensors");
    fs::copy(
        crate::common::fixture("tiny/llama/model.safetensors"),
        &outside,
    )
    .unwrap();
    for name in [
        "../outside.safetensors",
        "../../../../../../etc/passwd",
        outside.to_str().unwrap(),
        "a/../../outside.safetensors",
        "model.safetensors\0.txt",
        "",
        ".",
        "..",
        "C:\\windows\\win.ini",
        "\\\\host\\share",
    ] {
        let (dir, model) = copy("llama");
        fs::copy(&outside, dir.path().join("outside.safetensors")).unwrap();
        let index = json!({"metadata": {}, "weight_map": {"model.norm.weight": name}});
        fs::write(
            model.join("model.safetensors.index.json"),
            index.to_string(),
        )
        .unwrap();
        ends_with_an_error(20, name, &run(&model, &TOKENS), &["/model"]);
    }
    // The files are pipes, or links to other directories, to devices or to themselves.
    for file in ["model.safetensors", "config.json"] {
        for target in [
            outside.as_path(),
            Path::new("/dev/zero"),
            Path::new("itself"),
        ] {
            let (_dir, model) = copy("llama");
            let path = model.join(file);
            fs::remove_file(&path).unwrap();
            let target = if target == Path::new("itself") {
                &path
            } else {
                target
            };
            symlink(target, &path).unwrap();
            let what = format!("{file} -> {}", target.display());
            ends_with_an_error(20, &what, &run(&model, &TOKENS), &[]);
        }
    }
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "model.safetensors",
    ] {
        let (_dir, model) = copy("llama");
        let path = model.join(file);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        ends_with_an_error(
            20,
            &format!("{file} is a directory"),
            &run(&model, &TOKENS),
            &[],
        );
        fs::remove_dir(&path).unwrap();
        if Command::new("mkfifo")
            .arg(&path)
            .status()
            .is_ok_and(|s| s.success())
        {
            ends_with_an_error(20, &format!("{file} is a pipe"), &run(&model, &TOKENS), &[]);
        }
    }
}

#[test]
fn files_that_are_cut_short_at_every_boundary() {
    // The file ends between parts of the header, between tensors, or inside a tensor.
    for (name, file) in [
        ("llama-q4", "model.safetensors"),
        ("llama-gguf", "model.gguf"),
    ] {
        let (_dir, model) = copy(name);
        let path = model.join(file);
        let original = fs::read(&path).unwrap();
        let n = original.len();
        for cut in [
            0,
            1,
            4,
            7,
            8,
            9,
            24,
            100,
            n / 4,
            n / 2,
            n - 4096,
            n - 33,
            n - 1,
        ] {
            fs::write(&path, &original[..cut]).unwrap();
            let target = if name == "llama-gguf" { &path } else { &model };
            ends_with_an_error(
                2,
                &format!("{file} cut to {cut}"),
                &run(target, &TOKENS),
                &[file],
            );
        }
    }
}
