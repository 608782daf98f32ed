//! Sampling: from logits to a token. Changes of the logits, filters and a seeded draw follow in the
//! order of `inference::GenerateOptions`.

use std::hash::{BuildHasher, Hasher, RandomState};

use inference::{
    Error, ErrorKind, GenerateOptions, LogitsProcessor, Result, TokenLogprobs, TopLogprob,
};

/// The sampling state of one request.
pub struct Sampler {
    options: GenerateOptions,
    /// The number of tokens in the prompt.
    prompt: usize,
    /// The token that ends a text.
    end: u32,
    processors: Vec<Box<dyn LogitsProcessor>>,
    /// The state of the random generator (SplitMix64, Steele et al. 2014).
    state: u64,
}

impl Sampler {
    /// A sampler for a request. `prompt` is the length of the prompt. Without a seed, each call
    /// draws other random numbers.
    pub fn new(options: &GenerateOptions, prompt: usize, end: u32) -> Self {
        let processors = options.constraints.logits_processors.iter();
        Self {
            prompt,
            end,
            processors: processors.map(|p| p.make()).collect(),
            // Each `RandomState` has different random keys.
            state: options
                .sampling
                .seed
                .unwrap_or_else(|| RandomState::new().build_hasher().finish()),
            options: options.clone(),
        }
    }

    /// A random number from 0 to below 1.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Chooses a token by its `logits`. `ids` are the prompt and the reply so far.
    ///
    /// # Errors
    /// The error of a logits processor, or an error if no token remains.
    pub fn take(&mut self, logits: &[f32], ids: &[u32]) -> Result<u32> {
        if let Some(forced) = self
            .options
            .constraints
            .forced_tokens
            .get(ids.len() - self.prompt)
        {
            return Ok(*forced);
        }
        let mut logits = logits.to_vec();
        self.change(&mut logits, ids)?;
        let mut scores: Vec<(u32, f32)> = (0u32..).zip(logits).collect();
        scores.retain(|s| s.1 > f32::NEG_INFINITY);
        // Sorts the most probable token first. Among equal tokens, the lower id comes first.
        scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let Some(best) = scores.first().copied() else {
            let message = "every token is forbidden; ban fewer";
            return Err(Error::new(ErrorKind::InvalidOption, message));
        };
        if self.options.sampling.temperature == 0.0 {
            return Ok(best.0);
        }
        self.filter(&mut scores, best.1);
        let temperature = self.options.sampling.temperature;
        let weight = |score: f32| f64::from((score - best.1) / temperature).exp();
        let weights: Vec<f64> = scores.iter().map(|s| weight(s.1)).collect();
        let mut at = self.uniform() * weights.iter().sum::<f64>();
        for (w, s) in weights.iter().zip(&scores) {
            at -= w;
            if at < 0.0 {
                return Ok(s.0);
            }
        }
        Ok(scores[scores.len() - 1].0)
    }

