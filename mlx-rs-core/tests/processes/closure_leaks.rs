//! Functions and arrays passed to MLX must be released, also if a function panics or fails.
//!
//! The test runs in a separate process, because the counters would also count concurrent tests.

use std::panic::{AssertUnwindSafe, catch_unwind};

use mlx_rs_core::transforms::{
    CustomFunction, FunctionExporter, checkpoint, compile, compile_clear_cache, export_function,
    grad, jvp, live_closures, value_and_grad_tree, vjp, vmap,
};
use mlx_rs_core::{Array, Error, ErrorKind, Result, eval, memory};

type Arrays = Result<Vec<Array>>;

#[derive(Clone, Copy)]
enum Fate {
    Work,
    Fail,
    Panic,
}

fn body(fate: Fate, x: &[Array]) -> Arrays {
    let y = x[0].sin()?.exp()?;
    match fate {
        Fate::Work => Ok(vec![y]),
        Fate::Fail => Err(Error::new(ErrorKind::Value, "test", "failed")),
        Fate::Panic => std::panic::panic_any(1u8),
    }
}

/// Uses every kind of function once. Results are dropped, so nothing may remain.
fn everything(fate: Fate, dir: &std::path::Path) -> Vec<Arrays> {
    let x = Array::scalar(0.5f32).unwrap();
    let one = || [x.clone()];
    let batch = [Array::vector(&[0.1f32, 0.2]).unwrap()];
    let captured = Array::vector(&[1.0f32; 100]).unwrap();
    let f = move |x: &[Array]| body(fate, x);
    let caught = |run: &mut dyn FnMut() -> Arrays| {
        catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Value, "test", "panicked")))
    };
    let mut all = vec![
        caught(&mut || grad(f, &[0])(&one())),
        caught(&mut || grad(grad(f, &[0]), &[0])(&one())),
        caught(&mut || {
            value_and_grad_tree(&vec![x.clone()], |x| Ok((body(fate, x)?.remove(0), ())))
                .map(|r| r.2)
        }),
        caught(&mut || vjp(f, &one(), &one()).map(|r| r.1)),
        caught(&mut || jvp(f, &one(), &one()).map(|r| r.1)),
        caught(&mut || vmap(f, 0, 0)(&batch)),
        caught(&mut || checkpoint(f)(&one())),
        caught(&mut || {
            let captured = captured.clone();
            let block =
                checkpoint(move |x: &[Array]| body(fate, &[x[0].add(&captured.sum(0, false)?)?]));
            grad(|x: &[Array]| block(x), &[0])(&one())
        }),
        caught(&mut || compile(f).call(&one())),
        caught(&mut || export_function(dir.join("f"), f, &one(), false).map(|()| vec![])),
        caught(&mut || {
            let mut e = FunctionExporter::new(dir.join("g"), f, false)?;
            e.export(&one())?;
            e.finish().map(|()| vec![])
        }),
    ];
    let square = |x: &[Array]| -> Arrays { Ok(vec![x[0].square()?]) };
    all.push(caught(&mut || {
        let custom = CustomFunction::new(square).with_vjp(move |x, _, _| body(fate, x));
        grad(|x: &[Array]| custom.call(x), &[0])(&one())
    }));
    all.push(caught(&mut || {
        let custom = CustomFunction::new(square).with_jvp(move |x, _| body(fate, x));
        jvp(|x: &[Array]| custom.call(x), &one(), &one()).map(|r| r.1)
    }));
    all.push(caught(&mut || {
        let custom = CustomFunction::new(square)
            .with_vmap(move |x, axes| Ok((body(fate, x)?, vec![axes[0]])));
        vmap(|x: &[Array]| custom.call(x), 0, 0)(&batch)
    }));
    // The graph keeps the function. It is evaluated in the stream's thread, after the function's
    // owner is dropped.
    all.push(caught(&mut || {
        let y = checkpoint(f)(&one())?;
        eval(&y)?;
        Ok(y)
    }));
    all
}

#[test]
fn functions_arrays_and_bytes_are_given_back() {
    crate::alone::alone(
        "closure_leaks::functions_arrays_and_bytes_are_given_back",
        functions_arrays_and_bytes_are_given_back_alone,
    );
}

fn functions_arrays_and_bytes_are_given_back_alone() {
    std::panic::set_hook(Box::new(|_| {}));
    let dir = tempfile::tempdir().unwrap();
    // The first run creates objects that MLX keeps, such as the default stream.
    everything(Fate::Work, dir.path());
    compile_clear_cache().unwrap();
    let bytes = || {
        mlx_rs_core::synchronize().unwrap();
        memory::active().unwrap()
    };
    let before = (memory::live_arrays(), live_closures(), bytes());
    for fate in [Fate::Work, Fate::Fail, Fate::Panic] {
        for _ in 0..20 {
            let all = everything(fate, dir.path());
            assert!(live_closures() < 100);
            for (i, result) in all.iter().enumerate() {
                assert_eq!(
                    result.is_ok(),
                    matches!(fate, Fate::Work),
                    "{i}: {result:?}"
                );
            }
            drop(all);
            assert_eq!(
                (memory::live_arrays(), live_closures()),
                (before.0, before.1)
            );
        }
    }
    assert_eq!(bytes(), before.2);
}
