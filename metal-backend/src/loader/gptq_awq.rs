//! Loads matrices that GPTQ or AWQ packed, as affine MLX matrices with the same values. [`Packing`]
//! describes the stored tensors.

use half::f16;
use inference::{Error, ErrorKind, Result};
use inference_formats::config::Packing;
use mlx_rs_core::{Array, Dtype, QuantMode, Quantized};
use safetensors::Dtype as FileDtype;

use super::experts::{kernel_rows, packed_weight};
use super::streaming::{PartLayout, StoredRows, all_of, cast_mut, no_parts, one, sized, store};
use super::{Weights, mlx_shape};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};
use crate::error::engine;
use crate::exec;
use crate::nn::Weight;

/// The group sizes of MLX's affine format, the largest first.
const GROUPS: [usize; 3] = [128, 64, 32];

/// The position of output `n % 8` in a word of AWQ, in elements from the lowest bits.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The tensors of one matrix `[rows, cols]`, in memory.
#[derive(Debug)]
struct Packed {
    packing: Packing,
    bits: usize,
    rows: usize,
    cols: usize,
    /// Packed codes.
    words: Vec<u32>,
    /// Packed zero points; `None` if all are `2^(bits - 1)`.
    zeros: Option<Vec<u32>>,
    /// `[groups, rows]`.
    scales: Vec<f32>,
    /// The group of each column; `None` if groups are adjacent columns of equal number.
    group_of: Option<Vec<u32>>,
    groups: usize,
}

impl Packed {
    /// Returns the number of elements in a word.
    fn per_word(&self) -> usize {
        32 / self.bits
    }

    fn mask(&self) -> u32 {
        u32::MAX >> (32 - self.bits)
    }

    /// Returns the bit position of element `row % per_word` in a word of adjacent rows.
    fn shift(&self, row: usize) -> usize {
        let place = row % self.per_word();
        let place = match self.packing {
            Packing::Awq => AWQ_PLACES.get(place).copied().unwrap_or(place),
            _ => place,
        };
        place * self.bits
    }

    /// Returns the code of a weight.
    fn code(&self, row: usize, col: usize) -> u32 {
        let (at, shift) = match self.packing {
            Packing::Awq => (
                col * (self.rows / self.per_word()) + row / self.per_word(),
                self.shift(row),
            ),
            _ => (
                col / self.per_word() * self.rows + row,
                col % self.per_word() * self.bits,
            ),
        };
        self.words[at] >> shift & self.mask()
    }

    /// Returns the zero point of a row in a group.
    fn zero(&self, row: usize, group: usize) -> f32 {
        let Some(zeros) = &self.zeros else {
            return (1 << (self.bits - 1)) as f32;
        };
        let at = group * (self.rows / self.per_word()) + row / self.per_word();
        let offset = match self.packing {
            Packing::Gptq { zero_offset } => zero_offset,
            _ => 0,
        };
        let stored = zeros[at] >> self.shift(row) & self.mask();
        // The sum wraps, because GPTQ's first version stores the zero point 0 as the greatest code.
        ((stored + offset) & self.mask()) as f32
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales[group * self.rows + row]
    }

    fn group(&self, col: usize) -> usize {
        match &self.group_of {
            Some(groups) => groups[col] as usize,
            None => col / (self.cols / self.groups),
        }
    }

    /// Returns the group size in MLX's format. Returns `None` if MLX cannot represent the groups:
    /// their columns are not adjacent, or their size is not a multiple of an MLX group size.
    fn affine_group(&self) -> Option<usize> {
        let stored = self.cols / self.groups;
        let size = GROUPS
            .into_iter()
            .find(|size| stored.is_multiple_of(*size))?;
        self.group_of.is_none().then_some(size)
    }

    /// Writes the packed words of rows `first..`, `[n, cols / per_word]`.
    fn write_words(&self, first: usize, out: &mut [u32]) {
        let per_row = self.cols / self.per_word();
        for (row, words) in out.chunks_exact_mut(per_row.max(1)).enumerate() {
            let row = first + row;
            for (at, word) in words.iter_mut().enumerate() {
                *word = match self.packing {
                    // MLX and GPTQ both pack adjacent inputs of an output into a word.
                    Packing::Gptq { .. } => self.words[at * self.rows + row],
                    _ => (0..self.per_word()).fold(0, |word, i| {
                        word | self.code(row, at * self.per_word() + i) << (i * self.bits)
                    }),
                };
            }
        }
    }

