//! The random numbers of a request. The key of a step depends only on the seed and the step, so no
//! state is needed, and other requests of a batch have no effect.

use mlx_rs_core::distributed::Group;
use mlx_rs_core::random::Key;
use mlx_rs_core::{Array, Result};
use parking_lot::Mutex;

/// The source of seeds for requests without a seed, in a group of processes that compute one model.
/// All processes make the same requests in the same order, so they get equal seeds.
static AGREED: Mutex<Option<u64>> = Mutex::new(None);

/// The seed of one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seed(u64);

impl Seed {
    /// Uses the given seed, or one that differs from call to call.
    pub(super) fn new(seed: Option<u64>) -> Self {
        Self(scramble(seed.unwrap_or_else(entropy)))
    }

    /// Returns the random key of a step.
    pub(super) fn key(self, step: u64) -> Result<Key> {
        Key::new(self.word(step, 0))
    }

    /// Returns a random number in `[0, 1)` that does not depend on the step's key.
    pub(super) fn coin(self, step: u64) -> f32 {
        (self.word(step, 1) >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Returns a random number in `[0, 1)` with 53 bits, for the draw.
    pub(super) fn uniform(self, step: u64) -> f64 {
        (self.word(step, 0) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn word(self, step: u64, use_: u64) -> u64 {
        scramble(self.0.wrapping_add(step.wrapping_mul(2)).wrapping_add(use_))
    }
}

/// Applies a pseudo-random permutation of 64-bit words (the output function of `SplitMix64`, Steele
/// et al. 2014).
fn scramble(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Makes requests without a seed draw equally in all processes of `group`. The first process
/// provides the entropy.
///
/// # Errors
/// If the group cannot be reached.
pub fn agree_on_entropy(group: Group) -> Result<()> {
    let entropy = if group.rank() == 0 { fresh() } else { 0 };
    // The seed is sent as 16-bit words, because every group backend sums these exactly.
    let words = [0, 16, 32, 48].map(|shift| ((entropy >> shift) & 0xffff) as i32);
    let words = group.all_sum(&Array::vector(&words)?)?.to_vec::<i32>()?;
    let agreed = words.iter().rev().fold(0u64, |all, &word| {
        (all << 16) | u64::from(word.unsigned_abs())
    });
    let mut slot = AGREED.lock();
    *slot = Some(agreed);
    Ok(())
}

/// Returns a 64-bit word that differs from call to call.
fn entropy() -> u64 {
    let mut agreed = AGREED.lock();
    match agreed.as_mut() {
        Some(next) => {
            *next = scramble(*next);
            *next
        }
        None => fresh(),
    }
}

/// Returns random bits from the standard library's hasher, which the system seeds.
fn fresh() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_repeat_for_a_seed_and_differ_otherwise() {
        let words = |seed| {
            let seed = Seed::new(Some(seed));
            (0..100)
                .flat_map(|step| [seed.word(step, 0), seed.word(step, 1)])
                .collect::<std::collections::HashSet<_>>()
        };
        assert_eq!(words(1), words(1));
        assert_eq!(words(1).len(), 200);
        assert!(words(1).is_disjoint(&words(2)));
    }

    #[test]
    fn the_coin_is_fair() {
        let seed = Seed::new(Some(7));
        let heads = (0..10_000).filter(|&s| seed.coin(s) < 0.3).count();
        // Five standard deviations of 10,000 draws at 0.3 are 229.
        assert!((2771..3229).contains(&heads), "{heads}");
    }
}
