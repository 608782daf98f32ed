//! Compares products with a matrix of every format, on every instruction set, with their definition
//! in double precision. An instruction set without kernels for a format must use the portable ones.

use crate::gemm::dense::DenseType;
use crate::gemm::experts::tests::{Stack, double, near};
use crate::gemm::product::{MatrixFormat, MatrixPart, Product, Size};
use crate::isa::Isa;
use crate::layout::packed::{FLOAT_INPUTS, ScaleFormat};
use crate::layout::table::Table;
use crate::prefill_inputs::PrefillInputs;
use crate::simd::portable::vmath::Gate;
use crate::testing::{noise, with_each};
use crate::work::{Input, Work};

const TABLES: [Table; 6] = [
    Table::Iq4,
    Table::Iq3Xxs,
    Table::Iq3S,
    Table::Iq2,
    Table::Iq1,
    Table::Q3k,
];

/// The widths and group sizes that the format table lists for these scales. Formats with tables of
/// integers are tested with one of two sizes.
fn sizes(scales: ScaleFormat) -> Vec<(u32, usize)> {
    let all = (1..=8).flat_map(|bits| scales.groups(bits).iter().map(move |group| (bits, *group)));
    let wanted = match scales {
        ScaleFormat::Table(table) | ScaleFormat::TableSuper(table) => match table {
            Table::Iq4 | Table::Iq3Xxs | Table::Iq3S => Some(32),
            Table::Iq2 | Table::Iq1 | Table::Q3k => Some(16),
        },
        _ => None,
    };
    let all: Vec<_> = all
        .filter(|(_, group)| wanted.is_none_or(|wanted| wanted == *group))
        .collect();
    assert!(
        !all.is_empty(),
        "{scales:?} has no row in the table of formats"
    );
    all
}

/// All formats of matrices.
pub(crate) fn formats() -> Vec<MatrixFormat> {
    let dense = [DenseType::F32, DenseType::F16, DenseType::Bf16].map(MatrixFormat::Dense);
    let plain = [
        ScaleFormat::F32,
        ScaleFormat::F16,
        ScaleFormat::Symmetric,
        ScaleFormat::Super,
        ScaleFormat::SuperAffine,
        ScaleFormat::E8m0,
        ScaleFormat::E4m3,
    ];
    let tables = TABLES.map(ScaleFormat::Table);
    let super_tables = TABLES.map(ScaleFormat::TableSuper);
    let scales = plain.into_iter().chain(tables).chain(super_tables);
    let quantized = scales.flat_map(|scales| {
        let with = move |(bits, group)| MatrixFormat::Quantized {
            bits,
            group,
            scales,
        };
        sizes(scales).into_iter().map(with)
    });
    dense.into_iter().chain(quantized).collect()
}

#[test]
fn products_with_every_format_equal_the_definition() {
    // The matrix ends within a row block.
    const SIZE: Size = Size { n: 20, k: 256 };
    for kind in formats() {
        let made = Stack::new(kind, SIZE, 3);
        for rows in [1, 2, 5, 8, 33] {
            let x = noise(rows * SIZE.k, 5);
            let wanted: Vec<f64> = x
                .chunks_exact(SIZE.k)
                .flat_map(|x| made.exact(0, &double(x), false))
                .collect();
            let mut inputs = vec![Input::from_slice(&x)];
            inputs.extend(made.arrays(1));
            with_each(|isa| {
                for float_inputs in [false, true] {
                    let work = Product {
                        parts: vec![MatrixPart {
                            kind,
                            size: SIZE,
                            bias: false,
                            stored: None,
                        }],
                        rows,
                        k: SIZE.k,
                        n: SIZE.n,
                        eps: None,
                        gate: None,
                        activation: None,
                        residual: false,
                        float_inputs,
                        prefill_inputs: PrefillInputs::Float32,
                        isa,
                    };
                    let mut out = vec![f32::NAN; work.outputs()];
                    // SAFETY: these are the documented inputs of the work.
                    unsafe { work.run(&inputs, &mut out) };
                    near(&out, &wanted, &format!("{kind:?}, {rows} rows, {isa:?}"));
                }
            });
        }
    }
}

/// Whether products of this matrix give the same bits with any number of rows.
fn keeps_bits(isa: Isa, kind: MatrixFormat) -> bool {
    // Compares names, because the variants do not exist on other processors.
    let name = format!("{isa:?}");
    let is_exact = match kind {
        MatrixFormat::Quantized { bits, scales, .. } => scales.input_bits(bits) != FLOAT_INPUTS,
        MatrixFormat::Dense(_) => true,
    };
    is_exact && ["Avx2", "Avx512"].contains(&name.as_str())
}

