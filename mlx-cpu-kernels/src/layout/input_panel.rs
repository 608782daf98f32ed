//! A few input rows, in the form that kernels for quantized matrices read. This file has only types
//! and index functions; `simd` fills and reads the panels.

/// The maximum number of input rows per panel. Each matrix row is dequantized once per panel.
pub(crate) const MAX_ROWS: usize = 8;

/// [`MAX_ROWS`] for the kernels of AVX-512 with integer inputs.
pub(crate) const MOST_ROWS: usize = 16;

/// The number of rows of the next panel if `left` rows are left, and a panel has at most `most`
/// rows: [`MAX_ROWS`] or [`MOST_ROWS`].
pub(crate) const fn panel_rows(left: usize, most: usize) -> usize {
    match left {
        MOST_ROWS.. if most == MOST_ROWS => MOST_ROWS,
        12.. if most == MOST_ROWS => 12,
        MAX_ROWS.. => MAX_ROWS,
        _ => left,
    }
}

/// An input row, prepared as floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputRow<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// The sum of each group.
    pub sums: &'a [f32],
}

/// A few input rows, as many as [`panel_rows`] returns, prepared as floats or as 16-bit integers.
/// [`INPUTS_PER_SCALE`] adjacent integers share a scale. The integers are ordered by matrix word,
/// then by row.
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
    /// 16-bit integers `[inputs / RUN, rows, RUN]`, in the order of [`integer_index`] (with dotprod
    /// as bytes, see `neon/qgemv_dotprod.rs`); empty for floats.
    pub quants: &'a [i16],
    /// The scales of `quants`, `[inputs / INPUTS_PER_SCALE, rows]`.
    pub scales: &'a [f32],
    /// The sum of each group, `[rows, groups]`. For integers it is the sum of the rounded inputs.
    /// The effect of a rounding error is then proportional to the weight. With sums of the exact
    /// inputs it would be proportional to the code, which is never negative.
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

/// The number of adjacent inputs that share a scale. It is small, so that a large input affects the
/// precision of few other inputs. The products of these inputs with codes are summed exactly in one
/// lane. `STEP` of `integer_panel.rs` has the same value. So the kernels for few rows and for many
/// rows quantize a row to the same integers.
pub(crate) const INPUTS_PER_SCALE: usize = 16;

/// The number of adjacent inputs whose integers are stored together: as many as a word has 4-bit
/// codes.
pub(crate) const RUN: usize = 8;

/// The index of an input among `near` adjacent inputs. A shift of a word moves pairs of codes that
/// are half a word apart into 16-bit lanes, and inputs have the same order.
pub(crate) const fn pair_index(i: usize, near: usize) -> usize {
    2 * (i % (near / 2)) + i / (near / 2)
}

/// The index of input `i` among the inputs of a [`RUN`], for codes of this width. A word has four
/// 8-bit codes, so its inputs are in the order of [`pair_index`].
pub(crate) const fn integer_index(i: usize, bits: u32) -> usize {
    let near = if bits == 8 { 4 } else { RUN };
    i / near * near + pair_index(i % near, near)
}

/// The maximum magnitude of an input as an integer.
pub(crate) const MAX_QUANT: f32 = 32_767.0;
