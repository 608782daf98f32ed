//! The mLSTM recurrence over chunks of positions, as four GPU kernels (Beck et al. 2024,
//! arXiv:2405.04517; chunks as in xLSTM 7B, arXiv:2503.13427). The formulas of a position are:
//!
//! ```text
//! m' = max(f + m, i)
//! C' = exp(f + m - m') C + exp(i - m') k v^T
//! n' = exp(f + m - m') n + exp(i - m') k
//! h  = q C' / (max(|q n'|, exp(-m')) + eps)
//! ```
//!
//! | kernel | a thread for each | computes |
//! |---|---|---|
//! | `gates` | head | `m` of each position, and the factors of a chunk's memory and keys |
//! | `scores` | pair of positions in a chunk | products of queries and keys with their gates |
//! | `memory` | element of `C` and `n` | both at the beginning of each chunk, and at the end |
//! | `outputs` | element of an output | `h` |
//!
//! Threads exchange no data, so no kernel needs a barrier. Metal and CUDA have the same source,
//! except for some names.

use super::{CudaKernel, Launch, MetalKernel};
use crate::array::Array;
use crate::device::{cuda_is_available, metal_is_available};
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "kernel::mlstm";

/// The number of threads per group.
const GROUP: u32 = 256;

/// The language of a kernel.
///
/// ```
/// use mlx_rs_core::kernel::Dialect;
/// let gpu = mlx_rs_core::metal_is_available() || mlx_rs_core::cuda_is_available();
/// assert_eq!(Dialect::available().is_some(), gpu);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Apple's GPUs.
    Metal,
    /// NVIDIA's GPUs.
    Cuda,
}

impl Dialect {
    /// The dialect of this machine's GPU, if there is one.
    #[must_use]
    pub fn available() -> Option<Self> {
        match () {
            () if metal_is_available() => Some(Self::Metal),
            () if cuda_is_available() => Some(Self::Cuda),
            () => None,
        }
    }
}

/// The code of one kernel.
///
/// ```
/// use mlx_rs_core::kernel::{Dialect, MlstmSource};
/// let names = MlstmSource::all(Dialect::Cuda).map(|source| source.name);
/// assert_eq!(names, ["mlstm_gates", "mlstm_scores", "mlstm_memory", "mlstm_outputs"]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlstmSource {
    /// The name of the kernel.
    pub name: &'static str,
    /// The names of the kernel's inputs.
    pub inputs: &'static [&'static str],
    /// The names of the kernel's outputs.
    pub outputs: &'static [&'static str],
    /// The body of the kernel's function. It reads the constants `THREADS`, `L`, `DK`, `DV`,
    /// `CHUNK` and `CHUNKS`.
    pub body: String,
}

const GATES: &str = "
float m_here = m[id];
for (int from = 0; from < L; from += CHUNK) {
    int to = from + CHUNK < L ? from + CHUNK : L;
    float m_before = m_here;
    float sum = 0.0f;
    for (int t = from; t < to; ++t) {
        float old = f[id * L + t] + m_here;
        float own = i[id * L + t];
        m_here = old > own ? old : own;
        sum += f[id * L + t];
        most[id * L + t] = m_here;
        kept[id * L + t] = EXP(sum + m_before - m_here);
    }
    float decay = 0.0f;
    for (int t = to - 1; t >= from; --t) {
        taken[id * L + t] = EXP(decay + i[id * L + t] - m_here);
        decay += f[id * L + t];
    }
}
";

const SCORES: &str = "
int t = id / CHUNK % L;
int b = id / CHUNK / L;
int s = t / CHUNK * CHUNK + id % CHUNK;
float score = 0.0f;
if (s <= t) {
    // Each sum is computed separately, because the difference of two long prefix sums would lose
    // digits.
    float decay = 0.0f;
    for (int u = s + 1; u <= t; ++u) {
        decay += f[b * L + u];
    }
    for (int d = 0; d < DK; ++d) {
        score += q[(b * L + t) * DK + d] * k[(b * L + s) * DK + d];
    }
    score *= EXP(decay + i[b * L + s] - most[b * L + t]);
}
scores[id] = score;
";

