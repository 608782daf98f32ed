//! Tests derivatives under `vmap`, and derivatives of mapped functions. MLX's own rules write
//! outside of memory there. Each result is compared with the function on each example. A child
//! process repeats some of the tests with a checked heap.

#![allow(
    clippy::cloned_ref_to_slice_refs,
    reason = "a list of one array is written as all lists of arguments are"
)]

use std::process::Command;

use mlx_rs_core::transforms::{checkpoint, grad, jvp, vmap};
use mlx_rs_core::{All, Array, Dtype, Result, ScatterMode, array, linalg, stack, zeros};

fn count(shape: &[i32]) -> Result<Array> {
    let numbers: Vec<f32> = (0..shape.iter().product::<i32>())
        .map(|i| 0.25 + 0.125 * ((i * 7) % 23) as f32)
        .collect();
    Array::from_slice(&numbers, shape)
}

fn close(what: &str, a: &Array, b: &Array) -> Result<()> {
    assert_eq!(a.shape(), b.shape(), "{what}");
    for (a, b) in a.to_vec::<f32>()?.iter().zip(&b.to_vec::<f32>()?) {
        assert!(
            (a - b).abs() <= 1e-4 * (1.0 + b.abs()),
            "{what}: {a}, not {b}"
        );
    }
    Ok(())
}

type Function = fn(&Array) -> Result<Array>;

