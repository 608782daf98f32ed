//! Tests functions as files: round trips, and errors for files that MLX must not read.

#![expect(
    clippy::cloned_ref_to_slice_refs,
    reason = "a call reads the same with one array and with several"
)]

use mlx_rs_core::transforms::{
    FunctionExporter, ImportedFunction, Kwargs, compile, export_function, export_function_kwargs,
};
use mlx_rs_core::{All, Array, Dtype, ErrorKind, Result};

type Arrays = Result<Vec<Array>>;

fn vector(v: &[f32]) -> Array {
    Array::vector(v).unwrap()
}
fn model(x: &[Array]) -> Arrays {
    let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    let y = x[0].matmul(&weight)?;
    Ok(vec![y.sum(All, false)?, y])
}
/// Opens a file that the test has just written.
fn open(path: &std::path::Path) -> Result<ImportedFunction> {
    // SAFETY: this version of MLX has just written the file, or its header is refused.
    unsafe { ImportedFunction::open(path) }
}

#[test]
fn a_function_comes_back_with_its_constants() {
    let dir = tempfile::tempdir().unwrap();
    // The name would be a format string for printf.
    let path = dir.path().join("%n%s%p model.mlxfn");
    let x = vector(&[1.0, 1.0]);
    export_function(&path, model, &[x.clone()], false).unwrap();
    let f = open(&path).unwrap();
    for x in [x.clone(), vector(&[0.5, -2.0])] {
        let (given, expected) = (f.call(&[x.clone()]).unwrap(), model(&[x]).unwrap());
        assert_eq!(given.len(), 2);
        for (g, e) in given.iter().zip(&expected) {
            assert!(g.array_equal(e).unwrap());
        }
    }
    // Inputs of another form than the traced one must be errors.
    for bad in [
        vec![],
        vec![vector(&[1.0])],
        vec![x.astype(Dtype::Float16).unwrap()],
        vec![x.clone(), x],
    ] {
        assert_eq!(f.call(&bad).unwrap_err().kind(), ErrorKind::Mlx);
    }
    // No other file may be in the directory.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn shapeless_named_compiled_and_several() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let square = |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?]) };
    let (one, three) = (vector(&[2.0]), vector(&[1.0, 2.0, 3.0]));

    export_function(at("shapeless"), square, &[one.clone()], true).unwrap();
    let y = open(&at("shapeless"))
        .unwrap()
        .call(&[three.clone()])
        .unwrap();
    assert_eq!(y[0].to_vec::<f32>().unwrap(), [1.0, 4.0, 9.0]);

    let compiled = compile(square);
    export_function(
        at("compiled"),
        |x: &[Array]| compiled.call(x),
        &[one.clone()],
        false,
    )
    .unwrap();
    let y = open(&at("compiled")).unwrap().call(&[one.clone()]).unwrap();
    assert_eq!(y[0].to_vec::<f32>().unwrap(), [4.0]);

    // Many names, so that a hash order would be noticed.
    let named: Kwargs = (0..9)
        .map(|i| (format!("n{i}"), vector(&[i as f32])))
        .collect();
    let digits = |x: &[Array], n: &Kwargs| -> Arrays {
        let mut y = x[0].clone();
        for value in n.values() {
            y = y.multiply(&vector(&[2.0]))?.add(value)?;
        }
        Ok(vec![y])
    };
    export_function_kwargs(at("named"), digits, &[one.clone()], &named, false).unwrap();
    let f = open(&at("named")).unwrap();
    let expected = digits(&[one.clone()], &named).unwrap()[0]
        .item::<f32>()
        .unwrap();
    assert_eq!(
        f.call_kwargs(&[one.clone()], &named).unwrap()[0]
            .item::<f32>()
            .unwrap(),
        expected
    );
    assert!(f.call(&[one.clone()]).is_err());
    assert!(f.call_kwargs(&[one.clone()], &Kwargs::new()).is_err());

    let mut exporter = FunctionExporter::new(at("several"), square, false).unwrap();
    exporter.export(&[one.clone()]).unwrap();
    exporter.export(&[three.clone()]).unwrap();
    assert!(!at("several").exists(), "not there before it is complete");
    exporter.finish().unwrap();
    let f = open(&at("several")).unwrap();
    assert_eq!(f.call(&[one]).unwrap()[0].to_vec::<f32>().unwrap(), [4.0]);
    assert_eq!(
        f.call(&[three]).unwrap()[0].to_vec::<f32>().unwrap(),
        [1.0, 4.0, 9.0]
    );
    assert!(f.call(&[vector(&[1.0, 2.0])]).is_err());
}

