//! Rows of quantized matrices: slices, concatenation, and dequantized rows.

use mlx_cpu_kernels::{GatherRows, INTERLEAVED_ROWS, ScaleFormat, Size, dim};

use super::host_op::{self, OpKind};
use super::matrix_arrays::MatrixArrays;
use super::packing::lost;
use super::quantized::QuantizedMatrix;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::Result;

impl QuantizedMatrix {
    /// Rows `from..to` in the same memory. They must be whole row blocks: both bounds are multiples
    /// of 8, or `to` is the end of the matrix. `None` otherwise.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, QuantMode, Quantized, Stream, cpu::QuantizedMatrix};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[0.5f32; 20 * 32], &[20, 32])?;
    ///     let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
    ///     if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///         assert_eq!(matrix.rows(8, 20)?.map(|rows| rows.shape()), Some([12, 32]));
    ///         assert!(matrix.rows(0, 9)?.is_none());
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn rows(&self, from: i32, to: i32) -> Result<Option<Self>> {
        let (n, band) = (self.outputs(), INTERLEAVED_ROWS as i32);
        let aligned = from % band == 0 && (to % band == 0 || to == n);
        if !aligned || from < 0 || from >= to || to > n {
            return Ok(None);
        }
        let cut = |a: &Array| a.slice_axis(0, from / band, (to + band - 1) / band);
        let arrays: Vec<Array> = self.arrays()?.iter().map(cut).collect::<Result<_>>()?;
        Ok(Some(Self {
            stored: MatrixArrays::new(arrays)?,
            awaited: None,
            size: Size {
                n: (to - from).unsigned_abs() as usize,
                ..self.size
            },
            bits: self.bits,
            group: self.group,
            scales: self.scales,
            traced: self.traced,
            prefill_inputs: self.prefill_inputs,
        }))
    }

    /// Concatenates the rows of all parts in new memory. `None` if the parts differ in format or
    /// width, or a part does not end at a multiple of 8 rows.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let weight = ones(&[8, 64], Dtype::Float32)?;
    /// let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     let both = QuantizedMatrix::joined(&[&matrix, &matrix])?;
    ///     assert_eq!(both.map(|both| both.shape()), Some([16, 64]));
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn joined(parts: &[&Self]) -> Result<Option<Self>> {
        let Some(first) = parts.first() else {
            return Ok(None);
        };
        // If a part has float32 factors, float16 factors of other parts become float32.
        let scales = |m: &Self| match m.scales {
            ScaleFormat::F16 => ScaleFormat::F32,
            other => other,
        };
        let format = |m: &Self| (scales(m), m.bits, m.group, m.size.k);
        let fits =
            |m: &&Self| format(m) == format(first) && m.size.n.is_multiple_of(INTERLEAVED_ROWS);
        let rows = parts
            .iter()
            .try_fold(0i32, |n, m| n.checked_add(m.outputs()));
        let (true, Some(rows)) = (parts.iter().all(fits), rows) else {
            return Ok(None);
        };
        // If any part has float32 factors, all parts get float32 factors.
        let wide = parts.iter().find(|m| m.scales == ScaleFormat::F32);
        let scales = wide.unwrap_or(first).scales;
        let all = |i: usize| -> Result<Array> {
            let same_part = parts.iter().map(|m| match (m.arrays()?.get(i), scales) {
                (Some(a), ScaleFormat::F32) if i > 0 => a.astype(Dtype::Float32),
                (Some(a), _) => Ok(a.clone()),
                (None, _) => Err(lost()),
            });
            let same_part = same_part.collect::<Result<Vec<_>>>()?;
            let joined = crate::concatenate(&same_part.iter().collect::<Vec<_>>(), 0)?;
            crate::eval([&joined])?;
            Ok(joined)
        };
        let arrays: Vec<Array> = (0..first.arrays()?.len()).map(all).collect::<Result<_>>()?;
        Ok(Some(Self {
            stored: MatrixArrays::new(arrays)?,
            awaited: None,
            size: Size {
                n: dim(rows),
                ..first.size
            },
            bits: first.bits,
            group: first.group,
            scales,
            traced: first.traced,
            prefill_inputs: parts
                .iter()
                .map(|m| m.prefill_inputs)
                .max()
                .unwrap_or_default(),
        }))
    }

    /// The rows with these `ids`, dequantized: integers `[..]` to float32 `[.., k]`, on the CPU. An
    /// ID out of range selects the nearest row.
    ///
    /// # Errors
    /// [`Dtype`](crate::ErrorKind::Dtype) when the IDs are not integers; MLX's message when the
    /// current stream is not on the CPU.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, QuantMode, Quantized, Stream, cpu::QuantizedMatrix};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[0.5f32; 2 * 32], &[2, 32])?;
    ///     let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
    ///     if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///         let rows = matrix.take_rows(&Array::from_slice(&[1i32], &[1])?)?;
    ///         assert_eq!(rows.shape(), [1, 32]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn take_rows(&self, ids: &Array) -> Result<Array> {
        let op = "cpu::take_rows";
        // The operation itself handles IDs out of range.
        let ids = match ids.dtype() {
            Dtype::Int32 | Dtype::Uint32 => ids.clone(),
            _ => Array::clamp_indices(op, ids, self.outputs())?.astype(Dtype::Int32)?,
        };
        let work = GatherRows {
            count: ids.size(),
            signed: ids.dtype() == Dtype::Int32,
            size: self.size,
            bits: self.bits,
            groups: self.size.k / self.group,
            scales: self.scales,
            stored: self.stored_matrix()?,
        };
        // The number comes from the matrix's shape, so it fits `i32`.
        let shape = [ids.shape(), &[self.size.k as i32]].concat();
        let inputs: Vec<&Array> = match &work.stored {
            Some(_) => vec![&ids],
            None => std::iter::once(&ids).chain(self.inputs()?).collect(),
        };
        host_op::add(op, OpKind::Opaque, work, &inputs, &shape)
    }
}
