//! A matrix memory per head, as an operation of MLX's graph. MLX would need about twenty operations
//! per chunk, each of which reads and writes the whole memory.

use mlx_cpu_kernels::{MatrixMemory, MemoryRule, dim};

use super::host_op;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "cpu::Memory::scan";

/// The sizes of a memory, and its update rule.
///
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// let memory = cpu::Memory {
///     rule: cpu::MemoryRule::Decay,
///     heads: 1,
///     key_heads: 1,
///     key_dim: 2,
///     value_dim: 1,
///     scale: 1.0,
///     chunk: 64,
/// };
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let keys = Array::from_slice(&[1.0f32, 0.0, 0.0, 1.0], &[1, 2, 2])?;
///     let positions = cpu::MemoryInputs {
///         // The second position asks for what the first has written.
///         q: &Array::from_slice(&[0.0f32, 0.0, 1.0, 0.0], &[1, 2, 2])?,
///         k: &keys,
///         v: &Array::from_slice(&[5.0f32, 7.0], &[1, 2, 1])?,
///         f: &Array::from_slice(&[0.0f32, 0.5f32.ln()], &[1, 2, 1])?,
///         second: None,
///     };
///     let empty = Array::from_slice(&[0.0f32; 2], &[1, 1, 2, 1])?;
///     let (y, state) = memory.scan(&positions, &[empty])?;
///     assert_eq!(y.to_vec::<f32>()?, [0.0, 2.5]);
///     assert_eq!(state[0].to_vec::<f32>()?, [2.5, 7.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Memory {
    /// The update rule, with its formulas.
    pub rule: MemoryRule,
    /// The number of value heads. Each has a memory.
    pub heads: i32,
    /// The number of query and key heads. It divides `heads`, and equals `heads` if the rule is
    /// normalized.
    pub key_heads: i32,
    /// The number of elements of a query and of a key.
    pub key_dim: i32,
    /// The number of elements of a value.
    pub value_dim: i32,
    /// The factor on queries.
    pub scale: f32,
    /// The number of positions per chunk. It affects only the speed.
    pub chunk: i32,
}

/// The inputs of the recurrence: `R` rows of `L` positions. All arrays are float32. If the last
/// axis of an array is not contiguous, the array is copied.
#[derive(Debug, Clone, Copy)]
pub struct MemoryInputs<'a> {
    /// Queries, `[R, L, key_heads * key_dim]`.
    pub q: &'a Array,
    /// Keys, `[R, L, key_heads * key_dim]`.
    pub k: &'a Array,
    /// Values, `[R, L, heads * value_dim]`.
    pub v: &'a Array,
    /// Forget gates, `[R, L, heads]`: unmodified outputs of the projection for
    /// [`MemoryRule::Exponential`], logarithms for other rules.
    pub f: &'a Array,
    /// Input gates, or write strengths, `[R, L, heads]`; `None` for [`MemoryRule::Decay`].
    pub second: Option<&'a Array>,
}

impl Memory {
    /// The shapes of a state for `rows` rows: of `C`, and for a normalized rule also of `n` and
    /// `m`.
    fn state_shapes(&self, rows: i32) -> Vec<Vec<i32>> {
        let mut shapes = vec![vec![rows, self.heads, self.key_dim, self.value_dim]];
        if self.rule.is_normalized() {
            shapes.push(vec![rows, self.heads, self.key_dim]);
            shapes.push(vec![rows, self.heads]);
        }
        shapes
    }

