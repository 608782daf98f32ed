//! Seeded permutations, equal to those of `numpy.random.seed(seed)` and
//! `numpy.random.permutation(n)`.
//!
//! mlx-lm orders its batches with these permutations, so equal seeds give equal orders. The
//! generator is MT19937 (Matsumoto and Nishimura 1998), which is not secure. Dropout and initial
//! weights use MLX's generator.

const N: usize = 624;
const M: usize = 397;

/// A stream of permutations.
#[derive(Clone)]
pub struct Shuffler {
    state: [u32; N],
    at: usize,
}

impl std::fmt::Debug for Shuffler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shuffler").field("at", &self.at).finish()
    }
}

impl Shuffler {
    /// The stream of permutations for `seed`.
    #[must_use]
    pub fn new(seed: u32) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let before = state[i - 1];
            state[i] = 1_812_433_253_u32
                .wrapping_mul(before ^ (before >> 30))
                .wrapping_add(i as u32);
        }
        Self { state, at: N }
    }

    fn refill(&mut self) {
        for i in 0..N {
            let joined = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let odd = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (joined >> 1) ^ odd;
        }
        self.at = 0;
    }

    fn next_u32(&mut self) -> u32 {
        if self.at == N {
            self.refill();
        }
        let mut y = self.state[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// Returns a random integer from 0 to `most`: draws bits until the integer is in range.
    fn up_to(&mut self, most: u32) -> u32 {
        let mask = u32::MAX.checked_shr(most.leading_zeros()).unwrap_or(0);
        loop {
            let value = self.next_u32() & mask;
            if value <= most {
                return value;
            }
        }
    }

    /// Returns the integers below `n` in random order (Fisher-Yates shuffle, from the end).
    #[must_use]
    pub fn permutation(&mut self, n: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n).collect();
        for i in (1..n).rev() {
            let j = self.up_to(i);
            order.swap(i as usize, j as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_of_the_reference() {
        // The first outputs of the reference generator with seed 5489, and its known 10000th
        // output.
        let mut s = Shuffler::new(5489);
        assert_eq!(s.next_u32(), 3_499_211_612);
        let last = (1..10_000).map(|_| s.next_u32()).last().unwrap();
        assert_eq!(last, 4_123_659_995);
    }

    #[test]
    fn permutations_hold_every_number_once() {
        let mut s = Shuffler::new(7);
        for n in [0, 1, 2, 3, 31, 32, 33, 1000] {
            let mut p = s.permutation(n);
            p.sort_unstable();
            assert_eq!(p, (0..n).collect::<Vec<_>>());
        }
    }
}
