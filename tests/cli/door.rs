//! Tests of what users of other tools try first: model names, prompts, help and completions.

use std::process::Command;

use crate::common::fixture;
use crate::program::{mlx, output, piped, refused, stdout, text, tiny};
use serde_json::Value;

/// `run` prints the reply of `generate`, whether the prompt comes from arguments, a pipe or both.
#[test]
fn run_answers_words_and_pipes_alike() {
    let home = tempfile::tempdir().unwrap();
    let model = tiny();
    // Without these flags, `run` samples tokens at random.
    let greedy = ["--temp", "0", "--repeat-penalty", "1"];
    let flags = [&["--backend", "cpu", "-n", "8"], &greedy[..]].concat();
    let run = |words: &[&str]| {
        let args = [&["run", &model], words, &flags].concat();
        mlx(home.path(), &args)
    };
    let generate = [&["generate", "-m", &model, "tell me more"][..], &flags].concat();
    let wanted = stdout(&mlx(home.path(), &generate).output().unwrap());
    assert!(wanted.len() > 1, "{wanted:?}");
    let words = run(&["tell me more"]).output().unwrap();
    assert_eq!(stdout(&words), wanted);
    // As in ollama, only `--verbose` prints statistics.
    let said = text(&words.stderr);
    assert!(
        said.contains("--max-tokens") && !said.contains("tok/s"),
        "{said}"
    );
    let told = run(&["tell me more", "--verbose"]).output().unwrap();
    assert!(
        text(&told.stderr).contains("tok/s"),
        "{}",
        text(&told.stderr)
    );
    assert_eq!(
        stdout(&run(&["tell", "me", "more"]).output().unwrap()),
        wanted
    );
    assert_eq!(stdout(&piped(run(&[]), "tell me more\n")), wanted);
    assert_eq!(stdout(&piped(run(&["more"]), "tell me\n")), wanted);
    refused(&run(&[]).output().unwrap(), 2);
}

/// A model's `generation_config.json` recommends sampling options. In this test the file allows
/// either exactly one token or any token.
#[test]
fn run_draws_as_the_model_s_files_say() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, model.join(file.file_name().unwrap())).unwrap();
    }
    let name = model.to_str().unwrap();
    let run = |more: &[&str]| {
        let args = ["run", name, "tell me more", "--backend", "cpu", "-n", "8"];
        let args = [&args[..], &["--repeat-penalty", "1"], more].concat();
        stdout(&mlx(home.path(), &args).output().unwrap())
    };
    let greedy = run(&["--temp", "0"]);
    // The tiny model's probabilities are nearly uniform, so eight sampled tokens always differ from
    // the eight greedy tokens.
    let drawn: Vec<String> = ["1", "2", "3"]
        .iter()
        .map(|n| run(&["--seed", n]))
        .collect();
    assert!(drawn.iter().all(|reply| *reply != greedy), "{drawn:?}");
    let config = model.join("generation_config.json");
    std::fs::write(&config, r#"{"do_sample": true, "top_k": 1}"#).unwrap();
    assert_eq!(run(&["--seed", "1"]), greedy);
    // An error in the recommendation file causes a warning, and the command continues.
    std::fs::write(&config, r#"{"top_k": "one"}"#).unwrap();
    assert_eq!(run(&["--seed", "1"]), drawn[0]);
}

/// `--format`, a flag of ollama, sets a JSON schema.
#[test]
fn run_has_ollama_s_format() {
    let home = tempfile::tempdir().unwrap();
    let model = tiny();
    let run = |format: &str| {
        let args = [
            "run",
            &model,
            "hi",
            "--backend",
            "cpu",
            "-n",
            "200",
            "--format",
            format,
        ];
        mlx(home.path(), &args).output().unwrap()
    };
    let said = stdout(&run(r#"{"enum": ["left", "right"]}"#));
    assert!(
        matches!(said.as_str(), "\"left\"\n" | "\"right\"\n"),
        "{said}"
    );
    refused(&run("yaml"), 2);
}

#[test]
fn names_that_are_nowhere_are_answered_with_ways_out() {
    let told = refused(&output(&["run", "smolm2", "hi"]), 1);
    assert!(told.contains("did you mean smollm2"), "{told}");
    let told = refused(&output(&["run", "llama3.2", "hi"]), 1);
    assert!(
        told.contains("mlx pull mlx-community/Llama-3.2-3B-Instruct-4bit"),
        "{told}"
    );
    // The URL of a page on the hub is a valid model name.
    for address in [
        "hf.co/own/tiny",
        "https://huggingface.co/own/tiny/tree/main",
    ] {
        let told = refused(&output(&["pull", address]), 1);
        assert!(
            told.contains("own/tiny is not") && told.contains("MLX_OFFLINE"),
            "{told}"
        );
    }
}

/// For a misspelled name, the error suggests a model from the Hugging Face cache. The model's name
/// in another tool also finds that model.
#[test]
fn cached_models_are_suggested_and_found() {
    let home = tempfile::tempdir().unwrap();
    let put = |owner: &str, name: &str| {
        let repository = home.path().join(format!("hub/models--{owner}--{name}"));
        let snapshot = repository.join("snapshots/0123456789012345678901234567890123456789");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repository.join("refs")).unwrap();
        let commit = "0123456789012345678901234567890123456789";
        std::fs::write(repository.join("refs/main"), commit).unwrap();
        for file in std::fs::read_dir(fixture("tiny/llama")).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), snapshot.join(file.file_name())).unwrap();
        }
    };
    put("own", "tiny-llama");
    put("mlx-community", "Llama-3.2-3B-Instruct-4bit");
    for typo in ["own/tinny-llama", "tiny-llama"] {
        let told = refused(&mlx(home.path(), &["show", typo]).output().unwrap(), 1);
        assert!(told.contains("did you mean own/tiny-llama"), "{told}");
    }
    for name in ["own/tiny-llama", "hf.co/own/tiny-llama", "llama3.2"] {
        let shown = mlx(home.path(), &["show", name, "--json"])
            .output()
            .unwrap();
        let shown: Value = serde_json::from_str(&stdout(&shown)).unwrap();
        assert_eq!(shown["architecture"], "llama", "{name}");
    }
}

