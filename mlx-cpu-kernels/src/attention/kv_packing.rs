//! Packed heads of KV caches: codes of a few bits, with a scale and a bias for each group of
//! elements. The quantization is MLX's affine mode, so caches can be converted to and from MLX's
//! arrays.
//!
//! A head is a row of 32-bit words: the codes as a bit stream, then the scales of all groups, then
//! their biases (float32).

use crate::isa::Isa;
use crate::layout::packed::{code, code_position};
use crate::memory::resize;

/// The number of bits of a code, and the number of elements that share a scale and a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPacking {
    bits: u8,
    group: u8,
}

/// The smallest scale, as in MLX.
const MIN_SCALE: f32 = 1e-7;

impl KvPacking {
    /// A packing with 2, 3, 4, 5, 6 or 8 bits, in groups of 32, 64 or 128 elements; `None` for
    /// other numbers.
    /// ```
    /// use mlx_cpu_kernels::KvPacking;
    /// assert!(KvPacking::new(4, 32).is_some());
    /// assert!(KvPacking::new(7, 32).is_none() && KvPacking::new(4, 16).is_none());
    /// ```
    pub const fn new(bits: u32, group: u32) -> Option<Self> {
        match (bits, group) {
            (2..=6 | 8, 32 | 64 | 128) => Some(Self {
                bits: bits as u8,
                group: group as u8,
            }),
            _ => None,
        }
    }

    /// The number of bits of a code.
    pub const fn bits(self) -> u32 {
        self.bits as u32
    }

    /// The number of elements that share a scale and a bias.
    pub const fn group(self) -> usize {
        self.group as usize
    }

    /// The number of words that have the codes of a head with `d` elements, a multiple of
    /// [`Self::group`].
    pub const fn code_words(self, d: usize) -> usize {
        d * self.bits as usize / 32
    }

    /// The number of words of a head with `d` elements.
    pub const fn words(self, d: usize) -> usize {
        self.code_words(d) + 2 * (d / self.group())
    }

    /// Divides the words of a head into codes, scales and biases.
    fn parts(self, words: &[u32], d: usize) -> [&[u32]; 3] {
        let (codes, factors) = words.split_at(self.code_words(d));
        let (scales, biases) = factors.split_at(d / self.group());
        [codes, scales, biases]
    }

    /// Packs a head. An infinite element or NaN makes its whole group NaN.
    ///
    /// # Panics
    /// If `to` does not have [`Self::words`] words.
    pub(crate) fn pack(self, head: &[f32], to: &mut [u32]) {
        let d = head.len();
        assert!(d.is_multiple_of(self.group()) && to.len() == self.words(d));
        let (codes, factors) = to.split_at_mut(self.code_words(d));
        let (scales, biases) = factors.split_at_mut(d / self.group());
        codes.fill(0);
        let most = ((1u32 << self.bits) - 1) as f32;
        let groups = head.chunks_exact(self.group()).enumerate();
        for (g, group) in groups {
            let (scale, bias) = affine(group, most);
            (scales[g], biases[g]) = (scale.to_bits(), bias.to_bits());
            for (i, x) in group.iter().enumerate() {
                let nearest = ((x - bias) / scale).round_ties_even();
                // NaN becomes 0; the scale is NaN then.
                let code = nearest.clamp(0.0, most) as u32;
                let (word, shift) = code_position(g * self.group() + i, self.bits());
                codes[word] |= code << shift;
                if shift + self.bits() > 32 {
                    codes[word + 1] |= code >> (32 - shift);
                }
            }
        }
    }

    /// Unpacks `n` heads of `d` elements, whose words are `step` words apart, to adjacent rows of
    /// float32. The result does not depend on the instruction set.
    pub(crate) fn unpack_rows<'s>(
        self,
        isa: Isa,
        (from, step): (&[u32], usize),
        (n, d): (usize, usize),
        to: &'s mut Vec<f32>,
    ) -> &'s [f32] {
        let to = scratch(to, n * d);
        let words = self.words(d);
        for (i, row) in to.chunks_exact_mut(d).enumerate() {
            let from = &from[i * step..][..words];
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `has_avx2` is true only on processors with avx2.
                _ if isa.has_avx2() => unsafe { self.unpack_avx2(from, row) },
                _ => self.unpack(from, row),
            }
        }
        to
    }

    /// [`Self::unpack`] for AVX2.
    ///
    /// # Safety
    /// The processor must have avx2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack_avx2(self, from: &[u32], to: &mut [f32]) {
        self.unpack(from, to);
    }

    /// Unpacks a head.
    #[inline(always)]
    fn unpack(self, from: &[u32], to: &mut [f32]) {
        let [codes, scales, biases] = self.parts(from, to.len());
        let groups = to.chunks_exact_mut(self.group());
        let per = self.code_words(self.group());
        let factors = scales.iter().zip(biases);
        for ((to, codes), (scale, bias)) in groups.zip(codes.chunks_exact(per)).zip(factors) {
            let factors = (f32::from_bits(*scale), f32::from_bits(*bias));
            match self.bits {
                8 => unpack_words::<8, 4>(codes, factors, to),
                4 => unpack_words::<4, 8>(codes, factors, to),
                2 => unpack_words::<2, 16>(codes, factors, to),
                _ => {
                    for (i, to) in to.iter_mut().enumerate() {
                        let code = code(i, self.bits(), |w| codes[w]);
                        *to = code.cast_signed() as f32 * factors.0 + factors.1;
                    }
                }
            }
        }
    }
}

