//! Builds, tests and runs `examples/plugin/`. It is a separate workspace with its own backend, and
//! a program that chooses between that backend and ours.

use std::process::Command;

use crate::common::{greedy, tiny};
use inference::Prompt;

const WORKSPACE: &str = "examples/plugin";

/// The `chooser` program of the plugin workspace. The first call builds it.
fn chooser(args: &[&str]) -> Command {
    let mut command = crate::dependant::cargo(WORKSPACE);
    command.args(["run", "--quiet", "-p", "chooser", "--"]);
    command.args(args);
    command
}

/// The words of a backend's line in the list: name, availability, then capabilities or the reason
/// why the backend is unavailable.
fn listed<'a>(list: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let mut lines = list.lines().map(|l| l.split('\t').collect::<Vec<_>>());
    lines.find(|l| l.first() == Some(&name))
}

#[test]
fn the_program_lists_every_linked_backend_and_runs_the_one_that_a_flag_names() {
    let list = crate::dependant::stdout(&mut chooser(&[]));
    let echo = listed(&list, "echo").unwrap_or_else(|| panic!("{list}"));
    assert_eq!(echo[1], "available", "{list}");
    assert!(echo[2].contains("streaming,chat"), "{list}");
    let cpu = listed(&list, "cpu").unwrap_or_else(|| panic!("{list}"));
    assert_eq!(cpu[1], "available", "{list}");
    for gpu in ["cuda", "metal", "mlx_lm"] {
        // Every system links this backend; where it cannot run, the list has the reason.
        let gpu = listed(&list, gpu).unwrap_or_else(|| panic!("{list}"));
        assert!(gpu.len() == 3 && !gpu[2].is_empty(), "{list}");
    }

    // The plugin's model continues with the text that most often follows in its training text.
    let tale = crate::dependant::stdout(&mut chooser(&["--backend", "echo", "models/tales"]));
    assert!(tale.starts_with("trigram\t["), "{tale}");
    assert!(tale.contains("\" capit"), "{tale}");

    // A program outside the workspace gets the replies from our backend that our own program gets.
    let prompt = "One, two, three";
    let path = crate::common::fixture("tiny/llama");
    let arguments = ["--backend=cpu", path.to_str().unwrap(), prompt];
    let reply = crate::dependant::stdout(&mut chooser(&arguments));
    let stream = tiny("llama").generate(&Prompt::from(prompt), &greedy(24));
    let expected = stream.unwrap().collect_output().unwrap();
    assert_eq!(
        reply.trim_end_matches('\n'),
        format!("llama\t{:?}\t{:?}", expected.tokens, expected.text)
    );

    // The flag overrides the default backend. The error for a wrong name suggests a correct one.
    for (arguments, says) in [
        (["--backend", "ecko", "models/tales"], "did you mean `echo`"),
        (["--backend", "cpu", "models/tales"], "models/tales"),
        (["--backend", "echo", "models/none"], "models/none"),
    ] {
        let (_, stderr, output) = crate::dependant::run(&mut chooser(&arguments));
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
        assert!(
            stderr.starts_with("error: ") && stderr.contains(says),
            "{stderr}"
        );
    }
}

#[test]
fn the_strangers_backend_passes_its_own_tests_and_the_conformance_suite() {
    let mut command = crate::dependant::cargo(WORKSPACE);
    command.args(["test", "--quiet", "-p", "echo-backend"]);
    command.args(["--", "--nocapture"]);
    let out = crate::dependant::stdout(&mut command);
    let verdict = out.lines().find(|l| l.ends_with(": `echo` conforms"));
    assert!(verdict.is_some_and(|l| l.contains(" 0 failed,")), "{out}");
}
