//! Files of activations: a `.npy` file of float32 `[stimuli, layers, width]`, and
//! `<stem>_metadata.json`, which describes how it was made.

use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use inference_formats::atomic::AtomicFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::Matrix;
use crate::behavior::Correctness;
use crate::error::{Error, Result};
use crate::files::{MAX_TEXT, read_numbers, read_text, write_whole};
use crate::npy;

/// How a file of activations was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metadata {
    /// `[stimuli, layers, width]`.
    pub activation_shape: [usize; 3],
    /// The name of the model, as given.
    pub model: String,
    /// The architecture.
    pub architecture: String,
    /// The [`identity`](crate::files::identity) of the model's files. With an adapter, `+` and the
    /// adapter's identity follow.
    pub model_identity: String,
    /// SHA-256 of the stimuli's file.
    pub stimuli_sha256: String,
    /// The name of the template for the texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The position in the text whose states are stored.
    pub position: String,
    /// For each row, the index of its stimulus in the file.
    pub row_indices: Vec<usize>,
    /// Whether layer 0 is the embedding, the input of the first block.
    pub with_embedding: bool,
    /// For each row, whether the model continued the text as expected; `None` if that was not
    /// tested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correctness: Option<Vec<Option<Correctness>>>,
    /// SHA-256 of the activations' file.
    pub activations_sha256: String,
    /// The program's version.
    pub version: String,
}

/// The name of the metadata file for a file of activations.
pub fn metadata_path(activations: &Path) -> PathBuf {
    let stem = activations.file_stem().unwrap_or_default();
    activations.with_file_name(format!("{}_metadata.json", stem.to_string_lossy()))
}

/// The SHA-256 of a file in hexadecimal digits.
///
/// # Errors
/// [`Error::Io`].
pub fn sha256_of(path: &Path) -> Result<String> {
    let mut file = std::fs::File::open(path).map_err(|e| Error::io(path, e))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = file.read(&mut buffer).map_err(|e| Error::io(path, e))?;
        if n == 0 {
            return Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect());
        }
        hash.update(&buffer[..n]);
    }
}

/// Writes activations row by row. The file appears under its name only when it is complete.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: BufWriter<AtomicFile>,
    /// `[stimuli, layers, width]`.
    shape: [usize; 3],
    rows: usize,
}

impl Writer {
    /// Begins a file of this shape.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn begin(path: &Path, shape: [usize; 3]) -> Result<Self> {
        let header = npy::header(&shape)?;
        let begin = || {
            let mut file = BufWriter::new(AtomicFile::create(path)?);
            file.write_all(&header).map(|()| file)
        };
        let file = begin().map_err(|e| Error::io(path, e))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            shape,
            rows: 0,
        })
    }

    /// Adds the states of one stimulus: a slice of `width` elements for each layer.
    ///
    /// # Errors
    /// [`Error::Data`] for another shape, or for more rows than `shape` allows, and [`Error::Io`].
    pub fn push<S: AsRef<[f32]>>(&mut self, layers: &[S]) -> Result<()> {
        let [rows, depth, width] = self.shape;
        if self.rows == rows || layers.len() != depth {
            return Err(Error::data(format!(
                "cannot add row {} with {} layers to activations of shape {:?}",
                self.rows,
                layers.len(),
                self.shape
            )));
        }
        for layer in layers {
            let layer = layer.as_ref();
            if layer.len() != width {
                return Err(Error::data(format!(
                    "a state has {} elements; the activations have {width}",
                    layer.len()
                )));
            }
            let written = npy::bytes(layer).try_for_each(|bytes| self.file.write_all(&bytes));
            written.map_err(|e| Error::io(&self.path, e))?;
        }
        self.rows += 1;
        Ok(())
    }

    /// Renames the files to their final names. The hash in the metadata is filled in.
    ///
    /// # Errors
    /// [`Error::Data`] if rows are missing, and [`Error::Io`].
    pub fn finish(self, mut metadata: Metadata) -> Result<Metadata> {
        if self.rows != self.shape[0] {
            return Err(Error::data(format!(
                "only {} of {} rows were added; add all before finishing",
                self.rows, self.shape[0]
            )));
        }
        let io = |e| Error::io(&self.path, e);
        let file = self.file.into_inner().map_err(|e| io(e.into_error()))?;
        metadata.activation_shape = self.shape;
        metadata.activations_sha256 = sha256_of(file.unfinished())?;
        let text = serde_json::to_string_pretty(&metadata)
            .map_err(|e| Error::file(&self.path, e.to_string()))?;
        file.commit().map_err(io)?;
        write_whole(&metadata_path(&self.path), (text + "\n").as_bytes())?;
        Ok(metadata)
    }
}

/// Activations in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Activations {
    /// `[stimuli, layers, width]`.
    shape: [usize; 3],
    data: Vec<f32>,
}

