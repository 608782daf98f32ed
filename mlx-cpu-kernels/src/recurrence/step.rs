//! One position of a matrix memory: some columns of a head in one pass over the memory's rows.

use crate::isa::compiled_for_each_isa;
use crate::partition::OutputBlock;

/// The inputs of one position of one head.
pub(crate) struct Step<'a> {
    /// The scaled query.
    pub q: &'a [f32],
    /// The key, with its gate applied.
    pub k: &'a [f32],
    /// The factor on the memory.
    pub keep: f32,
}

compiled_for_each_isa! {
    /// Computes `c = keep * c + k^T value` and `y = q c`, where `value` and `y` are the columns of
    /// `c`. `before` is the address of these columns in the old memory, with a row stride of
    /// `stride`. Without `before`, the old memory is in `c`.
    pub(crate) fn advance(
        step: &Step<'_>,
        before: Option<(&[f32], usize)>,
        value: &[f32],
        c: &mut OutputBlock<'_>,
        y: &mut [f32],
    ) = advance_with;
}

#[inline(always)]
fn advance_with(
    step: &Step<'_>,
    before: Option<(&[f32], usize)>,
    value: &[f32],
    c: &mut OutputBlock<'_>,
    y: &mut [f32],
) {
    y.fill(0.0);
    for (a, (&k, &q)) in step.k.iter().zip(step.q).enumerate() {
        let row = c.row_mut(a);
        if let Some((before, stride)) = before {
            row.copy_from_slice(&before[a * stride..][..value.len()]);
        }
        for ((state, y), value) in row.iter_mut().zip(y.iter_mut()).zip(value) {
            *state = step.keep * *state + k * value;
            *y += q * *state;
        }
    }
}

compiled_for_each_isa! {
    /// `missing = strength * (value - keep * k c)`: the difference between the value and the one
    /// already stored for the key. `before` is as in [`advance`].
    pub(crate) fn missing(
        step: &Step<'_>,
        value: (&[f32], f32),
        before: Option<(&[f32], usize)>,
        c: &mut OutputBlock<'_>,
        missing: &mut [f32],
    ) = missing_with;
}

#[inline(always)]
fn missing_with(
    step: &Step<'_>,
    (value, strength): (&[f32], f32),
    before: Option<(&[f32], usize)>,
    c: &mut OutputBlock<'_>,
    missing: &mut [f32],
) {
    missing.fill(0.0);
    for (a, &k) in step.k.iter().enumerate() {
        let row: &[f32] = match before {
            Some((before, stride)) => &before[a * stride..],
            None => c.row_mut(a),
        };
        for (sum, state) in missing.iter_mut().zip(row) {
            *sum += k * state;
        }
    }
    for (sum, value) in missing.iter_mut().zip(value) {
        *sum = strength * (value - step.keep * *sum);
    }
}
