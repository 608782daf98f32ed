//! Tests matrix multiplications of empty arrays, which MLX's CPU code computes wrongly. Nothing may
//! be written out of bounds, nothing may end the process, and the values must be those of empty
//! sums.

use mlx_rs_core::fast::{self, Mask};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::transforms::{grad, vmap};
use mlx_rs_core::{
    All, Array, Dtype, QuantMode, Quantized, Result, async_eval, einsum, memory, ones, zeros,
};

/// Evaluates a result, if there is one, and checks that it has its declared shape and type.
fn settle(name: &str, result: Result<Array>) {
    let Ok(a) = result else { return };
    let before = (a.shape().to_vec(), a.dtype());
    if a.eval().is_ok() {
        assert_eq!((a.shape().to_vec(), a.dtype()), before, "{name}");
    }
}

/// MLX copies a matrix with an uncommon layout before it multiplies. For an empty product it frees
/// the copy at once, while its thread still writes the copy.
#[test]
fn empty_products_write_nowhere() {
    memory::set_budget(1 << 22);
    let slow =
        random::normal(0.0, 1.0, &[200, 200], Dtype::Float32, &Key::new(1).unwrap()).unwrap();
    type Product = fn(&Array, &Array) -> Result<Array>;
    // The operands: an empty array of the first shape, and an array of the second shape whose axis
    // of length 1 is broadcast.
    let products: [(&str, [i32; 3], [i32; 3], Product); 12] = [
        ("matmul", [3, 0, 2], [1, 2, 1], Array::matmul),
        ("matmul, second", [3, 2, 0], [1, 1, 2], |a, b| b.matmul(a)),
        ("block_masked_mm", [3, 0, 2], [1, 2, 1], |a, b| {
            a.block_masked_mm(b, 32, None, None, None)
        }),
        ("addmm", [3, 0, 2], [1, 2, 1], |a, b| {
            a.sum(-1, true)?.addmm(a, b, 1.0, 1.0)
        }),
        ("gather_mm", [3, 0, 2], [1, 2, 1], |a, b| {
            a.gather_mm(b, None, None, false)
        }),
        ("einsum", [3, 0, 2], [1, 2, 1], |a, b| {
            einsum("bij,cjk->bik", &[a, b])
        }),
        ("tensordot", [3, 0, 2], [1, 2, 1], |a, b| {
            a.tensordot_axes(&b.broadcast_to(&[2, 2, 1])?, &[2], &[1])
        }),
        ("inner", [3, 0, 2], [1, 1, 2], |a, b| {
            a.inner(&b.broadcast_to(&[2, 1, 2])?)
        }),
        ("attention", [3, 0, 2], [1, 1, 1], |a, b| {
            let (queries, keys) = (
                a.expand_dims(0)?
                    .slice_axis(-1, 0, 1)?
                    .tile(&[1, 2, 1, 1])?,
                b.expand_dims(0)?.broadcast_to(&[1, 3, 1, 1])?,
            );
            fast::scaled_dot_product_attention(&queries, &keys, &keys, 1.0, Mask::None)
        }),
        ("quantized", [1, 0, 64], [1, 1, 1], |a, b| {
            let weight = b.broadcast_to(&[1, 16, 64])?.squeeze_axis(0)?;
            let all = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
            let half = |part: &Array| part.slice(&[0, 0], part.shape(), &[2, 1]);
            let quantized = Quantized {
                weight: half(&all.weight)?,
                scales: half(&all.scales)?,
                biases: all.biases.as_ref().map(half).transpose()?,
                ..all
            };
            quantized.matmul_transposed(&a.squeeze_axis(0)?)
        }),
        ("mapped over nothing", [0, 2, 3], [1, 3, 1], |a, b| {
            let product = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].matmul(&x[1])?]) };
            let b = b.squeeze_axis(0)?.broadcast_to(&[3, 4])?;
            let mapped = vmap(product, [Some(0), None], 0)(&[a.clone(), b])?;
            Ok(mapped.into_iter().next().unwrap())
        }),
        ("attention, one head", [3, 0, 2], [1, 1, 1], |a, b| {
            let queries = a.expand_dims(0)?.slice_axis(-1, 0, 1)?;
            let keys = b.expand_dims(0)?;
            fast::scaled_dot_product_attention(&queries, &keys, &keys, 1.0, Mask::None)
        }),
    ];
    let mut touched = Vec::new();
    for (name, empty, other, product) in products {
        let empty = zeros(&empty, Dtype::Float32).unwrap();
        for _ in 0..20 {
            // A slow operation delays the copy, so that the next allocation gets the copy's memory.
            let late = slow.sort(-1).unwrap().sum(All, true).unwrap();
            let other = ones(&other, Dtype::Float32).unwrap().add(&late).unwrap();
            let result = product(&empty, &other).unwrap();
            async_eval([&result]).unwrap();
            let buffers: Vec<Vec<u8>> = (1..=16).map(|n| vec![7; 4 * n]).collect();
            late.eval().unwrap();
            result.eval().unwrap();
            if buffers.iter().flatten().any(|&byte| byte != 7) {
                touched.push(name);
                break;
            }
        }
    }
    assert!(touched.is_empty(), "{touched:?}");
}

