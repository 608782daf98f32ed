//! Measures products with quantized matrices by the number of input rows: billions of
//! multiplications a second. Each time is the minimum of many runs. On Linux it is processor time,
//! so other programs affect it little. Each product has several copies of its matrix, so weights
//! come from memory or the last cache, as in a model.
//!
//! `MLX_NUM_THREADS=1 cargo bench -p rust-mlx-cpu-kernels --bench quantized`

use std::hint::black_box;
use std::time::{Duration, Instant};

use mlx_cpu_kernels::{
    Input, Isa, MatrixFormat, PrefillInputs, Product, ScaleFormat, Size, Table, Work as _,
};

/// Inputs and outputs of the matrices.
const SHAPES: [(usize, usize); 2] = [(2048, 8192), (8192, 2048)];
const ROWS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 512];

/// Formats with the bits of a code and the group size.
const FORMATS: [(&str, ScaleFormat, u32, usize); 9] = [
    ("Q2_K", ScaleFormat::SuperAffine, 2, 16),
    ("Q4_K", ScaleFormat::SuperAffine, 4, 32),
    ("Q5_K", ScaleFormat::SuperAffine, 5, 32),
    ("Q6_K", ScaleFormat::Super, 6, 16),
    ("Q8_0", ScaleFormat::Symmetric, 8, 32),
    ("Q4_0", ScaleFormat::Symmetric, 4, 32),
    ("IQ4_XS", ScaleFormat::TableSuper(Table::Iq4), 4, 32),
    ("MXFP4", ScaleFormat::E8m0, 4, 32),
    ("4 bits", ScaleFormat::F16, 4, 64),
];

/// Copies of each matrix.
const COPIES: usize = 4;

/// Seconds of measurement per number of rows.
const SECONDS: f64 = 0.1;

fn main() {
    println!("{}", mlx_cpu_kernels::status());
    print!("| K | N | Format |");
    ROWS.iter().for_each(|rows| print!(" {rows} |"));
    println!();
    println!("|--:|--:|---|{}", "--:|".repeat(ROWS.len()));
    for (k, n) in SHAPES {
        for (name, scales, bits, group) in FORMATS {
            print!("| {k} | {n} | {name} |");
            let kind = MatrixFormat::Quantized {
                bits,
                group,
                scales,
            };
            let matrices: Vec<_> = (0..COPIES)
                .map(|_| Memory::new((n, k), (scales, bits, group)))
                .collect();
            for rows in ROWS {
                let rate = measure(kind, Size { n, k }, rows, &matrices);
                print!(" {rate:.1} |");
            }
            println!();
        }
    }
}

/// The arrays of a matrix: words, and two arrays of scales.
struct Memory {
    words: Vec<u32>,
    scales: [Vec<u16>; 2],
    /// The numbers of elements of the scales.
    lengths: [usize; 2],
}

impl Memory {
    fn new((n, k): (usize, usize), (format, bits, group): (ScaleFormat, u32, usize)) -> Self {
        let groups = n * k / group;
        // The number of elements, and whether they are bytes.
        let lengths = match format {
            ScaleFormat::SuperAffine => [(2 * groups, true), (2 * groups / 8, false)],
            ScaleFormat::Super | ScaleFormat::TableSuper(_) => {
                [(groups, true), (n * k / 256, false)]
            }
            ScaleFormat::E8m0 | ScaleFormat::E4m3 => [(groups, true), (0, false)],
            ScaleFormat::Symmetric | ScaleFormat::Table(_) => [(groups, false), (0, false)],
            ScaleFormat::F16 => [(groups, false), (groups, false)],
            ScaleFormat::F32 => unreachable!("not measured"),
        };
        Self {
            words: (0..n * k * bits as usize / 32)
                .map(|i| (i as u32).wrapping_mul(2_654_435_761))
                .collect(),
            // The float16 of these bits is small, and so are its bytes.
            scales: lengths.map(|(len, bytes)| vec![0x1c1c; if bytes { len / 2 } else { len }]),
            lengths: lengths.map(|(len, _)| len),
        }
    }

    fn inputs(&self) -> [Input; 3] {
        let [first, second] = [0, 1].map(|i| {
            // SAFETY: the memory has this number of elements of one or two bytes.
            unsafe { Input::from_raw(self.scales[i].as_ptr().cast(), self.lengths[i]) }
        });
        // SAFETY: the words exist.
        let words = unsafe { Input::from_raw(self.words.as_ptr().cast(), self.words.len()) };
        [words, first, second]
    }
}

/// Billions of multiplications a second with `rows` rows.
fn measure(kind: MatrixFormat, size: Size, rows: usize, matrices: &[Memory]) -> f64 {
    let Size { n, k } = size;
    let product = Product {
        prefill_inputs: PrefillInputs::Int16,
        ..Product::plain(Isa::detect(), kind, size, rows)
    };
    let x: Vec<f32> = (0..rows * k).map(|i| (i % 13) as f32 - 6.0).collect();
    let mut out = vec![0.0f32; rows * n];
    let mut least = f64::INFINITY;
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < SECONDS {
        for matrix in matrices {
            let [words, first, second] = matrix.inputs();
            let inputs = [Input::from_slice(&x), words, first, second];
            let start = clock();
            // SAFETY: the inputs are the rows and the arrays of a matrix in this format, and
            // `detect` returned the instruction set.
            unsafe { product.run(&inputs, black_box(&mut out)) };
            least = least.min((clock() - start).as_secs_f64());
        }
    }
    (rows * k * n) as f64 / least / 1e9
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
