//! Measures the cost of the safe layer: building lazy operations, evaluation, and copies in and
//! out. Each is compared with the same raw C calls. Also compares the lock with a thread that owns
//! MLX.
//!
//! `cargo bench -p rust-mlx-core` prints a table. `-- --json` prints one JSON object, which
//! `tools/compare_cost.py` compares with Python. `-- NAME` runs only the cases whose name contains
//! NAME. Figures are nanoseconds per call, the minimum of many short samples. The minimum is the
//! cost of the code on an idle processor. Other statistics depend more on the machine's load than
//! on the code.

use std::hint::black_box;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mlx_rs_core::{Array, Device, Dtype, array, eval, idx, memory, zeros};
use mlx_sys as sys;
use parking_lot::ReentrantMutex;

/// The number of operations of the large graph.
const GRAPH: usize = 10_000;
/// The number of values copied in and out.
const COPIED: usize = 1 << 20;

const SAMPLES: usize = 60;
const SAMPLE: Duration = Duration::from_millis(4);

struct Harness {
    only: Option<String>,
    results: Vec<(&'static str, f64)>,
}

impl Harness {
    /// Times repeated calls of `f`.
    fn case<R>(&mut self, name: &'static str, mut f: impl FnMut() -> R) {
        self.timed(name, 1, |n| {
            let start = Instant::now();
            for _ in 0..n {
                black_box(f());
            }
            start.elapsed()
        });
    }

    /// Records the time that `f(n)` reports for `n` repetitions. Each repetition counts as `parts`
    /// calls.
    fn timed(&mut self, name: &'static str, parts: usize, mut f: impl FnMut(usize) -> Duration) {
        if self.only.as_ref().is_some_and(|only| !name.contains(only)) {
            return;
        }
        let mut n = 1;
        while f(n) < SAMPLE {
            n *= 2;
        }
        let least = (0..SAMPLES)
            .map(|_| f(n).as_nanos() as f64 / (n * parts) as f64)
            .fold(f64::INFINITY, f64::min);
        self.results.push((name, least));
    }
}

fn main() {
    let mut json = false;
    let mut only = None;
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            // Cargo adds this argument.
            "--bench" => {}
            name => only = Some(name.to_owned()),
        }
    }
    // The raw calls use the CPU's stream. The safe calls and Python must use it, too.
    Device::cpu().set_default().expect("there is a CPU");
    let mut harness = Harness {
        only,
        results: Vec::new(),
    };
    locks(&mut harness);
    building(&mut harness);
    reading(&mut harness);
    if json {
        let list: Vec<String> = harness
            .results
            .iter()
            .map(|(name, ns)| format!("\"{name}\": {ns:.1}"))
            .collect();
        println!("{{{}}}", list.join(", "));
    } else {
        for (name, ns) in &harness.results {
            println!("{name:<32} {ns:>12.1} ns");
        }
    }
}

/// Compares the lock that every call takes with a thread that owns MLX.
fn locks(harness: &mut Harness) {
    let lock = ReentrantMutex::new(());
    harness.case("lock", || drop(black_box(lock.lock())));

    let (ask, asked) = mpsc::channel::<mpsc::SyncSender<u32>>();
    let owner = std::thread::spawn(move || {
        while let Ok(answer) = asked.recv() {
            let _ = answer.send(1);
        }
    });
    harness.case("owning_thread", || {
        let (answer, answered) = mpsc::sync_channel(1);
        ask.send(answer).ok();
        answered.recv()
    });
    drop(ask);
    owner.join().ok();
}

/// Runs `f` with a scalar and a stream that raw C calls create.
fn with_raw(f: impl FnOnce(sys::mlx_array, sys::mlx_stream)) {
    // SAFETY: the handles are created here, used only on this thread, and freed after use.
    unsafe {
        let stream = sys::mlx_default_cpu_stream_new();
        let a = sys::mlx_array_new_float32(1.0);
        f(a, stream);
        sys::mlx_array_free(a);
        sys::mlx_stream_free(stream);
    }
}

