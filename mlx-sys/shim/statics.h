// MLX's static objects, and a handler that runs before their destructors.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

// Makes the static objects that most of MLX uses, one after another, and registers `handler` with
// atexit after each. MLX makes some of them while it evaluates, and a process may end meanwhile. Returns
// 0, or 1 when some could not be made; they fail again where they are used.
int rust_mlx_make_statics(void (*handler)(void));

#ifdef __cplusplus
}
#endif
