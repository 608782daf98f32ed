//! An adapter as stored in files. Reads three layouts: mlx-lm's, go-mlx's (A and B transposed), and
//! Hugging Face PEFT's. `files.rs` applies the adapter to a model.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use inference_formats::hex;
use mlx_rs_core::{Array, eval, io};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::kind::AdapterKind;
use crate::checkpoint::files::{MAX_TEXT_FILE, ModelDir, invalid, read_text};
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::error::engine;
use crate::nn::adapter::{LowRank, PreparedPair, SlotKind, ends};

/// The name of the file with the trained weights.
pub const WEIGHTS_FILE: &str = "adapters.safetensors";
/// The name of the file with the hyperparameters.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// The name of the file with the trained weights in PEFT's layout.
const PEFT_WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// Returns a hash of the files of an adapter.
///
/// # Errors
/// If a file cannot be read.
pub fn hash_of_files(dir: &Path) -> std::io::Result<String> {
    let mut digest = Sha256::new();
    for name in [CONFIG_FILE, WEIGHTS_FILE, PEFT_WEIGHTS_FILE] {
        let path = dir.join(name);
        // Skips pipes, because opening one would block.
        if !path.is_file() {
            continue;
        }
        let mut file = std::fs::File::open(path)?;
        digest.update(name);
        digest.update(file.metadata()?.len().to_le_bytes());
        let mut buffer = vec![0; 1 << 16];
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => digest.update(&buffer[..n]),
            }
        }
    }
    Ok(hex(&digest.finalize()))
}

/// Settings in the configuration file that tensors do not show.
struct Settings {
    kind: AdapterKind,
    scale: f32,
    dropout: f32,
    /// Whether the file stores A as `[rank, in]`.
    rows_first: bool,
    weights: PathBuf,
}

fn settings(dir: &Path) -> Result<Settings> {
    if !dir.join(CONFIG_FILE).exists() {
        return Err(Error::new(
            ErrorKind::InvalidModel,
            format!(
                "there is no adapter here; give the directory with {CONFIG_FILE} and {WEIGHTS_FILE}"
            ),
        )
        .with_path(dir));
    }
    // Symbolic links must not lead out of the directory, as for models.
    let files = ModelDir::open(dir)?;
    let path = files.require(CONFIG_FILE)?;
    let text = read_text(&path, MAX_TEXT_FILE)?;
    let config: Value = serde_json::from_str(&text)
        .map_err(|e| invalid(&path, "not a JSON file").with_source(e))?;
    let kind = match config.get("fine_tune_type").and_then(Value::as_str) {
        _ if config.get("use_dora").and_then(Value::as_bool) == Some(true) => AdapterKind::Dora,
        None | Some("lora") => AdapterKind::Lora,
        Some("dora") => AdapterKind::Dora,
        Some("full") => AdapterKind::Full,
        Some(other) => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("there is no fine_tune_type `{other}`; there are lora, dora and full"),
            )
            .with_path(path));
        }
    };
    let peft = config.get("peft_type").is_some();
    let inner = config.get("lora_parameters").unwrap_or(&config);
    let number = |names: &[&str]| names.iter().find_map(|n| inner.get(n)?.as_f64());
    let finite = |name: &str, value: f64| {
        if value.is_finite() && (value as f32).is_finite() {
            Ok(value as f32)
        } else {
            Err(invalid(
                &path,
                format!("{name} is {value}; it must be a number"),
            ))
        }
    };
    let scale = match (number(&["scale"]), number(&["alpha", "lora_alpha"])) {
        (Some(scale), _) => scale,
        (None, Some(alpha)) => match number(&["rank", "r"]) {
            Some(rank) if rank > 0.0 => {
                if inner.get("use_rslora").and_then(Value::as_bool) == Some(true) {
                    alpha / rank.sqrt()
                } else {
                    alpha / rank
                }
            }
            _ => {
                return Err(invalid(
                    &path,
                    String::from("alpha is set without rank; set both, or scale"),
                ));
            }
        },
        (None, None) if kind == AdapterKind::Full => 1.0,
        (None, None) => {
            return Err(invalid(
                &path,
                String::from("neither scale nor alpha is set"),
            ));
        }
    };
    let dropout = number(&["dropout", "lora_dropout"]).unwrap_or(0.0);
    if !(0.0..1.0).contains(&dropout) {
        return Err(invalid(
            &path,
            format!("dropout is {dropout}; it must lie in 0 to below 1"),
        ));
    }
    let weights = match files.find(WEIGHTS_FILE)? {
        Some(path) => Some(path),
        None => files.find(PEFT_WEIGHTS_FILE)?,
    };
    let weights = weights.ok_or_else(|| {
        invalid(
            dir,
            format!("{WEIGHTS_FILE} is missing beside {CONFIG_FILE}"),
        )
    })?;
    if !weights.is_file() {
        return Err(invalid(&weights, "not a regular file"));
    }
    Ok(Settings {
        kind,
        scale: finite("scale", scale)?,
        dropout: dropout as f32,
        rows_first: peft || config.get("lora_parameters").is_none(),
        weights,
    })
}

