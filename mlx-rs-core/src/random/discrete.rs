//! Random bits, integers, choices, and permutations.

use mlx_sys as sys;

use super::{Key, countable};
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// Random bits, as unsigned integers of `width` bytes (1, 2 or 4).
///
/// ```
/// use mlx_rs_core::{Dtype, random};
/// let x = random::bits(&[3], 2, &random::Key::new(0)?)?;
/// assert_eq!((x.shape(), x.dtype()), (&[3][..], Dtype::Uint16));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape or another width.
#[doc(alias = "mlx_random_bits")]
pub fn bits(shape: &[i32], width: i32, key: &Key) -> Result<Array> {
    let op = "random_bits";
    countable(op, shape)?;
    if !matches!(width, 1 | 2 | 4) {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            format!("the width must be 1, 2 or 4 bytes, not {width}"),
        ));
    }
    let key = apart(&key.0, width)?;
    call::array(op, |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe { sys::mlx_random_bits(out, shape.as_ptr(), shape.len(), width, key.raw(), s) }
    })
}

#[cfg(mlx_c_0_5)]
fn apart(key: &Array, _width: i32) -> Result<&Array> {
    Ok(key)
}

/// Makes the key array distinct for each width. When MLX 0.30.1 compiles a function, it treats
/// draws of bits with equal shapes and keys as equal, even if their widths differ.
#[cfg(not(mlx_c_0_5))]
fn apart(key: &Array, width: i32) -> Result<Array> {
    let zero = Array::scalar(0u32)?;
    match width {
        1 => key.bitwise_or(&zero),
        2 => key.bitwise_xor(&zero),
        _ => Ok(key.clone()),
    }
}

/// MLX's floats represent every integer up to this value.
const EXACT: i64 = 1 << 24;

/// Random integers of `dtype` in `low..high`. If the interval is between 0 and 2^24, the values
/// equal MLX's, except that `high` itself never occurs; MLX's floats sometimes round to it. For
/// negative integers, MLX rounds towards zero, and it never returns most large integers. So for
/// other intervals, this function multiplies 32 random bits (64 for wide intervals) by the width of
/// the interval. The bias is at most the ratio of that width to 2^32 or 2^64.
///
/// ```
/// use mlx_rs_core::{Dtype, random};
/// let dice = random::randint(1, 7, &[100], Dtype::Int32, &random::Key::new(0)?)?;
/// assert!(dice.to_vec::<i32>()?.iter().all(|v| (1..7).contains(v)));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] for an empty interval, or bounds that do not fit `dtype`;
/// [`ErrorKind::Dtype`] for a type that is not an integer; also for an impossible shape.
#[doc(alias = "mlx_random_randint")]
pub fn randint(low: i64, high: i64, shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    let op = "random_randint";
    countable(op, shape)?;
    if !dtype.is_integer() {
        return Err(Error::new(
            ErrorKind::Dtype,
            op,
            format!("needs an integer type, not {dtype}"),
        ));
    }
    let bits = 8 * dtype.size() as u32;
    let (least, greatest) = match (dtype.is_signed_integer(), bits) {
        (_, 64) if dtype.is_signed_integer() => (i128::from(i64::MIN), i128::from(i64::MAX)),
        (true, bits) => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        (false, bits) => (0, (1i128 << bits) - 1),
    };
    if low >= high || i128::from(low) < least || i128::from(high) - 1 > greatest {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            format!("there is no integer of {dtype} from {low} to below {high}"),
        ));
    }
    if low >= 0 && high <= EXACT {
        let greatest = Array::scalar(high - 1)?.astype(dtype)?;
        let (low, high) = (Array::scalar(low as i32)?, Array::scalar(high as i32)?);
        let drawn = call::array(op, |out, s| {
            // SAFETY: pointer and length describe the slice; all handles are live.
            unsafe {
                sys::mlx_random_randint(
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
        })?;
        return drawn.minimum(&greatest);
    }
    // The width is at least one, because the interval is not empty, and below 2^64.
    let width = high.wrapping_sub(low) as u64;
    let offset = match u32::try_from(width) {
        // The upper half of a 64-bit product is `draw * width / 2^32`.
        Ok(width) => super::bits(shape, 4, key)?
            .astype(Dtype::Uint64)?
            .multiply(&Array::scalar(u64::from(width))?)?
            .right_shift(&Array::scalar(32u64)?)?,
        Err(_) => {
            let (first, second) = key.split()?;
            let upper = super::bits(shape, 4, &first)?
                .astype(Dtype::Uint64)?
                .left_shift(&Array::scalar(32u64)?)?;
            let word = upper.bitwise_or(&super::bits(shape, 4, &second)?.astype(Dtype::Uint64)?)?;
            word.remainder(&Array::scalar(width)?)?
        }
    };
    // Integers wrap around, so a negative start is correct after conversion to the requested type.
    let drawn = offset.add(&Array::scalar(low as u64)?)?;
    if dtype == Dtype::Int64 {
        return drawn.view(Dtype::Int64);
    }
    drawn.astype(dtype)
}

/// Random booleans of `shape`. Each is true with probability `p`, a float array that broadcasts to
/// `shape`.
///
/// ```
/// use mlx_rs_core::{array, random};
/// let x = random::bernoulli(&array!([0.0, 1.0])?, &[2], &random::Key::new(0)?)?;
/// assert_eq!(x.to_vec::<bool>()?, [false, true]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// For an impossible shape; MLX's message when `p` is not a float array or does not broadcast.
#[doc(alias = "mlx_random_bernoulli")]
pub fn bernoulli(p: &Array, shape: &[i32], key: &Key) -> Result<Array> {
    let op = "random_bernoulli";
    countable(op, shape)?;
    call::array(op, |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_bernoulli(out, p.raw(), shape.as_ptr(), shape.len(), key.0.raw(), s)
        }
    })
    .map_err(|e| e.with_inputs(&[p]))
}

