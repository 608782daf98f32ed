//! Tests of the reader with truncated and changed files, wrong headers, huge counts and random
//! bytes.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::testing::{Writer, string, write};
use super::*;
use crate::error::Error;

fn sample() -> Writer {
    Writer::default()
        .str("general.architecture", "llama")
        .u32("n", 5)
        .f32("f", 0.5)
        .raw("flag", 7, &[1])
        .strings("list", &["a", "", "bc"])
        .array("ids", 5, 2, &[1, 0, 0, 0, 255, 255, 255, 255])
        .array("nested", 9, 1, &[0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 8, 9])
        .tensor("w", &[32, 2], 3, &[9; 40])
        .tensor("b", &[3], 0, &[1; 12])
}

fn open(bytes: &[u8]) -> Result<Gguf> {
    let (_dir, path) = write(bytes);
    Gguf::open(&path)
}

fn refused(bytes: &[u8]) -> Error {
    open(bytes).expect_err("the file must be refused")
}

/// Checks that each tensor of an open file can be read or has an unsupported type.
fn readable(gguf: &Gguf) {
    for tensor in gguf.tensors().values() {
        match gguf.read(tensor) {
            Ok(bytes) => assert_eq!(bytes.len(), tensor.nbytes),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Unsupported),
        }
    }
}

#[test]
fn reads_what_was_written() {
    let (_dir, path) = sample().file();
    let gguf = Gguf::open(&path).unwrap();
    let m = gguf.metadata();
    assert_eq!(m.str("general.architecture").unwrap(), Some("llama"));
    assert_eq!(
        (m.u32("n").unwrap(), m.usize("none").unwrap()),
        (Some(5), None)
    );
    assert_eq!(
        (m.f32("f").unwrap(), m.f32("n").unwrap()),
        (Some(0.5), Some(5.0))
    );
    assert_eq!(m.bool("flag").unwrap(), Some(true));
    assert_eq!(m.strings("list").unwrap().unwrap(), ["a", "", "bc"]);
    assert_eq!(m.i32s("ids").unwrap().unwrap(), [1, -1]);
    let w = &gguf.tensors()["w"];
    assert_eq!(
        (w.kind, w.shape.as_slice(), w.nbytes),
        (GgmlType::Q4_1, &[2, 32][..], 40)
    );
    assert_eq!(gguf.read(w).unwrap(), [9; 40]);
    assert_eq!(gguf.read(&gguf.tensors()["b"]).unwrap(), [1; 12]);
    // The error for a wrong type must name the key.
    let e = m.u32("list").unwrap_err();
    assert!(
        e.message().contains("list") && e.message().contains("array of strings"),
        "{e}"
    );
    assert!(m.strings("n").unwrap_err().message().contains("u32"));
    assert!(m.str("n").is_err() && m.bool("n").is_err() && m.f32("list").is_err());
    assert!(m.f32s("ids").is_err() && m.i32s("list").is_err());
}

#[test]
fn every_truncation_is_an_error() {
    let file = sample().bytes();
    assert!(open(&file).is_ok());
    for n in 0..file.len() {
        let e = refused(&file[..n]);
        assert_eq!(e.kind(), ErrorKind::Invalid, "cut to {n}: {e}");
        assert!(e.path().is_some());
    }
}

#[test]
fn every_mutation_is_an_error_or_a_consistent_file() {
    let file = sample().bytes();
    for at in 0..file.len() {
        for byte in [
            0,
            1,
            0x7f,
            0x80,
            0xff,
            file[at] ^ 1,
            file[at].wrapping_add(32),
        ] {
            let mut bytes = file.clone();
            bytes[at] = byte;
            if let Ok(gguf) = open(&bytes) {
                readable(&gguf);
            }
        }
    }
}

#[test]
fn lies_are_named() {
    let with = |infos: &[(&str, &[u64], u32, u64)], data: usize| {
        infos
            .iter()
            .fold(Writer::default(), |w, i| w.info(i.0, i.1, i.2, i.3))
            .data(data)
            .bytes()
    };
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (
            with(&[("w", &[32], 3, 0), ("w", &[32], 3, 32)], 64),
            "twice",
        ),
        (Writer::default().u32("k", 1).u32("k", 1).bytes(), "twice"),
        (
            with(&[("a", &[32], 3, 0), ("b", &[32], 3, 0)], 64),
            "overlap",
        ),
        (
            with(&[("a", &[64], 3, 0), ("b", &[32], 3, 32)], 64),
            "overlap",
        ),
        (with(&[("a", &[32], 3, 8)], 64), "multiple of 32"),
        (with(&[("a", &[32], 3, 64)], 64), "truncated"),
        (with(&[("a", &[32], 3, u64::MAX - 31)], 64), "truncated"),
        (with(&[("a", &[31], 3, 0)], 64), "in a block"),
        (with(&[("a", &[0], 0, 0)], 64), "impossible dimension"),
        (with(&[("a", &[u64::MAX], 0, 0)], 64), "too large"),
        (
            with(&[("a", &[1 << 32, 1 << 32], 0, 0)], 64),
            "impossible dimension",
        ),
        (with(&[("a", &[1, 1, 1, 1, 1], 0, 0)], 64), "5 dimensions"),
        (
            Writer::default().u32("general.alignment", 0).bytes(),
            "power of two",
        ),
        (
            Writer::default().u32("general.alignment", 24).bytes(),
            "power of two",
        ),
        (
            Writer::default().u32("general.alignment", 1 << 31).bytes(),
            "power of two",
        ),
        (
            Writer::default().str("general.alignment", "32").bytes(),
            "string",
        ),
        (Writer::default().raw("k", 7, &[2]).bytes(), "bool"),
        (
            Writer::default().raw("k", 13, &[0; 8]).bytes(),
            "unknown value type 13",
        ),
        (
            Writer::default().array("k", 77, 1, &[0; 8]).bytes(),
            "unknown element type 77",
        ),
        (
            Writer::default()
                .raw("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff])
                .bytes(),
            "UTF-8",
        ),
    ];
    for (bytes, why) in cases {
        let e = refused(&bytes);
        assert!(e.message().contains(why), "{e} does not say {why}");
        assert_eq!(e.kind(), ErrorKind::Invalid);
    }
    let mut bytes = sample().bytes();
    bytes[4] = 1;
    assert!(refused(&bytes).message().contains("version 1"));
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(refused(&bytes).message().contains("big-endian"));
    bytes[0] = b'g';
    assert!(refused(&bytes).message().contains("not a GGUF file"));
}