/// Splits a tensor name into the layer's name and the parameter's suffix.
fn parsed(name: &str, kind: AdapterKind) -> Option<(&str, &'static str)> {
    const WHOLE: [(&str, &str); 2] = [(".weight", "weight"), (".bias", "bias")];
    const LOW_RANK: [(&str, &str); 12] = [
        (".lora_a", "lora_a"),
        (".lora_b", "lora_b"),
        (".m", "m"),
        (".lora_A.weight", "lora_a"),
        (".lora_B.weight", "lora_b"),
        (".lora_A.default.weight", "lora_a"),
        (".lora_B.default.weight", "lora_b"),
        (".lora_embedding_A", "lora_a"),
        (".lora_embedding_B", "lora_b"),
        (".lora_magnitude_vector", "m"),
        (".lora_magnitude_vector.weight", "m"),
        (".lora_magnitude_vector.default.weight", "m"),
    ];
    let ends: &[(&str, &str)] = match kind {
        AdapterKind::Full => &WHOLE,
        AdapterKind::Lora | AdapterKind::Dora => &LOW_RANK,
    };
    let (stem, part) = ends
        .iter()
        .find_map(|(end, part)| Some((name.strip_suffix(end)?, *part)))?;
    Some((stem, part))
}

/// Returns the total bytes of the adapter's tensors in a directory, from the file's header.
///
/// # Errors
/// [`ErrorKind::InvalidModel`], with the file and the fault.
pub(crate) fn stored_bytes(dir: &Path) -> Result<u64> {
    let settings = settings(dir)?;
    let header = SafetensorsCheckpoint::open_file(&settings.weights)?;
    if let Some(name) = header
        .names()
        .find(|name| parsed(name, settings.kind).is_none())
    {
        return Err(untrained(&settings.weights, name, settings.kind));
    }
    Ok(header.total_bytes())
}

/// Returns the error for a tensor that is not a parameter of the adapter.
fn untrained(file: &Path, name: &str, kind: AdapterKind) -> Error {
    let ends = match kind {
        AdapterKind::Full => "weight or bias",
        AdapterKind::Lora | AdapterKind::Dora => "lora_a, lora_b or m",
    };
    let message = format!("`{name}` is not a trained tensor; their names end in {ends}");
    invalid(file, message)
}

/// An adapter as stored: parameters by layer name.
pub(crate) struct Stored {
    file: PathBuf,
    pub(super) kind: AdapterKind,
    scale: f32,
    dropout: f32,
    rows_first: bool,
    layers: BTreeMap<String, BTreeMap<&'static str, Array>>,
}

impl Stored {
    /// Reads the adapter's files in a directory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`], with the file and the fault.
    pub(crate) fn read(dir: &Path) -> Result<Self> {
        let settings = settings(dir)?;
        let file = settings.weights;
        let loaded = io::load_safetensors(&file)
            .map_err(|e| invalid(&file, "the tensors cannot be read").with_source(e))?;
        let mut layers: BTreeMap<String, BTreeMap<&'static str, Array>> = BTreeMap::new();
        for (name, array) in loaded.arrays {
            let Some((stem, part)) = parsed(&name, settings.kind) else {
                return Err(untrained(&file, &name, settings.kind));
            };
            let parts = layers.entry(stem.to_owned()).or_default();
            if parts.insert(part, array).is_some() {
                return Err(invalid(&file, format!("`{name}` is there twice")));
            }
        }
        if layers.is_empty() {
            return Err(invalid(&file, "it has no trained parameters"));
        }
        Ok(Self {
            file,
            kind: settings.kind,
            scale: settings.scale,
            dropout: settings.dropout,
            rows_first: settings.rows_first,
            layers,
        })
    }

    /// Returns an error about this adapter's file.
    pub(crate) fn bad(&self, message: impl Into<String>) -> Error {
        invalid(&self.file, message)
    }

