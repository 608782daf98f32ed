//! Compares gradients with finite differences, for every differentiable operation that models use.
//! The tests in `transforms/` cover the transforms themselves.
//!
//! Each case is a function of a few small arrays. It is differentiated in reverse mode (`vjp`) and
//! forward mode (`jvp`). Both are compared with five-point differences (error of order h^4),
//! computed in float32 and summed in float64. Each is also computed in batches (`vmap`) and
//! compared with single examples.

#![expect(
    clippy::cloned_ref_to_slice_refs,
    reason = "a case reads the same with one array and with several"
)]

use mlx_rs_core::fast::{self, Mask, RopeBase};
use mlx_rs_core::transforms::{checkpoint, grad, vmap};
use mlx_rs_core::{
    All, Array, Dtype, QuantMode, Quantized, Result, concatenate, cpu, stack, where_,
};

mod differences;
#[path = "../support/operations.rs"]
mod operations;

use differences::{check, ids, normal, numbers, positive, scalar};
use operations::{Slope, of_one, of_two};

// ---- element by element

#[test]
fn functions_of_one_array() {
    // No element is within two steps of zero, where `abs` has a corner, and no two elements are
    // equal.
    let x = Array::from_slice(&[-1.4f32, -0.8, -0.3, 0.2, 0.7, 1.3], &[2, 3]).unwrap();
    let mut compared = 0;
    for (operation, f) in of_one() {
        let at = match operation.slope {
            Slope::Everywhere => x.clone(),
            Slope::Positive => positive(1, &[2, 3]),
            Slope::None => continue,
        };
        check(operation.name, &[at], |x| f(&x[0]));
        compared += 1;
    }
    assert!(compared > 30, "only {compared} operations have a slope");
    type Unary = fn(&Array) -> Result<Array>;
    let table: [(&str, Unary); 2] = [
        ("stop_gradient of a part", |x| {
            x.stop_gradient()?.multiply(&scalar(0.0))?.add(x)
        }),
        ("astype", |x| x.astype(Dtype::Float32)?.multiply(x)),
    ];
    for (name, f) in table {
        check(name, std::slice::from_ref(&x), |x| f(&x[0]));
    }
    check("square of log", &[positive(1, &[2, 3])], |x| {
        x[0].log()?.square()
    });
}

#[test]
fn functions_of_two_arrays_with_broadcasting() {
    // The elements are far enough apart to avoid the corner of `maximum`.
    let a = Array::from_slice(&[0.6f32, 1.1, 1.9, 1.4, 0.9, 1.7], &[2, 3]).unwrap();
    let shapes: [&[i32]; 4] = [&[2, 3], &[3], &[2, 1], &[]];
    let mut compared = 0;
    for (operation, f) in of_two() {
        // Matrix multiplications need other shapes. Their tests are below.
        let product = ["inner", "kron", "matmul", "outer"].contains(&operation.name);
        if operation.slope == Slope::None || product {
            continue;
        }
        compared += 1;
        let name = operation.name;
        for shape in shapes {
            let n: i32 = shape.iter().product();
            let b = [1.25f32, 0.75, 1.5, 0.8, 1.3, 1.0];
            let b = Array::from_slice(&b[..n as usize], shape).unwrap();
            check(&format!("{name} {shape:?}"), &[a.clone(), b.clone()], |x| {
                f(&x[0], &x[1])
            });
            check(&format!("{name} {shape:?} turned"), &[b, a.clone()], |x| {
                f(&x[0], &x[1])
            });
        }
    }
    assert!(compared >= 8, "only {compared} operations have a slope");
}

