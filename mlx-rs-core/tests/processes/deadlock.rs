//! Tests a function given to a transform that waits for a thread that uses MLX. That thread must
//! get an error, and both must continue. Only time in which the function is idle counts. The test
//! runs in a separate process, because the timeout applies to the whole process.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use mlx_rs_core::transforms::{
    compile, disable_compile, enable_compile, grad, set_deadlock_timeout,
};
use mlx_rs_core::{All, Array, Error, ErrorKind, Result};

type Arrays = Result<Vec<Array>>;

static TURN: Mutex<()> = Mutex::new(());

/// Ends the process when a test hangs.
fn watch() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(120));
        eprintln!("a test hangs");
        std::process::exit(1);
    });
}

fn compute() -> Result<f32> {
    let x = Array::from_slice(&[1.0f32, 2.0], &[2])?;
    x.exp()?.sum(All, false)?.item()
}

/// The error that a thread gets if it computes while its parent waits for it.
fn waited_for() -> Error {
    std::thread::spawn(|| compute().unwrap_err())
        .join()
        .unwrap()
}

#[test]
fn a_thread_that_is_waited_for_gets_an_error() {
    crate::alone::alone(
        "deadlock::a_thread_that_is_waited_for_gets_an_error",
        a_thread_that_is_waited_for_gets_an_error_alone,
    );
}

fn a_thread_that_is_waited_for_gets_an_error_alone() {
    let _turn = TURN.lock().unwrap();
    watch();
    let before = set_deadlock_timeout(Duration::from_millis(300));
    let shared = Array::scalar(3.0f32).unwrap();
    let f = |x: &[Array]| -> Arrays {
        // The thread also drops arrays, which must not wait either.
        let mine = (shared.clone(), x[0].clone());
        let e = std::thread::scope(|s| {
            let thread = s.spawn(move || {
                drop(mine);
                compute().unwrap_err()
            });
            thread.join().unwrap()
        });
        assert_eq!(e.kind(), ErrorKind::Deadlock, "{e}");
        assert_eq!(waited_for().kind(), ErrorKind::Deadlock);
        Ok(vec![x[0].square()?])
    };
    let g = grad(f, &[0])(&[Array::scalar(3.0f32).unwrap()]).unwrap();
    assert_eq!(g[0].item::<f32>().unwrap(), 6.0);
    // After the error the lock is free again, and the error has no lasting effect.
    let sum = std::thread::spawn(compute).join().unwrap().unwrap();
    assert!((sum - 10.107_338).abs() < 1e-4);

    disable_compile();
    let f = compile(|x: &[Array]| -> Arrays {
        assert_eq!(waited_for().kind(), ErrorKind::Deadlock);
        Ok(vec![x[0].square()?])
    });
    f.call(&[Array::scalar(3.0f32).unwrap()]).unwrap();
    enable_compile();
    set_deadlock_timeout(before);
}

#[test]
fn a_function_that_works_is_waited_for() {
    crate::alone::alone(
        "deadlock::a_function_that_works_is_waited_for",
        a_function_that_works_is_waited_for_alone,
    );
}

fn a_function_that_works_is_waited_for_alone() {
    let _turn = TURN.lock().unwrap();
    let before = set_deadlock_timeout(Duration::from_millis(200));
    let f = |x: &[Array]| -> Arrays {
        let other = std::thread::spawn(compute);
        let start = Instant::now();
        let mut spins = 0u64;
        while start.elapsed() < Duration::from_millis(800) {
            spins = std::hint::black_box(spins + 1);
        }
        OTHERS.lock().unwrap().push(other);
        Ok(vec![x[0].square()?])
    };
    static OTHERS: Mutex<Vec<std::thread::JoinHandle<Result<f32>>>> = Mutex::new(Vec::new());
    grad(f, &[0])(&[Array::scalar(3.0f32).unwrap()]).unwrap();
    for other in OTHERS.lock().unwrap().drain(..) {
        assert!(other.join().unwrap().is_ok());
    }
    set_deadlock_timeout(before);
}
