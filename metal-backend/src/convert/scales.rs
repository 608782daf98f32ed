//! GGUF blocks in MLX's packed form, and the smallest type that holds its scales without loss.

use half::{bf16, f16};
use inference::Result;
use mlx_rs_core::QuantMode;

use super::FloatType;
use super::rules::Format;
use super::source::Source;
use super::tensor::Tensor;
use crate::checkpoint::gguf::GgmlType;
use crate::checkpoint::gguf_quant;

/// Weights that are looked at between two decisions to go on: nearly always the first few tell.
const CHUNK: usize = 1 << 18;

/// Whether a type packs several weights into a block.
pub(super) fn is_block(kind: GgmlType) -> bool {
    kind.block().is_some_and(|(weights, _)| weights > 1)
}

/// MLX's form of a GGUF type with the same numbers.
pub(super) fn packing(kind: GgmlType) -> Option<Format> {
    Some(Format {
        bits: gguf_quant::repack(kind, &[])?.bits,
        group_size: 32,
        mode: QuantMode::Affine,
    })
}

/// The type of scales and biases of repacked blocks: float16 or bfloat16 where all are exact in it,
/// else float32.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn exact<'a>(
    source: &Source,
    tensors: impl Iterator<Item = &'a Tensor>,
) -> Result<FloatType> {
    let (mut half, mut brain) = (true, true);
    for tensor in tensors {
        let (rows, cols) = tensor.rows_and_cols();
        let at_once = match tensor.is_indivisible() {
            true => rows,
            false => (CHUNK / cols.max(1)).clamp(1, rows.max(1)),
        };
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
