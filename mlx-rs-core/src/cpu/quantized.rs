//! Quantized matrices for the kernels: conversion from and to MLX's form. `packed_formats.rs` makes
//! formats other than affine mode, and `quantized_rows.rs` slices matrices and reads rows.
//! `mlx-cpu-kernels/src/layout/packed.rs` documents the layout, and `projection.rs` has the
//! products.

use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use mlx_cpu_kernels::{
    INTERLEAVED_ROWS, PrefillInputs, ScaleFormat, Size, StoredMatrix, symmetric_bias,
};

use super::deferred::Awaited;
use super::dense::size_of;
use super::enabled;
use super::matrix_arrays::MatrixArrays;
use super::packing::{float_format, lost, takes};
use crate::array::Array;
use crate::closure;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{Pad, QuantMode, Quantized};

/// A matrix in packed layout, eight rows interleaved, word by word: quantized in affine mode to 2,
/// 3, 4, 5, 6 or 8 bits with float32 scales, or in MXFP4, MXFP8 or NVFP4.
/// ```
/// use mlx_rs_core::{Array, Device, QuantMode, Quantized, Stream, cpu::QuantizedMatrix};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let weight = Array::from_slice(&[0.5f32; 2 * 32], &[2, 32])?;
///     let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
///     // `None` where `MLX_CPU_KERNELS` is `off`.
///     if let Some(matrix) = QuantizedMatrix::new(&packed)? {
///         let y = matrix.product(&Array::from_slice(&[1.0f32; 32], &[1, 32])?)?;
///         assert_eq!(y.shape(), [1, 2]);
///         assert!((y.to_vec::<f32>()?[1] - 16.0).abs() < 1e-3);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct QuantizedMatrix {
    /// Read it by [`Self::ready`].
    pub(super) stored: Arc<MatrixArrays>,
    /// Set if the arrays may lack their values.
    pub(super) awaited: Option<Awaited>,
    pub(super) size: Size,
    pub(super) bits: u32,
    pub(super) group: usize,
    /// The format of scales and biases. It is float16 if that is exact, as for GGUF's simple types,
    /// which reduces the bytes per token by a fifth.
    pub(super) scales: ScaleFormat,
    /// Whether the matrix was made in a traced function, where its arrays may be differentiated.
    pub(super) traced: bool,
    /// The type of prefill inputs.
    pub(super) prefill_inputs: PrefillInputs,
}

