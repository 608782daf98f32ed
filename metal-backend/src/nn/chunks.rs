//! Splits the positions of a recurrence into chunks, and computes the decay between positions.

use mlx_rs_core::{Array, Dtype, Result, concatenate, tri, where_, zeros};

/// `[R, H, L, ..] -> [R, H, N, C, ..]`, padded with zeros. Zeros write nothing and forget nothing.
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

/// For each pair of positions (row, column): the fraction of the column's write that remains at the
/// row's position. `f` has the logarithms of the forget gates: `[.., C] -> [.., C, C]`. Writes
/// after the row's position have fraction 0.
///
/// The `f` between the two positions are summed directly, because the difference of two long sums
/// loses precision.
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
