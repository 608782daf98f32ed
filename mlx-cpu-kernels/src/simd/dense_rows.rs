//! Multiplication of input rows with rows of a dense matrix. The instruction set determines the
//! kernel.

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::layout::aligned::AlignedVec;
#[cfg(target_arch = "x86_64")]
use crate::layout::dense::DenseTile;
use crate::layout::dense::{DenseInputs, DenseView};
use crate::layout::input_panel::MAX_ROWS;
#[cfg(target_arch = "x86_64")]
use crate::layout::tile::LANES;
use crate::partition::OutputBlock;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};
use crate::simd::{portable, vmath};

/// The number of elements converted to float32 at once, for kernels that cannot read 16-bit
/// elements. They fit the L1 cache.
const AT_ONCE: usize = 1024;

/// Computes `out[i][row] = matrix[row] . x[i]`. [`pack_few`] prepares the inputs `x`.
pub(crate) fn multiply(
    isa: Isa,
    matrix: DenseView<'_>,
    x: DenseInputs<'_>,
    out: &mut OutputBlock<'_>,
) {
    let (rows, columns) = out.dims();
    // All reads and writes of the kernels are within these bounds.
    assert!(x.rows <= MAX_ROWS && rows == x.rows && matrix.len() == columns * x.k);
    assert!(x.values.len() == few_len(isa, x.rows, x.k));
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2, fma and f16c. The
        // lengths are asserted.
        Isa::Avx2 => unsafe { avx2::dense_rows::multiply(matrix, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors that also have avx512f and
        // avx512vl. The lengths are asserted.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::dense_rows::multiply(matrix, x, out) },
        _ => by_row(isa, matrix, x, out),
    }
}

/// The number of places (row slots) in the panel that [`multiply`] reads for `rows` inputs; `None`
/// if it reads unpacked rows. A panel is contiguous, so it uses all sets of the L1 cache. Unpacked
/// rows whose length is a multiple of 4 KiB would share a few sets.
pub(crate) fn places(isa: Isa, rows: usize) -> Option<usize> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::dense_rows::places(rows),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => avx512::dense_rows::places(rows),
        _ => {
            let _ = rows;
            None
        }
    }
}

/// The number of elements of a panel for `rows` rows of `k` elements in [`places`], or of the
/// unpacked rows.
pub(crate) fn few_len(isa: Isa, rows: usize, k: usize) -> usize {
    match places(isa, rows) {
        Some(places) => places * whole_vectors(isa, k),
        None => rows * k,
    }
}

/// `k`, rounded up to whole vectors of a panel.
fn whole_vectors(isa: Isa, k: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if let Some(tile) = packed_tile(isa) {
        return k.next_multiple_of(tile.lanes);
    }
    let _ = isa;
    k
}

/// Prepares at most [`MAX_ROWS`] rows `x` of `k` elements for [`multiply`]. If the kernel needs a
/// panel, the rows are packed into `panel`, whose length must be [`few_len`].
pub(crate) fn pack_few<'a>(
    isa: Isa,
    x: &'a [f32],
    k: usize,
    panel: &'a mut [f32],
) -> DenseInputs<'a> {
    let rows = x.len() / k.max(1);
    let values = match places(isa, rows) {
        #[cfg(target_arch = "x86_64")]
        Some(places) => {
            let mut each = [&[][..]; MAX_ROWS];
            each.iter_mut()
                .zip(x.chunks_exact(k))
                .for_each(|(to, row)| *to = row);
            pack_inputs(isa, &each[..rows], None, places, panel);
            panel
        }
        _ => {
            let _ = panel;
            x
        }
    };
    DenseInputs { rows, k, values }
}

/// The sizes of the packed operands of [`multiply_packed`]; `None` if there is no kernel for this
/// instruction set.
#[cfg(target_arch = "x86_64")]
pub(crate) fn packed_tile(isa: Isa) -> Option<DenseTile> {
    match isa {
        Isa::Avx2 => Some(avx2::dense_rows::TILE),
        Isa::Avx512 | Isa::Amx => Some(avx512::dense_rows::TILE),
        _ => None,
    }
}

