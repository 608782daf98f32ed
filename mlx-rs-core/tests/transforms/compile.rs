//! Tests compiled functions: when they trace, which results they replay, and how they combine with
//! other transforms. On the CPU, no native code may be written or loaded unless it is requested
//! (hazard 5 of `docs/safety.md`).
//!
//! Modes and the cache belong to the process, so tests that change them do not run concurrently.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlx_rs_core::random::{self, Key};
use mlx_rs_core::transforms::{
    CompileMode, Compiled, compile, compile_clear_cache, compile_mode, compile_shapeless,
    disable_compile, enable_compile, grad, set_compile_mode, vmap,
};
use mlx_rs_core::{All, Array, Device, Dtype, Error, ErrorKind, Result, Stream};
use parking_lot::{Mutex, MutexGuard};

type Arrays = Result<Vec<Array>>;

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock()
}

fn scalar(v: f32) -> Array {
    Array::scalar(v).unwrap()
}
fn vector(v: &[f32]) -> Array {
    Array::vector(v).unwrap()
}

/// `sum(sin(x) * exp(x))`, and a counter of its runs.
fn counted() -> (
    Arc<AtomicUsize>,
    impl Fn(&[Array]) -> Arrays + Send + 'static,
) {
    let runs = Arc::new(AtomicUsize::new(0));
    let inside = Arc::clone(&runs);
    let f = move |x: &[Array]| -> Arrays {
        inside.fetch_add(1, Ordering::Relaxed);
        Ok(vec![x[0].sin()?.multiply(&x[0].exp()?)?.sum(All, false)?])
    };
    (runs, f)
}
fn expected(x: &[f32]) -> f32 {
    x.iter().map(|x| x.sin() * x.exp()).sum()
}
fn value(f: &Compiled<Error>, x: &[f32]) -> f32 {
    f.call(&[vector(x)]).unwrap()[0].item().unwrap()
}
fn close(a: f32, b: f32) {
    assert!((a - b).abs() < 1e-4, "{a} {b}");
}

#[test]
fn random_bits_of_one_key_keep_their_widths() {
    let _turn = turn();
    let draw = |k: &[Array]| -> Arrays {
        let key = Key::from_array(k[0].clone())?;
        // MLX never merges outputs. So the bits pass through another operation before they are
        // returned.
        let one = |width| random::bits(&[4], width, &key)?.astype(Dtype::Uint32);
        Ok(vec![one(1)?, one(2)?, one(4)?.add(&Array::scalar(1u32)?)?])
    };
    let key = Array::vector(&[3u32, 4]).unwrap();
    let want = draw(std::slice::from_ref(&key)).unwrap();
    let got = compile(draw).call(&[key]).unwrap();
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(got.to_vec::<u32>().unwrap(), want.to_vec::<u32>().unwrap());
    }
}

