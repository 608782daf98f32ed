//! numpy must read every file of a vindex (`tools/golden/vindex_read.py`), of each level and type,
//! and files of vectors (`tools/golden/stores_read.py`).
#![cfg(feature = "probe")]

use std::path::Path;
use std::process::Command;

use crate::common::fixture;
use crate::program::{mlx, stdout};
use serde_json::Value;

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn numpy_reads_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/golden/vindex_read.py");
    for (name, flags, features, tensors) in [
        ("llama", &["--level", "all"][..], 3 * 192, 21),
        ("llama", &["--level", "all", "--f16"], 3 * 192, 21),
        ("llama", &[], 3 * 192, 1),
        ("llama", &["--level", "browse", "--down-top-k", "0"], 192, 1),
        ("mixtral", &["--level", "all"], 3 * 2 * 192, 17),
    ] {
        let model = fixture("tiny").join(name);
        let to = dir.path().join(format!("{name}{}", flags.join("")));
        let mut build = mlx(dir.path(), &["vindex", "build", "--backend", "cpu"]);
        build
            .arg("--model")
            .arg(&model)
            .arg("-o")
            .arg(&to)
            .args(flags);
        stdout(&build.output().unwrap());
        let mut read = Command::new(crate::python::with_mlx_lm());
        read.arg(&script).arg(&to).arg(&model);
        let counted: Value = serde_json::from_str(&stdout(&read.output().unwrap())).unwrap();
        assert_eq!(counted["features"], features, "{name} {flags:?}");
        assert_eq!(counted["tensors"], tensors, "{name} {flags:?}");
        let tokens = if flags.contains(&"0") { 0 } else { 10 };
        let all = if name == "llama" { 192 } else { 2 * 192 };
        assert_eq!(counted["tokens"], tokens * all, "{name} {flags:?}");
    }
}

/// Tests traces, boundary stores, context stores and extracted vectors.
#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn numpy_reads_files_of_vectors() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny/llama");
    let run = |args: &[&str]| {
        let mut command = mlx(dir.path(), args);
        command.args(["--backend", "cpu", "--model"]).arg(&model);
        stdout(&command.output().unwrap())
    };
    let file = |name: &str| dir.path().join(name).display().to_string();
    let (trac, bndx, ctxt) = (file("t.trac"), file("w.bndx"), file("w.ctxt"));
    let shared = ["trace", "--tokens", "5,6,7,8,9,10,11", "--save"];
    run(&[&shared[..], &[&trac]].concat());
    run(&[&shared[..], &[&bndx, "--window", "3"]].concat());
    let layers = ["--window", "3", "--save-layers", "1-2"];
    run(&[&shared[..], &[&ctxt], &layers].concat());
    let flags = ["--component", "ffn_down", "--top-k", "3", "--output"];
    run(&[&["vindex", "extract"], &flags[..], &[&file("vectors")]].concat());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/golden/stores_read.py");
    let read = |ctxt: &str| {
        let mut read = Command::new(crate::python::with_mlx_lm());
        read.arg(&script).args([&trac, &bndx, ctxt]);
        read.arg(file("vectors/ffn_down.ndjson")).output().unwrap()
    };
    let counted: Value = serde_json::from_str(&stdout(&read(&ctxt))).unwrap();
    let expected = serde_json::json!({
        "tokens": 7, "nodes": 4, "boundaries": 3, "contexts": 3, "vectors": 192});
    assert_eq!(counted, expected);
    // The script must detect a changed byte.
    let mut bytes = std::fs::read(&ctxt).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&ctxt, bytes).unwrap();
    assert!(!read(&ctxt).status.success());
}
