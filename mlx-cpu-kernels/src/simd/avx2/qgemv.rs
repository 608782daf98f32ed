//! Multiplication of quantized matrices with few input rows, for AVX2. Inputs are 16-bit integers;
//! sixteen adjacent inputs share a scale (`quantize_inputs.rs`). So sums of products are exact
//! integers until they are scaled. `avx512/qgemv.rs` reads the same inputs. `gemm/packed_gemm.rs`
//! handles many rows.

use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi32,
    _mm256_and_si256, _mm256_broadcast_ss, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_mul_ps, _mm256_mullo_epi16, _mm256_mullo_epi32, _mm256_or_si256, _mm256_set1_epi8,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256,
    _mm256_shuffle_epi8, _mm256_sll_epi32, _mm256_slli_epi16, _mm256_srai_epi16, _mm256_srl_epi32,
    _mm256_srli_epi16, _mm256_storeu_ps, _mm256_sub_epi16, _mm256_xor_ps,
};

use crate::layout::float_codes::{ByteScales, Codes, FP4_BIAS, FP4_SCALE};
use crate::layout::input_panel::{INPUTS_PER_SCALE, InputPanel, RUN};
use crate::layout::packed::{
    GROUPS_PER_AFFINE_SUPER, GROUPS_PER_SUPER, GroupParams, INTERLEAVED_ROWS, PackedMatrix,
    ScaleFormat, codes_per_chunk, symmetric_bias,
};
use crate::partition::OutputBlock;
use crate::simd::avx2::float_codes::{e4m3, e8m0, integers};
use crate::simd::avx2::integer_codes::integer_codes;

/// The prefetch distance of words, in bytes. Explicit prefetches are needed because the hardware
/// prefetcher stops at page boundaries and where another thread's part begins.
pub(crate) const PREFETCH_BYTES: usize = 4096;

/// The maximum number of input rows for which sums are multiplied by byte scales. With more rows,
/// codes are multiplied by them.
pub(crate) const SCALED_SUMS: usize = 4;

/// The code that represents zero where scales are bytes and there are no biases.
pub(crate) const ZERO_CODE: i16 = ScaleFormat::zero_code(ScaleFormat::SUPER_ID);

/// Addresses of input rows.
#[derive(Clone, Copy)]
pub(crate) struct InputPtrs {
    pub quants: *const i16,
    pub scales: *const f32,
    pub sums: *const f32,
}

impl InputPtrs {
    pub(crate) fn new(x: InputPanel<'_>) -> Self {
        Self {
            quants: x.quants.as_ptr(),
            scales: x.scales.as_ptr(),
            sums: x.sums.as_ptr(),
        }
    }
}

/// Addresses of a row block. Scales and biases have a [`ScaleFormat`]. For `Super`, `scales` are
/// the bytes and `biases` the float16 values.
#[derive(Clone, Copy)]
pub(crate) struct RowBlock {
    pub words: *const u32,
    pub scales: *const u8,
    pub biases: *const u8,
    /// The number of groups per row.
    pub groups: usize,
    /// The number of words per group.
    pub per: usize,
    /// The binary logarithm of the number of groups per float16, if scales are bytes times float16.
    /// A shift by it replaces a division for each group.
    pub super_shift: u32,
    /// The kind of the codes.
    pub codes: Codes,
    /// The factor by which the table multiplies scales, if codes index a table.
    pub unit: f32,
}

