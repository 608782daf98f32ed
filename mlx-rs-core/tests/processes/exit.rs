//! Ends processes while other threads compute, by returning from `main` or by `exit`. They must end
//! with the intended exit code, not by a signal. Each runs in a separate process.

use std::process::{Command, Stdio};
use std::time::Duration;

use mlx_rs_core::transforms::{compile, grad};
use mlx_rs_core::{All, Array, Device, Dtype, Result, Stream, fft, random};

type Arrays = Result<Vec<Array>>;

/// The variable with the child's way to end, and the delay in microseconds.
const HOW: &str = "RUST_MLX_TEST_EXIT";

/// Performs one of many operations that use MLX's static objects.
fn work(i: usize) -> Result<()> {
    let key = random::Key::new(i as u64)?;
    let x = random::normal(0.0, 1.0, &[64, 64], Dtype::Float32, &key)?;
    match i % 5 {
        0 => x.matmul(&x)?.eval(),
        1 => {
            let f = |x: &[Array]| -> Arrays { Ok(vec![x[0].sin()?.sum(All, false)?]) };
            grad(f, &[0])(&[x])?[0].eval()
        }
        2 => fft::fft(&x, None, -1)?.eval(),
        3 => {
            let f = compile(|x: &[Array]| -> Arrays { Ok(vec![x[0].exp()?.add(&x[0])?]) });
            mlx_rs_core::async_eval(&f.call(&[x])?)
        }
        _ => {
            let stream = Stream::new(Device::cpu())?;
            stream.scope(|| x.square()?.sum(All, false)?.eval())
        }
    }
}

#[test]
#[ignore = "a process of its own, started by processes_end_while_threads_compute"]
fn child() {
    let how = std::env::var(HOW).unwrap();
    let (how, after) = how.split_once(' ').unwrap();
    // Loads the library first. A process that ends while the library's constructors run may crash;
    // see `src/exit.rs`.
    Array::from_slice(&[1.0f32], &[1]).unwrap();
    for first in 0..3 {
        std::thread::spawn(move || {
            for i in first.. {
                work(i).unwrap();
            }
        });
    }
    std::thread::sleep(Duration::from_micros(after.parse().unwrap()));
    if how == "exit" {
        std::process::exit(7);
    }
    // Otherwise the test harness's `main` returns while the threads work.
}

#[test]
fn processes_end_while_threads_compute() {
    let runs = std::env::var("RUST_MLX_TEST_EXITS").map_or(40, |n| n.parse().unwrap());
    for run in 0..runs {
        let (how, code) = [("exit", 7), ("return", 0)][run % 2];
        let after = (run * 7919) % 30_000;
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "exit::child", "--ignored"])
            .env(HOW, format!("{how} {after}"))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(
            out.status.code(),
            Some(code),
            "run {run}, {how}: {:?} {text}",
            out.status
        );
    }
}

/// The destructor of a thread-local value may fail in MLX after the thread's message slot is
/// destroyed.
#[test]
fn destructors_of_threads_may_fail_in_mlx() {
    struct Late;
    impl Drop for Late {
        fn drop(&mut self) {
            let a = Array::from_slice(&[1.0f32, 2.0], &[2]).unwrap();
            let b = Array::from_slice(&[1.0f32; 3], &[3]).unwrap();
            let e = a.add(&b).unwrap_err();
            assert!(e.message().contains("broadcast"), "{e}");
        }
    }
    thread_local!(static LATE: Late = const { Late });
    let thread = std::thread::spawn(|| {
        LATE.with(|_| ());
        let a = Array::from_slice(&[1.0f32, 2.0], &[2]).unwrap();
        assert!(a.reshape(&[3]).is_err());
    });
    thread.join().unwrap();
}
