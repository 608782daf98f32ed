//! Tests results and errors of checkpoints and custom derivatives.

#![expect(
    clippy::cloned_ref_to_slice_refs,
    reason = "a case reads the same with one array and with several"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlx_rs_core::transforms::{
    CustomFunction, Tree, checkpoint, checkpoint_tree, custom_jvp, custom_vjp, custom_vmap, grad,
    jvp, value_and_grad_tree, vmap,
};
use mlx_rs_core::{
    All, Array, Dtype, Error, ErrorKind, QuantMode, Quantized, Result, concatenate, eval,
};

type Arrays = Result<Vec<Array>>;

fn scalar(v: f32) -> Array {
    Array::scalar(v).unwrap()
}
fn vector(v: &[f32]) -> Array {
    Array::vector(v).unwrap()
}
fn kind<T>(r: Result<T>) -> (ErrorKind, String) {
    let e: Error = r.err().expect("an error");
    (e.kind(), e.to_string())
}

// ---- checkpoint

#[test]
fn checkpoint_runs_again_in_the_backward_pass_and_gives_the_same_gradient() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let block = move |x: &[Array]| -> Arrays {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(vec![x[0].sin()?.exp()?.multiply(&x[1])?, x[0].cos()?])
    };
    let total = |y: Vec<Array>| -> Arrays { Ok(vec![y[0].add(&y[1])?.sum(All, false)?]) };
    let args = [vector(&[0.1, 0.2]), vector(&[3.0, 4.0])];
    let plain = grad(|x: &[Array]| total(block(x)?), &[0, 1])(&args).unwrap();
    eval(&plain).unwrap();
    assert_eq!(runs.swap(0, Ordering::Relaxed), 1);
    let saved = checkpoint(block);
    let again = grad(|x: &[Array]| total(saved(x)?), &[0, 1])(&args).unwrap();
    eval(&again).unwrap();
    assert_eq!(
        runs.load(Ordering::Relaxed),
        2,
        "forward, and once more for the gradient"
    );
    for (a, b) in plain.iter().zip(&again) {
        assert!(a.all_close(b, 1e-6, 0.0).unwrap());
    }
}

#[test]
fn checkpoints_nest_and_outlive_their_function() {
    let inner = checkpoint(|x: &[Array]| -> Arrays { Ok(vec![x[0].square()?]) });
    let outer = checkpoint(move |x: &[Array]| inner(&[x[0].square()?]));
    let g = grad(|x: &[Array]| outer(x), &[0])(&[scalar(2.0)]).unwrap();
    assert_eq!(g[0].item::<f32>().unwrap(), 32.0);
    // The function is dropped, but the graph keeps the parts that it needs.
    let y = {
        let block = checkpoint(|x: &[Array]| -> Arrays { Ok(vec![x[0].exp()?]) });
        block(&[scalar(0.0)]).unwrap()
    };
    assert_eq!(y[0].item::<f32>().unwrap(), 1.0);
}

#[test]
fn a_checkpointed_layer_has_gradients_for_parameters_and_inputs() {
    type Params = BTreeMap<String, Array>;
    let plain = |p: &Params, x: &[Array]| -> Arrays {
        Ok(vec![x[0].matmul(&p["weight"])?.add(&p["bias"])?.tanh()?])
    };
    let saved = checkpoint_tree(plain);
    let params = Params::from([
        (
            "weight".to_string(),
            Array::from_slice(&[0.1f32, -0.2, 0.3, 0.4], &[2, 2]).unwrap(),
        ),
        ("bias".to_string(), vector(&[0.5, -0.5])),
    ]);
    let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let run = |layer: &dyn Fn(&Params, &[Array]) -> Arrays| {
        value_and_grad_tree(&(params.clone(), x.clone()), |(p, x)| -> Result<_> {
            let h = layer(p, &[x.clone()])?;
            Ok((layer(p, &h)?[0].square()?.sum(All, false)?, ()))
        })
        .unwrap()
    };
    let ((a, (), plain), (b, (), saved)) = (run(&plain), run(&saved));
    assert!(a.all_close(&b, 1e-6, 1e-6).unwrap());
    for (a, b) in plain.leaves().into_iter().zip(saved.leaves()) {
        assert!(a.all_close(b, 1e-5, 1e-6).unwrap());
        assert!(
            a.abs()
                .unwrap()
                .sum(All, false)
                .unwrap()
                .item::<f32>()
                .unwrap()
                > 0.0
        );
    }
}

