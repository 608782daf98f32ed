//! A few rows of inputs in the form that products with quantized matrices read. Types and index
//! functions only; `simd` fills and reads them.

/// Rows of inputs that share one unpacked row of the matrix.
pub(crate) const MAX_ROWS: usize = 8;

/// A row of inputs, prepared as floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputRow<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// The sum of each group.
    pub sums: &'a [f32],
}

/// At most [`MAX_ROWS`] rows of inputs, prepared as floats or as 16-bit integers with a scale for a
/// few adjacent inputs. The latter stand word of the matrix after word, for a word row after row.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "whole numbers are for AVX2 and dotprod")
)]
pub(crate) struct InputPanel<'a> {
    /// How many.
    pub rows: usize,
    /// The elements row after row; empty where they are integers.
    pub values: &'a [f32],
    /// 16-bit integers `[words, rows, inputs_per_sum]`, in the order of [`pair_index`] (with
    /// dotprod as bytes, see `neon/qgemv_dotprod.rs`), or empty.
    pub quants: &'a [i16],
    /// Their scales, one for a few adjacent inputs ([`inputs_per_scale`]), `[words, rows]`.
    pub scales: &'a [f32],
    /// The sum of each group, `[rows, groups]`. For integers it is the sum of the rounded inputs.
    /// So a rounding error counts times the weight, not times the code, which is never negative.
    pub sums: &'a [f32],
}

impl<'a> InputPanel<'a> {
    /// Row `i` of a panel of floats with rows of `k` elements in `groups` groups.
    pub(crate) fn row(self, i: usize, k: usize, groups: usize) -> InputRow<'a> {
        InputRow {
            values: &self.values[i * k..(i + 1) * k],
            sums: &self.sums[i * groups..(i + 1) * groups],
        }
    }
}

/// A panel while it is prepared; see [`InputPanel`].
pub(crate) struct InputPanelMut<'a> {
    pub values: &'a mut [f32],
    pub quants: &'a mut [i16],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

/// Adjacent inputs that share a scale, so that a large input leaves others precise. Their products
/// with codes of this width are summed exactly in one lane.
pub(crate) const fn inputs_per_sum(bits: u32) -> usize {
    if bits == 8 { 4 } else { 8 }
}

/// The place of an input among its neighbors. Shifts of a word bring pairs of its codes that are
/// half a word apart into 16-bit lanes.
pub(crate) const fn pair_index(i: usize, near: usize) -> usize {
    2 * (i % (near / 2)) + i / (near / 2)
}

/// The largest integer.
pub(crate) const MAX_QUANT: f32 = 32_767.0;
