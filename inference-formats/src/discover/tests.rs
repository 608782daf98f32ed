//! Tests of searches in temporary directories.

use crate::gguf::testing::Writer;

use super::*;

/// A GGUF file whose metadata have an array before the keys that the search reads.
fn gguf(architecture: &str, file_type: u32) -> Vec<u8> {
    Writer::default()
        .strings("tokens", &["a", "b"])
        .str("general.architecture", architecture)
        .u32("general.file_type", file_type)
        .bytes()
}

fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn finds_directories_and_files_in_order_and_reports_what_is_broken() {
    let tmp = tempfile::tempdir().unwrap();
    let d = tmp.path();
    write(
        &d.join("b/config.json"),
        r#"{"model_type": "qwen3", "quantization": {"bits": 4, "group_size": 64}}"#,
    );
    write(&d.join("b/model-1.safetensors"), [0; 10]);
    write(&d.join("b/model-2.safetensors"), [0; 5]);
    write(&d.join("a/config.json"), "{broken");
    write(&d.join("a/model.safetensors"), []);
    write(&d.join("c/config.json"), "{}"); // no weights: not a model
    write(&d.join("d/x.gguf"), gguf("llama", 3));
    write(&d.join("e/1/2/3/4/5/config.json"), "{}"); // too deep
    #[cfg(unix)]
    std::os::unix::fs::symlink(d, d.join("loop")).unwrap();

    let models: Vec<_> = discover(d).unwrap().collect();
    assert_eq!(models.len(), 3, "{models:?}");
    let e = models[0].as_ref().unwrap_err();
    assert_eq!(e.path(), Some(d.join("a/config.json").as_path()));
    let b = models[1].as_ref().unwrap();
    assert_eq!(
        (b.model_type.as_str(), b.num_files, b.bytes),
        ("qwen3", 2, 15)
    );
    assert_eq!(
        b.quantization,
        Some(Quantization {
            bits: 4,
            group_size: 64
        })
    );
    let g = models[2].as_ref().unwrap();
    assert_eq!(
        (g.model_type.as_str(), g.format),
        ("llama", ModelFormat::Gguf)
    );
    assert_eq!(g.quantization_name.as_deref(), Some("Q4_1"));

    // The given path itself may be a model directory or a model file.
    assert_eq!(discover(d.join("b")).unwrap().count(), 1);
    assert_eq!(discover(d.join("d/x.gguf")).unwrap().count(), 1);
    let refused = |name: &str| discover(d.join(name)).unwrap_err().kind();
    assert_eq!(refused("none"), ErrorKind::NotFound);
    assert_eq!(refused("a/config.json"), ErrorKind::Invalid);
}

/// The results of a search in a directory with these `files`.
fn search<const N: usize>(files: [(&str, &[u8]); N]) -> Vec<Result<DiscoveredModel>> {
    let tmp = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        write(&tmp.path().join(name), bytes);
    }
    discover(tmp.path()).unwrap().collect()
}

fn configured(config: &str) -> Result<DiscoveredModel> {
    let files: [(&str, &[u8]); 2] = [("config.json", config.as_bytes()), ("w.safetensors", b"12")];
    let mut models = search(files);
    assert_eq!(models.len(), 1);
    models.remove(0)
}