#[test]
fn activations_as_models_compose_them() {
    let x = normal(2, &[2, 3]);
    check("gelu", &[x.clone()], |x| {
        let cdf = x[0]
            .multiply(&scalar(0.5f32.sqrt()))?
            .erf()?
            .add(&scalar(1.0))?;
        x[0].multiply(&cdf)?.multiply(&scalar(0.5))
    });
    check("gelu by tanh", &[x.clone()], |x| {
        let cube = x[0].power(&scalar(3.0))?.multiply(&scalar(0.044_715))?;
        let inner = x[0]
            .add(&cube)?
            .multiply(&scalar((2.0 / std::f32::consts::PI).sqrt()))?;
        x[0].multiply(&inner.tanh()?.add(&scalar(1.0))?)?
            .multiply(&scalar(0.5))
    });
    check("gelu by sigmoid", &[x.clone()], |x| {
        x[0].multiply(&x[0].multiply(&scalar(1.702))?.sigmoid()?)
    });
    check("swiglu", &[x.clone(), normal(3, &[2, 3])], |x| {
        x[0].silu()?.multiply(&x[1])
    });
    check("soft cap", &[x.clone()], |x| {
        x[0].divide(&scalar(2.0))?.tanh()?.multiply(&scalar(2.0))
    });
    check(
        "clip",
        &[Array::vector(&[-2.0f32, 0.3, 2.0]).unwrap()],
        |x| x[0].clip(Some(&scalar(-1.0)), Some(&scalar(1.0))),
    );
    let relu2 = Array::vector(&[-2.0f32, -0.3, 0.4, 2.0]).unwrap();
    check("relu squared", &[relu2], |x| {
        x[0].maximum(&scalar(0.0))?.square()
    });
}

// ---- reductions

#[test]
fn reductions() {
    let x = positive(4, &[2, 3, 2]);
    for keepdims in [false, true] {
        check("sum", &[x.clone()], |x| x[0].sum(All, keepdims));
        check("sum of an axis", &[x.clone()], |x| {
            x[0].square()?.sum(1, keepdims)
        });
        check("sum of axes", &[x.clone()], |x| {
            x[0].square()?.sum(&[0, -1], keepdims)
        });
        check("mean", &[x.clone()], |x| x[0].square()?.mean(-1, keepdims));
        check("prod", &[x.clone()], |x| x[0].prod(1, keepdims));
        check("max", &[x.clone()], |x| x[0].max(1, keepdims));
        check("min", &[x.clone()], |x| x[0].min(-1, keepdims));
        check("logsumexp", &[x.clone()], |x| x[0].logsumexp(-1, keepdims));
        check("variance", &[x.clone()], |x| x[0].var(-1, keepdims, 0));
    }
    check("cumsum", &[x.clone()], |x| x[0].cumsum(1, false, true));
    check("cumsum, reverse and exclusive", &[x.clone()], |x| {
        x[0].cumsum(-1, true, false)
    });
    check("sort", &[x], |x| x[0].sort(-1)?.cumsum(-1, false, true));
}

#[test]
fn softmax_and_cross_entropy() {
    let x = normal(5, &[2, 4]);
    for precise in [false, true] {
        check("softmax", &[x.clone()], |x| x[0].softmax(-1, precise));
    }
    check("softmax of another axis", &[x.clone()], |x| {
        x[0].softmax(0, false)
    });
    check("cross entropy", &[x], |x| {
        let targets = Array::from_slice(&[3i32, 1], &[2, 1])?;
        let picked = x[0].take_along_axis(&targets, -1)?.squeeze_axis(-1)?;
        x[0].logsumexp(-1, false)?
            .subtract(&picked)?
            .mean(All, false)
    });
}

// ---- shapes and places

