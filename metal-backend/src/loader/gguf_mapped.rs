//! Dense matrices of GGUF files. The kernels read them in the mapped file.

use inference::Result;
use mlx_rs_core::Dtype;
use mlx_rs_core::io::MappedFile;

use super::from_gguf::float_type;
use super::gguf_part::GgufPart;
use super::{Weights, mlx_shape};
use crate::error::engine;
use crate::exec;
use crate::nn::Weight;

/// The minimum size of a mapped matrix, in bytes. Each product with a mapped matrix queries the
/// file's length. For a smaller matrix, this costs more than mapping saves.
pub(super) const LEAST_BYTES: usize = 1 << 20;

impl Weights {
    /// Returns the matrix in the mapped file. Returns `None` if it must be copied: because it is
    /// small, needs conversion to `dtype`, has permuted rows, or is not aligned.
    ///
    /// # Errors
    /// If the file was truncated.
    pub(super) fn gguf_mapped(
        &self,
        tensor: &GgufPart,
        shape: &[usize],
        dtype: Dtype,
    ) -> Result<Option<Weight>> {
        let &[rows, cols] = shape else {
            return Ok(None);
        };
        let kept = float_type(tensor.kind) == Some(dtype) && self.dtype == Dtype::Float32;
        if !kept || tensor.nbytes < self.least_mapped || self.permuted_heads(tensor)?.is_some() {
            return Ok(None);
        }
        let (Some(bytes), Some(file)) = (tensor.bytes(), self.mapped_gguf(tensor)) else {
            return Ok(None);
        };
        let shape = mlx_shape(&[rows, cols]);
        exec::mapped(file, bytes, dtype, [shape[0], shape[1]]).map_err(engine("weights"))
    }

