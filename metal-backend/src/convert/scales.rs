//! Determines MLX's format for GGUF blocks, and the smallest lossless type for their scales.

use half::{bf16, f16};
use inference::Result;
use mlx_rs_core::QuantMode;

use super::float_type::FloatType;
use super::rules::Format;
use super::source::Source;
use super::tensor::Tensor;
use crate::checkpoint::gguf::GgmlType;
use crate::checkpoint::quantization::GROUP;

/// The approximate number of weights read at a time. Reading stops once neither 16-bit type
/// represents all values read so far, which usually shows in the first chunk.
const CHUNK: usize = 1 << 18;

/// Whether a GGUF type packs several weights into a block.
pub(super) fn is_block(kind: GgmlType) -> bool {
    kind.block().is_some_and(|(weights, _)| weights > 1)
}

/// Returns MLX's format that represents a GGUF type without loss; `None` if MLX has no such format.
pub(super) fn packing(kind: GgmlType) -> Option<Format> {
    Some(Format {
        bits: kind.layout().affine_bits()?.cast_signed(),
        group_size: GROUP as i32, // `GROUP` is small, so the cast is exact
        mode: QuantMode::Affine,
    })
}

/// Returns the type for scales and biases of repacked blocks: float16 or bfloat16 if this type
/// represents all of them exactly, otherwise float32.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn exact<'a>(
    source: &Source,
    tensors: impl Iterator<Item = &'a Tensor>,
) -> Result<FloatType> {
    let (mut half, mut brain) = (true, true);
    for tensor in tensors {
        let (rows, cols) = tensor.rows_and_cols();
        let at_once = tensor.rows_at_once(CHUNK / cols.max(1));
        for first in (0..rows).step_by(at_once.max(1)) {
            let packed = source.packed(tensor, first, at_once.min(rows - first))?;
            for x in packed.scales.iter().chain(&packed.biases) {
                half &= f16::from_f32(*x).to_f32() == *x;
                brain &= bf16::from_f32(*x).to_f32() == *x;
            }
            if !(half || brain) {
                return Ok(FloatType::F32);
            }
        }
    }
    Ok(if half {
        FloatType::F16
    } else {
        FloatType::BF16
    })
}
