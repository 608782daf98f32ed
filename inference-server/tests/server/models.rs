//! Tests of models that the server loads by name, uses and unloads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Client, Script, State, capabilities, config, eventually, lines, read};
use inference::{CancelToken, Error, ErrorKind, ModelInfo, Result, TextModel};
use inference_server::{
    Config, ModelDescription, ModelEntry, ModelSource, PullProgress, ServedModel, Server,
};
use serde_json::{Value, json};

mod adapters;
mod manage;

/// A source of scripted models. It records the server's calls.
#[derive(Default)]
struct Shelf {
    names: Vec<&'static str>,
    pulls: bool,
    deletes: bool,
    deleted: Mutex<Vec<String>>,
    /// An alias, and the name of its model.
    alias: Option<(&'static str, &'static str)>,
    /// The state of each model's latest load.
    states: Mutex<BTreeMap<String, Arc<State>>>,
    loads: Mutex<Vec<String>>,
    /// Number of loads in progress, and its maximum.
    now: AtomicUsize,
    peak: AtomicUsize,
    /// The directory of all adapters. A name `MODEL:NAME` is then the model with an adapter.
    adapters: Option<PathBuf>,
    /// Whether models share their weights with their adapters.
    shares: bool,
    /// If more models than this are open, loads fail with an out-of-memory error.
    memory: Option<usize>,
    slow: Duration,
}

impl Shelf {
    fn new(names: &[&'static str]) -> Self {
        Self {
            names: names.to_vec(),
            ..Self::default()
        }
    }

    fn state(&self, name: &str) -> Arc<State> {
        Arc::clone(&self.states.lock().unwrap()[name])
    }

    /// Number of requests that run in the model's latest load. 0 before the first load.
    ///
    /// A model is in [`loads`](Self::loads) a moment before it has a state. So a test that waits
    /// for a running request must use this method.
    fn running(&self, name: &str) -> usize {
        let states = self.states.lock().unwrap();
        states.get(name).map_or(0, |state| state.running())
    }

    fn closed(&self, name: &str) -> bool {
        self.state(name).is_closed()
    }

    fn loads(&self) -> Vec<String> {
        self.loads.lock().unwrap().clone()
    }

    fn open(&self) -> usize {
        let states = self.states.lock().unwrap();
        let open = |s: &&Arc<State>| !s.is_closed();
        states.values().filter(open).count()
    }
}

impl ModelSource for Shelf {
    fn entries(&self) -> Vec<ModelEntry> {
        let deleted = self.deleted.lock().unwrap();
        let there = |name: &&&str| !deleted.iter().any(|gone| gone == *name);
        let entry = |name: &&str| {
            ModelEntry::new(*name)
                .with_files(1234, 951_782_400)
                .with_format("gguf", "Q4_K_M")
        };
        let alias = self
            .alias
            .map(|(name, of)| ModelEntry::new(name).with_same_as(String::from(of)));
        let listed = self.names.iter().filter(there).map(entry);
        listed.chain(alias).collect()
    }

    fn describe(&self, name: &str) -> Option<ModelDescription> {
        let mut info = ModelInfo::default();
        (info.architecture, info.parameters) = ("tiny".into(), 134_515_008);
        info.sampling.temperature = Some(0.6);
        let described = ModelDescription::new()
            .with_info(info)
            .with_license(String::from("apache-2.0"))
            .with_template(String::from("{{ messages }}"));
        self.names.contains(&name).then_some(described)
    }

    fn can_delete(&self) -> bool {
        self.deletes
    }

    fn delete(&self, name: &str) -> Result<()> {
        if name.contains('/') {
            return Err(Error::new(ErrorKind::Unsupported, "not in the caches"));
        }
        self.deleted.lock().unwrap().push(name.to_owned());
        Ok(())
    }

