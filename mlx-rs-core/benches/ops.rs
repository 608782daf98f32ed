//! Measures single operations at a decoder's shapes: matrix multiplication, softmax, element-wise
//! operations, norms, rotation, attention, linear layers, and sampling from 32,000 logits.
//! `cost.rs` measures call overhead, and the bench `sampling` of `metal-backend` whole sampling
//! chains.
//!
//! `cargo bench -p rust-mlx-core --bench ops` runs on the best device; `-- NAME` runs only cases
//! whose name contains NAME. Cases that are slow on a CPU need `-- --include-ignored`. Cases named
//! `kernel` measure this crate's kernels, and run only on the CPU. A case named `mlx` beside them
//! measures MLX's equivalent. Each sample builds one operation and evaluates it.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use mlx_rs_core::fast::{self, Mask, RopeBase};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{Array, Device, Dtype, QuantMode, Quantized, Result, Stream, cpu};

/// The maximum seconds per case, unless a single sample takes longer.
const SECONDS: f64 = 0.4;

fn main() {
    println!(
        "kernels: {}, {}, {} threads; MLX on: {}",
        if cpu::enabled() { "on" } else { "off" },
        cpu::instruction_set(),
        cpu::threads(),
        stream().device()
    );
    divan::main();
}

fn stream() -> Stream {
    let device = if Device::gpu().is_available() {
        Device::gpu()
    } else {
        Device::cpu()
    };
    Stream::default_of(device).unwrap()
}

fn processor() -> Stream {
    Stream::default_of(Device::cpu()).unwrap()
}

/// Pseudo-random values with mean 0 and deviation 1.
fn noise(shape: &[i32], seed: u64) -> Array {
    let key = Key::new(seed).unwrap();
    let x = random::normal(0.0, 1.0, shape, Dtype::Float32, &key).unwrap();
    x.eval().unwrap();
    x
}

/// Times building and evaluating the result of `f`.
fn evaluated(bencher: Bencher<'_, '_>, f: impl Fn() -> Result<Array>) {
    bencher.bench_local(|| {
        let y = f().unwrap();
        y.eval().unwrap();
        black_box(y)
    });
}

mod matmul {
    use super::*;

    fn run(bencher: Bencher<'_, '_>, n: i32) {
        stream().scope(|| {
            let (a, b) = (noise(&[n, n], 1), noise(&[n, n], 2));
            // Counts multiply-adds, which are half the floating-point operations.
            let bencher = bencher.counter(ItemsCount::new(u64::from(n.unsigned_abs()).pow(3)));
            evaluated(bencher, || a.matmul(&b));
        });
    }

    #[divan::bench(args = [128, 256, 512], max_time = SECONDS)]
    fn square(bencher: Bencher<'_, '_>, n: i32) {
        run(bencher, n);
    }

    // With a plain BLAS, a sample of the largest size takes nearly a minute.
    #[divan::bench(args = [1024, 2048, 4096], sample_count = 3, sample_size = 1, max_time = SECONDS, ignore)]
    fn square_large(bencher: Bencher<'_, '_>, n: i32) {
        run(bencher, n);
    }
}

#[divan::bench(args = [1024, 4096, 16_384, 131_072], max_time = SECONDS)]
fn softmax(bencher: Bencher<'_, '_>, n: i32) {
    stream().scope(|| {
        let x = noise(&[1, n], 1);
        let bencher = bencher.counter(ItemsCount::new(n.unsigned_abs()));
        evaluated(bencher, || x.softmax(-1, true));
    });
}

mod elementwise {
    use super::*;

    const N: i32 = 1 << 20;

    fn run(bencher: Bencher<'_, '_>, f: fn(&Array, &Array) -> Result<Array>) {
        stream().scope(|| {
            let (a, b) = (noise(&[N], 1), noise(&[N], 2));
            evaluated(bencher.counter(ItemsCount::new(N.unsigned_abs())), || {
                f(&a, &b)
            });
        });
    }

    #[divan::bench(max_time = SECONDS)]
    fn add_1m(bencher: Bencher<'_, '_>) {
        run(bencher, Array::add);
    }

    #[divan::bench(max_time = SECONDS)]
    fn multiply_1m(bencher: Bencher<'_, '_>) {
        run(bencher, Array::multiply);
    }

