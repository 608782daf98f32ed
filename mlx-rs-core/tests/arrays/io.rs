//! Tests files of arrays: reading the files of numpy and Python MLX (tools/golden/io.py), comparing
//! written bytes with numpy's, round trips, and many kinds of damage.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mlx_rs_core::{Array, Complex32, Dtype, ErrorKind, array, io, zeros};
use proptest::prelude::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/io")
        .join(name)
}

/// The array that tools/golden/io.py stores for a type.
fn expected(dtype: Dtype) -> Array {
    let base = array!([[0, 1, 2], [3, 4, 5]]).unwrap();
    match dtype {
        Dtype::Bool => array!([[false, true, false], [true, false, true]]).unwrap(),
        Dtype::Complex64 => base
            .multiply(Array::scalar(Complex32::new(1.0, 2.0)).as_ref().unwrap())
            .unwrap(),
        _ => base.astype(dtype).unwrap(),
    }
}

fn assert_same(got: &Array, want: &Array, what: &str) {
    assert_eq!(got.dtype(), want.dtype(), "{what}");
    assert_eq!(got.shape(), want.shape(), "{what}");
    assert_eq!(
        &got.bytes().unwrap()[..],
        &want.bytes().unwrap()[..],
        "{what}"
    );
}

fn assert_types(arrays: &BTreeMap<String, Array>, missing: &[Dtype]) {
    for dtype in Dtype::ALL.into_iter().filter(|d| !missing.contains(d)) {
        let name = dtype.to_string();
        assert_same(&arrays[&name], &expected(dtype), &name);
    }
    assert_eq!(arrays.len(), Dtype::ALL.len() - missing.len());
}

#[test]
fn files_of_numpy_and_mlx_are_read() {
    for name in ["numpy.npz", "numpy_compressed.npz"] {
        assert_types(&io::load_npz(fixture(name)).unwrap(), &[Dtype::Bfloat16]);
    }
    assert_types(&io::load_npz(fixture("mlx.npz")).unwrap(), &[]);
    let loaded = io::load_safetensors(fixture("mlx.safetensors")).unwrap();
    assert_types(&loaded.arrays, &[Dtype::Float64]);
    assert_eq!(loaded.metadata["format"], "mlx");
    // MLX writes null if there is no metadata.
    let loaded = io::load_safetensors(fixture("mlx_no_metadata.safetensors")).unwrap();
    assert_same(&loaded.arrays["a"], &expected(Dtype::Int32), "a");
    assert!(loaded.metadata.is_empty());

    for name in ["rows.npy", "columns.npy", "version3.npy"] {
        let got = io::load_npy(fixture(name)).unwrap();
        assert_same(&got, &expected(Dtype::Float32), name);
    }
    let got = io::load_npy(fixture("big_endian.npy")).unwrap();
    assert_same(&got, &expected(Dtype::Complex64), "big_endian");
    let got = io::load_npy(fixture("vector.npy")).unwrap();
    assert_eq!(got.to_vec::<i64>().unwrap(), [0, 1, 2]);
    let got = io::load_npy(fixture("scalar.npy")).unwrap();
    assert_eq!((got.ndim(), got.item::<f64>().unwrap()), (0, 2.5));
    let got = io::load_npy(fixture("empty.npy")).unwrap();
    assert_eq!((got.shape(), got.dtype()), (&[0, 4][..], Dtype::Uint8));
}

#[test]
fn our_npy_is_byte_for_byte_numpy_s() {
    for name in ["rows.npy", "vector.npy", "scalar.npy", "empty.npy"] {
        let theirs = std::fs::read(fixture(name)).unwrap();
        let mut ours = Vec::new();
        io::write_npy(&mut ours, &io::load_npy(fixture(name)).unwrap()).unwrap();
        assert_eq!(ours, theirs, "{name}");
    }
    // Writing a view writes its visible elements only.
    let mut ours = Vec::new();
    io::write_npy(&mut ours, &io::load_npy(fixture("columns.npy")).unwrap()).unwrap();
    assert_eq!(ours, std::fs::read(fixture("rows.npy")).unwrap());
}

