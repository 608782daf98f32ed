//! Tests of processes that Open MPI starts. `.ci/run` calls them where `mpirun` is installed.

use std::process::{Command, Output};

use super::{logits, model, run};
use crate::program::refused;

/// Runs the same command in two processes of `mpirun`.
fn started(args: &[&str], variable: (&str, &str)) -> Output {
    let home = tempfile::tempdir().unwrap();
    Command::new("mpirun")
        // Without these flags, MPI refuses to run as root, and refuses more processes than cores.
        .args(["--allow-run-as-root", "--oversubscribe", "-np", "2"])
        .arg(env!("CARGO_BIN_EXE_mlx"))
        .args(args)
        .env("HOME", home.path())
        .env("MLX_NUM_THREADS", "1")
        .env(variable.0, variable.1)
        .output()
        .unwrap()
}

#[test]
#[ignore = "needs mpirun of Open MPI (Debian: openmpi-bin)"]
fn processes_of_mpirun_compute_as_one_and_end_well() {
    let path = model("llama");
    let asked = ["logits", "--model", &path, "--tokens", "5,17,42"];
    let expected = logits(&run(&asked));
    for split in ["tensor", "pipeline"] {
        // `logits` also requires that `mpirun` succeeds.
        let parts = logits(&started(&asked, ("MLX_SPLIT", split)));
        assert_eq!(parts.len(), expected.len());
        let off = parts.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        assert!(off.fold(0.0, f64::max) < 1e-4, "{split}");
    }
}

#[test]
#[ignore = "needs mpirun of Open MPI (Debian: openmpi-bin)"]
fn a_process_of_mpirun_that_fails_ends_all() {
    let asked = ["logits", "--model", "/nothing/here", "--tokens", "5"];
    let err = refused(&started(&asked, ("MLX_SPLIT", "tensor")), 1);
    assert!(err.contains("/nothing/here"), "{err}");
}
