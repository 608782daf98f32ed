//! Tests of the chat's screen and of saved conversations. The screen is tested at 80 and 40
//! columns, with and without colors.
#![cfg(unix)]

use std::path::Path;
use std::process::Command;

use crate::program::{mlx, piped, stdout, tiny};
use crate::terminal::Terminal;

/// The model's reply. A grammar forces the model to generate it.
const REPLY: &str = "## The fox\nThe quick brown fox jumps over the lazy dog, and **over the wall** too.\n\n\
    - an item which is long enough for two lines of forty columns\n```python\nreturn \"x\"\n```";

/// A chat in which the model replies with `reply`.
fn chat(home: &Path, reply: &str, more: &[&str]) -> Command {
    let regex: String = reply
        .chars()
        .map(|c| match c {
            '\n' => String::from("\\n"),
            c if c.is_ascii_punctuation() => format!("\\{c}"),
            c => c.to_string(),
        })
        .collect();
    let model = tiny();
    let args = [
        "chat",
        "-m",
        &model,
        "--backend",
        "cpu",
        "-c",
        "900",
        "-n",
        "600",
        "--regex",
        &regex,
    ];
    let mut command = mlx(home, &[&args, more].concat());
    command.env("TERM", "xterm-256color").env_remove("NO_COLOR");
    command
}

fn size(n: u16) -> std::num::NonZero<u16> {
    std::num::NonZero::new(n).unwrap()
}

/// The screen after the model's reply: its lines, and the terminal parser that drew them.
fn shown(command: &mut Command, columns: u16) -> (Vec<String>, vt100::Parser) {
    let mut terminal = Terminal::start(command, columns);
    terminal.wait_for(">>> ");
    terminal.keys("hi\r");
    terminal.wait_for("return");
    terminal.wait_for(">>> ");
    terminal.keys("/bye\r");
    assert_eq!(terminal.end().code(), Some(0));
    let mut screen = vt100::Parser::new(size(60), size(columns), 0);
    screen.process(terminal.screen().as_bytes());
    let lines = screen
        .screen()
        .rows(0, columns)
        .map(|row| row.trim_end().to_owned())
        .collect();
    (lines, screen)
}

/// Words wrapped at `width`, with `indent` before all lines but the first.
fn wrapped(text: &str, width: usize, indent: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().unwrap();
        if !line.trim().is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(format!("{indent}{word}"));
        } else {
            if !line.trim().is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

/// The position of the lines `wanted` on the screen. They must be adjacent.
#[track_caller]
fn stand(lines: &[String], wanted: &[String]) -> usize {
    let at = lines.windows(wanted.len()).position(|part| part == wanted);
    at.unwrap_or_else(|| panic!("{wanted:#?}\nnot in\n{lines:#?}"))
}

#[test]
fn a_reply_is_drawn_at_80_and_at_40_columns() {
    for columns in [80, 40] {
        let home = tempfile::tempdir().unwrap();
        let (lines, screen) = shown(&mut chat(home.path(), REPLY, &[]), columns);
        let width = usize::from(columns);
        let text = "The quick brown fox jumps over the lazy dog, and over the wall too.";
        let item = "• an item which is long enough for two lines of forty columns";
        let mut wanted = vec![String::from("The fox")];
        wanted.extend(wrapped(text, width, ""));
        wanted.push(String::new());
        wanted.extend(wrapped(item, width, "  "));
        wanted.extend(["```python", "return \"x\"", "```"].map(String::from));
        let at = stand(&lines, &wanted);
        // Only the heading and the words between the stars are bold.
        let bold: String = (at..at + wanted.len())
            .flat_map(|row| (0..columns).map(move |column| (row as u16, column)))
            .filter_map(|(row, column)| screen.screen().cell(row, column))
            .filter(|cell| cell.bold())
            .map(|cell| cell.contents().to_owned())
            .collect();
        assert_eq!(bold.replace(' ', ""), "Thefoxoverthewall");
        let row = (at + wanted.len() - 2) as u16;
        let color = |column| screen.screen().cell(row, column).unwrap().fgcolor();
        assert_eq!(color(0), vt100::Color::Idx(5), "a word of the language");
        assert_eq!(color(7), vt100::Color::Idx(2), "a string");
    }
}

/// The rows of the screen that `terminal` has drawn.
fn rows_of(terminal: &Terminal, columns: u16) -> Vec<String> {
    let mut screen = vt100::Parser::new(size(200), size(columns), 0);
    screen.process(terminal.screen().as_bytes());
    let rows = screen.screen().rows(0, columns);
    rows.map(|row| row.trim_end().to_owned()).collect()
}

#[test]
fn messages_of_a_narrow_chat_break_between_words() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(&mut chat(home.path(), "a", &[]), 40);
    terminal.wait_for(">>> ");
    terminal.keys("/help\r");
    terminal.wait_for(">>> ");
    terminal.keys("/set nonsense 1\r");
    terminal.wait_for("stop");
    terminal.wait_for(">>> ");
    let rows = rows_of(&terminal, 40);
    terminal.keys("/bye\r");
    assert_eq!(terminal.end().code(), Some(0));
    let words: Vec<&str> = rows.iter().flat_map(|row| row.split_whitespace()).collect();
    for text in [
        "instructions for the model, from here on;",
        "max_tokens, seed, stop",
        "what the last reply and the whole chat took",
        "no parameter \"nonsense\"; there are temperature, top_k, top_p, min_p,",
    ] {
        let wanted: Vec<&str> = text.split_whitespace().collect();
        let contains = words.windows(wanted.len()).any(|part| part == wanted);
        assert!(contains, "{text}\nnot in\n{rows:#?}");
    }
    // A table column that does not fit beside the row names is printed below them.
    assert!(
        rows.iter()
            .any(|row| row == "/set                 show the parameters")
    );
    let at = rows
        .iter()
        .position(|row| row.starts_with("/clear"))
        .unwrap();
    assert_eq!(rows[at..at + 2], ["/clear", "    forget the conversation"]);
}

