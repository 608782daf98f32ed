//! Converts a checkpoint to an MLX directory that `mlx-lm` and this engine load. The input is
//! safetensors or GGUF. Tensors are copied, cast, quantized or dequantized one by one, and written
//! to sharded safetensors.
//!
//! This module uses names and shapes of tensors, but no architectures, which `arch/` implements.
//! `rules` has the rules about names, including `mlx-lm`'s exceptions for single architectures.
//! Memory stays at some hundred megabytes for any model size. The output directory is created
//! atomically.

mod config;
mod execute;
mod faults;
mod float_type;
mod gguf;
mod given;
mod joined;
mod joined_matrix;
mod options;
mod plan;
mod planned;
mod quantization;
mod rules;
mod scales;
mod slice;
mod source;
mod stored;
mod tensor;
mod write;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Device, Stream, cuda_is_available, metal_is_available};

use crate::error::engine;
use crate::workdir::WorkDir;
use faults::failed;
use plan::Plan;
use source::Source;

pub(crate) use config::text_files;
pub use float_type::FloatType;
pub(crate) use gguf::tokenizer_files;
pub(crate) use given::{Given, Packed};
pub(crate) use joined_matrix::JoinedMatrix;
pub use options::{ConvertOptions, MAX_SHARD_BYTES};
pub(crate) use planned::Planned;
pub use quantization::{Quantization, Recipe};

/// The result of a conversion.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ConvertReport {
    /// The number of weights. A quantized weight counts as one.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// The number of files with tensors.
    pub shards: usize,
    /// The number of matrices that are stored quantized.
    pub quantized: usize,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl ConvertReport {
    /// The average bits per weight, including scales.
    #[must_use]
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.parameters.max(1) as f64
    }
}

/// Converts the model at `model`, a directory or a GGUF file, to the new directory `output`.
/// `progress` receives the bytes written and the total number of bytes.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] for options that conflict with each other or with the model, or for
/// an existing output; [`ErrorKind::InvalidModel`] and [`ErrorKind::Unsupported`] for the model;
/// [`ErrorKind::Io`] if writing fails. A failed conversion leaves no files.
pub fn convert(
    model: &Path,
    output: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ConvertReport> {
    convert_given(model, output, options, &Given::default(), progress)
}

/// Returns the matrices that a conversion with these options quantizes in the affine mode, and the
/// names of all tensors that it would write. Also checks that the output may be created. Writes
/// nothing.
///
/// # Errors
/// The errors of [`convert`]; also if a matrix of the model is quantized already.
pub(crate) fn planned_matrices(
    model: &Path,
    output: &Path,
    options: &ConvertOptions,
) -> Result<(Vec<Planned>, Vec<String>)> {
    options.validate()?;
    check_output(model, output, options.force)?;
    let source = Source::open(model)?;
    let plan = Plan::new(&source, options, &Given::default()).map_err(|e| e.or_path(model))?;
    let matrices = planned::planned(&plan, &source).map_err(|e| e.or_path(model))?;
    let outs = plan.items.iter().flat_map(|item| &item.outs);
    Ok((matrices, outs.map(|out| out.name.clone()).collect()))
}

/// Converts as [`convert`], with the values in `given` instead of the source's values.
///
/// # Errors
/// The errors of [`convert`].
pub(crate) fn convert_given(
    model: &Path,
    output: &Path,
    options: &ConvertOptions,
    given: &Given,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ConvertReport> {
    options.validate()?;
    check_output(model, output, options.force)?;
    let source = Source::open(model)?;
    let plan = Plan::new(&source, options, given).map_err(|e| e.or_path(model))?;

    let (parent, name) = parent_and_name(output)?;
    let work = WorkDir::new(&parent, &format!(".{name}.convert-"))
        .map_err(|e| failed("cannot create a directory", &parent, e))?;
    let fresh = work.path().join("m");
    fs::create_dir(&fresh).map_err(|e| failed("cannot create a directory", &fresh, e))?;

    let gpu = metal_is_available() || cuda_is_available();
    let device = if gpu { Device::gpu() } else { Device::cpu() };
    let stream = Stream::default_of(device).map_err(engine("convert"))?;
    let shards =
        stream.scope(|| write::weights((&source, given), &plan, &fresh, options, progress))?;
    config::write(&source, &plan, &fresh)?;
    publish(&fresh, output, work.path())?;
    Ok(ConvertReport {
        parameters: plan.parameters,
        bytes: plan.bytes(),
        shards,
        quantized: plan.quantized,
        notes: plan.notes,
    })
}

/// Checks bits and group size of the affine mode.
///
/// # Errors
/// [`ErrorKind::InvalidOption`], with the values that the mode supports.
pub(crate) fn check_affine(bits: i32, group_size: i32) -> Result<()> {
    let quantization = Quantization {
        bits: Some(bits),
        group_size: Some(group_size),
        ..Quantization::default()
    };
    rules::base_format(&quantization).map(|_| ())
}

/// Adds a path to errors that have none.
trait OrPath {
    fn or_path(self, path: &Path) -> Self;
}

impl OrPath for Error {
    fn or_path(self, path: &Path) -> Self {
        if self.path().is_some() {
            self
        } else {
            self.with_path(path)
        }
    }
}

fn parent_and_name(output: &Path) -> Result<(PathBuf, String)> {
    let name = output.file_name().and_then(|n| n.to_str()).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOption,
            "the output has no file name; name a directory",
        )
        .with_path(output)
    })?;
    let parent = match output.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_owned()))
}

/// Checks that the output is not the model, and that it is new or empty, or that `force` is set.
fn check_output(model: &Path, output: &Path, force: bool) -> Result<()> {
    let bad = |message: &str| {
        Err(Error::new(ErrorKind::InvalidOption, message.to_owned()).with_path(output))
    };
    let (parent, _) = parent_and_name(output)?;
    if !parent.is_dir() {
        return bad("the output's parent directory does not exist");
    }
    let Ok(metadata) = fs::symlink_metadata(output) else {
        return Ok(());
    };
    if !metadata.is_dir() {
        return bad("the output exists and is not a directory");
    }
    if let (Ok(model), Ok(output)) = (model.canonicalize(), output.canonicalize())
        && model.starts_with(&output)
    {
        return bad("the output contains the model; name another directory");
    }
    let mut entries =
        fs::read_dir(output).map_err(|e| failed("cannot list the output", output, e))?;
    if entries.next().is_some() && !force {
        return bad(
            "the output exists and is not empty; name another directory, or replace it (--force)",
        );
    }
    Ok(())
}

/// Moves the finished directory to its destination. The old directory is removed only after the
/// move.
fn publish(fresh: &Path, output: &Path, work: &Path) -> Result<()> {
    let cannot = |e| failed("cannot move the finished model to its place", output, e);
    if fs::symlink_metadata(output).is_ok() {
        let old = work.join("old");
        fs::rename(output, &old).map_err(cannot)?;
        if let Err(e) = fs::rename(fresh, output) {
            // Restores the old directory.
            let _ = fs::rename(&old, output);
            return Err(cannot(e));
        }
    } else {
        fs::rename(fresh, output).map_err(cannot)?;
    }
    if let Some(Ok(dir)) = output.parent().map(fs::File::open) {
        let _ = dir.sync_all();
    }
    Ok(())
}
