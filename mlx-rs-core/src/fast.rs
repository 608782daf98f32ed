//! MLX's fused kernels for transformers.

use std::ffi::CStr;

use mlx_sys as sys;

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::quirks::Facts;
use crate::{call, compat};

/// Root-mean-square normalization over the last axis, times `weight` (Zhang and Sennrich 2019):
/// `x / sqrt(mean(x^2) + eps) * weight`.
///
/// ```
/// use mlx_rs_core::{array, fast};
/// let y = fast::rms_norm(&array!([[3.0, 4.0]])?, Some(&array!([1.0, 2.0])?), 0.0)?;
/// let rms = 12.5f32.sqrt();
/// assert!(y.all_close(&array!([[3.0 / rms, 8.0 / rms]])?, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// MLX's message when the weight does not have the length of the last axis.
#[doc(alias = "mlx_fast_rms_norm")]
pub fn rms_norm(x: &Array, weight: Option<&Array>, eps: f32) -> Result<Array> {
    call::array("rms_norm", |out, s| {
        // SAFETY: all handles are live; null means no weight.
        unsafe { sys::mlx_fast_rms_norm(out, x.raw(), Array::raw_or_null(weight), eps, s) }
    })
    .map_err(|e| e.with_inputs(&[x]))
}

/// Normalization to zero mean and unit variance over the last axis, times `weight` plus `bias`
/// (Ba et al. 2016).
///
/// ```
/// use mlx_rs_core::{array, fast};
/// let y = fast::layer_norm(&array!([[1.0, 3.0]])?, None, Some(&array!([10.0, 10.0])?), 0.0)?;
/// assert!(y.all_close(&array!([[9.0, 11.0]])?, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// MLX's message when weight or bias do not have the length of the last axis.
#[doc(alias = "mlx_fast_layer_norm")]
pub fn layer_norm(
    x: &Array,
    weight: Option<&Array>,
    bias: Option<&Array>,
    eps: f32,
) -> Result<Array> {
    call::array("layer_norm", |out, s| {
        // SAFETY: all handles are live; null means no weight or bias.
        unsafe {
            sys::mlx_fast_layer_norm(
                out,
                x.raw(),
                Array::raw_or_null(weight),
                Array::raw_or_null(bias),
                eps,
                s,
            )
        }
    })
    .map_err(|e| e.with_inputs(&[x]))
}

/// The base of rotary frequencies.
#[derive(Debug, Clone, Copy)]
pub enum RopeBase<'a> {
    /// `base^(-2i / dims)` for pair `i`.
    Theta(f32),
    /// Explicit **wavelength factors**, one per pair, by which positions are divided: `[dims / 2]`.
    Freqs(&'a Array),
}

/// Rotary position embedding (Su et al. 2021) of `x` `[B, .., L, D]`. Positions are
/// `offset..offset + L`, multiplied by `scale`. The first `dims` elements of each vector rotate.
/// `traditional` pairs adjacent elements (0,1), (2,3), ..; otherwise element `i` is paired with
/// element `i + dims / 2`.
///
/// ```
/// use mlx_rs_core::{array, fast};
/// let x = array!([1.0, 0.0])?.reshape(&[1, 1, 1, 2])?; // [B, heads, L, D]
/// let y = fast::rope(&x, 2, false, fast::RopeBase::Theta(10_000.0), 1.0, 3)?;
/// // Position 3 turns the first pair by 3 radians.
/// assert!(y.flatten(0, -1)?.all_close(&array!([3.0f32.cos(), 3.0f32.sin()])?, 1e-4, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] when `x` has fewer than three axes or the frequencies do not fit;
/// [`ErrorKind::Value`] when `dims` is odd or not within the last axis.
#[doc(alias = "mlx_fast_rope")]
pub fn rope(
    x: &Array,
    dims: i32,
    traditional: bool,
    base: RopeBase<'_>,
    scale: f32,
    offset: i32,
) -> Result<Array> {
    let (theta, freqs) = check_rope(x, dims, base)?;
    // For a single pair both forms are equal, but MLX's gradient of the traditional form is wrong.
    let traditional = traditional && dims != 2;
    let length = x.shape()[x.ndim() - 2];
    if i64::from(offset) + i64::from(length) > i64::from(i32::MAX) || offset < 0 {
        return Err(Error::new(
            ErrorKind::Value,
            "rope",
            format!("the offset {offset} is negative, or the positions from it on exceed i32::MAX"),
        ));
    }
    call::array("rope", |out, s| {
        // SAFETY: all handles are live, and dims and positions are in range. Null means no array.
        unsafe {
            sys::mlx_fast_rope(
                out,
                x.raw(),
                dims,
                traditional,
                theta,
                scale,
                offset,
                Array::raw_or_null(freqs),
                s,
            )
        }
    })
    .map_err(|e| e.with_inputs(&[x]))
}

