//! Test helpers: a writer of small GGUF files, with valid or wrong headers, and blocks of weights.

use std::path::PathBuf;

use super::GgmlType;

/// A file under construction. The header contains the correct counts, unless a test changes the
/// bytes.
#[derive(Clone, Default)]
pub struct Writer {
    keys: Vec<Vec<u8>>,
    infos: Vec<Vec<u8>>,
    data: Vec<u8>,
}

/// A string in GGUF's form: its length in 8 bytes, then its bytes.
pub fn string(s: &str) -> Vec<u8> {
    [(s.len() as u64).to_le_bytes().as_slice(), s.as_bytes()].concat()
}

impl Writer {
    /// A key with its type number and the bytes of its value.
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys
            .push([string(key).as_slice(), &kind.to_le_bytes(), value].concat());
        self
    }

    /// Adds a key with an unsigned 32-bit integer.
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    /// Adds a key with a float32.
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    /// Adds a key with a string.
    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    /// Adds a key with an array of strings.
    pub fn strings(self, key: &str, values: &[&str]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|v| string(v)).collect();
        self.array(key, 8, values.len() as u64, &items)
    }

    /// Adds a key with an array of elements of type `kind`. `count` is the announced number of
    /// elements, which may be wrong.
    pub fn array(self, key: &str, kind: u32, count: u64, items: &[u8]) -> Self {
        let value = [kind.to_le_bytes().as_slice(), &count.to_le_bytes(), items].concat();
        self.raw(key, 9, &value)
    }

    /// Adds the header entry of a tensor without data. `dims` are in GGUF's order, fastest
    /// dimension first. `offset` is relative to the start of the data.
    pub fn info(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let mut info = string(name);
        info.extend((dims.len() as u32).to_le_bytes());
        info.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
        info.extend(kind.to_le_bytes());
        info.extend(offset.to_le_bytes());
        self.infos.push(info);
        self
    }

    /// Adds a tensor with its data, after the data of earlier tensors.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, bytes: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        let offset = self.data.len() as u64;
        self.data.extend(bytes);
        self.info(name, dims, kind, offset)
    }

    /// Sets the size of the data to `bytes` bytes.
    pub fn data(mut self, bytes: usize) -> Self {
        self.data.resize(bytes, 7);
        self
    }

    /// The bytes of the file. There is no padding at the end, so removing the last byte always
    /// damages data.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.infos.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        out.extend(self.keys.concat());
        out.extend(self.infos.concat());
        if !self.data.is_empty() {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&self.data);
        }
        out
    }

    /// Writes the file to a directory that exists as long as the guard.
    pub fn file(&self) -> (tempfile::TempDir, PathBuf) {
        write(&self.bytes())
    }
}

/// Writes `bytes` to `model.gguf` in a new directory that exists as long as the guard.
pub fn write(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

/// `count` blocks of arbitrary bytes. The scales are finite.
pub fn blocks(kind: GgmlType, count: usize) -> Vec<u8> {
    let row = kind.row().unwrap();
    let mut bytes: Vec<u8> = (0..count * row.bytes)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    for block in bytes.chunks_exact_mut(row.bytes) {
        for &at in row.halves {
            block[at + 1] &= 0xbf;
        }
        match kind {
            // The first byte is the exponent of the scale.
            GgmlType::MXFP4 => block[0] = 64 + block[0] % 128,
            // The upper bits of the last word belong to the scale.
            GgmlType::IQ1M => block[55] &= 0xbf,
            _ => {}
        }
    }
    bytes
}
