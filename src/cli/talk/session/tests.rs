//! Tests of the conversation with a mock model, on typed and on piped lines.

use super::*;
use crate::cli::mock::{self, Streams};
use crate::cli::terminal::lines::Plain;
use inference_conformance::scripted::{Scripted, Step};

fn sampling() -> SamplingArgs {
    use clap::Parser;
    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        sampling: SamplingArgs,
    }
    Program::parse_from(["chat"]).sampling
}

/// A new conversation.
fn session<'a>(model: &'a Scripted, sampling: &'a SamplingArgs) -> Session<'a> {
    let mut session = Session::new(Held::Lent(model), sampling.options().unwrap());
    session.sampling = Some(sampling);
    session
}

/// Runs a chat on piped input. With `terminal`, errors do not end the chat.
fn chat_with(model: &Scripted, input: &str, terminal: bool) -> (Result<(), Failure>, Streams) {
    let sampling = sampling();
    let mut session = session(model, &sampling);
    let mut streams = Streams::new(input);
    let mut console = streams.console();
    console.in_is_terminal = terminal;
    let done = session.run(&mut Plain, &mut console);
    (done, streams)
}

fn chat(model: &Scripted, input: &str) -> Streams {
    let (done, streams) = chat_with(model, input, false);
    done.unwrap();
    streams
}

#[test]
fn replies_alone_are_on_standard_output_and_history_grows() {
    let model = mock::instruct(&["yes", "."]);
    let streams = chat(&model, "one\n\n  \ntwo\n");
    assert_eq!(streams.out(), "yes.\nyes.\n");
    assert_eq!(streams.err(), "");
    assert_eq!(
        model.asked(),
        ["chat user:one", "chat user:one|assistant:yes.|user:two"]
    );
}

#[test]
fn bye_leaves_and_clear_forgets() {
    let model = mock::instruct(&["ok"]);
    chat(&model, "a\n/clear\nb\n/bye\nc\n");
    assert_eq!(model.asked(), ["chat user:a", "chat user:b"]);
}

#[test]
fn system_comes_first_by_either_command() {
    let model = mock::instruct(&["ok"]);
    chat(
        &model,
        "/system Be brief.\na\n/clear\n/set system \"Be long.\"\nb\n",
    );
    assert_eq!(
        model.asked(),
        [
            "chat system:Be brief.|user:a",
            "chat system:Be long.|user:b"
        ]
    );
}

#[test]
fn set_reaches_the_options_and_refuses_nonsense() {
    let model = mock::instruct(&["a", "b", "c"]);
    let streams = chat(
        &model,
        "/set max_tokens 2\nx\n/set parameter max_tokens 1\ny\n/set max_tokens many\n/set\n",
    );
    assert_eq!(streams.out(), "ab\na\n");
    let err = streams.err();
    assert!(
        err.contains("\"many\"") && err.contains("max_tokens 1\n"),
        "{err}"
    );
}

#[test]
fn several_lines_are_one_message() {
    let model = mock::instruct(&["ok"]);
    chat(
        &model,
        "\"\"\"first\n/bye\n\nlast\"\"\"\n\"\"\"one line\"\"\"\n\"\"\"\nopen\n",
    );
    let asked = model.asked();
    assert_eq!(asked[0], "chat user:first\n/bye\n\nlast");
    assert!(asked[1].ends_with("user:one line"), "{asked:?}");
    assert!(asked[2].ends_with("user:open"), "{asked:?}");
}

#[test]
fn unknown_commands_are_told_and_paths_are_messages() {
    let model = mock::instruct(&["ok"]);
    let streams = chat(&model, "/nonsense\n/usr/lib is full\n");
    assert!(
        streams.err().contains("no command /nonsense"),
        "{}",
        streams.err()
    );
    assert_eq!(model.asked(), ["chat user:/usr/lib is full"]);
}

