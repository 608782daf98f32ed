//! Matrices that the kernels multiply with: what is checked once, and how a product is cut into parts.

use std::cell::RefCell;

use super::host_op::{self, Input, Meaning, Work};
use super::kernel::{self, InputRow, Isa, MAX_ROWS, QuantizedRow};
use super::{enabled, pool};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{QuantMode, Quantized};

/// Products smaller than this (multiplications) are not worth a second thread.
const WORTH_SHARING: usize = 1 << 15;

/// Rows of the matrix that stay in the cache while all rows of inputs pass by.
const BLOCK: usize = 16;

/// Parts that each thread gets, so that a late one does not keep the others waiting.
const PARTS_PER_THREAD: usize = 4;

/// The sizes of a matrix `[n, k]`.
#[derive(Debug, Clone, Copy)]
struct Size {
    n: usize,
    k: usize,
}

impl Size {
    fn of(shape: &[i32]) -> Option<Self> {
        match *shape {
            [n, k] if n > 0 && k > 0 => Some(Self {
                n: n.unsigned_abs() as usize,
                k: k.unsigned_abs() as usize,
            }),
            _ => None,
        }
    }

    /// The output's shape and how many rows `x` has.
    fn output(self, op: &'static str, x: &Array) -> Result<(Vec<i32>, usize)> {
        let mut shape = x.shape().to_vec();
        let fits = x.dtype() == Dtype::Float32
            && shape.last().is_some_and(|&k| i64::from(k) == self.k as i64);
        let (Some(last), true) = (shape.last_mut(), fits) else {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("needs float32 [.., {}]", self.k),
            )
            .with_inputs(&[x]));
        };
        *last = self.n as i32; // it was an i32 in the matrix's shape
        Ok((shape, x.size() / self.k))
    }
}

/// A matrix quantized in affine mode to 4 or 8 bits, with float32 scales.
#[derive(Debug, Clone)]
pub struct QuantizedMatrix {
    weight: Array,
    scales: Array,
    biases: Array,
    size: Size,
    bits: u32,
    group: usize,
}

impl QuantizedMatrix {
    /// The matrix for the kernels, where they are on and have its format; `None` otherwise.
    ///
    /// # Errors
    /// When its parts do not fit each other, or memory runs out.
    pub fn new(matrix: &Quantized) -> Result<Option<Self>> {
        matrix.validate("cpu::QuantizedMatrix")?;
        let (Some(biases), QuantMode::Affine, 4 | 8) = (&matrix.biases, matrix.mode, matrix.bits)
        else {
            return Ok(None);
        };
        let group = matrix.group_size.unsigned_abs() as usize;
        let k = matrix.scales.shape().last().copied().unwrap_or(0);
        let rows = matrix.weight.shape().first().copied().unwrap_or(0);
        let Some(size) = k
            .checked_mul(matrix.group_size)
            .and_then(|k| Size::of(&[rows, k]))
        else {
            return Ok(None);
        };
        let plain = matrix.scales.dtype() == Dtype::Float32 && matrix.weight.shape().len() == 2;
        if !enabled() || !plain || !group.is_multiple_of(kernel::CHUNK) {
            return Ok(None);
        }
        let parts = [&matrix.weight, &matrix.scales, biases];
        let [weight, scales, biases] = contiguous(parts)?;
        Ok(Some(Self {
            weight,
            scales,
            biases,
            size,
            bits: matrix.bits.unsigned_abs(),
            group,
        }))
    }

    /// `x` times the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `x` is of another type or does not end in the matrix's inputs; MLX's
    /// message when the current stream is not on the CPU.
    pub fn product(&self, x: &Array) -> Result<Array> {
        let (shape, rows) = self.size.output("cpu::quantized_matmul", x)?;
        let work = QuantizedProduct {
            size: self.size,
            rows,
            bits: self.bits,
            group: self.group,
            isa: Isa::detect(),
        };
        let x = x.contiguous()?;
        let inputs = [&x, &self.weight, &self.scales, &self.biases];
        let meaning = Meaning::QuantizedProduct {
            group_size: self.group as i32, // both were i32 in the matrix
            bits: self.bits as i32,
        };
        host_op::add("cpu::quantized_matmul", meaning, work, &inputs, &shape)
    }
}

/// A matrix of float32.
#[derive(Debug, Clone)]
pub struct DenseMatrix {
    weight: Array,
    size: Size,
}

impl DenseMatrix {
    /// The matrix `[n, k]` for the kernels, where they are on and it is float32; `None` otherwise.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(weight: &Array) -> Result<Option<Self>> {
        let (Some(size), true, Dtype::Float32) =
            (Size::of(weight.shape()), enabled(), weight.dtype())
        else {
            return Ok(None);
        };
        let [weight] = contiguous([weight])?;
        Ok(Some(Self { weight, size }))
    }

    /// `x` times the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::product`].
    pub fn product(&self, x: &Array) -> Result<Array> {
        let (shape, rows) = self.size.output("cpu::matmul", x)?;
        let work = DenseProduct {
            size: self.size,
            rows,
            isa: Isa::detect(),
        };
        let x = x.contiguous()?;
        let inputs = [&x, &self.weight];
        host_op::add("cpu::matmul", Meaning::DenseProduct, work, &inputs, &shape)
    }
}

