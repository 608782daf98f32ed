//! Matrices of GGUF files that stay packed but are not affine: Q6_K, MXFP4, the IQ types and Q3_K.

use bytemuck::Pod;
use inference::Result;
use mlx_rs_core::{Dtype, QuantMode, Quantized};

use super::experts::{kernel_rows, packed_weight};
use super::streaming::{PartLayout, all_of, cast_mut, no_parts, one, sized, store};
use super::{Weights, dimension, mlx_shape};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::gguf::{Gguf, GgufTensor};
use crate::checkpoint::gguf_quant::{
    NibbleCodes, NibbleFormat, NibbleScales, repack_into, repack_nibbles, repack_super_affine_into,
    repack_super_scaled_into, super_affine_bits, symmetric_bits,
};
use crate::error::engine;
use crate::exec;
use crate::nn::Weight;

/// The number of inputs that share a scale in MXFP4.
const MXFP4_GROUP: i32 = 32;

impl Weights {
    /// A Q6_K matrix `[rows, cols]` for the kernels, with the file's bits per weight.
    pub(super) fn gguf_super_scaled(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        [rows, cols]: [usize; 2],
    ) -> Result<Option<Weight>> {
        let layout = |cols, dtype| PartLayout {
            interleaved: true,
            ..PartLayout::rows(cols, dtype)
        };
        let parts = [
            layout(cols / 16 * 3, Dtype::Uint32),
            layout(cols / 16, Dtype::Int8),
            layout(cols / 256, Dtype::Float16),
        ];
        let made = self.gguf_chunks(gguf, stored, tensor, &parts, |bytes, out, _| {
            let [words, scales, supers] = out else {
                return Err(no_parts());
            };
            let (words, scales, supers) = (cast_mut(words), cast_mut(scales), cast_mut(supers));
            repack_super_scaled_into(tensor.kind, bytes, words, scales, supers).ok_or_else(|| {
                wrong_tensor(gguf.path(), stored, "is no whole number of blocks a row")
            })
        })?;
        let rows = mlx_shape(&[rows])[0];
        Weight::from_super_scaled(all_of(made)?, rows).map_err(engine("weights"))
    }

    /// A Q4_K or Q5_K matrix `[rows, cols]` for the kernels, with nearly the file's bits per
    /// weight: 6-bit scales and minima become bytes. `None` if they do not support the type.
    pub(super) fn gguf_super_affine(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        [rows, cols]: [usize; 2],
    ) -> Result<Option<Weight>> {
        let Some(bits) = super_affine_bits(tensor.kind) else {
            return Ok(None);
        };
        let layout = |cols, dtype| PartLayout {
            interleaved: true,
            ..PartLayout::rows(cols, dtype)
        };
        let parts = [
            layout(cols / 32 * dimension(bits), Dtype::Uint32),
            layout(cols / 16, Dtype::Int8),
            layout(cols / 128, Dtype::Float16),
        ];
        let made = self.gguf_chunks(gguf, stored, tensor, &parts, |data, out, _| {
            let [words, bytes, supers] = out else {
                return Err(no_parts());
            };
            let (words, bytes, supers) = (cast_mut(words), cast_mut(bytes), cast_mut(supers));
            repack_super_affine_into(tensor.kind, data, words, bytes, supers).ok_or_else(|| {
                wrong_tensor(gguf.path(), stored, "is no whole number of blocks a row")
            })
        })?;
        let rows = mlx_shape(&[rows])[0];
        Weight::from_super_affine(all_of(made)?, rows, bits).map_err(engine("weights"))
    }

    /// A matrix `[rows, cols]` without biases for the kernels, with the file's bits per weight:
    /// Q4_0, Q5_0, Q8_0, and the ternary types in two bits. `None` if they do not support the type.
    pub(super) fn gguf_symmetric(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        [rows, cols]: [usize; 2],
    ) -> Result<Option<Weight>> {
        let Some(bits) = symmetric_bits(tensor.kind) else {
            return Ok(None);
        };
        let layout = |cols, dtype| PartLayout {
            interleaved: true,
            ..PartLayout::rows(cols, dtype)
        };
        let parts = [
            layout(cols / 32 * dimension(bits), Dtype::Uint32),
            layout(cols / 32, Dtype::Float16),
        ];
        let made = self.gguf_chunks(gguf, stored, tensor, &parts, |data, out, values| {
            let [words, scales] = out else {
                return Err(no_parts());
            };
            let n = scales.len() / Dtype::Float16.size();
            let (wide, biases) = sized(values, 2 * n).split_at_mut(n);
            repack_into(tensor.kind, data, cast_mut(words), wide, biases).ok_or_else(|| {
                wrong_tensor(gguf.path(), stored, "is no whole number of blocks a row")
            })?;
            // They were float16.
            store(wide, Dtype::Float16, scales);
            Ok(())
        })?;
        let rows = mlx_shape(&[rows])[0];
        Weight::from_symmetric(all_of(made)?, rows, bits).map_err(engine("weights"))
    }

