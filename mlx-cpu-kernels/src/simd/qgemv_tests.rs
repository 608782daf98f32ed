//! Products of rows against their definition, with every instruction set that is here; and what other tests of the
//! kernels share.

use super::*;
use crate::layout::input_panel::{LARGEST, MAX_ROWS};
use crate::layout::packed::{BAND, Factors};
use crate::simd::portable::qgemv::prepare_with;
use crate::simd::vmath::dense;
use crate::testing::noise;

/// [`prepare`] by the definition.
fn plain(isa: Isa, x: &[f32], k: usize, packing: (u32, usize), to: Prepared<'_>) {
    match isa {
        #[cfg(target_arch = "aarch64")]
        Isa::Dot => crate::simd::neon::qgemv_dotprod::tests::plain(x, k, packing, to),
        _ => prepare_with(x, k, packing, to),
    }
}

/// The largest whole number.
fn largest(isa: Isa) -> f32 {
    match isa {
        #[cfg(target_arch = "aarch64")]
        Isa::Dot => crate::simd::neon::qgemv_dotprod::LARGEST,
        _ => LARGEST,
    }
}

#[test]
fn quantized_rows_equal_the_definition() {
    const ROWS: usize = 3 * BAND;
    for (bits, group, groups, half) in [4u32, 8].into_iter().flat_map(|bits| {
        [32, 64, 128].into_iter().flat_map(move |group| {
            [1, 3, 18]
                .into_iter()
                .flat_map(move |n| [true, false].map(|half| (bits, group, n, half)))
        })
    }) {
        let k = group * groups;
        let words: Vec<u32> = noise(ROWS * k * bits as usize / 32, bits + group as u32)
            .iter()
            .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
            .collect();
        let near = neighbors(bits);
        let halves = |seed| -> Vec<u16> {
            let numbers = noise(ROWS * groups, seed);
            let half = |v: &f32| half::f16::from_f32(*v).to_bits();
            numbers.iter().map(half).collect()
        };
        let wide = |h: &[u16]| -> Vec<f32> {
            let single = |v: &u16| half::f16::from_bits(*v).to_f32();
            h.iter().map(single).collect()
        };
        let (scales, biases) = (halves(1), halves(2));
        let (wide_scales, wide_biases) = (wide(&scales), wide(&biases));
        let bands = Bands {
            words: &words,
            scales: if half {
                Factors::Half(&scales)
            } else {
                Factors::Single(&wide_scales)
            },
            biases: if half {
                Factors::Half(&biases)
            } else {
                Factors::Single(&wide_biases)
            },
            groups,
            bits,
        };
        assert_eq!((bands.count(), bands.per_word()), (ROWS / BAND, near));
        let at = |row: usize, i: usize| {
            let (band, lane) = (row / BAND, row % BAND);
            let word = words[(band * (k / near) + i / near) * BAND + lane];
            let q = word >> (i % near * bits as usize) & ((1 << bits) - 1);
            let g = (band * groups + i / group) * BAND + lane;
            f64::from(wide_scales[g]) * f64::from(q) + f64::from(wide_biases[g])
        };
        // As rows.
        let mut row = vec![0.0; k];
        for r in 0..ROWS {
            bands.row(r, &mut row);
            for (i, got) in row.iter().enumerate() {
                assert!((at(r, i) - f64::from(*got)).abs() < 1e-4, "{r} {i}");
            }
        }
        for m in 1..=MAX_ROWS {
            let all = noise(m * k, 7);
            for isa in Isa::all() {
                let (floats, wholes) = if in_whole(isa) {
                    (0, m * k)
                } else {
                    (m * k, 0)
                };
                let mut values = vec![0.0; floats];
                let mut whole = vec![7; wholes];
                let shared = sharing(isa, bits);
                let mut factors = vec![7.0; wholes / shared];
                let mut sums = vec![0.0; m * groups];
                let to = Prepared {
                    values: &mut values,
                    whole: &mut whole,
                    scales: &mut factors,
                    sums: &mut sums,
                };
                prepare(isa, &all, k, (bits, group), to);
                let x = Panel {
                    rows: m,
                    values: &values,
                    whole: &whole,
                    scales: &factors,
                    sums: &sums,
                };
                let mut out = vec![0.0; m * ROWS];
                block(isa, bands, x, &mut Columns::all(&mut out, m));
                for (x, got) in all.chunks(k).zip(out.chunks(ROWS)) {
                    for (row, got) in got.iter().enumerate() {
                        let part = |(i, x): (usize, &f32)| at(row, i) * f64::from(*x);
                        let exact: f64 = x.iter().enumerate().map(part).sum();
                        let size: f64 = x.iter().enumerate().map(|one| part(one).abs()).sum();
                        // Each element is off by half of a whole number's unit at most.
                        let rounding: f64 = (0..k)
                            .filter(|_| in_whole(isa))
                            .map(|i| {
                                let own = &x[i / shared * shared..][..shared];
                                let most = own.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                                let unit = f64::from(most / largest(isa));
                                (at(row, i) * unit / 2.0).abs()
                            })
                            .sum();
                        assert!(
                            (exact - f64::from(*got)).abs() <= 2e-6 * size.max(1.0) + rounding,
                            "{isa:?} {bits} bits, group {group}, {k} inputs: {got} {exact}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn whole_numbers_stand_where_the_definition_says() {
    for (bits, group, k, rows) in [
        (4, 32, 96, 3),
        (4, 64, 128, 8),
        (8, 32, 96, 2),
        (8, 128, 256, 1),
    ] {
        let x: Vec<f32> = noise(rows * k, bits).iter().map(|v| v * 9.0).collect();
        let prepared = |isa: Isa, f: &dyn Fn(Prepared<'_>)| {
            let mut p = (
                vec![7i16; rows * k],
                vec![7.0f32; rows * k / sharing(isa, bits)],
                vec![7.0f32; rows * k / group],
            );
            f(Prepared {
                values: &mut [],
                whole: &mut p.0,
                scales: &mut p.1,
                sums: &mut p.2,
            });
            p
        };
        for isa in Isa::all().into_iter().filter(|isa| in_whole(*isa)) {
            let plain = prepared(isa, &|to| plain(isa, &x, k, (bits, group), to));
            let own = prepared(isa, &|to| prepare(isa, &x, k, (bits, group), to));
            assert_eq!((&own.0, &own.1), (&plain.0, &plain.1), "{bits} bits");
            for (a, b) in own.2.iter().zip(&plain.2) {
                assert!((a - b).abs() < 1e-4, "{a} {b}");
            }
        }
    }
}

#[test]
fn dense_rows_equal_the_definition() {
    for k in [1, 7, 8, 31, 64, 577] {
        let w = noise(k, 3);
        for m in 1..=MAX_ROWS {
            let rows: Vec<Vec<f32>> = (0..m).map(|r| noise(k, r as u32 + 11)).collect();
            let x: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            for isa in Isa::all() {
                let mut out = vec![0.0; m];
                dense(isa, &w, &x, &mut out);
                for (x, got) in rows.iter().zip(&out) {
                    let exact: f64 = w.iter().zip(x).map(|(w, x)| f64::from(w * x)).sum();
                    assert!((exact - f64::from(*got)).abs() < 1e-4, "{isa:?} {k}");
                }
            }
        }
    }
}
