//! Packed numbers of two tiles' outputs as tiles of a matrix.

use std::arch::x86_64::{
    _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_castsi256_si512, _mm512_inserti64x4,
    _mm512_loadu_si512, _mm512_permutexvar_epi16, _mm512_srli_epi16, _mm512_storeu_si512,
};

use super::super::bands::BAND;
use super::{DEEP, Group, Line, SIDE, Sources};

/// Lines of a group's numbers.
pub(super) fn lines(bits: u32, deep: usize) -> usize {
    2 * SIDE * deep * bits as usize / 4
}

/// The numbers below 16, and that many times 16, as bfloat16; twice, so that a fifth bit does not count.
const NUMBERS: [[u16; DEEP]; 2] = {
    let mut numbers = [[0; DEEP]; 2];
    let mut i = 0;
    while i < DEEP {
        let n = (i % 16) as f32;
        numbers[0][i] = (n.to_bits() >> 16) as u16;
        numbers[1][i] = ((16.0 * n).to_bits() >> 16) as u16;
        i += 1;
    }
    numbers
};

/// The numbers of a group as tiles: two for a block of inputs, or four with 8 bits. `FOR` tells callers apart: what has one
/// caller only becomes part of it.
///
/// # Safety
/// As of [`unpack`], for all blocks of the group; the processor must have f16c.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn unpack_group<const BITS: u32, const FOR: usize>(
    from: &Sources<'_>,
    (group, deep): (usize, usize),
    to: *mut Line,
) -> Group {
    // SAFETY: the caller's promise.
    unsafe {
        for i in 0..deep {
            let to = to.add(i * 2 * SIDE * BITS as usize / 4);
            for tile in 0..2 {
                let (words, ahead) = (from.words[tile], from.ahead[tile]);
                unpack::<BITS, FOR>(words, ahead, group * deep + i, to.add(tile * SIDE));
            }
        }
        from.group(group)
    }
}

/// A block of inputs' numbers of two bands as a tile, a line for each pair of inputs. Of numbers of 8 bits the lower
/// halves are one tile, and the upper ones another after the tile beside it.
///
/// # Safety
/// The processor must have avx512f and avx512bw; both bands must have that block, and there must be room.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn unpack<const BITS: u32, const FOR: usize>(
    two: [*const u32; 2],
    ahead: usize,
    block: usize,
    to: *mut Line,
) {
    let words = BITS as usize;
    let per = SIDE / words;
    // SAFETY: the words and places are the caller's promise; what is fetched ahead need not be there.
    unsafe {
        let tables = NUMBERS
            .each_ref()
            .map(|t| _mm512_loadu_si512(t.as_ptr().cast()));
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
                q,
                _mm512_srli_epi16::<4>(q),
                _mm512_srli_epi16::<8>(q),
                _mm512_srli_epi16::<12>(q),
            ];
            for (i, q) in shifted.into_iter().enumerate() {
                let (part, line) = if BITS == 4 { (0, i) } else { (i % 2, i / 2) };
                let numbers = _mm512_permutexvar_epi16(q, tables[part]);
                let to = to.add(part * 2 * SIDE + w * per + line);
                _mm512_storeu_si512(to.cast(), numbers);
            }
        }
    }
}
