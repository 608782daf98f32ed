//! Handwritten declarations of `shim/graph.h`, `shim/host_op.h`, `shim/stalled.h`, `shim/statics.h`
//! and `shim/vmap.h`, which do not depend on mlx-c's version.

use std::ffi::{c_int, c_void};

use crate::{mlx_array, mlx_dtype, mlx_stream, mlx_vector_array};

/// An input of an operation while its work runs. The elements are row-contiguous, unless strided
/// ones were requested.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rust_mlx_view {
    /// The first element.
    pub data: *const c_void,
    /// The number of elements.
    pub size: usize,
    /// The number of axes.
    pub ndim: usize,
    /// The length of each axis.
    pub shape: *const c_int,
    /// The stride along each axis, in elements; never negative.
    pub strides: *const i64,
}

/// The work of an operation: reads the inputs, fills the whole output, and never unwinds.
pub type rust_mlx_run = unsafe extern "C" fn(
    payload: *const c_void,
    inputs: *const rust_mlx_view,
    num_inputs: usize,
    output: *mut c_void,
);

/// An operation without gradients and without a rule for batches.
pub const RUST_MLX_OPAQUE: c_int = 0;
/// Computes `x w^T` for `x [.., k]` and `w [n, k]`.
pub const RUST_MLX_DENSE_PRODUCT: c_int = 1;
/// Computes `x w^T` for `x [.., k]`, and for weight, scales and biases of a matrix `w [n, k]` that
/// is quantized in affine mode. Each of these three is `[row blocks, .., 8]`, with eight rows
/// interleaved and the last block padded.
pub const RUST_MLX_QUANTIZED_PRODUCT: c_int = 2;

/// What an operation computes. Gradients and batches need this.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rust_mlx_meaning {
    /// One of the `RUST_MLX_` constants.
    pub kind: c_int,
    /// The number of rows of a quantized matrix.
    pub rows: c_int,
    /// The number of elements of a quantized matrix that share a scale.
    pub group_size: c_int,
    /// The number of bits of an element of a quantized matrix.
    pub bits: c_int,
}

functions! {
    /// Adds an operation to a graph whose CPU work is `run`; see the header.
    pub fn rust_mlx_host_op(
        res: *mut mlx_array,
        inputs: *const mlx_array,
        num_inputs: usize,
        shape: *const c_int,
        ndim: usize,
        dtype: mlx_dtype,
        meaning: rust_mlx_meaning,
        run: rust_mlx_run,
        payload: *mut c_void,
        drop: unsafe extern "C" fn(*mut c_void),
        first_strided: usize,
        in_place: bool,
        stream: mlx_stream,
    ) -> c_int;

    /// An evaluated array with uninitialized elements; see the header.
    pub fn rust_mlx_uninitialized(
        res: *mut mlx_array,
        shape: *const c_int,
        ndim: usize,
        dtype: mlx_dtype,
    ) -> c_int;

    /// Creates MLX's static objects and registers a handler that runs before their destructors; see
    /// the header.
    pub fn rust_mlx_make_statics(handler: extern "C" fn()) -> c_int;

    /// Whether more than `limit` arrays are between `inputs` and `outputs`; see the header.
    pub fn rust_mlx_graph_exceeds(
        res: *mut bool,
        outputs: mlx_vector_array,
        inputs: mlx_vector_array,
        limit: usize,
    ) -> c_int;

    /// Handles arrays that `arrays` depend on and that would wait forever after a failed
    /// asynchronous evaluation; see the header.
    pub fn rust_mlx_release_stalled(arrays: mlx_vector_array) -> c_int;

    /// The outputs of a traced function over a batch, with each result checked; see the header.
    pub fn rust_mlx_vmap_replace(
        res: *mut mlx_vector_array,
        inputs: mlx_vector_array,
        traced_inputs: mlx_vector_array,
        traced_outputs: mlx_vector_array,
        in_axes: *const c_int,
        num_in_axes: usize,
        out_axes: *const c_int,
        num_out_axes: usize,
    ) -> c_int;
}
