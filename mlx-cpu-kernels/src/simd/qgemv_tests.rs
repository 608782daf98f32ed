//! Compares [`qgemv`] and dequantization with their definition in double precision. The tests use
//! every instruction set of this machine, and the emulated ones.

use super::*;
use crate::layout::float_codes::{ByteScales, Codes, FP4_BIAS, FP4_CODES, FP4_SCALE, e4m3};
use crate::layout::input_panel::{MAX_QUANT, MAX_ROWS, MOST_ROWS};
use crate::layout::packed::{
    GROUPS_PER_AFFINE_SUPER, GROUPS_PER_SUPER, GroupParams, INTERLEAVED_ROWS, SUPER_BIAS,
    ScaleFormat, TABLE_SUPER_WEIGHTS, symmetric_bias,
};
use crate::layout::table::Table;
use crate::simd::dequantize::DequantizeScratch;
use crate::testing::{noise, tested};

/// [`prepare_inputs`] by its definition.
fn plain(isa: Isa, x: &[f32], k: usize, packing: (u32, usize), to: InputPanelMut<'_>) {
    match isa {
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Dot => crate::simd::neon::qgemv_dotprod::tests::plain(x, k, packing, to),
        _ => portable::qgemv::prepare_inputs(x, k, packing, to),
    }
}

/// The maximum magnitude of an input as an integer.
fn largest(isa: Isa) -> f32 {
    match isa {
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Dot => crate::simd::neon::qgemv_dotprod::MAX_QUANT,
        _ => MAX_QUANT,
    }
}

/// Whether kernels multiply more than [`MAX_ROWS`] rows with codes that they unpack once.
fn has_large_panels(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Amx) {
        return true;
    }
    let _ = isa;
    false
}

/// The number of rows of the tested matrices.
const ROWS: usize = 3 * INTERLEAVED_ROWS;

#[test]
fn quantized_rows_equal_the_definition() {
    for (bits, group, groups, half) in [2u32, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| {
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
        let matrix = PackedMatrix {
            words: &words,
            scales: if half {
                GroupParams::F16(&scales)
            } else {
                GroupParams::F32(&wide_scales)
            },
            biases: if half {
                GroupParams::F16(&biases)
            } else {
                GroupParams::F32(&wide_biases)
            },
            groups,
            bits,
        };
        check(matrix, group, |g| (wide_scales[g], wide_biases[g]));
    }
}

/// Six bits in groups of 16. Scales are stored as bytes times float16, as in Q6_K.
#[test]
fn rows_with_super_scales_equal_the_definition() {
    const GROUP: usize = 16;
    for groups in [16, 48] {
        let k = GROUP * groups;
        let words: Vec<u32> = noise(ROWS * k * 6 / 32, 9)
            .iter()
            .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
            .collect();
        let codes: Vec<i8> = noise(ROWS * groups, 3)
            .iter()
            .map(|v| (v * 255.9) as i8)
            .collect();
        let supers: Vec<u16> = noise(ROWS * groups / GROUPS_PER_SUPER, 4)
            .iter()
            .map(|v| half::f16::from_f32(v * 0.02).to_bits())
            .collect();
        let params = |factor| GroupParams::Super {
            codes: &codes,
            supers: &supers,
            per: GROUPS_PER_SUPER,
            first: 0,
            factor,
            table: None,
        };
        let matrix = PackedMatrix {
            words: &words,
            scales: params(1.0),
            biases: params(SUPER_BIAS),
            groups,
            bits: 6,
        };
        let scale = |g: usize| {
            let (group, lane) = (g / INTERLEAVED_ROWS, g % INTERLEAVED_ROWS);
            let half = supers[group / GROUPS_PER_SUPER * INTERLEAVED_ROWS + lane];
            f32::from(codes[g]) * half::f16::from_bits(half).to_f32()
        };
        check(matrix, GROUP, |g| (scale(g), -32.0 * scale(g)));
        // The row blocks in the middle have different scales from the others.
        let x = noise(2 * k, 5);
        for isa in tested() {
            let products = |matrix: PackedMatrix<'_>| {
                let rows = matrix.row_blocks() * INTERLEAVED_ROWS;
                let mut out = vec![0.0; 2 * rows];
                with_panel(isa, &x, k, (6, GROUP), |x| {
                    qgemv(isa, matrix, x, &mut OutputBlock::contiguous(&mut out, 2));
                });
                out
            };
            let (all, some) = (products(matrix), products(matrix.block_range(1..3)));
            assert_eq!(some[..16], all[8..24], "{isa:?}");
            assert_eq!(some[16..], all[32..], "{isa:?}");
        }
    }
}

