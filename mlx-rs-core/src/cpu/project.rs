//! Products of rows with matrices, and what stands before and after them in a decoder, as one operation: a
//! norm, several matrices on the same input, biases, a gate, a residual.

use std::cell::RefCell;
use std::sync::Arc;

use super::bands::{BAND, Bands};
use super::dense::{Dense, Number};
use super::host_op::{self, Input, Meaning, Work};
use super::inputs::{Rows, Scratch};
use super::kernel::{self, Isa, MAX_ROWS};
use super::many::{MANY, Many, gate_all};
use super::matrix::{Matrix, Size};
use super::quantized::Stored;
use super::share::{Columns, Output, share};
use super::tile;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// Rows of a matrix that stay in the cache while all rows of inputs pass by.
const BLOCK: usize = 32;

/// Elements of a block's rows, unless that leaves too few rows.
const LONG: usize = 1 << 15;

/// The most matrices in one operation.
const MAX_PARTS: usize = 4;

/// Of the tanh approximation to `x * Phi(x)`, `0.5 x (1 + tanh(ROOT (x + CUBE x^3)))` (Hendrycks and Gimpel 2016): the root of
/// 2 / pi, and the weight of the cube.
pub(super) const ROOT: f32 = 0.797_884_6;
pub(super) const CUBE: f32 = 0.044_715;

/// An element-wise function on a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` by the tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

impl Gate {
    #[inline(always)]
    pub(super) fn apply(self, x: f32) -> f32 {
        match self {
            Gate::Silu => x / (1.0 + tile::exp(-x)),
            Gate::GeluTanh => {
                let inner = ROOT * (x + CUBE * x * x * x);
                0.5 * x * (1.0 + tile::tanh(inner))
            }
            // Not `max`, which would lose what is no number.
            Gate::Relu if x < 0.0 => 0.0,
            Gate::Relu => x,
        }
    }
}

/// What becomes of the products.
#[derive(Debug, Clone, Copy)]
pub enum Then<'a> {
    /// They stand one after another in the last axis.
    Nothing,
    /// They are added to this, of the output's shape.
    Add(&'a Array),
    /// The first of two goes through a gate and is multiplied with the second.
    Gate(Gate),
}

/// A product of the rows of an input with the transposes of matrices.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix, Projection, Then}};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
///         let bias = Array::from_slice(&[0.5f32, -0.5], &[2])?;
///         let before = Array::from_slice(&[100.0f32, 200.0], &[1, 2])?;
///         let parts = [(&matrix, Some(&bias))];
///         let block = Projection { parts: &parts, norm: None, then: Then::Add(&before) };
///         let y = block.of(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?)?;
///         assert_eq!(y.to_vec::<f32>()?, [121.5, 242.5]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// Matrices with as many inputs, each with a float32 bias `[n]` or without.
    pub parts: &'a [(&'a Matrix, Option<&'a Array>)],
    /// The input is divided by the root of its mean square (with so much added under it) and multiplied
    /// with a float32 weight `[k]` before.
    pub norm: Option<(&'a Array, f32)>,
    /// What follows.
    pub then: Then<'a>,
}

impl<'a> Projection<'a> {
    /// Computes it for `x`, on the CPU: float32 `[.., k]` to `[.., n]`, with `n` the sum of the matrices'
    /// outputs, or that of one with a gate.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit; MLX's message when the current stream is not
    /// on the CPU.
    pub fn of(&self, x: &Array) -> Result<Array> {
        self.with(x, false)
    }

