//! Rows of inputs as tiles of bfloat16: of each element the nearest one, and the nearest to what that lacks.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_ORD_Q, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_add_epi32, _mm512_mul_ps, _mm512_permutex2var_epi16, _mm512_reduce_add_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::{CHUNK, DEEP, Line, SIDE, large_m_asm, small_m_asm};
use crate::layout::input_panel::place;

/// Sums before the first: what is added before there is anything.
pub(crate) const LEAD: usize = large_m_asm::LATER * SIDE;

/// Rows of inputs in tiles of sixteen rows. These stand in pairs: greater parts, and what they lack; of at most eight rows both
/// are in one tile. Tiles that are multiplied together, at most [`CHUNK`], are a chunk: `[chunks, blocks of inputs, tiles]`.
#[derive(Default)]
pub(crate) struct Squares {
    rows: usize,
    k: usize,
    bits: u32,
    group: usize,
    tall: usize,
    count: usize,
    /// Tiles of a chunk; the last one may have fewer.
    wide: usize,
    tiles: Vec<Line>,
    /// Room that is read and not looked at, and the sums of groups, `[chunks, groups, rows]`: of what the pairs stand for, so that a rounding counts times the weight,
    /// not times the packed number alone.
    sums: Vec<f32>,
}

impl Squares {
    /// Makes room for so many rows of `k` inputs, for matrices of so many bits and this group size.
    pub(crate) fn resize(&mut self, rows: usize, k: usize, (bits, group): (u32, usize)) {
        assert!(rows > 0 && k > 0 && k.is_multiple_of(group));
        assert!(matches!(bits, 4 | 8) && group.is_multiple_of(DEEP));
        (self.rows, self.k, self.bits, self.group) = (rows, k, bits, group);
        let stacked = 2 * rows <= SIDE && k / group >= small_m_asm::LATER;
        self.tall = if stacked { SIDE / 2 } else { SIDE };
        self.count = rows.div_ceil(self.tall);
        // About as many in each.
        self.wide = self.count.div_ceil(self.count.div_ceil(CHUNK));
        let lines = self.pair() * self.count();
        // What was there is written again before it is read; shrunk, it would be filled with zeros whenever it grows again.
        let (lines, sums) = (lines * self.blocks(), LEAD + k / group * self.padded());
        self.tiles
            .resize(lines.max(self.tiles.len()), Line([0; DEEP]));
        self.sums.resize(sums.max(self.sums.len()), 0.0);
    }

    /// Whether both parts of the inputs stand in one tile, one after the other.
    pub(crate) fn stacked(&self) -> bool {
        self.tall < SIDE
    }

    /// Lines that the two parts take.
    fn pair(&self) -> usize {
        if self.stacked() { SIDE } else { 2 * SIDE }
    }

    /// Tiles beside each other.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Rows of each.
    pub(crate) fn tall(&self) -> usize {
        self.tall
    }

    /// Rows with those that fill the last tile.
    pub(crate) fn padded(&self) -> usize {
        self.count() * self.tall
    }

    /// Of a row.
    pub(crate) fn inputs(&self) -> usize {
        self.k
    }

    /// Groups of a row, and bits.
    pub(crate) fn packing(&self) -> (usize, u32) {
        (self.k / self.group, self.bits)
    }

    /// Blocks of [`DEEP`] inputs.
    pub(crate) fn blocks(&self) -> usize {
        self.k / DEEP
    }