impl Activations {
    /// Activations from values in the order of `shape`.
    ///
    /// # Errors
    /// [`Error::Data`] when their number does not match.
    pub fn new(shape: [usize; 3], data: Vec<f32>) -> Result<Self> {
        let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        if count != Some(data.len()) || data.is_empty() {
            return Err(Error::data(format!(
                "{} numbers do not fill activations of shape {shape:?}",
                data.len()
            )));
        }
        Ok(Self { shape, data })
    }

    /// Reads a `.npy` file of float32 or float64, `[stimuli, layers, width]`.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::File`] for another shape or type.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_numbers(path)?;
        let (shape, data) = npy::parse(&bytes).map_err(|message| Error::file(path, message))?;
        let Ok(shape) = <[usize; 3]>::try_from(shape.as_slice()) else {
            return Err(Error::file(
                path,
                format!("shape {shape:?} where [stimuli, layers, width] was expected"),
            ));
        };
        Self::new(shape, data).map_err(|e| Error::file(path, e.to_string()))
    }

    /// `[stimuli, layers, width]`.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// The number of stimuli.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.shape[1]
    }

    /// The states of one layer, `[stimuli, width]`.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, layer: usize) -> Matrix {
        let [rows, layers, width] = self.shape;
        assert!(layer < layers, "layer {layer} of {layers}");
        Matrix::from_fn(rows, width, |r, c| {
            f64::from(self.data[(r * layers + layer) * width + c])
        })
    }

    /// One state, `[width]`.
    ///
    /// # Panics
    /// When there is no such row or layer.
    pub fn state(&self, row: usize, layer: usize) -> &[f32] {
        let [_, layers, width] = self.shape;
        assert!(layer < layers, "layer {layer} of {layers}");
        &self.data[(row * layers + layer) * width..][..width]
    }
}

/// Reads the metadata of a file of activations, and checks the file's hash.
///
/// # Errors
/// [`Error::Io`], and [`Error::File`] if the metadata do not belong to the file.
pub fn read_metadata(activations: &Path) -> Result<Metadata> {
    let path = metadata_path(activations);
    let text = read_text(&path, MAX_TEXT)?;
    let metadata: Metadata =
        serde_json::from_slice(&text).map_err(|e| Error::file(&path, e.to_string()))?;
    let hash = sha256_of(activations)?;
    if hash != metadata.activations_sha256 {
        return Err(Error::file(
            activations,
            format!(
                "its hash is not the one in {}: one of them was changed",
                path.display()
            ),
        ));
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        Metadata {
            activation_shape: [0; 3],
            model: String::from("m"),
            architecture: String::from("llama"),
            model_identity: String::new(),
            stimuli_sha256: String::new(),
            template: None,
            position: String::from("last"),
            row_indices: vec![0, 1],
            with_embedding: false,
            correctness: None,
            activations_sha256: String::new(),
            version: String::from("0"),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        let mut writer = Writer::begin(&path, [2, 2, 3]).unwrap();
        writer.push(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).unwrap();
        assert!(!path.exists());
        assert!(writer.push(&[[1.0f32, 2.0, 3.0]]).is_err());
        writer.push(&[[7.0, 8.0, 9.0], [0.0, 0.5, 0.25]]).unwrap();
        assert!(writer.push(&[[1.0f32; 3]; 2]).is_err());
        let written = writer.finish(metadata()).unwrap();
        assert_eq!(written.activation_shape, [2, 2, 3]);
        assert_eq!(read_metadata(&path).unwrap(), written);

        let read = Activations::read(&path).unwrap();
        assert_eq!((read.rows(), read.layers()), (2, 2));
        assert_eq!(read.layer(1).as_slice(), [4.0, 0.0, 5.0, 0.5, 6.0, 0.25]);
        assert_eq!(read.state(1, 0), [7.0, 8.0, 9.0]);

        // The file is changed after the metadata were written.
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(
            read_metadata(&path)
                .unwrap_err()
                .to_string()
                .contains("was changed")
        );
    }

    #[test]
    fn unfinished_files_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        let writer = Writer::begin(&path, [2, 1, 1]).unwrap();
        assert!(writer.finish(metadata()).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn other_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        std::fs::write(&path, "no numbers").unwrap();
        assert!(
            Activations::read(&path)
                .unwrap_err()
                .to_string()
                .contains("not an .npy")
        );
        let mut writer = Writer::begin(&path, [1, 2, 3]).unwrap();
        writer.push(&[[1.0f32; 3]; 2]).unwrap();
        writer.finish(metadata()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for length in 0..bytes.len() {
            std::fs::write(&path, &bytes[..length]).unwrap();
            assert!(Activations::read(&path).is_err(), "{length} bytes");
        }
    }
}
