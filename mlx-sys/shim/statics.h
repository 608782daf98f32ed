// Creates MLX's static objects, and registers a handler that runs before their destructors.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

// Creates the static objects that most of MLX uses, one after another, and registers `handler` with
// atexit after each. MLX would otherwise create some of them during an evaluation, while the
// process may end. Returns 0, or 1 if some could not be created; they fail again where they are
// used.
int rust_mlx_make_statics(void (*handler)(void));

#ifdef __cplusplus
}
#endif
