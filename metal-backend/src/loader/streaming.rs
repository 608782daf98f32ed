//! Reads and converts tensors in chunks, directly into the memory of their arrays, on all cores.
//! Each thread reads its own chunks, so reading overlaps with conversion. Loading never has a
//! second copy of a tensor in memory, because an embedding can be half of a model.

use std::ops::Range;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, ChunkedArray, Dtype, fill_arrays};

use super::{Weights, mlx_shape};
use crate::error::engine;
use crate::exec;

/// The approximate number of stored bytes per read. A chunk and its converted form together fit a
/// core's second-level cache.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// The arrays made from one tensor.
pub(super) type Parts = Vec<Array>;

/// The layout of one array made from a tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartLayout {
    pub cols: usize,
    pub dtype: Dtype,
    /// Whether rows are interleaved for the kernels: `[bands, cols, BAND]` instead of `[rows,
    /// cols]`.
    pub interleaved: bool,
}

/// Scratch memory of a reading thread, reused for each chunk.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Bytes as stored. The element type is `u32` for alignment.
    pub stored: Vec<u32>,
    /// Decoded values, before they are converted to the array's type.
    pub values: Vec<f32>,
    /// Rows to be interleaved, for each part. The element type is `u32` for alignment.
    rows: Vec<Vec<u32>>,
}

impl PartLayout {
    /// A layout of contiguous rows, `[rows, cols]`.
    pub(super) fn rows(cols: usize, dtype: Dtype) -> Self {
        Self {
            cols,
            dtype,
            interleaved: false,
        }
    }

    fn row_bytes(self) -> usize {
        self.cols * self.dtype.size()
    }

    /// Allocates the array for `rows` rows, to be written in chunks of `at_once` rows.
    fn chunked(self, rows: usize, at_once: usize) -> ChunkedArray {
        let shape = if self.interleaved {
            vec![rows.div_ceil(BAND), self.cols, BAND]
        } else {
            vec![rows, self.cols]
        };
        ChunkedArray {
            shape: mlx_shape(&shape),
            dtype: self.dtype,
            chunk_bytes: at_once.saturating_mul(self.row_bytes()),
        }
    }

    /// Interleaves contiguous rows into `out`.
    fn interleave(self, rows: &[u8], out: &mut [u8]) {
        match self.dtype.size() {
            4 => interleave::<u32>(cast(rows), self.cols, cast_mut(out)),
            2 => interleave::<u16>(cast(rows), self.cols, cast_mut(out)),
            _ => interleave::<u8>(rows, self.cols, out),
        }
    }
}

const BAND: usize = exec::INTERLEAVED_ROWS;

/// Converts rows `[n, cols]` to `[bands, cols, BAND]`. Does not write the missing rows of an
/// incomplete last band.
fn interleave<T: Pod>(rows: &[T], cols: usize, out: &mut [T]) {
    let size = (cols * BAND).max(1);
    for (rows, band) in rows.chunks(size).zip(out.chunks_mut(size)) {
        let mut done = 0;
        if rows.len() == size {
            // Complete tiles of eight columns, which the compiler transposes in registers.
            for (i, tile) in band.chunks_exact_mut(BAND * BAND).enumerate() {
                let lines: [[T; BAND]; BAND] = std::array::from_fn(|r| {
                    let from = rows.get(r * cols + i * BAND..).unwrap_or_default();
                    from.first_chunk().copied().unwrap_or([T::zeroed(); BAND])
                });
                for (c, out) in tile.as_chunks_mut::<BAND>().0.iter_mut().enumerate() {
                    *out = lines.map(|line| line[c]);
                }
            }
            done = cols / BAND * BAND;
        }
        for (r, row) in rows.chunks(cols.max(1)).enumerate() {
            for (c, x) in row.iter().enumerate().skip(done) {
                band[c * BAND + r] = *x;
            }
        }
    }
}

/// Casts the bytes of a chunk to elements. Chunks contain complete elements and are aligned.
pub(super) fn cast<T: Pod>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(bytes)
}

/// Casts as [`cast`], for writing.
pub(super) fn cast_mut<T: Pod>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}

/// Returns the first `n` elements of `memory`, which grows if necessary.
pub(super) fn sized<T: Pod>(memory: &mut Vec<T>, n: usize) -> &mut [T] {
    if memory.len() < n {
        memory.resize(n, T::zeroed());
    }
    &mut memory[..n]
}

