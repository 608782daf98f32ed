//! Runs the `mlx` program with a separate home directory.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The program with a separate cache and state directory. It never downloads anything.
pub fn mlx(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args(args)
        .env("MLX_CACHE_DIR", home)
        .env("MLX_OFFLINE", "1")
        .env("HF_HUB_CACHE", home.join("hub"))
        .env_remove("MLX_BACKEND")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

pub fn output(args: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    mlx(home.path(), args).output().unwrap()
}

pub fn piped(mut command: Command, text: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    child.wait_with_output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
pub fn stdout(output: &Output) -> String {
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    text(&output.stdout)
}

#[track_caller]
pub fn refused(output: &Output, code: i32) -> String {
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{err}");
    assert_eq!(text(&output.stdout), "", "{err}");
    err
}

/// The path of the tiny Llama with random weights.
pub fn tiny() -> String {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/llama");
    model.to_str().unwrap().to_owned()
}
