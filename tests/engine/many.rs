//! Tests of the commands that process many prompts, on tiny checkpoints: `mlx batch`, `classify`,
//! `embed`, `cache-prompt` and `perplexity`. The library computes the expected results.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::common::{fixture, greedy, max_difference, tiny};
use inference::{EmbedOptions, GenerateOptions, Interrupt, Pooling, Prompt};
use serde_json::{Value, json};

/// Runs the program with `input` on its standard input.
fn mlx(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(arguments)
        .env_remove("MLX_BACKEND")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // If the program refuses its flags, it exits without reading input, and this write fails.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn stderr(run: &Output) -> String {
    String::from_utf8_lossy(&run.stderr).into_owned()
}

fn lines(text: &[u8]) -> Vec<Value> {
    String::from_utf8(text.to_vec())
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
        .collect()
}

/// The output of a successful run, one JSON value on each line.
fn printed(arguments: &[&str], input: &str) -> Vec<Value> {
    let run = mlx(arguments, input);
    assert!(run.status.success(), "{arguments:?}: {}", stderr(&run));
    lines(&run.stdout)
}

fn by_index(mut all: Vec<Value>) -> Vec<Value> {
    all.sort_by_key(|v| v["index"].as_u64().unwrap());
    all
}

/// The flags that name a model.
fn model(name: &str) -> Vec<String> {
    let path = fixture("tiny").join(name);
    ["--backend", "cpu", "--model", path.to_str().unwrap()]
        .map(String::from)
        .to_vec()
}

fn with<'a>(command: &'a str, model: &'a [String], rest: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec![command];
    all.extend(model.iter().map(String::as_str));
    all.extend(rest);
    all
}

fn float_list(value: &Value) -> Vec<f32> {
    crate::common::floats(value)
}

const PROMPTS: &str = concat!(
    "\"Hello there\"\n",
    "{\"prompt\":\"A longer prompt, of which there is more\",\"id\":\"second\"}\n",
    "{\"tokens\":[7,8,9],\"id\":3}\n",
    "\"The end\"\n",
);

#[test]
fn a_batch_gives_every_prompt_its_own_reply() {
    let name = model("qwen3");
    let run = with(
        "batch",
        &name,
        &["--max-tokens", "9", "--ignore-eos", "--batch-size", "3"],
    );
    let all = by_index(printed(&run, PROMPTS));
    assert_eq!(all.len(), 4);
    let ours = tiny("qwen3");
    let prompts = [
        Prompt::from("Hello there"),
        Prompt::from("A longer prompt, of which there is more"),
        Prompt::Tokens(vec![7, 8, 9]),
        Prompt::from("The end"),
    ];
    for (got, prompt) in all.iter().zip(&prompts) {
        let alone = ours.generate(prompt, &greedy(9)).unwrap();
        let alone = alone.collect_output().unwrap();
        assert_eq!(got["tokens"], json!(alone.tokens), "{prompt:?}");
        assert_eq!(got["text"], alone.text);
        assert_eq!(got["finish_reason"], "length");
    }
    assert_eq!(
        (&all[0]["id"], &all[1]["id"], &all[2]["id"]),
        (&Value::Null, &json!("second"), &json!(3))
    );
}

#[test]
fn an_interrupted_batch_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"));
    std::fs::write(&input, PROMPTS).unwrap();
    let name = model("llama");
    let (input, output) = (input.to_str().unwrap(), output.to_str().unwrap());
    let flags = ["--max-tokens", "5", "-i", input, "-o", output];
    let run = with("batch", &name, &flags);
    assert!(printed(&run, "").is_empty(), "results go to the file");
    let uninterrupted = std::fs::read(output).unwrap();
    let expected = by_index(lines(&uninterrupted));
    assert_eq!(expected.len(), 4);
    // The output file ends inside the third line, as after a crash.
    let ends: Vec<usize> = (0..uninterrupted.len())
        .filter(|&i| uninterrupted[i] == b'\n')
        .collect();
    std::fs::write(output, &uninterrupted[..ends[1] + 9]).unwrap();
    let again = mlx(&run, "");
    assert!(again.status.success(), "{}", stderr(&again));
    assert!(stderr(&again).contains("2 prompts"), "{}", stderr(&again));
    let after = std::fs::read(output).unwrap();
    assert_eq!(
        after[..=ends[1]],
        uninterrupted[..=ends[1]],
        "what was there stays"
    );
    assert_eq!(by_index(lines(&after)), expected);
    // Another run finds all prompts complete, and needs no input.
    assert!(mlx(&run, "").status.success());
    assert_eq!(std::fs::read(output).unwrap(), after);
}

