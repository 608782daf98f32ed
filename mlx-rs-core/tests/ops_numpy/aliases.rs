//! Tests operations that equal another operation in a different form or type. Each is compared, in
//! every type, with that operation, which has golden values.

use mlx_rs_core::random::Key;
use mlx_rs_core::{
    All, Array, Conv, Dtype, GridIndexing, Pad, Result, ScatterMode, broadcast_arrays,
    concatenate_flat, depends, eval, fft, full, linalg, meshgrid, ones, random, zeros,
};

fn values(shape: &[i32], dtype: Dtype) -> Array {
    let n: i32 = shape.iter().product();
    let values: Vec<i32> = (0..n).map(|i| (i * 5 + 2) % 7).collect();
    Array::from_slice(&values, shape)
        .and_then(|a| a.astype(dtype))
        .unwrap()
}

/// Pairs of results that must be equal.
fn pairs(dtype: Dtype) -> Result<Vec<(&'static str, Array, Array)>> {
    let a = values(&[3, 4], dtype);
    let ids = Array::vector(&[2u32, 0])?;
    let part = values(&[3, 2], dtype);
    let block = values(&[2, 1, 4], dtype);
    Ok(vec![
        (
            "take_flat",
            a.take_flat(&ids)?,
            a.reshape(&[12])?.take(&ids, 0)?,
        ),
        ("take_ids", a.take_ids(&[2, 0], 1)?, a.take(&ids, 1)?),
        (
            "take_clamped",
            a.take_clamped(&Array::vector(&[2i32, -9])?, 0)?,
            a.take(&ids, 0)?,
        ),
        (
            "update_axis",
            a.update_axis(&part, 1, 2)?,
            a.slice_update(&part, &[0, 2], &[3, 4], &[1, 1])?,
        ),
        (
            "gather_axis",
            a.gather_axis(&ids, 0, &[1, 4])?,
            a.gather(&[&ids], &[0], &[1, 4])?,
        ),
        (
            "scatter_axis",
            a.scatter_axis(&ids, &block, 0, ScatterMode::Replace)?,
            a.scatter(&[&ids], &block, &[0], ScatterMode::Replace)?,
        ),
        (
            "squeeze_axis",
            block.squeeze_axis(1)?,
            block.squeeze_axes(&[1])?,
        ),
        ("zeros_like", a.zeros_like()?, zeros(&[3, 4], dtype)?),
        ("ones_like", a.ones_like()?, ones(&[3, 4], dtype)?),
        (
            "full_like",
            a.full_like(&Array::scalar(3i32)?, dtype)?,
            full(&[3, 4], &Array::scalar(3i32)?, dtype)?,
        ),
        ("depends", depends(&[&a], &[&part])?.remove(0), a.clone()),
        ("stop_gradient", a.stop_gradient()?, a.clone()),
        (
            "number_of_elements",
            a.number_of_elements(&[0, 1], false, Dtype::Int32)?,
            ones(&[3, 4], Dtype::Int32)?.sum(All, false)?,
        ),
    ])
}

#[test]
fn other_forms_of_an_operation_are_that_operation() {
    for dtype in Dtype::ALL {
        for (name, got, expected) in pairs(dtype).unwrap() {
            eval([&got, &expected]).unwrap();
            assert_eq!(
                (got.shape(), got.dtype()),
                (expected.shape(), expected.dtype()),
                "{name}"
            );
            assert!(got.array_equal(&expected).unwrap(), "{name} of {dtype}");
        }
    }
    let key = Key::new(5).unwrap();
    let (uniform, between) = (
        random::uniform(0.0, 2.0, &[9], Dtype::Float32, &key).unwrap(),
        random::uniform_between(
            &Array::scalar(0.0f32).unwrap(),
            &Array::scalar(2.0f32).unwrap(),
            &[9],
            Dtype::Float32,
            &key,
        )
        .unwrap(),
    );
    assert!(uniform.array_equal(&between).unwrap());
}

