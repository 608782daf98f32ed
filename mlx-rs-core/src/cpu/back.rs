//! The backward pass of a product with a matrix: rows of gradients times the matrix itself, rather than its
//! transpose. Matrices stay as they are stored; a few of their rows are unpacked at a time.

use std::cell::RefCell;

use super::bands::{Bands, Room};
use super::dense::Dense;
use super::host_op::{self, Input, Meaning, Work};
use super::kernel::{CHUNK, Isa};
use super::matrix::{Matrix, Size};
use super::project::Kind;
use super::share::{Output, share};
use super::tile::{self, LANES, Left, Right};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::transforms::CustomFunction;

/// Columns of the matrix in one part; a multiple of every group.
const WIDE: usize = 128;

/// Rows of the matrix that are unpacked at a time: with so many columns they fit the first caches.
const DEEP: usize = 64;

impl Matrix {
    /// [`Matrix::product`] for what is differentiated with respect to `x`: the backward pass is a kernel, too.
    /// Under `vmap`, and for second derivatives, [`Matrix::product`] is there.
    ///
    /// # Errors
    /// As [`Matrix::product`].
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix}};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
    ///         let x = Array::from_slice(&[1.0f32, 10.0], &[1, 2])?;
    ///         assert_eq!(matrix.product_for_gradients(&x)?.to_vec::<f32>()?, [21.0, 43.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn product_for_gradients(&self, x: &Array) -> Result<Array> {
        if !self.size().k.is_multiple_of(LANES) {
            return self.product_with(x, true);
        }
        let (forward, backward) = (self.clone(), self.clone());
        let product = CustomFunction::new(move |x: &[Array]| match x {
            [x] => Ok(vec![forward.product_with(x, true)?]),
            _ => Err(one("argument")),
        });
        let product = product.with_vjp(move |_, cotangents, _| match cotangents {
            [cotangent] => Ok(vec![backward.pulled_back(cotangent)?]),
            _ => Err(one("cotangent")),
        });
        let mut outputs = product.call(std::slice::from_ref(x))?;
        outputs.pop().ok_or_else(|| one("output"))
    }

    /// `c` times the matrix: float32 `[.., n] -> [.., k]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `c` is of another type or does not end in the matrix's outputs; MLX's message
    /// when the current stream is not on the CPU.
    fn pulled_back(&self, c: &Array) -> Result<Array> {
        let op = "cpu::pulled_back";
        let size = self.size();
        let fits = c.dtype() == Dtype::Float32
            && c.shape()
                .last()
                .is_some_and(|&last| i64::from(last) == size.n as i64);
        if !fits {
            let message = format!("needs float32 [.., {}]", size.n);
            return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[c]));
        }
        let mut shape = c.shape().to_vec();
        if let (Some(last), Ok(k)) = (shape.last_mut(), i32::try_from(size.k)) {
            *last = k;
        }
        let work = Back {
            size,
            rows: c.size() / size.n,
            kind: match self {
                Matrix::Quantized(q) => Kind::Quantized {
                    bits: q.bits,
                    group: q.group,
                    half: q.half,
                },
                Matrix::Dense(d) => Kind::Dense(d.number),
            },
            isa: Isa::detect(),
        };
        let c = c.contiguous()?;
        let inputs: Vec<&Array> = std::iter::once(&c).chain(self.arrays()).collect();
        host_op::add(op, Meaning::Opaque, work, &inputs, &shape)
    }
}

fn one(what: &str) -> Error {
    let message = format!("one {what} is expected");
    Error::new(ErrorKind::Value, "cpu::product_for_gradients", message)
}

struct Back {
    size: Size,
    /// Of the gradients.
    rows: usize,
    kind: Kind,
    isa: Isa,
}