impl RowBlock {
    /// Returns the first row block of `matrix`. Asserts that the lengths of all row blocks, inputs
    /// and output match. So reads and writes for each row block, group, word and input row are in
    /// bounds.
    ///
    /// # Panics
    /// If the lengths do not match.
    pub(crate) fn first(
        matrix: PackedMatrix<'_>,
        x: InputPanel<'_>,
        out: &OutputBlock<'_>,
    ) -> (Self, ScaleFormat) {
        let (count, groups, per) = (matrix.row_blocks(), matrix.groups, matrix.words_per_group());
        let k = groups * matrix.group_size();
        assert!(matrix.words.len() == count * groups * per * INTERLEAVED_ROWS);
        assert!(matrix.scales.len() == count * groups * INTERLEAVED_ROWS);
        assert!(matrix.biases.len() == count * groups * INTERLEAVED_ROWS);
        assert!(matrix.group_size() * matrix.bits as usize == 32 * per);
        // Words of 4-bit codes are read in pairs, and words of 8-bit codes by fours. Both have
        // sixteen codes, whose inputs share a scale.
        let chunk = match matrix.bits {
            4 | 8 => INPUTS_PER_SCALE,
            bits => codes_per_chunk(bits),
        };
        assert!(chunk.is_multiple_of(INPUTS_PER_SCALE) && INPUTS_PER_SCALE == 2 * RUN);
        assert!(matrix.group_size().is_multiple_of(chunk));
        assert!(out.dims() == (x.rows, count * INTERLEAVED_ROWS));
        if matrix.codes() == Codes::E4m3 {
            assert!(x.values.len() == x.rows * k);
        } else {
            assert!(x.quants.len() == x.rows * k && x.sums.len() == x.rows * groups);
            assert!(x.scales.len() * INPUTS_PER_SCALE == x.rows * k);
        }
        let mut per_super = GROUPS_PER_SUPER;
        let (scales, biases, format) = match (matrix.scales, matrix.biases) {
            (GroupParams::F16(scales), GroupParams::F16(biases)) => {
                let all = (scales.as_ptr().cast(), biases.as_ptr().cast());
                (all.0, all.1, ScaleFormat::F16)
            }
            (GroupParams::F32(scales), GroupParams::F32(biases)) => {
                let all = (scales.as_ptr().cast(), biases.as_ptr().cast());
                (all.0, all.1, ScaleFormat::F32)
            }
            (
                GroupParams::Super {
                    codes,
                    supers,
                    per,
                    first,
                    table,
                    ..
                },
                GroupParams::Super { .. },
            ) => {
                assert!(groups.is_multiple_of(per) && first % groups == 0);
                per_super = per;
                let format = table.map_or(ScaleFormat::Super, ScaleFormat::TableSuper);
                let supers = &supers[first / per * INTERLEAVED_ROWS..];
                assert!(supers.len() * per >= codes.len());
                (codes.as_ptr().cast(), supers.as_ptr().cast(), format)
            }
            (
                GroupParams::SuperAffine {
                    codes,
                    supers,
                    first,
                    ..
                },
                GroupParams::SuperAffine { .. },
            ) => {
                per_super = GROUPS_PER_AFFINE_SUPER;
                assert!(groups.is_multiple_of(per_super) && first % groups == 0);
                let supers = &supers[first / per_super * 2 * INTERLEAVED_ROWS..];
                assert!(supers.len() * per_super >= codes.len());
                let all = (codes.as_ptr().cast(), supers.as_ptr().cast());
                (all.0, all.1, ScaleFormat::SuperAffine)
            }
            (GroupParams::Symmetric { halves, .. }, GroupParams::Symmetric { .. }) => {
                let scales = halves.as_ptr().cast();
                (scales, scales, ScaleFormat::Symmetric)
            }
            (GroupParams::Table { halves, table, .. }, GroupParams::Table { .. }) => {
                let scales = halves.as_ptr().cast();
                (scales, scales, ScaleFormat::Table(table))
            }
            (GroupParams::Bytes { codes, scales, .. }, GroupParams::Bytes { .. }) => {
                let format = match scales {
                    ByteScales::E8m0 => ScaleFormat::E8m0,
                    ByteScales::E4m3 => ScaleFormat::E4m3,
                };
                (codes.as_ptr(), codes.as_ptr(), format)
            }
            _ => unreachable!("scales and biases are in one format"),
        };
        assert!(per_super.is_power_of_two());
        let words = matrix.words.as_ptr();
        let first = Self {
            words,
            scales,
            biases,
            groups,
            per,
            super_shift: per_super.trailing_zeros(),
            codes: matrix.codes(),
            unit: match matrix.codes() {
                Codes::Table(table) => table.unit(),
                _ => 1.0,
            },
        };
        (first, format)
    }

