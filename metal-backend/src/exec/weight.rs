//! A weight as it is stored in memory: plain, quantized, or in the order of our own kernels. The
//! loader asks here which layout a tensor gets.

use inference_formats::footprint::WeightStorage;
use inference_formats::gguf_quant::NibbleCodes;
use mlx_rs_core::cpu::{self, Prompts};
use mlx_rs_core::{Array, Dtype, QuantMode, Quantized, Result};

/// A weight matrix `[out, in]` as it is stored in memory.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Plain numbers.
    Dense(Array),
    /// Packed integers with scales per group.
    Quantized(Quantized),
    /// The same in the order of our own kernels.
    Interleaved(cpu::QuantizedMatrix),
    /// A stack `[experts, out, in]` in that order, an expert's rows after another's.
    Experts {
        /// `[experts * out, in]`, where `out` is a multiple of 8.
        rows: cpu::QuantizedMatrix,
        /// How many.
        experts: i32,
    },
}

impl Weight {
    /// Bytes in memory.
    pub fn nbytes(&self) -> usize {
        match self {
            Weight::Dense(w) => w.nbytes(),
            Weight::Quantized(q) => q.nbytes(),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } => m.nbytes(),
        }
    }

    /// The same in the layout of the place that computes: in the order of our own kernels on a CPU,
    /// where they are on and have its format. What it came from can go then.
    ///
    /// Only affine weights change: their scales have the type that the model computes in. Scales of
    /// the other modes are bytes and do not show it, so the loader decides about those.
    ///
    /// # Errors
    /// When its parts do not fit each other, or memory runs out.
    pub fn in_layout(self, on_cpu: bool) -> Result<Self> {
        Ok(match self {
            Weight::Quantized(q) if on_cpu && q.mode == QuantMode::Affine => {
                match cpu::QuantizedMatrix::new(&q)? {
                    Some(matrix) => Weight::Interleaved(matrix),
                    None => Weight::Quantized(q),
                }
            }
            other => other,
        })
    }

    /// The same, which prompts meet as `prompts` says if it is in the layout of the kernels.
    #[must_use]
    pub fn with_prompts(self, prompts: Prompts) -> Self {
        match self {
            Weight::Interleaved(m) => Weight::Interleaved(m.with_prompts(prompts)),
            Weight::Experts { rows, experts } => Weight::Experts {
                rows: rows.with_prompts(prompts),
                experts,
            },
            other => other,
        }
    }

    /// The integers, scales and biases as MLX's own operations read them. `None` for plain numbers,
    /// and for a format that only the kernels have.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn quantized(&self) -> Result<Option<Quantized>> {
        match self {
            Weight::Dense(_) => Ok(None),
            Weight::Quantized(q) => Ok(Some(q.clone())),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } if !m.has_mlx_form() => {
                Ok(None)
            }
            Weight::Interleaved(m) => m.to_quantized().map(Some),
            Weight::Experts { rows, experts } => {
                let q = rows.to_quantized()?;
                Ok(Some(Quantized {
                    weight: stacked(&q.weight, *experts)?,
                    scales: stacked(&q.scales, *experts)?,
                    biases: q.biases.map(|b| stacked(&b, *experts)).transpose()?,
                    ..q
                }))
            }
        }
    }

    /// Bits and group size; `None` for plain numbers.
    pub fn format(&self) -> Option<(i32, i32)> {
        match self {
            Weight::Dense(_) => None,
            Weight::Quantized(q) => Some((q.bits, q.group_size)),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } => {
                Some((m.bits(), m.group_size()))
            }
        }
    }

    /// `[out, in]`, or `[experts, out, in]`.
    pub fn shape(&self) -> Vec<i32> {
        match self {
            Weight::Dense(w) => w.shape().to_vec(),
            Weight::Quantized(q) => {
                let mut shape = q.scales.shape().to_vec();
                if let Some(last) = shape.last_mut() {
                    *last = last.saturating_mul(q.group_size);
                }
                shape
            }
            Weight::Interleaved(m) => m.shape().to_vec(),
            Weight::Experts { rows, experts } => {
                let [all, inputs] = rows.shape();
                vec![*experts, all.checked_div(*experts).unwrap_or(0), inputs]
            }
        }
    }

    /// As plain numbers of `dtype`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn dense(&self, dtype: Dtype) -> Result<Array> {
        match self {
            Weight::Dense(w) => w.astype(dtype),
            Weight::Quantized(q) => q.dequantize(dtype),
            Weight::Interleaved(m) if !m.has_mlx_form() => {
                all_rows(m, 0, m.shape()[0])?.astype(dtype)
            }
            Weight::Interleaved(m) => m.to_quantized()?.dequantize(dtype),
            Weight::Experts { rows, experts } => {
                stacked(&Weight::Interleaved(rows.clone()).dense(dtype)?, *experts)
            }
        }
    }

    /// Some of its rows. They share its memory, unless it is interleaved and they do not begin and
    /// end at multiples of [`INTERLEAVED_ROWS`].
    ///
    /// # Errors
    /// When there are not so many.
    pub fn rows(&self, from: i32, to: i32) -> Result<Self> {
        let cut = |a: &Array| a.slice_axis(-2, from, to);
        Ok(match self {
            Weight::Dense(w) => Weight::Dense(cut(w)?),
            Weight::Quantized(q) => Weight::Quantized(Quantized {
                weight: cut(&q.weight)?,
                scales: cut(&q.scales)?,
                biases: q.biases.as_ref().map(cut).transpose()?,
                ..*q
            }),
            Weight::Interleaved(m) => match m.rows(from, to)? {
                Some(rows) => Weight::Interleaved(rows),
                None if !m.has_mlx_form() => Weight::Dense(all_rows(m, from, to)?),
                None => return Weight::Quantized(m.to_quantized()?).rows(from, to),
            },
            Weight::Experts { .. } => match self.quantized()? {
                Some(q) => return Weight::Quantized(q).rows(from, to),
                None => return Weight::Dense(self.dense(Dtype::Float32)?).rows(from, to),
            },
        })
    }

    /// The rows `ids`, in this order, in memory of their own.
    ///
    /// # Errors
    /// When there is no such row.
    pub fn picked(&self, ids: &[u32]) -> Result<Self> {
        let pick = |a: &Array| {
            let rows = a.take_ids(ids, -2)?.contiguous()?;
            rows.eval().map(|()| rows)
        };
        if let Weight::Dense(w) = self {
            return pick(w).map(Weight::Dense);
        }
        Ok(match self.quantized()? {
            Some(q) => Weight::Quantized(Quantized {
                weight: pick(&q.weight)?,
                scales: pick(&q.scales)?,
                biases: q.biases.as_ref().map(pick).transpose()?,
                ..q
            }),
            None => Weight::Dense(pick(&self.dense(Dtype::Float32)?)?),
        })
    }

    /// From packed integers and their [`factors`] (scales, biases), all in the order of the
    /// kernels; `format` is the number of rows, bits and group size.
    ///
    /// # Errors
    /// When the parts do not fit each other.
    pub fn from_interleaved(
        words: Array,
        factors: [Array; 2],
        format: (i32, i32, i32),
    ) -> Result<Self> {
        cpu::QuantizedMatrix::from_interleaved(words, factors, format).map(Self::Interleaved)
    }

    /// From the integers, scales and scales of scales of Q6_K for so many rows, in the order of the
    /// kernels; `None` where they do not have it.
    ///
    /// # Errors
    /// When the parts do not fit each other.
    pub fn from_super_scaled(parts: [Array; 3], rows: i32) -> Result<Option<Self>> {
        let matrix = cpu::QuantizedMatrix::from_super_scaled(parts, rows)?;
        Ok(matrix.map(Self::Interleaved))
    }

    /// From the codes, the scales and biases as bytes, and their factors of Q4_K or Q5_K for so many
    /// rows, in the order of the kernels; `None` where they do not have it.
    ///
    /// # Errors
    /// When the parts do not fit each other.
    pub fn from_super_affine(parts: [Array; 3], rows: i32, bits: i32) -> Result<Option<Self>> {
        let matrix = cpu::QuantizedMatrix::from_super_affine(parts, rows, bits)?;
        Ok(matrix.map(Self::Interleaved))
    }

    /// From codes and float16 scales without biases (Q4_0, Q5_0, Q8_0) for so many rows, in the
    /// order of the kernels; `None` where they do not have it.
    ///
    /// # Errors
    /// When the parts do not fit each other.
    pub fn from_symmetric(parts: [Array; 2], rows: i32, bits: i32) -> Result<Option<Self>> {
        let matrix = cpu::QuantizedMatrix::from_symmetric(parts, rows, bits)?;
        Ok(matrix.map(Self::Interleaved))
    }

    /// From codes of four bits, scales and, where those are bytes, scales of scales for so many
    /// rows, in the order of the kernels; `format` is what codes stand for, and the group size.
    /// `None` where the kernels do not have it.
    ///
    /// # Errors
    /// When the parts do not fit each other.
    pub fn from_table_codes(
        parts: Vec<Array>,
        rows: i32,
        (codes, group): (NibbleCodes, i32),
    ) -> Result<Option<Self>> {
        let Some(table) = table_of(codes) else {
            return Ok(None);
        };
        let matrix = cpu::QuantizedMatrix::from_table_codes(parts, rows, (table, group))?;
        Ok(matrix.map(Self::Interleaved))
    }

    /// From packed codes and the bytes of their scales in MXFP4, MXFP8 or NVFP4 for so many rows,
    /// in the order of the kernels; `None` where they do not have the mode.
    ///
    /// # Errors
    /// When the parts do not fit each other.
    pub fn from_float_codes(parts: [Array; 2], rows: i32, mode: QuantMode) -> Result<Option<Self>> {
        let matrix = cpu::QuantizedMatrix::from_float_codes(parts, rows, mode)?;
        Ok(matrix.map(Self::Interleaved))
    }

    /// Interleaved rows as a stack of so many experts, whose rows are multiples of
    /// [`INTERLEAVED_ROWS`]. Other weights stay as they are.
    #[must_use]
    pub fn into_experts(self, experts: i32) -> Self {
        match self {
            Weight::Interleaved(rows) => Weight::Experts { rows, experts },
            other => other,
        }
    }

    /// Matrices of one format for the kernels as a stack. `None` when they are not all in the order
    /// of the kernels, not of one format, or do not end with [`INTERLEAVED_ROWS`].
    ///
    /// # Errors
    /// When memory runs out.
    pub fn joined(parts: &[Self]) -> Result<Option<Self>> {
        let packed: Option<Vec<_>> = parts
            .iter()
            .map(|part| match part {
                Weight::Interleaved(m) => Some(m),
                _ => None,
            })
            .collect();
        let (Some(packed), Ok(experts)) = (packed, i32::try_from(parts.len())) else {
            return Ok(None);
        };
        let rows = cpu::QuantizedMatrix::joined(&packed)?;
        Ok(rows.map(|rows| Weight::Experts { rows, experts }))
    }

    /// The rows of these ids as numbers of `dtype`, `[..] -> [.., in]`. An id beyond the matrix
    /// takes the last row.
    ///
    /// # Errors
    /// When the ids are not integers.
    pub fn take_rows(&self, ids: &Array, dtype: Dtype) -> Result<Array> {
        match self {
            Weight::Dense(w) => w.take_clamped(ids, 0)?.astype(dtype),
            Weight::Quantized(q) => q.take_rows(ids)?.dequantize(dtype),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } => {
                m.take_rows(ids)?.astype(dtype)
            }
        }
    }

    /// The arrays it consists of, for evaluation at load.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Weight::Dense(w) => vec![w],
            Weight::Quantized(q) => [Some(&q.weight), Some(&q.scales), q.biases.as_ref()]
                .into_iter()
                .flatten()
                .collect(),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } => m.arrays().iter().collect(),
        }
    }
}

