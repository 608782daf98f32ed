//! Tests of runs that end early, by a kill or Ctrl-C, at random moments.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use metal_backend::train::config::TrainConfig;
use metal_backend::train::train_log::{Entry, LOG_FILE};
use metal_backend::train::{Run, STATE_FILE, Start, WEIGHTS_FILE};
use serde_json::Value;

use crate::{command, cpu, log, model, pirate, stderr};

/// The variable with the seed of the moments, so that a failure can be repeated.
const SEED: &str = "TRAIN_INTERRUPT_SEED";

/// Pseudo-random numbers (SplitMix64), seeded by the clock or by [`SEED`], which a failing test
/// prints.
struct Moments {
    seed: u64,
    state: u64,
}

impl Moments {
    fn new() -> Self {
        let seed = match std::env::var(SEED) {
            Ok(text) => text
                .parse()
                .unwrap_or_else(|e| panic!("{SEED}={text}: {e}")),
            Err(_) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                u64::from(now.subsec_nanos()) ^ u64::from(std::process::id()) << 32
            }
        };
        Self { seed, state: seed }
    }

    /// A duration up to `longest`, to the microsecond.
    fn next(&mut self, longest: Duration) -> Duration {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        Duration::from_micros(z % (longest.as_micros() as u64 + 1))
    }
}

impl Drop for Moments {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the moments were those of {SEED}={}", self.seed);
        }
    }
}

/// Trains in the background; `output` makes the process's output.
fn begin(adapters: &Path, output: fn() -> Stdio, more: &[&str]) -> Child {
    let (model, data) = (model(), pirate());
    let [model, data, path] = [&model, &data, adapters].map(|p| p.to_str().unwrap());
    let args = [
        "--model",
        model,
        "--data",
        data,
        "--adapter-path",
        path,
        "--backend",
        "cpu",
        "--iters",
        "1000000",
        "--batch-size",
        "1",
        "--val-batches",
        "0",
        "--steps-per-report",
        "1",
    ];
    command("train", &[&args[..], more].concat())
        .stdout(output())
        .stderr(output())
        .spawn()
        .unwrap()
}

/// Waits at most a minute for a condition, while the program runs.
fn wait(child: &mut Child, what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        assert!(begun.elapsed() < Duration::from_secs(60), "it does nothing");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reads every file of an adapter's directory completely, and returns the number of files with
/// tensors.
fn all_are_whole(adapters: &Path) -> usize {
    let mut tensors = 0;
    for entry in std::fs::read_dir(adapters).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_str().unwrap();
        // A partial file has a different name, and is never read.
        if name.starts_with('.') || file.is_dir() {
            continue;
        }
        let bytes = std::fs::read(&file).unwrap();
        let text = || std::str::from_utf8(&bytes).unwrap();
        match file.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => {
                safetensors::SafeTensors::deserialize(&bytes)
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
                tensors += 1;
            }
            Some("json") => {
                serde_json::from_str::<Value>(text()).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            Some("yaml") => {
                TrainConfig::from_yaml(text()).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            Some("svg") => assert!(text().trim_end().ends_with("</svg>"), "{name}"),
            // The file grows by lines. Its last line may be incomplete, and resuming removes it.
            Some("jsonl") => {
                for line in text().split_inclusive('\n').filter(|l| l.ends_with('\n')) {
                    serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("{name}: {e}"));
                }
            }
            _ => panic!("{name} is not known here"),
        }
    }
    tensors
}

/// After a kill at any moment, every file is complete and the run can be resumed.
#[test]
fn killed_at_any_moment_no_file_is_torn() {
    let mut moments = Moments::new();
    let dirs = tempfile::tempdir().unwrap();
    let adapters = dirs.path().join("a");
    let state = adapters.join(STATE_FILE);
    let saved = || std::fs::metadata(&state).and_then(|m| m.modified()).ok();
    let mut last = 0;
    for round in 0..6 {
        let before = saved();
        let more: &[&str] = if round > 0 { &["--resume"] } else { &[] };
        // The run saves after every step.
        let mut child = begin(
            &adapters,
            Stdio::null,
            &[&["--save-every", "1"], more].concat(),
        );
        // Every second round may end before its first save, but not the first round.
        if round % 2 == 0 {
            wait(&mut child, || saved() != before);
        } else {
            wait(&mut child, || adapters.join(LOG_FILE).is_file());
        }
        std::thread::sleep(moments.next(Duration::from_millis(60)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(all_are_whole(&adapters) >= 3);
        let options = TrainConfig::read(adapters.join("training_config.yaml")).unwrap();
        let resumed = Run::prepare(&model(), &cpu(), options, Start::Resume).unwrap();
        let step = resumed.step();
        let further = saved() != before;
        assert!(
            step >= last && (step > last) == further,
            "round {round}: {step} after {last}"
        );
        last = step;
        drop(resumed);
        // A new run removes the partial files of a killed one, and then its own.
        assert_eq!(hidden(&adapters), 0, "round {round}");
    }
    assert!(last >= 3, "{last}");
}

/// Ctrl-C at any moment saves, reports it and exits with 130; SIGTERM exits with 143.
#[test]
fn ctrl_c_saves_and_leaves() {
    let mut moments = Moments::new();
    let dirs = tempfile::tempdir().unwrap();
    let adapters = dirs.path().join("a");
    let mut last = 0;
    for round in 0..3 {
        let more: &[&str] = if round > 0 { &["--resume"] } else { &[] };
        let often = ["--save-every", if round == 1 { "1" } else { "1000000" }];
        let mut child = begin(
            &adapters,
            Stdio::piped,
            &[&["--json"], &often[..], more].concat(),
        );
        let lines = || {
            let text = std::fs::read_to_string(adapters.join(LOG_FILE)).unwrap_or_default();
            text.lines().count() as u64
        };
        wait(&mut child, || lines() >= last + 3);
        std::thread::sleep(moments.next(Duration::from_millis(40)));
        let (signal, code) = if round == 1 {
            ("-TERM", 143)
        } else {
            ("-INT", 130)
        };
        let sent = Command::new("kill")
            .args([signal, &child.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(stderr(&output).contains("--resume goes on"));
        assert_eq!(hidden(&adapters), 0);
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(told["interrupted"], true);
        let steps = told["steps"].as_u64().unwrap();
        assert!(steps >= last + 3, "{steps} after {last}");
        assert!(adapters.join(WEIGHTS_FILE).is_file());
        assert_eq!(all_are_whole(&adapters), 2 + numbered(&adapters));
        // All completed steps were saved, so none is repeated.
        let entries = log(&adapters);
        let numbers: Vec<u64> = entries.iter().map(Entry::step).collect();
        assert_eq!(numbers, (1..=steps).collect::<Vec<_>>());
        let options = TrainConfig::read(adapters.join("training_config.yaml")).unwrap();
        let resumed = Run::prepare(&model(), &cpu(), options, Start::Resume).unwrap();
        assert_eq!(resumed.step(), steps);
        last = steps;
    }
}

/// The number of partial files.
fn hidden(adapters: &Path) -> usize {
    let names = std::fs::read_dir(adapters).unwrap();
    names
        .filter(|e| {
            let name = e.as_ref().unwrap().file_name();
            name.to_str().unwrap().starts_with('.')
        })
        .count()
}

/// The number of adapters that are kept under their step's number.
fn numbered(adapters: &Path) -> usize {
    let names = std::fs::read_dir(adapters).unwrap();
    names
        .filter(|e| {
            let name = e.as_ref().unwrap().file_name();
            name.to_str().unwrap().ends_with("_adapters.safetensors")
        })
        .count()
}
