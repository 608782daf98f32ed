//! Runs GPU kernels on the CPU. The kernels' code in both languages is compiled as C++, with
//! replacements for GPU functions, and the results are compared with sums in float64. This tests
//! the arithmetic, not whether a GPU's compiler accepts the code.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use mlx_rs_core::kernel::{Dialect, MlstmSource};

use crate::examples::tiled_product;

const DIALECTS: [Dialect; 2] = [Dialect::Metal, Dialect::Cuda];

/// The GPU functions in C++. Groups run sequentially. The threads of a group run in parallel if the
/// kernel has barriers.
const PRELUDE: &str = r#"
#include <cmath>
#include <cstdio>
#include <pthread.h>
#include <vector>
struct Place { int x, y, z; };
static thread_local Place thread_position_in_grid, thread_position_in_threadgroup;
static thread_local Place threadgroup_position_in_grid, threadIdx, blockIdx;
static thread_local int rank;
namespace metal { static inline float exp(float x) { return std::exp(x); } }
namespace cg { struct Grid { int thread_rank() { return rank; } };
               static inline Grid this_grid() { return Grid(); } }
namespace mem_flags { enum { mem_threadgroup }; }
static pthread_barrier_t barrier;
static inline void threadgroup_barrier(int) { pthread_barrier_wait(&barrier); }
static inline void __syncthreads() { pthread_barrier_wait(&barrier); }
#define threadgroup static
#define __shared__ static
static std::vector<float> numbers(const char* path, size_t count) {
    std::vector<float> all(count);
    FILE* file = fopen(path, "rb");
    if (!file || fread(all.data(), sizeof(float), count, file) != count) { throw 1; }
    fclose(file);
    return all;
}
static void place(int gx, int gy, int x, int y) {
    threadIdx = thread_position_in_threadgroup = {x, y, 0};
    blockIdx = threadgroup_position_in_grid = {gx, gy, 0};
    thread_position_in_grid = {gx * WIDTH + x, gy * HEIGHT + y, 0};
    rank = gx * WIDTH + x;
}
"#;

struct Kernel<'a> {
    body: &'a str,
    inputs: Vec<(&'a str, &'a [f32])>,
    outputs: Vec<(&'a str, usize)>,
    constants: Vec<(&'a str, usize)>,
    /// The number of groups, and of threads per group, along two axes.
    groups: [usize; 2],
    group: [usize; 2],
    waits: bool,
}

/// Runs a kernel and returns its outputs.
fn run(kernel: &Kernel<'_>) -> Vec<Vec<f32>> {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let mut code = String::new();
    let [width, height] = kernel.group;
    writeln!(code, "enum {{ WIDTH = {width}, HEIGHT = {height} }};").unwrap();
    code.push_str(PRELUDE);
    for (name, value) in &kernel.constants {
        writeln!(code, "static const int {name} = {value};").unwrap();
    }
    let mut made = String::new();
    for (name, values) in &kernel.inputs {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        fs::write(path(name), bytes).unwrap();
        writeln!(code, "static const float* {name};").unwrap();
        let (file, count) = (path(name), values.len());
        writeln!(
            made,
            "auto in_{name} = numbers({file:?}, {count}); {name} = in_{name}.data();"
        )
        .unwrap();
    }
    for (name, count) in &kernel.outputs {
        writeln!(code, "static float* {name};").unwrap();
        // Outputs start as NaN, so elements that no thread writes are noticed.
        writeln!(
            made,
            "std::vector<float> out_{name}({count}, NAN); {name} = out_{name}.data();"
        )
        .unwrap();
    }
    let [gx, gy] = kernel.groups;
    let body = kernel.body;
    writeln!(code, "static void kernel() {{ {body} }}").unwrap();
    code.push_str("struct Job { int gx, gy, x, y; };\n");
    code.push_str("static void* thread(void* of) { Job* j = (Job*)of; ");
    code.push_str("place(j->gx, j->gy, j->x, j->y); kernel(); return nullptr; }\n");
    writeln!(code, "int main() {{ {made}").unwrap();
    writeln!(
        code,
        "for (int gy = 0; gy < {gy}; ++gy) for (int gx = 0; gx < {gx}; ++gx) {{"
    )
    .unwrap();
    let all = "for (int y = 0; y < HEIGHT; ++y) for (int x = 0; x < WIDTH; ++x)";
    if kernel.waits {
        code.push_str("pthread_barrier_init(&barrier, nullptr, WIDTH * HEIGHT);\n");
        code.push_str("std::vector<Job> jobs; std::vector<pthread_t> ids(WIDTH * HEIGHT);\n");
        writeln!(code, "{all} jobs.push_back({{gx, gy, x, y}});").unwrap();
        code.push_str("for (size_t i = 0; i < jobs.size(); ++i) ");
        code.push_str("if (pthread_create(&ids[i], nullptr, thread, &jobs[i])) return 1;\n");
        code.push_str("for (pthread_t id : ids) pthread_join(id, nullptr);\n");
        code.push_str("pthread_barrier_destroy(&barrier);\n");
    } else {
        writeln!(code, "{all} {{ place(gx, gy, x, y); kernel(); }}").unwrap();
    }
    code.push_str("}\n");
    for (name, count) in &kernel.outputs {
        let file = path(&format!("{name}.out"));
        writeln!(code, "FILE* f_{name} = fopen({file:?}, \"wb\");").unwrap();
        writeln!(
            code,
            "fwrite({name}, sizeof(float), {count}, f_{name}); fclose(f_{name});"
        )
        .unwrap();
    }
    code.push_str("return 0; }\n");
    let (source, program) = (path("kernel.cpp"), path("kernel"));
    fs::write(&source, &code).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-Wall",
        "-Werror=return-type",
    ];
    // Sanitizers check the indices. Kernels with barriers run without sanitizers, with which their
    // thousand threads take a minute.
    let more: &[&str] = match kernel.waits {
        true => &[],
        false => &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    };
    succeed(Command::new(compiler).args(flags).args(more).args([
        &source,
        "-o",
        &program,
        "-lpthread",
    ]));
    succeed(Command::new(&program).env("ASAN_OPTIONS", "detect_leaks=0"));
    let read = |(name, count): &(&str, usize)| {
        let bytes = fs::read(Path::new(&path(&format!("{name}.out")))).unwrap();
        let (all, rest) = bytes.as_chunks::<4>();
        assert!(all.len() == *count && rest.is_empty());
        all.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    kernel.outputs.iter().map(read).collect()
}

fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}