#[test]
fn a_failed_export_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let x = [vector(&[1.0, 1.0])];
    export_function(&path, model, &x, false).unwrap();
    let before = std::fs::read(&path).unwrap();
    let fails = |x: &[Array]| -> Arrays { Ok(vec![x[0].reshape(&[77])?]) };
    assert!(export_function(&path, fails, &x, false).is_err());
    let mut exporter = FunctionExporter::new(&path, fails, false).unwrap();
    assert!(exporter.export(&x).is_err());
    assert_eq!(exporter.export(&x).unwrap_err().kind(), ErrorKind::Value);
    assert_eq!(exporter.finish().unwrap_err().kind(), ErrorKind::Value);
    drop(FunctionExporter::new(&path, model, false).unwrap());
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn places_that_cannot_be_written_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let x = [vector(&[1.0, 1.0])];
    for path in [
        dir.path().to_path_buf(),
        dir.path().join("no/such"),
        "a\0b".into(),
        "/".into(),
    ] {
        let e = export_function(&path, model, &x, false).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Value, "{path:?}");
        let e = FunctionExporter::new(&path, model, false).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Value, "{path:?}");
    }
    let named = Kwargs::from([("a\0b".to_string(), vector(&[1.0]))]);
    let f = |x: &[Array], _: &Kwargs| model(x);
    let e = export_function_kwargs(dir.path().join("f"), f, &x, &named, false).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Value);
}

#[test]
fn files_that_are_no_export_of_this_version_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    export_function(&path, model, &[vector(&[1.0, 1.0])], false).unwrap();
    let good = std::fs::read(&path).unwrap();
    let header = 8 + mlx_rs_core::mlx_version().unwrap().len();
    let mut older = good.clone();
    older[8] = b'9';
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut cases: Vec<(Vec<u8>, &str)> = vec![
        (older, "but this is MLX"),
        (huge, "not a function"),
        (b"{\"safetensors\": 1}".to_vec(), "not a function"),
    ];
    for n in 0..header {
        cases.push((good[..n].to_vec(), "not a function"));
    }
    for (bytes, text) in cases {
        std::fs::write(&path, &bytes).unwrap();
        let e = open(&path).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Value);
        assert!(e.message().contains(text), "{e}");
    }
    for bad in [
        dir.path().to_path_buf(),
        dir.path().join("%n%s"),
        "a\0b".into(),
    ] {
        assert_eq!(open(&bad).err().unwrap().kind(), ErrorKind::Value);
    }
}

/// A file such as `/dev/full` is not regular, and a rename would replace it.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_not_replaced() {
    use std::os::unix::fs::FileTypeExt;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let f = |x: &[Array]| -> Arrays { Ok(vec![x[0].exp()?]) };
    let x = [vector(&[1.0])];
    for e in [
        export_function(&path, f, &x, false).unwrap_err(),
        FunctionExporter::new(&path, f, false).err().unwrap(),
        mlx_rs_core::io::save_npy(&path, &x[0]).unwrap_err(),
    ] {
        assert!(e.message().contains("not a regular file"), "{e}");
    }
    assert!(path.metadata().unwrap().file_type().is_socket());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
