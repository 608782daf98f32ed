//! The kernels for aarch64: four float32 at a time in the 32 registers of NEON, which each such processor with an
//! operating system has. Quantized rows become floats in registers. Loops that compilers put into vectors by themselves
//! (exponentials, gates, unpacking) are those of the other files: for this architecture they are compiled with NEON
//! anyway.

use std::arch::aarch64::{
    float32x4_t, uint8x16_t, vaddq_f32, vaddvq_f32, vandq_u8, vcvtq_f32_u32, vdupq_n_f32,
    vdupq_n_u8, vfmaq_f32, vfmaq_n_f32, vget_low_u8, vget_low_u16, vld1q_f32, vld1q_u8,
    vmovl_high_u8, vmovl_high_u16, vmovl_u8, vmovl_u16, vmulq_f32, vmulq_n_f32,
    vreinterpretq_f32_f64, vreinterpretq_f64_f32, vshrq_n_u8, vst1q_f32, vtrn1q_f32, vtrn1q_f64,
    vtrn2q_f32, vtrn2q_f64,
};

use super::kernel::{CHUNK, InputRow, QuantizedRow};
use super::tile::{LANES, Left, Product, Right};
use super::turn::{Scaled, place};

/// Elements of a vector.
const WIDTH: usize = 4;

/// Vectors of a row of a tile.
const VECTORS: usize = LANES / WIDTH;

/// A row of inputs, as addresses.
#[derive(Clone, Copy)]
struct FloatRow {
    values: *const f32,
    sums: *const f32,
}

