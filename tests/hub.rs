//! Fetching from the Hugging Face Hub, against a hub on this machine. It checks the layout of the
//! shared cache, the fetched files, and every way in which a transfer can fail.

mod common;
mod fake_hub;

use std::fs;
use std::path::Path;

use fake_hub::{COMMIT, FakeHub, Fault, etag_of};
use inference::ErrorKind;
use metal_backend as _;
use rust_mlx::hub::{ModelSpec, Progress, Silent, Stage};

fn spec(text: &str) -> ModelSpec {
    ModelSpec::parse(text).unwrap()
}

/// A hub with the smallest thing that counts as a model.
fn small() -> FakeHub {
    let hub = FakeHub::new();
    hub.file("config.json", r#"{"model_type":"llama"}"#)
        .file("model.safetensors", weights());
    hub
}

/// Bytes that differ from each other, larger than any buffer on the way.
fn weights() -> Vec<u8> {
    (0..700_000u32)
        .flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 7).to_le_bytes())
        .collect()
}

fn pull(hub: &FakeHub) -> inference::Result<std::path::PathBuf> {
    hub.client().pull(&spec("own/tiny"), false, &mut Silent)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Everything arrived, and nothing half-done is left.
fn assert_whole(hub: &FakeHub) {
    let bytes = fs::read(hub.snapshot().join("model.safetensors")).unwrap();
    assert!(bytes == weights(), "the weights differ");
    for name in names(&hub.repository().join("blobs")) {
        assert!(!name.contains("incomplete"), "{name}");
    }
}

#[test]
fn a_model_is_fetched_into_pythons_layout_and_runs() {
    let hub = FakeHub::of_dir(&common::fixture("tiny/llama-sharded"));
    hub.file("pytorch_model.bin", "no")
        .file("README.md", "no")
        .file("evil.py", "no");
    let path = pull(&hub).unwrap();
    assert_eq!(path, hub.snapshot());
    let got = names(&path);
    for unwanted in ["pytorch_model.bin", "README.md", "evil.py", "golden.json"] {
        assert!(!got.iter().any(|n| n == unwanted), "{got:?}");
    }
    assert!(
        got.iter().any(|n| n == "model.safetensors.index.json"),
        "{got:?}"
    );
    assert_eq!(
        fs::read_to_string(hub.repository().join("refs/main")).unwrap(),
        COMMIT
    );
    for name in &got {
        let bytes = fs::read(path.join(name)).unwrap();
        let link = fs::read_link(path.join(name)).unwrap();
        assert_eq!(
            link,
            Path::new("../../blobs").join(etag_of(name, &bytes)),
            "{name}"
        );
    }
    // A fetched model can also be used by its name alone.
    let output = hub
        .program(&["generate", "--backend", "cpu", "--raw", "--tokens", "40,41"])
        .args(["--max-tokens", "2", "--json", "--model", "own/tiny"])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    // A second time only the list and the files' headers are asked for; with the cache first,
    // nothing.
    hub.forget_log();
    assert_eq!(pull(&hub).unwrap(), path);
    assert!(
        hub.log()
            .iter()
            .all(|r| r.method == "HEAD" || r.path.starts_with("/api/"))
    );
    hub.forget_log();
    assert_eq!(
        hub.client().get(&spec("own/tiny"), &mut Silent).unwrap(),
        path
    );
    assert!(hub.log().is_empty());
}

#[test]
fn the_program_pulls_lists_and_removes() {
    let hub = FakeHub::of_dir(&common::fixture("tiny/llama-q4"));
    let run = |args: &[&str]| {
        let output = hub.program(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let (code, out, err) = run(&["pull", "own/tiny"]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(Path::new(out.trim_end()), hub.snapshot());
    assert!(
        err.contains("downloading own/tiny/model.safetensors"),
        "{err}"
    );

    let (code, out, _) = run(&["ls", "--json"]);
    assert_eq!(code, Some(0));
    let list: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(list[0]["name"], "own/tiny");
    assert_eq!(list[0]["revision"], COMMIT);
    assert_eq!(list[0]["refs"][0], "main");
    assert_eq!(list[0]["model_type"], "llama");
    assert_eq!(list[0]["complete"], true);
    let (_, out, _) = run(&["ls"]);
    assert!(
        out.contains("own/tiny") && out.contains("01234567 (main)"),
        "{out}"
    );

    let (code, _, err) = run(&["rm", "own/tiny"]);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("--yes"), "{err}");
    assert!(hub.snapshot().is_dir());
    let (code, out, err) = run(&["rm", "own/tiny", "--yes", "--json"]);
    assert_eq!(code, Some(0), "{err}");
    let removed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(removed["bytes"].as_u64().unwrap() > 1000);
    assert!(!hub.repository().exists());
    let (code, _, err) = run(&["rm", "own/tiny", "--yes"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("not in the cache"), "{err}");
    let (_, out, _) = run(&["ls", "--json"]);
    assert_eq!(out, "[]\n");
}

#[test]
fn a_name_that_is_not_cached_is_fetched_by_the_commands_that_load() {
    let hub = FakeHub::of_dir(&common::fixture("tiny/llama-gguf"));
    let output = hub
        .program(&[
            "generate",
            "--backend",
            "cpu",
            "--raw",
            "--tokens",
            "40,41",
            "--max-tokens",
            "2",
        ])
        .args(["--quiet", "--model", "own/tiny:model.gguf"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(names(&hub.snapshot()), ["model.gguf"]);
}

#[test]
fn revisions_are_branches_and_commits() {
    let hub = small();
    hub.revision("refs%2Fpr%2F7");
    let at = |text: &str| hub.client().pull(&spec(text), false, &mut Silent);
    at("own/tiny@refs/pr/7").unwrap();
    assert_eq!(
        fs::read_to_string(hub.repository().join("refs/refs/pr/7")).unwrap(),
        COMMIT
    );
    assert!(!hub.repository().join("refs/main").exists());
    at(&format!("own/tiny@{COMMIT}")).unwrap();
    assert_eq!(names(&hub.repository().join("refs")), ["refs"]);
    let error = at("own/tiny@gone").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ModelNotFound);
    assert!(error.to_string().contains("no such branch"), "{error}");
}

#[test]
fn a_broken_transfer_goes_on_where_it_stopped() {
    let hub = small();
    hub.fault("GET", "/store/", Fault::DropAfter(1_000_000), 1);
    hub.fault("GET", "/store/", Fault::DropAfter(1_234), 1);
    pull(&hub).unwrap();
    assert_whole(&hub);
    let ranges: Vec<_> = hub
        .log()
        .into_iter()
        .filter(|r| r.at_store)
        .map(|r| r.headers.get("range").cloned())
        .collect();
    let want = [
        None,
        Some("bytes=1000000-".to_owned()),
        Some("bytes=1001234-".to_owned()),
    ];
    assert_eq!(ranges, want);
}

#[test]
fn a_killed_run_is_continued_by_the_next() {
    let hub = small();
    // More breaks than one run repeats, none with progress after the first.
    hub.fault("GET", "/store/", Fault::DropAfter(500_000), 1);
    hub.fault("GET", "/store/", Fault::DropAfter(0), 20);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(
        !hub.repository().join("refs/main").exists(),
        "nothing claims to be whole"
    );
    let left = format!("{}.incomplete", etag_of("model.safetensors", &weights()));
    assert_eq!(
        fs::metadata(hub.repository().join("blobs").join(&left))
            .unwrap()
            .len(),
        500_000
    );

    let hub = restart(hub);
    pull(&hub).unwrap();
    assert_whole(&hub);
    let first = hub.log().into_iter().find(|r| r.at_store).unwrap();
    assert_eq!(first.headers["range"], "bytes=500000-");
}

/// The same repository and cache behind a hub without faults.
fn restart(hub: FakeHub) -> FakeHub {
    let mut fresh = small();
    fresh.cache = hub.cache;
    fresh
}

#[test]
fn a_server_without_ranges_sends_it_all_again() {
    let hub = small();
    hub.fault("GET", "/store/", Fault::DropAfter(400_000), 1);
    hub.fault("GET", "/store/", Fault::WholeFile, 1);
    pull(&hub).unwrap();
    assert_whole(&hub);
}

#[test]
fn what_an_earlier_run_left_is_not_believed() {
    for left in [
        vec![7u8; 100_000],
        vec![7u8; 9_000_000],
        weights()[..5].to_vec(),
        {
            let mut bytes = weights();
            bytes[3] ^= 1;
            bytes
        },
    ] {
        let hub = small();
        let etag = etag_of("model.safetensors", &weights());
        fs::create_dir_all(hub.repository().join("blobs")).unwrap();
        fs::write(
            hub.repository().join(format!("blobs/{etag}.incomplete")),
            left,
        )
        .unwrap();
        pull(&hub).unwrap();
        assert_whole(&hub);
    }
}

#[test]
fn passing_failures_are_repeated_and_lasting_ones_are_not() {
    for status in [429, 500, 502, 503] {
        let hub = small();
        let busy = || Fault::Status(status, vec![("Retry-After", "0".into())]);
        hub.fault("GET", "/api/", busy(), 2);
        hub.fault("HEAD", "/resolve/", busy(), 2);
        hub.fault("GET", "/store/", busy(), 2);
        pull(&hub).unwrap_or_else(|e| panic!("{status}: {e}"));
        assert_whole(&hub);
    }
    for (status, kind) in [
        (401, ErrorKind::ModelNotFound),
        (403, ErrorKind::Io),
        (404, ErrorKind::ModelNotFound),
        (500, ErrorKind::Io),
        (429, ErrorKind::Io),
    ] {
        for (method, part) in [("GET", "/api/"), ("HEAD", "/resolve/"), ("GET", "/store/")] {
            let hub = small();
            hub.fault(method, part, Fault::Status(status, vec![]), 1000);
            let error = pull(&hub).unwrap_err();
            assert_eq!(error.kind(), kind, "{status} {part}: {error}");
            assert!(error.to_string().contains(&status.to_string()), "{error}");
            let tries = hub
                .log()
                .iter()
                .filter(|r| r.method == method && r.path.contains(part))
                .count();
            assert_eq!(
                tries,
                if matches!(status, 429 | 500) { 5 } else { 1 },
                "{status} {part}"
            );
            assert!(hub.client().cached(&spec("own/tiny")).is_none());
        }
    }
}

#[test]
fn gated_and_private_repositories_say_what_to_do() {
    let hub = small();
    let gated = || Fault::Status(403, vec![("X-Error-Code", "GatedRepo".into())]);
    hub.fault("HEAD", "/resolve/", gated(), 9);
    let error = pull(&hub).unwrap_err().to_string();
    assert!(
        error.contains("gated") && error.contains("HF_TOKEN"),
        "{error}"
    );

    let hub = small();
    hub.needs_token("hf_secret");
    let error = pull(&hub).unwrap_err().to_string();
    assert!(error.contains("HF_TOKEN"), "{error}");
    let client = hub.client().with_token("hf_wrong").unwrap();
    let error = client
        .pull(&spec("own/tiny"), false, &mut Silent)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("does not allow") && !error.contains("hf_wrong"),
        "{error}"
    );
    hub.forget_log();
    let client = hub.client().with_token("hf_secret").unwrap();
    client.pull(&spec("own/tiny"), false, &mut Silent).unwrap();
    assert_whole(&hub);
    // The token goes to the hub only.
    for request in hub.log() {
        assert_eq!(
            request.headers.contains_key("authorization"),
            !request.at_store,
            "{request:?}"
        );
    }
}

#[test]
fn the_token_may_lie_in_its_file() {
    let hub = small();
    hub.needs_token("hf_secret");
    let home = hub.cache.path().join("home");
    fs::create_dir_all(&home).unwrap();
    assert_eq!(
        hub.program(&["pull", "own/tiny"])
            .output()
            .unwrap()
            .status
            .code(),
        Some(1)
    );
    fs::write(home.join("token"), "hf_secret\n").unwrap();
    let output = hub.program(&["pull", "own/tiny"]).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn bytes_that_are_not_what_was_announced_are_refused() {
    // Another content, each time; once, it is repeated with success.
    let hub = small();
    hub.fault("GET", "/store/", Fault::Garbage, 9);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
    assert!(error.to_string().contains("hashes to"), "{error}");
    assert!(
        names(&hub.repository().join("blobs"))
            .iter()
            .all(|n| n.len() == 40),
        "only the config"
    );
    assert!(hub.client().cached(&spec("own/tiny")).is_none());

    // Small files are checked too.
    let hub = small();
    hub.fault("GET", "config.json", Fault::Garbage, 9);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");

    // Another hash, more bytes, and none at all where some were announced.
    let hub = small();
    hub.etag(&etag_of("model.safetensors", b"another"));
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("hashes to"), "{error}");
    let hub = small();
    let etag = etag_of("model.safetensors", &weights());
    let announce = vec![
        ("Location", "http://127.0.0.1:1/".to_owned()),
        ("X-Linked-Etag", etag),
        ("X-Linked-Size", "5".to_owned()),
    ];
    hub.fault("HEAD", "model.safetensors", Fault::Status(302, announce), 1);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");
    assert!(error.to_string().contains("more bytes"), "{error}");
    let hub = small();
    hub.fault("GET", "/store/", Fault::Length(0), 1000);
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert!(hub.client().cached(&spec("own/tiny")).is_none());
}

#[test]
fn damage_in_the_cache_is_found_when_asked() {
    let hub = small();
    pull(&hub).unwrap();
    let blob = hub.blob("model.safetensors", &weights());
    let mut bytes = weights();
    bytes[12_345] ^= 1;
    fs::write(&blob, &bytes).unwrap();
    pull(&hub).unwrap();
    assert!(fs::read(&blob).unwrap() == bytes, "it was not looked at");
    hub.client()
        .pull(&spec("own/tiny"), true, &mut Silent)
        .unwrap();
    assert_whole(&hub);
    // Of the wrong length it is noticed anyway.
    fs::write(&blob, b"short").unwrap();
    pull(&hub).unwrap();
    assert_whole(&hub);
}

#[test]
fn names_that_lead_out_are_refused() {
    let outside = |hub: &FakeHub| {
        !hub.cache
            .path()
            .parent()
            .unwrap()
            .join("evil.gguf")
            .exists()
    };
    for name in [
        "../../../../evil.gguf",
        "/tmp/evil.gguf",
        "a\\..\\..\\evil.gguf",
        "a/../../evil.gguf",
    ] {
        let hub = FakeHub::new();
        hub.claim(name);
        let error = pull(&hub).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{name}");
        assert!(error.to_string().contains("refused"), "{error}");
        assert!(outside(&hub));
        assert!(!hub.repository().exists());
    }
    let hub = FakeHub::new();
    hub.file("config.json", "{}");
    hub.file(
        "model.safetensors.index.json",
        r#"{"weight_map":{"x":"../../../evil.safetensors"}}"#,
    );
    hub.claim("../../../evil.safetensors");
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    for etag in ["../../evil", "", "a/b", ".hidden", "x\\y"] {
        let hub = small();
        hub.etag(etag);
        let error = pull(&hub).unwrap_err();
        assert!(error.to_string().contains("ETag"), "{error}");
    }
}

#[test]
fn offline_the_cache_is_all_there_is() {
    let hub = small();
    let offline = || hub.client().with_offline(true);
    let error = offline()
        .pull(&spec("own/tiny"), false, &mut Silent)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ModelNotFound);
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    let path = pull(&hub).unwrap();
    hub.forget_log();
    assert_eq!(
        offline()
            .pull(&spec("own/tiny"), false, &mut Silent)
            .unwrap(),
        path
    );
    let at = format!("own/tiny@{COMMIT}");
    assert_eq!(
        offline().pull(&spec(&at), false, &mut Silent).unwrap(),
        path
    );
    assert!(
        offline()
            .pull(&spec("own/other"), false, &mut Silent)
            .is_err()
    );
    assert!(hub.log().is_empty());
    // A snapshot that lacks its weights is not the model.
    fs::remove_file(hub.blob("model.safetensors", &weights())).unwrap();
    assert!(
        offline()
            .pull(&spec("own/tiny"), false, &mut Silent)
            .is_err()
    );
    hub.client().get(&spec("own/tiny"), &mut Silent).unwrap();
    assert_whole(&hub);
}

#[test]
fn nobody_answering_is_an_error_with_the_way_out() {
    let hub = small();
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let client = rust_mlx::hub::HfHub::new(&format!("http://127.0.0.1:{port}"), hub.cache.path())
        .unwrap()
        .with_retry_delay(std::time::Duration::from_millis(1));
    let error = client
        .pull(&spec("own/tiny"), false, &mut Silent)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn redirects_without_end_and_answers_that_are_no_hub_are_errors() {
    let hub = small();
    let around = Fault::Status(302, vec![("Location", "/own/tiny/resolve/x".into())]);
    hub.fault("HEAD", "/resolve/", around, 1000);
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("without end"), "{error}");
    let hub = small();
    hub.fault("GET", "/api/", Fault::Status(200, vec![]), 1000);
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("HF_ENDPOINT"), "{error}");
    let hub = small();
    let to_file = Fault::Status(302, vec![("Location", "file:///etc/passwd".into())]);
    hub.fault("GET", "/store/", to_file, 1000);
    assert!(pull(&hub).unwrap_err().to_string().contains("nowhere"));
}

#[test]
fn many_at_once_fetch_each_file_once() {
    let hub = small();
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..6).map(|_| scope.spawn(|| pull(&hub))).collect();
        for run in runs {
            assert_eq!(run.join().unwrap().unwrap(), hub.snapshot());
        }
    });
    assert_whole(&hub);
    assert_eq!(hub.log().iter().filter(|r| r.at_store).count(), 1);
}