    #[divan::bench(max_time = SECONDS)]
    fn exp_1m(bencher: Bencher<'_, '_>) {
        run(bencher, |a, _| a.exp());
    }

    #[divan::bench(max_time = SECONDS)]
    fn silu_times_1m(bencher: Bencher<'_, '_>) {
        run(bencher, |a, b| a.multiply(&a.sigmoid()?)?.multiply(b));
    }
}

/// Positions per pass: a decode step, a batch of 8, and a prefill.
const POSITIONS: [i32; 3] = [1, 8, 512];
/// The hidden size of a small model.
const HIDDEN: i32 = 576;

#[divan::bench(args = POSITIONS, max_time = SECONDS)]
fn rms_norm(bencher: Bencher<'_, '_>, positions: i32) {
    stream().scope(|| {
        let (x, weight) = (noise(&[1, positions, HIDDEN], 1), noise(&[HIDDEN], 2));
        evaluated(bencher, || fast::rms_norm(&x, Some(&weight), 1e-5));
    });
}

#[divan::bench(args = POSITIONS, max_time = SECONDS)]
fn rope(bencher: Bencher<'_, '_>, positions: i32) {
    stream().scope(|| {
        let x = noise(&[1, 9, positions, 64], 1);
        let base = RopeBase::Theta(1e5);
        evaluated(bencher, || fast::rope(&x, 64, false, base, 1.0, 100));
    });
}

mod attention {
    use super::*;

    /// 9 query heads with 3 key heads of 64, as in the same model. `queries` queries attend to 512
    /// keys.
    #[divan::bench(args = [1, 32, 512], max_time = SECONDS)]
    fn mlx(bencher: Bencher<'_, '_>, queries: i32) {
        stream().scope(|| {
            let q = noise(&[1, 9, queries, 64], 1);
            let (k, v) = (noise(&[1, 3, 512, 64], 2), noise(&[1, 3, 512, 64], 3));
            let mask = if queries == 1 {
                Mask::None
            } else {
                Mask::Causal
            };
            evaluated(bencher, || {
                fast::scaled_dot_product_attention(&q, &k, &v, 0.125, mask)
            });
        });
    }

    /// The same attention as `mlx`, by this crate's kernel.
    #[divan::bench(args = [1, 32, 512], max_time = SECONDS)]
    fn kernel(bencher: Bencher<'_, '_>, queries: i32) {
        let heads = cpu::Heads {
            n_heads: 9,
            n_kv_heads: 3,
            head_dim: 64,
            scale: 0.125,
            softcap: None,
            q_norm: None,
            k_norm: None,
            rotation: None,
            sinks: None,
        };
        processor().scope(|| {
            let packed = noise(&[1, queries, 15 * 64], 1);
            let lanes = [cpu::KvView {
                length: queries,
                offset: 512 - queries,
                keys: noise(&[1, 3, 512, 64], 2),
                values: noise(&[1, 3, 512, 64], 3),
                packing: None,
                filled: 512,
                order: Some((0, 0)),
                window: None,
            }];
            evaluated(bencher, || heads.attend(&packed, &lanes, false));
        });
    }
}

/// `[out, in]` of the model's gate matrix, and of a matrix larger than the caches of most
/// processors.
const MATRICES: [(i32, i32); 2] = [(1536, 576), (8192, 4096)];

/// The sizes of a multiplication: rows of the input, outputs, inputs.
type Product = (i32, i32, i32);

const PRODUCTS: [Product; 4] = [
    (1, MATRICES[0].0, MATRICES[0].1),
    (8, MATRICES[0].0, MATRICES[0].1),
    (1, MATRICES[1].0, MATRICES[1].1),
    (8, MATRICES[1].0, MATRICES[1].1),
];
/// A short prompt and a long one, and a matrix of a large model. On a CPU, MLX takes seconds for
/// the longer ones.
const PREFILLS: [Product; 3] = [
    (16, MATRICES[0].0, MATRICES[0].1),
    (512, MATRICES[0].0, MATRICES[0].1),
    (512, 4096, 4096),
];

mod linear {
    use super::*;