#[test]
fn a_prompt_that_fails_is_told_and_the_others_are_answered() {
    let name = model("llama");
    let run = with("batch", &name, &["--max-tokens", "4"]);
    let output = mlx(&run, "\"good\"\n{\"tokens\":[1,4000000]}\n\"as well\"\n");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("1 of 3"), "{}", stderr(&output));
    let all = by_index(lines(&output.stdout));
    assert_eq!(all.len(), 3);
    let error = all[1]["error"].as_str().unwrap();
    assert!(error.contains("4000000"), "{error}");
    for good in [&all[0], &all[2]] {
        assert!(good["error"].is_null() && good["finish_reason"].is_string());
    }
    // The program checks all prompts before it computes anything.
    let output = mlx(&run, "\"good\"\nnot json\n");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("line 2"), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}

#[test]
fn what_runs_together_is_measured() {
    let name = model("llama");
    let flags = ["--together", "3", "--generate-tokens", "6", "--repeat", "2"];
    let run = with("bench", &name, &flags);
    let all = printed(&[&run[..], &["--prompt-tokens", "9"]].concat(), "");
    let together = &all[0]["together"];
    assert_eq!(together["requests"], 3);
    assert_eq!(together["classify"]["prompts"], 6);
    assert_eq!(together["classify_alike"]["tokens_alike"], 64);
    assert_eq!(together["classify_chats"]["prompts"], 6, "{together}");
    let lengths = &together["classify_chats"]["prompt_tokens"];
    assert!(lengths[0].as_u64() > Some(16) && lengths[0].as_u64() < lengths[1].as_u64());
    let tokens = together["classify_chats"]["tokens"].as_array().unwrap();
    let length = |ids: &Value| ids.as_array().map(|ids| ids.len() as u64);
    assert_eq!(tokens.len(), 6);
    assert_eq!(tokens.iter().map(length).min(), Some(lengths[0].as_u64()));
    assert_eq!(tokens.iter().map(length).max(), Some(lengths[1].as_u64()));
    for (section, figures) in [
        (
            "batch",
            &["sequential_tokens_per_second", "together_tokens_per_second"],
        ),
        ("classify", &["sequential_seconds", "together_seconds"]),
        (
            "classify_alike",
            &["sequential_seconds", "together_seconds"],
        ),
        (
            "classify_chats",
            &["sequential_seconds", "together_seconds"],
        ),
        (
            "sampling",
            &["greedy_seconds_per_token", "chain_seconds_per_token"],
        ),
    ] {
        for figure in figures {
            let value = together[section][figure].as_f64();
            assert!(
                value.is_some_and(|v| v > 0.0),
                "{section} {figure}: {all:?}"
            );
        }
    }
    let few = [
        "--together",
        "2",
        "--generate-tokens",
        "1",
        "--prompt-tokens",
        "4",
    ];
    let output = mlx(&with("bench", &name, &few), "");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn packing_begins_where_mlx_lm_begins() {
    let name = model("qwen3-q4");
    let reply = |flags: &[&str]| {
        let prompt = [
            "--raw",
            "--prompt",
            "Once upon a time",
            "--max-tokens",
            "40",
            "--ignore-eos",
            "--json",
            "--logprobs",
            "0",
        ];
        let run = [&with("generate", &name, &prompt)[..], flags].concat();
        printed(&run, "")[0]["logprobs"].clone()
    };
    let plain = reply(&[]);
    let packed = ["--kv-bits", "2", "--kv-group-size", "32"];
    assert_eq!(
        reply(&packed),
        plain,
        "nothing is packed before the 5,000th position"
    );
    let now = reply(&[&packed[..], &["--quantized-kv-start", "0"]].concat());
    assert_ne!(now, plain);
}

#[test]
fn classification_names_the_likeliest_token_and_label() {
    let name = model("gemma2");
    let run = with(
        "classify",
        &name,
        &[
            "--top",
            "3",
            "--label",
            " a",
            "--label",
            "Z",
            "--precision",
            "exact",
        ],
    );
    let all = printed(&run, PROMPTS);
    assert_eq!(all.len(), 4);
    let ours = tiny("gemma2");
    let prompts = [
        Prompt::from("Hello there"),
        Prompt::from("A longer prompt, of which there is more"),
        Prompt::Tokens(vec![7, 8, 9]),
        Prompt::from("The end"),
    ];
    let results = ours
        .classify(&prompts, &GenerateOptions::new(), true)
        .unwrap();
    let tokens = ours.as_token_model().unwrap();
    let firsts = [" a", "Z"].map(|label| tokens.encode(label, false).unwrap()[0] as usize);
    for (i, (got, result)) in all.iter().zip(&results).enumerate() {
        assert_eq!(got["index"], i);
        assert_eq!(got["token"], result.token.id);
        let top = got["top"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["token"]), (3, &json!(result.token.id)));
        let shares: Vec<f64> = top
            .iter()
            .map(|t| t["probability"].as_f64().unwrap())
            .collect();
        assert!(shares.is_sorted_by(|a, b| a >= b) && shares.iter().sum::<f64>() < 1.0 + 1e-9);
        let logits = result.logits.as_ref().unwrap();
        let ratio = f64::from(logits[firsts[0]] - logits[firsts[1]]).exp();
        let (a, z) = (&got["labels"][" a"], &got["labels"]["Z"]);
        let (a, z) = (a.as_f64().unwrap(), z.as_f64().unwrap());
        assert!((a + z - 1.0).abs() < 1e-9 && (a / z / ratio - 1.0).abs() < 1e-3);
        assert_eq!(got["label"], if a > z { " a" } else { "Z" });
    }
    let same = with("classify", &name, &["--label", "Z", "--label", "Z"]);
    let output = mlx(&same, PROMPTS);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("same token"));
}

