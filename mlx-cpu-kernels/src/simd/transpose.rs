//! Transposes rows into panels of `LANES` rows, and tiles back into rows. The instruction set
//! determines the kernel.

use crate::isa::Isa;
use crate::layout::tile::{LANES, ScaledRow};
#[cfg(any(target_arch = "aarch64", test))]
use crate::simd::neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// Packs at most `LANES` adjacent rows, `[k, LANES]`. Each element is multiplied by its row's
/// factor and, if given, its weight. Missing rows are zero.
pub(crate) fn pack_rows(
    isa: Isa,
    rows: &[ScaledRow<'_>],
    weight: Option<&[f32]>,
    panel: &mut [f32],
) {
    if rows.len() < LANES {
        panel.fill(0.0);
    }
    let done = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => {
            let vectorized = panel.len() / LANES / 8 * 8;
            let (eights, _) = rows.as_chunks::<8>();
            for (group, rows) in eights.iter().enumerate() {
                // SAFETY: only `detect` makes these, on processors with avx2.
                unsafe {
                    avx2::transpose::pack_rows(rows, weight, vectorized, (8 * group, &mut *panel));
                };
            }
            // Packs the remaining elements of these rows, which do not fill a vector.
            let done = 8 * eights.len();
            scatter(&rows[..done], weight, (vectorized, 0), panel);
            done
        }
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon | Isa::Dot => {
            let vectorized = panel.len() / LANES / 4 * 4;
            let (fours, _) = rows.as_chunks::<4>();
            for (group, rows) in fours.iter().enumerate() {
                // SAFETY: the processor has neon, or neon is emulated; see `Isa::Neon`.
                unsafe {
                    neon::f32::pack_rows(rows, weight, vectorized, (4 * group, &mut *panel));
                }
            }
            let done = 4 * fours.len();
            scatter(&rows[..done], weight, (vectorized, 0), panel);
            done
        }
        Isa::Portable => 0,
    };
    scatter(&rows[done..], weight, (0, done), panel);
}

/// Writes the elements from `from` on of some rows. The first row is written to `lane`.
fn scatter(
    rows: &[ScaledRow<'_>],
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

/// Stores lanes `lane..lane + 8` of sums `[columns, LANES]` as rows, which begin at `to` and are
/// `step` apart. If `before` is given, its elements at the same offsets are added. Returns the
/// number of finished columns.
///
/// # Safety
/// Each of the eight rows must have `columns` elements, which no other thread uses. If `before` is
/// given, its rows must have as many elements.
pub(crate) unsafe fn store_rows(
    isa: Isa,
    sums: &[f32],
    lane: usize,
    (to, step): (*mut f32, usize),
    before: Option<*const f32>,
) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes it, on processors with avx2 and fma; the caller guarantees
        // the rest.
        Isa::Avx2 => unsafe { avx2::transpose::store_rows(sums, lane, (to, step), before) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx2, fma and avx512f; the caller
        // guarantees the rest.
        Isa::Avx512 | Isa::Amx => unsafe {
            avx512::transpose::store_rows(sums, lane, (to, step), before)
        },
        #[cfg(any(target_arch = "aarch64", test))]
        // SAFETY: the processor has neon, or neon is emulated; see `Isa::Neon`. The caller
        // guarantees the rest.
        Isa::Neon | Isa::Dot => unsafe { neon::f32::store_rows(sums, lane, (to, step), before) },
        Isa::Portable => {
            let _ = (sums, lane, to, step, before);
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::with_each;

    #[test]
    fn stored_rows_are_the_lanes_of_the_tile() {
        for columns in [0, 4, 8, 16, 24, 31, 40, 96] {
            let sums: Vec<f32> = (0..columns * LANES).map(|i| i as f32).collect();
            let step = columns + 3;
            let before: Vec<f32> = (0..8 * step).map(|i| 0.5 * i as f32).collect();
            with_each(|isa| {
                for lane in [0, 8] {
                    for before in [None, Some(&before)] {
                        let mut rows = vec![-1.0; 8 * step];
                        let from = before.map(Vec::as_ptr);
                        // SAFETY: both have eight rows of `step` elements, and no other thread uses
                        // them.
                        let done = unsafe {
                            store_rows(isa, &sums, lane, (rows.as_mut_ptr(), step), from)
                        };
                        assert!(done <= columns, "{isa:?} {columns}");
                        for (i, value) in rows.into_iter().enumerate() {
                            let (row, column) = (i / step, i % step);
                            let sum = |column| sums[column * LANES + lane + row];
                            let old = before.map_or(0.0, |before| before[i]);
                            let wanted = if column < done {
                                sum(column) + old
                            } else {
                                -1.0
                            };
                            assert_eq!(value, wanted, "{isa:?} {columns} {row} {column}");
                        }
                    }
                }
            });
        }
    }
}
