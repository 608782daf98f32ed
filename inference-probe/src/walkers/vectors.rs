//! Files of a model's vectors as lines of JSON, layer by layer. An interrupted run continues after
//! the last complete layer.
//!
//! The first line is a [`Header`]. Each vector has a line, and after each layer there is a line
//! `{"done": LAYER, "vectors": N, "sha256": HASH}`. The hash covers the layer's number and lines. A
//! file without hashes can be continued, too.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Scored, to_line};
use crate::error::{Error, Result};

/// The version of the format.
pub const VERSION: u32 = 1;

/// Maximum length of a line in bytes. A vector of 131,072 values fits.
const MAX_LINE: u64 = 8 << 20;

/// The header: a description of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`VERSION`].
    pub version: u32,
    /// The kind of the vectors.
    pub component: String,
    /// The model's name.
    pub model: String,
    /// A hash that identifies the model's files ([`crate::files::identity`]).
    pub identity: String,
    /// Elements of a vector.
    pub hidden_size: usize,
    /// The number of tokens for each vector.
    pub top_k: usize,
}

/// A vector and the tokens with the most similar embeddings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The layer.
    pub layer: usize,
    /// The index of the vector in the layer.
    pub index: usize,
    /// The elements of the vector.
    pub vector: Vec<f32>,
    /// For a head's output column or query row, the matching value or key row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Vec<f32>>,
    /// The tokens with the greatest dot products.
    pub top_k: Vec<Named>,
}

/// A token that is listed with a vector.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Named {
    /// The id.
    pub token: u32,
    /// The text.
    pub text: String,
    /// The dot product of the token's embedding and the vector.
    pub score: f32,
}

impl Named {
    /// A token with its text.
    #[must_use]
    pub fn new(scored: Scored, text: String) -> Self {
        Self {
            token: scored.id,
            text,
            score: scored.score,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Done {
    done: usize,
    vectors: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

/// The hash of a layer, from that of its lines.
fn hash_of(lines: Sha256, layer: usize) -> String {
    let hash = lines.chain_update((layer as u64).to_le_bytes()).finalize();
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file layer by layer.
#[derive(Debug)]
pub struct Extraction {
    file: BufWriter<File>,
    path: PathBuf,
    /// Complete layers.
    done: Vec<usize>,
    /// Number of vectors after the last complete layer, and the hash of their lines.
    vectors: usize,
    hash: Sha256,
}

impl Extraction {
    /// Starts the file. With `resume`, continues the file at `path` if its header is equal, and
    /// removes everything after the last complete layer.
    ///
    /// # Errors
    /// [`Error::Io`], also when the file exists and `resume` is false; [`Error::File`] for a file
    /// with another header, or with a changed layer.
    pub fn open(path: &Path, header: &Header, resume: bool) -> Result<Self> {
        let io = |e| Error::io(path, e);
        if resume && path.exists() {
            let (end, done) = complete_layers(path, header)?;
            let mut file = OpenOptions::new().write(true).open(path).map_err(io)?;
            file.set_len(end).map_err(io)?;
            file.seek(SeekFrom::End(0)).map_err(io)?;
            return Ok(Self {
                file: BufWriter::new(file),
                path: path.to_owned(),
                done,
                vectors: 0,
                hash: Sha256::new(),
            });
        }
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        let mut writer = Self {
            file: BufWriter::new(file.map_err(io)?),
            path: path.to_owned(),
            done: Vec::new(),
            vectors: 0,
            hash: Sha256::new(),
        };
        writer.write(&to_line(header)?)?;
        Ok(writer)
    }

    /// Whether the file contains a layer.
    #[must_use]
    pub fn has(&self, layer: usize) -> bool {
        self.done.contains(&layer)
    }

    /// Adds a vector of the current layer.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for numbers that JSON cannot represent.
    pub fn line(&mut self, line: &Line) -> Result<()> {
        let mut all = line.vector.iter().chain(line.input.iter().flatten());
        if all.any(|x| !x.is_finite()) {
            let (layer, index) = (line.layer, line.index);
            let message = format!("vector {index} of layer {layer} holds what is no finite number");
            return Err(Error::data(message));
        }
        let text = to_line(line)?;
        self.write(&text)?;
        self.hash.update(text);
        self.vectors += 1;
        Ok(())
    }

    /// Ends a layer. When this returns, the layer is durable on disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn end_layer(&mut self, layer: usize) -> Result<()> {
        let vectors = std::mem::take(&mut self.vectors);
        let lines = std::mem::take(&mut self.hash);
        let done = Done {
            done: layer,
            vectors,
            sha256: Some(hash_of(lines, layer)),
        };
        self.write(&to_line(&done)?)?;
        let flushed = self
            .file
            .flush()
            .and_then(|()| self.file.get_ref().sync_data());
        flushed.map_err(|e| Error::io(&self.path, e))?;
        self.done.push(layer);
        Ok(())
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|e| Error::io(&self.path, e))
    }
}

/// The position where the last complete layer of a file ends, and the complete layers.
fn complete_layers(path: &Path, header: &Header) -> Result<(u64, Vec<usize>)> {
    let io = |e| Error::io(path, e);
    let bad = |message: &str| Error::file(path, message);
    let mut file = BufReader::new(File::open(path).map_err(io)?);
    let mut text = Vec::new();
    let mut next = |text: &mut Vec<u8>| -> Result<bool> {
        text.clear();
        let mut limited = (&mut file).take(MAX_LINE);
        limited.read_until(b'\n', text).map_err(io)?;
        Ok(text.last() == Some(&b'\n'))
    };
    let actual: Option<Header> = match next(&mut text)? {
        true => serde_json::from_slice(&text).ok(),
        false => None,
    };
    let actual =
        actual.ok_or_else(|| bad("the first line is not the header of a file of vectors"))?;
    if actual != *header {
        return Err(bad(
            "it is of another model, component, version or number of tokens; take another directory",
        ));
    }
    let mut at = text.len() as u64;
    let (mut end, mut done, mut vectors) = (at, Vec::new(), 0);
    let mut hash = Sha256::new();
    while next(&mut text)? {
        at += text.len() as u64;
        let Ok(layer) = serde_json::from_slice::<Done>(&text) else {
            vectors += 1;
            hash.update(&text);
            continue;
        };
        if layer.vectors != vectors {
            return Err(bad(
                "a layer does not have the number of vectors that it declares",
            ));
        }
        let actual = hash_of(std::mem::take(&mut hash), layer.done);
        if layer.sha256.is_some_and(|stored| stored != actual) {
            return Err(bad(
                "a layer's lines are not those that were written (SHA-256)",
            ));
        }
        (end, vectors) = (at, 0);
        done.push(layer.done);
    }
    Ok((end, done))
}