#[test]
fn arguments_without_a_gradient_in_a_checkpoint() {
    // Indices have no gradient. For a quantized matrix, there must be an error instead of a wrong
    // gradient.
    let weight = mlx_rs_core::ones(&[8, 32], Dtype::Float32).unwrap();
    let q = Quantized::quantize(&weight, 32, 4, QuantMode::Affine).unwrap();
    let embed = checkpoint(|x: &[Array]| -> Arrays { Ok(vec![x[0].take_clamped(&x[1], 0)?]) });
    let ids = Array::vector(&[1i32, 1, 0]).unwrap();
    let loss = |x: &[Array]| -> Arrays {
        Ok(vec![
            embed(&[x[0].clone(), ids.clone()])?[0].sum(All, false)?,
        ])
    };
    let g = grad(loss, &[0])(&[vector(&[5.0, 6.0, 7.0])]).unwrap();
    assert_eq!(g[0].to_vec::<f32>().unwrap(), [1.0, 2.0, 0.0]);

    let inside = q.clone();
    let passed = checkpoint(move |x: &[Array]| -> Arrays {
        let q = Quantized {
            weight: x[1].clone(),
            ..inside.clone()
        };
        Ok(vec![q.matmul_transposed(&x[0])?])
    });
    let captured = {
        let q = q.clone();
        checkpoint(move |x: &[Array]| -> Arrays { Ok(vec![q.matmul_transposed(&x[0])?]) })
    };
    let x = mlx_rs_core::ones(&[1, 32], Dtype::Float32).unwrap();
    let loss = |x: &[Array]| -> Arrays {
        Ok(vec![
            passed(&[x[0].clone(), q.weight.clone()])?[0].sum(All, false)?,
        ])
    };
    assert_eq!(kind(grad(loss, &[0])(&[x.clone()])).0, ErrorKind::Mlx);
    let loss = |x: &[Array]| -> Arrays { Ok(vec![captured(x)?[0].sum(All, false)?]) };
    assert_eq!(
        grad(loss, &[0])(&[x]).unwrap()[0].to_vec::<f32>().unwrap(),
        [8.0; 32]
    );
}

// ---- custom derivatives

#[test]
fn custom_derivatives_replace_the_true_ones() {
    let f = custom_vjp(
        |x: &[Array]| -> Arrays { Ok(vec![x[0].multiply(&x[1])?]) },
        |primals, cotangents, outputs| {
            assert_eq!(outputs[0].item::<f32>()?, 6.0);
            Ok(vec![
                cotangents[0].multiply(&primals[0])?,
                cotangents[0].multiply(&scalar(7.0))?,
            ])
        },
    );
    let at = [scalar(2.0), scalar(3.0)];
    let grads = grad(|x: &[Array]| f(x), &[0, 1])(&at).unwrap();
    assert_eq!(grads[0].item::<f32>().unwrap(), 2.0);
    assert_eq!(grads[1].item::<f32>().unwrap(), 7.0);
    assert_eq!(f(&at).unwrap()[0].item::<f32>().unwrap(), 6.0);

    let g = custom_jvp(
        |x: &[Array]| -> Arrays { Ok(vec![x[0].multiply(&x[1])?]) },
        |_, tangents| Ok(vec![tangents[0].add(&tangents[1])?]),
    );
    let (_, slopes) = jvp(|x: &[Array]| g(x), &at, &[scalar(1.0), scalar(10.0)]).unwrap();
    assert_eq!(slopes[0].item::<f32>().unwrap(), 11.0);
    // Only one argument is differentiated, so the other has no tangent.
    let (_, slopes) = jvp(
        |x: &[Array]| g(&[x[0].clone(), scalar(3.0)]),
        &at[..1],
        &[scalar(1.0)],
    )
    .unwrap();
    assert_eq!(slopes[0].item::<f32>().unwrap(), 1.0);
    // The same must hold in a checkpoint, which runs the function again in the backward pass.
    let saved = checkpoint(g);
    let (_, slopes) = jvp(|x: &[Array]| saved(x), &at, &[scalar(1.0), scalar(10.0)]).unwrap();
    assert_eq!(slopes[0].item::<f32>().unwrap(), 11.0);

    let h = custom_vmap(
        |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?]) },
        |x, axes| Ok((vec![x[0].multiply(&scalar(100.0))?], vec![axes[0]])),
    );
    let y = vmap(|x: &[Array]| h(x), 0, 0)(&[vector(&[1.0, 2.0])]).unwrap();
    assert_eq!(y[0].to_vec::<f32>().unwrap(), [100.0, 200.0]);
}

