// See vmap.h.
#include "vmap.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/c/error.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

// An array and the axis of its batch; -1 means no batch.
struct Mapped {
  mx::array value;
  int axis;
};

// The maximum number of examples for which an operation is repeated if MLX's rule for it is wrong.
constexpr int MOST_REPEATED = 4096;

const Arrays& get(mlx_vector_array arrays) {
  return *static_cast<const Arrays*>(arrays.ctx);
}

mx::Shape with_batch(mx::Shape shape, int axis, int batch) {
  shape.insert(shape.begin() + axis, batch);
  return shape;
}

// An array without elements and without inputs.
mx::array nothing(mx::Shape shape, mx::Dtype dtype) {
  return mx::array(mx::allocator::malloc(0), std::move(shape), dtype);
}

// Moves the batch to the first axis. An array without a batch is broadcast, because it is equal for
// each example.
mx::array batch_first(const Mapped& a, int batch, mx::Stream s) {
  if (a.axis >= 0) {
    return mx::moveaxis(a.value, a.axis, 0, s);
  }
  return mx::broadcast_to(
      mx::expand_dims(a.value, 0, s), with_batch(a.value.shape(), 0, batch), s);
}

// The type is recognized by its name, because the library does not export it.
bool is_scatter(const mx::Primitive& primitive) {
  const char* names[] = {"Scatter", "Scatter Sum", "Scatter Prod", "Scatter Max", "Scatter Min"};
  return std::any_of(std::begin(names), std::end(names), [&](const char* name) {
    return std::strcmp(primitive.name(), name) == 0;
  });
}

bool is_slice_update(const mx::Primitive& primitive) {
  return std::strcmp(primitive.name(), "SliceUpdate") == 0 ||
      std::strcmp(primitive.name(), "DynamicSliceUpdate") == 0;
}

// MLX's rule places the batch of the updates wrongly if the batch is not the first axis of array
// and updates.
mx::array scatter(mx::Scatter& primitive, const std::vector<Mapped>& inputs, int batch) {
  auto s = primitive.stream();
  auto [mode, axes] = primitive.state();
  std::vector<mx::array> indices;
  for (size_t i = 1; i + 1 < inputs.size(); i++) {
    indices.push_back(batch_first(inputs[i], batch, s));
  }
  for (auto& axis : axes) {
    axis++;
  }
  // The index of the example becomes one more index array.
  int index_ndim = indices.empty() ? 1 : int(indices[0].ndim());
  mx::Dtype type = mx::int32;
  if (!indices.empty() && mx::size_of(indices[0].dtype()) >= 4) {
    type = indices[0].dtype();
  }
  mx::Shape column(index_ndim, 1);
  column[0] = batch;
  indices.push_back(mx::reshape(mx::arange(0, batch, 1, type, s), column, s));
  axes.push_back(0);
  auto array = batch_first(inputs[0], batch, s);
  auto updates = mx::expand_dims(batch_first(inputs.back(), batch, s), index_ndim, s);
  switch (mode) {
    case mx::Scatter::None:
      return mx::scatter(array, indices, updates, axes, s);
    case mx::Scatter::Sum:
      return mx::scatter_add(array, indices, updates, axes, s);
    case mx::Scatter::Prod:
      return mx::scatter_prod(array, indices, updates, axes, s);
    case mx::Scatter::Max:
      return mx::scatter_max(array, indices, updates, axes, s);
    case mx::Scatter::Min:
      return mx::scatter_min(array, indices, updates, axes, s);
  }
  throw std::runtime_error("[vmap] a scatter of an unknown kind");
}

// Repeats the operation of `node` on other inputs, which must have the shapes of its own inputs.
Arrays repeat_on(const mx::array& node, const Arrays& inputs) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const auto& output : node.outputs()) {
    shapes.push_back(output.shape());
    dtypes.push_back(output.dtype());
  }
  return mx::array::make_arrays(std::move(shapes), dtypes, node.primitive_ptr(), inputs);
}

