//! Loads tensors of GGUF files. A matrix stays quantized if MLX or the CPU kernels support its
//! format (`gguf_packed.rs` loads formats that are not affine). All other tensors become dense.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;
use half::slice::HalfFloatSliceExt;
use inference::Result;
use mlx_rs_core::{Array, Dtype, QuantMode, Quantized};

use super::experts::{kernel_rows, packed_weight};
use super::gguf_part::GgufPart;
use super::streaming::{
    PartLayout, Parts, Scratch, StoredRows, all_of, cast_mut, fit_in_f16, no_parts, one,
    rows_and_cols, sized, sized_bytes, store,
};
use super::{Source, Weights, dimension, mlx_shape};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::gguf::{GgmlType, Gguf};
use crate::checkpoint::gguf_config::GgufNames;
use crate::checkpoint::quantization::{
    Misfit, dequantize, permuted_row, repack_into, unpermute_into, unpermute_rows,
};
use crate::error::engine;
use crate::exec::{self, RowBlocks};
use crate::nn::Weight;

/// The rows of a tensor, which are read in Hugging Face's order.
#[derive(Debug, Clone)]
pub(super) struct GgufRows {
    tensor: GgufPart,
    rows: usize,
    /// The number of rows; for a bias, the number of elements.
    units: usize,
    /// The number of units per head, if the file permutes units within each head.
    head: Option<usize>,
}

impl GgufRows {
    pub(super) fn stored(&self) -> StoredRows {
        StoredRows {
            rows: self.rows,
            nbytes: self.tensor.nbytes,
            together: self.head.filter(|_| self.units == self.rows).unwrap_or(1),
        }
    }

    /// Reads some rows, and calls `make` as [`Weights::gguf_chunks`] describes.
    pub(super) fn read(
        &self,
        range: Range<usize>,
        out: &mut [&mut [u8]],
        scratch: &mut Scratch,
        make: impl Fn(&[u8], &mut [&mut [u8]], &mut Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        let bytes = sized_bytes(&mut scratch.stored, range.len() * self.tensor.row_bytes());
        self.tensor.read_rows(range.clone(), bytes)?;
        let Some((units, heads)) = self.heads(range.len()) else {
            return make(bytes, out, &mut scratch.values);
        };
        let usual = unpermute_rows(bytes, units, heads);
        make(&usual, out, &mut scratch.values)
    }

    /// Returns the numbers of units and heads in some rows; `None` if the file has Hugging Face's
    /// order.
    fn heads(&self, rows: usize) -> Option<(usize, usize)> {
        let units = match self.units == self.rows {
            true => rows,
            false => self.units,
        };
        self.head.map(|head| (units, units / head.max(1)))
    }

    /// Reads some rows into `out`, in Hugging Face's order.
    fn copy(&self, range: Range<usize>, out: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        let Some((units, heads)) = self.heads(range.len()) else {
            return self.tensor.read_rows(range, out);
        };
        let bytes = sized_bytes(&mut scratch.stored, range.len() * self.tensor.row_bytes());
        self.tensor.read_rows(range, bytes)?;
        unpermute_into(bytes, units, heads, out);
        Ok(())
    }

    /// Packs some rows with the kernels for `blocks`. Returns `false` if the rows are not complete
    /// row blocks.
    pub(super) fn pack(
        &self,
        blocks: RowBlocks,
        range: Range<usize>,
        out: &mut [&mut [u8]],
        scratch: &mut Scratch,
    ) -> Result<bool> {
        if !range.len().is_multiple_of(exec::INTERLEAVED_ROWS) {
            return Ok(false);
        }
        let row = self.tensor.row_bytes();
        let bytes = sized_bytes(&mut scratch.stored, range.len() * row);
        self.tensor.read_rows(range, bytes)?;
        Ok(match self.head {
            None => blocks.pack(bytes, row, |row| row, out),
            Some(head) => blocks.pack(bytes, row, |row| permuted_row(row, head), out),
        })
    }
}

impl Weights {
    pub(super) fn gguf_tensor(
        &self,
        gguf: &Arc<Gguf>,
        names: &GgufNames,
        name: &str,
        shape: &[usize],
    ) -> Result<GgufPart> {
        let stored = names.tensor(name).unwrap_or_else(|| name.to_owned());
        self.gguf_part(gguf, stored, name, shape)
    }