#[test]
fn derivatives_that_do_not_fit_are_refused() {
    let run = |vjp: fn(&[Array]) -> Arrays| {
        let f = custom_vjp(
            |x: &[Array]| -> Arrays { Ok(vec![x[0].sum(All, false)?]) },
            move |primals, _, _| vjp(primals),
        );
        kind(grad(|x: &[Array]| f(x), &[0])(&[vector(&[1.0, 2.0])])).0
    };
    assert_eq!(run(|_| Ok(vec![])), ErrorKind::Shape);
    assert_eq!(
        run(|p| Ok(vec![p[0].clone(), p[0].clone()])),
        ErrorKind::Shape
    );
    assert_eq!(run(|p| Ok(vec![p[0].sum(All, false)?])), ErrorKind::Shape);
    assert_eq!(
        run(|p| Ok(vec![p[0].astype(Dtype::Float16)?])),
        ErrorKind::Dtype
    );

    let run = |jvp: fn(&[Array]) -> Arrays| {
        let f = custom_jvp(
            |x: &[Array]| -> Arrays { Ok(vec![x[0].sum(All, false)?]) },
            move |primals, _| jvp(primals),
        );
        let x = [vector(&[1.0, 2.0])];
        kind(mlx_rs_core::transforms::jvp(|x: &[Array]| f(x), &x, &x)).0
    };
    assert_eq!(run(|_| Ok(vec![])), ErrorKind::Shape);
    assert_eq!(run(|p| Ok(vec![p[0].clone()])), ErrorKind::Shape);

    type Batched = Result<(Vec<Array>, Vec<Option<i32>>)>;
    let run = |batched: fn(&[Array]) -> Batched| {
        let f = custom_vmap(
            |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?]) },
            move |x, _| batched(x),
        );
        kind(vmap(|x: &[Array]| f(x), 0, 0)(&[vector(&[1.0, 2.0])])).0
    };
    assert_eq!(run(|_| Ok((vec![], vec![]))), ErrorKind::Shape);
    assert_eq!(run(|x| Ok((x.to_vec(), vec![]))), ErrorKind::Value);
    assert_eq!(run(|x| Ok((x.to_vec(), vec![Some(1)]))), ErrorKind::Index);
    assert_eq!(run(|x| Ok((x.to_vec(), vec![None]))), ErrorKind::Shape);
    assert_eq!(
        run(|x| Ok((vec![concatenate(&[&x[0], &x[0]], 0)?], vec![Some(0)]))),
        ErrorKind::Shape
    );
}

#[test]
fn a_custom_function_may_have_all_three() {
    let f = CustomFunction::new(|x: &[Array]| -> Arrays { Ok(vec![x[0].square()?]) })
        .with_vjp(|_, c, _| Ok(vec![c[0].multiply(&scalar(10.0))?]))
        .with_jvp(|_, t| Ok(vec![t[0].multiply(&scalar(20.0))?]))
        .with_vmap(|x, axes| Ok((vec![x[0].negative()?], vec![axes[0]])));
    let x = scalar(3.0);
    assert_eq!(f.call(&[x.clone()]).unwrap()[0].item::<f32>().unwrap(), 9.0);
    let g = grad(|x: &[Array]| f.call(x), &[0])(&[x.clone()]).unwrap();
    assert_eq!(g[0].item::<f32>().unwrap(), 10.0);
    let (_, t) = jvp(|x: &[Array]| f.call(x), &[x.clone()], &[scalar(1.0)]).unwrap();
    assert_eq!(t[0].item::<f32>().unwrap(), 20.0);
    let y = vmap(|x: &[Array]| f.call(x), 0, 0)(&[vector(&[1.0, 2.0])]).unwrap();
    assert_eq!(y[0].to_vec::<f32>().unwrap(), [-1.0, -2.0]);
}
