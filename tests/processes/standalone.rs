//! A bundled program must run without any file of its build. A program that cannot find MLX's
//! library must print a remedy.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::{Command, Output};

fn mlx(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/bin:/bin");
    command
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn a_bundle_works_for_another_user_in_another_place() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let made = dir.path().join("made");
    let built = Path::new(env!("CARGO_BIN_EXE_mlx"));
    let output = Command::new(built)
        .args(["self", "bundle"])
        .arg(&made)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(Path::new(printed.trim()), made.join("bin/mlx"));

    let moved = dir.path().join("moved");
    std::fs::rename(&made, &moved).unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/llama");
    let model = dir.path().join("model");
    copy(&fixture, &model);
    // The dynamic loader logs each file that it opens.
    let log = dir.path().join("log");
    std::fs::create_dir(&log).unwrap();
    std::fs::set_permissions(&log, std::fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = mlx(&moved.join("bin/mlx"));
    command
        .env("LD_DEBUG", "files")
        .env("LD_DEBUG_OUTPUT", log.join("files"))
        .args(["logits", "--tokens", "1,2,3", "--model"])
        .arg(&model);
    if std::fs::metadata("/proc/self")
        .is_ok_and(|metadata| std::os::unix::fs::MetadataExt::uid(&metadata) == 0)
    {
        // This user may not read the home directory of the user who built the program.
        command.uid(65534).gid(65534);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let mut opened = String::new();
    for entry in std::fs::read_dir(&log).unwrap() {
        opened += &std::fs::read_to_string(entry.unwrap().path()).unwrap();
    }
    let lines = || {
        opened
            .lines()
            .filter(|line| line.contains("calling init: "))
    };
    for name in ["libmlx.so", "libblas", "liblapack"] {
        let matches: Vec<_> = lines().filter(|line| line.contains(name)).collect();
        assert!(!matches.is_empty(), "{name} is not opened");
        for line in matches {
            assert!(line.contains(&*moved.to_string_lossy()), "{line}");
        }
    }
}

#[test]
fn without_the_library_the_program_starts_and_says_what_would_help() {
    let dir = tempfile::tempdir().unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_mlx"));
    let run = |args: &[&str]| {
        mlx(built)
            .env("MLX_LIBRARY_DIR", dir.path())
            .args(args)
            .output()
            .unwrap()
    };
    let output = run(&["backends"]);
    assert!(output.status.success(), "{}", text(&output));
    let said = text(&output);
    assert!(
        said.contains("are not available") && said.contains("cpu"),
        "{said}"
    );
    assert!(said.contains(&*dir.path().to_string_lossy()), "{said}");
    assert!(said.contains("MLX_LIBRARY_DIR"), "{said}");
    assert!(said.contains("mlx self install"), "{said}");
    let output = run(&[
        "generate",
        "--model",
        "tests/fixtures/tiny/llama",
        "--prompt",
        "a",
    ]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("mlx self install"),
        "{}",
        text(&output)
    );
    // The program prints the reason once, not once per backend.
    assert_eq!(
        text(&output).matches("libmlx").count(),
        1,
        "{}",
        text(&output)
    );
    assert!(text(&output).len() < 600, "{}", text(&output));
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}
