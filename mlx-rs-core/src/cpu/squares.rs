//! Products of quantized matrices with two or more rows of inputs where the processor has AMX (`amx`): inputs go into
//! tiles once, then two tiles of outputs at a time, neighbors or a gate's two, go through all of them.

use std::cell::RefCell;

use super::amx::{self, Filling, Outputs, Registers, SIDE, Squares, Two};
use super::bands::BAND;
use super::kernel::Isa;
use super::many::{Many, gate_all};
use super::project::{Data, Product};
use super::share::{Output, share, spread};

/// Rows of inputs at a time: their tiles fit the second cache.
const ROWS: usize = 256;

/// Rows of inputs from which this pays.
const SOME: usize = 2;

/// Rows up to which each thread makes its own tiles of them: to make them takes less than to wait for those that another one
/// makes, and to fetch them.
const ALONE: usize = 16;

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
    pub(super) fn fits_squares(&self) -> bool {
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
    pub(super) fn run_in_squares(&self, packings: &[(u32, usize)], out: &Output) {
        let places = self.places();
        if self.product.rows <= ALONE {
            return self.run_alone(packings, out);
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
                squares.resize_with(packings.len().max(squares.len()), Squares::default);
                for (squares, packing) in squares.iter_mut().zip(packings) {
                    squares.resize(self.product.rows, self.product.k, *packing);
                    let padded = squares.padded();
                    self.fill_rows(rows, (0, padded), &squares.filling());
                }
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
    fn finish(
        &self,
        place: Place,
        (first, last): (usize, usize),
        sums: &mut [Outputs],
        out: &Output,
    ) {
        let Product { n, isa, gate, .. } = *self.product;
        let plane = sums.len() / 2;
        let (one, other) = sums.split_at_mut(plane);
        // The last band may be wider than the matrix.
        let end = self.product.parts[place.part].size.n;
        let widths = [0, SIDE].map(|at| end.saturating_sub(place.from + at).min(SIDE));
        for (i, sums) in [&mut *one, &mut *other].into_iter().enumerate() {
            let (part, from) = match gate {
                Some(_) => (i, place.from),
                None => (place.part, place.from + i * SIDE),
            };
            if let Some(bias) = self.data[part].1 {
                let bias = &bias[from.min(bias.len())..];
                for row in sums {
                    row.0.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
                }
            }
        }
        let (one, other) = match gate {
            Some(gate) => {
                let (gates, ups) = (bytemuck::cast_slice_mut(one), bytemuck::cast_slice(other));
                gate_all(isa, gate, gates, ups);
                (&*one, &[][..])
            }
            None => (&*one, &*other),
        };
        let planes = [one, other];
        for row in 0..last - first {
            for (i, plane) in planes.iter().enumerate() {
                let (Some(Outputs(sums)), 1..) = (plane.get(row), widths[i]) else {
                    continue;
                };
                let at = (first + row) * n + place.column + i * SIDE;
                // SAFETY: these columns of this row belong to this place alone.
                let to = unsafe { out.part(at, widths[i]) };
                write(sums, self.residual.map(|r| &r[at..at + widths[i]]), to);
            }
        }
    }
}

/// A row of a tile with what is added, if anything; the tile may be wider than the row.
#[inline]
fn write(sums: &[f32; SIDE], before: Option<&[f32]>, to: &mut [f32]) {
    match (<&mut [f32; SIDE]>::try_from(&mut *to), before) {
        // In vectors.
        (Ok(to), None) => *to = *sums,
        (Ok(to), Some(before)) => {
            for (i, before) in before.iter().enumerate() {
                to[i] = sums[i] + before;
            }
        }
        (Err(_), None) => to.copy_from_slice(&sums[..to.len()]),
        (Err(_), Some(before)) => {
            for ((to, sum), before) in to.iter_mut().zip(sums).zip(before) {
                *to = sum + before;
            }
        }
    }
}