type Moves = (&'static str, fn(&Array) -> Result<Vec<Array>>);

fn one(a: Result<Array>) -> Result<Vec<Array>> {
    Ok(vec![a?])
}

/// Operations that move values without reading them, for an array `[2, 3, 1]`. Their golden values
/// are `int32`.
fn moves() -> Vec<Moves> {
    vec![
        ("swap_axes", |a| one(a.swap_axes(0, 1))),
        ("move_axis", |a| one(a.move_axis(0, 2))),
        ("flatten", |a| one(a.flatten(0, 1))),
        ("unflatten", |a| one(a.unflatten(1, &[3, 1]))),
        ("expand_dims", |a| one(a.expand_dims(1))),
        ("expand_dims_axes", |a| one(a.expand_dims_axes(&[0, 2]))),
        ("squeeze", |a| one(a.squeeze())),
        ("squeeze_axes", |a| one(a.squeeze_axes(&[2]))),
        ("broadcast_to", |a| one(a.broadcast_to(&[2, 3, 4]))),
        ("as_strided", |a| one(a.as_strided(&[2, 2], &[1, 2], 1))),
        ("roll_axes", |a| one(a.roll_axes(&[1, -1], &[0, 1]))),
        ("repeat_flat", |a| one(a.repeat_flat(2))),
        ("pad_symmetric", |a| one(a.pad_symmetric(1, Pad::Edge))),
        ("at_least_1d", |a| one(a.at_least_1d())),
        ("at_least_2d", |a| one(a.flatten(0, -1)?.at_least_2d())),
        ("at_least_3d", |a| one(a.flatten(0, -1)?.at_least_3d())),
        ("slice_update", |a| {
            let part = a.slice_axis(1, 0, 1)?;
            one(a.slice_update(&part, &[0, 2, 0], &[2, 3, 1], &[1, 1, 1]))
        }),
        ("concatenate_flat", |a| one(concatenate_flat(&[a, a]))),
        ("split", |a| a.split(3, 1)),
        ("split_at", |a| a.split_at(&[1], 1)),
        ("meshgrid", |a| {
            let line = a.flatten(0, -1)?;
            meshgrid(&[&line, &line], false, GridIndexing::Ij)
        }),
        ("broadcast_arrays", |a| {
            broadcast_arrays(&[a, &a.slice_axis(1, 0, 1)?])
        }),
        ("gather", |a| {
            one(a.gather(&[&Array::vector(&[2i32, 0])?], &[1], &[2, 1, 1]))
        }),
        ("slice_at", |a| {
            one(a.slice_at(&Array::vector(&[1i32])?, &[1], &[2, 2, 1]))
        }),
        ("slice_update_at", |a| {
            let part = a.slice_axis(1, 0, 2)?;
            one(a.slice_update_at(&part, &Array::vector(&[1i32])?, &[1]))
        }),
    ]
}

#[test]
fn operations_that_move_values_do_so_in_every_type() {
    let a = values(&[2, 3, 1], Dtype::Int32);
    for dtype in Dtype::ALL {
        let typed = a.astype(dtype).unwrap();
        for (name, f) in moves() {
            let (got, expected) = (f(&typed).unwrap(), f(&a).unwrap());
            assert_eq!(got.len(), expected.len());
            for (got, expected) in got.iter().zip(&expected) {
                assert_eq!(got.dtype(), dtype, "{name}");
                let expected = expected.astype(dtype).unwrap();
                assert!(got.array_equal(&expected).unwrap(), "{name} of {dtype}");
            }
        }
    }
}

#[test]
fn order_is_the_same_in_every_real_type() {
    let a = Array::vector(&[5i32, 1, 3, 0, 4, 2]).unwrap();
    let real = Dtype::ALL
        .into_iter()
        .filter(|&d| d != Dtype::Bool && d != Dtype::Complex64);
    for dtype in real {
        let typed = a.astype(dtype).unwrap();
        let order = typed.argsort_flat().unwrap().to_vec::<u32>().unwrap();
        assert_eq!(order, [3, 1, 5, 2, 4, 0], "{dtype}");
        for (name, at, of) in [
            ("partition_flat", typed.partition_flat(3), 3),
            (
                "argpartition_flat",
                typed.argpartition_flat(3).and_then(|i| typed.take(&i, 0)),
                3,
            ),
            ("topk_flat", typed.topk_flat(2).and_then(|t| t.sort(0)), 0),
        ] {
            let value = at.and_then(|x| {
                x.slice_axis(0, of, of + 1)?
                    .astype(Dtype::Int32)?
                    .item::<i32>()
            });
            assert_eq!(
                value.unwrap(),
                if of == 3 { 3 } else { 4 },
                "{name} of {dtype}"
            );
        }
    }
}

/// Compares `f` in other types with `f` in `float32`, to the precision of the type. A difference
/// fails the test.
fn as_in_float32(name: &str, types: &[Dtype], f: impl Fn(&Array) -> Result<Array>) {
    for &dtype in types {
        let a = values(&[1, 4, 4], dtype);
        let single = a.astype(Dtype::Float32).unwrap();
        let (got, expected) = (f(&a).unwrap(), f(&single).unwrap());
        assert_eq!(got.shape(), expected.shape(), "{name} of {dtype}");
        let wide = |a: &Array| match a.dtype() {
            Dtype::Complex64 => concatenate_flat(&[&a.real()?, &a.imag()?]),
            _ => a.astype(Dtype::Float32),
        };
        let close = wide(&got).and_then(|g| g.all_close(&wide(&expected)?, 2e-2, 2e-2));
        assert!(close.unwrap(), "{name} of {dtype}: {got} {expected}");
    }
}

#[test]
fn functions_of_floats_take_other_types_as_float32() {
    let halves = [Dtype::Float16, Dtype::Bfloat16];
    let others = [
        Dtype::Bool,
        Dtype::Uint8,
        Dtype::Int8,
        Dtype::Int32,
        Dtype::Int64,
        Dtype::Float16,
        Dtype::Bfloat16,
    ];
    as_in_float32("hadamard_transform", &halves, |a| {
        a.hadamard_transform(None)
    });
    as_in_float32("to_fp8", &halves, Array::to_fp8);
    as_in_float32("conv_transpose", &halves, |a| {
        a.conv_transpose(&ones(&[2, 3, 4], a.dtype())?, &Conv::default())
    });
    as_in_float32("rfft", &others, |a| fft::rfft(a, None, -1));
    as_in_float32("rfft2", &others, |a| fft::rfft2(a, None, [-2, -1]));
    as_in_float32("rfftn", &others, |a| fft::rfftn(a, None, All));
    as_in_float32("fft", &others, |a| fft::fft(a, None, -1));
    as_in_float32("irfft", &others, |a| fft::irfft(a, None, -1));
    as_in_float32("sigmoid", &others, Array::sigmoid);
    as_in_float32("softmax", &others, |a| a.softmax(-1, true));
    as_in_float32("logsumexp", &others, |a| a.logsumexp(All, false));
    as_in_float32("var", &others, |a| a.var(-1, false, 0));
    as_in_float32("std", &others, |a| a.std(-1, false, 1));
    as_in_float32("mean", &others, |a| a.mean(-1, false));
    as_in_float32("silu", &halves, Array::silu);
    as_in_float32("logsumexp of axes", &others, |a| a.logsumexp(&[0, 1], true));
    as_in_float32("logcumsumexp", &others, |a| a.logcumsumexp(-1, false, true));
    as_in_float32("norm", &others, |a| {
        linalg::norm(a, linalg::Norm::L2, All, false)
    });
    as_in_float32("erf", &others, Array::erf);
    as_in_float32("exp", &others, Array::exp);
    as_in_float32("median", &others, |a| a.median(-1, false));
    as_in_float32("is_close", &others, |a| {
        a.is_close(&a.square()?, 1e-5, 0.0, false)
    });
    for (name, f) in [
        (
            "nan_to_num",
            (|a| a.nan_to_num(0.0, None, None)) as fn(&Array) -> Result<Array>,
        ),
        ("is_inf", Array::is_inf),
        ("is_finite", Array::is_finite),
        ("is_neg_inf", Array::is_neg_inf),
        ("is_pos_inf", Array::is_pos_inf),
        ("is_nan", Array::is_nan),
        ("reciprocal", |a| {
            a.maximum(&ones(&[1], a.dtype())?)?.reciprocal()
        }),
        ("rsqrt", |a| a.maximum(&ones(&[1], a.dtype())?)?.rsqrt()),
        ("log1p", Array::log1p),
        ("softmax of all", |a| a.softmax(All, false)),
        ("softmax in the middle", |a| a.softmax(1, false)),
        ("softmax, precise", |a| a.softmax(&[1, 2], true)),
        ("logcumsumexp, from the end", |a| {
            a.logcumsumexp(1, true, false)
        }),
        ("cumulative mean", |a| {
            a.cumsum(-1, false, true)?.mean(All, false)
        }),
        ("norm of axes", |a| {
            linalg::norm(a, linalg::Norm::Frobenius, &[1, 2], true)
        }),
    ] {
        as_in_float32(name, &others, f);
    }
    as_in_float32("softmax of axes", &others, |a| a.softmax(&[1, 2], false));
}
