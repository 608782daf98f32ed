//! Tests of training runs that a kill or Ctrl-C ends at a random moment.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use metal_backend::train::config::TrainConfig;
use metal_backend::train::train_log::{Entry, LOG_FILE};
use metal_backend::train::{Run, STATE_FILE, Start, WEIGHTS_FILE};
use serde_json::Value;

use crate::{command, cpu, log, model, pirate, stderr};

/// The environment variable with the random seed. With the printed seed, a failure can be repeated.
const SEED: &str = "TRAIN_INTERRUPT_SEED";

/// A pseudo-random generator (SplitMix64). [`SEED`] or the clock seeds it, and a failing test
/// prints the seed.
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

    /// A random duration up to `longest`, in microseconds.
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

/// Starts a training process. `output` makes its standard output.
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

/// Waits up to a minute until the condition is true. The program must keep running.
fn wait(child: &mut Child, what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        assert!(begun.elapsed() < Duration::from_secs(60), "it does nothing");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reads each file of an adapter directory completely, and returns the number of files with
/// tensors.
fn all_are_whole(adapters: &Path) -> usize {
    let mut tensors = 0;
    for entry in std::fs::read_dir(adapters).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_str().unwrap();
        // The name of a partial file starts with a dot. Readers ignore such files.
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
            // The log grows by lines. A kill may leave an incomplete last line, which resuming
            // removes.
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

/// After a kill at any moment, every file must be complete, and the run must be resumable.
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
        // The run saves its state after every step.
        let mut child = begin(
            &adapters,
            Stdio::null,
            &[&["--save-every", "1"], more].concat(),
        );
        // Every second round may be killed before its first save, but the first round may not.
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
        // A new run removes the partial files that the killed run left, and leaves none itself.
        assert_eq!(hidden(&adapters), 0, "round {round}");
    }
    assert!(last >= 3, "{last}");
}

/// At any moment, Ctrl-C must save the run, print a report and exit with 130. SIGTERM must exit
/// with 143.
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
        // All completed steps were saved, so the resumed run must not repeat a step.
        let entries = log(&adapters);
        let numbers: Vec<u64> = entries.iter().map(Entry::step).collect();
        assert_eq!(numbers, (1..=steps).collect::<Vec<_>>());
        let options = TrainConfig::read(adapters.join("training_config.yaml")).unwrap();
        let resumed = Run::prepare(&model(), &cpu(), options, Start::Resume).unwrap();
        assert_eq!(resumed.step(), steps);
        last = steps;
    }
}

/// Number of partial files.
fn hidden(adapters: &Path) -> usize {
    let names = std::fs::read_dir(adapters).unwrap();
    names
        .filter(|e| {
            let name = e.as_ref().unwrap().file_name();
            name.to_str().unwrap().starts_with('.')
        })
        .count()
}

/// Number of saved adapters whose names contain a step number.
fn numbered(adapters: &Path) -> usize {
    let names = std::fs::read_dir(adapters).unwrap();
    names
        .filter(|e| {
            let name = e.as_ref().unwrap().file_name();
            name.to_str().unwrap().ends_with("_adapters.safetensors")
        })
        .count()
}
