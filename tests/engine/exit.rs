//! Tests the end of a process whose other threads still generate: `main` returns, or the process
//! calls `exit`. The exit code must be the intended one, and no signal may end the process. Each
//! case runs in a separate process.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{greedy, tiny};
use inference::Prompt;

/// The environment variable that says how the child process ends, and after how many microseconds.
const HOW: &str = "RUST_MLX_TEST_EXIT";

#[test]
#[ignore = "a process of its own, started by processes_end_during_generation"]
fn child() {
    let how = std::env::var(HOW).unwrap();
    let (how, after) = how.split_once(' ').unwrap();
    let (started, running) = std::sync::mpsc::channel();
    for first in 0..2u32 {
        let started = started.clone();
        std::thread::spawn(move || {
            let model = tiny("llama");
            started.send(()).unwrap();
            for i in first.. {
                let prompt = Prompt::from(vec![1 + i % 50, 2, 3]);
                let stream = model.generate(&prompt, &greedy(16)).unwrap();
                stream.collect_output().unwrap();
            }
        });
    }
    running.recv().unwrap();
    std::thread::sleep(Duration::from_micros(after.parse().unwrap()));
    if how == "exit" {
        std::process::exit(7);
    }
    // Without this, the test harness's `main` would return while the threads still run.
}

#[test]
fn processes_end_during_generation() {
    let runs = std::env::var("RUST_MLX_TEST_EXITS").map_or(20, |n| n.parse().unwrap());
    for run in 0..runs {
        let (how, code) = [("exit", 7), ("return", 0)][run % 2];
        let after = (run * 7919) % 20_000;
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "exit::child", "--ignored"])
            .env(HOW, format!("{how} {after}"))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        let status = out.status;
        assert_eq!(
            status.code(),
            Some(code),
            "run {run}, {how}: {status:?} {text}"
        );
    }
}
