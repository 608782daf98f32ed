//! Quantized matrices in formats that are not affine: floats of four and eight bits, and those of
//! GGUF that MLX lacks.

use mlx_cpu_kernels::{
    GROUPS_PER_AFFINE_SUPER, GROUPS_PER_SUPER, INTERLEAVED_ROWS, Prompts, ScaleFormat, Size,
    TABLE_SUPER_WEIGHTS, Table,
};

use super::QuantizedMatrix;
use super::enabled;
use super::matrix::size_of;
use super::quantized::MatrixArrays;
use crate::array::Array;
use crate::closure;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::QuantMode;

impl QuantizedMatrix {
    /// A matrix of 6 bits in groups of 16, in GGUF's Q6_K format and size. Scales are signed bytes
    /// times a float16 for each 256 inputs. Codes stand for -32 to 31. All arrays are
    /// [interleaved](Self::interleaved): packed codes `[n, k / 16 * 3]` as MLX packs 6 bits, bytes
    /// (int8) `[n, k / 16]` and float16 `[n, k / 256]`. `None` where the kernels are off.
    ///
    /// MLX has no such format. So [`Self::to_quantized`], `vmap` over a product and second
    /// derivatives of it are errors.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when they do not fit each other; when memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, cpu::QuantizedMatrix, ones};
    /// let part = |width, dtype| QuantizedMatrix::interleaved(&ones(&[9, width], dtype)?);
    /// let parts = [part(48, Dtype::Uint32)?, part(16, Dtype::Int8)?, part(1, Dtype::Float16)?];
    /// if let Some(matrix) = QuantizedMatrix::from_super_scaled(parts, 9)? {
    ///     assert_eq!(matrix.shape(), [9, 256]);
    ///     assert!(matrix.to_quantized().is_err());
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn from_super_scaled([words, bytes, supers]: [Array; 3], n: i32) -> Result<Option<Self>> {
        const BITS: i32 = 6;
        const GROUP: i32 = 16;
        let per_super = GROUPS_PER_SUPER as i32; // a small constant
        let groups = bytes.shape().get(1).copied().unwrap_or(0);
        let k = groups.checked_mul(GROUP).unwrap_or(0);
        let fits = |size: &Size| {
            let (blocks, block) = (
                size.n.div_ceil(INTERLEAVED_ROWS) as i32, // below `n`
                INTERLEAVED_ROWS as i32,
            );
            let is = |a: &Array, dtype: Dtype, width: i32| {
                a.dtype() == dtype && a.shape() == [blocks, width, block]
            };
            groups % per_super == 0
                && is(&words, Dtype::Uint32, k / 32 * BITS)
                && is(&bytes, Dtype::Int8, groups)
                && is(&supers, Dtype::Float16, groups / per_super)
        };
        let Some(size) = size_of(&[n, k]).filter(fits) else {
            let message = format!("these are no parts of a matrix of {n} rows with super-scales");
            let error = Error::new(ErrorKind::Shape, "cpu::QuantizedMatrix", message);
            return Err(error.with_inputs(&[&words, &bytes, &supers]));
        };
        if !enabled() {
            return Ok(None);
        }
        let arrays = vec![
            words.contiguous()?,
            bytes.contiguous()?,
            supers.contiguous()?,
        ];
        crate::eval(&arrays)?;
        Ok(Some(Self {
            stored: MatrixArrays::new(arrays)?,
            size,
            bits: BITS.unsigned_abs(),
            group: GROUP.unsigned_abs() as usize,
            scales: ScaleFormat::Super,
            traced: closure::inside(),
            prompts: Prompts::from_environment(),
        }))
    }

