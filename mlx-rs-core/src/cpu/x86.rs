//! The kernels for x86-64 with AVX2 and FMA: eight float32 at a time.

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadl_epi64, _mm_loadu_si128, _mm_movehl_ps,
    _mm_shuffle_ps, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_broadcastsi128_si256,
    _mm256_castps256_ps128, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_extractf128_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps,
    _mm256_setzero_si256, _mm256_slli_epi32, _mm256_srlv_epi32, _mm256_storeu_ps,
};

use super::kernel::{CHUNK, InputRow, Isa, Prepared, QuantizedRow};

/// See [`super::kernel::prepare`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn prepare(x: &[f32], bits: u32, group: usize, to: Prepared<'_>) {
    super::kernel::prepare_with(Isa::Avx2, x, bits, group, to);
}

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
                (4.., 4) => rows_4::<4>(row, &x[done..], &mut out[done..]),
                (2.., 4) => rows_4::<2>(row, &x[done..], &mut out[done..]),
                (_, 4) => rows_4::<1>(row, &x[done..], &mut out[done..]),
                (8.., _) => rows_8::<8, 1>(row, &x[done..], &mut out[done..]),
                (4.., _) => rows_8::<4, 1>(row, &x[done..], &mut out[done..]),
                (2.., _) => rows_8::<2, 2>(row, &x[done..], &mut out[done..]),
                _ => rows_8::<1, 4>(row, &x[done..], &mut out[done..]),
            }
        };
    }
}

/// One row of a matrix of 4 bits with `M` of inputs in digits.
///
/// A lane sums products of a whole group: at most 16 weights (of a group of 128) below 16 with digits of at
/// most 128, 30,720, which the digits' weights of 65,536, 256 and 1 keep below 2^31.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows_4<const M: usize>(
    row: QuantizedRow<'_>,
    x: &[InputRow<'_>],
    out: &mut [f32],
) -> usize {
    let groups = row.scales.len();
    let k = x[0].digits.len() / 3;
    let width = k / groups.max(1);
    let bytes = width / 2;
    // The reads below stay within these.
    assert!(row.packed.len() >= groups * bytes && row.biases.len() >= groups);
    assert!(width.is_multiple_of(CHUNK) && width <= 128 && groups * width == k);
    assert!(x.len() >= M && out.len() >= M);
    for x in &x[..M] {
        assert!(x.digits.len() >= 3 * k && x.scales.len() >= groups && x.sums.len() >= groups);
    }
    // SAFETY: all offsets are below the lengths asserted above; features are the caller's promise.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let halves = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
        let ones = _mm256_set1_epi16(1);
        let base = _mm256_set1_epi16(256);
        let mut totals = [_mm256_setzero_ps(); M];
        for g in 0..groups {
            let mut sums = [_mm256_setzero_si256(); M];
            for chunk in 0..width / CHUNK {
                let packed = row.packed.as_ptr().add(g * bytes + chunk * CHUNK / 2);
                // Lower halves of bytes in the lower lane, upper ones in the upper.
                let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(packed.cast()));
                let w = _mm256_and_si256(_mm256_srlv_epi32(both, halves), mask);
                let at = g * width + chunk * CHUNK;
                for (sum, x) in sums.iter_mut().zip(x) {
                    let digits = x.digits.as_ptr().add(at);
                    let digit = |i: usize| _mm256_loadu_si256(digits.add(i * k).cast());
                    let low = _mm256_madd_epi16(_mm256_maddubs_epi16(w, digit(0)), ones);
                    let middle = _mm256_madd_epi16(_mm256_maddubs_epi16(w, digit(1)), ones);
                    let high = _mm256_madd_epi16(_mm256_maddubs_epi16(w, digit(2)), base);
                    let upper = _mm256_slli_epi32::<8>(_mm256_add_epi32(high, middle));
                    *sum = _mm256_add_epi32(*sum, _mm256_add_epi32(upper, low));
                }
            }
            let scale = *row.scales.get_unchecked(g);
            for ((total, sum), x) in totals.iter_mut().zip(sums).zip(x) {
                let scale = _mm256_set1_ps(scale * *x.scales.get_unchecked(g));
                *total = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum), *total);
            }
        }
        for ((total, x), out) in totals.into_iter().zip(x).zip(out) {
            *out = horizontal(total) + dot(row.biases.as_ptr(), x.sums.as_ptr(), groups);
        }
    }
    M
}

/// One row of a matrix of 8 bits with `M` of inputs, in `A` independent sums each, which hide the latency of
/// the multiplication where there are few rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows_8<const M: usize, const A: usize>(
    row: QuantizedRow<'_>,
    x: &[InputRow<'_>],
    out: &mut [f32],
) -> usize {
    let groups = row.scales.len();
    let width = x[0].values.len() / groups.max(1);
    // The reads below stay within these.
    assert!(row.packed.len() >= groups * width && row.biases.len() >= groups);
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
                let at = g * width + chunk * CHUNK;
                let packed = row.packed.as_ptr().add(at);
                let mut w = [_mm256_setzero_ps(); 4];
                for (i, w) in w.iter_mut().enumerate() {
                    let bytes = _mm_loadl_epi64(packed.add(8 * i).cast());
                    *w = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
                }
                for (sums, x) in sums.iter_mut().zip(x) {
                    let x = x.values.as_ptr().add(at);
                    for (j, w) in w.iter().enumerate() {
                        let sum = &mut sums[j % A];
                        *sum = _mm256_fmadd_ps(*w, _mm256_loadu_ps(x.add(8 * j)), *sum);
                    }
                }
            }
            let scale = _mm256_set1_ps(*row.scales.get_unchecked(g));
            for (total, sums) in totals.iter_mut().zip(sums) {
                let sum = sums[1..].iter().fold(sums[0], |a, b| _mm256_add_ps(a, *b));
                *total = _mm256_fmadd_ps(scale, sum, *total);
            }
        }
        for ((total, x), out) in totals.into_iter().zip(x).zip(out) {
            *out = horizontal(total) + dot(row.biases.as_ptr(), x.sums.as_ptr(), groups);
        }
    }
    M
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

/// `y += a * x`.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn add_scaled(y: &mut [f32], a: f32, x: &[f32]) {
    let n = y.len().min(x.len());
    // SAFETY: all offsets are below `n`; features are the caller's promise.
    unsafe {
        let factor = _mm256_set1_ps(a);
        let mut i = 0;
        while i + 8 <= n {
            let sum = _mm256_fmadd_ps(
                factor,
                _mm256_loadu_ps(x.as_ptr().add(i)),
                _mm256_loadu_ps(y.as_ptr().add(i)),
            );
            _mm256_storeu_ps(y.as_mut_ptr().add(i), sum);
            i += 8;
        }
        while i < n {
            y[i] += a * x[i];
            i += 1;
        }
    }
}

/// `a . b`.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn inner(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: as many elements as both have; features are the caller's promise.
    unsafe { dot(a.as_ptr(), b.as_ptr(), a.len().min(b.len())) }
}