    /// A matrix with this many bits (32 for float32), and its packed form if there is one.
    fn weight(bits: i32, (_, n, k): Product) -> (Array, Option<Quantized>) {
        let w = noise(&[n, k], 1);
        let packed = (bits < 32).then(|| Quantized::quantize(&w, 32, bits, QuantMode::Affine));
        (w, packed.map(|p| p.unwrap()))
    }

    fn mlx(bencher: Bencher<'_, '_>, bits: i32, product: Product) {
        stream().scope(|| {
            let (w, packed) = weight(bits, product);
            let x = noise(&[1, product.0, product.2], 2);
            match packed {
                Some(q) => {
                    mlx_rs_core::eval(q_arrays(&q)).unwrap();
                    let bencher = bencher.counter(BytesCount::new(q.nbytes()));
                    evaluated(bencher, || q.matmul_transposed(&x));
                }
                None => {
                    let transposed = w.swap_axes(0, 1).unwrap();
                    let bencher = bencher.counter(BytesCount::new(w.nbytes()));
                    evaluated(bencher, || x.matmul(&transposed));
                }
            }
        });
    }

    fn q_arrays(q: &Quantized) -> Vec<&Array> {
        let mut all = vec![&q.weight, &q.scales];
        all.extend(&q.biases);
        all
    }

    fn kernel(bencher: Bencher<'_, '_>, bits: i32, product: Product) {
        processor().scope(|| {
            let (w, packed) = weight(bits, product);
            let x = noise(&[1, product.0, product.2], 2);
            let bytes = packed.as_ref().map_or(w.nbytes(), Quantized::nbytes);
            let matrix = match packed {
                Some(q) => cpu::QuantizedMatrix::new(&q)
                    .unwrap()
                    .map(cpu::Matrix::Quantized),
                None => cpu::DenseMatrix::new(&w).unwrap().map(cpu::Matrix::Dense),
            };
            // With MLX_CPU_KERNELS=off there is no kernel to measure.
            if let Some(matrix) = matrix {
                evaluated(bencher.counter(BytesCount::new(bytes)), || {
                    matrix.product(&x)
                });
            }
        });
    }

    macro_rules! cases {
        ($($module:ident: $bits:literal),*) => { $(
            mod $module {
                use super::*;

                #[divan::bench(args = PRODUCTS, max_time = SECONDS)]
                fn mlx(bencher: Bencher<'_, '_>, product: Product) {
                    super::mlx(bencher, $bits, product);
                }

                #[divan::bench(args = PRODUCTS, max_time = SECONDS)]
                fn kernel(bencher: Bencher<'_, '_>, product: Product) {
                    super::kernel(bencher, $bits, product);
                }

                #[divan::bench(args = PREFILLS, max_time = SECONDS, ignore)]
                fn mlx_prefill(bencher: Bencher<'_, '_>, product: Product) {
                    super::mlx(bencher, $bits, product);
                }

                #[divan::bench(args = PREFILLS, max_time = SECONDS)]
                fn kernel_prefill(bencher: Bencher<'_, '_>, product: Product) {
                    super::kernel(bencher, $bits, product);
                }
            }
        )* };
    }

    cases!(bits_2: 2, bits_3: 3, bits_4: 4, bits_5: 5, bits_6: 6, bits_8: 8, float32: 32);
}

/// A multiplication with one row reads its matrix once, so memory bandwidth limits it. The bench
/// also measures a plain read of the same bytes.
mod memory {
    use super::*;

    /// `[out, in]` of a matrix larger than the caches of servers.
    const MATRIX: (i32, i32) = (65_536, 4096);

    /// A matrix with 4 bits in groups of 32. Its scales and biases are exact in float16.
    fn matrix() -> Option<cpu::QuantizedMatrix> {
        let (n, k) = MATRIX;
        let factors = |seed| {
            let half = noise(&[n, k / 32], seed).astype(Dtype::Float16).unwrap();
            half.astype(Dtype::Float32).unwrap()
        };
        let key = Key::new(3).unwrap();
        let matrix = Quantized {
            weight: random::bits(&[n, k / 8], 4, &key).unwrap(),
            scales: factors(1),
            biases: Some(factors(2)),
            group_size: 32,
            bits: 4,
            mode: QuantMode::Affine,
        };
        cpu::QuantizedMatrix::new(&matrix).unwrap()
    }

