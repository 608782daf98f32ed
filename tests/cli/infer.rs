//! Tests of inference over a vindex: walking layers in `mlx serve`, and walk and dense pass in
//! `/v1/infer` and `mlx infer`.
#![cfg(all(feature = "probe", feature = "serve"))]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Output, Stdio};

use crate::common::{fixture, greedy, tiny};
use crate::program::{mlx, output, refused, stdout};
use inference::{Interrupt, LoadOptions, Prompt, TextModel};
use serde_json::{Value, json};

fn model(name: &str) -> String {
    fixture("tiny").join(name).display().to_string()
}

/// Builds the features of the tiny Llama in `dir`.
fn build(dir: &Path) -> String {
    let (model_path, to) = (model("llama"), dir.join("v").display().to_string());
    let args = [
        "vindex",
        "build",
        "--backend",
        "cpu",
        "--model",
        &model_path,
        "-o",
        &to,
    ];
    stdout(&mlx(dir, &args).output().unwrap());
    to
}

fn walking(vindex: &str) -> Box<dyn TextModel> {
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_feed_forward("walk:3".parse().unwrap())
        .with_vindex(Some(vindex.into()));
    inference::load_model(fixture("tiny/llama"), &options).unwrap()
}

/// A running `mlx serve`, which ends with the test.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(home: &Path, args: &[&str]) -> Self {
        let mut command = mlx(home, &[&["serve", "--port", "0"], args].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut url = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut url).unwrap();
        let url = url.trim().to_owned();
        Self { child, url }
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let request = (Self::agent().post(format!("{}{path}", self.url)))
            .header("Content-Type", "application/json");
        Self::read(request.send(body.to_string()).unwrap())
    }

    fn get(&self, path: &str) -> (u16, Value) {
        Self::read(
            Self::agent()
                .get(format!("{}{path}", self.url))
                .call()
                .unwrap(),
        )
    }

    fn agent() -> ureq::Agent {
        let config = ureq::Agent::config_builder();
        (config.http_status_as_error(false).proxy(None).build()).into()
    }

    fn read(mut answer: ureq::http::Response<ureq::Body>) -> (u16, Value) {
        let text = answer.body_mut().read_to_string().unwrap();
        (
            answer.status().as_u16(),
            serde_json::from_str(&text).unwrap(),
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_server_walks() {
    let dir = tempfile::tempdir().unwrap();
    let (vindex, llama) = (build(dir.path()), model("llama"));
    let flags = ["--backend", "cpu", "--ffn", "walk:3", "--vindex", &vindex];
    let server = Server::start(dir.path(), &[&flags[..], &[&llama]].concat());
    let body = json!({"model": "llama", "prompt": "the cat", "max_tokens": 9, "temperature": 0});
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let said = |model: &dyn TextModel| {
        let prompt = Prompt::Text(String::from("the cat"));
        let output = model.generate(&prompt, &greedy(9)).unwrap();
        output.collect_output().unwrap().text
    };
    let actual = said(walking(&vindex).as_ref());
    assert_eq!(answer["choices"][0]["text"], actual);
    assert_ne!(actual, said(tiny("llama").as_ref()));

    let gpt2 = model("gpt2");
    let two = [&["serve", "--port", "0"], &flags[..], &[&llama, &gpt2]].concat();
    let wrong = refused(&output(&two), 2);
    assert!(
        wrong.contains("--ffn and --vindex are for one model"),
        "{wrong}"
    );
}

/// The most probable token after `the cat`, with its probability to four digits. The first value
/// is that of the model with its feed-forward plan, the second that of the unchanged model.
fn expected(vindex: &str) -> (Value, Value) {
    let (walking_model, trained) = (walking(vindex), tiny("llama"));
    let ids = (trained.as_token_model().unwrap())
        .encode("the cat", true)
        .unwrap();
    let first = |model: &dyn TextModel| {
        let tokens = model.as_token_model().unwrap();
        let logits = tokens
            .logits(&Prompt::Tokens(ids.clone()), false, &Interrupt::new())
            .unwrap();
        let logits = logits.logits;
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - greatest).exp()).sum();
        let id = logits.iter().position(|x| *x == greatest).unwrap() as u32;
        let text = tokens.decode(&[id]).unwrap();
        json!({"token": text, "probability": (1e4 / sum).round() / 1e4})
    };
    let answers = (first(walking_model.as_ref()), first(trained.as_ref()));
    assert_ne!(answers.0, answers.1, "both ways give one number");
    answers
}

#[test]
fn the_program_compares_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let (vindex, llama) = (build(dir.path()), model("llama"));
    let (walk, dense) = expected(&vindex);
    let flags = ["--backend", "cpu", "--ffn", "walk:3", "--vindex", &vindex];
    let run = |more: &[&str]| {
        let args = ["infer", "--model", &llama, "--prompt", "the cat"];
        output(&[&args[..], more].concat())
    };
    let json_of = |out: &Output| -> Value { serde_json::from_str(&stdout(out)).unwrap() };
    let infer = |more: &[&str]| json_of(&run(&[more, &["--json"]].concat()));
    let both = infer(&[&flags[..], &["--compare"]].concat());
    assert_eq!((&both["walk"][0], &both["dense"][0]), (&walk, &dense));
    assert_eq!(both["prompt"], "the cat");
    assert_eq!(both["walk"].as_array().unwrap().len(), 5);
    let one = infer(&[&flags[..], &["--top", "2"]].concat());
    assert_eq!(
        (&one["predictions"][0], &one["mode"]),
        (&walk, &json!("walk"))
    );
    assert_eq!(one["predictions"].as_array().unwrap().len(), 2);
    let plain = infer(&["--backend", "cpu"]);
    let actual = (&plain["predictions"][0], &plain["mode"]);
    assert_eq!(actual, (&dense, &json!("dense")));
    let sparse = ["--backend", "cpu", "--ffn", "sparse:3", "--compare"];
    assert_eq!(infer(&sparse)["dense"][0], dense);
    assert_eq!(infer(&sparse[..4])["mode"], "plan");
    let table = stdout(&run(&[&flags[..], &["--compare"]].concat()));
    assert!(
        table.starts_with("walk:3 in ") && table.lines().count() == 6,
        "{table}"
    );

    let only = [&flags[..], &["--walk-only", "--compare"]].concat();
    assert!(refused(&run(&only), 2).contains("leave --walk-only out"));
    assert!(refused(&run(&["--compare"]), 2).contains("--ffn"));
    assert!(refused(&run(&["--compare", "--ffn", "dense"]), 2).contains("other than dense"));
}

