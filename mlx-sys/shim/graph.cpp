// See graph.h.
#include "graph.h"

#include <cstdint>
#include <exception>
#include <unordered_set>
#include <vector>

#include "mlx/c/error.h"
#include "mlx/mlx.h"

namespace {

namespace mx = mlx::core;

const std::vector<mx::array>& get(mlx_vector_array arrays) {
  return *static_cast<const std::vector<mx::array>*>(arrays.ctx);
}

bool exceeds(
    const std::vector<mx::array>& outputs,
    const std::vector<mx::array>& inputs,
    size_t limit) {
  std::unordered_set<std::uintptr_t> seen;
  for (const auto& a : inputs) {
    seen.insert(a.id());
  }
  size_t count = 0;
  // Pointers to arrays that the graph owns. The graph does not change during the walk.
  std::vector<const mx::array*> left;
  auto visit = [&](const mx::array& a) {
    if (seen.insert(a.id()).second) {
      count++;
      left.push_back(&a);
    }
  };
  for (const auto& a : outputs) {
    visit(a);
  }
  while (!left.empty() && count <= limit) {
    const auto& a = *left.back();
    left.pop_back();
    for (const auto& input : a.inputs()) {
      visit(input);
    }
  }
  return count > limit;
}

} // namespace

extern "C" int rust_mlx_graph_exceeds(
    bool* res,
    mlx_vector_array outputs,
    mlx_vector_array inputs,
    size_t limit) {
  try {
    *res = exceeds(get(outputs), get(inputs), limit);
    return 0;
  } catch (std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}