#[test]
fn one_trace_for_each_form_of_the_arguments() {
    let _turn = turn();
    let (runs, f) = counted();
    let f = compile(f);
    for x in [[0.1f32, 0.2], [0.3, 0.4], [0.5, -0.6]] {
        close(value(&f, &x), expected(&x));
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    close(value(&f, &[1.0]), expected(&[1.0]));
    assert_eq!(runs.load(Ordering::Relaxed), 2, "another shape");
    let half = vector(&[0.5]).astype(Dtype::Float16).unwrap();
    assert_eq!(f.call(&[half]).unwrap()[0].dtype(), Dtype::Float16);
    assert_eq!(runs.load(Ordering::Relaxed), 3, "another type");
    let stream = Stream::new(Device::default_device()).unwrap();
    close(stream.scope(|| value(&f, &[1.0])), expected(&[1.0]));
    assert_eq!(runs.load(Ordering::Relaxed), 4, "another stream");
    close(value(&f, &[1.0]), expected(&[1.0]));
    assert_eq!(runs.load(Ordering::Relaxed), 4, "the first is still there");
    compile_clear_cache().unwrap();
    close(value(&f, &[1.0]), expected(&[1.0]));
    assert_eq!(runs.load(Ordering::Relaxed), 5);
}

#[test]
fn a_shapeless_trace_serves_all_lengths() {
    let _turn = turn();
    let (runs, f) = counted();
    // SAFETY: element-wise functions and a sum over all axes are valid for every shape.
    let f = unsafe { compile_shapeless(f) };
    for x in [&[0.1f32, 0.2][..], &[1.0], &[0.1, 0.2, 0.3]] {
        close(value(&f, x), expected(x));
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
}

#[test]
fn a_function_dropped_and_another_made_in_its_place_do_not_mix() {
    let _turn = turn();
    for i in 0..200 {
        let factor = i as f32;
        let f = compile(move |x: &[Array]| -> Arrays { Ok(vec![x[0].multiply(&scalar(factor))?]) });
        assert_eq!(
            f.call(&[scalar(2.0)]).unwrap()[0].item::<f32>().unwrap(),
            2.0 * factor
        );
    }
}

#[test]
fn modes() {
    let _turn = turn();
    let (runs, f) = counted();
    let f = compile(f);
    disable_compile();
    assert_eq!(compile_mode(), CompileMode::Disabled);
    for _ in 0..3 {
        close(value(&f, &[0.5]), expected(&[0.5]));
    }
    assert_eq!(runs.swap(0, Ordering::Relaxed), 3);
    for mode in [
        CompileMode::NoSimplify,
        CompileMode::NoFuse,
        CompileMode::Enabled,
    ] {
        set_compile_mode(mode);
        compile_clear_cache().unwrap();
        for _ in 0..3 {
            close(value(&f, &[0.5]), expected(&[0.5]));
        }
        assert_eq!(runs.swap(0, Ordering::Relaxed), 1, "{mode:?}");
    }
    enable_compile();
    assert_eq!(compile_mode(), CompileMode::Enabled);
}

#[test]
fn inside_and_around_other_transforms() {
    let _turn = turn();
    let (_, f) = counted();
    let f = Arc::new(compile(f));
    let slope = |x: f32| (x.sin() + x.cos()) * x.exp();
    let inner = Arc::clone(&f);
    let g = grad(move |x: &[Array]| inner.call(x), &[0])(&[vector(&[0.3, 0.7])]).unwrap();
    let g = g[0].to_vec::<f32>().unwrap();
    close(g[0], slope(0.3));
    close(g[1], slope(0.7));
    let rows = Array::from_slice(&[0.1f32, 0.2, 0.3, 0.4], &[2, 2]).unwrap();
    let y = vmap(|x: &[Array]| f.call(x), 0, 0)(&[rows]).unwrap()[0]
        .to_vec::<f32>()
        .unwrap();
    close(y[1], expected(&[0.3, 0.4]));
    // Compiles the gradient of a compiled function.
    let inner = Arc::clone(&f);
    let outer = compile(move |x: &[Array]| {
        let inner = Arc::clone(&inner);
        grad(move |x: &[Array]| inner.call(x), &[0])(x)
    });
    for x in [0.2f32, 0.4] {
        close(
            outer.call(&[vector(&[x])]).unwrap()[0]
                .to_vec::<f32>()
                .unwrap()[0],
            slope(x),
        );
    }
}

#[test]
fn a_compiled_function_may_call_itself() {
    let _turn = turn();
    static SELF: std::sync::OnceLock<Compiled<Error>> = std::sync::OnceLock::new();
    // Computes x * 2^ndim, dropping one axis at each level of recursion.
    let f = SELF.get_or_init(|| {
        compile(|x: &[Array]| -> Arrays {
            if x[0].ndim() == 0 {
                return Ok(x.to_vec());
            }
            let once = SELF
                .get()
                .map_or_else(|| Ok(vec![]), |f| f.call(&[x[0].sum(0, false)?]))?;
            Ok(vec![once[0].multiply(&scalar(2.0))?])
        })
    });
    for v in [3.0f32, 5.0] {
        let x = Array::from_slice(&[v], &[1, 1, 1]).unwrap();
        assert_eq!(f.call(&[x]).unwrap()[0].item::<f32>().unwrap(), 8.0 * v);
    }
}

#[test]
fn what_cannot_be_traced_is_an_error_and_the_next_call_traces_again() {
    let _turn = turn();
    let reads = compile(|x: &[Array]| -> Arrays { Ok(vec![scalar(x[0].item::<f32>()?)]) });
    for _ in 0..2 {
        assert_eq!(
            reads.call(&[scalar(1.0)]).unwrap_err().kind(),
            ErrorKind::Mlx
        );
    }
    let clears = compile(|x: &[Array]| -> Arrays {
        compile_clear_cache()?;
        Ok(x.to_vec())
    });
    let e = clears.call(&[scalar(1.0)]).unwrap_err();
    assert_eq!(
        (e.kind(), e.op()),
        (ErrorKind::Value, "compile_clear_cache")
    );
    compile_clear_cache().unwrap();
}

#[test]
fn outputs_that_are_inputs_constants_or_the_same_twice() {
    let _turn = turn();
    let f = compile(|x: &[Array]| -> Arrays {
        let y = x[0].square()?;
        Ok(vec![x[1].clone(), scalar(7.0), y.clone(), y])
    });
    for (a, b) in [(2.0f32, 3.0f32), (4.0, 5.0)] {
        let out = f.call(&[scalar(a), scalar(b)]).unwrap();
        let out: Vec<f32> = out.iter().map(|o| o.item().unwrap()).collect();
        assert_eq!(out, [b, 7.0, a * a, a * a]);
    }
    let none = compile(|_: &[Array]| -> Arrays { Ok(vec![]) });
    assert!(none.call(&[scalar(1.0)]).unwrap().is_empty());
    assert!(none.call(&[]).unwrap().is_empty());
}

#[test]
fn eight_threads_call_one_compiled_function() {
    let _turn = turn();
    let f = Arc::new(compile(|x: &[Array]| -> Arrays {
        Ok(vec![x[0].square()?.sum(All, false)?])
    }));
    let threads: Vec<_> = (1..=8)
        .map(|n| {
            let f = Arc::clone(&f);
            std::thread::spawn(move || {
                for i in 0..20 {
                    let x = vec![i as f32; n];
                    let y = f.call(&[vector(&x)]).unwrap()[0].item::<f32>().unwrap();
                    assert_eq!(y, (n * i * i) as f32);
                }
            })
        })
        .collect();
    for t in threads {
        t.join().unwrap();
    }
}

// ---- native code on the CPU

/// Runs in a separate process that the next test starts.
#[test]
#[ignore = "a process of its own, started by native_code_is_written_only_when_it_was_allowed"]
fn child() {
    if std::env::var_os("RUST_MLX_TEST_ALLOW").is_some() {
        mlx_rs_core::transforms::allow_cpu_jit().unwrap();
    }
    let (_, f) = counted();
    let f = compile(f);
    let cpu = Stream::default_of(Device::cpu()).unwrap();
    cpu.scope(|| close(value(&f, &[0.5, 0.25]), expected(&[0.5, 0.25])));
}

#[cfg(target_os = "linux")]
#[test]
fn native_code_is_written_only_when_it_was_allowed() {
    use std::os::unix::fs::PermissionsExt;

    let run = |allow: bool, mode: u32| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode)).unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "compile::child", "--ignored"])
            .env("TMPDIR", dir.path());
        if allow {
            command.env("RUST_MLX_TEST_ALLOW", "1");
        }
        let out = command.output().unwrap();
        let wrote = std::fs::read_dir(dir.path()).unwrap().count() > 0;
        (
            out.status.success(),
            wrote,
            String::from_utf8_lossy(&out.stdout).into_owned(),
        )
    };
    for mode in [0o700, 0o777] {
        let (ok, wrote, text) = run(false, mode);
        assert!(ok, "{text}");
        assert!(!wrote, "native code without permission");
    }
    let (ok, wrote, text) = run(true, 0o700);
    assert!(ok, "{text}");
    assert!(
        wrote,
        "this build of MLX does not fuse on the CPU; then the above shows nothing"
    );
    let (ok, wrote, _) = run(true, 0o755);
    assert!(!ok && !wrote, "others can enter this directory");
}

