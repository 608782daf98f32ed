//! An adapter made part of its model: a directory of safetensors in, the same with changed numbers out. One
//! file of weights is in memory at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, Device, Dtype, QuantMode, Quantized, Stream, io};
use serde_json::Value;

use super::adapter::{Stored, same_layer};
use crate::checkpoint::files::{MAX_TEXT_FILE, invalid, read_text};
use crate::checkpoint::{ModelFiles, locate};
use crate::error::engine;
use crate::nn::adapter::{Delta, DeltaKind, adapted, lengths};

/// Writes the model at `model` with the adapter at `adapter` into the new directory `output`. What is
/// quantized stays so, in its format; the numbers of a fused model are those of the adapted one up to that.
/// Returns how many layers changed.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] when the output is there already, [`ErrorKind::Unsupported`] for a GGUF file,
/// [`ErrorKind::InvalidModel`] when the adapter does not fit. Nothing is left behind then.
pub fn fuse(model: &Path, adapter: &Path, output: &Path) -> Result<usize> {
    let ModelFiles::Directory(dir) = locate(model)? else {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "adapters are fused into directories of safetensors; convert the GGUF file first",
        )
        .with_path(model));
    };
    if fs::symlink_metadata(output).is_ok() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the output is there already; name another directory",
        )
        .with_path(output));
    }
    let failed =
        |path: &Path, e: std::io::Error| Error::new(ErrorKind::Io, e.to_string()).with_path(path);
    let stream = Stream::default_of(Device::cpu()).map_err(engine("fuse"))?;
    let stored = stream.scope(|| Stored::read(adapter))?;
    let formats = Formats::read(&dir)?;
    let parent = match output.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let work = tempfile::Builder::new()
        .prefix(".fuse-")
        .tempdir_in(parent)
        .map_err(|e| failed(parent, e))?;
    let fresh = work.path().join("m");
    fs::create_dir(&fresh).map_err(|e| failed(&fresh, e))?;

    let mut done = BTreeSet::new();
    for entry in fs::read_dir(&dir).map_err(|e| failed(&dir, e))? {
        let path = entry.map_err(|e| failed(&dir, e))?.path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else {
            continue;
        };
        let to = fresh.join(name);
        if path.extension().is_some_and(|e| e == "safetensors") {
            stream.scope(|| fuse_file(&path, &to, &stored, &formats, &mut done))?;
        } else {
            fs::copy(&path, &to).map_err(|e| failed(&to, e))?;
        }
    }
    if let Some(name) = stored.names().find(|name| !done.contains(*name)) {
        return Err(stored.bad(format!(
            "`{name}` is adapted, which this model does not store as a matrix of this name"
        )));
    }
    fs::rename(&fresh, output).map_err(|e| failed(output, e))?;
    Ok(done.len())
}

fn fuse_file(
    from: &Path,
    to: &Path,
    stored: &Stored,
    formats: &Formats,
    done: &mut BTreeSet<String>,
) -> Result<()> {
    let bad = |e: mlx_rs_core::Error| invalid(from, e.to_string());
    let loaded = io::load_safetensors(from).map_err(bad)?;
    let mut arrays = loaded.arrays;
    for layer in stored.names() {
        let own = |name: &&String| {
            name.strip_suffix(".weight")
                .is_some_and(|stem| same_layer(stem, layer))
        };
        let Some(stem) = arrays
            .keys()
            .find(own)
            .map(|n| n.trim_end_matches(".weight").to_owned())
        else {
            continue;
        };
        change(&mut arrays, &stem, layer, stored, formats)?;
        done.insert(layer.to_owned());
    }
    let metadata: Vec<(&str, &str)> = loaded
        .metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    io::save_safetensors(to, &arrays, &metadata)
        .map_err(|e| Error::new(ErrorKind::Io, e.to_string()).with_path(to))
}

fn change(
    arrays: &mut BTreeMap<String, Array>,
    stem: &str,
    layer: &str,
    stored: &Stored,
    formats: &Formats,
) -> Result<()> {
    let part = |end: &str| format!("{stem}.{end}");
    let Some(weight) = arrays.get(&part("weight")).cloned() else {
        return Ok(());
    };
    let Some(scales) = arrays.get(&part("scales")).cloned() else {
        let delta = stored.delta(layer, weight.shape())?;
        let sum = sum(
            &weight.astype(Dtype::Float32).map_err(engine("fuse"))?,
            &delta,
        )
        .and_then(|w| w.astype(weight.dtype()))
        .map_err(engine("fuse"))?;
        arrays.insert(part("weight"), sum);
        return Ok(());
    };
    let (group_size, bits, mode) = formats.of(stem)?;
    let packed = Quantized {
        weight,
        biases: arrays.get(&part("biases")).cloned(),
        scales,
        group_size,
        bits,
        mode,
    };
    packed
        .validate("fuse")
        .map_err(|e| stored.bad(e.to_string()))?;
    let float = match packed.scales.dtype() {
        Dtype::Uint8 => Dtype::Bfloat16,
        other => other,
    };
    let dense = packed.dequantize(Dtype::Float32).map_err(engine("fuse"))?;
    let delta = stored.delta(layer, dense.shape())?;
    let again = sum(&dense, &delta)
        .and_then(|w| Quantized::quantize(&w.astype(float)?, group_size, bits, mode))
        .map_err(engine("fuse"))?;
    arrays.insert(part("weight"), again.weight);
    arrays.insert(part("scales"), again.scales);
    if let Some(biases) = again.biases {
        arrays.insert(part("biases"), biases);
    }
    Ok(())
}

/// The adapted matrix.
fn sum(weight: &Array, delta: &Delta) -> mlx_rs_core::Result<Array> {
    let float = |a: &Array| a.astype(Dtype::Float32);
    let sum = adapted(weight, &float(&delta.a)?, &float(&delta.b)?, delta.scale)?;
    match (&delta.m, delta.kind) {
        (Some(m), DeltaKind::Dora) => {
            let factor = float(m)?.divide(&lengths(&sum)?)?;
            sum.multiply(&factor.expand_dims(-1)?)
        }
        _ => Ok(sum),
    }
}

/// How matrices are packed, by the model's configuration.
struct Formats {
    path: std::path::PathBuf,
    quantization: Value,
}

impl Formats {
    fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = read_text(&path, MAX_TEXT_FILE)?;
        let mut config: Value = serde_json::from_str(&text)
            .map_err(|e| invalid(&path, format!("not a JSON file: {e}")))?;
        let quantization = ["quantization", "quantization_config"]
            .iter()
            .find_map(|key| config.get_mut(*key).map(Value::take))
            .unwrap_or(Value::Null);
        Ok(Self { path, quantization })
    }

    /// Group size, bits and mode of a layer.
    fn of(&self, stem: &str) -> Result<(i32, i32, QuantMode)> {
        let own = self.quantization.get(stem).filter(|v| v.is_object());
        let field = |name: &str| {
            own.and_then(|own| own.get(name))
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
