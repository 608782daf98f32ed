//! Operands of the micro-kernel, as addresses and strides.

/// Columns of a tile, and rows of inputs in a panel.
pub const LANES: usize = 16;

/// One factor of a tile: element `(row, i)` stands at `data + row * row_stride + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct TileA {
    pub data: *const f32,
    pub row_stride: usize,
    pub stride: usize,
}

/// The other one: `LANES` neighbors for each `i`, at `data + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct TileB {
    pub data: *const f32,
    pub stride: usize,
}

/// The product: `LANES` neighbors for each row, at `data + row * row_stride`.
#[derive(Clone, Copy)]
pub(crate) struct TileC {
    pub data: *mut f32,
    pub row_stride: usize,
    /// Adds to the values there instead of replacing them.
    pub accumulate: bool,
}

/// A row of inputs, and what its elements are multiplied with.
pub(crate) type ScaledRow<'a> = (&'a [f32], f32);
