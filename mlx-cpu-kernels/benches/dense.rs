//! Measures products with dense matrices, with few and many input rows: billions of operations a
//! second, and the share of the highest rate of multiply-add instructions, measured beside each
//! product. Each time is the minimum of many runs. On Linux it is processor time, so other programs
//! affect it little.
//!
//! `MLX_NUM_THREADS=1 cargo bench -p rust-mlx-cpu-kernels --bench dense`

use std::hint::black_box;
use std::time::{Duration, Instant};

use mlx_cpu_kernels::{DenseType, Input, Isa, MatrixFormat, Product, Size, Work as _};

/// Inputs and outputs of the matrices.
const SHAPES: [(usize, usize); 6] = [
    (384, 384),
    (384, 1536),
    (1536, 384),
    (2048, 2048),
    (2048, 8192),
    (8192, 2048),
];
const ROWS: [usize; 7] = [1, 4, 8, 12, 16, 128, 1024];
const TYPES: [(DenseType, &str); 3] = [
    (DenseType::F32, "float32"),
    (DenseType::F16, "float16"),
    (DenseType::Bf16, "bfloat16"),
];

/// Seconds of measurement per line.
const SECONDS: f64 = 0.3;

fn main() {
    let isa = Isa::detect();
    println!("{}", mlx_cpu_kernels::status());
    println!("| K | N | Rows | Type | 10^9 operations/s | Of the highest |");
    println!("|--:|--:|--:|---|--:|--:|");
    for (k, n) in SHAPES {
        for (number, name) in TYPES {
            for rows in ROWS {
                measure(isa, (k, n, rows), (number, name));
            }
        }
    }
}

/// Measures one product and prints its line.
fn measure(isa: Isa, (k, n, rows): (usize, usize, usize), (number, name): (DenseType, &str)) {
    let product = Product::plain(isa, MatrixFormat::Dense(number), Size { n, k }, rows);
    let x: Vec<f32> = (0..rows * k).map(|i| (i % 13) as f32 - 6.0).collect();
    // The bits of 1 in each type; a float32 of bits 0x3f80_3f80 is also about 1.
    let bits: u16 = if number == DenseType::F16 {
        0x3c00
    } else {
        0x3f80
    };
    let words = vec![u32::from(bits) * 0x1_0001; n * k];
    // SAFETY: `words` has the memory of `n * k` elements of each type, aligned for each.
    let matrix = unsafe { Input::from_raw(words.as_ptr().cast(), n * k) };
    let inputs = [Input::from_slice(&x), matrix];
    let mut out = vec![0.0f32; rows * n];
    let mut run = || {
        // SAFETY: the inputs are the rows and the matrix in their types and sizes, and `detect`
        // returned the instruction set.
        unsafe { product.run(&inputs, black_box(&mut out)) };
    };
    run();
    let (mut least, mut peak) = (f64::INFINITY, 0.0f64);
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < SECONDS {
        let start = clock();
        run();
        least = least.min((clock() - start).as_secs_f64());
        for _ in 0..20 {
            peak = peak.max(multiply_adds(isa));
        }
    }
    let rate = 2.0 * (rows * k * n) as f64 / least / 1e9;
    let share = 100.0 * rate / peak;
    println!("| {k} | {n} | {rows} | {name} | {rate:.1} | {share:.0} % |");
}

/// The processor time of all threads together. So rates are per thread.
fn clock() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes only `time`.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// The rate of multiply-add instructions of one thread, in 10^9 operations a second; NaN if it is
/// not known for the instruction set.
fn multiply_adds(isa: Isa) -> f64 {
    const STEPS: u32 = 4000;
    let start = clock();
    let per_step = match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `detect` makes this only on processors with avx2 and fma.
        Isa::Avx2 => unsafe { x86::steps_of_8(STEPS) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `detect` makes these only on processors that also have avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { x86::steps_of_16(STEPS) },
        _ => f64::NAN,
    };
    f64::from(STEPS) * per_step / (clock() - start).as_secs_f64() / 1e9
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};
    use std::hint::black_box;

    /// Multiplies and adds in twelve independent vectors. Returns the operations of a step.
    ///
    /// # Safety
    /// The processor must have avx2 and fma.
    #[target_feature(enable = "avx2,fma")]
    pub(crate) unsafe fn steps_of_8(steps: u32) -> f64 {
        let factor = _mm256_set1_ps(black_box(0.999));
        let mut sums = [factor; 12];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, factor);
            }
        }
        black_box(sums);
        12.0 * 8.0 * 2.0
    }

    /// As [`steps_of_8`], with vectors of sixteen.
    ///
    /// # Safety
    /// The processor must have avx512f.
    #[target_feature(enable = "avx512f")]
    pub(crate) unsafe fn steps_of_16(steps: u32) -> f64 {
        let factor = _mm512_set1_ps(black_box(0.999));
        let mut sums = [factor; 12];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, factor);
            }
        }
        black_box(sums);
        12.0 * 16.0 * 2.0
    }
}
