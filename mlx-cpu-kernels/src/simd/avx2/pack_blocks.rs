//! Packs row blocks from GGUF blocks with AVX2. 256 weights of each of eight rows are converted in
//! a buffer that fits the first-level cache, and then transposed.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_cvtsi32_si128, _mm_cvtsi64_si128, _mm_loadu_si128, _mm_setzero_si128,
    _mm_srli_epi16, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpackhi_epi64,
    _mm_unpacklo_epi8, _mm_unpacklo_epi16, _mm_unpacklo_epi64, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_castsi256_si128, _mm256_cmpeq_epi8,
    _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16,
    _mm256_or_si256, _mm256_packus_epi16, _mm256_permute2x128_si256, _mm256_permute4x64_epi64,
    _mm256_set_epi64x, _mm256_set_m128i, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_epi64x, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_sll_epi16,
    _mm256_slli_epi16, _mm256_slli_epi64, _mm256_srl_epi16, _mm256_srli_epi16, _mm256_srli_epi64,
    _mm256_storeu_si256, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32,
    _mm256_unpacklo_epi64, _mm256_xor_si256,
};

use crate::layout::blocks::{BlockKind, PIECE, PackedBlockMut};
use crate::layout::packed::INTERLEAVED_ROWS;

const ROWS: usize = INTERLEAVED_ROWS;

/// Words of a row in the buffer: 64 for codes of 8 bits, and some for stores that exceed the last
/// word.
const STRIDE: usize = 72;

/// A piece of one row.
#[repr(C, align(32))]
#[derive(Clone, Copy)]
struct RowPiece {
    words: [u32; STRIDE],
    /// The scales: float16, or bytes.
    scales: [u8; 16],
    /// The float16 values that all weights of a block share, as raw bits.
    supers: [u16; 2],
}

/// Packs a row block of `weights` weights a row.
///
/// # Safety
/// The processor must have avx2.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn pack_row_block(
    kind: BlockKind,
    rows: [&[u8]; ROWS],
    weights: usize,
    out: &mut PackedBlockMut<'_>,
) {
    match kind {
        BlockKind::Q4_0 | BlockKind::Iq4Nl => {
            pack::<18>(kind, rows, weights, out, |blocks, to| q4_0(blocks, to));
        }
        BlockKind::Q5_0 => pack::<22>(kind, rows, weights, out, |blocks, to| q5_0(blocks, to)),
        BlockKind::Q8_0 => pack::<34>(kind, rows, weights, out, |blocks, to| q8_0(blocks, to)),
        BlockKind::Q4K => pack::<144>(kind, rows, weights, out, |blocks, to| q4_k(blocks, to)),
        BlockKind::Q5K => pack::<176>(kind, rows, weights, out, |blocks, to| q5_k(blocks, to)),
        BlockKind::Q6K => pack::<210>(kind, rows, weights, out, |blocks, to| q6_k(blocks, to)),
        BlockKind::Iq4Xs => pack::<136>(kind, rows, weights, out, |blocks, to| iq4_xs(blocks, to)),
    }
}

/// [`pack_row_block`] for blocks of `BYTES` bytes. `convert` converts the blocks of a piece.
#[inline]
#[target_feature(enable = "avx2")]
fn pack<const BYTES: usize>(
    kind: BlockKind,
    rows: [&[u8]; ROWS],
    weights: usize,
    out: &mut PackedBlockMut<'_>,
    convert: impl Fn(&[[u8; BYTES]], &mut RowPiece),
) {
    let rows = rows.map(|row| row.as_chunks::<BYTES>().0);
    let empty = RowPiece {
        words: [0; STRIDE],
        scales: [0; 16],
        supers: [0; 2],
    };
    let mut pieces = [empty; ROWS];
    let (bits, supers) = (kind.bits(), kind.supers());
    for first in (0..weights).step_by(PIECE) {
        let end = weights.min(first + PIECE);
        for (row, piece) in rows.iter().zip(&mut pieces) {
            convert(&row[first / kind.weights()..end / kind.weights()], piece);
        }
        let words = &mut out.words[first / 32 * bits * ROWS..end / 32 * bits * ROWS];
        transpose_words(&pieces, words.as_chunks_mut::<ROWS>().0);
        let of_scales = |weights: usize| weights / 32 * kind.scale_bytes() * ROWS;
        let scales = &mut out.scales[of_scales(first)..of_scales(end)];
        match supers {
            0 => transpose_halves(&pieces, scales.as_chunks_mut::<{ 2 * ROWS }>().0),
            _ => transpose_bytes(&pieces, scales.as_chunks_mut::<{ 2 * ROWS }>().0),
        }
        let to = &mut out.supers[first / PIECE * supers * ROWS..][..supers * ROWS];
        for (i, to) in to.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
            *to = std::array::from_fn(|r| pieces[r].supers[i]);
        }
    }
}

