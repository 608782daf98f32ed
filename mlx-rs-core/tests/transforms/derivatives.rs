//! Tests results and errors of gradients over arguments and trees, Jacobian products, `vmap`,
//! checkpoints and custom derivatives. `gradients/` tests the values of single operations, and
//! `callbacks.rs` functions that fail.

#![expect(
    clippy::cloned_ref_to_slice_refs,
    reason = "a case reads the same with one array and with several"
)]

use std::collections::BTreeMap;
use std::sync::Arc;

use mlx_rs_core::transforms::{
    Tree, VmapAxes, checkpoint, grad, jvp, value_and_grad, value_and_grad_tree, vjp, vmap,
};
use mlx_rs_core::{All, Array, Dtype, Error, ErrorKind, Result, eval, where_};

type Arrays = Result<Vec<Array>>;

fn scalar(v: f32) -> Array {
    Array::scalar(v).unwrap()
}
fn vector(v: &[f32]) -> Array {
    Array::vector(v).unwrap()
}
fn matrix(v: &[f32], rows: i32) -> Array {
    Array::from_slice(v, &[rows, v.len() as i32 / rows]).unwrap()
}
fn kind<T>(r: Result<T>) -> (ErrorKind, String) {
    let e: Error = r.err().expect("an error");
    (e.kind(), e.to_string())
}
fn sum_of_squares(x: &[Array]) -> Arrays {
    Ok(vec![x[0].square()?.sum(All, false)?])
}

// ---- gradients

#[test]
fn gradients_come_in_the_order_they_were_asked_for() {
    let f = |x: &[Array]| -> Arrays {
        // The function is a + 10 b + 100 c.
        let b = x[1].multiply(&scalar(10.0))?;
        let c = x[2].multiply(&scalar(100.0))?;
        Ok(vec![x[0].add(&b)?.add(&c)?])
    };
    let args = [scalar(1.0), scalar(1.0), scalar(1.0)];
    for (argnums, expected) in [
        (&[0usize, 1, 2][..], &[1.0f32, 10.0, 100.0][..]),
        (&[2, 0, 1], &[100.0, 1.0, 10.0]),
        (&[1], &[10.0]),
    ] {
        let grads = grad(f, argnums)(&args).unwrap();
        let grads: Vec<f32> = grads.iter().map(|g| g.item().unwrap()).collect();
        assert_eq!(grads, expected);
    }
}

#[test]
fn an_argument_without_influence_has_zeros() {
    let grads =
        grad(sum_of_squares, &[0, 1])(&[vector(&[1.0, 2.0]), vector(&[5.0, 6.0, 7.0])]).unwrap();
    assert_eq!(grads[1].to_vec::<f32>().unwrap(), [0.0; 3]);
}

#[test]
fn gradients_keep_shape_and_type() {
    for dtype in [Dtype::Float16, Dtype::Bfloat16, Dtype::Float32] {
        let x = matrix(&[1.0, 2.0, 3.0, 4.0], 2).astype(dtype).unwrap();
        let grads = grad(sum_of_squares, &[0])(&[x]).unwrap();
        assert_eq!((grads[0].dtype(), grads[0].shape()), (dtype, &[2, 2][..]));
        assert_eq!(grads[0].to_f32_vec().unwrap(), [2.0, 4.0, 6.0, 8.0]);
    }
}

