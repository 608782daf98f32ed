//! Compares matrices of small floats (MXFP4, MXFP8, NVFP4) with MLX's.

use super::*;
use crate::{Device, Stream};

fn noise(shape: &[i32]) -> Array {
    let n: i32 = shape.iter().product();
    let values: Vec<f32> = (0..n)
        .map(|i| ((i * 7919) % 211) as f32 * 0.01 - 1.0)
        .collect();
    Array::from_slice(&values, shape).unwrap()
}

/// A matrix of small floats must have MLX's values, as a whole and by row, and MLX's products.
#[test]
fn small_floats_are_those_of_mlx() {
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        for mode in [QuantMode::Mxfp4, QuantMode::Mxfp8, QuantMode::Nvfp4] {
            let (bits, group) = float_format(mode).unwrap();
            // The last row block is incomplete.
            for (n, k) in [(20, 32), (24, 96), (300, 160)] {
                let packed = Quantized::quantize(&noise(&[n, k]), group, bits, mode).unwrap();
                // If the kernels are disabled, there is nothing to compare.
                let Some(matrix) = QuantizedMatrix::new(&packed).unwrap() else {
                    return;
                };
                assert_eq!((matrix.mode(), matrix.shape()), (mode, [n, k]));
                let back = matrix.to_quantized().unwrap();
                assert!(back.weight.array_equal(&packed.weight).unwrap());
                assert!(back.scales.array_equal(&packed.scales).unwrap());
                let dense = packed.dequantize(Dtype::Float32).unwrap();
                let ids: Vec<i32> = (0..n).rev().collect();
                let ids = Array::from_slice(&ids, &[n]).unwrap();
                let rows = matrix.take_rows(&ids).unwrap();
                assert!(
                    rows.array_equal(&dense.take_clamped(&ids, 0).unwrap())
                        .unwrap()
                );
                let some = matrix.rows(8, 16).unwrap().unwrap();
                let part = dense.slice_axis(0, 8, 16).unwrap();
                for rows in [1, 5, 33] {
                    let x = noise(&[1, rows, k]);
                    for (matrix, dense) in [(&matrix, &dense), (&some, &part)] {
                        let y = matrix.product(&x).unwrap();
                        let wanted = x.matmul(&dense.swap_axes(0, 1).unwrap()).unwrap();
                        let what = format!("{mode:?} {n} {k} {rows}");
                        assert!(y.all_close(&wanted, 1e-4, 2e-3).unwrap(), "{what}");
                    }
                }
            }
            let joined = |n| {
                let q = Quantized::quantize(&noise(&[n, 32]), group, bits, mode).unwrap();
                QuantizedMatrix::new(&q).unwrap().unwrap()
            };
            let (joined_16, short) = (joined(16), joined(12));
            let both = QuantizedMatrix::joined(&[&joined_16, &joined_16]).unwrap();
            assert_eq!(both.map(|m| (m.mode(), m.shape())), Some((mode, [32, 32])));
            assert!(
                QuantizedMatrix::joined(&[&joined_16, &short])
                    .unwrap()
                    .is_none()
            );
        }
    });
}
