//! Tests of downloads from a local copy of the Hugging Face Hub. They check the layout of the
//! shared cache, which files are fetched, and every failure of a transfer.

mod refusals;
mod transfers;

use std::fs;
use std::path::Path;

use crate::fake_hub::{COMMIT, FakeHub, Fault, etag_of};
use inference::ErrorKind;
use metal_backend as _;
use rust_mlx::hub::{ModelSpec, Progress, Silent, Stage};

fn spec(text: &str) -> ModelSpec {
    ModelSpec::parse(text).unwrap()
}

/// A hub with a minimal model.
fn small() -> FakeHub {
    let hub = FakeHub::new();
    hub.file("config.json", r#"{"model_type":"llama"}"#)
        .file("model.safetensors", weights());
    hub
}

/// Varying bytes, larger than every buffer.
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

/// Checks that every file is complete and no partial file remains.
fn assert_whole(hub: &FakeHub) {
    let bytes = fs::read(hub.snapshot().join("model.safetensors")).unwrap();
    assert!(bytes == weights(), "the weights differ");
    for name in names(&hub.repository().join("blobs")) {
        assert!(!name.contains("incomplete"), "{name}");
    }
}

#[test]
fn a_model_is_fetched_into_pythons_layout_and_runs() {
    let hub = FakeHub::of_dir(&crate::common::fixture("tiny/llama-sharded"));
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
    // The program finds the downloaded model by its name.
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

    // A second download requests only the file list and the files' headers. With the option that
    // prefers the cache, it requests nothing.
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
    let hub = FakeHub::of_dir(&crate::common::fixture("tiny/llama-q4"));
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
    let hub = FakeHub::of_dir(&crate::common::fixture("tiny/llama-gguf"));
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
    // A wrong length is always detected.
    fs::write(&blob, b"short").unwrap();
    pull(&hub).unwrap();
    assert_whole(&hub);
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
    // A snapshot without its weights does not count as a model.
    fs::remove_file(hub.blob("model.safetensors", &weights())).unwrap();
    assert!(
        offline()
            .pull(&spec("own/tiny"), false, &mut Silent)
            .is_err()
    );
    hub.client().get(&spec("own/tiny"), &mut Silent).unwrap();
    assert_whole(&hub);
}

#[cfg(unix)]
#[test]
fn one_revision_is_removed_and_what_others_use_stays() {
    let hub = small();
    pull(&hub).unwrap();
    // Another revision, in the layout of Python's client, has equal weights and another
    // configuration.
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