#[test]
fn stats_show_and_help_answer_on_standard_error() {
    let model = mock::instruct(&["a", "b"]);
    let streams = chat(&model, "/stats\nx\n/stats\n/show\n/help\n/?\n");
    let err = streams.err();
    for part in [
        "no reply yet",
        "generated: 2 tokens",
        "1 replies",
        "architecture mock",
        "/system TEXT",
    ] {
        assert!(err.contains(part), "{part:?} not in {err}");
    }
    assert_eq!(streams.out(), "ab\n");
}

#[test]
fn an_interrupted_reply_is_kept_as_far_as_it_came() {
    let model = mock::instruct(&["a", "b"]).after(1, Step::fail(ErrorKind::Cancelled));
    let streams = chat(&model, "x\ny\n");
    assert_eq!(streams.out(), "a\na\n");
    assert_eq!(model.asked()[1], "chat user:x|assistant:a|user:y");
    assert!(streams.err().contains("stopped"), "{}", streams.err());
}

#[test]
fn a_failed_reply_ends_a_script_but_not_a_conversation() {
    let broken = || mock::instruct(&["a", "b"]).after(1, Step::fail(ErrorKind::Engine));
    let model = broken();
    let (done, _) = chat_with(&model, "x\ny\n", false);
    assert_eq!(done.unwrap_err().exit_code(), 1);
    assert_eq!(model.asked().len(), 1);

    let model = broken();
    let (done, streams) = chat_with(&model, "x\ny\n", true);
    done.unwrap();
    // A failed exchange must not stay in the conversation.
    assert_eq!(model.asked(), ["chat user:x", "chat user:y"]);
    assert_eq!(streams.err().matches("error: ").count(), 2);
}

#[test]
fn a_closed_model_ends_the_conversation() {
    let model = mock::instruct(&["a"]).after(0, Step::fail(ErrorKind::Closed));
    let (done, _) = chat_with(&model, "x\ny\n", true);
    assert_eq!(done.unwrap_err().exit_code(), 1);
}

#[test]
fn one_prompt_is_answered_by_every_kind_of_model() {
    let sampling = sampling();
    for (model, asked) in [
        (mock::instruct(&["ok"]), "chat user:hi"),
        (mock::base(&["ok"]), "text hi"),
    ] {
        let mut streams = Streams::new("");
        session(&model, &sampling)
            .answer("hi".into(), &mut streams.console())
            .unwrap();
        assert_eq!(model.asked(), [asked]);
        assert_eq!(
            (streams.out().as_str(), streams.err().as_str()),
            ("ok\n", "")
        );
    }
    let model = mock::instruct(&["a", "b"]).after(1, Step::fail(ErrorKind::Cancelled));
    let mut streams = Streams::new("");
    let mut console = streams.console();
    console.in_is_terminal = true;
    console.verbose = true;
    let failure = session(&model, &sampling).answer("hi".into(), &mut console);
    assert_eq!(failure.unwrap_err().exit_code(), 130);
    assert!(
        streams.err().contains("generated: 1 tokens"),
        "{}",
        streams.err()
    );
}

#[test]
fn commands_that_fail_do_not_end_the_conversation() {
    let model = mock::instruct(&["ok"]);
    let streams = chat(&model, "/save\n/load\n/resume\n/show nonsense\nhi\n");
    let err = streams.err();
    for part in ["/save NAME", "/load NAME", "no conversation", "/show knows"] {
        assert!(err.contains(part), "{part}: {err}");
    }
    assert_eq!(streams.out(), "ok\n");
}

#[test]
fn statistics_follow_replies_where_wanted() {
    let model = mock::instruct(&["ok"]);
    let streams = chat(
        &model,
        "/set verbose\nhi\n/set quiet\nhi\n/show parameters\n",
    );
    let err = streams.err();
    assert_eq!(err.matches("tok/s").count(), 2, "{err}");
    assert!(err.contains("temperature 0\n"), "{err}");
}
