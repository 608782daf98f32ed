//! What a person sees on a terminal: the program runs on a pseudo terminal.
#![cfg(unix)]

mod common;
#[path = "common/terminal.rs"]
mod terminal;

use std::path::Path;
use std::process::Command;

use common::fixture;
use terminal::Terminal;

/// `mlx chat` with the tiny model, which says nonsense, and with a history of its own.
fn chat(state: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args(["chat", "--backend", "cpu", "--model"])
        .arg(fixture("tiny/llama"))
        .args(["-n", "3"])
        .args(more)
        .env_remove("MLX_BACKEND")
        .env_remove("RUST_LOG")
        .env_remove("MLX_CACHE_DIR")
        .env("XDG_STATE_HOME", state)
        .env("NO_COLOR", "1")
        .env("TERM", "xterm");
    command
}

/// A terminal that cannot be driven still gets its prompts, and the chat answers.
#[test]
fn a_dumb_terminal_is_good_for_a_chat() {
    let state = tempfile::tempdir().unwrap();
    for kind in ["dumb", "emacs", "xterm"] {
        let mut terminal = Terminal::start(chat(state.path(), &[]).env("TERM", kind), 80);
        terminal.wait_for(">>> ");
        terminal.keys("hello\r");
        terminal.wait_for("\n");
        terminal.wait_for(">>> ");
        terminal.keys("/stats\r");
        terminal.wait_for("1 replies, 3 tokens");
        terminal.wait_for(">>> ");
        terminal.keys("/bye\r");
        assert_eq!(terminal.end().code(), Some(0), "{kind}");
    }
}

/// Lines that are pasted into a terminal without bracketed paste arrive at once; each is a message.
#[test]
fn pasted_lines_are_all_read() {
    let state = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(&mut chat(state.path(), &[]), 80);
    terminal.wait_for(">>> ");
    let lines: String = (0..3).map(|n| format!("line number {n}\r")).collect();
    terminal.keys(&lines);
    for n in 0..3 {
        terminal.wait_for(&format!("line number {n}"));
        terminal.wait_for("\n");
    }
    terminal.wait_for(">>> ");
    terminal.keys("/stats\r");
    terminal.wait_for("3 replies, 9 tokens");
    terminal.keys("/bye\r");
    assert_eq!(terminal.end().code(), Some(0));
}
