//! Learned quantization: conversions that choose codes, scales or bits with calibration data
//! instead of rounding to nearest. The output has the format of a plain conversion.
//!
//! - `gptq.rs`: rounds columns one after another, and compensates errors in later columns;
//! - `awq.rs`: scales up input channels with large activations before rounding;
//! - `dynamic.rs`: gives more bits to layers that affect the output most;
//! - `dwq.rs`: trains scales and biases by distillation;
//! - `distance.rs`: the divergence of the quantized model from the original model, and its
//!   gradients;
//! - `calibration.rs`: token sequences from the user's data;
//! - `walk.rs`, `inputs.rs`: the inputs of linear layers, block by block;
//! - `affine.rs`: the quantized format;
//! - `job.rs`: a quantization in progress.

mod affine;
mod awq;
mod calibration;
mod distance;
mod dwq;
mod dynamic;
mod gptq;
mod inputs;
mod job;
mod walk;

use std::collections::BTreeMap;
use std::path::Path;

use inference::{CancelToken, Error, ErrorKind, LoadOptions, Result};

use crate::adapter::key;
use crate::convert::{
    ConvertOptions, ConvertReport, Planned, check_affine, convert_given, planned_matrices,
};
pub use awq::Awq;
pub use calibration::Calibration;
pub use dwq::Dwq;
pub use dynamic::Dynamic;
pub use gptq::Gptq;
use job::Job;

/// A method of learned quantization, with its options.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Method {
    /// GPTQ: column by column, with errors compensated in later columns.
    Gptq(Gptq),
    /// AWQ: channel scales, folded into the previous layers.
    Awq(Awq),
    /// More bits for sensitive layers.
    Dynamic(Dynamic),
    /// DWQ: scales and biases trained by distillation.
    Dwq(Dwq),
}

impl Method {
    fn check(&self) -> Result<()> {
        match self {
            Self::Gptq(gptq) => gptq.check(),
            Self::Awq(awq) => awq.check(),
            Self::Dynamic(dynamic) => dynamic.check(),
            Self::Dwq(dwq) => dwq.check(),
        }
    }

    /// Whether the method computes gradients of the complete model, which need much memory per
    /// token.
    fn differentiates(&self) -> bool {
        matches!(self, Self::Dynamic(_) | Self::Dwq(_))
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        match self {
            Self::Gptq(gptq) => gptq.run(job),
            Self::Awq(awq) => awq.run(job),
            Self::Dynamic(dynamic) => dynamic.run(job),
            Self::Dwq(dwq) => dwq.run(job),
        }
    }
}

/// The options of [`quantize`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// The method.
    pub method: Method,
    /// The calibration data. Only [`Dynamic`] with a file of sensitivities needs none.
    pub calibration: Option<Calibration>,
    /// The number of sequences in a pass.
    pub batch_size: usize,
    /// Bits and group size of matrices outside the blocks, such as the embedding; `None` means the
    /// conversion's values.
    pub fallback: (Option<i32>, Option<i32>),
}

impl QuantizeOptions {
    /// Creates options for a method with its calibration data. A pass has four sequences, or one if
    /// the method computes gradients of the complete model.
    #[must_use]
    pub fn new(method: Method, calibration: Option<Calibration>) -> Self {
        Self {
            batch_size: if method.differentiates() { 1 } else { 4 },
            method,
            calibration,
            fallback: (None, None),
        }
    }
}

/// A callback for progress. Its arguments: name of the current stage, number of finished steps, and
/// total number of steps in the stage.
pub type Progress<'a> = dyn FnMut(&'static str, u64, u64) + 'a;

/// Converts the model at `model` to the new directory `output`, and quantizes matrices by a learned
/// method. `convert` selects the bits, as for a plain conversion.
///
/// # Errors
/// The errors of [`crate::convert::convert`]; [`inference::ErrorKind::InvalidOption`] for a model
/// that is quantized already or unusable calibration data, [`inference::ErrorKind::Unsupported`]
/// for a model whose layers the method cannot reach, [`inference::ErrorKind::Cancelled`]. A failed
/// call leaves no files.
pub fn quantize(
    model: &Path,
    output: &Path,
    convert: &ConvertOptions,
    options: &QuantizeOptions,
    load: &LoadOptions,
    cancel: &CancelToken,
    progress: &mut Progress<'_>,
) -> Result<ConvertReport> {
    options.method.check()?;
    let reads_results = match &options.method {
        Method::Dynamic(dynamic) => dynamic.has_sensitivities(),
        _ => false,
    };
    if options.calibration.is_none() && !reads_results {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the method needs calibration data",
        ));
    }
    let (mut planned, names) = planned_matrices(model, output, convert)?;
    let formats = fall_back(&mut planned, options.fallback)?;
    let (engine, _model) = crate::backend::open(model, load)?;
    let sequences = match &options.calibration {
        Some(calibration) if !reads_results => calibration.read(engine.text())?,
        _ => Vec::new(),
    };
    let (given, notes) = {
        let mut job = Job::new(
            engine,
            (planned, &names),
            sequences,
            options.batch_size,
            cancel,
            progress,
        )?;
        job.given.formats = formats;
        options.method.run(&mut job)?;
        (job.given, job.notes)
    };
    let mut report = convert_given(model, output, convert, &given, &mut |done, total| {
        progress("writing", done, total);
    })?;
    report.notes.extend(notes);
    Ok(report)
}

/// Changes the formats of matrices outside the blocks. Returns the changed formats by path.
fn fall_back(
    planned: &mut [Planned],
    (bits, group_size): (Option<i32>, Option<i32>),
) -> Result<BTreeMap<String, (i32, i32)>> {
    let mut formats = BTreeMap::new();
    if (bits, group_size) == (None, None) {
        return Ok(formats);
    }
    for matrix in planned {
        // The key of a matrix in a block is shorter than its path; skip it.
        if key(&matrix.path).len() < matrix.path.len() {
            continue;
        }
        let bits = bits.unwrap_or(matrix.bits);
        let group_size = group_size.unwrap_or(matrix.group_size);
        check_affine(bits, group_size)?;
        let columns = matrix.shape.last().copied().unwrap_or(0);
        if columns.is_multiple_of(group_size.unsigned_abs() as usize) {
            (matrix.bits, matrix.group_size) = (bits, group_size);
            formats.insert(matrix.path.clone(), (bits, group_size));
        }
    }
    Ok(formats)
}

#[cfg(test)]
mod golden_tests;
