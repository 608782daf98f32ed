//! Tests of summaries of GGUF files that are complete, truncated, changed or malicious.

use std::time::{Duration, Instant};

use inference_formats::gguf::testing::{Writer, string, write};
use inference_formats::gguf::{Gguf, GgufSummary};
use inference_formats::{Error, ErrorKind, Result};
use proptest::prelude::*;

fn read(bytes: &[u8]) -> Result<GgufSummary> {
    let (_dir, path) = write(bytes);
    GgufSummary::open(&path)
}

fn refused(bytes: &[u8]) -> Error {
    read(bytes).expect_err("the file must be refused")
}

/// A header with a vocabulary before the relevant keys.
fn typed(file_type: u32) -> Writer {
    Writer::default()
        .strings("tokenizer.ggml.tokens", &["a", "b"])
        .str("general.architecture", "qwen2")
        .u32("general.file_type", file_type)
}

/// A header without a file type: most weights are Q4_K, most tensors F32.
fn untyped() -> Writer {
    let nested = [4u32.to_le_bytes().as_slice(), &2u64.to_le_bytes(), &[0; 8]].concat();
    Writer::default()
        .array("nested", 9, 1, &nested)
        .array("numbers", 6, 2, &[0; 8])
        .raw("flag", 7, &[1])
        .str("general.architecture", "qwen3")
        .info("norm.1", &[64], 0, 0)
        .info("norm.2", &[64], 0, 0)
        .info("w", &[256, 16], 12, 0)
        .info("new", &[64, 640], 9999, 0)
}

#[test]
fn the_file_type_names_the_quantization() {
    let bytes = typed(7).bytes();
    let summary = read(&bytes).unwrap();
    assert_eq!(summary.architecture.as_deref(), Some("qwen2"));
    assert_eq!(summary.quantization.as_deref(), Some("Q8_0"));
    assert_eq!(summary.bytes, bytes.len() as u64);
    // An unknown file type gives no name, and neither does a file without tensors.
    assert_eq!(read(&typed(777).bytes()).unwrap().quantization, None);
    assert_eq!(read(&Writer::default().bytes()).unwrap().architecture, None);
}

#[test]
fn without_a_file_type_most_weights_decide() {
    let summary = read(&untyped().bytes()).unwrap();
    assert_eq!(summary.architecture.as_deref(), Some("qwen3"));
    assert_eq!(summary.quantization.as_deref(), Some("Q4_K"));
    // A type that cannot be decoded still has a name.
    let other = Writer::default().info("w", &[256, 16], 23, 0).bytes();
    assert_eq!(
        read(&other).unwrap().quantization.as_deref(),
        Some("IQ4_XS")
    );
}

#[test]
fn it_reads_what_loading_refuses_and_agrees_elsewhere() {
    // A part of a split file, and tensors without data: a model list must still show the model.
    let part = typed(2)
        .raw("split.count", 2, &[3, 0])
        .info("w", &[32], 2, 0);
    let (_dir, path) = part.file();
    assert!(Gguf::open(&path).is_err());
    assert!(GgufSummary::open(&path).is_ok());
}

#[test]
fn every_truncation_is_an_error() {
    for bytes in [typed(777).bytes(), untyped().bytes()] {
        assert!(read(&bytes).is_ok());
        for n in 0..bytes.len() {
            assert_eq!(
                refused(&bytes[..n]).kind(),
                ErrorKind::Invalid,
                "cut to {n}"
            );
        }
    }
}