/// [`rope`] with positions that start at `offset`: an integer array with one value, or with one
/// value for each of the `B` sequences of `x`. A batch of prompts with different lengths needs one
/// value per sequence.
///
/// ```
/// use mlx_rs_core::{Dtype, array, fast, idx, ones};
/// let x = ones(&[2, 1, 1, 4], Dtype::Float32)?; // two sequences at different positions
/// let base = fast::RopeBase::Theta(10_000.0);
/// let y = fast::rope_at(&x, 4, false, base, 1.0, &array!([0, 7])?)?;
/// let alone = fast::rope(&x, 4, false, base, 1.0, 7)?;
/// assert!(y.get(idx![0])?.all_close(&x.get(idx![0])?, 1e-5, 1e-6)?);
/// assert!(y.get(idx![1])?.all_close(&alone.get(idx![1])?, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`rope`]; [`ErrorKind::Shape`] or [`ErrorKind::Dtype`] for unsuitable offsets.
#[doc(alias = "mlx_fast_rope_dynamic")]
pub fn rope_at(
    x: &Array,
    dims: i32,
    traditional: bool,
    base: RopeBase<'_>,
    scale: f32,
    offset: &Array,
) -> Result<Array> {
    let (theta, freqs) = check_rope(x, dims, base)?;
    // For a single pair both forms are equal, but MLX's derivative of the traditional form is
    // wrong.
    let traditional = traditional && dims != 2;
    if !offset.dtype().is_integer() {
        return Err(Error::new(
            ErrorKind::Dtype,
            "rope",
            format!("offsets must be integers, not {}", offset.dtype()),
        ));
    }
    if offset.ndim() > 1 || (offset.size() != 1 && offset.size() as i64 != i64::from(x.shape()[0]))
    {
        return Err(Error::new(
            ErrorKind::Shape,
            "rope",
            "give one offset, or one for each sequence of the batch",
        )
        .with_inputs(&[x, offset]));
    }
    call::array("rope", |out, s| {
        // SAFETY: all handles are live, dims are in range, and the offsets match. Null means no
        // array. Positions are only multiplied, never used as an address.
        unsafe {
            sys::mlx_fast_rope_dynamic(
                out,
                x.raw(),
                dims,
                traditional,
                theta,
                scale,
                offset.raw(),
                Array::raw_or_null(freqs),
                s,
            )
        }
    })
    .map_err(|e| e.with_inputs(&[x, offset]))
}

