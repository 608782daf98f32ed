//! Compares matrices with scales of scales with their definition: 6 bits (GGUF's Q6_K), and 4 and 5
//! bits with biases (Q4_K and Q5_K). Also tests matrices with scales and no biases (Q4_0, Q8_0).

use super::*;
use crate::error::ErrorKind;
use crate::transforms::vjp;

const N: usize = 21;
const K: usize = 512;

/// A matrix of [`N`] rows and [`K`] columns, and its elements.
fn matrix() -> (QuantizedMatrix, Vec<f32>) {
    let (rows, groups) = (N as i32, K / 16);
    let random = |n: usize, seed| noise(n, seed).into_iter().map(f32::to_bits);
    let codes: Vec<u32> = random(N * K, 1)
        .map(|b| b.wrapping_mul(2_654_435_761) >> 26)
        .collect();
    let bytes: Vec<i8> = noise(N * groups, 2)
        .iter()
        .map(|v| (v * 255.9) as i8)
        .collect();
    let supers: Vec<half::f16> = noise(N * K / 256, 3)
        .iter()
        .map(|v| half::f16::from_f32(v * 0.01))
        .collect();
    let mut words = vec![0u32; N * K / 16 * 3];
    for (i, code) in codes.iter().enumerate() {
        for bit in 0..6 {
            let at = 6 * i + bit;
            words[at / 32] |= (code >> bit & 1) << (at % 32);
        }
    }
    let elements = (0..N * K).map(|i| {
        let scale = supers[i / 256].to_f32() * f32::from(bytes[i / 16]);
        scale * (codes[i] as f32 - 32.0)
    });
    let interleaved = |a: Array| QuantizedMatrix::interleaved(&a).unwrap();
    let parts = [
        interleaved(Array::from_slice(&words, &[rows, (K / 16 * 3) as i32]).unwrap()),
        interleaved(Array::from_slice(&bytes, &[rows, groups as i32]).unwrap()),
        interleaved(Array::from_slice(&supers, &[rows, (K / 256) as i32]).unwrap()),
    ];
    let matrix = QuantizedMatrix::from_super_scaled(parts, rows).unwrap();
    (matrix.expect("kernels are on"), elements.collect())
}

#[test]
fn products_and_rows_equal_the_definition() {
    on_cpu(|| {
        let (matrix, elements) = matrix();
        with_each(|isa| {
            for rows in [1, 2, 7, 8, 15, 16, 40] {
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
                // Elements are up to 20, and inputs of few rows are rounded to 16 bits. The
                // kernels' own tests have exact bounds.
                close(&got, &wanted, 1e-2, &format!("{isa:?} {rows}"));
            }
        });
        let ids = Array::from_slice(&[20i32, 0, 9], &[3]).unwrap();
        let rows = host(&matrix.take_rows(&ids).unwrap());
        for (got, id) in rows.chunks(K).zip([20, 0, 9]) {
            assert_eq!(got, &elements[id * K..][..K], "row {id}");
        }
        // A view of some rows, without a copy.
        let part = matrix.rows(8, 21).unwrap().expect("whole row blocks");
        let x = array(&noise(K, 6), &[1, K as i32]);
        let all = host(&matrix.product(&x).unwrap());
        assert_eq!(host(&part.product(&x).unwrap()), all[8..]);
    });
}