/// A float16 scale per 32 codes. A fixed code represents zero.
#[test]
fn symmetric_rows_equal_the_definition() {
    const GROUP: usize = 32;
    for (bits, zero) in [(2u32, 1.0), (4, 8.0), (5, 16.0), (8, 128.0)] {
        assert_eq!(symmetric_bias(bits), -zero);
        for groups in [1, 3, 18] {
            let words: Vec<u32> = noise(ROWS * groups * bits as usize, bits)
                .iter()
                .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
                .collect();
            let halves: Vec<u16> = noise(ROWS * groups, 3)
                .iter()
                .map(|v| half::f16::from_f32(v * 0.1).to_bits())
                .collect();
            let params = |factor| GroupParams::Symmetric {
                halves: &halves,
                factor,
            };
            let matrix = PackedMatrix {
                words: &words,
                scales: params(1.0),
                biases: params(symmetric_bias(bits)),
                groups,
                bits,
            };
            let scale = |g: usize| half::f16::from_bits(halves[g]).to_f32();
            check(matrix, GROUP, |g| (scale(g), -zero * scale(g)));
        }
    }
}

/// Tests codes of 2 bits in groups of 16, and of 4 and 5 bits in groups of 32. Each scale and bias
/// is a byte times a shared float16, as in Q2_K, Q4_K and Q5_K.
#[test]
fn rows_with_super_scales_and_biases_equal_the_definition() {
    for (bits, size, groups) in [
        (2u32, 16, 16),
        (2, 16, 48),
        (4, 32, 8),
        (4, 32, 24),
        (5, 32, 8),
        (5, 32, 24),
    ] {
        let k = size * groups;
        let words: Vec<u32> = noise(ROWS * k * bits as usize / 32, 9)
            .iter()
            .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
            .collect();
        let codes: Vec<i8> = noise(2 * ROWS * groups, 3)
            .iter()
            .map(|v| (v * 63.9 + 32.0) as i8)
            .collect();
        let supers: Vec<u16> = noise(2 * ROWS * groups / GROUPS_PER_AFFINE_SUPER, 4)
            .iter()
            .map(|v| half::f16::from_f32(v * 0.02).to_bits())
            .collect();
        let params = |is_bias| GroupParams::SuperAffine {
            codes: &codes,
            supers: &supers,
            first: 0,
            is_bias,
        };
        let matrix = PackedMatrix {
            words: &words,
            scales: params(false),
            biases: params(true),
            groups,
            bits,
        };
        // In a group, eight bytes of scales precede eight bytes of biases.
        let number = |g: usize, is_bias: usize| {
            let (group, lane) = (g / INTERLEAVED_ROWS, g % INTERLEAVED_ROWS);
            let at = |group: usize| (2 * group + is_bias) * INTERLEAVED_ROWS + lane;
            let half = half::f16::from_bits(supers[at(group / GROUPS_PER_AFFINE_SUPER)]);
            f32::from(codes[at(group)]) * half.to_f32()
        };
        check(matrix, size, |g| (number(g, 0), -number(g, 1)));
        // The row blocks in the middle have different scales from the others.
        let x = noise(2 * k, 5);
        for isa in tested() {
            let products = |matrix: PackedMatrix<'_>| {
                let rows = matrix.row_blocks() * INTERLEAVED_ROWS;
                let mut out = vec![0.0; 2 * rows];
                with_panel(isa, &x, k, (bits, size), |x| {
                    qgemv(isa, matrix, x, &mut OutputBlock::contiguous(&mut out, 2));
                });
                out
            };
            let (all, some) = (products(matrix), products(matrix.block_range(1..3)));
            assert_eq!(some[..16], all[8..24], "{isa:?}");
            assert_eq!(some[16..], all[32..], "{isa:?}");
        }
    }
}