/// Values from -1 to 1.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn a_product_in_tiles_is_the_product() {
    for (rows, inner, cols) in [(40usize, 70usize, 50usize), (1, 1, 1)] {
        let (a, b) = (noise(rows * inner, 1), noise(inner * cols, 2));
        for dialect in DIALECTS {
            let body = tiled_product::source(dialect);
            let actual = run(&Kernel {
                body: &body,
                inputs: vec![("a", &a), ("b", &b)],
                outputs: vec![("product", rows * cols)],
                constants: vec![("ROWS", rows), ("COLS", cols), ("INNER", inner)],
                groups: [cols.div_ceil(32), rows.div_ceil(32)],
                group: [32, 32],
                waits: true,
            });
            for (at, actual) in actual[0].iter().enumerate() {
                let (row, col) = (at / cols, at % cols);
                let exact: f64 = (0..inner)
                    .map(|i| f64::from(a[row * inner + i]) * f64::from(b[i * cols + col]))
                    .sum();
                let error = (f64::from(*actual) - exact).abs();
                assert!(error < 1e-5, "{dialect:?}, {row}, {col}: {actual} {exact}");
            }
        }
    }
}

/// Sizes of a case: all heads, positions, elements of a key, and elements of a value.
type Sizes = (usize, usize, usize, usize);

/// Inputs and memory, with their names in the kernels.
struct Case {
    sizes: Sizes,
    arrays: Vec<(&'static str, Vec<f32>)>,
}

impl Case {
    fn new(sizes: Sizes, gate: f32) -> Self {
        let (b, l, dk, dv) = sizes;
        let scaled = |count, seed, by: f32| -> Vec<f32> {
            noise(count, seed).into_iter().map(|x| x * by).collect()
        };
        let forget = noise(b * l, 5).into_iter();
        let arrays = vec![
            ("q", noise(b * l * dk, 1)),
            ("k", noise(b * l * dk, 2)),
            ("v", noise(b * l * dv, 3)),
            ("i", scaled(b * l, 4, gate)),
            // The logarithms of the forget gates, which are at most 0.
            ("f", forget.map(|x| (x - 1.0) * gate / 2.0).collect()),
            ("c", noise(b * dk * dv, 6)),
            ("n", noise(b * dk, 7)),
            ("m", noise(b, 8)),
            ("eps", vec![1e-6]),
        ];
        Self { sizes, arrays }
    }

    fn of(&self, name: &str) -> &[f32] {
        &self
            .arrays
            .iter()
            .find(|(array_name, _)| *array_name == name)
            .unwrap()
            .1
    }

