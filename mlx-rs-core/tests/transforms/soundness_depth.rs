//! Builds graphs of hundreds of thousands of operations, in threads with small stacks. A transform
//! must return a result or an error. The stack must not overflow.

use mlx_rs_core::transforms::{
    checkpoint, compile, custom_vjp, export_function, grad, jvp, value_and_grad, vjp, vmap,
};
use mlx_rs_core::{Array, Device, ErrorKind, Result, Stream};

/// A depth that would overflow a stack of 8 MiB several times.
const DEEP: usize = 400_000;
/// A depth that would overflow the stack of these tests.
const MEDIUM: usize = 50_000;
/// A depth that exceeds the stack of a transform.
const TOO_DEEP: usize = 540_000;

type Arrays = Result<Vec<Array>>;

fn chain(x: &Array, n: usize) -> Result<Array> {
    let mut y = x.clone();
    for _ in 0..n {
        y = y.negative()?;
    }
    Ok(y)
}

fn scalar(v: f32) -> Array {
    Array::scalar(v).unwrap()
}

/// Runs `f` on the CPU with a stack of 256 KiB, a quarter of the smallest default.
fn with_little_stack(f: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    let run = move || Stream::default_of(Device::cpu()).unwrap().scope(f);
    thread.spawn(run).unwrap().join().unwrap();
}

fn too_deep<T: std::fmt::Debug>(result: Result<T>) {
    let e = result.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Value, "{e}");
    assert!(e.message().contains("operations"), "{e}");
}

#[test]
fn gradients_of_deep_graphs() {
    with_little_stack(|| {
        let f = |n: usize| move |x: &[Array]| -> Arrays { Ok(vec![chain(&x[0], n)?]) };
        let g = grad(f(DEEP), &[0])(&[scalar(2.0)]).unwrap();
        assert_eq!(g[0].item::<f32>().unwrap(), 1.0);
        too_deep(grad(f(TOO_DEEP), &[0])(&[scalar(2.0)]));
        let (_, g) = vjp(f(DEEP), &[scalar(2.0)], &[scalar(3.0)]).unwrap();
        assert_eq!(g[0].item::<f32>().unwrap(), 3.0);
    });
}

#[test]
fn forward_derivatives_of_deep_graphs() {
    with_little_stack(|| {
        let f = |x: &[Array]| -> Arrays { Ok(vec![chain(&x[0], MEDIUM)?]) };
        let (_, g) = jvp(f, &[scalar(2.0)], &[scalar(3.0)]).unwrap();
        assert_eq!(g[0].item::<f32>().unwrap(), 3.0);
    });
}

#[test]
fn a_captured_deep_graph() {
    with_little_stack(|| {
        for n in [MEDIUM, TOO_DEEP] {
            let outer = chain(&scalar(2.0), n).unwrap();
            let f = |x: &[Array]| -> Arrays { Ok(vec![x[0].multiply(&outer)?]) };
            let x = Array::vector(&[1.0f32, 2.0]).unwrap();
            let results = [
                grad(f, &[0])(&[scalar(3.0)]),
                vmap(f, 0, 0)(std::slice::from_ref(&x)),
                {
                    let outer = outer.clone();
                    let f = move |x: &[Array]| -> Arrays { Ok(vec![x[0].multiply(&outer)?]) };
                    compile(f).call(std::slice::from_ref(&x))
                },
            ];
            for result in results {
                if n == MEDIUM {
                    result.unwrap()[0].eval().unwrap();
                } else {
                    too_deep(result);
                }
            }
        }
    });
}

#[test]
fn compiled_and_mapped_deep_graphs() {
    with_little_stack(|| {
        let f = |x: &[Array]| -> Arrays { Ok(vec![chain(&x[0], MEDIUM)?]) };
        let compiled = compile(f);
        for v in [1.0, 2.0] {
            let y = compiled.call(&[scalar(v)]).unwrap();
            assert_eq!(y[0].item::<f32>().unwrap(), v);
        }
        let x = Array::vector(&[1.0f32, 2.0]).unwrap();
        let y = vmap(f, 0, 0)(std::slice::from_ref(&x)).unwrap();
        assert_eq!(y[0].to_vec::<f32>().unwrap(), [1.0, 2.0]);
        too_deep(compile(|x: &[Array]| -> Arrays { Ok(vec![chain(&x[0], TOO_DEEP)?]) }).call(&[x]));
    });
}

#[test]
fn deep_graphs_are_exported() {
    with_little_stack(|| {
        let dir = tempfile::tempdir().unwrap();
        let f = |x: &[Array]| -> Arrays { Ok(vec![chain(&x[0], MEDIUM / 5)?]) };
        let x = [scalar(1.0)];
        export_function(dir.path().join("f"), f, &x, false).unwrap();
        let f = |x: &[Array]| -> Arrays { Ok(vec![chain(&x[0], TOO_DEEP)?]) };
        too_deep(export_function(dir.path().join("f"), f, &x, false));
    });
}

#[test]
fn a_checkpoint_of_a_deep_graph() {
    with_little_stack(|| {
        for n in [MEDIUM, TOO_DEEP] {
            let block = checkpoint(move |x: &[Array]| -> Arrays { Ok(vec![chain(&x[0], n)?]) });
            let result = value_and_grad(block, &[0])(&[scalar(2.0)]);
            if n == MEDIUM {
                assert_eq!(result.unwrap().1[0].item::<f32>().unwrap(), 1.0);
            } else {
                too_deep(result);
            }
        }
    });
}

#[test]
fn long_chains_of_functions_are_dropped() {
    with_little_stack(|| {
        let n = 100_000;
        let double = custom_vjp(
            |x: &[Array]| -> Arrays { Ok(vec![x[0].add(&x[0])?]) },
            |_, cotangents, _| Ok(vec![cotangents[0].clone()]),
        );
        let saved = checkpoint(|x: &[Array]| -> Arrays { Ok(vec![x[0].negative()?]) });
        for f in [
            &double as &dyn Fn(&[Array]) -> Arrays,
            &saved as &dyn Fn(&[Array]) -> Arrays,
        ] {
            let mut y = vec![scalar(1.0)];
            for _ in 0..n {
                y = f(&y).unwrap();
            }
            drop(y);
        }
    });
}

#[test]
fn long_chains_of_functions_are_evaluated() {
    with_little_stack(|| {
        let saved = checkpoint(|x: &[Array]| -> Arrays { Ok(vec![x[0].negative()?]) });
        let mut y = vec![scalar(1.0)];
        for _ in 0..20_000 {
            y = saved(&y).unwrap();
        }
        assert_eq!(y[0].item::<f32>().unwrap(), 1.0);
        let f = |x: &[Array]| -> Arrays {
            let mut y = x.to_vec();
            for _ in 0..20_000 {
                y = saved(&y)?;
            }
            Ok(y)
        };
        let g = grad(f, &[0])(&[scalar(2.0)]).unwrap();
        assert_eq!(g[0].item::<f32>().unwrap(), 1.0);
    });
}

#[test]
fn functions_of_functions_are_dropped() {
    type Function = Box<dyn Fn(&[Array]) -> Arrays + Send>;
    with_little_stack(|| {
        let mut f: Function = Box::new(|x: &[Array]| -> Arrays { Ok(x.to_vec()) });
        for i in 0..100_000 {
            let inner = f;
            f = if i % 2 == 0 {
                Box::new(custom_vjp(inner, |_, cotangents, _| {
                    Ok(vec![cotangents[0].clone()])
                }))
            } else {
                Box::new(checkpoint(inner))
            };
        }
        drop(f);
    });
}