#[test]
fn keys_typed_during_a_reply_stand_behind_the_next_prompt() {
    let home = tempfile::tempdir().unwrap();
    let reply = format!("begin {}end", "abc def ghi ".repeat(30));
    let mut terminal = Terminal::start(&mut chat(home.path(), &reply, &[]), 80);
    terminal.wait_for(">>> ");
    terminal.keys("hi\r");
    terminal.wait_for("begin");
    terminal.keys("typed");
    terminal.wait_for("end");
    terminal.wait_for(">>> ");
    terminal.wait_for("typed");
    let rows = rows_of(&terminal, 80);
    terminal.keys("\u{15}/bye\r");
    assert_eq!(terminal.end().code(), Some(0));
    let with: Vec<&String> = rows.iter().filter(|row| row.contains("typed")).collect();
    assert_eq!(with, [">>> typed"], "{rows:#?}");
}

#[test]
fn without_colors_words_are_wrapped_and_marks_are_spelled() {
    let home = tempfile::tempdir().unwrap();
    let (lines, screen) = shown(chat(home.path(), REPLY, &[]).env("NO_COLOR", "1"), 40);
    let text = "The quick brown fox jumps over the lazy dog, and **over the wall** too.";
    stand(&lines, &wrapped(text, 40, ""));
    stand(&lines, &["## The fox".to_owned()]);
    let colored = (0..60).flat_map(|row| (0..40).map(move |column| (row, column)));
    let colored = colored.filter_map(|(row, column)| screen.screen().cell(row, column));
    assert!(
        colored
            .into_iter()
            .all(|cell| !cell.bold() && cell.fgcolor() == vt100::Color::Default)
    );
}

#[test]
fn pipes_and_simple_terminals_get_the_text_itself() {
    let home = tempfile::tempdir().unwrap();
    let said = stdout(&piped(chat(home.path(), REPLY, &[]), "hi\n"));
    assert_eq!(said, format!("{REPLY}\n"));
    for (more, term) in [(&[][..], "dumb"), (&["--no-word-wrap"][..], "xterm")] {
        let mut command = chat(home.path(), REPLY, more);
        let mut terminal = Terminal::start(command.env("TERM", term).env("NO_COLOR", "1"), 40);
        terminal.wait_for(">>> ");
        terminal.keys("hi\r");
        terminal.wait_for("## The fox");
        terminal.wait_for(
            "The quick brown fox jumps over the lazy dog, and **over the wall** too.\r\n",
        );
        terminal.wait_for(">>> ");
        terminal.keys("/bye\r");
        assert_eq!(terminal.end().code(), Some(0));
    }
}

/// A scripted conversation with multi-line messages, `/set`, `/save`, `/load` and `/resume`. A
/// second program continues the saved conversation.
#[test]
fn a_conversation_is_kept_and_gone_on_from() {
    for columns in [80, 40] {
        let home = tempfile::tempdir().unwrap();
        let mut terminal = Terminal::start(&mut chat(home.path(), "Ahoy", &[]), columns);
        let mut step = |keys: &str, shows: &[&str]| {
            terminal.wait_for(">>> ");
            terminal.keys(keys);
            for shown in shows {
                terminal.wait_for(shown);
            }
        };
        step("/system Speak.\r", &["instructions set"]);
        step("/set verbose\r", &["verbose from here on"]);
        step("/set temperature 0.5\r", &["temperature is now 0.5"]);
        step("\"\"\"one\rtwo\"\"\"\r", &["... ", "Ahoy", "tok/s"]);
        step("/save First\r", &["mlx run First"]);
        step("/clear\r", &["forgotten"]);
        step("/load first\r", &["2 messages so far"]);
        step("/show system\r", &["Speak."]);
        step(
            "/show modelfile\r",
            &["MESSAGE user \"\"\"one", "two\"\"\""],
        );
        step("/load nothing-of-the-kind\r", &["error: no model"]);
        step("/clear\r", &["forgotten"]);
        step("/resume\r", &["2 messages so far"]);
        step("/template\r", &["messages"]);
        step("/bye\r", &[]);
        assert_eq!(terminal.end().code(), Some(0));

        let mut terminal = Terminal::start(
            mlx(home.path(), &["chat", "--resume", "--backend", "cpu"]).env("TERM", "xterm"),
            columns,
        );
        terminal.wait_for("2 messages so far; the last: Ahoy");
        terminal.wait_for(">>> ");
        terminal.keys("/set\r");
        terminal.wait_for("temperature 0.5");
        terminal.wait_for(">>> ");
        terminal.keys("/bye\r");
        assert_eq!(terminal.end().code(), Some(0));
        let shown = stdout(
            &mlx(home.path(), &["show", "first", "--system"])
                .output()
                .unwrap(),
        );
        assert_eq!(shown, "Speak.\n");
    }
}

#[test]
fn scripts_leave_no_conversation_behind() {
    let home = tempfile::tempdir().unwrap();
    stdout(&piped(chat(home.path(), "Ahoy", &[]), "hi\n"));
    assert!(!home.path().join("last_chat.json").exists());
    let none = mlx(home.path(), &["chat", "--resume"]).output().unwrap();
    let told = crate::program::refused(&none, 1);
    assert!(told.contains("no conversation"), "{told}");
}
