//! Input rows in the forms that few-row kernels read. The rows are normalized, then prepared once
//! for each packing.

use std::ops::Range;

use crate::isa::Isa;
use crate::layout::aligned::AlignedVec;
use crate::layout::dense::DenseInputs;
use crate::layout::input_panel::{InputPanel, InputPanelMut, MAX_ROWS, panel_rows};
use crate::memory::resize;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::simd::{dense_rows, qgemv, vmath};

/// Memory reused between operations, because each token requires hundreds of operations.
#[derive(Default)]
pub(crate) struct Scratch {
    /// The rows of each panel.
    panels: Vec<Range<usize>>,
    normalized: Vec<f32>,
    forms: Vec<PreparedForm>,
    /// The panels for dense matrices, one after another.
    dense: AlignedVec,
}

/// Inputs prepared for matrices of one packing.
#[derive(Default)]
struct PreparedForm {
    /// The number of elements per row in each of the four vectors below.
    each: [usize; 4],
    values: Vec<f32>,
    quants: Vec<i16>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

/// The forms of input rows.
#[derive(Clone, Copy)]
pub(crate) struct Forms<'p> {
    /// The distinct packings of the matrices: the width of `ScaleFormat::input_bits`, and the group
    /// size.
    pub packings: &'p [(u32, usize)],
    /// Whether a matrix is dense.
    pub dense: bool,
    /// The maximum number of rows of a panel; see [`panel_rows`].
    pub most: usize,
    /// Whether several threads prepare panels. It must be false inside a part of a job, because the
    /// pool runs one job at a time.
    pub threads: bool,
}

/// Input rows, in each required form.
pub(crate) struct PreparedRows<'a> {
    /// The number of rows.
    pub count: usize,
    /// The rows as floats, after the norm.
    values: &'a [f32],
    k: usize,
    forms: &'a [PreparedForm],
    dense: &'a [f32],
    /// The maximum number of rows of a panel.
    most: usize,
    isa: Isa,
}

impl Scratch {
    /// Prepares rows of `k` elements in these forms. An optional norm (a weight and its epsilon)
    /// comes first.
    pub(crate) fn fill<'a>(
        &'a mut self,
        isa: Isa,
        x: &'a [f32],
        norm: Option<(&[f32], f32)>,
        k: usize,
        forms: Forms<'_>,
    ) -> PreparedRows<'a> {
        let Forms {
            packings,
            most,
            dense,
            threads,
        } = forms;
        let (panels, normalized) = (&mut self.panels, &mut self.normalized);
        list_panels(x.len() / k, most, panels);
        let panels = &*panels;
        let run = |part: &OnPanels<'_>| {
            if threads && panels.len() > 1 {
                parallel_ranges(panels.len(), 4 * x.len(), &|from, to| {
                    part(&panels[from..to]);
                });
            } else {
                part(panels);
            }
        };
        let values = match norm {
            Some((weight, eps)) => {
                resize(normalized, x.len(), 0.0);
                let out = SharedOutput::new(normalized);
                run(&|panels| {
                    for rows in panels {
                        let rows = rows.start * k..rows.end * k;
                        // SAFETY: each panel belongs to only one part of the job.
                        let out = unsafe { out.slice_mut(rows.start, rows.len()) };
                        normalize(isa, &x[rows], weight, eps, out);
                    }
                });
                normalized
            }
            None => x,
        };
        while self.forms.len() < packings.len() {
            self.forms.push(PreparedForm::default());
        }
        let forms = &mut self.forms[..packings.len()];
        for (form, packing) in forms.iter_mut().zip(packings) {
            form.fill(isa, values, k, *packing, &run);
        }
        if dense {
            fill_dense(isa, values, k, &mut self.dense);
        }
        PreparedRows {
            count: x.len() / k,
            values,
            k,
            forms,
            dense: &self.dense,
            most,
            isa,
        }
    }

    /// Returns the rows that the last [`Self::fill`] prepared. That call must have had no norm, and
    /// the same forms.
    pub(crate) fn filled<'a>(
        &'a self,
        isa: Isa,
        x: &'a [f32],
        k: usize,
        forms: Forms<'_>,
    ) -> PreparedRows<'a> {
        PreparedRows {
            count: x.len() / k,
            values: x,
            k,
            forms: &self.forms[..forms.packings.len()],
            dense: &self.dense,
            most: forms.most,
            isa,
        }
    }
}

