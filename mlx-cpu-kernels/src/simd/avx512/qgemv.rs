//! Multiplication of quantized matrices with few input rows, for AVX-512 with VNNI. Two row blocks
//! are processed together, so that a vector holds sixteen outputs. VNNI multiplies and adds in one
//! instruction (`vpdpwssd`). `avx2/quantize_inputs.rs` prepares the inputs.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch,
    _mm_unpackhi_epi64, _mm_unpacklo_epi64, _mm256_castps_pd, _mm256_castsi128_si256,
    _mm256_inserti128_si256, _mm256_loadu_pd, _mm256_loadu_si256, _mm256_storeu_ps,
    _mm512_add_epi32, _mm512_and_si512, _mm512_castpd_ps, _mm512_castpd256_pd512,
    _mm512_castps512_ps256, _mm512_castsi256_si512, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
    _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_fnmsub_ps, _mm512_insertf64x4, _mm512_inserti64x4,
    _mm512_mul_ps, _mm512_mullo_epi16, _mm512_mullo_epi32, _mm512_or_si512, _mm512_set1_epi8,
    _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_shuffle_epi8, _mm512_sll_epi32, _mm512_slli_epi16, _mm512_srai_epi16, _mm512_srl_epi32,
    _mm512_srli_epi16, _mm512_storeu_ps, _mm512_sub_epi16,
};

use crate::layout::float_codes::{Codes, FP4_BIAS, FP4_SCALE};
use crate::layout::input_panel::{InputPanel, RUN};
use crate::layout::packed::{
    INTERLEAVED_ROWS, PackedMatrix, ScaleFormat, codes_per_chunk, symmetric_bias,
};
use crate::partition::OutputBlock;
use crate::simd::avx2::float_codes::{e4m3, e8m0, integers};
use crate::simd::avx2::integer_codes::integer_codes;
use crate::simd::avx2::qgemv::{
    InputPtrs, PREFETCH_BYTES, RowBlock, SCALED_SUMS, ZERO_CODE, qgemv_for_constants,
};

/// The number of bytes of a cache line.
const LINE: usize = 64;

qgemv_for_constants!("avx2,fma,f16c,avx512f,avx512bw,avx512vnni", $, 1 2 3 4 5 6 7 8 12 16);

integer_codes!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512vnni", __m512i,
    and: _mm512_and_si512,
    or: _mm512_or_si512,
    shuffle: _mm512_shuffle_epi8,
    set_8: _mm512_set1_epi8,
    set_16: _mm512_set1_epi16,
    set_32: _mm512_set1_epi32,
    left_16: _mm512_slli_epi16,
    right_16: _mm512_srli_epi16,
    signed_right_16: _mm512_srai_epi16,
    left_32: _mm512_sll_epi32,
    right_32: _mm512_srl_epi32,
    sub_16: _mm512_sub_epi16,
    mul_16: _mm512_mullo_epi16,
);

/// Multiplies all row blocks with `M` rows.
///
/// # Safety
/// As [`rows`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn row_blocks<const M: usize, const BITS: u32, const SCALES: u32>(
    first: RowBlock,
    count: usize,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    let x = InputPtrs::new(x);
    let (to, step) = out.raw_parts();
    for i in (0..count).step_by(2) {
        // If the number of row blocks is odd, the last one is paired with itself.
        let next = (i + 1).min(count - 1);
        // SAFETY: the row blocks are below `count` and have eight elements each in each row of the
        // output. `RowBlock::first` asserted that both exist.
        unsafe {
            let two = [first.after::<SCALES>(i), first.after::<SCALES>(next)];
            for (m, sums) in tile::<M, BITS, SCALES>(two, x).into_iter().enumerate() {
                let to = to.add(m * step + i * INTERLEAVED_ROWS);
                if next > i {
                    _mm512_storeu_ps(to, sums);
                } else {
                    _mm256_storeu_ps(to, _mm512_castps512_ps256(sums));
                }
            }
        }
    }
}