/// Returns the first `n` bytes of `memory`, which grows if necessary.
pub(super) fn sized_bytes(memory: &mut Vec<u32>, n: usize) -> &mut [u8] {
    let words = sized(memory, n.div_ceil(size_of::<u32>()));
    &mut bytemuck::cast_slice_mut(words)[..n]
}

/// Writes values as `dtype`, a float type.
pub(super) fn store(values: &[f32], dtype: Dtype, out: &mut [u8]) {
    match dtype {
        Dtype::Float16 => cast_mut::<f16>(out).convert_from_f32_slice(values),
        Dtype::Bfloat16 => cast_mut::<bf16>(out).convert_from_f32_slice(values),
        _ => cast_mut::<f32>(out).copy_from_slice(values),
    }
}

/// Whether all values are finite in float16.
pub(super) fn fit_in_f16(values: &[f32]) -> bool {
    let mut halves = [f16::ZERO; 256];
    let mut back = [0.0f32; 256];
    values.chunks(256).all(|part| {
        let (halves, back) = (&mut halves[..part.len()], &mut back[..part.len()]);
        halves.convert_from_f32_slice(part);
        halves.convert_to_f32_slice(back);
        back == part
    })
}

/// The size of a tensor in rows and bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredRows {
    pub rows: usize,
    /// The size of the tensor in the file, in bytes.
    pub nbytes: usize,
    /// The number of adjacent rows that must be read together.
    pub together: usize,
}

impl Weights {
    /// Converts a tensor to its parts. `read` writes a range of rows of each part as bytes.
    pub(super) fn in_chunks(
        &self,
        stored: StoredRows,
        parts: &[PartLayout],
        read: impl Fn(Range<usize>, &mut [&mut [u8]], &mut Scratch) -> Result<()> + Sync,
    ) -> Result<Parts> {
        let chunks = self.chunks(stored, parts);
        let fill = |scratch: &mut Scratch, chunk: usize, out: &mut [&mut [u8]]| {
            chunks.fill(chunk, out, scratch, &read)
        };
        fill_arrays(&chunks.arrays(), exec::threads(), Scratch::default, fill)
            .map_err(engine("weights"))?
    }

    /// Returns the chunks in which a tensor is converted.
    pub(super) fn chunks(&self, stored: StoredRows, parts: &[PartLayout]) -> Chunks {
        let StoredRows {
            rows,
            nbytes,
            together,
        } = stored;
        let mut step = together.max(1);
        if parts.iter().any(|part| part.interleaved) {
            step = (1..=BAND)
                .map(|n| n * step)
                .find(|n| n % BAND == 0)
                .unwrap_or(step);
        }
        let at_once = (self.chunk_bytes / (nbytes / rows.max(1)).max(1)).max(1);
        let at_once = at_once
            .next_multiple_of(step)
            .min(rows.next_multiple_of(step))
            .max(1);
        Chunks {
            rows,
            at_once,
            parts: parts.to_vec(),
        }
    }
}

/// A tensor in chunks of rows, and the layouts of the arrays into which it is converted.
#[derive(Debug, Clone)]
pub(super) struct Chunks {
    rows: usize,
    at_once: usize,
    parts: Vec<PartLayout>,
}

impl Chunks {
    /// Allocates the arrays to be filled.
    pub(super) fn arrays(&self) -> Vec<ChunkedArray> {
        let array = |part: &PartLayout| part.chunked(self.rows, self.at_once);
        self.parts.iter().map(array).collect()
    }

    /// Returns the rows of a chunk.
    pub(super) fn range(&self, chunk: usize) -> Range<usize> {
        let first = chunk * self.at_once;
        first..self.rows.min(first + self.at_once)
    }

    /// Writes a chunk of each array. `read` writes its rows as bytes; this function interleaves
    /// them.
    pub(super) fn fill(
        &self,
        chunk: usize,
        out: &mut [&mut [u8]],
        scratch: &mut Scratch,
        read: impl Fn(Range<usize>, &mut [&mut [u8]], &mut Scratch) -> Result<()>,
    ) -> Result<()> {
        let (range, parts) = (self.range(chunk), &self.parts);
        let mut waiting = std::mem::take(&mut scratch.rows);
        waiting.resize_with(parts.len(), Vec::new);
        let mut places: Vec<&mut [u8]> = (out.iter_mut().zip(&mut waiting).zip(parts))
            .map(|((out, waiting), part)| {
                if !part.interleaved {
                    return &mut **out;
                }
                sized_bytes(waiting, range.len() * part.row_bytes())
            })
            .collect();
        let done = read(range.clone(), &mut places, scratch);
        for ((out, waiting), part) in out.iter_mut().zip(&waiting).zip(parts) {
            if part.interleaved {
                let bytes: &[u8] = bytemuck::cast_slice(waiting);
                part.interleave(&bytes[..range.len() * part.row_bytes()], out);
            }
        }
        scratch.rows = waiting;
        done
    }
}

