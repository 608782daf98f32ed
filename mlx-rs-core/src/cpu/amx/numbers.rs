//! Packed numbers of two tiles' outputs as tiles of a matrix.

use std::arch::x86_64::{
    _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_castsi256_si512, _mm512_inserti64x4,
    _mm512_set1_epi16, _mm512_slli_epi16, _mm512_srli_epi16, _mm512_storeu_si512,
    _mm512_ternarylogic_epi32,
};

use super::super::bands::BAND;
use super::{Line, SIDE, Sources};

/// 16 and 256 as bfloat16, and the four bits that count ones in the first and sixteens in the other: so numbers below 16 become
/// bfloat16 that are greater by that, without a table.
pub(super) const BASES: [i16; 2] = [0x4180, 0x4380];
pub(super) const COUNTING: i16 = 0x0078;

/// What numbers of so many bits in tiles are greater than they should be.
pub(super) fn excess(bits: u32) -> f32 {
    if bits == 4 { 16.0 } else { 16.0 + 256.0 }
}

/// The numbers of the first group, of so many blocks of inputs, as tiles: two for a block, or four with 8 bits, greater than they are
/// by [`excess`].
///
/// # Safety
/// As of [`unpack`], for all blocks of the group.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(super) unsafe fn unpack_group<const BITS: u32>(from: &Sources<'_>, deep: usize, to: *mut Line) {
    for i in 0..deep {
        for tile in 0..2 {
            let (words, ahead) = (from.words[tile], from.ahead[tile]);
            // SAFETY: the caller's promise.
            unsafe {
                let to = to.add((i * 2 * BITS as usize / 4 + tile) * SIDE);
                unpack::<BITS>(words, ahead, i, to);
            }
        }
    }
}

/// A block of inputs' numbers of two bands as a tile, a line for each pair of inputs. Of numbers of 8 bits the lower
/// halves are one tile, and the upper ones another after the tile beside it.
///
/// # Safety
/// The processor must have avx512f and avx512bw; both bands must have that block, and there must be room.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn unpack<const BITS: u32>(two: [*const u32; 2], ahead: usize, block: usize, to: *mut Line) {
    let words = BITS as usize;
    let per = SIDE / words;
    // SAFETY: the words and places are the caller's promise; what is fetched ahead need not be there.
    unsafe {
        let four = _mm512_set1_epi16(COUNTING);
        let bases = BASES.map(|b| _mm512_set1_epi16(b));
        for w in 0..words {
            let at = (block * words + w) * BAND;
            let (low, high) = (two[0].add(at), two[1].add(at));
            if w % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T1>(low.wrapping_add(ahead).cast());
                _mm_prefetch::<_MM_HINT_T1>(high.wrapping_add(ahead).cast());
            }
            let (low, high) = (
                _mm256_loadu_si256(low.cast()),
                _mm256_loadu_si256(high.cast()),
            );
            let q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            let shifted = [
                _mm512_slli_epi16::<3>(q),
                _mm512_srli_epi16::<1>(q),
                _mm512_srli_epi16::<5>(q),
                _mm512_srli_epi16::<9>(q),
            ];
            for (i, q) in shifted.into_iter().enumerate() {
                let (part, line) = if BITS == 4 { (0, i) } else { (i % 2, i / 2) };
                // Four bits, and the others of the base.
                let numbers = _mm512_ternarylogic_epi32::<0xea>(q, four, bases[part]);
                let to = to.add(part * 2 * SIDE + w * per + line);
                _mm512_storeu_si512(to.cast(), numbers);
            }
        }
    }
}