    fn load(&self, name: &str) -> Result<ServedModel> {
        assert!(self.names.contains(&name), "{name} is not on the list");
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.peak.fetch_max(now, Ordering::SeqCst);
        std::thread::sleep(self.slow);
        self.now.fetch_sub(1, Ordering::SeqCst);
        self.loads.lock().unwrap().push(name.to_owned());
        assert!(!name.contains("panic"), "asked to when loaded");
        if name.contains("broken") {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                "/secret/model.gguf is cut",
            ));
        }
        if self.memory.is_some_and(|most| self.open() >= most) {
            return Err(Error::new(ErrorKind::OutOfMemory, "it does not fit"));
        }
        let script = match self.shares {
            true => Script::new().with_adapters(),
            false => Script::new(),
        };
        let state = Arc::clone(&script.state);
        self.states.lock().unwrap().insert(name.to_owned(), state);
        let model = script.into_model();
        ServedModel::new(name, model, capabilities())
    }

    fn base_of(&self, name: &str) -> Option<String> {
        self.adapters.as_ref()?;
        Some(name.split_once(':')?.0.to_owned())
    }

    fn add_adapter(&self, name: &str, model: &dyn TextModel) -> Result<()> {
        assert!(self.names.contains(&name), "{name} is not on the list");
        let dir = self.adapters.as_ref().unwrap();
        let dir = match name.contains("broken") {
            true => dir.join("nothing"),
            false => dir.clone(),
        };
        model.add_adapter(name, &dir)
    }

    fn can_pull(&self) -> bool {
        self.pulls
    }

    fn pull(&self, name: &str, progress: &mut dyn FnMut(PullProgress)) -> Result<()> {
        if name != "own/new" {
            return Err(Error::new(
                ErrorKind::ModelNotFound,
                "no such place: /secret",
            ));
        }
        for completed in [0, 50, 100] {
            let event = PullProgress::new("downloading");
            progress(event.with_file("weights", completed, 100));
        }
        Ok(())
    }
}

struct Running {
    client: Client,
    shelf: Arc<Shelf>,
    stop: CancelToken,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

fn serve(config: &Config, shelf: Shelf, models: Vec<ServedModel>) -> Running {
    let shelf = Arc::new(shelf);
    let source: Arc<dyn ModelSource> = Arc::clone(&shelf) as _;
    let server = Server::bind_with_source(config, models, source).unwrap();
    let client = Client::new(server.address());
    let stop = CancelToken::new();
    let token = stop.clone();
    let thread = std::thread::spawn(move || server.run(&token).unwrap());
    Running {
        client,
        shelf,
        stop,
        thread: Some(thread),
    }
}

fn ask(model: &str, prompt: &str) -> Value {
    json!({"model": model, "prompt": prompt, "max_tokens": 100})
}

impl Running {
    #[track_caller]
    fn says(&self, model: &str) -> Value {
        let reply = self.client.post("/v1/completions", &ask(model, "x"));
        reply.expect(200)
    }

    /// The names of the loaded models, and the times at which they expire.
    fn ps(&self) -> Vec<(String, String)> {
        let answer = self.client.get("/api/ps").expect(200);
        let models = answer["models"].as_array().unwrap().clone();
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        models
            .iter()
            .map(|m| (text(&m["name"]), text(&m["expires_at"])))
            .collect()
    }

    fn loaded(&self) -> Vec<String> {
        self.ps().into_iter().map(|(name, _)| name).collect()
    }
}

#[test]
fn a_model_is_loaded_when_a_request_first_names_it() {
    let server = serve(&config(), Shelf::new(&["one", "own/two"]), Vec::new());
    assert!(server.loaded().is_empty());
    let list = server.client.get("/v1/models").expect(200);
    let ids: Vec<&str> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["one", "own/two"]);
    let tags = server.client.get("/api/tags").expect(200);
    assert_eq!(tags["models"][1]["size"], 1234);
    assert_eq!(
        tags["models"][1]["modified_at"],
        "2000-02-29T00:00:00.000000000Z"
    );
    let show = json!({"model": "own/two"});
    server.client.post("/api/show", &show).expect(200);
    // The properties of a model are unknown until the model is loaded.
    let props = server.client.get("/props").expect(200);
    assert_eq!(
        (&props["is_sleeping"], &props["model_alias"]),
        (&json!(true), &json!("one"))
    );
    assert_eq!(props["default_generation_settings"]["n_ctx"], Value::Null);
    assert_eq!(
        server.client.get("/slots").expect(200)[0]["n_ctx"],
        Value::Null
    );
    assert!(server.shelf.loads().is_empty(), "looking loads nothing");

    let reply = server.says("own/two");
    assert_eq!(reply["model"], "own/two");
    assert_eq!(reply["choices"][0]["text"], "hello world");
    server.says("own/two:latest");
    assert_eq!(server.shelf.loads(), ["own/two"]);
    assert_eq!(server.loaded(), ["own/two"]);
    assert_eq!(server.says("one")["model"], "one");
    assert_eq!(server.loaded(), ["own/two", "one"]);
    let (_, expires) = server.ps()[0].clone();
    assert!(
        expires.starts_with("20"),
        "after five minutes, but {expires}"
    );
}