    /// Whether group `g` is the first, and whether it is the last, of the groups that share a
    /// float.
    #[inline]
    pub(crate) fn place_in_super<const SCALES: u32>(self, g: usize) -> (bool, bool) {
        if ScaleFormat::has_byte_scales(SCALES) {
            let last = (1usize << self.super_shift) - 1;
            (g & last == 0, g & last == last)
        } else {
            (true, true)
        }
    }

    /// The row block that is `i` row blocks later.
    ///
    /// # Safety
    /// That row block must exist, with scales in this format.
    #[inline]
    pub(crate) unsafe fn after<const SCALES: u32>(self, i: usize) -> Self {
        let factors = i * self.groups * INTERLEAVED_ROWS;
        let (scales, biases) = match SCALES {
            ScaleFormat::F32_ID => (4 * factors, 4 * factors),
            ScaleFormat::F16_ID | ScaleFormat::TABLE_ID | ScaleFormat::SYMMETRIC_ID => {
                (2 * factors, 2 * factors)
            }
            ScaleFormat::E8M0_ID | ScaleFormat::E4M3_ID => (factors, factors),
            ScaleFormat::SUPER_AFFINE_ID => (2 * factors, (4 * factors) >> self.super_shift),
            _ => (factors, (2 * factors) >> self.super_shift),
        };
        // SAFETY: the caller guarantees that the row block exists in this format.
        unsafe {
            Self {
                words: self
                    .words
                    .add(i * self.groups * self.per * INTERLEAVED_ROWS),
                scales: self.scales.add(scales),
                biases: self.biases.add(biases),
                ..self
            }
        }
    }
}

/// Generates `qgemv` for `$features`. The generated function calls `row_blocks` of the invoking
/// module. It passes the bits, the scale format and the number of input rows as constants. There
/// are instances for `$rows` input rows.
macro_rules! qgemv_for_constants {
    // `$d` is a dollar sign, for the macro inside.
    ($features:literal, $d:tt, $($rows:literal)*) => {
        /// Multiplies row blocks with each of the inputs; see [`crate::simd::qgemv::qgemv`].
        ///
        /// # Safety
        /// The processor must have the features of this instance.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn qgemv(
            matrix: PackedMatrix<'_>,
            x: InputPanel<'_>,
            out: &mut OutputBlock<'_>,
        ) {
            let count = matrix.row_blocks();
            let (first, format) = RowBlock::first(matrix, x, out);
            /// One match arm for each row of the format table that has integer kernels.
            macro_rules! arms {
                (
                    integers { $d($d id:ident, $d bits:literal, $d groups:expr, $d kernels:expr;)* }
                    $d($d rest:tt)*
                ) => {
                    match (format.id(), matrix.bits) {
                        $d((ScaleFormat::$d id, $d bits) => {
                            rows::<$d bits, { ScaleFormat::$d id }>(first, count, x, out)
                        })*
                        _ => unreachable!("a format of the table"),
                    }
                };
            }
            // SAFETY: the caller guarantees the features. `RowBlock::first` asserted the lengths.
            unsafe { crate::layout::formats::packed_formats!(arms) }
        }

        /// Multiplies all row blocks with all rows.
        ///
        /// # Safety
        /// As [`qgemv`], with the lengths that [`RowBlock::first`] asserts.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn rows<const BITS: u32, const SCALES: u32>(
            first: RowBlock,
            count: usize,
            x: InputPanel<'_>,
            out: &mut OutputBlock<'_>,
        ) {
            // SAFETY: the caller guarantees the features, and the lengths that `RowBlock::first`
            // asserts.
            unsafe {
                match x.rows {
                    $($rows => row_blocks::<$rows, BITS, SCALES>(first, count, x, out),)*
                    _ => unreachable!("a number of `panel_rows`"),
                }
            }
        }
    };
}
pub(crate) use qgemv_for_constants;