fn raw_add(a: sys::mlx_array, b: sys::mlx_array, stream: sys::mlx_stream) -> sys::mlx_array {
    // SAFETY: the callers pass live handles, and own the result.
    unsafe {
        let mut out = sys::mlx_array_new();
        sys::mlx_add(&raw mut out, a, b, stream);
        out
    }
}

fn free(a: sys::mlx_array) {
    // SAFETY: the callers own the handle, and do not use it again.
    unsafe {
        sys::mlx_array_free(a);
    }
}

fn building(harness: &mut Harness) {
    let a = Array::scalar(1.0f32).expect("a scalar");
    let m = zeros(&[64, 64], Dtype::Float32).expect("a matrix");
    eval([&a, &m]).expect("evaluates");

    harness.case("add", || a.add(&a));
    with_raw(|a, stream| harness.case("add_raw", || free(raw_add(a, a, stream))));

    harness.case("matmul", || m.matmul(&m));
    harness.case("clone", || a.clone());
    harness.case("scalar", || Array::scalar(1.0f32));
    harness.case("operator_with_scalar", || &a * 2.0);
    harness.case("index_row", || m.get(idx![3]));
    harness.case("index_ranges", || m.get(idx![1..9, ..; 2]));
    harness.case("reshape", || m.reshape(&[32, 128]));

    // Only the last array of the chain is kept. Freeing it is not measured, neither here nor in
    // Python.
    harness.timed("graph", GRAPH, |n| {
        let mut spent = Duration::ZERO;
        for _ in 0..n {
            let start = Instant::now();
            let mut x = a.add(&a).expect("adds");
            for _ in 1..GRAPH {
                x = x.add(&a).expect("adds");
            }
            spent += start.elapsed();
            drop(x);
        }
        spent
    });
    with_raw(|a, stream| {
        harness.timed("graph_raw", GRAPH, |n| {
            let mut spent = Duration::ZERO;
            for _ in 0..n {
                let start = Instant::now();
                let mut x = raw_add(a, a, stream);
                for _ in 1..GRAPH {
                    let next = raw_add(x, a, stream);
                    free(x);
                    x = next;
                }
                spent += start.elapsed();
                free(x);
            }
            spent
        });
    });
}

fn reading(harness: &mut Harness) {
    let a = Array::scalar(1.0f32).expect("a scalar");
    harness.case("evaluate_scalar", || {
        a.add(&a).and_then(|b| b.item::<f32>()).expect("evaluates")
    });
    with_raw(|a, stream| {
        harness.case("evaluate_scalar_raw", || {
            let b = raw_add(a, a, stream);
            let mut value = 0.0;
            // SAFETY: the handle is live, and its value is a float32.
            unsafe {
                sys::mlx_array_eval(b);
                sys::mlx_array_item_float32(&raw mut value, b);
            }
            free(b);
            value
        });
    });
    let known = array!(1.0).expect("a scalar");
    harness.case("item", || known.item::<f32>());

    let values = vec![1.0f32; COPIED];
    harness.case("copy_in_1m", || Array::vector(&values));
    harness.case("copy_in_1m_raw", || {
        let shape = [COPIED as i32];
        // SAFETY: the shape has exactly the number of values, which MLX copies.
        free(unsafe {
            sys::mlx_array_new_data(
                values.as_ptr().cast(),
                shape.as_ptr(),
                1,
                sys::mlx_dtype__MLX_FLOAT32,
            )
        });
    });
    let a = Array::vector(&values).expect("an array");
    harness.case("copy_out_1m", || a.to_vec::<f32>());
    harness.case("borrow_1m", || {
        a.data::<f32>().map(|d| d[COPIED - 1]).expect("evaluated")
    });
    with_raw(|_, _| {
        harness.case("copy_out_1m_raw", || {
            // SAFETY: the array is evaluated and row-contiguous, and has this number of values.
            unsafe { std::slice::from_raw_parts(raw_data(&a), COPIED) }.to_vec()
        });
    });
    harness.case("memory_active", memory::active);
}

/// The address of an evaluated array's values.
fn raw_data(a: &Array) -> *const f32 {
    a.data::<f32>().expect("evaluated").as_ptr()
}
