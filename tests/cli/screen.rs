//! Tests of the terminal screen. The program runs on a pseudo terminal.
#![cfg(unix)]

use std::path::Path;
use std::process::Command;

use crate::common::fixture;
use crate::terminal::Terminal;

/// `mlx chat` with the tiny random model and a history file in `state`.
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

/// A terminal without cursor control gets plain prompts, and the chat still replies.
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

/// A terminal without bracketed paste sends all pasted lines at once. The chat treats each line as
/// a message.
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

/// The chat prints the model's name and completes commands. During a reply the terminal does not
/// echo typed keys, so `^C` must not appear.
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
    // On a controlling terminal, Ctrl-C sends this signal. The terminal shows `^C` if it echoes.
    assert!(!terminal.echoes());
    terminal.signal("INT");
    terminal.wait_for("(stopped: ");
    terminal.wait_for(">>> ");
    terminal.keys("/bye\r");
    assert_eq!(terminal.end().code(), Some(0));
}

/// The history is saved line by line, so a killed chat loses nothing.
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
    let saved = history();
    assert!(saved.contains("line 0\nline 1\n"), "{saved}");
}

/// The text of the screen without escape sequences. A progress bar draws many times in one place,
/// so each drawing becomes a line.
fn lines(screen: &str) -> Vec<String> {
    let mut plain = String::new();
    let mut rest = screen.chars().peekable();
    while let Some(c) = rest.next() {
        if c == '\u{1b}' && rest.peek() == Some(&'[') {
            rest.find(char::is_ascii_alphabetic);
        } else {
            plain.push(c);
        }
    }
    plain.split(['\r', '\n']).map(str::to_owned).collect()
}

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args(args)
        .env_remove("MLX_BACKEND")
        .env_remove("RUST_LOG")
        .env("NO_COLOR", "1")
        .env("TERM", "xterm");
    command
}

/// A progress bar wider than the terminal would wrap and fill many lines.
#[test]
fn bars_fit_into_80_columns() {
    let dirs = tempfile::tempdir().unwrap();
    let model = fixture("tiny/llama");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/pirate");
    let long = dirs
        .path()
        .join("a-directory-whose-name-is-much-longer-than-a-line-of-a-terminal-has-room-for");
    let [model, data, long] = [&model, &data, &long].map(|p| p.to_str().unwrap());
    let train = [
        "train",
        "--backend",
        "cpu",
        "-m",
        model,
        "--data",
        data,
        "--adapter-path",
        long,
        "--iters",
        "30",
        "--val-batches",
        "0",
        "--steps-per-report",
        "1000",
        "--save-every",
        "1000",
    ];
    let mut terminal = Terminal::start(&mut program(&train), 80);
    assert_eq!(terminal.end().code(), Some(0));
    let screen = terminal.screen();
    let shown = lines(&screen);
    let bars: Vec<&String> = shown.iter().filter(|line| line.starts_with('[')).collect();
    assert!(bars.iter().any(|bar| bar.contains("tok/s")), "{screen}");
    for bar in bars {
        assert!(bar.chars().count() <= 80, "{bar}");
    }

    let made = format!("{long}-converted");
    let mut terminal = Terminal::start(&mut program(&["convert", "-m", model, "-o", &made]), 80);
    assert_eq!(terminal.end().code(), Some(0));
    let screen = terminal.screen();
    let shown = lines(&screen);
    let bars: Vec<&String> = shown.iter().filter(|line| line.contains("[")).collect();
    assert!(!bars.is_empty(), "{screen}");
    for bar in bars {
        let columns = bar.chars().count();
        assert!(columns <= 80 && !bar.contains(" 0 B/s"), "{bar}");
    }
}

/// A prompt with a slow prefill shows a progress bar.
#[test]
fn a_long_prompt_shows_a_bar() {
    let model = fixture("tiny/llama");
    let ids = vec!["40"; 20_000].join(",");
    let args = [
        "generate",
        "--backend",
        "cpu",
        "-m",
        model.to_str().unwrap(),
        "--tokens",
        &ids,
        "-n",
        "1",
        "-c",
        "20000",
        "--prefill-step-size",
        "1",
    ];
    let mut terminal = Terminal::start(&mut program(&args), 80);
    terminal.wait_for("reading the prompt");
    terminal.wait_for("/20000 tokens");
    terminal.signal("INT");
    assert_eq!(terminal.end().code(), Some(130));
}