    /// Returns scales and biases in MLX's format, `[rows, cols / size]`.
    fn factors(&self, size: usize) -> mlx_rs_core::Result<[Array; 2]> {
        let groups = self.cols / size;
        let mut both = [const { Vec::new() }; 2];
        for row in 0..self.rows {
            for group in 0..groups {
                let stored = self.group(group * size);
                let scale = self.scale(row, stored);
                both[0].push(scale);
                both[1].push(-scale * self.zero(row, stored));
            }
        }
        let shape = mlx_shape(&[self.rows, groups]);
        let [scales, biases] = both;
        Ok([
            Array::from_vec(scales, &shape)?,
            Array::from_vec(biases, &shape)?,
        ])
    }

    /// Writes the weights of a row, rounded to float16, because GPTQ's own kernels compute them in
    /// float16.
    fn write_row(&self, row: usize, out: &mut [f32]) {
        for (col, value) in out.iter_mut().enumerate() {
            let group = self.group(col);
            let code = self.code(row, col) as f32;
            let exact = self.scale(row, group) * (code - self.zero(row, group));
            *value = f16::from_f32(exact).to_f32();
        }
    }
}

impl Weights {
    /// Loads the matrix with this prefix; `None` unless GPTQ or AWQ packed it.
    pub(super) fn gptq_or_awq(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        names: &TensorNames,
        prefix: &str,
        shape: &[usize],
        for_kernels: bool,
    ) -> Result<Option<Weight>> {
        let Some(name) = names.stored(&format!("{prefix}.qweight")) else {
            return Ok(None);
        };
        let packed = self.read_packed(checkpoint, names, (prefix, name), shape)?;
        let Some(group) = packed.affine_group() else {
            return self.expanded(&packed, for_kernels).map(Some);
        };
        let (rows, bits) = (packed.rows, mlx_shape(&[packed.bits])[0]);
        let group_size = mlx_shape(&[group])[0];
        let kernel = for_kernels
            && kernel_rows(shape).is_some()
            && exec::keeps_packed(QuantMode::Affine, bits, group_size, self.dtype);
        let words = packed.cols / packed.per_word();
        let layout = PartLayout {
            interleaved: kernel,
            ..PartLayout::rows(words, Dtype::Uint32)
        };
        let stored = StoredRows {
            rows,
            nbytes: rows * words * size_of::<u32>(),
            together: 1,
        };
        let weight = self.in_chunks(stored, &[layout], |rows, out, _| {
            let [out] = out else { return Err(no_parts()) };
            packed.write_words(rows.start, cast_mut(out));
            Ok(())
        })?;
        let [scales, biases] = packed.factors(group).map_err(engine("weights"))?;
        if kernel {
            let [words] = all_of(weight)?;
            let format = (mlx_shape(&[rows])[0], bits, group_size);
            let factors = [exec::factors(scales), exec::factors(biases)];
            let [scales, biases] = factors.map(|f| f.map_err(engine("weights")));
            return Weight::from_interleaved(words, [scales?, biases?], format)
                .map(|rows| Some(packed_weight(rows, shape)))
                .map_err(engine("weights"));
        }
        let typed = |factors: Array| factors.astype(self.dtype).map_err(engine("weights"));
        Ok(Some(Weight::Quantized(Quantized {
            weight: one(weight, &[rows, words])?,
            scales: typed(scales)?,
            biases: Some(typed(biases)?),
            group_size,
            bits,
            mode: QuantMode::Affine,
        })))
    }