/// Multiplies two row blocks with `M` input rows.
///
/// # Safety
/// The processor must have the features of [`qgemv`]. The row blocks and `x` must have the groups
/// and words that the row blocks state.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const M: usize, const BITS: u32, const SCALES: u32>(
    two: [RowBlock; 2],
    x: InputPtrs,
) -> [__m512; M] {
    let RowBlock { groups, per, .. } = two[0];
    let mut totals = [_mm512_setzero_ps(); M];
    let mut sums = [_mm512_setzero_ps(); M];
    let mut shared_biases = _mm512_setzero_ps();
    let table = integers(two[0].codes);
    let table = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(table), table);
    let unit = _mm512_set1_ps(two[0].unit);
    let (group_words, group_scales) = group_bytes::<SCALES>(two[0]);
    for g in 0..groups {
        let (first, last) = two[0].place_in_super::<SCALES>(g);
        if first {
            sums = [_mm512_setzero_ps(); M];
        }
        let ahead = ahead_of(g * group_words, groups * group_words, PREFETCH_BYTES);
        let scales_at = g * group_scales;
        let scales_ahead = ahead_of(scales_at, groups * group_scales, PREFETCH_BYTES / 8);
        // SAFETY: offsets are below the words and groups that the caller guarantees. Prefetched
        // addresses need not be valid.
        unsafe {
            if scales_at.is_multiple_of(LINE) {
                for block in two {
                    let at = block.scales.wrapping_add(scales_at + scales_ahead);
                    _mm_prefetch::<_MM_HINT_T0>(at.cast());
                }
            }
            if SCALES == ScaleFormat::SUPER_AFFINE_ID && first {
                shared_biases = halves(two, 2 * (g >> two[0].super_shift) + 1);
            }
            let (bytes, byte_biases) = match ScaleFormat::has_byte_scales(SCALES) {
                true => byte_scales::<SCALES>(two, g, shared_biases),
                false => (_mm512_setzero_si512(), _mm512_setzero_ps()),
            };
            if BITS == 8 {
                for w in (g * per..(g + 1) * per).step_by(4) {
                    let q = std::array::from_fn(|i| {
                        words_of(two, w + i, (i % 2 == 0).then_some(ahead))
                    });
                    let [a, b, c, d]: [__m512i; 4] = q;
                    let n = [pairs_of_8bit([a, b]), pairs_of_8bit([c, d])];
                    add_pairs::<M, SCALES>(&mut sums, n, x, w / 4, bytes);
                }
            } else if BITS == 4 {
                for w in (g * per..(g + 1) * per).step_by(2) {
                    let q = [words_of(two, w, Some(ahead)), words_of(two, w + 1, None)];
                    let n = match ScaleFormat::nibbles(SCALES) {
                        Codes::E2M1_ID => {
                            q.map(|q| looked_up_pairs::<{ Codes::E2M1_ID }>(q, table))
                        }
                        Codes::TABLE_ID => {
                            q.map(|q| looked_up_pairs::<{ Codes::TABLE_ID }>(q, table))
                        }
                        _ => q.map(|q| pairs_of_4bit(q)),
                    };
                    add_pairs::<M, SCALES>(&mut sums, n, x, w / 2, bytes);
                }
            } else {
                let words = codes_per_chunk(BITS) * BITS as usize / 32;
                for w in (g * per..(g + 1) * per).step_by(words) {
                    let mut q = [_mm512_setzero_si512(); 5];
                    for (i, q) in q.iter_mut().enumerate().take(words) {
                        *q = words_of(two, w + i, (i % 2 == 0).then_some(ahead));
                    }
                    // The number of scales of inputs before this chunk.
                    let place = w * 2 / BITS as usize;
                    let n = [pairs_of_run::<BITS, 0>(&q), pairs_of_run::<BITS, 1>(&q)];
                    add_pairs::<M, SCALES>(&mut sums, n, x, place, bytes);
                    if codes_per_chunk(BITS) == 32 {
                        let n = [pairs_of_run::<BITS, 2>(&q), pairs_of_run::<BITS, 3>(&q)];
                        add_pairs::<M, SCALES>(&mut sums, n, x, place + 1, bytes);
                    }
                }
            }
            if ScaleFormat::has_byte_scales(SCALES) {
                if ScaleFormat::has_biases(SCALES) {
                    for (m, total) in totals.iter_mut().enumerate() {
                        let group = _mm512_set1_ps(*x.sums.add(m * groups + g));
                        *total = _mm512_fmadd_ps(byte_biases, group, *total);
                    }
                }
                if last {
                    let scale = _mm512_mul_ps(shared_scales::<SCALES>(two, g), unit);
                    for (total, sum) in totals.iter_mut().zip(sums) {
                        *total = _mm512_fmadd_ps(scale, sum, *total);
                    }
                }
                continue;
            }
            let (scale, bias) = if SCALES == ScaleFormat::TABLE_ID {
                let scale = factors::<{ ScaleFormat::F16_ID }>(two.map(|block| block.scales), g);
                (_mm512_mul_ps(scale, unit), _mm512_setzero_ps())
            } else if SCALES == ScaleFormat::SYMMETRIC_ID {
                let scale = factors::<{ ScaleFormat::F16_ID }>(two.map(|block| block.scales), g);
                let zero = _mm512_set1_ps(symmetric_bias(BITS));
                (scale, _mm512_mul_ps(scale, zero))
            } else if SCALES == ScaleFormat::E8M0_ID || SCALES == ScaleFormat::E4M3_ID {
                let scale = float_scales::<SCALES>(two, g);
                (
                    _mm512_mul_ps(scale, _mm512_set1_ps(FP4_SCALE)),
                    _mm512_mul_ps(scale, _mm512_set1_ps(FP4_BIAS)),
                )
            } else {
                (
                    factors::<SCALES>(two.map(|block| block.scales), g),
                    factors::<SCALES>(two.map(|block| block.biases), g),
                )
            };
            for (m, (total, sum)) in totals.iter_mut().zip(sums).enumerate() {
                *total = _mm512_fmadd_ps(scale, sum, *total);
                if ScaleFormat::has_biases(SCALES) {
                    let group = _mm512_set1_ps(*x.sums.add(m * groups + g));
                    *total = _mm512_fmadd_ps(bias, group, *total);
                }
            }
        }
    }
    totals
}

