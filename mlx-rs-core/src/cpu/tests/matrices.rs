//! Tests quantized matrices in the kernels' layout: conversion to MLX's form, slices, and rows by
//! index.

use super::*;
use crate::All;
use crate::error::Result;
use crate::random::{self, Key};
use crate::transforms::grad;

/// A matrix of `n` rows. With `halves`, scales and biases are exact in float16.
fn packed(n: i32, k: i32, (bits, group): (i32, i32), halves: bool) -> Quantized {
    let w = array(&noise((n * k) as usize, 5), &[n, k]);
    let q = Quantized::quantize(&w, group, bits, QuantMode::Affine).unwrap();
    if halves { in_few_digits(q) } else { q }
}

fn same(a: &Quantized, b: &Quantized) {
    assert!(a.weight.array_equal(&b.weight).unwrap());
    assert!(a.scales.array_equal(&b.scales).unwrap());
    let (a, b) = (a.biases.as_ref().unwrap(), b.biases.as_ref().unwrap());
    assert!(a.array_equal(b).unwrap());
}

#[test]
fn they_come_back_as_they_were() {
    on_cpu(|| {
        for (n, k) in [(1, 128), (8, 384), (21, 128)] {
            for format in [(4, 32), (4, 64), (8, 32), (8, 128)] {
                for halves in [true, false] {
                    let q = packed(n, k, format, halves);
                    let matrix = QuantizedMatrix::new(&q).unwrap().expect("kernels are on");
                    assert_eq!(matrix.shape(), [n, k]);
                    assert_eq!((matrix.bits(), matrix.group_size()), format);
                    same(&matrix.to_quantized().unwrap(), &q);
                }
            }
        }
    });
}

#[test]
fn parts_are_whole_bands() {
    on_cpu(|| {
        let q = packed(21, 64, (4, 32), true);
        let matrix = QuantizedMatrix::new(&q).unwrap().expect("kernels are on");
        for (from, to) in [(0, 21), (8, 16), (16, 21), (0, 8)] {
            let part = matrix.rows(from, to).unwrap().expect("bands");
            let cut = |a: &Array| a.slice_axis(0, from, to).unwrap();
            let wanted = Quantized {
                weight: cut(&q.weight),
                scales: cut(&q.scales),
                biases: q.biases.as_ref().map(cut),
                ..q.clone()
            };
            same(&part.to_quantized().unwrap(), &wanted);
            let x = array(&noise(64, 7), &[1, 64]);
            let sliced = matrix.product(&x).unwrap().slice_axis(1, from, to);
            assert_eq!(host(&part.product(&x).unwrap()), host(&sliced.unwrap()));
        }
        for (from, to) in [(1, 8), (0, 9), (8, 8), (-8, 8), (16, 24)] {
            assert!(matrix.rows(from, to).unwrap().is_none(), "{from} {to}");
        }
    });
}

#[test]
fn rows_by_their_numbers() {
    on_cpu(|| {
        for (format, halves) in [((4, 32), true), ((4, 64), false), ((8, 32), true)] {
            let q = packed(13, 64, format, halves);
            let matrix = QuantizedMatrix::new(&q).unwrap().expect("kernels are on");
            let all = host(&q.dequantize(Dtype::Float32).unwrap());
            // IDs out of range select the nearest row.
            let ids = [12i32, 0, 7, 8, 99, -3];
            let wanted: Vec<f64> = [12usize, 0, 7, 8, 12, 0]
                .iter()
                .flat_map(|row| all[row * 64..][..64].iter().map(|v| f64::from(*v)))
                .collect();
            let signed = Array::from_slice(&ids, &[2, 3]).unwrap();
            let rows = matrix.take_rows(&signed).unwrap();
            assert_eq!(rows.shape(), [2, 3, 64]);
            close(&host(&rows), &wanted, 1e-6, "32 bits");
            let long = matrix.take_rows(&signed.astype(Dtype::Int64).unwrap());
            close(&host(&long.unwrap()), &wanted, 1e-6, "64 bits");
            let unsigned = Array::from_slice(&[12u32, 0, 7, 8, u32::MAX], &[5]).unwrap();
            let rows = matrix.take_rows(&unsigned).unwrap();
            close(&host(&rows), &wanted[..5 * 64], 1e-6, "unsigned");
            assert!(matrix.take_rows(&array(&[1.0], &[1])).is_err());
        }
    });
}

/// A fused operation has no gradient. Normally the operation itself stores its matrices, so MLX
/// does not know them. A traced matrix stays an input of the graph node, so that MLX refuses its
/// gradient.
#[test]
fn a_derivative_of_a_held_matrix_is_refused() {
    on_cpu(|| {
        let q = packed(8, 64, (4, 32), false);
        let x = random::normal(0.0, 1.0, &[1, 64], Dtype::Float32, &Key::new(1).unwrap()).unwrap();
        let norm = array(&[1.0; 64], &[64]);
        let f = |scales: &[Array]| -> Result<Vec<Array>> {
            let q = Quantized {
                scales: scales[0].clone(),
                ..q.clone()
            };
            let matrix = QuantizedMatrix::new(&q)?.map(Matrix::Quantized);
            let matrix = matrix.expect("kernels are on");
            let product = Projection {
                parts: &[(&matrix, None)],
                norm: Some((&norm, 1e-5)),
                then: Epilogue::None,
            };
            Ok(vec![product.of(&x)?.sum(All, false)?])
        };
        assert!(grad(f, &[0])(std::slice::from_ref(&q.scales)).is_err());
    });
}
