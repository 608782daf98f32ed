//! The header reader against headers that are whole, cut, mutated and hostile.

use std::io::Cursor;

use proptest::prelude::*;

use super::*;

/// Writes headers.
pub struct Build(Vec<u8>);

impl Build {
    pub fn new(tensors: u64, keys: u64) -> Self {
        Self(Vec::new()).raw(b"GGUF").u32(3).u64(tensors).u64(keys)
    }
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
    pub fn u32(self, n: u32) -> Self {
        self.raw(&n.to_le_bytes())
    }
    pub fn u64(self, n: u64) -> Self {
        self.raw(&n.to_le_bytes())
    }
    pub fn text(self, s: &str) -> Self {
        self.u64(s.len() as u64).raw(s.as_bytes())
    }
    pub fn tensor(self, name: &str, dims: &[u64], kind: u32) -> Self {
        let start = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(start, |b, d| b.u64(*d)).u32(kind).u64(0)
    }
    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

/// A header with an array before what is looked for.
pub fn sample(architecture: &str, file_type: u32) -> Vec<u8> {
    let tokens = Build::new(0, 3).text("tokens").u32(ARRAY).u32(STRING);
    tokens
        .u64(2)
        .text("a")
        .text("b")
        .text("general.architecture")
        .u32(STRING)
        .text(architecture)
        .text("general.file_type")
        .u32(U32)
        .u32(file_type)
        .done()
}

/// A header without a file type: most weights are Q4_K, most tensors F32.
fn untyped() -> Vec<u8> {
    Build::new(4, 3)
        .text("nested")
        .u32(ARRAY)
        .u32(ARRAY)
        .u64(1)
        .u32(U32)
        .u64(2)
        .u32(1)
        .u32(2)
        .text("flag")
        .u32(7)
        .raw(&[1])
        .text("general.architecture")
        .u32(STRING)
        .text("qwen3")
        .tensor("norm.1", &[64], 0)
        .tensor("norm.2", &[64], 0)
        .tensor("w", &[64, 64], 12)
        .tensor("new", &[64, 640], 9999)
        .done()
}

fn read(bytes: &[u8]) -> Fault<Facts> {
    Header::new(Cursor::new(bytes), bytes.len() as u64).read()
}

#[test]
fn reads_what_discovery_shows() {
    let facts = read(&sample("qwen2", 7)).unwrap();
    assert_eq!(facts.architecture.as_deref(), Some("qwen2"));
    assert_eq!(facts.quantization, Some("Q8_0"));
}

#[test]
fn without_a_file_type_the_tensors_tell() {
    let facts = read(&untyped()).unwrap();
    assert_eq!(facts.architecture.as_deref(), Some("qwen3"));
    assert_eq!(facts.quantization, Some("Q4_K"));
    // An unknown file type says nothing either, and neither do no tensors.
    assert_eq!(read(&sample("llama", 777)).unwrap().quantization, None);
}

#[test]
fn every_truncation_is_an_error() {
    for whole in [sample("llama", 3), untyped()] {
        for n in 0..whole.len() {
            assert!(read(&whole[..n]).is_err(), "cut to {n}");
        }
    }
}

#[test]
fn lies_are_told_apart() {
    let refused = |bytes: Vec<u8>, says: &str| {
        let e = read(&bytes).unwrap_err();
        assert!(e.contains(says), "{e}");
    };
    let magic = || Build(Vec::new()).raw(b"GGUF");
    refused(
        b"GGML, or anything else that is long enough".to_vec(),
        "not a GGUF file",
    );
    refused(magic().u32(1).u64(0).u64(0).done(), "version 1");
    refused(magic().u32(3 << 24).u64(0).u64(0).done(), "big-endian");
    refused(Build::new(0, u64::MAX).done(), "metadata keys");
    refused(Build::new(u64::MAX, 0).done(), "tensors");
    refused(Build::new(0, 1).u64(u64::MAX).done(), "metadata key of");
    refused(
        Build::new(0, 1).text("k").u32(STRING).u64(1 << 40).done(),
        "remain",
    );
    refused(Build::new(0, 1).text("k").u32(99).done(), "unknown type 99");
    let array = |kind, n| Build::new(0, 1).text("k").u32(ARRAY).u32(kind).u64(n);
    refused(array(10, u64::MAX).done(), "too long");
    refused(array(0, u64::MAX).done(), "remain");
    refused(array(STRING, u64::MAX).done(), "remain");
    let nested = (0..40).fold(Build::new(0, 1).text("k").u32(ARRAY), |b, _| {
        b.u32(ARRAY).u64(1)
    });
    refused(nested.done(), "nested");
    refused(
        Build::new(1, 0).text("t").u32(u32::MAX).done(),
        "dimensions",
    );
    refused(Build::new(0, 1).u64(2).raw(&[0xff, 0xfe]).done(), "UTF-8");
}

#[test]
fn a_file_larger_than_any_header_is_not_read_through() {
    // 1 TiB that claims to be one array of empty strings; an endless source of zeros serves it.
    struct Zeros;
    impl Read for Zeros {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            buffer.fill(0);
            Ok(buffer.len())
        }
    }
    struct Source(std::io::Chain<Cursor<Vec<u8>>, Zeros>);
    impl Read for Source {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(buffer)
        }
    }
    impl Seek for Source {
        fn seek(&mut self, _: std::io::SeekFrom) -> std::io::Result<u64> {
            Err(std::io::Error::other("not needed within the buffer"))
        }
    }
    let start = Build::new(0, 1)
        .text("k")
        .u32(ARRAY)
        .u32(STRING)
        .u64(1 << 37);
    let source = Source(Cursor::new(start.done()).chain(Zeros));
    let e = Header::new(source, 1 << 40).read().unwrap_err();
    assert!(e.contains("longer than"), "{e}");
}

proptest! {
    #[test]
    fn mutations_never_panic(at in any::<prop::sample::Index>(), byte: u8, typed: bool) {
        let mut bytes = if typed { sample("llama", 3) } else { untyped() };
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = read(&bytes);
    }

    #[test]
    fn words_of_any_size_never_panic(at in any::<prop::sample::Index>(), word: u64, typed: bool) {
        let mut bytes = if typed { sample("llama", 3) } else { untyped() };
        let at = at.index(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        let _ = read(&bytes);
    }

    #[test]
    fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..300), keys in 0u64..4) {
        let _ = read(&noise);
        let _ = read(&Build::new(keys, keys).raw(&noise).done());
    }
}
