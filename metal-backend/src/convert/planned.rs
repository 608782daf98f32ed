//! The matrices that a conversion quantizes, for methods that compute the quantized values.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::QuantMode;
use safetensors::Dtype;

use super::float_type::FloatType;
use super::plan::{Plan, Work};
use super::scales;
use super::source::Source;
use super::tensor::Stored;

/// A matrix that a conversion quantizes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Planned {
    /// The name without `.weight`.
    pub path: String,
    /// `[out, in]`, or `[experts, out, in]`.
    pub shape: Vec<usize>,
    /// Bits per code.
    pub bits: i32,
    /// The number of weights that share a scale.
    pub group_size: i32,
    /// The type of scales and biases.
    pub factors: FloatType,
}

/// Returns the matrices that the conversion quantizes in the affine mode.
///
/// # Errors
/// If a matrix of the source is already quantized, or the mode is not affine.
pub(super) fn planned(plan: &Plan, source: &Source) -> Result<Vec<Planned>> {
    let bad = |message: &str| Error::new(ErrorKind::InvalidOption, message.to_owned());
    let mut matrices = Vec::new();
    for item in &plan.items {
        let Some(out) = item.outs.first() else {
            continue;
        };
        let path = out.name.strip_suffix(".weight").unwrap_or(&out.name);
        let is_block = |part: &usize| match &source.tensors[*part].stored {
            Stored::Gguf { kind, .. } => scales::is_block(*kind),
            Stored::Safetensors | Stored::Slice { .. } => source.tensors[*part].dtype == Dtype::U32,
        };
        if item.parts.iter().any(is_block) {
            return Err(bad(
                "the model is quantized already, and learned quantization needs the weights before \
                 rounding: convert the original, or --dequantize the model first",
            ));
        }
        let Work::Quantize(format, factors) = item.work else {
            continue;
        };
        if format.mode != QuantMode::Affine {
            return Err(bad("learned quantization has the mode affine only"));
        }
        let mut shape = out.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = *last * 32 / format.bits.unsigned_abs() as usize;
        }
        matrices.push(Planned {
            path: path.to_owned(),
            shape,
            bits: format.bits,
            group_size: format.group_size,
            factors,
        });
    }
    Ok(matrices)
}
