//! A function given to MLX that fails: a panic resumes here, an error is the value that was returned,
//! in every kind of callback. What is counted is in `closure_leaks.rs`.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mlx_rs_core::transforms::{
    CustomFunction, FunctionExporter, Kwargs, checkpoint, compile, export_function,
    export_function_kwargs, grad, jvp, value_and_grad, value_and_grad_tree, vjp, vmap,
};
use mlx_rs_core::{Array, Error, ErrorKind, Result, eval};

/// An error of a program, with something in it that no text could carry.
#[derive(Debug)]
enum Mine {
    Mlx(Error),
    Code(u64),
}
impl fmt::Display for Mine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mine::Mlx(e) => write!(f, "mlx: {e}"),
            Mine::Code(code) => write!(f, "code {code} %n%s"),
        }
    }
}
impl std::error::Error for Mine {}
impl From<Error> for Mine {
    fn from(e: Error) -> Self {
        Mine::Mlx(e)
    }
}

const CODE: u64 = 0xdead_beef_cafe;

/// What a function under test does.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Panic,
    Fail,
    /// MLX itself refuses.
    Refuse,
}

fn meet<T>(fate: Fate, x: &[Array]) -> Result<T, Mine> {
    match fate {
        Fate::Panic => std::panic::panic_any(CODE),
        Fate::Fail => Err(Mine::Code(CODE)),
        Fate::Refuse => {
            x[0].reshape(&[12345])?;
            unreachable!("reshape should have failed")
        }
    }
}

fn one() -> Array {
    Array::scalar(1.0f32).unwrap()
}
fn batch() -> Array {
    Array::vector(&[1.0f32, 2.0]).unwrap()
}

/// Runs `f` with each fate and looks at what comes out.
fn all_fates(what: &str, f: impl Fn(Fate) -> Result<(), Mine>) {
    for _ in 0..2 {
        let payload = catch_unwind(AssertUnwindSafe(|| f(Fate::Panic))).expect_err(what);
        assert_eq!(payload.downcast_ref(), Some(&CODE), "{what}");
        match f(Fate::Fail) {
            Err(Mine::Code(CODE)) => {}
            other => panic!("{what}: {other:?}"),
        }
        match f(Fate::Refuse) {
            Err(Mine::Mlx(e)) => {
                assert_eq!((e.kind(), e.op()), (ErrorKind::Mlx, "reshape"), "{what}");
            }
            other => panic!("{what}: {other:?}"),
        }
        // Nothing is left behind.
        let g = grad(
            |x: &[Array]| -> Result<_> { Ok(vec![x[0].square()?]) },
            &[0],
        )(&[one()])
        .unwrap();
        assert_eq!(g[0].item::<f32>().unwrap(), 2.0, "{what}");
    }
}

#[test]
fn functions_of_gradients() {
    all_fates("grad", |fate| {
        grad(|x: &[Array]| meet(fate, x), &[0])(&[one()]).map(drop)
    });
    all_fates("value_and_grad", |fate| {
        value_and_grad(|x: &[Array]| meet(fate, x), &[0])(&[one()]).map(drop)
    });
    all_fates("value_and_grad_tree", |fate| {
        value_and_grad_tree(&vec![one()], |x| meet::<(Array, ())>(fate, x)).map(drop)
    });
    all_fates("vjp", |fate| {
        vjp(|x: &[Array]| meet(fate, x), &[one()], &[one()]).map(drop)
    });
    all_fates("jvp", |fate| {
        jvp(|x: &[Array]| meet(fate, x), &[one()], &[one()]).map(drop)
    });
}

#[test]
fn functions_of_nested_transforms() {
    all_fates("grad of grad", |fate| {
        let inner = grad(move |x: &[Array]| meet(fate, x), &[0]);
        grad(inner, &[0])(&[one()]).map(drop)
    });
    all_fates("vmap of grad", |fate| {
        let inner = grad(move |x: &[Array]| meet(fate, x), &[0]);
        vmap(inner, 0, 0)(&[batch()]).map(drop)
    });
}

#[test]
fn functions_of_vmap() {
    all_fates("vmap", |fate| {
        vmap(|x: &[Array]| meet(fate, x), 0, 0)(&[batch()]).map(drop)
    });
}

#[test]
fn functions_of_checkpoint_forward_and_backward() {
    all_fates("checkpoint", |fate| {
        checkpoint(move |x: &[Array]| meet(fate, x))(&[one()]).map(drop)
    });
    all_fates("checkpoint, backward", |fate| {
        let runs = std::sync::atomic::AtomicUsize::new(0);
        let block = checkpoint(move |x: &[Array]| -> Result<Vec<Array>, Mine> {
            if runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed) > 0 {
                return meet(fate, x);
            }
            Ok(vec![x[0].exp()?])
        });
        grad(|x: &[Array]| block(x), &[0])(&[one()]).map(drop)
    });
}

