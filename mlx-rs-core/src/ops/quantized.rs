//! Quantized weights: packed integers with a scale (and in affine mode a bias) per group of
//! consecutive elements of the last axis.
//!
//! ```
//! use mlx_rs_core::{Dtype, QuantMode, Quantized, ones};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let w = ones(&[8, 64], Dtype::Float32)?;
//! let q = Quantized::quantize(&w, 32, 4, QuantMode::Affine)?;
//! let y = q.matmul_transposed(&ones(&[1, 64], Dtype::Float32)?)?;
//! assert_eq!(y.to_vec::<f32>()?, [64.0; 8]);
//! # Ok(()) }
//! ```

use std::ffi::CStr;

use mlx_sys as sys;

use super::IndexArg;
use crate::array::Array;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::quirks::Facts;
use crate::stream::Stream;
use crate::{call, compat};

/// The format of quantized values.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum QuantMode {
    /// `scale * q + bias` with groups of 32, 64 or 128.
    #[default]
    Affine,
    /// 4-bit floats. Each 32 share a power-of-two scale (OCP microscaling).
    Mxfp4,
    /// 8-bit floats. Each 32 share a power-of-two scale (OCP microscaling).
    Mxfp8,
    /// 4-bit floats. Each 16 share an 8-bit float scale (NVIDIA).
    Nvfp4,
}

impl QuantMode {
    pub(super) fn name(self) -> &'static CStr {
        match self {
            QuantMode::Affine => c"affine",
            QuantMode::Mxfp4 => c"mxfp4",
            QuantMode::Mxfp8 => c"mxfp8",
            QuantMode::Nvfp4 => c"nvfp4",
        }
    }

    /// The mode with this MLX name, as checkpoints write it. `None` if the name is unknown.
    ///
    /// ```
    /// use mlx_rs_core::QuantMode;
    /// assert_eq!(QuantMode::from_name("mxfp4"), Some(QuantMode::Mxfp4));
    /// assert_eq!(QuantMode::from_name("int3"), None);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [
            QuantMode::Affine,
            QuantMode::Mxfp4,
            QuantMode::Mxfp8,
            QuantMode::Nvfp4,
        ]
        .into_iter()
        .find(|m| m.name().to_str() == Ok(name))
    }
}

/// A quantized matrix. Each 32-bit word of `weight` packs `32 / bits` values.
#[derive(Debug, Clone)]
pub struct Quantized {
    /// Packed values, `uint32 [.., n, k * bits / 32]`.
    pub weight: Array,
    /// One scale per group, `[.., n, k / group_size]`.
    pub scales: Array,
    /// One bias per group in affine mode, `[.., n, k / group_size]`.
    pub biases: Option<Array>,
    /// The number of consecutive elements that share a scale.
    pub group_size: i32,
    /// The number of bits per value.
    pub bits: i32,
    /// The format of the values.
    pub mode: QuantMode,
}

pub(super) fn some_int(value: i32) -> sys::mlx_optional_int {
    sys::mlx_optional_int {
        value,
        has_value: true,
    }
}

