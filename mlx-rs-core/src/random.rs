//! Random values from explicit keys (Threefry, Salmon et al. 2011). A key always produces the same
//! values, which are those of Python's `mlx.core.random`. There is deliberately no global
//! generator, because its values would depend on the order of calls on all threads. A program that
//! draws often uses a [`Keys`].
//!
//! ```
//! use mlx_rs_core::{Dtype, random};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let mut keys = random::Keys::new(7)?;
//! let noise = random::normal(0.0, 1.0, &[2, 3], Dtype::Float32, &keys.next_key()?)?;
//! let dice = random::randint(1, 7, &[4], Dtype::Int32, &keys.next_key()?)?;
//! assert_eq!((noise.shape(), dice.shape()), (&[2, 3][..], &[4][..]));
//! # Ok(()) }
//! ```

mod discrete;

pub use discrete::{
    bernoulli, bits, categorical, categorical_samples, categorical_shaped, permutation,
    permutation_of, randint,
};

use mlx_sys as sys;

use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// The state of a generator: two 32-bit words on the device.
#[derive(Debug, Clone)]
pub struct Key(Array);

impl Key {
    /// The key of a seed.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, random};
    /// let draw = |seed| random::uniform(0.0, 1.0, &[4], Dtype::Float32, &random::Key::new(seed)?);
    /// assert!(draw(7)?.array_equal(&draw(7)?)?);
    /// assert!(!draw(7)?.array_equal(&draw(8)?)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot allocate it.
    #[doc(alias = "mlx_random_key")]
    pub fn new(seed: u64) -> Result<Self> {
        call::adopt("random_key", |out| {
            // SAFETY: `out` is a writable handle.
            unsafe { sys::mlx_random_key(out, seed) }
        })
        .map(Self)
    }

    /// A key from its two words. A compiled function can thus receive a key as an argument.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Dtype, Result, random, transforms::compile};
    /// let draw = compile(|x: &[Array]| -> Result<Vec<Array>> {
    ///     let key = random::Key::from_array(x[0].clone())?;
    ///     Ok(vec![random::uniform(0.0, 1.0, &[4], Dtype::Float32, &key)?])
    /// });
    /// for seed in [7, 8] {
    ///     let key = random::Key::new(seed)?;
    ///     let plain = random::uniform(0.0, 1.0, &[4], Dtype::Float32, &key)?;
    ///     assert!(draw.call(&[key.array().clone()])?[0].array_equal(&plain)?);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when `words` is not two words of [`Dtype::Uint32`].
    pub fn from_array(words: Array) -> Result<Self> {
        if words.dtype() == Dtype::Uint32 && words.shape() == [2] {
            return Ok(Self(words));
        }
        let message = "a key is two words of uint32";
        Err(Error::new(ErrorKind::Value, "random_key", message).with_inputs(&[&words]))
    }

    /// Two independent keys.
    ///
    /// ```
    /// use mlx_rs_core::random;
    /// let (a, b) = random::Key::new(7)?.split()?;
    /// assert!(!a.array().array_equal(b.array())?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot allocate them.
    #[doc(alias = "mlx_random_split")]
    pub fn split(&self) -> Result<(Self, Self)> {
        let (first, second) = call::pair("random_split", |first, second, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { sys::mlx_random_split(first, second, self.0.raw(), s) }
        })?;
        Ok((Self(first), Self(second)))
    }

    /// `count` independent keys.
    ///
    /// ```
    /// use mlx_rs_core::random;
    /// assert_eq!(random::Key::new(7)?.split_into(3)?.len(), 3);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for a negative count.
    #[doc(alias = "mlx_random_split_num")]
    pub fn split_into(&self, count: i32) -> Result<Vec<Self>> {
        let op = "random_split";
        if count < 0 {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                format!("cannot split a key into {count}"),
            ));
        }
        countable(op, &[count, 2])?;
        if count == 0 {
            return Ok(Vec::new());
        }
        // The keys as rows: `[count, 2]`.
        let rows = call::array(op, |out, s| {
            // SAFETY: all handles are live; the count is positive.
            unsafe { sys::mlx_random_split_num(out, self.0.raw(), count, s) }
        })?;
        (0..count)
            .map(|i| Ok(Self(rows.slice_axis(0, i, i + 1)?.reshape(&[2])?)))
            .collect()
    }

    /// The two words of the key, for evaluation together with other arrays.
    ///
    /// ```
    /// use mlx_rs_core::random;
    /// assert_eq!(random::Key::new(7)?.array().to_vec::<u32>()?, [0, 7]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn array(&self) -> &Array {
        &self.0
    }
}

/// A sequence of keys from one seed. It equals the keys of MLX's global generator after
/// `mlx.core.random.seed`, but belongs to the caller.
#[derive(Debug, Clone)]
pub struct Keys {
    state: Key,
}