    /// Dequantizes a matrix whose groups MLX does not support. Uses 16 bits if the kernels can
    /// multiply by them.
    fn expanded(&self, packed: &Packed, for_kernels: bool) -> Result<Weight> {
        let (rows, cols) = (packed.rows, packed.cols);
        let dtype = self.matrix_type(Dtype::Float16, &[rows, cols], for_kernels);
        let stored = StoredRows {
            rows,
            nbytes: rows * cols * dtype.size(),
            together: 1,
        };
        let layout = PartLayout::rows(cols, dtype);
        let parts = self.in_chunks(stored, &[layout], |rows, out, scratch| {
            let [out] = out else { return Err(no_parts()) };
            let values = sized(&mut scratch.values, rows.len() * cols);
            for (row, values) in rows.zip(values.chunks_exact_mut(cols.max(1))) {
                packed.write_row(row, values);
            }
            store(values, dtype, out);
            Ok(())
        })?;
        one(parts, &[rows, cols]).map(Weight::Dense)
    }

    /// Reads and checks the tensors of a packed matrix.
    fn read_packed(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        names: &TensorNames,
        (prefix, name): (&str, &str),
        shape: &[usize],
    ) -> Result<Packed> {
        let (packing, format) = (self.config.packing, self.config.quantization.as_ref());
        let bits = match (packing, format) {
            (Packing::Gptq { .. } | Packing::Awq, Some(format)) => format.bits.unsigned_abs(),
            _ => {
                return Err(wrong_tensor(
                    &self.path,
                    name,
                    "is there, but quantization_config in config.json names neither gptq nor awq",
                ));
            }
        } as usize;
        if self.member.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "weights packed by GPTQ or AWQ cannot be divided among processes; use a checkpoint \
                 converted for MLX, or a pipeline",
            ));
        }
        let per_word = 32 / bits;
        let [rows, cols] = *shape else {
            return Err(self.wrong_shape(name, &[], shape));
        };
        if !rows.is_multiple_of(per_word) || !cols.is_multiple_of(per_word) {
            let why = format!("has {rows} rows and {cols} columns; both must divide by {per_word}");
            return Err(wrong_tensor(&self.path, name, why));
        }
        let words_shape = match packing {
            Packing::Awq => [cols, rows / per_word],
            _ => [cols / per_word, rows],
        };
        let info = |part: &str| {
            let usual = format!("{prefix}.{part}");
            self.stored_tensor(checkpoint, names, &usual, &[])
        };
        let words = self.words_of(checkpoint, info("qweight")?, &words_shape)?;
        let (scales_name, scales) = info("scales")?;
        let groups = match *scales.shape {
            [groups, of] if of == rows && groups > 0 && cols.is_multiple_of(groups) => groups,
            _ => return Err(self.wrong_shape(scales_name, &scales.shape, &[cols, rows])),
        };
        let zeros = match names.stored(&format!("{prefix}.qzeros")) {
            Some(_) => {
                Some(self.words_of(checkpoint, info("qzeros")?, &[groups, rows / per_word])?)
            }
            None => None,
        };
        let part = self.part(scales_name, &[groups, rows])?;
        let scales = self
            .dense_of(checkpoint, scales_name, scales, &part, Dtype::Float32)?
            .to_f32_vec()
            .map_err(engine("weights"))?;
        let mut packed = Packed {
            packing,
            bits,
            rows,
            cols,
            words,
            zeros,
            scales,
            group_of: None,
            groups,
        };
        if names.stored(&format!("{prefix}.g_idx")).is_some() {
            let (name, info) = info("g_idx")?;
            let group_of = self.words_of(checkpoint, (name, info), &[cols])?;
            if let Some(wrong) = group_of.iter().find(|g| **g as usize >= groups) {
                let why = format!("has group {wrong}; there are {groups}");
                return Err(wrong_tensor(checkpoint.file_of(info), name, why));
            }
            let neighbors = |(col, group): (usize, &u32)| *group as usize == packed.group(col);
            if !group_of.iter().enumerate().all(neighbors) {
                packed.group_of = Some(group_of);
            }
        }
        Ok(packed)
    }

    /// Reads a tensor of 32-bit integers.
    fn words_of(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        (name, info): (&str, &TensorInfo),
        shape: &[usize],
    ) -> Result<Vec<u32>> {
        if info.shape != shape {
            return Err(self.wrong_shape(name, &info.shape, shape));
        }
        if !matches!(info.dtype, FileDtype::I32 | FileDtype::U32) {
            let why = format!("is {:?}; it must be I32", info.dtype);
            return Err(wrong_tensor(checkpoint.file_of(info), name, why));
        }
        Ok(checkpoint.read(info)?)
    }
}
