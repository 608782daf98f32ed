//! C programs that use the library, compiled by the C compiler and run on tiny models.

#![cfg(all(unix, feature = "metal-backend"))]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

fn golden(name: &str) -> Value {
    let path = fixture(name).join("golden.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The directory of the libraries: Cargo builds them before this test, beside it.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().to_owned()
}

fn run(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?} {:?}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// A compiler with the flags of all programs.
fn compiler(name: &str, source: &Path) -> Command {
    let mut compiler = Command::new(name);
    compiler
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"))
        .arg(source);
    compiler
}

/// A program that uses the dynamic library.
fn program(source: &Path, to: &Path) -> PathBuf {
    let program = to.join(source.file_stem().unwrap());
    let libraries = libraries();
    let mut cc = compiler("cc", source);
    cc.arg("-std=c99")
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&libraries)
        .arg("-lrust_mlx_c")
        .arg(format!("-Wl,-rpath,{}", libraries.display()));
    run(&mut cc);
    program
}

/// A program in an environment in which nothing is downloaded.
fn offline(program: &Path, home: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("MLX_CACHE_DIR", home)
        .env("MLX_OFFLINE", "1")
        .env("HF_HUB_CACHE", home.join("hub"));
    command
}

fn ids(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect()
}

#[test]
fn every_function_works_and_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/calls.c");
    let (llama, bert) = (golden("tiny/llama"), golden("encoders/bert"));
    let case = &llama["prompts"][0];
    let encoded = &llama["text"]["encode"][0];
    let mut command = offline(&program(&source, dir.path()), dir.path());
    command
        .args([fixture("tiny/llama"), fixture("encoders/bert")])
        .arg(encoded["text"].as_str().unwrap())
        .arg(case["tokens"].to_string())
        .arg(bert["texts"].to_string());
    let output = String::from_utf8(run(&mut command).stdout).unwrap();
    let line = |name: &str| {
        let found = output.lines().find_map(|line| line.strip_prefix(name));
        found
            .unwrap_or_else(|| panic!("no line {name} in\n{output}"))
            .trim()
    };
    let value = |name: &str| serde_json::from_str::<Value>(line(name)).unwrap();

    assert_eq!(line("version"), env!("CARGO_PKG_VERSION"));
    let backends = value("backends");
    let cpu = backends.as_array().unwrap().iter();
    let cpu = cpu
        .clone()
        .find(|backend| backend["name"] == "cpu")
        .unwrap();
    assert_eq!(
        (&cpu["available"], &cpu["reason"]),
        (&json!(true), &json!(null))
    );
    assert_eq!(value("info")["num_layers"], 3);
    assert_eq!(value("ids"), encoded["tokens"]);
    assert_eq!(line("text "), encoded["text"]);

    // The tokens are those that the reference implementation chose.
    let reply = value("reply");
    assert_eq!(ids(&reply["tokens"]), ids(&case["greedy"]));
    assert_eq!(reply["finish_reason"], "length");
    assert_eq!(reply["metrics"]["prompt_tokens"], 7);
    assert_eq!(line("pieces"), "24");
    let (stopped, whole) = (value("stopped"), value("whole"));
    assert_eq!(stopped["finish_reason"], "cancelled");
    assert_eq!(ids(&stopped["tokens"]), ids(&whole["tokens"])[..3]);
    assert_eq!(ids(&whole["tokens"]).len(), 24);

    for (name, status, part) in [
        ("null-model", 8, "model is NULL"),
        ("null-out", 8, "out is NULL"),
        ("null-name", 8, "model is NULL"),
        ("bad-utf8", 8, "model is not UTF-8"),
        ("no-backend", 1, "no backend is named `abacus`"),
        ("no-model", 5, "no-such-model"),
        ("bad-json", 8, "options must be a JSON object"),
        ("bad-option", 8, "kv_bits is 7"),
        ("twice", 8, "the backend is given twice"),
        ("null-prompt", 8, "prompt is NULL"),
        ("no-option", 8, "did you mean `temperature`"),
        ("logits", 7, "logits are not returned"),
        ("bad-messages", 8, "messages[0]"),
        ("null-ids", 8, "ids is NULL, and count is 3"),
        ("null-count", 8, "count is NULL"),
        ("unknown-id", 8, "4000000000"),
        ("null-text", 8, "text is NULL"),
        ("no-embedding-option", 8, "did you mean `dimensions`"),
        ("encoder-generates", 7, ""),
    ] {
        let said = line(&format!("refused {name} "));
        assert!(said.starts_with(&format!("{status} ")), "{name}: {said}");
        assert!(said.contains(part), "{name}: {said}");
    }

    let vectors = line("vectors");
    let (counts, numbers) = vectors.split_once('[').unwrap();
    let expected = bert["vectors"].as_array().unwrap();
    let width = expected[0].as_array().unwrap().len();
    assert_eq!(counts.trim(), format!("{} {width}", expected.len()));
    let numbers: Vec<f64> = serde_json::from_str(&format!("[{numbers}")).unwrap();
    let expected = expected.iter().flat_map(|row| row.as_array().unwrap());
    for (number, expected) in numbers.iter().zip(expected) {
        let expected = expected.as_f64().unwrap();
        assert!((number - expected).abs() < 2e-3, "{number} {expected}");
    }
}

#[test]
fn the_example_answers_a_question() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(&root().join("examples/c/generate.c"), dir.path());
    let mut command = offline(&program, dir.path());
    command
        .arg(fixture("tiny/llama"))
        .args(["What is the \"answer\"?\n", "cpu"]);
    let output = run(&mut command);
    let errors = String::from_utf8(output.stderr).unwrap();
    let reply: Value = serde_json::from_str(errors.trim()).unwrap();
    assert_eq!(reply["text"].as_str().unwrap().as_bytes(), output.stdout);
    assert!(!output.stdout.is_empty());

    let mut command = offline(&program, dir.path());
    let failed = command.args(["no-such-model", "x"]).output().unwrap();
    assert_eq!(failed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&failed.stderr).contains("error 5: no model"));
}

#[test]
fn the_header_is_also_one_of_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("uses.cpp");
    let text = "#include \"rust_mlx.h\"\n\
                int main() { return rust_mlx_version() == nullptr; }\n";
    std::fs::write(&source, text).unwrap();
    run(compiler("c++", &source).args(["-std=c++17", "-fsyntax-only"]));
}

/// A linker leaves out the object files of a static library that no symbol refers to. No symbol
/// refers to the registrations of backends, so programs must link the library as a whole.
#[test]
#[cfg(target_os = "linux")]
fn the_static_library_has_its_backends_if_linked_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("backends.c");
    let text = "#include <stdio.h>\n#include \"rust_mlx.h\"\n\
                int main(void) { char *list = NULL; if (rust_mlx_backends(&list, NULL)) return 1; \
                puts(list); rust_mlx_string_free(list); return 0; }\n";
    std::fs::write(&source, text).unwrap();
    let program = dir.path().join("backends");
    let mut cc = compiler("cc", &source);
    cc.arg("-Wl,--whole-archive")
        .arg(libraries().join("librust_mlx_c.a"))
        .args([
            "-Wl,--no-whole-archive",
            "-lgcc_s",
            "-lpthread",
            "-ldl",
            "-lm",
        ])
        .arg("-o")
        .arg(&program);
    run(&mut cc);
    let list = run(&mut offline(&program, dir.path())).stdout;
    let list: Value = serde_json::from_slice(&list).unwrap();
    let names: Vec<&str> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|backend| backend["name"].as_str().unwrap())
        .collect();
    assert!(names.contains(&"cpu"), "{names:?}");
}
