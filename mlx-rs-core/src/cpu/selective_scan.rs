//! The recurrence of Mamba as an operation of MLX's graph. MLX would need about ten operations per
//! chunk of positions, each of which reads and writes a state for every position.

use mlx_cpu_kernels::dim;

use super::host_op;
use super::scanned::Scanned;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "cpu::SelectiveScan::scan";

/// The inputs of a selective scan: `R` rows of `L` positions. Each channel has a state. All arrays
/// are float32. If the last axis of an array is not contiguous, the array is copied.
///
/// ```text
/// t  = ln(1 + exp(d))
/// S' = exp(t A) S + t x B
/// y  = S' C
/// ```
///
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let ones = Array::from_slice(&[1.0f32; 2], &[1, 2, 1])?;
///     // ln(1 + exp(d)) is 1.
///     let steps = Array::from_slice(&[1.0f32.exp_m1().ln(); 2], &[1, 2, 1])?;
///     let scan = cpu::SelectiveScan {
///         x: &Array::from_slice(&[3.0f32, 5.0], &[1, 2, 1])?,
///         steps: &steps,
///         rates: &Array::from_slice(&[0.5f32.ln()], &[1, 1])?,
///         written: &ones,
///         read: &ones,
///     };
///     let (y, state) = scan.scan(&Array::from_slice(&[0.0f32], &[1, 1, 1])?)?;
///     let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-5);
///     close(y.to_vec::<f32>()?[1], 0.5 * 3.0 + 5.0);
///     close(state.to_vec::<f32>()?[0], 6.5);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct SelectiveScan<'a> {
    /// Inputs, `[R, L, channels]`.
    pub x: &'a Array,
    /// Step sizes before their softplus (d), `[R, L, channels]`.
    pub steps: &'a Array,
    /// Negative decay rates (A), `[channels, state]`.
    pub rates: &'a Array,
    /// The map from inputs to the state (B), `[R, L, state]`.
    pub written: &'a Array,
    /// The map from the state to outputs (C), `[R, L, state]`.
    pub read: &'a Array,
}

impl SelectiveScan<'_> {
    /// Returns the outputs `[R, L, channels]`, and the state `[R, channels, state]` after the last
    /// position. `before` is the state before the first position. Computed on the CPU.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for an array of another type or shape; MLX's message when the current
    /// stream is not on the CPU.
    pub fn scan(&self, before: &Array) -> Result<(Array, Array)> {
        let Self {
            x,
            steps,
            rates,
            written,
            read,
        } = *self;
        let inputs = [before, rates, x, steps, written, read];
        let fault =
            |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&inputs);
        let (&[rows, length, channels], &[_, state]) = (x.shape(), rates.shape()) else {
            return Err(fault(
                "needs inputs [rows, length, channels] and rates [channels, state]".into(),
            ));
        };
        let (wide, narrow) = ([rows, length, channels], [rows, length, state]);
        let all_states = [rows, channels, state];
        let expected: [&[i32]; 6] = [
            &all_states,
            &[channels, state],
            &wide,
            &wide,
            &narrow,
            &narrow,
        ];
        let fits = |(array, shape): (&&Array, &&[i32])| {
            array.dtype() == Dtype::Float32 && array.shape() == *shape
        };
        if wide.iter().chain(&[state]).any(|&n| n < 1) || !inputs.iter().zip(&expected).all(fits) {
            return Err(fault(format!("needs float32 of shapes {expected:?}")));
        }
        let scanned = Scanned {
            outputs: &wide,
            state: &all_states,
        };
        let Some(sizes) = scanned.sizes() else {
            return Err(fault("the outputs have more elements than an array".into()));
        };
        let work = mlx_cpu_kernels::SelectiveScan {
            rows: dim(rows),
            length: dim(length),
            channels: dim(channels),
            state: dim(state),
        };
        let all = host_op::add_strided(OP, work, &inputs, 2, &[sizes.1])?;
        scanned.divide(&all, sizes, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::tests::on_cpu;
    use crate::{Device, Stream, zeros};

    fn random(shape: &[i32], seed: u32) -> Array {
        let n = shape.iter().product::<i32>() as usize;
        Array::from_slice(&mlx_cpu_kernels::testing::noise(n, seed), shape).unwrap()
    }

    /// Views of one array must have the same results as copies. A sequence in segments must have
    /// the results of one pass.
    #[test]
    fn views_and_segments_equal_one_pass() {
        on_cpu(|| {
            let wide = random(&[2, 20, 21 + 21 + 4 + 4], 1);
            let rates = random(&[21, 4], 2).abs().unwrap().negative().unwrap();
            let before = random(&[2, 21, 4], 3);
            let run = |pieces: &[i32], copied: bool| {
                let (mut from, mut state, mut all) = (0, before.clone(), Vec::new());
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
                    let (x, steps) = (part(0, 21), part(21, 42));
                    let scan = SelectiveScan {
                        x: &x,
                        steps: &steps,
                        rates: &rates,
                        written: &part(42, 46),
                        read: &part(46, 50),
                    };
                    let (y, after) = scan.scan(&state).unwrap();
                    all.push(y);
                    (state, from) = (after, from + piece);
                }
                all.push(state);
                let outputs: Vec<&Array> = all[..pieces.len()].iter().collect();
                let y = crate::concatenate(&outputs, 1).unwrap();
                [&y, &all[pieces.len()]].map(|a| a.to_vec::<f32>().unwrap())
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
            let (x, narrow, rates) = (zeros(&[1, 3, 6]), zeros(&[1, 3, 2]), zeros(&[6, 2]));
            let good = SelectiveScan {
                x: &x,
                steps: &x,
                rates: &rates,
                written: &narrow,
                read: &narrow,
            };
            let state = zeros(&[1, 6, 2]);
            assert!(good.scan(&state).is_ok());
            assert!(good.scan(&zeros(&[2, 6, 2])).is_err());
            let (half, none) = (x.astype(Dtype::Float16).unwrap(), zeros(&[1, 0, 6]));
            for bad in [
                SelectiveScan {
                    steps: &half,
                    ..good
                },
                SelectiveScan { x: &none, ..good },
                SelectiveScan { read: &x, ..good },
                SelectiveScan { rates: &x, ..good },
            ] {
                let error = bad.scan(&state).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
            }
        });
    }
}