/// MLX merges equal scalars of a graph, and then loses those that are outputs.
#[test]
fn outputs_may_be_arguments_and_constants() {
    let _turn = turn();
    let constant = Array::scalar(1.0f32).unwrap();
    let f = compile(move |x: &[Array]| -> Result<Vec<Array>> {
        let one = Array::scalar(1.0f32)?;
        let sum = x[0].add(&one)?.add(&Array::scalar(1.0f32)?)?;
        Ok(vec![
            sum,
            x[0].clone(),
            one,
            constant.clone(),
            x[0].stop_gradient()?,
        ])
    });
    for n in [2, 3, 2, 1, 5] {
        let x = Array::from_slice(&vec![4.0f32; n], &[n as i32]).unwrap();
        let y = f.call(&[x]).unwrap();
        let values: Vec<Vec<f32>> = y.iter().map(|y| y.to_vec().unwrap()).collect();
        let four = vec![4.0; n];
        assert_eq!(
            values,
            [vec![6.0; n], four.clone(), vec![1.0], vec![1.0], four]
        );
    }
}

#[test]
fn a_function_without_arguments_is_traced_once() {
    let _turn = turn();
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    let f = compile(move |_: &[Array]| -> Result<Vec<Array>> {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(vec![vector(&[1.0, 4.0]).sqrt()?])
    });
    for _ in 0..3 {
        assert_eq!(f.call(&[]).unwrap()[0].to_vec::<f32>().unwrap(), [1.0, 2.0]);
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
}
