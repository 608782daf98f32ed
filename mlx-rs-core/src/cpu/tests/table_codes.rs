//! Compares matrices whose codes are mapped to integers by a table (GGUF's IQ types and Q3_K) with
//! their definition.

use mlx_cpu_kernels::Table;

use super::*;
use crate::error::ErrorKind;

const N: usize = 21;
const K: usize = 512;

/// The integers of some tables by the definition of the formats, with the tables' units.
const TABLES: [(Table, [i8; 16], f32); 3] = [
    (
        Table::Iq4,
        [
            -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
        ],
        1.0,
    ),
    (
        Table::Iq2,
        [8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0],
        0.125,
    ),
    (
        Table::Q3k,
        [-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0],
        1.0,
    ),
];

fn interleaved<T: crate::Element>(rows: &[T], width: usize) -> Array {
    let rows = Array::from_slice(rows, &[(rows.len() / width) as i32, width as i32]).unwrap();
    QuantizedMatrix::interleaved(&rows).unwrap()
}

/// A matrix of [`N`] rows and [`K`] columns, and its elements.
fn matrix(table: usize, group: usize, is_super: bool) -> (QuantizedMatrix, Vec<f32>) {
    let (table, integers, unit) = TABLES[table];
    let words: Vec<u32> = noise(N * K / 8, 1)
        .into_iter()
        .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
        .collect();
    let bytes: Vec<i8> = noise(N * K / group, 2)
        .iter()
        .map(|v| (v * 63.9) as i8)
        .collect();
    let half = |v: &f32| half::f16::from_f32(v * 0.01);
    let supers: Vec<half::f16> = noise(N * K / 256, 3).iter().map(half).collect();
    let halves: Vec<half::f16> = noise(N * K / group, 4).iter().map(half).collect();
    let elements = (0..N * K).map(|i| {
        let scale = match is_super {
            true => supers[i / 256].to_f32() * f32::from(bytes[i / group]),
            false => halves[i / group].to_f32(),
        };
        let code = words[i / 8] >> (i % 8 * 4) & 15;
        scale * unit * f32::from(integers[code as usize])
    });
    let elements = elements.collect();
    let codes = interleaved(&words, K / 8);
    let parts = match is_super {
        true => vec![
            codes,
            interleaved(&bytes, K / group),
            interleaved(&supers, K / 256),
        ],
        false => vec![codes, interleaved(&halves, K / group)],
    };
    let made = QuantizedMatrix::from_table_codes(parts, N as i32, (table, group as i32)).unwrap();
    (made.expect("kernels are on"), elements)
}

#[test]
fn products_and_rows_equal_the_definition() {
    on_cpu(|| {
        for (table, group, is_super) in
            [(0, 32, false), (0, 32, true), (1, 16, true), (2, 16, true)]
        {
            let (matrix, elements) = matrix(table, group, is_super);
            assert!(!matrix.has_mlx_form() && matrix.to_quantized().is_err());
            with_each(|isa| {
                for rows in [1, 2, 8, 15, 16, 40] {
                    let x = noise(rows * K, 5);
                    let wanted: Vec<f64> = x
                        .chunks(K)
                        .flat_map(|x| {
                            elements.chunks(K).map(move |w| {
                                let pairs = x.iter().zip(w);
                                pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
                            })
                        })
                        .collect();
                    let x = array(&x, &[rows as i32, K as i32]);
                    let got = host(&matrix.product(&x).unwrap());
                    // Inputs of few rows are rounded to 16 bits. The kernels' own tests have exact
                    // bounds.
                    let size = wanted.iter().fold(1.0f64, |most, y| most.max(y.abs()));
                    close(
                        &got,
                        &wanted,
                        1e-4 * size,
                        &format!("{isa:?} {table} {rows}"),
                    );
                }
            });
            let ids = Array::from_slice(&[20i32, 0, 9], &[3]).unwrap();
            let rows = host(&matrix.take_rows(&ids).unwrap());
            for (got, id) in rows.chunks(K).zip([20, 0, 9]) {
                assert_eq!(got, &elements[id * K..][..K], "row {id}");
            }
            let part = matrix.rows(8, 21).unwrap().expect("whole row blocks");
            let x = array(&noise(K, 6), &[1, K as i32]);
            let all = host(&matrix.product(&x).unwrap());
            assert_eq!(host(&part.product(&x).unwrap()), all[8..]);
            let joined = |parts: &[&QuantizedMatrix]| QuantizedMatrix::joined(parts).unwrap();
            let eight = matrix.rows(0, 8).unwrap().unwrap();
            let both = joined(&[&eight, &eight]).expect("one format");
            let both = host(&both.product(&x).unwrap());
            assert_eq!((&both[..8], &both[8..]), (&all[..8], &all[..8]));
        }
        let eight = |table, group, is_super| {
            let full_matrix = matrix(table, group, is_super).0;
            full_matrix.rows(0, 8).unwrap().unwrap()
        };
        // The two matrices have equal widths and group sizes, but different tables.
        let (one, other) = (eight(1, 16, true), eight(2, 16, true));
        assert!(QuantizedMatrix::joined(&[&one, &other]).unwrap().is_none());
    });
}

#[test]
fn parts_that_do_not_fit_are_errors() {
    let part = |width: i32, dtype: Dtype| {
        let rows = crate::zeros(&[9, width], dtype).unwrap();
        QuantizedMatrix::interleaved(&rows).unwrap()
    };
    let fine = || {
        vec![
            part(32, Dtype::Uint32),
            part(16, Dtype::Int8),
            part(1, Dtype::Float16),
        ]
    };
    let made = |parts: Vec<Array>, n, group| {
        QuantizedMatrix::from_table_codes(parts, n, (Table::Iq2, group))
    };
    assert!(made(fine(), 9, 16).is_ok());
    for (i, wrong) in [
        (0, part(31, Dtype::Uint32)),
        (0, part(32, Dtype::Int32)),
        (1, part(15, Dtype::Int8)),
        (1, part(16, Dtype::Uint8)),
        (2, part(2, Dtype::Float16)),
        (2, part(1, Dtype::Float32)),
    ] {
        let mut parts = fine();
        parts[i] = wrong;
        assert_eq!(made(parts, 9, 16).unwrap_err().kind(), ErrorKind::Shape);
    }
    for (n, group) in [(17, 16), (9, 32), (9, 0), (9, -16), (0, 16)] {
        let e = made(fine(), n, group).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape, "{n} {group}");
    }
    let bytes_alone = fine().into_iter().take(2).collect();
    assert_eq!(
        made(bytes_alone, 9, 16).unwrap_err().kind(),
        ErrorKind::Shape
    );
    assert_eq!(
        made(Vec::new(), 9, 16).unwrap_err().kind(),
        ErrorKind::Shape
    );
}