/// Prepares the panels with these rows.
type OnPanels<'a> = dyn Fn(&[Range<usize>]) + Sync + 'a;

/// Lists the rows of each panel.
fn list_panels(rows: usize, most: usize, panels: &mut Vec<Range<usize>>) {
    panels.clear();
    let mut first = 0;
    while first < rows {
        let next = first + panel_rows(rows - first, most);
        panels.push(first..next);
        first = next;
    }
}

impl PreparedForm {
    /// Prepares rows for a packing. `run` calls its argument with panels, perhaps on several
    /// threads.
    fn fill(
        &mut self,
        isa: Isa,
        x: &[f32],
        k: usize,
        (bits, group): (u32, usize),
        run: &dyn Fn(&OnPanels<'_>),
    ) {
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
        resize(&mut self.values, rows * floats, 0.0);
        resize(&mut self.quants, rows * wholes, 0);
        resize(&mut self.scales, rows * scales, 0.0);
        resize(&mut self.sums, rows * sums, 0.0);
        let (values, quants) = (
            SharedOutput::new(&mut self.values),
            SharedOutput::new(&mut self.quants),
        );
        let (scale_places, sum_places) = (
            SharedOutput::new(&mut self.scales),
            SharedOutput::new(&mut self.sums),
        );
        run(&|panels| {
            for rows in panels {
                let (first, n) = (rows.start, rows.len());
                // SAFETY: each panel belongs to only one part of the job.
                let to = unsafe {
                    InputPanelMut {
                        values: values.slice_mut(first * floats, n * floats),
                        quants: quants.slice_mut(first * wholes, n * wholes),
                        scales: scale_places.slice_mut(first * scales, n * scales),
                        sums: sum_places.slice_mut(first * sums, n * sums),
                    }
                };
                let x = &x[first * k..rows.end * k];
                qgemv::prepare_inputs(isa, x, k, (bits, group), to);
            }
        });
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
    /// The number of rows of the panel from row `from` on.
    pub(crate) fn panel_rows(&self, from: usize) -> usize {
        panel_rows(self.count - from, self.most)
    }

    /// The panel of the rows from `from` on, in this form.
    pub(crate) fn panel(&self, form: usize, from: usize) -> InputPanel<'_> {
        self.forms[form].panel(from, self.panel_rows(from))
    }

    /// The rows of the panel from row `from` on, a multiple of [`MAX_ROWS`], for dense matrices.
    pub(crate) fn dense(&self, from: usize) -> DenseInputs<'_> {
        let (isa, k, rows) = (self.isa, self.k, self.panel_rows(from));
        let values = match dense_rows::places(isa, rows) {
            Some(_) => {
                let at = from / MAX_ROWS * dense_rows::few_len(isa, MAX_ROWS, k);
                &self.dense[at..at + dense_rows::few_len(isa, rows, k)]
            }
            None => &self.values[from * k..(from + rows) * k],
        };
        DenseInputs { rows, k, values }
    }
}

/// Packs the rows of each panel for dense matrices, if the kernel needs panels.
fn fill_dense(isa: Isa, x: &[f32], k: usize, to: &mut AlignedVec) {
    let of = |rows: usize| dense_rows::places(isa, rows).map(|_| dense_rows::few_len(isa, rows, k));
    let (rows, each) = (x.len() / k, of(MAX_ROWS).unwrap_or(0));
    let rest = of(rows % MAX_ROWS).unwrap_or(0);
    to.resize(rows / MAX_ROWS * each + rest);
    let panels = to.chunks_mut(each.max(1));
    for (x, panel) in x.chunks(MAX_ROWS * k).zip(panels) {
        dense_rows::pack_few(isa, x, k, panel);
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