    #[divan::bench(sample_count = 20, sample_size = 1)]
    fn kernel_4_bits(bencher: Bencher<'_, '_>) {
        processor().scope(|| {
            // With MLX_CPU_KERNELS=off there is no kernel to measure.
            if let Some(matrix) = matrix() {
                let x = noise(&[1, 1, MATRIX.1], 4);
                let bytes = BytesCount::new(matrix.nbytes());
                evaluated(bencher.counter(bytes), || matrix.product(&x));
            }
        });
    }

    /// Uses as many threads as the kernels do. Each thread reads a separate part.
    #[divan::bench(sample_count = 20, sample_size = 1)]
    fn plain_read(bencher: Bencher<'_, '_>) {
        let numbers = vec![1u64; 5 * (MATRIX.0 * MATRIX.1) as usize / 64];
        let piece = numbers.len().div_ceil(cpu::threads());
        let bytes = BytesCount::new(8 * numbers.len());
        bencher.counter(bytes).bench_local(|| {
            std::thread::scope(|threads| {
                for piece in numbers.chunks(piece) {
                    threads.spawn(|| {
                        let sum = piece.iter().fold(0u64, |a, b| a.wrapping_add(*b));
                        black_box(sum);
                    });
                }
            });
        });
    }
}

mod sample_32k {
    use mlx_rs_core::cpu::{DrawParams, Pick, SampleParams};

    use super::*;

    const VOCABULARY: i32 = 32_000;

    /// Measures `f` on a stream, with logits `[1, 32000]`.
    fn run(bencher: Bencher<'_, '_>, stream: &Stream, f: impl Fn(&Array) -> Result<Array>) {
        stream.scope(|| {
            let logits = noise(&[1, VOCABULARY], 1);
            evaluated(bencher, || f(&logits));
        });
    }

    /// A draw among all tokens.
    fn all() -> DrawParams {
        DrawParams {
            scale: 1.25,
            uniform: 0.5,
            ..DrawParams::new()
        }
    }

    /// Samples one token with the kernel.
    fn sample(bencher: Bencher<'_, '_>, pick: Pick) {
        let params = SampleParams::new(pick);
        run(bencher, &processor(), |x| {
            cpu::sample(x, vec![params.clone().into()])
        });
    }

    #[divan::bench(max_time = SECONDS)]
    fn greedy_mlx(bencher: Bencher<'_, '_>) {
        run(bencher, &stream(), |x| x.argmax(-1, false));
    }

    #[divan::bench(max_time = SECONDS)]
    fn greedy_kernel(bencher: Bencher<'_, '_>) {
        sample(bencher, Pick::Greedy);
    }

    #[divan::bench(max_time = SECONDS)]
    fn top_40_kernel(bencher: Bencher<'_, '_>) {
        sample(bencher, Pick::Draw(DrawParams { top_k: 40, ..all() }));
    }

    #[divan::bench(max_time = SECONDS)]
    fn sort_mlx(bencher: Bencher<'_, '_>) {
        run(bencher, &stream(), |x| x.argsort(-1));
    }

    #[divan::bench(max_time = SECONDS)]
    fn draw_mlx(bencher: Bencher<'_, '_>) {
        let key = Key::new(7).unwrap();
        run(bencher, &stream(), |x| random::categorical(x, -1, &key));
    }

    #[divan::bench(max_time = SECONDS)]
    fn draw_kernel(bencher: Bencher<'_, '_>) {
        sample(bencher, Pick::Draw(all()));
    }

    #[divan::bench(max_time = SECONDS)]
    fn top_p_kernel(bencher: Bencher<'_, '_>) {
        sample(
            bencher,
            Pick::Draw(DrawParams {
                top_p: 0.9,
                ..all()
            }),
        );
    }

    #[divan::bench(max_time = SECONDS)]
    fn top_n_sigma_kernel(bencher: Bencher<'_, '_>) {
        let draw = DrawParams {
            top_n_sigma: 1.0,
            ..all()
        };
        sample(bencher, Pick::Draw(draw));
    }

    #[divan::bench(max_time = SECONDS)]
    fn typical_p_kernel(bencher: Bencher<'_, '_>) {
        let draw = DrawParams {
            typical_p: 0.9,
            ..all()
        };
        sample(bencher, Pick::Draw(draw));
    }
}
