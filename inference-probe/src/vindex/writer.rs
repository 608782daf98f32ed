//! Writes a vindex completely or not at all. An incomplete vindex is in a separate directory beside
//! its final place, with a journal of the finished parts.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::build::Build;
use super::index::{
    About, BIASES, DOWN, FILES, FileIndex, GATE, INDEX, Index, IndexFile, LayerIndex, Level,
    MANIFEST, MAX_INDEX, MAX_LAYERS, MAX_TOKENS, MAX_WIDTH, META, META_HEADER, Manifest, Numbers,
    TensorIndex, TensorKind, Tokens, UP, sha256,
};
use super::layer::Layer;
use super::numbers::{bytes_of, too_great};
use super::reader::read_index;
use crate::error::{Error, Result};

/// The hash of each part of a layer, by its file.
type Hashes = BTreeMap<String, String>;

/// File names in the directory of an incomplete build.
const JOURNAL: &str = "partial.json";
const JOURNAL_TENSORS: &str = "partial_tensors.json";
const LOCK: &str = "partial.lock";

/// Writes a vindex layer by layer, so that only one layer is in memory.
#[derive(Debug)]
pub struct Writer {
    target: PathBuf,
    dir: PathBuf,
    build: Build,
    files: BTreeMap<&'static str, BufWriter<File>>,
    index: Index,
    tensors: Vec<TensorIndex>,
    /// The lock of the build directory, held by this process.
    lock: Option<File>,
    done: bool,
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.files.clear();
        if !self.done && !self.build.resume {
            // Errors are ignored, because the next build replaces remaining files.
            let _ = std::fs::remove_dir_all(&self.dir);
        }
        self.lock = None;
    }
}

/// The build directory, beside `path`.
fn beside(path: &Path) -> Result<PathBuf> {
    let name = (path.file_name()).ok_or_else(|| Error::file(path, "does not name a directory"))?;
    let mut name = name.to_owned();
    name.push(".partial");
    Ok(path.with_file_name(name))
}

impl Writer {
    /// Starts a vindex at `path`, with at most `down_top_k` tokens per feature.
    ///
    /// # Errors
    /// As [`Writer::begin`].
    pub fn create(path: &Path, about: About, down_top_k: usize) -> Result<Self> {
        let build = Build {
            down_top_k,
            ..Build::default()
        };
        Self::begin(path, about, build)
    }

