//! Merges an adapter into its model: reads a directory of safetensors, and writes a directory with
//! the merged weights. Only one weight file is in memory at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path};

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, Device, Dtype, QuantMode, Quantized, Stream, io};
use serde_json::Value;

use crate::adapter::{Stored, same_layer};
use crate::checkpoint::files::{MAX_TEXT_FILE, invalid, read_text};
use crate::checkpoint::{Family, ModelFiles, locate, python_json};
use crate::convert::{ConvertOptions, convert};
use crate::error::engine;
use crate::nn::adapter::{LowRank, SlotKind, adapted, lengths};
use crate::workdir::{WorkDir, parent_of};

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
                let of_layer = |name: &&String| {
                    let stem = name.strip_suffix(end).and_then(|n| n.strip_suffix('.'));
                    stem.is_some_and(|stem| same_layer(stem, layer))
                };
                if let Some(name) = arrays.keys().find(of_layer).cloned() {
                    self.change(&mut arrays, &name, layer, end, None)?;
                    self.done.insert((layer.clone(), end, None));
                    continue;
                }
                for (expert, name) in self.singles(&arrays, layer) {
                    self.change(&mut arrays, &name, layer, end, Some(expert))?;
                    self.done.insert((layer.clone(), end, Some(expert)));
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

    /// Returns the matrices of single experts in a file, with their indices, if `layer` is a stack
    /// of experts.
    fn singles(&self, arrays: &BTreeMap<String, Array>, layer: &str) -> Vec<(i32, String)> {
        let (Some(experts), Some((parent, part))) =
            (self.stored.experts(layer), layer.rsplit_once('.'))
        else {
            return Vec::new();
        };
        let parent = parent
            .trim_end_matches(".switch_mlp")
            .trim_end_matches(".switch_glu")
            .trim_end_matches(".experts");
        // Mixtral has other names for these matrices.
        let other = match part {
            "gate_proj" => "w1",
            "up_proj" => "w3",
            "down_proj" => "w2",
            other => other,
        };
        (0..experts)
            .filter_map(|expert| {
                let of_expert = |name: &&String| {
                    let stem = name.strip_suffix(".weight");
                    stem.is_some_and(|stem| {
                        [part, other].iter().any(|part| {
                            same_layer(stem, &format!("{parent}.experts.{expert}.{part}"))
                        })
                    })
                };
                Some((expert, arrays.keys().find(of_expert)?.clone()))
            })
            .collect()
    }

    /// Merges the adapter into a tensor of a file. The tensor is one expert's matrix, or the entire
    /// weight.
    fn change(
        &self,
        arrays: &mut BTreeMap<String, Array>,
        name: &str,
        layer: &str,
        end: &str,
        expert: Option<i32>,
    ) -> Result<()> {
        if self.stored.replaces_weights() {
            self.replace(arrays, name, layer, end, expert)
        } else {
            self.add(arrays, name.trim_end_matches(".weight"), layer, expert)
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
        name: &str,
        layer: &str,
        end: &str,
        expert: Option<i32>,
    ) -> Result<()> {
        let Some(old) = arrays.get(name) else {
            return Ok(());
        };
        if arrays.contains_key(&format!("{}.scales", name.trim_end_matches(".weight"))) {
            return Err(self.stored.bad(format!(
                "`{layer}` was trained in plain numbers, but this model has it quantized"
            )));
        }
        let turned = self.formats.is_turned(name);
        let mut shape = old.shape().to_vec();
        if turned {
            shape.reverse();
        }
        let shape = self.stacked(layer, &shape, expert);
        let replacement = self.stored.replacement(layer, end, &shape)?;
        let new = one_of(&replacement, expert).and_then(|w| {
            let w = if turned { w.swap_axes(0, 1)? } else { w };
            w.astype(old.dtype())
        });
        arrays.insert(name.to_owned(), new.map_err(engine("fuse"))?);
        Ok(())
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
    fn low_rank(
        &self,
        stem: &str,
        layer: &str,
        shape: &[i32],
        expert: Option<i32>,
    ) -> Result<LowRank> {
        let kind = if TABLES.iter().any(|table| same_layer(stem, table)) {
            SlotKind::Table
        } else {
            SlotKind::Matrix
        };
        let shape = self.stacked(layer, shape, expert);
        let mut low = self.stored.low_rank(layer, kind, &shape)?;
        low.a = one_of(&low.a, expert).map_err(engine("fuse"))?;
        low.b = one_of(&low.b, expert).map_err(engine("fuse"))?;
        Ok(low)
    }

    /// Adds the trained low-rank term to a matrix.
    fn add(
        &self,
        arrays: &mut BTreeMap<String, Array>,
        stem: &str,
        layer: &str,
        expert: Option<i32>,
    ) -> Result<()> {
        let name = format!("{stem}.weight");
        if let Some(packed) = self.packed(arrays, stem)? {
            let float = float_of(&packed);
            let dense = packed.dequantize(Dtype::Float32).map_err(engine("fuse"))?;
            let low = self.low_rank(stem, layer, dense.shape(), expert)?;
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
            arrays.insert(name, again.weight);
            arrays.insert(format!("{stem}.scales"), again.scales);
            if let Some(biases) = again.biases {
                arrays.insert(format!("{stem}.biases"), biases);
            }
            return Ok(());
        }
        let Some(weight) = arrays.get(&name) else {
            return Ok(());
        };
        let turned = self.formats.is_turned(&name);
        let turn = |a: &Array| {
            if turned {
                a.swap_axes(0, 1)
            } else {
                Ok(a.clone())
            }
        };
        let dense = turn(weight)
            .and_then(|w| w.astype(Dtype::Float32))
            .map_err(engine("fuse"))?;
        let low = self.low_rank(stem, layer, dense.shape(), expert)?;
        let new = sum(&dense, &low)
            .and_then(|w| turn(&w)?.astype(weight.dtype()))
            .map_err(engine("fuse"))?;
        arrays.insert(name, new);
        Ok(())
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

/// The formats of the model's matrices, from its configuration.
struct Formats {
    path: std::path::PathBuf,
    quantization: Value,
    /// The model's family, which lists the matrices that are stored as `[in, out]`.
    family: Option<&'static Family>,
}

impl Formats {
    fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = read_text(&path, MAX_TEXT_FILE)?;
        let mut config: Value = python_json::from_slice(text.as_bytes())
            .map_err(|e| invalid(&path, "not a JSON file").with_source(e))?;
        let quantization = ["quantization", "quantization_config"]
            .iter()
            .find_map(|key| config.get_mut(*key).map(Value::take))
            .unwrap_or(Value::Null);
        let family = config
            .get("model_type")
            .and_then(Value::as_str)
            .and_then(Family::of);
        Ok(Self {
            path,
            quantization,
            family,
        })
    }

    /// Whether a tensor of a file is stored transposed, as `[in, out]`.
    fn is_turned(&self, name: &str) -> bool {
        self.family.is_some_and(|f| f.is_transposed(name))
    }

    /// Returns group size, bits and mode of a layer's matrix.
    fn of(&self, stem: &str) -> Result<(i32, i32, QuantMode)> {
        let entry = self.quantization.get(stem).filter(|v| v.is_object());
        let field = |name: &str| {
            entry
                .and_then(|entry| entry.get(name))
                .or_else(|| self.quantization.get(name))
        };
        let number = |name: &str| {
            field(name)
                .and_then(Value::as_i64)
                .and_then(|n| i32::try_from(n).ok())
                .ok_or_else(|| {
                    invalid(
                        &self.path,
                        format!("the quantization of `{stem}` has no {name}"),
                    )
                })
        };
        let mode = field("mode").and_then(Value::as_str).unwrap_or("affine");
        let mode = QuantMode::from_name(mode)
            .ok_or_else(|| invalid(&self.path, format!("there is no quantization `{mode}`")))?;
        Ok((number("group_size")?, number("bits")?, mode))
    }
}
