// Vectorization: what MLX's vmap_replace does, with the results of its rules checked.
#pragma once

#include <stddef.h>

#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sets `res` to the outputs of a traced function over a batch. `traced_inputs` and `traced_outputs` come from
// mlx_detail_vmap_trace; `inputs` hold the batch along `in_axes`, -1 for none. The batch of output i becomes axis
// `out_axes[i]`; an output with -1 must not depend on the batch.
//
// MLX does not check what the rules of its operations return. The next operation then reads axes that are not there,
// or a kernel writes where no memory is. Here each result must have the shape of a single example plus the batch. A
// result that has not is replaced by one operation for each example. Scatters have a rule of their own. An empty batch
// runs no rule: its results are empty.
// Returns 0, or 1 with the message given to mlx-c's error handler.
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
