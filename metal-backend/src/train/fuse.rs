//! Merges an adapter into its model: reads a directory of safetensors, and writes a directory with
//! the merged weights. Only one weight file is in memory at a time.

mod formats;
mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path};

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, Device, Dtype, Quantized, Stream, io};
use serde_json::Value;

use crate::adapter::{Stored, same_layer};
use crate::checkpoint::files::{MAX_TEXT_FILE, invalid, read_text};
use crate::checkpoint::{ModelFiles, locate, python_json};
use crate::convert::{ConvertOptions, convert};
use crate::error::engine;
use crate::nn::adapter::{LowRank, SlotKind, adapted, lengths};
use crate::workdir::{WorkDir, parent_of};
use formats::Formats;
use target::{Names, Target};

/// Merges the adapter at `adapter` into the model at `model`, and writes the result to the new
/// directory `output`. Returns the number of changed tensors. Quantized weights are quantized again
/// in the same format, so the merged model differs from the adapted model by quantization errors.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] if the output exists, [`ErrorKind::Unsupported`] for a GGUF file,
/// [`ErrorKind::InvalidModel`] if the adapter does not fit. A failed call leaves no files.
pub fn fuse(model: &Path, adapter: &Path, output: &Path) -> Result<usize> {
    fuse_as(model, adapter, output, false)
}

/// Merges as [`fuse`], but writes each quantized matrix dequantized, in the type of its scales, so
/// that no precision is lost. A GGUF file is first converted to dense weights.
///
/// # Errors
/// The errors of [`fuse`], except that a GGUF file is allowed.
pub fn fuse_dequantized(model: &Path, adapter: &Path, output: &Path) -> Result<usize> {
    let ModelFiles::Gguf(file) = locate(model)? else {
        return fuse_as(model, adapter, output, true);
    };
    // This check is repeated later. It runs before the conversion, which can take minutes.
    must_be_new(output)?;
    let parent = parent_of(output);
    let work = WorkDir::new(parent, WORK_PREFIX).map_err(|e| failed(parent, e))?;
    let dense = work.path().join("dense");
    let options = ConvertOptions::new().with_dequantize(true);
    convert(&file, &dense, &options, &mut |_, _| {})?;
    fuse_as(&dense, adapter, output, true)
}

/// The prefix of hidden directories for unfinished models.
const WORK_PREFIX: &str = ".fuse-";

fn must_be_new(output: &Path) -> Result<()> {
    if fs::symlink_metadata(output).is_ok() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the output exists already; name another directory",
        )
        .with_path(output));
    }
    Ok(())
}

fn fuse_as(model: &Path, adapter: &Path, output: &Path, dequantize: bool) -> Result<usize> {
    let ModelFiles::Directory(dir) = locate(model)? else {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "a GGUF file takes no adapter while it stays quantized; make it dense, with --dequantize",
        )
        .with_path(model));
    };
    must_be_new(output)?;
    let stream = Stream::default_of(Device::cpu()).map_err(engine("fuse"))?;
    let stored = stream.scope(|| Stored::read(adapter))?;
    let mut fusion = Fusion {
        stored,
        names: Names::read(&dir)?,
        formats: Formats::read(&dir)?,
        dequantize,
        done: BTreeSet::new(),
    };
    let parent = parent_of(output);
    let work = WorkDir::new(parent, WORK_PREFIX).map_err(|e| failed(parent, e))?;
    let fresh = work.path().join("m");
    fs::create_dir(&fresh).map_err(|e| failed(&fresh, e))?;

    for entry in fs::read_dir(&dir).map_err(|e| failed(&dir, e))? {
        let path = entry.map_err(|e| failed(&dir, e))?.path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else {
            continue;
        };
        let to = fresh.join(name);
        if path.extension().is_some_and(|e| e == "safetensors") {
            stream.scope(|| fusion.file(&path, &to))?;
        } else if dequantize && (name == "config.json" || name == INDEX) {
            let text = without_packing(&path, name == INDEX)?;
            fs::write(&to, text).map_err(|e| failed(&to, e))?;
        } else {
            fs::copy(&path, &to).map_err(|e| failed(&to, e))?;
        }
    }
    copy_modules(&dir, &fresh)?;
    fusion.check()?;
    fs::rename(&fresh, output).map_err(|e| failed(output, e))?;
    Ok(fusion.done.len())
}

