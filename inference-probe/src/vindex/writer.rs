//! Writing a vindex: whole or not at all.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::{
    About, BIASES, DOWN, FILES, GATE, INDEX, Index, IndexFile, Layer, LayerIndex, MAX_LAYERS,
    MAX_TOKENS, MAX_WIDTH, META, META_HEADER, Tokens, UP, VERSION, hash_of, header, sha256,
};
use crate::error::{Error, Result};

/// Writes a vindex layer by layer, so that no more than one is in memory.
#[derive(Debug)]
pub struct Writer {
    target: PathBuf,
    dir: tempfile::TempDir,
    files: [BufWriter<File>; 5],
    at_meta: u64,
    index: Index,
}

impl Writer {
    /// Begins a vindex that will be at `path`, with at most `down_top_k` tokens of each feature.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for sizes that a vindex does not have, and when there is
    /// something at `path`.
    pub fn create(path: &Path, about: About, down_top_k: usize) -> Result<Self> {
        if path.exists() {
            return Err(Error::file(path, "there is something already"));
        }
        if !(1..=MAX_WIDTH).contains(&about.hidden_size) || down_top_k > MAX_TOKENS {
            return Err(Error::data(format!(
                "hidden states of {} elements, or {down_top_k} tokens of a feature, are not \
                 supported",
                about.hidden_size
            )));
        }
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let dir = tempfile::Builder::new()
            .prefix(".vindex-")
            .tempdir_in(parent)
            .map_err(|e| Error::io(path, e))?;
        let open = |name: &str| {
            let at = dir.path().join(name);
            let file = File::create_new(&at).map_err(|e| Error::io(&at, e))?;
            Ok(BufWriter::new(file))
        };
        let [gate, up, down, biases, meta] = FILES;
        let files = [
            open(gate)?,
            open(up)?,
            open(down)?,
            open(biases)?,
            open(meta)?,
        ];
        let index = Index {
            version: VERSION,
            about,
            down_top_k,
            layers: Vec::new(),
        };
        let mut writer = Self {
            target: path.to_owned(),
            dir,
            files,
            at_meta: META_HEADER,
            index,
        };
        // The number of layers is written at the end.
        writer.put(META, &[0; META_HEADER as usize])?;
        Ok(writer)
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let at = FILES.iter().position(|file| *file == name);
        let Some(file) = at.and_then(|at| self.files.get_mut(at)) else {
            return Err(Error::data(format!("a vindex has no file {name}")));
        };
        let path = self.dir.path().join(name);
        file.write_all(bytes).map_err(|e| Error::io(&path, e))
    }

    /// Adds the next layer, with what each of its features would say.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] when parts do not fit each other.
    pub fn push(&mut self, layer: &Layer, tokens: &[Tokens]) -> Result<()> {
        let features = layer.check(self.index.about.hidden_size)?;
        let most = tokens.iter().map(Vec::len).max().unwrap_or(0);
        if tokens.len() != features || most > self.index.down_top_k {
            return Err(Error::data(format!(
                "tokens of {} features where the layer has {features}, {most} of one where {} are \
                 kept",
                tokens.len(),
                self.index.down_top_k
            )));
        }
        if self.index.layers.len() >= MAX_LAYERS {
            return Err(Error::data(format!("more than {MAX_LAYERS} layers")));
        }
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
        let biases = layer.biases.as_ref().map(|b| {
            let up = b.up.as_deref().unwrap_or_default();
            bytes_of([b.gate.as_slice(), up, b.down.as_slice()])
        });
        let parts = [
            (GATE, Some(bytes_of([layer.gate.as_slice()]))),
            (UP, layer.up.as_deref().map(|up| bytes_of([up]))),
            (DOWN, Some(bytes_of([layer.down.as_slice()]))),
            (BIASES, biases),
            (META, Some(meta)),
        ];
        let mut hashes = BTreeMap::new();
        let mut meta = (self.at_meta, 0);
        for (name, bytes) in parts {
            let Some(bytes) = bytes else { continue };
            hashes.insert(name.to_owned(), sha256(&bytes));
            if name == META {
                meta.1 = bytes.len() as u64;
            }
            self.put(name, &bytes)?;
        }
        self.at_meta += meta.1;
        self.index.layers.push(LayerIndex {
            num_features: features,
            activation: layer.activation,
            gated: layer.up.is_some(),
            biased: layer.biases.is_some(),
            meta,
            sha256: hashes,
        });
        Ok(())
    }

    /// Writes the index, and gives the directory its name.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a vindex without layers.
    pub fn finish(self) -> Result<()> {
        let Self {
            target,
            dir,
            files,
            index,
            ..
        } = self;
        if index.layers.is_empty() {
            return Err(Error::data("a vindex needs at least one layer"));
        }
        let at = |name: &str| dir.path().join(name);
        let header = header(&index);
        for (name, file) in FILES.iter().zip(files) {
            let fault = |e| Error::io(&at(name), e);
            let mut file = file.into_inner().map_err(|e| fault(e.into_error()))?;
            if *name == META {
                file.seek(SeekFrom::Start(0)).map_err(fault)?;
                file.write_all(&header).map_err(fault)?;
            }
            file.sync_all().map_err(fault)?;
        }
        let path = at(INDEX);
        let sha256 = hash_of(&index)?;
        let text = serde_json::to_vec_pretty(&IndexFile { index, sha256 })
            .map_err(|e| Error::file(&path, e.to_string()))?;
        crate::files::write_whole(&path, &text)?;
        // A directory that is not empty is not replaced.
        std::fs::rename(dir.path(), &target).map_err(|e| Error::io(&target, e))?;
        // It is no temporary one any more: nothing is left to remove.
        let _ = dir.keep();
        Ok(())
    }
}

fn bytes_of<'a>(parts: impl IntoIterator<Item = &'a [f32]>) -> Vec<u8> {
    let values = parts.into_iter().flatten();
    values.flat_map(|v| v.to_le_bytes()).collect()
}