/// Rows that are interleaved in memory for the kernels.
pub const INTERLEAVED_ROWS: usize = cpu::QuantizedMatrix::INTERLEAVED_ROWS;

/// Whether a matrix of `stored` numbers stays so in memory for a CPU that computes in `compute`.
pub fn keeps_half(stored: Dtype, compute: Dtype) -> bool {
    compute == Dtype::Float32 && cpu::DenseMatrix::supports(stored)
}

/// Whether the kernels multiply with packed matrices of this format, whose factors are `compute`.
pub fn keeps_packed(mode: QuantMode, bits: i32, group_size: i32, compute: Dtype) -> bool {
    cpu::QuantizedMatrix::supports(mode, bits, group_size, compute)
}

/// The kernels' table of these codes; floats have none.
fn table_of(codes: NibbleCodes) -> Option<cpu::Table> {
    Some(match codes {
        NibbleCodes::Iq4 => cpu::Table::Iq4,
        NibbleCodes::Iq3Xxs => cpu::Table::Iq3Xxs,
        NibbleCodes::Iq3S => cpu::Table::Iq3S,
        NibbleCodes::Iq2 => cpu::Table::Iq2,
        NibbleCodes::Iq1 => cpu::Table::Iq1,
        NibbleCodes::Q3k => cpu::Table::Q3k,
        _ => return None,
    })
}

