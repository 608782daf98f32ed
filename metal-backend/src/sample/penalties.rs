//! Changes logits before the filters, with functions on `[1, V]`: penalties, biases, bans and a
//! grammar's mask. All operations stay in MLX's graph.

use mlx_rs_core::{Array, Dtype, Result, where_};

use super::filters::minus_infinity;

/// Lowers the logits of the tokens in `history` `[1, n]`. Positive logits are divided by `penalty`,
/// negative logits multiplied (Keskar et al. 2019, CTRL). A repeated token counts once.
pub fn repeat_penalty(logits: &Array, history: &Array, penalty: f32) -> Result<Array> {
    let seen = logits.take_along_axis(history, -1)?;
    let by = Array::scalar(penalty)?;
    let lowered = where_(
        &seen.less(&Array::scalar(0.0f32)?)?,
        &seen.multiply(&by)?,
        &seen.divide(&by)?,
    )?;
    // Duplicate ids get equal values, so the order of the writes does not matter.
    logits.put_along_axis(history, &lowered, -1)
}

/// Computes `logit - presence * (count > 0) - frequency * count`, as OpenAI's API. `counts` is
/// float32 `[1, V]`.
pub fn count_penalty(
    logits: &Array,
    counts: &Array,
    presence: f32,
    frequency: f32,
) -> Result<Array> {
    let mut out = logits.clone();
    if frequency != 0.0 {
        out = out.subtract(&counts.multiply(&Array::scalar(frequency)?)?)?;
    }
    if presence != 0.0 {
        let occurs = counts
            .greater(&Array::scalar(0.0f32)?)?
            .astype(Dtype::Float32)?;
        out = out.subtract(&occurs.multiply(&Array::scalar(presence)?)?)?;
    }
    Ok(out)
}

/// Returns `counts` `[1, V]`, incremented for `token` `[1]`.
pub fn count(counts: &Array, token: &Array) -> Result<Array> {
    let token = token.reshape(&[1, 1])?;
    let more = counts
        .take_along_axis(&token, -1)?
        .add(&Array::scalar(1.0f32)?)?;
    counts.put_along_axis(&token, &more, -1)
}

/// Adds `bias` `[1, n]` to the logits of `ids` `[1, n]`, which are distinct.
pub fn add_bias(logits: &Array, ids: &Array, bias: &Array) -> Result<Array> {
    let biased = logits.take_along_axis(ids, -1)?.add(bias)?;
    logits.put_along_axis(ids, &biased, -1)
}

/// Makes the tokens `ids` `[1, n]` impossible.
pub fn forbid(logits: &Array, ids: &Array) -> Result<Array> {
    logits.put_along_axis(ids, &minus_infinity()?, -1)
}

/// Makes all tokens impossible except those whose bit is set in `words`: token `i` is bit `i % 32`
/// of word `i / 32`. Missing words count as zero. Only these bits are copied to the device.
pub fn allow(logits: &Array, words: &[u32]) -> Result<Array> {
    let vocabulary = logits.dim(-1)?;
    let mut words = words.to_vec();
    words.resize(usize::try_from(vocabulary).unwrap_or(0).div_ceil(32), 0);
    let n = words.len() as i32; // the vocabulary fits `i32`, so this is at most a 32nd of it
    let bits: Vec<u32> = (0..32).map(|i| 1 << i).collect();
    let set = Array::from_slice(&words, &[n, 1])?
        .bitwise_and(&Array::from_slice(&bits, &[1, 32])?)?
        .not_equal(&Array::scalar(0u32)?)?
        .reshape(&[1, -1])? // [n, 32] -> [1, 32 n]
        .slice_axis(-1, 0, vocabulary)?;
    where_(&set, logits, &minus_infinity()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    fn row(values: &[f32]) -> Array {
        Array::from_slice(values, &[1, values.len() as i32]).unwrap()
    }

    fn ids(values: &[u32]) -> Array {
        Array::from_slice(values, &[1, values.len() as i32]).unwrap()
    }

    fn values(a: Result<Array>) -> Vec<f32> {
        a.unwrap().to_vec().unwrap()
    }

    #[test]
    fn the_penalty_follows_the_sign_and_counts_once() {
        let out = values(repeat_penalty(
            &row(&[-1.0, 2.0, 3.0]),
            &ids(&[1, 0, 1]),
            2.0,
        ));
        assert_eq!(out, [-2.0, 1.0, 3.0]);
    }

    #[test]
    fn presence_counts_once_and_frequency_each_time() {
        let mut counts = row(&[0.0; 3]);
        for token in [1u32, 2, 1] {
            counts = count(&counts, &Array::vector(&[token]).unwrap()).unwrap();
        }
        let x = row(&[5.0, 5.0, NO]);
        assert_eq!(values(count_penalty(&x, &counts, 1.0, 0.0)), [5.0, 4.0, NO]);
        assert_eq!(values(count_penalty(&x, &counts, 0.0, 0.5)), [5.0, 4.0, NO]);
        assert_eq!(
            values(count_penalty(&x, &counts, -1.0, 0.25)),
            [5.0, 5.5, NO]
        );
    }

    #[test]
    fn biases_and_bans_touch_only_their_tokens() {
        let x = row(&[1.0, 2.0, 3.0]);
        let biased = add_bias(&x, &ids(&[2, 0]), &row(&[-3.0, 0.5]));
        assert_eq!(values(biased), [1.5, 2.0, 0.0]);
        assert_eq!(values(forbid(&x, &ids(&[1, 1]))), [1.0, NO, 3.0]);
    }

    #[test]
    fn the_mask_is_read_bit_by_bit() {
        for n in [1usize, 31, 32, 33, 70] {
            let x = row(&vec![1.0; n]);
            let words = [0x8000_0001u32, 0b10];
            let out = values(allow(&x, &words));
            for (i, v) in out.iter().enumerate() {
                let set = words.get(i / 32).is_some_and(|w| w >> (i % 32) & 1 == 1);
                assert_eq!(v.is_finite(), set, "token {i} of {n}");
            }
        }
    }
}
