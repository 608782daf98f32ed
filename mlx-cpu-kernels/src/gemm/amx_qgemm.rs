//! Products of quantized matrices with two or more rows of inputs where the processor has AMX (`amx`): inputs go into
//! tiles once, then two tiles of outputs at a time, neighbors or a gate's two, go through all of them.

use std::cell::RefCell;

use crate::gemm::packed_gemm::Many;
use crate::gemm::product::{Data, Product};
use crate::isa::Isa;
use crate::layout::packed::BAND;
use crate::partition::{Output, share, spread};
use crate::pool;
use crate::simd::amx::{self, Filling, Outputs, Registers, SIDE, Squares, Two};

/// The most rows of inputs at a time, and elements of them: their tiles are to fit the second cache.
const ROWS: usize = 256;
const ELEMENTS: usize = 1 << 18;

/// Rows of inputs from which this pays.
const SOME: usize = 2;

/// Rows up to which each thread makes its own tiles of them: to make them takes less than to wait for those that another one
/// makes, and to fetch them.
const ALONE: usize = 16;

/// Rows for each thread from which it has rows of its own, and all outputs of them: what it reads was written by itself then, mostly,
/// and each number of a matrix still meets enough of them.
const APART: usize = 32;

/// Parts of a thread's outputs, so that others can take what a late one has not begun.
const PIECES: usize = 4;

thread_local! {
    /// The inputs, for each packing that matrices have.
    static SQUARES: RefCell<Vec<Squares>> = RefCell::default();
    /// The thread's own.
    static OWN: RefCell<Vec<Squares>> = RefCell::default();
    static SCRATCH: RefCell<amx::Scratch> = RefCell::default();
}

/// Outputs `from..` of a part, at most two tiles' (of a gate, one's of each part), and where they stand in a row.
#[derive(Clone, Copy)]
struct Place {
    part: usize,
    from: usize,
    column: usize,
}

