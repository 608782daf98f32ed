// Repairs arrays after MLX failed in the middle of an asynchronous evaluation.
#pragma once

#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

// An asynchronous evaluation attaches an event to every array that it starts. It signals the event
// when it has started all of them. If the evaluation fails before that, the event is never
// signaled, and a reader of one of those arrays waits forever (ml-explore/mlx#3675). This function
// visits all arrays of the graphs that lead to `arrays`. For each array that is not available, it
// waits for the array's stream. If the array is still not available, its work has ended but the
// event was not signaled, so the function removes the event. Returns nonzero after passing a
// message to mlx-c's error handler if it fails.
int rust_mlx_release_stalled(mlx_vector_array arrays);

#ifdef __cplusplus
}
#endif