qgemv_for_constants!("avx2,fma,f16c", $, 1 2 3 4 5 6 7 8);

integer_codes!(
    "avx2,fma,f16c", __m256i,
    and: _mm256_and_si256,
    or: _mm256_or_si256,
    shuffle: _mm256_shuffle_epi8,
    set_8: _mm256_set1_epi8,
    set_16: _mm256_set1_epi16,
    set_32: _mm256_set1_epi32,
    left_16: _mm256_slli_epi16,
    right_16: _mm256_srli_epi16,
    signed_right_16: _mm256_srai_epi16,
    left_32: _mm256_sll_epi32,
    right_32: _mm256_srl_epi32,
    sub_16: _mm256_sub_epi16,
    mul_16: _mm256_mullo_epi16,
);

/// Multiplies all row blocks with `M` rows.
///
/// # Safety
/// As [`rows`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn row_blocks<const M: usize, const BITS: u32, const SCALES: u32>(
    first: RowBlock,
    count: usize,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    let x = InputPtrs::new(x);
    let (to, step) = out.raw_parts();
    for i in 0..count {
        // SAFETY: row block `i` is below `count` and has eight elements in each row of the output.
        // `RowBlock::first` asserted that both exist.
        unsafe {
            let block = first.after::<SCALES>(i);
            let sums = tile::<M, BITS, SCALES>(block, x);
            for (m, sums) in sums.into_iter().enumerate() {
                _mm256_storeu_ps(to.add(m * step + i * INTERLEAVED_ROWS), sums);
            }
        }
    }
}

