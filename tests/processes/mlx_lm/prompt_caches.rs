//! Tests that Python mlx-lm and this program can continue each other's saved prompts.

use super::*;

/// Runs one of mlx-lm's Python programs.
fn python(arguments: &[&str]) -> String {
    let mut command = Command::new(crate::python::with_mlx_lm());
    command.args(["-m", "mlx_lm"]).args(arguments);
    finished(command)
}

fn finished(mut command: Command) -> String {
    // The network is not used.
    command
        .env("HF_HUB_OFFLINE", "1")
        .env("MLX_BACKEND", "cpu")
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn mlx(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command.args(arguments);
    finished(command)
}

/// The models and their flags. Weights are float32, the type in which both programs compute.
const MODELS: [(&str, &[&str]); 3] = [
    ("llama", &[]),
    ("qwen3", &[]),
    // A head of 32 elements allows a quantized cache.
    (
        "qwen3-q4",
        &[
            "--kv-bits",
            "8",
            "--kv-group-size",
            "32",
            "--quantized-kv-start",
            "0",
        ],
    ),
];

const BEGUN: &str = "Once upon";
const ENDED: &str = " a time";

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn what_one_program_keeps_the_other_goes_on_from() {
    let dir = tempfile::tempdir().unwrap();
    for (name, flags) in MODELS {
        let path = tiny(name);
        let model = ["--model", path.to_str().unwrap()];
        let [ours, theirs] = ["ours", "theirs"].map(|of| {
            let file = dir.path().join(format!("{name}-{of}.safetensors"));
            file.to_str().unwrap().to_owned()
        });
        let begin = |file| {
            [
                &model[..],
                flags,
                &["--prompt", BEGUN, "--prompt-cache-file", file],
            ]
            .concat()
        };
        python(&[&["cache_prompt"][..], &begin(&theirs)].concat());
        mlx(&[&["cache-prompt", "--quiet"][..], &begin(&ours)].concat());
        let end = |file| {
            let reply = [
                "--max-tokens",
                "12",
                "--prompt",
                ENDED,
                "--prompt-cache-file",
                file,
            ];
            [&model[..], flags, &reply].concat()
        };
        let by_python =
            |file| python(&[&["generate", "--verbose", "False"][..], &end(file)].concat());
        let by_us = |file| mlx(&[&["generate", "--quiet"][..], &end(file)].concat());
        let expected = by_python(&theirs);
        assert!(!expected.trim().is_empty(), "{name}");
        for (who, got) in [
            ("ours, read by mlx-lm", by_python(&ours)),
            ("mlx-lm's, read by us", by_us(&theirs)),
            ("ours, read by us", by_us(&ours)),
        ] {
            assert_eq!(got.trim_end(), expected.trim_end(), "{name}: {who}");
        }
    }
}

/// mlx-lm wrote the golden files. When mlx-lm continues our files of the same prompts, the reply
/// must be equal.
#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn files_of_ours_say_in_mlx_lm_what_its_own_say() {
    let dir = tempfile::tempdir().unwrap();
    let cases = golden(&fixture("prompt-cache"));
    for case in cases.as_array().unwrap() {
        let name = case["file"].as_str().unwrap();
        // These cases need flags. `tests/engine/prompt_cache.rs` covers quantized and bounded
        // caches.
        if !case["flags"].as_array().unwrap().is_empty() {
            continue;
        }
        let path = tiny(case["model"].as_str().unwrap());
        let file = dir.path().join(name);
        let model = load(&path);
        let prompt_cache = model.as_prompt_cache().unwrap();
        prompt_cache
            .save_prompt_cache(
                &Prompt::Tokens(ids(&case["prompt"])),
                &file,
                &Interrupt::new(),
            )
            .unwrap();
        let expected = ids(&case["greedy"]);
        for file in [&file, &fixture("prompt-cache").join(name)] {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/golden/prompt_cache.py");
            let mut command = Command::new(crate::python::with_mlx_lm());
            command.arg(script).arg("--check").arg(&path).arg(file);
            command.args([case["more"].to_string(), expected.len().to_string()]);
            let tokens: Value = serde_json::from_str(&finished(command)).unwrap();
            assert_eq!(ids(&tokens), expected, "{name}: {}", file.display());
        }
    }
}
