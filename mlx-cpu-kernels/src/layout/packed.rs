//! Quantized matrices as the kernels store them: in bands of eight rows, a word of each beside another, so that a vector
//! holds one word of each row and its lanes are outputs. Nothing is summed across lanes then, and memory is read from
//! the first byte to the last. What reads them here is what needs rows one after another; products are elsewhere.

use std::ops::Range;

use half::f16;

use crate::simd::dispatch::{self, Isa, QuantizedRow};
use crate::work::Input;

/// Rows of a band.
pub const BAND: usize = 8;

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

    fn part(self, range: Range<usize>) -> Self {
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

/// Room for the rows of a band, one after another.
#[derive(Default)]
pub(crate) struct Room {
    /// As floats, which are as large; nothing is computed with them.
    words: Vec<f32>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    /// Scales or biases before they stand in rows.
    wide: Vec<f32>,
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

    /// Some rows of the matrix as floats, a row after another, from column `from` on, which begins a group; `out` is
    /// `[rows, columns]` with whole groups. With 4 bits the even elements of a chunk come before the odd ones.
    pub(crate) fn unpack(
        self,
        isa: Isa,
        rows: Range<usize>,
        from: usize,
        room: &mut Room,
        out: &mut [f32],
    ) {
        let columns = out.len() / rows.len().max(1);
        if columns == 0 {
            return;
        }
        let per = self.group_words();
        let width = per * self.per_word();
        let groups = from / width..(from + columns) / width;
        let n = groups.len();
        for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns)) {
            let own = row % BAND;
            if own == 0 || row == rows.start {
                let band = self.part(row / BAND..row / BAND + 1);
                let words = &band.words[groups.start * per * BAND..groups.end * per * BAND];
                room.words.resize(words.len(), 0.0);
                apart(isa, bytemuck::cast_slice(words), &mut room.words);
                let own = groups.clone();
                spread(
                    isa,
                    band.scales,
                    own.clone(),
                    &mut room.wide,
                    &mut room.scales,
                );
                spread(isa, band.biases, own, &mut room.wide, &mut room.biases);
            }
            let row = QuantizedRow {
                packed: bytemuck::cast_slice(&room.words[own * n * per..(own + 1) * n * per]),
                scales: &room.scales[own * n..(own + 1) * n],
                biases: &room.biases[own * n..(own + 1) * n],
            };
            dispatch::unpack(isa, row, self.bits, out);
        }
    }

    /// All rows as floats, a column after another: `[columns, rows]`, without a step across lanes.
    pub(crate) fn unpack_columns(self, isa: Isa, out: &mut [f32]) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2, fma and f16c.
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
                crate::simd::avx2::vmath::unpack_columns(self, out)
            },
            _ => self.unpack_columns_portable(out),
        }
    }

    fn unpack_columns_portable(self, out: &mut [f32]) {
        let (per, near) = (self.group_words(), self.per_word());
        let (width, mask) = (self.count() * BAND, u32::MAX >> (32 - self.bits));
        for i in 0..self.count() {
            let band = self.part(i..i + 1);
            let groups = out.chunks_exact_mut(per * near * width);
            for ((g, out), words) in groups.enumerate().zip(band.words.chunks_exact(per * BAND)) {
                let (scales, biases) = (band.scales.eight(g), band.biases.eight(g));
                let words = words.as_chunks::<BAND>().0.iter();
                for (words, columns) in words.zip(out.chunks_exact_mut(near * width)) {
                    for (j, column) in columns.chunks_exact_mut(width).enumerate() {
                        for (lane, out) in column[i * BAND..][..BAND].iter_mut().enumerate() {
                            let q = words[lane] >> (j as u32 * self.bits) & mask;
                            *out = q.cast_signed() as f32 * scales[lane] + biases[lane];
                        }
                    }
                }
            }
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

/// Scales or biases of a band's rows, a row after another.
fn spread(
    isa: Isa,
    band: Factors<'_>,
    groups: Range<usize>,
    room: &mut Vec<f32>,
    to: &mut Vec<f32>,
) {
    let n = groups.len();
    to.resize(BAND * n, 0.0);
    match band.part(groups.start * BAND..groups.end * BAND) {
        Factors::Single(all) => apart(isa, all, to),
        Factors::Half(all) => {
            room.resize(BAND * n, 0.0);
            dispatch::widen(isa, all, room);
            apart(isa, room, to);
        }
    }
}

/// What stands `[n, BAND]`, as `[BAND, n]`: whatever the bits mean.
fn apart(isa: Isa, from: &[f32], to: &mut [f32]) {
    assert!(from.len() == to.len());
    #[cfg(target_arch = "x86_64")]
    let done = match isa {
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma; the lengths are
        // asserted.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            crate::simd::transpose::eights_avx2(from, to)
        },
        Isa::Portable => 0,
    };
    #[cfg(not(target_arch = "x86_64"))]
    let (done, _) = (0, isa);
    let n = from.len() / BAND;
    for (i, eight) in from.as_chunks::<BAND>().0.iter().enumerate().skip(done) {
        for (row, word) in eight.iter().enumerate() {
            to[row * n + i] = *word;
        }
    }
}