/// A row has the same result, bit by bit, alone, among few rows and among many. Otherwise a reply
/// could depend on other requests in the same batch.
#[test]
fn a_row_has_the_same_result_alone_and_among_others() {
    // The matrix ends within a row block, and the rows end within a panel.
    const SIZE: Size = Size { n: 52, k: 768 };
    const ROWS: usize = 80;
    let mut x = noise(ROWS * SIZE.k, 5);
    // Zeros, tiny numbers, and a channel with large ones.
    x[3 * SIZE.k..][..32].fill(0.0);
    x[4 * SIZE.k..][..SIZE.k]
        .iter_mut()
        .for_each(|x| *x *= 1e-37);
    x.iter_mut()
        .skip(9)
        .step_by(SIZE.k)
        .for_each(|x| *x *= 900.0);
    let weight = noise(SIZE.k, 6);
    let bias = noise(SIZE.n, 7);
    for kind in formats() {
        let made = [Stack::new(kind, SIZE, 3), Stack::new(kind, SIZE, 4)];
        with_each(|isa| {
            if !keeps_bits(isa, kind) {
                return;
            }
            for (norm, gate) in [(false, None), (true, None), (true, Some(Gate::Silu))] {
                let run = |x: &[f32]| {
                    let parts = 1 + usize::from(gate.is_some());
                    let part = || MatrixPart {
                        kind,
                        size: SIZE,
                        bias: true,
                        stored: None,
                    };
                    let work = Product {
                        parts: (0..parts).map(|_| part()).collect(),
                        rows: x.len() / SIZE.k,
                        k: SIZE.k,
                        n: SIZE.n,
                        eps: norm.then_some(1e-5),
                        gate,
                        activation: None,
                        residual: false,
                        float_inputs: false,
                        prefill_inputs: PrefillInputs::Int16,
                        isa,
                    };
                    let mut inputs = vec![Input::from_slice(x)];
                    inputs.extend(norm.then(|| Input::from_slice(&weight)));
                    for made in &made[..parts] {
                        inputs.extend(made.arrays(1));
                        inputs.push(Input::from_slice(&bias));
                    }
                    let mut out = vec![f32::NAN; work.outputs()];
                    // SAFETY: these are the documented inputs of the work.
                    unsafe { work.run(&inputs, &mut out) };
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let all = run(&x);
                for rows in [1, 3, 8, 11, 28, 37] {
                    for (i, x) in x.chunks_exact(rows * SIZE.k).enumerate() {
                        let wanted = &all[i * rows * SIZE.n..][..rows * SIZE.n];
                        assert!(
                            run(x) == wanted,
                            "{kind:?}, {isa:?}, norm {norm}, {gate:?}: {rows} rows from {}",
                            i * rows
                        );
                    }
                }
            }
        });
    }
}

/// All results of a row with a NaN or an infinity must be NaN or infinite, and all other results
/// must be finite. Quantized inputs are integers, which cannot represent NaN.
#[test]
fn rows_that_are_no_numbers_stay_so() {
    const SIZE: Size = Size { n: 20, k: 512 };
    for kind in formats() {
        let made = Stack::new(kind, SIZE, 3);
        for (rows, bad) in [1, 2, 5, 8, 16, 33].into_iter().flat_map(|rows| {
            let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            bad.map(|bad| (rows, bad))
        }) {
            let mut x = noise(rows * SIZE.k, 5);
            let row = rows / 2;
            x[row * SIZE.k + 299] = bad;
            let mut inputs = vec![Input::from_slice(&x)];
            inputs.extend(made.arrays(1));
            with_each(|isa| {
                let mut work = Product::plain(isa, kind, SIZE, rows);
                work.prefill_inputs = PrefillInputs::Int16;
                let mut out = vec![0.0; work.outputs()];
                // SAFETY: these are the documented inputs of the work.
                unsafe { work.run(&inputs, &mut out) };
                for (i, out) in out.chunks_exact(SIZE.n).enumerate() {
                    let is_right = |v: &f32| v.is_finite() == (i != row);
                    assert!(
                        out.iter().all(is_right),
                        "{kind:?}, {isa:?}, {bad}, row {i} of {rows}: {out:?}"
                    );
                }
            });
        }
    }
}