/// Functions of `[n, m]` whose derivatives scatter, each valid for `n, m >= 2`.
const FUNCTIONS: &[(&str, Function)] = &[
    ("take", |x| {
        let rows = x.take(&array!([0, -1])?, 0)?.sigmoid()?;
        rows.slice_axis(-1, 0, 1)?.square()?.sum(All, false)?.sqrt()
    }),
    ("take columns", |x| {
        x.take(&array!([-1, 0, 0])?, 1)?.square()
    }),
    ("take_clamped", |x| {
        let rows = x.take_clamped(&array!([[0, 9], [1, 0]])?, 0)?.exp()?;
        rows.slice_axis(1, 1, 2)?.square()
    }),
    ("take of small integers", |x| {
        x.take(&array!([1u8, 0, 1])?, -1)?.exp()
    }),
    ("take_flat", |x| x.take_flat(&array!([1, 1, 3])?)?.square()),
    ("take_ids", |x| x.take_ids(&[1, 0, 1], 1)?.exp()),
    ("computed places", |x| {
        let at = x.argmax(1, false)?;
        x.take_clamped(&at, 0)?.square()
    }),
    ("take_along_axis", |x| {
        let at = x.argsort(1)?;
        x.repeat(2, 0)?.take_along_axis(&at.repeat(2, 0)?, 1)?.exp()
    }),
    ("fixed take_along_axis", |x| {
        let at = zeros(&[1, 1], Dtype::Int32)?;
        x.take_along_axis(&at.broadcast_to(&[x.shape()[0], 1])?, 1)?
            .exp()
    }),
    ("repeat, take, slice, take_along_axis", |x| {
        let y = x.repeat(2, 1)?.take(&array!([1, 0, 1])?, 0)?;
        let y = y.slice_axis(1, 1, 3)?;
        y.take_along_axis(&y.argsort(0)?, 0)?.square()
    }),
    ("put_along_axis", |x| {
        let at = x.stop_gradient()?.argmin(1, true)?;
        x.put_along_axis(&at, &x.slice_axis(1, 0, 1)?.exp()?, 1)?
            .square()
    }),
    ("scatter_add_axis", |x| {
        let at = x.stop_gradient()?.argsort(0)?;
        x.scatter_add_axis(&at, &x.exp()?, 0)?.square()
    }),
    ("gather", |x| {
        x.gather(&[&array!([1, 0])?, &array!([0, 1])?], &[0, 1], &[1, 1])?
            .exp()
    }),
    ("gather of a part", |x| {
        x.gather(&[&array!([1, 0])?], &[0], &[1, 1])?.exp()
    }),
    ("gather of blocks", |x| {
        x.gather(&[&array!([0])?], &[1], &[2, 2])?.exp()
    }),
    ("scatter", |x| {
        let updates = x.slice_axis(0, 0, 2)?.expand_dims(1)?.exp()?;
        x.scatter(&[&array!([1, 0])?], &updates, &[0], ScatterMode::Replace)?
            .square()
    }),
    ("scatter of sums", |x| {
        let updates = x.slice_axis(0, 0, 2)?.expand_dims(1)?.exp()?;
        x.scatter(&[&array!([1, 1])?], &updates, &[0], ScatterMode::Add)?
            .square()
    }),
    ("scatter of columns", |x| {
        let updates = x.slice_axis(1, 0, 2)?.transpose()?.expand_dims(2)?.exp()?;
        x.scatter(&[&array!([0, 1])?], &updates, &[1], ScatterMode::Max)?
            .square()
    }),
    ("slice_at", |x| {
        x.slice_at(&array!([1, 0])?, &[0, 1], &[1, 2])?.exp()
    }),
    ("slice_update_at", |x| {
        let part = x.slice_axis(1, 0, 1)?.exp()?;
        x.slice_update_at(&part, &array!([1])?, &[1])?.square()
    }),
    ("slice_update", |x| {
        let part = x.slice_axis(0, 1, 2)?.exp()?;
        x.slice_update(&part, &[0, 0], &[1, i32::MAX], &[1, 1])?
            .square()
    }),
    ("steps", |x| {
        x.slice(&[-1, 0], &[i32::MIN, i32::MAX], &[-1, 2])?.exp()
    }),
    ("diagonal", |x| x.diagonal(0, 0, 1)?.exp()),
    ("diag", |x| {
        let d = x.slice_axis(0, 0, 1)?.flatten(0, -1)?.diag(0)?;
        d.matmul(&d)?.exp()
    }),
    ("masked_scatter", |x| {
        x.masked_scatter(&x.greater(&array!(1.0f32)?)?, &x.flatten(0, -1)?.exp()?)
    }),
    ("sort", |x| x.sort(0)?.exp()?.multiply(x)),
    ("topk", |x| x.topk(1, 1)?.square()),
    ("cumsum", |x| x.cumsum(1, true, false)?.square()),
    ("split", |x| {
        let parts = x.split_at(&[1], 1)?;
        parts[0].multiply(&parts[1].slice_axis(1, 0, 1)?)?.exp()
    }),
    ("norm", |x| {
        x.take(&array!([0, 0])?, 0)?.softmax(-1, true)?.square()
    }),
];

fn sum(f: Function) -> impl Fn(&[Array]) -> Result<Vec<Array>> + Clone {
    move |x: &[Array]| Ok(vec![f(&x[0])?.sum(All, false)?])
}

/// Asserts that `slope` is the derivative of `f` at `x` along `tangent`, by finite differences.
fn assert_slope(what: &str, f: Function, x: &Array, tangent: &Array, slope: &Array) -> Result<()> {
    let h = array!(1.0f32 / 256.0)?;
    let step = tangent.multiply(&h)?;
    let (high, low) = (f(&x.add(&step)?)?, f(&x.subtract(&step)?)?);
    let expected = high.subtract(&low)?.divide(&h.add(&h)?)?;
    assert_eq!(slope.shape(), expected.shape(), "{what}");
    let (slope, expected) = (slope.to_vec::<f32>()?, expected.to_vec::<f32>()?);
    for (a, b) in slope.iter().zip(&expected) {
        assert!(
            (a - b).abs() <= 0.02 * (1.0 + b.abs()),
            "{what}: {slope:?}, by differences {expected:?}"
        );
    }
    Ok(())
}