#[test]
fn what_cannot_be_differentiated_is_said_before_mlx_is_asked() {
    let x = vector(&[1.0, 2.0]);
    let ints = Array::vector(&[1i32, 2]).unwrap();
    let sum = |x: &[Array]| -> Arrays { Ok(vec![x[0].sum(All, false)?]) };
    let table: [(Result<Vec<Array>>, ErrorKind, &str); 8] = [
        (
            grad(sum, &[])(&[x.clone()]),
            ErrorKind::Value,
            "no argument",
        ),
        (
            grad(sum, &[1])(&[x.clone()]),
            ErrorKind::Index,
            "argument 1",
        ),
        (
            grad(sum, &[usize::MAX])(&[x.clone()]),
            ErrorKind::Index,
            "out of range",
        ),
        (grad(sum, &[0, 0])(&[x.clone()]), ErrorKind::Value, "twice"),
        (grad(sum, &[0])(&[ints]), ErrorKind::Dtype, "int32"),
        (
            grad(|x: &[Array]| -> Arrays { Ok(x.to_vec()) }, &[0])(&[x.clone()]),
            ErrorKind::Shape,
            "[2]",
        ),
        (
            grad(|_: &[Array]| -> Arrays { Ok(vec![]) }, &[0])(&[x.clone()]),
            ErrorKind::Value,
            "no arrays",
        ),
        (
            grad(
                |x: &[Array]| -> Arrays { Ok(vec![x[0].argmax(0, false)?]) },
                &[0],
            )(&[x]),
            ErrorKind::Dtype,
            "uint32",
        ),
    ];
    for (i, (result, expected, text)) in table.into_iter().enumerate() {
        let (kind, message) = kind(result);
        assert_eq!(kind, expected, "{i}: {message}");
        assert!(message.contains(text), "{i}: {message}");
    }
}

#[test]
fn values_can_be_read_inside_a_gradient_and_borrowed_state_written() {
    let mut seen = Vec::new();
    let mut f = value_and_grad(
        |x: &[Array]| -> Arrays {
            let y = x[0].square()?;
            seen.push(y.item::<f32>()?);
            Ok(vec![y])
        },
        &[0],
    );
    f(&[scalar(2.0)]).unwrap();
    f(&[scalar(3.0)]).unwrap();
    drop(f);
    assert_eq!(seen, [4.0, 9.0]);
}

#[test]
fn transforms_nest() {
    // f(x) = sum(x^3) has the gradient 3x^2. The gradient of its sum is 6x. Both are also computed
    // over a batch.
    let cubes =
        |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?.multiply(&x[0])?.sum(All, false)?]) };
    let mut first = grad(cubes, &[0]);
    let second = |x: &[Array]| -> Arrays { Ok(vec![first(x)?[0].sum(All, false)?]) };
    let x = matrix(&[1.0, 2.0, 3.0, 4.0], 2);
    let per_row = vmap(grad(second, &[0]), 0, 0)(&[x]).unwrap();
    assert_eq!(per_row[0].to_vec::<f32>().unwrap(), [6.0, 12.0, 18.0, 24.0]);
}

#[test]
fn stop_gradient_and_detach_end_the_gradient() {
    let f = |x: &[Array]| -> Arrays {
        let fixed = x[0].stop_gradient()?.multiply(&x[0].detach()?)?;
        Ok(vec![fixed.multiply(&x[0])?])
    };
    assert_eq!(
        grad(f, &[0])(&[scalar(3.0)]).unwrap()[0]
            .item::<f32>()
            .unwrap(),
        9.0
    );
    // An output that is only a `stop_gradient` must not shift the cotangents of the others.
    let g = |x: &[Array]| -> Arrays { Ok(vec![x[0].stop_gradient()?, x[0].square()?]) };
    let (_, products) = vjp(g, &[scalar(3.0)], &[scalar(1000.0), scalar(1.0)]).unwrap();
    assert_eq!(products[0].item::<f32>().unwrap(), 6.0);
}

