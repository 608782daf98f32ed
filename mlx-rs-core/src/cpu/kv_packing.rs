//! Packed KV caches as arrays: from and to the arrays that MLX's quantization makes.

use mlx_cpu_kernels::{KvPacking, KvType, dim};

use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{QuantMode, Quantized, concatenate};

/// Packs keys or values `[1, Hkv, n, D]` as the kernels store them: uint32 `[1, Hkv, n, words]`.
/// The words of a head are its codes, its scales and its biases ([`KvPacking`]).
///
/// # Errors
/// [`ErrorKind::Shape`] if groups do not divide the heads; MLX's message for other types than
/// floats.
/// ```
/// use mlx_rs_core::{Array, Dtype, cpu::{KvPacking, pack_kv, unpack_kv}};
/// let packing = KvPacking::new(8, 32).ok_or("no such packing")?;
/// let keys = Array::from_slice(&[0.5f32; 64], &[1, 1, 2, 32])?;
/// let rows = pack_kv(&keys, packing)?;
/// // Eight words of codes, a scale and a bias.
/// assert_eq!(rows.shape(), [1, 1, 2, 10]);
/// let back = unpack_kv(&rows, packing)?.dequantize(Dtype::Float32)?;
/// assert_eq!(back.to_vec::<f32>()?, [0.5; 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn pack_kv(heads: &Array, packing: KvPacking) -> Result<Array> {
    let width = heads.dim(-1)?;
    super::attention::check_packing(width, packing)?;
    let wide = heads.astype(Dtype::Float32)?;
    let bits = packing.bits().cast_signed();
    let packed = Quantized::quantize(&wide, group(packing), bits, QuantMode::Affine)?;
    join_kv(&packed)
}

/// Converts arrays that MLX quantized, with float scales, to rows of [`pack_kv`].
///
/// # Errors
/// [`ErrorKind::Shape`] without biases; MLX's message if shapes do not match.
/// ```
/// # use mlx_rs_core::{Array, Dtype, cpu::{KvPacking, join_kv, pack_kv, unpack_kv}};
/// # let packing = KvPacking::new(4, 32).ok_or("no such packing")?;
/// let rows = pack_kv(&Array::from_slice(&[0.5f32; 32], &[1, 1, 1, 32])?, packing)?;
/// let again = join_kv(&unpack_kv(&rows, packing)?)?;
/// assert_eq!(again.to_vec::<u32>()?, rows.to_vec::<u32>()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn join_kv(packed: &Quantized) -> Result<Array> {
    let words = |a: &Array| a.astype(Dtype::Float32)?.view(Dtype::Uint32);
    let Some(biases) = &packed.biases else {
        return Err(Error::new(ErrorKind::Shape, OP, "packed keys need biases"));
    };
    concatenate(
        &[&packed.weight, &words(&packed.scales)?, &words(biases)?],
        -1,
    )
}

/// Converts rows of [`pack_kv`] to the arrays of MLX's quantization.
///
/// # Errors
/// [`ErrorKind::Shape`] if the rows do not have the words of a head.
/// ```
/// # use mlx_rs_core::{Array, Dtype, cpu::{KvPacking, unpack_kv}, zeros};
/// # let packing = KvPacking::new(8, 32).ok_or("no such packing")?;
/// let rows = zeros(&[1, 1, 2, 10], Dtype::Uint32)?;
/// assert_eq!(unpack_kv(&rows, packing)?.weight.shape(), [1, 1, 2, 8]);
/// assert!(unpack_kv(&zeros(&[1, 1, 2, 11], Dtype::Uint32)?, packing).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn unpack_kv(rows: &Array, packing: KvPacking) -> Result<Quantized> {
    let width = rows.dim(-1)?;
    // The words of a group: its codes, a scale and a bias.
    let each = KvType::Packed(packing).row(packing.group());
    let groups = dim(width) / each;
    if rows.dtype() != Dtype::Uint32 || width < 1 || !dim(width).is_multiple_of(each) {
        let message = format!("a packed head has a multiple of {each} words (uint32)");
        return Err(Error::new(ErrorKind::Shape, OP, message).with_inputs(&[rows]));
    }
    let codes = int(packing.code_words(groups * packing.group()));
    let (scales, end) = (codes + int(groups), codes + 2 * int(groups));
    let floats = |from, to| rows.slice_axis(-1, from, to)?.view(Dtype::Float32);
    Ok(Quantized {
        weight: rows.slice_axis(-1, 0, codes)?,
        scales: floats(codes, scales)?,
        biases: Some(floats(scales, end)?),
        group_size: group(packing),
        bits: packing.bits().cast_signed(),
        mode: QuantMode::Affine,
    })
}

const OP: &str = "cpu::kv_packing";

fn group(packing: KvPacking) -> i32 {
    int(packing.group())
}

/// `n` as an `i32`, for numbers that are at most the length of an axis.
fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}