#[test]
fn shapes() {
    let x = normal(6, &[2, 3, 2]);
    type Unary = fn(&Array) -> Result<Array>;
    let table: [(&str, Unary); 13] = [
        ("reshape", |x| x.reshape(&[3, -1])),
        ("transpose", Array::transpose),
        ("transpose_axes", |x| x.transpose_axes(&[1, 0, 2])),
        ("swap_axes", |x| x.swap_axes(0, -1)),
        ("expand_dims", |x| x.expand_dims(1)),
        ("squeeze_axis", |x| x.slice_axis(1, 1, 2)?.squeeze_axis(1)),
        ("flatten", |x| x.flatten(0, 1)),
        ("broadcast_to", |x| {
            x.expand_dims(0)?.broadcast_to(&[3, 2, 3, 2])
        }),
        ("contiguous", |x| x.transpose()?.contiguous()),
        ("repeat", |x| x.repeat(3, 1)),
        ("split", |x| {
            let parts = x.split(3, 1)?;
            parts[2].multiply(&parts[0])
        }),
        ("tril", |x| x.tril(0)),
        ("triu", |x| x.triu(1)),
    ];
    for (name, f) in table {
        check(name, std::slice::from_ref(&x), |x| {
            f(&x[0].square()?)?.multiply(&scalar(2.0))
        });
    }
    let y = normal(7, &[2, 1, 2]);
    let both = [x, y];
    check("concatenate", &both, |x| {
        concatenate(&[&x[0], &x[1], &x[0]], 1)?.square()
    });
    check("stack", &both, |x| {
        stack(&[&x[0], &x[1].broadcast_to(&[2, 3, 2])?], -1)?.square()
    });
}

#[test]
fn slices_and_updates() {
    let x = normal(8, &[3, 4]);
    check("slice", &[x.clone()], |x| {
        x[0].slice(&[0, 1], &[3, 4], &[2, 2])?.square()
    });
    check("slice backwards", &[x.clone()], |x| {
        x[0].slice(&[2, 3], &[-4, -5], &[-1, -2])?.square()
    });
    check("slice_axis", &[x.clone()], |x| {
        x[0].slice_axis(-1, 1, 3)?.square()
    });
    let update = normal(9, &[2, 2]);
    let both = [x, update];
    check("slice_update", &both, |x| {
        x[0].slice_update(&x[1], &[0, 1], &[3, 3], &[2, 1])?
            .square()
    });
    check("update_axis", &both, |x| {
        x[0].update_axis(&x[1].reshape(&[1, 4])?, 0, 1)?.square()
    });
}

#[test]
fn choices() {
    let (x, y) = (normal(10, &[3, 4]), normal(11, &[4]));
    let condition = Array::from_slice(
        &[
            true, false, true, true, false, false, true, false, true, true, false, true,
        ],
        &[3, 4],
    )
    .unwrap();
    check("where", &[x.clone(), y], |x| {
        where_(&condition, &x[0].square()?, &x[1])
    });
    // Rows that are selected twice receive both gradients, as in an embedding.
    check("take", &[x.clone()], |x| {
        x[0].take(&ids(&[2, 0, 2]), 0)?.square()
    });
    check("take columns", &[x.clone()], |x| {
        x[0].take(&ids(&[1, 1, -1]), 1)?.square()
    });
    check("take_ids", &[x.clone()], |x| {
        x[0].take_ids(&[1, 1, 0], 0)?.square()
    });
    check("take_clamped", &[x.clone()], |x| {
        x[0].take_clamped(&ids(&[1, 99]), 0)?.square()
    });
    let places = Array::from_slice(&[3i32, 0, 1, 1, 2, 2], &[3, 2]).unwrap();
    check("take_along_axis", &[x.clone()], |x| {
        x[0].take_along_axis(&places, 1)?.square()
    });
    let distinct = Array::from_slice(&[3i32, 0, 1, 2, 2, 0], &[3, 2]).unwrap();
    check("put_along_axis", &[x.clone(), normal(12, &[3, 2])], |x| {
        x[0].put_along_axis(&distinct, &x[1], 1)?.square()
    });
    let apart = Array::from_slice(&[0.1f32, 0.9, -0.5, 0.4, 1.2, -1.0, 0.3, 0.7], &[2, 4]).unwrap();
    check("topk", &[apart], |x| {
        x[0].topk(2, -1)?.sum(-1, false)?.square()
    });
}

// ---- products