#[test]
fn values_that_are_arguments_or_constants() {
    let x = [scalar(3.0), vector(&[1.0, 2.0])];
    let slope = |f: fn(&[Array]) -> Arrays| {
        let (values, grads) = value_and_grad(f, &[0])(&x).unwrap();
        let aux = values.get(1).map(|a| a.to_vec::<f32>().unwrap());
        (
            values[0].item::<f32>().unwrap(),
            grads[0].item::<f32>().unwrap(),
            aux,
        )
    };
    assert_eq!(slope(|x| Ok(vec![x[0].clone()])), (3.0, 1.0, None));
    assert_eq!(slope(|_| Ok(vec![scalar(5.0)])), (5.0, 0.0, None));
    assert_eq!(slope(|x| Ok(vec![x[0].stop_gradient()?])), (3.0, 0.0, None));
    // An output that is passed through may be an argument, a `stop_gradient`, an integer, or the
    // differentiated value itself.
    assert_eq!(
        slope(|x| Ok(vec![x[0].square()?, x[0].clone()])),
        (9.0, 6.0, Some(vec![3.0]))
    );
    assert_eq!(
        slope(|x| Ok(vec![x[0].square()?, x[1].clone()])),
        (9.0, 6.0, Some(vec![1.0, 2.0]))
    );
    assert_eq!(
        slope(|x| Ok(vec![x[0].square()?, x[0].stop_gradient()?])),
        (9.0, 6.0, Some(vec![3.0]))
    );
    assert_eq!(
        slope(|x| {
            let y = x[0].square()?;
            Ok(vec![y.clone(), y])
        }),
        (9.0, 6.0, Some(vec![9.0]))
    );
    let ints = |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?, x[1].argmax(0, false)?]) };
    let (values, grads) = value_and_grad(ints, &[0])(&x).unwrap();
    assert_eq!(values[1].item::<u32>().unwrap(), 1);
    assert_eq!(grads[0].item::<f32>().unwrap(), 6.0);
    // The same with `vjp`, for each position of the output.
    let (_, products) = vjp(|x: &[Array]| -> Arrays { Ok(x.to_vec()) }, &x, &x).unwrap();
    assert_eq!(products[1].to_vec::<f32>().unwrap(), [1.0, 2.0]);
}

// ---- trees

#[test]
fn named_trees_of_parameters() {
    type Layers = BTreeMap<String, BTreeMap<String, Array>>;
    let layer = |w: &[f32], b: f32| {
        BTreeMap::from([("w".to_string(), vector(w)), ("b".to_string(), scalar(b))])
    };
    let params: Layers = BTreeMap::from([
        ("l10".to_string(), layer(&[1.0, 2.0], 0.5)),
        ("l2".to_string(), layer(&[3.0], 0.25)),
    ]);
    let (loss, (), grads) = value_and_grad_tree(&params, |p| -> Result<_> {
        let mut total = scalar(0.0);
        for (i, layer) in p.values().enumerate() {
            let scale = scalar(10f32.powi(i as i32));
            let part = layer["w"].sum(All, false)?.multiply(&layer["b"])?;
            total = total.add(&part.multiply(&scale)?)?;
        }
        Ok((total, ()))
    })
    .unwrap();
    assert_eq!(loss.item::<f32>().unwrap(), 1.5 + 7.5);
    assert_eq!(grads["l10"]["w"].to_vec::<f32>().unwrap(), [0.5, 0.5]);
    assert_eq!(grads["l10"]["b"].item::<f32>().unwrap(), 3.0);
    assert_eq!(grads["l2"]["w"].to_vec::<f32>().unwrap(), [2.5]);
    assert_eq!(grads["l2"]["b"].item::<f32>().unwrap(), 30.0);
    // One step of gradient descent, for each leaf.
    let next = params
        .zip_leaves(&grads, |p, g| p.subtract(&g.multiply(&scalar(0.1))?))
        .unwrap();
    assert_eq!(next["l2"]["b"].item::<f32>().unwrap(), 0.25 - 3.0);
    eval(next.leaves()).unwrap();
}

#[test]
fn trees_refuse_what_has_no_gradient() {
    let f = |p: &Vec<Array>| -> Result<(Array, ())> { Ok((p[0].sum(All, false)?, ())) };
    assert_eq!(
        kind(value_and_grad_tree(&Vec::<Array>::new(), f)).0,
        ErrorKind::Value
    );
    let ints = vec![Array::vector(&[1i32]).unwrap()];
    assert_eq!(kind(value_and_grad_tree(&ints, f)).0, ErrorKind::Dtype);
}

