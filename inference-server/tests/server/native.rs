//! Tests of llama.cpp's own routes and of `/v1/infer`.

mod further;

use crate::common::{Running, Script, config, events, eventually, serve, serve_script};
use inference::SamplerOrder;
use serde_json::{Value, json};

#[test]
fn a_completion_has_the_shape_that_llama_cpp_gives_it() {
    let server = serve(&config());
    let body = json!({"prompt": "say:Guten⏎Tag", "n_predict": 50, "temperature": 0, "seed": 7,
        "return_tokens": true, "n_probs": 2});
    let reply = server.client().post("/completion", &body).expect(200);
    assert_eq!(reply["content"], "Guten\nTag");
    assert_eq!(reply["stop"], true);
    assert_eq!(reply["stop_type"], "eos");
    assert_eq!(reply["stopping_word"], "");
    assert_eq!(reply["has_new_line"], true);
    assert_eq!(reply["truncated"], false);
    assert_eq!(reply["tokens_predicted"], 9);
    assert_eq!(reply["tokens_evaluated"], "say:Guten⏎Tag".len());
    assert_eq!(reply["tokens_cached"], 2);
    assert_eq!(reply["timings"]["predicted_n"], 9);
    // Prefill computes the first token, so eight decode steps follow.
    let each = reply["timings"]["predicted_per_token_ms"].as_f64().unwrap();
    let all = reply["timings"]["predicted_ms"].as_f64().unwrap();
    assert!(all == 16.0 && each == 2.0, "{reply}");
    assert_eq!(reply["timings"]["cache_n"], 2);
    assert_eq!(reply["prompt"], "say:Guten⏎Tag");
    assert_eq!(reply["generation_settings"]["n_predict"], 50);
    assert_eq!(reply["tokens"][0], u32::from(b'G'));
    let first = &reply["completion_probabilities"][0];
    assert_eq!(first["token"], "G");
    assert_eq!(first["id"], u32::from(b'G'));
    assert_eq!(first["bytes"], json!([b'G']));
    assert_eq!(first["top_logprobs"].as_array().unwrap().len(), 2);
    let options = server.state.last_options();
    assert_eq!(
        (
            options.sampling.temperature,
            options.sampling.top_k,
            options.sampling.seed
        ),
        (0.0, 40, Some(7))
    );
    assert_eq!(
        (
            options.penalties.repeat_penalty,
            options.penalties.repeat_window
        ),
        (1.0, 64)
    );

    let cut = json!({"prompt": "say:hello", "n_predict": 3});
    let cut = server.client().post("/completion", &cut).expect(200);
    assert_eq!(
        (&cut["content"], &cut["stop_type"]),
        (&json!("hel"), &json!("limit"))
    );
    assert_eq!(cut["tokens"], json!([]));
    let stopped = json!({"prompt": "say:hello", "stop": ["ll"], "n_predict": -1});
    let stopped = server.client().post("/completion", &stopped).expect(200);
    assert_eq!(stopped["stop_type"], "word");
    assert_eq!(stopped["stopping_word"], "ll");
}

#[test]
fn several_prompts_have_several_answers() {
    let server = serve(&config());
    let ids: Vec<u32> = "say:two".bytes().map(u32::from).collect();
    for prompts in [json!(["say:one", "say:two"]), json!([ids, ids])] {
        let body = json!({"prompt": prompts});
        let reply = server.client().post("/completion", &body).expect(200);
        let all = reply.as_array().unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all[1]["content"], "two");
        assert_eq!(all[1]["prompt"], "say:two");
        assert_eq!(all[1]["index"], 1);
    }
    let one = json!({"prompt": ids});
    let one = server.client().post("/completion", &one).expect(200);
    assert_eq!(one["content"], "two");
}

#[test]
fn a_stream_of_a_completion_ends_with_its_figures() {
    let server = serve(&config());
    let body = json!({"prompt": "say:hello", "stream": true});
    let events = events(&server.client().post("/completion", &body));
    let (last, pieces) = events.split_last().unwrap();
    let text: String = pieces
        .iter()
        .map(|(_, piece)| {
            assert_eq!(piece["stop"], false);
            piece["content"].as_str().unwrap()
        })
        .collect();
    assert_eq!(text, "hello");
    assert_eq!(last.1["stop"], true);
    assert_eq!(last.1["content"], "");
    assert_eq!(last.1["tokens_predicted"], 5);
}

