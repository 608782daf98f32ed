//! Files of residual traces: a header of 64 bytes, then float32 vectors, all little-endian.
//!
//! | offset | what |
//! |---|---|
//! | 0 | `TRAC` |
//! | 4 | version, `u32`: 1 |
//! | 8 | elements of a vector, `u32` |
//! | 12 | blocks `n`, `u32` |
//! | 16 | tokens, `u32` |
//! | 20 | zeros up to 32 |
//! | 32 | SHA-256 of the file with zeros here |
//! | 64 | for each token, for each of `n + 1` nodes: residual, mixer, feed-forward |
//!
//! Node 0 is the embedding, whose mixer and feed-forward vectors are zero. Node `l + 1` is block
//! `l`. The format is that of larql's full chain store. larql's files have zeros as hash, which is
//! then not checked. In numpy: `np.fromfile(path, "<f4", offset=64).reshape(tokens, n + 1, 3,
//! width)`.

use std::path::Path;

use crate::error::{Error, Result};
use crate::files::{self, read_numbers, write_whole};

const MAGIC: &[u8; 4] = b"TRAC";
const VERSION: u32 = 1;
const HEADER: usize = 64;
/// Number of vectors of a node.
const PARTS: usize = 3;

/// The residual stream of some tokens, and each block's contributions to it.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceStore {
    width: usize,
    blocks: usize,
    tokens: usize,
    /// `[tokens, blocks + 1, 3, width]`.
    values: Vec<f32>,
}

impl TraceStore {
    /// An empty store of vectors of `width` elements for models with this number of blocks.
    ///
    /// # Errors
    /// [`Error::Data`] for a width of 0.
    pub fn new(width: usize, blocks: usize) -> Result<Self> {
        if width == 0 {
            return Err(Error::data("vectors of no elements cannot be stored"));
        }
        Ok(Self {
            width,
            blocks,
            tokens: 0,
            values: Vec::new(),
        })
    }

    /// Adds a token: its embedding and, for each block, the residual stream after the block, the
    /// mixer's contribution, and the feed-forward part's contribution.
    ///
    /// # Errors
    /// [`Error::Data`] for another number of blocks, or vectors of another length. After an error,
    /// the store is unchanged.
    pub fn push(&mut self, embedding: &[f32], blocks: &[[&[f32]; PARTS]]) -> Result<()> {
        if blocks.len() != self.blocks {
            return Err(Error::data(format!(
                "the trace has {} blocks; the store has {}",
                blocks.len(),
                self.blocks
            )));
        }
        let vectors = blocks.iter().flatten().copied();
        if let Some(v) = std::iter::once(embedding)
            .chain(vectors.clone())
            .find(|v| v.len() != self.width)
        {
            return Err(Error::data(format!(
                "a vector has {} elements; the store has {}",
                v.len(),
                self.width
            )));
        }
        self.values.extend_from_slice(embedding);
        let zeros = (PARTS - 1) * self.width;
        self.values.extend(std::iter::repeat_n(0.0, zeros));
        vectors.for_each(|v| self.values.extend_from_slice(v));
        self.tokens += 1;
        Ok(())
    }

    /// The number of tokens in the store.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of blocks of the model.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The number of elements of a vector.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The residual, mixer and feed-forward vectors of a node. Node 0 is the embedding, and node
    /// `l + 1` is block `l`. `None` if the token or node does not exist.
    #[must_use]
    pub fn node(&self, token: usize, node: usize) -> Option<[&[f32]; PARTS]> {
        if token >= self.tokens || node > self.blocks {
            return None;
        }
        let from = (token * (self.blocks + 1) + node) * PARTS * self.width;
        let part = |i: usize| {
            self.values
                .get(from + i * self.width..from + (i + 1) * self.width)
        };
        Some([part(0)?, part(1)?, part(2)?])
    }

