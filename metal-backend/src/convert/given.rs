//! Values that replace values of the source in a conversion, and formats of matrices. Learned
//! quantization (`quant/`) computes them from a loaded model.

use std::collections::BTreeMap;

/// Formats, matrices and vectors that replace those of the source.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// Bits and group size of a matrix, by its path (the name without `.weight`).
    pub formats: BTreeMap<String, (i32, i32)>,
    /// The quantized form of a matrix, by its path.
    pub packed: BTreeMap<String, Packed>,
    /// The values of a tensor that is not quantized, by its name.
    pub dense: BTreeMap<String, Vec<f32>>,
}

/// A matrix in the affine format. Its scales and biases are exactly representable in the stored
/// type.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Packed {
    /// Packed codes, row by row.
    pub weight: Vec<u32>,
    /// One scale for each group.
    pub scales: Vec<f32>,
    /// One bias for each group.
    pub biases: Vec<f32>,
}