/// Multiplies a row block with `M` input rows.
///
/// # Safety
/// The processor must have avx2, fma and f16c. `block` and `x` must have the groups and words that
/// `block` states.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const M: usize, const BITS: u32, const SCALES: u32>(
    block: RowBlock,
    x: InputPtrs,
) -> [__m256; M] {
    let mut totals = [_mm256_setzero_ps(); M];
    let mut sums = [_mm256_setzero_ps(); M];
    let mut shared_biases = _mm256_setzero_ps();
    let table = integers(block.codes);
    for g in 0..block.groups {
        let (first, last) = block.place_in_super::<SCALES>(g);
        if first {
            sums = [_mm256_setzero_ps(); M];
        }
        // SAFETY: offsets are below the words and groups that the caller guarantees. Prefetched
        // addresses need not be valid.
        unsafe {
            if SCALES == ScaleFormat::SUPER_AFFINE_ID && first {
                let place = (2 * (g >> block.super_shift) + 1) * 2 * INTERLEAVED_ROWS;
                let biases = _mm256_cvtph_ps(_mm_loadu_si128(block.biases.add(place).cast()));
                shared_biases = _mm256_xor_ps(biases, _mm256_set1_ps(-0.0));
            }
            let (bytes, byte_biases) = match ScaleFormat::has_byte_scales(SCALES) {
                true => byte_scales::<SCALES>(block, g, shared_biases),
                false => (_mm256_setzero_si256(), _mm256_setzero_ps()),
            };
            if BITS == 8 {
                for w in (g * block.per..(g + 1) * block.per).step_by(4) {
                    let q = std::array::from_fn(|i| word_of(block, w + i, i % 2 == 0));
                    let [a, b, c, d]: [__m256i; 4] = q;
                    let n = [pairs_of_8bit([a, b]), pairs_of_8bit([c, d])];
                    add_pairs::<M, SCALES>(&mut sums, n, x, w / 4, bytes);
                }
            } else if BITS == 4 {
                for w in (g * block.per..(g + 1) * block.per).step_by(2) {
                    let q = [word_of(block, w, true), word_of(block, w + 1, false)];
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
                for w in (g * block.per..(g + 1) * block.per).step_by(words) {
                    let mut q = [_mm256_setzero_si256(); 5];
                    for (i, q) in q.iter_mut().enumerate().take(words) {
                        *q = word_of(block, w + i, i % 2 == 0);
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
                        let group = _mm256_broadcast_ss(&*x.sums.add(m * block.groups + g));
                        *total = _mm256_fmadd_ps(byte_biases, group, *total);
                    }
                }
                if last {
                    let scale = shared_scales::<SCALES>(block, g);
                    for (total, sum) in totals.iter_mut().zip(sums) {
                        *total = _mm256_fmadd_ps(scale, sum, *total);
                    }
                }
                continue;
            }
            let (scale, bias) = match SCALES {
                ScaleFormat::F16_ID => {
                    let ahead = PREFETCH_BYTES / 8;
                    _mm_prefetch::<_MM_HINT_T0>(block.scales.wrapping_add(g * 16 + ahead).cast());
                    _mm_prefetch::<_MM_HINT_T0>(block.biases.wrapping_add(g * 16 + ahead).cast());
                    (
                        _mm256_cvtph_ps(_mm_loadu_si128(block.scales.add(g * 16).cast())),
                        _mm256_cvtph_ps(_mm_loadu_si128(block.biases.add(g * 16).cast())),
                    )
                }
                ScaleFormat::SYMMETRIC_ID => {
                    let ahead = PREFETCH_BYTES / 8;
                    _mm_prefetch::<_MM_HINT_T0>(block.scales.wrapping_add(g * 16 + ahead).cast());
                    let scale = _mm256_cvtph_ps(_mm_loadu_si128(block.scales.add(g * 16).cast()));
                    let zero = _mm256_set1_ps(symmetric_bias(BITS));
                    (scale, _mm256_mul_ps(scale, zero))
                }
                ScaleFormat::F32_ID => (
                    _mm256_loadu_ps(block.scales.add(g * 32).cast()),
                    _mm256_loadu_ps(block.biases.add(g * 32).cast()),
                ),
                ScaleFormat::E8M0_ID | ScaleFormat::E4M3_ID => {
                    let codes = _mm_loadl_epi64(block.scales.add(g * 8).cast());
                    let scale = match SCALES {
                        ScaleFormat::E8M0_ID => e8m0(codes),
                        _ => e4m3(codes),
                    };
                    (
                        _mm256_mul_ps(scale, _mm256_set1_ps(FP4_SCALE)),
                        _mm256_mul_ps(scale, _mm256_set1_ps(FP4_BIAS)),
                    )
                }
                ScaleFormat::TABLE_ID => {
                    let ahead = PREFETCH_BYTES / 8;
                    _mm_prefetch::<_MM_HINT_T0>(block.scales.wrapping_add(g * 16 + ahead).cast());
                    let halves = _mm_loadu_si128(block.scales.add(g * 16).cast());
                    let unit = _mm256_set1_ps(block.unit);
                    let scale = _mm256_mul_ps(_mm256_cvtph_ps(halves), unit);
                    (scale, _mm256_setzero_ps())
                }
                _ => unreachable!("byte scales, above"),
            };
            for (m, (total, sum)) in totals.iter_mut().zip(sums).enumerate() {
                *total = _mm256_fmadd_ps(scale, sum, *total);
                if ScaleFormat::has_biases(SCALES) {
                    let group = _mm256_broadcast_ss(&*x.sums.add(m * block.groups + g));
                    *total = _mm256_fmadd_ps(bias, group, *total);
                }
            }
        }
    }
    totals
}

/// The byte scales of a group of a row block, and its biases: bytes times `shared_biases`. The
/// biases are zero if the format has none.
///
/// # Safety
/// The processor must have avx2 and f16c. The row block must have this group, with byte scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn byte_scales<const SCALES: u32>(
    block: RowBlock,
    group: usize,
    shared_biases: __m256,
) -> (__m256i, __m256) {
    // SAFETY: the caller guarantees eight or sixteen bytes of the group. Prefetched addresses need
    // not be valid.
    unsafe {
        if SCALES == ScaleFormat::SUPER_AFFINE_ID {
            let at = block.scales.add(group * 2 * INTERLEAVED_ROWS);
            if group.is_multiple_of(4) {
                _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(PREFETCH_BYTES / 8));
            }
            let [scales, biases] = [0, INTERLEAVED_ROWS]
                .map(|from| _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(from).cast())));
            (
                scales,
                _mm256_mul_ps(_mm256_cvtepi32_ps(biases), shared_biases),
            )
        } else {
            let at = block.scales.add(group * INTERLEAVED_ROWS);
            (
                _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())),
                _mm256_setzero_ps(),
            )
        }
    }
}

