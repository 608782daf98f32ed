//! Quantized matrices in formats other than affine mode: 4- and 8-bit floats, and GGUF formats that
//! MLX lacks.

use mlx_cpu_kernels::{
    GROUPS_PER_AFFINE_SUPER, GROUPS_PER_SUPER, INTERLEAVED_ROWS, PrefillInputs, ScaleFormat, Size,
    TABLE_SUPER_WEIGHTS, Table,
};

use super::QuantizedMatrix;
use super::deferred::MatrixParts;
use super::dense::size_of;
use super::enabled;
use super::packing::{float_format, takes, words_of};
use crate::array::Array;
use crate::closure;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::QuantMode;

impl QuantizedMatrix {
    /// A matrix with 6 bits in groups of 16, in the format and size of GGUF's Q6_K. Scales are
    /// signed bytes times a float16 per 256 inputs. Codes represent -32 to 31. All arrays are
    /// [interleaved](Self::interleaved): packed codes `[n, k / 16 * 3]` in MLX's 6-bit packing,
    /// bytes (int8) `[n, k / 16]` and float16 `[n, k / 256]`. `None` if the kernels are disabled.
    ///
    /// MLX has no such format. So [`Self::to_quantized`], `vmap` over a product and second
    /// derivatives of a product are errors.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the arrays do not match; when memory runs out.
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
    pub fn from_super_scaled(parts: impl Into<MatrixParts>, n: i32) -> Result<Option<Self>> {
        let parts = parts.into();
        const GROUP: i32 = 16;
        let per_super = GROUPS_PER_SUPER as i32; // a small constant
        let groups = parts.width(1);
        let k = groups.checked_mul(GROUP).unwrap_or(0);
        let widths = [
            (Dtype::Uint32, words_of(k, 6)),
            (Dtype::Int8, groups),
            (Dtype::Float16, groups / per_super),
        ];
        let format = PackedFormat::new(6, GROUP, ScaleFormat::Super);
        let known = groups % per_super == 0;
        Self::of_parts(parts, &widths, (n, k), known, format)
    }