/// Checks the arguments that both forms of [`rope`] have in common, and converts the base for C.
fn check_rope<'a>(
    x: &Array,
    dims: i32,
    base: RopeBase<'a>,
) -> Result<(sys::mlx_optional_float, Option<&'a Array>)> {
    let shape = x.shape();
    if shape.len() < 3 {
        return Err(
            Error::new(ErrorKind::Shape, "rope", "needs axes [.., heads, L, D]").with_inputs(&[x]),
        );
    }
    let head_dim = shape[shape.len() - 1];
    if dims <= 0 || dims % 2 != 0 || dims > head_dim {
        return Err(Error::new(
            ErrorKind::Value,
            "rope",
            format!(
                "{dims} rotary dimensions must be even and within the {head_dim} of the last axis"
            ),
        ));
    }
    match base {
        RopeBase::Theta(value) => Ok((
            sys::mlx_optional_float {
                value,
                has_value: true,
            },
            None,
        )),
        RopeBase::Freqs(freqs) => {
            if freqs.shape() != [dims / 2] {
                return Err(Error::new(
                    ErrorKind::Shape,
                    "rope",
                    format!("frequencies must have shape [{}]", dims / 2),
                )
                .with_inputs(&[x, freqs]));
            }
            Ok((
                sys::mlx_optional_float {
                    value: 0.0,
                    has_value: false,
                },
                Some(freqs),
            ))
        }
    }
}

/// The keys that a query may attend to.
#[derive(Debug, Clone, Copy)]
pub enum Mask<'a> {
    /// All keys.
    None,
    /// The key at the query's position, and all earlier keys. The last query attends to every key.
    Causal,
    /// A boolean (true: attend) or additive array that broadcasts to `[B, H, Lq, Lk]`.
    Array(&'a Array),
}

impl Mask<'_> {
    fn name(self) -> &'static CStr {
        match self {
            Mask::None => c"",
            Mask::Causal => c"causal",
            Mask::Array(_) => c"array",
        }
    }
}

/// `softmax(scale * q k^T + mask) v` (Vaswani et al. 2017) for `q` `[B, H, Lq, D]` and `k`, `v`
/// `[B, Hkv, Lk, D]`. `H` is a multiple of `Hkv`: a group of query heads shares each key head.
///
/// ```
/// use mlx_rs_core::{Dtype, arange, array, fast, idx, ones};
/// let q = ones(&[1, 2, 3, 4], Dtype::Float32)?; // [B, H, L, D]
/// let v = arange(0.0, 12.0, 1.0, Dtype::Float32)?.reshape(&[1, 1, 3, 4])?;
/// let k = ones(&[1, 1, 3, 4], Dtype::Float32)?; // one head of keys for two of queries
/// let y = fast::scaled_dot_product_attention(&q, &k, &v, 0.5, fast::Mask::Causal)?;
/// assert_eq!(y.shape(), [1, 2, 3, 4]);
/// // The first query sees the first key alone, the second two of equal weight.
/// assert!(y.get(idx![0, 0, 0])?.all_close(&array!([0.0, 1.0, 2.0, 3.0])?, 1e-5, 1e-6)?);
/// assert!(y.get(idx![0, 0, 1])?.all_close(&array!([2.0, 3.0, 4.0, 5.0])?, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// MLX's message when shapes, types or the mask do not fit.
pub fn scaled_dot_product_attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f32,
    mask: Mask<'_>,
) -> Result<Array> {
    scaled_dot_product_attention_with_sinks(queries, keys, values, scale, mask, None)
}