#[test]
fn an_unknown_type_fails_when_it_is_read() {
    let gguf = |writer: Writer| {
        let (dir, path) = writer.file();
        (Gguf::open(&path).unwrap(), dir)
    };
    let (file, _dir) = gguf(Writer::default().info("a", &[256], 40, 0).data(144));
    let tensor = &file.tensors()["a"];
    assert_eq!(tensor.kind, GgmlType::Other(40));
    let e = file.read(tensor).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("NVFP4"), "{e}");
    assert_eq!(GgmlType::Other(99).name(), "type 99");
}

#[test]
fn one_part_of_several_is_unsupported() {
    let e = refused(&Writer::default().raw("split.count", 2, &[3, 0]).bytes());
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("3 parts"));
    assert!(open(&Writer::default().raw("split.count", 2, &[1, 0]).bytes()).is_ok());
}

#[test]
fn bombs_cost_nothing() {
    let start = Instant::now();
    for count in [1 << 20, 1 << 40, u64::MAX / 8, u64::MAX] {
        for kind in 0..13 {
            let bytes = Writer::default()
                .array("bomb", kind, count, &[0; 64])
                .bytes();
            assert_eq!(refused(&bytes).kind(), ErrorKind::Invalid);
        }
        let long = Writer::default()
            .raw("bomb", 8, &count.to_le_bytes())
            .bytes();
        assert!(refused(&long).message().contains("claims"));
        for at in [8, 16] {
            let mut bytes = sample().bytes();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            assert!(refused(&bytes).message().contains("claims"));
        }
        let mut name = b"GGUF".to_vec();
        name.extend(3u32.to_le_bytes());
        name.extend([0u64.to_le_bytes(), 1u64.to_le_bytes(), count.to_le_bytes()].concat());
        name.extend([0; 64]);
        assert!(refused(&name).message().contains("claims"));
    }
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn arrays_nest_only_so_deep() {
    let mut value = [0u32.to_le_bytes().as_slice(), &0u64.to_le_bytes()].concat();
    for _ in 0..100_000 {
        value = {
            let mut outer = 9u32.to_le_bytes().to_vec();
            outer.extend(1u64.to_le_bytes());
            if value.len() > 4096 {
                break;
            }
            outer.extend(value);
            outer
        };
    }
    assert!(
        refused(&Writer::default().raw("deep", 9, &value).bytes())
            .message()
            .contains("deeper")
    );
}

#[test]
fn a_crowd_of_empty_arrays_is_bounded() {
    // Each string needs 12 bytes in the file. Too many strings must be rejected before memory is
    // allocated.
    let count = (4u64 << 20) + 1;
    let items = [0u32.to_le_bytes().as_slice(), &0u64.to_le_bytes()]
        .concat()
        .repeat(count as usize);
    let start = Instant::now();
    let e = refused(&Writer::default().array("crowd", 9, count, &items).bytes());
    assert!(e.message().contains("at most"), "{e}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_file_that_shrinks_is_an_error() {
    let (_dir, path) = sample().file();
    let gguf = Gguf::open(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(100).unwrap();
    let e = gguf.read(&gguf.tensors()["w"]).unwrap_err();
    assert!(e.message().contains("shorter"), "{e}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn noise_never_panics(tail in prop::collection::vec(any::<u8>(), 0..400), keys in 0u64..4, tensors in 0u64..4) {
        let _ = open(&tail);
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend([tensors.to_le_bytes(), keys.to_le_bytes()].concat());
        bytes.extend(tail);
        if let Ok(gguf) = open(&bytes) {
            readable(&gguf);
        }
    }

    /// A valid key with a random value reaches more code of the reader than random bytes do.
    #[test]
    fn random_values_never_panic(kind in 0u32..14, value in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = open(&Writer::default().raw("k", kind, &value).bytes());
        let _ = open(&Writer::default().array("k", kind, 3, &[string("a"), value].concat()).bytes());
    }

    #[test]
    fn random_tensors_stay_inside(dims in prop::collection::vec(0u64..70, 0..6), kind in 0u32..32, offset in 0u64..9, data in 1usize..600) {
        let file = Writer::default().info("a", &dims, kind, offset * 32).data(data);
        if let Ok(gguf) = open(&file.bytes()) {
            readable(&gguf);
        }
    }
}