#[cfg(unix)]
#[test]
fn one_revision_is_removed_and_what_others_use_stays() {
    let hub = small();
    pull(&hub).unwrap();
    // Another revision with the same weights and its own configuration, as Python lays it out.
    let other = hub.repository().join("snapshots/feedbeef");
    fs::create_dir_all(&other).unwrap();
    fs::write(hub.repository().join("blobs/otherconfig"), "{}").unwrap();
    let weights_link = fs::read_link(hub.snapshot().join("model.safetensors")).unwrap();
    std::os::unix::fs::symlink("../../blobs/otherconfig", other.join("config.json")).unwrap();
    std::os::unix::fs::symlink(weights_link, other.join("model.safetensors")).unwrap();
    fs::write(hub.repository().join("refs/dev"), "feedbeef").unwrap();
    let client = hub.client();
    assert_eq!(client.list().unwrap().len(), 2);
    let removed = client.remove(&spec("own/tiny@dev")).unwrap();
    assert_eq!(
        (removed.commits.as_slice(), removed.bytes),
        (&["feedbeef".to_owned()][..], 2)
    );
    assert!(!other.exists() && !hub.repository().join("refs/dev").exists());
    assert!(!hub.repository().join("blobs/otherconfig").exists());
    assert_whole(&hub);
    assert!(client.remove(&spec("own/tiny@dev")).is_err());
    client.remove(&spec("own/tiny@main")).unwrap();
    assert!(!hub.repository().exists());
}

#[test]
fn progress_tells_the_bytes() {
    #[derive(Default)]
    struct Seen(Vec<(Stage, String, u64)>, u64);
    impl Progress for Seen {
        fn begin(&mut self, stage: Stage, what: &str, total: u64) {
            self.0.push((stage, what.to_owned(), total));
        }
        fn advance(&mut self, done: u64) {
            self.1 = done;
        }
    }
    let hub = small();
    let mut seen = Seen::default();
    hub.client()
        .pull(&spec("own/tiny"), false, &mut seen)
        .unwrap();
    let total = weights().len() as u64;
    let last = seen.0.last().unwrap();
    assert_eq!((last.0, last.2, seen.1), (Stage::Downloading, total, total));
    assert_eq!(last.1, "own/tiny/model.safetensors (2/2)");
}
