//! Products of quantized matrices with a few rows of inputs that were made 16-bit whole numbers, for x86-64
//! with AVX2: sums within a group are exact integers, and only they meet the scales. Not for many rows, whose
//! matrices become floats once for all of them (`many.rs`).

use std::arch::x86_64::{
    __m256, __m256i, _CMP_GT_OQ, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128,
    _mm_movehl_ps, _mm_setr_epi8, _mm_shuffle_ps, _mm_storeu_si128, _mm_unpackhi_epi32,
    _mm_unpackhi_epi64, _mm_unpacklo_epi32, _mm_unpacklo_epi64, _mm256_add_epi32, _mm256_add_ps,
    _mm256_and_ps, _mm256_and_si256, _mm256_andnot_ps, _mm256_broadcast_ss,
    _mm256_broadcastsi128_si256, _mm256_castpd_ps, _mm256_castps256_ps128, _mm256_castsi256_si128,
    _mm256_cmp_ps, _mm256_cvtepi32_ps, _mm256_cvtps_epi32, _mm256_div_ps, _mm256_extractf128_ps,
    _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maskload_ps, _mm256_max_ps, _mm256_mul_ps,
    _mm256_packs_epi32, _mm256_permute_ps, _mm256_permute2f128_ps, _mm256_permute4x64_epi64,
    _mm256_permutevar_ps, _mm256_set1_epi16, _mm256_set1_pd, _mm256_set1_ps, _mm256_setr_epi32,
    _mm256_setzero_ps, _mm256_shuffle_epi8, _mm256_srli_epi16, _mm256_storeu_si256,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi64, _mm256_zextsi128_si256,
};

use super::kernel::{CHUNK, LARGEST, Panel, Prepared, QuantizedRow, neighbors, padded};

/// Rows of inputs, as addresses.
#[derive(Clone, Copy)]
struct Inputs {
    whole: *const i16,
    scales: *const f32,
    sums: *const f32,
}

/// A row of a matrix, as addresses.
#[derive(Clone, Copy)]
struct Row {
    packed: *const u8,
    scales: *const f32,
    biases: *const f32,
    /// Groups of a row.
    groups: usize,
}

/// Consecutive rows of a matrix with each of the inputs; see [`super::kernel::block`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn block(
    matrix: QuantizedRow<'_>,
    groups: usize,
    bits: u32,
    x: Panel<'_>,
    out: &mut [f32],
) {
    let columns = out.len() / x.rows.max(1);
    let bytes = matrix.packed.len() / columns.max(1);
    let k = bytes * 8 / bits as usize;
    let width = k / groups.max(1);
    // The reads below stay within these.
    assert!(matrix.packed.len() == columns * bytes && groups * width == k);
    assert!(matrix.scales.len() == columns * groups && matrix.biases.len() == columns * groups);
    assert!(x.whole.len() == x.rows * padded(k) && out.len() == x.rows * columns);
    assert!(x.scales.len() * neighbors(bits) == x.rows * padded(k));
    assert!(x.sums.len() == x.rows * groups);
    // SAFETY: features are the caller's promise; the lengths are asserted.
    unsafe {
        match (bits, width) {
            (4, 32) => rows::<4, 1>(matrix, groups, x, out),
            (4, 64) => rows::<4, 2>(matrix, groups, x, out),
            (4, 128) => rows::<4, 4>(matrix, groups, x, out),
            (8, 32) => rows::<8, 1>(matrix, groups, x, out),
            (8, 64) => rows::<8, 2>(matrix, groups, x, out),
            (8, 128) => rows::<8, 4>(matrix, groups, x, out),
            _ => unreachable!("4 or 8 bits, in groups of 32, 64 or 128"),
        }
    }
}

/// All columns with all rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn rows<const BITS: u32, const C: usize>(
    matrix: QuantizedRow<'_>,
    groups: usize,
    x: Panel<'_>,
    out: &mut [f32],
) {
    // SAFETY: the caller's promises.
    unsafe {
        match x.rows {
            1 => columns::<1, BITS, C>(matrix, groups, x, out),
            2 => columns::<2, BITS, C>(matrix, groups, x, out),
            3 => columns::<3, BITS, C>(matrix, groups, x, out),
            4 => columns::<4, BITS, C>(matrix, groups, x, out),
            5 => columns::<5, BITS, C>(matrix, groups, x, out),
            6 => columns::<6, BITS, C>(matrix, groups, x, out),
            7 => columns::<7, BITS, C>(matrix, groups, x, out),
            8 => columns::<8, BITS, C>(matrix, groups, x, out),
            _ => unreachable!("at most eight rows"),
        }
    }
}