/// The first `n` elements of a buffer, which grows if necessary. Their values are arbitrary.
pub(crate) fn scratch(buffer: &mut Vec<f32>, n: usize) -> &mut [f32] {
    if buffer.len() < n {
        resize(buffer, n, 0.0);
    }
    &mut buffer[..n]
}

/// Unpacks words of `PER` codes of `BITS` bits each.
#[inline(always)]
fn unpack_words<const BITS: u32, const PER: usize>(
    codes: &[u32],
    (scale, bias): (f32, f32),
    to: &mut [f32],
) {
    let mask = (1 << BITS) - 1;
    for (word, to) in codes.iter().zip(to.as_chunks_mut::<PER>().0) {
        for (i, to) in to.iter_mut().enumerate() {
            let code = (word >> (BITS * i as u32)) & mask;
            *to = code.cast_signed() as f32 * scale + bias;
        }
    }
}

/// The scale and the bias of a group, as MLX chooses them. Of the minimum and the maximum, the one
/// with the larger magnitude is exact. Zero is exact if it is within the range.
fn affine(group: &[f32], most: f32) -> (f32, f32) {
    let mut range = (f32::INFINITY, f32::NEG_INFINITY);
    let mut no_number = 0.0;
    for x in group {
        range = (range.0.min(*x), range.1.max(*x));
        // Adds zero; if an element is infinite or NaN, it adds NaN.
        no_number += x * 0.0;
    }
    let (least, greatest) = range;
    let scale = ((greatest - least) / most).max(MIN_SCALE) + no_number;
    let (scale, edge) = match least.abs() > greatest.abs() {
        true => (scale, least),
        false => (-scale, greatest),
    };
    let steps = (edge / scale).round_ties_even();
    match steps == 0.0 {
        true => (scale, 0.0),
        false => (edge / steps, edge),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    const BITS: [u32; 6] = [2, 3, 4, 5, 6, 8];

    #[test]
    fn elements_are_within_half_a_step() {
        for (bits, group) in BITS.into_iter().flat_map(|b| [(b, 32), (b, 64), (b, 128)]) {
            let packing = KvPacking::new(bits, group).unwrap();
            for (seed, shift) in [(1, 0.0), (2, 3.0), (3, -3.0)] {
                let d = 2 * packing.group();
                let head: Vec<f32> = noise(d, seed).iter().map(|v| v + shift).collect();
                let mut words = vec![0; packing.words(d)];
                packing.pack(&head, &mut words);
                let mut unpacked = vec![0.0; d];
                packing.unpack(&words, &mut unpacked);
                with_each(|isa| {
                    let mut scratch = Vec::new();
                    let rows = packing.unpack_rows(isa, (&words, 0), (1, d), &mut scratch);
                    assert_eq!(rows, unpacked, "{isa:?}");
                });
                for (back, head) in unpacked
                    .chunks_exact(packing.group())
                    .zip(head.chunks_exact(packing.group()))
                {
                    let (scale, _) = affine(head, ((1u32 << bits) - 1) as f32);
                    for (back, x) in back.iter().zip(head) {
                        // Rounding adds up to half a step, and the other end of the range may be
                        // cut by half a step.
                        let error = (back - x).abs();
                        assert!(
                            error <= scale.abs() * 1.001 + 1e-6,
                            "{bits} {error} {scale}"
                        );
                    }
                    let mean = back
                        .iter()
                        .zip(head)
                        .map(|(b, x)| (b - x).abs())
                        .sum::<f32>();
                    assert!(mean / group as f32 <= scale.abs() * 0.5, "{bits} {mean}");
                }
            }
        }
    }

    #[test]
    fn equal_elements_and_zeros_are_exact() {
        for bits in BITS {
            let packing = KvPacking::new(bits, 32).unwrap();
            for value in [0.0, 5.0, -2.5] {
                let mut words = vec![u32::MAX; packing.words(32)];
                packing.pack(&[value; 32], &mut words);
                let mut back = vec![f32::NAN; 32];
                packing.unpack(&words, &mut back);
                assert_eq!(back, [value; 32], "{bits} bits");
            }
        }
    }

    #[test]
    fn what_is_no_number_makes_its_group_nan() {
        let packing = KvPacking::new(8, 32).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut head = noise(64, 5);
            head[40] = bad;
            let mut words = vec![0; packing.words(64)];
            packing.pack(&head, &mut words);
            let mut back = vec![0.0; 64];
            packing.unpack(&words, &mut back);
            assert!(back[..32].iter().all(|v| v.is_finite()));
            assert!(back[32..].iter().all(|v| v.is_nan()), "{bad}");
        }
    }

    #[test]
    fn heads_may_be_apart() {
        let packing = KvPacking::new(4, 32).unwrap();
        let (d, words) = (32, packing.words(32));
        let mut all = vec![0; 3 * words + 2];
        let heads: Vec<Vec<f32>> = (0..2).map(|i| noise(d, 7 + i)).collect();
        let step = words + 1;
        for (i, head) in heads.iter().enumerate() {
            packing.pack(head, &mut all[i * step..][..words]);
        }
        let mut scratch = Vec::new();
        let rows = packing.unpack_rows(Isa::Portable, (&all, step), (2, d), &mut scratch);
        let mut alone = vec![0.0; d];
        packing.unpack(&all[step..][..words], &mut alone);
        assert_eq!(rows[d..], alone[..]);
    }
}