/// Applies `each` to every example along `axis`, and stacks the results.
fn one_by_one(
    x: &Array,
    axis: i32,
    mut each: impl FnMut(&Array) -> Result<Array>,
) -> Result<Array> {
    let parts: Vec<Array> = (0..x.dim(axis)?)
        .map(|i| {
            each(
                &x.slice_axis(axis, i, i + 1)?
                    .squeeze_axis(axis)?
                    .contiguous()?,
            )
        })
        .collect::<Result<_>>()?;
    stack(&parts.iter().collect::<Vec<_>>(), 0)
}

/// The shapes of batches, and the axis of the examples.
const BATCHES: &[(&[i32], i32)] = &[
    (&[2, 2, 2], 0),
    (&[2, 2, 2], 1),
    (&[2, 2, 2], 2),
    (&[3, 2, 4], 0),
    (&[4, 3, 2], 1),
    (&[4, 4, 5], 2),
    (&[1, 3, 3], 0),
];

#[test]
fn gradients_of_each_example_are_those_of_one() -> Result<()> {
    for (name, f) in FUNCTIONS {
        for &(shape, axis) in BATCHES {
            let x = count(shape)?;
            let what = format!("{name} of {shape:?} over {axis}");
            let got = vmap(grad(sum(*f), &[0]), axis, 0)(&[x.clone()])?;
            let expected = one_by_one(&x, axis, |x| {
                Ok(grad(sum(*f), &[0])(&[x.clone()])?.remove(0))
            })?;
            close(&what, &got[0], &expected)?;
        }
    }
    Ok(())
}

#[test]
fn second_derivatives_and_forward_ones_as_well() -> Result<()> {
    for (name, f) in FUNCTIONS {
        for &(shape, axis) in &BATCHES[..4] {
            let x = count(shape)?;
            let what = format!("{name} of {shape:?} over {axis}");
            let slope = move |x: &[Array]| -> Result<Vec<Array>> {
                Ok(vec![grad(sum(*f), &[0])(x)?[0].square()?.sum(All, false)?])
            };
            // Some functions have no second derivative in MLX, even without a batch.
            let alone = one_by_one(&x, axis, |x| Ok(grad(slope, &[0])(&[x.clone()])?.remove(0)));
            let got = vmap(grad(slope, &[0]), axis, 0)(&[x.clone()]);
            if let (Ok(alone), Ok(got)) = (&alone, &got) {
                close(&format!("second {what}"), &got[0], alone)?;
            }
            assert_eq!(alone.is_err(), got.is_err(), "{what}: {alone:?} {got:?}");

            let along = move |x: &[Array], tangent: Array| -> Result<Vec<Array>> {
                Ok(jvp(|x: &[Array]| Ok(vec![f(&x[0])?]), x, &[tangent])?.1)
            };
            let one = x.slice_axis(axis, 0, 1)?.squeeze_axis(axis)?.contiguous()?;
            let plain = along(&[one.clone()], one.cos()?);
            if let Ok(plain) = &plain {
                assert_slope(&what, *f, &one, &one.cos()?, &plain[0])?;
            }
            let tangent = one.transpose()?.cos()?.contiguous()?.transpose()?;
            if let (Ok(plain), Ok(views)) = (plain, along(&[one], tangent)) {
                close(&format!("column-major {what}"), &views[0], &plain[0])?;
            }
            let forward =
                move |x: &[Array]| along(x, x[0].transpose()?.cos()?.contiguous()?.transpose()?);
            let alone = one_by_one(&x, axis, |x| Ok(forward(&[x.clone()])?.remove(0)));
            let got = vmap(forward, axis, 0)(&[x.clone()]);
            if let (Ok(alone), Ok(got)) = (&alone, &got) {
                close(&format!("forward {what}"), &got[0], alone)?;
            }
            assert_eq!(alone.is_err(), got.is_err(), "{what}: {alone:?} {got:?}");
        }
    }
    Ok(())
}