#[test]
fn lies_are_named() {
    let says = |bytes: Vec<u8>, why: &str| {
        let e = refused(&bytes);
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(e.message().contains(why), "{e} does not say {why}");
    };
    says(
        b"GGML, and much more than a magic".to_vec(),
        "not a GGUF file",
    );
    let with = |at: usize, bytes: &[u8]| {
        let mut file = typed(7).bytes();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    says(with(4, &1u32.to_le_bytes()), "version 1");
    says(with(4, &3u32.to_be_bytes()), "big-endian");
    says(with(8, &u64::MAX.to_le_bytes()), "claims");
    says(with(16, &u64::MAX.to_le_bytes()), "claims");
    says(with(24, &u64::MAX.to_le_bytes()), "claims");
    let key = |kind: u32, value: &[u8]| Writer::default().raw("k", kind, value).bytes();
    says(key(8, &(1u64 << 40).to_le_bytes()), "claims");
    says(key(99, &[0; 8]), "unknown value type 99");
    let array = |kind: u32, n: u64| Writer::default().array("k", kind, n, &[0; 64]).bytes();
    for kind in 0..13 {
        says(array(kind, u64::MAX), "claims");
        says(array(kind, 1 << 40), "claims");
    }
    says(array(77, 1), "unknown element type 77");
    let nested = (0..40).fold(Vec::new(), |inner, _| {
        [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes(), &inner].concat()
    });
    says(key(9, &nested), "deeper");
    let dims = Writer::default().info("t", &[1; 5], 0, 0);
    says(dims.bytes(), "dimensions");
    let text = [1u64.to_le_bytes().as_slice(), &[0xff]].concat();
    let key = Writer::default().raw("general.architecture", 8, &text);
    says(key.bytes(), "UTF-8");
}

/// The file may be large, but the header is limited. Neither reader may read more than the limit.
#[test]
fn a_header_longer_than_any_models_is_refused() {
    // A sparse file whose only key announces 256 MiB of integers. The file is large enough to
    // contain them.
    let claim = [10u32.to_le_bytes().as_slice(), &(32u64 << 20).to_le_bytes()].concat();
    let (_dir, path) = Writer::default().raw("k", 9, &claim).file();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(300 << 20).unwrap();
    let start = Instant::now();
    for e in [
        GgufSummary::open(&path).unwrap_err(),
        Gguf::open(&path).unwrap_err(),
    ] {
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(e.message().contains("at most"), "{e}");
    }
    // A similar file, with a short key after the largest accepted array.
    let claim = [
        10u32.to_le_bytes().as_slice(),
        &((32u64 << 20) - 7).to_le_bytes(),
    ]
    .concat();
    let (_dir, path) = Writer::default().raw("k", 9, &claim).u32("l", 0).file();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(300 << 20).unwrap();
    let e = GgufSummary::open(&path).unwrap_err();
    assert!(e.message().contains("the header is longer than"), "{e}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[cfg(unix)]
#[test]
fn what_is_no_file_is_not_opened() {
    // Opening a device or pipe could block, so it must be refused.
    let e = GgufSummary::open(std::path::Path::new("/dev/null")).unwrap_err();
    assert!(e.message().contains("regular"), "{e}");
    let e = GgufSummary::open(std::path::Path::new("/nothing/here.gguf")).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
}

proptest! {
    #[test]
    fn mutations_never_panic(at in any::<prop::sample::Index>(), byte: u8, is_typed: bool) {
        let mut bytes = if is_typed { typed(3).bytes() } else { untyped().bytes() };
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = read(&bytes);
    }

    #[test]
    fn words_of_any_size_never_panic(at in any::<prop::sample::Index>(), word: u64, is_typed: bool) {
        let mut bytes = if is_typed { typed(3).bytes() } else { untyped().bytes() };
        let at = at.index(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        let _ = read(&bytes);
    }

    /// Skipping a value must end at the byte where storing the value ends, or both must fail.
    #[test]
    fn skipped_values_are_as_long_as_kept_ones(
        kind in 0u32..14,
        value in prop::collection::vec(any::<u8>(), 0..120),
        count in 0u64..4,
    ) {
        for writer in [
            Writer::default().raw("k", kind, &value),
            Writer::default().array("k", kind, count, &[string("a"), value].concat()),
        ] {
            let (_dir, path) = writer.str("general.architecture", "x").file();
            if let Ok(gguf) = Gguf::open(&path) {
                let summary = GgufSummary::open(&path).unwrap();
                let architecture = gguf.metadata().str("general.architecture").unwrap();
                prop_assert_eq!(summary.architecture.as_deref(), architecture);
            }
        }
    }
}
