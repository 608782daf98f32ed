//! Tests of adapters that share the weights of a model.

use inference_conformance::scripted::ScriptedAdapter;

use super::*;

/// A directory with an adapter, which is deleted at the end.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A source with adapters, and their directory.
fn shelf(names: &[&'static str], shares: bool) -> (Shelf, Directory) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::SeqCst);
    let name = format!("inference-server-adapters-{}-{number}", std::process::id());
    let dir = std::env::temp_dir().join(name);
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join(ScriptedAdapter::FILE), "q_proj").unwrap();
    let mut shelf = Shelf::new(names);
    (shelf.adapters, shelf.shares) = (Some(dir.clone()), shares);
    (shelf, Directory(dir))
}

#[test]
fn adapters_share_a_models_weights_and_its_batch() {
    let names = ["one", "one:a", "one:b"];
    let (shelf, _dir) = shelf(&names, true);
    let server = serve(&config(), shelf, Vec::new());
    // The first request for an adapter also loads the model.
    assert_eq!(server.says("one:a")["model"], "one:a");
    let options = |server: &Running| server.shelf.state("one").last_options();
    assert_eq!(options(&server).adapter.as_deref(), Some("one:a"));
    server.says("one:b");
    assert_eq!(options(&server).adapter.as_deref(), Some("one:b"));
    server.says("one");
    assert_eq!(options(&server).adapter, None);
    assert_eq!(server.shelf.loads(), ["one"], "the weights are loaded once");
    let mut loaded = server.loaded();
    loaded.sort();
    assert_eq!(loaded, names);
    let running: Vec<_> = names
        .iter()
        .map(|name| {
            let long = json!({"model": name, "prompt": "!long", "max_tokens": 100_000});
            server.client.open_json("/v1/completions", &long)
        })
        .collect();
    eventually("they run together", || server.shelf.running("one") == 3);
    assert_eq!(
        server.shelf.state("one").sessions(),
        1,
        "they run in one session"
    );
    drop(running);
}

#[test]
fn a_model_stays_while_its_adapters_are_used_and_goes_with_them() {
    let config = config().with_max_models(1);
    let (shelf, _dir) = shelf(&["one", "one:a", "two"], true);
    let server = serve(&config, shelf, Vec::new());
    // The adapter does not count as a second model.
    server.says("one:a");
    assert_eq!(server.shelf.loads(), ["one"]);
    let state = server.shelf.state("one");
    assert_eq!(state.adapters(), ["one:a"]);
    let long = json!({"model": "one:a", "prompt": "!long", "max_tokens": 100_000});
    let running = server.client.open_json("/v1/completions", &long);
    eventually("it runs", || server.shelf.running("one") == 1);
    let waiting = server.client.open_json("/v1/completions", &ask("two", "x"));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(server.shelf.loads(), ["one"], "the model is in use");
    drop(running);
    assert_eq!(read(waiting).expect(200)["model"], "two");
    assert!(state.is_closed());
    assert_eq!(server.loaded(), ["two"]);
    server.says("one:a");
    assert_eq!(server.shelf.loads(), ["one", "two", "one"]);
}

#[test]
fn adapters_expire_before_their_model() {
    let config = config().with_keep_alive(Duration::from_millis(100));
    let (shelf, _dir) = shelf(&["one", "one:a"], true);
    let server = serve(&config, shelf, Vec::new());
    server.says("one:a");
    let state = server.shelf.state("one");
    // Without a request, a new model stays for ten seconds; `keep_alive` does not wait for that.
    let body = json!({"model": "one:a", "keep_alive": 0});
    server.client.post("/api/chat", &body).expect(200);
    eventually("the adapter is gone", || state.adapters().is_empty());
    assert!(!state.is_closed());
    let body = json!({"model": "one", "keep_alive": 0});
    server.client.post("/api/chat", &body).expect(200);
    eventually("the model is gone", || state.is_closed());
    // Unloading a model also unloads its adapters.
    server.says("one:a");
    let state = server.shelf.state("one");
    server.client.post("/api/chat", &body).expect(200);
    eventually("both are gone", || state.is_closed());
    assert_eq!(server.loaded(), Vec::<String>::new());
}

#[test]
fn what_cannot_share_is_loaded_apart() {
    let (shelf, _dir) = shelf(&["one", "one:a"], false);
    let server = serve(&config(), shelf, Vec::new());
    server.says("one:a");
    assert_eq!(server.shelf.loads(), ["one", "one:a"]);
    assert_eq!(server.shelf.state("one:a").last_options().adapter, None);
}

#[test]
fn bad_adapters_and_routes_without_adapters_are_errors() {
    let (shelf, _dir) = shelf(&["one", "one:a", "one:broken"], true);
    let server = serve(&config(), shelf, Vec::new());
    let error = server
        .client
        .post("/v1/completions", &ask("one:broken", "x"));
    assert_eq!(error.expect(500)["error"]["code"], "model_not_loaded");
    server.says("one");
    let body = json!({"model": "one:a", "input": "x"});
    let error = server.client.post("/v1/embeddings", &body).expect(400);
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("--adapter-path"), "{message}");
    let body = json!({"model": "one:a", "query": "x", "documents": ["y"]});
    server.client.post("/v1/rerank", &body).expect(400);
    let body = json!({"model": "one", "input": "x"});
    server.client.post("/v1/embeddings", &body).expect(200);
}