/// All columns with `M` rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const M: usize, const BITS: u32, const C: usize>(
    matrix: QuantizedRow<'_>,
    groups: usize,
    x: Panel<'_>,
    out: &mut [f32],
) {
    let count = out.len() / M;
    let bytes = groups * C * CHUNK * BITS as usize / 8;
    let x = Inputs {
        whole: x.whole.as_ptr(),
        scales: x.scales.as_ptr(),
        sums: x.sums.as_ptr(),
    };
    for column in 0..count {
        let row = Row {
            packed: matrix.packed[column * bytes..].as_ptr(),
            scales: matrix.scales[column * groups..].as_ptr(),
            biases: matrix.biases[column * groups..].as_ptr(),
            groups,
        };
        // SAFETY: one more row of the matrix is there, and the inputs have as many groups: asserted by
        // `block`, whose promises hold.
        let found = unsafe { tile::<M, BITS, C>(row, x) };
        for (m, value) in found.iter().enumerate() {
            out[m * count + column] = *value;
        }
    }
}

/// A row of a matrix, in groups of `C` chunks, with `M` rows of inputs.
///
/// # Safety
/// The processor must have avx2 and fma; `row` and `x` must have as many groups as it says.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize, const BITS: u32, const C: usize>(row: Row, x: Inputs) -> [f32; M] {
    // SAFETY: the caller's promises.
    let mut totals = unsafe {
        if BITS == 4 {
            nibbles::<M, C>(row, x)
        } else {
            octets::<M, C>(row, x)
        }
    };
    let groups = row.groups;
    // SAFETY: below `groups` for the row and each of the inputs.
    unsafe {
        let whole = groups / 8 * 8;
        let mut g = 0;
        while g < whole {
            let bias = _mm256_loadu_ps(row.biases.add(g));
            for (m, total) in totals.iter_mut().enumerate() {
                let sums = _mm256_loadu_ps(x.sums.add(m * groups + g));
                *total = _mm256_fmadd_ps(bias, sums, *total);
            }
            g += 8;
        }
        if g < groups {
            let mask = first(groups - g);
            let bias = _mm256_maskload_ps(row.biases.add(g), mask);
            for (m, total) in totals.iter_mut().enumerate() {
                let sums = _mm256_maskload_ps(x.sums.add(m * groups + g), mask);
                *total = _mm256_fmadd_ps(bias, sums, *total);
            }
        }
    }
    totals.map(|total| horizontal(total))
}

/// A mask of the first `n` of eight lanes, at most seven.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn first(n: usize) -> __m256i {
    const ONES: [i32; 15] = [-1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    let from = &ONES[7 - n.min(7)..][..8];
    // SAFETY: eight elements of a slice that has them.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// Sums of [`tile`] without biases, 4 bits: two chunks at a time, one in each half of a vector. A lane sums eight
/// products below 16 * 2^15.
///
/// # Safety
/// As of [`tile`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn nibbles<const M: usize, const C: usize>(row: Row, x: Inputs) -> [__m256; M] {
    let chunks = row.groups * C;
    let pairs = chunks / 2;
    let mut totals = [_mm256_setzero_ps(); M];
    // SAFETY: pairs of chunks are within the row and the inputs, and so is the last chunk, whose inputs are
    // filled up with zeros.
    unsafe {
        let spread = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
        for pair in 0..pairs {
            let at = row.packed.add(pair * CHUNK);
            let scales = row.scales.add(2 * pair / C);
            let scale = if C == 1 {
                // One of each half.
                let both = _mm256_castpd_ps(_mm256_set1_pd(scales.cast::<f64>().read_unaligned()));
                _mm256_permutevar_ps(both, spread)
            } else {
                _mm256_broadcast_ss(&*scales)
            };
            let q = _mm256_loadu_si256(at.cast());
            add_nibbles(&mut totals, q, scale, x, pair);
        }
        if C == 1 && chunks % 2 == 1 {
            let at = row.packed.add(pairs * CHUNK);
            let q = _mm256_zextsi128_si256(_mm_loadu_si128(at.cast()));
            let scale = _mm256_broadcast_ss(&*row.scales.add(2 * pairs));
            add_nibbles(&mut totals, q, scale, x, pairs);
        }
    }
    totals
}