    /// A matrix whose 4-bit codes index a table of integers. Its parts are codes, scales, and
    /// optional scales of scales. `None` for other types, and for a type that only the kernels have
    /// if they do not take the tensor.
    pub(super) fn gguf_nibbles(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        shape: &[usize],
        for_kernels: bool,
    ) -> Result<Option<Weight>> {
        let (Some(format), Some(codes), Some((&cols, outer))) = (
            NibbleFormat::of(tensor.kind),
            NibbleCodes::of(tensor.kind),
            shape.split_last(),
        ) else {
            return Ok(None);
        };
        let is_float = format == NibbleFormat::Powers;
        let kept = match is_float {
            true => exec::keeps_packed(QuantMode::Mxfp4, 4, MXFP4_GROUP, self.dtype),
            false => exec::keeps_gguf_bits(self.dtype),
        };
        let kernel_rows = kernel_rows(shape).filter(|_| for_kernels && kept);
        if kernel_rows.is_none() && (!is_float || outer.is_empty()) {
            return Ok(None);
        }
        let layout = |cols, dtype| PartLayout {
            interleaved: kernel_rows.is_some(),
            ..PartLayout::rows(cols, dtype)
        };
        let (group, mut parts) = (format.group(), vec![layout(cols / 8, Dtype::Uint32)]);
        match format {
            NibbleFormat::Powers => parts.push(layout(cols / group, Dtype::Uint8)),
            NibbleFormat::Super { .. } => {
                parts.push(layout(cols / group, Dtype::Int8));
                parts.push(layout(cols / 256, Dtype::Float16));
            }
            _ => parts.push(layout(cols / group, Dtype::Float16)),
        }
        let made = self.gguf_chunks(gguf, stored, tensor, &parts, |bytes, out, _| {
            let packed = repack_nibbles(tensor.kind, bytes).ok_or_else(|| {
                wrong_tensor(gguf.path(), stored, "is no whole number of blocks a row")
            })?;
            match (&packed.scales, out) {
                (NibbleScales::Powers(powers), [words, scales]) => {
                    if powers.contains(&u8::MAX) {
                        let message = "has a scale that is no number (exponent 255)";
                        return Err(wrong_tensor(gguf.path(), stored, message));
                    }
                    put(&packed.packed, words)?;
                    put(powers, scales)
                }
                (NibbleScales::Halves(halves), [words, scales]) => {
                    put(&packed.packed, words)?;
                    put(halves, scales)
                }
                (NibbleScales::Super { scales, supers }, [words, bytes, halves]) => {
                    put(&packed.packed, words)?;
                    put(scales, bytes)?;
                    put(supers, halves)
                }
                _ => Err(no_parts()),
            }
        })?;
        let Some((rows, _)) = kernel_rows else {
            let [weight, scales] = all_of(made)?;
            let with_last = |n: usize| [outer, &[n]].concat();
            return Ok(Some(Weight::Quantized(Quantized {
                weight: one(vec![weight], &with_last(cols / 8))?,
                scales: one(vec![scales], &with_last(cols / group))?,
                biases: None,
                group_size: MXFP4_GROUP,
                bits: 4,
                mode: QuantMode::Mxfp4,
            })));
        };
        let rows = mlx_shape(&[rows])[0];
        let matrix = match is_float {
            true => Weight::from_float_codes(all_of(made)?, rows, QuantMode::Mxfp4),
            // A small constant.
            false => Weight::from_table_codes(made, rows, (codes, group as i32)),
        };
        let matrix = matrix.map_err(engine("weights"))?;
        Ok(matrix.map(|rows| packed_weight(rows, shape)))
    }
}

/// Writes elements as bytes.
fn put<T: Pod>(elements: &[T], out: &mut [u8]) -> Result<()> {
    let bytes: &[u8] = bytemuck::cast_slice(elements);
    if bytes.len() != out.len() {
        return Err(no_parts());
    }
    out.copy_from_slice(bytes);
    Ok(())
}
