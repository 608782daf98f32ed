//! Stores input rows as tiles of bfloat16 pairs. A pair has the nearest bfloat16 of an element, and
//! the nearest bfloat16 of the remainder.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_ORD_Q, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_add_epi32, _mm512_mul_ps, _mm512_permutex2var_epi16, _mm512_reduce_add_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::large_m_asm;
use super::small_m_asm;
use super::tiles::{TILE_K, TILE_ROWS, TILES_PER_CHUNK, TileRow};
use crate::layout::input_panel::pair_index;
use crate::memory::resize;

/// Padding before the first sums, which the first additions read.
pub(crate) const SUMS_LEAD: usize = large_m_asm::PIPELINE_DEPTH * TILE_ROWS;

/// Input rows in tiles of sixteen rows. Each tile is a pair of tiles: high parts, and remainders.
/// With at most eight rows, both parts are in one tile. Tiles of a chunk, at most
/// [`TILES_PER_CHUNK`], are multiplied together. The order is `[chunks, blocks of inputs, tiles]`.
#[derive(Default)]
pub(crate) struct InputTiles {
    rows: usize,
    k: usize,
    bits: u32,
    group: usize,
    tall: usize,
    count: usize,
    /// The number of tiles per chunk; the last chunk may have fewer.
    wide: usize,
    tiles: Vec<TileRow>,
    /// The sums of groups, `[chunks, groups, rows]`, after padding whose values do not matter. They
    /// are sums of the rounded values in the pairs. So the effect of a rounding error is
    /// proportional to the weight, not to the code.
    sums: Vec<f32>,
}

impl InputTiles {
    /// Resizes for `rows` rows of `k` inputs, and matrices with this bit width and group size.
    pub(crate) fn resize(&mut self, rows: usize, k: usize, (bits, group): (u32, usize)) {
        assert!(rows > 0 && k > 0 && k.is_multiple_of(group));
        assert!(matches!(bits, 4 | 8) && group.is_multiple_of(TILE_K));
        (self.rows, self.k, self.bits, self.group) = (rows, k, bits, group);
        let is_stacked = 2 * rows <= TILE_ROWS && k / group >= small_m_asm::PIPELINE_DEPTH;
        self.tall = if is_stacked { TILE_ROWS / 2 } else { TILE_ROWS };
        self.count = rows.div_ceil(self.tall);
        // Chunks have nearly equal sizes.
        self.wide = self.count.div_ceil(self.count.div_ceil(TILES_PER_CHUNK));
        let lines = self.pair() * self.count();
        // Old content is overwritten before it is read. The buffers never shrink, because growing
        // again would fill them with zeros.
        let (lines, sums) = (lines * self.blocks(), SUMS_LEAD + k / group * self.padded());
        let lines = lines.max(self.tiles.len());
        resize(&mut self.tiles, lines, TileRow([0; TILE_K]));
        let sums = sums.max(self.sums.len());
        resize(&mut self.sums, sums, 0.0);
    }

    /// Whether both parts of the inputs are in one tile.
    pub(crate) fn is_stacked(&self) -> bool {
        self.tall < TILE_ROWS
    }

    /// The number of lines that both parts of a tile occupy.
    fn pair(&self) -> usize {
        if self.is_stacked() {
            TILE_ROWS
        } else {
            2 * TILE_ROWS
        }
    }

    /// The number of tiles.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The number of rows per tile.
    pub(crate) fn tall(&self) -> usize {
        self.tall
    }

    /// The number of rows including padding of the last tile.
    pub(crate) fn padded(&self) -> usize {
        self.count() * self.tall
    }

    /// The number of inputs of a row.
    pub(crate) fn inputs(&self) -> usize {
        self.k
    }

    /// The number of groups per row, and the number of bits per code.
    pub(crate) fn packing(&self) -> (usize, u32) {
        (self.k / self.group, self.bits)
    }

    /// The number of blocks of [`TILE_K`] inputs.
    pub(crate) fn blocks(&self) -> usize {
        self.k / TILE_K
    }