// Repeats the operation of `node` for each example.
std::vector<Mapped> one_by_one(const mx::array& node, const std::vector<Mapped>& inputs, int batch) {
  auto s = node.primitive().stream();
  if (batch > MOST_REPEATED) {
    std::ostringstream text;
    text << "[vmap] " << node.primitive().name() << " cannot be mapped over " << batch
         << " examples, only over " << MOST_REPEATED;
    throw std::invalid_argument(text.str());
  }
  std::vector<Arrays> parts(node.outputs().size());
  for (int i = 0; i < batch; i++) {
    Arrays example;
    for (const auto& in : inputs) {
      example.push_back(in.axis < 0 ? in.value : mx::take(in.value, i, in.axis, s));
    }
    auto results = repeat_on(node, example);
    for (size_t k = 0; k < results.size(); k++) {
      parts[k].push_back(results[k]);
    }
  }
  std::vector<Mapped> stacked;
  for (const auto& part : parts) {
    stacked.push_back({mx::stack(part, 0, s), 0});
  }
  return stacked;
}

// Whether the results of MLX's rule have the shapes of single examples plus the batch.
bool fits(const std::vector<Mapped>& results, const mx::array& node, int batch) {
  auto outputs = node.outputs();
  if (results.size() != outputs.size()) {
    return false;
  }
  for (size_t i = 0; i < results.size(); i++) {
    const auto& [value, axis] = results[i];
    auto expected = outputs[i].shape();
    if (axis > int(expected.size()) || axis < -1) {
      return false;
    }
    if (axis >= 0) {
      expected = with_batch(std::move(expected), axis, batch);
    }
    if (value.shape() != expected || value.dtype() != outputs[i].dtype()) {
      return false;
    }
  }
  return true;
}

std::vector<Mapped> map_node(const mx::array& node, const std::vector<Mapped>& inputs, int batch) {
  std::vector<Mapped> results;
  Arrays values;
  std::vector<int> axes;
  bool any = false;
  for (const auto& in : inputs) {
    values.push_back(in.value);
    axes.push_back(in.axis);
    any |= in.axis >= 0;
  }
  if (!any) {
    for (auto& result : repeat_on(node, values)) {
      results.push_back({result, -1});
    }
    return results;
  }
  auto& primitive = node.primitive();
  if (is_scatter(primitive)) {
    auto& own = static_cast<mx::Scatter&>(primitive);
    results.push_back({scatter(own, inputs, batch), 0});
  } else {
    if (std::strcmp(primitive.name(), "Gather") == 0) {
      // The kernel reads blocks of a column-major array in memory order, so the array is
      // copied.
      values[0] = mx::contiguous(values[0], /* allow_col_major = */ false, primitive.stream());
    }
    if (is_slice_update(primitive) && axes[0] >= 0 && axes[1] < 0) {
      // MLX 0.32 would give the update a batch of one, and read beyond it.
      axes[1] = axes[0];
      values[1] = mx::broadcast_to(
          mx::expand_dims(values[1], axes[1], primitive.stream()),
          with_batch(values[1].shape(), axes[1], batch),
          primitive.stream());
    }
    auto [outputs, out_axes] = primitive.vmap(values, axes);
    for (size_t i = 0; i < outputs.size() && i < out_axes.size(); i++) {
      results.push_back({outputs[i], out_axes[i]});
    }
  }
  if (!fits(results, node, batch)) {
    return one_by_one(node, inputs, batch);
  }
  return results;
}

// The arrays between mapped inputs and outputs, inputs first. There is no recursion, because a
// graph may be deep.
Arrays in_order(
    const Arrays& outputs,
    std::unordered_set<std::uintptr_t> seen,
    std::unordered_set<std::uintptr_t> mapped) {
  Arrays order;
  std::vector<std::pair<mx::array, size_t>> open;
  auto visit = [&](const mx::array& a) {
    if (!a.has_primitive() || !seen.insert(a.id()).second) {
      return;
    }
    for (const auto& sibling : a.siblings()) {
      seen.insert(sibling.id());
    }
    open.push_back({a, 0});
  };
  for (const auto& output : outputs) {
    visit(output);
    while (!open.empty()) {
      auto& [top, next] = open.back();
      if (next < top.inputs().size()) {
        auto input = top.inputs()[next++];
        visit(input);
        continue;
      }
      auto done = top;
      open.pop_back();
      for (const auto& input : done.inputs()) {
        if (mapped.count(input.id()) != 0) {
          for (const auto& each : done.outputs()) {
            mapped.insert(each.id());
          }
          order.push_back(done);
          break;
        }
      }
    }
  }
  return order;
}