    /// Returns the outputs `[R, L, heads * value_dim]`, and the state after the last position.
    /// `state` is the state before the first position: `C` `[R, heads, key_dim, value_dim]`, and
    /// for a normalized rule also `n` `[R, heads, key_dim]` and `m` `[R, heads]`. Computed on the
    /// CPU.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for an array of another type or shape, or sizes that do not match;
    /// MLX's message when the current stream is not on the CPU.
    pub fn scan(
        &self,
        positions: &MemoryInputs<'_>,
        state: &[Array],
    ) -> Result<(Array, Vec<Array>)> {
        let MemoryInputs { q, k, v, f, second } = *positions;
        let mut inputs: Vec<&Array> = state.iter().collect();
        inputs.extend([q, k, v, f]);
        inputs.extend(second);
        let fault =
            |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&inputs);
        let [rows, length, _] = *q.shape() else {
            return Err(fault("needs queries [rows, length, width]".into()));
        };
        let sizes = [self.heads, self.key_heads, self.key_dim, self.value_dim];
        let grouped = self.key_heads > 0 && self.heads % self.key_heads == 0;
        let paired = !self.rule.is_normalized() || self.heads == self.key_heads;
        if rows < 1 || length < 1 || sizes.iter().any(|&n| n < 1) || !grouped || !paired {
            return Err(fault(format!(
                "{self:?} over {rows} rows of {length} positions is not possible"
            )));
        }
        let wide = |heads: i32, dim: i32| vec![rows, length, heads.saturating_mul(dim)];
        let keys = wide(self.key_heads, self.key_dim);
        let mut expected = self.state_shapes(rows);
        expected.extend([keys.clone(), keys, wide(self.heads, self.value_dim)]);
        expected.push(wide(self.heads, 1));
        if self.rule.has_second_gate() {
            expected.push(wide(self.heads, 1));
        }
        let fits = |(array, shape): (&&Array, &Vec<i32>)| {
            array.dtype() == Dtype::Float32 && array.shape() == shape
        };
        if inputs.len() != expected.len() || !inputs.iter().zip(&expected).all(fits) {
            return Err(fault(format!("needs float32 of shapes {expected:?}")));
        }
        let shapes = self.state_shapes(rows);
        let count = |shape: &[i32]| shape.iter().fold(1i64, |n, &d| n.saturating_mul(d.into()));
        let output_shape = wide(self.heads, self.value_dim);
        let total = shapes
            .iter()
            .fold(count(&output_shape), |n, s| n.saturating_add(count(s)));
        let total = i32::try_from(total)
            .map_err(|_| fault("the outputs have more elements than an array".into()))?;
        let work = MatrixMemory {
            rule: self.rule,
            rows: dim(rows),
            length: dim(length),
            heads: dim(self.heads),
            key_heads: dim(self.key_heads),
            key_dim: dim(self.key_dim),
            value_dim: dim(self.value_dim),
            scale: self.scale,
            chunk: dim(self.chunk),
        };
        let all = host_op::add_strided(OP, work, &inputs, state.len(), &[total])?;
        let mut from = 0;
        let mut part = |shape: &[i32]| {
            let to = from + shape.iter().product::<i32>();
            let part_array = all.slice_axis(0, from, to)?.reshape(shape);
            from = to;
            part_array
        };
        let y = part(&output_shape)?;
        let after = shapes.iter().map(|shape| {
            let output = part(shape)?;
            // With several positions the state is copied, because a view would keep the outputs of
            // all positions in memory.
            if length == 1 {
                Ok(output)
            } else {
                output.contiguous()
            }
        });
        let after = after.collect::<Result<_>>()?;
        Ok((y, after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::tests::on_cpu;
    use crate::{Device, Stream, zeros};

    const MEMORY: Memory = Memory {
        rule: MemoryRule::Exponential {
            gate_cap: Some(15.0),
            eps: 1e-6,
        },
        heads: 2,
        key_heads: 2,
        key_dim: 3,
        value_dim: 4,
        scale: 0.5,
        chunk: 16,
    };

    fn random(shape: &[i32], seed: u32) -> Array {
        let n = shape.iter().product::<i32>() as usize;
        Array::from_slice(&mlx_cpu_kernels::testing::noise(n, seed), shape).unwrap()
    }

    /// Views of one projection, and rows of a longer array, must have the same results as copies.
    #[test]
    fn views_are_read_where_they_stand() {
        on_cpu(|| {
            let wide = random(&[2, 20, 6 + 6 + 8 + 4], 1);
            let part = |from: i32, to: i32| {
                let rows = wide.slice_axis(1, 3, 20).unwrap();
                rows.slice_axis(2, from, to).unwrap()
            };
            let views = [
                part(0, 6),
                part(6, 12),
                part(12, 20),
                part(20, 22),
                part(22, 24),
            ];
            let copies = views.clone().map(|a| a.contiguous().unwrap());
            let state: Vec<Array> = (MEMORY.state_shapes(2).iter().zip(5..))
                .map(|(shape, seed)| random(shape, seed))
                .collect();
            let [actual, expected] = [&views, &copies].map(|[q, k, v, f, i]| {
                let positions = MemoryInputs {
                    q,
                    k,
                    v,
                    f,
                    second: Some(i),
                };
                let (y, after) = MEMORY.scan(&positions, &state).unwrap();
                assert_eq!(y.shape(), [2, 17, 8]);
                let mut all = vec![y.to_vec::<f32>().unwrap()];
                all.extend(after.iter().map(|a| a.to_vec::<f32>().unwrap()));
                all
            });
            assert_eq!(actual, expected);
            assert!(actual.iter().flatten().all(|x| x.is_finite()));
        });
    }

    /// Segments of a sequence, each with the state of the previous one, must have the same result
    /// as the whole sequence.
    #[test]
    fn pieces_are_one_pass() {
        on_cpu(|| {
            let [q, k] = [1, 2].map(|seed| random(&[1, 50, 6], seed));
            let v = random(&[1, 50, 8], 3);
            let [f, i] = [4, 5].map(|seed| random(&[1, 50, 2], seed));
            let run = |pieces: &[i32]| {
                let mut state: Vec<Array> = (MEMORY.state_shapes(1).iter())
                    .map(|shape| zeros(shape, Dtype::Float32).unwrap())
                    .collect();
                let (mut from, mut all) = (0, Vec::new());
                for piece in pieces {
                    let slice = |a: &Array| a.slice_axis(1, from, from + piece).unwrap();
                    let (q, k, v, f, i) = (slice(&q), slice(&k), slice(&v), slice(&f), slice(&i));
                    let positions = MemoryInputs {
                        q: &q,
                        k: &k,
                        v: &v,
                        f: &f,
                        second: Some(&i),
                    };
                    let (y, after) = MEMORY.scan(&positions, &state).unwrap();
                    all.extend(y.to_vec::<f32>().unwrap());
                    (state, from) = (after, from + piece);
                }
                all.extend(state.iter().flat_map(|a| a.to_vec::<f32>().unwrap()));
                all
            };
            let one_pass = run(&[50]);
            for pieces in [&[1; 50][..], &[17, 1, 32], &[49, 1], &[2, 48]] {
                for (piece, one_pass) in run(pieces).iter().zip(&one_pass) {
                    assert!((piece - one_pass).abs() < 1e-5, "{piece} {one_pass}");
                }
            }
        });
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let [q, f] = [6, 2].map(|width| zeros(&[1, 3, width], Dtype::Float32).unwrap());
            let v = zeros(&[1, 3, 8], Dtype::Float32).unwrap();
            let state: Vec<Array> = (MEMORY.state_shapes(1).iter())
                .map(|shape| zeros(shape, Dtype::Float32).unwrap())
                .collect();
            let good = MemoryInputs {
                q: &q,
                k: &q,
                v: &v,
                f: &f,
                second: Some(&f),
            };
            assert!(MEMORY.scan(&good, &state).is_ok());
            let half = v.astype(Dtype::Float16).unwrap();
            let none = zeros(&[1, 0, 6], Dtype::Float32).unwrap();
            for bad in [
                MemoryInputs {
                    second: None,
                    ..good
                },
                MemoryInputs { v: &half, ..good },
                MemoryInputs { v: &q, ..good },
                MemoryInputs { q: &none, ..good },
                MemoryInputs { q: &f, ..good },
            ] {
                let error = MEMORY.scan(&bad, &state).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
            }
            assert!(MEMORY.scan(&good, &state[..1]).is_err());
            for bad in [
                Memory { heads: 3, ..MEMORY },
                Memory {
                    key_heads: 1,
                    ..MEMORY
                },
                Memory {
                    key_heads: 0,
                    ..MEMORY
                },
                Memory {
                    key_dim: -3,
                    ..MEMORY
                },
                Memory {
                    value_dim: i32::MAX,
                    ..MEMORY
                },
            ] {
                assert!(bad.scan(&good, &state).is_err(), "{bad:?}");
            }
        });
    }
}
