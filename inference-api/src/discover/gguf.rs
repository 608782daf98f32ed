//! The little of a GGUF header that discovery shows: architecture and quantization. Bounded: no
//! length in the file is believed before it is compared with what remains.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use super::{DiscoveredModel, ModelFormat, Quantization};
use crate::error::{Error, ErrorKind, Result};

const MAX_KEYS: u64 = 1 << 16;
const MAX_KEY: u64 = 1 << 16;
const MAX_DEPTH: usize = 4;

/// `general.file_type` numbers and their names, as llama.cpp writes them.
const FILE_TYPES: [(u32, &str); 19] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (38, "MXFP4"),
];

pub(super) fn describe(path: &Path) -> Result<DiscoveredModel> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidModel, message).with_path(path);
    let file = File::open(path).map_err(|e| super::io_error(path, "cannot open", e))?;
    let bytes = file.metadata().map_err(|e| super::io_error(path, "cannot read", e))?.len();
    let mut header = Header { reader: BufReader::new(file), left: bytes };
    let (architecture, file_type) = header.read().map_err(invalid)?;
    let name = file_type.and_then(|t| FILE_TYPES.iter().find(|(n, _)| *n == t)).map(|(_, n)| *n);
    let quantization = match name {
        Some("Q4_0" | "Q4_1") => Some(Quantization { bits: 4, group_size: 32 }),
        Some("Q5_0" | "Q5_1") => Some(Quantization { bits: 5, group_size: 32 }),
        Some("Q8_0") => Some(Quantization { bits: 8, group_size: 32 }),
        _ => None,
    };
    Ok(DiscoveredModel {
        path: path.to_owned(),
        model_type: architecture.unwrap_or_default(),
        format: ModelFormat::Gguf,
        quantization,
        quantization_name: name.map(str::to_owned),
        num_files: 1,
        bytes,
    })
}

struct Header<R> {
    reader: R,
    /// Bytes of the file not yet read.
    left: u64,
}

type Fault<T> = std::result::Result<T, String>;

impl<R: Read + Seek> Header<R> {
    fn bytes<const N: usize>(&mut self) -> Fault<[u8; N]> {
        let mut buffer = [0; N];
        self.spend(N as u64)?;
        self.reader.read_exact(&mut buffer).map_err(|e| format!("cannot read the header: {e}"))?;
        Ok(buffer)
    }

    fn spend(&mut self, n: u64) -> Fault<()> {
        self.left = self
            .left
            .checked_sub(n)
            .ok_or_else(|| format!("the header asks for {n} bytes where {} remain", self.left))?;
        Ok(())
    }

    fn u32(&mut self) -> Fault<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Fault<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn skip(&mut self, n: u64) -> Fault<()> {
        self.spend(n)?;
        // `n` is at most the file's length, which an i64 holds.
        self.reader
            .seek(SeekFrom::Current(n as i64))
            .map(|_| ())
            .map_err(|e| format!("cannot read the header: {e}"))
    }

    fn string(&mut self) -> Fault<String> {
        let n = self.u64()?;
        if n > MAX_KEY {
            return Err(format!("a name of {n} bytes is longer than {MAX_KEY}"));
        }
        self.spend(n)?;
        let mut buffer = vec![0; n as usize];
        self.reader.read_exact(&mut buffer).map_err(|e| format!("cannot read the header: {e}"))?;
        String::from_utf8(buffer).map_err(|_| String::from("a name is not UTF-8"))
    }

    fn scalar_size(kind: u32) -> Option<u64> {
        Some(match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            _ => return None,
        })
    }

    fn skip_value(&mut self, kind: u32, depth: usize) -> Fault<()> {
        if let Some(size) = Self::scalar_size(kind) {
            return self.skip(size);
        }
        match kind {
            8 => {
                let n = self.u64()?;
                self.skip(n)
            }
            9 if depth < MAX_DEPTH => {
                let (kind, n) = (self.u32()?, self.u64()?);
                if let Some(size) = Self::scalar_size(kind) {
                    let bytes = n.checked_mul(size).ok_or("an array is too long")?;
                    return self.skip(bytes);
                }
                if n > self.left {
                    return Err(format!("an array of {n} elements is longer than the file"));
                }
                (0..n).try_for_each(|_| self.skip_value(kind, depth + 1))
            }
            9 => Err(String::from("arrays are nested too deeply")),
            _ => Err(format!("a value has the unknown type {kind}")),
        }
    }

    /// Architecture and file type, where the metadata names them.
    fn read(&mut self) -> Fault<(Option<String>, Option<u32>)> {
        if &self.bytes::<4>()? != b"GGUF" {
            return Err(String::from("not a GGUF file: the magic number is missing"));
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            return Err(format!("GGUF version {version} is not supported; 2 and 3 are"));
        }
        let _tensors = self.u64()?;
        let keys = self.u64()?;
        if keys > MAX_KEYS {
            return Err(format!("{keys} metadata keys are more than {MAX_KEYS}"));
        }
        let (mut architecture, mut file_type) = (None, None);
        for _ in 0..keys {
            let key = self.string()?;
            let kind = self.u32()?;
            match (key.as_str(), kind) {
                ("general.architecture", 8) => architecture = Some(self.string()?),
                ("general.file_type", 4) => file_type = Some(self.u32()?),
                _ => self.skip_value(kind, 0)?,
            }
            if architecture.is_some() && file_type.is_some() {
                break;
            }
        }
        Ok((architecture, file_type))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    fn text(out: &mut Vec<u8>, s: &str) {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    }

    /// A header with an array before what is looked for.
    pub fn sample(architecture: &str, file_type: u32) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(0u64.to_le_bytes());
        out.extend(3u64.to_le_bytes());
        text(&mut out, "tokens");
        out.extend(9u32.to_le_bytes());
        out.extend(8u32.to_le_bytes());
        out.extend(2u64.to_le_bytes());
        text(&mut out, "a");
        text(&mut out, "b");
        text(&mut out, "general.architecture");
        out.extend(8u32.to_le_bytes());
        text(&mut out, architecture);
        text(&mut out, "general.file_type");
        out.extend(4u32.to_le_bytes());
        out.extend(file_type.to_le_bytes());
        out
    }

    fn read(bytes: &[u8]) -> Fault<(Option<String>, Option<u32>)> {
        Header { reader: Cursor::new(bytes), left: bytes.len() as u64 }.read()
    }

    #[test]
    fn reads_what_discovery_shows() {
        assert_eq!(read(&sample("qwen2", 7)).unwrap(), (Some("qwen2".into()), Some(7)));
    }

    #[test]
    fn every_truncation_is_an_error() {
        let whole = sample("llama", 3);
        for n in 0..whole.len() {
            assert!(read(&whole[..n]).is_err(), "cut to {n}");
        }
    }

    proptest! {
        #[test]
        fn mutations_never_panic(at in 0usize..100, byte in any::<u8>()) {
            let mut bytes = sample("llama", 3);
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = read(&bytes);
        }

        #[test]
        fn noise_never_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = read(&bytes);
            let start = [b"GGUF".as_slice(), &3u32.to_le_bytes()].concat();
            bytes.splice(0..0, start);
            let _ = read(&bytes);
        }
    }
}
