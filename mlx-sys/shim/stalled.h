// What MLX leaves behind when it fails in the middle of an asynchronous evaluation.
#pragma once

#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

// An asynchronous evaluation attaches an event to every array that it starts, and signals it when it has
// started all of them. If it fails before, the event is never signaled, and whoever reads one of those
// arrays waits forever (ml-explore/mlx#3675). This looks at all arrays of the graphs that lead to
// `arrays`: of those that are not there yet it waits for the stream, and takes away the event if that has
// not helped, since what was to be waited for is done by then. Nonzero, with a message, if it fails.
int rust_mlx_release_stalled(mlx_vector_array arrays);

#ifdef __cplusplus
}
#endif