/// Interleaves the words of eight rows.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_words(pieces: &[RowPiece; ROWS], out: &mut [[u32; ROWS]]) {
    assert!(out.len() <= STRIDE);
    for (first, to) in (0..).step_by(8).zip(out.chunks_mut(8)) {
        // SAFETY: `first + 8` is at most `STRIDE`, a multiple of eight.
        let rows = pieces
            .each_ref()
            .map(|piece| unsafe { _mm256_loadu_si256(piece.words.as_ptr().add(first).cast()) });
        for (to, column) in to.iter_mut().zip(transposed(rows)) {
            // SAFETY: `to` has eight words.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), column) };
        }
    }
}

/// Transposes 8 by 8 words.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(r: [__m256i; 8]) -> [__m256i; 8] {
    let zero = _mm256_setzero_si256();
    let (mut fours, mut columns) = ([zero; 8], [zero; 8]);
    for half in 0..2 {
        let r = &r[4 * half..4 * half + 4];
        let low = [
            _mm256_unpacklo_epi32(r[0], r[1]),
            _mm256_unpacklo_epi32(r[2], r[3]),
        ];
        let high = [
            _mm256_unpackhi_epi32(r[0], r[1]),
            _mm256_unpackhi_epi32(r[2], r[3]),
        ];
        fours[4 * half] = _mm256_unpacklo_epi64(low[0], low[1]);
        fours[4 * half + 1] = _mm256_unpackhi_epi64(low[0], low[1]);
        fours[4 * half + 2] = _mm256_unpacklo_epi64(high[0], high[1]);
        fours[4 * half + 3] = _mm256_unpackhi_epi64(high[0], high[1]);
    }
    for i in 0..4 {
        columns[i] = _mm256_permute2x128_si256::<0x20>(fours[i], fours[4 + i]);
        columns[4 + i] = _mm256_permute2x128_si256::<0x31>(fours[i], fours[4 + i]);
    }
    columns
}