/// The numbers of bytes of the words, and of the scales, of a group of a row block.
#[inline]
fn group_bytes<const SCALES: u32>(block: RowBlock) -> (usize, usize) {
    let scale = match SCALES {
        ScaleFormat::F32_ID => 4,
        ScaleFormat::F16_ID
        | ScaleFormat::TABLE_ID
        | ScaleFormat::SYMMETRIC_ID
        | ScaleFormat::SUPER_AFFINE_ID => 2,
        _ => 1,
    };
    (4 * block.per * INTERLEAVED_ROWS, scale * INTERLEAVED_ROWS)
}

/// The prefetch distance in bytes, at byte `at` of a row block with `size` bytes. The prefetched
/// bytes are read after `distance` more bytes of this row block, or of its successor, have been
/// read. Two adjacent row blocks are read side by side, so the successor is the second row block
/// after this one.
#[inline]
pub(super) fn ahead_of(at: usize, size: usize, distance: usize) -> usize {
    let distance = distance.min(size);
    match at + distance < size {
        true => distance,
        false => distance + size,
    }
}

/// Word `w` of each row of two row blocks. Words this number of bytes later are prefetched.
///
/// # Safety
/// The processor must have avx512f. Both row blocks must have this word.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn words_of(two: [RowBlock; 2], w: usize, prefetch: Option<usize>) -> __m512i {
    let at = two.map(|block| block.words.wrapping_add(w * INTERLEAVED_ROWS));
    // SAFETY: the caller guarantees that both row blocks have this word. Prefetched addresses need
    // not be valid.
    unsafe {
        if let Some(ahead) = prefetch {
            for at in at {
                _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(ahead));
            }
        }
        let [low, high] = at.map(|at| _mm256_loadu_si256(at.cast()));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}

