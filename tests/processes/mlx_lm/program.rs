//! Tests of the backend through the program `mlx`.

use super::*;

/// The program with this Python interpreter for the backend `mlx_lm`.
fn mlx(args: &[&str], variable: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args(args)
        .env("MLXLM_PYTHON", crate::python::with_mlx_lm())
        .env_remove("MLX_BACKEND")
        .stdin(Stdio::null());
    if let Some(name) = variable {
        command.env("MLX_BACKEND", name);
    }
    command.output().unwrap()
}

fn json(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn the_program_lists_it_and_chooses_it_by_variable_and_flag() {
    let list = json(&mlx(&["backends", "--json"], None));
    let list: HashMap<&str, &Value> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|b| (b["name"].as_str().unwrap(), b))
        .collect();
    let entry = list["mlx_lm"];
    assert_eq!(entry["available"], true, "{entry}");
    assert_eq!(entry["default"], false);
    assert_eq!(entry["capabilities"]["logits"], true);
    assert_eq!(entry["capabilities"]["classify"], false);
    assert!(
        entry["device"].as_str().unwrap().contains("mlx-lm 0."),
        "{entry}"
    );

    let path = tiny("llama");
    let model = path.to_str().unwrap();
    let used = |args: &[&str], variable| {
        let all = [&["inspect", model, "--json"], args].concat();
        json(&mlx(&all, variable))["backend"].clone()
    };
    assert_eq!(used(&[], None), "cpu");
    assert_eq!(used(&[], Some("mlx_lm")), "mlx_lm");
    assert_eq!(used(&["--backend", "cpu"], Some("mlx_lm")), "cpu");
    assert_eq!(used(&["--backend", "mlx_lm"], Some("cpu")), "mlx_lm");
    let reply = |name: &str| {
        let args = [
            "generate",
            "--quiet",
            "--model",
            model,
            "--backend",
            name,
            "--raw",
            "--tokens",
            "40,41,42",
            "--max-tokens",
            "12",
            "--ignore-eos",
            "--json",
        ];
        json(&mlx(&args, None))["tokens"].clone()
    };
    assert_eq!(reply("mlx_lm"), reply("cpu"));
}

/// The backend cannot return hidden states or apply edits. Each command that needs them must say
/// so.
#[cfg(feature = "probe")]
#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn what_looks_inside_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let edits = r#"{"edits": [{"layers": 0, "hook": "z", "op": "zero"}]}"#;
    std::fs::write(file("edits.json"), edits).unwrap();
    std::fs::write(file("stimuli.json"), r#"[{"text": "the cat"}]"#).unwrap();
    let model = tiny("llama").display().to_string();
    let (edits, stimuli) = (file("edits.json"), file("stimuli.json"));
    let (npy, lines) = (file("a.npy"), file("e.jsonl"));
    for (command, says) in [
        (&["trace", "--tokens", "5,6"][..], "does not look inside"),
        (
            &["trace", "--tokens", "5,6", "--patch", "the cat"],
            "does not look inside",
        ),
        (
            &["probe", "extract", "-s", &stimuli, "-o", &npy],
            "does not show hidden states",
        ),
        (
            &["vindex", "edges", "--output", &lines],
            "does not look inside",
        ),
        (
            &["generate", "--raw", "--tokens", "5,6", "--steer", &edits],
            "does not have the option steering",
        ),
        (
            &[
                "bench",
                "--profile",
                "--prompt-tokens",
                "8",
                "--generate-tokens",
                "4",
            ],
            "--profile needs a backend",
        ),
    ] {
        let args = [command, &["--backend", "mlx_lm", "--model", &model]].concat();
        let run = mlx(&args, None);
        let errors = String::from_utf8_lossy(&run.stderr);
        assert!(
            matches!(run.status.code(), Some(1 | 2)),
            "{args:?}: {errors}"
        );
        assert!(errors.contains(says), "{args:?}: {errors}");
        assert!(run.stdout.is_empty(), "{args:?}");
    }
}

/// The child processes of a process.
#[cfg(target_os = "linux")]
fn children(parent: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).unwrap();
    tasks
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap())
        .collect::<String>()
        .split_whitespace()
        .map(|number| number.parse().unwrap())
        .collect()
}

/// After a kill, neither a Python process nor its script file may remain.
#[cfg(target_os = "linux")]
#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn a_killed_program_leaves_nothing_behind() {
    use std::io::{BufRead, BufReader};
    let room = tempfile::tempdir().unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args([
            "generate",
            "--backend",
            "mlx_lm",
            "--raw",
            "--tokens",
            "1,2,3",
        ])
        .args(["--ignore-eos", "--max-tokens", "100000000", "--model"])
        .arg(tiny("llama"))
        .env("MLXLM_PYTHON", crate::python::with_mlx_lm())
        .env("TMPDIR", room.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The first output proves that the Python process runs.
    let mut out = BufReader::new(program.stdout.take().unwrap());
    assert!(!out.fill_buf().unwrap().is_empty());
    let bridges = children(program.id());
    assert_eq!(bridges.len(), 1);
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 1);
    program.kill().unwrap();
    program.wait().unwrap();
    let process = PathBuf::from(format!("/proc/{}", bridges[0]));
    let begun = Instant::now();
    loop {
        let files: Vec<_> = std::fs::read_dir(room.path()).unwrap().collect();
        if files.is_empty() && !process.exists() {
            break;
        }
        let state = std::fs::read_to_string(process.join("stat"));
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "left behind: {files:?}, {state:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