#[test]
fn custom_derivatives() {
    let square = |x: &[Array]| -> Result<Vec<Array>, Mine> { Ok(vec![x[0].square()?]) };
    all_fates("custom function", |fate| {
        CustomFunction::new(move |x: &[Array]| meet(fate, x))
            .call(&[one()])
            .map(drop)
    });
    all_fates("custom vjp", |fate| {
        let f = CustomFunction::new(square).with_vjp(move |x, _, _| meet(fate, x));
        grad(|x: &[Array]| f.call(x), &[0])(&[one()]).map(drop)
    });
    all_fates("custom jvp", |fate| {
        let f = CustomFunction::new(square).with_jvp(move |x, _| meet(fate, x));
        jvp(|x: &[Array]| f.call(x), &[one()], &[one()]).map(drop)
    });
    all_fates("custom vmap", |fate| {
        let f = CustomFunction::new(square).with_vmap(move |x, _| meet(fate, x));
        vmap(|x: &[Array]| f.call(x), 0, 0)(&[batch()]).map(drop)
    });
}

#[test]
fn compiled_functions() {
    all_fates("compile", |fate| {
        compile(move |x: &[Array]| meet(fate, x))
            .call(&[one()])
            .map(drop)
    });
    all_fates("compile, inside a gradient", |fate| {
        let f = compile(move |x: &[Array]| meet(fate, x));
        grad(|x: &[Array]| f.call(x), &[0])(&[one()]).map(drop)
    });
    // The same function may be called again after it failed.
    let fails = std::sync::atomic::AtomicBool::new(true);
    let f = compile(move |x: &[Array]| -> Result<Vec<Array>, Mine> {
        if fails.swap(false, std::sync::atomic::Ordering::Relaxed) {
            return meet(Fate::Fail, x);
        }
        Ok(vec![x[0].square()?])
    });
    assert!(f.call(&[one()]).is_err());
    assert_eq!(f.call(&[one()]).unwrap()[0].item::<f32>().unwrap(), 1.0);
}

#[test]
fn exported_functions() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.mlxfn");
    all_fates("export", |fate| {
        export_function(&path, |x: &[Array]| meet(fate, x), &[one()], false)
    });
    all_fates("export with names", |fate| {
        let f = |x: &[Array], _: &Kwargs| meet(fate, x);
        let named = Kwargs::from([("n".to_string(), one())]);
        export_function_kwargs(&path, f, &[one()], &named, false)
    });
    all_fates("exporter", |fate| {
        let mut e = FunctionExporter::new(&path, move |x: &[Array]| meet(fate, x), false)?;
        e.export(&[one()])
    });
    // No file, whole or half, is left of any of these.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn an_error_of_another_type_is_the_source() {
    let f =
        CustomFunction::new(|x: &[Array]| -> Result<Vec<Array>, Mine> { Ok(vec![x[0].square()?]) })
            .with_vjp(|_, _, _| Err(Mine::Code(CODE)));
    let outer = |x: &[Array]| -> Result<Vec<Array>> {
        f.call(x)
            .map_err(|_| Error::new(ErrorKind::Value, "outer", "not reached"))
    };
    let e = grad(outer, &[0])(&[one()]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Callback);
    assert!(e.message().contains("%n%s"), "{e}");
    let source = std::error::Error::source(&e).and_then(|s| s.downcast_ref::<Mine>());
    assert!(matches!(source, Some(Mine::Code(CODE))), "{source:?}");
}

#[test]
fn a_failure_that_the_function_handles_is_forgotten() {
    let inner = |x: &[Array]| meet::<Vec<Array>>(Fate::Fail, x);
    let f = |x: &[Array]| -> Result<Vec<Array>, Mine> {
        assert!(grad(inner, &[0])(x).is_err());
        let caught = catch_unwind(AssertUnwindSafe(|| {
            grad(|x: &[Array]| meet::<Vec<Array>>(Fate::Panic, x), &[0])(x)
        }));
        assert!(caught.is_err());
        Ok(vec![x[0].square()?])
    };
    let g = grad(f, &[0])(&[one()]).unwrap();
    assert_eq!(g[0].item::<f32>().unwrap(), 2.0);
}

#[test]
fn a_panic_in_a_value_dropped_by_c_does_not_abort() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("in drop");
        }
    }
    let bomb = Bomb;
    let y = {
        let block = checkpoint(move |x: &[Array]| -> Result<Vec<Array>> {
            let _ = &bomb;
            Ok(vec![x[0].square()?])
        });
        block(&[one()]).unwrap()
        // Rust drops its share of the function here, the graph the last one.
    };
    drop(y);
    eval([&one()]).unwrap();
}