#[test]
fn what_a_completion_cannot_have_is_refused_by_name() {
    let server = serve(&config());
    for (field, value) in [
        ("grammar", json!("root ::= \"a\"")),
        ("mirostat", json!(2)),
        ("typical_p", json!(0)),
        ("top_n_sigma", json!("x")),
        ("dry_multiplier", json!(0.8)),
        ("lora", json!([{"id": 0, "scale": 1}])),
        ("logit_bias", json!([[999_999, 1]])),
        ("logit_bias", json!([["hello", "x"]])),
        ("logit_bias", json!([["a".repeat(2000), 1]])),
        ("logit_bias", json!([["a".repeat(400), 1]])),
        ("logit_bias", json!([[1, 1, 1]])),
        ("logit_bias", json!([[1, "x"]])),
        ("n_probs", json!(1000)),
        ("top_p", json!(2)),
        ("repeat_penalty", json!(0)),
    ] {
        let mut body = json!({"prompt": "x"});
        body[field] = value;
        let error = server.client().post("/completion", &body).expect(400);
        assert_eq!(error["error"]["param"], field, "{error}");
    }
    let none = server.client().post("/completion", &json!({}));
    assert_eq!(none.expect(400)["error"]["param"], "prompt");
    let body = json!({"prompt": "x", "logit_bias": [[65, -2.5], [66, false]], "repeat_last_n": -1,
        "temperature": -1, "seed": -1});
    server.client().post("/completion", &body).expect(200);
    let options = server.state.last_options();
    assert_eq!(options.constraints.logit_bias[&65], -2.5);
    assert_eq!(options.constraints.banned_tokens, [66]);
    assert_eq!(
        (options.penalties.repeat_window, options.sampling.seed),
        (0, None)
    );
    assert_eq!(options.sampling.temperature, 0.0);
    for bias in [
        json!([["hi", -2.5], ["j", false]]),
        json!({"hi": -2.5, "j": false}),
    ] {
        let body = json!({"prompt": "x", "logit_bias": bias});
        server.client().post("/completion", &body).expect(200);
        let constraints = server.state.last_options().constraints;
        let biased: Vec<(u32, f32)> = constraints.logit_bias.into_iter().collect();
        assert_eq!(biased, [(u32::from(b'h'), -2.5), (u32::from(b'i'), -2.5)]);
        assert_eq!(constraints.banned_tokens, [u32::from(b'j')]);
    }
}