/// A matrix of [`N`] rows and [`K`] columns with scales and biases, and its elements.
fn affine(bits: usize) -> (QuantizedMatrix, Vec<f32>) {
    let (rows, groups) = (N as i32, K / 32);
    let codes: Vec<u32> = noise(N * K, 1)
        .into_iter()
        .map(|v| v.to_bits().wrapping_mul(2_654_435_761) >> (32 - bits))
        .collect();
    let bytes: Vec<i8> = noise(2 * N * groups, 2)
        .iter()
        .map(|v| (v * 63.9 + 32.0) as i8)
        .collect();
    let supers: Vec<half::f16> = noise(2 * N * K / 256, 3)
        .iter()
        .map(|v| half::f16::from_f32(v * 0.01))
        .collect();
    let mut words = vec![0u32; N * K / 32 * bits];
    for (i, code) in codes.iter().enumerate() {
        for bit in 0..bits {
            let at = bits * i + bit;
            words[at / 32] |= (code >> bit & 1) << (at % 32);
        }
    }
    let elements = (0..N * K).map(|i| {
        let [scale, min] = [0, 1].map(|part| {
            supers[2 * (i / 256) + part].to_f32() * f32::from(bytes[2 * (i / 32) + part])
        });
        scale * codes[i] as f32 - min
    });
    let interleaved = |a: Array| QuantizedMatrix::interleaved(&a).unwrap();
    let parts = [
        interleaved(Array::from_slice(&words, &[rows, (K / 32 * bits) as i32]).unwrap()),
        interleaved(Array::from_slice(&bytes, &[rows, 2 * groups as i32]).unwrap()),
        interleaved(Array::from_slice(&supers, &[rows, (K / 128) as i32]).unwrap()),
    ];
    let matrix = QuantizedMatrix::from_super_affine(parts, rows, bits as i32).unwrap();
    (matrix.expect("kernels are on"), elements.collect())
}

/// A matrix of [`N`] rows and [`K`] columns with scales and no biases, and its elements.
fn symmetric(bits: usize) -> (QuantizedMatrix, Vec<f32>) {
    let (rows, groups) = (N as i32, K / 32);
    let words: Vec<u32> = noise(N * groups * bits, 1)
        .into_iter()
        .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
        .collect();
    let halves: Vec<half::f16> = noise(N * groups, 2)
        .iter()
        .map(|v| half::f16::from_f32(v * 0.1))
        .collect();
    let zero = if bits == 2 { 1 } else { 1 << (bits - 1) };
    let bit = |i: usize| words[i / 32] >> (i % 32) & 1;
    let elements = (0..N * K).map(|i| {
        let q: u32 = (0..bits).map(|b| bit(bits * i + b) << b).sum();
        halves[i / 32].to_f32() * (q as f32 - zero as f32)
    });
    let elements = elements.collect();
    let interleaved = |a: Array| QuantizedMatrix::interleaved(&a).unwrap();
    let parts = [
        interleaved(Array::from_slice(&words, &[rows, (groups * bits) as i32]).unwrap()),
        interleaved(Array::from_slice(&halves, &[rows, groups as i32]).unwrap()),
    ];
    let matrix = QuantizedMatrix::from_symmetric(parts, rows, bits as i32).unwrap();
    (matrix.expect("kernels are on"), elements)
}

#[test]
fn products_and_rows_with_biases_equal_the_definition() {
    on_cpu(|| {
        let all = [4, 5].map(|bits| (bits, affine(bits)));
        let symmetric = [2, 4, 5, 8].map(|bits| (bits, symmetric(bits)));
        for (bits, (matrix, elements)) in all.into_iter().chain(symmetric) {
            let elements = &elements;
            with_each(|isa| {
                for rows in [1, 2, 7, 8, 15, 16, 40] {
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
                    close(&got, &wanted, 1e-2, &format!("{bits} {isa:?} {rows}"));
                }
            });
            let ids = Array::from_slice(&[20i32, 0, 9], &[3]).unwrap();
            let rows = host(&matrix.take_rows(&ids).unwrap());
            for (got, id) in rows.chunks(K).zip([20, 0, 9]) {
                assert_eq!(got, &elements[id * K..][..K], "row {id}");
            }
            // The matrix in MLX's form must have the same values.
            assert!(matrix.has_mlx_form());
            let plain = matrix.to_quantized().unwrap();
            assert_eq!((plain.bits, plain.group_size), (bits as i32, 32));
            assert_eq!(&host(&plain.dequantize(Dtype::Float32).unwrap()), elements);
            // A view of some rows, without a copy.
            let part = matrix.rows(8, 21).unwrap().expect("whole row blocks");
            let x = array(&noise(K, 6), &[1, K as i32]);
            let all = host(&matrix.product(&x).unwrap());
            assert_eq!(host(&part.product(&x).unwrap()), all[8..]);
        }
    });
}

