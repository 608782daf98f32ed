//! Rows to columns and back: inputs into panels of `LANES` rows beside each other, and tiles out of them. Eight by
//! eight in registers where there is AVX2, four by four where there is NEON.

use crate::simd::dispatch::Isa;
use crate::simd::microkernel::LANES;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, _mm256_add_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_permute2f128_ps, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

/// A row of inputs, and what its elements are multiplied with.
pub(crate) type Scaled<'a> = (&'a [f32], f32);

/// At most `LANES` rows one beside another, `[k, LANES]`: each element times its row's factor and its weight,
/// where there are weights. Rows that are not there are zeros.
pub(crate) fn pack(isa: Isa, rows: &[Scaled<'_>], weight: Option<&[f32]>, panel: &mut [f32]) {
    if rows.len() < LANES {
        panel.fill(0.0);
    }
    let done = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => {
            let whole = panel.len() / LANES / 8 * 8;
            let (eights, _) = rows.as_chunks::<8>();
            for (group, rows) in eights.iter().enumerate() {
                // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2.
                unsafe { pack_avx2(rows, weight, whole, (8 * group, &mut *panel)) };
            }
            // What is left of these rows.
            let done = 8 * eights.len();
            scatter(&rows[..done], weight, (whole, 0), panel);
            done
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dot => {
            let whole = panel.len() / LANES / 4 * 4;
            let (fours, _) = rows.as_chunks::<4>();
            for (group, rows) in fours.iter().enumerate() {
                // SAFETY: these are made by `detect` only, where the processor has neon.
                unsafe {
                    crate::simd::neon::kernels::pack(rows, weight, whole, (4 * group, &mut *panel));
                }
            }
            let done = 4 * fours.len();
            scatter(&rows[..done], weight, (whole, 0), panel);
            done
        }
        Isa::Portable => 0,
    };
    scatter(&rows[done..], weight, (0, done), panel);
}

/// The elements from `from` on of some rows, the first of which is at `lane`.
fn scatter(
    rows: &[Scaled<'_>],
    weight: Option<&[f32]>,
    (from, lane): (usize, usize),
    panel: &mut [f32],
) {
    let panel = panel.as_chunks_mut::<LANES>().0;
    for (lane, (row, factor)) in (lane..).zip(rows) {
        for (i, x) in row.iter().enumerate().skip(from) {
            let x = x * factor * weight.map_or(1.0, |w| w[i]);
            panel[i][lane] = x;
        }
    }
}

/// Eight rows, their first `whole` elements, to `lane` and the next seven.
///
/// # Safety
/// The processor must have avx2 and fma.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_avx2(
    rows: &[Scaled<'_>; 8],
    weight: Option<&[f32]>,
    whole: usize,
    (lane, panel): (usize, &mut [f32]),
) {
    assert!(whole.is_multiple_of(8) && lane + 8 <= LANES && panel.len() >= whole * LANES);
    assert!(rows.iter().all(|(row, _)| row.len() >= whole));
    assert!(weight.is_none_or(|w| w.len() >= whole));
    for at in (0..whole).step_by(8) {
        // SAFETY: eight elements from `at` on are below `whole`, which rows, weight and panel have; features are the caller's promise.
        unsafe {
            let mut block = [_mm256_setzero_ps(); 8];
            for (block, (row, factor)) in block.iter_mut().zip(rows) {
                let x = _mm256_loadu_ps(row.as_ptr().add(at));
                *block = _mm256_mul_ps(x, _mm256_set1_ps(*factor));
                if let Some(weight) = weight {
                    *block = _mm256_mul_ps(*block, _mm256_loadu_ps(weight.as_ptr().add(at)));
                }
            }
            for (i, column) in (at..).zip(transposed(block)) {
                let to = panel.as_mut_ptr().add(i * LANES + lane);
                _mm256_storeu_ps(to, column);
            }
        }
    }
}

/// Lanes `lane..lane + 8` of `columns` sums each, `[columns, LANES]`, as rows that are `step` apart from `to` on,
/// with what is at the same places of `before` added. Returns the columns that are done, from the first on.
///
/// # Safety
/// There must be `columns` elements in each of eight rows, which nobody else uses.
pub(crate) unsafe fn rows(
    isa: Isa,
    sums: &[f32],
    lane: usize,
    (to, step): (*mut f32, usize),
    before: Option<*const f32>,
) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2; the rest is the
        // caller's promise.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { rows_avx2(sums, lane, (to, step), before) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: these are made by `detect` only, where the processor has neon; the rest is the
        // caller's promise.
        Isa::Neon | Isa::Dot => unsafe {
            crate::simd::neon::kernels::rows(sums, lane, (to, step), before)
        },
        Isa::Portable => {
            let _ = (sums, lane, to, step, before);
            0
        }
    }
}

/// # Safety
/// As [`rows`], and the processor must have avx2 and fma.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn rows_avx2(
    sums: &[f32],
    lane: usize,
    (to, step): (*mut f32, usize),
    before: Option<*const f32>,
) -> usize {
    assert!(lane + 8 <= LANES);
    let whole = sums.len() / LANES / 8 * 8;
    for at in (0..whole).step_by(8) {
        // SAFETY: eight columns from `at` on are in `sums`; the rows are the caller's promise, as are the
        // features.
        unsafe {
            let mut block = [_mm256_setzero_ps(); 8];
            for (i, block) in block.iter_mut().enumerate() {
                *block = _mm256_loadu_ps(sums.as_ptr().add((at + i) * LANES + lane));
            }
            for (i, mut row) in transposed(block).into_iter().enumerate() {
                if let Some(before) = before {
                    row = _mm256_add_ps(row, _mm256_loadu_ps(before.add(i * step + at)));
                }
                _mm256_storeu_ps(to.add(i * step + at), row);
            }
        }
    }
    whole
}

/// What stands `[n, 8]`, as `[8, n]`, whatever the bits mean. Returns how many of `n` are done, from the first on.
///
/// # Safety
/// The processor must have avx2 and fma; both must be of the same length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn eights_avx2(from: &[f32], to: &mut [f32]) -> usize {
    let n = from.len() / 8;
    let whole = n / 8 * 8;
    for at in (0..whole).step_by(8) {
        // SAFETY: eight vectors from `at` on, and their places in eight rows of `n`.
        unsafe {
            let mut block = [_mm256_setzero_ps(); 8];
            for (i, block) in block.iter_mut().enumerate() {
                *block = _mm256_loadu_ps(from.as_ptr().add((at + i) * 8));
            }
            for (i, row) in transposed(block).into_iter().enumerate() {
                _mm256_storeu_ps(to.as_mut_ptr().add(i * n + at), row);
            }
        }
    }
    whole
}

/// Rows as columns.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transposed(r: [__m256; 8]) -> [__m256; 8] {
    let mut pairs = [_mm256_setzero_ps(); 8];
    for i in 0..4 {
        pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let mut fours = [_mm256_setzero_ps(); 8];
    for half in 0..2 {
        let p = &pairs[4 * half..4 * half + 4];
        fours[4 * half] = _mm256_shuffle_ps::<0x44>(p[0], p[2]);
        fours[4 * half + 1] = _mm256_shuffle_ps::<0xee>(p[0], p[2]);
        fours[4 * half + 2] = _mm256_shuffle_ps::<0x44>(p[1], p[3]);
        fours[4 * half + 3] = _mm256_shuffle_ps::<0xee>(p[1], p[3]);
    }
    let mut columns = [_mm256_setzero_ps(); 8];
    for i in 0..4 {
        columns[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[4 + i]);
        columns[4 + i] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[4 + i]);
    }
    columns
}