/// Returns rows (the product of all axes but the last) and columns.
pub(super) fn rows_and_cols(shape: &[usize]) -> (usize, usize) {
    match shape.split_last() {
        Some((cols, outer)) => (outer.iter().product(), *cols),
        None => (1, 1),
    }
}

/// Converts the parts to an array of length `N`.
pub(super) fn all_of<const N: usize>(parts: Parts) -> Result<[Array; N]> {
    <[Array; N]>::try_from(parts).map_err(|_| no_parts())
}

/// Returns the error for a wrong number of parts, which means a bug in this crate.
pub(super) fn no_parts() -> Error {
    Error::new(
        ErrorKind::Engine,
        "a tensor was read in an unexpected number of parts",
    )
}

/// Returns the only part, reshaped to `shape`.
pub(super) fn one(parts: Parts, shape: &[usize]) -> Result<Array> {
    let [part] = all_of(parts)?;
    let shape = mlx_shape(shape);
    if part.shape() == shape {
        return Ok(part);
    }
    part.reshape(&shape)
        .and_then(|part| part.eval().map(|()| part))
        .map_err(engine("weights"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::gguf::testing::Writer;
    use crate::checkpoint::{Gguf, ModelConfig};

    const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 40,
        "quantization": {"bits": 4, "group_size": 32}}"#;

    fn bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 37 % 251) as u8 & 0xbf).collect()
    }

    /// Returns the values of all tensors in a file of either format, read in chunks of `chunk`
    /// bytes.
    fn values(path: &Path, gguf: bool, chunk: usize) -> Vec<Vec<f32>> {
        let config = ModelConfig::from_json(CONFIG.as_bytes()).unwrap();
        let mut weights = if gguf {
            Weights::from_gguf(Gguf::open(path).unwrap(), &config, Dtype::Float32)
        } else {
            let checkpoint = crate::checkpoint::safetensors::SafetensorsCheckpoint::open(path);
            Weights::from_safetensors(checkpoint.unwrap(), path, &config, Dtype::Float32)
        };
        weights.chunk_bytes = chunk;
        ["model.embed_tokens", "model.layers.0.self_attn.q_proj"]
            .iter()
            .map(|name| {
                let weight = weights.matrix(name, 40, 64).unwrap();
                weight.dense(Dtype::Float32).unwrap().to_f32_vec().unwrap()
            })
            .collect()
    }

    #[test]
    fn chunks_make_up_the_whole() {
        // Q4_1 blocks with finite scales, and a BF16 tensor.
        let mut q4 = bytes(40 * 2 * 20);
        q4.chunks_mut(20).for_each(|b| b[1] &= 0x3f);
        let (_dir, gguf) = Writer::default()
            .tensor("token_embd.weight", &[64, 40], 3, &q4)
            .tensor("blk.0.attn_q.weight", &[64, 40], 30, &bytes(40 * 128))
            .file();

        let dir = tempfile::tempdir().unwrap();
        let header = serde_json::json!({
            "model.embed_tokens.weight": {"dtype": "U32", "shape": [40, 8], "data_offsets": [0, 1280]},
            "model.embed_tokens.scales": {"dtype": "F16", "shape": [40, 2], "data_offsets": [1280, 1440]},
            "model.embed_tokens.biases": {"dtype": "F16", "shape": [40, 2], "data_offsets": [1440, 1600]},
            "model.layers.0.self_attn.q_proj.weight":
                {"dtype": "BF16", "shape": [40, 64], "data_offsets": [1600, 6720]},
        })
        .to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        let mut data = bytes(6720);
        data[1280..1600].iter_mut().for_each(|b| *b &= 0x3f);
        file.extend(data);
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();

        for (path, is_gguf) in [(gguf.as_path(), true), (dir.path(), false)] {
            let unchunked = values(path, is_gguf, CHUNK_BYTES);
            assert!(unchunked.iter().flatten().all(|x| x.is_finite()));
            assert_ne!(unchunked[0][..64], unchunked[0][64..128]);
            // Chunks of one row, chunks that do not divide the rows, and chunks longer than a row.
            for chunk in [1, 600, 1000] {
                assert_eq!(values(path, is_gguf, chunk), unchunked, "{chunk}");
            }
        }
    }
}
