//! Values that a conversion writes instead of values from its source, and the matrices that a
//! conversion quantizes. Learned quantization (`quant/`) computes such values from a loaded model.

use std::collections::BTreeMap;

/// The formats, matrices and vectors that replace those of the source.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// Bits and group size of a matrix, by its path (the name without `.weight`).
    pub formats: BTreeMap<String, (i32, i32)>,
    /// The quantized form of a matrix, by its path.
    pub packed: BTreeMap<String, Packed>,
    /// The values of a tensor that stays dense, by its name.
    pub dense: BTreeMap<String, Vec<f32>>,
}

/// A matrix in the affine mode. Scales and biases are exact in the type in which they are stored.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Packed {
    /// Packed codes, row by row.
    pub weight: Vec<u32>,
    /// One scale for each group.
    pub scales: Vec<f32>,
    /// One bias for each group.
    pub biases: Vec<f32>,
}