    /// The definition, position by position in float64: outputs, `C` with `n` as the last column,
    /// and `m`.
    fn exact(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let (b, l, dk, dv) = self.sizes;
        let wide =
            |name: &str| -> Vec<f64> { self.of(name).iter().copied().map(f64::from).collect() };
        let [q, k, v, i, f, c, n, m] = ["q", "k", "v", "i", "f", "c", "n", "m"].map(wide);
        let (mut outputs, mut after, mut most) = (Vec::new(), Vec::new(), Vec::new());
        for head in 0..b {
            // The memory has the shape [DK, DV + 1].
            let mut memory: Vec<f64> = (0..dk)
                .flat_map(|d| {
                    let row = c[(head * dk + d) * dv..][..dv].to_vec();
                    row.into_iter().chain([n[head * dk + d]])
                })
                .collect();
            let mut here = m[head];
            for t in 0..l {
                let at = head * l + t;
                let next = (f[at] + here).max(i[at]);
                let (keep, take) = ((f[at] + here - next).exp(), (i[at] - next).exp());
                here = next;
                for (d, row) in memory.chunks_mut(dv + 1).enumerate() {
                    let key = take * k[at * dk + d];
                    for (e, x) in row.iter_mut().enumerate() {
                        let value = if e < dv { v[at * dv + e] } else { 1.0 };
                        *x = keep * *x + key * value;
                    }
                }
                let seen: Vec<f64> = (0..=dv)
                    .map(|e| {
                        (0..dk)
                            .map(|d| q[at * dk + d] * memory[d * (dv + 1) + e])
                            .sum()
                    })
                    .collect();
                let least = (-here.max(-80.0)).exp();
                let size = seen[dv].abs().max(least) + f64::from(self.of("eps")[0]);
                outputs.extend(seen[..dv].iter().map(|x| x / size));
            }
            after.extend(memory);
            most.push(here);
        }
        (outputs, after, most)
    }

    /// Runs the four kernels one after another.
    fn emulated(mut self, dialect: Dialect, chunk: usize) -> Self {
        let (b, l, dk, dv) = self.sizes;
        let chunks = l.div_ceil(chunk);
        let heads = b * l;
        let sizes: [&[(&'static str, usize)]; 4] = [
            &[("most", heads), ("kept", heads), ("taken", heads)],
            &[("scores", heads * chunk)],
            &[
                ("starts", b * chunks * dk * (dv + 1)),
                ("after", b * dk * (dv + 1)),
            ],
            &[("h", heads * dv)],
        ];
        let threads = [b, heads * chunk, b * dk * (dv + 1), heads * dv];
        for ((source, outputs), threads) in MlstmSource::all(dialect).iter().zip(sizes).zip(threads)
        {
            assert!(outputs.iter().map(|(name, _)| name).eq(source.outputs));
            let actual = run(&Kernel {
                body: &source.body,
                inputs: source
                    .inputs
                    .iter()
                    .map(|name| (*name, self.of(name)))
                    .collect(),
                outputs: outputs.to_vec(),
                constants: vec![
                    ("THREADS", threads),
                    ("L", l),
                    ("DK", dk),
                    ("DV", dv),
                    ("CHUNK", chunk),
                    ("CHUNKS", chunks),
                ],
                // There is one group more than the kernel needs. The threads of that group must do
                // nothing.
                groups: [threads.div_ceil(64) + 1, 1],
                group: [64, 1],
                waits: false,
            });
            let names = outputs.iter().map(|(name, _)| *name);
            self.arrays.extend(names.zip(actual));
        }
        self
    }
}

#[test]
fn mlstm_over_chunks_is_position_by_position() {
    for (sizes, chunk, gate, bound) in [
        ((3, 11, 4, 5), 4, 2.0, 1e-4),
        ((2, 5, 3, 2), 5, 2.0, 1e-4),
        // The exponentials of these gates overflow unless the exponents are limited to 0.
        ((1, 70, 3, 4), 64, 200.0, 1e-3),
    ] {
        let (outputs, after, most) = Case::new(sizes, gate).exact();
        for dialect in DIALECTS {
            let actual = Case::new(sizes, gate).emulated(dialect, chunk);
            let same = |name: &str, exact: &[f64]| {
                let ours = actual.of(name);
                assert_eq!(ours.len(), exact.len());
                for (at, (a, b)) in ours.iter().zip(exact).enumerate() {
                    let error = (f64::from(*a) - b).abs() / b.abs().max(1.0);
                    assert!(error < bound, "{dialect:?} {sizes:?} {name} {at}: {a} {b}");
                }
            };
            same("h", &outputs);
            same("after", &after);
            let (_, l, _, _) = sizes;
            for (head, exact) in most.iter().enumerate() {
                let ours = f64::from(actual.of("most")[head * l + l - 1]);
                assert!((ours - exact).abs() < 1e-3, "{ours} {exact}");
            }
        }
    }
}