#[test]
fn packed_matrices_and_inputs_of_nothing() {
    memory::set_budget(1 << 22);
    for mode in [QuantMode::Affine, QuantMode::Mxfp4, QuantMode::Nvfp4] {
        let group = if mode == QuantMode::Nvfp4 { 16 } else { 32 };
        let experts = ones(&[3, 32, 64], Dtype::Float32).unwrap();
        let all = Quantized::quantize(&experts, group, 4, mode).unwrap();
        let part = |f: &dyn Fn(&Array) -> Result<Array>| Quantized {
            weight: f(&all.weight).unwrap(),
            scales: f(&all.scales).unwrap(),
            biases: all.biases.as_ref().map(|b| f(b).unwrap()),
            ..all.clone()
        };
        let single = part(&|a| a.slice_axis(0, 0, 1)?.squeeze_axis(0));
        let rows = part(&|a| a.slice_axis(0, 0, 1)?.squeeze_axis(0)?.slice_axis(0, 0, 0));
        let none = part(&|a| a.slice_axis(0, 0, 0));
        let product = single.matmul_transposed(&ones(&[0, 64], Dtype::Float32).unwrap());
        assert_eq!(product.unwrap().shape(), [0, 32]);
        let no_indices = Array::vector::<i32>(&[]).unwrap();
        let index = Array::vector(&[1]).unwrap();
        for shape in [
            &[0, 64][..],
            &[2, 0, 64],
            &[0, 2, 64],
            &[0],
            &[0, 0],
            &[0, 32],
            &[2, 64],
            &[3, 2, 32],
        ] {
            let x = ones(shape, Dtype::Float32).unwrap();
            for matrix in [&all, &single, &rows, &none] {
                settle("matmul_transposed", matrix.matmul_transposed(&x));
                settle("matmul", matrix.matmul(&x));
                for indices in [&index, &no_indices] {
                    settle(
                        "gather_matmul",
                        matrix.gather_matmul(&x, None, indices, true, false),
                    );
                    settle(
                        "gather_matmul",
                        matrix.gather_matmul(&x, indices, indices, false, true),
                    );
                }
            }
        }
        for matrix in [&all, &single, &rows, &none] {
            settle("dequantize", matrix.dequantize(Dtype::Float16));
            settle(
                "take_rows",
                matrix
                    .take_rows(&no_indices)
                    .and_then(|q| q.dequantize(Dtype::Float32)),
            );
        }
    }
}

#[test]
fn sums_over_nothing_are_zeros_with_gradients() {
    let (a, b) = (
        ones(&[2, 0], Dtype::Float32).unwrap(),
        ones(&[0, 3], Dtype::Float32).unwrap(),
    );
    let c = Array::from_slice(&[5.0f32; 3], &[3]).unwrap();
    let same = |got: Result<Array>, shape: &[i32], value: f32| {
        let got = got.unwrap();
        assert_eq!(got.shape(), shape);
        assert!(got.to_vec::<f32>().unwrap().iter().all(|&v| v == value));
    };
    same(a.matmul(&b), &[2, 3], 0.0);
    same(a.inner(&b.swap_axes(0, 1).unwrap()), &[2, 3], 0.0);
    same(a.tensordot(&b, 1), &[2, 3], 0.0);
    same(einsum("ij,jk->ik", &[&a, &b]), &[2, 3], 0.0);
    same(einsum("ij,jk->k", &[&a, &b]), &[3], 0.0);
    same(c.addmm(&a, &b, 2.0, 3.0), &[2, 3], 15.0);
    let sum = |x: &[Array]| -> Result<Vec<Array>> {
        Ok(vec![x[2].addmm(&x[0], &x[1], 1.0, 2.0)?.sum(All, false)?])
    };
    let gradients = grad(sum, &[0, 1, 2])(&[a, b, c]).unwrap();
    let [a, b, c] = gradients.try_into().unwrap();
    same(Ok(a), &[2, 0], 0.0);
    same(Ok(b), &[0, 3], 0.0);
    same(Ok(c), &[3], 4.0);
}
