//! Tests multiplication in 8-bit integers: exact sums of integers, every format against its
//! definition in double precision, and rows whose results do not depend on other rows.

use crate::gemm::experts::tests::Stack;
use crate::gemm::format_tests::formats;
use crate::gemm::packed_gemm::GemmTask;
use crate::gemm::product::{MatrixData, MatrixFormat, MatrixPart, Product, Size};
use crate::isa::Isa;
use crate::layout::byte_panel::UNIT;
use crate::layout::float_codes::Codes;
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix, ScaleFormat};
use crate::partition::SharedOutput;
use crate::prefill_inputs::PrefillInputs;
use crate::simd::byte_tile::Dot;
use crate::simd::portable::refine_bytes::LARGE;
use crate::simd::portable::vmath::Gate;
use crate::testing::{noise, with_each};
use crate::work::{Input, Work};

/// Every instruction that this processor supports, including slower ones that it would not choose.
fn dots() -> Vec<Dot> {
    let mut all: Vec<_> = Isa::all().into_iter().filter_map(Dot::for_isa).collect();
    if Isa::all().contains(&Isa::Avx2) {
        all.push(Dot::Maddubs);
    }
    all.dedup();
    all
}

fn product(kind: MatrixFormat, size: Size, rows: usize, isa: Isa) -> Product {
    Product {
        prefill_inputs: PrefillInputs::Int8,
        ..Product::plain(isa, kind, size, rows)
    }
}

/// Runs a product with one instruction.
fn run(dot: Dot, product: &Product, x: &[f32], matrix: PackedMatrix<'_>) -> Vec<f32> {
    let data = [(MatrixData::Quantized { matrix, form: 0 }, None)];
    let task = GemmTask {
        product,
        x,
        norm: None,
        data: &data,
        residual: None,
    };
    assert!(task.byte_dot().is_some());
    let mut out = vec![f32::NAN; product.outputs()];
    let refine = product.prefill_inputs == PrefillInputs::Mixed;
    task.run_bytes((dot, refine), &SharedOutput::new(&mut out));
    out
}

/// Input integers with scale 1. Each unit contains 127 or -127, which makes the scale 1.
fn integers(rows: usize, k: usize, seed: u32) -> Vec<f32> {
    let mut x: Vec<f32> = noise(rows * k, seed)
        .iter()
        .map(|v| (v * 254.0).round())
        .collect();
    for (i, unit) in x.chunks_mut(UNIT).enumerate() {
        unit[i % UNIT] = [127.0, -127.0][i % 2];
    }
    x
}

#[test]
fn integer_products_equal_exact_sums() {
    for (bits, group) in [2, 3, 4, 5, 6, 8]
        .into_iter()
        .flat_map(|bits| [16, 32, 64, 128].map(|group| (bits, group)))
        // A group must consist of whole words.
        .filter(|(bits, group)| *group > 16 || bits % 2 == 0)
    {
        // Codes are all at the maximum, or arbitrary.
        for full in [true, false] {
            let (rows, n, k) = (35, 29usize, 256);
            let wide = n.next_multiple_of(INTERLEAVED_ROWS);
            let mut words: Vec<u32> = noise(wide * k / 32 * bits as usize, bits)
                .iter()
                .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
                .collect();
            if full {
                words.fill(u32::MAX);
            }
            let (ones, zeros) = (vec![1.0f32; wide * k / group], vec![0.0; wide * k / group]);
            // SAFETY: the words exist while the inputs are used.
            let first = unsafe { Input::from_raw(words.as_ptr().cast(), words.len()) };
            let inputs = [first, Input::from_slice(&ones), Input::from_slice(&zeros)];
            let format = (bits, k / group, ScaleFormat::F32);
            // SAFETY: the inputs are words and float32 scales and biases.
            let matrix = unsafe { PackedMatrix::from_inputs(&inputs, format) };
            let mut x = integers(rows, k, 3);
            if full {
                x.fill(127.0);
                x[..k].fill(-127.0);
            }
            let kind = MatrixFormat::Quantized {
                bits,
                group,
                scales: ScaleFormat::F32,
            };
            let mut w = vec![0.0; k];
            for dot in dots() {
                let product = product(kind, Size { n, k }, rows, Isa::detect());
                let actual = run(dot, &product, &x, matrix);
                for i in 0..n {
                    matrix.dequantize_row(i, &mut w);
                    for (row, x) in x.chunks_exact(k).enumerate() {
                        let wanted: i64 = w.iter().zip(x).map(|(w, x)| *w as i64 * *x as i64).sum();
                        let actual = actual[row * n + i];
                        assert_eq!(
                            actual, wanted as f32,
                            "{dot:?} {bits} {group} {row} {i}: sums of integers are exact"
                        );
                    }
                }
            }
        }
    }
}

