//! A weight in memory: dense, quantized, or in our kernels' layout. This module decides the layout
//! for the loader.

use std::ops::Range;

use inference_formats::footprint::WeightStorage;
use inference_formats::quantization::{GROUP, Layout, NibbleCodes};
use mlx_rs_core::cpu::{self, PrefillInputs};
use mlx_rs_core::io::MappedFile;
use mlx_rs_core::{Array, Dtype, QuantMode, Quantized, Result};

/// A weight matrix `[out, in]` in memory.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Unquantized.
    Dense(Array),
    /// Unquantized, in a mapped file. Only our kernels multiply by it.
    Mapped(cpu::DenseMatrix),
    /// Packed integers with scales per quantization group.
    Quantized(Quantized),
    /// Quantized, in the layout of our kernels.
    Interleaved(cpu::QuantizedMatrix),
    /// A stack `[experts, out, in]` in the kernels' layout, expert by expert.
    Experts {
        /// `[experts * out, in]`, where `out` is a multiple of 8.
        rows: cpu::QuantizedMatrix,
        /// The number of experts.
        experts: i32,
    },
}

impl Weight {
    /// Bytes in memory.
    pub fn nbytes(&self) -> usize {
        match self {
            Weight::Dense(w) => w.nbytes(),
            Weight::Mapped(m) => {
                let [rows, cols] = m.shape().map(|n| n.unsigned_abs() as usize);
                rows * cols * m.dtype().size()
            }
            Weight::Quantized(q) => q.nbytes(),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } => m.nbytes(),
        }
    }

    /// Converts the weight to the best layout for the device. On a CPU, this is our kernels'
    /// layout, if the kernels are enabled and support the format. The original can then be dropped.
    ///
    /// Converts only affine weights: the type of their scales is the model's compute type. Scales
    /// of other modes are bytes, from which the compute type is unknown, so the loader decides the
    /// layout of these weights.
    ///
    /// # Errors
    /// If the parts of the weight do not match, or memory runs out.
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

    /// Sets the type to which prefill inputs are converted, for weights in the kernels' layout.
    #[must_use]
    pub fn with_prefill_inputs(self, prefill_inputs: PrefillInputs) -> Self {
        match self {
            Weight::Interleaved(m) => Weight::Interleaved(m.with_prefill_inputs(prefill_inputs)),
            Weight::Experts { rows, experts } => Weight::Experts {
                rows: rows.with_prefill_inputs(prefill_inputs),
                experts,
            },
            other => other,
        }
    }

    /// Returns the integers, scales and biases in the layout of MLX's operations. Returns `None`
    /// for dense weights, and for formats that only our kernels support.
    pub fn quantized(&self) -> Result<Option<Quantized>> {
        match self {
            Weight::Dense(_) | Weight::Mapped(_) => Ok(None),
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

    /// Returns bits and group size; `None` for dense weights.
    pub fn format(&self) -> Option<(i32, i32)> {
        match self {
            Weight::Dense(_) | Weight::Mapped(_) => None,
            Weight::Quantized(q) => Some((q.bits, q.group_size)),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } => {
                Some((m.bits(), m.group_size()))
            }
        }
    }

    /// Returns `[out, in]`, or `[experts, out, in]`.
    pub fn shape(&self) -> Vec<i32> {
        match self {
            Weight::Dense(w) => w.shape().to_vec(),
            Weight::Mapped(m) => m.shape().to_vec(),
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

    /// Returns the dequantized weight as `dtype`.
    pub fn dense(&self, dtype: Dtype) -> Result<Array> {
        match self {
            Weight::Dense(w) => w.astype(dtype),
            Weight::Mapped(m) => m.weight()?.astype(dtype),
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

    /// Returns the rows `from..to`. They share the weight's memory, except interleaved rows whose
    /// range is not aligned to [`INTERLEAVED_ROWS`].
    ///
    /// # Errors
    /// If the range exceeds the rows.
    pub fn rows(&self, from: i32, to: i32) -> Result<Self> {
        let cut = |a: &Array| a.slice_axis(-2, from, to);
        Ok(match self {
            Weight::Dense(w) => Weight::Dense(cut(w)?),
            Weight::Mapped(m) => Weight::Dense(cut(&m.weight()?)?),
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

    /// Copies the rows `ids`, in this order.
    ///
    /// # Errors
    /// If a row does not exist.
    pub fn picked(&self, ids: &[u32]) -> Result<Self> {
        let pick = |a: &Array| {
            let rows = a.take_ids(ids, -2)?.contiguous()?;
            rows.eval().map(|()| rows)
        };
        match self {
            Weight::Dense(w) => return pick(w).map(Weight::Dense),
            Weight::Mapped(m) => return pick(&m.weight()?).map(Weight::Dense),
            _ => {}
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

    /// Creates a weight from packed integers and their [`factors`] (scales, biases) in the kernels'
    /// layout. `format` contains the number of rows, the bits and the group size.
    pub fn from_interleaved(
        words: Array,
        factors: [Array; 2],
        format: (i32, i32, i32),
    ) -> Result<Self> {
        cpu::QuantizedMatrix::from_interleaved(words, factors, format).map(Self::Interleaved)
    }

    /// Creates a weight of `rows` rows from the arrays of a quantized matrix (codes, scales, ...),
    /// which `layout` describes. In each array, eight rows are interleaved. Returns `None` if the
    /// kernels do not support `layout`.
    ///
    /// # Errors
    /// If the parts do not match.
    pub fn from_layout(
        parts: impl Into<cpu::MatrixParts>,
        rows: i32,
        layout: Layout,
    ) -> Result<Option<Self>> {
        let parts = parts.into();
        use cpu::QuantizedMatrix as Matrix;
        let of_table = |parts: cpu::MatrixParts, codes: NibbleCodes, group: usize| {
            // The group size is 16 or 32, so the cast is exact.
            let table = table_of(codes).map(|table| (table, group as i32));
            table.map_or(Ok(None), |table| {
                Matrix::from_table_codes(parts, rows, table)
            })
        };
        let matrix = match layout {
            Layout::Floats | Layout::Affine { .. } => None,
            Layout::Symmetric { bits } => Matrix::from_symmetric(parts, rows, bits.cast_signed())?,
            Layout::SuperAffine { bits, .. } => {
                Matrix::from_super_affine(parts, rows, bits.cast_signed())?
            }
            Layout::SuperScaled => Matrix::from_super_scaled(parts, rows)?,
            Layout::Powers => Matrix::from_float_codes(parts, rows, QuantMode::Mxfp4)?,
            Layout::Table { codes } => of_table(parts, codes, GROUP)?,
            Layout::TableSuper { codes, group } => of_table(parts, codes, group)?,
            _ => None,
        };
        Ok(matrix.map(Self::Interleaved))
    }

    /// Creates a weight of `rows` rows in the kernels' layout from codes and byte scales in MXFP4,
    /// MXFP8 or NVFP4. Returns `None` if the kernels do not support the mode.
    pub fn from_float_codes(parts: [Array; 2], rows: i32, mode: QuantMode) -> Result<Option<Self>> {
        let matrix = cpu::QuantizedMatrix::from_float_codes(parts, rows, mode)?;
        Ok(matrix.map(Self::Interleaved))
    }

    /// Converts interleaved rows to a stack of `experts` experts. Each expert's number of rows must
    /// be a multiple of [`INTERLEAVED_ROWS`]. Does not change other weights.
    #[must_use]
    pub fn into_experts(self, experts: i32) -> Self {
        match self {
            Weight::Interleaved(rows) => Weight::Experts { rows, experts },
            other => other,
        }
    }

    /// Concatenates kernel matrices into a stack. Returns `None` if a matrix is not in the kernels'
    /// layout, if formats differ, or if a number of rows is not a multiple of [`INTERLEAVED_ROWS`].
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

    /// Returns the rows with these ids, dequantized as `dtype`: `[..] -> [.., in]`. An id beyond
    /// the matrix reads the last row.
    ///
    /// # Errors
    /// If the ids are not integers.
    pub fn take_rows(&self, ids: &Array, dtype: Dtype) -> Result<Array> {
        match self {
            Weight::Dense(w) => w.take_clamped(ids, 0)?.astype(dtype),
            Weight::Mapped(m) => m.take_rows(ids)?.astype(dtype),
            Weight::Quantized(q) => q.take_rows(ids)?.dequantize(dtype),
            Weight::Interleaved(m) | Weight::Experts { rows: m, .. } => {
                m.take_rows(ids)?.astype(dtype)
            }
        }
    }
}

/// The number of rows that the kernels' layout interleaves.
pub const INTERLEAVED_ROWS: usize = cpu::QuantizedMatrix::INTERLEAVED_ROWS;

/// Whether a matrix that is stored as `stored` keeps this type in memory, for a CPU that computes
/// in `compute`.
pub fn keeps_half(stored: Dtype, compute: Dtype) -> bool {
    compute == Dtype::Float32 && cpu::DenseMatrix::supports(stored)
}

/// Returns the matrix of this type and shape at these bytes of a file. Returns `None` if the
/// kernels cannot read it there.
///
/// # Errors
/// If the number of bytes does not match the shape, or the file was truncated.
pub fn mapped(
    file: &MappedFile,
    bytes: Range<usize>,
    dtype: Dtype,
    shape: [i32; 2],
) -> Result<Option<Weight>> {
    let matrix = cpu::DenseMatrix::mapped(file, bytes, dtype, shape)?;
    Ok(matrix.map(Weight::Mapped))
}

/// Whether the kernels support packed matrices of this format with scales of type `compute`.
pub fn keeps_packed(mode: QuantMode, bits: i32, group_size: i32, compute: Dtype) -> bool {
    cpu::QuantizedMatrix::supports(mode, bits, group_size, compute)
}

/// Returns the kernels' table for these codes; `None` for float codes.
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

/// Whether GGUF types that MLX does not support keep (almost) their stored bits in memory, for a
/// CPU that computes in `compute`.
pub fn keeps_gguf_bits(compute: Dtype) -> bool {
    compute == Dtype::Float32 && cpu::enabled()
}

/// Returns how weights are stored in memory, for estimates. Summarizes [`keeps_half`],
/// [`keeps_packed`] and [`keeps_gguf_bits`]. `on_cpu` says whether a CPU computes.
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

/// Interleaves groups of [`INTERLEAVED_ROWS`] rows for the kernels, element by element.
pub fn interleaved(rows: &Array) -> Result<Array> {
    cpu::QuantizedMatrix::interleaved(rows)
}

/// Converts scales or biases `[out, groups]` to the kernels' type and layout.
pub fn factors(rows: Array) -> Result<Array> {
    cpu::QuantizedMatrix::factors(rows)
}

/// Reshapes rows `[experts * out, width]` to `[experts, out, width]`.
fn stacked(rows: &Array, experts: i32) -> Result<Array> {
    let width = rows.dim(-1)?;
    rows.reshape(&[experts, -1, width])
}

/// Returns the dequantized rows `from..to`.
fn all_rows(matrix: &cpu::QuantizedMatrix, from: i32, to: i32) -> Result<Array> {
    let ids: Vec<i32> = (from..to).collect();
    let count = to.saturating_sub(from).max(0);
    matrix.take_rows(&Array::from_slice(&ids, &[count])?)
}