#[test]
fn products() {
    for (a, b) in [
        (&[2, 3][..], &[3, 2][..]),
        (&[3], &[3, 2]),
        (&[2, 3], &[3]),
        (&[2, 2, 3], &[3, 2]),
        (&[2, 1, 2, 3], &[2, 3, 2]),
    ] {
        check(
            &format!("matmul {a:?} {b:?}"),
            &[normal(13, a), normal(14, b)],
            |x| x[0].matmul(&x[1]),
        );
    }
    check(
        "matmul with a transposed matrix",
        &[normal(13, &[2, 3]), normal(14, &[4, 3])],
        |x| x[0].matmul(&x[1].transpose()?),
    );
    let parts = [
        normal(15, &[2, 4]),
        normal(16, &[2, 3]),
        normal(17, &[3, 4]),
    ];
    check("addmm", &parts, |x| x[0].addmm(&x[1], &x[2], 0.5, 2.0));
    check("inner", &[normal(18, &[3]), normal(19, &[3])], |x| {
        x[0].inner(&x[1])
    });
    check("outer", &[normal(18, &[3]), normal(19, &[2])], |x| {
        x[0].outer(&x[1])
    });
}

#[test]
fn quantized_products_with_respect_to_what_is_multiplied() {
    let weight = normal(20, &[8, 64]);
    for (mode, group, bits) in [
        (QuantMode::Affine, 32, 2),
        (QuantMode::Affine, 64, 3),
        (QuantMode::Affine, 64, 4),
        (QuantMode::Affine, 32, 5),
        (QuantMode::Affine, 32, 6),
        (QuantMode::Affine, 64, 8),
        (QuantMode::Mxfp4, 32, 4),
        (QuantMode::Mxfp8, 32, 8),
        (QuantMode::Nvfp4, 16, 4),
    ] {
        let q = Quantized::quantize(&weight, group, bits, mode).unwrap();
        let name = format!("quantized_matmul {mode:?} {bits} bits");
        check(&name, &[numbers(21, &[1, 2, 64], -0.5, 0.5)], |x| {
            q.matmul_transposed(&x[0])
        });
        let stack = Quantized::quantize(&normal(22, &[3, 8, 64]), group, bits, mode).unwrap();
        let name = format!("gather_qmm {mode:?} {bits} bits");
        check(&name, &[numbers(23, &[2, 1, 64], -0.5, 0.5)], |x| {
            gathered_quantized(&stack, &x[0], &ids(&[2, 0]))
        });
    }
}

#[test]
fn gathered_products() {
    let args = [normal(24, &[2, 1, 3]), normal(25, &[3, 3, 2])];
    check("gather_mm", &args, |x| {
        gathered_dense(&x[0], &x[1], &ids(&[2, 0]))
    });
}