    /// Returns the number of heads if the file permutes rows within heads; `None` if the rows are
    /// in Hugging Face's order.
    pub(super) fn permuted_heads(&self, tensor: &GgufPart) -> Result<Option<usize>> {
        let permuted = matches!(&self.source, Source::Gguf(_, names) if names.permuted());
        let (queries, keys) = match self.split() {
            Some(split) => (split.heads(), split.kv_heads()),
            None => (
                self.config.num_attention_heads,
                self.config.num_key_value_heads,
            ),
        };
        let heads = match tensor.name.rsplit('.').nth(1) {
            _ if !permuted => return Ok(None),
            Some("attn_q") => queries,
            Some("attn_k") => keys,
            _ => return Ok(None),
        };
        match tensor.shape.first() {
            Some(&rows) if rows % (2 * heads) == 0 => Ok(Some(heads)),
            _ => Err(wrong_tensor(
                tensor.gguf.path(),
                &tensor.name,
                format!(
                    "has shape {:?}, which does not divide into {heads} heads",
                    tensor.shape
                ),
            )),
        }
    }

    /// Reads a tensor in chunks, on several threads. `make` receives the bytes of some rows in
    /// Hugging Face's order, and writes these rows to each part. Its last argument is scratch
    /// memory for elements.
    pub(super) fn gguf_chunks(
        &self,
        tensor: &GgufPart,
        parts: &[PartLayout],
        make: impl Fn(&[u8], &mut [&mut [u8]], &mut Vec<f32>) -> Result<()> + Sync,
    ) -> Result<Parts> {
        let rows = self.gguf_rows(tensor)?;
        self.in_chunks(rows.stored(), parts, |range, out, scratch| {
            rows.read(range, out, scratch, &make)
        })
    }

    /// Returns the rows of a tensor, to be read in Hugging Face's order.
    pub(super) fn gguf_rows(&self, tensor: &GgufPart) -> Result<GgufRows> {
        let (rows, _) = rows_and_cols(&tensor.shape);
        let heads = self.permuted_heads(tensor)?;
        // Rows are permuted within each head. For a bias, a row is one element.
        let units = tensor.shape.first().copied().unwrap_or(rows);
        Ok(GgufRows {
            tensor: tensor.clone(),
            rows,
            units,
            head: heads.map(|heads| units / heads.max(1)),
        })
    }

    pub(super) fn gguf_dense(
        &self,
        tensor: &GgufPart,
        shape: &[usize],
        dtype: Dtype,
    ) -> Result<Array> {
        let (_, cols) = rows_and_cols(shape);
        let parts = [PartLayout::rows(cols, dtype)];
        // The file is little-endian, so bytes can be copied only on a little-endian machine.
        let as_stored = float_type(tensor.kind) == Some(dtype) && cfg!(target_endian = "little");
        if as_stored {
            let rows = self.gguf_rows(tensor)?;
            let made = self.in_chunks(rows.stored(), &parts, |range, out, scratch| {
                let [out] = out else { return Err(no_parts()) };
                rows.copy(range, out, scratch)
            })?;
            return one(made, shape);
        }
        let made = self.gguf_chunks(tensor, &parts, |bytes, out, values| {
            let [out] = out else { return Err(no_parts()) };
            // Aligned bytes can be cast, and the conversion then uses processor instructions.
            if let (GgmlType::F16, true, Ok(halves)) = (
                tensor.kind,
                cfg!(target_endian = "little"),
                bytemuck::try_cast_slice::<u8, f16>(bytes),
            ) {
                let values = sized(values, halves.len());
                halves.convert_to_f32_slice(values);
                store(values, dtype, out);
                return Ok(());
            }
            let values = dequantize(tensor.kind, bytes).ok_or_else(|| {
                let kind = tensor.kind.name();
                let message = format!("is stored as {kind}, which is not supported");
                wrong_tensor(tensor.gguf.path(), &tensor.name, message)
            })?;
            store(&values, dtype, out);
            Ok(())
        })?;
        one(made, shape)
    }

