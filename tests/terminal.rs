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
        let mut terminal = Terminal::start(chat(state.path(), &["-n", "3"]).env("TERM", kind), 80);
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
    let mut terminal = Terminal::start(&mut chat(state.path(), &["-n", "3"]), 80);
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

/// The chat says what answers, completes commands, and draws no `^C` into a reply that is stopped.
#[test]
fn a_chat_helps_the_person_at_the_terminal() {
    let state = tempfile::tempdir().unwrap();
    let mut command = chat(state.path(), &["--ignore-eos", "-n", "100000"]);
    let mut terminal = Terminal::start(&mut command, 80);
    let shown = terminal.wait_for(">>> ");
    assert!(shown.contains("llama on cpu ("), "{shown}");
    assert!(shown.contains("), context: "), "{shown}");

    terminal.keys("/cl\t");
    terminal.wait_for("/clear");
    terminal.keys("\r");
    terminal.wait_for("the conversation is forgotten");
    terminal.wait_for(">>> ");
    terminal.keys("/set tem\t0.5\r");
    terminal.wait_for("temperature is now 0.5");
    terminal.wait_for(">>> ");

    terminal.keys("hello\r");
    terminal.wait_for("hello");
    terminal.wait_for("\n");
    let before = terminal.screen().len();
    while terminal.screen().len() < before + 50 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // As the key does where the terminal is the program's own.
    terminal.keys("\u{3}");
    terminal.signal("INT");
    let reply = terminal.wait_for("(stopped: ");
    assert!(!reply.contains("^C"), "{reply}");
    terminal.wait_for(">>> ");
    terminal.keys("/bye\r");
    assert_eq!(terminal.end().code(), Some(0));
}

/// The history is kept line by line: a chat that is killed loses nothing.
#[test]
fn a_killed_chat_keeps_its_history() {
    let state = tempfile::tempdir().unwrap();
    let history = || {
        let file = state.path().join("rust-mlx/chat_history");
        std::fs::read_to_string(file).unwrap()
    };
    for n in 0..2 {
        let mut terminal = Terminal::start(&mut chat(state.path(), &["-n", "3"]), 80);
        terminal.wait_for(">>> ");
        terminal.keys(&format!("line {n}\r"));
        terminal.wait_for("\n");
        terminal.wait_for(">>> ");
        terminal.signal("KILL");
        assert!(!terminal.end().success());
    }
    let kept = history();
    assert!(kept.contains("line 0\nline 1\n"), "{kept}");
}
