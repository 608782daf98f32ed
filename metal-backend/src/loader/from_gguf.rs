//! Tensors of GGUF files as arrays. Matrices stay quantized where MLX has the same format (see
//! `gguf_quant`); all others become dense.

use inference::Result;
use mlx_rs_core::{Array, Dtype, QuantMode, Quantized, cpu};

use super::streaming::{PartLayout, Parts, all_of, one, rows_and_cols};
use super::{Source, Weights, dimension, mlx_shape};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::gguf::{GgmlType, Gguf, GgufTensor};
use crate::checkpoint::gguf_config::GgufNames;
use crate::checkpoint::gguf_quant::{dequantize, repack, unpermute_rows};
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

    /// The number of heads whose rows are in GGUF order; `None` for the usual order.
    fn permuted_heads(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
    ) -> Result<Option<usize>> {
        let permuted = matches!(&self.source, Source::Gguf(_, names) if names.permuted());
        let heads = match stored.rsplit('.').nth(1) {
            _ if !permuted => return Ok(None),
            Some("attn_q") => self.config.num_attention_heads,
            Some("attn_k") => self.config.num_key_value_heads,
            _ => return Ok(None),
        };
        match tensor.shape.first() {
            Some(&rows) if rows % (2 * heads) == 0 => Ok(Some(heads)),
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

    /// Reads a tensor in chunks. `make` gets the bytes of some rows, in the order of Hugging Face.
    fn gguf_chunks(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        parts: &[PartLayout],
        make: impl Fn(&[u8], usize) -> Result<Parts>,
    ) -> Result<Parts> {
        let (rows, _) = rows_and_cols(&tensor.shape);
        if let Some(heads) = self.permuted_heads(gguf, stored, tensor)? {
            // Rows change places within their heads. The rows of a bias are its elements.
            let units = tensor.shape.first().copied().unwrap_or(rows);
            let bytes = unpermute_rows(&gguf.read(tensor)?, units, heads);
            return make(&bytes, rows);
        }
        let row = tensor.nbytes / rows.max(1);
        self.in_chunks(rows, tensor.nbytes, parts, |first, count| {
            make(&gguf.read_bytes(tensor, first * row, count * row)?, count)
        })
    }

    pub(super) fn gguf_dense(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        shape: &[usize],
        dtype: Dtype,
    ) -> Result<Array> {
        let (_, cols) = rows_and_cols(shape);
        let parts = [PartLayout::rows(cols, dtype)];
        let made = self.gguf_chunks(gguf, stored, tensor, &parts, |bytes, rows| {
            let values = dequantize(tensor.kind, bytes).ok_or_else(|| {
                wrong_tensor(
                    gguf.path(),
                    stored,
                    format!(
                        "is stored as {}, which is not supported",
                        tensor.kind.name()
                    ),
                )
            })?;
            Ok(vec![self.array_of(
                &values,
                &mlx_shape(&[rows, cols]),
                dtype,
            )?])
        })?;
        one(made, shape)
    }

    pub(super) fn gguf_matrix(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        shape: &[usize],
        for_kernels: bool,
    ) -> Result<Weight> {
        let Some(bits) = repack(tensor.kind, &[]).map(|packed| packed.bits) else {
            // Decoded through float32, which holds all numbers of both types.
            let own = match tensor.kind {
                GgmlType::F16 => Dtype::Float16,
                GgmlType::BF16 => Dtype::Bfloat16,
                _ => self.dtype,
            };
            let dtype = self.matrix_type(own, shape, for_kernels);
            return self
                .gguf_dense(gguf, stored, tensor, shape, dtype)
                .map(Weight::Dense);
        };
        let Some((&cols, outer)) = shape.split_last() else {
            return Err(self.wrong_shape(stored, &tensor.shape, shape));
        };
        let (groups, words) = (cols / 32, cols / 32 * dimension(bits));
        let kernel =
            for_kernels && cpu::QuantizedMatrix::supports(QuantMode::Affine, bits, 32, self.dtype);
        let numbers = PartLayout {
            interleaved: kernel,
            ..PartLayout::rows(words, Dtype::Uint32)
        };
        let factors = PartLayout::rows(groups, self.dtype);
        let parts = [numbers, factors, factors];
        let made = self.gguf_chunks(gguf, stored, tensor, &parts, |bytes, rows| {
            let packed = repack(tensor.kind, bytes).ok_or_else(|| {
                wrong_tensor(gguf.path(), stored, "is no whole number of blocks a row")
            })?;
            let groups = mlx_shape(&[rows, groups]);
            Ok(vec![
                Array::from_slice(&packed.packed, &mlx_shape(&[rows, words]))
                    .and_then(|rows| numbers.ordered(rows))
                    .map_err(engine("weights"))?,
                self.array(&packed.scales, &groups)?,
                self.array(&packed.biases, &groups)?,
            ])
        })?;
        if let (true, [rows]) = (kernel, outer) {
            let [words, scales, biases] = all_of(made)?;
            let format = (mlx_shape(&[*rows])[0], bits, 32);
            let scales = cpu::QuantizedMatrix::factors(scales).map_err(engine("weights"))?;
            let biases = cpu::QuantizedMatrix::factors(biases).map_err(engine("weights"))?;
            return cpu::QuantizedMatrix::from_interleaved(words, [scales, biases], format)
                .map(Weight::Interleaved)
                .map_err(engine("weights"));
        }
        let with_last = |n: usize| [outer, &[n]].concat();
        let mut made = made.into_iter();
        let mut next = |n: usize| one(made.next().into_iter().collect(), &with_last(n));
        Ok(Weight::Quantized(Quantized {
            weight: next(words)?,
            scales: next(groups)?,
            biases: Some(next(groups)?),
            group_size: 32,
            bits,
            mode: QuantMode::Affine,
        }))
    }
}