const MEMORY: &str = "
int e = id % (DV + 1);
int d = id / (DV + 1) % DK;
int b = id / (DV + 1) / DK;
float value = e < DV ? c[(b * DK + d) * DV + e] : n[b * DK + d];
for (int x = 0; x < CHUNKS; ++x) {
    starts[((b * CHUNKS + x) * DK + d) * (DV + 1) + e] = value;
    int from = x * CHUNK;
    int to = from + CHUNK < L ? from + CHUNK : L;
    value *= kept[b * L + to - 1];
    for (int s = from; s < to; ++s) {
        float one = e < DV ? v[(b * L + s) * DV + e] : 1.0f;
        value += taken[b * L + s] * k[(b * L + s) * DK + d] * one;
    }
}
after[id] = value;
";

const OUTPUTS: &str = "
int e = id % DV;
int t = id / DV % L;
int b = id / DV / L;
int x = t / CHUNK;
float found = 0.0f;
float dot = 0.0f;
for (int d = 0; d < DK; ++d) {
    float query = q[(b * L + t) * DK + d];
    int at = ((b * CHUNKS + x) * DK + d) * (DV + 1);
    found += query * starts[at + e];
    dot += query * starts[at + DV];
}
found *= kept[b * L + t];
dot *= kept[b * L + t];
for (int s = x * CHUNK; s <= t; ++s) {
    float score = scores[(b * L + t) * CHUNK + s - x * CHUNK];
    found += score * v[(b * L + s) * DV + e];
    dot += score;
}
// Below -80 the denominator would overflow, and the output is nearly zero.
float m_here = most[b * L + t] > -80.0f ? most[b * L + t] : -80.0f;
float least = EXP(-m_here);
float size = dot < 0.0f ? -dot : dot;
h[id] = found / ((size > least ? size : least) + eps[0]);
";

impl MlstmSource {
    /// The four kernels, in the order in which they run.
    #[must_use]
    pub fn all(dialect: Dialect) -> [Self; 4] {
        let (id, exp) = match dialect {
            Dialect::Metal => ("thread_position_in_grid.x", "metal::exp"),
            Dialect::Cuda => ("cg::this_grid().thread_rank()", "expf"),
        };
        let stage = |name, inputs, outputs, body: &str| Self {
            name,
            inputs,
            outputs,
            body: format!(
                "int id = {id};\nif (id >= THREADS) {{ return; }}{}",
                body.replace("EXP", exp)
            ),
        };
        [
            stage(
                "mlstm_gates",
                &["i", "f", "m"],
                &["most", "kept", "taken"],
                GATES,
            ),
            stage(
                "mlstm_scores",
                &["q", "k", "i", "f", "most"],
                &["scores"],
                SCORES,
            ),
            stage(
                "mlstm_memory",
                &["k", "v", "kept", "taken", "c", "n"],
                &["starts", "after"],
                MEMORY,
            ),
            stage(
                "mlstm_outputs",
                &["q", "v", "most", "kept", "scores", "starts", "eps"],
                &["h"],
                OUTPUTS,
            ),
        ]
    }
}

/// The positions of `B` heads, over all rows. All arrays are float32.
#[derive(Debug, Clone, Copy)]
pub struct MlstmInputs<'a> {
    /// Queries, already scaled, `[B, L, DK]`.
    pub q: &'a Array,
    /// Keys, `[B, L, DK]`.
    pub k: &'a Array,
    /// Values, `[B, L, DV]`.
    pub v: &'a Array,
    /// Input gates before the exponential, `[B, L]`.
    pub i: &'a Array,
    /// Logarithms of forget gates, `[B, L]`.
    pub f: &'a Array,
}

/// The memory, float32: `C` `[B, DK, DV]`, `n` `[B, DK]` and `m` `[B]`.
#[derive(Debug, Clone)]
pub struct MlstmMemory {
    /// The sum of outer products of keys and values, scaled by `exp(-m)`.
    pub c: Array,
    /// The sum of keys, scaled by `exp(-m)`.
    pub n: Array,
    /// The logarithm of the divisor of `c` and `n`.
    pub m: Array,
}

/// Sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    heads: i32,
    length: i32,
    key_dim: i32,
    value_dim: i32,
    chunk: i32,
}

impl Sizes {
    fn check(inputs: &MlstmInputs<'_>, memory: &MlstmMemory, chunk: i32) -> Result<Self> {
        let MlstmInputs { q, k, v, i, f } = *inputs;
        let all = [q, k, v, i, f, &memory.c, &memory.n, &memory.m];
        let fault = |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&all);
        let (&[heads, length, key_dim], &[_, _, value_dim]) = (q.shape(), v.shape()) else {
            return Err(fault("needs queries and values [B, L, D]".into()));
        };
        let expected = [
            vec![heads, length, key_dim],
            vec![heads, length, key_dim],
            vec![heads, length, value_dim],
            vec![heads, length],
            vec![heads, length],
            vec![heads, key_dim, value_dim],
            vec![heads, key_dim],
            vec![heads],
        ];
        let fits = |(array, shape): (&&Array, &Vec<i32>)| {
            array.dtype() == Dtype::Float32 && array.shape() == shape
        };
        if !all.iter().zip(&expected).all(fits) {
            return Err(fault(format!("needs float32 of shapes {expected:?}")));
        }
        if [heads, length, key_dim, value_dim, chunk]
            .iter()
            .any(|&n| n < 1)
        {
            return Err(fault("needs sizes and a chunk of at least 1".into()));
        }
        let sizes = Self {
            heads,
            length,
            key_dim,
            value_dim,
            chunk: chunk.min(length),
        };
        // Kernels compute indices in 32 bits.
        let wide = sizes.chunk.max(key_dim).max(value_dim);
        let largest = [
            [heads, length, wide, 1],
            [heads, sizes.chunks(), key_dim, value_dim.saturating_add(1)],
        ]
        .map(|shape| shape.iter().fold(1i64, |n, &d| n.saturating_mul(d.into())));
        if largest.iter().any(|&n| n > i64::from(i32::MAX)) {
            return Err(fault(
                "is too large for one call; give fewer positions".into(),
            ));
        }
        Ok(sizes)
    }

    fn chunks(&self) -> i32 {
        self.length.div_euclid(self.chunk) + i32::from(self.length % self.chunk != 0)
    }

    /// The shapes of the outputs of each kernel.
    fn outputs(&self) -> [Vec<Vec<i32>>; 4] {
        let Self {
            heads,
            length,
            key_dim,
            value_dim,
            chunk,
        } = *self;
        [
            vec![vec![heads, length]; 3],
            vec![vec![heads, length, chunk]],
            vec![
                vec![heads, self.chunks(), key_dim, value_dim + 1],
                vec![heads, key_dim, value_dim + 1],
            ],
            vec![vec![heads, length, value_dim]],
        ]
    }

    /// The number of threads of each kernel.
    fn threads(&self) -> [i32; 4] {
        let Self {
            heads,
            length,
            key_dim,
            value_dim,
            chunk,
        } = *self;
        [
            heads,
            heads * length * chunk,
            heads * key_dim * (value_dim + 1),
            heads * length * value_dim,
        ]
    }
}

enum Kernel {
    Metal(MetalKernel),
    Cuda(CudaKernel),
}

impl Kernel {
    fn new(dialect: Dialect, source: &MlstmSource) -> Result<Self> {
        let MlstmSource {
            name,
            inputs,
            outputs,
            body,
        } = source;
        Ok(match dialect {
            Dialect::Metal => Self::Metal(MetalKernel::new(name, inputs, outputs, body)?),
            Dialect::Cuda => Self::Cuda(CudaKernel::new(name, inputs, outputs, body)?),
        })
    }
}

