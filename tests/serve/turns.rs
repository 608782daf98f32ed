//! Conversations over HTTP with models whose states cannot be trimmed.

use serde_json::{Value, json};

use crate::{long_copy, serve_args};

#[test]
fn a_second_turn_of_a_hybrid_is_not_computed_again() {
    let text = |seed: usize, n: usize| -> String {
        let letter = |i: usize| char::from(b'a' + ((i * i + i * 7 + seed * 5) % 26) as u8);
        (0..n).map(letter).collect()
    };
    for name in ["lfm2", "qwen3-next", "falcon-h1", "gemma3", "xlstm"] {
        let dir = long_copy(name);
        let server = serve_args(&[dir.path().to_str().unwrap()]);
        let ask = |messages: &Value, cache: bool| {
            let body = json!({"messages": messages, "max_tokens": 16, "temperature": 0,
                "ignore_eos": true, "cache_prompt": cache});
            let reply = server.json("/v1/chat/completions", &body);
            let usage = &reply["usage"];
            let prompt = usage["prompt_tokens"].as_u64().unwrap();
            let cached = usage["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .unwrap();
            (
                reply["choices"][0]["message"]["content"].clone(),
                prompt,
                cached,
            )
        };
        let mut messages = json!([
            {"role": "system", "content": text(1, 300)},
            {"role": "user", "content": text(2, 1700)},
        ]);
        let (_, first, cached) = ask(&messages, true);
        assert!(first >= 2000 && cached == 0, "{name}: {first}, {cached}");
        // Clients drop the reasoning of a reply, so the next prompt contains another text than the
        // reply.
        for more in [
            json!({"role": "assistant", "content": text(3, 25)}),
            json!({"role": "user", "content": text(4, 40)}),
        ] {
            messages.as_array_mut().unwrap().push(more);
        }
        let (expected, ..) = ask(&messages, false);
        let (actual, second, cached) = ask(&messages, true);
        assert_eq!(actual, expected, "{name}");
        let (computed, new) = (second - cached, second - first);
        assert!(computed <= new + 64, "{name}: {computed} of {new}");
    }
}
