// See statics.h.
#include "statics.h"

#include <cstdlib>
#include <exception>

#include "mlx/allocator.h"
#include "mlx/compile_impl.h"
#include "mlx/mlx.h"
#include "mlx/scheduler.h"
#include "mlx/version.h"
#if __has_include("mlx/backend/cpu/encoder.h")
#include "mlx/backend/cpu/encoder.h"
#define RUST_MLX_HAS_ENCODER 1
#endif

extern "C" int rust_mlx_make_statics(void (*handler)(void)) {
  namespace mx = mlx::core;
  try {
    mx::allocator::allocator();
    std::atexit(handler);
    mx::scheduler::scheduler();
    std::atexit(handler);
#if MLX_VERSION_NUMERIC >= 32000
    // In this version, default streams belong to a thread. Functions read from files run on the
    // first stream.
    auto stream = mx::new_thread_unsafe_stream(mx::Device(mx::Device::cpu));
#else
    auto stream = mx::default_stream(mx::Device(mx::Device::cpu));
#endif
#ifdef RUST_MLX_HAS_ENCODER
    mx::cpu::get_command_encoder(stream);
    std::atexit(handler);
#endif
#if MLX_VERSION_NUMERIC >= 32000
    // In this version, the cache belongs to a thread.
    mx::detail::compile_clear_cache(mx::detail::compile_cache());
#else
    mx::detail::compile_clear_cache();
#endif
    std::atexit(handler);
    // A vjp creates the static stack of transforms, which cannot be accessed directly from outside
    // of MLX.
    auto one = mx::array(1.0f);
    mx::vjp([](const mx::array& x) { return x; }, one, one);
    std::atexit(handler);
    return 0;
  } catch (std::exception&) {
    return 1;
  }
}