// ---- products with Jacobians

#[test]
fn vjp_and_jvp_of_several_inputs_and_outputs() {
    // The function is (a, b) -> (a * b, a + b).
    let f = |x: &[Array]| -> Arrays { Ok(vec![x[0].multiply(&x[1])?, x[0].add(&x[1])?]) };
    let at = [scalar(2.0), scalar(5.0)];
    let (values, products) = vjp(f, &at, &[scalar(1.0), scalar(10.0)]).unwrap();
    assert_eq!(values[1].item::<f32>().unwrap(), 7.0);
    assert_eq!(products[0].item::<f32>().unwrap(), 15.0);
    assert_eq!(products[1].item::<f32>().unwrap(), 12.0);
    let (_, slopes) = jvp(f, &at, &[scalar(1.0), scalar(10.0)]).unwrap();
    assert_eq!(slopes[0].item::<f32>().unwrap(), 25.0);
    assert_eq!(slopes[1].item::<f32>().unwrap(), 11.0);
}

#[test]
fn the_forward_mode_is_safe_and_right_where_that_of_mlx_is_not() {
    // MLX 0.30 reads out of bounds in `where` if only one of the two branches has a tangent.
    let chosen = |x: &[Array]| -> Arrays {
        let negative = x[0].less(&scalar(0.0))?;
        Ok(vec![
            where_(&negative, &scalar(5.0), &x[0].square()?)?,
            x[0].argmax(0, false)?,
        ])
    };
    let x = [vector(&[-1.0, 3.0])];
    let (values, slopes) = jvp(chosen, &x, &[vector(&[1.0, 1.0])]).unwrap();
    assert_eq!(values[0].to_vec::<f32>().unwrap(), [5.0, 9.0]);
    assert_eq!(slopes[0].to_vec::<f32>().unwrap(), [0.0, 6.0]);
    // The tangent of an output without a derivative is zeros of the output's type.
    assert_eq!(
        (slopes[1].dtype(), slopes[1].item::<u32>().unwrap()),
        (Dtype::Uint32, 0)
    );
    // A function whose outputs do not depend on its inputs, and one without outputs.
    let constant = |_: &[Array]| -> Arrays { Ok(vec![scalar(3.0)]) };
    assert_eq!(
        jvp(constant, &x, &x).unwrap().1[0].item::<f32>().unwrap(),
        0.0
    );
    let nothing = |_: &[Array]| -> Arrays { Ok(vec![]) };
    assert!(jvp(nothing, &x, &x).unwrap().1.is_empty());
    // This function differs between its first and second run.
    let mut runs = 0;
    let changing = |x: &[Array]| -> Arrays {
        runs += 1;
        Ok(vec![x[0].repeat(runs, 0)?])
    };
    assert_eq!(kind(jvp(changing, &x, &x)).0, ErrorKind::Value);
}

#[test]
fn forward_over_reverse_and_reverse_over_forward() {
    // f(x) = sum(x^4): the Hessian times v is 12 x^2 v.
    let f = |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?.square()?.sum(All, false)?]) };
    let (x, v) = ([vector(&[1.0, 2.0])], [vector(&[1.0, 10.0])]);
    let (_, forward) = jvp(grad(f, &[0]), &x, &v).unwrap();
    assert_eq!(forward[0].to_vec::<f32>().unwrap(), [12.0, 480.0]);
    let slope = |x: &[Array]| -> Arrays { Ok(jvp(f, x, &v)?.1) };
    let reverse = grad(slope, &[0])(&x).unwrap();
    assert_eq!(reverse[0].to_vec::<f32>().unwrap(), [12.0, 480.0]);
}

