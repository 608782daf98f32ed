//! Speculative decoding of requests that the server runs together.

use serde_json::json;

use crate::common::{fixture, greedy, tiny};
use crate::{agent, command, serve};
use inference::Prompt;

#[test]
fn requests_that_run_together_are_drafted_for() {
    let model = tiny("llama");
    let path = fixture("tiny/llama");
    let path = path.to_str().unwrap();
    let prompts = ["hello", "one two three", "The capital", "x"];
    let expected: Vec<String> = prompts
        .iter()
        .map(|prompt| {
            let stream = model.generate(&Prompt::from(*prompt), &greedy(40));
            stream.unwrap().text().unwrap()
        })
        .collect();
    for flags in [
        &["--draft-model", path, "--num-draft-tokens", "4"][..],
        &["--prompt-lookup", "2"],
    ] {
        let server = serve(flags);
        std::thread::scope(|scope| {
            for (prompt, expected) in prompts.iter().zip(&expected) {
                let server = &server;
                scope.spawn(move || {
                    let body = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0,
                        "ignore_eos": true});
                    let reply = server.json("/v1/completions", &body);
                    assert_eq!(reply["choices"][0]["text"], expected.as_str(), "{prompt}");
                    assert_eq!(reply["usage"]["completion_tokens"], 40);
                });
            }
        });
        let url = format!("{}/metrics", server.url);
        let text = agent().get(&url).call().unwrap();
        let text = text.into_body().read_to_string().unwrap();
        let count = |name: &str| -> f64 {
            let value = |line: &str| line.strip_prefix(name)?.trim().parse().ok();
            let found = text.lines().find_map(value);
            found.unwrap_or_else(|| panic!("{name} in {text}"))
        };
        let drafted = count("inference_draft_tokens_total");
        let accepted = count("inference_accepted_draft_tokens_total");
        assert!(
            drafted > 0.0 && accepted <= drafted,
            "{drafted}, {accepted}"
        );
    }
}

#[test]
fn a_recurrent_model_cannot_be_drafted_for() {
    let recurrent = fixture("tiny/lfm2");
    let recurrent = recurrent.to_str().unwrap();
    for (flags, code, says) in [
        (&["--prompt-lookup", "2", recurrent][..], 1, "recurrent"),
        (&["--draft-model", recurrent, recurrent], 1, "recurrent"),
        (&["--draft-model", "x", recurrent, "other"], 2, "one model"),
        (
            &["--draft-model", "x", recurrent, "--cached"],
            2,
            "one model",
        ),
        (
            &["--num-draft-tokens", "65", recurrent],
            2,
            "num_draft_tokens",
        ),
    ] {
        let output = command()
            .args(["--port", "0"])
            .args(flags)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {text}");
        assert!(text.contains(says), "{flags:?}: {text}");
    }
}
