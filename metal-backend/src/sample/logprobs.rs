//! Log-probabilities of sampled tokens and of their most probable alternatives. The device computes
//! them together with the draw, and only the log-probabilities are copied to the host.

use mlx_rs_core::{Array, Result};

use super::filters::{greatest, shift};
use crate::exec::sampling;

/// Log-probabilities of one step, under the softmax of the model's logits.
#[derive(Debug)]
pub struct Logprobs {
    /// The log-probabilities of the sampled tokens, `[B]`.
    chosen: Array,
    /// The most probable tokens in ascending order: log-probabilities and ids, `[B, n]` each.
    top: Option<(Array, Array)>,
}

impl Logprobs {
    /// Computes the log-probabilities of `tokens` `[B]` under `logits` `[B, V]`, and of the `n`
    /// most probable tokens (all tokens, if there are fewer).
    ///
    /// `logits` are float32. `on_cpu` says whether the current stream is on the CPU.
    pub fn new(logits: &Array, tokens: &Array, n: usize, on_cpu: bool) -> Result<Self> {
        let vocabulary = logits.dim(-1)?;
        let n = i32::try_from(n).unwrap_or(i32::MAX).min(vocabulary);
        let count = n.unsigned_abs() as usize;
        if let Some(fused) = sampling::log_probabilities(logits, tokens, count, on_cpu)? {
            return Ok(Self {
                chosen: fused.chosen,
                top: (n > 0).then_some((fused.values, fused.indices)),
            });
        }
        let shifted = shift(logits)?;
        let chosen = shifted.take_along_axis(&tokens.expand_dims(-1)?, -1)?;
        let total = shifted.logsumexp(-1, true)?; // [B, 1]
        let chosen = chosen.subtract(&total)?.squeeze_axis(-1)?;
        let top = if n > 0 {
            let (values, ids) = greatest(&shifted, n)?;
            Some((values.subtract(&total)?, ids))
        } else {
            None
        };
        Ok(Self { chosen, top })
    }

    /// The arrays to evaluate.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let top = self.top.iter().flat_map(|(values, ids)| [values, ids]);
        std::iter::once(&self.chosen).chain(top)
    }

    /// Reads one row: the log-probability of its token, and its `n` most probable tokens in
    /// descending order. Waits until they are computed.
    ///
    /// # Errors
    /// If the row does not exist, or the computation failed.
    pub fn row(&self, row: i32, n: usize) -> Result<(f32, Vec<(u32, f32)>)> {
        let chosen = self.chosen.slice_axis(0, row, row + 1)?.item::<f32>()?;
        let Some((values, ids)) = &self.top else {
            return Ok((chosen, Vec::new()));
        };
        let values = values.slice_axis(0, row, row + 1)?.to_vec::<f32>()?;
        let ids = ids.slice_axis(0, row, row + 1)?.to_vec::<u32>()?;
        let top = ids.into_iter().zip(values).rev().take(n).collect();
        Ok((chosen, top))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_those_of_the_softmax() {
        let p = [0.1f32, 0.6, 0.05, 0.25];
        let q = [0.25f32; 4];
        let rows: Vec<f32> = p.iter().chain(&q).map(|p| p.ln() + 3.0).collect();
        let logits = Array::from_slice(&rows, &[2, 4]).unwrap();
        let tokens = Array::vector(&[3u32, 0]).unwrap();
        let l = Logprobs::new(&logits, &tokens, 2, false).unwrap();
        let (chosen, top) = l.row(0, 2).unwrap();
        assert!((chosen - 0.25f32.ln()).abs() < 1e-6, "{chosen}");
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3]);
        assert!((top[0].1 - 0.6f32.ln()).abs() < 1e-6, "{top:?}");
        let (chosen, top) = l.row(1, 1).unwrap();
        assert!((chosen - 0.25f32.ln()).abs() < 1e-6, "{chosen}");
        assert_eq!(top.len(), 1);
        assert!(l.row(2, 1).is_err());
        let none = Logprobs::new(&logits, &tokens, 0, false).unwrap();
        assert_eq!(none.row(0, 5).unwrap().1, []);
        let all = Logprobs::new(&logits, &tokens, 9, false).unwrap();
        assert_eq!(all.row(0, 9).unwrap().1.len(), 4);
    }

    #[test]
    fn infinities_are_certain_or_impossible() {
        let inf = f32::INFINITY;
        let logits = Array::from_slice(&[-inf, inf, 0.0], &[1, 3]).unwrap();
        let tokens = Array::vector(&[1u32]).unwrap();
        let l = Logprobs::new(&logits, &tokens, 3, false).unwrap();
        let (chosen, top) = l.row(0, 3).unwrap();
        assert_eq!(chosen, 0.0);
        assert_eq!((top[0].0, top[0].1), (1, 0.0));
        assert_eq!(top[2], (0, -inf));
    }
}
