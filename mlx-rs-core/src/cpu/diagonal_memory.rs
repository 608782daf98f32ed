//! A matrix memory whose rows have separate forget gates, as an operation of MLX's graph. MLX would
//! need about thirty operations per chunk of positions, some of which compute an exponential for
//! each pair of positions and each channel.

use mlx_cpu_kernels::dim;

use super::host_op;
use super::scanned::Scanned;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "cpu::DiagonalMemory::scan";

/// The inputs of the recurrence: `R` rows of `L` positions. Each of the `H` heads has a memory. All
/// arrays are float32. If the last axis of an array is not contiguous, the array is copied.
///
/// ```text
/// u  = a S
/// S' = diag(exp(f)) S + b^T u + k^T v
/// y  = q S'
/// ```
///
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let keys = Array::from_slice(&[1.0f32, 0.0, 0.0, 1.0], &[1, 2, 2])?;
///     let none = Array::from_slice(&[0.0f32; 4], &[1, 2, 2])?;
///     let half = 0.5f32.ln();
///     let memory = cpu::DiagonalMemory {
///         // The second position asks for what the first has written.
///         q: &Array::from_slice(&[0.0f32, 0.0, 1.0, 0.0], &[1, 2, 2])?,
///         k: &keys,
///         v: &Array::from_slice(&[5.0f32, 7.0], &[1, 2, 1])?,
///         // Only the first row of the memory decays.
///         f: &Array::from_slice(&[half, 0.0, half, 0.0], &[1, 2, 2])?,
///         a: &none,
///         b: None,
///     };
///     let empty = Array::from_slice(&[0.0f32; 2], &[1, 1, 2, 1])?;
///     let (y, after) = memory.scan(&empty)?;
///     assert_eq!(y.to_vec::<f32>()?, [0.0, 2.5]);
///     assert_eq!(after.to_vec::<f32>()?, [2.5, 7.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct DiagonalMemory<'a> {
    /// Queries, `[R, L, H * key_dim]`.
    pub q: &'a Array,
    /// Keys, `[R, L, H * key_dim]`.
    pub k: &'a Array,
    /// Values, `[R, L, H * value_dim]`.
    pub v: &'a Array,
    /// Logarithms of the forget gates, at most 0, `[R, L, H * key_dim]`.
    pub f: &'a Array,
    /// The keys that read the memory before a position, `[R, L, H * key_dim]`.
    pub a: &'a Array,
    /// The keys that write what `a` has read, `[R, L, H * key_dim]`; `None` if they equal `k`.
    pub b: Option<&'a Array>,
}

