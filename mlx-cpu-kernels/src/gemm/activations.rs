//! Input rows in the forms that few-row kernels read. The rows are normalized, then prepared once
//! for each packing.

use crate::isa::Isa;
use crate::layout::input_panel::{InputPanel, InputPanelMut, MAX_ROWS};
use crate::simd::{qgemv, vmath};

/// Memory reused between operations, because each token requires hundreds of operations.
#[derive(Default)]
pub(crate) struct Scratch {
    normalized: Vec<f32>,
    forms: Vec<PreparedForm>,
}

/// Inputs prepared for one packing.
#[derive(Default)]
struct PreparedForm {
    /// The number of elements per row in each of the four vectors below.
    each: [usize; 4],
    values: Vec<f32>,
    quants: Vec<i16>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

/// Input rows, in each required form.
pub(crate) struct PreparedRows<'a> {
    /// The number of rows.
    pub count: usize,
    /// The rows as floats, after the norm.
    values: &'a [f32],
    k: usize,
    forms: &'a [PreparedForm],
}

impl Scratch {
    /// Prepares rows of `k` elements for these packings. An optional norm (a weight and its
    /// epsilon) comes first.
    pub(crate) fn fill<'a>(
        &'a mut self,
        isa: Isa,
        x: &'a [f32],
        norm: Option<(&[f32], f32)>,
        k: usize,
        packings: &[(u32, usize)],
    ) -> PreparedRows<'a> {
        let values = match norm {
            Some((weight, eps)) => {
                self.normalized.resize(x.len(), 0.0);
                normalize(isa, x, weight, eps, &mut self.normalized);
                &self.normalized
            }
            None => x,
        };
        while self.forms.len() < packings.len() {
            self.forms.push(PreparedForm::default());
        }
        let forms = &mut self.forms[..packings.len()];
        for (form, packing) in forms.iter_mut().zip(packings) {
            form.fill(isa, values, k, *packing);
        }
        PreparedRows {
            count: x.len() / k,
            values,
            k,
            forms,
        }
    }

    /// The rows of the last [`Self::fill`]. That call must have had no norm and the same number of
    /// packings.
    pub(crate) fn filled<'a>(
        &'a self,
        x: &'a [f32],
        k: usize,
        packings: &[(u32, usize)],
    ) -> PreparedRows<'a> {
        PreparedRows {
            count: x.len() / k,
            values: x,
            k,
            forms: &self.forms[..packings.len()],
        }
    }
}

impl PreparedForm {
    fn fill(&mut self, isa: Isa, x: &[f32], k: usize, (bits, group): (u32, usize)) {
        let rows = x.len() / k;
        let (floats, wholes) = if qgemv::quantizes_inputs(isa, bits) {
            (0, k)
        } else {
            (k, 0)
        };
        self.each = [
            floats,
            wholes,
            wholes / qgemv::inputs_per_scale(isa),
            k / group,
        ];
        let [floats, wholes, scales, sums] = self.each;
        self.values.resize(rows * floats, 0.0);
        self.quants.resize(rows * wholes, 0);
        self.scales.resize(rows * scales, 0.0);
        self.sums.resize(rows * sums, 0.0);
        for first in (0..rows).step_by(MAX_ROWS) {
            let last = rows.min(first + MAX_ROWS);
            let to = InputPanelMut {
                values: &mut self.values[first * floats..last * floats],
                quants: &mut self.quants[first * wholes..last * wholes],
                scales: &mut self.scales[first * scales..last * scales],
                sums: &mut self.sums[first * sums..last * sums],
            };
            qgemv::prepare_inputs(isa, &x[first * k..last * k], k, (bits, group), to);
        }
    }

    /// The panel of `n` rows from `from` on.
    fn panel(&self, from: usize, n: usize) -> InputPanel<'_> {
        let [floats, wholes, scales, sums] = self.each;
        InputPanel {
            rows: n,
            values: &self.values[from * floats..(from + n) * floats],
            quants: &self.quants[from * wholes..(from + n) * wholes],
            scales: &self.scales[from * scales..(from + n) * scales],
            sums: &self.sums[from * sums..(from + n) * sums],
        }
    }
}

impl PreparedRows<'_> {
    /// At most [`MAX_ROWS`] rows from `from` on, in this form.
    pub(crate) fn panel(&self, form: usize, from: usize) -> InputPanel<'_> {
        self.forms[form].panel(from, MAX_ROWS.min(self.count - from))
    }

    /// Calls `f` with at most [`MAX_ROWS`] rows from `from` on, as floats.
    pub(crate) fn dense<R>(&self, from: usize, f: impl FnOnce(&[&[f32]]) -> R) -> R {
        let mut rows = [&[][..]; MAX_ROWS];
        let inputs = self.values[from * self.k..].chunks_exact(self.k);
        let mut n = 0;
        for (row, inputs) in rows.iter_mut().zip(inputs) {
            *row = inputs;
            n += 1;
        }
        f(&rows[..n])
    }
}

/// Applies `x / sqrt(mean(x^2) + eps) * weight` row by row.
fn normalize(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let k = weight.len();
    for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k)) {
        let square = vmath::dot(isa, x, x);
        let factor = 1.0 / (square / k as f32 + eps).sqrt();
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * factor * w;
        }
    }
}