#[test]
fn what_mlx_has_no_type_for_says_so() {
    for (name, part) in [
        ("refused_object.npy", "never executed"),
        ("refused_record.npy", "records"),
        ("refused_text.npy", "U2"),
        ("refused_complex128.npy", "complex64"),
    ] {
        let e = io::load_npy(fixture(name)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{name}: {e}");
        assert!(e.message().contains(part), "{name}: {e}");
        assert!(e.message().contains(name), "{name}: {e}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fp8.safetensors");
    let header = r#"{"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}"#;
    std::fs::write(&path, safetensors(header, &[1, 2])).unwrap();
    let file = io::SafetensorsFile::open(&path).unwrap();
    assert_eq!((file.dtype("a"), file.shape("a")), (None, Some(&[2][..])));
    let e = file.load("a").unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("F8_E4M3"), "{e}");
}

fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

#[test]
fn every_type_and_layout_comes_back_from_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut arrays: BTreeMap<String, Array> = Dtype::ALL
        .into_iter()
        .map(|d| (d.to_string(), expected(d)))
        .collect();
    let base = expected(Dtype::Float32);
    arrays.insert("transposed".into(), base.transpose().unwrap());
    arrays.insert("broadcast".into(), base.broadcast_to(&[4, 2, 3]).unwrap());
    arrays.insert("empty".into(), zeros(&[2, 0], Dtype::Int8).unwrap());
    arrays.insert("scalar".into(), array!(true).unwrap());
    arrays.insert("odd/ name\n\"%n%s\" é.npy".into(), array!([1u8]).unwrap());
    arrays.insert("lazy".into(), base.exp().unwrap());

    io::save_npz(path("a.npz"), &arrays).unwrap();
    io::save_npz_compressed(path("b.npz"), &arrays).unwrap();
    let metadata = [("z", "1"), ("format", "mlx"), ("a", "%n \"é\"")];
    io::save_safetensors(path("c.safetensors"), &arrays, &metadata).unwrap();
    let c = io::load_safetensors(path("c.safetensors")).unwrap();
    assert_eq!(c.metadata.len(), 3);
    for (key, value) in metadata {
        assert_eq!(c.metadata[key], value);
    }
    for loaded in [
        io::load_npz(path("a.npz")).unwrap(),
        io::load_npz(path("b.npz")).unwrap(),
        c.arrays,
    ] {
        assert_eq!(loaded.len(), arrays.len());
        for (name, array) in &arrays {
            assert_same(&loaded[name], array, name);
        }
    }
    for (name, array) in &arrays {
        io::save_npy(path("d.npy"), array).unwrap();
        assert_same(&io::load_npy(path("d.npy")).unwrap(), array, name);
    }
    // Saving the same arrays again must write the same bytes.
    io::save_safetensors(path("e.safetensors"), &arrays, &metadata).unwrap();
    let read = |name: &str| std::fs::read(path(name)).unwrap();
    assert_eq!(read("c.safetensors"), read("e.safetensors"));
    // No temporary file may remain, and a new file must have ordinary permissions.
    let mut names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        ["a.npz", "b.npz", "c.safetensors", "d.npy", "e.safetensors"]
    );
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(path("plain"), b"").unwrap();
        let mode = |name: &str| std::fs::metadata(path(name)).unwrap().permissions().mode();
        assert_eq!(mode("d.npy"), mode("plain"));
    }
}

#[test]
fn a_failed_save_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.npz");
    let a = array!([1, 2]).unwrap();
    io::save_npz(&path, [("a", &a)]).unwrap();
    let before = std::fs::read(&path).unwrap();
    let e = io::save_npz(&path, [("b", &a), ("b", &a)]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Value);
    assert!(io::save_npz(&path, [("", &a)]).is_err());
    assert!(io::save_safetensors(&path, [("__metadata__", &a)], &[]).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), before);
    // A file cannot replace a directory, and cannot be created in a directory that does not exist.
    assert_eq!(
        io::save_npy(dir.path(), &a).unwrap_err().kind(),
        ErrorKind::Io
    );
    let missing = dir.path().join("missing/a.npy");
    assert_eq!(io::save_npy(missing, &a).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn what_is_no_file_or_another_format_is_an_error_with_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("%n%s.npy");
    let errors = [
        io::load_npy(&missing).unwrap_err(),
        io::load_npz(&missing).unwrap_err(),
        io::load_safetensors(&missing).unwrap_err(),
        io::load_npy(dir.path()).unwrap_err(),
    ];
    for e in &errors {
        assert_eq!(e.kind(), ErrorKind::Io, "{e}");
    }
    assert!(errors[0].message().contains("%n%s.npy"), "{}", errors[0]);
    let rows = fixture("rows.npy");
    assert_eq!(io::load_npz(&rows).unwrap_err().kind(), ErrorKind::Format);
    let e = io::load_safetensors(&rows).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Format);
    let e = io::load_npy(fixture("numpy.npz")).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Format);
}