    /// [`Self::of`], with floats throughout where `in_floats`: what is differentiated has no steps then, however few rows
    /// there are.
    pub(super) fn with(&self, x: &Array, in_floats: bool) -> Result<Array> {
        let op = "cpu::project";
        let fault = |message: String| Error::new(ErrorKind::Shape, op, message).with_inputs(&[x]);
        let Some((first, _)) = self.parts.first() else {
            return Err(fault("needs a matrix".into()));
        };
        let k = first.size().k;
        let fits = x.dtype() == Dtype::Float32
            && x.shape()
                .last()
                .is_some_and(|&last| i64::from(last) == k as i64);
        if !fits {
            return Err(fault(format!("needs float32 [.., {k}]")));
        }
        let mut inputs = vec![x];
        let adds = matches!(self.then, Then::Add(_));
        // A product alone has derivatives, for which MLX must see its matrix.
        let alone = matches!(
            (self.parts, self.norm, self.then),
            ([(_, None)], None, Then::Nothing)
        );
        let mut work = self.plan(x.size() / k, (adds, !alone), &mut inputs)?;
        work.in_floats = in_floats;
        let mut shape = x.shape().to_vec();
        match (shape.last_mut(), i32::try_from(work.n)) {
            (Some(last), Ok(n)) => *last = n,
            _ => return Err(fault(format!("an axis cannot have {} outputs", work.n))),
        }
        if let Then::Add(residual) = self.then {
            if residual.shape() != shape || residual.dtype() != Dtype::Float32 {
                return Err(fault(format!("what is added must be float32 {shape:?}")));
            }
            inputs.push(residual);
        }
        let meaning = match work.parts.as_slice() {
            [part] if alone => match part.kind {
                Kind::Dense(_) => Meaning::DenseProduct,
                Kind::Quantized { bits, group, .. } => Meaning::QuantizedProduct {
                    rows: part.size.n as i32, // all of them were i32 in the matrix
                    group_size: group as i32,
                    bits: bits as i32,
                },
            },
            _ => Meaning::Opaque,
        };
        host_op::add(op, meaning, work, &inputs, &shape)
    }