/// The float factors of the byte scales of a group in a row block.
///
/// # Safety
/// The processor must have avx2 and f16c. The row block must have this group, with byte scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn shared_scales<const SCALES: u32>(block: RowBlock, group: usize) -> __m256 {
    let place = group >> block.super_shift;
    let place = match SCALES {
        // The float16 values of the biases follow those of the scales.
        ScaleFormat::SUPER_AFFINE_ID => 2 * place,
        _ => place,
    };
    // SAFETY: the caller guarantees the float16 of the group's super-group.
    let supers = unsafe {
        let at = block.biases.add(place * 2 * INTERLEAVED_ROWS);
        _mm256_cvtph_ps(_mm_loadu_si128(at.cast()))
    };
    _mm256_mul_ps(supers, _mm256_set1_ps(block.unit))
}

/// Word `w` of each row of a row block. If `prefetch` is set, later words are prefetched.
///
/// # Safety
/// The processor must have avx2. The row block must have this word.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn word_of(block: RowBlock, w: usize, prefetch: bool) -> __m256i {
    let at = block.words.wrapping_add(w * INTERLEAVED_ROWS);
    // SAFETY: the caller guarantees that the row block has this word. Prefetched addresses need not
    // be valid.
    unsafe {
        if prefetch {
            _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(PREFETCH_BYTES));
        }
        _mm256_loadu_si256(at.cast())
    }
}

/// Adds the products of two runs of codes with the inputs that share scale `place`. If scales are
/// bytes, `bytes` has the byte of each lane. A lane sums sixteen products exactly. A product is at
/// most 2^12 * (2^15 - 1); see [`crate::layout::packed::MAX_SCALED_CODE`].
///
/// # Safety
/// The processor must have avx2 and fma. The index `place` must be within the inputs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_pairs<const M: usize, const SCALES: u32>(
    sums: &mut [__m256; M],
    mut n: [[__m256i; 4]; 2],
    x: InputPtrs,
    place: usize,
    bytes: __m256i,
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
            let exact = |run: usize| {
                let at = x.quants.add(((2 * place + run) * M + m) * RUN);
                let part = |i: usize| _mm256_madd_epi16(n[run][i], broadcast_pair(at.add(2 * i)));
                _mm256_add_epi32(
                    _mm256_add_epi32(part(0), part(1)),
                    _mm256_add_epi32(part(2), part(3)),
                )
            };
            let mut exact = _mm256_add_epi32(exact(0), exact(1));
            if scaled_sums {
                exact = _mm256_mullo_epi32(exact, bytes);
            }
            let scale = _mm256_broadcast_ss(&*x.scales.add(place * M + m));
            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, *sum);
        }
    }
}

/// Loads two adjacent inputs into each lane.
///
/// # Safety
/// The processor must have avx2. The two inputs must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn broadcast_pair(at: *const i16) -> __m256i {
    // SAFETY: the caller guarantees that the two inputs exist.
    _mm256_set1_epi32(unsafe { at.cast::<i32>().read_unaligned() })
}