impl Keys {
    /// The sequence of a seed.
    ///
    /// ```
    /// use mlx_rs_core::random;
    /// let (mut a, mut b) = (random::Keys::new(7)?, random::Keys::new(7)?);
    /// assert!(a.next_key()?.array().array_equal(b.next_key()?.array())?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot allocate it.
    pub fn new(seed: u64) -> Result<Self> {
        Key::new(seed).map(|state| Self { state })
    }

    /// The next key. It is evaluated at once. Otherwise a long sequence would be a deep graph.
    ///
    /// ```
    /// use mlx_rs_core::random;
    /// let mut keys = random::Keys::new(7)?;
    /// let (first, second) = (keys.next_key()?, keys.next_key()?);
    /// assert!(!first.array().array_equal(second.array())?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot allocate it.
    pub fn next_key(&mut self) -> Result<Key> {
        let (state, key) = self.state.split()?;
        crate::eval([state.array(), key.array()])?;
        self.state = state;
        Ok(key)
    }
}

fn countable(op: &'static str, shape: &[i32]) -> Result<()> {
    if memory::checked_bytes(shape, 8).is_some_and(|b| b <= memory::budget()) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Shape,
        op,
        format!("shape {shape:?} is negative or too large"),
    ))
}

fn float_only(op: &'static str, dtype: Dtype) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Dtype,
        op,
        format!("needs a float type, not {dtype}"),
    ))
}

/// Uniform values in `[low, high)`.
///
/// ```
/// use mlx_rs_core::{Dtype, random};
/// let x = random::uniform(-1.0, 1.0, &[100], Dtype::Float32, &random::Key::new(0)?)?;
/// assert!(x.to_vec::<f32>()?.iter().all(|v| (-1.0..1.0).contains(v)));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape, or a type that is not `float16`, `bfloat16` or `float32`.
pub fn uniform(low: f32, high: f32, shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    let (low, high) = (Array::scalar(low)?, Array::scalar(high)?);
    uniform_between(&low, &high, shape, dtype, key)
}

/// [`uniform`] values between two arrays, which broadcast to `shape`.
///
/// ```
/// use mlx_rs_core::{Dtype, array, random};
/// let (low, high) = (array!([0.0, 10.0])?, array!([1.0, 11.0])?);
/// let x = random::uniform_between(&low, &high, &[2], Dtype::Float32, &random::Key::new(0)?)?;
/// assert_eq!(x.floor()?.to_vec::<f32>()?, [0.0, 10.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`uniform`]; MLX's message when the limits do not broadcast to the shape.
#[doc(alias = "mlx_random_uniform")]
pub fn uniform_between(
    low: &Array,
    high: &Array,
    shape: &[i32],
    dtype: Dtype,
    key: &Key,
) -> Result<Array> {
    countable("random_uniform", shape)?;
    float_only("random_uniform", dtype)?;
    call::array("random_uniform", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_uniform(
                out,
                low.raw(),
                high.raw(),
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                key.0.raw(),
                s,
            )
        }
    })
}

/// Normal values with the given mean and standard deviation.
///
/// ```
/// use mlx_rs_core::{All, Dtype, random};
/// let x = random::normal(5.0, 0.1, &[1000], Dtype::Float32, &random::Key::new(0)?)?;
/// assert!((x.mean(All, false)?.item::<f32>()? - 5.0).abs() < 0.05);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape, or a type that is not a float.
#[doc(alias = "mlx_random_normal")]
pub fn normal(mean: f32, std: f32, shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    countable("random_normal", shape)?;
    float_only("random_normal", dtype)?;
    call::array("random_normal", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_normal(
                out,
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                mean,
                std,
                key.0.raw(),
                s,
            )
        }
    })
}

/// Standard Gumbel values, `-log(-log(u))`.
///
/// ```
/// use mlx_rs_core::{Dtype, random};
/// let x = random::gumbel(&[2, 3], Dtype::Float32, &random::Key::new(0)?)?;
/// assert_eq!(x.shape(), [2, 3]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape, or a type that is not a float.
#[doc(alias = "mlx_random_gumbel")]
pub fn gumbel(shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    countable("random_gumbel", shape)?;
    float_only("random_gumbel", dtype)?;
    call::array("random_gumbel", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_gumbel(
                out,
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                key.0.raw(),
                s,
            )
        }
    })
}

/// Normal values. Mean and standard deviation are arrays that broadcast to `shape`. They default to
/// 0 and 1.
///
/// ```
/// use mlx_rs_core::{Dtype, array, random};
/// let mean = array!([0.0, 100.0])?;
/// let x = random::normal_with(Some(&mean), None, &[2], Dtype::Float32, &random::Key::new(0)?)?;
/// assert!(x.at::<f32>(&[1])? > x.at::<f32>(&[0])?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape, or a type that is neither a float nor complex; MLX's message when the
/// parameters do not broadcast.
#[doc(alias = "mlx_random_normal_broadcast")]
pub fn normal_with(
    mean: Option<&Array>,
    std: Option<&Array>,
    shape: &[i32],
    dtype: Dtype,
    key: &Key,
) -> Result<Array> {
    let op = "random_normal";
    countable(op, shape)?;
    if dtype != Dtype::Complex64 {
        float_only(op, dtype)?;
    }
    let drawn = call::array(op, |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live; null stands for
        // none.
        unsafe {
            sys::mlx_random_normal_broadcast(
                out,
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                Array::raw_or_null(mean),
                Array::raw_or_null(std),
                key.0.raw(),
                s,
            )
        }
    })?;
    if drawn.shape() == shape {
        return Ok(drawn);
    }
    Err(Error::new(
        ErrorKind::Shape,
        op,
        format!("mean and deviation do not broadcast to {shape:?}"),
    ))
}