#[test]
fn what_is_not_on_the_list_is_never_loaded() {
    let server = serve(&config(), Shelf::new(&["one"]), Vec::new());
    for name in ["two", "../one", "/etc/passwd", "own/two", "one/", "ONE"] {
        let reply = server.client.post("/v1/completions", &ask(name, "x"));
        let error = reply.expect(404);
        assert_eq!(error["error"]["code"], "model_not_found");
        assert!(
            error["error"]["message"]
                .as_str()
                .unwrap()
                .ends_with("there are: one")
        );
    }
    assert!(server.shelf.loads().is_empty());
}

#[test]
fn many_clients_of_one_model_wait_for_one_load() {
    let mut shelf = Shelf::new(&["one", "two"]);
    shelf.slow = Duration::from_millis(200);
    let server = serve(&config(), shelf, Vec::new());
    let clients: Vec<_> = (0..4)
        .map(|i| {
            let model = ["one", "two"][i % 2];
            server.client.open_json("/v1/completions", &ask(model, "x"))
        })
        .collect();
    for client in clients {
        read(client).expect(200);
    }
    let mut loads = server.shelf.loads();
    loads.sort();
    assert_eq!(loads, ["one", "two"]);
    assert_eq!(server.shelf.peak.load(Ordering::SeqCst), 1, "one at a time");
}

#[test]
fn more_that_wait_for_models_are_refused() {
    let mut shelf = Shelf::new(&["one"]);
    shelf.slow = Duration::from_millis(500);
    let server = serve(&config(), shelf, Vec::new());
    let ask = ask("one", "x");
    let clients: Vec<_> = (0..8)
        .map(|_| server.client.open_json("/v1/completions", &ask))
        .collect();
    let mut statuses: Vec<u16> = clients.into_iter().map(|c| read(c).status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 200, 429, 429, 429, 429]);
}

#[test]
fn a_model_goes_after_its_time() {
    let config = config().with_keep_alive(Duration::from_millis(300));
    let server = serve(&config, Shelf::new(&["one"]), Vec::new());
    server.says("one");
    assert_eq!(server.loaded(), ["one"]);
    eventually("it is closed", || server.shelf.closed("one"));
    assert!(server.loaded().is_empty());
    server.says("one");
    assert_eq!(server.shelf.loads(), ["one", "one"]);
}

#[test]
fn a_request_says_how_long_the_model_stays() {
    let server = serve(&config(), Shelf::new(&["one"]), Vec::new());
    let chat = |keep: Value| {
        let body = json!({"model": "one", "prompt": "x", "stream": false, "keep_alive": keep});
        server.client.post("/api/generate", &body)
    };
    // A request for an unlimited time gets one day, because the operator set a limit.
    chat(json!(-1)).expect(200);
    assert_ne!(server.ps()[0].1, "9999-12-31T23:59:59Z");
    chat(json!("2h")).expect(200);
    assert_ne!(server.ps()[0].1, "9999-12-31T23:59:59Z");
    let forever = serve(
        &config().with_keep_alive(None),
        Shelf::new(&["one"]),
        Vec::new(),
    );
    forever.says("one");
    assert_eq!(forever.ps()[0].1, "9999-12-31T23:59:59Z");
    let error = chat(json!("soon")).expect(400);
    assert!(error["error"].as_str().unwrap().contains("keep_alive"));
    chat(json!(0)).expect(200);
    eventually("it is closed", || server.shelf.closed("one"));

    // A request with an empty prompt loads or unloads the model.
    let load = server
        .client
        .post("/api/generate", &json!({"model": "one"}));
    assert_eq!(load.expect(200)["done_reason"], "load");
    assert_eq!(server.loaded(), ["one"]);
    let body = json!({"model": "one", "keep_alive": 0});
    let unload = server.client.post("/api/chat", &body);
    assert_eq!(unload.expect(200)["done_reason"], "unload");
    eventually("it is closed", || server.shelf.closed("one"));
    assert_eq!(server.shelf.loads(), ["one", "one"]);
}