/// The scales or biases of a group of two row blocks.
///
/// # Safety
/// The processor must have avx2, f16c and avx512f. Both row blocks must have this group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn factors<const SCALES: u32>(two: [*const u8; 2], group: usize) -> __m512 {
    // SAFETY: the caller guarantees the eight values of the group. Prefetched addresses need not be
    // valid.
    unsafe {
        if SCALES == ScaleFormat::F16_ID {
            let [low, high] = two.map(|block| {
                let at = block.add(group * 2 * INTERLEAVED_ROWS);
                _mm_loadu_si128(at.cast())
            });
            let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            _mm512_cvtph_ps(both)
        } else {
            let [low, high] =
                two.map(|block| _mm256_loadu_pd(block.add(group * 4 * INTERLEAVED_ROWS).cast()));
            let both = _mm512_insertf64x4::<1>(_mm512_castpd256_pd512(low), high);
            _mm512_castpd_ps(both)
        }
    }
}

/// The byte scales of a group of two row blocks, and its biases: bytes times the negative of
/// `shared_biases`. The biases are zero if the format has none.
///
/// # Safety
/// The processor must have avx2, f16c and avx512f. Both row blocks must have this group, with byte
/// scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn byte_scales<const SCALES: u32>(
    two: [RowBlock; 2],
    group: usize,
    shared_biases: __m512,
) -> (__m512i, __m512) {
    // SAFETY: the caller guarantees eight or sixteen bytes of the group.
    unsafe {
        if SCALES == ScaleFormat::SUPER_AFFINE_ID {
            let [low, high] = two.map(|block| {
                _mm_loadu_si128(block.scales.add(group * 2 * INTERLEAVED_ROWS).cast())
            });
            let biases = _mm512_cvtepi8_epi32(_mm_unpackhi_epi64(low, high));
            let biases = _mm512_cvtepi32_ps(biases);
            (
                _mm512_cvtepi8_epi32(_mm_unpacklo_epi64(low, high)),
                // The negative product.
                _mm512_fnmsub_ps(biases, shared_biases, _mm512_setzero_ps()),
            )
        } else {
            let [low, high] =
                two.map(|block| _mm_loadl_epi64(block.scales.add(group * INTERLEAVED_ROWS).cast()));
            let scales = _mm512_cvtepi8_epi32(_mm_unpacklo_epi64(low, high));
            (scales, _mm512_setzero_ps())
        }
    }
}

/// The float factors of the byte scales of a group in two row blocks.
///
/// # Safety
/// The processor must have avx2, f16c and avx512f. Both row blocks must have this group, with byte
/// scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn shared_scales<const SCALES: u32>(two: [RowBlock; 2], group: usize) -> __m512 {
    let place = group >> two[0].super_shift;
    let place = match SCALES {
        // The float16 values of the biases follow those of the scales.
        ScaleFormat::SUPER_AFFINE_ID => 2 * place,
        _ => place,
    };
    // SAFETY: the caller guarantees the float16 of the group's super-group.
    unsafe { halves(two, place) }
}

/// The float16 values of two row blocks that groups share, eight of each. `place` is their index in
/// units of eight.
///
/// # Safety
/// The processor must have f16c and avx512f. Both row blocks must have values at this index.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn halves(two: [RowBlock; 2], place: usize) -> __m512 {
    // SAFETY: the caller guarantees the values.
    let [low, high] = two.map(|block| unsafe {
        _mm_loadu_si128(block.biases.add(place * 2 * INTERLEAVED_ROWS).cast())
    });
    let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
    _mm512_cvtph_ps(both)
}