    /// Starts a vindex at `path`, or continues an interrupted build. Until it is complete, its
    /// directory has the suffix `.partial`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for impossible sizes; [`Error::File`] if `path` exists, if
    /// another process builds there, or if the interrupted build is damaged or has another model or
    /// other settings.
    pub fn begin(path: &Path, about: About, build: Build) -> Result<Self> {
        if path.exists() {
            return Err(Error::file(path, "already exists; choose another path"));
        }
        if !(1..=MAX_WIDTH).contains(&about.hidden_size) || build.down_top_k > MAX_TOKENS {
            return Err(Error::data(format!(
                "hidden states of {} elements, or {} tokens of a feature, are not supported",
                about.hidden_size, build.down_top_k
            )));
        }
        let dir = beside(path)?;
        let io = |e| Error::io(&dir, e);
        let there = match std::fs::symlink_metadata(&dir) {
            Ok(metadata) if metadata.is_dir() && dir.join(LOCK).is_file() => true,
            Ok(_) => {
                let message = "is no build that was interrupted; a build would need this name";
                return Err(Error::file(&dir, message));
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
            Err(e) => return Err(io(e)),
        };
        if !there {
            std::fs::create_dir(&dir).map_err(io)?;
        }
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join(LOCK))
            .map_err(io)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(Error::file(&dir, "another process is building it"));
            }
            Err(std::fs::TryLockError::Error(e)) => return Err(io(e)),
        }
        let mut writer = Self {
            target: path.to_owned(),
            dir,
            build,
            files: BTreeMap::new(),
            index: Index {
                version: 1,
                about,
                down_top_k: build.down_top_k,
                layers: Vec::new(),
                level: build.level,
                dtype: build.numbers,
                files: BTreeMap::new(),
            },
            tensors: Vec::new(),
            lock: Some(lock),
            done: false,
        };
        let has_journal = writer.dir.join(JOURNAL).is_file();
        if there && build.resume && has_journal {
            if let Err(e) = writer.take_up() {
                // The files belong to another build, so dropping this writer must not remove them.
                writer.done = true;
                return Err(e);
            }
        } else if there {
            writer.clear()?;
        }
        writer.open_files()?;
        Ok(writer)
    }

    /// Removes the files of an earlier build.
    fn clear(&self) -> Result<()> {
        let io = |e| Error::io(&self.dir, e);
        for entry in std::fs::read_dir(&self.dir).map_err(io)? {
            let entry = entry.map_err(io)?;
            if entry.file_name() != LOCK {
                std::fs::remove_file(entry.path()).map_err(io)?;
            }
        }
        Ok(())
    }

    /// Reads the journal of an interrupted build, and checks the written files against it.
    fn take_up(&mut self) -> Result<()> {
        let path = self.dir.join(JOURNAL);
        let index = read_index(&path)?;
        let same = index.about.is_same_model(&self.index.about)
            && (index.level, index.dtype, index.down_top_k)
                == (self.index.level, self.index.dtype, self.index.down_top_k);
        if !same {
            let message = "is a build of another model or kind; remove it, or build without resume";
            return Err(Error::file(&self.dir, message));
        }
        let tensors = self.dir.join(JOURNAL_TENSORS);
        let mut text = Vec::new();
        File::open(&tensors)
            .and_then(|file| file.take(MAX_INDEX).read_to_end(&mut text))
            .map_err(|e| Error::io(&tensors, e))?;
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|e| Error::file(&tensors, format!("is damaged: {e}")))?;
        self.index = index;
        self.tensors = manifest.tensors;
        for (number, layer) in self.index.layers.iter().enumerate() {
            for (name, hash) in &layer.sha256 {
                let place = (
                    self.index.begins(name, number),
                    self.index.part(name, layer),
                );
                self.compare(name, place, hash)?;
            }
        }
        for tensor in &self.tensors {
            let place = (tensor.offset, tensor.bytes);
            self.compare(tensor.kind.file(), place, &tensor.sha256)?;
        }
        for (name, about) in &self.index.files {
            self.compare(name, (0, about.bytes), &about.sha256)?;
        }
        Ok(())
    }

    fn compare(&self, name: &str, (from, count): (u64, u64), hash: &str) -> Result<()> {
        let path = self.dir.join(name);
        let mut bytes = Vec::new();
        File::open(&path)
            .and_then(|mut file| {
                file.seek(SeekFrom::Start(from))?;
                file.take(count).read_to_end(&mut bytes)
            })
            .map_err(|e| Error::io(&path, e))?;
        match sha256(&bytes) == hash {
            true => Ok(()),
            false => Err(Error::file(
                &path,
                "is damaged; remove the directory and build it again",
            )),
        }
    }

    /// Opens the files and truncates them to the lengths in the journal.
    fn open_files(&mut self) -> Result<()> {
        let tensors = TensorKind::ALL.map(TensorKind::file);
        for name in FILES.into_iter().chain(tensors) {
            let length = self.length(name);
            // Files of tensors are created with their first tensor.
            if length == 0 && !FILES.contains(&name) {
                let _ = std::fs::remove_file(self.dir.join(name));
                continue;
            }
            self.open(name, length)?;
        }
        if self.index.layers.is_empty() {
            // The number of layers in the header is written at the end.
            self.open(META, 0)?;
            self.put(META, &[0; META_HEADER as usize])?;
        }
        Ok(())
    }

    fn open(&mut self, name: &'static str, length: u64) -> Result<()> {
        let path = self.dir.join(name);
        let open = || {
            let mut file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)?;
            file.set_len(length)?;
            file.seek(SeekFrom::End(0))?;
            Ok(BufWriter::new(file))
        };
        let file = open().map_err(|e| Error::io(&path, e))?;
        self.files.insert(name, file);
        Ok(())
    }

    /// The length of a file according to the index.
    fn length(&self, name: &str) -> u64 {
        match FILES.contains(&name) {
            true => self.index.size_of(name),
            false => {
                let of_file = self.tensors.iter().filter(|t| t.kind.file() == name);
                of_file.map(|t| t.bytes).sum()
            }
        }
    }

    fn put(&mut self, name: &'static str, bytes: &[u8]) -> Result<()> {
        if !self.files.contains_key(name) {
            self.open(name, 0)?;
        }
        let path = self.dir.join(name);
        match self.files.get_mut(name) {
            Some(file) => file.write_all(bytes).map_err(|e| Error::io(&path, e)),
            None => Err(Error::file(&path, "is not open")),
        }
    }

    /// The number of layers written so far, including those of an earlier build.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.index.layers.len()
    }

    /// Whether a tensor of this name has been written.
    #[must_use]
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    /// Whether a copied file of this name has been written.
    #[must_use]
    pub fn has_file(&self, name: &str) -> bool {
        self.index.files.contains_key(name)
    }

    /// Rejects numbers that float16 cannot represent.
    fn check_range(&self, what: &str, values: &[&[f32]]) -> Result<()> {
        let beyond = self.index.dtype == Numbers::Float16 && values.iter().any(|v| too_great(v));
        match beyond {
            true => Err(Error::data(format!(
                "{what} has numbers beyond the greatest float16; build it with float32"
            ))),
            false => Ok(()),
        }
    }

    /// Adds a tensor that is not a feature. It is durable after [`Writer::save`] or after the next
    /// layer.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] if the number of values does not match the shape, or the name
    /// already exists.
    pub fn push_tensor(
        &mut self,
        name: &str,
        kind: TensorKind,
        shape: &[usize],
        values: &[f32],
    ) -> Result<()> {
        let dtype = self.index.dtype;
        let file = kind.file();
        let offset = self.length(file);
        let mut tensor = TensorIndex {
            name: name.to_owned(),
            kind,
            file: file.to_owned(),
            offset,
            bytes: 0,
            shape: shape.to_vec(),
            dtype,
            sha256: String::new(),
        };
        if tensor.elements() != Some(values.len() as u64) || self.has_tensor(name) {
            return Err(Error::data(format!(
                "{name} of shape {shape:?} with {} values is not possible here",
                values.len()
            )));
        }
        self.check_range(name, &[values])?;
        let bytes = bytes_of(&[values], dtype);
        tensor.bytes = bytes.len() as u64;
        tensor.sha256 = sha256(&bytes);
        self.put(file, &bytes)?;
        self.tensors.push(tensor);
        Ok(())
    }

    /// Adds a file with these contents.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a name that the vindex itself uses, and for a name that
    /// is empty, is `..`, or contains `/`, `\` or NUL.
    pub fn push_file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let tensors = TensorKind::ALL.map(TensorKind::file);
        let reserved = FILES.contains(&name)
            || tensors.contains(&name)
            || name == INDEX
            || name.starts_with("partial");
        let plain = !name.is_empty() && !name.contains(['/', '\\', '\0']) && name != "..";
        if reserved || !plain {
            return Err(Error::data(format!(
                "a vindex has no room for a file {name:?}"
            )));
        }
        crate::files::write_whole(&self.dir.join(name), bytes)?;
        let about = FileIndex {
            bytes: bytes.len() as u64,
            sha256: sha256(bytes),
        };
        self.index.files.insert(name.to_owned(), about);
        Ok(())
    }

    /// Adds the next layer, with the output tokens of each of its features.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for inconsistent parts.
    pub fn push(&mut self, layer: &Layer, tokens: &[Tokens]) -> Result<()> {
        let features = layer.check(self.index.about.hidden_size)?;
        self.check_tokens(tokens, features)?;
        let written = self.put_matrices(layer);
        written.and_then(|hashes| self.end_layer((layer, features), tokens, hashes))
    }

    /// Like [`Writer::push`], but `tokens` computes the tokens in this thread while another thread
    /// writes the matrices. The outer error is that of `tokens`; the writer is then unchanged.
    ///
    /// # Errors
    /// The error of `tokens`; the inner result has the errors of [`Writer::push`].
    pub fn push_with<E>(
        &mut self,
        layer: &Layer,
        tokens: impl FnOnce() -> std::result::Result<Vec<Tokens>, E>,
    ) -> std::result::Result<Result<()>, E> {
        let features = match layer.check(self.index.about.hidden_size) {
            Ok(features) => features,
            Err(e) => return Ok(Err(e)),
        };
        let (tokens, written) = std::thread::scope(|scope| {
            let writing = scope.spawn(|| self.put_matrices(layer));
            let tokens = tokens();
            (tokens, writing.join())
        });
        let written = written.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (tokens, hashes) = match (tokens, written) {
            (Ok(tokens), Ok(hashes)) => (tokens, hashes),
            (Ok(_), Err(e)) => return Ok(self.forget().and(Err(e))),
            (Err(e), _) => {
                return match self.forget() {
                    Ok(()) => Err(e),
                    Err(io_error) => Ok(Err(io_error)),
                };
            }
        };
        if let Err(e) = self.check_tokens(&tokens, features) {
            return Ok(self.forget().and(Err(e)));
        }
        Ok(self.end_layer((layer, features), &tokens, hashes))
    }

    /// Removes all data from the files that the index does not contain.
    fn forget(&mut self) -> Result<()> {
        self.files.clear();
        self.open_files()
    }

    fn check_tokens(&self, tokens: &[Tokens], features: usize) -> Result<()> {
        let most = tokens.iter().map(Vec::len).max().unwrap_or(0);
        if tokens.len() != features || most > self.index.down_top_k {
            return Err(Error::data(format!(
                "tokens of {} features where the layer has {features}, {most} of one where {} are \
                 kept",
                tokens.len(),
                self.index.down_top_k
            )));
        }
        Ok(())
    }

    /// Writes the matrices and biases of the next layer. Returns their hashes.
    fn put_matrices(&mut self, layer: &Layer) -> Result<Hashes> {
        if self.index.layers.len() >= MAX_LAYERS {
            return Err(Error::data(format!("more than {MAX_LAYERS} layers")));
        }
        let has_projections = self.index.level >= Level::Inference;
        let mut matrices = vec![(GATE, layer.gate.as_slice())];
        if has_projections {
            matrices.extend(layer.up.as_deref().map(|up| (UP, up)));
            matrices.push((DOWN, layer.down.as_slice()));
        }
        let all: Vec<&[f32]> = matrices.iter().map(|(_, values)| *values).collect();
        self.check_range(&format!("layer {}", self.index.layers.len()), &all)?;
        let mut parts: Vec<(&'static str, Vec<u8>)> = (matrices.into_iter())
            .map(|(name, values)| (name, bytes_of(&[values], self.index.dtype)))
            .collect();
        parts.extend(layer.biases.as_ref().map(|b| {
            let up = b.up.as_deref().unwrap_or_default();
            (BIASES, bytes_of(&[&b.gate, up, &b.down], Numbers::Float32))
        }));
        let mut hashes = BTreeMap::new();
        for (name, bytes) in &parts {
            hashes.insert((*name).to_owned(), sha256(bytes));
            self.put(name, bytes)?;
        }
        Ok(hashes)
    }

    /// Writes the tokens of the layer whose matrices were written last, and adds the layer to the
    /// index.
    fn end_layer(
        &mut self,
        (layer, features): (&Layer, usize),
        tokens: &[Tokens],
        mut hashes: Hashes,
    ) -> Result<()> {
        let bytes = meta_of(tokens);
        let meta = (self.index.size_of(META), bytes.len() as u64);
        hashes.insert(META.to_owned(), sha256(&bytes));
        self.put(META, &bytes)?;
        self.index.layers.push(LayerIndex {
            num_features: features,
            activation: layer.activation,
            gated: layer.up.is_some(),
            biased: layer.biases.is_some(),
            meta,
            experts: layer.experts,
            sha256: hashes,
        });
        self.save()
    }

    /// Makes everything written so far durable, and records it in the journal.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&mut self) -> Result<()> {
        if !self.build.resume {
            return Ok(());
        }
        for (name, file) in &mut self.files {
            let path = self.dir.join(name);
            file.flush().map_err(|e| Error::io(&path, e))?;
        }
        self.write_json(JOURNAL_TENSORS, &self.manifest())?;
        self.write_index(JOURNAL)
    }

    fn manifest(&self) -> Manifest {
        Manifest {
            tensors: self.tensors.clone(),
        }
    }

    fn write_json(&self, name: &str, value: &impl serde::Serialize) -> Result<()> {
        let path = self.dir.join(name);
        let text =
            serde_json::to_vec_pretty(value).map_err(|e| Error::file(&path, e.to_string()))?;
        crate::files::write_whole(&path, &text)
    }

    fn write_index(&self, name: &str) -> Result<()> {
        let mut index = self.index.clone();
        let experts = index.layers.iter().any(|layer| layer.experts.is_some());
        let plain = index.level == Level::default() && index.dtype == Numbers::default();
        // A vindex without newer features gets version 1, so that older readers accept it.
        index.version = if plain && !experts && index.files.is_empty() {
            1
        } else {
            2
        };
        let sha256 = index.hash()?;
        self.write_json(name, &IndexFile { index, sha256 })
    }

    /// Writes the index, and renames the directory to its final name.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a vindex without layers.
    pub fn finish(mut self) -> Result<()> {
        if self.index.layers.is_empty() {
            return Err(Error::data("a vindex needs at least one layer"));
        }
        let header = self.index.header();
        for (name, file) in std::mem::take(&mut self.files) {
            let path = self.dir.join(name);
            let fault = |e| Error::io(&path, e);
            let mut file = file.into_inner().map_err(|e| fault(e.into_error()))?;
            if name == META {
                file.seek(SeekFrom::Start(0)).map_err(fault)?;
                file.write_all(&header).map_err(fault)?;
            }
            file.sync_all().map_err(fault)?;
        }
        if !self.tensors.is_empty() {
            let manifest = serde_json::to_vec_pretty(&self.manifest())
                .map_err(|e| Error::file(&self.dir.join(MANIFEST), e.to_string()))?;
            self.push_file(MANIFEST, &manifest)?;
        }
        self.write_index(INDEX)?;
        // The rename cannot replace a directory that is not empty.
        std::fs::rename(&self.dir, &self.target).map_err(|e| Error::io(&self.target, e))?;
        self.done = true;
        for name in [JOURNAL, JOURNAL_TENSORS, LOCK] {
            // Readers ignore these files.
            let _ = std::fs::remove_file(self.target.join(name));
        }
        Ok(())
    }
}

/// A layer's part of `down_meta.bin`.
fn meta_of(tokens: &[Tokens]) -> Vec<u8> {
    let mut meta = Vec::new();
    for tokens in tokens {
        let (first, logit) = tokens.first().copied().unwrap_or((u32::MAX, 0.0));
        meta.extend(first.to_le_bytes());
        meta.extend(logit.to_le_bytes());
        meta.push(u8::try_from(tokens.len()).unwrap_or(u8::MAX));
        for (token, logit) in tokens {
            meta.extend(token.to_le_bytes());
            meta.extend(logit.to_le_bytes());
        }
    }
    meta
}