impl Quantized {
    /// Quantizes a matrix `[.., n, k]`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, ones};
    /// let q = Quantized::quantize(&ones(&[8, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// assert_eq!(q.weight.shape(), [8, 8]); // eight numbers a word
    /// assert_eq!(q.scales.shape(), [8, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for bits or groups that the mode does not support; MLX's message when
    /// the last axis is not divisible into groups.
    #[doc(alias = "mlx_quantize")]
    pub fn quantize(weight: &Array, group_size: i32, bits: i32, mode: QuantMode) -> Result<Self> {
        check_format("quantize", group_size, bits, mode)?;
        single_or_half("quantize", weight.dtype())?;
        if weight.ndim() < 2 || weight.size() == 0 {
            return Err(Error::new(
                ErrorKind::Shape,
                "quantize",
                "needs a matrix that is not empty",
            )
            .with_inputs(&[weight]));
        }
        if mode == QuantMode::Nvfp4 && Facts::current()?.scales_nvfp4_wrongly() {
            let on_cpu = Stream::default_of(Device::cpu())?;
            return on_cpu.scope(|| Self::quantize(weight, group_size, bits, mode));
        }
        let parts = call::arrays("quantize", |out, s| {
            // SAFETY: all handles are live; the mode is a static NUL-terminated string.
            unsafe {
                compat::mlx_quantize(
                    out,
                    weight.raw(),
                    some_int(group_size),
                    some_int(bits),
                    mode.name().as_ptr(),
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[weight]))?;
        let mut parts = parts.into_iter();
        match (parts.next(), parts.next()) {
            (Some(weight), Some(scales)) => Ok(Self {
                weight,
                scales,
                biases: parts.next(),
                group_size,
                bits,
                mode,
            }),
            _ => Err(Error::new(
                ErrorKind::Mlx,
                "quantize",
                "MLX returned too few arrays",
            )),
        }
    }

    /// Checks that the parts match. Every use of them calls this first.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, ErrorKind, QuantMode, Quantized, ones};
    /// let mut q = Quantized::quantize(&ones(&[8, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// q.validate("load")?;
    /// q.bits = 8;
    /// assert_eq!(q.validate("load").unwrap_err().kind(), ErrorKind::Shape);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`], [`ErrorKind::Dtype`] or [`ErrorKind::Value`], with the part that does
    /// not match.
    pub fn validate(&self, op: &'static str) -> Result<()> {
        check_format(op, self.group_size, self.bits, self.mode)?;
        let bad = |kind, message: String| {
            Err(Error::new(kind, op, message).with_inputs(&[&self.weight, &self.scales]))
        };
        if self.weight.dtype() != Dtype::Uint32 {
            return bad(
                ErrorKind::Dtype,
                format!("packed weights must be uint32, not {}", self.weight.dtype()),
            );
        }
        let scales = self.scales.dtype();
        let fits = match self.mode {
            QuantMode::Affine => single_or_half(op, scales).is_ok(),
            _ => scales == Dtype::Uint8,
        };
        if !fits {
            return bad(
                ErrorKind::Dtype,
                format!("scales of {scales} do not fit this mode"),
            );
        }
        let (w, s) = (self.weight.shape(), self.scales.shape());
        let k = w
            .last()
            .map(|&words| i64::from(words) * 32 / i64::from(self.bits));
        let groups = s.last().map(|&g| i64::from(g) * i64::from(self.group_size));
        if w.len() < 2
            || w.len() != s.len()
            || w[..w.len() - 1] != s[..s.len() - 1]
            || k != groups
            // MLX counts bits in an i32, so the number of words is limited.
            || w.last().is_some_and(|&words| words > i32::MAX / 32)
        {
            return bad(
                ErrorKind::Shape,
                format!(
                    "scales do not fit weights packed at {} bits in groups of {}",
                    self.bits, self.group_size
                ),
            );
        }
        match (&self.biases, self.mode) {
            (Some(b), QuantMode::Affine) if b.shape() == s && b.dtype() == self.scales.dtype() => {}
            (None, QuantMode::Affine) => {
                return bad(ErrorKind::Value, String::from("affine weights need biases"));
            }
            (Some(b), QuantMode::Affine) => {
                return bad(
                    ErrorKind::Shape,
                    format!(
                        "biases {:?} {} differ from the scales",
                        b.shape(),
                        b.dtype()
                    ),
                );
            }
            (Some(_), _) => {
                return bad(
                    ErrorKind::Value,
                    String::from("only affine weights have biases"),
                );
            }
            (None, _) => {}
        }
        Ok(())
    }

    /// Converts the values to `dtype`: `[.., n, k]`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, ones};
    /// let w = ones(&[8, 64], Dtype::Float32)?;
    /// let q = Quantized::quantize(&w, 32, 4, QuantMode::Affine)?;
    /// assert!(q.dequantize(Dtype::Float32)?.all_close(&w, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the parts do not match.
    #[doc(alias = "mlx_dequantize")]
    pub fn dequantize(&self, dtype: Dtype) -> Result<Array> {
        self.validate("dequantize")?;
        single_or_half("dequantize", dtype)?;
        call::array("dequantize", |out, s| {
            // SAFETY: all handles are live and checked to match. The mode is a static string.
            unsafe {
                compat::mlx_dequantize(
                    out,
                    self.weight.raw(),
                    self.scales.raw(),
                    Array::raw_or_null(self.biases.as_ref()),
                    some_int(self.group_size),
                    some_int(self.bits),
                    self.mode.name().as_ptr(),
                    sys::mlx_optional_dtype {
                        value: dtype.raw(),
                        has_value: true,
                    },
                    s,
                )
            }
        })
    }

    /// Multiplies `x` with the transposed matrix: `[.., m, k] x [n, k]^T -> [.., m, n]`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, ones};
    /// let q = Quantized::quantize(&ones(&[8, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// let y = q.matmul_transposed(&ones(&[1, 64], Dtype::Float32)?)?;
    /// assert_eq!(y.to_vec::<f32>()?, [64.0; 8]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the parts do not match each other or `x`.
    #[doc(alias = "mlx_quantized_matmul")]
    pub fn matmul_transposed(&self, x: &Array) -> Result<Array> {
        self.matmul_as(x, true)
    }

    /// Multiplies `x` with the matrix: `[.., m, n] x [n, k] -> [.., m, k]`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, ones};
    /// let q = Quantized::quantize(&ones(&[8, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// let y = q.matmul(&ones(&[1, 8], Dtype::Float32)?)?;
    /// assert_eq!(y.to_vec::<f32>()?, [8.0; 64]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the parts do not match each other or `x`.
    #[doc(alias = "mlx_quantized_matmul")]
    pub fn matmul(&self, x: &Array) -> Result<Array> {
        self.matmul_as(x, false)
    }

    fn matmul_as(&self, x: &Array, transpose: bool) -> Result<Array> {
        self.validate("quantized_matmul")?;
        single_or_half("quantized_matmul", x.dtype())?;
        // MLX broadcasts batches only if both operands have a batch.
        if x.ndim() < 1 || (self.weight.ndim() > 2 && x.ndim() <= 2) {
            return Err(Error::new(
                ErrorKind::Shape,
                "quantized_matmul",
                "a batch of matrices needs a batch of inputs: give x as many axes",
            )
            .with_inputs(&[x, &self.weight]));
        }
        if self.is_miscomputed()? {
            return self
                .dequantized_product(x, transpose)
                .map_err(|e| e.with_inputs(&[x, &self.weight, &self.scales]));
        }
        call::array("quantized_matmul", |out, s| {
            // SAFETY: all handles are live and checked to match. The mode is a static string.
            unsafe {
                sys::mlx_quantized_matmul(
                    out,
                    x.raw(),
                    self.weight.raw(),
                    self.scales.raw(),
                    Array::raw_or_null(self.biases.as_ref()),
                    transpose,
                    some_int(self.group_size),
                    some_int(self.bits),
                    self.mode.name().as_ptr(),
                    s,
                )
            }
        })
        .and_then(|product| product.unless_of_nothing(&[x, &self.weight]))
        .map_err(|e| e.with_inputs(&[x, &self.weight, &self.scales]))
    }

    /// Multiplies with selected matrices, for mixtures of experts. `x` `[.., m, k]` at the indices
    /// `lhs` is multiplied with the matrix `[.., n, k]` at the indices `rhs`. The matrix is
    /// transposed unless `transpose` is false. Indices refer to the matrices of the flattened
    /// batch, and broadcast with each other: `[index shape .., m, n]`. `sorted` declares that the
    /// indices ascend, which is faster on a GPU.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, array, concatenate, ones, zeros};
    /// // Of two experts the second.
    /// let experts = concatenate(
    ///     &[&zeros(&[1, 8, 64], Dtype::Float32)?, &ones(&[1, 8, 64], Dtype::Float32)?],
    ///     0,
    /// )?;
    /// let q = Quantized::quantize(&experts, 32, 4, QuantMode::Affine)?;
    /// let y = q.gather_matmul(&ones(&[1, 64], Dtype::Float32)?, None, &array!([1])?, true, false)?;
    /// assert_eq!((y.shape(), y.to_vec::<f32>()?), (&[1, 1, 8][..], vec![64.0; 8]));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for an `x` with fewer than two axes, or an empty batch;
    /// [`ErrorKind::Dtype`] for indices that are not integers; when the parts do not match each
    /// other or `x`.
    #[doc(alias = "mlx_gather_qmm")]
    pub fn gather_matmul<'a>(
        &self,
        x: &Array,
        lhs: impl Into<IndexArg<'a>>,
        rhs: impl Into<IndexArg<'a>>,
        transpose: bool,
        sorted: bool,
    ) -> Result<Array> {
        let op = "gather_qmm";
        self.validate(op)?;
        single_or_half(op, x.dtype())?;
        if x.ndim() < 2 {
            return Err(
                Error::new(ErrorKind::Shape, op, "x needs at least two axes").with_inputs(&[x]),
            );
        }
        let lhs = lhs.into().resolve(op, x)?;
        let rhs = rhs.into().resolve(op, &self.weight)?;
        if lhs.is_none() && rhs.is_none() {
            return self.matmul_as(x, transpose);
        }
        if self.is_miscomputed()? {
            return self
                .dequantized_gather(x, lhs.as_ref(), rhs.as_ref(), transpose, sorted)
                .map_err(|e| e.with_inputs(&[x, &self.weight, &self.scales]));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live and checked to match. Every index is within its batch.
            // The mode is a static string. Null means no array.
            unsafe {
                sys::mlx_gather_qmm(
                    out,
                    x.raw(),
                    self.weight.raw(),
                    self.scales.raw(),
                    Array::raw_or_null(self.biases.as_ref()),
                    Array::raw_or_null(lhs.as_ref()),
                    Array::raw_or_null(rhs.as_ref()),
                    transpose,
                    some_int(self.group_size),
                    some_int(self.bits),
                    self.mode.name().as_ptr(),
                    sorted,
                    s,
                )
            }
        })
        .and_then(|product| product.unless_of_nothing(&[x, &self.weight]))
        .map_err(|e| e.with_inputs(&[x, &self.weight, &self.scales]))
    }