    /// Returns the mapped file of the tensor.
    fn mapped_gguf(&self, tensor: &GgufPart) -> Option<&MappedFile> {
        let map = || {
            let handle = tensor.gguf.handle().ok()?;
            MappedFile::of(handle, tensor.gguf.path()).ok()
        };
        self.mapped.get_or_init(map).as_ref()
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs_core::{Array, Device, Stream};

    use super::*;
    use crate::checkpoint::gguf::testing::{Writer, blocks, write};
    use crate::checkpoint::gguf::{GgmlType, Gguf};
    use crate::checkpoint::{ModelConfig, quantization::dequantize};
    use crate::exec::PrefillInputs;

    const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
        "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 40}"#;
    const UP: (&str, &str) = ("model.layers.0.mlp.up_proj", "blk.0.ffn_up.weight");

    /// Opens the weights of a file, without a minimum size of mapped matrices.
    fn opened(path: &std::path::Path, dtype: Dtype) -> Weights {
        let config = ModelConfig::from_json(CONFIG.as_bytes()).unwrap();
        let mut all = Weights::from_gguf(Gguf::open(path).unwrap(), &config, dtype);
        all.use_cpu(PrefillInputs::Float32);
        all.least_mapped = 0;
        all
    }

    fn values(weight: &Weight) -> Vec<f32> {
        weight.dense(Dtype::Float32).unwrap().to_f32_vec().unwrap()
    }

    /// Returns the bits of values, because some values are NaN.
    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    fn on_cpu(run: impl FnOnce()) {
        Stream::default_of(Device::cpu()).unwrap().scope(run);
    }

    #[test]
    fn floats_are_mapped_as_they_are() {
        on_cpu(|| {
            for kind in [GgmlType::F16, GgmlType::BF16, GgmlType::F32] {
                let bytes = blocks(kind, 40 * 64);
                let (_dir, path) = (Writer::default().tensor("other", &[5], 0, &[0; 20]))
                    .tensor(UP.1, &[64, 40], kind.id(), &bytes)
                    .file();
                let wanted = bits(&dequantize(kind, &bytes).unwrap());
                let mut all = opened(&path, Dtype::Float32);
                let weight = all.matrix(UP.0, 40, 64).unwrap();
                assert_eq!(
                    matches!(weight, Weight::Mapped(_)),
                    exec::enabled(),
                    "{kind:?}"
                );
                assert_eq!(weight.nbytes(), bytes.len());
                assert_eq!(weight.shape(), [40, 64]);
                assert!(bits(&values(&weight)) == wanted, "{kind:?}");
                assert!(bits(&values(&weight.rows(3, 9).unwrap())) == wanted[3 * 64..9 * 64]);
                assert!(bits(&values(&weight.picked(&[39]).unwrap())) == wanted[39 * 64..]);
                let ids = Array::from_slice(&[17i32], &[1]).unwrap();
                let row = weight.take_rows(&ids, Dtype::Float32).unwrap();
                assert!(bits(&row.to_f32_vec().unwrap()) == wanted[17 * 64..18 * 64]);
                // Small matrices, and matrices that are converted, must be copied.
                all.least_mapped = LEAST_BYTES;
                assert!(matches!(
                    all.matrix(UP.0, 40, 64).unwrap(),
                    Weight::Dense(_)
                ));
                let mut other = opened(&path, Dtype::Bfloat16);
                assert!(matches!(
                    other.matrix(UP.0, 40, 64).unwrap(),
                    Weight::Dense(_)
                ));
            }
        });
    }

    /// GGUF permits an alignment of one byte, so tensors may be unaligned.
    #[test]
    fn floats_that_are_not_aligned_are_copied() {
        on_cpu(|| {
            for odd in 0..2 {
                let file = (Writer::default().u32("general.alignment", 1))
                    .info(UP.1, &[64, 40], GgmlType::F16.id(), 32 + odd)
                    .data(40 * 64 * 2 + 96)
                    .bytes();
                let (_dir, path) = write(&file);
                let mut all = opened(&path, Dtype::Float32);
                let gguf = Gguf::open(&path).unwrap();
                let at = gguf.position(&gguf.tensors()[UP.1]);
                let weight = all.matrix(UP.0, 40, 64).unwrap();
                let mapped = exec::enabled() && at.is_multiple_of(2);
                assert_eq!(matches!(weight, Weight::Mapped(_)), mapped, "{at}");
                let stored = &file[at as usize..at as usize + 40 * 64 * 2];
                assert!(values(&weight) == dequantize(GgmlType::F16, stored).unwrap());
            }
        });
    }

    #[test]
    fn permuted_rows_are_copied() {
        on_cpu(|| {
            let bytes = blocks(GgmlType::F16, 64 * 64);
            let (_dir, path) = Writer::default()
                .tensor("blk.0.attn_q.weight", &[64, 64], GgmlType::F16.id(), &bytes)
                .file();
            let mut all = opened(&path, Dtype::Float32);
            let weight = all
                .matrix("model.layers.0.self_attn.q_proj", 64, 64)
                .unwrap();
            assert!(matches!(weight, Weight::Dense(_)));
        });
    }

    #[cfg(unix)]
    #[test]
    fn a_truncated_file_is_an_error() {
        on_cpu(|| {
            let bytes = blocks(GgmlType::F16, 40 * 64);
            let (_dir, path) = Writer::default()
                .tensor(UP.1, &[64, 40], GgmlType::F16.id(), &bytes)
                .tensor(
                    "blk.0.ffn_down.weight",
                    &[40, 64],
                    GgmlType::F16.id(),
                    &bytes,
                )
                .file();
            let mut all = opened(&path, Dtype::Float32);
            let weight = all.matrix(UP.0, 40, 64).unwrap();
            let shrunk = std::fs::File::options().write(true).open(&path).unwrap();
            shrunk.set_len(100).unwrap();
            let error = all
                .matrix("model.layers.0.mlp.down_proj", 64, 40)
                .unwrap_err();
            assert!(!error.message().is_empty());
            if exec::enabled() {
                let error = weight.dense(Dtype::Float32).unwrap_err();
                assert!(error.message().contains("truncated"), "{error}");
            }
        });
    }
}