    /// The first tile of each chunk, and how many it has.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = (usize, usize)> {
        let (count, wide) = (self.count, self.wide);
        (0..count)
            .step_by(wide)
            .map(move |first| (first, wide.min(count - first)))
    }

    /// Of how many tiles the chunks before a tile's are, its place among its own, and how many those are.
    fn chunk(&self, tile: usize) -> (usize, usize, usize) {
        let first = tile / self.wide * self.wide;
        (first, tile - first, self.wide.min(self.count - first))
    }

    /// Where the greater parts of a tile are for a block of inputs, in lines; what they lack follows.
    fn place(&self, tile: usize, block: usize) -> usize {
        let (before, at, wide) = self.chunk(tile);
        self.pair() * (before * self.blocks() + block * wide + at)
    }

    /// Where the sums of a tile's rows are for a group.
    fn sums_place(&self, tile: usize, group: usize) -> usize {
        let (before, at, wide) = self.chunk(tile);
        LEAD + self.tall * (before * (self.k / self.group) + group * wide + at)
    }

    /// A tile's pair for a block of inputs; those that follow in its chunk are behind.
    pub(super) fn tile(&self, tile: usize, block: usize) -> &[Line] {
        &self.tiles[self.place(tile, block)..]
    }

    /// The sums of a group of a tile's rows; those that follow in its chunk are behind, and before there is some room.
    pub(crate) fn sums(&self, tile: usize, group: usize) -> &[f32] {
        &self.sums[self.sums_place(tile, group)..]
    }

    /// All tiles.
    pub(super) fn tiles(&self) -> *const Line {
        self.tiles.as_ptr()
    }

    /// The room before the sums of a chunk, which it begins with this tile.
    pub(crate) fn lead(&self, tile: usize) -> *const f32 {
        self.sums[self.sums_place(tile, 0) - LEAD..].as_ptr()
    }

    /// Where rows are written; each by one thread.
    pub(crate) fn filling(&mut self) -> Filling<'_> {
        Filling {
            sums: self.sums.as_mut_ptr(),
            tiles: self.tiles.as_mut_ptr(),
            to: self,
        }
    }
}

/// [`Squares`] while rows are written.
pub(crate) struct Filling<'a> {
    to: &'a Squares,
    sums: *mut f32,
    tiles: *mut Line,
}

// SAFETY: each row's places are its own; that a row is written by one thread is what `row` demands.
unsafe impl Sync for Filling<'_> {}

impl Filling<'_> {
    /// Writes row `row`: each element times the factor and its weight, where there are weights; zeros without elements.
    ///
    /// # Safety
    /// The processor must have avx512f and avx512bw; no other thread may write this row meanwhile.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
    pub(crate) unsafe fn row(
        &self,
        row: usize,
        x: Option<&[f32]>,
        (factor, weight): (f32, Option<&[f32]>),
    ) {
        let Squares {
            tall,
            k,
            bits,
            group,
            ..
        } = *self.to;
        assert!(row < self.to.padded());
        assert!(x.is_none_or(|x| x.len() == k) && weight.is_none_or(|w| w.len() == k));
        let (tile, line) = (row / tall, row % tall);
        let second = if self.to.stacked() { tall } else { SIDE };
        let order = order(bits);
        let first = self.to.place(tile, 0) + line;
        let step = self.to.place(tile, 1) - self.to.place(tile, 0);
        let deep = group / DEEP;
        let first_sum = self.to.sums_place(tile, 0) + line;
        let next_sum = self.to.sums_place(tile, 1) - self.to.sums_place(tile, 0);
        for g in 0..k / group {
            let mut sum = 0.0;
            for block in g * deep..(g + 1) * deep {
                // SAFETY: a line of this row for each part, of which `resize` made room for all blocks; `x` and the weights
                // have `DEEP` elements from here on; the rest is the caller's promise.
                unsafe {
                    let high = self.tiles.add(first + block * step);
                    let low = high.add(second);
                    match x {
                        Some(x) => {
                            let weight = weight.map(|w| w.as_ptr().add(block * DEEP));
                            let x = x.as_ptr().add(block * DEEP);
                            sum += split(x, (factor, weight), order, (high, low));
                        }
                        None => (*high, *low) = (Line([0; DEEP]), Line([0; DEEP])),
                    }
                }
            }
            // SAFETY: one of the row's sums; see above.
            unsafe { *self.sums.add(first_sum + g * next_sum) = sum };
        }
    }
}

/// Inputs as they come; see [`order`].
pub(crate) fn natural() -> [u16; DEEP] {
    std::array::from_fn(|i| 2 * i as u16 + 1)
}

/// For each place of a tile's row, where the upper half of its input stands among those of a block.
fn order(bits: u32) -> &'static [u16; DEEP] {
    const FOUR: [u16; DEEP] = ordered(8);
    const EIGHT: [u16; DEEP] = ordered(4);
    if bits == 4 { &FOUR } else { &EIGHT }
}

/// [`order`] where a word has so many numbers.
const fn ordered(near: usize) -> [u16; DEEP] {
    let mut order = [0; DEEP];
    let mut i = 0;
    while i < DEEP {
        order[i / near * near + place(i % near, near)] = 2 * i as u16 + 1;
        i += 1;
    }
    order
}

