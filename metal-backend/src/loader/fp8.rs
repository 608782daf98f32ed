//! Matrices of FP8 values (E4M3) with one scale per block, as DeepSeek publishes them. The CPU has
//! no FP8 instructions, so the matrices are converted to bfloat16.

use half::bf16;
use inference::{Error, ErrorKind, Result};
use inference_formats::config::Packing;
use mlx_rs_core::Dtype;

use super::Weights;
use super::streaming::{PartLayout, StoredRows, no_parts, one, sized, sized_bytes, store};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};
use crate::error::engine;
use crate::nn::Weight;

/// Returns the value of an E4M3 number: a sign, 4 exponent bits with bias 7, 3 fraction bits. There
/// are no infinities; all ones in exponent and fraction mean NaN ("FP8 Formats for Deep Learning",
/// arXiv 2209.05433).
fn e4m3(bits: u8) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f32::from(bits & 7) / 8.0);
    sign * match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-6),
        _ => (1.0 + fraction) * 2f32.powi(exponent - 7),
    }
}

impl Weights {
    /// Loads the matrix with this prefix, which the file stores in FP8.
    pub(super) fn fp8(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        names: &TensorNames,
        (prefix, name): (&str, &str),
        info: &TensorInfo,
        (shape, for_kernels): (&[usize], bool),
    ) -> Result<Weight> {
        let Packing::Fp8 {
            block: [tall, wide],
        } = self.config.packing
        else {
            return Err(wrong_tensor(
                checkpoint.file_of(info),
                name,
                "is F8_E4M3, but quantization_config in config.json does not name fp8 with \
                 weight_block_size",
            ));
        };
        if self.member.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "FP8 weights cannot be divided among processes; use a checkpoint converted for MLX, \
                 or a pipeline",
            ));
        }
        let [rows, cols] = *shape else {
            return Err(self.wrong_shape(name, &info.shape, shape));
        };
        if info.shape != shape {
            return Err(self.wrong_shape(name, &info.shape, shape));
        }
        let across = cols.div_ceil(wide);
        let blocks = [rows.div_ceil(tall), across];
        let usual = format!("{prefix}.weight_scale_inv");
        let (scales_name, scales) = self.stored_tensor(checkpoint, names, &usual, &blocks)?;
        let part = self.part(scales_name, &blocks)?;
        let scales = self
            .dense_of(checkpoint, scales_name, scales, &part, Dtype::Float32)?
            .to_f32_vec()
            .map_err(engine("weights"))?;
        let values: [f32; 256] = std::array::from_fn(|bits| e4m3(bits as u8));
        let dtype = self.matrix_type(Dtype::Bfloat16, shape, for_kernels);
        let stored = StoredRows {
            rows,
            nbytes: info.nbytes,
            together: 1,
        };
        let layout = PartLayout::rows(cols, dtype);
        let parts = self.in_chunks(stored, &[layout], |rows, out, scratch| {
            let [out] = out else { return Err(no_parts()) };
            let n = rows.len() * cols;
            let bytes = sized_bytes(&mut scratch.stored, n);
            checkpoint.read_into(info, rows.start * cols, bytes)?;
            let weights = sized(&mut scratch.values, n);
            let lines = bytes.chunks_exact(cols.max(1));
            for ((row, bytes), weights) in
                rows.zip(lines).zip(weights.chunks_exact_mut(cols.max(1)))
            {
                let scales = &scales[row / tall * across..][..across];
                let blocks = bytes.chunks(wide).zip(weights.chunks_mut(wide));
                for ((bytes, weights), scale) in blocks.zip(scales) {
                    for (byte, weight) in bytes.iter().zip(weights) {
                        *weight = bf16::from_f32(values[usize::from(*byte)] * scale).to_f32();
                    }
                }
            }
            store(weights, dtype, out);
            Ok(())
        })?;
        one(parts, shape).map(Weight::Dense)
    }
}

#[cfg(test)]
mod tests {
    use super::e4m3;

    #[test]
    fn the_values_of_e4m3() {
        for (bits, value) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 7.0 * 2f32.powi(-9)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(e4m3(bits), value, "{bits:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }
}
