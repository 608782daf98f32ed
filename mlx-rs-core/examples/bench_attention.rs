//! Compares flash attention with the full score matrix: time, memory, and error relative to
//! float64. The numbers of heads are those of Gemma 3 4B: eight query heads and four key heads.
//!
//! ```text
//! cargo bench -p rust-mlx-core --bench attention
//! ```

use std::time::{Duration, Instant};

use mlx_rs_core::fast::{self, Mask};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{
    All, Array, Device, Dtype, Result, Stream, concatenate, cpu, memory, tri, where_,
};

const HEADS: i32 = 8;
const KV_HEADS: i32 = 4;

/// The number of positions, and of elements of a head.
pub type Size = (i32, i32);

/// The sizes to time.
pub const TIMED: [Size; 16] = [
    (1, 32),
    (6, 32),
    (96, 32),
    (192, 32),
    (1, 64),
    (6, 64),
    (96, 64),
    (192, 64),
    (1, 128),
    (6, 128),
    (96, 128),
    (192, 128),
    (1, 256),
    (6, 256),
    (96, 256),
    (192, 256),
];

/// The numbers of positions for measurements of memory and precision, with heads of 256.
pub const MEASURED: [i32; 4] = [6, 128, 512, 2048];

/// Queries, keys and values, in the layouts of both implementations.
struct Inputs {
    /// Queries `[1, H, L, D]`; keys and values `[1, Hkv, L, D]`.
    q: Array,
    k: Array,
    v: Array,
    /// Queries, keys and values in one array `[1, L, (H + 2 Hkv) * D]`, as a fused projection
    /// returns them.
    packed: Array,
    size: Size,
}

impl Inputs {
    fn new(size: Size) -> Result<Self> {
        let (length, dim) = size;
        let noise = |shape: &[i32], seed| -> Result<Array> {
            let x = random::normal(0.0, 1.0, shape, Dtype::Float32, &Key::new(seed)?)?;
            x.eval()?;
            Ok(x)
        };
        let q = noise(&[1, HEADS, length, dim], 1)?;
        let k = noise(&[1, KV_HEADS, length, dim], 2)?;
        let v = noise(&[1, KV_HEADS, length, dim], 3)?;
        // [1, H, L, D] -> [1, L, H * D]
        let flat = |a: &Array| a.swap_axes(1, 2)?.reshape(&[1, length, -1]);
        let packed = concatenate(&[&flat(&q)?, &flat(&k)?, &flat(&v)?], -1)?;
        packed.eval()?;
        Ok(Self {
            q,
            k,
            v,
            packed,
            size,
        })
    }

    fn scale(&self) -> f32 {
        (self.size.1 as f32).powf(-0.5)
    }

    /// Computes `softmax(Q K^T) V` with all scores in memory.
    fn materialized(&self) -> Result<Array> {
        self.materialized_in(Dtype::Float32)
    }

    /// [`Self::materialized`] with sums of this type: `[Hkv, H / Hkv, L, D]`.
    fn materialized_in(&self, dtype: Dtype) -> Result<Array> {
        let (length, dim) = self.size;
        let q = self.q.reshape(&[KV_HEADS, HEADS / KV_HEADS, length, dim])?;
        let (k, v) = (self.k.swap_axes(0, 1)?, self.v.swap_axes(0, 1)?); // [Hkv, 1, L, D]
        let (q, k, v) = (q.astype(dtype)?, k.astype(dtype)?, v.astype(dtype)?);
        let number = |value: f32| Array::scalar(value)?.astype(dtype);
        let scores = q
            .matmul(&k.swap_axes(-1, -2)?)?
            .multiply(&number(self.scale())?)?;
        let seen = tri(length, length, 0, Dtype::Bool)?;
        let scores = where_(&seen, &scores, &number(f32::NEG_INFINITY)?)?;
        scores.softmax(-1, true)?.matmul(&v)
    }

