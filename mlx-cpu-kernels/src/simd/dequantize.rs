//! Quantized matrices as floats: rows, or columns of all rows.

use std::ops::Range;

use crate::isa::Isa;
use crate::layout::packed::{BAND, Bands, Factors, QuantizedRow};
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2;
use crate::simd::{portable, vmath};

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

impl Bands<'_> {
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
            unpack_row(isa, row, self.bits, out);
        }
    }

    /// All rows as floats, a column after another: `[columns, rows]`, without a step across lanes.
    pub(crate) fn unpack_columns(self, isa: Isa, out: &mut [f32]) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2, fma and f16c.
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
                avx2::dequantize::unpack_columns(self, out);
            },
            _ => portable::dequantize::unpack_columns(self, out),
        }
    }
}

/// A row of a matrix as floats. With 4 bits the even elements of a chunk come before the odd ones.
fn unpack_row(isa: Isa, row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { avx2::dequantize::unpack(row, bits, out) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dot => portable::dequantize::unpack(row, bits, out),
        Isa::Portable => portable::dequantize::unpack(row, bits, out),
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
            vmath::widen(isa, all, room);
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
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { avx2::transpose::eights(from, to) },
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
