//! Packs small integers into 32-bit words. The first integer is in the lowest bits.

use super::layout::GROUP;

/// Packs the 32 codes of a group into `bits` words. Each code has `bits` bits. Callers pass a
/// constant, so the compiler removes the other branches.
#[inline(always)]
pub(super) fn pack_group(bits: u32, q: &[u8; GROUP], words: &mut [u32]) {
    match bits {
        2 => copy([0, 16].map(|at| pack_pairs(sixteen(q, at))), words),
        4 => copy(quarters(q).map(|eight| pack_nibbles(&eight)), words),
        5 => copy(pack_five(q), words),
        _ => {
            for (word, bytes) in words.iter_mut().zip(q.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*bytes);
            }
        }
    }
}

#[inline(always)]
fn copy<const N: usize>(from: [u32; N], to: &mut [u32]) {
    if let Some(to) = to.first_chunk_mut::<N>() {
        *to = from;
    }
}

/// Packs 16 values of 2 bits into a word.
pub(super) fn pack_pairs(q: &[u8; 16]) -> u32 {
    q.iter().rev().fold(0, |word, &q| word << 2 | u32::from(q))
}

/// The 16 values that start at `at`.
fn sixteen(q: &[u8; GROUP], at: usize) -> &[u8; 16] {
    q.as_chunks::<16>().0.get(at / 16).unwrap_or(&[0; 16])
}

fn quarters(q: &[u8; GROUP]) -> [[u8; 8]; 4] {
    let mut all = [[0; 8]; 4];
    for (part, bytes) in all.iter_mut().zip(q.as_chunks::<8>().0) {
        *part = *bytes;
    }
    all
}

/// Joins the two fields of each pair, for all pairs at once. Each field has `FIELD` bits. A value
/// uses `WIDTH` of them. `low` is a mask of the first value in each pair.
#[inline(always)]
fn join_pairs<const WIDTH: u32, const FIELD: u32>(x: u64, low: u64) -> u64 {
    (x & low) | (x >> (FIELD - WIDTH) & (low << WIDTH))
}

/// Packs eight values of four bits into a word.
#[inline(always)]
pub(super) fn pack_nibbles(q: &[u8; 8]) -> u32 {
    let x = u64::from_le_bytes(*q);
    let x = join_pairs::<4, 8>(x, 0x000f_000f_000f_000f);
    let x = join_pairs::<8, 16>(x, 0x0000_00ff_0000_00ff);
    join_pairs::<16, 32>(x, 0x0000_0000_0000_ffff) as u32
}

/// Packs 16 values of 6 bits into 3 words.
#[inline(always)]
pub(super) fn pack_six(q: &[u8; 16]) -> [u32; 3] {
    let eight = |q: &[u8; 8]| {
        let x = u64::from_le_bytes(*q);
        let x = join_pairs::<6, 8>(x, 0x003f_003f_003f_003f);
        let x = join_pairs::<12, 16>(x, 0x0000_0fff_0000_0fff);
        join_pairs::<24, 32>(x, 0x0000_0000_00ff_ffff)
    };
    let halves = q.as_chunks::<8>().0;
    let [low, high] = [0, 1].map(|i| halves.get(i).map_or(0, eight));
    [
        low as u32,
        (low >> 32 | high << 16) as u32,
        (high >> 16) as u32,
    ]
}

/// Packs 32 values of 5 bits into 5 words.
#[inline(always)]
fn pack_five(q: &[u8; GROUP]) -> [u32; 5] {
    // The eight values of a quarter become 40 bits.
    let [a, b, c, d] = quarters(q).map(|q| {
        let x = u64::from_le_bytes(q);
        let x = join_pairs::<5, 8>(x, 0x001f_001f_001f_001f);
        let x = join_pairs::<10, 16>(x, 0x0000_03ff_0000_03ff);
        join_pairs::<20, 32>(x, 0x0000_0000_000f_ffff)
    });
    [
        a as u32,
        (a >> 32 | b << 8) as u32,
        (b >> 24 | c << 16) as u32,
        (c >> 16 | d << 24) as u32,
        (d >> 8) as u32,
    ]
}
