//! Measures the mLSTM recurrence over a prompt of 2,048 positions on the CPU: in chunks, position
//! by position in one call, and with one call per position as in decode. The sizes are those of one
//! layer of an xLSTM with 162M parameters, and of xLSTM 7B.
//!
//! `cargo bench -p rust-mlx-core --bench recurrence`

use std::time::{Duration, Instant};

use mlx_rs_core::cpu::{Memory, MemoryInputs, MemoryRule};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{Array, Device, Dtype, Result, Stream, eval};

const POSITIONS: i32 = 2048;
const CHUNK: i32 = 64;
const RUNS: usize = 5;

/// The number of heads, and of elements of a key and of a value.
const SIZES: [(&str, [i32; 3]); 2] = [("162M", [4, 96, 192]), ("7B", [8, 256, 512])];

/// Queries, keys, values, forget gates and input gates, each `[1, L, width]`.
struct Prompt([Array; 5]);

impl Prompt {
    fn new([heads, key_dim, value_dim]: [i32; 3]) -> Result<Self> {
        let noise = |width: i32, seed| -> Result<Array> {
            let shape = [1, POSITIONS, width];
            let x = random::normal(0.0, 1.0, &shape, Dtype::Float32, &Key::new(seed)?)?;
            x.eval()?;
            Ok(x)
        };
        Ok(Self([
            noise(heads * key_dim, 1)?,
            noise(heads * key_dim, 2)?,
            noise(heads * value_dim, 3)?,
            noise(heads, 4)?,
            noise(heads, 5)?,
        ]))
    }

    /// The outputs of positions `from..to`, and the state after them.
    fn scan(
        &self,
        memory: &Memory,
        (from, to): (i32, i32),
        state: &[Array],
    ) -> Result<(Array, Vec<Array>)> {
        let part = |array: &Array| array.slice_axis(1, from, to);
        let Self([q, k, v, f, i]) = self;
        let positions = MemoryInputs {
            q: &part(q)?,
            k: &part(k)?,
            v: &part(v)?,
            f: &part(f)?,
            second: Some(&part(i)?),
        };
        memory.scan(&positions, state)
    }
}

fn empty([heads, key_dim, value_dim]: [i32; 3]) -> Result<Vec<Array>> {
    let shapes: [&[i32]; 3] = [
        &[1, heads, key_dim, value_dim],
        &[1, heads, key_dim],
        &[1, heads],
    ];
    let zeros = |shape: &&[i32]| {
        let count = shape.iter().product::<i32>().unsigned_abs() as usize;
        Array::from_slice(&vec![0.0f32; count], shape)
    };
    shapes.iter().map(zeros).collect()
}

/// The shortest time of a few runs, and `m` of the last state, to compare results.
fn timed(mut run: impl FnMut() -> Result<Vec<Array>>) -> Result<(Duration, Vec<f32>)> {
    let mut best = Duration::MAX;
    let mut last = Vec::new();
    for _ in 0..RUNS {
        let began = Instant::now();
        let state = run()?;
        eval(&state)?;
        best = best.min(began.elapsed());
        last = state[1].to_vec::<f32>()?;
    }
    Ok((best, last))
}

fn main() -> Result<()> {
    Stream::default_of(Device::cpu())?.scope(|| {
        println!("{POSITIONS} positions, chunks of {CHUNK}, one layer");
        println!("size  in chunks  by position  a call each  ratio to chunks");
        for (name, sizes) in SIZES {
            let [heads, key_dim, value_dim] = sizes;
            let prompt = Prompt::new(sizes)?;
            let memory = |chunk| Memory {
                rule: MemoryRule::Exponential {
                    gate_cap: Some(15.0),
                    eps: 1e-6,
                },
                heads,
                key_heads: heads,
                key_dim,
                value_dim,
                scale: (key_dim as f32).powf(-0.5),
                chunk,
            };
            let in_chunks = |chunk: i32| {
                timed(|| {
                    let (h, mut after) =
                        prompt.scan(&memory(chunk), (0, POSITIONS), &empty(sizes)?)?;
                    after.push(h);
                    Ok(after)
                })
            };
            let (chunks, actual) = in_chunks(CHUNK)?;
            let (single, same) = in_chunks(1)?;
            let (calls, again) = timed(|| {
                let mut state = empty(sizes)?;
                for at in 0..POSITIONS {
                    let (h, after) = prompt.scan(&memory(1), (at, at + 1), &state)?;
                    eval(after.iter().chain([&h]))?;
                    state = after;
                }
                Ok(state)
            })?;
            // All three ways must compute the same function.
            for other in [&same, &again] {
                for (a, b) in actual.iter().zip(other) {
                    assert!((a - b).abs() <= 1e-3 * b.abs().max(1.0), "{a} {b}");
                }
            }
            let ratio = |time: Duration| time.as_secs_f64() / chunks.as_secs_f64();
            println!(
                "{name:>4}  {chunks:>9.1?}  {single:>11.1?}  {calls:>11.1?}  {:.2} {:.2}",
                ratio(single),
                ratio(calls)
            );
        }
        Ok(())
    })
}