impl DiagonalMemory<'_> {
    /// Returns the outputs `[R, L, H * value_dim]`, and the memory `[R, H, key_dim, value_dim]`
    /// after the last position. `before` is the memory before the first position. Computed on the
    /// CPU.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for an array of another type or shape; MLX's message when the current
    /// stream is not on the CPU.
    pub fn scan(&self, before: &Array) -> Result<(Array, Array)> {
        let Self { q, k, v, f, a, b } = *self;
        let mut inputs = vec![before, q, k, f, a, v];
        inputs.extend(b);
        let fault =
            |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&inputs);
        let (&[_, length, _], &[rows, heads, key_dim, value_dim]) = (q.shape(), before.shape())
        else {
            return Err(fault(
                "needs queries [rows, length, width] and a memory [rows, heads, key_dim, \
                 value_dim]"
                    .into(),
            ));
        };
        let wide = |dim: i32| [rows, length, heads.saturating_mul(dim)];
        let (keys, values) = (wide(key_dim), wide(value_dim));
        let memory = [rows, heads, key_dim, value_dim];
        let expected: [&[i32]; 7] = [&memory, &keys, &keys, &keys, &keys, &values, &keys];
        let fits = |(array, shape): (&&Array, &&[i32])| {
            array.dtype() == Dtype::Float32 && array.shape() == *shape
        };
        let is_empty = memory.iter().chain(&[length]).any(|&n| n < 1);
        if is_empty || !inputs.iter().zip(&expected).all(fits) {
            return Err(fault(format!("needs float32 of shapes {expected:?}")));
        }
        let scanned = Scanned {
            outputs: &values,
            state: &memory,
        };
        let Some(sizes) = scanned.sizes() else {
            return Err(fault("the outputs have more elements than an array".into()));
        };
        let work = mlx_cpu_kernels::DiagonalMemory {
            rows: dim(rows),
            length: dim(length),
            heads: dim(heads),
            key_dim: dim(key_dim),
            value_dim: dim(value_dim),
            writes_apart: b.is_some(),
        };
        let all = host_op::add_strided(OP, work, &inputs, 1, &[sizes.1])?;
        scanned.divide(&all, sizes, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::tests::on_cpu;
    use crate::{Device, Stream, zeros};

    /// Views of one array must have the same results as copies. A sequence in segments must have
    /// the results of one pass.
    #[test]
    fn views_and_segments_equal_one_pass() {
        on_cpu(|| {
            let noise = |shape: &[i32], seed: u32| {
                let n = shape.iter().product::<i32>() as usize;
                Array::from_slice(&mlx_cpu_kernels::testing::noise(n, seed), shape).unwrap()
            };
            // Two heads: five arrays with keys of 4 elements, and values of 3.
            let wide = noise(&[2, 20, 5 * 8 + 6], 1);
            let wide = wide.multiply(&Array::scalar(0.3f32).unwrap()).unwrap();
            let before = noise(&[2, 2, 4, 3], 3);
            let run = |pieces: &[i32], copied: bool| {
                let (mut from, mut memory, mut all) = (0, before.clone(), Vec::new());
                for piece in pieces {
                    let part = |first: i32, last: i32| {
                        let rows = wide.slice_axis(1, from, from + piece).unwrap();
                        let view = rows.slice_axis(2, first, last).unwrap();
                        if copied {
                            view.contiguous().unwrap()
                        } else {
                            view
                        }
                    };
                    let f = part(24, 32).abs().unwrap().negative().unwrap();
                    let scan = DiagonalMemory {
                        q: &part(0, 8),
                        k: &part(8, 16),
                        v: &part(40, 46),
                        f: &f,
                        a: &part(16, 24),
                        b: Some(&part(32, 40)),
                    };
                    let (y, after) = scan.scan(&memory).unwrap();
                    all.push(y);
                    (memory, from) = (after, from + piece);
                }
                let outputs: Vec<&Array> = all.iter().collect();
                let y = crate::concatenate(&outputs, 1).unwrap();
                [&y, &memory].map(|a| a.to_vec::<f32>().unwrap())
            };
            let one_pass = run(&[20], true);
            assert!(one_pass.iter().flatten().all(|v| v.is_finite()));
            assert_eq!(run(&[20], false), one_pass);
            assert_eq!(run(&[1, 12, 7], false), one_pass);
        });
    }

    #[test]
    fn arrays_that_do_not_fit_are_an_error() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let zeros = |shape: &[i32]| zeros(shape, Dtype::Float32).unwrap();
            let (keys, values) = (zeros(&[1, 3, 8]), zeros(&[1, 3, 6]));
            let good = DiagonalMemory {
                q: &keys,
                k: &keys,
                v: &values,
                f: &keys,
                a: &keys,
                b: Some(&keys),
            };
            let memory = zeros(&[1, 2, 4, 3]);
            assert!(good.scan(&memory).is_ok());
            assert!(good.scan(&zeros(&[2, 2, 4, 3])).is_err());
            assert!(good.scan(&zeros(&[1, 2, 4])).is_err());
            let (half, none) = (keys.astype(Dtype::Float16).unwrap(), zeros(&[1, 0, 8]));
            for bad in [
                DiagonalMemory { f: &half, ..good },
                DiagonalMemory { q: &none, ..good },
                DiagonalMemory { v: &keys, ..good },
                DiagonalMemory {
                    b: Some(&values),
                    ..good
                },
            ] {
                let error = bad.scan(&memory).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
            }
        });
    }
}
