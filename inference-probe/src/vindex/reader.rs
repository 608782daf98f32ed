//! Reading a vindex: nothing is believed that a hash does not say.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::index::{
    About, BIASES, DOWN, FILES, FileIndex, GATE, INDEX, Index, IndexFile, LayerIndex, Level,
    MANIFEST, MAX_INDEX, META, META_HEADER, Manifest, Numbers, TensorIndex, TensorKind, Tokens, UP,
    VERSIONS, sha256,
};
use super::layer::{Biases, Hit, Layer, gates, hits};
use super::numbers::floats;
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
    numbers: Numbers,
    sha256: String,
}

impl MatrixPart {
    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its bytes there: little-endian, row-major.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// How its numbers are stored.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// The numbers in its bytes.
    #[must_use]
    pub fn floats(&self, bytes: &[u8]) -> Vec<f32> {
        floats(bytes, self.numbers)
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

/// A vindex on disk. A clone is another handle: what one has compared with its hash, the others
/// read without. The files must not change meanwhile.
#[derive(Debug, Clone)]
pub struct Vindex {
    dir: PathBuf,
    index: Index,
    tensors: Vec<TensorIndex>,
    /// Layers and files whose bytes were compared with their hashes.
    compared: Arc<Mutex<BTreeSet<(usize, &'static str)>>>,
}

/// The index in a directory, and a fault of it.
pub(super) fn read_index(path: &Path) -> Result<Index> {
    let mut text = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_INDEX + 1).read_to_end(&mut text))
        .map_err(|e| Error::io(path, e))?;
    if text.len() as u64 > MAX_INDEX {
        return Err(Error::file(path, "is too large for an index"));
    }
    let file: IndexFile = serde_json::from_slice(&text)
        .map_err(|e| Error::file(path, format!("is no index of a vindex: {e}")))?;
    let IndexFile { index, sha256 } = file;
    if index.hash()? != sha256 {
        return Err(Error::file(path, "was changed: its hash is another"));
    }
    if !VERSIONS.contains(&index.version) {
        let message = format!(
            "version {} is not known, only {} to {}",
            index.version,
            VERSIONS.start(),
            VERSIONS.end()
        );
        return Err(Error::file(path, message));
    }
    index
        .check()
        .map_err(|message| Error::file(path, message))?;
    Ok(index)
}

/// A whole file after its hash was compared.
fn whole(dir: &Path, name: &str, about: &FileIndex) -> Result<Vec<u8>> {
    let path = dir.join(name);
    let mut bytes = Vec::new();
    File::open(&path)
        .and_then(|file| {
            file.take(about.bytes.saturating_add(1))
                .read_to_end(&mut bytes)
        })
        .map_err(|e| Error::io(&path, e))?;
    if bytes.len() as u64 != about.bytes || sha256(&bytes) != about.sha256 {
        return Err(Error::file(&path, "is damaged: it has another hash"));
    }
    Ok(bytes)
}

/// The tensors that a manifest names, in whole files without gaps.
fn tensors_of(path: &Path, bytes: &[u8]) -> Result<Vec<TensorIndex>> {
    let fault = |message: String| Error::file(path, message);
    let manifest: Manifest = serde_json::from_slice(bytes)
        .map_err(|e| fault(format!("is no manifest of a vindex: {e}")))?;
    let mut names = BTreeSet::new();
    for kind in TensorKind::ALL {
        let mut at = 0u64;
        for tensor in manifest.tensors.iter().filter(|t| t.kind == kind) {
            let bytes = tensor
                .elements()
                .and_then(|n| n.checked_mul(tensor.dtype.size()));
            let fits = tensor.file == kind.file()
                && tensor.offset == at
                && bytes == Some(tensor.bytes)
                && names.insert(tensor.name.as_str());
            let end = at.checked_add(tensor.bytes).filter(|_| fits);
            at =
                end.ok_or_else(|| fault(format!("has an impossible place for {}", tensor.name)))?;
        }
    }
    Ok(manifest.tensors)
}

impl Vindex {
    /// Opens a vindex and checks its index, its small files and the sizes of the others. Their
    /// content is checked when it is read.
    ///
    /// # Errors
    /// [`Error::Io`] for files that cannot be read; [`Error::File`] for those that are damaged, of
    /// another version, or do not fit each other.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(INDEX);
        let index = read_index(&path)?;
        if index.layers.is_empty() {
            return Err(Error::file(&path, "has impossible sizes"));
        }
        let mut tensors = Vec::new();
        for (name, about) in &index.files {
            let plain = !name.is_empty() && !name.contains(['/', '\\', '\0']) && name != "..";
            if !plain {
                return Err(Error::file(&path, "names a file outside of the directory"));
            }
            if name == MANIFEST {
                tensors = tensors_of(&dir.join(name), &whole(dir, name, about)?)?;
            }
        }
        let vindex = Self {
            dir: dir.to_owned(),
            index,
            tensors,
            compared: Arc::default(),
        };
        for (name, wanted) in vindex.sizes() {
            let path = dir.join(&name);
            let own = std::fs::metadata(&path).map_err(|e| Error::io(&path, e))?;
            if own.len() != wanted {
                let message = format!("has {} bytes; the index says {wanted}", own.len());
                return Err(Error::file(&path, message));
            }
        }
        let found = vindex.bytes(META, 0, META_HEADER)?;
        if found != vindex.index.header() {
            let message = "does not begin as the index says";
            return Err(Error::file(&dir.join(META), message));
        }
        Ok(vindex)
    }