#[test]
fn quantizations_are_named() {
    let named = |config| {
        let model = configured(config).unwrap();
        (
            model.quantization.map(|q| (q.bits, q.group_size)),
            model.quantization_name.unwrap_or_default(),
        )
    };
    let name = String::from;
    assert_eq!(named("{}"), (None, name("")));
    assert_eq!(
        named(r#"{"quantization": {"bits": 8, "group_size": 32, "mode": "affine"}}"#),
        (Some((8, 32)), name("8-bit"))
    );
    assert_eq!(
        named(r#"{"quantization_config": {"bits": 4, "group_size": -1, "quant_method": "gptq"}}"#),
        (None, name("gptq 4-bit"))
    );
    assert_eq!(
        named(r#"{"quantization_config": {"quant_method": "fp8"}}"#),
        (None, name("fp8"))
    );
    // Invalid values are omitted from the result.
    assert_eq!(
        named(r#"{"quantization": {"bits": 4000000000, "group_size": 0}}"#),
        (None, name(""))
    );
    assert_eq!(
        named(r#"{"quantization": true, "model_type": 7}"#),
        (None, name(""))
    );
}

#[test]
fn configurations_that_are_none_are_errors() {
    let deep = "[".repeat(100_000);
    for config in ["", "{", "[]", "null", "\u{0}", &deep] {
        let e = configured(config).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(e.path().unwrap().ends_with("config.json"), "{e}");
    }
    let large = format!("{{\"a\": \"{}\"}}", "x".repeat(MAX_CONFIG as usize));
    let e = configured(&large).unwrap_err();
    assert!(e.message().contains("at most 16777216"), "{e}");
}

#[test]
fn a_split_gguf_is_one_model() {
    let header = gguf("llama", 15);
    let models = search([
        ("m-00001-of-00003.gguf", &header),
        ("m-00002-of-00003.gguf", b"12"),
        ("m-00003-of-00003.gguf", b"345"),
        ("n-00002-of-00002.gguf", b"the first part is missing"),
        ("o-00001-of-00002.gguf", &header),
        ("p-1-of-2.gguf", &header),
    ]);
    assert_eq!(models.len(), 4, "{models:?}");
    let m = models[0].as_ref().unwrap();
    assert_eq!((m.num_files, m.bytes), (3, header.len() as u64 + 5));
    assert_eq!(m.quantization_name.as_deref(), Some("Q4_K_M"));
    let e = models[1].as_ref().unwrap_err();
    assert!(e.path().unwrap().ends_with("n-00002-of-00002.gguf"), "{e}");
    let e = models[2].as_ref().unwrap_err();
    assert!(e.message().contains("part 2 of 2 is missing"), "{e}");
    assert_eq!(models[3].as_ref().unwrap().num_files, 1);
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_broken_ones_reported() {
    use std::os::unix::fs::symlink;
    let tmp = tempfile::tempdir().unwrap();
    let d = tmp.path();
    write(&d.join("blobs/1"), "{\"model_type\": \"llama\"}");
    write(&d.join("blobs/2"), "1234");
    // The directory layout of the Hugging Face cache.
    fs::create_dir_all(d.join("snapshots/abc")).unwrap();
    symlink("../../blobs/1", d.join("snapshots/abc/config.json")).unwrap();
    symlink("../../blobs/2", d.join("snapshots/abc/model.safetensors")).unwrap();
    fs::create_dir_all(d.join("snapshots/def")).unwrap();
    symlink("../../blobs/9", d.join("snapshots/def/config.json")).unwrap();
    symlink("../../blobs/2", d.join("snapshots/def/model.safetensors")).unwrap();
    symlink("nowhere", d.join("y.gguf")).unwrap();
    // Opening a device or a pipe may block, so the search must refuse them before opening.
    symlink("/dev/null", d.join("z.gguf")).unwrap();
    let models: Vec<_> = discover(d).unwrap().collect();
    assert_eq!(models.len(), 4, "{models:?}");
    let model = models[0].as_ref().unwrap();
    assert_eq!((model.model_type.as_str(), model.bytes), ("llama", 4));
    let at = |i: usize| models[i].as_ref().unwrap_err().path().unwrap().to_owned();
    assert_eq!(at(1), d.join("snapshots/def/config.json"));
    assert_eq!(at(2), d.join("y.gguf"));
    assert_eq!(at(3), d.join("z.gguf"));
}

#[test]
fn models_lie_at_most_four_directories_deep() {
    let header = gguf("llama", 1);
    let models = search([("1/2/3/4/a.gguf", &header), ("1/2/3/4/5/b.gguf", &header)]);
    assert_eq!(models.len(), 1);
    let model = models[0].as_ref().unwrap();
    let json = serde_json::to_string(model).unwrap();
    assert_eq!(
        &serde_json::from_str::<DiscoveredModel>(&json).unwrap(),
        model
    );
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
    #[test]
    fn any_files_are_listed_or_refused(config: Vec<u8>, file: Vec<u8>) {
        let tmp = tempfile::tempdir().unwrap();
        write(&tmp.path().join("a/config.json"), &config);
        write(&tmp.path().join("a/w.safetensors"), &file);
        write(&tmp.path().join("b.gguf"), &file);
        for item in discover(tmp.path()).unwrap() {
            if let Err(e) = item {
                assert!(e.path().is_some_and(|p| p.starts_with(tmp.path())), "{e}");
            }
        }
    }
}
