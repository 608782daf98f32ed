//! Elements of a dense matrix in memory. This file has only types and index functions.

use std::ops::Range;

use crate::work::Input;

/// The type of a matrix's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseType {
    /// float32.
    F32,
    /// float16.
    F16,
    /// bfloat16.
    Bf16,
}

/// The elements of a dense matrix, by type.
#[derive(Clone, Copy)]
pub(crate) enum DenseView<'a> {
    F32(&'a [f32]),
    /// float16, as raw bits.
    F16(&'a [u16]),
    /// bfloat16, as raw bits.
    Bf16(&'a [u16]),
}

/// The element types as constants, for generic functions.
#[cfg(target_arch = "x86_64")]
impl DenseView<'_> {
    pub(crate) const F32_ID: u32 = 0;
    pub(crate) const F16_ID: u32 = 1;
    pub(crate) const BF16_ID: u32 = 2;
}

impl<'a> DenseView<'a> {
    /// The elements of an input; empty without an input.
    ///
    /// # Safety
    /// The elements must have the type `number`.
    pub(crate) unsafe fn new(number: DenseType, input: Option<&'a Input>) -> Self {
        // SAFETY: the caller guarantees the type. Elements of both 16-bit types can be read as raw
        // bits.
        unsafe {
            match number {
                DenseType::F32 => Self::F32(input.map(|i| i.as_slice()).unwrap_or_default()),
                DenseType::F16 => Self::F16(input.map(|i| i.as_slice()).unwrap_or_default()),
                DenseType::Bf16 => Self::Bf16(input.map(|i| i.as_slice()).unwrap_or_default()),
            }
        }
    }

    /// A range of the elements.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[range]),
            Self::F16(all) => Self::F16(&all[range]),
            Self::Bf16(all) => Self::Bf16(&all[range]),
        }
    }

    /// The number of elements.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::F16(all) | Self::Bf16(all) => all.len(),
        }
    }

    /// The addresses of the elements.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn bytes(self) -> Range<*const u8> {
        let (start, size) = match self {
            Self::F32(all) => (all.as_ptr().cast::<u8>(), size_of_val(all)),
            Self::F16(all) | Self::Bf16(all) => (all.as_ptr().cast(), size_of_val(all)),
        };
        start..start.wrapping_add(size)
    }
}

/// Input rows for few-row kernels, at most
/// [`MAX_ROWS`](crate::layout::input_panel::MAX_ROWS).
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseInputs<'a> {
    /// The number of rows.
    pub rows: usize,
    /// The number of elements of a row.
    pub k: usize,
    /// The elements row by row, or a panel `[k / lanes, places, lanes]`. A panel has one place for
    /// each row and possibly unused places; see [`places`](crate::simd::dense_rows::places). Unused
    /// places, and the rest of the last vector, are zero.
    pub values: &'a [f32],
}

/// The sizes of a register tile and of its packed operands. A vector has adjacent columns of one
/// row. Inputs are packed in panels `[k / lanes, inputs, lanes]`. Matrix rows are packed in blocks
/// of some columns, each `[rows of the matrix / rows, columns / lanes, rows, lanes]`. Missing
/// elements of the last vector, panel or tile are zero.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseTile {
    /// The number of input rows.
    pub inputs: usize,
    /// The number of matrix rows.
    pub rows: usize,
    /// The number of elements of a vector.
    pub lanes: usize,
}

#[cfg(target_arch = "x86_64")]
impl DenseTile {
    /// The number of elements of a panel of inputs with `k` columns.
    pub(crate) fn panel_len(self, k: usize) -> usize {
        k.next_multiple_of(self.lanes) * self.inputs
    }

    /// The number of elements of `rows` packed matrix rows with `k` columns.
    pub(crate) fn matrix_len(self, rows: usize, k: usize) -> usize {
        k.next_multiple_of(self.lanes) * rows.next_multiple_of(self.rows)
    }
}
