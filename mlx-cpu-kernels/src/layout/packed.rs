//! Quantized matrices as the kernels store them: in bands of eight rows, a word of each beside another, so that a vector
//! holds one word of each row and its lanes are outputs. Nothing is summed across lanes then, and memory is read from
//! the first byte to the last. Products and unpacking are in `simd`.

use std::ops::Range;

use half::f16;

use crate::work::Input;

/// Elements that are unpacked at a time; every group size is a multiple.
pub(crate) const CHUNK: usize = 32;

/// Rows of a band.
pub const BAND: usize = 8;

/// A row of a quantized matrix: `w = scale * q + bias`, group after group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuantizedRow<'a> {
    /// Packed numbers: two to a byte, the lower half first, or one.
    pub packed: &'a [u8],
    /// One a group.
    pub scales: &'a [f32],
    /// One a group.
    pub biases: &'a [f32],
}

/// Scales or biases of a matrix as they are stored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Factors<'a> {
    /// As float32.
    Single(&'a [f32]),
    /// The bits of float16.
    Half(&'a [u16]),
}

impl<'a> Factors<'a> {
    /// What an operation was given.
    ///
    /// # Safety
    /// The array given to the operation in this place must be of float16 where they are `half`, else of float32.
    pub(crate) unsafe fn of(input: &'a Input, half: bool) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            if half {
                Self::Half(input.as_slice::<u16>())
            } else {
                Self::Single(input.as_slice::<f32>())
            }
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Self::Single(all) => all.len(),
            Self::Half(all) => all.len(),
        }
    }

    /// Where they are, and how many bytes.
    pub(crate) fn bytes(self) -> (*const u8, usize) {
        match self {
            Self::Single(all) => (all.as_ptr().cast(), size_of_val(all)),
            Self::Half(all) => (all.as_ptr().cast(), size_of_val(all)),
        }
    }

    pub(crate) fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::Single(all) => Self::Single(&all[range]),
            Self::Half(all) => Self::Half(&all[range]),
        }
    }

    /// One group of a band's rows.
    pub(crate) fn eight(self, group: usize) -> [f32; BAND] {
        let at = group * BAND..(group + 1) * BAND;
        let mut eight = [0.0; BAND];
        match self {
            Self::Single(all) => eight.copy_from_slice(&all[at]),
            Self::Half(all) => {
                for (to, from) in eight.iter_mut().zip(&all[at]) {
                    *to = f16::from_bits(*from).to_f32();
                }
            }
        }
        eight
    }
}

/// Bands of a quantized matrix, one after another: `w = scale * q + bias`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bands<'a> {
    /// Packed numbers `[bands, words, BAND]`, the first in the lowest bits.
    pub words: &'a [u32],
    /// `[bands, groups, BAND]`.
    pub scales: Factors<'a>,
    /// `[bands, groups, BAND]`.
    pub biases: Factors<'a>,
    /// Of a row.
    pub groups: usize,
    /// Of a number: 4 or 8.
    pub bits: u32,
}

impl<'a> Bands<'a> {
    /// What an operation was given: the arrays of a `QuantizedMatrix`, with groups of so many numbers of `bits` in a row.
    /// Nothing without them.
    ///
    /// # Safety
    /// The first must be of words, the others of float16 where they are `half`, else of float32.
    pub(crate) unsafe fn of(inputs: &'a [Input], (bits, groups, half): (u32, usize, bool)) -> Self {
        let [words, scales, biases] = inputs else {
            let nothing = Factors::Single(&[]);
            return Self {
                words: &[],
                scales: nothing,
                biases: nothing,
                groups,
                bits,
            };
        };
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                words: words.as_slice::<u32>(),
                scales: Factors::of(scales, half),
                biases: Factors::of(biases, half),
                groups,
                bits,
            }
        }
    }

    pub(crate) fn count(self) -> usize {
        self.scales.len() / (self.groups * BAND).max(1)
    }

    /// Words of a row's group.
    pub(crate) fn group_words(self) -> usize {
        self.words.len() / self.scales.len().max(1)
    }

    /// Numbers of a word.
    pub(crate) fn per_word(self) -> usize {
        32 / self.bits as usize
    }

    /// Some of them.
    pub(crate) fn part(self, bands: Range<usize>) -> Self {
        let per = |n: usize| bands.start * n * BAND..bands.end * n * BAND;
        let (words, factors) = (per(self.groups * self.group_words()), per(self.groups));
        Self {
            words: &self.words[words],
            scales: self.scales.part(factors.clone()),
            biases: self.biases.part(factors),
            ..self
        }
    }

    /// A row of the matrix as floats, in order.
    pub(crate) fn row(self, row: usize, out: &mut [f32]) {
        let own = row % BAND;
        let band = self.part(row / BAND..row / BAND + 1);
        let (per, near) = (self.group_words(), self.per_word());
        let mask = u32::MAX >> (32 - self.bits);
        for (g, out) in out.chunks_exact_mut(per * near).enumerate() {
            let (scale, bias) = (band.scales.eight(g)[own], band.biases.eight(g)[own]);
            for (w, out) in (g * per..).zip(out.chunks_exact_mut(near)) {
                let word = band.words[w * BAND + own];
                for (i, out) in out.iter_mut().enumerate() {
                    let q = word >> (i as u32 * self.bits) & mask;
                    *out = q as f32 * scale + bias;
                }
            }
        }
    }
}