    /// Writes the file. It appears completely or not at all.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] when a number does not fit the header.
    pub fn write(&self, path: &Path) -> Result<()> {
        let number = |n: usize| {
            u32::try_from(n)
                .map(u32::to_le_bytes)
                .map_err(|_| Error::data(format!("{n} does not fit the header of a trace")))
        };
        let mut bytes = Vec::with_capacity(HEADER + 4 * self.values.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        for n in [self.width, self.blocks, self.tokens] {
            bytes.extend(number(n)?);
        }
        bytes.resize(HEADER, 0);
        bytes.extend(self.values.iter().flat_map(|v| v.to_le_bytes()));
        files::put_hash(&mut bytes, HEADER);
        write_whole(path, &bytes)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::File`] for a file that is not a trace, has another version, has
    /// changed bytes, or has a size that does not match its header.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_numbers(path)?;
        Self::parse(&bytes).map_err(|why| Error::file(path, why))
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let (header, data) = bytes
            .split_at_checked(HEADER)
            .ok_or_else(|| format!("{} bytes are less than a header of {HEADER}", bytes.len()))?;
        let (words, _) = header.as_chunks::<4>();
        if words.first() != Some(MAGIC) {
            return Err(String::from(
                "this is no trace: it does not begin with TRAC",
            ));
        }
        let word = |i: usize| words.get(i).map_or(0, |w| u32::from_le_bytes(*w));
        if word(1) != VERSION {
            return Err(format!(
                "version {} of traces is not known, only {VERSION}",
                word(1)
            ));
        }
        let [width, blocks, tokens] = [2, 3, 4].map(|i| word(i) as usize);
        let sizes = [tokens, blocks + 1, PARTS, width, 4];
        let expected = sizes.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        if width == 0 || expected != Some(data.len()) {
            return Err(format!(
                "{} bytes of vectors do not fit {tokens} tokens, {blocks} blocks and a width of \
                 {width}",
                data.len()
            ));
        }
        files::check_hash(bytes, HEADER)?;
        let (values, _) = data.as_chunks::<4>();
        Ok(Self {
            width,
            blocks,
            tokens,
            values: values.iter().map(|v| f32::from_le_bytes(*v)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn store() -> TraceStore {
        let mut store = TraceStore::new(2, 1).unwrap();
        let block = |x: f32| [vec![x + 1.0, x + 2.0], vec![0.5, 1.0], vec![0.5, 1.0]];
        for x in [0.0, 10.0] {
            let [a, b, c] = block(x);
            store.push(&[x, x], &[[&a, &b, &c]]).unwrap();
        }
        store
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.trac");
        store().write(&path).unwrap();
        let read = TraceStore::read(&path).unwrap();
        assert_eq!(read, store());
        assert_eq!((read.tokens(), read.blocks(), read.width()), (2, 1, 2));
        assert_eq!(read.node(1, 0).unwrap()[0], [10.0, 10.0]);
        assert_eq!(read.node(1, 1).unwrap()[1], [0.5, 1.0]);
        assert_eq!((read.node(2, 0), read.node(0, 2)), (None, None));
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 64 + 4 * 2 * 2 * 3 * 2);
        assert_eq!(&bytes[..8], b"TRAC\x01\0\0\0");
        // Each residual must be the sum of all contributions before it.
        for token in 0..2 {
            let before = read.node(token, 0).unwrap()[0][1];
            let [residual, mixer, feed_forward] = read.node(token, 1).unwrap();
            assert_eq!(residual[1], before + mixer[1] + feed_forward[1]);
        }
    }

    #[test]
    fn every_truncation_and_other_headers_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.trac");
        store().write(&path).unwrap();
        let complete = std::fs::read(&path).unwrap();
        for n in 0..complete.len() {
            assert!(TraceStore::parse(&complete[..n]).is_err(), "{n}");
        }
        let changed = |at: usize, byte: u8| {
            let mut bytes = complete.clone();
            bytes[at] = byte;
            TraceStore::parse(&bytes).unwrap_err()
        };
        assert!(changed(0, b'X').contains("TRAC"));
        assert!(changed(4, 2).contains("version 2"));
        assert!(changed(11, 255).contains("do not fit"));
        assert!(changed(19, 255).contains("do not fit"));
        for (at, byte) in complete.iter().enumerate() {
            for bit in [1, 128] {
                let error = changed(at, byte ^ bit);
                assert!((0..20).contains(&at) || error.contains("SHA-256"), "{at}");
            }
        }
        // Other writers omit the hash.
        let mut without = complete.clone();
        without[32..64].fill(0);
        assert_eq!(TraceStore::parse(&without).unwrap(), self::store());
        assert!(TraceStore::new(0, 1).is_err());
        let mut store = store();
        assert!(store.push(&[0.0; 2], &[]).is_err());
        assert!(store.push(&[0.0; 3], &[[&[0.0; 2]; 3]]).is_err());
        assert_eq!(store.tokens(), 2);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = bytes;
            let _ = TraceStore::parse(&bytes);
            if bytes.len() >= 8 {
                bytes[..8].copy_from_slice(b"TRAC\x01\0\0\0");
                let _ = TraceStore::parse(&bytes);
            }
        }
    }
}