    /// The work for so many rows, which reads the rows, then what is appended to `inputs` here, then what is
    /// added where it `adds`. Where it `holds`, matrices are not among the inputs, if that can be.
    pub(super) fn plan(
        &self,
        rows: usize,
        (adds, holds): (bool, bool),
        inputs: &mut Vec<&'a Array>,
    ) -> Result<Product> {
        let fault = |message: String| Error::new(ErrorKind::Shape, "cpu::project", message);
        let k = self.parts.first().map_or(0, |(first, _)| first.size().k);
        if self.parts.len() > MAX_PARTS || self.parts.iter().any(|(m, _)| m.size().k != k) {
            return Err(fault(format!(
                "the matrices must be at most {MAX_PARTS}, with {k} inputs each"
            )));
        }
        let vector =
            |a: &Array, n: usize| a.dtype() == Dtype::Float32 && a.ndim() == 1 && a.size() == n;
        if let Some((weight, _)) = self.norm {
            if !vector(weight, k) {
                return Err(fault(format!("the norm needs a float32 weight [{k}]")));
            }
            inputs.push(weight);
        }
        let mut parts = Vec::with_capacity(self.parts.len());
        let mut n = 0;
        for (matrix, bias) in self.parts {
            let size = matrix.size();
            let held = match matrix {
                Matrix::Quantized(q) if holds => q.held(),
                _ => None,
            };
            if held.is_none() {
                inputs.extend(matrix.arrays());
            }
            if let Some(bias) = bias {
                if !vector(bias, size.n) {
                    return Err(fault(format!("a bias must be float32 [{}]", size.n)));
                }
                inputs.push(bias);
            }
            parts.push(Part {
                kind: match matrix {
                    Matrix::Quantized(q) => Kind::Quantized {
                        bits: q.bits,
                        group: q.group,
                        half: q.half,
                    },
                    Matrix::Dense(d) => Kind::Dense(d.number),
                },
                size,
                bias: bias.is_some(),
                held,
            });
            n += size.n;
        }
        if let Then::Gate(_) = self.then {
            let [(gate, _), (up, _)] = self.parts else {
                return Err(fault("a gate needs two matrices".into()));
            };
            if gate.size().n != up.size().n {
                return Err(fault("a gate needs two matrices of one size".into()));
            }
            n /= 2;
        }
        Ok(Product {
            parts,
            rows,
            k,
            n,
            eps: self.norm.map(|(_, eps)| eps),
            gate: match self.then {
                Then::Gate(gate) => Some(gate),
                _ => None,
            },
            adds,
            in_floats: false,
            isa: Isa::detect(),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Quantized {
        bits: u32,
        group: usize,
        /// Whether scales and biases are float16.
        half: bool,
    },
    Dense(Number),
}

pub(super) struct Part {
    pub kind: Kind,
    pub size: Size,
    bias: bool,
    /// A quantized matrix, unless it is among the inputs.
    pub held: Option<Arc<Stored>>,
}

impl Part {
    /// Of its matrix.
    pub(super) fn bands(&self) -> usize {
        self.size.n.div_ceil(BAND)
    }
}

pub(super) struct Product {
    pub parts: Vec<Part>,
    /// Of the input.
    pub rows: usize,
    pub k: usize,
    /// Of the output.
    pub n: usize,
    eps: Option<f32>,
    pub gate: Option<Gate>,
    adds: bool,
    /// Whether few rows are multiplied like many.
    in_floats: bool,
    pub isa: Isa,
}

/// A matrix as it lies in memory.
#[derive(Clone, Copy)]
pub(super) enum Data<'a> {
    Quantized {
        bands: Bands<'a>,
        /// Which of the prepared inputs it takes.
        form: usize,
    },
    Dense(Dense<'a>),
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Work for Product {
    fn outputs(&self) -> usize {
        self.rows * self.n
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let mut inputs = inputs.iter();
        fn floats(input: Option<&Input>) -> &[f32] {
            // SAFETY: `Projection::plan` and its caller gave arrays of these types, or of words as large, in this
            // order.
            input.map_or(&[][..], |i| unsafe { i.as_slice::<f32>() })
        }
        let x = floats(inputs.next());
        let norm = self.eps.map(|eps| (floats(inputs.next()), eps));
        let mut packings: Vec<(u32, usize)> = Vec::with_capacity(MAX_PARTS);
        let mut data: Vec<(Data<'_>, Option<&[f32]>)> = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let own = match part.kind {
                // SAFETY: as of `floats`.
                Kind::Dense(number) => Data::Dense(unsafe { Dense::of(number, inputs.next()) }),
                Kind::Quantized { bits, group, half } => {
                    let packing = (bits, group);
                    let known = packings.iter().position(|p| *p == packing);
                    let matrix = match &part.held {
                        Some(held) => &held.inputs[..],
                        None => {
                            let rest = inputs.as_slice();
                            let (matrix, rest) = rest.split_at(rest.len().min(3));
                            inputs = rest.iter();
                            matrix
                        }
                    };
                    Data::Quantized {
                        // SAFETY: as above.
                        bands: unsafe { Bands::of(matrix, (bits, self.k / group, half)) },
                        form: known.unwrap_or_else(|| {
                            packings.push(packing);
                            packings.len() - 1
                        }),
                    }
                }
            };
            let bias = part.bias.then(|| floats(inputs.next()));
            data.push((own, bias));
        }
        let residual = self.adds.then(|| floats(inputs.next()));
        let out = Output::new(output);
        let many = Many {
            product: self,
            x,
            norm,
            data: &data,
            residual,
        };
        #[cfg(target_arch = "x86_64")]
        if !self.in_floats {
            if many.fits_squares() {
                return many.run_in_squares(&packings, &out);
            }
            if many.fits_bricks() {
                return many.run_in_bricks(&out);
            }
        }
        if self.rows >= MANY || self.in_floats {
            return many.run(&out);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let rows = scratch.fill(self.isa, x, norm, self.k, &packings);
            match self.gate {
                Some(gate) => self.gated(gate, &data, &rows, &out),
                None => self.plain(&data, residual, &rows, &out),
            }
        });
    }
}

impl Product {
    /// The products of the inputs from `from` on with bands `bands.0..bands.1` of a matrix, and its biases, for as many
    /// rows of the output as there are inputs. The matrix may end before the last band does: `out` has its columns only.
    fn block(
        &self,
        (data, bias): (Data<'_>, Option<&[f32]>),
        bands: (usize, usize),
        rows: &Rows<'_>,
        from: usize,
        out: &mut Columns<'_>,
    ) {
        let (first, width) = (bands.0 * BAND, (bands.1 - bands.0) * BAND);
        let (n, columns) = out.size();
        match data {
            Data::Quantized { form, bands: all } => {
                let (x, all) = (rows.panel(form, from), all.part(bands.0..bands.1));
                if columns == width {
                    kernel::block(self.isa, all, x, out);
                } else {
                    let mut sums = [0.0; BLOCK * MAX_ROWS];
                    for at in (0..width).step_by(BLOCK) {
                        let part = at..width.min(at + BLOCK);
                        let sums = &mut sums[..n * part.len()];
                        let all = all.part(part.start / BAND..part.end / BAND);
                        kernel::block(self.isa, all, x, &mut Columns::all(sums, n));
                        for (i, sums) in sums.chunks_exact(part.len()).enumerate() {
                            let to = &mut out.row(i)[at..columns.min(part.end)];
                            to.copy_from_slice(&sums[..to.len()]);
                        }
                    }
                }
            }
            Data::Dense(matrix) => {
                rows.dense(from, |x| {
                    for column in 0..columns {
                        let at = (first + column) * self.k;
                        let mut sums = [0.0; MAX_ROWS];
                        let sums = &mut sums[..x.len()];
                        matrix.products(self.isa, at..at + self.k, x, sums);
                        for (i, sum) in sums.iter().enumerate() {
                            out.row(i)[column] = *sum;
                        }
                    }
                });
            }
        }
        if let Some(bias) = bias {
            for i in 0..n {
                let row = out.row(i).iter_mut();
                row.zip(&bias[first..]).for_each(|(v, b)| *v += b);
            }
        }
    }

    /// Bands of a matrix at a time: fewer of long rows, so that the first cache holds what is computed with.
    fn block_bands(&self) -> usize {
        (LONG / self.k.max(1)).clamp(BAND, BLOCK) / BAND
    }

    fn plain(
        &self,
        data: &[(Data<'_>, Option<&[f32]>)],
        residual: Option<&[f32]>,
        rows: &Rows<'_>,
        out: &Output,
    ) {
        let alone = rows.count == 1;
        let all: usize = self.parts.iter().map(Part::bands).sum();
        // One row needs nothing to stay in a cache.
        let block = if alone { all } else { self.block_bands() };
        share(all, rows.count * self.n * self.k, &|first, last| {
            let (mut start, mut place) = (0, 0);
            for (part, own) in self.parts.iter().zip(data) {
                let end = start + part.bands();
                let (mut at, stop) = (first.max(start), last.min(end));
                while at < stop {
                    let next = (at + block).min(stop);
                    let column = (at - start) * BAND;
                    // The last band may be wider than the matrix.
                    let columns = ((next - at) * BAND).min(part.size.n - column);
                    for from in (0..rows.count).step_by(MAX_ROWS) {
                        let n = MAX_ROWS.min(rows.count - from);
                        let at_row = |i: usize| (from + i) * self.n + place + column;
                        // SAFETY: these columns belong to this part alone.
                        let mut to = unsafe { out.columns(at_row(0), self.n, (n, columns)) };
                        self.block(*own, (at - start, next - start), rows, from, &mut to);
                        if let Some(residual) = residual {
                            for i in 0..n {
                                let before = &residual[at_row(i)..];
                                let to = to.row(i).iter_mut();
                                to.zip(before).for_each(|(to, before)| *to += before);
                            }
                        }
                    }
                    at = next;
                }
                start = end;
                place += part.size.n;
            }
        });
    }

    fn gated(
        &self,
        gate: Gate,
        data: &[(Data<'_>, Option<&[f32]>)],
        rows: &Rows<'_>,
        out: &Output,
    ) {
        let [first, second] = data else {
            return;
        };
        let block = self.block_bands();
        let work = 2 * rows.count * self.n * self.k;
        share(self.n.div_ceil(BAND), work, &|begin, last| {
            for at in (begin..last).step_by(block) {
                let bands = (at, (at + block).min(last));
                let columns = ((bands.1 - at) * BAND).min(self.n - at * BAND);
                for from in (0..rows.count).step_by(MAX_ROWS) {
                    let n = MAX_ROWS.min(rows.count - from);
                    let place = from * self.n + at * BAND;
                    // SAFETY: these columns belong to this part alone.
                    let mut gates = unsafe { out.columns(place, self.n, (n, columns)) };
                    let mut ups = [0.0; BLOCK * MAX_ROWS];
                    let mut ups = Columns::all(&mut ups[..n * columns], n);
                    self.block(*first, bands, rows, from, &mut gates);
                    self.block(*second, bands, rows, from, &mut ups);
                    for i in 0..n {
                        gate_all(self.isa, gate, gates.row(i), ups.row(i));
                    }
                }
            }
        });
    }
}