    /// A matrix of `n` rows with 4 or 5 `bits` in groups of 32, or 2 bits in groups of 16, in the
    /// format of GGUF's Q4_K, Q5_K or Q2_K: `w = d * scale * q - m * min`. All arrays are
    /// [interleaved](Self::interleaved): packed codes `[n, k / 32 * bits]` in MLX's packing, bytes
    /// (int8) `[n, 2 * groups]` with the scale and the minimum of each group, and float16 `[n,
    /// groups / 4]` with `d` and `m` for each 8 groups. `None` if the kernels are disabled.
    ///
    /// [`Self::to_quantized`] multiplies the two levels of scales; it refuses groups of 16. `vmap`
    /// over a product and second derivatives of a product are errors.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the arrays do not match, or for other `bits`; when memory runs
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
        parts: impl Into<MatrixParts>,
        n: i32,
        bits: i32,
    ) -> Result<Option<Self>> {
        let parts = parts.into();
        let group = if bits == 2 { 16 } else { 32 };
        let per_super = GROUPS_PER_AFFINE_SUPER as i32; // a small constant
        let groups = parts.width(1) / 2;
        let k = groups.checked_mul(group).unwrap_or(0);
        let known = groups % per_super == 0;
        let widths = [
            (Dtype::Uint32, words_of(k, bits)),
            (Dtype::Int8, 2 * groups),
            (Dtype::Float16, 2 * groups / per_super),
        ];
        let format = PackedFormat::new(bits, group, ScaleFormat::SuperAffine);
        Self::of_parts(parts, &widths, (n, k), known, format)
    }

    /// Returns a matrix `[n, k]` of the interleaved `parts`, or `None` if the kernels are disabled.
    /// Part `i` must have the type and the number of elements per row of `widths[i]`. Returns an
    /// error if `known` is false, which means that the caller does not support the sizes.
    fn of_parts(
        parts: MatrixParts,
        widths: &[(Dtype, i32)],
        (n, k): (i32, i32),
        known: bool,
        format: PackedFormat,
    ) -> Result<Option<Self>> {
        let fits = |size: &Size| {
            let blocks = size.n.div_ceil(INTERLEAVED_ROWS) as i32; // below `n`
            let is = |((of, shape), &(dtype, width)): (&(Dtype, Vec<i32>), &(Dtype, i32))| {
                *of == dtype && *shape == [blocks, width, INTERLEAVED_ROWS as i32]
            };
            known
                && takes(format.scales, format.bits, format.group)
                && parts.count() == widths.len()
                && parts.described().iter().zip(widths).all(is)
        };
        let Some(size) = size_of(&[n, k]).filter(fits) else {
            let PackedFormat {
                bits,
                group,
                scales,
            } = format;
            let message = format!(
                "these are no parts of a matrix of {n} rows: {bits} bits, groups of {group}, scales {scales:?}"
            );
            let shapes = parts.described();
            let message = format!("{message}: {shapes:?}");
            return Err(Error::new(
                ErrorKind::Shape,
                "cpu::QuantizedMatrix",
                message,
            ));
        };
        if !enabled() {
            return Ok(None);
        }
        let (stored, awaited) = parts.stored()?;
        Ok(Some(Self {
            stored,
            awaited,
            size,
            bits: format.bits.unsigned_abs(),
            group: format.group.unsigned_abs() as usize,
            scales: format.scales,
            traced: closure::inside(),
            prefill_inputs: PrefillInputs::from_environment().unwrap_or_default(),
        }))
    }

    /// The scales and biases of [`Self::from_super_affine`]: float32 `[row blocks, groups, 8]`
    /// each.
    pub(super) fn super_affine_factors(bytes: &Array, supers: &Array) -> Result<[Array; 2]> {
        let (per, rows) = (GROUPS_PER_AFFINE_SUPER as i32, INTERLEAVED_ROWS as i32);
        let (blocks, count) = (supers.dim(0)?, supers.dim(1)? / 2);
        let bytes = bytes.reshape(&[blocks, count, per, 2, rows])?;
        let supers = supers.reshape(&[blocks, count, 1, 2, rows])?;
        let supers = supers.astype(Dtype::Float32)?;
        let product = bytes.astype(Dtype::Float32)?.multiply(&supers)?;
        let part = |at: i32| {
            let factor = product.slice_axis(3, at, at + 1)?;
            factor.reshape(&[blocks, count * per, rows])
        };
        Ok([part(0)?, part(1)?.negative()?])
    }

    /// A matrix of `n` rows with 2, 4, 5 or 8 `bits` in groups of 32 with a scale but no bias, in
    /// the format and size of GGUF's Q4_0, Q5_0 and Q8_0 (and TQ2_0): `w = scale * (q - zero)`,
    /// where `zero` is 1, 8, 16 or 128. Both arrays are [interleaved](Self::interleaved): packed
    /// codes `[n, k / 32 * bits]` in MLX's packing, and float16 `[n, k / 32]`. `None` if the
    /// kernels are disabled.
    ///
    /// [`Self::to_quantized`] adds the biases that MLX's form requires. `vmap` over a product and
    /// second derivatives of a product are errors.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the arrays do not match, or for other `bits`; when memory runs
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
    pub fn from_symmetric(
        parts: impl Into<MatrixParts>,
        n: i32,
        bits: i32,
    ) -> Result<Option<Self>> {
        let parts = parts.into();
        const GROUP: i32 = 32;
        let groups = parts.width(1);
        let k = groups.checked_mul(GROUP).unwrap_or(0);
        let widths = [(Dtype::Uint32, words_of(k, bits)), (Dtype::Float16, groups)];
        let format = PackedFormat::new(bits, GROUP, ScaleFormat::Symmetric);
        Self::of_parts(parts, &widths, (n, k), true, format)
    }

    /// A matrix of `n` rows in MXFP4, MXFP8 or NVFP4: codes and byte scales in MLX's packing, both
    /// [interleaved](Self::interleaved). `None` if the kernels are disabled, and for affine mode.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the arrays do not match; when memory runs out.
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
        parts: impl Into<MatrixParts>,
        n: i32,
        mode: QuantMode,
    ) -> Result<Option<Self>> {
        let parts = parts.into();
        let Some((bits, group)) = float_format(mode).filter(|_| enabled()) else {
            return Ok(None);
        };
        let groups = parts.width(1);
        let k = groups.checked_mul(group).unwrap_or(0);
        let scales = match mode {
            QuantMode::Nvfp4 => ScaleFormat::E4m3,
            _ => ScaleFormat::E8m0,
        };
        let widths = [(Dtype::Uint32, k / 8 * bits / 4), (Dtype::Uint8, groups)];
        let format = PackedFormat::new(bits, group, scales);
        Self::of_parts(parts, &widths, (n, k), true, format)
    }

    /// A matrix with 4-bit codes that index `table`, in groups of 16 or 32. The first of `parts`
    /// are packed codes `[n, k / 8]` in MLX's 4-bit packing. The scales follow: float16 `[n, k /
    /// group]`, or the product of signed bytes `[n, k / group]` and float16 `[n, k / 256]`. All are
    /// [interleaved](Self::interleaved). A byte times an integer of the table must be within ±4,096
    /// ([`mlx_cpu_kernels::MAX_SCALED_CODE`]); otherwise products are wrong. `None` if the kernels
    /// are disabled.
    ///
    /// MLX has no such format; see [`Self::from_super_scaled`].
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the arrays do not match; when memory runs out.
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
        parts: impl Into<MatrixParts>,
        n: i32,
        (table, group): (Table, i32),
    ) -> Result<Option<Self>> {
        let parts = parts.into();
        const BITS: i32 = 4;
        let per_super = TABLE_SUPER_WEIGHTS as i32; // a small constant
        let groups = parts.width(1);
        let k = groups.checked_mul(group).unwrap_or(0);
        let codes = (Dtype::Uint32, words_of(k, BITS));
        let (scales, unit, widths) = match parts.count() {
            2 => {
                let widths = vec![codes, (Dtype::Float16, groups)];
                (ScaleFormat::Table(table), 32, widths)
            }
            _ => {
                let supers = (Dtype::Float16, k / per_super);
                let widths = vec![codes, (Dtype::Int8, groups), supers];
                (ScaleFormat::TableSuper(table), per_super, widths)
            }
        };
        let known = k % unit == 0;
        let format = PackedFormat::new(BITS, group, scales);
        Self::of_parts(parts, &widths, (n, k), known, format)
    }
}

/// The packing of a matrix's codes.
struct PackedFormat {
    bits: i32,
    group: i32,
    scales: ScaleFormat,
}

impl PackedFormat {
    const fn new(bits: i32, group: i32, scales: ScaleFormat) -> Self {
        Self {
            bits,
            group,
            scales,
        }
    }
}