Arrays replace(
    const Arrays& inputs,
    const Arrays& traced_inputs,
    const Arrays& traced_outputs,
    const std::vector<int>& in_axes,
    const std::vector<int>& out_axes) {
  if (in_axes.size() != inputs.size() || traced_inputs.size() != inputs.size() ||
      out_axes.size() != traced_outputs.size()) {
    throw std::invalid_argument("[vmap] there is not one axis for each input and output");
  }
  int batch = -1;
  std::unordered_map<std::uintptr_t, Mapped> map;
  std::unordered_set<std::uintptr_t> seen, mapped;
  for (size_t i = 0; i < inputs.size(); i++) {
    auto traced = traced_inputs[i];
    seen.insert(traced.id());
    if (in_axes[i] < 0) {
      continue;
    }
    batch = inputs[i].shape(in_axes[i]);
    map.insert({traced.id(), {inputs[i], in_axes[i]}});
    mapped.insert(traced.id());
    traced.set_tracer(false);
  }
  if (batch < 0) {
    throw std::invalid_argument("[vmap] no input has a batch");
  }
  for (auto& node : in_order(traced_outputs, seen, mapped)) {
    for (auto output : node.outputs()) {
      output.set_tracer(false);
    }
    bool empty = batch == 0;
    if (!empty) {
      auto outputs = node.outputs();
      empty = std::all_of(
          outputs.begin(), outputs.end(), [](const auto& output) { return output.size() == 0; });
    }
    std::vector<Mapped> results;
    if (empty) {
      for (const auto& output : node.outputs()) {
        results.push_back({nothing(with_batch(output.shape(), 0, batch), output.dtype()), 0});
      }
    } else {
      std::vector<Mapped> given;
      for (const auto& input : node.inputs()) {
        auto at = map.find(input.id());
        given.push_back(at != map.end() ? at->second : Mapped{input, -1});
      }
      results = map_node(node, given, batch);
    }
    auto outputs = node.outputs();
    for (size_t i = 0; i < outputs.size(); i++) {
      map.insert({outputs[i].id(), results.at(i)});
    }
  }
  Arrays out;
  for (size_t i = 0; i < traced_outputs.size(); i++) {
    const auto& traced = traced_outputs[i];
    auto at = map.find(traced.id());
    auto result = at != map.end() ? at->second : Mapped{traced, -1};
    int wanted = out_axes[i];
    if (wanted < 0 && result.axis >= 0) {
      std::ostringstream text;
      text << "[vmap] Axis -1 invalid for output with " << result.value.ndim() << " dimensions.";
      throw std::invalid_argument(text.str());
    }
    if (wanted < 0) {
      out.push_back(result.value);
    } else if (result.axis < 0) {
      out.push_back(mx::repeat(mx::expand_dims(result.value, wanted), batch, wanted));
    } else if (result.axis != wanted) {
      out.push_back(mx::moveaxis(result.value, result.axis, wanted));
    } else {
      out.push_back(result.value);
    }
  }
  return out;
}

} // namespace

extern "C" int rust_mlx_vmap_replace(
    mlx_vector_array* res,
    mlx_vector_array inputs,
    mlx_vector_array traced_inputs,
    mlx_vector_array traced_outputs,
    const int* in_axes,
    size_t num_in_axes,
    const int* out_axes,
    size_t num_out_axes) {
  try {
    auto out = replace(
        get(inputs),
        get(traced_inputs),
        get(traced_outputs),
        {in_axes, in_axes + num_in_axes},
        {out_axes, out_axes + num_out_axes});
    if (res->ctx) {
      *static_cast<Arrays*>(res->ctx) = std::move(out);
    } else {
      res->ctx = new Arrays(std::move(out));
    }
    return 0;
  } catch (std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}
