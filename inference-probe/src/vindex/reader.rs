//! Reading a vindex: nothing is believed that a hash does not say.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::{
    About, BIASES, Biases, DOWN, FILES, GATE, INDEX, Index, IndexFile, Layer, LayerIndex,
    MAX_INDEX, MAX_LAYERS, MAX_TOKENS, MAX_WIDTH, META, META_HEADER, Tokens, UP, VERSION, hash_of,
    header, sha256,
};
use crate::error::{Error, Result};

/// A file that has a matrix `[features, hidden]` of each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFile {
    /// Gate rows; without a gate those of the up matrix.
    Gate,
    /// Up rows, where there is a gate beside them.
    Up,
    /// Columns of the down matrix.
    Down,
}

impl MatrixFile {
    fn name(self) -> &'static str {
        match self {
            Self::Gate => GATE,
            Self::Up => UP,
            Self::Down => DOWN,
        }
    }
}

/// Where the matrix of a layer is, for readers that map the file instead of copying it. Compare the
/// bytes with [`MatrixPart::verify`] before their use.
#[derive(Debug, Clone)]
pub struct MatrixPart {
    path: PathBuf,
    range: Range<u64>,
    layer: usize,
    sha256: String,
}

impl MatrixPart {
    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its bytes there: float32, little-endian, row-major.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Whether `bytes`, those of the range, are as they were written.
    ///
    /// # Errors
    /// [`Error::File`] when they are not.
    pub fn verify(&self, bytes: &[u8]) -> Result<()> {
        if bytes.len() as u64 != self.range.end - self.range.start || sha256(bytes) != self.sha256 {
            return Err(damaged(&self.path, self.layer));
        }
        Ok(())
    }
}

fn damaged(path: &Path, layer: usize) -> Error {
    Error::file(path, format!("is damaged: layer {layer} has another hash"))
}

/// A vindex on disk.
#[derive(Debug, Clone)]
pub struct Vindex {
    dir: PathBuf,
    index: Index,
}