#[test]
fn a_full_queue_refuses_neither_loads_nor_unloads() {
    let config = config().with_parallel(1).with_max_queue(0);
    let server = serve(&config, Shelf::new(&["one", "two"]), Vec::new());
    let long = json!({"model": "one", "prompt": "!long", "max_tokens": 100_000});
    let running = server.client.open_json("/v1/completions", &long);
    eventually("it runs", || {
        server.shelf.loads() == ["one"] && server.shelf.running("one") == 1
    });
    let asks = json!({"model": "two", "prompt": "x",
        "messages": [{"role": "user", "content": "x"}]});
    for (path, nothing) in [
        ("/api/generate", json!({"model": "two"})),
        ("/api/generate", json!({"model": "two", "prompt": ""})),
        ("/api/chat", json!({"model": "two", "messages": []})),
        ("/api/chat", json!({"model": "two"})),
    ] {
        server.client.post(path, &asks).expect(429);
        let load = server.client.post(path, &nothing).expect(200);
        assert_eq!(load["done_reason"], "load", "{path}: {nothing}");
        assert_eq!(server.loaded(), ["one", "two"]);
        let mut unload = nothing.clone();
        unload["keep_alive"] = 0.into();
        let unload = server.client.post(path, &unload).expect(200);
        assert_eq!(unload["done_reason"], "unload", "{path}: {nothing}");
        eventually("it is closed", || server.shelf.closed("two"));
        assert_eq!(server.loaded(), ["one"]);
        // An invalid field is an error even in a request that only loads.
        let mut bad = nothing.clone();
        bad["keep_alive"] = "soon".into();
        server.client.post(path, &bad).expect(400);
    }
    drop(running);
    eventually("it ends", || server.shelf.running("one") == 0);
}

#[test]
fn a_client_cannot_keep_a_model_forever_nor_keep_others_out() {
    let mut limits = crate::common::limits();
    limits.keep_alive = Duration::from_millis(400);
    let config = config()
        .with_keep_alive(Duration::from_millis(100))
        .with_max_models(1)
        .with_limits(limits);
    let server = serve(&config, Shelf::new(&["one", "two"]), Vec::new());
    let body = json!({"model": "one", "prompt": "x", "stream": false, "keep_alive": -1});
    server.client.post("/api/generate", &body).expect(200);
    // Another model is loaded immediately in its place.
    server.says("two");
    assert!(server.shelf.closed("one"));
    server.client.post("/api/generate", &body).expect(200);
    eventually("it is closed", || server.shelf.closed("one"));
}

#[test]
fn a_model_in_use_stays() {
    let config = config().with_keep_alive(Duration::ZERO);
    let server = serve(&config, Shelf::new(&["one"]), Vec::new());
    let long = json!({"model": "one", "prompt": "!long", "max_tokens": 100_000});
    let running = server.client.open_json("/v1/completions", &long);
    eventually("it runs", || {
        server.shelf.loads() == ["one"] && server.shelf.running("one") == 1
    });
    let body = json!({"model": "one", "keep_alive": 0});
    server.client.post("/api/chat", &body).expect(200);
    // While the first model is busy, other requests start and end.
    server.says("one");
    std::thread::sleep(Duration::from_millis(300));
    assert!(!server.shelf.closed("one"));
    assert_eq!(server.shelf.running("one"), 1);
    drop(running);
    eventually("it is closed", || server.shelf.closed("one"));
    assert_eq!(server.shelf.loads(), ["one"]);
}

#[test]
fn the_least_recently_used_model_makes_room() {
    let config = config().with_max_models(2);
    let names = ["one", "two", "three"];
    let server = serve(&config, Shelf::new(&names), Vec::new());
    server.says("one");
    server.says("two");
    server.says("one");
    server.says("three");
    assert!(server.shelf.closed("two"));
    assert_eq!(server.loaded(), ["one", "three"]);
}

#[test]
fn a_busy_model_makes_room_after_its_requests() {
    let config = config().with_max_models(1);
    let server = serve(&config, Shelf::new(&["one", "two"]), Vec::new());
    let long = json!({"model": "one", "prompt": "!long", "max_tokens": 100_000});
    let running = server.client.open_json("/v1/completions", &long);
    eventually("it runs", || {
        server.shelf.loads() == ["one"] && server.shelf.running("one") == 1
    });
    let waiting = server.client.open_json("/v1/completions", &ask("two", "x"));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(server.shelf.loads(), ["one"]);
    // New requests for the retired model must not delay the other model. This request waits until
    // its model is loaded again.
    let again = server.client.open_json("/v1/completions", &ask("one", "x"));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(server.shelf.running("one"), 1);
    drop(running);
    assert_eq!(read(waiting).expect(200)["model"], "two");
    assert_eq!(read(again).expect(200)["model"], "one");
    assert_eq!(server.shelf.loads(), ["one", "two", "one"]);
}

#[test]
fn want_of_memory_unloads_idle_models() {
    let mut shelf = Shelf::new(&["one", "two", "three"]);
    shelf.memory = Some(1);
    let server = serve(&config(), shelf, Vec::new());
    server.says("one");
    server.says("two");
    assert!(server.shelf.closed("one"));
    assert_eq!(server.loaded(), ["two"]);
}

#[test]
fn a_model_that_does_not_fit_alone_is_an_error() {
    let mut shelf = Shelf::new(&["one"]);
    shelf.memory = Some(0);
    let server = serve(&config(), shelf, Vec::new());
    let reply = server.client.post("/v1/completions", &ask("one", "x"));
    assert_eq!(reply.expect(503)["error"]["code"], "out_of_memory");
}