#[test]
fn the_server_compares_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let (vindex, llama) = (build(dir.path()), model("llama"));
    let (walk, dense) = expected(&vindex);
    let flags = ["--backend", "cpu", "--ffn", "walk:3", "--vindex", &vindex];
    let body = |mode: &str| json!({"prompt": "the cat", "top": 3, "mode": mode});
    let server = Server::start(dir.path(), &[&flags[..], &[&llama]].concat());
    let infer = |body: &Value| server.post("/v1/infer", body);
    let (status, both) = infer(&body("compare"));
    assert_eq!(
        (status, &both["walk"][0], &both["dense"][0]),
        (200, &walk, &dense)
    );
    for field in ["walk_ms", "dense_ms", "latency_ms"] {
        assert!(both[field].is_number(), "{both}");
    }
    assert_eq!(both["walk"].as_array().unwrap().len(), 3);
    assert_eq!(both.as_object().unwrap().len(), 6, "{both}");
    for (mode, expected) in [("walk", &walk), ("dense", &dense)] {
        let (status, reply) = infer(&body(mode));
        assert_eq!((status, &reply["predictions"][0]), (200, expected));
        assert_eq!(reply["mode"], mode);
    }
    let (_, reply) = infer(&json!({"prompt": "the cat"}));
    assert_eq!(reply["mode"], "walk");
    // Caches of walking and dense computations are not mixed.
    let (_, again) = infer(&body("compare"));
    assert_eq!(
        (&again["walk"], &again["dense"]),
        (&both["walk"], &both["dense"])
    );
    for wrong in [body("other"), json!({"prompt": " "})] {
        assert_eq!(infer(&wrong).0, 400);
    }

    let only = [&flags[..], &["--walk-only", &llama]].concat();
    let server = Server::start(dir.path(), &only);
    let (status, reply) = server.post("/v1/infer", &body("walk"));
    assert_eq!((status, &reply["predictions"][0]), (200, &walk));
    for mode in ["dense", "compare"] {
        let (status, reply) = server.post("/v1/infer", &body(mode));
        assert_eq!(
            (status, &reply["error"]["code"]),
            (503, &json!("no_weights"))
        );
    }
    let server = Server::start(dir.path(), &["--backend", "cpu", &llama]);
    let (status, reply) = server.post("/v1/infer", &body("dense"));
    assert_eq!((status, &reply["predictions"][0]), (200, &dense));
    let (status, reply) = server.post("/v1/infer", &body("walk"));
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("mode")));
}

/// The directory has all weights, so no model is named.
#[test]
fn a_vindex_alone_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let (model_path, to) = (model("llama"), dir.path().join("all").display().to_string());
    let build = ["vindex", "build", "--backend", "cpu", "--level", "all"];
    let build = [&build[..], &["--model", &model_path, "-o", &to]].concat();
    stdout(&mlx(dir.path(), &build).output().unwrap());
    let (_, dense) = expected(&to);
    let server = Server::start(dir.path(), &["--backend", "cpu", &to]);
    let (status, models) = server.get("/v1/models");
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("all")));
    let body = |mode: &str| json!({"prompt": "the cat", "top": 3, "mode": mode});
    let (status, reply) = server.post("/v1/infer", &body("walk"));
    assert_eq!(status, 200, "{reply}");
    // With all features, the walk equals the dense pass.
    assert_eq!(reply["predictions"][0], dense);
    let (_, reply) = server.post("/v1/infer", &json!({"prompt": "the cat"}));
    assert_eq!(reply["mode"], "walk");
    assert_eq!(server.post("/v1/infer", &body("dense")).0, 503);
    let body = json!({"model": "all", "prompt": "the cat", "max_tokens": 9, "temperature": 0});
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let prompt = Prompt::Text(String::from("the cat"));
    let output = tiny("llama").generate(&prompt, &greedy(9)).unwrap();
    let said = output.collect_output().unwrap().text;
    assert_eq!(answer["choices"][0]["text"], said);
    // With few features, the walk gives the same predictions as a model with that plan.
    let flags = ["--backend", "cpu", "--ffn", "walk:3", "--vindex", &to, &to];
    let server = Server::start(dir.path(), &flags);
    let (_, reply) = server.post("/v1/infer", &json!({"prompt": "the cat", "mode": "walk"}));
    assert_eq!(reply["predictions"][0], expected(&to).0);

    let few = self::build(dir.path());
    let wrong = refused(&output_of(dir.path(), &["serve", "--port", "0", &few]), 1);
    assert!(wrong.contains("--level all"), "{wrong}");
}

fn output_of(home: &Path, args: &[&str]) -> Output {
    mlx(home, args).output().unwrap()
}