#[test]
fn kernels_of_this_crate() {
    let (x, weight) = (numbers(26, &[2, 2, 64], -0.5, 0.5), normal(27, &[4, 64]));
    let Some(dense) = cpu::DenseMatrix::new(&weight).unwrap() else {
        panic!("the kernels are off; unset MLX_CPU_KERNELS for the tests");
    };
    let on_cpu = mlx_rs_core::Stream::default_of(mlx_rs_core::Device::cpu()).unwrap();
    on_cpu.scope(|| {
        check("dense kernel", &[x.clone()], |x| dense.product(&x[0]));
        check(
            "dense kernel, matrix",
            &[x.slice_axis(0, 0, 1).unwrap(), weight.clone()],
            |x| {
                cpu::DenseMatrix::new(&x[1])?
                    .map_or_else(|| x[0].sum(All, false), |m| m.product(&x[0]))
            },
        );
        for bits in [2, 3, 4, 5, 6, 8] {
            let q = Quantized::quantize(&weight, 32, bits, QuantMode::Affine).unwrap();
            let kernel = cpu::QuantizedMatrix::new(&q)
                .unwrap()
                .expect("a format of the kernels");
            // With few rows the kernel rounds its inputs, so differences would be those of a step
            // function.
            check(
                &format!("quantized kernel, {bits} bits"),
                &[numbers(29, &[16, 64], -0.5, 0.5)],
                |x| kernel.product(&x[0]),
            );
            // The gradient of an operation without one is an error.
            let scales = |x: &[Array]| -> Result<Vec<Array>> {
                let q = Quantized {
                    scales: x[0].clone(),
                    ..q.clone()
                };
                let kernel = cpu::QuantizedMatrix::new(&q)?.expect("a format of the kernels");
                Ok(vec![
                    kernel
                        .product(&numbers(28, &[1, 64], 0.0, 1.0))?
                        .sum(All, false)?,
                ])
            };
            let e = grad(scales, &[0])(&[q.scales.clone()]).unwrap_err();
            assert!(e.message().contains("with respect to the matrix"), "{e}");
            // Checks a batch, and the gradient of a gradient.
            let f = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![kernel.product(&x[0])?]) };
            for axis in [0, 1] {
                let batched = vmap(f, axis, axis)(&[x.clone()]).unwrap();
                assert!(
                    batched[0]
                        .all_close(&f(&[x.clone()]).unwrap()[0], 1e-4, 1e-4)
                        .unwrap()
                );
            }
            let first = |x: &[Array]| -> Result<Vec<Array>> {
                let loss = |x: &[Array]| -> Result<Vec<Array>> {
                    Ok(vec![kernel.product(&x[0])?.square()?.sum(All, false)?])
                };
                grad(loss, &[0])(x)
            };
            check(
                "gradient of a gradient",
                &[numbers(29, &[16, 64], -0.5, 0.5)],
                |x| {
                    first(x)?[0]
                        .square()?
                        .sum(-1, false)?
                        .multiply(&scalar(0.01))
                },
            );
        }
    });
}

// ---- fused operations

#[test]
fn norms() {
    let x = normal(30, &[2, 3, 8]);
    let (weight, bias) = (positive(31, &[8]), normal(32, &[8]));
    check("rms_norm", &[x.clone(), weight.clone()], |x| {
        fast::rms_norm(&x[0], Some(&x[1]), 1e-5)
    });
    check("rms_norm without weight", &[x.clone()], |x| {
        fast::rms_norm(&x[0], None, 1e-5)
    });
    check("rms_norm, gemma", &[x.clone(), weight.clone()], |x| {
        fast::rms_norm(&x[0], Some(&x[1].add(&scalar(1.0))?), 1e-6)
    });
    let all = [x.clone(), weight, bias];
    check("layer_norm", &all, |x| {
        fast::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), 1e-5)
    });
    check("layer_norm without bias", &all[..2], |x| {
        fast::layer_norm(&x[0], Some(&x[1]), None, 1e-5)
    });
    check("layer_norm alone", &[x], |x| {
        fast::layer_norm(&x[0], None, None, 1e-5)
    });
}

#[test]
fn rotary_embedding() {
    let x = normal(33, &[1, 2, 3, 8]);
    let freqs = positive(34, &[4]);
    for traditional in [false, true] {
        for (dims, offset, scale) in [(8, 0, 1.0), (4, 5, 0.5)] {
            let name = format!("rope {traditional} {dims} {offset}");
            check(&name, &[x.clone()], |x| {
                fast::rope(
                    &x[0],
                    dims,
                    traditional,
                    RopeBase::Theta(100.0),
                    scale,
                    offset,
                )
            });
        }
        check(
            &format!("rope {traditional} with frequencies"),
            &[x.clone()],
            |x| fast::rope(&x[0], 8, traditional, RopeBase::Freqs(&freqs), 1.0, 2),
        );
    }
}

#[test]
fn attention() {
    let (q, k, v) = (
        normal(35, &[1, 4, 3, 4]),
        normal(36, &[1, 2, 3, 4]),
        normal(37, &[1, 2, 3, 4]),
    );
    let boolean = Array::from_slice(
        &[true, false, true, true, true, false, true, true, true],
        &[1, 1, 3, 3],
    )
    .unwrap();
    let additive = normal(38, &[3, 3]);
    for (name, mask) in [
        ("none", Mask::None),
        ("causal", Mask::Causal),
        ("boolean", Mask::Array(&boolean)),
        ("additive", Mask::Array(&additive)),
    ] {
        check(
            &format!("attention, mask: {name}"),
            &[q.clone(), k.clone(), v.clone()],
            |x| fast::scaled_dot_product_attention(&x[0], &x[1], &x[2], 0.5, mask),
        );
    }
    check(
        "attention with respect to the mask",
        std::slice::from_ref(&additive),
        |x| fast::scaled_dot_product_attention(&q, &k, &v, 0.5, Mask::Array(&x[0])),
    );
}