    /// Applies penalties, biases, processors and bans.
    fn change(&mut self, logits: &mut [f32], ids: &[u32]) -> Result<()> {
        let (prompt, reply) = ids.split_at(self.prompt);
        let o = &self.options;
        if o.penalties.repeat_penalty != 1.0 {
            let from = match o.penalties.repeat_window {
                0 => 0,
                n => ids.len().saturating_sub(n),
            };
            let mut seen = vec![false; logits.len()];
            for id in &ids[from..] {
                if !std::mem::replace(&mut seen[*id as usize], true) {
                    let logit = &mut logits[*id as usize];
                    *logit = if *logit > 0.0 {
                        *logit / o.penalties.repeat_penalty
                    } else {
                        *logit * o.penalties.repeat_penalty
                    };
                }
            }
        }
        let mut seen = vec![false; logits.len()];
        for id in reply {
            let first = !std::mem::replace(&mut seen[*id as usize], true);
            logits[*id as usize] -= o.penalties.frequency_penalty;
            logits[*id as usize] -= if first {
                o.penalties.presence_penalty
            } else {
                0.0
            };
        }
        for (id, bias) in &o.constraints.logit_bias {
            logits[*id as usize] += bias;
        }
        for processor in &mut self.processors {
            processor.process(prompt, reply, logits)?;
        }
        for id in &o.constraints.banned_tokens {
            logits[*id as usize] = f32::NEG_INFINITY;
        }
        if reply.len() < o.stop.min_tokens {
            let end = (!o.stop.ignore_eos).then_some(&self.end);
            for id in o.stop.stop_tokens.iter().chain(end) {
                if let Some(logit) = logits.get_mut(*id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    /// Removes tokens that must not be drawn. At least one token stays.
    fn filter(&mut self, scores: &mut Vec<(u32, f32)>, best: f32) {
        let weight = |score: f32| f64::from(score - best).exp();
        let total: f64 = scores.iter().map(|s| weight(s.1)).sum();
        let p = |score: f32| weight(score) / total;
        let (top_p, min_p) = (
            f64::from(self.options.sampling.top_p),
            f64::from(self.options.sampling.min_p),
        );
        let mut sum = 0.0;
        let mut keep = 0;
        for s in scores.iter() {
            if keep > 0 && ((top_p < 1.0 && sum >= top_p) || weight(s.1) < min_p) {
                break;
            }
            keep += 1;
            sum += p(s.1);
        }
        scores.truncate(keep);
        let (probability, threshold) = (
            self.options.sampling.xtc_probability,
            self.options.sampling.xtc_threshold,
        );
        if probability > 0.0 && self.uniform() < f64::from(probability) {
            let above = scores
                .iter()
                .filter(|s| p(s.1) >= f64::from(threshold))
                .count();
            scores.drain(..above.saturating_sub(1));
        }
        if self.options.sampling.top_k > 0 {
            scores.truncate(self.options.sampling.top_k);
        }
    }
}

/// The log-probability of `id` by the model's own `logits`, and the `n` most probable tokens.
pub fn logprobs(logits: &[f32], id: u32, n: usize, spell: impl Fn(u32) -> String) -> TokenLogprobs {
    let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    let log_sum = sum.ln() as f32;
    let mut order: Vec<u32> = (0u32..).take(logits.len()).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    let of = |id: u32| logits[id as usize] - log_sum;
    let top = order.into_iter().take(n);
    let top = top
        .map(|id| TopLogprob::new(id, spell(id), of(id)))
        .collect();
    TokenLogprobs::new(of(id), top)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_and_penalties_do_what_they_say() {
        let logits = [0.1f32.ln(), 0.6f32.ln(), 0.3f32.ln()];
        let all = |o: &GenerateOptions| {
            let mut s = Sampler::new(o, 1, 9);
            let mut taken: Vec<_> = (0..200)
                .map(|_| s.take(&logits, &[1, 1]).unwrap())
                .collect();
            taken.sort_unstable();
            taken.dedup();
            taken
        };
        let drawn = GenerateOptions::new().with_temperature(1.0).with_seed(5);
        assert_eq!(all(&drawn), [0, 1, 2]);
        assert_eq!(all(&drawn.clone().with_top_k(2)), [1, 2]);
        assert_eq!(all(&drawn.clone().with_top_p(0.7)), [1, 2]);
        assert_eq!(all(&drawn.clone().with_min_p(0.6)), [1]);
        assert_eq!(all(&drawn.clone().with_banned_tokens([1])), [0, 2]);
        assert_eq!(all(&drawn.clone().with_logit_bias([(0, 50.0)])), [0]);
        let xtc = drawn.clone().with_xtc_probability(1.0);
        assert_eq!(all(&xtc.clone().with_xtc_threshold(0.2)), [0, 2]);
        assert_eq!(all(&xtc.with_xtc_threshold(0.5)), [0, 1, 2]);
        let greedy = GenerateOptions::new();
        assert_eq!(all(&greedy.clone().with_repeat_penalty(10.0)), [2]);
        assert_eq!(all(&greedy.clone().with_presence_penalty(9.0)), [2]);
        assert_eq!(all(&greedy.clone().with_frequency_penalty(9.0)), [2]);
        assert_eq!(all(&greedy.clone().with_forced_tokens([0, 0])), [0]);
        assert_eq!(all(&greedy), [1]);
        let none = greedy.with_banned_tokens([0, 1, 2]);
        let e = Sampler::new(&none, 1, 9).take(&logits, &[1]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption);
    }

    #[test]
    fn log_probabilities_are_normalized() {
        let l = logprobs(&[1.0, 3.0, 2.0], 2, 2, |id| id.to_string());
        let sum: f32 = [1.0f32, 3.0, 2.0].iter().map(|x| x.exp()).sum();
        assert!((l.logprob - (2.0 - sum.ln())).abs() < 1e-6);
        assert_eq!(l.top.iter().map(|t| t.id).collect::<Vec<_>>(), [1, 2]);
    }
}