/// The minimum number of input rows for which [`multiply_packed`] is faster than [`multiply`],
/// although it packs the matrix. With 2,048 columns, packing is faster from 16 rows on, and slower
/// with 12.
#[cfg(target_arch = "x86_64")]
pub(crate) const MIN_PACKED_ROWS: usize = 16;

/// Packs the rows `x` into a panel with `places` row slots. With a `norm`, which is a weight and a
/// factor for each row, each row is multiplied by the weight and by its factor.
///
/// # Panics
/// If there is no kernel for the instruction set, or the lengths do not match.
#[cfg(target_arch = "x86_64")]
pub(crate) fn pack_inputs(
    isa: Isa,
    x: &[&[f32]],
    norm: Option<(&[f32], &[f32])>,
    places: usize,
    panel: &mut [f32],
) {
    let k = x.first().map_or(0, |x| x.len());
    assert!(x.len() <= places);
    assert!(
        packed_tile(isa).is_some_and(|tile| panel.len() == places * k.next_multiple_of(tile.lanes))
    );
    assert!(x.iter().all(|x| x.len() == k));
    assert!(norm.is_none_or(|(weight, factors)| weight.len() == k && factors.len() >= x.len()));
    match isa {
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2, fma and f16c. The
        // lengths are asserted.
        Isa::Avx2 => unsafe { avx2::dense_rows::pack_inputs(x, norm, places, panel) },
        // SAFETY: only `detect` makes these, on processors that also have avx512f and
        // avx512vl. The lengths are asserted.
        Isa::Avx512 | Isa::Amx => unsafe {
            avx512::dense_rows::pack_inputs(x, norm, places, panel);
        },
        _ => {}
    }
}

/// Packs whole matrix rows of `k` elements, as float32.
///
/// # Panics
/// If there is no kernel for the instruction set, or the lengths do not match.
#[cfg(target_arch = "x86_64")]
pub(crate) fn pack_matrix(isa: Isa, matrix: DenseView<'_>, k: usize, packed: &mut [f32]) {
    let rows = matrix.len() / k;
    assert!(matrix.len() == rows * k);
    assert!(packed_tile(isa).is_some_and(|tile| packed.len() == tile.matrix_len(rows, k)));
    match isa {
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2, fma and f16c. The
        // lengths are asserted.
        Isa::Avx2 => unsafe { avx2::dense_rows::pack_matrix(matrix, k, packed) },
        // SAFETY: only `detect` makes these, on processors that also have avx512f and
        // avx512vl. The lengths are asserted.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::dense_rows::pack_matrix(matrix, k, packed) },
        _ => {}
    }
}

/// Computes `tile[row * LANES + i] = matrix[row] . x[i]` for the inputs of a panel and the `rows`
/// rows of a matrix with `k` columns, both packed. Each result equals that of [`multiply`], bit by
/// bit. `sums` is scratch memory. The kernel prefetches cache lines of `ahead` and removes them
/// from the range.
///
/// # Panics
/// If there is no kernel for the instruction set, or the lengths do not match.
#[cfg(target_arch = "x86_64")]
pub(crate) fn multiply_packed(
    isa: Isa,
    panel: &[f32],
    matrix: &[f32],
    (rows, k): (usize, usize),
    sums: &mut AlignedVec,
    tile: &mut [f32],
    ahead: &mut Range<*const u8>,
) {
    // All reads and writes of the kernels are within these bounds.
    assert!(packed_tile(isa).is_some_and(|sizes| {
        panel.len() == sizes.panel_len(k)
            && matrix.len() == sizes.matrix_len(rows, k)
            && (rows == 0 || tile.len() >= (rows - 1) * LANES + sizes.inputs)
    }));
    let (size, tile) = ((rows, k), tile.as_mut_ptr());
    match isa {
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2, fma and f16c. The
        // lengths are asserted.
        Isa::Avx2 => unsafe {
            avx2::dense_rows::multiply_packed(panel, matrix, size, sums, tile, ahead);
        },
        // SAFETY: only `detect` makes these, on processors that also have avx512f and
        // avx512vl. The lengths are asserted.
        Isa::Avx512 | Isa::Amx => unsafe {
            avx512::dense_rows::multiply_packed(panel, matrix, size, sums, tile, ahead);
        },
        _ => {
            let _ = (size, sums, tile, ahead);
        }
    }
}

