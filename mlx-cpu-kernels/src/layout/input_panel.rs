//! A few input rows in the form that products with quantized matrices read. This file has only
//! types and index functions; `simd` fills and reads them.

/// Input rows that share one dequantized matrix row.
pub(crate) const MAX_ROWS: usize = 8;

/// An input row, prepared as floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputRow<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// The sum of each group.
    pub sums: &'a [f32],
}

/// At most [`MAX_ROWS`] input rows, prepared as floats or as 16-bit integers with one scale per few
/// adjacent inputs. The integers are ordered by matrix word, then by row.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "whole numbers are for AVX2 and dotprod")
)]
pub(crate) struct InputPanel<'a> {
    /// The number of rows.
    pub rows: usize,
    /// The elements row by row; empty for integers.
    pub values: &'a [f32],
    /// 16-bit integers `[words, rows, inputs_per_sum]`, in the order of [`pair_index`] (with
    /// dotprod as bytes, see `neon/qgemv_dotprod.rs`); empty for floats.
    pub quants: &'a [i16],
    /// Their scales `[words, rows]`, one per few adjacent inputs ([`inputs_per_scale`]).
    pub scales: &'a [f32],
    /// The sum of each group, `[rows, groups]`. For integers it is the sum of the rounded inputs. A
    /// rounding error is then multiplied by the weight, not by the code, which is never negative.
    pub sums: &'a [f32],
}

impl<'a> InputPanel<'a> {
    /// Row `i` of a float panel whose rows have `k` elements in `groups` groups.
    pub(crate) fn row(self, i: usize, k: usize, groups: usize) -> InputRow<'a> {
        InputRow {
            values: &self.values[i * k..(i + 1) * k],
            sums: &self.sums[i * groups..(i + 1) * groups],
        }
    }
}

/// A panel during preparation; see [`InputPanel`].
pub(crate) struct InputPanelMut<'a> {
    pub values: &'a mut [f32],
    pub quants: &'a mut [i16],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

/// The number of adjacent inputs that share a scale, so that a large input affects few others.
/// Their products with codes of this width are summed exactly in one lane.
pub(crate) const fn inputs_per_sum(bits: u32) -> usize {
    if bits == 8 { 4 } else { 8 }
}

/// The index of an input among its neighbors. Shifts of a word move pairs of codes that are half a
/// word apart into 16-bit lanes.
pub(crate) const fn pair_index(i: usize, near: usize) -> usize {
    2 * (i % (near / 2)) + i / (near / 2)
}

/// The maximum integer of an input.
pub(crate) const MAX_QUANT: f32 = 32_767.0;