/// Checks that `axis` exists and is not empty. Returns the axis counted from the front.
fn choices(logits: &Array, axis: i32) -> Result<usize> {
    let op = "categorical";
    let at = logits.axis(op, axis)?;
    if logits.shape()[at] == 0 {
        return Err(Error::new(
            ErrorKind::Index,
            op,
            "an axis without logits cannot be drawn from",
        )
        .with_inputs(&[logits]));
    }
    Ok(at)
}

/// Draws one index (`uint32`) along `axis`, with the probabilities `softmax(logits)`.
///
/// ```
/// use mlx_rs_core::{array, random};
/// let logits = array!([[0.0, 1e9], [1e9, 0.0]])?;
/// assert_eq!(random::categorical(&logits, -1, &random::Key::new(0)?)?.to_vec::<u32>()?, [1, 0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Index`] when there is no such axis or it is empty.
#[doc(alias = "mlx_random_categorical")]
pub fn categorical(logits: &Array, axis: i32, key: &Key) -> Result<Array> {
    choices(logits, axis)?;
    call::array("categorical", |out, s| {
        // SAFETY: all handles are live; the axis exists.
        unsafe { sys::mlx_random_categorical(out, logits.raw(), axis, key.0.raw(), s) }
    })
    .map_err(|e| e.with_inputs(&[logits]))
}

/// [`categorical`] with `samples` independent draws, which are a new last axis.
///
/// ```
/// use mlx_rs_core::{array, random};
/// let x = random::categorical_samples(&array!([[0.0, 1e9]])?, -1, 3, &random::Key::new(0)?)?;
/// assert_eq!((x.shape(), x.to_vec::<u32>()?), (&[1, 3][..], vec![1, 1, 1]));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`categorical`]; [`ErrorKind::Shape`] for a negative number, or one beyond the budget.
#[doc(alias = "mlx_random_categorical_num_samples")]
pub fn categorical_samples(logits: &Array, axis: i32, samples: i32, key: &Key) -> Result<Array> {
    let op = "categorical";
    choices(logits, axis)?;
    // MLX draws one number for each logit and sample.
    countable(op, &[logits.shape(), &[samples]].concat())?;
    call::array(op, |out, s| {
        // SAFETY: all handles are live; the axis exists and the number is not negative.
        unsafe {
            sys::mlx_random_categorical_num_samples(
                out,
                logits.raw(),
                axis,
                samples,
                key.0.raw(),
                s,
            )
        }
    })
    .map_err(|e| e.with_inputs(&[logits]))
}

/// [`categorical`] with a result of `shape`, to which the other axes of `logits` broadcast.
///
/// ```
/// use mlx_rs_core::{array, random};
/// let x = random::categorical_shaped(&array!([0.0, 1e9])?, -1, &[2, 2], &random::Key::new(0)?)?;
/// assert_eq!(x.to_vec::<u32>()?, [1; 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`categorical`]; for an impossible shape; MLX's message when the axes do not broadcast to it.
#[doc(alias = "mlx_random_categorical_shape")]
pub fn categorical_shaped(logits: &Array, axis: i32, shape: &[i32], key: &Key) -> Result<Array> {
    let op = "categorical";
    let at = choices(logits, axis)?;
    countable(op, &[shape, &[logits.shape()[at]]].concat())?;
    call::array(op, |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live; the axis exists.
        unsafe {
            sys::mlx_random_categorical_shape(
                out,
                logits.raw(),
                axis,
                shape.as_ptr(),
                shape.len(),
                key.0.raw(),
                s,
            )
        }
    })
    .map_err(|e| e.with_inputs(&[logits]))
}

/// The elements of `axis`, in random order.
///
/// ```
/// use mlx_rs_core::{array, random};
/// let x = random::permutation(&array!([[1, 2], [3, 4], [5, 6]])?, 0, &random::Key::new(0)?)?;
/// assert_eq!(x.sum(1, false)?.sort(0)?.to_vec::<i32>()?, [3, 7, 11]); // whole rows moved
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Index`] when there is no such axis.
pub fn permutation(a: &Array, axis: i32, key: &Key) -> Result<Array> {
    let op = "random_permutation";
    if a.shape()[a.axis(op, axis)?] == 0 {
        return Ok(a.clone());
    }
    // This is MLX's algorithm, but its own gather computes some arrays wrongly.
    let order = permutation_of(a.dim(axis)?, key)?;
    a.take_raw(op, &order, axis)
}

/// The integers `0..count` (`uint32`), in random order.
///
/// ```
/// use mlx_rs_core::random;
/// let x = random::permutation_of(5, &random::Key::new(0)?)?;
/// assert_eq!(x.sort(0)?.to_vec::<u32>()?, [0, 1, 2, 3, 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for a negative count, or one beyond the budget.
#[doc(alias = "mlx_random_permutation_arange")]
pub fn permutation_of(count: i32, key: &Key) -> Result<Array> {
    let op = "random_permutation";
    countable(op, &[count])?;
    if count == 0 {
        // MLX would sort and divide by the length, which is zero.
        return crate::zeros(&[0], Dtype::Uint32);
    }
    call::array(op, |out, s| {
        // SAFETY: all handles are live; the count is positive.
        unsafe { sys::mlx_random_permutation_arange(out, count, key.0.raw(), s) }
    })
}
