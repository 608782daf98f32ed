//! From logits to a token, all on the device: nothing here reads a value back to the host.
//!
//! The chain is penalties, then top-p, min-p, top-k, temperature and a categorical draw, in that
//! order; at temperature 0 it collapses to the penalties and the greatest logit.

mod filters;

pub use filters::{min_p, repeat_penalty, top_k, top_p};

use inference::GenerateOptions;
use mlx_rs_core::random::{Key, categorical};
use mlx_rs_core::{Array, Dtype, Result, concatenate};

/// The composed chain of one request, with its random state.
#[derive(Debug, Clone)]
pub struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repeat_penalty: f32,
    /// Tokens the penalty looks back on; 0 means all.
    window: usize,
    /// Recent token ids on the device, `[1, n]`; `None` while empty or not needed.
    history: Option<Array>,
    key: Option<Key>,
}

impl Sampler {
    /// The chain that `options` describe; `prompt` starts the penalty's history. Without a seed the
    /// draw is seeded from the system's entropy.
    ///
    /// # Errors
    /// When MLX cannot allocate the random state.
    pub fn new(options: &GenerateOptions, prompt: &[u32]) -> Result<Self> {
        let greedy = options.temperature == 0.0;
        let key = if greedy {
            None
        } else {
            Some(Key::new(options.seed.unwrap_or_else(entropy))?)
        };
        let mut sampler = Self {
            temperature: options.temperature,
            top_k: options.top_k,
            top_p: options.top_p,
            min_p: options.min_p,
            repeat_penalty: options.repeat_penalty,
            window: options.repeat_window,
            history: None,
            key,
        };
        if sampler.penalizes() && !prompt.is_empty() {
            let tail = match sampler.window {
                0 => prompt,
                n => &prompt[prompt.len().saturating_sub(n)..],
            };
            sampler.history = Some(Array::vector(tail)?.expand_dims(0)?);
        }
        Ok(sampler)
    }

    /// Whether a token must be known before the next can be drawn.
    pub fn waits(_: &GenerateOptions) -> bool {
        false
    }

    fn penalizes(&self) -> bool {
        self.repeat_penalty != 1.0
    }

    /// Draws one token (`uint32 [1]`) from logits `[1, vocab]` and remembers it.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn sample(&mut self, logits: &Array) -> Result<Array> {
        let mut logits = logits.astype(Dtype::Float32)?;
        if let Some(history) = &self.history {
            logits = repeat_penalty(&logits, history, self.repeat_penalty)?;
        }
        let token = match &self.key {
            None => logits.argmax(-1, false)?,
            Some(key) => {
                if self.top_p > 0.0 && self.top_p < 1.0 {
                    logits = top_p(&logits, self.top_p)?;
                }
                if self.min_p > 0.0 {
                    logits = min_p(&logits, self.min_p)?;
                }
                if self.top_k > 0 {
                    logits = top_k(&logits, self.top_k)?;
                }
                logits = logits.multiply(&Array::scalar(1.0 / self.temperature)?)?;
                let (next, draw) = key.split()?;
                let token = categorical(&logits, -1, &draw)?;
                self.key = Some(next);
                token
            }
        };
        if self.penalizes() {
            self.remember(&token)?;
        }
        Ok(token)
    }

    /// Adds a token `[1]` to the history and drops what falls out of the window.
    fn remember(&mut self, token: &Array) -> Result<()> {
        let token = token.reshape(&[1, 1])?;
        self.history = Some(match &self.history {
            None => token,
            Some(history) => {
                let joined = concatenate(&[history, &token], 1)?;
                let n = joined.dim(1)?;
                match i32::try_from(self.window) {
                    Ok(window) if window > 0 && n > window => {
                        joined.slice_axis(1, n - window, n)?
                    }
                    _ => joined,
                }
            }
        });
        Ok(())
    }

    /// The arrays that carry state to the next step, to be evaluated with it.
    pub fn state(&self) -> impl Iterator<Item = &Array> {
        self.history.iter().chain(self.key.iter().map(Key::array))
    }
}

/// A seed that differs from call to call: the randomly keyed hasher of the standard library.
fn entropy() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> GenerateOptions {
        GenerateOptions::default()
    }

    fn logits(values: &[f32]) -> Array {
        Array::from_slice(values, &[1, values.len() as i32]).unwrap()
    }

    fn draw(sampler: &mut Sampler, values: &[f32]) -> u32 {
        sampler
            .sample(&logits(values))
            .unwrap()
            .to_vec::<u32>()
            .unwrap()[0]
    }

    #[test]
    fn greedy_takes_the_greatest_and_the_first_of_equals() {
        let mut s = Sampler::new(&options(), &[]).unwrap();
        assert_eq!(draw(&mut s, &[0.0, 3.0, 1.0]), 1);
        assert_eq!(draw(&mut s, &[2.0, 0.0, 2.0]), 0);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let values: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.3).collect();
        let run = |seed| {
            let o = options().with_temperature(1.0).with_seed(seed);
            let mut s = Sampler::new(&o, &[]).unwrap();
            (0..20).map(|_| draw(&mut s, &values)).collect::<Vec<_>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn draws_follow_the_distribution() {
        // Probabilities 0.1, 0.2, 0.7 over 3,000 draws: five standard deviations is under 130.
        let values = [0.1f32.ln(), 0.2f32.ln(), 0.7f32.ln()];
        let o = options().with_temperature(1.0).with_seed(1);
        let mut s = Sampler::new(&o, &[]).unwrap();
        let mut counts = [0i32; 3];
        for _ in 0..3000 {
            counts[draw(&mut s, &values) as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([300, 600, 2100]) {
            assert!((count - expected).abs() < 130, "{counts:?}");
        }
    }

    #[test]
    fn the_penalty_forgets_what_left_its_window() {
        let o = options().with_repeat_penalty(100.0).with_repeat_window(2);
        let mut s = Sampler::new(&o, &[]).unwrap();
        let values = [4.0, 3.0, 2.0, 1.0];
        let drawn: Vec<u32> = (0..6).map(|_| draw(&mut s, &values)).collect();
        assert_eq!(drawn, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn the_prompt_counts_as_history() {
        let o = options().with_repeat_penalty(100.0);
        let mut s = Sampler::new(&o, &[0]).unwrap();
        assert_eq!(draw(&mut s, &[4.0, 3.0]), 1);
    }
}