    /// The first tile of each chunk, and its number of tiles.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = (usize, usize)> {
        let (count, wide) = (self.count, self.wide);
        (0..count)
            .step_by(wide)
            .map(move |first| (first, wide.min(count - first)))
    }

    /// For a tile: the number of tiles in earlier chunks, its index in its chunk, and the chunk's
    /// number of tiles.
    fn chunk(&self, tile: usize) -> (usize, usize, usize) {
        let first = tile / self.wide * self.wide;
        (first, tile - first, self.wide.min(self.count - first))
    }

    /// The line of a tile's high parts for a block of inputs. The remainders follow.
    fn place(&self, tile: usize, block: usize) -> usize {
        let (before, at, wide) = self.chunk(tile);
        self.pair() * (before * self.blocks() + block * wide + at)
    }

    /// The index of the sums of a tile's rows for a group.
    fn sums_place(&self, tile: usize, group: usize) -> usize {
        let (before, at, wide) = self.chunk(tile);
        SUMS_LEAD + self.tall * (before * (self.k / self.group) + group * wide + at)
    }

    /// A tile's pair for a block of inputs. The later tiles of its chunk follow in the slice.
    pub(super) fn tile(&self, tile: usize, block: usize) -> &[TileRow] {
        &self.tiles[self.place(tile, block)..]
    }

    /// The sums of a group of a tile's rows. The sums of later tiles of its chunk follow.
    pub(crate) fn sums(&self, tile: usize, group: usize) -> &[f32] {
        &self.sums[self.sums_place(tile, group)..]
    }

    /// The address of all tiles.
    pub(super) fn tiles(&self) -> *const TileRow {
        self.tiles.as_ptr()
    }

    /// The padding before the sums of the chunk that starts with this tile.
    pub(crate) fn lead(&self, tile: usize) -> *const f32 {
        self.sums[self.sums_place(tile, 0) - SUMS_LEAD..].as_ptr()
    }

    /// A writer of rows. Only one thread may write each row.
    pub(crate) fn writer(&mut self) -> InputTilesWriter<'_> {
        InputTilesWriter {
            sums: self.sums.as_mut_ptr(),
            tiles: self.tiles.as_mut_ptr(),
            to: self,
        }
    }
}

/// [`InputTiles`] while threads write rows.
pub(crate) struct InputTilesWriter<'a> {
    to: &'a InputTiles,
    sums: *mut f32,
    tiles: *mut TileRow,
}

// SAFETY: the elements of different rows are disjoint, and `row` requires that only one thread
// writes a row.
unsafe impl Sync for InputTilesWriter<'_> {}

impl InputTilesWriter<'_> {
    /// Writes row `row`: each element times the factor and, if given, its weight. Without elements
    /// it writes zeros.
    ///
    /// # Safety
    /// The processor must have avx512f and avx512bw. No other thread may write this row.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
    pub(crate) unsafe fn row(
        &self,
        row: usize,
        x: Option<&[f32]>,
        (factor, weight): (f32, Option<&[f32]>),
    ) {
        let InputTiles {
            tall,
            k,
            bits,
            group,
            ..
        } = *self.to;
        assert!(row < self.to.padded());
        assert!(x.is_none_or(|x| x.len() == k) && weight.is_none_or(|w| w.len() == k));
        let (tile, line) = (row / tall, row % tall);
        let second = if self.to.is_stacked() {
            tall
        } else {
            TILE_ROWS
        };
        let code_order = code_order(bits);
        let first = self.to.place(tile, 0) + line;
        let step = self.to.place(tile, 1) - self.to.place(tile, 0);
        let deep = group / TILE_K;
        let first_sum = self.to.sums_place(tile, 0) + line;
        let next_sum = self.to.sums_place(tile, 1) - self.to.sums_place(tile, 0);
        for g in 0..k / group {
            let mut sum = 0.0;
            for block in g * deep..(g + 1) * deep {
                // SAFETY: this row has a line per part, and `resize` allocated all blocks. `x` and
                // the weights have `TILE_K` elements from here on. The caller guarantees the
                // features and exclusive use.
                unsafe {
                    let high = self.tiles.add(first + block * step);
                    let low = high.add(second);
                    match x {
                        Some(x) => {
                            let weight = weight.map(|w| w.as_ptr().add(block * TILE_K));
                            let x = x.as_ptr().add(block * TILE_K);
                            sum += split(x, (factor, weight), code_order, (high, low));
                        }
                        None => (*high, *low) = (TileRow([0; TILE_K]), TileRow([0; TILE_K])),
                    }
                }
            }
            // SAFETY: this is the address of one of the row's sums, which `resize` allocated.
            unsafe { *self.sums.add(first_sum + g * next_sum) = sum };
        }
    }
}

/// The order of inputs for codes that need no reordering; see [`code_order`].
pub(crate) fn natural_order() -> [u16; TILE_K] {
    std::array::from_fn(|i| 2 * i as u16 + 1)
}