impl QuantizedMatrix {
    /// Sets the type of inputs with 16 or more rows. Without this call the environment decides; see
    /// [`PrefillInputs::from_environment`].
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::{PrefillInputs, QuantizedMatrix}, ones};
    /// let weight = ones(&[8, 64], Dtype::Float32)?;
    /// let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     let matrix = matrix.with_prefill_inputs(PrefillInputs::Int8);
    ///     assert_eq!(matrix.prefill_inputs(), PrefillInputs::Int8);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_prefill_inputs(mut self, prefill_inputs: PrefillInputs) -> Self {
        self.prefill_inputs = prefill_inputs;
        self
    }

    /// The type of prefill inputs; see [`Self::with_prefill_inputs`].
    ///
    /// ```
    /// use mlx_rs_core::cpu::{PrefillInputs, QuantizedMatrix};
    /// let exact = |m: &QuantizedMatrix| m.prefill_inputs() == PrefillInputs::Float32;
    /// ```
    pub fn prefill_inputs(&self) -> PrefillInputs {
        self.prefill_inputs
    }

    /// The number of interleaved rows.
    pub const INTERLEAVED_ROWS: usize = INTERLEAVED_ROWS;

    /// Whether the kernels are enabled and support this mode, width and group size. `scales` is the
    /// model's compute type, which in affine mode is also the type of scales and biases.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, cpu::QuantizedMatrix};
    /// assert!(!QuantizedMatrix::supports(QuantMode::Affine, 7, 32, Dtype::Float32));
    /// let mxfp4 = QuantizedMatrix::supports(QuantMode::Mxfp4, 4, 32, Dtype::Float32);
    /// assert_eq!(mxfp4, mlx_rs_core::cpu::enabled());
    /// ```
    #[must_use]
    pub fn supports(mode: QuantMode, bits: i32, group_size: i32, scales: Dtype) -> bool {
        let known = match mode {
            QuantMode::Affine => takes(ScaleFormat::F32, bits, group_size),
            QuantMode::Mxfp4 | QuantMode::Mxfp8 | QuantMode::Nvfp4 => {
                float_format(mode).is_some_and(|known| known == (bits, group_size))
            }
        };
        enabled() && known && scales == Dtype::Float32
    }

    /// The matrix for the kernels, in separate memory. `None` if the kernels are disabled or lack
    /// the format.
    ///
    /// # Errors
    /// When the parts of the matrix do not match, or memory runs out.
    pub fn new(matrix: &Quantized) -> Result<Option<Self>> {
        matrix.validate("cpu::QuantizedMatrix")?;
        let Quantized {
            mode,
            bits,
            group_size,
            ..
        } = *matrix;
        if mode != QuantMode::Affine {
            let [n, _] = *matrix.weight.shape() else {
                return Ok(None);
            };
            if !Self::supports(mode, bits, group_size, Dtype::Float32) || n == 0 {
                return Ok(None);
            }
            let parts = [
                Self::interleaved(&matrix.weight)?,
                Self::interleaved(&matrix.scales)?,
            ];
            return Self::from_float_codes(parts, n, mode);
        }
        let (Some(biases), [n, _]) = (&matrix.biases, matrix.weight.shape()) else {
            return Ok(None);
        };
        if !Self::supports(mode, bits, group_size, matrix.scales.dtype()) || *n == 0 {
            return Ok(None);
        }
        let words = Self::interleaved(&matrix.weight)?;
        let factors = [
            Self::factors(matrix.scales.clone())?,
            Self::factors(biases.clone())?,
        ];
        Self::from_interleaved(words, factors, (*n, bits, group_size)).map(Some)
    }

    /// The scales or biases of `rows`, float32 `[n, groups]`, [interleaved](Self::interleaved).
    /// They become float16 if that is exact. `rows` is freed as soon as possible.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `rows` is not float32 of two axes; when memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Dtype, cpu::QuantizedMatrix};
    /// let exact = Array::from_slice(&[0.5f32, 3.0], &[2, 1])?;
    /// assert_eq!(QuantizedMatrix::factors(exact)?.dtype(), Dtype::Float16);
    /// let others = Array::from_slice(&[0.1f32, 3.0], &[2, 1])?;
    /// assert_eq!(QuantizedMatrix::factors(others)?.dtype(), Dtype::Float32);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn factors(rows: Array) -> Result<Array> {
        if rows.dtype() != Dtype::Float32 {
            let message = format!("scales and biases must be float32, not {}", rows.dtype());
            let error = Error::new(ErrorKind::Shape, "cpu::QuantizedMatrix", message);
            return Err(error.with_inputs(&[&rows]));
        }
        let exact = fit_in_f16(&rows.data::<f32>()?);
        let rows = if exact {
            let half = rows.astype(Dtype::Float16)?;
            crate::eval([&half])?;
            half
        } else {
            rows
        };
        let all = Self::interleaved(&rows)?;
        crate::eval([&all])?;
        Ok(all)
    }

    /// Makes a matrix of `n` rows. `words` has its codes in the order of [`Self::interleaved`];
    /// scales and biases are in the order of [`Self::factors`].
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the arrays do not match, or the kernels lack their format; when
    /// memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let q = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// let words = QuantizedMatrix::interleaved(&q.weight)?;
    /// if let (Some(biases), true) = (q.biases, mlx_rs_core::cpu::enabled()) {
    ///     let factors = [QuantizedMatrix::factors(q.scales)?, QuantizedMatrix::factors(biases)?];
    ///     let matrix = QuantizedMatrix::from_interleaved(words, factors, (9, 4, 32))?;
    ///     assert_eq!(matrix.shape(), [9, 64]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn from_interleaved(
        words: Array,
        [scales, biases]: [Array; 2],
        (n, bits, group_size): (i32, i32, i32),
    ) -> Result<Self> {
        let groups = scales.shape().get(1).copied().unwrap_or(0);
        let k = groups.checked_mul(group_size).unwrap_or(0);
        let fits = |size: Size| {
            let (bands, band) = (
                size.n.div_ceil(INTERLEAVED_ROWS) as i32,
                INTERLEAVED_ROWS as i32,
            ); // below `n`
            let factor = |a: &Array| {
                a.shape() == [bands, groups, band]
                    && matches!(a.dtype(), Dtype::Float16 | Dtype::Float32)
            };
            words.dtype() == Dtype::Uint32
                && words.shape() == [bands, k / 32 * bits, band]
                && factor(&scales)
                && factor(&biases)
        };
        let known = Self::supports(QuantMode::Affine, bits, group_size, Dtype::Float32);
        let Some(size) = size_of(&[n, k]).filter(|size| known && fits(*size)) else {
            let message = format!("these are no parts of a matrix of {n} rows, {bits} bits");
            let error = Error::new(ErrorKind::Shape, "cpu::QuantizedMatrix", message);
            return Err(error.with_inputs(&[&words, &scales, &biases]));
        };
        // Scales and biases must have the same type.
        let half = scales.dtype() == Dtype::Float16 && biases.dtype() == Dtype::Float16;
        let dtype = if half { Dtype::Float16 } else { Dtype::Float32 };
        let (scales, biases) = (scales.astype(dtype)?, biases.astype(dtype)?);
        crate::eval([&words, &scales, &biases])?;
        Ok(Self {
            stored: MatrixArrays::new(vec![words, scales, biases])?,
            awaited: None,
            size,
            bits: bits.unsigned_abs(),
            group: group_size.unsigned_abs() as usize,
            scales: if half {
                ScaleFormat::F16
            } else {
                ScaleFormat::F32
            },
            traced: closure::inside(),
            prefill_inputs: PrefillInputs::from_environment().unwrap_or_default(),
        })
    }

    /// The mode of codes and scales. It is valid only if [`Self::has_mlx_form`].
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let packed = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// // `None` where `MLX_CPU_KERNELS` is `off`.
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     assert_eq!(matrix.mode(), QuantMode::Affine);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn mode(&self) -> QuantMode {
        match (self.scales, self.bits) {
            (ScaleFormat::E8m0, 4) => QuantMode::Mxfp4,
            (ScaleFormat::E8m0, _) => QuantMode::Mxfp8,
            (ScaleFormat::E4m3, _) => QuantMode::Nvfp4,
            _ => QuantMode::Affine,
        }
    }

    /// Rows `[n, width]` in packed layout: `[row blocks, width, 8]`, with eight rows interleaved.
    /// Missing rows of the last block are zero.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `rows` does not have two axes; when memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, cpu::QuantizedMatrix, ones};
    /// let rows = ones(&[9, 64], Dtype::Float32)?;
    /// assert_eq!(QuantizedMatrix::interleaved(&rows)?.shape(), [2, 64, 8]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn interleaved(rows: &Array) -> Result<Array> {
        let [n, width] = *rows.shape() else {
            let error = Error::new(
                ErrorKind::Shape,
                "cpu::QuantizedMatrix",
                "these are no rows",
            );
            return Err(error.with_inputs(&[rows]));
        };
        let band = INTERLEAVED_ROWS as i32;
        let bands = n / band + i32::from(n % band != 0);
        let missing = (band - n % band) % band;
        let full = match missing {
            0 => rows.clone(),
            _ => rows.pad(&[0], &[0], &[missing], Pad::Zero)?,
        };
        full.reshape(&[bands, band, width])?
            .swap_axes(1, 2)?
            .contiguous()
    }

    /// The matrix in the form of MLX's own operations, with float32 scales. Once computed, it is in
    /// separate memory.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] unless [`Self::has_mlx_form`]; when memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Dtype, QuantMode, Quantized, Stream, cpu::QuantizedMatrix};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[0.5f32; 3 * 32], &[3, 32])?;
    ///     let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
    ///     if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///         assert!(matrix.to_quantized()?.weight.array_equal(&packed.weight)?);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn to_quantized(&self) -> Result<Quantized> {
        if !self.has_mlx_form() {
            let message = "MLX has no format for super-scales, codes of a table, or groups of 16";
            return Err(Error::new(
                ErrorKind::Value,
                "cpu::QuantizedMatrix",
                message,
            ));
        }
        let rows = |a: &Array| -> Result<Array> {
            let [bands, width, band] = *a.shape() else {
                return Err(lost());
            };
            a.swap_axes(1, 2)?
                .reshape(&[bands * band, width])?
                .slice_axis(0, 0, self.outputs())
        };
        let arrays = self.arrays()?;
        if let ([words, scales], ScaleFormat::Symmetric) = (arrays, self.scales) {
            let scales = rows(scales)?.astype(Dtype::Float32)?;
            let zero = Array::scalar(symmetric_bias(self.bits))?;
            return Ok(Quantized {
                weight: rows(words)?,
                biases: Some(scales.multiply(&zero)?),
                scales,
                group_size: self.group_size(),
                bits: self.bits(),
                mode: QuantMode::Affine,
            });
        }
        if let ([words, bytes], mode) = (arrays, self.mode()) {
            return Ok(Quantized {
                weight: rows(words)?,
                scales: rows(bytes)?,
                biases: None,
                group_size: self.group_size(),
                bits: self.bits(),
                mode,
            });
        }
        let [words, scales, biases] = arrays else {
            return Err(lost());
        };
        let [scales, biases] = match self.scales {
            ScaleFormat::SuperAffine => Self::super_affine_factors(scales, biases)?,
            _ => [scales.clone(), biases.clone()],
        };
        Ok(Quantized {
            weight: rows(words)?,
            scales: rows(&scales)?.astype(Dtype::Float32)?,
            biases: Some(rows(&biases)?.astype(Dtype::Float32)?),
            group_size: self.group_size(),
            bits: self.bits(),
            mode: QuantMode::Affine,
        })
    }

    /// Whether MLX's own operations support the format. They lack the formats of
    /// [`Self::from_super_scaled`] and [`Self::from_table_codes`].
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let packed = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// // `None` where `MLX_CPU_KERNELS` is `off`.
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     assert!(matrix.has_mlx_form());
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn has_mlx_form(&self) -> bool {
        match self.scales {
            ScaleFormat::Super | ScaleFormat::Table(_) | ScaleFormat::TableSuper(_) => false,
            // MLX's affine mode has no groups of 16.
            ScaleFormat::SuperAffine => self.group >= 32,
            _ => true,
        }
    }

    /// The group size: 32, 64 or 128; 16 in some GGUF formats and in NVFP4.
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let packed = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// // `None` where `MLX_CPU_KERNELS` is `off`.
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     assert_eq!(matrix.group_size(), 32);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn group_size(&self) -> i32 {
        self.group as i32
    }

    /// The number of bits of a code: 2, 3, 4, 5, 6 or 8.
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let packed = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// // `None` where `MLX_CPU_KERNELS` is `off`.
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     assert_eq!(matrix.bits(), 4);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn bits(&self) -> i32 {
        self.bits as i32
    }

    /// The shape, `[n, k]`.
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let packed = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// // `None` where `MLX_CPU_KERNELS` is `off`.
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     assert_eq!(matrix.shape(), [9, 64]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn shape(&self) -> [i32; 2] {
        // Both sizes come from the matrix's shape, so they fit `i32`.
        [self.size.n as i32, self.size.k as i32]
    }

    /// The arrays of the matrix: packed codes, scales, and biases if there are any. Waits for the
    /// values of a matrix that a [`Packer`](super::Packer) makes.
    ///
    /// # Errors
    /// When packing the values failed.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let packed = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// // `None` where `MLX_CPU_KERNELS` is `off`.
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     assert_eq!(matrix.arrays()?[0].shape(), [2, 8, 8]); // two times eight rows of eight words
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn arrays(&self) -> Result<&[Array]> {
        Ok(&self.ready()?.arrays)
    }

    /// The stored arrays with their values.
    fn ready(&self) -> Result<&Arc<MatrixArrays>> {
        if let Some(awaited) = &self.awaited {
            awaited.wait()?;
        }
        Ok(&self.stored)
    }

    /// The three arrays that operations read. If there are no biases, the scales are passed in
    /// their place.
    pub(super) fn inputs(&self) -> Result<Vec<&Array>> {
        let arrays = self.arrays()?;
        let part = |i| arrays.get(i).or(arrays.last());
        Ok((0..3).filter_map(part).collect())
    }

    /// The matrix for an operation without gradients, which stores the matrix instead of reading it
    /// from an input. Each input costs time in MLX's evaluation. `None` if the matrix must stay an
    /// input, so that a gradient with respect to it is refused.
    ///
    /// # Errors
    /// As [`Self::arrays`].
    pub(super) fn stored_matrix(&self) -> Result<Option<StoredMatrix>> {
        let stored = Arc::clone(self.ready()?);
        // SAFETY: the inputs are elements of arrays that `MatrixArrays` keeps. Arrays are
        // immutable, and have their values.
        Ok((!self.traced).then(|| unsafe { StoredMatrix::new(self.stored.inputs, stored) }))
    }

    /// The size in memory, in bytes.
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, cpu::QuantizedMatrix, ones};
    /// let packed = Quantized::quantize(&ones(&[9, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// // `None` where `MLX_CPU_KERNELS` is `off`.
    /// if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///     assert!(matrix.nbytes() >= 16 * (32 + 4 + 4)); // sixteen rows
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.stored.arrays.iter().map(Array::nbytes).sum()
    }

    pub(super) fn outputs(&self) -> i32 {
        self.shape()[0]
    }
}

impl Drop for QuantizedMatrix {
    /// Also frees values that MLX released earlier, on threads that must not free them.
    fn drop(&mut self) {
        closure::drop_discarded();
    }
}

/// Whether float16 represents all of these values exactly.
fn fit_in_f16(all: &[f32]) -> bool {
    let mut halves = [f16::ZERO; 256];
    let mut back = [0.0f32; 256];
    all.chunks(256).all(|part| {
        let (halves, back) = (&mut halves[..part.len()], &mut back[..part.len()]);
        halves.convert_from_f32_slice(part);
        halves.convert_to_f32_slice(back);
        back == part
    })
}

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod tests;