#[test]
fn cut_at_every_byte_nothing_loads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut");
    for name in [
        "rows.npy",
        "version3.npy",
        "numpy_compressed.npz",
        "mlx_no_metadata.safetensors",
    ] {
        let bytes = std::fs::read(fixture(name)).unwrap();
        // Truncates small files at each length, and larger files at a sample of lengths.
        let step = 1 + bytes.len() / 400;
        for length in (0..bytes.len()).step_by(step) {
            std::fs::write(&path, &bytes[..length]).unwrap();
            let result = match name.rsplit_once('.').unwrap().1 {
                "npy" => io::load_npy(&path).map(drop),
                "npz" => io::load_npz(&path).map(drop),
                _ => io::load_safetensors(&path).map(drop),
            };
            let e = result.expect_err(&format!("{name} cut to {length} bytes"));
            assert_eq!(e.kind(), ErrorKind::Format, "{name} at {length}: {e}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        std::fs::write(&path, longer).unwrap();
        match name.rsplit_once('.').unwrap().1 {
            "npy" => assert!(io::load_npy(&path).is_err()),
            "npz" => {} // the ZIP format allows data around the archive
            _ => assert!(io::load_safetensors(&path).is_err()),
        }
    }
    // A stream may have more data after the array.
    let mut two = std::fs::read(fixture("rows.npy")).unwrap();
    two.extend(std::fs::read(fixture("vector.npy")).unwrap());
    let mut source = &two[..];
    assert_eq!(io::read_npy(&mut source).unwrap().shape(), [2, 3]);
    assert_eq!(io::read_npy(&mut source).unwrap().shape(), [3]);
    assert!(source.is_empty());
}

#[test]
fn headers_that_lie_allocate_nothing() {
    let npy = |text: &str, data: &[u8]| {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.extend(data);
        bytes
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lie");
    for (shape, kind) in [
        ("(2000000000, 2000000000)", ErrorKind::OutOfMemory),
        (
            "(2147483647, 2147483647, 2147483647)",
            ErrorKind::OutOfMemory,
        ),
        ("(4294967296,)", ErrorKind::Shape),
        ("(1000000000,)", ErrorKind::Format),
        ("(3,)", ErrorKind::Format),
        ("(1,)", ErrorKind::Format),
    ] {
        let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
        std::fs::write(&path, npy(&text, &[0; 8])).unwrap();
        let e = io::load_npy(&path).unwrap_err();
        assert_eq!(e.kind(), kind, "{shape}: {e}");
    }
    // A stream's length is unknown in advance, so the error must come from reading.
    let text = "{'descr': '|u1', 'fortran_order': True, 'shape': (1000000000, 2), }\n";
    let e = io::read_npy(&npy(text, &[0; 8])[..]).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Format), "{e}");
    let mut long = b"\x93NUMPY\x02\x00\xff\xff\xff\xff".to_vec();
    long.extend([b' '; 100]);
    assert_eq!(
        io::read_npy(&long[..]).unwrap_err().kind(),
        ErrorKind::Format
    );
    assert_eq!(
        io::read_npy(&b"\x93NUMPY\x09\x00\x00\x00"[..])
            .unwrap_err()
            .kind(),
        ErrorKind::Unsupported
    );

    for (header, data) in [
        // Byte ranges that overlap, leave a gap, differ in size from the shape, exceed the file, or
        // overflow.
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
            3,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
            3,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}"#,
            2,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#,
            2,
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,2]}}"#,
            2,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
            3,
        ),
        (
            r#"{"a":{"dtype":"U7","shape":[2],"data_offsets":[0,2]}}"#,
            2,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}"#,
            2,
        ),
        (r#"["a"]"#, 0),
        ("", 0),
    ] {
        std::fs::write(&path, safetensors(header, &vec![0; data])).unwrap();
        let e = io::load_safetensors(&path).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Format, "{header}: {e}");
    }
    let mut huge = u64::MAX.to_le_bytes().to_vec();
    huge.extend([b' '; 64]);
    std::fs::write(&path, huge).unwrap();
    assert_eq!(
        io::load_safetensors(&path).unwrap_err().kind(),
        ErrorKind::Format
    );
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    std::fs::write(&path, safetensors(&deep, &[])).unwrap();
    assert!(io::load_safetensors(&path).is_err());
}

#[test]
fn one_open_file_serves_many_threads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let arrays: BTreeMap<String, Array> = (0..16)
        .map(|i| (i.to_string(), Array::vector(&vec![i; 1000]).unwrap()))
        .collect();
    io::save_safetensors(&path, &arrays, &[]).unwrap();
    let file = io::SafetensorsFile::open(&path).unwrap();
    std::thread::scope(|scope| {
        for t in 0..8i32 {
            let file = &file;
            scope.spawn(move || {
                for i in (0..16).map(|i| (i * 5 + t) % 16) {
                    let a = file.load(&i.to_string()).unwrap();
                    assert_eq!(a.to_vec::<i32>().unwrap(), vec![i; 1000]);
                }
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever bytes change, the result must be an error or an array that can be read.
    #[test]
    fn damaged_files_never_crash(
        which in 0usize..4,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let name = ["rows.npy", "big_endian.npy", "numpy_compressed.npz", "mlx.safetensors"][which];
        let mut bytes = std::fs::read(fixture(name)).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("damaged");
        std::fs::write(&path, bytes).unwrap();
        let arrays = match which {
            0 | 1 => io::load_npy(&path).map(|a| BTreeMap::from([(String::new(), a)])),
            2 => io::load_npz(&path),
            _ => io::load_safetensors(&path).map(|s| s.arrays),
        };
        for a in arrays.into_iter().flatten().map(|(_, a)| a) {
            prop_assert_eq!(a.bytes().unwrap().len(), a.nbytes());
        }
    }
}
