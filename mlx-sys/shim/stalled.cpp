// See stalled.h.
#include "stalled.h"

#include <cstdint>
#include <exception>
#include <unordered_set>
#include <vector>

#include "mlx/c/error.h"
#include "mlx/mlx.h"

namespace {

namespace mx = mlx::core;

// Detaches the event by assignment, because `detach_event` needs a symbol that MLX 0.32 does not
// export.
void take_event(const mx::array& a) {
  a.event() = mx::Event{};
}

void release(const mx::array& a) {
  if (!a.event().valid()) {
    return;
  }
  if (a.status() == mx::array::Status::unscheduled) {
    // Otherwise the next evaluation would use the event of the failed evaluation.
    take_event(a);
    return;
  }
  if (a.is_available()) {
    return;
  }
  mx::synchronize(a.event().stream());
  if (!a.is_available()) {
    take_event(a);
    a.set_status(mx::array::Status::available);
  }
}

} // namespace

extern "C" int rust_mlx_release_stalled(mlx_vector_array arrays) {
  try {
    std::vector<mx::array> left = *static_cast<std::vector<mx::array>*>(arrays.ctx);
    std::unordered_set<std::uintptr_t> seen;
    while (!left.empty()) {
      auto a = std::move(left.back());
      left.pop_back();
      if (!seen.insert(a.id()).second) {
        continue;
      }
      release(a);
      for (const auto& sibling : a.siblings()) {
        release(sibling);
        seen.insert(sibling.id());
      }
      for (const auto& input : a.inputs()) {
        left.push_back(input);
      }
    }
    return 0;
  } catch (std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}