/// 4- and 8-bit floats: MXFP4, NVFP4 with groups of half that size, and MXFP8.
#[test]
fn rows_of_small_floats_equal_the_definition() {
    for (bits, scales, group) in [
        (4, ByteScales::E8m0, 32),
        (4, ByteScales::E4m3, 16),
        (8, ByteScales::E8m0, 32),
    ] {
        for groups in [1, 2, 3, 18] {
            let k = group * groups;
            let words: Vec<u32> = noise(ROWS * k * bits as usize / 32, group as u32)
                .iter()
                .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
                .collect();
            // The scales are between a sixteenth and eight; with 8-bit codes they are smaller. E4M3
            // scales are signed.
            let middle = if bits == 8 { 119.0 } else { 127.0 };
            let codes: Vec<u8> = noise(ROWS * groups, 3)
                .iter()
                .map(|v| match scales {
                    ByteScales::E8m0 => (middle + 7.0 * v) as u8,
                    ByteScales::E4m3 => (56.0 + 48.0 * v) as u8 | u8::from(*v > 0.3) << 7,
                })
                .collect();
            let params = |factor| GroupParams::Bytes {
                codes: &codes,
                scales,
                factor,
            };
            let factors = match bits {
                4 => [FP4_SCALE, FP4_BIAS],
                _ => [1.0, 0.0],
            };
            let matrix = PackedMatrix {
                words: &words,
                scales: params(factors[0]),
                biases: params(factors[1]),
                groups,
                bits,
            };
            let scale = |g: usize| scales.decode(codes[g]);
            check(matrix, group, |g| {
                (scale(g) * factors[0], scale(g) * factors[1])
            });
        }
    }
}

/// Codes that index an integer table. Scales are float16 (IQ4_NL), or bytes times float16 with
/// groups of 32 and 16 (other IQ types and Q3_K).
#[test]
fn rows_of_table_codes_equal_the_definition() {
    for (table, group, is_super) in [
        (Table::Iq4, 32, false),
        (Table::Iq4, 32, true),
        (Table::Iq3Xxs, 32, true),
        (Table::Iq3S, 32, true),
        (Table::Iq2, 16, true),
        (Table::Iq1, 16, true),
        (Table::Q3k, 16, true),
    ] {
        let per = TABLE_SUPER_WEIGHTS / group;
        for groups in [per, 3 * per] {
            let k = group * groups;
            let words: Vec<u32> = noise(ROWS * k / 8, group as u32)
                .iter()
                .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
                .collect();
            let bytes: Vec<i8> = noise(ROWS * groups, 3)
                .iter()
                .map(|v| (v * 63.9) as i8)
                .collect();
            let small = |n: usize, factor: f32| -> Vec<u16> {
                let half = |v: &f32| half::f16::from_f32(v * factor).to_bits();
                noise(n, 4).iter().map(half).collect()
            };
            let (supers, halves) = (
                small(ROWS * groups / per, 0.001),
                small(ROWS * groups, 0.02),
            );
            let params = |factor| match is_super {
                true => GroupParams::Super {
                    codes: &bytes,
                    supers: &supers,
                    per,
                    first: 0,
                    factor,
                    table: Some(table),
                },
                false => GroupParams::Table {
                    halves: &halves,
                    factor,
                    table,
                },
            };
            let matrix = PackedMatrix {
                words: &words,
                scales: params(table.unit()),
                biases: params(0.0),
                groups,
                bits: 4,
            };
            check(matrix, group, |g| {
                let (at, lane) = (g / INTERLEAVED_ROWS, g % INTERLEAVED_ROWS);
                let scale = match is_super {
                    true => {
                        let half = supers[at / per * INTERLEAVED_ROWS + lane];
                        f32::from(bytes[g]) * half::f16::from_bits(half).to_f32()
                    }
                    false => half::f16::from_bits(halves[g]).to_f32(),
                };
                (scale * table.unit(), 0.0)
            });
        }
    }
}