// ---- together

/// A whole transformer block. The tests above cover single operations, this one their combination.
fn block(x: &[Array]) -> Result<Array> {
    let [x, norm, qkv, out, gate, up, down] = x else {
        unreachable!("seven arguments")
    };
    let heads = |y: &Array| y.reshape(&[1, 3, 2, 4])?.transpose_axes(&[0, 2, 1, 3]);
    let parts = fast::rms_norm(x, Some(norm), 1e-5)?
        .matmul(qkv)?
        .split(3, -1)?;
    let rope = |y: &Array| fast::rope(&heads(y)?, 4, false, RopeBase::Theta(100.0), 1.0, 0);
    let (q, k, v) = (rope(&parts[0])?, rope(&parts[1])?, heads(&parts[2])?);
    let a = fast::scaled_dot_product_attention(&q, &k, &v, 0.5, Mask::Causal)?;
    let a = a.transpose_axes(&[0, 2, 1, 3])?.reshape(&[1, 3, 8])?;
    let x = x.add(&a.matmul(out)?)?;
    let y = fast::rms_norm(&x, Some(norm), 1e-5)?;
    x.add(
        &y.matmul(gate)?
            .silu()?
            .multiply(&y.matmul(up)?)?
            .matmul(down)?,
    )
}

fn block_args() -> [Array; 7] {
    let small = |seed, shape: &[i32]| numbers(seed, shape, -0.4, 0.4);
    [
        normal(40, &[1, 3, 8]),
        positive(41, &[8]),
        small(42, &[8, 24]),
        small(43, &[8, 8]),
        small(44, &[8, 6]),
        small(45, &[8, 6]),
        small(46, &[6, 8]),
    ]
}

#[test]
fn a_transformer_block_plain_and_checkpointed() {
    let args = block_args();
    check("block", &args, block);
    let saved = checkpoint(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![block(x)?]) });
    check("checkpointed block", &args, |x| Ok(saved(x)?.remove(0)));
}

/// Gradients in half precision must equal those of float32 within the precision of the type.
#[test]
fn gradients_in_half_precision_are_those_of_float32() {
    let loss =
        |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![block(x)?.square()?.mean(All, false)?]) };
    let args = block_args();
    let all: Vec<usize> = (0..args.len()).collect();
    let exact = grad(loss, &all)(&args).unwrap();
    for (dtype, tolerance) in [(Dtype::Float16, 5e-3), (Dtype::Bfloat16, 5e-2)] {
        let half: Vec<Array> = args.iter().map(|a| a.astype(dtype).unwrap()).collect();
        let given = grad(loss, &all)(&half).unwrap();
        for (n, (given, exact)) in given.iter().zip(&exact).enumerate() {
            assert_eq!(given.dtype(), dtype);
            let exact = exact.to_vec::<f32>().unwrap();
            let largest = exact.iter().fold(0f32, |m, v| m.max(v.abs()));
            for (g, e) in given.to_f32_vec().unwrap().iter().zip(&exact) {
                assert!(
                    (g - e).abs() <= tolerance * largest,
                    "{dtype}, argument {n}: {g}, {e}"
                );
            }
        }
    }
}

// ---- calls whose form may change with the crate

fn gathered_dense(x: &Array, stack: &Array, ids: &Array) -> Result<Array> {
    x.gather_mm(stack, None, ids, false)
}

fn gathered_quantized(stack: &Quantized, x: &Array, ids: &Array) -> Result<Array> {
    stack.gather_matmul(x, None, ids, true, false)
}
