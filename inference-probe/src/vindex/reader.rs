//! Reads a vindex. No data is used before its hash is checked.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::index::{
    About, BIASES, DOWN, FILES, FileIndex, GATE, INDEX, Index, IndexFile, LayerIndex, Level,
    MANIFEST, MAX_INDEX, META, META_HEADER, Manifest, Numbers, TensorIndex, TensorKind, Tokens, UP,
    VERSIONS, sha256,
};
use super::layer::{Biases, Hit, Layer, gates, hits};
use super::numbers::floats;
use crate::error::{Error, Result};

/// A file with a matrix `[features, hidden]` for each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFile {
    /// Gate rows; in layers without a gate, the up rows.
    Gate,
    /// Up rows of layers with a gate.
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

/// The position of a layer's matrix, for readers that map the file into memory. Check the bytes
/// with [`MatrixPart::verify`] before use.
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

    /// The range of its bytes in the file: little-endian, row-major.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// The type of its numbers.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// Decodes the values in `bytes`.
    #[must_use]
    pub fn floats(&self, bytes: &[u8]) -> Vec<f32> {
        floats(bytes, self.numbers)
    }

    /// Checks that `bytes`, the contents of the range, have not changed since they were written.
    ///
    /// # Errors
    /// [`Error::File`] when they have changed.
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

