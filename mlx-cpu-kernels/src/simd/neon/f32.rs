//! Float32 kernels for aarch64, four elements at a time. Quantized rows are converted to floats in
//! registers. Loops that compilers vectorize (exponentials, gates, dequantization) are in
//! `portable`, which is compiled with NEON on aarch64.

use crate::layout::input_panel::InputPanel;
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix};
use crate::layout::tile::{LANES, ScaledRow, TileA, TileB, TileC};
use crate::partition::OutputBlock;
use crate::simd::neon::intrinsics::{
    float32x4_t, vaddq_f32, vaddvq_f32, vandq_u32, vcvtq_f32_u32, vdupq_n_f32, vdupq_n_u32,
    vfmaq_f32, vfmaq_n_f32, vld1q_f32, vld1q_u32, vmulq_f32, vmulq_n_f32, vreinterpretq_f32_f64,
    vreinterpretq_f64_f32, vshrq_n_u32, vst1q_f32, vtrn1q_f32, vtrn1q_f64, vtrn2q_f32, vtrn2q_f64,
};

/// The number of elements of a vector.
const WIDTH: usize = 4;

/// The number of vectors per row of a tile.
const VECTORS: usize = LANES / WIDTH;

/// The addresses of a row block.
#[derive(Clone, Copy)]
struct RowBlock<'a> {
    words: *const u32,
    /// The number of words per group.
    per: usize,
    packed: PackedMatrix<'a>,
}

/// See [`crate::simd::qgemv::qgemv`].
///
/// # Safety
/// The processor must have neon.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) unsafe fn qgemv<const BITS: i32>(
    matrix: PackedMatrix<'_>,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    const { assert!(BITS == 4 || BITS == 8) };
    assert!(matrix.bits == BITS as u32);
    let (count, groups, per) = (matrix.row_blocks(), matrix.groups, matrix.words_per_group());
    let k = groups * matrix.group_size();
    // All reads in `tile` are within these bounds.
    assert!(matrix.words.len() == count * groups * per * INTERLEAVED_ROWS);
    assert!(x.values.len() == x.rows * k && x.sums.len() == x.rows * groups);
    for i in 0..count {
        let packed = matrix.block_range(i..i + 1);
        let block = RowBlock {
            words: packed.words.as_ptr(),
            per,
            packed,
        };
        let mut row = 0;
        while row < x.rows {
            let at = (row, k, i);
            // SAFETY: the lengths are asserted above. Each call processes only rows that remain.
            row += unsafe {
                match x.rows - row {
                    8.. => few::<8, 1, BITS>(block, x, at, out),
                    4.. => few::<4, 2, BITS>(block, x, at, out),
                    2.. => few::<2, 4, BITS>(block, x, at, out),
                    _ => few::<1, 4, BITS>(block, x, at, out),
                }
            };
        }
    }
}

/// Multiplies row block `i` with `M` rows of `k` inputs, beginning at `row`. Each row has `S`
/// independent sums, which hides latency. Returns `M`.
///
/// # Safety
/// The lengths must be those that [`qgemv`] asserts. There must be `M` rows of inputs from `row`
/// on, and codes of `BITS` bits.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
unsafe fn few<const M: usize, const S: usize, const BITS: i32>(
    block: RowBlock<'_>,
    x: InputPanel<'_>,
    (row, k, i): (usize, usize, usize),
    out: &mut OutputBlock<'_>,
) -> usize {
    let zero = vdupq_n_f32(0.0);
    let (near, groups) = (32 / BITS as usize, block.packed.groups);
    let mask = vdupq_n_u32(u32::MAX >> (32 - BITS));
    let mut totals = [[zero; 2]; M];
    for g in 0..groups {
        let mut sums = [[[zero; 2]; S]; M];
        for w in g * block.per..(g + 1) * block.per {
            // SAFETY: the caller guarantees word `w` of each of the eight rows.
            let mut q = unsafe {
                let at = block.words.add(w * INTERLEAVED_ROWS);
                [vld1q_u32(at), vld1q_u32(at.add(WIDTH))]
            };
            for j in 0..near {
                let n = q.map(|q| vcvtq_f32_u32(vandq_u32(q, mask)));
                q = [vshrq_n_u32::<BITS>(q[0]), vshrq_n_u32::<BITS>(q[1])];
                for (m, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: the input of this code is below `k`, and the caller guarantees `k`
                    // inputs per row.
                    let x = unsafe { *x.values.as_ptr().add((row + m) * k + w * near + j) };
                    for (sum, n) in sums[j % S].iter_mut().zip(n) {
                        *sum = vfmaq_n_f32(*sum, n, x);
                    }
                }
            }
        }
        let (scales, biases) = (block.packed.scales.group(g), block.packed.biases.group(g));
        for (m, (totals, sums)) in totals.iter_mut().zip(sums).enumerate() {
            let group = x.sums[(row + m) * groups + g];
            for (half, total) in totals.iter_mut().enumerate() {
                let sum = sums[1..]
                    .iter()
                    .fold(sums[0][half], |a, b| vaddq_f32(a, b[half]));
                // SAFETY: these are four of the group's eight values.
                let (scale, bias) = unsafe {
                    let at = half * WIDTH;
                    (
                        vld1q_f32(scales.as_ptr().add(at)),
                        vld1q_f32(biases.as_ptr().add(at)),
                    )
                };
                *total = vfmaq_n_f32(vfmaq_f32(*total, sum, scale), bias, group);
            }
        }
    }
    for (m, totals) in totals.iter().enumerate() {
        let place = &mut out.row_mut(row + m)[i * INTERLEAVED_ROWS..][..INTERLEAVED_ROWS];
        for (half, total) in totals.iter().enumerate() {
            // SAFETY: these are four of the eight outputs.
            unsafe { vst1q_f32(place.as_mut_ptr().add(half * WIDTH), *total) };
        }
    }
    M
}

