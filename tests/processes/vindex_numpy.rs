//! numpy reads every file of a vindex (`tools/golden/vindex_read.py`), of each level and type.
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