/// The exact product, and a bound for its rounding errors: seven standard deviations.
fn definition(w: &[f32], x: &[f32], prefill_inputs: PrefillInputs) -> (f64, f64) {
    let most = |x: &[f32]| x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let squares = x.chunks(UNIT).map(|x| f64::from(most(x)).powi(2));
    let usual = (squares.sum::<f64>() / x.len().div_ceil(UNIT) as f64).sqrt();
    let (mut sum, mut variance, mut size) = (0.0f64, 0.0f64, 0.0f64);
    for (w, x) in w.chunks(UNIT).zip(x.chunks(UNIT)) {
        let most = f64::from(most(x));
        let is_refined =
            prefill_inputs == PrefillInputs::Mixed && most > 1.001 * f64::from(LARGE) * usual;
        let step = most / if is_refined { 127.0 * 254.0 } else { 127.0 };
        for (w, x) in w.iter().zip(x) {
            let (w, x) = (f64::from(*w), f64::from(*x));
            sum += w * x;
            size += (w * x).abs();
            variance += (w * step).powi(2) / 12.0;
        }
    }
    (sum, 7.0 * variance.sqrt() + 2e-5 * size)
}

#[test]
fn every_format_and_number_of_rows_is_near_the_definition() {
    const SIZE: Size = Size { n: 20, k: 256 };
    for (kind, prefill_inputs) in formats().into_iter().flat_map(|kind| {
        [PrefillInputs::Int8, PrefillInputs::Mixed].map(|prefill_inputs| (kind, prefill_inputs))
    }) {
        let made = Stack::new(kind, SIZE, 3);
        let mut all = noise(70 * SIZE.k, 5);
        // In every second row, one channel is larger than the others.
        all.iter_mut()
            .skip(5)
            .step_by(2 * SIZE.k)
            .for_each(|v| *v *= 50.0);
        let mut wanted = Vec::new();
        for x in all.chunks_exact(SIZE.k) {
            wanted.extend((0..SIZE.n).map(|i| definition(made.row(i), x, prefill_inputs)));
        }
        for rows in 1..=70 {
            let x = &all[..rows * SIZE.k];
            let mut inputs = vec![Input::from_slice(x)];
            inputs.extend(made.arrays(1));
            with_each(|isa| {
                // Other instruction sets compute in floats; `format_tests.rs` covers them.
                if !isa.has_avx2() {
                    return;
                }
                let mut work = product(kind, SIZE, rows, isa);
                work.prefill_inputs = prefill_inputs;
                let mut out = vec![f32::NAN; work.outputs()];
                // SAFETY: the inputs are as the operation documents.
                unsafe { work.run(&inputs, &mut out) };
                for (i, (actual, (wanted, allowed))) in out.iter().zip(&wanted).enumerate() {
                    let off = (f64::from(*actual) - wanted).abs();
                    assert!(
                        off <= *allowed,
                        "{kind:?} {prefill_inputs:?} {rows} {isa:?} {i}: {actual} {wanted} {allowed}"
                    );
                }
            });
        }
    }
}