/// # Safety
/// At both addresses, `n` elements must exist.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
unsafe fn dot_ptr(a: *const f32, b: *const f32, n: usize) -> f32 {
    // Four sums hide the latency of the multiplication.
    let mut sums = [vdupq_n_f32(0.0); 4];
    let mut i = 0;
    // SAFETY: all offsets are below `n`.
    unsafe {
        while i + 4 * WIDTH <= n {
            for (j, sum) in sums.iter_mut().enumerate() {
                let at = i + WIDTH * j;
                *sum = vfmaq_f32(*sum, vld1q_f32(a.add(at)), vld1q_f32(b.add(at)));
            }
            i += 4 * WIDTH;
        }
        while i + WIDTH <= n {
            sums[0] = vfmaq_f32(sums[0], vld1q_f32(a.add(i)), vld1q_f32(b.add(i)));
            i += WIDTH;
        }
        let mut total = vaddvq_f32(added(&sums));
        while i < n {
            total = (*a.add(i)).mul_add(*b.add(i), total);
            i += 1;
        }
        total
    }
}

/// The sum of one or more vectors.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn added(sums: &[float32x4_t]) -> float32x4_t {
    sums[1..].iter().fold(sums[0], |a, b| vaddq_f32(a, *b))
}

/// See [`crate::simd::vmath::dot_rows`].
///
/// # Safety
/// The processor must have neon.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) unsafe fn dot_rows(row: &[f32], x: &[&[f32]], out: &mut [f32]) {
    let mut done = 0;
    while done < x.len() {
        // The vectors of sums are sixteen in total, which hides the latency of the multiplication.
        done += match x.len() - done {
            8.. => dot_rows_m::<8, 2>(row, &x[done..], &mut out[done..]),
            4.. => dot_rows_m::<4, 4>(row, &x[done..], &mut out[done..]),
            2.. => dot_rows_m::<2, 8>(row, &x[done..], &mut out[done..]),
            _ => dot_rows_m::<1, 8>(row, &x[done..], &mut out[done..]),
        };
    }
}

/// Multiplies a row with `M` input rows. Each of them has `A` independent sums. Returns `M`.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn dot_rows_m<const M: usize, const A: usize>(row: &[f32], x: &[&[f32]], out: &mut [f32]) -> usize {
    let k = row.len();
    assert!(x.len() >= M && out.len() >= M);
    for x in &x[..M] {
        assert!(x.len() >= k);
    }
    let zero = vdupq_n_f32(0.0);
    let mut sums = [[zero; A]; M];
    let vectorized = k / (WIDTH * A) * (WIDTH * A);
    for at in (0..vectorized).step_by(WIDTH * A) {
        // SAFETY: all offsets are below `vectorized`, and all rows have `k` elements or more.
        unsafe {
            let mut w = [zero; A];
            for (a, w) in w.iter_mut().enumerate() {
                *w = vld1q_f32(row.as_ptr().add(at + WIDTH * a));
            }
            for (sums, x) in sums.iter_mut().zip(x) {
                for (a, (sum, w)) in sums.iter_mut().zip(w).enumerate() {
                    *sum = vfmaq_f32(*sum, w, vld1q_f32(x.as_ptr().add(at + WIDTH * a)));
                }
            }
        }
    }
    for ((sums, x), out) in sums.iter().zip(x).zip(out) {
        let (row, x) = (&row[vectorized..], &x[vectorized..k]);
        // SAFETY: `dot_ptr` gets the elements that remain in both rows.
        *out = vaddvq_f32(added(sums)) + unsafe { dot_ptr(row.as_ptr(), x.as_ptr(), row.len()) };
    }
    M
}

/// `a . b`.
///
/// # Safety
/// The processor must have neon.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: the length is that of the shorter slice.
    unsafe { dot_ptr(a.as_ptr(), b.as_ptr(), a.len().min(b.len())) }
}