    /// A matrix of `n` rows and of 4 or 5 `bits` in groups of 32, in GGUF's Q4_K or Q5_K format and
    /// nearly their size: `w = d * scale * q - m * min`. All arrays are
    /// [interleaved](Self::interleaved): packed codes `[n, k / 32 * bits]` as MLX packs them, bytes
    /// (int8) `[n, k / 16]` with the scale and the minimum of each group, and float16 `[n, k / 128]`
    /// with `d` and `m` of each 256 inputs. `None` where the kernels are off.
    ///
    /// [`Self::to_quantized`] multiplies the factors. `vmap` over a product and second derivatives
    /// of it are errors.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when they do not fit each other, or for other `bits`; when memory runs
    /// out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, cpu::QuantizedMatrix, ones};
    /// let part = |width, dtype| QuantizedMatrix::interleaved(&ones(&[9, width], dtype)?);
    /// let parts = [part(32, Dtype::Uint32)?, part(16, Dtype::Int8)?, part(2, Dtype::Float16)?];
    /// if let Some(matrix) = QuantizedMatrix::from_super_affine(parts, 9, 4)? {
    ///     assert_eq!(matrix.shape(), [9, 256]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn from_super_affine(
        [words, bytes, supers]: [Array; 3],
        n: i32,
        bits: i32,
    ) -> Result<Option<Self>> {
        const GROUP: i32 = 32;
        let per_super = GROUPS_PER_AFFINE_SUPER as i32; // a small constant
        let groups = bytes.shape().get(1).copied().unwrap_or(0) / 2;
        let k = groups.checked_mul(GROUP).unwrap_or(0);
        let fits = |size: &Size| {
            let (blocks, block) = (
                size.n.div_ceil(INTERLEAVED_ROWS) as i32, // below `n`
                INTERLEAVED_ROWS as i32,
            );
            let is = |a: &Array, dtype: Dtype, width: i32| {
                a.dtype() == dtype && a.shape() == [blocks, width, block]
            };
            matches!(bits, 4 | 5)
                && groups % per_super == 0
                && is(&words, Dtype::Uint32, k / 32 * bits)
                && is(&bytes, Dtype::Int8, 2 * groups)
                && is(&supers, Dtype::Float16, 2 * groups / per_super)
        };
        let Some(size) = size_of(&[n, k]).filter(fits) else {
            let message = format!(
                "these are no parts of a matrix of {n} rows and {bits} bits with super-scales and biases"
            );
            let error = Error::new(ErrorKind::Shape, "cpu::QuantizedMatrix", message);
            return Err(error.with_inputs(&[&words, &bytes, &supers]));
        };
        if !enabled() {
            return Ok(None);
        }
        let arrays = vec![
            words.contiguous()?,
            bytes.contiguous()?,
            supers.contiguous()?,
        ];
        crate::eval(&arrays)?;
        Ok(Some(Self {
            stored: MatrixArrays::new(arrays)?,
            size,
            bits: bits.unsigned_abs(),
            group: GROUP.unsigned_abs() as usize,
            scales: ScaleFormat::SuperAffine,
            traced: closure::inside(),
            prompts: Prompts::from_environment(),
        }))
    }

    /// The scales and biases of [`Self::from_super_affine`]: float32 `[row blocks, groups, 8]` each.
    pub(super) fn super_affine_factors(bytes: &Array, supers: &Array) -> Result<[Array; 2]> {
        let (per, rows) = (GROUPS_PER_AFFINE_SUPER as i32, INTERLEAVED_ROWS as i32);
        let (blocks, count) = (supers.dim(0)?, supers.dim(1)? / 2);
        let bytes = bytes.reshape(&[blocks, count, per, 2, rows])?;
        let supers = supers.reshape(&[blocks, count, 1, 2, rows])?;
        let supers = supers.astype(Dtype::Float32)?;
        let product = bytes.astype(Dtype::Float32)?.multiply(&supers)?;
        let part = |at: i32| {
            let own = product.slice_axis(3, at, at + 1)?;
            own.reshape(&[blocks, count * per, rows])
        };
        Ok([part(0)?, part(1)?.negative()?])
    }

    /// A matrix of `n` rows and of 2, 4, 5 or 8 `bits` in groups of 32 with a scale but no bias, in
    /// the format and size of GGUF's Q4_0, Q5_0 and Q8_0 (and TQ2_0): `w = scale * (q - zero)`, where
    /// the zero is 1, 8, 16 or 128. Both arrays are [interleaved](Self::interleaved): packed codes
    /// `[n, k / 32 * bits]` as MLX packs them, and float16 `[n, k / 32]`. `None` where the kernels are
    /// off.
    ///
    /// [`Self::to_quantized`] adds the biases. `vmap` over a product and second derivatives of it are
    /// errors.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when they do not fit each other, or for other `bits`; when memory runs
    /// out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, cpu::QuantizedMatrix, ones};
    /// let part = |width, dtype| QuantizedMatrix::interleaved(&ones(&[9, width], dtype)?);
    /// let parts = [part(16, Dtype::Uint32)?, part(2, Dtype::Float16)?];
    /// if let Some(matrix) = QuantizedMatrix::from_symmetric(parts, 9, 8)? {
    ///     assert_eq!(matrix.shape(), [9, 64]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn from_symmetric([words, scales]: [Array; 2], n: i32, bits: i32) -> Result<Option<Self>> {
        const GROUP: i32 = 32;
        let groups = scales.shape().get(1).copied().unwrap_or(0);
        let k = groups.checked_mul(GROUP).unwrap_or(0);
        let fits = |size: &Size| {
            let (blocks, block) = (
                size.n.div_ceil(INTERLEAVED_ROWS) as i32, // below `n`
                INTERLEAVED_ROWS as i32,
            );
            let is = |a: &Array, dtype: Dtype, width: i32| {
                a.dtype() == dtype && a.shape() == [blocks, width, block]
            };
            matches!(bits, 2 | 4 | 5 | 8)
                && is(&words, Dtype::Uint32, groups.saturating_mul(bits))
                && is(&scales, Dtype::Float16, groups)
        };
        let Some(size) = size_of(&[n, k]).filter(fits) else {
            let message = format!(
                "these are no parts of a matrix of {n} rows and {bits} bits without biases"
            );
            let error = Error::new(ErrorKind::Shape, "cpu::QuantizedMatrix", message);
            return Err(error.with_inputs(&[&words, &scales]));
        };
        if !enabled() {
            return Ok(None);
        }
        let arrays = vec![words.contiguous()?, scales.contiguous()?];
        crate::eval(&arrays)?;
        Ok(Some(Self {
            stored: MatrixArrays::new(arrays)?,
            size,
            bits: bits.unsigned_abs(),
            group: GROUP.unsigned_abs() as usize,
            scales: ScaleFormat::Symmetric,
            traced: closure::inside(),
            prompts: Prompts::from_environment(),
        }))
    }

    /// A matrix of `n` rows in MXFP4, MXFP8 or NVFP4: codes and the bytes of scales as MLX packs
    /// them, both [interleaved](Self::interleaved). `None` where the kernels are off, and for
    /// affine mode.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when they do not fit each other; when memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, cpu::QuantizedMatrix, ones};
    /// let part = |width, dtype| QuantizedMatrix::interleaved(&ones(&[9, width], dtype)?);
    /// let parts = [part(8, Dtype::Uint32)?, part(2, Dtype::Uint8)?];
    /// if let Some(matrix) = QuantizedMatrix::from_float_codes(parts, 9, QuantMode::Mxfp4)? {
    ///     assert_eq!(matrix.shape(), [9, 64]);
    ///     assert_eq!(matrix.mode(), QuantMode::Mxfp4);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn from_float_codes(
        [words, bytes]: [Array; 2],
        n: i32,
        mode: QuantMode,
    ) -> Result<Option<Self>> {
        let Some((bits, group)) = float_format(mode).filter(|_| enabled()) else {
            return Ok(None);
        };
        let groups = bytes.shape().get(1).copied().unwrap_or(0);
        let k = groups.checked_mul(group).unwrap_or(0);
        let fits = |size: &Size| {
            let (blocks, block) = (
                size.n.div_ceil(INTERLEAVED_ROWS) as i32, // below `n`
                INTERLEAVED_ROWS as i32,
            );
            words.dtype() == Dtype::Uint32
                && words.shape() == [blocks, k / 8 * bits / 4, block]
                && bytes.dtype() == Dtype::Uint8
                && bytes.shape() == [blocks, groups, block]
        };
        let Some(size) = size_of(&[n, k]).filter(fits) else {
            let message = format!("these are no parts of a matrix of {n} rows in {mode:?}");
            let error = Error::new(ErrorKind::Shape, "cpu::QuantizedMatrix", message);
            return Err(error.with_inputs(&[&words, &bytes]));
        };
        let arrays = vec![words.contiguous()?, bytes.contiguous()?];
        crate::eval(&arrays)?;
        Ok(Some(Self {
            stored: MatrixArrays::new(arrays)?,
            size,
            bits: bits.unsigned_abs(),
            group: group.unsigned_abs() as usize,
            scales: match mode {
                QuantMode::Nvfp4 => ScaleFormat::E4m3,
                _ => ScaleFormat::E8m0,
            },
            traced: closure::inside(),
            prompts: Prompts::from_environment(),
        }))
    }

    /// A matrix of 4 bits whose codes `table` turns into integers, in groups of 16 or 32. `parts`
    /// are packed codes `[n, k / 8]` as MLX packs 4 bits, and scales: float16 `[n, k / group]`, or
    /// signed bytes of this shape and float16 `[n, k / 256]`, by which they are multiplied. All are
    /// [interleaved](Self::interleaved). `None` where the kernels are off.
    ///
    /// MLX has no such format, as of [`Self::from_super_scaled`].
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when they do not fit each other; when memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, cpu::{QuantizedMatrix, Table}, ones};
    /// let part = |width, dtype| QuantizedMatrix::interleaved(&ones(&[9, width], dtype)?);
    /// let parts = vec![part(8, Dtype::Uint32)?, part(2, Dtype::Float16)?];
    /// if let Some(matrix) = QuantizedMatrix::from_table_codes(parts, 9, (Table::Iq4, 32))? {
    ///     assert_eq!(matrix.shape(), [9, 64]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn from_table_codes(
        parts: Vec<Array>,
        n: i32,
        (table, group): (Table, i32),
    ) -> Result<Option<Self>> {
        const BITS: i32 = 4;
        let per_super = TABLE_SUPER_WEIGHTS as i32; // a small constant
        let groups = parts
            .get(1)
            .and_then(|scales| scales.shape().get(1).copied());
        let k = groups.unwrap_or(0).checked_mul(group).unwrap_or(0);
        let blocks = |size: &Size| size.n.div_ceil(INTERLEAVED_ROWS) as i32; // below `n`
        let fits = |size: &Size| {
            let is = |a: &Array, dtype: Dtype, width: i32| {
                a.dtype() == dtype && a.shape() == [blocks(size), width, INTERLEAVED_ROWS as i32]
            };
            let words = |a: &Array| is(a, Dtype::Uint32, k / 8);
            matches!(group, 16 | 32)
                && match parts.as_slice() {
                    [codes, scales] => {
                        words(codes) && k % 32 == 0 && is(scales, Dtype::Float16, k / group)
                    }
                    [codes, scales, supers] => {
                        words(codes)
                            && k % per_super == 0
                            && is(scales, Dtype::Int8, k / group)
                            && is(supers, Dtype::Float16, k / per_super)
                    }
                    _ => false,
                }
        };
        let Some(size) = size_of(&[n, k]).filter(fits) else {
            let message =
                format!("these are no parts of a matrix of {n} rows with codes of a table");
            let error = Error::new(ErrorKind::Shape, "cpu::QuantizedMatrix", message);
            return Err(error.with_inputs(&parts.iter().collect::<Vec<_>>()));
        };
        if !enabled() {
            return Ok(None);
        }
        let scales = match parts.len() {
            2 => ScaleFormat::Table(table),
            _ => ScaleFormat::TableSuper(table),
        };
        let arrays: Vec<Array> = parts.iter().map(Array::contiguous).collect::<Result<_>>()?;
        crate::eval(&arrays)?;
        Ok(Some(Self {
            stored: MatrixArrays::new(arrays)?,
            size,
            bits: BITS.unsigned_abs(),
            group: group.unsigned_abs() as usize,
            scales,
            traced: closure::inside(),
            prompts: Prompts::from_environment(),
        }))
    }
}

/// Bits and group size of a mode whose codes are floats.
pub(super) fn float_format(mode: QuantMode) -> Option<(i32, i32)> {
    match mode {
        QuantMode::Affine => None,
        QuantMode::Mxfp4 => Some((4, 32)),
        QuantMode::Mxfp8 => Some((8, 32)),
        QuantMode::Nvfp4 => Some((4, 16)),
    }
}