#[test]
fn parts_with_biases_that_do_not_fit_are_errors() {
    let part = |width: i32, dtype: Dtype| {
        let rows = crate::zeros(&[9, width], dtype).unwrap();
        QuantizedMatrix::interleaved(&rows).unwrap()
    };
    let fine = || {
        [
            part(32, Dtype::Uint32),
            part(16, Dtype::Int8),
            part(2, Dtype::Float16),
        ]
    };
    assert!(QuantizedMatrix::from_super_affine(fine(), 9, 4).is_ok());
    for (i, wrong) in [
        (0, part(31, Dtype::Uint32)),
        (0, part(32, Dtype::Int32)),
        (1, part(15, Dtype::Int8)),
        (1, part(16, Dtype::Uint8)),
        (2, part(1, Dtype::Float16)),
        (2, part(2, Dtype::Float32)),
    ] {
        let mut parts = fine();
        parts[i] = wrong;
        let e = QuantizedMatrix::from_super_affine(parts, 9, 4).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape);
    }
    let halves = |width| [part(16, Dtype::Uint32), part(width, Dtype::Float16)];
    assert!(QuantizedMatrix::from_symmetric(halves(2), 9, 8).is_ok());
    for (width, n, bits) in [(3, 9, 8), (2, 17, 8), (2, 9, 4), (2, 9, 6)] {
        let e = QuantizedMatrix::from_symmetric(halves(width), n, bits).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape);
    }
    for (n, bits) in [(17, 4), (9, 5), (9, 6)] {
        let e = QuantizedMatrix::from_super_affine(fine(), n, bits).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape);
    }
}

#[test]
fn its_backward_pass_is_a_kernel() {
    on_cpu(|| {
        let (matrix, elements) = matrix();
        let matrix = Matrix::Quantized(matrix);
        let (x, c) = (noise(3 * K, 7), noise(3 * N, 8));
        let wanted: Vec<f64> = c
            .chunks(N)
            .flat_map(|c| {
                let elements = &elements;
                (0..K).map(move |i| {
                    let rows = c.iter().zip(elements.chunks(K));
                    rows.map(|(c, w)| f64::from(*c) * f64::from(w[i])).sum()
                })
            })
            .collect();
        let (x, c) = (array(&x, &[3, K as i32]), array(&c, &[3, N as i32]));
        let run = |x: &[Array]| -> crate::Result<Vec<Array>> {
            Ok(vec![matrix.product_for_gradients(&x[0])?])
        };
        let (_, dx) = vjp(run, &[x], &[c]).unwrap();
        close(&host(&dx[0]), &wanted, 1e-4, "gradient");
    });
}

#[test]
fn parts_that_do_not_fit_are_errors() {
    let part = |width: i32, dtype: Dtype| {
        let rows = crate::zeros(&[9, width], dtype).unwrap();
        QuantizedMatrix::interleaved(&rows).unwrap()
    };
    let fine = || {
        [
            part(48, Dtype::Uint32),
            part(16, Dtype::Int8),
            part(1, Dtype::Float16),
        ]
    };
    assert!(QuantizedMatrix::from_super_scaled(fine(), 9).is_ok());
    for (i, wrong) in [
        (0, part(47, Dtype::Uint32)),
        (0, part(48, Dtype::Int32)),
        (1, part(15, Dtype::Int8)),
        (1, part(16, Dtype::Uint8)),
        (2, part(2, Dtype::Float16)),
        (2, part(1, Dtype::Float32)),
    ] {
        let mut parts = fine();
        parts[i] = wrong;
        let e = QuantizedMatrix::from_super_scaled(parts, 9).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape);
    }
    let e = QuantizedMatrix::from_super_scaled(fine(), 17).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Shape);
}
