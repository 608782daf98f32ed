//! Tensors of GGUF files as arrays: matrices stay quantized where MLX has the same numbers
//! (`gguf_quant` says which), everything else becomes dense.

use inference::Result;
use mlx_rs_core::{Array, QuantMode, Quantized};

use super::{Source, Weights, dimension, mlx_shape};
use crate::checkpoint::gguf::{Gguf, GgufTensor};
use crate::checkpoint::gguf_config::GgufNames;
use crate::checkpoint::gguf_quant::{dequantize, repack, unpermute_rows};
use crate::checkpoint::safetensors::wrong_tensor;
use crate::error::engine;
use crate::nn::Weight;

impl Weights {
    pub(super) fn gguf_tensor<'a>(
        &self,
        gguf: &'a Gguf,
        names: &GgufNames,
        name: &str,
        shape: &[usize],
    ) -> Result<(String, &'a GgufTensor)> {
        let stored = names.tensor(name).unwrap_or_else(|| name.to_owned());
        let tensor = gguf
            .tensors()
            .get(&stored)
            .ok_or_else(|| self.missing(&stored, shape))?;
        if tensor.shape != shape {
            return Err(self.wrong_shape(&stored, &tensor.shape, shape));
        }
        Ok((stored, tensor))
    }

    /// A tensor's bytes with rows in Hugging Face's order.
    fn gguf_bytes(&self, gguf: &Gguf, stored: &str, tensor: &GgufTensor) -> Result<Vec<u8>> {
        let bytes = gguf.read(tensor)?;
        let permuted = matches!(&self.source, Source::Gguf(_, names) if names.permuted());
        let heads = match stored.rsplit('.').nth(1) {
            _ if !permuted => return Ok(bytes),
            Some("attn_q") => self.config.num_attention_heads,
            Some("attn_k") => self.config.num_key_value_heads,
            _ => return Ok(bytes),
        };
        match tensor.shape.first() {
            Some(&rows) if rows % (2 * heads) == 0 => Ok(unpermute_rows(&bytes, rows, heads)),
            _ => Err(wrong_tensor(
                gguf.path(),
                stored,
                format!(
                    "has shape {:?}, which does not divide into {heads} heads",
                    tensor.shape
                ),
            )),
        }
    }

    pub(super) fn gguf_dense(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        shape: &[usize],
    ) -> Result<Array> {
        let bytes = self.gguf_bytes(gguf, stored, tensor)?;
        let values = dequantize(tensor.kind, &bytes).ok_or_else(|| {
            wrong_tensor(
                gguf.path(),
                stored,
                format!(
                    "is stored as {}, which is not supported",
                    tensor.kind.name()
                ),
            )
        })?;
        self.array(&values, &mlx_shape(shape))
    }

    pub(super) fn gguf_matrix(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        shape: &[usize],
    ) -> Result<Weight> {
        let bytes = self.gguf_bytes(gguf, stored, tensor)?;
        let Some(packed) = repack(tensor.kind, &bytes) else {
            drop(bytes);
            return self
                .gguf_dense(gguf, stored, tensor, shape)
                .map(Weight::Dense);
        };
        let Some((&cols, rows)) = shape.split_last() else {
            return Err(self.wrong_shape(stored, &tensor.shape, shape));
        };
        let with_last = |n: usize| mlx_shape(&[rows, &[n]].concat());
        let groups = with_last(cols / 32);
        let weight = Array::from_slice(
            &packed.packed,
            &with_last(cols / 32 * dimension(packed.bits)),
        )
        .map_err(engine("weights"))?;
        Ok(Weight::Quantized(Quantized {
            weight,
            scales: self.array(&packed.scales, &groups)?,
            biases: Some(self.array(&packed.biases, &groups)?),
            group_size: 32,
            bits: packed.bits,
            mode: QuantMode::Affine,
        }))
    }
}
