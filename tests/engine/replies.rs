//! Tests of `mlx generate` and `mlx chat` beyond the reply's text: exit codes, metrics, limits and
//! logs. They run the program with a tiny random model.

use std::process::{Command, Output, Stdio};

use crate::common::fixture;
use serde_json::Value;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .arg(args[0])
        .args(["--backend", "cpu", "--model"])
        .arg(fixture("tiny/llama"))
        .args(&args[1..])
        .env_remove("MLX_BACKEND")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

fn mlx(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// If only the model can refuse an option, the error is still a usage error with exit code 2.
#[test]
fn impossible_values_exit_with_2_also_once_the_model_is_there() {
    for args in [
        &["--regex", "("][..],
        &["--json-schema", r#"{"type": "nonsense"}"#],
        &["--grammar", "start: nothing_of_the_kind"],
        &["--banned-tokens", "4000000000"],
    ] {
        let all = [&["generate", "--prompt", "a"], args].concat();
        let output = mlx(&all);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(output.stdout.is_empty());
    }
}

/// A schema with a chain of 20,000 references must not overflow the stack. It once ended the
/// process with exit code 134.
#[test]
fn a_schema_of_chained_references_is_a_wrong_command_line() {
    let mut definitions = serde_json::Map::new();
    for i in 0..20_000 {
        let next = serde_json::json!({"$ref": format!("#/$defs/d{}", i + 1)});
        definitions.insert(format!("d{i}"), next);
    }
    definitions.insert("d20000".into(), serde_json::json!({"type": "string"}));
    let schema = serde_json::json!({"$ref": "#/$defs/d0", "$defs": definitions});
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), schema.to_string()).unwrap();
    let path = file.path().to_str().unwrap();
    let output = mlx(&["generate", "--prompt", "a", "--json-schema-file", path]);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(output.stdout.is_empty());
    assert!(told.contains("schema"), "{told}");
}

/// An empty prompt must be refused. An earlier version generated a random reply.
#[test]
fn an_empty_prompt_has_no_reply() {
    for prompt in ["", "  \n"] {
        for args in [&["generate", "--prompt", prompt][..], &["generate", prompt]] {
            let output = mlx(args);
            assert_eq!(output.status.code(), Some(2), "{args:?}");
            assert!(output.stdout.is_empty(), "{args:?}");
            let told = stderr(&output);
            assert!(told.contains("the prompt is empty"), "{args:?}: {told}");
        }
    }
}

#[test]
fn nothing_generated_has_no_speed() {
    let output = mlx(&["generate", "--prompt", "a", "--max-tokens", "0"]);
    assert_eq!(output.status.code(), Some(0));
    let told = stderr(&output);
    assert!(told.contains("generated: 0 tokens"), "{told}");
    assert!(!told.contains("tok/s"), "{told}");
    let output = mlx(&["generate", "--prompt", "a", "--max-tokens", "0", "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    for rate in ["prefill_tokens_per_second", "decode_tokens_per_second"] {
        assert_eq!(json["metrics"][rate], 0.0, "{json}");
    }
    let output = mlx(&["generate", "--prompt", "a", "--max-tokens", "2"]);
    assert_eq!(stderr(&output).matches("tok/s").count(), 2);
}

/// Each further `-v` logs more to standard error, and nothing to standard output.
#[test]
fn more_v_says_more() {
    let mut before = 0;
    for flag in [&[][..], &["-v"], &["-vv"], &["-vvv"]] {
        let args = [
            "generate",
            "--prompt",
            "a",
            "-n",
            "4",
            "--quiet",
            "--ignore-eos",
        ];
        let output = mlx(&[&args[..], flag].concat());
        assert_eq!(output.status.code(), Some(0));
        let lines = stderr(&output).lines().count();
        assert!(
            flag.is_empty() == (lines == 0),
            "{flag:?}: {}",
            stderr(&output)
        );
        assert!(
            flag.is_empty() || lines > before,
            "{flag:?}: {}",
            stderr(&output)
        );
        before = lines;
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_exits_with_130() {
    use std::io::Read;
    let args = [
        "generate",
        "--prompt",
        "a",
        "-n",
        "1000000",
        "--ignore-eos",
        "-c",
        "64",
    ];
    let mut child = command(&args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 20];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut some)
        .unwrap();
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &id])
            .status()
            .unwrap()
            .success()
    );
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    // The program keeps the partial reply and its metrics.
    assert!(
        stderr(&output).contains("generated: "),
        "{}",
        stderr(&output)
    );
}

fn context() -> usize {
    let output = mlx(&["generate", "--prompt", "a", "-n", "0", "-vv"]);
    let told = stderr(&output);
    let (_, rest) = told.split_once("context=").unwrap();
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn a_prompt_beyond_the_context_is_refused() {
    let context = context();
    let ids = |n: usize| vec!["40"; n].join(",");
    let (long, fits) = (ids(context + 1), ids(context - 1));
    let run = |ids: &str, more: &[&str]| {
        mlx(&[&["generate", "--tokens", ids, "--ignore-eos"], more].concat())
    };
    let output = run(&long, &["-n", "1"]);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    for what in [
        &format!("{} tokens", context + 1),
        &format!("context {context}"),
        "--ctx-size",
    ] {
        assert!(told.contains(what), "{what}: {told}");
    }
    let output = run(&long, &["-n", "1", "--ctx-size", "32"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = run(&fits, &["-n", "1"]);
    assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
    // Before the reply ends, its length is unknown. So the program reports the overflow at the end.
    let output = run(&fits, &["-n", "4"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(
        stderr(&output).contains("warning: prompt and reply"),
        "{}",
        stderr(&output)
    );
}

/// The chat reports where it cut a reply. Without a flag, it cuts a reply at the end of the
/// context.
#[test]
fn a_chat_says_where_a_reply_is_cut() {
    use std::io::Write;
    let context = context();
    let chat = |more: &[&str]| {
        let mut child = command(&[&["chat", "--ignore-eos"], more].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(b"hello\n/stats\n").unwrap();
        drop(input);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stderr(&output)
    };
    let told = chat(&["-n", "5"]);
    assert!(told.contains("(cut after 5 tokens;"), "{told}");
    let told = chat(&[]);
    let (_, rest) = told.split_once("prompt: ").unwrap();
    let prompt: usize = rest.split(' ').next().unwrap().parse().unwrap();
    let limit = context - prompt;
    assert!(
        told.contains(&format!("(cut after {limit} tokens;")),
        "{told}"
    );
    assert!(!told.contains("warning"), "{told}");
}
