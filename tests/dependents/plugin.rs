//! Builds, tests and runs `examples/plugin/`, a third party's workspace with its own backend and a
//! program that chooses between both backends.

use std::process::Command;

use crate::common::{greedy, tiny};
use inference::Prompt;

const WORKSPACE: &str = "examples/plugin";

/// Runs the program in its workspace. The first call builds it.
fn chooser(args: &[&str]) -> Command {
    let mut command = crate::dependant::cargo(WORKSPACE);
    command.args(["run", "--quiet", "-p", "chooser", "--"]);
    command.args(args);
    command
}

/// A line of the list: the name, whether it is available, and its capabilities or the reason.
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
        // The backend is linked on every system, available or with a reason.
        let gpu = listed(&list, gpu).unwrap_or_else(|| panic!("{list}"));
        assert!(gpu.len() == 3 && !gpu[2].is_empty(), "{list}");
    }

    // The third party's model continues with the most frequent counted text.
    let tale = crate::dependant::stdout(&mut chooser(&["--backend", "echo", "models/tales"]));
    assert!(tale.starts_with("trigram\t["), "{tale}");
    assert!(tale.contains("\" capit"), "{tale}");

    // Third parties get the same results from our backend.
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

    // The flag overrides the default, and an error for a wrong name suggests another.
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
