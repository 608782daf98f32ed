//! A crate outside this workspace links the backend and picks it by name. It is built and run as
//! its author would, with Cargo alone.

mod common;
#[path = "common/dependant.rs"]
mod dependant;

use common::{greedy, tiny};
use inference::Prompt;

fn outside(args: &[&str]) -> (String, String, std::process::Output) {
    let mut command = dependant::cargo("tests/outside", "dependants");
    command.args(["run", "--quiet", "--"]).args(args);
    dependant::run(&mut command)
}

#[test]
fn a_strangers_program_links_the_backend_and_picks_it_by_name() {
    let path = common::fixture("tiny/llama");
    let (stdout, stderr, output) = outside(&["cpu", path.to_str().unwrap()]);
    assert!(output.status.success(), "{stderr}");
    for name in ["cpu true", "cuda", "metal"] {
        assert!(stderr.contains(name), "{stderr}");
    }
    let expected = tiny("llama")
        .generate(&Prompt::Tokens(vec![40, 41, 42]), &greedy(8))
        .unwrap()
        .collect_output()
        .unwrap()
        .tokens;
    assert_eq!(stdout.trim(), format!("{expected:?}"));

    let (_, stderr, output) = outside(&["cqu", path.to_str().unwrap()]);
    assert!(!output.status.success());
    assert!(stderr.contains("did you mean"), "{stderr}");
}