#[test]
fn a_model_that_cannot_be_loaded_says_so_and_nothing_of_files() {
    let server = serve(
        &config(),
        Shelf::new(&["broken", "panic", "one"]),
        Vec::new(),
    );
    for name in ["broken", "panic", "broken"] {
        let reply = server.client.post("/v1/completions", &ask(name, "x"));
        let error = reply.expect(500);
        assert_eq!(error["error"]["code"], "model_not_loaded", "{name}");
        assert!(!reply.text().contains("secret"), "{}", reply.text());
    }
    server.says("one");
    assert_eq!(server.loaded(), ["one"]);
}

#[test]
fn a_client_that_leaves_does_not_stop_a_load() {
    let mut shelf = Shelf::new(&["one"]);
    shelf.slow = Duration::from_millis(300);
    let server = serve(&config(), shelf, Vec::new());
    let ask = ask("one", "x");
    let client = server.client.open_json("/v1/completions", &ask);
    eventually("it is being loaded", || {
        server.shelf.now.load(Ordering::SeqCst) == 1
    });
    drop(client);
    eventually("it is loaded", || server.loaded() == ["one"]);
    server.says("one");
    assert_eq!(server.shelf.loads(), ["one"]);
}

#[test]
fn models_of_the_start_stay() {
    let script = Script::new();
    let state = Arc::clone(&script.state);
    let model = script.into_model();
    let model = ServedModel::new("tiny", model, capabilities()).unwrap();
    let config = config().with_keep_alive(Duration::ZERO).with_max_models(1);
    let server = serve(&config, Shelf::new(&["one"]), vec![model]);
    // A request without a name gets the first model.
    let reply = server
        .client
        .post("/v1/completions", &json!({"prompt": "x"}));
    assert_eq!(reply.expect(200)["model"], "tiny");
    let body = json!({"model": "tiny", "keep_alive": 0});
    let unload = server.client.post("/api/chat", &body).expect(200);
    assert_eq!(unload["done_reason"], "load", "it is there still");
    server.says("one");
    eventually("one is closed", || server.shelf.closed("one"));
    assert!(!state.is_closed());
    assert_eq!(
        server.ps(),
        [("tiny".into(), "9999-12-31T23:59:59Z".into())]
    );
    drop(server);
    assert!(state.is_closed());
}

#[test]
fn models_are_fetched_only_where_that_is_allowed() {
    let server = serve(&config(), Shelf::new(&["one"]), Vec::new());
    let pull = json!({"model": "own/new"});
    let refused = server.client.post("/api/pull", &pull);
    assert!(
        refused.expect(403)["error"]
            .as_str()
            .unwrap()
            .contains("--allow-pull")
    );

    let mut shelf = Shelf::new(&["one"]);
    shelf.pulls = true;
    let server = serve(&config(), shelf, Vec::new());
    let said = lines(&server.client.post("/api/pull", &pull));
    let statuses: Vec<&str> = said.iter().map(|l| l["status"].as_str().unwrap()).collect();
    assert_eq!(
        statuses,
        ["downloading", "downloading", "downloading", "success"]
    );
    assert_eq!(
        (&said[1]["total"], &said[1]["completed"]),
        (&json!(100), &json!(50))
    );
    let body = json!({"name": "own/new", "stream": false});
    let reply = server.client.post("/api/pull", &body).expect(200);
    assert_eq!(reply, json!({"status": "success"}));
    let unknown = json!({"model": "own/old", "stream": false});
    let unknown = server.client.post("/api/pull", &unknown);
    assert_eq!(unknown.expect(404)["error"], "there is no such model");
    let refusal = lines(
        &server
            .client
            .post("/api/pull", &json!({"model": "own/old"})),
    );
    assert_eq!(
        refusal,
        [json!({"error": "there is no such model"})],
        "in the stream"
    );
    server
        .client
        .post("/api/pull", &json!({"model": ""}))
        .expect(400);
}

#[test]
fn the_first_model_stands_in_for_others_if_that_is_asked_for() {
    let server = crate::common::serve(&config().with_any_model(true));
    let body = json!({"model": "gpt-4o", "prompt": "say:hello"});
    let reply = server.client().post("/v1/completions", &body).expect(200);
    // The answer contains the name of the model that replied.
    assert_eq!(reply["model"], "tiny");
    assert_eq!(reply["choices"][0]["text"], "hello");
    let strict = crate::common::serve(&config());
    strict.client().post("/v1/completions", &body).expect(404);
}
