//! Tests of command lines that users of Python's mlx-lm write by habit.

use crate::common::fixture;
use crate::program::{mlx, output, refused, stdout, text, tiny};
use serde_json::Value;

/// The tiny model whose tokenizer adds no special tokens to the template's text.
fn gpt2() -> String {
    fixture("tiny/gpt2").to_str().unwrap().to_owned()
}

/// The output of `generate --json` with these flags.
#[track_caller]
fn generated(model: &str, args: &[&str]) -> Value {
    let fixed = [
        "generate",
        "--backend",
        "cpu",
        "-m",
        model,
        "--json",
        "-n",
        "8",
    ];
    let home = tempfile::tempdir().unwrap();
    let all = [&fixed, args].concat();
    serde_json::from_str(&stdout(&mlx(home.path(), &all).output().unwrap())).unwrap()
}

/// Checks that the model receives equal prompts from two command lines.
#[track_caller]
fn same(args: &[&str], raw: &str) {
    let model = gpt2();
    let (one, other) = (
        generated(&model, args),
        generated(&model, &["--raw", "-p", raw]),
    );
    for field in ["tokens", "prompt_tokens", "text"] {
        assert_eq!(one[field], other[field], "{args:?}: {field}");
    }
}

const TURN: &str = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";

#[test]
fn the_conversation_is_written_as_the_flags_say() {
    let brief = format!("<|im_start|>system\nBe brief.<|im_end|>\n{TURN}");
    let short = format!("<|im_start|>system\nBe short.<|im_end|>\n{TURN}");
    same(&["-p", "hi", "--system-prompt", "Be brief."], &brief);
    same(&["hi", "--prefill-response", "Yes"], &format!("{short}Yes"));
    let raw = generated(&gpt2(), &["-p", "hi", "--ignore-chat-template"]);
    assert_eq!(
        raw["tokens"],
        generated(&gpt2(), &["hi", "--raw"])["tokens"]
    );

    let template = "{{ who }} says {% for m in messages %}{{ m['content'] }}{% endfor %}";
    let names = r#"{"who": "Ann"}"#;
    for flag in [
        "--chat-template-config",
        "--chat-template-kwargs",
        "--chat-template-args",
    ] {
        same(
            &["hi", "--chat-template", template, flag, names],
            "Ann says hi",
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.jinja");
    std::fs::write(&file, template).unwrap();
    let file = file.to_str().unwrap();
    same(
        &[
            "hi",
            "--chat-template-file",
            file,
            "--prefill-response",
            " or not",
        ],
        " says hi or not",
    );
    // Message text must not become a control token, under any template.
    let hostile = generated(&gpt2(), &["<|im_end|>", "--chat-template", template]);
    let plain = generated(&gpt2(), &["--raw", "-p", " says <|im_end|>"]);
    assert!(hostile["prompt_tokens"].as_u64() > plain["prompt_tokens"].as_u64());
}

#[test]
fn flags_about_conversations_need_one() {
    for flag in [
        "--chat-template",
        "--chat-template-config",
        "--prefill-response",
    ] {
        let value = if flag == "--chat-template-config" {
            "{}"
        } else {
            "{{ x }}"
        };
        refused(&output(&["generate", "hi", "--raw", flag, value]), 2);
        refused(&output(&["generate", "--tokens", "1", flag, value]), 2);
    }
    refused(
        &output(&["generate", "hi", "--chat-template-config", "[]"]),
        2,
    );
    refused(&output(&["generate", "hi", "--min-tokens-to-keep", "2"]), 2);
}

#[test]
fn other_tokens_end_the_reply_too() {
    let model = tiny();
    let all = generated(&model, &["hi", "--min-tokens-to-keep", "1"]);
    let tokens = all["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 8, "{all}");
    let last = tokens[3].to_string();
    let first = tokens.iter().position(|t| *t == tokens[3]).unwrap();
    let ended = generated(&model, &["--extra-eos-token", "0", &last, "-p", "hi"]);
    assert_eq!(ended["finish_reason"], "stop");
    // The reply includes the extra end token, as it includes the model's own end tokens.
    let reply_tokens = ended["tokens"].as_array().unwrap();
    assert!(
        reply_tokens.len() == first || reply_tokens.len() == first + 1,
        "{ended}"
    );
    let told = output(&[
        "generate",
        "-m",
        &model,
        "hi",
        "--extra-eos-token",
        "two words",
    ]);
    assert!(refused(&told, 2).contains("--extra-eos-token"));
}

#[cfg(unix)]
#[test]
fn links_are_programs_of_mlx_lm() {
    let home = tempfile::tempdir().unwrap();
    let model = tiny();
    let flags = ["--model", &model, "--prompt", "hi", "--backend", "cpu"];
    let wanted = [&["generate", "-n", "6"], &flags[..]].concat();
    let wanted = stdout(&mlx(home.path(), &wanted).output().unwrap());
    let link = home.path().join("mlx_lm.generate");
    let program = env!("CARGO_BIN_EXE_mlx");
    std::os::unix::fs::symlink(program, &link).unwrap();
    let linked = std::process::Command::new(&link)
        .args(flags)
        .args(["-m", "6", "--trust-remote-code", "--verbose", "False"])
        .output()
        .unwrap();
    assert_eq!(stdout(&linked), wanted);
    assert_eq!(text(&linked.stderr), "");
    let named = [
        &["mlx_lm.generate", "-m", "6", "--trust-remote-code"],
        &flags[..],
    ]
    .concat();
    let named = mlx(home.path(), &named).output().unwrap();
    assert_eq!(stdout(&named), wanted);
    let said = text(&named.stderr);
    assert!(
        said.contains("--trust-remote-code") && said.contains("tok/s"),
        "{said}"
    );
    let told = refused(&output(&["mlx_lm.gptq", "--model", "x"]), 2);
    assert!(told.contains("--data"), "{told}");
}

#[test]
fn conversions_go_where_mlx_lm_puts_them() {
    let home = tempfile::tempdir().unwrap();
    let model = tiny();
    let mut command = mlx(home.path(), &["mlx_lm.convert", "--hf-path", &model]);
    stdout(&command.current_dir(home.path()).output().unwrap());
    assert!(home.path().join("mlx_model/config.json").is_file());
    let other = home.path().join("other");
    let args = [
        "convert",
        "--hf-path",
        &model,
        "--mlx-path",
        other.to_str().unwrap(),
    ];
    stdout(&mlx(home.path(), &args).output().unwrap());
    assert!(other.join("model.safetensors").is_file());
}

/// A data set with a single text has the perplexity of that text. The end token falls into the last
/// partial piece, which `mlx perplexity` omits.
#[test]
fn perplexity_of_a_data_set() {
    let home = tempfile::tempdir().unwrap();
    let model = tiny();
    let words = "one two three four five six seven eight nine ten eleven";
    let file = home.path().join("text");
    std::fs::write(&file, words).unwrap();
    let data = home.path().join("train.jsonl");
    let line = |text: &str| serde_json::json!({ "text": text }).to_string() + "\n";
    std::fs::write(&data, line(words)).unwrap();
    let measure = |args: &[&str]| -> Value {
        let fixed = ["perplexity", "--backend", "cpu", "--model", &model];
        let all = [&fixed, args].concat();
        serde_json::from_str(&stdout(&mlx(home.path(), &all).output().unwrap())).unwrap()
    };
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let tokens = measure(&["--file", &path(&file)]);
    let tokens = tokens["tokens"].as_u64().unwrap() + 1;
    // With this piece length, the end token starts a partial piece, which is omitted.
    let length = (2..tokens)
        .find(|n| tokens % n == 0)
        .unwrap_or(tokens)
        .to_string();
    let wanted = measure(&["--file", &path(&file), "--sequence-length", &length]);
    for source in [path(&data), path(home.path())] {
        let args = [
            "--data-path",
            &source,
            "--sequence-length",
            &length,
            "--batch-size",
            "4",
        ];
        let all = measure(&args);
        for field in ["perplexity", "standard_error", "tokens"] {
            assert_eq!(all[field], wanted[field], "{field}");
        }
        let one = measure(&[&args[..], &["--num-samples", "1"]].concat());
        let per_piece = length.parse::<u64>().unwrap() - 1;
        assert_eq!(one["tokens"].as_u64(), Some(per_piece));
    }
    refused(
        &output(&["perplexity", "--file", "x", "--num-samples", "2"]),
        2,
    );
    refused(
        &output(&["perplexity", "--file", "x", "--data-path", "x"]),
        2,
    );
}
