//! The operations of random programs by name and kind.

/// How results of the same operation on the same values in another layout may differ.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    /// Not at all.
    Exact,
    /// By the rounding of each element.
    Element,
    /// By the order of sums over elements.
    Sum,
    /// By the rounding of an algorithm.
    Long,
}

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
pub const UNARY: [&str; 44] = [
    "abs",
    "negative",
    "square",
    "sqrt",
    "exp",
    "log",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "floor",
    "ceil",
    "sign",
    "erf",
    "reciprocal",
    "rsqrt",
    "log1p",
    "expm1",
    "arctan",
    "logical_not",
    "is_nan",
    "is_finite",
    "real",
    "imag",
    "conjugate",
    "bitwise_invert",
    "round",
    "nan_to_num",
    "silu",
    "arcsinh",
    "cosh",
    "sinh",
    "tan",
    "log2",
    "log10",
    "degrees",
    "radians",
    "erfinv",
    "is_inf",
    "contiguous",
    "copy",
    "arccos",
    "arcsin",
    "arctanh",
];
pub const BINARY: [&str; 27] = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "maximum",
    "minimum",
    "logaddexp",
    "equal",
    "not_equal",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "logical_and",
    "logical_or",
    "floor_divide",
    "remainder",
    "power",
    "arctan2",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "left_shift",
    "right_shift",
    "is_close",
    "divmod",
    "kron",
];
pub const REDUCE: [&str; 14] = [
    "sum",
    "prod",
    "mean",
    "max",
    "min",
    "all",
    "any",
    "logsumexp",
    "var",
    "std",
    "median",
    "softmax",
    "norm",
    "argmax",
];
pub const AXIS: [&str; 16] = [
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "sort",
    "argsort",
    "partition",
    "argpartition",
    "topk",
    "argmin",
    "argmax",
    "roll",
    "repeat",
    "sort_flat",
    "argsort_flat",
];
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
    match name {
        "sum" | "mean" | "prod" | "var" | "std" | "norm" | "logsumexp" | "softmax" | "cumsum"
        | "cumprod" | "logcumsumexp" | "matmul" | "addmm" | "inner" | "tensordot" | "einsum"
        | "conv" | "conv_transpose" | "rms_norm" | "layer_norm" | "attention" | "hadamard"
        | "quantized_matmul" | "gather_mm" | "block_masked_mm" | "segmented_mm" | "scatter"
        | "scatter_add_axis" | "outer" | "kron" | "median" => Kind::Sum,
        "fft" | "rfft" | "irfft" | "fftn" | "rfftn" | "irfftn" | "qr" | "inv" | "solve"
        | "cholesky" | "singular_values" | "lu_factor" => Kind::Long,
        "exp" | "log" | "sin" | "cos" | "tanh" | "sigmoid" | "erf" | "reciprocal" | "rsqrt"
        | "log1p" | "expm1" | "arctan" | "silu" | "arcsinh" | "cosh" | "sinh" | "tan" | "log2"
        | "log10" | "erfinv" | "logaddexp" | "divide" | "power" | "arctan2" | "sqrt" | "cross"
        | "rope" | "arccos" | "arcsin" | "arctanh" | "square" | "multiply" | "abs"
        | "remainder" | "floor_divide" | "divmod" => Kind::Element,
        _ => Kind::Exact,
    }
}

/// Operations that are smooth wherever they are defined.
pub fn is_smooth(name: &str) -> bool {
    matches!(
        name,
        "transpose_axes"
            | "slice"
            | "broadcast_to"
            | "expand_dims"
            | "squeeze"
            | "reshape"
            | "flatten"
            | "split"
            | "split_at"
            | "as_strided"
            | "swap_axes"
            | "move_axis"
            | "diagonal"
            | "unflatten"
            | "squeeze_axis"
            | "slice_axis"
            | "negative"
            | "square"
            | "exp"
            | "sin"
            | "cos"
            | "tanh"
            | "sigmoid"
            | "arctan"
            | "silu"
            | "arcsinh"
            | "cosh"
            | "sinh"
            | "degrees"
            | "radians"
            | "contiguous"
            | "copy"
            | "add"
            | "subtract"
            | "multiply"
            | "logaddexp"
            | "sum"
            | "prod"
            | "mean"
            | "logsumexp"
            | "var"
            | "softmax"
            | "max"
            | "min"
            | "cumsum"
            | "cumprod"
            | "logcumsumexp"
            | "sort"
            | "roll"
            | "repeat"
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
            | "matmul"
            | "addmm"
            | "inner"
            | "outer"
            | "tensordot"
            | "einsum"
            | "tril"
            | "triu"
            | "cross"
            | "kron"
            | "rms_norm"
            | "layer_norm"
            | "rope"
            | "attention"
            | "block_masked_mm"
            | "maximum"
            | "minimum"
            | "abs"
            | "divide"
            | "topk"
            | "sort_flat"
            | "cummax"
            | "cummin"
            | "median"
            | "std"
            | "norm"
            | "segmented_mm"
            | "expm1"
            | "clip"
            | "hadamard"
    )
}