#[test]
fn show_tells_what_the_files_say() {
    let model = tiny();
    let config = std::fs::read(fixture("tiny/llama/config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let json: Value = serde_json::from_str(&stdout(&output(&["show", &model, "--json"]))).unwrap();
    assert_eq!(json["architecture"], "llama");
    assert_eq!(json["context_length"], config["max_position_embeddings"]);
    assert_eq!(json["embedding_length"], config["hidden_size"]);
    let template = json["template"].as_str().unwrap();
    let alone = stdout(&output(&["show", &model, "--template"]));
    assert_eq!(
        alone.trim_end_matches('\n'),
        template.trim_end_matches('\n')
    );
    let people = stdout(&output(&["show", &model]));
    for part in [
        "  Model\n",
        "architecture",
        "context length",
        "  Capabilities\n",
    ] {
        assert!(people.contains(part), "{people}");
    }
    let told = refused(&output(&["show", &model, "--license"]), 1);
    assert!(told.contains("license"), "{told}");
    refused(&output(&["show", &model, "--license", "--template"]), 2);
}

#[test]
fn shells_and_man_know_every_subcommand() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&output(&["completions", shell]));
        for name in ["generate", "perplexity", "--max-tokens"] {
            // fish's completion script lists flags without dashes.
            assert!(
                script.contains(name.trim_start_matches('-')),
                "{shell}: {name}"
            );
        }
    }
    assert!(refused(&output(&["completions", "tcsh"]), 2).contains("bash"));
    let dir = tempfile::tempdir().unwrap();
    let pages = stdout(&output(&["man", dir.path().join("man1").to_str().unwrap()]));
    assert!(pages.lines().count() > 20, "{pages}");
    let mut referred = 0;
    for page in pages.lines() {
        let page = std::fs::read_to_string(page).unwrap();
        assert!(
            page.contains(".TH mlx") && page.contains(".SH SYNOPSIS"),
            "{page}"
        );
        // Each manual page that this page refers to exists.
        let page = page.replace("\\-", "-");
        for name in page.lines().filter_map(|line| line.strip_suffix("(1)")) {
            let file = dir.path().join(format!("man1/{name}.1"));
            assert!(file.is_file(), "{name}");
            referred += 1;
        }
    }
    assert!(referred > 40, "{referred}");
    assert!(dir.path().join("man1/mlx-vindex-walk.1").is_file());
    assert!(!pages.contains("help.1"), "{pages}");
    let page = std::fs::read_to_string(dir.path().join("man1/mlx-generate.1")).unwrap();
    assert!(page.contains("max\\-tokens"), "{page}");
}

#[cfg(unix)]
#[test]
fn bash_accepts_its_script() {
    let script = stdout(&output(&["completions", "bash"]));
    let mut bash = Command::new("bash");
    bash.args(["-n"]);
    assert!(piped(bash, &script).status.success());
}

#[test]
fn short_help_is_short_and_says_so() {
    for name in ["generate", "chat", "run", "train"] {
        let [short, long] = ["-h", "--help"].map(|flag| stdout(&output(&[name, flag])));
        assert!(
            short.lines().count() * 3 < long.lines().count() * 2,
            "{name}"
        );
        assert!(!short.contains("--frequency-penalty") || name == "train");
        for flag in ["--model", "--backend"] {
            assert!(name == "run" || short.contains(flag), "{name}: {flag}");
        }
    }
    let [short, long] = ["-h", "--help"].map(|flag| stdout(&output(&["generate", flag])));
    assert!(short.contains("`--help` shows all flags") && !long.contains("these are the usual"));
    assert!(long.contains("--frequency-penalty"));
}