    /// Returns the type in memory of a tensor that is dequantized.
    pub(super) fn gguf_float_type(
        &self,
        tensor: &GgufPart,
        shape: &[usize],
        for_kernels: bool,
    ) -> Dtype {
        // Tensors are decoded to float32, which represents both half types exactly.
        let float_type = match tensor.kind {
            GgmlType::F16 => Dtype::Float16,
            GgmlType::BF16 => Dtype::Bfloat16,
            _ => self.dtype,
        };
        self.matrix_type(float_type, shape, for_kernels)
    }

    pub(super) fn gguf_matrix(
        &self,
        tensor: &GgufPart,
        shape: &[usize],
        for_kernels: bool,
    ) -> Result<Weight> {
        if let Some(weight) = self.gguf_packed(tensor, shape, for_kernels)? {
            return Ok(weight);
        }
        let layout = tensor.kind.layout();
        let Some(bits) = layout.affine_bits().map(u32::cast_signed) else {
            let dtype = self.gguf_float_type(tensor, shape, for_kernels);
            if for_kernels && let Some(mapped) = self.gguf_mapped(tensor, shape, dtype)? {
                return Ok(mapped);
            }
            return self.gguf_dense(tensor, shape, dtype).map(Weight::Dense);
        };
        let Some((&cols, outer)) = shape.split_last() else {
            return Err(self.wrong_shape(&tensor.name, &tensor.shape, shape));
        };
        let (groups, words) = (cols / 32, cols / 32 * dimension(bits));
        let kernel_rows = kernel_rows(shape)
            .filter(|_| for_kernels && exec::keeps_packed(QuantMode::Affine, bits, 32, self.dtype));
        let kernel = kernel_rows.is_some();
        let part = |cols, dtype| PartLayout {
            interleaved: kernel,
            ..PartLayout::rows(cols, dtype)
        };
        let in_f16 = AtomicBool::new(true);
        let read = |factors: Dtype| {
            let parts = [
                part(words, Dtype::Uint32),
                part(groups, factors),
                part(groups, factors),
            ];
            self.gguf_chunks(tensor, &parts, |bytes, out, values| {
                let [words, scales, biases] = out else {
                    return Err(no_parts());
                };
                let n = scales.len() / factors.size();
                let values = sized(values, 2 * n);
                let (s, b) = values.split_at_mut(n);
                repack_into(tensor.kind, bytes, cast_mut(words), s, b).ok_or_else(|| {
                    wrong_tensor(tensor.gguf.path(), &tensor.name, Misfit::Size.to_string())
                })?;
                if kernel && in_f16.load(Ordering::Relaxed) && !(fit_in_f16(s) && fit_in_f16(b)) {
                    in_f16.store(false, Ordering::Relaxed);
                }
                store(s, factors, scales);
                store(b, factors, biases);
                Ok(())
            })
        };
        // Block scales are float16 in the file. Scales of K types are multiplied by 6-bit factors,
        // and float16 cannot represent these products.
        let products = layout.has_product_scales();
        let mut made = match kernel && !products {
            true => read(Dtype::Float16)?,
            false => read(self.dtype)?,
        };
        // A bias is a multiple of the scale and may overflow float16. In this case, the tensor is
        // read again.
        if kernel && !products && !in_f16.load(Ordering::Relaxed) {
            made = read(self.dtype)?;
        }
        if let Some((rows, _)) = kernel_rows {
            let [words, scales, biases] = all_of(made)?;
            let format = (mlx_shape(&[rows])[0], bits, 32);
            let exact = match in_f16.load(Ordering::Relaxed) {
                true => Dtype::Float16,
                false => Dtype::Float32,
            };
            let scales = scales.astype(exact).map_err(engine("weights"))?;
            let biases = biases.astype(exact).map_err(engine("weights"))?;
            return Weight::from_interleaved(words, [scales, biases], format)
                .map(|rows| packed_weight(rows, shape))
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

/// Returns the type of unquantized elements; `None` for quantized types.
pub(super) fn float_type(kind: GgmlType) -> Option<Dtype> {
    match kind {
        GgmlType::F16 => Some(Dtype::Float16),
        GgmlType::BF16 => Some(Dtype::Bfloat16),
        GgmlType::F32 => Some(Dtype::Float32),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use inference_formats::footprint::Footprint;
    use mlx_rs_core::{Device, Stream, cpu};

    use super::*;
    use crate::checkpoint::ModelConfig;
    use crate::checkpoint::gguf::testing::{Writer, blocks};
    use crate::checkpoint::quantization::{Layout, TYPES};

    const ROWS: usize = 300;
    const COLS: usize = 512;
    const PREFIX: &str = "model.layers.0.mlp.up_proj";
    const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 1,
        "intermediate_size": 300, "num_attention_heads": 4, "vocab_size": 40}"#;

    fn on_cpu(run: impl FnOnce()) {
        Stream::default_of(Device::cpu()).unwrap().scope(run);
    }

    #[test]
    fn blocks_reach_the_kernels_as_they_are() {
        on_cpu(|| {
            // All types that stay quantized in memory.
            for row in TYPES {
                let format = match row.layout() {
                    Layout::Floats => continue,
                    Layout::SuperScaled => (6, 16),
                    Layout::Powers | Layout::Table { .. } => (4, 32),
                    Layout::TableSuper { group, .. } => (4, group as i32),
                    Layout::SuperAffine { bits, group } => (bits.cast_signed(), group as i32),
                    other => (other.affine_bits().unwrap().cast_signed(), 32),
                };
                let (kind, layout) = (row.id, row.layout());
                let bytes = blocks(row.kind, ROWS * COLS / row.weights);
                let dims = [COLS as u64, ROWS as u64];
                let (_dir, path) = Writer::default()
                    .tensor("blk.0.ffn_up.weight", &dims, kind, &bytes)
                    .file();
                let file = || Gguf::open(&path).unwrap();
                let config = ModelConfig::from_json(CONFIG.as_bytes()).unwrap();
                let stored = file().tensors()["blk.0.ffn_up.weight"].kind;
                let wanted = dequantize(stored, &bytes).unwrap();
                let name = stored.name();

                for (kernels, chunk) in [(true, 1), (true, 1 << 20), (false, 1 << 20)] {
                    let mut all = Weights::from_gguf(file(), &config, Dtype::Float32);
                    all.chunk_bytes = chunk;
                    if kernels {
                        all.use_cpu(exec::PrefillInputs::Float32);
                    }
                    let weight = all.matrix(PREFIX, ROWS as i32, COLS as i32).unwrap();
                    let loaded = weight.dense(Dtype::Float32).unwrap().to_f32_vec().unwrap();
                    assert!(loaded == wanted, "{name}, {kernels}, {chunk}");

                    let storage = Weights::storage(kernels, Dtype::Float32);
                    let estimate = Footprint::of_gguf(&file(), &config, &storage).loaded_bytes();
                    let off = (weight.nbytes() as f64 / estimate as f64 - 1.0).abs();
                    // The last row block is padded, so the size may exceed the estimate slightly.
                    assert!(off < 0.015, "{name}: {} and {estimate}", weight.nbytes());

                    let Weight::Interleaved(matrix) = &weight else {
                        assert!(!kernels || !cpu::enabled(), "{name} is not for the kernels");
                        // MLX supports affine codes and MXFP4, but no other code tables and no
                        // groups of 16.
                        let in_mlx = layout.affine_bits().is_some() || layout == Layout::Powers;
                        assert_eq!(weight.format().is_some(), in_mlx, "{name}");
                        continue;
                    };
                    assert!(kernels);
                    assert_eq!((matrix.bits(), matrix.group_size()), format, "{name}");
                    // The last row block is padded, so the bits per weight vary.
                    let bits = weight.nbytes() as f64 * 8.0 / (ROWS * COLS) as f64;
                    let (few, most) = match layout {
                        // Scales and biases are float16 if they fit, otherwise float32.
                        Layout::Affine { bits } => (f64::from(bits) + 1.0, f64::from(bits) + 2.0),
                        _ => [layout.bytes(256) as f64 * 8.0 / 256.0; 2].into(),
                    };
                    let wide = few..most * 1.025;
                    assert!(wide.contains(&bits), "{name}: {bits} bits a weight");
                    let ids = Array::from_slice(&[299i32, 0, 17], &[3]).unwrap();
                    let rows = matrix.take_rows(&ids).unwrap().to_f32_vec().unwrap();
                    for (row, id) in rows.chunks(COLS).zip([299, 0, 17]) {
                        assert!(row == &wanted[id * COLS..][..COLS], "{name}, row {id}");
                    }
                    // Rows of a fused matrix may start at any index; this one is not a multiple of
                    // eight.
                    let part = weight.rows(5, 77).unwrap();
                    let part = part.dense(Dtype::Float32).unwrap().to_f32_vec().unwrap();
                    assert!(part == wanted[5 * COLS..77 * COLS], "{name}, rows");
                }
            }
        });
    }

    #[test]
    fn exponents_that_are_no_numbers_are_errors() {
        on_cpu(|| {
            let mut bytes = blocks(GgmlType::MXFP4, ROWS * COLS / 32);
            bytes[17 * 16 * 123] = 255;
            let dims = [COLS as u64, ROWS as u64];
            let (_dir, path) = Writer::default()
                .tensor("blk.0.ffn_up.weight", &dims, 39, &bytes)
                .file();
            let config = ModelConfig::from_json(CONFIG.as_bytes()).unwrap();
            for kernels in [true, false] {
                let gguf = Gguf::open(&path).unwrap();
                let mut all = Weights::from_gguf(gguf, &config, Dtype::Float32);
                if kernels {
                    all.use_cpu(exec::PrefillInputs::Float32);
                }
                let e = all.matrix(PREFIX, ROWS as i32, COLS as i32).unwrap_err();
                assert!(e.message().contains("exponent 255"), "{e}");
            }
        });
    }

    /// A stack of experts must also keep its blocks, for any chunk size.
    #[test]
    fn experts_reach_the_kernels_as_they_are() {
        const EXPERTS: usize = 5;
        let prefix = "model.layers.0.mlp.switch_mlp.up_proj";
        let config = CONFIG.replace("llama", "qwen3_moe");
        on_cpu(|| {
            for stored in [
                GgmlType::Q4_0,
                GgmlType::Q8_0,
                GgmlType::Q6K,
                GgmlType::F16,
                GgmlType::MXFP4,
                GgmlType::IQ4NL,
                GgmlType::IQ3S,
            ] {
                let (weights, block) = stored.block().unwrap();
                let bytes = blocks(stored, ROWS * COLS / weights);
                let rows = ROWS / EXPERTS / 2; // 30, which is not a multiple of a row block
                for (experts, rows) in [(EXPERTS, 2 * rows - 4), (EXPERTS, rows)] {
                    let bytes = &bytes[..experts * rows * COLS / weights * block];
                    let dims = [COLS as u64, rows as u64, experts as u64];
                    let (_dir, path) = Writer::default()
                        .tensor("blk.0.ffn_up_exps.weight", &dims, stored.id(), bytes)
                        .file();
                    let file = || Gguf::open(&path).unwrap();
                    let config = ModelConfig::from_json(config.as_bytes()).unwrap();
                    let wanted = dequantize(stored, bytes).unwrap();
                    for chunk in [1, 1 << 20] {
                        let mut all = Weights::from_gguf(file(), &config, Dtype::Float32);
                        all.chunk_bytes = chunk;
                        all.use_cpu(exec::PrefillInputs::Float32);
                        let shape = [experts, rows, COLS].map(|n| n as i32);
                        let weight = all.stack(prefix, &shape).unwrap();
                        assert_eq!(weight.shape(), shape);
                        let what = format!("{}, {rows} rows, {chunk}", stored.name());
                        let loaded = weight.dense(Dtype::Float32).unwrap();
                        assert_eq!(loaded.shape(), shape, "{what}");
                        assert!(loaded.to_f32_vec().unwrap() == wanted, "{what}");
                        let some = weight.rows(3, 17).unwrap().dense(Dtype::Float32).unwrap();
                        assert!(
                            some.array_equal(&loaded.slice_axis(1, 3, 17).unwrap())
                                .unwrap(),
                            "{what}"
                        );
                        if !cpu::enabled() || rows % 8 != 0 {
                            continue;
                        }
                        match &weight {
                            Weight::Dense(w) => assert_eq!(w.dtype(), Dtype::Float16, "{what}"),
                            Weight::Experts { .. } => {}
                            _ => panic!("{what} is not for the kernels"),
                        }
                        let storage = Weights::storage(true, Dtype::Float32);
                        let estimate = Footprint::of_gguf(&file(), &config, &storage);
                        assert_eq!(weight.nbytes() as u64, estimate.loaded_bytes(), "{what}");
                    }
                }
            }
        });
    }
}