#[test]
fn texts_become_ids_and_back() {
    let server = serve(&config());
    let client = server.client();
    let ids = client.post("/tokenize", &json!({"content": "abc"}));
    assert_eq!(ids.expect(200), json!({"tokens": [97, 98, 99]}));
    let pieces = json!({"content": "ab", "with_pieces": true});
    let pieces = client.post("/tokenize", &pieces).expect(200);
    assert_eq!(pieces["tokens"][1], json!({"id": 98, "piece": "b"}));
    let text = client.post("/detokenize", &json!({"tokens": [97, 98, 99]}));
    assert_eq!(text.expect(200), json!({"content": "abc"}));
    assert_eq!(
        client.post("/tokenize", &json!({})).expect(200),
        json!({"tokens": []})
    );
    for (path, body) in [
        ("/detokenize", json!({"tokens": [1_000_000]})),
        ("/detokenize", json!({"tokens": "x"})),
        ("/detokenize", json!({"tokens": [-1]})),
        (
            "/detokenize",
            json!({"tokens": vec![97; (4 << 20) / 8 + 1]}),
        ),
        ("/tokenize", json!({"content": 1})),
        ("/tokenize", json!({"content": "x", "parse_special": false})),
    ] {
        client.post(path, &body).expect(400);
    }
    let talk = json!({"messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"mood": "good"}});
    let prompt = client.post("/apply-template", &talk).expect(200);
    assert_eq!(prompt, json!({"prompt": "mood=\"good\"\nuser: hi\n"}));
    let bad = json!({"messages": [{"role": "user", "content": "!template"}]});
    let bad = client.post("/apply-template", &bad).expect(400);
    assert!(
        bad["error"]["message"]
            .as_str()
            .unwrap()
            .contains("template failed")
    );
    let vectors = json!({"content": ["ab", "abc"]});
    let vectors = client.post("/embedding", &vectors).expect(200);
    assert_eq!(vectors[1]["index"], 1);
    assert_eq!(vectors[1]["embedding"][0][1], 1.0);
    for (path, field) in [("/embedding", "content"), ("/v1/embeddings", "input")] {
        let unknown = client.post(path, &json!({field: [[2_147_483_648_u32]]}));
        let error = unknown.expect(400)["error"]["message"].to_string();
        assert!(
            error.contains("2147483648 is outside the vocabulary"),
            "{path}: {error}"
        );
    }
    server.idle();
}

#[test]
fn the_state_is_told() {
    let server = serve(&config());
    let client = server.client();
    let props = client.get("/props").expect(200);
    assert_eq!(props["total_slots"], 4);
    assert_eq!(props["default_generation_settings"]["n_ctx"], 1000);
    assert_eq!(props["model_alias"], "tiny");
    // The model is loaded, and has no chat template.
    assert_eq!(props["chat_template"], "");
    assert_eq!(props["is_sleeping"], false);
    let busy = |slots: &Value| {
        let slots = slots.as_array().unwrap();
        assert_eq!(slots.len(), 4);
        assert!(slots.iter().all(|s| s["n_ctx"] == 1000));
        slots.iter().filter(|s| s["is_processing"] == true).count()
    };
    assert_eq!(busy(&client.get("/slots").expect(200)), 0);
    let long = json!({"prompt": "!prefill", "n_predict": -1});
    let mut running = Vec::new();
    for n in 1..=4 {
        running.push(client.open_json("/completion", &long));
        eventually("one more runs", || server.state.running() == n);
        let slots = client.get("/slots").expect(200);
        assert_eq!(busy(&slots), n);
        // The first slots count as used.
        for (id, slot) in slots.as_array().unwrap().iter().enumerate() {
            assert_eq!(slot["id"], id);
            assert_eq!(slot["is_processing"], id < n);
        }
    }
    assert_eq!(busy(&client.get("/slots").expect(200)), 4);
    client.get("/slots?fail_on_no_slot=1").expect(503);
    drop(running);
    server.idle();
    client.get("/slots?fail_on_no_slot=1").expect(200);
    eventually("none", || busy(&client.get("/slots").json()) == 0);
}

#[test]
fn documents_are_sorted_by_their_scores_in_each_form() {
    let server = serve(&config());
    let client = server.client();
    let documents = json!(["xyz", {"text": "abb"}, "bzz", "ab"]);
    let ask = json!({"query": "ab", "documents": documents, "top_n": 3, "return_documents": true});
    for path in ["/rerank", "/v1/rerank", "/reranking", "/v1/reranking"] {
        let reply = client.post(path, &ask).expect(200);
        let results = reply["results"].as_array().unwrap();
        let order: Vec<_> = results
            .iter()
            .map(|r| r["index"].as_u64().unwrap())
            .collect();
        assert_eq!(order, [1, 3, 2], "{path}: {reply}");
        assert_eq!(results[0]["relevance_score"], 0.75);
        assert_eq!(results[0]["document"]["text"], "abb");
        assert_eq!(reply["usage"]["total_tokens"], 11 + 4 * 2);
        assert_eq!(reply["model"], "tiny");
    }
    // There are more documents than one turn scores.
    let many: Vec<String> = (0..40).map(|i| "a".repeat(i % 7)).collect();
    let reply = client.post("/rerank", &json!({"query": "a", "documents": many}));
    let reply = reply.expect(200);
    let scores: Vec<f64> = (reply["results"].as_array().unwrap().iter())
        .map(|r| r["relevance_score"].as_f64().unwrap())
        .collect();
    assert!(scores.len() == 40 && scores.is_sorted_by(|a, b| a >= b));
    let list =
        json!({"query": "ab", "texts": ["q", "ab"], "raw_scores": true, "return_text": true});
    assert_eq!(
        client.post("/rerank", &list).expect(200),
        json!([{"index": 1, "score": 2.0, "text": "ab"}, {"index": 0, "score": 0.0, "text": "q"}])
    );
    // A long document is truncated, unless the request forbids truncation.
    let long = "a".repeat(60);
    client
        .post("/rerank", &json!({"query": "a", "documents": [long]}))
        .expect(200);
    for body in [
        json!({"query": "a", "documents": [long], "truncate": false}),
        json!({"query": "a", "texts": [long]}),
        json!({"query": "a"}),
        json!({"documents": ["a"]}),
        json!({"query": "", "documents": ["a"]}),
        json!({"query": "a", "documents": []}),
        json!({"query": "a", "documents": [1]}),
        json!({"query": "a", "documents": [{"title": "x"}]}),
        json!({"query": "a", "documents": ["a"], "texts": ["a"]}),
        json!({"query": "a", "documents": ["a"], "rank_fields": ["x"]}),
        json!({"query": "a", "documents": ["a"], "max_tokens_per_doc": 4}),
        json!({"query": "a", "documents": vec!["x"; 257]}),
    ] {
        client.post("/rerank", &body).expect(400);
    }
    let script = Script::writing("{{ messages }}", &[]);
    let other = serve_script(&config(), script, |model| model);
    let error = other.client().post("/rerank", &ask).expect(400);
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("not made to score")
    );
}

#[test]
fn the_state_is_that_of_this_server() {
    let config = config().with_parallel(2).with_max_queue(3);
    let server = serve_script(&config, Script::writing("{{ messages }}", &[]), |model| {
        model.with_context(None)
    });
    let client = server.client();
    let props = client.get("/props").expect(200);
    assert_eq!(props["total_slots"], 2);
    assert_eq!(props["chat_template"], "{{ messages }}");
    // If the operator sets no limit, the value is the model's own context.
    assert_eq!(
        props["default_generation_settings"]["n_ctx"],
        client.get("/api/ps").json()["models"][0]["context_length"]
    );
    assert_eq!(props["default_generation_settings"]["n_ctx"], 1_000_000);
    let slots = client.get("/slots").expect(200);
    assert_eq!(slots.as_array().unwrap().len(), 2);
    assert!(
        slots
            .as_array()
            .unwrap()
            .iter()
            .all(|s| s["n_ctx"] == 1_000_000)
    );
    // The default settings must equal the options of a request without parameters.
    client
        .post("/completion", &json!({"prompt": "say:x"}))
        .expect(200);
    let ran = server.state.last_options();
    let params = &props["default_generation_settings"]["params"];
    let number = |name: &str| params[name].as_f64().unwrap() as f32;
    assert_eq!(number("temperature"), ran.sampling.temperature);
    assert_eq!(params["top_k"], ran.sampling.top_k);
    assert_eq!(number("top_p"), ran.sampling.top_p);
    assert_eq!(number("min_p"), ran.sampling.min_p);
    assert_eq!(number("repeat_penalty"), ran.penalties.repeat_penalty);
    assert_eq!(params["repeat_last_n"], ran.penalties.repeat_window);
    assert_eq!(params["seed"], -1);
    assert_eq!(ran.sampling.seed, None);
    // llama.cpp's -1 means as many tokens as fit. The prompt has five tokens.
    assert_eq!(params["n_predict"], -1);
    let mut most = client.post("/completion", &json!({"prompt": "say:x", "n_predict": -1}));
    most.expect(200);
    assert_eq!(server.state.last_options().max_tokens, ran.max_tokens);
    most = client.post("/completion", &json!({"prompt": "say:x", "n_predict": 3}));
    most.expect(200);
    assert_eq!(server.state.last_options().max_tokens, 3);
    // Filters that the list `samplers` omits are disabled. Only two orders are accepted.
    let with = |samplers: &Value| json!({"prompt": "say:x", "samplers": samplers});
    for (samplers, order, top_k, min_p) in [
        (
            json!(["temperature", "top_k", "top_p", "min_p"]),
            SamplerOrder::TemperatureFirst,
            40,
            0.05,
        ),
        (
            json!(["temperature", "dry", "top_p"]),
            SamplerOrder::TemperatureFirst,
            0,
            0.0,
        ),
        (
            json!([
                "penalties",
                "top_k",
                "typ_p",
                "top_p",
                "min_p",
                "xtc",
                "temperature"
            ]),
            SamplerOrder::NucleusFirst,
            40,
            0.05,
        ),
        (json!(["temperature"]), SamplerOrder::NucleusFirst, 0, 0.0),
        (
            json!(["top_n_sigma", "top_k", "typical_p", "temperature"]),
            SamplerOrder::NucleusFirst,
            40,
            0.0,
        ),
    ] {
        client.post("/completion", &with(&samplers)).expect(200);
        let ran = server.state.last_options().sampling;
        assert_eq!(
            (ran.sampler_order, ran.top_k, ran.min_p),
            (order, top_k, min_p),
            "{samplers}"
        );
    }
    // The two orders place typical-p differently.
    let typical = |samplers: &Value| {
        let mut body = with(samplers);
        body["typical_p"] = 0.5.into();
        body["top_n_sigma"] = (-1).into();
        client.post("/completion", &body)
    };
    for samplers in [
        json!(["typ_p", "top_p", "temperature"]),
        json!(["temperature", "min_p", "typ_p"]),
    ] {
        typical(&samplers).expect(200);
        let ran = server.state.last_options().sampling;
        assert_eq!((ran.typical_p, ran.top_n_sigma), (0.5, 0.0));
    }
    typical(&json!(["temperature", "typ_p", "min_p"])).expect(400);
    typical(&json!(["temperature"])).expect(200);
    assert_eq!(server.state.last_options().sampling.typical_p, 1.0);
    for samplers in [
        json!(["top_p", "top_k"]),
        json!(["top_k", "temperature", "top_p"]),
        json!(["magic"]),
    ] {
        let refused = client.post("/completion", &with(&samplers));
        refused.expect(400);
    }
    // The two further fields are `n_predict` and `seed`.
    let names = inference::Parameter::all().count() + 2;
    assert_eq!(params.as_object().unwrap().len(), names, "{params}");
}

/// The test covers every route that generates, with and without the field.
#[test]
fn exclusion_of_top_choices_has_one_bound() {
    let server = coder(MARKS);
    let client = server.client();
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    for (path, mut body) in [
        ("/completion", json!({"prompt": "x", "n_predict": 1})),
        ("/completions", json!({"prompt": "x", "n_predict": 1})),
        (
            "/infill",
            json!({"input_prefix": "x", "input_suffix": "y", "n_predict": 1}),
        ),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 1})),
        ("/v1/chat/completions", chat.clone()),
        (
            "/v1/responses",
            json!({"input": "x", "max_output_tokens": 20}),
        ),
        ("/v1/messages", chat.clone()),
    ] {
        let reads = !["/v1/messages", "/v1/responses"].contains(&path);
        body["xtc_probability"] = 0.5.into();
        body["xtc_threshold"] = 0.5.into();
        client.post(path, &body).expect(200);
        let ran = server.state.last_options().sampling;
        if reads {
            assert_eq!((ran.xtc_probability, ran.xtc_threshold), (0.5, 0.5));
        }
        for bad in [0.500_1, 0.75, 1.0, -0.1] {
            body["xtc_threshold"] = bad.into();
            let reply = client.post(path, &body);
            if reads {
                let error = reply.expect(400);
                assert_eq!(error["error"]["param"], "xtc_threshold", "{path}: {error}");
                let message = error["error"]["message"].as_str().unwrap();
                assert!(message.ends_with("between 0 and 0.5"), "{message}");
            } else {
                // An API ignores a field that it does not have.
                reply.expect(200);
                let ran = server.state.last_options().sampling;
                assert_eq!(ran.xtc_probability, 0.0, "{path}");
            }
        }
    }
    let mut body = json!({"messages": [{"role": "user", "content": "x"}], "stream": false});
    body["options"] = json!({"xtc_threshold": 0.6});
    let error = client.post("/api/chat", &body).expect(400);
    assert!(error["error"].as_str().unwrap().contains("xtc_threshold"));
}

const MARKS: &[&str] = &[
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|file_sep|>",
];

fn coder(marks: &'static [&'static str]) -> Running {
    let script = Script::writing("{{ messages }}", marks);
    serve_script(&config(), script, |model| model.with_context(1000))
}