/// Computes `M` rows of [`crate::simd::microkernel::gemm_tiles`]. Six rows with four vectors each
/// leave eight registers for the factors.
///
/// # Safety
/// The obligations of [`crate::simd::microkernel::gemm_tiles`], for `M` rows.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) unsafe fn tile<const M: usize>(depth: usize, left: TileA, right: TileB, product: TileC) {
    let mut sums = [[vdupq_n_f32(0.0); VECTORS]; M];
    let (mut a, mut b) = (left.data, right.data);
    for _ in 0..depth {
        // SAFETY: the caller guarantees the elements of both operands for each of `depth` steps.
        unsafe {
            let lanes: [_; VECTORS] = std::array::from_fn(|v| vld1q_f32(b.wrapping_add(WIDTH * v)));
            for (m, sums) in sums.iter_mut().enumerate() {
                let factor = *a.wrapping_add(m * left.row_stride);
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum = vfmaq_n_f32(*sum, lanes, factor);
                }
            }
        }
        a = a.wrapping_add(left.stride);
        b = b.wrapping_add(right.stride);
    }
    for (m, sums) in sums.into_iter().enumerate() {
        for (v, sum) in sums.into_iter().enumerate() {
            let to = product
                .data
                .wrapping_add(m * product.row_stride + WIDTH * v);
            // SAFETY: the caller guarantees `LANES` elements of the product in each of `M` rows.
            unsafe {
                let sum = if product.accumulate {
                    vaddq_f32(vld1q_f32(to), sum)
                } else {
                    sum
                };
                vst1q_f32(to, sum);
            }
        }
    }
}

/// Packs the first `vectorized` elements of four input rows. The rows become `lane` and the next
/// three lanes of a panel.
///
/// # Safety
/// The processor must have neon.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) unsafe fn pack_rows(
    rows: &[ScaledRow<'_>; WIDTH],
    weight: Option<&[f32]>,
    vectorized: usize,
    (lane, panel): (usize, &mut [f32]),
) {
    assert!(
        vectorized.is_multiple_of(WIDTH)
            && lane + WIDTH <= LANES
            && panel.len() >= vectorized * LANES
    );
    assert!(rows.iter().all(|(row, _)| row.len() >= vectorized));
    assert!(weight.is_none_or(|w| w.len() >= vectorized));
    for at in (0..vectorized).step_by(WIDTH) {
        let mut block = [vdupq_n_f32(0.0); WIDTH];
        // SAFETY: four elements from `at` on are below `vectorized`, so rows, weight and panel have
        // them.
        unsafe {
            for (block, (row, factor)) in block.iter_mut().zip(rows) {
                *block = vmulq_n_f32(vld1q_f32(row.as_ptr().add(at)), *factor);
                if let Some(weight) = weight {
                    *block = vmulq_f32(*block, vld1q_f32(weight.as_ptr().add(at)));
                }
            }
            for (i, column) in (at..).zip(transposed(block)) {
                let to = panel.as_mut_ptr().add(i * LANES + lane);
                vst1q_f32(to, column);
            }
        }
    }
}

/// See [`crate::simd::transpose::store_rows`].
///
/// # Safety
/// The obligations of [`crate::simd::transpose::store_rows`].
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) unsafe fn store_rows(
    sums: &[f32],
    lane: usize,
    (to, step): (*mut f32, usize),
    before: Option<*const f32>,
) -> usize {
    assert!(lane + 2 * WIDTH <= LANES);
    let vectorized = sums.len() / LANES / WIDTH * WIDTH;
    for at in (0..vectorized).step_by(WIDTH) {
        for first in [0, WIDTH] {
            let mut block = [vdupq_n_f32(0.0); WIDTH];
            // SAFETY: `sums` has four columns from `at` on. The caller guarantees the rows.
            unsafe {
                for (i, block) in block.iter_mut().enumerate() {
                    *block = vld1q_f32(sums.as_ptr().add((at + i) * LANES + lane + first));
                }
                for (i, mut row) in (first..).zip(transposed(block)) {
                    if let Some(before) = before {
                        row = vaddq_f32(row, vld1q_f32(before.add(i * step + at)));
                    }
                    vst1q_f32(to.add(i * step + at), row);
                }
            }
        }
    }
    vectorized
}

/// Transposes four rows.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn transposed([a, b, c, d]: [float32x4_t; WIDTH]) -> [float32x4_t; WIDTH] {
    let even = |a, b| vreinterpretq_f64_f32(vtrn1q_f32(a, b));
    let odd = |a, b| vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    [
        vreinterpretq_f32_f64(vtrn1q_f64(even(a, b), even(c, d))),
        vreinterpretq_f32_f64(vtrn1q_f64(odd(a, b), odd(c, d))),
        vreinterpretq_f32_f64(vtrn2q_f64(even(a, b), even(c, d))),
        vreinterpretq_f32_f64(vtrn2q_f64(odd(a, b), odd(c, d))),
    ]
}