/// The name of the file that lists the tensors and their files.
const INDEX: &str = "model.safetensors.index.json";

/// An I/O error at a path.
fn failed(path: &Path, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot read or write this")
        .with_path(path)
        .with_source(e)
}

/// Copies the directories of sentence-transformers modules, which an adapter does not change:
/// pooling and layers after pooling.
fn copy_modules(model: &Path, fresh: &Path) -> Result<()> {
    let list = model.join(MODULES);
    if !list.is_file() {
        return Ok(());
    }
    let text = read_text(&list, MAX_TEXT_FILE)?;
    let modules = python_json::from_slice(text.as_bytes())
        .map_err(|e| invalid(&list, "not a JSON file").with_source(e))?;
    let paths = modules.as_array().into_iter().flatten();
    for name in paths.filter_map(|module| module.get("path")?.as_str()) {
        // The list is untrusted, so only a directory inside the model's directory is copied.
        let is_inside = matches!(
            Path::new(name).components().collect::<Vec<_>>().as_slice(),
            [Component::Normal(_)]
        );
        let (from, to) = (model.join(name), fresh.join(name));
        if !is_inside || !from.is_dir() {
            continue;
        }
        fs::create_dir_all(&to).map_err(|e| failed(&to, e))?;
        for entry in fs::read_dir(&from).map_err(|e| failed(&from, e))? {
            let path = entry.map_err(|e| failed(&from, e))?.path();
            if let Some(name) = path.file_name().filter(|_| path.is_file()) {
                fs::copy(&path, to.join(name)).map_err(|e| failed(&path, e))?;
            }
        }
    }
    Ok(())
}

/// The file that lists the modules of a sentence-transformers directory.
const MODULES: &str = "modules.json";

/// Reads a model's configuration or index, and removes what describes quantized matrices.
fn without_packing(path: &Path, is_index: bool) -> Result<String> {
    let text = read_text(path, MAX_TEXT_FILE)?;
    let mut value = python_json::from_slice(text.as_bytes())
        .map_err(|e| invalid(path, "not a JSON file").with_source(e))?;
    if is_index {
        if let Some(map) = value.get_mut("weight_map").and_then(Value::as_object_mut) {
            let packed: Vec<String> = map
                .keys()
                .filter_map(|name| name.strip_suffix(".scales").map(str::to_owned))
                .collect();
            map.retain(|name, _| {
                let stem = name
                    .strip_suffix(".scales")
                    .or(name.strip_suffix(".biases"));
                stem.is_none_or(|stem| !packed.iter().any(|one| one == stem))
            });
        }
    } else if let Some(fields) = value.as_object_mut() {
        fields.remove("quantization");
        fields.remove("quantization_config");
    }
    serde_json::to_string_pretty(&value).map_err(|e| {
        Error::new(ErrorKind::Engine, "the configuration cannot be written").with_source(e)
    })
}