/// [`scaled_dot_product_attention`] with `sinks`: one score per query head, `[H]`. The score enters
/// each softmax of its head, but has no value (Xiao et al. 2023).
///
/// ```
/// use mlx_rs_core::{Dtype, array, fast, ones};
/// let one = ones(&[1, 1, 1, 4], Dtype::Float32)?;
/// let score = array!([4.0])?; // the same as that of the one key: each gets half
/// let y = fast::scaled_dot_product_attention_with_sinks(
///     &one, &one, &one, 1.0, fast::Mask::None, Some(&score),
/// )?;
/// assert!(y.all_close(&array!(0.5)?, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] without heads or when there is not one sink per query head; otherwise MLX's
/// message when shapes, types or the mask do not fit.
#[doc(alias = "mlx_fast_scaled_dot_product_attention")]
pub fn scaled_dot_product_attention_with_sinks(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f32,
    mask: Mask<'_>,
    sinks: Option<&Array>,
) -> Result<Array> {
    let bad = |why: &str| {
        Err(
            Error::new(ErrorKind::Shape, "scaled_dot_product_attention", why)
                .with_inputs(&[queries, keys, values]),
        )
    };
    let (q, k, v) = (queries.shape(), keys.shape(), values.shape());
    if q.len() != 4 || k.len() != 4 || v.len() != 4 {
        return bad("queries, keys and values need axes [B, H, L, D]");
    }
    // MLX divides by the number of key heads, and never compares the lengths of keys and values. So
    // both are checked here.
    if k[1] == 0 || k[2] != v[2] {
        return bad("keys and values need at least one head and the same length");
    }
    if sinks.is_some_and(|s| s.shape() != [q[1]]) {
        return bad("give one sink for each query head");
    }
    // MLX 0.30.1 aligns the first query with the first key if there are more queries than keys.
    #[cfg(not(mlx_c_0_5))]
    let aligned = match mask {
        Mask::Causal if q[2] > k[2] => Some(causal_mask(q[2], k[2])?),
        _ => None,
    };
    #[cfg(not(mlx_c_0_5))]
    let mask = aligned.as_ref().map_or(mask, Mask::Array);
    let ordered = if Facts::current()?.copies_queries_too_late(q[2]) {
        Some(queries.contiguous()?)
    } else {
        None
    };
    let queries = ordered.as_ref().unwrap_or(queries);
    let array = match mask {
        Mask::Array(a) => Some(a),
        Mask::None | Mask::Causal => None,
    };
    call::array("scaled_dot_product_attention", |out, s| {
        // SAFETY: all handles are live, and the mode is a static string. Null means no array.
        unsafe {
            compat::mlx_fast_scaled_dot_product_attention(
                out,
                queries.raw(),
                keys.raw(),
                values.raw(),
                scale,
                mask.name().as_ptr(),
                Array::raw_or_null(array),
                Array::raw_or_null(sinks),
                s,
            )
        }
    })
    .and_then(|attended| attended.unless_of_nothing(&[queries, keys, values]))
    .map_err(|e| e.with_inputs(&[queries, keys, values]))
}

/// The cross-entropy loss of each row of logits `[.., classes]` for its target class, `[..]`:
/// `log(sum(exp(logits))) - logits[target]`. Targets out of range are clamped.
///
/// ```
/// use mlx_rs_core::{array, fast};
/// let loss = fast::cross_entropy(&array!([[0.0, 0.0]])?, &array!([1])?)?;
/// assert!((loss.at::<f32>(&[0])? - 2.0f32.ln()).abs() < 1e-6);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] when the number of targets differs from the number of rows, or there are no
/// classes.
pub fn cross_entropy(logits: &Array, targets: &Array) -> Result<Array> {
    let rows = logits.shape().split_last().map(|(_, rows)| rows);
    if rows != Some(targets.shape()) {
        return Err(Error::new(
            ErrorKind::Shape,
            "cross_entropy",
            "give one target for each row of logits",
        )
        .with_inputs(&[logits, targets]));
    }
    let chosen = logits.take_along_axis(&targets.expand_dims(-1)?, -1)?;
    logits
        .logsumexp(-1, false)?
        .subtract(&chosen.squeeze_axis(-1)?)
}

/// The causal mask `[queries, keys]`: true for keys that are not later than the query. The last
/// query and the last key are aligned.
#[cfg(not(mlx_c_0_5))]
fn causal_mask(queries: i32, keys: i32) -> Result<Array> {
    use crate::dtype::Dtype;
    use crate::ops::arange;
    let (queries, keys) = (f64::from(queries), f64::from(keys));
    let query = arange(keys - queries, keys, 1.0, Dtype::Int32)?.expand_dims(1)?;
    query.greater_equal(&arange(0.0, keys, 1.0, Dtype::Int32)?)
}
