//! A crate outside this workspace links the backend and selects the backend by name. The test
//! builds and runs the crate with Cargo alone, as its author would.

use std::path::Path;

use crate::common::{greedy, tiny};
use inference::Prompt;

fn outside(args: &[&str]) -> (String, String, std::process::Output) {
    let mut command = crate::dependant::cargo("tests/outside");
    command.args(["run", "--quiet", "--"]).args(args);
    crate::dependant::run(&mut command)
}

#[test]
fn a_strangers_program_links_the_backend_and_picks_it_by_name() {
    let path = crate::common::fixture("tiny/llama");
    let (stdout, stderr, output) = outside(&["cpu", path.to_str().unwrap()]);
    assert!(output.status.success(), "{stderr}");
    for name in ["cpu true", "cuda", "metal"] {
        assert!(stderr.contains(name), "{stderr}");
    }
    // The crate's manifest has no profile, so the engine is unoptimized and prints a warning.
    // docs/library.md has the recommended profile.
    assert!(stderr.contains("built without optimization"), "{stderr}");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/library.md");
    assert!(
        std::fs::read_to_string(page)
            .unwrap()
            .contains("[profile.dev.package.\"*\"]\nopt-level = 3")
    );
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

/// If a workspace contains this checkout in a subdirectory, it must exclude the checkout, as
/// docs/library.md says. Only then does Cargo read our packages with our edition and versions.
#[cfg(unix)]
#[test]
fn a_checkout_below_another_workspace_is_excluded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root, dir.path().join("rust-mlx")).unwrap();
    std::fs::create_dir(dir.path().join("src")).unwrap();
    std::fs::write(dir.path().join("src/lib.rs"), "").unwrap();
    let package = "[package]\nname = \"theirs\"\nversion = \"0.0.0\"\nedition = \"2021\"\n\
                   [dependencies]\nrust-mlx-inference-formats = { path = \"rust-mlx/inference-formats\" }\n";
    let read = |workspace: &str| {
        let manifest = format!("{package}{workspace}");
        std::fs::write(dir.path().join("Cargo.toml"), manifest).unwrap();
        let mut cargo = crate::dependant::clean(std::process::Command::new(env!("CARGO")));
        cargo.current_dir(dir.path()).args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ]);
        crate::dependant::run(&mut cargo)
    };
    let line = "[workspace]\nexclude = [\"rust-mlx\"]\n";
    let (out, err, output) = read(line);
    assert!(output.status.success(), "{err}");
    assert!(out.contains("\"theirs\""), "{out}");
    // Without the `exclude` line, Cargo must fail.
    let (_, err, output) = read("[workspace]\n");
    assert!(!output.status.success(), "{err}");
    let page = std::fs::read_to_string(root.join("docs/library.md")).unwrap();
    assert!(page.contains("exclude = [\"rust-mlx\"]"), "{page}");
}