/// The state of a merge, file by file.
struct Fusion {
    stored: Stored,
    names: Names,
    formats: Formats,
    dequantize: bool,
    /// The merged weights: layer name, weight suffix, and expert index if experts are stored one by
    /// one.
    done: BTreeSet<(String, &'static str, Option<i32>)>,
}

impl Fusion {
    fn file(&mut self, from: &Path, to: &Path) -> Result<()> {
        let bad =
            |e: mlx_rs_core::Error| invalid(from, "the tensors cannot be fused").with_source(e);
        let loaded = io::load_safetensors(from).map_err(bad)?;
        let mut arrays = loaded.arrays;
        let layers: Vec<String> = self.stored.names().map(str::to_owned).collect();
        for layer in &layers {
            for end in self.changing(layer) {
                let experts = self.stored.experts(layer);
                for target in self.names.targets(&arrays, (layer, end), experts) {
                    self.change(&mut arrays, &target, layer, end)?;
                    self.done.insert((layer.clone(), end, target.expert));
                }
            }
        }
        if self.dequantize {
            let packed: Vec<String> = arrays
                .keys()
                .filter_map(|name| name.strip_suffix(".scales").map(str::to_owned))
                .collect();
            for stem in packed {
                let Some(packed) = self.packed(&arrays, &stem)? else {
                    continue;
                };
                let dense = packed
                    .dequantize(float_of(&packed))
                    .map_err(engine("fuse"))?;
                put_dense(&mut arrays, &stem, dense);
            }
        }
        let metadata: Vec<(&str, &str)> = loaded
            .metadata
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        io::save_safetensors(to, &arrays, &metadata).map_err(|e| {
            Error::new(ErrorKind::Io, "cannot write the tensors")
                .with_path(to)
                .with_source(e)
        })
    }

    /// Returns the suffixes of the weights that the adapter changes in a layer.
    fn changing(&self, layer: &str) -> Vec<&'static str> {
        if self.stored.replaces_weights() {
            self.stored.ends(layer).collect()
        } else {
            vec!["weight"]
        }
    }