/// Adds the products of a pair of chunks.
///
/// # Safety
/// The processor must have avx2 and fma; the pair must be within the inputs.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_nibbles<const M: usize>(
    totals: &mut [__m256; M],
    q: __m256i,
    scale: __m256,
    x: Inputs,
    pair: usize,
) {
    let mask = _mm256_set1_epi16(15);
    let w = [
        _mm256_and_si256(q, mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(q), mask),
        _mm256_and_si256(_mm256_srli_epi16::<8>(q), mask),
        _mm256_srli_epi16::<12>(q),
    ];
    // SAFETY: the pair is within the inputs: the caller's promise.
    unsafe {
        let whole = x.whole.add(pair * M * 2 * CHUNK);
        let scales = x.scales.add(pair * M * 8);
        for (m, total) in totals.iter_mut().enumerate() {
            let part = |i: usize| {
                let x = _mm256_loadu_si256(whole.add(m * 2 * CHUNK + i * 16).cast());
                _mm256_madd_epi16(w[i], x)
            };
            let sum = _mm256_add_epi32(
                _mm256_add_epi32(part(0), part(1)),
                _mm256_add_epi32(part(2), part(3)),
            );
            let factor = _mm256_mul_ps(scale, _mm256_loadu_ps(scales.add(m * 8)));
            *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, *total);
        }
    }
}

/// Sums of [`tile`] without biases, 8 bits. A lane sums four products below 2^23.
///
/// # Safety
/// As of [`tile`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn octets<const M: usize, const C: usize>(row: Row, x: Inputs) -> [__m256; M] {
    let mut totals = [_mm256_setzero_ps(); M];
    // SAFETY: all chunks are within the row and the inputs.
    unsafe {
        let mask = _mm256_set1_epi16(255);
        for g in 0..row.groups {
            let scale = _mm256_broadcast_ss(&*row.scales.add(g));
            for c in g * C..(g + 1) * C {
                let at = row.packed.add(c * CHUNK);
                let q = _mm256_loadu_si256(at.cast());
                let (even, odd) = (_mm256_and_si256(q, mask), _mm256_srli_epi16::<8>(q));
                let place = c / 2 * M * 2 + c % 2;
                let (whole, scales) = (x.whole.add(place * CHUNK), x.scales.add(place * 8));
                for (m, total) in totals.iter_mut().enumerate() {
                    let at = whole.add(m * 2 * CHUNK);
                    let even = _mm256_madd_epi16(even, _mm256_loadu_si256(at.cast()));
                    let odd = _mm256_madd_epi16(odd, _mm256_loadu_si256(at.add(16).cast()));
                    let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(even, odd));
                    let factor = _mm256_mul_ps(scale, _mm256_loadu_ps(scales.add(m * 16)));
                    *total = _mm256_fmadd_ps(sum, factor, *total);
                }
            }
        }
    }
    totals
}

/// See [`super::kernel::prepare`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn prepare(x: &[f32], k: usize, (bits, group): (u32, usize), to: Prepared<'_>) {
    let (rows, groups, chunks) = (x.len() / k, k / group, group / CHUNK);
    // The writes below stay within these.
    assert!(to.whole.len() == rows * padded(k) && groups * chunks * CHUNK == k);
    assert!(to.scales.len() * neighbors(bits) == rows * padded(k));
    assert!(to.sums.len() == rows * groups);
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (g, x) in x.chunks_exact(group).enumerate() {
            let at = row * groups + g;
            // SAFETY: a row has `k / CHUNK` chunks, each of which has a place; features are the caller's promise.
            to.sums[at] =
                unsafe { group_to_whole(x, g * chunks, (bits, row, rows), to.whole, to.scales) };
        }
        if !k.is_multiple_of(2 * CHUNK) {
            let nothing = [0.0; CHUNK];
            // SAFETY: the place that fills the last pair.
            unsafe {
                group_to_whole(&nothing, k / CHUNK, (bits, row, rows), to.whole, to.scales);
            }
        }
    }
}

