//! Rows of inputs as the kernels take them: through a norm, and prepared for each packing that the matrices have.

use super::kernel::{self, Isa, MAX_ROWS, Panel, Prepared, neighbors};
use super::share::{Output, share};

/// What preparing an element costs, in multiplications.
const COST: usize = 4;

/// Kept from one operation to the next, since every token needs them hundreds of times.
#[derive(Default)]
pub(super) struct Scratch {
    normed: Vec<f32>,
    forms: Vec<Form>,
}

/// Inputs prepared for one packing.
#[derive(Default)]
struct Form {
    /// Bits of a number, and numbers of a group.
    packing: (u32, usize),
    /// What a row has of the following.
    each: [usize; 4],
    values: Vec<f32>,
    whole: Vec<i16>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

/// Rows of an input, in each form that is needed.
pub(super) struct Rows<'a> {
    /// How many.
    pub count: usize,
    /// As floats, through the norm.
    values: &'a [f32],
    k: usize,
    forms: &'a [Form],
}

impl Scratch {
    /// Rows of `k` elements through a norm (a weight, and what is added under the
    /// root) if there is one, for these packings.
    pub(super) fn fill<'a>(
        &'a mut self,
        isa: Isa,
        x: &'a [f32],
        norm: Option<(&[f32], f32)>,
        k: usize,
        packings: &[(u32, usize)],
    ) -> Rows<'a> {
        let count = x.len() / k;
        while self.forms.len() < packings.len() {
            self.forms.push(Form::default());
        }
        let forms = &mut self.forms[..packings.len()];
        for (form, packing) in forms.iter_mut().zip(packings) {
            form.resize(isa, count, k, *packing);
        }
        self.normed
            .resize(if norm.is_some() { x.len() } else { 0 }, 0.0);
        let normed = Output::new(&mut self.normed);
        let places: Vec<Places> = forms.iter_mut().map(Form::places).collect();
        share(
            count.div_ceil(MAX_ROWS),
            count * k * COST,
            &|begin, last| {
                for at in (begin..last).map(|panel| panel * MAX_ROWS) {
                    let rows = at..count.min(at + MAX_ROWS);
                    let n = rows.len();
                    let mut own = &x[rows.start * k..rows.end * k];
                    if let Some((weight, eps)) = norm {
                        // SAFETY: each panel's rows are written by one part alone, here and below.
                        let to = unsafe { normed.part(at * k, n * k) };
                        normalize(isa, own, weight, eps, to);
                        own = to;
                    }
                    for places in &places {
                        // SAFETY: as above.
                        let to = unsafe { places.panel(at, n) };
                        kernel::prepare(isa, own, k, places.packing, to);
                    }
                }
            },
        );
        Rows {
            count,
            values: if norm.is_some() { &self.normed } else { x },
            k,
            forms,
        }
    }
}

impl Form {
    fn resize(&mut self, isa: Isa, rows: usize, k: usize, (bits, group): (u32, usize)) {
        let (floats, wholes) = if kernel::in_whole(isa) {
            (0, k)
        } else {
            (k, 0)
        };
        self.packing = (bits, group);
        self.each = [floats, wholes, wholes / neighbors(bits), k / group];
        let [floats, wholes, scales, sums] = self.each;
        self.values.resize(rows * floats, 0.0);
        self.whole.resize(rows * wholes, 0);
        self.scales.resize(rows * scales, 0.0);
        self.sums.resize(rows * sums, 0.0);
    }

    fn places(&mut self) -> Places {
        Places {
            packing: self.packing,
            each: self.each,
            values: Output::new(&mut self.values),
            whole: Output::new(&mut self.whole),
            scales: Output::new(&mut self.scales),
            sums: Output::new(&mut self.sums),
        }
    }

    /// The panel of `n` rows from `from` on.
    fn panel(&self, from: usize, n: usize) -> Panel<'_> {
        let [floats, wholes, scales, sums] = self.each;
        Panel {
            rows: n,
            values: &self.values[from * floats..(from + n) * floats],
            whole: &self.whole[from * wholes..(from + n) * wholes],
            scales: &self.scales[from * scales..(from + n) * scales],
            sums: &self.sums[from * sums..(from + n) * sums],
        }
    }
}

/// A form while threads fill it.
struct Places {
    packing: (u32, usize),
    each: [usize; 4],
    values: Output,
    whole: Output<i16>,
    scales: Output,
    sums: Output,
}

impl Places {
    /// Those of the panel of `n` rows from `from` on.
    ///
    /// # Safety
    /// Nobody else may use them.
    unsafe fn panel(&self, from: usize, n: usize) -> Prepared<'_> {
        let [floats, wholes, scales, sums] = self.each;
        // SAFETY: the caller's promise.
        unsafe {
            Prepared {
                values: self.values.part(from * floats, n * floats),
                whole: self.whole.part(from * wholes, n * wholes),
                scales: self.scales.part(from * scales, n * scales),
                sums: self.sums.part(from * sums, n * sums),
            }
        }
    }
}

impl Rows<'_> {
    /// At most [`MAX_ROWS`] rows from `from` on, prepared in this form.
    pub(super) fn panel(&self, form: usize, from: usize) -> Panel<'_> {
        self.forms[form].panel(from, MAX_ROWS.min(self.count - from))
    }

    /// At most [`MAX_ROWS`] rows from `from` on, as floats: `f` of them.
    pub(super) fn dense<R>(&self, from: usize, f: impl FnOnce(&[&[f32]]) -> R) -> R {
        let mut rows = [&[][..]; MAX_ROWS];
        let own = self.values[from * self.k..].chunks_exact(self.k);
        let mut n = 0;
        for (row, own) in rows.iter_mut().zip(own) {
            *row = own;
            n += 1;
        }
        f(&rows[..n])
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight`, row by row.
fn normalize(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let k = weight.len();
    for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k)) {
        let square = kernel::inner(isa, x, x);
        let factor = 1.0 / (square / k as f32 + eps).sqrt();
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * factor * w;
        }
    }
}
