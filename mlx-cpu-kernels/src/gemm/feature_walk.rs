//! A feed-forward block that computes selected features only. For each row, it selects the features
//! with the greatest gates, and reads only their rows of the up and down matrices.
//!
//! A quantized down matrix cannot be read this way: a feature is one of its columns, but groups of
//! codes run along its rows. So both matrices are float32 or float16, `[features, hidden]`,
//! row-major. Another object owns their memory, such as a mapped file. Float16 rows are converted
//! exactly to float32 when read, a few elements at a time.

use std::sync::Arc;

use crate::gemm::activations::{Forms, Scratch};
use crate::isa::Isa;
use crate::layout::dense::DenseView;
use crate::layout::input_panel::MAX_ROWS;
use crate::partition::{SharedOutput, parallel_parts, parallel_ranges};
use crate::pool;
use crate::simd::portable::vmath::Gate;
use crate::simd::{dense_rows, vmath};
use crate::work::{Input, Work};

/// Float32 values whose memory another object owns, such as a mapped file.
pub type HeldFloats = Arc<dyn AsRef<[f32]> + Send + Sync>;

/// A dense matrix whose memory another object owns, such as a mapped file.
#[derive(Clone)]
pub enum StoredRows {
    /// float32.
    F32(HeldFloats),
    /// float16, as raw bits.
    F16(Arc<dyn AsRef<[u16]> + Send + Sync>),
}

impl StoredRows {
    fn view(&self) -> DenseView<'_> {
        match self {
            Self::F32(all) => DenseView::F32((**all).as_ref()),
            Self::F16(all) => DenseView::F16((**all).as_ref()),
        }
    }
}

/// The number of float16 elements converted at once, so that they stay in the L1 cache.
const AT_ONCE: usize = 512;

/// A part of a row as float32. A float32 part is returned in place, and a float16 part is converted
/// into `wide`. The part has at most [`AT_ONCE`] elements.
fn widened<'a>(isa: Isa, part: DenseView<'a>, wide: &'a mut [f32; AT_ONCE]) -> &'a [f32] {
    match part {
        DenseView::F32(part) => part,
        other => {
            let wide = &mut wide[..other.len()];
            other.to_f32(isa, 0, wide);
            wide
        }
    }
}

/// `row . x`.
fn dot(isa: Isa, row: DenseView<'_>, x: &[f32]) -> f32 {
    if let DenseView::F32(row) = row {
        return vmath::dot(isa, row, x);
    }
    let mut wide = [0.0; AT_ONCE];
    let parts = x.chunks(AT_ONCE).enumerate().map(|(i, x)| {
        let from = i * AT_ONCE;
        let row = widened(isa, row.slice(from..from + x.len()), &mut wide);
        vmath::dot(isa, row, x)
    });
    parts.sum()
}

