//! Splits the positions of a recurrence into chunks, and computes the decay between positions.

use mlx_rs_core::{Array, Dtype, Result, concatenate, tri, where_, zeros};

/// Reshapes `[R, H, L, ..]` to `[R, H, N, C, ..]`, padded with zeros. A padded position writes
/// nothing and forgets nothing.
///
/// # Errors
/// If `a` has more positions than `count` chunks of `size`.
pub fn cut(a: &Array, size: i32, count: i32) -> Result<Array> {
    let shape = a.shape().to_vec();
    let (head, rest) = (&shape[..2], &shape[3..]);
    let missing = size * count - shape[2];
    let padded = if missing == 0 {
        a.clone()
    } else {
        let filler = [head, &[missing], rest].concat();
        let zeros = zeros(&filler, a.dtype())?;
        concatenate(&[a, &zeros], 2)?
    };
    padded.reshape(&[head, &[count, size], rest].concat())
}

/// Joins the outputs of all chunks, `[R, H, C, ..]` each, and drops the padding. Returns
/// `[R, H, length, ..]`.
///
/// # Errors
/// If there are no chunks, or fewer positions than `length`.
pub fn joined(chunks: &[Array], length: i32) -> Result<Array> {
    let all = match chunks {
        [one] => one.clone(),
        several => concatenate(&several.iter().collect::<Vec<_>>(), 2)?,
    };
    match all.dim(2)? == length {
        true => Ok(all),
        false => all.slice_axis(2, 0, length),
    }
}

/// Returns the decay `[.., C, C]` for the logarithms of forget gates `f` `[.., C]`. Element `[row,
/// column]` is the fraction of the column's write that remains at the row's position; 0 for later
/// columns.
///
/// Sums the `f` between two positions directly, because the difference of two long sums would lose
/// precision.
pub fn decay(f: &Array) -> Result<Array> {
    let size = f.dim(-1)?;
    let before = tri(size, size, -1, Dtype::Float32)?;
    let causal = tri(size, size, 0, Dtype::Bool)?;
    let left = f
        .expand_dims(-1)?
        .multiply(&before)?
        .cumsum(-2, false, true)?
        .exp()?;
    where_(&causal, &left, &Array::scalar(0.0f32)?)
}

/// Helpers for the tests of the rules.
#[cfg(test)]
pub(super) mod test_support {
    use super::*;

    /// Returns `n` pseudo-random numbers from -1 to 1 (linear congruential generator).
    pub fn numbers(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2) + 1;
        (0..n)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// Returns the greatest difference between two lists of numbers.
    ///
    /// # Panics
    /// If a number is not finite, or if the lengths differ.
    pub fn distance(actual: &Array, expected: &[f64]) -> f64 {
        let actual = actual.to_vec::<f32>().unwrap();
        assert_eq!(actual.len(), expected.len());
        (actual.iter().zip(expected))
            .map(|(&f, &e)| {
                assert!(f.is_finite(), "{f} instead of {e}");
                (f64::from(f) - e).abs()
            })
            .fold(0.0, f64::max)
    }
}