/// The matrix as it lies in memory.
#[derive(Clone, Copy)]
enum Stored<'a> {
    Dense(Dense<'a>),
    Quantized(Bands<'a>),
}

/// What a thread needs.
#[derive(Default)]
struct Scratch {
    /// Unpacked rows.
    weights: Vec<f32>,
    room: Room,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Work for Back {
    fn outputs(&self) -> usize {
        self.rows * self.size.k
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `pulled_back` gave arrays of these types, in this order.
        let of = |i: usize| unsafe {
            let input = inputs.get(i);
            input.map(|i| i.as_slice::<f32>()).unwrap_or_default()
        };
        let c = of(0);
        let stored = match self.kind {
            // SAFETY: as above.
            Kind::Dense(number) => Stored::Dense(unsafe { Dense::of(number, inputs.get(1)) }),
            Kind::Quantized { bits, group, half } => {
                let groups = self.size.k / group;
                let matrix = inputs.get(1..).unwrap_or_default();
                // SAFETY: as above.
                Stored::Quantized(unsafe { Bands::of(matrix, (bits, groups, half)) })
            }
        };
        let Size { n, k } = self.size;
        assert!(c.len() >= self.rows * n);
        if self.rows == 0 {
            return;
        }
        let out = Output::new(output);
        share(k.div_ceil(WIDE), self.rows * n * k, &|first, last| {
            for part in first..last {
                let columns = (part * WIDE, ((part + 1) * WIDE).min(k));
                SCRATCH.with_borrow_mut(|scratch| self.part(c, stored, columns, scratch, &out));
            }
        });
    }
}

impl Back {
    /// Columns `from..to` of the output.
    fn part(
        &self,
        c: &[f32],
        stored: Stored<'_>,
        (from, to): (usize, usize),
        Scratch { weights, room }: &mut Scratch,
        out: &Output,
    ) {
        let Size { n, k } = self.size;
        let width = to - from;
        weights.resize(DEEP * width, 0.0);
        for first in (0..n).step_by(DEEP) {
            let depth = DEEP.min(n - first);
            let rows = &mut weights[..depth * width];
            match stored {
                Stored::Dense(weight) => {
                    for (row, to) in (first..).zip(rows.chunks_exact_mut(width)) {
                        weight.widen(self.isa, row * k + from, to);
                    }
                }
                Stored::Quantized(bands) => {
                    bands.unpack(self.isa, first..first + depth, from, room, rows);
                }
            }
            for column in (0..width).step_by(LANES) {
                let left = Left {
                    data: c[first..].as_ptr(),
                    row_step: n,
                    step: 1,
                };
                let right = Right {
                    data: weights[column..].as_ptr(),
                    step: width,
                };
                let product = tile::Product {
                    data: out.address(from + column, (self.rows - 1) * k + LANES),
                    row_step: k,
                    adds: first > 0,
                };
                // SAFETY: `rows` rows of `c` (its length is asserted) have `depth` elements from `first` on;
                // `weights` has as many rows of `width`, a multiple of `LANES`; the output has these columns
                // in each row, which belong to this part alone.
                unsafe { tile::tiles(self.isa, self.rows, depth, left, right, product) };
            }
        }
        if matches!(stored, Stored::Quantized(bands) if bands.bits == 4) {
            for row in 0..self.rows {
                // SAFETY: these columns belong to this part alone, and the tiles are done.
                let columns = unsafe { out.part(row * k + from, width) };
                columns.as_chunks_mut::<CHUNK>().0.iter_mut().for_each(pair);
            }
        }
    }
}

/// Even elements before odd ones, back to pairs.
fn pair(chunk: &mut [f32; CHUNK]) {
    let apart = *chunk;
    for i in 0..CHUNK / 2 {
        chunk[2 * i] = apart[i];
        chunk[2 * i + 1] = apart[CHUNK / 2 + i];
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::in_few_digits;
    use super::super::{DenseMatrix, QuantizedMatrix};
    use super::*;
    use crate::ops::{QuantMode, Quantized};
    use crate::transforms::vjp;
    use std::slice::from_ref;

    fn noise(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|i| (((i + seed) * 7919) % 211) as f32 * 0.01 - 1.0)
            .collect();
        Array::from_slice(&values, shape).unwrap()
    }

    #[test]
    fn it_is_the_backward_pass_of_mlx() {
        for (n, k) in [(96, 64), (50, 192), (300, 160), (7, 48), (5, 20)] {
            // 0, 1, 2: dense.
            for bits in [0, 1, 2, 4, 8] {
                let weight = noise(&[n, k], 3);
                let types = [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16];
                let (matrix, dense) = if let Some(dtype) = types.get(bits as usize) {
                    let stored = weight.astype(*dtype).unwrap();
                    (
                        DenseMatrix::new(&stored).unwrap().map(Matrix::Dense),
                        stored.astype(Dtype::Float32).unwrap(),
                    )
                } else if k % 32 == 0 {
                    let packed = Quantized::quantize(&weight, 32, bits, QuantMode::Affine).unwrap();
                    // The kernels keep scales of so few digits as float16.
                    let packed = if bits == 8 {
                        in_few_digits(packed)
                    } else {
                        packed
                    };
                    let dense = packed.dequantize(Dtype::Float32).unwrap();
                    let matrix = QuantizedMatrix::new(&packed).unwrap();
                    (matrix.map(Matrix::Quantized), dense)
                } else {
                    continue;
                };
                // Without kernels there is nothing to compare.
                let Some(matrix) = matrix else { continue };
                for rows in [1, 5, 33] {
                    let (x, c) = (noise(&[1, rows, k], 5), noise(&[1, rows, n], 7));
                    for ours in [true, false] {
                        let run = |x: &[Array]| -> Result<Vec<Array>> {
                            Ok(vec![if ours {
                                matrix.product_for_gradients(&x[0])?
                            } else {
                                matrix.product(&x[0])?
                            }])
                        };
                        let (y, dx) = vjp(run, from_ref(&x), from_ref(&c)).unwrap();
                        let expected = c.matmul(&dense).unwrap();
                        assert!(
                            dx[0].all_close(&expected, 1e-4, 1e-3).unwrap(),
                            "{n} {k} {bits} {rows}"
                        );
                        let expected = x.matmul(&dense.swap_axes(0, 1).unwrap()).unwrap();
                        assert!(y[0].all_close(&expected, 1e-4, 2e-3).unwrap());
                    }
                }
            }
        }
    }

    #[test]
    fn a_dense_matrix_has_a_gradient_of_its_own_type() {
        for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
            let weight = noise(&[7, 20], 3).astype(dtype).unwrap();
            let (x, c) = (noise(&[1, 5, 20], 5), noise(&[1, 5, 7], 7));
            let run = |w: &[Array]| -> Result<Vec<Array>> {
                // Without kernels there is nothing to compare.
                match DenseMatrix::new(&w[0])? {
                    Some(matrix) => Ok(vec![matrix.product(&x)?]),
                    None => Ok(vec![x.matmul(&w[0].swap_axes(0, 1)?)?]),
                }
            };
            let (_, dw) = vjp(run, from_ref(&weight), from_ref(&c)).unwrap();
            assert_eq!(dw[0].dtype(), dtype);
            let (rows, columns) = (c.squeeze_axis(0).unwrap(), x.squeeze_axis(0).unwrap());
            let expected = rows.swap_axes(0, 1).unwrap().matmul(&columns).unwrap();
            let found = dw[0].astype(Dtype::Float32).unwrap();
            assert!(found.all_close(&expected, 1e-2, 1e-2).unwrap(), "{dtype:?}");
        }
    }
}
