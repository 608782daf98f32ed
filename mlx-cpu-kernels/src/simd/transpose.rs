//! Transposes rows into panels of `LANES` rows, and tiles back into rows. Chooses the kernel by
//! instruction set.

use crate::isa::Isa;
use crate::layout::tile::{LANES, ScaledRow};
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2;
#[cfg(any(target_arch = "aarch64", test))]
use crate::simd::neon;

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
            // The elements that the vector kernel left over in these rows.
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
/// `step` apart. If `before` is given, its elements at the same places are added. Returns the
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
        // SAFETY: only `detect` makes these, on processors with avx2; the caller guarantees the
        // rest.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            avx2::transpose::store_rows(sums, lane, (to, step), before)
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