/// A vindex on disk. Clones share the record of parts whose hashes were checked. The files must not
/// change while the vindex is open.
#[derive(Debug, Clone)]
pub struct Vindex {
    dir: PathBuf,
    index: Index,
    tensors: Vec<TensorIndex>,
    /// Layers and files whose hashes were checked.
    compared: Arc<Mutex<BTreeSet<(usize, &'static str)>>>,
}

/// Reads the index in a directory and checks it.
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

/// Reads a whole file and compares its hash.
fn read_checked(dir: &Path, name: &str, about: &FileIndex) -> Result<Vec<u8>> {
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

/// The tensors of a manifest. They must fill whole files without gaps.
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
    /// Opens a vindex. Checks its index, its small files, and the sizes of all other files. The
    /// content of these files is checked when it is read.
    ///
    /// # Errors
    /// [`Error::Io`] for files that cannot be read; [`Error::File`] for files that are damaged, of
    /// another version, or inconsistent.
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
                tensors = tensors_of(&dir.join(name), &read_checked(dir, name, about)?)?;
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
            let metadata = std::fs::metadata(&path).map_err(|e| Error::io(&path, e))?;
            if metadata.len() != wanted {
                let message = format!("has {} bytes; the index says {wanted}", metadata.len());
                return Err(Error::file(&path, message));
            }
        }
        let header = vindex.bytes(META, 0, META_HEADER)?;
        if header != vindex.index.header() {
            let message = "does not begin as the index says";
            return Err(Error::file(&dir.join(META), message));
        }
        Ok(vindex)
    }

    /// The files other than the index, with their sizes.
    fn sizes(&self) -> Vec<(String, u64)> {
        let layers = FILES.map(|name| (name.to_owned(), self.index.size_of(name)));
        let files = (self.index.files.iter()).map(|(name, about)| (name.clone(), about.bytes));
        let tensors = TensorKind::ALL.into_iter().filter_map(|kind| {
            let of_kind = self.tensors.iter().filter(|t| t.kind == kind);
            let bytes: u64 = of_kind.map(|t| t.bytes).sum();
            (bytes > 0).then(|| (kind.file().to_owned(), bytes))
        });
        layers.into_iter().chain(files).chain(tensors).collect()
    }

    fn bytes(&self, name: &str, from: u64, count: u64) -> Result<Vec<u8>> {
        let path = self.dir.join(name);
        let fault = |e| Error::io(&path, e);
        let mut file = File::open(&path).map_err(fault)?;
        file.seek(SeekFrom::Start(from)).map_err(fault)?;
        // The index contains the file's size, which bounds this read.
        let mut bytes = Vec::new();
        file.take(count).read_to_end(&mut bytes).map_err(fault)?;
        if bytes.len() as u64 != count {
            return Err(Error::file(&path, "ends before it should"));
        }
        Ok(bytes)
    }

    /// Reads a layer's part of a file, and checks its hash the first time. `None` if the layer has
    /// no such part.
    fn read(&self, name: &'static str, number: usize) -> Result<Option<Vec<u8>>> {
        let layer = self.layer_index(number)?;
        let count = self.index.part(name, layer);
        if count == 0 {
            return Ok(None);
        }
        let bytes = self.bytes(name, self.index.begins(name, number), count)?;
        let place = (number, name);
        let compared = || self.compared.lock();
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

    /// The position of a layer's matrix. `None` if the layer has no such matrix, or if this level
    /// does not include it.
    ///
    /// # Errors
    /// [`Error::Data`] for a layer that does not exist.
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

    /// The biases of a layer, if it has any.
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
        let layer_entry = self.index.layers.get(layer);
        layer_entry
            .ok_or_else(|| Error::data(format!("there is no layer {layer}; there are {count}")))
    }

    /// The model of the vindex.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.index.about
    }

    /// The level of the vindex.
    #[must_use]
    pub fn level(&self) -> Level {
        self.index.level
    }

    /// The type of its numbers, except biases and logits, which are float32.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        self.index.dtype
    }

    /// The layers in order.
    #[must_use]
    pub fn layers(&self) -> &[LayerIndex] {
        &self.index.layers
    }

    /// The maximum number of tokens of each feature.
    #[must_use]
    pub fn down_top_k(&self) -> usize {
        self.index.down_top_k
    }

    /// The tensors that are not features, in the order of the manifest.
    #[must_use]
    pub fn tensors(&self) -> &[TensorIndex] {
        &self.tensors
    }

    /// The numbers of a tensor, row-major. `None` for a name that is not in the manifest.
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

    /// The contents of a copied file, such as `tokenizer.json`. `None` if there is no such file.
    ///
    /// # Errors
    /// As [`Vindex::layer`].
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let about = self.index.files.get(name);
        about
            .map(|about| read_checked(&self.dir, name, about))
            .transpose()
    }

    /// The size of all files except the index, in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.sizes().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The matrices of a layer.
    ///
    /// # Errors
    /// [`Error::Data`] for a layer that does not exist, and at level `browse`, which has only
    /// gates; [`Error::Io`] and [`Error::File`] for files that cannot be read or are damaged.
    pub fn layer(&self, layer: usize) -> Result<Layer> {
        let index = self.layer_index(layer)?;
        if self.index.level < Level::Inference {
            return Err(Error::data(format!(
                "{} has the level browse, which holds only gates; build it with the level inference",
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

    /// For each of the states `[states, hidden]`, the features of a layer with the largest gate
    /// values by magnitude. The states must be inputs of the layer's feed-forward part. Only the
    /// gate rows are read, once for all states.
    ///
    /// # Errors
    /// [`Error::Data`] for an incomplete state, and a layer that does not exist; otherwise as
    /// [`Vindex::layer`].
    pub fn nearest(&self, layer: usize, states: &[f32], top_k: usize) -> Result<Vec<Vec<Hit>>> {
        let hidden = self.index.about.hidden_size;
        self.layer_index(layer)?;
        if !states.len().is_multiple_of(hidden) {
            let message = format!(
                "{} numbers are not a whole number of states of {hidden} elements",
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

    /// [`Vindex::nearest`] with precomputed gate values `[states, features]`, with bias and before
    /// the activation.
    ///
    /// # Errors
    /// [`Error::Data`] for an incomplete row of gates, and a layer that does not exist.
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

    /// The output tokens of each feature of a layer.
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

    /// Compares the tensors that are not features, and the copied files, with their hashes.
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
