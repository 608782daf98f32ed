//! Operands of the register-tile micro-kernel, as addresses and strides.

/// Columns of a tile, and rows of inputs in a panel.
pub const LANES: usize = 16;

/// One factor of a tile: element `(row, i)` stands at `data + row * row_step + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub data: *const f32,
    pub row_step: usize,
    pub step: usize,
}

/// The other one: `LANES` neighbors for each `i`, at `data + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct Right {
    pub data: *const f32,
    pub step: usize,
}

/// The product: `LANES` neighbors for each row, at `data + row * row_step`.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub data: *mut f32,
    pub row_step: usize,
    /// What is there is added to, rather than replaced.
    pub adds: bool,
}

/// A row of inputs, and what its elements are multiplied with.
pub(crate) type Scaled<'a> = (&'a [f32], f32);
