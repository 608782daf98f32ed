// An operation whose CPU work is a function of the caller's: how Rust kernels enter an MLX graph.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mlx/c/array.h"
#include "mlx/c/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

// An input while the work runs: row-contiguous elements (copied where they are not), unless strided ones were asked
// for. They are aligned for their type (copied where they are not).
typedef struct rust_mlx_view_ {
  const void* data;
  // Elements.
  size_t size;
  size_t ndim;
  const int* shape;
  // In elements; none is negative.
  const int64_t* strides;
} rust_mlx_view;

// The work: reads the inputs, fills the whole output. Runs on MLX's stream thread and must not unwind.
typedef void (*rust_mlx_run)(
    const void* payload,
    const rust_mlx_view* inputs,
    size_t num_inputs,
    void* output);

// What the operation computes, for its derivatives and for batches, which MLX's own operations compute.
typedef enum rust_mlx_meaning_kind_ {
  // Anything: it has neither.
  RUST_MLX_OPAQUE = 0,
  // Inputs x [.., k] and w [n, k]: x times w transposed.
  RUST_MLX_DENSE_PRODUCT = 1,
  // Inputs x [.., k], and w, scales, biases of a matrix [n, k] quantized in affine mode, each [bands, .., 8] with
  // eight rows side by side, the last ones filled up: likewise.
  RUST_MLX_QUANTIZED_PRODUCT = 2,
} rust_mlx_meaning_kind;

typedef struct rust_mlx_meaning_ {
  // A rust_mlx_meaning_kind.
  int kind;
  // Of a quantized matrix.
  int rows;
  int group_size;
  int bits;
} rust_mlx_meaning;

// Adds the operation to the graph of `stream`, which must be on the CPU. The output has `shape` and
// `dtype`. The work sees copies of inputs that are not row-contiguous when the graph is evaluated; from number
// `first_strided` on, only of those whose last axis has other than neighbors, or that have a negative stride.
// With `in_place` the output, of the first input's shape and type, begins as that input, in its memory where nobody
// else needs it; the work must not read that input. `payload` is freed with `drop` once nobody needs it, also when this fails. Returns 0 and sets `res`, or 1 with the
// message given to mlx-c's error handler.
int rust_mlx_host_op(
    mlx_array* res,
    const mlx_array* inputs,
    size_t num_inputs,
    const int* shape,
    size_t ndim,
    mlx_dtype dtype,
    rust_mlx_meaning meaning,
    rust_mlx_run run,
    void* payload,
    void (*drop)(void*),
    size_t first_strided,
    bool in_place,
    mlx_stream stream);

// Sets `res` to an array of `shape` and `dtype` that is there already and whose elements have no
// particular value. Returns 0, or 1 with the message given to mlx-c's error handler.
int rust_mlx_uninitialized(mlx_array* res, const int* shape, size_t ndim, mlx_dtype dtype);

#ifdef __cplusplus
}
#endif