/// The arrays in memory, row after row.
fn contiguous<const N: usize>(arrays: [&Array; N]) -> Result<[Array; N]> {
    let all: Vec<Array> = arrays
        .iter()
        .map(|a| a.contiguous())
        .collect::<Result<_>>()?;
    crate::eval(&all)?;
    <[Array; N]>::try_from(all)
        .map_err(|_| Error::new(ErrorKind::Mlx, "contiguous", "arrays were lost"))
}

/// The output, written by several threads in places of their own.
struct Output {
    data: *mut f32,
    len: usize,
}

// SAFETY: each part writes columns of its own; see `share`.
unsafe impl Sync for Output {}

impl Output {
    fn write(&self, at: usize, value: f32) {
        assert!(at < self.len);
        // SAFETY: within the output, and no other part writes here.
        unsafe { self.data.add(at).write(value) };
    }
}

/// Cuts the columns `0..n` of the output into parts and computes `columns(from, to)` on all threads;
/// a product of so many multiplications.
fn share(n: usize, multiplications: usize, columns: &(dyn Fn(usize, usize) + Sync)) {
    let pool = pool::pool();
    if multiplications < WORTH_SHARING || pool.width() == 1 {
        columns(0, n);
        return;
    }
    let part = n.div_ceil(pool.width() * PARTS_PER_THREAD).max(1);
    pool.run(n.div_ceil(part), &|i| {
        columns(i * part, ((i + 1) * part).min(n));
    });
}

thread_local! {
    /// Prepared inputs: kept, since every token needs them hundreds of times.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

struct QuantizedProduct {
    size: Size,
    rows: usize,
    bits: u32,
    group: usize,
    isa: Isa,
}

impl Work for QuantizedProduct {
    fn outputs(&self) -> usize {
        self.rows * self.size.n
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Size { n, k } = self.size;
        let [x, weight, scales, biases] = inputs else {
            return;
        };
        // SAFETY: `product` gave these arrays of these types in this order.
        let (x, weight, scales, biases) = unsafe {
            (
                x.as_slice::<f32>(),
                weight.as_slice::<u32>(),
                scales.as_slice::<f32>(),
                biases.as_slice::<f32>(),
            )
        };
        let packed: &[u8] = bytemuck::cast_slice(weight);
        let (bytes, groups) = (k * self.bits as usize / 8, k / self.group);
        SCRATCH.with_borrow_mut(|(values, sums)| {
            values.resize(self.rows * k, 0.0);
            sums.resize(self.rows * groups, 0.0);
            for ((x, values), sums) in x
                .chunks_exact(k)
                .zip(values.chunks_exact_mut(k))
                .zip(sums.chunks_exact_mut(groups))
            {
                kernel::prepare(x, self.bits, self.group, values, sums);
            }
            let rows: Vec<InputRow<'_>> = values
                .chunks_exact(k)
                .zip(sums.chunks_exact(groups))
                .map(|(values, sums)| InputRow { values, sums })
                .collect();
            let out = Output {
                data: output.as_mut_ptr(),
                len: output.len(),
            };
            share(n, self.rows * n * k, &|from, to| {
                for block in (from..to).step_by(BLOCK) {
                    for (piece, rows) in rows.chunks(MAX_ROWS).enumerate() {
                        for column in block..(block + BLOCK).min(to) {
                            let row = QuantizedRow {
                                packed: &packed[column * bytes..(column + 1) * bytes],
                                scales: &scales[column * groups..(column + 1) * groups],
                                biases: &biases[column * groups..(column + 1) * groups],
                            };
                            let mut sums = [0.0; MAX_ROWS];
                            let sums = &mut sums[..rows.len()];
                            kernel::quantized(self.isa, row, self.bits, rows, sums);
                            for (i, sum) in sums.iter().enumerate() {
                                out.write((piece * MAX_ROWS + i) * n + column, *sum);
                            }
                        }
                    }
                }
            });
        });
    }
}

struct DenseProduct {
    size: Size,
    rows: usize,
    isa: Isa,
}

impl Work for DenseProduct {
    fn outputs(&self) -> usize {
        self.rows * self.size.n
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Size { n, k } = self.size;
        let [x, weight] = inputs else {
            return;
        };
        // SAFETY: `product` gave these arrays of these types in this order.
        let (x, weight) = unsafe { (x.as_slice::<f32>(), weight.as_slice::<f32>()) };
        let rows: Vec<&[f32]> = x.chunks_exact(k).collect();
        let out = Output {
            data: output.as_mut_ptr(),
            len: output.len(),
        };
        share(n, self.rows * n * k, &|from, to| {
            for block in (from..to).step_by(BLOCK) {
                for (piece, rows) in rows.chunks(MAX_ROWS).enumerate() {
                    for column in block..(block + BLOCK).min(to) {
                        let mut sums = [0.0; MAX_ROWS];
                        let sums = &mut sums[..rows.len()];
                        kernel::dense(self.isa, &weight[column * k..(column + 1) * k], rows, sums);
                        for (i, sum) in sums.iter().enumerate() {
                            out.write((piece * MAX_ROWS + i) * n + column, *sum);
                        }
                    }
                }
            }
        });
    }
}
