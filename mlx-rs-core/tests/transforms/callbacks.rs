//! Tests failures of functions given to MLX, in every kind of callback. A panic must resume in the
//! caller, and an error must be returned. `closure_leaks.rs` checks that nothing leaks.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mlx_rs_core::transforms::{
    CustomFunction, FunctionExporter, Kwargs, checkpoint, compile, export_function,
    export_function_kwargs, grad, jvp, value_and_grad, value_and_grad_tree, vjp, vmap,
};
use mlx_rs_core::{Array, Device, Error, ErrorKind, Result, Stream, eval, io};

/// A program's error type, with a value that a message could not carry.
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

/// How a function under test ends.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Panic,
    Fail,
    /// The function calls MLX so that MLX refuses.
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

/// Runs `f` with each fate and checks the result.
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
        // After each failure, another transform must succeed.
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
    // A compiled function may be called again after it failed.
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
    // None of the failures may leave a file, complete or partial.
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
        // Rust drops its reference to the function here, and the graph drops the last one.
    };
    drop(y);
    eval([&one()]).unwrap();
}

/// A panic whose payload panics again when it is dropped must not abort.
#[test]
fn a_panic_in_what_a_panic_carries_does_not_abort() {
    struct Relentless;
    impl Drop for Relentless {
        fn drop(&mut self) {
            panic!("again");
        }
    }
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            std::panic::panic_any(Relentless);
        }
    }
    let bomb = Bomb;
    let y = {
        let block = checkpoint(move |x: &[Array]| -> Result<Vec<Array>> {
            let _ = &bomb;
            Ok(vec![x[0].square()?])
        });
        block(&[one()]).unwrap()
        // Rust drops its reference to the function here, and the graph drops the last one.
    };
    drop(y);
    eval([&one()]).unwrap();
}

/// A user's reader or writer that panics or fails after this many bytes.
struct Broken {
    left: usize,
    bytes: std::io::Cursor<Vec<u8>>,
    panics: bool,
}

impl Broken {
    fn new(left: usize, bytes: &[u8], panics: bool) -> Self {
        let bytes = std::io::Cursor::new(bytes.to_vec());
        Self {
            left,
            bytes,
            panics,
        }
    }

    /// The number of bytes, at most `n`, before the failure.
    fn some(&mut self, n: usize) -> std::io::Result<usize> {
        if self.left == 0 && self.panics {
            std::panic::panic_any(CODE);
        }
        if self.left == 0 {
            return Err(std::io::Error::other("code %n%s"));
        }
        let n = n.min(self.left);
        self.left -= n;
        Ok(n)
    }
}

impl std::io::Read for Broken {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let n = self.some(into.len())?;
        self.bytes.read(&mut into[..n])
    }
}

impl std::io::Write for Broken {
    fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
        self.some(from.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn readers_and_writers() {
    let mut good = Vec::new();
    io::write_npy(&mut good, &batch()).unwrap();
    for left in 0..good.len() {
        let payload = catch_unwind(AssertUnwindSafe(|| {
            io::read_npy(Broken::new(left, &good, true)).map(drop)
        }));
        assert_eq!(payload.unwrap_err().downcast_ref(), Some(&CODE), "{left}");
        let e = io::read_npy(Broken::new(left, &good, false)).unwrap_err();
        assert!(e.message().contains("code %n%s"), "{left}: {e}");

        let payload = catch_unwind(AssertUnwindSafe(|| {
            io::write_npy(Broken::new(left, &[], true), &batch())
        }));
        assert_eq!(payload.unwrap_err().downcast_ref(), Some(&CODE), "{left}");
        let e = io::write_npy(Broken::new(left, &[], false), &batch()).unwrap_err();
        assert!(e.message().contains("code %n%s"), "{left}: {e}");
    }
    // The lock must be free: another thread can work, and so can this thread.
    let sum = std::thread::spawn(|| batch().sum(0, false).unwrap().item::<f32>().unwrap());
    assert_eq!(sum.join().unwrap(), 3.0);
    let back = io::read_npy(&good[..]).unwrap();
    assert!(back.array_equal(&batch()).unwrap());
}

#[test]
fn scopes_of_streams_and_devices() {
    let stream = Stream::new(Device::cpu()).unwrap();
    all_fates("stream", |fate| stream.scope(|| meet(fate, &[one()])));
    all_fates("device", |fate| {
        Device::cpu().scope(|| meet(fate, &[one()]))
    });
    assert_ne!(Stream::current().unwrap(), stream);
}

#[test]
fn compiled_functions_on_eight_threads() {
    std::thread::scope(|scope| {
        for t in 0..8 {
            scope.spawn(move || {
                for round in 0..10 {
                    let fate = [Fate::Panic, Fate::Fail, Fate::Refuse][(t + round) % 3];
                    let run = catch_unwind(AssertUnwindSafe(|| {
                        let f = compile(move |x: &[Array]| meet::<Vec<Array>>(fate, x));
                        let inner = grad(|x: &[Array]| f.call(x), &[0])(&[one()]);
                        inner.and_then(|_| vmap(|x: &[Array]| meet(fate, x), 0, 0)(&[batch()]))
                    }));
                    assert_eq!(run.is_err(), fate == Fate::Panic);
                    assert!(run.map_or(true, |r| r.is_err()));
                    let square = |x: &[Array]| -> Result<_> { Ok(vec![x[0].square()?]) };
                    let g = grad(square, &[0])(&[one()]).unwrap();
                    assert_eq!(g[0].item::<f32>().unwrap(), 2.0);
                }
            });
        }
    });
}