/// The bits of the nearest bfloat16 in the upper halves, with others below; their value; and what it lacks. Of what is no
/// number only the upper half says so: it must not have come from memory as it is.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
pub(crate) fn nearest(v: __m512) -> (__m512i, __m512, __m512) {
    let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v);
    let bits = _mm512_castps_si512(v);
    let bits = _mm512_mask_add_epi32(bits, number, bits, _mm512_set1_epi32(0x8000));
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    let near = _mm512_castsi512_ps(_mm512_and_si512(bits, upper));
    (bits, near, _mm512_sub_ps(v, near))
}

/// A block of inputs as a pair; returns the sum of what it stands for.
///
/// # Safety
/// The processor must have avx512f and avx512bw; there must be `DEEP` elements, and weights, and room.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
pub(crate) unsafe fn split(
    x: *const f32,
    (factor, weight): (f32, Option<*const f32>),
    order: &[u16; DEEP],
    (high, low): (*mut Line, *mut Line),
) -> f32 {
    let mut sum = _mm512_setzero_ps();
    let (mut highs, mut lows) = ([_mm512_set1_epi32(0); 2], [_mm512_set1_epi32(0); 2]);
    // SAFETY: the elements and places are the caller's promise.
    unsafe {
        for i in 0..2 {
            let mut v = _mm512_mul_ps(_mm512_loadu_ps(x.add(16 * i)), _mm512_set1_ps(factor));
            if let Some(weight) = weight {
                v = _mm512_mul_ps(v, _mm512_loadu_ps(weight.add(16 * i)));
            }
            let (bits, near, rest) = nearest(v);
            let (rest_bits, rest, _) = nearest(rest);
            (highs[i], lows[i]) = (bits, rest_bits);
            sum = _mm512_add_ps(sum, _mm512_add_ps(near, rest));
        }
        let order = _mm512_loadu_si512(order.as_ptr().cast());
        for (halves, to) in [(highs, high), (lows, low)] {
            let both = _mm512_permutex2var_epi16(halves[0], order, halves[1]);
            _mm512_storeu_si512(to.cast(), both);
        }
    }
    _mm512_reduce_add_ps(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::testing::{noise, with_each};

    fn value(line: &Line, at: usize) -> f32 {
        f32::from_bits(u32::from(line.0[at]) << 16)
    }

    /// Pairs are within 2^-17 of the inputs, wherever they stand; sums are those of the pairs; rows that fill a tile are
    /// zeros.
    #[test]
    fn pairs_are_sixteen_bits_of_their_inputs() {
        with_each(|isa| {
            // The writing needs AVX-512 only.
            if !matches!(isa, Isa::Avx512 | Isa::Amx) {
                return;
            }
            for (rows, k, bits, group) in [
                (1, 64, 4, 32),
                (8, 96, 8, 32),
                (9, 128, 4, 128),
                (17, 64, 8, 64),
                (50, 128, 4, 64),
                (100, 64, 4, 32),
            ] {
                let x: Vec<f32> = noise(rows * k, 3).iter().map(|v| v * 37.0).collect();
                let weight = noise(k, 4);
                let mut squares = Squares::default();
                squares.resize(rows, k, (bits, group));
                let padded = squares.padded();
                let filling = squares.filling();
                for row in 0..padded {
                    let own = (row < rows).then(|| &x[row * k..(row + 1) * k]);
                    // SAFETY: this instruction set has AVX-512; one thread writes.
                    unsafe { filling.row(row, own, (0.5, Some(&weight))) };
                }
                let order = order(bits);
                for row in 0..padded {
                    let (tile, line) = (row / squares.tall(), row % squares.tall());
                    for g in 0..k / group {
                        let mut sum = 0.0;
                        for i in g * group..(g + 1) * group {
                            let pair = squares.tile(tile, i / DEEP);
                            let second = if squares.stacked() { rows } else { SIDE };
                            let wanted = 2 * (i % DEEP) as u16 + 1;
                            let at = order.iter().position(|o| *o == wanted).unwrap();
                            let near = value(&pair[line], at);
                            let got = near + value(&pair[line + second], at);
                            let exact = if row < rows {
                                x[row * k + i] * 0.5 * weight[i]
                            } else {
                                0.0
                            };
                            let allowed = exact.abs() * f32::powi(2.0, -17);
                            assert!((got - exact).abs() <= allowed, "{row} {i}: {got} {exact}");
                            sum += f64::from(got);
                        }
                        let got = f64::from(squares.sums(tile, g)[line]);
                        assert!((got - sum).abs() < 1e-4, "{row} {g}: {got} {sum}");
                    }
                }
            }
        });
    }
}