/// The tangents are column-major, and blocks have two axes. MLX reads such blocks in memory order.
#[test]
fn forward_derivatives_of_blocks() -> Result<()> {
    let functions: &[(&str, Function)] = &[
        ("first", |x| x.take(&array!([1, 0])?, 0)?.square()),
        ("middle", |x| x.take(&array!([1, 0])?, 1)?.square()),
        ("last", |x| x.take(&array!([1, 0])?, 2)?.square()),
        ("clamped", |x| x.take_clamped(&array!([1, 0])?, 2)?.square()),
        ("gather", |x| {
            x.gather(&[&array!([1, 0])?], &[2], &[2, 3, 1])?.square()
        }),
        ("part", |x| {
            x.gather(&[&array!([1, 0])?], &[2], &[2, 2, 1])?.square()
        }),
        ("none", |x| x.gather(&[], &[], &[2, 2, 3])?.square()),
        ("flat", |x| x.take_flat(&array!([5, 0])?)?.square()),
    ];
    let x = count(&[2, 3, 4])?;
    let tangent = x.transpose()?.cos()?.contiguous()?.transpose()?;
    for (name, f) in functions {
        let along = |x: &[Array]| -> Result<Vec<Array>> {
            let tangent = x[0].transpose()?.cos()?.contiguous()?.transpose()?;
            Ok(jvp(|x: &[Array]| Ok(vec![f(&x[0])?]), x, &[tangent])?.1)
        };
        assert_slope(name, *f, &x, &tangent, &along(&[x.clone()])?[0])?;
        for axis in 0..4 {
            let batch = stack(&[&x, &x.cos()?], axis)?;
            let got = vmap(along, axis, 0)(&[batch.clone()])?;
            let expected = one_by_one(&batch, axis, |x| Ok(along(&[x.clone()])?.remove(0)))?;
            close(&format!("{name} over {axis}"), &got[0], &expected)?;
        }
    }
    Ok(())
}

#[test]
fn mapped_functions_derive() -> Result<()> {
    for (name, f) in FUNCTIONS {
        for &(shape, axis) in BATCHES {
            let x = count(shape)?;
            let what = format!("{name} of {shape:?} over {axis}");
            let total = move |x: &[Array]| -> Result<Vec<Array>> {
                let each = vmap(sum(*f), axis, 0)(x)?;
                Ok(vec![each[0].square()?.sum(All, false)?])
            };
            let got = grad(total, &[0])(&[x.clone()])?;
            let one = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![sum(*f)(x)?[0].square()?]) };
            let expected = one_by_one(&x, axis, |x| Ok(grad(one, &[0])(&[x.clone()])?.remove(0)))?;
            close(&what, &got[0].move_axis(axis, 0)?, &expected)?;
            let again = grad(checkpoint(total), &[0])(&[x.clone()])?;
            close(&format!("checkpoint {what}"), &again[0], &got[0])?;
        }
    }
    Ok(())
}

#[test]
fn batches_of_batches_as_well() -> Result<()> {
    for (name, f) in FUNCTIONS {
        let x = count(&[2, 3, 2, 2])?;
        let mut inner = vmap(grad(sum(*f), &[0]), 1, 0);
        // The outer batch is the middle axis.
        let got = vmap(|x: &[Array]| inner(x), 1, 0)(&[x.clone()])?;
        let expected = one_by_one(&x, 1, |x| {
            one_by_one(x, 1, |x| Ok(grad(sum(*f), &[0])(&[x.clone()])?.remove(0)))
        })?;
        close(name, &got[0], &expected)?;
    }
    Ok(())
}