/// Adds weighted rows to an output.
fn add_scaled<const N: usize>(
    isa: Isa,
    y: &mut [f32],
    rows: [DenseView<'_>; N],
    weights: [f32; N],
) {
    let mut wide = [[0.0; AT_ONCE]; N];
    for (i, y) in y.chunks_mut(AT_ONCE).enumerate() {
        let from = i * AT_ONCE;
        let mut parts = [&[][..]; N];
        for ((part, row), wide) in parts.iter_mut().zip(rows).zip(&mut wide) {
            *part = widened(isa, row.slice(from..from + y.len()), wide);
        }
        vmath::add_scaled(isa, y, parts, weights);
    }
}

/// The number of output columns per part of the work, for many rows. It is small, so that these
/// columns of all down rows stay in the L2 cache.
const COLUMNS: usize = 128;

/// The number of rows per part of the work, for many rows.
const ROWS: usize = 32;

/// Products of rows with [`StoredRows`]. The input is `x [rows, k]`, float32.
pub struct HeldProduct {
    /// The number of rows of `x`.
    pub rows: usize,
    /// The number of elements of a row.
    pub k: usize,
    /// The matrix `[n, k]`.
    pub matrix: StoredRows,
    /// The bias `[n]`, added to each row of the result.
    pub bias: Option<HeldFloats>,
    /// The instruction set.
    pub isa: Isa,
}

impl HeldProduct {
    fn n(&self) -> usize {
        self.matrix.view().len() / self.k.max(1)
    }
}

impl Work for HeldProduct {
    fn outputs(&self) -> usize {
        self.rows * self.n()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let (n, k) = (self.n(), self.k);
        let matrix = self.matrix.view();
        let bias = self.bias.as_ref().map(|bias| (**bias).as_ref());
        // SAFETY: the caller passes float32.
        let x = (inputs.first()).map_or(&[][..], |x| unsafe { x.as_slice::<f32>() });
        assert!(x.len() == self.rows * k && bias.is_none_or(|bias| bias.len() == n));
        let out = SharedOutput::new(output);
        let forms = Forms {
            packings: &[],
            dense: true,
            most: MAX_ROWS,
            threads: true,
        };
        let mut scratch = Scratch::default();
        let x = scratch.fill(self.isa, x, None, k, forms);
        parallel_ranges(n, self.rows * n * k, &|from, to| {
            let rows = matrix.slice(from * k..to * k);
            for first in (0..self.rows).step_by(MAX_ROWS) {
                let count = x.panel_rows(first);
                // SAFETY: the parts have disjoint columns.
                let mut out = unsafe { out.block(first * n + from, n, (count, to - from)) };
                dense_rows::multiply(self.isa, rows, x.dense(first), &mut out);
                for i in 0..count {
                    let row = out.row_mut(i);
                    if let Some(bias) = bias {
                        row.iter_mut()
                            .zip(&bias[from..to])
                            .for_each(|(y, b)| *y += b);
                    }
                }
            }
        });
    }
}

/// A feed-forward block that computes, for each row, the `top_k` features with the greatest gate
/// magnitudes before the activation. Of equal magnitudes, the first ones are selected. A feature
/// `f` adds `a_f * down[f]` with `a_f = activation(gate_f) * (up[f] . x + up_bias_f)`, or without
/// an up matrix `a_f = activation(gate_f)`. A row's result does not depend on other rows.
///
/// The inputs are float32: `x [rows, hidden]`, and gates `[rows, features]`. If `activation` is
/// `None`, the gates after the activation follow.
pub struct FeatureWalk {
    /// The number of rows of `x`.
    pub rows: usize,
    /// The number of elements of a row.
    pub hidden: usize,
    /// The number of rows of each matrix.
    pub features: usize,
    /// The maximum number of features per row.
    pub top_k: usize,
    /// The activation; `None` if the kernels do not support it.
    pub activation: Option<Gate>,
    /// The up matrix `[features, hidden]`; `None` for a block without one.
    pub up: Option<StoredRows>,
    /// The bias of the up matrix, `[features]`.
    pub up_bias: Option<HeldFloats>,
    /// The down matrix, `[features, hidden]`.
    pub down: StoredRows,
    /// The bias of the down matrix, `[hidden]`.
    pub down_bias: Option<HeldFloats>,
    /// The instruction set.
    pub isa: Isa,
}

impl Work for FeatureWalk {
    fn outputs(&self) -> usize {
        self.rows * self.hidden
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let input = |i: usize| match inputs.get(i) {
            // SAFETY: the caller passes float32.
            Some(input) => unsafe { input.as_slice::<f32>() },
            None => &[],
        };
        let (x, gates) = (input(0), input(1));
        let count = self.rows * self.features;
        assert!(x.len() == self.rows * self.hidden && gates.len() == count);
        let activated = match self.activation {
            Some(_) => None,
            None => Some(input(2)),
        };
        assert!(activated.is_none_or(|all| all.len() == count));
        let ids = self.choose(gates);
        let weights = self.weights(x, gates, activated, &ids);
        self.sum(&ids, &weights, output);
    }
}

impl FeatureWalk {
    /// The number of features per row.
    fn features_per_row(&self) -> usize {
        self.top_k.min(self.features)
    }

    /// The number of multiplications of a pass over one of the matrices.
    fn work(&self) -> usize {
        self.rows * self.features_per_row() * self.hidden
    }

    /// The selected features of each row, ascending: `[rows, features_per_row]`.
    fn choose(&self, gates: &[f32]) -> Vec<u32> {
        let (features, k) = (self.features, self.features_per_row());
        if k == features {
            let all = 0..u32::try_from(features).unwrap_or(u32::MAX);
            return (0..self.rows).flat_map(|_| all.clone()).collect();
        }
        let mut ids = vec![0; self.rows * k];
        let out = SharedOutput::new(&mut ids);
        parallel_ranges(self.rows, self.rows * features * 8, &|from, to| {
            let mut keys: Vec<u64> = Vec::with_capacity(features);
            for row in from..to {
                keys.clear();
                let gates = &gates[row * features..(row + 1) * features];
                // Magnitudes have the same order as their bits. Among equal magnitudes the first is
                // selected. NaN is the greatest, so it reaches the result.
                keys.extend((0u32..).zip(gates).map(|(f, gate)| {
                    (u64::from(gate.abs().to_bits()) << 32) | u64::from(u32::MAX - f)
                }));
                if k > 0 {
                    keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
                }
                // SAFETY: each part has separate rows.
                let ids = unsafe { out.slice_mut(row * k, k) };
                for (id, key) in ids.iter_mut().zip(&keys) {
                    *id = u32::MAX - (key & u64::from(u32::MAX)) as u32;
                }
                // The indices are sorted, so rows are read in memory order.
                ids.sort_unstable();
            }
        });
        ids
    }

    /// The weights of the selected down rows: `[rows, features_per_row]`.
    fn weights(
        &self,
        x: &[f32],
        gates: &[f32],
        activated: Option<&[f32]>,
        ids: &[u32],
    ) -> Vec<f32> {
        let (features, hidden, k) = (self.features, self.hidden, self.features_per_row());
        let up = self.up.as_ref().map(StoredRows::view);
        let bias = self.up_bias.as_ref().map(|bias| (**bias).as_ref());
        assert!(up.is_none_or(|up| up.len() == features * hidden));
        assert!(bias.is_none_or(|bias| bias.len() == features));
        let mut weights = vec![0.0; ids.len()];
        let out = SharedOutput::new(&mut weights);
        // The loop is parallel over features. So a thread uses an up row for all input rows while
        // it is in the cache.
        parallel_ranges(features, self.work(), &|from, to| {
            for row in 0..self.rows {
                let row_ids = &ids[row * k..(row + 1) * k];
                let first = row_ids.partition_point(|id| (*id as usize) < from);
                let last = row_ids.partition_point(|id| (*id as usize) < to);
                // SAFETY: each part has separate features.
                let weights = unsafe { out.slice_mut(row * k + first, last - first) };
                let x = &x[row * hidden..(row + 1) * hidden];
                for (weight, id) in weights.iter_mut().zip(&row_ids[first..last]) {
                    let feature = *id as usize;
                    let at = row * features + feature;
                    let opened = match (self.activation, activated) {
                        (Some(gate), _) => gate.apply(gates[at]),
                        (None, Some(all)) => all[at],
                        (None, None) => f32::NAN,
                    };
                    *weight = match up {
                        Some(up) => {
                            let up = up.slice(feature * hidden..(feature + 1) * hidden);
                            let bias = bias.map_or(0.0, |bias| bias[feature]);
                            opened * (dot(self.isa, up, x) + bias)
                        }
                        None => opened,
                    };
                }
            }
        });
        weights
    }

    /// Adds the weighted selected down rows and the bias.
    fn sum(&self, ids: &[u32], weights: &[f32], output: &mut [f32]) {
        let (hidden, k) = (self.hidden, self.features_per_row());
        let down = self.down.view();
        let bias = self.down_bias.as_ref().map(|bias| (**bias).as_ref());
        assert!(down.len() == self.features * hidden && output.len() == self.rows * hidden);
        assert!(bias.is_none_or(|bias| bias.len() == hidden));
        // With few rows, each thread reads its whole share of a down row at once.
        let width = match self.rows {
            0..8 => (hidden.div_ceil(pool::threads()).next_multiple_of(16)).max(64),
            _ => COLUMNS,
        };
        let (columns, groups) = (hidden.div_ceil(width), self.rows.div_ceil(ROWS));
        let out = SharedOutput::new(output);
        parallel_parts(columns * groups, self.work(), &|parts| {
            for part in parts {
                let (column, group) = (part % columns * width, part / columns * ROWS);
                let n = width.min(hidden - column);
                for row in group..(group + ROWS).min(self.rows) {
                    // SAFETY: the parts have disjoint rows or columns.
                    let y = unsafe { out.slice_mut(row * hidden + column, n) };
                    match bias {
                        Some(bias) => y.copy_from_slice(&bias[column..column + n]),
                        None => y.fill(0.0),
                    }
                    let range = row * k..(row + 1) * k;
                    let (ids, weights) = (&ids[range.clone()], &weights[range]);
                    let of = |id: u32| {
                        let from = id as usize * hidden + column;
                        down.slice(from..from + n)
                    };
                    let (ids, ids_left) = ids.as_chunks::<4>();
                    let (weights, weights_left) = weights.as_chunks::<4>();
                    for (ids, weights) in ids.iter().zip(weights) {
                        add_scaled(self.isa, y, ids.map(of), *weights);
                    }
                    for (id, weight) in ids_left.iter().zip(weights_left) {
                        add_scaled(self.isa, y, [of(*id)], [*weight]);
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    fn stored(values: &[f32]) -> HeldFloats {
        Arc::new(values.to_vec())
    }

    /// `values` rounded to float16, and the rounded values as float32.
    fn halves(values: &[f32]) -> (StoredRows, Vec<f32>) {
        let halves: Vec<half::f16> = values.iter().map(|v| half::f16::from_f32(*v)).collect();
        let bits: Vec<u16> = halves.iter().map(|h| h.to_bits()).collect();
        let exact = halves.iter().map(|h| h.to_f32()).collect();
        (StoredRows::F16(Arc::new(bits)), exact)
    }

    fn run(work: &impl Work, inputs: &[&[f32]]) -> Vec<f32> {
        let inputs: Vec<Input> = inputs.iter().map(|x| Input::from_slice(x)).collect();
        let mut output = vec![f32::NAN; work.outputs()];
        // SAFETY: the inputs are float32 and as the operation documents.
        unsafe { work.run(&inputs, &mut output) };
        output
    }

    /// One row of the block by its definition, in float64.
    fn walked(work: &FeatureWalk, x: &[f32], gates: &[f32]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..gates.len()).collect();
        order.sort_by(|a, b| gates[*b].abs().total_cmp(&gates[*a].abs()).then(a.cmp(b)));
        order.truncate(work.top_k);
        let hidden = x.len();
        let mut y = vec![0.0; hidden];
        for f in order {
            let gate = f64::from(gates[f]);
            let mut weight = gate / (1.0 + (-gate).exp());
            if let Some(up) = &work.up {
                let DenseView::F32(up) = up.view() else {
                    panic!("the definition is of float32")
                };
                let up = &up[f * hidden..(f + 1) * hidden];
                let product: f64 = (up.iter().zip(x))
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                let bias = work.up_bias.as_ref().map_or(0.0, |b| (**b).as_ref()[f]);
                weight *= product + f64::from(bias);
            }
            let DenseView::F32(down) = work.down.view() else {
                panic!("the definition is of float32")
            };
            let down = &down[f * hidden..(f + 1) * hidden];
            for (y, d) in y.iter_mut().zip(down) {
                *y += weight * f64::from(*d);
            }
        }
        if let Some(bias) = &work.down_bias {
            y.iter_mut()
                .zip((**bias).as_ref())
                .for_each(|(y, b)| *y += f64::from(*b));
        }
        y
    }

    #[test]
    fn walks_are_their_definition_and_rows_do_not_depend_on_each_other() {
        with_each(|isa| {
            for (rows, hidden, features) in [(1, 1, 1), (1, 70, 131), (3, 64, 40), (41, 300, 97)] {
                let x = noise(rows * hidden, 1);
                let gates: Vec<f32> = noise(rows * features, 2).iter().map(|g| 8.0 * g).collect();
                let [up, down] = [3, 4].map(|seed| {
                    let values = noise(features * hidden, seed);
                    StoredRows::F32(stored(&values))
                });
                let [up_bias, down_bias] = [stored(&noise(features, 5)), stored(&noise(hidden, 6))];
                for top_k in [0, 1, 7, features - 1, features, usize::MAX] {
                    for (gated, biased) in [(true, true), (true, false), (false, true)] {
                        let mut work = FeatureWalk {
                            rows,
                            hidden,
                            features,
                            top_k,
                            activation: Some(Gate::Silu),
                            up: gated.then(|| up.clone()),
                            up_bias: biased.then(|| Arc::clone(&up_bias)),
                            down: down.clone(),
                            down_bias: biased.then(|| Arc::clone(&down_bias)),
                            isa,
                        };
                        let y = run(&work, &[&x, &gates]);
                        work.rows = 1;
                        for row in 0..rows {
                            let row_of =
                                |all: &[f32], n: usize| all[row * n..(row + 1) * n].to_vec();
                            let (x, gates) = (row_of(&x, hidden), row_of(&gates, features));
                            let (y, alone) = (row_of(&y, hidden), run(&work, &[&x, &gates]));
                            assert_eq!(y, alone, "{isa:?} {rows} {top_k}");
                            for (y, wanted) in y.iter().zip(walked(&work, &x, &gates)) {
                                let difference = (f64::from(*y) - wanted).abs();
                                assert!(
                                    difference < 2e-4,
                                    "{isa:?} {hidden} {top_k}: {difference}"
                                );
                            }
                        }
                    }
                }
            }
        });
    }

    /// Rows are longer than [`AT_ONCE`], so each row needs more than one conversion.
    #[test]
    fn float16_gives_what_its_numbers_give_in_float32() {
        let (rows, hidden, features) = (3, 1100, 20);
        let (x, gates) = (noise(rows * hidden, 1), noise(rows * features, 2));
        let [up, down] = [3, 4].map(|seed| halves(&noise(features * hidden, seed)));
        with_each(|isa| {
            let walk = |up, down| FeatureWalk {
                rows,
                hidden,
                features,
                top_k: 7,
                activation: Some(Gate::Silu),
                up: Some(up),
                up_bias: None,
                down,
                down_bias: None,
                isa,
            };
            let short = walk(up.0.clone(), down.0.clone());
            let wide = [&up, &down].map(|(_, exact)| StoredRows::F32(stored(exact)));
            let [wide_up, wide_down] = wide;
            let (a, b) = (
                run(&short, &[&x, &gates]),
                run(&walk(wide_up, wide_down), &[&x, &gates]),
            );
            for (a, b) in a.iter().zip(&b) {
                assert!((a - b).abs() < 1e-4, "{isa:?}: {a} {b}");
            }
        });
    }

    #[test]
    fn of_equal_gates_the_first_are_taken_and_no_number_is_lost() {
        let down = StoredRows::F32(stored(&[1.0, 10.0, 100.0, 1000.0]));
        let mut work = FeatureWalk {
            rows: 1,
            hidden: 1,
            features: 4,
            top_k: 2,
            activation: None,
            up: None,
            up_bias: None,
            down,
            down_bias: None,
            isa: Isa::detect(),
        };
        let ones = [1.0; 4];
        assert_eq!(run(&work, &[&[0.0], &[2.0, -2.0, 2.0, 0.0], &ones]), [11.0]);
        assert_eq!(
            run(&work, &[&[0.0], &[0.0, 1.0, -3.0, 2.0], &ones]),
            [1100.0]
        );
        // Gates that are passed after the activation are used unchanged.
        assert_eq!(
            run(
                &work,
                &[&[0.0], &[0.0, 0.0, 5.0, 4.0], &[0.0, 0.0, 0.5, 2.0]]
            ),
            [2050.0]
        );
        work.top_k = 1;
        let gates = [1.0, f32::NAN, 3.0, 2.0];
        assert!(run(&work, &[&[0.0], &gates, &gates])[0].is_nan());
    }

    #[test]
    fn products_with_held_matrices_are_those_of_float64() {
        with_each(|isa| {
            for (rows, n, k) in [(1, 1, 1), (1, 400, 96), (9, 33, 70), (20, 64, 64)] {
                let (x, matrix, bias) = (noise(rows * k, 1), noise(n * k, 2), noise(n, 3));
                let (short, rounded) = halves(&matrix);
                let both = [
                    (StoredRows::F32(stored(&matrix)), &matrix),
                    (short, &rounded),
                ];
                for (biased, (rows_held, matrix)) in [false, true]
                    .into_iter()
                    .flat_map(|b| both.clone().map(|m| (b, m)))
                {
                    let work = HeldProduct {
                        rows,
                        k,
                        matrix: rows_held,
                        bias: biased.then(|| stored(&bias)),
                        isa,
                    };
                    let y = run(&work, &[&x]);
                    for (i, got) in y.iter().enumerate() {
                        let (row, column) = (&x[i / n * k..][..k], &matrix[i % n * k..][..k]);
                        let product: f64 = (row.iter().zip(column))
                            .map(|(a, b)| f64::from(*a) * f64::from(*b))
                            .sum();
                        let wanted = product + if biased { f64::from(bias[i % n]) } else { 0.0 };
                        assert!(
                            (f64::from(*got) - wanted).abs() < 1e-4,
                            "{isa:?} {rows} {n} {k}"
                        );
                    }
                }
            }
        });
    }
}