    /// Checks that every trained weight was merged.
    fn check(&self) -> Result<()> {
        for layer in self.stored.names() {
            for end in self.changing(layer) {
                let is_fused = |expert| self.done.contains(&(layer.to_owned(), end, expert));
                let experts = self.stored.experts(layer);
                let singly = experts.is_some_and(|n| (0..n).all(|expert| is_fused(Some(expert))));
                if !singly && !is_fused(None) {
                    return Err(self.stored.bad(format!(
                        "`{layer}` is trained, which this model does not store under this name"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Merges the adapter into a tensor of a file.
    fn change(
        &self,
        arrays: &mut BTreeMap<String, Array>,
        target: &Target,
        layer: &str,
        end: &str,
    ) -> Result<()> {
        if self.stored.replaces_weights() {
            self.replace(arrays, target, layer, end)
        } else {
            self.add(arrays, target, layer)
        }
    }

    /// Returns the shape of the expert stack, computed from the shape of a single expert.
    fn stacked(&self, layer: &str, shape: &[i32], expert: Option<i32>) -> Vec<i32> {
        let experts = expert.and_then(|_| self.stored.experts(layer));
        experts.into_iter().chain(shape.iter().copied()).collect()
    }

    /// Replaces a tensor by the adapter's tensor.
    fn replace(
        &self,
        arrays: &mut BTreeMap<String, Array>,
        target: &Target,
        layer: &str,
        end: &str,
    ) -> Result<()> {
        let stem = target.tensor.trim_end_matches(".weight");
        if arrays.contains_key(&format!("{stem}.scales")) {
            return Err(self.stored.bad(format!(
                "`{layer}` was trained in plain numbers, but this model has it quantized"
            )));
        }
        let Some(old) = target.read(arrays).map_err(engine("fuse"))? else {
            return Ok(());
        };
        let shape = self.stacked(layer, old.shape(), target.expert);
        let replacement = self.stored.replacement(layer, end, &shape)?;
        one_of(&replacement, target.expert)
            .and_then(|new| target.write(arrays, &new))
            .map_err(engine("fuse"))
    }

    /// Returns the quantized matrix `stem` of a file; `None` if the matrix is not quantized.
    fn packed(&self, arrays: &BTreeMap<String, Array>, stem: &str) -> Result<Option<Quantized>> {
        let part = |end: &str| arrays.get(&format!("{stem}.{end}")).cloned();
        let (Some(weight), Some(scales)) = (part("weight"), part("scales")) else {
            return Ok(None);
        };
        let (group_size, bits, mode) = self.formats.of(stem)?;
        let packed = Quantized {
            weight,
            biases: part("biases"),
            scales,
            group_size,
            bits,
            mode,
        };
        packed
            .validate("fuse")
            .map_err(|e| self.stored.bad(e.to_string()))?;
        Ok(Some(packed))
    }

    /// Returns the adapter's low-rank term for a matrix of this shape.
    fn low_rank(&self, target: &Target, layer: &str, shape: &[i32]) -> Result<LowRank> {
        let kind = if TABLES.iter().any(|table| same_layer(&target.stem, table)) {
            SlotKind::Table
        } else {
            SlotKind::Matrix
        };
        let shape = self.stacked(layer, shape, target.expert);
        let mut low = self.stored.low_rank(layer, kind, &shape)?;
        low.a = one_of(&low.a, target.expert).map_err(engine("fuse"))?;
        low.b = one_of(&low.b, target.expert).map_err(engine("fuse"))?;
        Ok(low)
    }

    /// Adds the trained low-rank term to a matrix.
    fn add(
        &self,
        arrays: &mut BTreeMap<String, Array>,
        target: &Target,
        layer: &str,
    ) -> Result<()> {
        let stem = target.tensor.trim_end_matches(".weight");
        if let Some(packed) = self.packed(arrays, stem)? {
            let float = float_of(&packed);
            let dense = packed.dequantize(Dtype::Float32).map_err(engine("fuse"))?;
            let low = self.low_rank(target, layer, dense.shape())?;
            let dense = sum(&dense, &low)
                .and_then(|w| w.astype(float))
                .map_err(engine("fuse"))?;
            if self.dequantize {
                put_dense(arrays, stem, dense);
                return Ok(());
            }
            let (group_size, bits, mode) = (packed.group_size, packed.bits, packed.mode);
            let again =
                Quantized::quantize(&dense, group_size, bits, mode).map_err(engine("fuse"))?;
            arrays.insert(format!("{stem}.weight"), again.weight);
            arrays.insert(format!("{stem}.scales"), again.scales);
            if let Some(biases) = again.biases {
                arrays.insert(format!("{stem}.biases"), biases);
            }
            return Ok(());
        }
        let Some(weight) = target.read(arrays).map_err(engine("fuse"))? else {
            return Ok(());
        };
        let dense = weight.astype(Dtype::Float32).map_err(engine("fuse"))?;
        let low = self.low_rank(target, layer, dense.shape())?;
        sum(&dense, &low)
            .and_then(|new| target.write(arrays, &new))
            .map_err(engine("fuse"))
    }
}

/// Returns one expert's slice, or the complete stack if `expert` is `None`.
fn one_of(stack: &Array, expert: Option<i32>) -> mlx_rs_core::Result<Array> {
    match expert {
        Some(expert) => stack.slice_axis(0, expert, expert + 1)?.squeeze_axis(0),
        None => Ok(stack.clone()),
    }
}

/// The names of embedding tables.
const TABLES: [&str; 4] = ["embed_tokens", "embed_tokens_per_layer", "wte", "wpe"];

/// Returns the type to which a quantized matrix is dequantized.
fn float_of(packed: &Quantized) -> Dtype {
    match packed.scales.dtype() {
        Dtype::Uint8 => Dtype::Bfloat16,
        other => other,
    }
}

/// Replaces a quantized matrix by a dense one.
fn put_dense(arrays: &mut BTreeMap<String, Array>, stem: &str, dense: Array) {
    arrays.remove(&format!("{stem}.scales"));
    arrays.remove(&format!("{stem}.biases"));
    arrays.insert(format!("{stem}.weight"), dense);
}

/// Returns the matrix with the low-rank term added. For DoRA, also rescales its rows.
fn sum(weight: &Array, low: &LowRank) -> mlx_rs_core::Result<Array> {
    let float = |a: &Array| a.astype(Dtype::Float32);
    let sum = adapted(weight, &float(&low.a)?, &float(&low.b)?, low.scale)?;
    let Some(m) = &low.m else {
        return Ok(sum);
    };
    let factor = float(m)?.divide(&lengths(&sum)?)?;
    sum.multiply(&factor.expand_dims(-1)?)
}