/// A group of a row in whole numbers, from chunk `first` of the row on, in the order of
/// [`super::kernel::to_whole`]; returns the sum of what they stand for.
///
/// # Safety
/// The processor must have avx2 and fma; all chunks of `x` must have places in `whole` and `scales`.
#[target_feature(enable = "avx2,fma")]
unsafe fn group_to_whole(
    x: &[f32],
    first: usize,
    (bits, row, rows): (u32, usize, usize),
    whole: &mut [i16],
    scales: &mut [f32],
) -> f32 {
    // SAFETY: within the group, and in its places.
    unsafe {
        let sign = _mm256_set1_ps(-0.0);
        let largest = _mm256_set1_ps(LARGEST);
        let (mut sum, mut rest) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        let near = neighbors(bits);
        for (chunk, x) in (first..).zip(x.as_chunks::<CHUNK>().0) {
            let (pair, half) = (chunk / 2 * rows + row, chunk % 2);
            let mut parts = [_mm256_set1_epi16(0); 4];
            let to_scales = scales.as_mut_ptr().add((2 * pair + half) * (CHUNK / near));
            for (i, part) in parts.iter_mut().enumerate() {
                let v = _mm256_loadu_ps(x.as_ptr().add(8 * i));
                sum = _mm256_add_ps(sum, v);
                // What is no number is not greater.
                let v_size = _mm256_max_ps(_mm256_andnot_ps(sign, v), _mm256_setzero_ps());
                // The greatest of four neighbors in each of them, then of eight.
                let two = _mm256_max_ps(v_size, _mm256_permute_ps::<0b10_11_00_01>(v_size));
                let mut most = _mm256_max_ps(two, _mm256_permute_ps::<0b01_00_11_10>(two));
                if bits == 4 {
                    most = _mm256_max_ps(most, _mm256_permute2f128_ps::<1>(most, most));
                }
                let scale = _mm256_div_ps(most, largest);
                let some = _mm256_cmp_ps::<_CMP_GT_OQ>(most, _mm256_setzero_ps());
                let inverse = _mm256_and_ps(some, _mm256_div_ps(largest, most));
                *part = _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse));
                let back = _mm256_cvtepi32_ps(*part);
                rest = _mm256_add_ps(rest, _mm256_fnmadd_ps(back, scale, v));
                let low = _mm_cvtss_f32(_mm256_castps256_ps128(scale));
                if bits == 4 {
                    *to_scales.add(i) = low;
                } else {
                    *to_scales.add(2 * i) = low;
                    *to_scales.add(2 * i + 1) = _mm_cvtss_f32(_mm256_extractf128_ps::<1>(scale));
                }
            }
            // Sixteen elements each, in order.
            let packed = |a, b| _mm256_permute4x64_epi64::<0b1101_1000>(_mm256_packs_epi32(a, b));
            let (low, high) = (packed(parts[0], parts[1]), packed(parts[2], parts[3]));
            let to = whole.as_mut_ptr().add(pair * 2 * CHUNK);
            if bits == 4 {
                fourths(low, high, to.add(half * 8));
            } else {
                halves(low, high, to.add(half * CHUNK));
            }
        }
        horizontal(sum) - horizontal(rest)
    }
}

/// Stores each fourth of 32 elements, from the first on, then from the second on, and so on, sixteen elements apart.
///
/// # Safety
/// The processor must have avx2; there must be room for them.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn fourths(low: __m256i, high: __m256i, to: *mut i16) {
    // Pairs of elements that are four apart.
    let pairs = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,
    ));
    let (low, high) = (
        _mm256_shuffle_epi8(low, pairs),
        _mm256_shuffle_epi8(high, pairs),
    );
    let (a, b) = (
        _mm256_castsi256_si128(low),
        _mm256_extracti128_si256::<1>(low),
    );
    let (c, d) = (
        _mm256_castsi256_si128(high),
        _mm256_extracti128_si256::<1>(high),
    );
    let (first, second) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
    let (third, fourth) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
    let all = [
        _mm_unpacklo_epi64(first, second),
        _mm_unpackhi_epi64(first, second),
        _mm_unpacklo_epi64(third, fourth),
        _mm_unpackhi_epi64(third, fourth),
    ];
    for (i, part) in all.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(to.add(16 * i).cast(), part) };
    }
}

/// Stores the even ones of 32 elements, then the odd ones.
///
/// # Safety
/// As [`fourths`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn halves(low: __m256i, high: __m256i, to: *mut i16) {
    let apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
    ));
    let (low, high) = (
        _mm256_shuffle_epi8(low, apart),
        _mm256_shuffle_epi8(high, apart),
    );
    let even = _mm256_permute4x64_epi64::<0b1101_1000>(_mm256_unpacklo_epi64(low, high));
    let odd = _mm256_permute4x64_epi64::<0b1101_1000>(_mm256_unpackhi_epi64(low, high));
    // SAFETY: the caller's promise.
    unsafe {
        _mm256_storeu_si256(to.cast(), even);
        _mm256_storeu_si256(to.add(16).cast(), odd);
    }
}

/// The sum of the eight elements.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn horizontal(v: __m256) -> f32 {
    let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps::<1>(quarter, quarter)))
}