impl Many<'_> {
    /// Whether the product is one for [`Self::run_in_squares`].
    pub(crate) fn fits_squares(&self) -> bool {
        let quantized = |(data, _): &(Data<'_>, _)| matches!(data, Data::Quantized { .. });
        let together = self.product.gate.is_none() || self.form_of(0) == self.form_of(1);
        self.product.isa == Isa::Amx
            && self.product.rows >= SOME
            && self.data.iter().all(quantized)
            && together
    }

    /// Which of the prepared inputs a part takes, if it is quantized.
    fn form_of(&self, part: usize) -> Option<usize> {
        match self.data.get(part)?.0 {
            Data::Quantized { form, .. } => Some(form),
            Data::Dense(_) => None,
        }
    }

    /// All products, to be asked for where they fit.
    pub(crate) fn run_in_squares(&self, packings: &[(u32, usize)], out: &Output) {
        let places = self.places();
        if self.product.rows <= ALONE {
            return self.run_alone(packings, out);
        }
        if self.product.rows >= APART * pool::pool().width() {
            return self.run_apart(packings, out);
        }
        SQUARES.with_borrow_mut(|squares| {
            squares.resize_with(packings.len().max(squares.len()), Squares::default);
            for first in (0..self.product.rows).step_by(ROWS) {
                let rows = (first, (first + ROWS).min(self.product.rows));
                for (squares, packing) in squares.iter_mut().zip(packings) {
                    self.fill_squares(rows, *packing, squares);
                }
                let squares = &*squares;
                let work = (rows.1 - rows.0) * self.product.n * self.product.k;
                spread(places, work, &|own| {
                    self.multiply_squares(squares, own, rows, out);
                });
            }
        });
    }

    /// The same for many rows: each thread has some of its own, which it makes tiles of.
    fn run_apart(&self, packings: &[(u32, usize)], out: &Output) {
        let Product { rows, n, k, .. } = *self.product;
        let threads = pool::pool().width();
        let most = (ELEMENTS / k).clamp(APART, ROWS) * threads;
        let size = rows
            .div_ceil(threads * rows.div_ceil(most))
            .next_multiple_of(SIDE);
        let (places, pieces) = (self.places(), PIECES);
        spread(rows.div_ceil(size) * pieces, rows * n * k, &|own| {
            OWN.with_borrow_mut(|squares| {
                let mut filled = None;
                for (block, piece) in own.map(|i| (i / pieces, i % pieces)) {
                    let rows = (block * size, rows.min((block + 1) * size));
                    if filled.replace(block) != Some(block) {
                        self.fill_own(packings, rows, squares);
                    }
                    let place = |piece: usize| places * piece / pieces;
                    let mut own = place(piece)..place(piece + 1);
                    self.multiply_squares(squares, &mut own, rows, out);
                }
            });
        });
    }

    /// Makes all tiles of these rows.
    fn fill_own(
        &self,
        packings: &[(u32, usize)],
        rows: (usize, usize),
        squares: &mut Vec<Squares>,
    ) {
        squares.resize_with(packings.len().max(squares.len()), Squares::default);
        for (squares, packing) in squares.iter_mut().zip(packings) {
            squares.resize(rows.1 - rows.0, self.product.k, *packing);
            let padded = squares.padded();
            self.fill_rows(rows, (0, padded), &squares.filling());
        }
    }

    /// The same for few rows: each thread makes its own tiles of them.
    fn run_alone(&self, packings: &[(u32, usize)], out: &Output) {
        let rows = (0, self.product.rows);
        let work = self.product.rows * self.product.n * self.product.k;
        spread(self.places(), work, &|own| {
            let mut own = own.peekable();
            if own.peek().is_none() {
                return;
            }
            OWN.with_borrow_mut(|squares| {
                self.fill_own(packings, rows, squares);
                self.multiply_squares(squares, &mut own, rows, out);
            });
        });
    }

    /// Products of the rows that are in tiles with outputs of the places that are the thread's own.
    fn multiply_squares(
        &self,
        squares: &[Squares],
        own: &mut dyn Iterator<Item = usize>,
        rows: (usize, usize),
        out: &Output,
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: `Isa::Amx` is made by `detect` only, where they are available.
            let registers = unsafe { Registers::new() };
            let form = |place: usize| self.form_of(self.part(place).0);
            let mut own = own.peekable();
            while let Some(of) = own.peek().map(|&place| form(place)) {
                let mut alike = std::iter::from_fn(|| own.next_if(|&place| form(place) == of));
                let x = &squares[of.unwrap_or(0)];
                // SAFETY: the same has AVX-512.
                unsafe {
                    amx::products(
                        &mut alike,
                        &|i| self.source(self.place(i)),
                        x,
                        &registers,
                        scratch,
                        &mut |i, sums| self.finish(self.place(i), rows, sums, out),
                    );
                }
            }
        });
    }

    /// How many [`Place`]s there are.
    fn places(&self) -> usize {
        let parts = &self.product.parts;
        match self.product.gate {
            Some(_) => self.product.n.div_ceil(SIDE),
            None => parts.iter().map(|p| p.size.n.div_ceil(2 * SIDE)).sum(),
        }
    }

    fn place(&self, i: usize) -> Place {
        let (part, end) = self.part(i);
        let parts = &self.product.parts;
        let from = match self.product.gate {
            Some(_) => i * SIDE,
            None => (parts[part].size.n.div_ceil(2 * SIDE) - (end - i)) * 2 * SIDE,
        };
        let start: usize = parts[..part].iter().map(|p| p.size.n).sum();
        Place {
            part,
            from,
            column: start + from,
        }
    }

    /// Puts rows of the input into tiles, through the norm.
    fn fill_squares(
        &self,
        (first, last): (usize, usize),
        packing: (u32, usize),
        squares: &mut Squares,
    ) {
        let k = self.product.k;
        squares.resize(last - first, k, packing);
        let padded = squares.padded();
        let filling = squares.filling();
        share(padded, padded * k * 4, &|from, to| {
            self.fill_rows((first, last), (from, to), &filling);
        });
    }

    /// Puts the rows `from..to` of these into tiles; each is to be one thread's alone.
    fn fill_rows(
        &self,
        (first, last): (usize, usize),
        (from, to): (usize, usize),
        filling: &Filling<'_>,
    ) {
        let k = self.product.k;
        for row in from..to {
            let x = (first + row < last).then(|| &self.x[(first + row) * k..][..k]);
            let factor = x.map_or(1.0, |x| self.factor(self.product.isa, x));
            let weight = self.norm.map(|(weight, _)| weight);
            // SAFETY: each row is written by one part alone; `Isa::Amx` is made by `detect` only, where the processor has AVX-512.
            unsafe { filling.row(row, x, (factor, weight)) };
        }
    }

    /// The part of a place, the first of a gate, and the first place of the next one.
    fn part(&self, i: usize) -> (usize, usize) {
        if self.product.gate.is_some() {
            return (0, self.places());
        }
        let mut end = 0;
        for (part, own) in self.product.parts.iter().enumerate() {
            end += own.size.n.div_ceil(2 * SIDE);
            if i < end {
                return (part, end);
            }
        }
        unreachable!("as many as `places` says")
    }

    /// The two tiles' rows of the matrix; the first one's twice where there is only one.
    fn source(&self, place: Place) -> Two<'_> {
        let tile = |part: usize, from: usize| match self.data[part].0 {
            Data::Quantized { bands, .. } => {
                let (first, count) = (from / BAND, bands.count());
                (first < count).then(|| bands.part(first..count.min(first + SIDE / BAND)))
            }
            Data::Dense(_) => None,
        };
        let one = tile(place.part, place.from);
        let other = match self.product.gate {
            Some(_) => tile(1, place.from),
            None => tile(place.part, place.from + SIDE),
        };
        match (one, other) {
            (Some(one), other) => Two([one, other.unwrap_or(one)]),
            (None, _) => unreachable!("a place is in its part"),
        }
    }

    /// Products of rows of the input with two tiles' outputs, on to the output.
    fn finish(&self, place: Place, (first, last): (usize, usize), sums: &[Outputs], out: &Output) {
        let Product { n, gate, .. } = *self.product;
        // The last band may be wider than the matrix.
        let end = self.product.parts[place.part].size.n;
        let most = if gate.is_some() { SIDE } else { 2 * SIDE };
        let width = most.min(end - place.from);
        let bias = |part: usize, from: usize| {
            let bias = self.data[part].1?;
            Some(&bias[from.min(end)..end.min(from + SIDE)])
        };
        let biases = match gate {
            Some(_) => [bias(0, place.from), bias(1, place.from)],
            None => [
                bias(place.part, place.from),
                bias(place.part, place.from + SIDE),
            ],
        };
        let at = first * n + place.column;
        let then = amx::Then {
            biases,
            gate,
            before: self.residual.map(|all| &all[at..]),
        };
        // SAFETY: these columns of these rows belong to this place alone; `Isa::Amx` is made by `detect` only, where the
        // processor has AVX-512.
        unsafe {
            let mut to = out.columns(at, n, (last - first, width));
            amx::put(sums, &then, &mut to);
        }
    }
}
