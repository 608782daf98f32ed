//! Adapters as files: `adapters.safetensors` and `adapter_config.json` as Python mlx-lm writes them. Read
//! are also go-mlx's layout (A and B the other way around) and that of Hugging Face's PEFT.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, eval, io};
use serde_json::{Value, json};

use super::lora::{self, AdapterKind, LoraAdapter};
use crate::checkpoint::files::{MAX_TEXT_FILE, invalid, read_text};
use crate::error::engine;
use crate::nn::adapter::{Delta, LowRank, Passes, Site, SiteKind, ends};
use crate::workdir::replace;

/// The trained numbers.
pub const WEIGHTS_FILE: &str = "adapters.safetensors";
/// What they are.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// PEFT's name of the former.
const PEFT_WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// How mlx-lm calls a model's layers, where it is not as we do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Naming {
    /// In front of every name.
    prefix: &'static str,
    /// In front of names of a checkpoint that mlx-lm does not have.
    dropped: &'static str,
}

impl Naming {
    /// For an architecture.
    pub fn of(architecture: &str) -> Self {
        let (prefix, dropped) = match architecture {
            // Models of images and text hold the latter in a part of its own.
            "gemma3" | "gemma4" => ("language_model.", ""),
            "gpt2" => ("model.", "transformer."),
            _ => ("", ""),
        };
        Self { prefix, dropped }
    }

    /// What mlx-lm calls a layer.
    fn theirs(&self, name: &str) -> String {
        let name = name.strip_prefix(self.dropped).unwrap_or(name);
        match name.strip_prefix(self.prefix) {
            Some(rest) if !rest.is_empty() => name.to_owned(),
            _ => format!("{}{name}", self.prefix),
        }
    }

    /// What mlx-lm's `keys` call a layer: what is after the number of the block, or all of it for one that
    /// is in none.
    pub(crate) fn key(&self, name: &str) -> String {
        match key(name) {
            inside if inside.len() < name.len() => inside.to_owned(),
            whole => self.theirs(whole),
        }
    }
}

/// What is after the number of the block in a name; all of it for one that is in none.
pub(crate) fn key(name: &str) -> &str {
    let mut rest = name;
    while let Some((part, after)) = rest.split_once('.') {
        if part.parse::<usize>().is_ok() {
            return after;
        }
        rest = after;
    }
    name
}

/// mlx-lm has A as `[in, rank]` and B as `[rank, out]`, but those of experts as we do, and those of tables
/// with their names exchanged, which turns them, too.
pub(super) fn is_turned(part: &Array, kind: SiteKind) -> bool {
    part.shape().len() == 2 && kind == SiteKind::Matrix
}

fn turned(part: &Array, kind: SiteKind) -> mlx_rs_core::Result<Array> {
    if is_turned(part, kind) {
        part.swap_axes(0, 1)
    } else {
        Ok(part.clone())
    }
}

/// Writes an adapter to a directory, which is made where there is none. Each file is replaced as a whole,
/// the numbers last.
///
/// # Errors
/// When writing fails.
pub fn save(adapter: &LoraAdapter, dir: &Path) -> Result<()> {
    let io_error =
        |path: &Path, e: &std::io::Error| Error::new(ErrorKind::Io, e.to_string()).with_path(path);
    let sites: Vec<(&Arc<Site>, Arc<Delta>)> = adapter
        .sites()
        .iter()
        .filter_map(|site| Some((site, site.stored()?)))
        .collect();
    if sites.is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the adapter was taken off the model; there is nothing to save",
        ));
    }
    let blocks: Vec<usize> = sites.iter().filter_map(|(site, _)| site.block()).collect();
    let from = blocks.iter().min().copied().unwrap_or(0);
    let num_layers = adapter.blocks.saturating_sub(from).max(1);
    let mut config = json!({ "fine_tune_type": adapter.kind, "num_layers": num_layers });
    let low = sites.iter().find_map(|(_, delta)| match delta.as_ref() {
        Delta::LowRank(low) => Some(low),
        Delta::Whole(_) => None,
    });
    if let Some(low) = low {
        let rank = low.a.shape().iter().rev().nth(1).copied().unwrap_or(0);
        let mut keys: Vec<String> = sites
            .iter()
            .map(|(site, _)| adapter.naming.key(site.name()))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        config["lora_parameters"] = json!({
            "rank": rank,
            "scale": low.scale,
            "dropout": low.dropout,
            "alpha": low.scale * rank as f32,
            "keys": keys,
        });
    }
    let mut arrays = BTreeMap::new();
    for (site, delta) in &sites {
        for (end, part) in site.parts() {
            let part = match delta.as_ref() {
                Delta::LowRank(_) => turned(&part, site.kind()).map_err(engine("save"))?,
                Delta::Whole(_) => part,
            };
            let name = adapter.naming.theirs(site.name());
            arrays.insert(format!("{name}.{end}"), part);
        }
    }
    fs::create_dir_all(dir).map_err(|e| io_error(dir, &e))?;
    let path = dir.join(CONFIG_FILE);
    let text = serde_json::to_string_pretty(&config)
        .map_err(|e| Error::new(ErrorKind::Engine, e.to_string()))?;
    replace(&path, text.as_bytes())?;
    io::save_safetensors(dir.join(WEIGHTS_FILE), &arrays, &[("format", "mlx")])
        .map_err(|e| Error::new(ErrorKind::Io, e.to_string()).with_path(dir.join(WEIGHTS_FILE)))
}

