//! The cell of sLSTM as an operation of MLX's graph. MLX would need about thirty operations for
//! each position.

use mlx_cpu_kernels::dim;

use super::host_op::{self, OpKind};
use super::scanned::Scanned;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "cpu::ScalarMemory::scan";

/// The inputs of the recurrence: `R` rows of `L` positions, with heads of `dim` elements. All
/// arrays are float32.
///
/// ```text
/// raw = gates + y R                 of the gates i, f, z, o
/// d   = m + logsigmoid(f)
/// m'  = max(i, d)                   i alone if n is 0
/// c'  = exp(d - m') c + exp(i - m') tanh(z)
/// n'  = exp(d - m') n + exp(i - m')
/// y'  = sigmoid(o) c' / n'
/// ```
///
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu, zeros, Dtype};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     // Both positions write 1, and the output gate is one half.
///     let gates = Array::from_slice(&[0.0f32, 0.0, 9.0, 0.0].repeat(2), &[1, 2, 4, 1, 1])?;
///     let cell = cpu::ScalarMemory {
///         gates: &gates,
///         recurrent: &zeros(&[1, 1, 4], Dtype::Float32)?,
///     };
///     let nothing = zeros(&[1, 1, 1], Dtype::Float32)?;
///     let state = std::array::from_fn(|_| nothing.clone());
///     let (outputs, [y, ..]) = cell.scan(&state)?;
///     assert!((y.to_vec::<f32>()?[0] - 0.5).abs() < 1e-4);
///     assert_eq!(outputs.shape(), [1, 2, 1, 1]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ScalarMemory<'a> {
    /// The gates' parts that depend on the input, `[R, L, 4, heads, dim]`.
    pub gates: &'a Array,
    /// The matrices from the previous output to the gates (R), `[heads, dim, 4 * dim]`.
    pub recurrent: &'a Array,
}

impl ScalarMemory<'_> {
    /// Returns the outputs `[R, L, heads, dim]`, and the state after the last position: y, c, n and
    /// m, `[R, heads, dim]` each. `before` is the state before the first position. Computed on the
    /// CPU.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for an array of another type or shape; MLX's message when the current
    /// stream is not on the CPU.
    pub fn scan(&self, before: &[Array; 4]) -> Result<(Array, [Array; 4])> {
        let Self { gates, recurrent } = *self;
        let mut inputs = vec![gates, recurrent];
        inputs.extend(before);
        let fault =
            |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&inputs);
        let &[rows, length, 4, heads, width] = gates.shape() else {
            return Err(fault("needs gates [rows, length, 4, heads, dim]".into()));
        };
        let matrices = [heads, width, width.saturating_mul(4)];
        let state = [rows, heads, width];
        let fits = |array: &Array, shape: &[i32]| {
            array.dtype() == Dtype::Float32 && array.shape() == shape
        };
        let all_fit = fits(gates, gates.shape())
            && fits(recurrent, &matrices)
            && before.iter().all(|part| fits(part, &state));
        if [rows, length, heads, width].iter().any(|&n| n < 1) || !all_fit {
            let message = format!("needs float32, matrices {matrices:?} and states {state:?}");
            return Err(fault(message));
        }
        let scanned = Scanned {
            outputs: &[rows, length, heads, width],
            state: &[4, rows, heads, width],
        };
        let Some(sizes) = scanned.sizes() else {
            return Err(fault("the outputs have more elements than an array".into()));
        };
        let work = mlx_cpu_kernels::ScalarMemory {
            rows: dim(rows),
            length: dim(length),
            heads: dim(heads),
            dim: dim(width),
        };
        let all = host_op::add(OP, OpKind::Opaque, work, &inputs, &[sizes.1])?;
        let (y, after) = scanned.divide(&all, sizes, length)?;
        let part = |at: i32| after.slice_axis(0, at, at + 1)?.squeeze_axis(0);
        Ok((y, [part(0)?, part(1)?, part(2)?, part(3)?]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::tests::on_cpu;
    use crate::{Device, Stream, zeros};

    #[test]
    fn segments_equal_one_pass() {
        on_cpu(|| {
            let noise = |shape: &[i32], seed: u32| {
                let n = shape.iter().product::<i32>() as usize;
                Array::from_slice(&mlx_cpu_kernels::testing::noise(n, seed), shape).unwrap()
            };
            let (gates, recurrent) = (noise(&[2, 20, 4, 3, 5], 1), noise(&[3, 5, 20], 2));
            let nothing = zeros(&[2, 3, 5], Dtype::Float32).unwrap();
            let run = |pieces: &[i32]| {
                let (mut from, mut state) = (0, std::array::from_fn(|_| nothing.clone()));
                let mut all = Vec::new();
                for piece in pieces {
                    let cell = ScalarMemory {
                        gates: &gates.slice_axis(1, from, from + piece).unwrap(),
                        recurrent: &recurrent,
                    };
                    let (y, after) = cell.scan(&state).unwrap();
                    all.push(y);
                    (state, from) = (after, from + piece);
                }
                let outputs: Vec<&Array> = all.iter().collect();
                let y = crate::concatenate(&outputs, 1).unwrap();
                let [_, c, n, m] = state;
                [y, c, n, m].map(|a| a.to_vec::<f32>().unwrap())
            };
            let one_pass = run(&[20]);
            assert!(one_pass.iter().flatten().all(|v| v.is_finite()));
            assert_eq!(run(&[1, 12, 7]), one_pass);
        });
    }

    #[test]
    fn arrays_that_do_not_fit_are_an_error() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let zeros = |shape: &[i32]| zeros(shape, Dtype::Float32).unwrap();
            let (gates, recurrent) = (zeros(&[1, 3, 4, 2, 5]), zeros(&[2, 5, 20]));
            let good = ScalarMemory {
                gates: &gates,
                recurrent: &recurrent,
            };
            let state = |shape: &[i32]| std::array::from_fn(|_| zeros(shape));
            assert!(good.scan(&state(&[1, 2, 5])).is_ok());
            assert!(good.scan(&state(&[2, 2, 5])).is_err());
            let (half, none) = (
                gates.astype(Dtype::Float16).unwrap(),
                zeros(&[1, 0, 4, 2, 5]),
            );
            for gates in [&half, &none, &recurrent] {
                let bad = ScalarMemory { gates, ..good };
                let error = bad.scan(&state(&[1, 2, 5])).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
            }
        });
    }
}