    /// The maximum error of `actual` relative to float64, which only the CPU supports.
    fn error(&self, actual: &Array) -> Result<f32> {
        let (length, dim) = self.size;
        // On the CPU, the result has the shape [1, L, H * D].
        let actual = match actual.shape() {
            [1, _, width] if *width == HEADS * dim => {
                actual.reshape(&[1, length, HEADS, dim])?.swap_axes(1, 2)?
            }
            _ => actual.clone(),
        };
        actual.eval()?;
        Stream::default_of(Device::cpu())?.scope(|| {
            let exact = self.materialized_in(Dtype::Float64)?;
            let actual = actual.reshape(exact.shape())?.astype(Dtype::Float64)?;
            let worst = actual.subtract(&exact)?.abs()?.max(All, false)?;
            worst.astype(Dtype::Float32)?.item()
        })
    }

    /// Flash attention: this crate's kernel on a CPU, MLX's on other devices.
    fn fused(&self) -> Result<Array> {
        let (length, dim) = self.size;
        if Stream::current()?.device() != Device::cpu() || !cpu::enabled() {
            let (q, k, v) = (&self.q, &self.k, &self.v);
            return fast::scaled_dot_product_attention(q, k, v, self.scale(), Mask::Causal);
        }
        let heads = cpu::Heads {
            n_heads: HEADS,
            n_kv_heads: KV_HEADS,
            head_dim: dim,
            scale: self.scale(),
            softcap: None,
            q_norm: None,
            k_norm: None,
            rotation: None,
            sinks: None,
        };
        let view = cpu::KvView {
            length,
            offset: 0,
            keys: self.k.clone(),
            values: self.v.clone(),
            packing: None,
            filled: length,
            order: Some((0, 0)),
            window: None,
        };
        heads.attend(&self.packed, &[view], false)
    }
}

/// The median time of building and evaluating the operation.
fn median(runs: usize, make: &dyn Fn() -> Result<Array>) -> Result<Duration> {
    make()?.eval()?;
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let began = Instant::now();
        make()?.eval()?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(times.get(times.len() / 2).copied().unwrap_or_default())
}

/// The peak memory of the evaluation, without the memory that was in use before.
fn peak(make: &dyn Fn() -> Result<Array>) -> Result<usize> {
    memory::clear_cache()?;
    memory::reset_peak()?;
    let before = memory::active()?;
    let y = make()?;
    y.eval()?;
    Ok(memory::peak()?.saturating_sub(before))
}

/// Prints the tables of all sizes.
pub fn main() -> Result<()> {
    run(&TIMED, &MEASURED, 21).map(|_| ())
}

/// Prints the tables. Returns the maximum error of flash attention.
pub fn run(timed: &[Size], measured: &[i32], runs: usize) -> Result<f32> {
    let gpu = Device::gpu().is_available();
    let device = if gpu { Device::gpu() } else { Device::cpu() };
    Stream::default_of(device)?.scope(|| {
        println!("{HEADS} heads on {KV_HEADS}, causal, on {device}");
        println!("positions  head  in blocks      with all scores");
        for &size in timed {
            let inputs = Inputs::new(size)?;
            let fused = median(runs, &|| inputs.fused())?;
            let materialized_time = median(runs, &|| inputs.materialized())?;
            let ratio = materialized_time.as_secs_f64() / fused.as_secs_f64();
            println!(
                "{:>9}  {:>4}  {fused:>12.1?}  {materialized_time:>12.1?}  {ratio:.2}",
                size.0, size.1
            );
        }
        println!("positions  bytes in blocks  bytes with all scores");
        for &length in measured {
            let inputs = Inputs::new((length, 256))?;
            let fused = peak(&|| inputs.fused())?;
            let materialized_peak = peak(&|| inputs.materialized())?;
            println!("{length:>9}  {fused:>15}  {materialized_peak:>21}");
        }
        println!("positions  error in blocks  error with all scores, beside float64");
        let mut worst = 0.0f32;
        for &length in measured {
            let inputs = Inputs::new((length, 256))?;
            let fused = inputs.error(&inputs.fused()?)?;
            let materialized_error = inputs.error(&inputs.materialized()?)?;
            println!("{length:>9}  {fused:>15.1e}  {materialized_error:>21.1e}");
            worst = worst.max(fused);
        }
        Ok(worst)
    })
}
