// An MLX operation whose CPU work is a function of the caller. Rust kernels become a part of an MLX
// graph through it.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mlx/c/array.h"
#include "mlx/c/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

// An input while the work runs. The elements are row-contiguous, unless strided ones were
// requested, and aligned for their type. Inputs that are not so are copied first.
typedef struct rust_mlx_view_ {
  const void* data;
  // The number of elements.
  size_t size;
  size_t ndim;
  const int* shape;
  // In elements. No stride is negative.
  const int64_t* strides;
} rust_mlx_view;

// The work reads the inputs and fills the whole output. It runs on MLX's stream thread and must not
// unwind.
typedef void (*rust_mlx_run)(
    const void* payload,
    const rust_mlx_view* inputs,
    size_t num_inputs,
    void* output);

// What the operation computes. MLX's own operations then compute its derivatives and batches.
typedef enum rust_mlx_meaning_kind_ {
  // Any other computation, which has neither derivatives nor batches.
  RUST_MLX_OPAQUE = 0,
  // Inputs x [.., k] and w [n, k]; computes x times w transposed.
  RUST_MLX_DENSE_PRODUCT = 1,
  // Inputs x [.., k], and w, scales and biases of a matrix [n, k] that is quantized in affine mode.
  // Each of these three is [row blocks, .., 8], with eight rows interleaved and the last block
  // padded. Computes x times the matrix transposed.
  RUST_MLX_QUANTIZED_PRODUCT = 2,
} rust_mlx_meaning_kind;

typedef struct rust_mlx_meaning_ {
  // A rust_mlx_meaning_kind.
  int kind;
  // The fields of a quantized matrix.
  int rows;
  int group_size;
  int bits;
} rust_mlx_meaning;

// Adds the operation to the graph of `stream`, which must be on the CPU. The output has `shape` and
// `dtype`. When the graph is evaluated, inputs that are not row-contiguous are copied first. From
// index `first_strided` on, only inputs are copied whose last axis is not contiguous or that have a
// negative stride. With `in_place`, the output has the first input's shape and type, and starts
// with its values. It reuses that input's memory if nothing else needs it. The work must not read
// that input. `payload` is freed with `drop` when nothing needs it any more, also if this call
// fails. Returns 0 and sets `res`, or returns 1 after passing a message to mlx-c's error handler.
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

// Sets `res` to an evaluated array of `shape` and `dtype` whose elements are uninitialized. Returns
// 0, or 1 after passing a message to mlx-c's error handler.
int rust_mlx_uninitialized(mlx_array* res, const int* shape, size_t ndim, mlx_dtype dtype);

#ifdef __cplusplus
}
#endif
