//! Compares `mlx evaluate --tasks` with `mlx_lm.evaluate`. Both run lm-eval's harness. The
//! questions are a small file in the data set's format (`tests/fixtures/lm-eval`), so the test
//! downloads nothing.

use super::*;

/// Runs a command with the questions and without a network.
fn offline(mut command: Command) -> Output {
    let cache = crate::python::kept().join("lm-eval-cache");
    command
        .current_dir(fixture("lm-eval"))
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_DATASETS_OFFLINE", "1")
        .env("HF_HOME", cache)
        .env("MLXLM_PYTHON", crate::python::with_lm_eval())
        .env("MLX_BACKEND", "cpu")
        .stdin(Stdio::null());
    command.output().unwrap()
}

fn successful(command: Command) -> Output {
    let output = offline(command);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    output
}

/// The metrics of a task.
fn figures(results: &Value) -> [f64; 4] {
    let task = &results["arc_easy"];
    let names = [
        "acc,none",
        "acc_stderr,none",
        "acc_norm,none",
        "acc_norm_stderr,none",
    ];
    names.map(|name| {
        task[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name} in {task}"))
    })
}

fn ours(model: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args([
            "evaluate", "--quiet", "--tasks", "arc_easy", "--limit", "20", "--model",
        ])
        .arg(model)
        .args(flags);
    command
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn arc_easy_has_the_figures_of_mlx_lm_on_the_first_model() {
    let gguf = rust_mlx::hub::first_model().unwrap();
    let converted = crate::python::first_model_converted(&gguf);
    let dir = tempfile::tempdir().unwrap();
    let mut theirs = Command::new(crate::python::with_lm_eval());
    theirs
        .args([
            "-m", "mlx_lm", "evaluate", "--tasks", "arc_easy", "--limit", "20", "--model",
        ])
        .arg(&converted)
        .arg("--output-dir")
        .arg(dir.path());
    successful(theirs);
    let files: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(files.len(), 1);
    let written = files[0].as_ref().unwrap();
    let theirs: Value = serde_json::from_slice(&std::fs::read(written.path()).unwrap()).unwrap();

    let out = tempfile::tempdir().unwrap();
    let flags = ["--output-dir", out.path().to_str().unwrap()];
    let run = successful(ours(&converted, &flags));
    let results: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(figures(&results), figures(&theirs), "{results}\n{theirs}");
    // Random answers would have an accuracy of one quarter.
    assert!(figures(&results)[0] > 0.4, "{results}");
    // The result file has mlx-lm's file name and content.
    let ours = std::fs::read(out.path().join(written.file_name())).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&ours).unwrap(), results);
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn faults_of_tasks_are_told() {
    let failed = |command| {
        let output = offline(command);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let mut command = ours(&tiny("llama"), &[]);
    command.args(["--tasks", "no_such_task"]);
    let told = failed(command);
    assert!(told.contains("no_such_task"), "{told}");
    // Without the harness, the error must say how to install it.
    let mut command = ours(&tiny("llama"), &[]);
    command.env("PYTHONPATH", fixture("lm-eval").join("missing"));
    let told = failed(command);
    assert!(told.contains("pip install lm_eval"), "{told}");
}