#[test]
fn embeddings_are_those_of_the_library() {
    let name = model("qwen3");
    let ours = tiny("qwen3");
    let embedder = ours.as_embedding_model().unwrap();
    let text = "Hello there\nThe end\n";
    let prompts = ["Hello there", "The end"].map(Prompt::from);
    for (flags, pooling, normalize) in [
        (&["--text"][..], Pooling::Mean, true),
        (
            &["--text", "--pooling", "last", "--no-normalize"],
            Pooling::Last,
            false,
        ),
    ] {
        let all = printed(&with("embed", &name, flags), text);
        let options = EmbedOptions::new()
            .with_pooling(pooling)
            .with_normalize(normalize);
        let none = Interrupt::new();
        let expected = embedder.embed(&prompts, &options, &none).unwrap();
        assert_eq!(all.len(), 2);
        for (got, expected) in all.iter().zip(&expected) {
            let difference = max_difference(&float_list(&got["embedding"]), expected);
            assert!(difference < 1e-5, "{difference}");
        }
    }
}

#[test]
fn a_kept_prompt_gives_the_reply_of_the_whole_and_is_not_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kept.safetensors");
    let file = file.to_str().unwrap();
    let name = model("llama");
    let cached = with(
        "cache-prompt",
        &name,
        &[
            "--raw",
            "--prompt",
            "Once upon a time",
            "--prompt-cache-file",
            file,
        ],
    );
    let about = printed(&cached, "");
    let n = about[0]["tokens"].as_u64().unwrap();
    assert!(n > 3);
    assert_eq!(
        about[0]["bytes"].as_u64().unwrap(),
        std::fs::metadata(file).unwrap().len()
    );
    let flags = [
        "--raw",
        "--prompt",
        " there was",
        "--prompt-cache-file",
        file,
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--json",
    ];
    let run = with("generate", &name, &flags);
    let got = &printed(&run, "")[0];
    assert_eq!(got["metrics"]["cached_tokens"], n);
    let ours = tiny("llama");
    let tokens = ours.as_token_model().unwrap();
    let mut full_prompt = tokens.encode("Once upon a time", true).unwrap();
    assert_eq!(full_prompt.len() as u64, n);
    full_prompt.extend(tokens.encode(" there was", false).unwrap());
    let expected = ours
        .generate(&Prompt::Tokens(full_prompt), &greedy(8))
        .unwrap();
    assert_eq!(
        got["tokens"],
        json!(expected.collect_output().unwrap().tokens)
    );
    // A prompt cache of one model must not load into another model.
    let other = model("qwen3");
    let output = mlx(&with("generate", &other, &flags), "");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("another model"),
        "{}",
        stderr(&output)
    );
    // A file that is not a prompt cache is refused.
    std::fs::write(file, "not a cache").unwrap();
    let output = mlx(&run, "");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
}

#[test]
fn perplexity_is_of_the_whole_pieces_of_the_text() {
    let name = model("llama");
    let ours = tiny("llama");
    let tokens = ours.as_token_model().unwrap();
    let text = "It was the best of times, it was the worst of times. ".repeat(6);
    let ids = tokens.encode(&text, true).unwrap();
    let run = with("perplexity", &name, &["-p", "-", "--sequence-length", "33"]);
    let got = &printed(&run, &text)[0];
    let evaluated = ids.len() / 33 * 33;
    assert!(evaluated > 33 && ids.len() - evaluated > 1);
    assert_eq!(got["skipped_tokens"], ids.len() - evaluated);
    let scores: Vec<f64> = ids[..evaluated]
        .chunks(33)
        .flat_map(|piece| {
            tokens
                .token_logprobs(&Prompt::Tokens(piece.to_vec()), &Interrupt::new())
                .unwrap()
        })
        .map(|logprob| -f64::from(logprob))
        .collect();
    assert_eq!(got["tokens"], scores.len());
    let mean = scores.iter().sum::<f64>() / scores.len() as f64;
    let perplexity = got["perplexity"].as_f64().unwrap();
    assert!((perplexity / mean.exp() - 1.0).abs() < 1e-6, "{perplexity}");
    // A text that is shorter than a piece forms one piece.
    let short = &printed(&with("perplexity", &name, &["-p", &text]), "")[0];
    assert_eq!(short["tokens"], ids.len() - 1);
    assert_eq!(short["skipped_tokens"], 0);
    let output = mlx(&with("perplexity", &name, &["-p", ""]), "");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
}
