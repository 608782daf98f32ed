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

/// See [`super::kernel::unpack`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn unpack(row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
    super::kernel::unpack_with(row, bits, out);
}

/// One row of a matrix of 8 bits with each of the inputs.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn row_8(row: QuantizedRow<'_>, x: &[InputRow<'_>], out: &mut [f32]) {
    let mut done = 0;
    while done < x.len() {
        // SAFETY: the features are the caller's promise; each call is given as many rows as it takes.
        done += unsafe {
            match x.len() - done {
                8.. => rows_8::<8, 1>(row, &x[done..], &mut out[done..]),
                4.. => rows_8::<4, 1>(row, &x[done..], &mut out[done..]),
                2.. => rows_8::<2, 2>(row, &x[done..], &mut out[done..]),
                _ => rows_8::<1, 4>(row, &x[done..], &mut out[done..]),
            }
        };
    }
}

/// A row of inputs in digits, as addresses.
#[derive(Clone, Copy)]
struct DigitRow {
    digits: *const i8,
    scales: *const f32,
    sums: *const f32,
}

/// `N` rows of a matrix of 4 bits, in groups of `C` chunks, with `M` rows of inputs in digits.
///
/// A lane sums products of a whole group: at most 16 weights (of a group of 128) below 16 with digits of at
/// most 128, 30,720, which the digits' weights of 65,536, 256 and 1 keep below 2^31.
///
/// # Safety
/// The processor must have avx2 and fma. `packed`, `scales` and `biases` must begin `N` rows of `groups`
/// groups, and each of `x` must have as many, with its digits `k` apart.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize, const N: usize, const C: usize>(
    (packed, scales, biases): (*const u8, *const f32, *const f32),
    groups: usize,
    x: &[DigitRow; M],
    k: usize,
) -> [[f32; M]; N] {
    // SAFETY: all addresses are those of elements that the caller promises; so are the features.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let halves = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
        let ones = _mm256_set1_epi16(1);
        let base = _mm256_set1_epi16(256);
        let stride = groups * C * (CHUNK / 2);
        let mut totals = [[_mm256_setzero_ps(); M]; N];
        let mut offsets = [[0.0f32; M]; N];
        for g in 0..groups {
            let mut sums = [[_mm256_setzero_si256(); M]; N];
            for c in 0..C {
                let chunk = g * C + c;
                let mut w = [_mm256_setzero_si256(); N];
                for (n, w) in w.iter_mut().enumerate() {
                    let at = packed.add(n * stride + chunk * (CHUNK / 2));
                    // Lower halves of bytes in the lower lane, upper ones in the upper.
                    let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(at.cast()));
                    *w = _mm256_and_si256(_mm256_srlv_epi32(both, halves), mask);
                }
                for m in 0..M {
                    let digits = x[m].digits.add(chunk * CHUNK);
                    let d0 = _mm256_loadu_si256(digits.cast());
                    let d1 = _mm256_loadu_si256(digits.add(k).cast());
                    let d2 = _mm256_loadu_si256(digits.add(2 * k).cast());
                    for n in 0..N {
                        let low = _mm256_madd_epi16(_mm256_maddubs_epi16(w[n], d0), ones);
                        let middle = _mm256_madd_epi16(_mm256_maddubs_epi16(w[n], d1), ones);
                        let high = _mm256_madd_epi16(_mm256_maddubs_epi16(w[n], d2), base);
                        let upper = _mm256_slli_epi32::<8>(_mm256_add_epi32(high, middle));
                        let sum = _mm256_add_epi32(upper, low);
                        sums[n][m] = _mm256_add_epi32(sums[n][m], sum);
                    }
                }
            }
            for n in 0..N {
                let (scale, bias) = (*scales.add(n * groups + g), *biases.add(n * groups + g));
                for m in 0..M {
                    let factor = _mm256_set1_ps(scale * *x[m].scales.add(g));
                    let sum = _mm256_cvtepi32_ps(sums[n][m]);
                    totals[n][m] = _mm256_fmadd_ps(factor, sum, totals[n][m]);
                    offsets[n][m] = bias.mul_add(*x[m].sums.add(g), offsets[n][m]);
                }
            }
        }
        let mut out = [[0.0; M]; N];
        for n in 0..N {
            for m in 0..M {
                out[n][m] = horizontal(totals[n][m]) + offsets[n][m];
            }
        }
        out
    }
}

/// See [`super::kernel::block`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn block_4(
    matrix: QuantizedRow<'_>,
    groups: usize,
    x: &[InputRow<'_>],
    out: &mut [f32],
) {
    let columns = out.len() / x.len().max(1);
    let k = x.first().map_or(0, |x| x.digits.len() / 3);
    let width = k / groups.max(1);
    // The reads in `tile` stay within these.
    assert!(matrix.packed.len() == columns * k / 2 && matrix.scales.len() == columns * groups);
    assert!(matrix.biases.len() == columns * groups && groups * width == k);
    for x in x {
        assert!(x.digits.len() == 3 * k && x.scales.len() == groups && x.sums.len() == groups);
    }
    // SAFETY: features are the caller's promise.
    unsafe {
        match width {
            32 => blocks::<1>(matrix, (groups, k, columns), x, out),
            64 => blocks::<2>(matrix, (groups, k, columns), x, out),
            128 => blocks::<4>(matrix, (groups, k, columns), x, out),
            _ => unreachable!("groups have 32, 64 or 128 elements"),
        }
    }
}

/// All columns with all rows, in tiles.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn blocks<const C: usize>(
    matrix: QuantizedRow<'_>,
    sizes: (usize, usize, usize),
    x: &[InputRow<'_>],
    out: &mut [f32],
) {
    let mut row = 0;
    while row < x.len() {
        // SAFETY: each call is given as many rows as it takes; features are the caller's promise.
        row += unsafe {
            match x.len() - row {
                4.. => columns::<4, 1, C>(matrix, sizes, (x, row), out),
                2.. => columns::<2, 2, C>(matrix, sizes, (x, row), out),
                _ => columns::<1, 2, C>(matrix, sizes, (x, row), out),
            }
        };
    }
}

/// All columns with `M` rows from `row` on.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const M: usize, const N: usize, const C: usize>(
    matrix: QuantizedRow<'_>,
    (groups, k, count): (usize, usize, usize),
    (x, row): (&[InputRow<'_>], usize),
    out: &mut [f32],
) -> usize {
    let own: [DigitRow; M] = std::array::from_fn(|m| DigitRow {
        digits: x[row + m].digits.as_ptr(),
        scales: x[row + m].scales.as_ptr(),
        sums: x[row + m].sums.as_ptr(),
    });
    let from = |column: usize| {
        (
            matrix.packed[column * k / 2..].as_ptr(),
            matrix.scales[column * groups..].as_ptr(),
            matrix.biases[column * groups..].as_ptr(),
        )
    };
    let mut column = 0;
    while column + N <= count {
        // SAFETY: `N` more rows of the matrix are there, and the inputs have as many groups: asserted by
        // `block_4`, whose promises hold.
        let found = unsafe { tile::<M, N, C>(from(column), groups, &own, k) };
        for (n, values) in found.iter().enumerate() {
            for (m, value) in values.iter().enumerate() {
                out[(row + m) * count + column + n] = *value;
            }
        }
        column += N;
    }
    while column < count {
        // SAFETY: as above, for one.
        let [values] = unsafe { tile::<M, 1, C>(from(column), groups, &own, k) };
        for (m, value) in values.iter().enumerate() {
            out[(row + m) * count + column] = *value;
        }
        column += 1;
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