/// For each position in a tile's row, the input of the block that is stored there. The entry is the
/// index of the upper 16-bit half of that input.
fn code_order(bits: u32) -> &'static [u16; TILE_K] {
    const FOUR: [u16; TILE_K] = code_order_for(8);
    const EIGHT: [u16; TILE_K] = code_order_for(4);
    if bits == 4 { &FOUR } else { &EIGHT }
}

/// [`code_order`] for this number of codes per word.
const fn code_order_for(near: usize) -> [u16; TILE_K] {
    let mut code_order = [0; TILE_K];
    let mut i = 0;
    while i < TILE_K {
        code_order[i / near * near + pair_index(i % near, near)] = 2 * i as u16 + 1;
        i += 1;
    }
    code_order
}

/// Returns three vectors: the nearest bfloat16 in the upper halves of the bits, with arbitrary bits
/// below; the value of that bfloat16; and the remainder. A NaN is not rounded, because the carry
/// could change it to another value.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
pub(crate) fn round_to_bf16(v: __m512) -> (__m512i, __m512, __m512) {
    let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v);
    let bits = _mm512_castps_si512(v);
    let bits = _mm512_mask_add_epi32(bits, number, bits, _mm512_set1_epi32(0x8000));
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    let near = _mm512_castsi512_ps(_mm512_and_si512(bits, upper));
    (bits, near, _mm512_sub_ps(v, near))
}

/// Writes a block of inputs as pairs. Returns the sum of the pairs' values.
///
/// # Safety
/// The processor must have avx512f and avx512bw. `TILE_K` elements and weights must exist, and both
/// lines must be writable.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
pub(crate) unsafe fn split(
    x: *const f32,
    (factor, weight): (f32, Option<*const f32>),
    code_order: &[u16; TILE_K],
    (high, low): (*mut TileRow, *mut TileRow),
) -> f32 {
    let mut sum = _mm512_setzero_ps();
    let (mut highs, mut lows) = ([_mm512_set1_epi32(0); 2], [_mm512_set1_epi32(0); 2]);
    // SAFETY: the caller guarantees the features, the elements and weights, and both lines.
    unsafe {
        for i in 0..2 {
            let mut v = _mm512_mul_ps(_mm512_loadu_ps(x.add(16 * i)), _mm512_set1_ps(factor));
            if let Some(weight) = weight {
                v = _mm512_mul_ps(v, _mm512_loadu_ps(weight.add(16 * i)));
            }
            let (bits, near, rest) = round_to_bf16(v);
            let (rest_bits, rest, _) = round_to_bf16(rest);
            (highs[i], lows[i]) = (bits, rest_bits);
            sum = _mm512_add_ps(sum, _mm512_add_ps(near, rest));
        }
        let code_order = _mm512_loadu_si512(code_order.as_ptr().cast());
        for (halves, to) in [(highs, high), (lows, low)] {
            let both = _mm512_permutex2var_epi16(halves[0], code_order, halves[1]);
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

    fn value(line: &TileRow, at: usize) -> f32 {
        f32::from_bits(u32::from(line.0[at]) << 16)
    }

    /// At every position, a pair differs from its input by a relative error of at most 2^-17. Sums
    /// are those of the pairs' values. Padding rows are zeros.
    #[test]
    fn pairs_are_sixteen_bits_of_their_inputs() {
        with_each(|isa| {
            // Writing tiles needs AVX-512, but not AMX.
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
                let mut tiles = InputTiles::default();
                tiles.resize(rows, k, (bits, group));
                let padded = tiles.padded();
                let writer = tiles.writer();
                for row in 0..padded {
                    let inputs = (row < rows).then(|| &x[row * k..(row + 1) * k]);
                    // SAFETY: this instruction set has AVX-512, and only one thread writes.
                    unsafe { writer.row(row, inputs, (0.5, Some(&weight))) };
                }
                let code_order = code_order(bits);
                for row in 0..padded {
                    let (tile, line) = (row / tiles.tall(), row % tiles.tall());
                    for g in 0..k / group {
                        let mut sum = 0.0;
                        for i in g * group..(g + 1) * group {
                            let pair = tiles.tile(tile, i / TILE_K);
                            let second = if tiles.is_stacked() { rows } else { TILE_ROWS };
                            let wanted = 2 * (i % TILE_K) as u16 + 1;
                            let at = code_order.iter().position(|o| *o == wanted).unwrap();
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
                        let got = f64::from(tiles.sums(tile, g)[line]);
                        assert!((got - sum).abs() < 1e-4, "{row} {g}: {got} {sum}");
                    }
                }
            }
        });
    }
}