/// Laplace values with the given location and scale: their density is `exp(-|x - location| / scale)
/// / (2 scale)`.
///
/// ```
/// use mlx_rs_core::{All, Dtype, random};
/// let x = random::laplace(5.0, 0.1, &[1000], Dtype::Float32, &random::Key::new(0)?)?;
/// assert!((x.mean(All, false)?.item::<f32>()? - 5.0).abs() < 0.05);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape, or a type that is not a float.
#[doc(alias = "mlx_random_laplace")]
pub fn laplace(location: f32, scale: f32, shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    countable("random_laplace", shape)?;
    float_only("random_laplace", dtype)?;
    call::array("random_laplace", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_laplace(
                out,
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                location,
                scale,
                key.0.raw(),
                s,
            )
        }
    })
}

/// Standard normal values within `[lower, upper]`. Both limits are arrays that broadcast to
/// `shape`.
///
/// ```
/// use mlx_rs_core::{Dtype, array, random};
/// let (low, high) = (array!(-0.5)?, array!(0.5)?);
/// let x = random::truncated_normal(&low, &high, &[50], Dtype::Float32, &random::Key::new(0)?)?;
/// assert!(x.to_vec::<f32>()?.iter().all(|v| v.abs() <= 0.5));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape, or a type that is not a float; MLX's message when the limits do not
/// broadcast.
#[doc(alias = "mlx_random_truncated_normal")]
pub fn truncated_normal(
    lower: &Array,
    upper: &Array,
    shape: &[i32],
    dtype: Dtype,
    key: &Key,
) -> Result<Array> {
    countable("random_truncated_normal", shape)?;
    float_only("random_truncated_normal", dtype)?;
    call::array("random_truncated_normal", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_truncated_normal(
                out,
                lower.raw(),
                upper.raw(),
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                key.0.raw(),
                s,
            )
        }
    })
    .map_err(|e| e.with_inputs(&[lower, upper]))
}

/// Jointly normal vectors, `float32` `[shape .., n]`, with `mean` `[.., n]` and covariance `[.., n,
/// n]`. The leading axes of both broadcast to `shape`. Computed on the CPU. The result is NaN where
/// the covariance is not finite.
///
/// ```
/// use mlx_rs_core::{array, random};
/// let (mean, covariance) = (array!([0.0, 50.0])?, array!([[1.0, 0.5], [0.5, 1.0]])?);
/// let x = random::multivariate_normal(&mean, &covariance, &[3], &random::Key::new(0)?)?;
/// assert_eq!(x.shape(), [3, 2]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape, or when mean and covariance do not fit each other; [`ErrorKind::Dtype`]
/// for those that are not `float32`.
#[doc(alias = "mlx_random_multivariate_normal")]
pub fn multivariate_normal(
    mean: &Array,
    covariance: &Array,
    shape: &[i32],
    key: &Key,
) -> Result<Array> {
    let op = "random_multivariate_normal";
    let fits = match (mean.shape(), covariance.shape()) {
        ([.., n], [.., rows, columns]) => {
            n == rows && n == columns && (1..=crate::linalg::LARGEST_SINGLE).contains(n)
        }
        _ => false,
    };
    if !fits || covariance.size() == 0 {
        return Err(Error::new(
            ErrorKind::Shape,
            op,
            format!(
                "needs a mean [.., n] and a covariance [.., n, n], n at most {}",
                crate::linalg::LARGEST_SINGLE
            ),
        )
        .with_inputs(&[mean, covariance]));
    }
    if mean.dtype() != Dtype::Float32 || covariance.dtype() != Dtype::Float32 {
        return Err(Error::new(
            ErrorKind::Dtype,
            op,
            "mean and covariance must be float32",
        ));
    }
    let n = mean.shape()[mean.ndim() - 1];
    countable(op, &[shape, &[n]].concat())?;
    crate::linalg::guarded(covariance, n, |safe| {
        call::array(op, |out, s| {
            // SAFETY: pointer and length describe the slice, and all handles are live. The
            // covariance is finite and not too large for the decomposition.
            unsafe {
                sys::mlx_random_multivariate_normal(
                    out,
                    mean.raw(),
                    safe.raw(),
                    shape.as_ptr(),
                    shape.len(),
                    Dtype::Float32.raw(),
                    key.0.raw(),
                    s,
                )
            }
        })
    })
    .map_err(|e| e.with_inputs(&[mean, covariance]))
}