/// What a configuration file says that the numbers do not.
struct Settings {
    kind: AdapterKind,
    scale: f32,
    dropout: f32,
    /// A is `[rank, in]` in the file.
    rows_first: bool,
    weights: PathBuf,
}

fn settings(dir: &Path) -> Result<Settings> {
    let path = dir.join(CONFIG_FILE);
    if !path.is_file() {
        return Err(Error::new(
            ErrorKind::InvalidModel,
            format!(
                "there is no adapter here; give the directory with {CONFIG_FILE} and {WEIGHTS_FILE}"
            ),
        )
        .with_path(dir));
    }
    let text = read_text(&path, MAX_TEXT_FILE)?;
    let config: Value =
        serde_json::from_str(&text).map_err(|e| invalid(&path, format!("not a JSON file: {e}")))?;
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
                    String::from("there is an alpha but no rank"),
                ));
            }
        },
        (None, None) if kind == AdapterKind::Full => 1.0,
        (None, None) => {
            return Err(invalid(
                &path,
                String::from("there is neither a scale nor an alpha"),
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
    let weights = [WEIGHTS_FILE, PEFT_WEIGHTS_FILE].map(|name| dir.join(name));
    let weights = weights.iter().find(|path| path.is_file()).ok_or_else(|| {
        invalid(
            dir,
            format!("{WEIGHTS_FILE} is missing beside {CONFIG_FILE}"),
        )
    })?;
    Ok(Settings {
        kind,
        scale: finite("scale", scale)?,
        dropout: dropout as f32,
        rows_first: peft || config.get("lora_parameters").is_none(),
        weights: weights.clone(),
    })
}

/// The parts of a name in a file: the layer's name, and which of its parts.
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

/// An adapter as its files have it: parts by the name of their layer.
pub(crate) struct Stored {
    file: PathBuf,
    kind: AdapterKind,
    scale: f32,
    dropout: f32,
    rows_first: bool,
    layers: BTreeMap<String, BTreeMap<&'static str, Array>>,
}

impl Stored {
    /// Reads the files of a directory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] naming the file and what is wrong in it.
    pub(crate) fn read(dir: &Path) -> Result<Self> {
        let settings = settings(dir)?;
        let file = settings.weights;
        let loaded = io::load_safetensors(&file).map_err(|e| invalid(&file, e.to_string()))?;
        let mut layers: BTreeMap<String, BTreeMap<&'static str, Array>> = BTreeMap::new();
        for (name, array) in loaded.arrays {
            let Some((stem, part)) = parsed(&name, settings.kind) else {
                let ends = match settings.kind {
                    AdapterKind::Full => "weight or bias",
                    AdapterKind::Lora | AdapterKind::Dora => "lora_a, lora_b or m",
                };
                return Err(invalid(
                    &file,
                    format!("`{name}` is not a part of what was trained; those end in {ends}"),
                ));
            };
            let parts = layers.entry(stem.to_owned()).or_default();
            if parts.insert(part, array).is_some() {
                return Err(invalid(&file, format!("`{name}` is there twice")));
            }
        }
        if layers.is_empty() {
            return Err(invalid(&file, "it holds no numbers"));
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

    /// An error about these files.
    pub(crate) fn bad(&self, message: impl Into<String>) -> Error {
        invalid(&self.file, message)
    }

    /// The names of the adapted layers, as the file has them.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.layers.keys().map(String::as_str)
    }

    /// Whether it holds other numbers for the model's own, rather than what is added to them.
    pub(crate) fn is_whole(&self) -> bool {
        self.kind == AdapterKind::Full
    }

    /// The parts of a layer, by the ends of their names.
    pub(crate) fn ends(&self, name: &str) -> impl Iterator<Item = &'static str> {
        self.layers
            .get(name)
            .into_iter()
            .flat_map(|parts| parts.keys().copied())
    }

    /// How many experts a layer has, if it is a stack of them.
    pub(crate) fn experts(&self, name: &str) -> Option<i32> {
        let mut parts = self.layers.get(name)?.values();
        parts.find_map(|part| match part.shape() {
            [experts, _, _] => Some(*experts),
            _ => None,
        })
    }

    /// One part of a layer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] when it is missing.
    fn part(&self, name: &str, end: &str) -> Result<Array> {
        let found = self.layers.get(name).and_then(|parts| parts.get(end));
        found
            .cloned()
            .ok_or_else(|| self.bad(format!("`{name}.{end}` is missing")))
    }

    /// The numbers in place of a weight or a bias (`end`) of `shape`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] when they are missing or do not fit.
    pub(crate) fn whole(&self, name: &str, end: &str, shape: &[i32]) -> Result<Array> {
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

    /// What is to be added to the weight of a layer, of `shape`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] when a part is missing or does not fit.
    pub(crate) fn low_rank(&self, name: &str, kind: SiteKind, shape: &[i32]) -> Result<LowRank> {
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
            let (found, rows) = (m.shape(), b.shape().first());
            return Err(self.bad(format!("`{name}.m` is {found:?}; there are {rows:?} rows")));
        }
        eval([&a, &b].into_iter().chain(&m)).map_err(engine("adapter"))?;
        Ok(LowRank {
            a,
            b,
            m,
            scale: self.scale,
            dropout: self.dropout,
        })
    }
}

/// Whether two names are of one layer: others put something in front of the names of a checkpoint.
pub(crate) fn same_layer(a: &str, b: &str) -> bool {
    // GPT-2's own checkpoints put this where mlx-lm puts `model.`.
    let [a, b] = [a, b].map(|name| name.strip_prefix("transformer.").unwrap_or(name));
    let ends = |long: &str, short: &str| {
        long.strip_suffix(short)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    ends(a, b) || ends(b, a)
}

/// Loads an adapter from a directory and puts it at the layers of `all` that it names, in place of what was
/// there. Nothing changes when it does not fit.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] naming the file and the number that does not fit this model.
pub fn load(all: &[Arc<Site>], dir: &Path, naming: Naming, passes: &Passes) -> Result<LoraAdapter> {
    let stored = Stored::read(dir)?;
    let mut deltas = Vec::with_capacity(stored.layers.len());
    let missing = |name: &str| {
        stored.bad(format!(
            "`{name}` is trained, which this model does not have"
        ))
    };
    for name in stored.names() {
        let mut own = all.iter().filter(|site| same_layer(name, site.name()));
        if !stored.is_whole() {
            let site = own.find(|s| s.is_matrix()).ok_or_else(|| missing(name))?;
            let low = stored.low_rank(name, site.kind(), &site.shape())?;
            deltas.push((Arc::clone(site), Delta::LowRank(low)));
            continue;
        }
        let own: Vec<_> = own.collect();
        for end in stored.ends(name) {
            let site = own.iter().find(|site| site.end() == end);
            let site = site.ok_or_else(|| missing(&format!("{name}.{end}")))?;
            let whole = stored.whole(name, end, &site.shape())?;
            deltas.push((Arc::clone(site), Delta::Whole(whole)));
        }
    }
    let new = deltas.into_iter().map(|(site, delta)| (site, Some(delta)));
    passes.change(lora::bare(all).chain(new));
    Ok(LoraAdapter::standing(all, stored.kind, naming))
}

/// A and B as we have them, from either layout.
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
    // Where both would fit, the layout that such files have.
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
