//! Lists the operations of random programs, by name and kind.

use std::sync::LazyLock;

pub use crate::table::Rounding as Kind;
use crate::table::{self, Call, Slope, of_one, of_two};

pub const VIEWS: [&str; 20] = [
    "transpose_axes",
    "slice",
    "slice",
    "slice",
    "broadcast_to",
    "expand_dims",
    "squeeze",
    "reshape",
    "reshape",
    "flatten",
    "split",
    "split_at",
    "as_strided",
    "swap_axes",
    "move_axis",
    "diagonal",
    "unflatten",
    "view",
    "squeeze_axis",
    "slice_axis",
];
/// Operations of one array that are not in [`UNARY`]. They need a definite matrix, which [`OTHER`]
/// makes from a square one first.
const NOT_ALONE: [&str; 2] = ["inv", "pinv"];

/// The functions of one array.
pub static UNARY: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let further = ["round", "nan_to_num"];
    let all = of_one().map(|(o, _)| o.name);
    all.chain(further)
        .filter(|n| !NOT_ALONE.contains(n))
        .collect()
});

/// The functions of two arrays with shapes that broadcast.
pub static BINARY: LazyLock<Vec<&str>> = LazyLock::new(|| {
    // The shapes of these operations do not broadcast, so they are in `OTHER`.
    let products = ["inner", "matmul", "outer", "solve"];
    let further = ["is_close", "divmod"];
    let all = of_two().map(|(o, _)| o.name);
    all.chain(further)
        .filter(|n| !products.contains(n))
        .collect()
});

/// The functions of axes.
pub static REDUCE: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let further = ["var", "std", "norm", "argmax"];
    let all = table::OPERATIONS.iter();
    let all = all.filter(|o| matches!(o.call, Call::Reduce(_)));
    all.map(|o| o.name).chain(further).collect()
});

/// The functions of one axis.
pub static AXIS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let further = [
        "partition",
        "argpartition",
        "topk",
        "argmin",
        "argmax",
        "roll",
        "repeat",
    ];
    let all = table::OPERATIONS.iter();
    let all = all.filter(|o| matches!(o.call, Call::Scan(_) | Call::Axis(_)));
    let all = all.map(|o| o.name).filter(|n| !VIEWS.contains(n));
    all.chain(further).collect()
});

pub const OTHER: [&str; 54] = [
    "where",
    "clip",
    "astype",
    "take",
    "take_clamped",
    "take_along_axis",
    "put_along_axis",
    "gather",
    "scatter",
    "slice_update",
    "slice_at",
    "slice_update_at",
    "masked_scatter",
    "scatter_add_axis",
    "concatenate",
    "stack",
    "pad",
    "tile",
    "matmul",
    "matmul",
    "addmm",
    "inner",
    "outer",
    "tensordot",
    "einsum",
    "tril",
    "triu",
    "conv",
    "conv",
    "conv_transpose",
    "fft",
    "rfft",
    "irfft",
    "fftn",
    "rfftn",
    "irfftn",
    "fftshift",
    "qr",
    "inv",
    "solve",
    "cholesky",
    "singular_values",
    "cross",
    "lu_factor",
    "rms_norm",
    "layer_norm",
    "rope",
    "attention",
    "quantize",
    "quantized_matmul",
    "gather_mm",
    "block_masked_mm",
    "segmented_mm",
    "hadamard",
];
pub const RANDOM: [&str; 4] = ["bernoulli", "categorical", "uniform", "permutation"];

pub fn kind(name: &str) -> Kind {
    if let Some(operation) = table::named(name) {
        return operation.rounding;
    }
    match name {
        "var" | "std" | "norm" | "addmm" | "tensordot" | "einsum" | "conv" | "conv_transpose"
        | "rms_norm" | "layer_norm" | "attention" | "hadamard" | "quantized_matmul"
        | "gather_mm" | "block_masked_mm" | "segmented_mm" | "scatter" | "scatter_add_axis" => {
            Kind::Sum
        }
        "qr" | "cholesky" | "lu_factor" => Kind::Long,
        "cross" | "rope" | "divmod" => Kind::Element,
        _ => Kind::Exact,
    }
}

/// Whether an operation is differentiable wherever it is defined.
pub fn is_smooth(name: &str) -> bool {
    if let Some(operation) = table::named(name) {
        return operation.slope == Slope::Everywhere;
    }
    matches!(
        name,
        "transpose_axes"
            | "slice"
            | "broadcast_to"
            | "expand_dims"
            | "reshape"
            | "split"
            | "split_at"
            | "as_strided"
            | "diagonal"
            | "unflatten"
            | "slice_axis"
            | "var"
            | "roll"
            | "where"
            | "take"
            | "take_clamped"
            | "take_along_axis"
            | "put_along_axis"
            | "gather"
            | "scatter"
            | "slice_update"
            | "slice_at"
            | "slice_update_at"
            | "masked_scatter"
            | "scatter_add_axis"
            | "concatenate"
            | "stack"
            | "pad"
            | "tile"
            | "addmm"
            | "tensordot"
            | "einsum"
            | "tril"
            | "triu"
            | "cross"
            | "rms_norm"
            | "layer_norm"
            | "rope"
            | "attention"
            | "block_masked_mm"
            | "std"
            | "norm"
            | "segmented_mm"
            | "clip"
            | "hadamard"
    )
}
