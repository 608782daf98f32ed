//! From logits to a token: penalty, filters, and a seeded draw.

use std::hash::{BuildHasher, Hasher, RandomState};

use inference::GenerateOptions;

/// The state of one request's draws (SplitMix64, Steele et al. 2014).
#[derive(Debug)]
pub struct Sampler(u64);

impl Sampler {
    /// With the seed of the options, or one that differs from call to call.
    pub fn new(options: &GenerateOptions) -> Self {
        // Each `RandomState` has keys of its own.
        Self(
            options
                .seed
                .unwrap_or_else(|| RandomState::new().build_hasher().finish()),
        )
    }

    /// A number in 0 to below 1.
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Takes a token after `ids`, by their `logits`.
    pub fn take(&mut self, logits: &[f32], ids: &[u32], o: &GenerateOptions) -> u32 {
        let mut scores: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
        if o.repeat_penalty != 1.0 {
            let from = match o.repeat_window {
                0 => 0,
                n => ids.len().saturating_sub(n),
            };
            let mut seen = vec![false; scores.len()];
            for id in &ids[from..] {
                if !std::mem::replace(&mut seen[*id as usize], true) {
                    let score = &mut scores[*id as usize].1;
                    *score = if *score > 0.0 {
                        *score / o.repeat_penalty
                    } else {
                        *score * o.repeat_penalty
                    };
                }
            }
        }
        // The most probable first; of equals, the first in the vocabulary.
        scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if o.temperature == 0.0 {
            return scores[0].0;
        }
        if o.top_k > 0 {
            scores.truncate(o.top_k);
        }
        let best = scores[0].1;
        let weight = |score: f32| f64::from((score - best) / o.temperature).exp();
        let mut weights: Vec<f64> = scores.iter().map(|s| weight(s.1)).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let mut keep = 0;
        for w in &weights {
            if *w < f64::from(o.min_p) {
                break;
            }
            keep += 1;
            sum += w;
            if o.top_p < 1.0 && sum / total > f64::from(o.top_p) {
                break;
            }
        }
        weights.truncate(keep.max(1));
        let mut at = self.uniform() * weights.iter().sum::<f64>();
        for (w, s) in weights.iter().zip(&scores) {
            at -= w;
            if at < 0.0 {
                return s.0;
            }
        }
        scores[weights.len() - 1].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_and_penalties_do_what_they_say() {
        let logits = [0.1f32.ln(), 0.6f32.ln(), 0.3f32.ln()];
        let all = |o: &GenerateOptions| {
            let mut s = Sampler::new(o);
            let mut taken: Vec<_> = (0..200).map(|_| s.take(&logits, &[1], o)).collect();
            taken.sort_unstable();
            taken.dedup();
            taken
        };
        let drawn = GenerateOptions::new().with_temperature(1.0).with_seed(5);
        assert_eq!(all(&drawn), [0, 1, 2]);
        assert_eq!(all(&drawn.clone().with_top_k(2)), [1, 2]);
        assert_eq!(all(&drawn.clone().with_top_p(0.7)), [1, 2]);
        assert_eq!(all(&drawn.clone().with_min_p(0.6)), [1]);
        let penalized = GenerateOptions::new().with_repeat_penalty(10.0);
        assert_eq!(all(&penalized), [2]);
        assert_eq!(all(&GenerateOptions::new()), [1]);
    }
}
