//! Eight threads build, index, assign, evaluate, read, print, convert and save at the same time.
//! They use separate streams and shared arrays. Each thread's results must equal those of the same
//! work in a single thread.
//!
//! `RUST_MLX_STRESS_ROUNDS` sets the number of rounds of each thread (default 12).
//! `tools/valgrind.sh` runs a few rounds under memcheck.

use std::sync::Barrier;

use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{All, Array, Device, Dtype, Result, Stream, array, async_eval, eval, idx, io};

const THREADS: u64 = 8;

fn rounds() -> u64 {
    let wanted = std::env::var("RUST_MLX_STRESS_ROUNDS")
        .ok()
        .and_then(|v| v.parse().ok());
    wanted.unwrap_or(12)
}

/// One round of work. The results depend only on the arguments.
fn work(seed: u64, shared: &Array, stream: &Stream, dir: &std::path::Path) -> Result<Vec<f32>> {
    let key = Key::new(seed)?;
    let x = random::normal(0.0, 1.0, &[16, 24], Dtype::Float32, &key)?;
    // This thread builds the graph, and the stream's thread computes it.
    let y = stream.scope(|| x.matmul(shared)?.tanh())?;
    async_eval([&y])?;
    let mut z = y.add(&x.get(idx![.., ..8])?)?;
    // Checked indices evaluate arrays while other threads build graphs.
    let ids = array!([3, -1, 0])?;
    z.set(idx![&ids, ..; 2], 0.5)?;
    z = z.at_idx(idx![[1, 1, 2]]).add(&z.get(idx![0])?)?;
    z.set(idx![&z.greater(&array!(0.9)?)?], -0.25)?;
    let clone = z.clone();
    z += 1.0;
    assert_eq!(format!("{z:?}"), "Array([16, 8], float32)");
    assert!(z.to_string().starts_with("array([["));
    // Errors belong to their thread, even if other threads make and drop errors at the same time.
    let e = z.matmul(&x).unwrap_err();
    assert_eq!(e.shapes(), [vec![16, 8], vec![16, 24]]);
    assert!(z.get(idx![seed as i64 + 16]).is_err());
    for row in z.iter().take(3) {
        row?.sum(All, false)?.item::<f32>()?;
    }
    // Round trips through memory that MLX keeps, and through a file.
    let back = Array::from_vec(z.to_vec::<f32>()?, z.shape())?;
    let path = dir.join(format!("{seed}.safetensors"));
    io::save_safetensors(&path, [("back", &back), ("clone", &clone)], &[])?;
    let loaded = io::load_safetensors(&path)?;
    let sum = loaded.arrays["back"].subtract(&loaded.arrays["clone"])?;
    eval([&sum, &back])?;
    assert!(sum.all_close(&array!(1.0)?, 1e-5, 1e-5)?);
    let shared_sum = shared.sum(All, false)?.item::<f32>()?;
    let mut out = back.to_vec::<f32>()?;
    out.push(shared_sum);
    Ok(out)
}

#[test]
fn eight_threads_do_everything_at_once_as_if_alone() {
    crate::alone::alone(
        "stress::eight_threads_do_everything_at_once_as_if_alone",
        eight_threads_do_everything_at_once_as_if_alone_alone,
    );
}

fn eight_threads_do_everything_at_once_as_if_alone_alone() {
    let dir = tempfile::tempdir().unwrap();
    // Threads share the array before it is evaluated. The first thread that needs it computes it.
    let shared = random::normal(0.0, 1.0, &[24, 8], Dtype::Float32, &Key::new(99).unwrap())
        .and_then(|a| a.multiply(&array!(0.5)?))
        .unwrap();
    let barrier = Barrier::new(THREADS as usize);
    let results: Vec<Vec<Vec<f32>>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..THREADS)
            .map(|t| {
                let (shared, barrier, dir) = (&shared, &barrier, dir.path());
                scope.spawn(move || {
                    barrier.wait();
                    let stream = Stream::new(Device::default_device()).unwrap();
                    (0..rounds())
                        .map(|r| work(t * 1000 + r, shared, &stream, dir).unwrap())
                        .collect()
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    let stream = Stream::new(Device::default_device()).unwrap();
    for (t, rounds) in (0..THREADS).zip(&results) {
        for (r, got) in (0..).zip(rounds) {
            let alone = work(t * 1000 + r, &shared, &stream, dir.path()).unwrap();
            assert_eq!(got, &alone, "thread {t}, round {r}");
        }
    }
}