/// The outputs `[B, L, DV]` of all positions, and the memory after the last position. Runs on the
/// machine's GPU, with `chunk` positions at a time. The chunk size does not change the result.
///
/// ```
/// use mlx_rs_core::kernel::{Dialect, MlstmInputs, MlstmMemory, mlstm};
/// use mlx_rs_core::{Array, ErrorKind};
/// let zeros = |shape: &[i32]| {
///     let count = shape.iter().product::<i32>() as usize;
///     Array::from_slice(&vec![0.0f32; count], shape)
/// };
/// let (q, v, gate) = (zeros(&[2, 5, 4])?, zeros(&[2, 5, 3])?, zeros(&[2, 5])?);
/// let inputs = MlstmInputs { q: &q, k: &q, v: &v, i: &gate, f: &gate };
/// let memory = MlstmMemory { c: zeros(&[2, 4, 3])?, n: zeros(&[2, 4])?, m: zeros(&[2])? };
/// match mlstm(&inputs, &memory, 64, 1e-6) {
///     Ok((h, after)) => assert_eq!((h.shape(), after.n.shape()), (&[2, 5, 3][..], &[2, 4][..])),
///     Err(e) => assert!(e.kind() == ErrorKind::Unsupported && Dialect::available().is_none()),
/// }
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays of other shapes or types, and for sizes that exceed 32-bit
/// indices; [`ErrorKind::Unsupported`] without a GPU.
pub fn mlstm(
    inputs: &MlstmInputs<'_>,
    memory: &MlstmMemory,
    chunk: i32,
    eps: f32,
) -> Result<(Array, MlstmMemory)> {
    let sizes = Sizes::check(inputs, memory, chunk)?;
    let dialect = Dialect::available()
        .ok_or_else(|| Error::new(ErrorKind::Unsupported, OP, "needs a GPU with Metal or CUDA"))?;
    let sources = MlstmSource::all(dialect);
    let (shapes, threads) = (sizes.outputs(), sizes.threads());
    let run = |at: usize, arrays: &[&Array]| -> Result<Vec<Array>> {
        let kernel = Kernel::new(dialect, &sources[at])?;
        let count = u32::try_from(threads[at]).unwrap_or(0);
        let mut launch = Launch::new()
            .grid(count, 1, 1)
            .thread_group(count.min(GROUP), 1, 1)
            .template("THREADS", threads[at])
            .template("L", sizes.length)
            .template("DK", sizes.key_dim)
            .template("DV", sizes.value_dim)
            .template("CHUNK", sizes.chunk)
            .template("CHUNKS", sizes.chunks());
        for array in arrays {
            launch = launch.input(array);
        }
        for shape in &shapes[at] {
            launch = launch.output(shape, Dtype::Float32);
        }
        // SAFETY: the shapes of all inputs were checked against the constants, and outputs have the
        // shapes that the constants imply. A thread writes only its own elements and reads within
        // these shapes. Threads beyond `THREADS` do nothing. `tests/arrays/emulated_kernels.rs`
        // checks this with emulated kernels.
        unsafe {
            match &kernel {
                Kernel::Metal(kernel) => kernel.launch(&launch),
                Kernel::Cuda(kernel) => kernel.launch(&launch),
            }
        }
    };
    let MlstmInputs { q, k, v, i, f } = *inputs;
    let lost = || {
        Error::new(
            ErrorKind::Mlx,
            OP,
            "a kernel has fewer outputs than it was given",
        )
    };
    let gates = run(0, &[i, f, &memory.m])?;
    let [most, decay, taken] = <[Array; 3]>::try_from(gates).map_err(|_| lost())?;
    let scores = run(1, &[q, k, i, f, &most])?.pop().ok_or_else(lost)?;
    let memories = run(2, &[k, v, &decay, &taken, &memory.c, &memory.n])?;
    let [starts, after] = <[Array; 2]>::try_from(memories).map_err(|_| lost())?;
    let eps = Array::vector(&[eps])?;
    let h = run(3, &[q, v, &most, &decay, &scores, &starts, &eps])?
        .pop()
        .ok_or_else(lost)?;
    let (width, last) = (sizes.value_dim, sizes.length - 1);
    Ok((
        h,
        MlstmMemory {
            c: after.slice_axis(-1, 0, width)?,
            n: after.slice_axis(-1, width, width + 1)?.squeeze_axis(-1)?,
            m: most.slice_axis(1, last, last + 1)?.squeeze_axis(1)?,
        },
    ))
}
