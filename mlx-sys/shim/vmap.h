// Vectorization like MLX's vmap_replace, but it checks the results of MLX's rules.
#pragma once

#include <stddef.h>

#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sets `res` to the outputs of a traced function over a batch. `traced_inputs` and `traced_outputs`
// come from mlx_detail_vmap_trace. `inputs` have the batch along `in_axes`; -1 means no batch. The
// batch of output i becomes axis `out_axes[i]`. An output with -1 must not depend on the batch.
//
// MLX does not check the results of its operations' rules. With a wrong result, the next operation
// reads axes that do not exist, or a kernel writes out of bounds. Here each result must have the
// shape of a single example plus the batch. A result with another shape is replaced by one
// operation for each example. Scatters have their own rule. For an empty batch no rule runs, and
// the results are empty. Returns 0, or 1 after passing a message to mlx-c's error handler.
int rust_mlx_vmap_replace(
    mlx_vector_array* res,
    mlx_vector_array inputs,
    mlx_vector_array traced_inputs,
    mlx_vector_array traced_outputs,
    const int* in_axes,
    size_t num_in_axes,
    const int* out_axes,
    size_t num_out_axes);

#ifdef __cplusplus
}
#endif