#[test]
fn a_row_has_the_same_bits_among_any_others() {
    const SIZE: Size = Size { n: 53, k: 1024 };
    for kind in formats() {
        let MatrixFormat::Quantized {
            bits,
            group,
            scales,
        } = kind
        else {
            continue;
        };
        let made = Stack::new(kind, SIZE, 9);
        let inputs = made.arrays(1);
        // SAFETY: the inputs are the arrays of a matrix in this format.
        let matrix = unsafe { PackedMatrix::from_inputs(&inputs, (bits, SIZE.k / group, scales)) };
        if matrix.codes() == Codes::E4m3 {
            continue;
        }
        let mut x = noise(600 * SIZE.k, 7);
        // In every fifth row, the large inputs are in other columns.
        for (row, x) in x.chunks_exact_mut(SIZE.k).enumerate().step_by(5) {
            x[row % SIZE.k] *= 40.0;
            x[row * 7 % SIZE.k] *= 90.0;
        }
        for (dot, prefill_inputs) in dots().into_iter().flat_map(|dot| {
            [PrefillInputs::Int8, PrefillInputs::Mixed].map(|prefill_inputs| (dot, prefill_inputs))
        }) {
            let of = |rows: usize, skip: usize| {
                let mut product = product(kind, SIZE, rows, Isa::detect());
                product.prefill_inputs = prefill_inputs;
                run(dot, &product, &x[skip * SIZE.k..][..rows * SIZE.k], matrix)
            };
            // These are more rows than a block has. Threads divide the work by columns.
            let all = of(600, 0);
            for (rows, skip) in [(16, 0), (17, 500), (39, 561), (70, 1)] {
                let actual = of(rows, skip);
                let same = actual
                    .iter()
                    .zip(&all[skip * SIZE.n..])
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{kind:?} {dot:?} {prefill_inputs:?} {rows} {skip}");
            }
        }
    }
}

#[test]
fn a_gate_meets_both_matrices_and_bad_rows_stay_bad() {
    const SIZE: Size = Size { n: 24, k: 256 };
    let kind = MatrixFormat::Quantized {
        bits: 4,
        group: 32,
        scales: ScaleFormat::F32,
    };
    let made = Stack::new(kind, SIZE, 3);
    let inputs = made.arrays(1);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = noise(17 * SIZE.k, 3);
        x[2 * SIZE.k + 7] = bad;
        with_each(|isa| {
            let mut work = product(kind, SIZE, 17, isa);
            let part = || MatrixPart {
                kind,
                size: SIZE,
                bias: false,
                stored: None,
            };
            work.parts = vec![part(), part()];
            work.gate = Some(Gate::Silu);
            work.prefill_inputs = PrefillInputs::Mixed;
            let all: Vec<Input> = [Input::from_slice(&x)]
                .into_iter()
                .chain(inputs.iter().copied())
                .chain(inputs.iter().copied())
                .collect();
            let mut out = vec![0.0; work.outputs()];
            // SAFETY: the inputs are as the operation documents.
            unsafe { work.run(&all, &mut out) };
            for (row, out) in out.chunks_exact(SIZE.n).enumerate() {
                assert_eq!(row != 2, out.iter().all(|v| v.is_finite()), "{bad} {isa:?}");
                let x = &x[row * SIZE.k..][..SIZE.k];
                for (i, out) in out.iter().enumerate().filter(|_| row != 2) {
                    let y: f64 = (made.row(i).iter().zip(x))
                        .map(|(w, x)| f64::from(*w) * f64::from(*x))
                        .sum();
                    let wanted = y / (1.0 + (-y).exp()) * y;
                    let off = (f64::from(*out) - wanted).abs();
                    assert!(
                        off < 0.02 * (1.0 + y * y),
                        "{isa:?} {row} {i}: {out} {wanted}"
                    );
                }
            }
        });
    }
}
