//! Products of rows with matrices, and the operations around them in a decoder: a norm, several matrices
//! on the same input, biases, a gate, a residual.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use crate::gemm::activations::{Rows, Scratch};
use crate::gemm::dense::{Dense, Number};
use crate::gemm::packed_gemm::{MANY, Many, gate_all};
use crate::layout::packed::{BAND, Bands};
use crate::partition::{Columns, Output, share};
use crate::simd::dispatch::{self, Isa, MAX_ROWS};
use crate::simd::microkernel;
use crate::work::{Input, Work};

/// Rows of a matrix that stay in the cache while all rows of inputs pass by.
const BLOCK: usize = 32;

/// Elements of a block's rows, unless that leaves too few rows.
const LONG: usize = 1 << 15;

/// The most matrices in one operation.
pub const MAX_PARTS: usize = 4;

/// Of the tanh approximation to `x * Phi(x)`, `0.5 x (1 + tanh(ROOT (x + CUBE x^3)))` (Hendrycks and Gimpel 2016): the root of
/// 2 / pi, and the weight of the cube.
pub(crate) const ROOT: f32 = 0.797_884_6;
pub(crate) const CUBE: f32 = 0.044_715;

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
    pub(crate) fn apply(self, x: f32) -> f32 {
        match self {
            Gate::Silu => x / (1.0 + microkernel::exp(-x)),
            Gate::GeluTanh => {
                let inner = ROOT * (x + CUBE * x * x * x);
                0.5 * x * (1.0 + microkernel::tanh(inner))
            }
            // Not `max`, which would lose what is no number.
            Gate::Relu if x < 0.0 => 0.0,
            Gate::Relu => x,
        }
    }
}

/// The sizes of a matrix `[n, k]`.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

/// The arrays of a quantized matrix that an operation keeps, instead of having them as inputs.
#[derive(Clone)]
pub struct Held {
    /// Words, scales and biases.
    inputs: [Input; 3],
    /// Keeps the memory of the inputs.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `Held::new` demands that the inputs are in memory that the owner keeps and nothing writes.
unsafe impl Send for Held {}
// SAFETY: as for Send.
unsafe impl Sync for Held {}

impl Held {
    /// Words, scales and biases in memory that `owner` keeps.
    ///
    /// # Safety
    /// The elements must be there, and must not be written, while `owner` lives.
    pub unsafe fn new(inputs: [Input; 3], owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            inputs,
            _owner: owner,
        }
    }

    pub(crate) fn inputs(&self) -> &[Input] {
        &self.inputs
    }
}

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// In affine mode, in bands.
    Quantized {
        /// Of a number: 4 or 8.
        bits: u32,
        /// Numbers that share a scale.
        group: usize,
        /// Whether scales and biases are float16.
        half: bool,
    },
    /// Of this type.
    Dense(Number),
}

/// One matrix of a product.
pub struct Part {
    /// How it is stored.
    pub kind: Kind,
    /// Its sizes.
    pub size: Size,
    /// Whether a bias follows it among the inputs.
    pub bias: bool,
    /// A quantized matrix, unless it is among the inputs.
    pub held: Option<Held>,
}

impl Part {
    /// Of its matrix.
    pub(crate) fn bands(&self) -> usize {
        self.size.n.div_ceil(BAND)
    }
}

/// A product of rows with the transposes of matrices: a norm before it, biases, a gate or a residual after
/// it. Its inputs are float32: the rows `[rows, k]`, the weight of the norm `[k]`, for each part the matrix
/// (one array when dense, words, scales and biases when quantized, none when held) and its bias `[n]`, and
/// the residual `[rows, n]`.
pub struct Product {
    /// Matrices with the same inputs.
    pub parts: Vec<Part>,
    /// Rows of the input.
    pub rows: usize,
    /// Columns of the input.
    pub k: usize,
    /// Columns of the output.
    pub n: usize,
    /// What the norm before it adds under the root.
    pub eps: Option<f32>,
    /// The first of two parts goes through it and is multiplied with the second.
    pub gate: Option<Gate>,
    /// Whether a residual is added.
    pub adds: bool,
    /// Whether few rows are multiplied like many.
    pub in_floats: bool,
    /// The instruction set.
    pub isa: Isa,
}

/// A matrix as it lies in memory.
#[derive(Clone, Copy)]
pub(crate) enum Data<'a> {
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

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
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
                        Some(held) => held.inputs(),
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
                    dispatch::block(self.isa, all, x, out);
                } else {
                    let mut sums = [0.0; BLOCK * MAX_ROWS];
                    for at in (0..width).step_by(BLOCK) {
                        let part = at..width.min(at + BLOCK);
                        let sums = &mut sums[..n * part.len()];
                        let all = all.part(part.start / BAND..part.end / BAND);
                        dispatch::block(self.isa, all, x, &mut Columns::all(sums, n));
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