/// See [`super::kernel::block`].
#[target_feature(enable = "neon")]
pub(super) fn block(
    matrix: QuantizedRow<'_>,
    groups: usize,
    bits: u32,
    x: &[InputRow<'_>],
    out: &mut [f32],
) {
    let count = out.len() / x.len().max(1);
    let k = x.first().map_or(0, |x| x.values.len());
    let per_byte = if bits == 4 { 2 } else { 1 };
    // The reads in `few` stay within these.
    assert!(groups > 0 && k.is_multiple_of(groups * CHUNK));
    assert!(matrix.packed.len() == count * k / per_byte);
    assert!(matrix.scales.len() == count * groups && matrix.biases.len() == count * groups);
    for x in x {
        assert!(x.values.len() == k && x.sums.len() == groups);
    }
    let sizes = (groups, k, count);
    let mut row = 0;
    while row < x.len() {
        // SAFETY: the lengths are asserted above, and each call is given as many rows as it takes.
        row += unsafe {
            match (bits, x.len() - row) {
                (4, 8..) => columns::<8, 2, 2>(matrix, sizes, (x, row), out),
                (4, 4..) => columns::<4, 2, 2>(matrix, sizes, (x, row), out),
                (4, 2..) => columns::<2, 4, 2>(matrix, sizes, (x, row), out),
                (4, _) => columns::<1, 4, 2>(matrix, sizes, (x, row), out),
                (_, 8..) => columns::<8, 2, 1>(matrix, sizes, (x, row), out),
                (_, 4..) => columns::<4, 2, 1>(matrix, sizes, (x, row), out),
                (_, 2..) => columns::<2, 4, 1>(matrix, sizes, (x, row), out),
                (_, _) => columns::<1, 4, 1>(matrix, sizes, (x, row), out),
            }
        };
    }
}

/// All rows of the matrix, `N` at a time, with `M` rows of inputs from `row` on. Returns `M`.
///
/// # Safety
/// Lengths as [`block`] asserts them, with `M` rows of inputs from `row` on, and `PER_BYTE` numbers to a byte.
#[target_feature(enable = "neon")]
unsafe fn columns<const M: usize, const N: usize, const PER_BYTE: usize>(
    matrix: QuantizedRow<'_>,
    (groups, k, count): (usize, usize, usize),
    (x, row): (&[InputRow<'_>], usize),
    out: &mut [f32],
) -> usize {
    let own: [FloatRow; M] = std::array::from_fn(|m| FloatRow {
        values: x[row + m].values.as_ptr(),
        sums: x[row + m].sums.as_ptr(),
    });
    let from = |column: usize| {
        (
            matrix.packed[column * k / PER_BYTE..].as_ptr(),
            matrix.scales[column * groups..].as_ptr(),
            matrix.biases[column * groups..].as_ptr(),
        )
    };
    let mut column = 0;
    while column + N <= count {
        // SAFETY: `N` more rows of the matrix are there, and the inputs have as many elements.
        let found = unsafe { few::<M, N, PER_BYTE>(from(column), (groups, k), &own) };
        for (n, values) in found.iter().enumerate() {
            for (m, value) in values.iter().enumerate() {
                out[(row + m) * count + column + n] = *value;
            }
        }
        column += N;
    }
    while column < count {
        // SAFETY: as above, for one.
        let [values] = unsafe { few::<M, 1, PER_BYTE>(from(column), (groups, k), &own) };
        for (m, value) in values.iter().enumerate() {
            out[(row + m) * count + column] = *value;
        }
        column += 1;
    }
    M
}

/// `N` rows of a matrix with `M` rows of inputs. A vector of inputs is read once for all `N`, and numbers become
/// floats once for all `M`.
///
/// # Safety
/// The three addresses must begin `N` rows of `k` numbers, `PER_BYTE` to a byte, in `groups` groups of whole chunks,
/// and each of `x` must have as many.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn few<const M: usize, const N: usize, const PER_BYTE: usize>(
    (packed, scales, biases): (*const u8, *const f32, *const f32),
    (groups, k): (usize, usize),
    x: &[FloatRow; M],
) -> [[f32; M]; N] {
    let zero = vdupq_n_f32(0.0);
    let (width, stride) = (k / groups, k / PER_BYTE);
    let mut totals = [[zero; M]; N];
    for g in 0..groups {
        let mut sums = [[zero; M]; N];
        // Sixteen bytes at a time. Two numbers to a byte: sixteen even elements, then the odd ones.
        for at in (g * width..(g + 1) * width).step_by(16 * PER_BYTE) {
            for half in 0..PER_BYTE {
                let mut w = [[zero; 4]; N];
                for (n, w) in w.iter_mut().enumerate() {
                    // SAFETY: sixteen bytes of row `n`, which the caller promises.
                    let bytes = unsafe { vld1q_u8(packed.add(n * stride + at / PER_BYTE)) };
                    *w = floats(match (PER_BYTE, half) {
                        (1, _) => bytes,
                        (_, 0) => vandq_u8(bytes, vdupq_n_u8(15)),
                        _ => vshrq_n_u8::<4>(bytes),
                    });
                }
                for j in 0..4 {
                    for (m, x) in x.iter().enumerate() {
                        // SAFETY: four elements of the sixteen that these numbers belong to.
                        let x = unsafe { vld1q_f32(x.values.add(at + 16 * half + WIDTH * j)) };
                        for n in 0..N {
                            sums[n][m] = vfmaq_f32(sums[n][m], w[n][j], x);
                        }
                    }
                }
            }
        }
        for n in 0..N {
            // SAFETY: group `g` of row `n`.
            let scale = unsafe { *scales.add(n * groups + g) };
            for m in 0..M {
                totals[n][m] = vfmaq_n_f32(totals[n][m], sums[n][m], scale);
            }
        }
    }
    let mut out = [[0.0; M]; N];
    for n in 0..N {
        for m in 0..M {
            // SAFETY: all groups of row `n`, and of the inputs.
            let offset = unsafe { dot(biases.add(n * groups), x[m].sums, groups) };
            out[n][m] = vaddvq_f32(totals[n][m]) + offset;
        }
    }
    out
}

/// Sixteen bytes as floats.
#[inline]
#[target_feature(enable = "neon")]
fn floats(bytes: uint8x16_t) -> [float32x4_t; 4] {
    let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
    [
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
        vcvtq_f32_u32(vmovl_high_u16(low)),
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
        vcvtq_f32_u32(vmovl_high_u16(high)),
    ]
}

/// # Safety
/// There must be `n` elements at both.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn dot(a: *const f32, b: *const f32, n: usize) -> f32 {
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

/// The sum of vectors, at least one.
#[inline]
#[target_feature(enable = "neon")]
fn added(sums: &[float32x4_t]) -> float32x4_t {
    sums[1..].iter().fold(sums[0], |a, b| vaddq_f32(a, *b))
}

/// See [`super::kernel::dense`].
#[target_feature(enable = "neon")]
pub(super) fn dense(row: &[f32], x: &[&[f32]], out: &mut [f32]) {
    let mut done = 0;
    while done < x.len() {
        // Sixteen sums in all, which hide the latency of the multiplication.
        done += match x.len() - done {
            8.. => dense_rows::<8, 2>(row, &x[done..], &mut out[done..]),
            4.. => dense_rows::<4, 4>(row, &x[done..], &mut out[done..]),
            2.. => dense_rows::<2, 8>(row, &x[done..], &mut out[done..]),
            _ => dense_rows::<1, 8>(row, &x[done..], &mut out[done..]),
        };
    }
}

/// A row with `M` of inputs, in `A` independent sums each. Returns `M`.
#[target_feature(enable = "neon")]
fn dense_rows<const M: usize, const A: usize>(row: &[f32], x: &[&[f32]], out: &mut [f32]) -> usize {
    let k = row.len();
    assert!(x.len() >= M && out.len() >= M);
    for x in &x[..M] {
        assert!(x.len() >= k);
    }
    let zero = vdupq_n_f32(0.0);
    let mut sums = [[zero; A]; M];
    let whole = k / (WIDTH * A) * (WIDTH * A);
    for at in (0..whole).step_by(WIDTH * A) {
        // SAFETY: all offsets are below `whole`, which all rows have.
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
        *out = vaddvq_f32(added(sums)) + inner(&row[whole..], &x[whole..k]);
    }
    M
}

/// `a . b`.
#[target_feature(enable = "neon")]
pub(super) fn inner(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: as many elements as both have.
    unsafe { dot(a.as_ptr(), b.as_ptr(), a.len().min(b.len())) }
}

/// `M` rows of [`super::tile::tiles`]: six with four vectors each leave eight registers for the factors.
///
/// # Safety
/// As [`super::tile::tiles`], for `M` rows.
#[target_feature(enable = "neon")]
pub(super) unsafe fn tile<const M: usize>(
    depth: usize,
    left: Left,
    right: Right,
    product: Product,
) {
    let mut sums = [[vdupq_n_f32(0.0); VECTORS]; M];
    let (mut a, mut b) = (left.data, right.data);
    for _ in 0..depth {
        // SAFETY: the elements are the caller's promise.
        unsafe {
            let lanes: [_; VECTORS] = std::array::from_fn(|v| vld1q_f32(b.wrapping_add(WIDTH * v)));
            for (m, sums) in sums.iter_mut().enumerate() {
                let factor = *a.wrapping_add(m * left.row_step);
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum = vfmaq_n_f32(*sum, lanes, factor);
                }
            }
        }
        a = a.wrapping_add(left.step);
        b = b.wrapping_add(right.step);
    }
    for (m, sums) in sums.into_iter().enumerate() {
        for (v, sum) in sums.into_iter().enumerate() {
            let to = product.data.wrapping_add(m * product.row_step + WIDTH * v);
            // SAFETY: as above.
            unsafe {
                let sum = if product.adds {
                    vaddq_f32(vld1q_f32(to), sum)
                } else {
                    sum
                };
                vst1q_f32(to, sum);
            }
        }
    }
}

/// Four rows of inputs, their first `whole` elements, to `lane` and the next three of a panel.
#[target_feature(enable = "neon")]
pub(super) fn pack(
    rows: &[Scaled<'_>; WIDTH],
    weight: Option<&[f32]>,
    paired: bool,
    whole: usize,
    (lane, panel): (usize, &mut [f32]),
) {
    assert!(whole.is_multiple_of(WIDTH) && lane + WIDTH <= LANES && panel.len() >= whole * LANES);
    assert!(rows.iter().all(|(row, _)| row.len() >= whole));
    assert!(weight.is_none_or(|w| w.len() >= whole));
    // A chunk is cut nowhere, so that its elements stay within it.
    assert!(!paired || whole.is_multiple_of(CHUNK));
    for at in (0..whole).step_by(WIDTH) {
        let mut block = [vdupq_n_f32(0.0); WIDTH];
        // SAFETY: four elements from `at` on are below `whole`, which rows, weight and panel have; a paired place
        // stays within its chunk.
        unsafe {
            for (block, (row, factor)) in block.iter_mut().zip(rows) {
                *block = vmulq_n_f32(vld1q_f32(row.as_ptr().add(at)), *factor);
                if let Some(weight) = weight {
                    *block = vmulq_f32(*block, vld1q_f32(weight.as_ptr().add(at)));
                }
            }
            for (i, column) in (at..).zip(transposed(block)) {
                let to = panel.as_mut_ptr().add(place(i, paired) * LANES + lane);
                vst1q_f32(to, column);
            }
        }
    }
}

/// See [`super::turn::rows`].
///
/// # Safety
/// As there.
#[target_feature(enable = "neon")]
pub(super) unsafe fn rows(
    sums: &[f32],
    lane: usize,
    (to, step): (*mut f32, usize),
    before: Option<*const f32>,
) -> usize {
    assert!(lane + 2 * WIDTH <= LANES);
    let whole = sums.len() / LANES / WIDTH * WIDTH;
    for at in (0..whole).step_by(WIDTH) {
        for first in [0, WIDTH] {
            let mut block = [vdupq_n_f32(0.0); WIDTH];
            // SAFETY: four columns from `at` on are in `sums`; the rows are the caller's promise.
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
    whole
}

/// Rows as columns.
#[inline]
#[target_feature(enable = "neon")]
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