/// Calls `f` with rows of `k` inputs, prepared for a packing.
fn with_panel(
    isa: Isa,
    x: &[f32],
    k: usize,
    (bits, group): (u32, usize),
    f: impl FnOnce(InputPanel<'_>),
) {
    let (floats, quants) = if quantizes_inputs(isa, bits) {
        (0, x.len())
    } else {
        (x.len(), 0)
    };
    let (mut values, mut quants) = (vec![0.0; floats], vec![7; quants]);
    let mut scales = vec![7.0; quants.len() / inputs_per_scale(isa)];
    let mut sums = vec![0.0; x.len() / group];
    let to = InputPanelMut {
        values: &mut values,
        quants: &mut quants,
        scales: &mut scales,
        sums: &mut sums,
    };
    prepare_inputs(isa, x, k, (bits, group), to);
    f(InputPanel {
        rows: x.len() / k,
        values: &values,
        quants: &quants,
        scales: &scales,
        sums: &sums,
    });
}

/// Checks dequantization and multiplication of a matrix with [`ROWS`] rows against the definition.
/// `params` returns the scale and bias of each group.
fn check(matrix: PackedMatrix<'_>, group: usize, params: impl Fn(usize) -> (f32, f32)) {
    let PackedMatrix {
        words,
        groups,
        bits,
        ..
    } = matrix;
    let k = group * groups;
    assert_eq!(
        (matrix.row_blocks(), matrix.group_size()),
        (ROWS / INTERLEAVED_ROWS, group)
    );
    let exactly = |row: usize, i: usize| {
        let (block, lane) = (row / INTERLEAVED_ROWS, row % INTERLEAVED_ROWS);
        let first = block * (k * bits as usize / 32);
        // The definition of a bit stream, bit by bit.
        let bit = |n: usize| {
            let word = words[(first + n / 32) * INTERLEAVED_ROWS + lane];
            word >> (n % 32) & 1
        };
        let q: u32 = (0..bits)
            .map(|b| bit(i * bits as usize + b as usize) << b)
            .sum();
        let q = match matrix.codes() {
            Codes::Integers => q as f32,
            Codes::E2m1 => f32::from(FP4_CODES[q as usize]),
            Codes::E4m3 => e4m3(q as u8),
            Codes::Table(table) => f32::from(table.integers()[q as usize]),
        };
        let g = (block * groups + i / group) * INTERLEAVED_ROWS + lane;
        let (scale, bias) = params(g);
        f64::from(scale) * f64::from(q) + f64::from(bias)
    };
    let all: Vec<f64> = (0..ROWS * k).map(|i| exactly(i / k, i % k)).collect();
    let at = |row: usize, i: usize| all[row * k + i];
    for isa in tested() {
        let mut columns = vec![0.0; ROWS * k];
        matrix.dequantize_transposed(isa, &mut columns);
        // Dequantizes the columns from a middle group on, in rows that begin within a row block.
        let (rows, from) = (3..ROWS, k / group / 2 * group);
        let mut some = vec![0.0; rows.len() * (k - from)];
        let buffer = &mut DequantizeScratch::default();
        matrix.dequantize_rows(isa, rows.clone(), from, buffer, &mut some);
        for (r, i) in (0..ROWS).flat_map(|r| (0..k).map(move |i| (r, i))) {
            let got = f64::from(columns[i * ROWS + r]);
            assert!(
                (at(r, i) - got).abs() < 1e-4,
                "{isa:?} {bits} {r} {i}: {got}"
            );
            if r >= rows.start && i >= from {
                // For 4-bit integers, the even elements of a chunk precede the odd ones.
                let place = match bits {
                    4 if matrix.codes() == Codes::Integers => i / 32 * 32 + i % 2 * 16 + i % 32 / 2,
                    _ => i,
                };
                let got = f64::from(some[(r - rows.start) * (k - from) + place - from]);
                assert!(
                    (at(r, i) - got).abs() < 1e-4,
                    "{isa:?} {bits} {r} {i}: {got}"
                );
            }
        }
    }
    // `dequantize_row` returns the elements in column order.
    let mut row = vec![0.0; k];
    for r in 0..ROWS {
        matrix.dequantize_row(r, &mut row);
        for (i, got) in row.iter().enumerate() {
            assert!((at(r, i) - f64::from(*got)).abs() < 1e-4, "{r} {i}");
        }
    }
    let bits = match matrix.codes() {
        Codes::Integers => bits,
        _ => ScaleFormat::E8m0.input_bits(bits),
    };
    for m in (1..=MAX_ROWS).chain([12, MOST_ROWS]) {
        let inputs = noise(m * k, 7);
        for isa in tested() {
            if m > MAX_ROWS && (!has_large_panels(isa) || !matrix.kernels().integers) {
                continue;
            }
            let shared = inputs_per_scale(isa);
            let mut out = vec![0.0; m * ROWS];
            with_panel(isa, &inputs, k, (bits, group), |x| {
                qgemv(isa, matrix, x, &mut OutputBlock::contiguous(&mut out, m));
            });
            for (x, got) in inputs.chunks(k).zip(out.chunks(ROWS)) {
                for (row, got) in got.iter().enumerate() {
                    let part = |(i, x): (usize, &f32)| at(row, i) * f64::from(*x);
                    let exact: f64 = x.iter().enumerate().map(part).sum();
                    let size: f64 = x.iter().enumerate().map(|one| part(one).abs()).sum();
                    // Rounding to integers changes each element by at most half an integer step.
                    let rounding: f64 = (0..k)
                        .filter(|_| quantizes_inputs(isa, bits))
                        .map(|i| {
                            let group_inputs = &x[i / shared * shared..][..shared];
                            let most = group_inputs.iter().fold(0.0f32, |a, b| a.max(b.abs()));
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

#[test]
fn whole_numbers_stand_where_the_definition_says() {
    for (bits, group, k, rows) in [
        (4, 32, 96, 3),
        (4, 64, 128, 8),
        (8, 32, 96, 2),
        (8, 128, 256, 1),
        (3, 32, 96, 3),
        (6, 64, 128, 8),
    ] {
        let x: Vec<f32> = noise(rows * k, bits).iter().map(|v| v * 9.0).collect();
        let prepared = |isa: Isa, f: &dyn Fn(InputPanelMut<'_>)| {
            let mut p = (
                vec![7i16; rows * k],
                vec![7.0f32; rows * k / inputs_per_scale(isa)],
                vec![7.0f32; rows * k / group],
            );
            f(InputPanelMut {
                values: &mut [],
                quants: &mut p.0,
                scales: &mut p.1,
                sums: &mut p.2,
            });
            p
        };
        for isa in tested()
            .into_iter()
            .filter(|isa| quantizes_inputs(*isa, bits))
        {
            let plain = prepared(isa, &|to| plain(isa, &x, k, (bits, group), to));
            let actual = prepared(isa, &|to| prepare_inputs(isa, &x, k, (bits, group), to));
            assert_eq!((&actual.0, &actual.1), (&plain.0, &plain.1), "{bits} bits");
            for (a, b) in actual.2.iter().zip(&plain.2) {
                assert!((a - b).abs() < 1e-4, "{a} {b}");
            }
        }
    }
}