#[inline]
#[target_feature(enable = "avx2")]
fn load16(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: sixteen bytes exist.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load32(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes exist.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// The 32 bytes of a block from `at` on.
#[inline]
#[target_feature(enable = "avx2")]
fn load32_at<const N: usize>(block: &[u8; N], at: usize) -> __m256i {
    match block[at..].first_chunk::<32>() {
        Some(bytes) => load32(bytes),
        None => _mm256_setzero_si256(),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store16(x: __m128i, to: &mut [u8; 16]) {
    // SAFETY: sixteen bytes exist.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), x) }
}

/// Stores 16 bytes at byte `at` of the words.
#[inline]
#[target_feature(enable = "avx2")]
fn store16_at(words: &mut [u32; STRIDE], at: usize, x: __m128i) {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
    if let Some(to) = bytes[at..].first_chunk_mut::<16>() {
        store16(x, to);
    }
}

/// Stores 32 bytes at byte `at` of the words.
#[inline]
#[target_feature(enable = "avx2")]
fn store32_at(words: &mut [u32; STRIDE], at: usize, x: __m256i) {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
    if let Some(to) = bytes[at..].first_chunk_mut::<32>() {
        // SAFETY: 32 bytes exist.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), x) }
    }
}

/// Interleaves the bytes of eight rows: `[16, 8]`.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_bytes(pieces: &[RowPiece; ROWS], out: &mut [[u8; 2 * ROWS]]) {
    let r = pieces.each_ref().map(|piece| load16(&piece.scales));
    // Each step interleaves a row with the one four, two and one rows below.
    let (l04, h04) = (_mm_unpacklo_epi8(r[0], r[4]), _mm_unpackhi_epi8(r[0], r[4]));
    let (l15, h15) = (_mm_unpacklo_epi8(r[1], r[5]), _mm_unpackhi_epi8(r[1], r[5]));
    let (l26, h26) = (_mm_unpacklo_epi8(r[2], r[6]), _mm_unpackhi_epi8(r[2], r[6]));
    let (l37, h37) = (_mm_unpacklo_epi8(r[3], r[7]), _mm_unpackhi_epi8(r[3], r[7]));
    let eight = |even: [__m128i; 2], odd: [__m128i; 2]| {
        let [a, b] = even;
        let [c, d] = odd;
        let (ab, cd) = (_mm_unpacklo_epi8(a, b), _mm_unpacklo_epi8(c, d));
        let (ab2, cd2) = (_mm_unpackhi_epi8(a, b), _mm_unpackhi_epi8(c, d));
        [
            _mm_unpacklo_epi8(ab, cd),
            _mm_unpackhi_epi8(ab, cd),
            _mm_unpacklo_epi8(ab2, cd2),
            _mm_unpackhi_epi8(ab2, cd2),
        ]
    };
    let columns = [eight([l04, l26], [l15, l37]), eight([h04, h26], [h15, h37])];
    for (to, column) in out.iter_mut().zip(columns.as_flattened()) {
        store16(*column, to);
    }
}

/// Interleaves the float16 of eight rows: `[8, 8]`.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_halves(pieces: &[RowPiece; ROWS], out: &mut [[u8; 2 * ROWS]]) {
    let r = pieces.each_ref().map(|piece| load16(&piece.scales));
    let four = |a: __m128i, b: __m128i, c: __m128i, d: __m128i| {
        let (ac, bd) = (_mm_unpacklo_epi16(a, c), _mm_unpacklo_epi16(b, d));
        let (ac2, bd2) = (_mm_unpackhi_epi16(a, c), _mm_unpackhi_epi16(b, d));
        [
            _mm_unpacklo_epi16(ac, bd),
            _mm_unpackhi_epi16(ac, bd),
            _mm_unpacklo_epi16(ac2, bd2),
            _mm_unpackhi_epi16(ac2, bd2),
        ]
    };
    let (top, bottom) = (four(r[0], r[1], r[2], r[3]), four(r[4], r[5], r[6], r[7]));
    let mut columns = [_mm_setzero_si128(); 8];
    for i in 0..4 {
        columns[2 * i] = _mm_unpacklo_epi64(top[i], bottom[i]);
        columns[2 * i + 1] = _mm_unpackhi_epi64(top[i], bottom[i]);
    }
    for (to, column) in out.iter_mut().zip(columns) {
        store16(column, to);
    }
}

/// Joins the 4-bit codes of adjacent bytes. Two inputs of 32 codes become 16 bytes each.
#[inline]
#[target_feature(enable = "avx2")]
fn joined_nibbles(first: __m256i, second: __m256i) -> __m256i {
    let weights = _mm256_set1_epi16(0x1001);
    let pairs = |x: __m256i| _mm256_maddubs_epi16(x, weights);
    let packed = _mm256_packus_epi16(pairs(first), pairs(second));
    // `packus` works within halves of 128 bits, so its results are reordered.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
}

/// `d, q: 32 x 4 bits`.
#[inline]
#[target_feature(enable = "avx2")]
fn q4_0(blocks: &[[u8; 18]], to: &mut RowPiece) {
    let mask = _mm256_set1_epi8(15);
    for (i, block) in blocks.iter().enumerate() {
        let ([d0, d1, codes @ ..], scales) = (block, &mut to.scales[2 * i..2 * i + 2]);
        scales.copy_from_slice(&[*d0, *d1]);
        let bytes = load16(codes);
        // The low nibbles are the first 16 codes, the high nibbles the others.
        let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
        let codes = joined_nibbles(_mm256_and_si256(both, mask), _mm256_setzero_si256());
        store16_at(&mut to.words, 16 * i, _mm256_castsi256_si128(codes));
    }
}

/// `d, fifth bits: 32, q: 32 x 4 bits`.
#[inline]
#[target_feature(enable = "avx2")]
fn q5_0(blocks: &[[u8; 22]], to: &mut RowPiece) {
    // Byte `i` of the 32 selects the byte of the fifth bits that has bit `i`.
    let byte = _mm256_set_epi64x(
        0x0303_0303_0303_0303,
        0x0202_0202_0202_0202,
        0x0101_0101_0101_0101,
        0,
    );
    let each = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let (mask, bit) = (_mm256_set1_epi8(15), _mm256_set1_epi8(16));
    for (i, block) in blocks.iter().enumerate() {
        let ([d0, d1, h0, h1, h2, h3, codes @ ..], scales) =
            (block, &mut to.scales[2 * i..2 * i + 2]);
        scales.copy_from_slice(&[*d0, *d1]);
        let fifth = _mm256_set1_epi32(i32::from_le_bytes([*h0, *h1, *h2, *h3]));
        let fifth = _mm256_and_si256(_mm256_shuffle_epi8(fifth, byte), each);
        let high = _mm256_and_si256(_mm256_cmpeq_epi8(fifth, each), bit);
        // The low nibbles belong to the first 16 codes, the high nibbles to the others.
        let bytes = load16(codes);
        let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
        let codes = _mm256_or_si256(_mm256_and_si256(both, mask), high);
        let [low, high] = joined_fives(codes);
        store16_at(&mut to.words, 20 * i, low);
        store16_at(&mut to.words, 20 * i + 10, high);
    }
}

/// `d, upper 2 bits of 8 scales, lower 4 bits of 8 scales, q: 256 x 4 bits`.
#[inline]
#[target_feature(enable = "avx2")]
fn iq4_xs(blocks: &[[u8; 136]], to: &mut RowPiece) {
    let Some(block) = blocks.first() else { return };
    to.supers[0] = u16::from_le_bytes([block[0], block[1]]);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for (g, scale) in to.scales[..8].iter_mut().enumerate() {
        let low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
        let upper = (high >> (2 * g) & 3) as u8;
        *scale = (low | upper << 4).wrapping_sub(32);
    }
    let mask = _mm256_set1_epi8(15);
    for pair in 0..4 {
        // The low nibbles of 16 bytes are the first codes of a group, the high nibbles the others.
        let bytes = load32_at(block, 8 + 32 * pair);
        let (low, high) = (
            _mm256_and_si256(bytes, mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask),
        );
        let codes = joined_nibbles(
            _mm256_permute2x128_si256::<0x20>(low, high),
            _mm256_permute2x128_si256::<0x31>(low, high),
        );
        store32_at(&mut to.words, 32 * pair, codes);
    }
}

/// `d, q: 32 signed bytes`.
#[inline]
#[target_feature(enable = "avx2")]
fn q8_0(blocks: &[[u8; 34]], to: &mut RowPiece) {
    let flip = _mm256_set1_epi8(i8::MIN);
    for (i, block) in blocks.iter().enumerate() {
        to.scales[2 * i..2 * i + 2].copy_from_slice(&block[..2]);
        let codes = _mm256_xor_si256(load32_at(block, 2), flip);
        store32_at(&mut to.words, 32 * i, codes);
    }
}

/// The fields `d`, `dmin`, scales and minima of a K block.
#[inline]
#[target_feature(enable = "avx2")]
fn k_scales(start: &[u8; 16], to: &mut RowPiece) {
    let word = |i: usize| {
        let four = start.as_chunks::<4>().0;
        u32::from_le_bytes(four[i])
    };
    let (halves, a, b, c) = (word(0), word(1), word(2), word(3));
    to.supers = [halves as u16, (halves >> 16) as u16];
    // Each word has the field of four groups. The upper two bits of the last four groups are above
    // those of the first four.
    let low = |x: u32| x & 0x3f3f_3f3f;
    let high = |low: u32, upper: u32| low & 0x0f0f_0f0f | upper >> 2 & 0x3030_3030;
    let scales = u64::from(low(a)) | u64::from(high(c, a)) << 32;
    let minima = u64::from(low(b)) | u64::from(high(c >> 4, b)) << 32;
    let pairs = _mm_unpacklo_epi8(
        _mm_cvtsi64_si128(scales.cast_signed()),
        _mm_cvtsi64_si128(minima.cast_signed()),
    );
    store16(pairs, &mut to.scales);
}

/// `d, dmin, scales and minima: 16 x 6 bits, q: 256 x 4 bits`.
#[inline]
#[target_feature(enable = "avx2")]
fn q4_k(blocks: &[[u8; 144]], to: &mut RowPiece) {
    let Some((start, _)) = blocks.first().and_then(|b| b.split_first_chunk::<16>()) else {
        return;
    };
    k_scales(start, to);
    let mask = _mm256_set1_epi8(15);
    for pair in 0..4 {
        let bytes = load32_at(&blocks[0], 16 + 32 * pair);
        let (low, high) = (bytes, _mm256_srli_epi16::<4>(bytes));
        let codes = joined_nibbles(_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
        store32_at(&mut to.words, 32 * pair, codes);
    }
}

/// `d, dmin, scales and minima: 16 x 6 bits, fifth bits: 256, q: 256 x 4 bits`.
#[inline]
#[target_feature(enable = "avx2")]
fn q5_k(blocks: &[[u8; 176]], to: &mut RowPiece) {
    let Some((start, _)) = blocks.first().and_then(|b| b.split_first_chunk::<16>()) else {
        return;
    };
    k_scales(start, to);
    let (mask, bit) = (_mm256_set1_epi8(15), _mm256_set1_epi8(16));
    let fifth = load32_at(&blocks[0], 16);
    for group in 0..8i32 {
        let at = 20 * group as usize; // below 160
        let bytes = load32_at(&blocks[0], 48 + 32 * (group / 2) as usize);
        let nibbles = match group % 2 {
            0 => bytes,
            _ => _mm256_srli_epi16::<4>(bytes),
        };
        // Bit `group` of each byte becomes bit 4 of the code.
        let high = match group {
            0..4 => _mm256_sll_epi16(fifth, _mm_cvtsi32_si128(4 - group)),
            _ => _mm256_srl_epi16(fifth, _mm_cvtsi32_si128(group - 4)),
        };
        let codes = _mm256_or_si256(_mm256_and_si256(nibbles, mask), _mm256_and_si256(high, bit));
        let [low, high] = joined_fives(codes);
        store16_at(&mut to.words, at, low);
        store16_at(&mut to.words, at + 10, high);
    }
}

/// Packs 32 codes of 5 bits, one per byte. The 16 codes of each half become the first ten bytes of
/// a vector.
#[inline]
#[target_feature(enable = "avx2")]
fn joined_fives(codes: __m256i) -> [__m128i; 2] {
    let tens = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(32 << 8 | 1));
    let twenties = _mm256_madd_epi16(tens, _mm256_set1_epi32(1024 << 16 | 1));
    let low = _mm256_and_si256(twenties, _mm256_set1_epi64x(0xf_ffff));
    let high = _mm256_slli_epi64::<20>(_mm256_srli_epi64::<32>(twenties));
    let forties = _mm256_or_si256(low, high);
    const TAKEN: [i8; 16] = [0, 1, 2, 3, 4, 8, 9, 10, 11, 12, -1, -1, -1, -1, -1, -1];
    taken(forties, TAKEN)
}

/// The bytes of each half at the indices `which`; an index of -1 gives zero.
#[inline]
#[target_feature(enable = "avx2")]
fn taken(x: __m256i, which: [i8; 16]) -> [__m128i; 2] {
    let which = _mm256_broadcastsi128_si256(load16(&which.map(i8::cast_unsigned)));
    let x = _mm256_shuffle_epi8(x, which);
    [_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x)]
}

/// `q low: 256 x 4 bits, q high: 256 x 2 bits, scales: 16 signed bytes, d`.
#[inline]
#[target_feature(enable = "avx2")]
fn q6_k(blocks: &[[u8; 210]], to: &mut RowPiece) {
    const TAKEN: [i8; 16] = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1];
    let Some(block) = blocks.first() else { return };
    to.scales.copy_from_slice(&block[192..208]);
    to.supers[0] = u16::from_le_bytes([block[208], block[209]]);
    let (mask, upper) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
    for half in 0..2 {
        let low = [0, 32].map(|at| load32_at(block, 64 * half + at));
        let high = load32_at(block, 128 + 32 * half);
        for quarter in 0..4 {
            let nibbles = low[quarter % 2];
            let nibbles = match quarter / 2 {
                0 => nibbles,
                _ => _mm256_srli_epi16::<4>(nibbles),
            };
            // Bits `2 * quarter` and the next become bits 4 and 5 of the code.
            let high = match quarter {
                0 => _mm256_slli_epi16::<4>(high),
                1 => _mm256_slli_epi16::<2>(high),
                2 => high,
                _ => _mm256_srli_epi16::<2>(high),
            };
            let codes = _mm256_or_si256(
                _mm256_and_si256(nibbles, mask),
                _mm256_and_si256(high, upper),
            );
            let twelves = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(64 << 8 | 1));
            let words = _mm256_madd_epi16(twelves, _mm256_set1_epi32(4096 << 16 | 1));
            let at = 24 * (4 * half + quarter);
            let [first, second] = taken(words, TAKEN);
            store16_at(&mut to.words, at, first);
            store16_at(&mut to.words, at + 12, second);
        }
    }
}