#[test]
fn products_check_their_vectors() {
    let f = |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?]) };
    let x = [vector(&[1.0, 2.0])];
    for bad in [
        vec![],
        vec![scalar(1.0)],
        vec![vector(&[1.0, 2.0]), scalar(1.0)],
    ] {
        assert_eq!(kind(vjp(f, &x, &bad)).0, ErrorKind::Shape);
        assert_eq!(kind(jvp(f, &x, &bad)).0, ErrorKind::Shape);
    }
    let ints = [Array::vector(&[1i32]).unwrap()];
    assert_eq!(kind(vjp(f, &ints, &ints)).0, ErrorKind::Dtype);
    assert_eq!(kind(jvp(f, &ints, &ints)).0, ErrorKind::Dtype);
    // A tangent of another float type is converted to the primal's type.
    let half = vector(&[1.0, 1.0]).astype(Dtype::Float16).unwrap();
    let (_, slopes) = jvp(f, &x, &[half]).unwrap();
    assert_eq!(slopes[0].dtype(), Dtype::Float32);
}

// ---- vmap

#[test]
fn vmap_over_any_axis_in_and_out() {
    let x = matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
    let double = |x: &[Array]| -> Arrays { Ok(vec![x[0].add(&x[0])?]) };
    let turned = x
        .add(&x)
        .unwrap()
        .transpose()
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    for (i, o, shape) in [
        (0, 0, [2, 3]),
        (0, 1, [3, 2]),
        (1, 0, [3, 2]),
        (-1, -1, [2, 3]),
    ] {
        let y = vmap(double, i, o)(&[x.clone()]).unwrap();
        assert_eq!(y[0].shape(), shape, "{i} {o}");
        if (i, o) == (0, 1) || (i, o) == (1, 0) {
            assert_eq!(y[0].to_vec::<f32>().unwrap(), turned);
        }
    }
}

#[test]
fn vmap_refuses_what_does_not_fit() {
    let first = |x: &[Array]| -> Arrays { Ok(vec![x[0].clone()]) };
    let x = matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
    let e = |i: VmapAxes, o: VmapAxes, args: &[Array]| kind(vmap(first, i, o)(args)).0;
    let all = VmapAxes::All;
    let each = |a: &[Option<i32>]| VmapAxes::from(a);
    assert_eq!(e(all(2), all(0), &[x.clone()]), ErrorKind::Index);
    assert_eq!(e(all(-3), all(0), &[x.clone()]), ErrorKind::Index);
    assert_eq!(e(all(0), all(2), &[x.clone()]), ErrorKind::Index);
    assert_eq!(e(all(0), all(i32::MIN), &[x.clone()]), ErrorKind::Index);
    assert_eq!(e(all(0), all(0), &[scalar(1.0)]), ErrorKind::Index);
    assert_eq!(
        e(all(0), all(0), &[x.clone(), vector(&[1.0])]),
        ErrorKind::Shape
    );
    assert_eq!(e(each(&[None]), all(0), &[x.clone()]), ErrorKind::Value);
    assert_eq!(
        e(each(&[Some(0), None]), all(0), &[x.clone()]),
        ErrorKind::Value
    );
    assert_eq!(e(all(0), each(&[None]), &[x.clone()]), ErrorKind::Value);
    assert_eq!(e(all(0), each(&[]), &[x.clone()]), ErrorKind::Value);
    assert_eq!(e(all(0), all(0), &[]), ErrorKind::Value);
    // Reading a value must fail, because the arrays that `vmap` passes have no values.
    let reads = |x: &[Array]| -> Arrays { Ok(vec![scalar(x[0].sum(All, false)?.item::<f32>()?)]) };
    assert_eq!(kind(vmap(reads, 0, 0)(&[x])).0, ErrorKind::Mlx);
}