    /// The files besides the index, with their sizes.
    fn sizes(&self) -> Vec<(String, u64)> {
        let layers = FILES.map(|name| (name.to_owned(), self.index.size_of(name)));
        let files = (self.index.files.iter()).map(|(name, about)| (name.clone(), about.bytes));
        let tensors = TensorKind::ALL.into_iter().filter_map(|kind| {
            let own = self.tensors.iter().filter(|t| t.kind == kind);
            let bytes: u64 = own.map(|t| t.bytes).sum();
            (bytes > 0).then(|| (kind.file().to_owned(), bytes))
        });
        layers.into_iter().chain(files).chain(tensors).collect()
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

    /// A layer's part of a file, after its hash was compared once. `None` where it has none.
    fn read(&self, name: &'static str, number: usize) -> Result<Option<Vec<u8>>> {
        let layer = self.layer_index(number)?;
        let count = self.index.part(name, layer);
        if count == 0 {
            return Ok(None);
        }
        let bytes = self.bytes(name, self.index.begins(name, number), count)?;
        let place = (number, name);
        let compared = || self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        if !compared().contains(&place) {
            if layer.sha256.get(name) != Some(&sha256(&bytes)) {
                return Err(damaged(&self.dir.join(name), number));
            }
            compared().insert(place);
        }
        Ok(Some(bytes))
    }

    /// The path of a file of matrices.
    #[must_use]
    pub fn path(&self, file: MatrixFile) -> PathBuf {
        self.dir.join(file.name())
    }

    /// Where a matrix of a layer is. `None` where the layer, or a vindex of this level, has none.
    ///
    /// # Errors
    /// [`Error::Data`] for a layer that is not there.
    pub fn matrix(&self, layer: usize, file: MatrixFile) -> Result<Option<MatrixPart>> {
        let (index, name) = (self.layer_index(layer)?, file.name());
        let Some(sha256) = index.sha256.get(name).cloned() else {
            return Ok(None);
        };
        let from = self.index.begins(name, layer);
        Ok(Some(MatrixPart {
            path: self.dir.join(name),
            range: from..from + self.index.part(name, index),
            layer,
            numbers: self.index.dtype,
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
        let all = bytes.map(|bytes| floats(&bytes, Numbers::Float32));
        Ok(all.map(|all| {
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

    /// How much of the model it has.
    #[must_use]
    pub fn level(&self) -> Level {
        self.index.level
    }

    /// How its numbers are stored, but for biases and logits, which are float32.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        self.index.dtype
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

    /// The tensors that are no features, as the manifest lists them.
    #[must_use]
    pub fn tensors(&self) -> &[TensorIndex] {
        &self.tensors
    }

    /// The numbers of a tensor, row-major. `None` for a name that the manifest does not have.
    ///
    /// # Errors
    /// As [`Vindex::layer`].
    pub fn tensor(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.tensors.iter().find(|t| t.name == name) else {
            return Ok(None);
        };
        let bytes = self.bytes(&tensor.file, tensor.offset, tensor.bytes)?;
        if sha256(&bytes) != tensor.sha256 {
            let message = format!("is damaged: {name} has another hash");
            return Err(Error::file(&self.dir.join(&tensor.file), message));
        }
        Ok(Some(floats(&bytes, tensor.dtype)))
    }

    /// A whole file, such as `tokenizer.json`. `None` for one that it does not have.
    ///
    /// # Errors
    /// As [`Vindex::layer`].
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let about = self.index.files.get(name);
        about.map(|about| whole(&self.dir, name, about)).transpose()
    }

    /// Bytes of all files but the index.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.sizes().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The matrices of a layer.
    ///
    /// # Errors
    /// [`Error::Data`] for a layer that is not there, and at level `browse`, which has gates alone;
    /// [`Error::Io`] and [`Error::File`] for files that cannot be read or are damaged.
    pub fn layer(&self, layer: usize) -> Result<Layer> {
        let index = self.layer_index(layer)?;
        if self.index.level < Level::Inference {
            return Err(Error::data(format!(
                "{} has the level browse, with gates alone; build it with the level inference",
                self.dir.display()
            )));
        }
        let part = |name| {
            let bytes = self.read(name, layer)?;
            Ok(bytes.map(|bytes| floats(&bytes, self.index.dtype)))
        };
        let layer = Layer {
            activation: index.activation,
            gate: part(GATE)?.unwrap_or_default(),
            up: part(UP)?,
            down: part(DOWN)?.unwrap_or_default(),
            biases: self.biases(layer)?,
            experts: index.experts,
        };
        layer.check(self.index.about.hidden_size)?;
        Ok(layer)
    }

    /// The features of a layer with the greatest gate by magnitude, for each of some states
    /// `[states, hidden]` as the layer's feed-forward part reads them. Only the gate is read, once
    /// for all states.
    ///
    /// # Errors
    /// [`Error::Data`] for numbers that are no whole states, and a layer that is not there; else as
    /// [`Vindex::layer`].
    pub fn nearest(&self, layer: usize, states: &[f32], top_k: usize) -> Result<Vec<Vec<Hit>>> {
        let hidden = self.index.about.hidden_size;
        self.layer_index(layer)?;
        if !states.len().is_multiple_of(hidden) {
            let message = format!(
                "{} numbers are no states of {hidden} elements",
                states.len()
            );
            return Err(Error::data(message));
        }
        let rows = self.read(GATE, layer)?.unwrap_or_default();
        let rows = floats(&rows, self.index.dtype);
        let biases = self.biases(layer)?;
        let bias = biases.as_ref().map(|b| b.gate.as_slice());
        let of = |x: &[f32]| hits(&gates(&rows, bias, x), top_k);
        Ok(states.chunks_exact(hidden).map(of).collect())
    }

    /// [`Vindex::nearest`] from gates that were computed elsewhere: `[states, features]`, with the
    /// bias, before the activation.
    ///
    /// # Errors
    /// [`Error::Data`] for numbers that are no gates of whole states, and a layer that is not
    /// there.
    pub fn nearest_of(&self, layer: usize, gates: &[f32], top_k: usize) -> Result<Vec<Vec<Hit>>> {
        let features = self.layer_index(layer)?.num_features;
        if features == 0 || !gates.len().is_multiple_of(features) {
            let message = format!(
                "{} numbers are no gates of {features} features",
                gates.len()
            );
            return Err(Error::data(message));
        }
        let of = |gates: &[f32]| {
            let gates: Vec<f64> = gates.iter().copied().map(f64::from).collect();
            hits(&gates, top_k)
        };
        Ok(gates.chunks_exact(features).map(of).collect())
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
        let mut all = Vec::new();
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
        self.verify_weights()
    }

    /// Compares the tensors that are no features, and the whole files, with their hashes.
    ///
    /// # Errors
    /// As [`Vindex::layer`], for the first one that is damaged.
    pub fn verify_weights(&self) -> Result<()> {
        for name in self.index.files.keys() {
            self.file(name)?;
        }
        for tensor in &self.tensors {
            self.tensor(&tensor.name)?;
        }
        Ok(())
    }
}