/// Processes one matrix row after another.
fn by_row(isa: Isa, matrix: DenseView<'_>, x: DenseInputs<'_>, out: &mut OutputBlock<'_>) {
    let (k, (n, columns)) = (x.k, out.dims());
    let mut wide = [0.0; AT_ONCE];
    for column in 0..columns {
        let mut totals = [0.0; MAX_ROWS];
        for from in (0..k).step_by(AT_ONCE) {
            let wide = &mut wide[..AT_ONCE.min(k - from)];
            let weights = match matrix.slice(column * k + from..column * k + from + wide.len()) {
                DenseView::F32(all) => all,
                DenseView::F16(all) => {
                    vmath::f16_to_f32(isa, all, wide);
                    wide
                }
                DenseView::Bf16(all) => {
                    portable::vmath::bf16_to_f32(all, wide);
                    wide
                }
            };
            let mut parts = [&[][..]; MAX_ROWS];
            for (part, x) in parts.iter_mut().zip(x.values.chunks_exact(k)) {
                *part = &x[from..from + weights.len()];
            }
            let mut sums = [0.0; MAX_ROWS];
            vmath::dot_rows(isa, weights, &parts[..n], &mut sums[..n]);
            totals
                .iter_mut()
                .zip(sums)
                .for_each(|(all, sum)| *all += sum);
        }
        for (i, total) in totals[..n].iter().enumerate() {
            out.row_mut(i)[column] = *total;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    #[test]
    fn rows_of_each_type_equal_a_float64_product() {
        with_each(|isa| {
            for k in [1, 7, 16, 31, 64, 2050] {
                let few = [(1, 1), (3, 8), (4, 1), (5, 2), (9, 3), (13, 4), (8, 5)];
                // More columns than those whose sums are kept between blocks of inputs.
                let many = [(101, 6), (49, 7), (98, 8)];
                for (columns, rows) in few.into_iter().chain(many) {
                    let w = noise(columns * k, 3);
                    let x = noise(rows * k, 4);
                    let half: Vec<u16> =
                        (w.iter().map(|v| half::f16::from_f32(*v).to_bits())).collect();
                    let brain: Vec<u16> =
                        (w.iter().map(|v| half::bf16::from_f32(*v).to_bits())).collect();
                    let of = |view: DenseView<'_>| {
                        let mut out = vec![f32::NAN; rows * columns];
                        let mut panel = vec![f32::NAN; few_len(isa, rows, k)];
                        let x = pack_few(isa, &x, k, &mut panel);
                        multiply(isa, view, x, &mut OutputBlock::contiguous(&mut out, rows));
                        out
                    };
                    let halves: Vec<f32> =
                        (half.iter().map(|v| half::f16::from_bits(*v).to_f32())).collect();
                    let brains: Vec<f32> =
                        (brain.iter().map(|v| half::bf16::from_bits(*v).to_f32())).collect();
                    // Float16 and bfloat16 convert exactly to float32, so the results are equal.
                    assert_eq!(of(DenseView::F16(&half)), of(DenseView::F32(&halves)));
                    assert_eq!(of(DenseView::Bf16(&brain)), of(DenseView::F32(&brains)));
                    let actual = of(DenseView::F32(&w));
                    for (i, x) in x.chunks_exact(k).enumerate() {
                        for (c, w) in w.chunks_exact(k).enumerate() {
                            let wanted: f64 =
                                (w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x))).sum();
                            let got = f64::from(actual[i * columns + c]);
                            assert!(
                                (got - wanted).abs() < 1e-5 * (k as f64).sqrt(),
                                "{k} {i} {c}"
                            );
                        }
                        // A row must have the same result alone as among other rows.
                        let mut alone = vec![f32::NAN; columns];
                        let mut to = OutputBlock::contiguous(&mut alone, 1);
                        let x = pack_few(isa, x, k, &mut []);
                        multiply(isa, DenseView::F32(&w), x, &mut to);
                        let together = &actual[i * columns..(i + 1) * columns];
                        #[cfg(target_arch = "x86_64")]
                        if packed_tile(isa).is_some() {
                            assert_eq!(alone, together);
                        }
                        let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
                        assert!(alone.iter().zip(together).all(near));
                    }
                }
            }
        });
    }
}
