// Measures the size of a graph before MLX walks the graph by recursion.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sets `res` to whether more than `limit` arrays lead to `outputs`, including `outputs`. Arrays
// that lead to `inputs` do not count. MLX's transforms recurse along such a graph, with at most one
// level for each array. Returns 0, or 1 after passing a message to mlx-c's error handler.
int rust_mlx_graph_exceeds(
    bool* res,
    mlx_vector_array outputs,
    mlx_vector_array inputs,
    size_t limit);

#ifdef __cplusplus
}
#endif
