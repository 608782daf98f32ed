//! Operands of the micro-kernel, as addresses with strides.

/// The number of columns of a tile, and of input rows of a panel.
pub const LANES: usize = 16;

/// The first operand of a tile: element `(row, i)` is at `data + row * row_stride + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct TileA {
    pub data: *const f32,
    pub row_stride: usize,
    pub stride: usize,
}

/// The second operand: `LANES` adjacent elements for each `i`, at `data + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct TileB {
    pub data: *const f32,
    pub stride: usize,
}

/// The result: `LANES` adjacent elements for each row, at `data + row * row_stride`.
#[derive(Clone, Copy)]
pub(crate) struct TileC {
    pub data: *mut f32,
    pub row_stride: usize,
    /// Whether to add to the existing values instead of replacing them.
    pub accumulate: bool,
}

/// The outputs of a tile of rows with a micro-panel: adjacent elements for each row, at
/// `data + row * row_stride`.
#[cfg(target_arch = "x86_64")]
pub(crate) struct ColumnOutput {
    pub data: *mut f32,
    pub row_stride: usize,
    /// The bias added to each row.
    pub bias: Option<*const f32>,
    /// An array that is added to the outputs. It has the row stride of the outputs.
    pub residual: Option<*const f32>,
}

/// The elements to prefetch while a tile is computed: at column `i`, the `step` elements from
/// `data + i * step` on. The addresses need not be valid.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub data: *const f32,
    pub step: usize,
}

/// An input row and its factor.
pub(crate) type ScaledRow<'a> = (&'a [f32], f32);

/// For each query of a panel, the maximum score of a block of keys, and the sum of exponentials
/// relative to it.
pub(crate) type BlockSoftmax = ([f32; LANES], [f32; LANES]);