/// The scales of a group of two row blocks, stored as 8-bit floats.
///
/// # Safety
/// The processor must have avx2, f16c and avx512f. Both row blocks must have this group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn float_scales<const SCALES: u32>(two: [RowBlock; 2], group: usize) -> __m512 {
    // SAFETY: the caller guarantees eight bytes of the group.
    let [low, high] = two.map(|block| unsafe {
        let codes = _mm_loadl_epi64(block.scales.add(group * INTERLEAVED_ROWS).cast());
        match SCALES {
            ScaleFormat::E8M0_ID => e8m0(codes),
            _ => e4m3(codes),
        }
    });
    let both = _mm512_castpd256_pd512(_mm256_castps_pd(low));
    _mm512_castpd_ps(_mm512_insertf64x4::<1>(both, _mm256_castps_pd(high)))
}

/// Adds the products of two runs of codes with the inputs that share scale `place`. If scales are
/// bytes, `bytes` has the byte of each lane. A lane sums sixteen products exactly. A product is at
/// most 2^12 * (2^15 - 1); see [`crate::layout::packed::MAX_SCALED_CODE`].
///
/// # Safety
/// The processor must have the features of [`qgemv`]. The index `place` must be within the inputs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_pairs<const M: usize, const SCALES: u32>(
    sums: &mut [__m512; M],
    mut n: [[__m512i; 4]; 2],
    x: InputPtrs,
    place: usize,
    bytes: __m512i,
) {
    if SCALES == ScaleFormat::SUPER_ID {
        n = [less::<ZERO_CODE>(n[0]), less::<ZERO_CODE>(n[1])];
    }
    // With few rows, there are fewer sums than codes, so the sums are multiplied by the scales.
    let scaled_codes = const { ScaleFormat::has_byte_scales(SCALES) && M > SCALED_SUMS };
    let scaled_sums = const { ScaleFormat::has_byte_scales(SCALES) && M <= SCALED_SUMS };
    if scaled_codes {
        let bytes = in_both_halves(bytes);
        n = [times(n[0], bytes), times(n[1], bytes)];
    }
    for (m, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the caller guarantees that `place` is within the inputs.
        unsafe {
            let mut exact = dot::<M>(n, x.quants.add((2 * place * M + m) * RUN));
            if scaled_sums {
                exact = _mm512_mullo_epi32(exact, bytes);
            }
            let scale = _mm512_set1_ps(*x.scales.add(place * M + m));
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, *sum);
        }
    }
}

/// The products of two runs of codes with an input row, summed in each lane. The first run of the
/// row's integers is at `at`; there are `M` rows.
///
/// LLVM would split each `_mm512_dpwssd_epi32` of such a chain into `vpmaddwd` and `vpaddd`, and
/// load the inputs with a third instruction. Assembly needs one instruction. With one or two rows,
/// few sums are independent, so the latency of a chain would limit the speed. Each run then has its
/// own sum.
///
/// # Safety
/// The processor must have the features of [`qgemv`]. Both runs of the row must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn dot<const M: usize>(n: [[__m512i; 4]; 2], at: *const i16) -> __m512i {
    let next = at.wrapping_add(M * RUN);
    let zero = _mm512_setzero_si512();
    // SAFETY: the caller guarantees the features and both runs.
    unsafe {
        match M {
            ..=2 => _mm512_add_epi32(dot_of_run(zero, n[0], at), dot_of_run(zero, n[1], next)),
            _ => dot_of_run(dot_of_run(zero, n[0], at), n[1], next),
        }
    }
}

/// Adds the products of a run of codes with the row's integers at `at`.
///
/// # Safety
/// The processor must have the features of [`qgemv`]. The run of the row must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn dot_of_run(mut sum: __m512i, n: [__m512i; 4], at: *const i16) -> __m512i {
    // SAFETY: the caller guarantees the features and the run. The instructions only read memory.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {a}, dword ptr [{x}]{{1to16}}",
            "vpdpwssd {sum}, {b}, dword ptr [{x} + 4]{{1to16}}",
            "vpdpwssd {sum}, {c}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpwssd {sum}, {d}, dword ptr [{x} + 12]{{1to16}}",
            x = in(reg) at,
            sum = inout(zmm_reg) sum,
            a = in(zmm_reg) n[0],
            b = in(zmm_reg) n[1],
            c = in(zmm_reg) n[2],
            d = in(zmm_reg) n[3],
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    sum
}
