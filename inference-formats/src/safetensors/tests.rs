//! Tests of truncated or changed checkpoints, wrong headers and indices, and names that lead out of
//! the directory.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};
use proptest::prelude::*;
use safetensors::tensor::TensorView;

use super::*;

/// The bytes of a file with f32 tensors of shape `[n]`. Each element is the tensor's index.
fn file(names: &[(&str, usize)]) -> Vec<u8> {
    let data: Vec<Vec<u8>> = names
        .iter()
        .enumerate()
        .map(|(i, (_, n))| (i as f32).to_le_bytes().repeat(*n))
        .collect();
    let views = names
        .iter()
        .zip(&data)
        .map(|((name, n), data)| (*name, TensorView::new(Dtype::F32, vec![*n], data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// A file with this header and `data` bytes after it.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.resize(out.len() + data, 0);
    out
}

fn one(bytes: &[u8]) -> Result<SafetensorsCheckpoint> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    SafetensorsCheckpoint::open(dir.path())
}

fn refused(bytes: &[u8]) -> Error {
    one(bytes).expect_err("the file must be refused")
}

fn index(dir: &Path, entries: &[(&str, &str)]) {
    let map: serde_json::Map<_, _> = entries
        .iter()
        .map(|(n, f)| ((*n).to_owned(), (*f).into()))
        .collect();
    let json = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(dir.join(INDEX), json.to_string()).unwrap();
}

#[test]
fn reads_exact_elements() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("model.safetensors"),
        file(&[("a", 3), ("b", 5)]),
    )
    .unwrap();
    fs::write(dir.path().join(ADAPTERS), file(&[("a", 1)])).unwrap();
    let c = SafetensorsCheckpoint::open(dir.path()).unwrap();
    assert_eq!(c.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(c.total_bytes(), 32);
    let b = c.info("b").unwrap();
    assert_eq!(
        (b.shape.as_slice(), b.nbytes, b.dtype),
        (&[5][..], 20, Dtype::F32)
    );
    assert!(c.file_of(b).ends_with("model.safetensors"));
    assert_eq!(c.read::<f32>(b).unwrap(), [1.0; 5]);
    assert!(c.read::<u16>(b).unwrap_err().message().contains("F32"));
    assert!(c.info("c").is_none());
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = file(&[("a", 3), ("b", 5)]);
    assert!(one(&bytes).is_ok());
    for n in 0..bytes.len() {
        let e = refused(&bytes[..n]);
        assert_eq!(e.kind(), ErrorKind::Invalid, "cut to {n}: {e}");
        assert!(e.path().is_some_and(|p| p.ends_with("model.safetensors")));
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(refused(&longer).message().contains("damaged"));
}

#[test]
fn every_mutation_is_an_error_or_a_consistent_file() {
    let original = file(&[("a", 3), ("b", 5)]);
    let header = original.len() - 32;
    // Bytes that have a meaning in JSON, and some others. Each case is a file.
    let meaningful = *b"\"{}[],:0123456789-+.eE\\ntfu \n\x7f\xff";
    let bytes: std::collections::BTreeSet<u8> = meaningful
        .into_iter()
        .chain((0..=255).step_by(13))
        .collect();
    for at in 0..header {
        for &byte in &bytes {
            let mut bytes = original.clone();
            bytes[at] = byte;
            if let Ok(c) = one(&bytes) {
                assert_eq!(c.total_bytes(), 32);
                for name in c.names() {
                    c.read::<u8>(c.info(name).unwrap()).ok();
                }
            }
        }
    }
}

#[test]
fn lying_headers_are_named() {
    let t = |dtype: &str, shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let cases = [
        (format!(r#"{{"a":{}}}"#, t("F32", "[2]", 0, 4)), 4, "wrong"),
        (format!(r#"{{"a":{}}}"#, t("F32", "[1]", 4, 8)), 8, "wrong"),
        (format!(r#"{{"a":{}}}"#, t("F32", "[1]", 4, 0)), 4, "wrong"),
        (
            format!(r#"{{"a":{}}}"#, t("F32", "[4294967296,4294967296,4]", 0, 4)),
            4,
            "wrong",
        ),
        (
            format!(
                r#"{{"a":{},"b":{}}}"#,
                t("F32", "[1]", 0, 4),
                t("F32", "[1]", 0, 4)
            ),
            4,
            "wrong",
        ),
        (
            format!(
                r#"{{"a":{},"b":{}}}"#,
                t("F32", "[1]", 0, 4),
                t("F32", "[1]", 8, 12)
            ),
            12,
            "wrong",
        ),
        (
            format!(
                r#"{{"a":{},"a":{}}}"#,
                t("F32", "[1]", 0, 4),
                t("F32", "[1]", 4, 8)
            ),
            8,
            "twice",
        ),
        (
            format!(r#"{{"a":{}}}"#, t("F32", "[-1]", 0, 4)),
            4,
            "malformed",
        ),
        (
            format!(r#"{{"a":{}}}"#, t("F32", "[1.5]", 0, 4)),
            4,
            "malformed",
        ),
        (
            format!(r#"{{"a":{}}}"#, t("F33", "[1]", 0, 4)),
            4,
            "malformed",
        ),
        (
            format!(r#"{{"a":{}}}"#, t("F32", "[1,1,1,1,1,1,1,1,1]", 0, 4)),
            4,
            "dimensions",
        ),
        (
            format!(r#"{{"a":{}}}"#, t("F32", "[1]", 0, u64::MAX)),
            4,
            "wrong",
        ),
        (String::from(r#"{"a":1}"#), 0, "malformed"),
        (String::from("[]"), 0, "malformed"),
        (String::new(), 0, "malformed"),
        (String::from(r#"{"__metadata__":[1]}"#), 0, "malformed"),
        (
            format!(r#"{{"{}":{}}}"#, "n".repeat(5000), t("F32", "[1]", 0, 4)),
            4,
            "5000 bytes",
        ),
    ];
    for (header, data, why) in cases {
        let e = refused(&raw(&header, data));
        assert!(format!("{e:#}").contains(why), "{e} does not say {why}");
    }
}

#[test]
fn bombs_cost_nothing() {
    let start = Instant::now();
    for length in [9, 1 << 27, 1 << 40, u64::MAX - 7, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        assert!(refused(&bytes).message().contains("claims"));
    }
    // The header is shorter than the maximum, but nested deeply, or has a long value where that is
    // forbidden.
    assert!(one(&raw(&"[".repeat(1 << 20), 0)).is_err());
    assert!(one(&raw(&format!(r#"{{"a":{}"#, "{\"b\":".repeat(1 << 18)), 0)).is_err());
    let dims = "1,".repeat(1 << 20);
    let shape = format!(r#"{{"a":{{"dtype":"F32","shape":[{dims}1],"data_offsets":[0,4]}}}}"#);
    assert!(format!("{:#}", refused(&raw(&shape, 4))).contains("dimensions"));
    let many: Vec<_> = (0..=MAX_TENSORS)
        .map(|i| format!(r#""{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    let e = refused(&raw(&format!("{{{}}}", many.join(",")), 0));
    assert!(format!("{e:#}").contains("more than"), "{e}");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn shards_are_read_by_their_index() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("m-1.safetensors"), file(&[("a", 1)])).unwrap();
    fs::write(at.join("m-2.safetensors"), file(&[("b", 2), ("c", 3)])).unwrap();
    fs::write(at.join("other.safetensors"), file(&[("a", 1)])).unwrap();
    let open = || SafetensorsCheckpoint::open(at);
    // Without the index, the other file contains a repeated name.
    assert!(open().unwrap_err().message().contains("is also in"));
    index(
        at,
        &[
            ("a", "m-1.safetensors"),
            ("b", "m-2.safetensors"),
            ("c", "m-2.safetensors"),
        ],
    );
    assert_eq!(open().unwrap().names().collect::<Vec<_>>(), ["a", "b", "c"]);
    for (entries, why) in [
        (
            &[("a", "m-1.safetensors"), ("z", "m-2.safetensors")][..],
            "does not hold it",
        ),
        (
            &[("a", "m-2.safetensors"), ("b", "m-1.safetensors")],
            "does not hold it",
        ),
        (&[("a", "m-3.safetensors")], "missing"),
        (&[("a", "config.json")], "not named like"),
        (&[], "empty"),
    ] {
        index(at, entries);
        let e = open().unwrap_err();
        assert!(format!("{e:#}").contains(why), "{e} does not say {why}");
    }
    for text in [
        "",
        "{",
        "[]",
        r#"{"weight_map": 1}"#,
        r#"{"weight_map": {"a": 1}}"#,
    ] {
        fs::write(at.join(INDEX), text).unwrap();
        assert!(
            open().unwrap_err().message().contains("not an index"),
            "{text}"
        );
    }
}

#[test]
fn shard_names_do_not_escape() {
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("model");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("in.safetensors"), file(&[("b", 1)])).unwrap();
    let secret = outer.path().join("out.safetensors");
    fs::write(&secret, file(&[("a", 1)])).unwrap();
    let absolute = secret.to_str().unwrap().to_owned();
    for name in [
        "../out.safetensors",
        "./../out.safetensors",
        "x/../../out.safetensors",
        "..\\out.safetensors",
        "C:out.safetensors",
        "\0/out.safetensors",
        "in.safetensors\0.safetensors",
        "%n%s%p/../out.safetensors",
        "/.safetensors",
        &absolute,
    ] {
        index(&dir, &[("a", name)]);
        let e = SafetensorsCheckpoint::open(&dir).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(e.message().contains("refused"), "{name:?}: {e}");
    }
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&secret, dir.join("link.safetensors")).unwrap();
        index(&dir, &[("a", "link.safetensors")]);
        let e = SafetensorsCheckpoint::open(&dir).unwrap_err();
        assert!(e.message().contains("leads out"), "{e}");
        // The index itself must not lead out of the directory.
        fs::rename(dir.join(INDEX), outer.path().join("index")).unwrap();
        std::os::unix::fs::symlink(outer.path().join("index"), dir.join(INDEX)).unwrap();
        assert!(
            SafetensorsCheckpoint::open(&dir)
                .unwrap_err()
                .message()
                .contains("leads out")
        );
    }
}

#[test]
fn tensors_of_a_vindex_are_those_of_its_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let values = [1.5f32, -2.0, 3.0];
    write("norms.bin", bytemuck::cast_slice(&values));
    let entry = |name: &str, file: &str, offset: u64, bytes: u64, shape: &str, dtype: &str| {
        format!(
            r#"{{"name":"{name}","kind":"norm","file":"{file}","offset":{offset},"bytes":{bytes},
                "shape":{shape},"dtype":"{dtype}","sha256":"0"}}"#
        )
    };
    let manifest = |entries: &[String]| {
        let text = format!(r#"{{"tensors":[{}]}}"#, entries.join(","));
        write("weight_manifest.json", text.as_bytes());
        SafetensorsCheckpoint::open(dir.path())
    };
    let (first, rest) = (
        entry("a", "norms.bin", 0, 4, "[1]", "float32"),
        entry("b", "norms.bin", 4, 8, "[2,1]", "float32"),
    );
    let checkpoint = manifest(&[first.clone(), rest]).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    let b = checkpoint.info("b").unwrap();
    assert_eq!((b.dtype, b.shape.as_slice()), (Dtype::F32, &[2, 1][..]));
    assert_eq!(checkpoint.read::<f32>(b).unwrap(), [-2.0, 3.0]);
    for (wrong, why) in [
        (
            entry("b", "norms.bin", 8, 8, "[2]", "float32"),
            "impossible position",
        ),
        (
            entry("b", "norms.bin", 4, 4, "[2]", "float32"),
            "impossible position",
        ),
        (
            entry("b", "norms.bin", u64::MAX, 4, "[1]", "float32"),
            "impossible position",
        ),
        (
            entry(
                "b",
                "norms.bin",
                0,
                0,
                "[4294967295,4294967295,4]",
                "float32",
            ),
            "impossible position",
        ),
        (
            entry("b", "norms.bin", 0, 4, "[1,1,1,1,1,1,1,1,1]", "float32"),
            "impossible position",
        ),
        (entry("b", "norms.bin", 0, 4, "[1]", "float64"), "neither"),
        (entry("a", "norms.bin", 0, 4, "[1]", "float32"), "twice"),
        (entry("b", "none.bin", 0, 4, "[1]", "float32"), "missing"),
        (
            entry("b", "../norms.bin", 0, 4, "[1]", "float32"),
            "refused",
        ),
        (String::from("{}"), "not a manifest"),
    ] {
        let e = manifest(&[first.clone(), wrong]).unwrap_err();
        assert!(format!("{e:#}").contains(why), "{e:#} does not say {why}");
    }
}

#[test]
fn a_directory_without_weights_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let e = SafetensorsCheckpoint::open(dir.path()).unwrap_err();
    assert!(e.message().contains("no .safetensors"));
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    let e = SafetensorsCheckpoint::open(dir.path()).unwrap_err();
    assert!(e.message().contains("regular"), "{e}");
    let e = SafetensorsCheckpoint::open(&dir.path().join("none")).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
}

#[test]
fn a_file_that_shrinks_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, file(&[("a", 300)])).unwrap();
    let c = SafetensorsCheckpoint::open(dir.path()).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(200)
        .unwrap();
    let e = c.read::<f32>(c.info("a").unwrap()).unwrap_err();
    assert!(e.message().contains("shorter"), "{e}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = one(&bytes);
        let _ = one(&raw(&String::from_utf8_lossy(&bytes), 8));
    }

    #[test]
    fn random_headers_stay_inside(
        shape in prop::collection::vec(0u64..6, 0..4), from in 0u64..8, to in 0u64..40, data in 0usize..40
    ) {
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":{shape:?},"data_offsets":[{from},{to}]}}}}"#);
        if let Ok(c) = one(&raw(&header, data)) {
            let a = c.info("a").unwrap();
            prop_assert_eq!(a.nbytes as u64, shape.iter().product::<u64>());
            prop_assert_eq!(c.read::<u8>(a).unwrap().len(), a.nbytes);
        }
    }
}

#[test]
fn null_metadata_is_what_mlx_writes_for_none() {
    let header = r#"{"__metadata__":null,"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    assert_eq!(
        one(&raw(header, 8)).unwrap().names().collect::<Vec<_>>(),
        ["w"]
    );
}
