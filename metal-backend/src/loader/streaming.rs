//! Large tensors are read and converted in chunks, straight into their place. So loading never
//! holds a second copy of one: an embedding can be half of a model.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, Dtype, eval, zeros};

use super::{Weights, mlx_shape};
use crate::error::engine;
use crate::exec;

/// About how many stored bytes are read at a time.
pub(super) const CHUNK_BYTES: usize = 2 << 20;

/// The arrays `[rows, ..]` that one chunk becomes, one for each part of the result.
pub(super) type Parts = Vec<Array>;

/// The layout of one part of the result.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartLayout {
    pub cols: usize,
    pub dtype: Dtype,
    /// Whether the rows are interleaved for the kernels: `[bands, cols, BAND]` instead of `[rows,
    /// cols]`.
    pub interleaved: bool,
}

impl PartLayout {
    /// Rows one after another, `[rows, cols]`.
    pub(super) fn rows(cols: usize, dtype: Dtype) -> Self {
        Self {
            cols,
            dtype,
            interleaved: false,
        }
    }

    /// Rows as they were read, in this layout.
    pub(super) fn ordered(self, rows: Array) -> mlx_rs_core::Result<Array> {
        if self.interleaved {
            exec::interleaved(&rows)
        } else {
            Ok(rows)
        }
    }

    fn shape(self, rows: usize) -> Vec<usize> {
        if self.interleaved {
            vec![rows.div_ceil(BAND), self.cols, BAND]
        } else {
            vec![rows, self.cols]
        }
    }

    /// The index along the first axis of row `first`.
    fn place(self, first: usize) -> i32 {
        let place = if self.interleaved {
            first / BAND
        } else {
            first
        };
        i32::try_from(place).unwrap_or(-1)
    }
}

const BAND: usize = exec::INTERLEAVED_ROWS;

impl Weights {
    /// The parts of a tensor. `read` makes them from the rows `first..first + count`, each in its
    /// layout. `stored` is the size of the tensor in the file, in bytes.
    pub(super) fn in_chunks(
        &self,
        rows: usize,
        stored: usize,
        parts: &[PartLayout],
        read: impl Fn(usize, usize) -> Result<Parts>,
    ) -> Result<Parts> {
        let mut at_once = (self.chunk_bytes / (stored / rows.max(1)).max(1)).max(1);
        if parts.iter().any(|part| part.interleaved) {
            at_once = at_once.next_multiple_of(BAND);
        }
        if rows <= at_once {
            return read(0, rows);
        }
        let mut whole = parts
            .iter()
            .map(|part| zeros(&mlx_shape(&part.shape(rows)), part.dtype))
            .collect::<mlx_rs_core::Result<Parts>>()
            .map_err(engine("weights"))?;
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let chunk = read(first, count)?;
            // No other reference exists, so MLX writes in place.
            whole = whole
                .into_iter()
                .zip(chunk)
                .zip(parts)
                .map(|((whole, chunk), part)| whole.update_axis(&chunk, 0, part.place(first)))
                .collect::<mlx_rs_core::Result<Parts>>()
                .and_then(|whole| eval(&whole).map(|()| whole))
                .map_err(engine("weights"))?;
        }
        Ok(whole)
    }
}

/// The product of all axes but the last, and the last.
pub(super) fn rows_and_cols(shape: &[usize]) -> (usize, usize) {
    match shape.split_last() {
        Some((cols, outer)) => (outer.iter().product(), *cols),
        None => (1, 1),
    }
}

/// The parts as an array of `N`.
pub(super) fn all_of<const N: usize>(parts: Parts) -> Result<[Array; N]> {
    let fault = || Error::new(ErrorKind::Engine, "a tensor fell apart while it was read");
    <[Array; N]>::try_from(parts).map_err(|_| fault())
}

/// The only part, in the shape `shape`.
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

    /// All tensors of both formats, read in chunks of `chunk` bytes.
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
        // Q4_1 blocks with finite scales, and BF16.
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
            let whole = values(path, is_gguf, CHUNK_BYTES);
            assert!(whole.iter().flatten().all(|x| x.is_finite()));
            assert_ne!(whole[0][..64], whole[0][64..128]);
            // Chunks of one row, chunks that do not divide the rows, chunks longer than a row.
            for chunk in [1, 600, 1000] {
                assert_eq!(values(path, is_gguf, chunk), whole, "{chunk}");
            }
        }
    }
}