    /// Quantizes `x` to the same mode, then multiplies it with the transposed matrix, so that the
    /// GPU computes with narrow floats: `[m, k] x [n, k]^T -> [m, n]`. It requires the mode
    /// [`QuantMode::Nvfp4`] or [`QuantMode::Mxfp8`], and a CUDA device that supports such products.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, ErrorKind, QuantMode, Quantized, ones};
    /// let q = Quantized::quantize(&ones(&[32, 64], Dtype::Float32)?, 16, 4, QuantMode::Nvfp4)?;
    /// match q.matmul_quantized(&ones(&[32, 64], Dtype::Float32)?) {
    ///     Ok(y) => assert_eq!(y.shape(), [32, 32]),
    ///     Err(e) => assert_eq!(e.kind(), ErrorKind::Unsupported), // without CUDA
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] without CUDA; [`ErrorKind::Shape`] when an operand has more than
    /// two axes; [`ErrorKind::Value`] for other modes; when the parts do not match each other or
    /// `x`.
    #[doc(alias = "mlx_qqmm")]
    pub fn matmul_quantized(&self, x: &Array) -> Result<Array> {
        let op = "qqmm";
        self.validate(op)?;
        if !matches!(self.mode, QuantMode::Nvfp4 | QuantMode::Mxfp8) {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                "both sides can be quantized as nvfp4 and mxfp8 only",
            ));
        }
        if x.ndim() != 2 || self.weight.ndim() != 2 {
            return Err(
                Error::new(ErrorKind::Shape, op, "both sides must have two axes")
                    .with_inputs(&[x, &self.weight]),
            );
        }
        if !crate::cuda_is_available() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                op,
                "needs a CUDA device; use matmul_transposed elsewhere",
            ));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live and checked to match. The mode is a static string.
            unsafe {
                compat::mlx_qqmm(
                    out,
                    x.raw(),
                    self.weight.raw(),
                    self.scales.raw(),
                    some_int(self.group_size),
                    some_int(self.bits),
                    self.mode.name().as_ptr(),
                    s,
                )
            }
        })
        .and_then(|product| product.unless_of_nothing(&[x, &self.weight]))
        .map_err(|e| e.with_inputs(&[x, &self.weight, &self.scales]))
    }

    /// Rows of the matrix by index, still quantized. Indices out of range are clamped, lazily.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, array, ones};
    /// let q = Quantized::quantize(&ones(&[8, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// let rows = q.take_rows(&array!([3, 5])?)?;
    /// assert_eq!(rows.dequantize(Dtype::Float32)?.shape(), [2, 64]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::take_clamped`].
    pub fn take_rows(&self, indices: &Array) -> Result<Self> {
        Ok(Self {
            weight: self.weight.take_clamped(indices, 0)?,
            scales: self.scales.take_clamped(indices, 0)?,
            biases: self
                .biases
                .as_ref()
                .map(|b| b.take_clamped(indices, 0))
                .transpose()?,
            ..*self
        })
    }

    /// The size of all parts in bytes.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, QuantMode, Quantized, ones};
    /// let q = Quantized::quantize(&ones(&[8, 64], Dtype::Float32)?, 32, 4, QuantMode::Affine)?;
    /// assert_eq!(q.nbytes(), 256 + 64 + 64); // numbers, scales, biases
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.weight.nbytes() + self.scales.nbytes() + self.biases.as_ref().map_or(0, Array::nbytes)
    }
}

/// Checks that MLX's quantized kernels support this type. For other types, MLX ends the process
/// during evaluation.
fn single_or_half(op: &'static str, dtype: Dtype) -> Result<()> {
    if dtype.is_float() && dtype != Dtype::Float64 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Dtype,
        op,
        format!("takes float32, float16 or bfloat16, not {dtype}"),
    ))
}

fn check_format(op: &'static str, group_size: i32, bits: i32, mode: QuantMode) -> Result<()> {
    let ok = match mode {
        QuantMode::Affine => {
            matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) && matches!(group_size, 32 | 64 | 128)
        }
        QuantMode::Mxfp4 => bits == 4 && group_size == 32,
        QuantMode::Mxfp8 => bits == 8 && group_size == 32,
        QuantMode::Nvfp4 => bits == 4 && group_size == 16,
    };
    if ok {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Value,
        op,
        format!(
            "{} has no {bits} bits in groups of {group_size}; affine takes bits 2, 3, 4, 5, 6, 8 in \
             groups of 32, 64, 128",
            mode.name().to_string_lossy()
        ),
    ))
}