#[test]
fn vmap_keeps_indices_inside_whatever_the_batch() {
    let table = matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2); // two batches of three
    let wild = Array::from_slice(&[0i32, 9, -1, i32::MAX, i32::MIN, 2], &[2, 3]).unwrap();
    type Two = fn(&[Array]) -> Arrays;
    let functions: [Two; 3] = [
        |x| Ok(vec![x[0].take_clamped(&x[1], 0)?]),
        |x| Ok(vec![x[0].take_along_axis(&x[1], 0)?]),
        |x| Ok(vec![x[0].put_along_axis(&x[1], &scalar(0.0), 0)?]),
    ];
    for f in functions {
        for axes in [[Some(0), Some(0)], [None, Some(0)], [Some(0), None]] {
            let (mut args, mut rows) = (Vec::new(), [Vec::new(), Vec::new()]);
            for (array, axis) in [&table, &wild].into_iter().zip(axes) {
                let row = |i| {
                    array
                        .slice_axis(0, i, i + 1)
                        .unwrap()
                        .squeeze_axis(0)
                        .unwrap()
                };
                args.push(if axis.is_some() {
                    array.clone()
                } else {
                    row(0)
                });
                for (i, rows) in rows.iter_mut().enumerate() {
                    rows.push(row(if axis.is_some() { i as i32 } else { 0 }));
                }
            }
            let given = match vmap(f, axes, 0)(&args) {
                Ok(mut given) => given.remove(0),
                // MLX may not support this operation under `vmap`; an error is correct.
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::Mlx, "{e}");
                    continue;
                }
            };
            let expected: Vec<Array> = rows.iter().map(|r| f(r).unwrap().remove(0)).collect();
            let expected = mlx_rs_core::stack(&expected.iter().collect::<Vec<_>>(), 0).unwrap();
            assert_eq!(
                given.to_vec::<f32>().unwrap(),
                expected.to_vec::<f32>().unwrap(),
                "{axes:?}"
            );
        }
    }
    // Checked indices read values, which arrays under `vmap` do not have. Strides apply to a single
    // example.
    let checked = |x: &[Array]| -> Arrays { Ok(vec![x[0].take(&x[1], 0)?]) };
    assert!(vmap(checked, 0, 0)(&[table.clone(), wild]).is_err());
    let strided = |x: &[Array]| -> Arrays { Ok(vec![x[0].as_strided(&[2], &[2], 0)?]) };
    if let Ok(y) = vmap(strided, 0, 0)(&[table.clone()]) {
        assert_eq!(y[0].to_vec::<f32>().unwrap(), [1.0, 3.0, 4.0, 6.0]);
    }
    // The batch is empty.
    let empty = mlx_rs_core::zeros(&[0, 3], Dtype::Float32).unwrap();
    if let Ok(y) = vmap(|x: &[Array]| -> Arrays { Ok(vec![x[0].exp()?]) }, 0, 0)(&[empty]) {
        assert_eq!(y[0].shape(), [0, 3]);
        assert!(y[0].to_vec::<f32>().unwrap().is_empty());
    }
}

// ---- threads

#[test]
fn eight_threads_differentiate_at_once() {
    let shared = Arc::new(checkpoint(|x: &[Array]| -> Arrays {
        Ok(vec![x[0].square()?.exp()?])
    }));
    let threads: Vec<_> = (0..8)
        .map(|t| {
            let block = Arc::clone(&shared);
            std::thread::spawn(move || {
                for i in 0..20 {
                    let x = 0.01 * (t * 20 + i) as f32;
                    let g = grad(|x: &[Array]| block(x), &[0])(&[scalar(x)]).unwrap();
                    let expected = 2.0 * x * (x * x).exp();
                    assert!(
                        (g[0].item::<f32>().unwrap() - expected).abs() < 1e-3 * expected.max(1.0)
                    );
                }
            })
        })
        .collect();
    for t in threads {
        t.join().unwrap();
    }
}