/// Either the indices or the array differ between examples.
#[test]
fn indices_may_have_the_batch() -> Result<()> {
    let x = count(&[2, 2, 3])?;
    let at = array!([[0, 2], [1, -1]])?;
    for (with_x, with_at) in [(true, true), (true, false), (false, true)] {
        let f = |a: &[Array]| -> Result<Vec<Array>> {
            let picked = a[0].take_clamped(&a[1], 1)?;
            Ok(vec![picked.square()?.multiply(&picked)?.sum(All, false)?])
        };
        let (axes, args) = (
            [with_x.then_some(0), with_at.then_some(1)],
            [
                if with_x {
                    x.clone()
                } else {
                    x.take_ids(&[0], 0)?.squeeze_axis(0)?
                },
                if with_at {
                    at.clone()
                } else {
                    at.take_ids(&[1], 0)?.squeeze_axis(0)?
                },
            ],
        );
        let got = vmap(grad(f, &[0]), axes, 0)(&args)?;
        for i in 0..2 {
            let x = if with_x {
                x.take_ids(&[i], 0)?.squeeze_axis(0)?
            } else {
                args[0].clone()
            };
            let at = if with_at {
                at.take_ids(&[i], 1)?.squeeze_axis(1)?
            } else {
                args[1].clone()
            };
            let expected = grad(f, &[0])(&[x, at])?;
            let i = i as i32;
            close(
                "indices",
                &got[0].slice_axis(0, i, i + 1)?.squeeze_axis(0)?,
                &expected[0],
            )?;
        }
    }
    Ok(())
}

/// For an empty batch, no rule of MLX may run. One of them reads axes that do not exist.
#[test]
fn empty_batches_have_empty_results() -> Result<()> {
    let diagonal: Function = |x| {
        let d = x.diag(0)?;
        d.matmul(&d)?.abs()
    };
    let inverse: Function = |x| linalg::inv(&x.diag(0)?.matmul(&x.diag(0)?)?);
    let exponential: Function = |x| {
        let d = x.diag(0)?;
        d.matmul(&d)?.exp()
    };
    for (f, shape) in [(diagonal, [0, 1]), (inverse, [0, 4]), (exponential, [0, 2])] {
        let got = vmap(grad(sum(f), &[0]), 0, 0)(&[zeros(&shape, Dtype::Float32)?])?;
        assert_eq!(got[0].shape(), shape);
        assert!(got[0].to_vec::<f32>()?.is_empty());
    }
    for (_, f) in FUNCTIONS {
        for axis in 0..3 {
            let mut shape = vec![3, 2];
            shape.insert(axis, 0);
            let x = zeros(&shape, Dtype::Float32)?;
            let got = vmap(grad(sum(*f), &[0]), axis as i32, axis as i32)(&[x])?;
            assert_eq!(got[0].shape(), shape);
        }
    }
    Ok(())
}

/// Runs the tests with a checked heap, where freed memory is overwritten. Results that are right
/// only by luck, because the wrong memory is readable, end the process.
///
/// valgrind finds more errors. With `RUST_MIN_STACK=300000000` these tests take a minute under
/// valgrind. No transform then needs a separate stack, whose 256 MiB valgrind would mark each time.
#[test]
fn a_checked_heap_stays_whole() {
    if std::env::var_os("SOUNDNESS_VMAP_CHILD").is_some() {
        for _ in 0..40 {
            for (_, f) in FUNCTIONS {
                for &(shape, axis) in BATCHES {
                    let x = count(shape).unwrap();
                    let got = vmap(grad(sum(*f), &[0]), axis, 0)(&[x]).unwrap();
                    got[0].to_vec::<f32>().unwrap();
                }
            }
        }
        return;
    }
    let out = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "soundness_vmap::a_checked_heap_stays_whole",
            "--nocapture",
        ])
        .env("SOUNDNESS_VMAP_CHILD", "1")
        // The C library has its heap checks in a separate library since 2.34. Without that library
        // the loader prints a warning and continues.
        .env("LD_PRELOAD", "libc_malloc_debug.so.0")
        .env("MALLOC_CHECK_", "3")
        .env("MALLOC_PERTURB_", "165")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {text}", out.status);
}
