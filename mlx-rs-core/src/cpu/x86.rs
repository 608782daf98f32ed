//! The kernels for x86-64 with AVX2 and FMA: eight float32 at a time.

use std::arch::x86_64::{
    __m128i, __m256, _mm_add_ps, _mm_add_ss, _mm_and_si128, _mm_cvtss_f32, _mm_loadl_epi64,
    _mm_loadu_si128, _mm_movehl_ps, _mm_set1_epi8, _mm_shuffle_ps, _mm_srli_epi16, _mm_srli_si128,
    _mm256_add_ps, _mm256_castps256_ps128, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32,
    _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps,
};

use super::kernel::{CHUNK, InputRow, QuantizedRow};

/// See [`super::kernel::quantized`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn quantized(
    row: QuantizedRow<'_>,
    bits: u32,
    x: &[InputRow<'_>],
    out: &mut [f32],
) {
    let mut done = 0;
    while done < x.len() {
        let left = x.len() - done;
        // SAFETY: the features are the caller's promise; each call is given as many rows as it takes.
        done += unsafe {
            match (left, bits) {
                (8.., 4) => rows::<8, 1, 4>(row, &x[done..], &mut out[done..]),
                (8.., _) => rows::<8, 1, 8>(row, &x[done..], &mut out[done..]),
                (4.., 4) => rows::<4, 1, 4>(row, &x[done..], &mut out[done..]),
                (4.., _) => rows::<4, 1, 8>(row, &x[done..], &mut out[done..]),
                (2.., 4) => rows::<2, 2, 4>(row, &x[done..], &mut out[done..]),
                (2.., _) => rows::<2, 2, 8>(row, &x[done..], &mut out[done..]),
                (_, 4) => rows::<1, 4, 4>(row, &x[done..], &mut out[done..]),
                _ => rows::<1, 4, 8>(row, &x[done..], &mut out[done..]),
            }
        };
    }
}

/// One row of the matrix with `M` of inputs, in `A` independent sums each, which hide the latency of
/// the multiplication where there are few rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows<const M: usize, const A: usize, const BITS: u32>(
    row: QuantizedRow<'_>,
    x: &[InputRow<'_>],
    out: &mut [f32],
) -> usize {
    let groups = row.scales.len();
    let width = x[0].values.len() / groups.max(1);
    let bytes = width * BITS as usize / 8;
    // The reads below stay within these.
    assert!(row.packed.len() >= groups * bytes && row.biases.len() >= groups);
    assert!(width.is_multiple_of(CHUNK) && x.len() >= M && out.len() >= M);
    for x in &x[..M] {
        assert!(x.values.len() >= groups * width && x.sums.len() >= groups);
    }
    // SAFETY: all offsets are below the lengths asserted above; features are the caller's promise.
    unsafe {
        let mut totals = [_mm256_setzero_ps(); M];
        for g in 0..groups {
            let mut sums = [[_mm256_setzero_ps(); A]; M];
            for chunk in 0..width / CHUNK {
                let packed = row
                    .packed
                    .as_ptr()
                    .add(g * bytes + chunk * CHUNK * BITS as usize / 8);
                let w = unpack::<BITS>(packed);
                let at = g * width + chunk * CHUNK;
                for m in 0..M {
                    let x = x[m].values.as_ptr().add(at);
                    for (j, w) in w.iter().enumerate() {
                        let sum = &mut sums[m][j % A];
                        *sum = _mm256_fmadd_ps(*w, _mm256_loadu_ps(x.add(8 * j)), *sum);
                    }
                }
            }
            let scale = _mm256_set1_ps(*row.scales.get_unchecked(g));
            for m in 0..M {
                let sum = sums[m][1..]
                    .iter()
                    .fold(sums[m][0], |a, b| _mm256_add_ps(a, *b));
                totals[m] = _mm256_fmadd_ps(scale, sum, totals[m]);
            }
        }
        for m in 0..M {
            let biases = dot(row.biases.as_ptr(), x[m].sums.as_ptr(), groups);
            out[m] = horizontal(totals[m]) + biases;
        }
    }
    M
}

/// 32 packed numbers as floats; with 4 bits the even ones first.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn unpack<const BITS: u32>(packed: *const u8) -> [__m256; 4] {
    // SAFETY: the caller has 16 bytes (4 bits) or 32 there.
    unsafe {
        if BITS == 4 {
            let mask = _mm_set1_epi8(15);
            let bytes = _mm_loadu_si128(packed.cast());
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            [
                floats(low),
                floats(_mm_srli_si128::<8>(low)),
                floats(high),
                floats(_mm_srli_si128::<8>(high)),
            ]
        } else {
            let part = |i: usize| floats(_mm_loadl_epi64(packed.add(8 * i).cast()));
            [part(0), part(1), part(2), part(3)]
        }
    }
}

/// The lower eight bytes as floats.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn floats(bytes: __m128i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
}

/// The sum of the eight elements.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn horizontal(v: __m256) -> f32 {
    let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps::<1>(quarter, quarter)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn dot(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: the caller has `n` elements in both.
    unsafe {
        let mut sum = _mm256_setzero_ps();
        let whole = n / 8 * 8;
        let mut i = 0;
        while i < whole {
            sum = _mm256_fmadd_ps(_mm256_loadu_ps(a.add(i)), _mm256_loadu_ps(b.add(i)), sum);
            i += 8;
        }
        let mut total = horizontal(sum);
        while i < n {
            total += *a.add(i) * *b.add(i);
            i += 1;
        }
        total
    }
}

/// See [`super::kernel::dense`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dense(row: &[f32], x: &[&[f32]], out: &mut [f32]) {
    let mut done = 0;
    while done < x.len() {
        // SAFETY: the features are the caller's promise; each call is given as many rows as it takes.
        done += unsafe {
            match x.len() - done {
                8.. => dense_rows::<8, 1>(row, &x[done..], &mut out[done..]),
                4.. => dense_rows::<4, 1>(row, &x[done..], &mut out[done..]),
                2.. => dense_rows::<2, 4>(row, &x[done..], &mut out[done..]),
                _ => dense_rows::<1, 8>(row, &x[done..], &mut out[done..]),
            }
        };
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn dense_rows<const M: usize, const A: usize>(
    row: &[f32],
    x: &[&[f32]],
    out: &mut [f32],
) -> usize {
    let k = row.len();
    assert!(x.len() >= M && out.len() >= M);
    for x in &x[..M] {
        assert!(x.len() >= k);
    }
    // SAFETY: all offsets are below the lengths asserted above; features are the caller's promise.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); A]; M];
        let whole = k / (8 * A) * (8 * A);
        let mut at = 0;
        while at < whole {
            let mut w = [_mm256_setzero_ps(); A];
            for (a, w) in w.iter_mut().enumerate() {
                *w = _mm256_loadu_ps(row.as_ptr().add(at + 8 * a));
            }
            for (sums, x) in sums.iter_mut().zip(x) {
                for (a, (sum, w)) in sums.iter_mut().zip(w).enumerate() {
                    let x = _mm256_loadu_ps(x.as_ptr().add(at + 8 * a));
                    *sum = _mm256_fmadd_ps(w, x, *sum);
                }
            }
            at += 8 * A;
        }
        for m in 0..M {
            let sum = sums[m][1..]
                .iter()
                .fold(sums[m][0], |a, b| _mm256_add_ps(a, *b));
            out[m] = horizontal(sum) + dot(row.as_ptr().add(at), x[m].as_ptr().add(at), k - at);
        }
    }
    M
}