/// Whether a matrix in a type of GGUF that MLX lacks keeps its bits, or nearly, for a CPU that
/// computes in `compute`.
pub fn keeps_gguf_bits(compute: Dtype) -> bool {
    compute == Dtype::Float32 && cpu::enabled()
}

/// How weights are held in memory, for estimates: what the three functions above say. `on_cpu` is
/// for a processor that computes in `compute`.
pub fn storage(on_cpu: bool, compute: Dtype) -> WeightStorage {
    fn packed(mode: &str, bits: i32, group_size: i32) -> bool {
        QuantMode::from_name(mode)
            .is_some_and(|mode| keeps_packed(mode, bits, group_size, Dtype::Float32))
    }
    let kernels = on_cpu && compute == Dtype::Float32;
    WeightStorage {
        compute_bytes: compute.size() as u64,
        keeps_halves: kernels && keeps_half(Dtype::Bfloat16, compute),
        keeps_half_factors: if kernels { packed } else { |_, _, _| false },
        keeps_gguf_bits: kernels && keeps_gguf_bits(compute),
    }
}

/// Rows of numbers in the order of the kernels: [`INTERLEAVED_ROWS`] at a time, element by element.
///
/// # Errors
/// When memory runs out.
pub fn interleaved(rows: &Array) -> Result<Array> {
    cpu::QuantizedMatrix::interleaved(rows)
}

/// Scales or biases `[out, groups]` in the type and order of the kernels.
///
/// # Errors
/// When memory runs out.
pub fn factors(rows: Array) -> Result<Array> {
    cpu::QuantizedMatrix::factors(rows)
}

/// Rows `[experts * out, width]` as `[experts, out, width]`.
fn stacked(rows: &Array, experts: i32) -> Result<Array> {
    let width = rows.dim(-1)?;
    rows.reshape(&[experts, -1, width])
}

/// Rows `from..to` as plain numbers.
fn all_rows(matrix: &cpu::QuantizedMatrix, from: i32, to: i32) -> Result<Array> {
    let ids: Vec<i32> = (from..to).collect();
    let count = to.saturating_sub(from).max(0);
    matrix.take_rows(&Array::from_slice(&ids, &[count])?)
}