/// The gradient of the sum of a running extreme. Each result counts for the element that it equals,
/// the latest one if several are equal. A result that is NaN, or precedes the first element, counts
/// for none.
fn slopes_of_extreme(row: &[f32], greatest: bool, reverse: bool, inclusive: bool) -> Vec<f32> {
    let mut slopes = vec![0.0; row.len()];
    let order: Vec<usize> = match reverse {
        true => (0..row.len()).rev().collect(),
        false => (0..row.len()).collect(),
    };
    for (n, _) in order.iter().enumerate() {
        let seen = &order[..n + usize::from(inclusive)];
        if seen.iter().any(|&i| row[i].is_nan()) {
            continue;
        }
        let value = |i: usize| if greatest { row[i] } else { -row[i] };
        let owner = seen
            .iter()
            .copied()
            .reduce(|best, i| match value(i) >= value(best) {
                true => i,
                false => best,
            });
        if let Some(owner) = owner {
            slopes[owner] += 1.0;
        }
    }
    slopes
}

/// MLX 0.32 searches for the element that equals the extreme. NaN equals nothing, so MLX writes
/// outside of the gradient's memory. Earlier versions have no such gradient.
#[test]
fn gradients_of_running_extremes_stay_inside_their_memory() {
    let (rows, width) = (40, 33);
    let mut values: Vec<f32> = (0..rows * width).map(|i| (i * 7919 % 13) as f32).collect();
    for row in 0..rows {
        // NaN is first, last, in the middle, everywhere, or absent.
        match row % 5 {
            0 => values[row * width] = f32::NAN,
            1 => values[row * width + width - 1] = f32::NAN,
            2 => values[row * width + width / 2] = f32::NAN,
            3 => values[row * width..(row + 1) * width].fill(f32::NAN),
            _ => values[row * width + 4] = f32::NEG_INFINITY,
        }
    }
    let x = matrix(&values, rows as i32);
    for case in 0..8 {
        let [greatest, reverse, inclusive] = [1, 2, 4].map(|bit| case & bit != 0);
        let extreme = move |x: &Array| match greatest {
            true => x.cummax(-1, reverse, inclusive),
            false => x.cummin(-1, reverse, inclusive),
        };
        let expected: Vec<f32> = values
            .chunks(width)
            .flat_map(|row| slopes_of_extreme(row, greatest, reverse, inclusive))
            .collect();
        let total = move |x: &[Array]| -> Arrays { Ok(vec![extreme(&x[0])?.sum(All, false)?]) };
        match grad(total, &[0])(&[x.clone()]) {
            Ok(slopes) => {
                let slopes = slopes[0].to_vec::<f32>().unwrap();
                assert_eq!(slopes, expected, "{greatest} {reverse} {inclusive}");
            }
            Err(e) => assert!(
                e.to_string().contains("VJP is not implemented"),
                "{greatest} {reverse} {inclusive}: {e}"
            ),
        }
        // The values must equal those without a gradient, also in 16-bit types.
        let plain = extreme(&x).unwrap().to_vec::<f32>().unwrap();
        for dtype in [Dtype::Float16, Dtype::Bfloat16] {
            let narrow = extreme(&x.astype(dtype).unwrap()).unwrap();
            let narrow = narrow.astype(Dtype::Float32).unwrap();
            let same = narrow.to_vec::<f32>().unwrap();
            let differs = |(a, b): (&f32, &f32)| a != b && !(a.is_nan() && b.is_nan());
            let at = plain.iter().zip(&same).position(differs);
            let shown = at.map(|i| (i, plain[i], same[i]));
            assert_eq!(shown, None, "{dtype} {greatest} {reverse} {inclusive}");
        }
        let traced = checkpoint(move |x: &[Array]| -> Arrays { Ok(vec![extreme(&x[0])?]) });
        let traced = traced(&[x.clone()]).unwrap()[0].to_vec::<f32>().unwrap();
        let bits = |all: &[f32]| -> Vec<Option<u32>> {
            let one = |v: &f32| (!v.is_nan()).then(|| v.to_bits());
            all.iter().map(one).collect()
        };
        assert_eq!(
            bits(&plain),
            bits(&traced),
            "{greatest} {reverse} {inclusive}"
        );
    }
}