    /// The names of the adapted layers in the file.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.layers.keys().map(String::as_str)
    }

    /// Whether the adapter replaces the model's weights instead of adding to them.
    pub(crate) fn replaces_weights(&self) -> bool {
        self.kind == AdapterKind::Full
    }

    /// The suffixes of a layer's parameters in the file.
    pub(crate) fn ends(&self, name: &str) -> impl Iterator<Item = &'static str> {
        self.layers
            .get(name)
            .into_iter()
            .flat_map(|parts| parts.keys().copied())
    }

    /// Returns the number of experts in a layer; `None` if it is not a stack of experts.
    pub(crate) fn experts(&self, name: &str) -> Option<i32> {
        let mut parts = self.layers.get(name)?.values();
        parts.find_map(|part| match part.shape() {
            [experts, _, _] => Some(*experts),
            _ => None,
        })
    }

    /// Returns one parameter of a layer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if the parameter is missing.
    fn part(&self, name: &str, end: &str) -> Result<Array> {
        let tensor = self.layers.get(name).and_then(|parts| parts.get(end));
        tensor
            .cloned()
            .ok_or_else(|| self.bad(format!("`{name}.{end}` is missing")))
    }

    /// Returns the replacement of a layer's weight or bias (`end`), which must have the shape
    /// `shape`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if the replacement is missing or has another shape.
    pub(crate) fn replacement(&self, name: &str, end: &str, shape: &[i32]) -> Result<Array> {
        let part = self.part(name, end)?;
        if part.shape() != shape {
            return Err(self.bad(format!(
                "`{name}.{end}` is {:?}; the model's is {shape:?}",
                part.shape()
            )));
        }
        part.eval().map_err(engine("adapter"))?;
        Ok(part)
    }

    /// Returns the low-rank parameters for a layer's weight with the shape `shape`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if a parameter is missing or does not fit.
    pub(crate) fn low_rank(&self, name: &str, kind: SlotKind, shape: &[i32]) -> Result<LowRank> {
        let (a, b) = ends(kind);
        let (a, b) = fitted(
            shape,
            self.part(name, a)?,
            self.part(name, b)?,
            self.rows_first,
        )
        .map_err(|what| self.bad(format!("the adapter of `{name}` does not fit: {what}")))?;
        let m = match self.kind {
            AdapterKind::Dora => Some(self.part(name, "m")?),
            _ => None,
        };
        if let Some(m) = &m
            && (m.shape().len() != 1 || m.shape().first() != b.shape().first())
        {
            let (actual, rows) = (m.shape(), b.shape().first());
            return Err(self.bad(format!("`{name}.m` is {actual:?}; there are {rows:?} rows")));
        }
        eval([&a, &b].into_iter().chain(&m)).map_err(engine("adapter"))?;
        Ok(LowRank {
            a,
            b,
            m,
            scale: self.scale,
            dropout: self.dropout,
            prepared: PreparedPair::default(),
        })
    }
}

/// Converts A and B to our layout from either orientation in files.
fn fitted(
    shape: &[i32],
    a: Array,
    b: Array,
    rows_first: bool,
) -> std::result::Result<(Array, Array), String> {
    let [leading @ .., out, inputs] = shape else {
        return Err(format!("the layer is {shape:?}"));
    };
    let fits = |a: &[i32], b: &[i32]| match (a, b) {
        ([la @ .., ra, i], [lb @ .., o, rb]) => {
            la == leading && lb == leading && ra == rb && i == inputs && o == out && *ra > 0
        }
        _ => false,
    };
    let turn = |x: &Array| x.swap_axes(-1, -2).map_err(|e| e.to_string());
    if a.shape().len() < 2 || b.shape().len() < 2 {
        return Err(format!("A is {:?} and B {:?}", a.shape(), b.shape()));
    }
    let (at, bt) = (turn(&a)?, turn(&b)?);
    // If both orientations fit, uses the usual orientation of this kind of file.
    let (as_is, turned) = (fits(a.shape(), b.shape()), fits(at.shape(), bt.shape()));
    match (as_is, turned) {
        (true, true) if rows_first || !leading.is_empty() => Ok((a, b)),
        (_, true) => Ok((at, bt)),
        (true, false) => Ok((a, b)),
        (false, false) => Err(format!(
            "A is {:?} and B {:?}; the layer is {shape:?}, so that they must be [{inputs}, rank] and \
             [rank, {out}]",
            a.shape(),
            b.shape()
        )),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_do_not_lead_out_of_the_directory() {
        let place = tempfile::tempdir().unwrap();
        let theirs =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/training/llama-4");
        let directory = place.path().join("adapter");
        let fresh = || {
            let _ = std::fs::remove_dir_all(&directory);
            std::fs::create_dir(&directory).unwrap();
            for name in [CONFIG_FILE, WEIGHTS_FILE] {
                std::fs::copy(theirs.join(name), directory.join(name)).unwrap();
            }
        };
        let read = || Stored::read(&directory).map(|stored| stored.names().count());
        fresh();
        assert_eq!(read().unwrap(), 4);
        assert_eq!(stored_bytes(&directory).unwrap() % 4, 0);
        // A link to a file inside the directory must work like a file.
        let numbered = directory.join("0000002_adapters.safetensors");
        std::fs::rename(directory.join(WEIGHTS_FILE), &numbered).unwrap();
        symlink(&numbered, directory.join(WEIGHTS_FILE)).unwrap();
        assert_eq!(read().unwrap(), 4);
        for name in [CONFIG_FILE, WEIGHTS_FILE] {
            fresh();
            std::fs::remove_file(directory.join(name)).unwrap();
            symlink(theirs.join(name), directory.join(name)).unwrap();
            for error in [read().unwrap_err(), stored_bytes(&directory).unwrap_err()] {
                let text = format!("{error}");
                assert_eq!(error.kind(), ErrorKind::InvalidModel, "{text}");
                assert!(text.contains(name) && text.contains("leads out"), "{text}");
            }
        }
        // Opening a pipe would block forever, so it must be refused.
        fresh();
        std::fs::remove_file(directory.join(WEIGHTS_FILE)).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(directory.join(WEIGHTS_FILE))
            .status();
        assert!(made.unwrap().success());
        let text = read().unwrap_err().to_string();
        assert!(
            text.contains(WEIGHTS_FILE) && text.contains("regular"),
            "{text}"
        );
    }
}