impl Vindex {
    /// Opens a vindex and checks its index and the sizes of its files. Their content is checked
    /// when it is read.
    ///
    /// # Errors
    /// [`Error::Io`] for files that cannot be read; [`Error::File`] for those that are damaged, of
    /// another version, or do not fit each other.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(INDEX);
        let mut text = Vec::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_INDEX + 1).read_to_end(&mut text))
            .map_err(|e| Error::io(&path, e))?;
        if text.len() as u64 > MAX_INDEX {
            return Err(Error::file(&path, "is too large for an index"));
        }
        let file: IndexFile = serde_json::from_slice(&text)
            .map_err(|e| Error::file(&path, format!("is no index of a vindex: {e}")))?;
        let IndexFile { index, sha256 } = file;
        if hash_of(&index)? != sha256 {
            return Err(Error::file(&path, "was changed: its hash is another"));
        }
        if index.version != VERSION {
            let message = format!("version {} is not known, only {VERSION}", index.version);
            return Err(Error::file(&path, message));
        }
        let vindex = Self {
            dir: dir.to_owned(),
            index,
        };
        vindex
            .check()
            .map_err(|message| Error::file(&path, message))?;
        for name in FILES {
            let path = dir.join(name);
            let own = std::fs::metadata(&path).map_err(|e| Error::io(&path, e))?;
            let wanted = vindex.size_of(name);
            if own.len() != wanted {
                let message = format!("has {} bytes; the index says {wanted}", own.len());
                return Err(Error::file(&path, message));
            }
        }
        let found = vindex.bytes(META, 0, META_HEADER)?;
        if found != header(&vindex.index) {
            let message = "does not begin as the index says";
            return Err(Error::file(&dir.join(META), message));
        }
        Ok(vindex)
    }

    fn check(&self) -> std::result::Result<(), String> {
        let index = &self.index;
        let sizes = (1..=MAX_WIDTH).contains(&index.about.hidden_size)
            && (1..=MAX_LAYERS).contains(&index.layers.len())
            && index.down_top_k <= MAX_TOKENS;
        if !sizes {
            return Err(String::from("has impossible sizes"));
        }
        let mut at = META_HEADER;
        for (i, layer) in index.layers.iter().enumerate() {
            let most = (layer.num_features as u64).saturating_mul(9 + 8 * MAX_TOKENS as u64);
            let wanted = FILES.iter().filter(|name| self.part(name, layer) > 0);
            let hashed = layer.sha256.keys().map(String::as_str);
            if !(1..=MAX_WIDTH).contains(&layer.num_features)
                || layer.meta.0 != at
                || layer.meta.1 > most
                || {
                    let mut wanted: Vec<&str> = wanted.copied().collect();
                    wanted.sort_unstable();
                    !hashed.eq(wanted)
                }
            {
                return Err(format!("layer {i} has impossible sizes, or no hashes"));
            }
            at += layer.meta.1;
        }
        Ok(())
    }

    /// Bytes that a layer has in a file.
    fn part(&self, name: &str, layer: &LayerIndex) -> u64 {
        let (features, hidden) = (layer.num_features, self.index.about.hidden_size);
        let matrix = 4 * features as u64 * hidden as u64;
        match name {
            GATE | DOWN => matrix,
            UP if layer.gated => matrix,
            BIASES if layer.biased => {
                let up = if layer.gated { features } else { 0 };
                4 * (features + up + hidden) as u64
            }
            META => layer.meta.1,
            _ => 0,
        }
    }

    fn size_of(&self, name: &str) -> u64 {
        let layers: u64 = self.index.layers.iter().map(|l| self.part(name, l)).sum();
        layers + if name == META { META_HEADER } else { 0 }
    }

    fn bytes(&self, name: &str, from: u64, count: u64) -> Result<Vec<u8>> {
        let path = self.dir.join(name);
        let fault = |e| Error::io(&path, e);
        let mut file = File::open(&path).map_err(fault)?;
        file.seek(SeekFrom::Start(from)).map_err(fault)?;
        // The size of the file is that of the index, which bounds it.
        let mut bytes = Vec::new();
        file.take(count).read_to_end(&mut bytes).map_err(fault)?;
        if bytes.len() as u64 != count {
            return Err(Error::file(&path, "ends before it should"));
        }
        Ok(bytes)
    }

    /// A layer's part of a file, after its hash was compared. `None` where it has none.
    fn read(&self, name: &str, number: usize) -> Result<Option<Vec<u8>>> {
        let layer = self.layer_index(number)?;
        let count = self.part(name, layer);
        if count == 0 {
            return Ok(None);
        }
        let bytes = self.bytes(name, self.begins(name, number), count)?;
        if layer.sha256.get(name) != Some(&sha256(&bytes)) {
            return Err(damaged(&self.dir.join(name), number));
        }
        Ok(Some(bytes))
    }

    /// Where a layer's part of a file begins.
    fn begins(&self, name: &str, number: usize) -> u64 {
        let before: u64 = (self.index.layers[..number].iter())
            .map(|l| self.part(name, l))
            .sum();
        before + if name == META { META_HEADER } else { 0 }
    }

    /// The path of a file of matrices.
    #[must_use]
    pub fn path(&self, file: MatrixFile) -> PathBuf {
        self.dir.join(file.name())
    }

    /// Where a matrix of a layer is. `None` where the layer has none.
    ///
    /// # Errors
    /// [`Error::Data`] for a layer that is not there.
    pub fn matrix(&self, layer: usize, file: MatrixFile) -> Result<Option<MatrixPart>> {
        let (index, name) = (self.layer_index(layer)?, file.name());
        let Some(sha256) = index.sha256.get(name).cloned() else {
            return Ok(None);
        };
        let from = self.begins(name, layer);
        Ok(Some(MatrixPart {
            path: self.dir.join(name),
            range: from..from + self.part(name, index),
            layer,
            sha256,
        }))
    }

    /// The biases of a layer, where it has them.
    ///
    /// # Errors
    /// As [`Vindex::layer`].
    pub fn biases(&self, layer: usize) -> Result<Option<Biases>> {
        let index = self.layer_index(layer)?;
        let bytes = self.read(BIASES, layer)?;
        Ok(bytes.map(|bytes| floats(&bytes)).map(|all: Vec<f32>| {
            let (gate, rest) = all.split_at(index.num_features);
            let (up, down) = rest.split_at(if index.gated { index.num_features } else { 0 });
            Biases {
                gate: gate.to_vec(),
                up: index.gated.then(|| up.to_vec()),
                down: down.to_vec(),
            }
        }))
    }

    fn layer_index(&self, layer: usize) -> Result<&LayerIndex> {
        let count = self.index.layers.len();
        let found = self.index.layers.get(layer);
        found.ok_or_else(|| Error::data(format!("there is no layer {layer}; there are {count}")))
    }

    /// What it is of.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.index.about
    }

    /// The layers, first to last.
    #[must_use]
    pub fn layers(&self) -> &[LayerIndex] {
        &self.index.layers
    }

    /// Tokens of each feature, at most.
    #[must_use]
    pub fn down_top_k(&self) -> usize {
        self.index.down_top_k
    }

    /// Bytes of all files but the index.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        FILES.iter().map(|name| self.size_of(name)).sum()
    }

    /// The matrices of a layer.
    ///
    /// # Errors
    /// [`Error::Data`] for a layer that is not there; [`Error::Io`] and [`Error::File`] for files
    /// that cannot be read or are damaged.
    pub fn layer(&self, layer: usize) -> Result<Layer> {
        let index = self.layer_index(layer)?;
        let part = |name| Ok(self.read(name, layer)?.map(|bytes| floats(&bytes)));
        let layer = Layer {
            activation: index.activation,
            gate: part(GATE)?.unwrap_or_default(),
            up: part(UP)?,
            down: part(DOWN)?.unwrap_or_default(),
            biases: self.biases(layer)?,
        };
        layer.check(self.index.about.hidden_size)?;
        Ok(layer)
    }

    /// What each feature of a layer would say.
    ///
    /// # Errors
    /// As [`Vindex::layer`].
    pub fn tokens(&self, layer: usize) -> Result<Vec<Tokens>> {
        let features = self.layer_index(layer)?.num_features;
        let bytes = self.read(META, layer)?.unwrap_or_default();
        let damaged = || Error::file(&self.dir.join(META), "has a feature that ends too early");
        let mut rest = bytes.as_slice();
        let mut all = Vec::with_capacity(features);
        for _ in 0..features {
            let (head, tail) = rest.split_at_checked(9).ok_or_else(damaged)?;
            let count = usize::from(head[8]);
            let (pairs, tail) = tail.split_at_checked(8 * count).ok_or_else(damaged)?;
            let (pairs, _) = pairs.as_chunks::<8>();
            let pair = |p: &[u8; 8]| {
                let [a, b, c, d, e, f, g, h] = *p;
                (
                    u32::from_le_bytes([a, b, c, d]),
                    f32::from_le_bytes([e, f, g, h]),
                )
            };
            all.push(pairs.iter().map(pair).collect());
            rest = tail;
        }
        match rest {
            [] => Ok(all),
            _ => Err(damaged()),
        }
    }

    /// Compares all files with their hashes.
    ///
    /// # Errors
    /// As [`Vindex::layer`], for the first part that is damaged.
    pub fn verify(&self) -> Result<()> {
        for layer in 0..self.index.layers.len() {
            for name in FILES {
                self.read(name, layer)?;
            }
            self.tokens(layer)?;
        }
        Ok(())
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks::<4>();
    values.iter().map(|v| f32::from_le_bytes(*v)).collect()
}
