// See host_op.h. The primitive keeps the caller's payload; copies of the graph share it.
#include "host_op.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/c/error.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#if __has_include("mlx/backend/cpu/encoder.h")
#include "mlx/backend/cpu/encoder.h"
#define RUST_MLX_HAS_ENCODER 1
#else
#include "mlx/scheduler.h"
#endif

namespace {

namespace mx = mlx::core;

// Memory for `bytes` bytes. MLX's CPU allocator returns a null pointer when the system refuses
// memory, and MLX itself would write to it. mlx-rs-core recognizes this message.
mx::allocator::Buffer allocate(const char* op, size_t bytes) {
  auto buffer = mx::allocator::malloc(bytes);
  if (!buffer.ptr()) {
    throw std::runtime_error(
        "[" + std::string(op) + "] the system has no " + std::to_string(bytes) +
        " bytes of memory");
  }
  return buffer;
}

class HostOp : public mx::UnaryPrimitive {
 public:
  HostOp(
      mx::Stream stream,
      rust_mlx_meaning meaning,
      rust_mlx_run run,
      std::shared_ptr<void> payload,
      size_t first_strided,
      bool in_place)
      : mx::UnaryPrimitive(stream),
        meaning_(meaning),
        run_(run),
        payload_(std::move(payload)),
        first_strided_(first_strided),
        in_place_(in_place) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override {
    std::vector<rust_mlx_view> views;
    views.reserve(inputs.size());
    // Copies of the inputs' shapes and strides, because the work may outlive the handles.
    auto layouts = std::make_shared<std::vector<Layout>>();
    layouts->reserve(inputs.size());
    bool scattered = false;
    for (size_t i = 0; i < inputs.size(); i++) {
      const auto& in = inputs[i];
      bool as_is = aligned(in) &&
          (in.flags().row_contiguous || (i >= first_strided_ && walkable(in)));
      scattered |= !as_is;
      layouts->push_back(
          {{in.shape().begin(), in.shape().end()},
           {in.strides().begin(), in.strides().end()},
           in.itemsize(),
           as_is});
      const auto& layout = layouts->back();
      views.push_back(
          {in.data<void>(), in.size(), in.ndim(), layout.shape.data(), layout.strides.data()});
    }
    // If nothing else needs the first input, the output reuses its memory; otherwise it is a copy.
    bool taken = in_place_ && inputs.at(0).is_donatable() && aligned(inputs[0]) &&
        inputs[0].flags().row_contiguous &&
        inputs[0].data_size() == inputs[0].size();
    if (taken) {
      output.copy_shared_buffer(inputs[0]);
    } else {
      output.set_data(allocate("HostOp", output.nbytes()));
    }
    size_t copied = in_place_ && !taken ? output.nbytes() : 0;
    // MLX keeps the memory of inputs and output alive until the stream has finished this work.
    auto work = [run = run_,
                 payload = payload_,
                 layouts = std::move(layouts),
                 views = std::move(views),
                 scattered,
                 copied,
                 out = output.data<void>()]() mutable {
      std::vector<std::vector<char>> copies;
      if (scattered) {
        copies = gather(*layouts, views);
      }
      if (copied != 0) {
        std::memcpy(out, views[0].data, copied);
      }
      run(payload.get(), views.data(), views.size(), out);
    };
#ifdef RUST_MLX_HAS_ENCODER
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& in : inputs) {
      encoder.set_input_array(in);
    }
    encoder.set_output_array(output);
    encoder.dispatch(std::move(work));
#else
    mx::scheduler::enqueue(stream(), std::move(work));
#endif
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("[HostOp] runs on the CPU only");
  }

  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>&) override {
    std::vector<mx::array> grads;
    const auto& cotangent = cotangents.at(0);
    for (int argnum : argnums) {
      if (argnum == 0) {
        grads.push_back(product(cotangent, primals, /* transpose = */ false));
      } else if (argnum == 1 && meaning_.kind == RUST_MLX_DENSE_PRODUCT) {
        // [rows, n] transposed times [rows, k]
        auto rows = mx::transpose(as_matrix(cotangent), {1, 0}, stream());
        auto gradient = mx::matmul(rows, as_matrix(primals.at(0)), stream());
        grads.push_back(mx::astype(gradient, primals.at(1).dtype(), stream()));
      } else {
        refuse("a gradient with respect to the matrix");
      }
    }
    return grads;
  }

  std::vector<mx::array> jvp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& tangents,
      const std::vector<int>& argnums) override {
    std::optional<mx::array> sum;
    for (size_t i = 0; i < argnums.size(); i++) {
      std::optional<mx::array> part;
      if (argnums[i] == 0) {
        part = product(tangents.at(i), primals, /* transpose = */ true);
      } else if (argnums[i] == 1 && meaning_.kind == RUST_MLX_DENSE_PRODUCT) {
        part = product(primals.at(0), {primals.at(0), tangents.at(i)}, /* transpose = */ true);
      } else {
        refuse("a derivative with respect to the matrix");
      }
      sum = sum ? mx::add(*sum, *part, stream()) : *part;
    }
    if (!sum) {
      refuse("a derivative with respect to nothing");
    }
    return {*sum};
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs,
      const std::vector<int>& axes) override {
    for (size_t i = 1; i < axes.size(); i++) {
      if (axes[i] != -1) {
        refuse("a batch of matrices");
      }
    }
    auto x = mx::moveaxis(inputs.at(0), axes.at(0), 0, stream());
    return {{product(x, inputs, /* transpose = */ true)}, {0}};
  }

  const char* name() const override {
    return "HostOp";
  }

 private:
  struct Layout {
    std::vector<int> shape;
    std::vector<int64_t> strides;
    size_t itemsize;
    // Whether the work can read the input without a copy.
    bool as_is;
  };

  // Makes row-contiguous copies of the inputs that the work cannot read directly. In the list of
  // views, the copies replace those inputs.
  static std::vector<std::vector<char>> gather(
      std::vector<Layout>& layouts,
      std::vector<rust_mlx_view>& views) {
    std::vector<std::vector<char>> copies;
    for (size_t i = 0; i < views.size(); i++) {
      auto& layout = layouts[i];
      auto& view = views[i];
      if (layout.as_is) {
        continue;
      }
      std::vector<char> copy(view.size * layout.itemsize);
      std::vector<int> index(view.ndim, 0);
      int64_t at = 0;
      for (size_t n = 0; n < view.size; n++) {
        const char* from = static_cast<const char*>(view.data) + at * int64_t(layout.itemsize);
        std::copy(from, from + layout.itemsize, copy.data() + n * layout.itemsize);
        for (size_t axis = view.ndim; axis-- > 0;) {
          at += layout.strides[axis];
          if (++index[axis] < layout.shape[axis]) {
            break;
          }
          at -= layout.strides[axis] * index[axis];
          index[axis] = 0;
        }
      }
      int64_t stride = 1;
      for (size_t axis = view.ndim; axis-- > 0;) {
        layout.strides[axis] = stride;
        stride *= layout.shape[axis];
      }
      view.data = copy.data();
      copies.push_back(std::move(copy));
    }
    return copies;
  }

  // Whether the elements are aligned. A view of bytes as a wider type may begin at any address.
  static bool aligned(const mx::array& in) {
    return reinterpret_cast<std::uintptr_t>(in.data<void>()) % in.itemsize() == 0;
  }

  // Whether the last axis is contiguous and no stride is negative.
  static bool walkable(const mx::array& in) {
    for (auto stride : in.strides()) {
      if (stride < 0) {
        return false;
      }
    }
    return in.ndim() > 0 && (in.shape(-1) == 1 || in.strides(-1) == 1);
  }

  // Multiplies x with the matrix that follows the first input, or with its transpose. Uses MLX's
  // own operations.
  mx::array product(const mx::array& x, const std::vector<mx::array>& inputs, bool transpose) {
    switch (meaning_.kind) {
      case RUST_MLX_DENSE_PRODUCT: {
        const auto& w = inputs.at(1);
        return mx::matmul(x, transpose ? mx::transpose(w, {1, 0}, stream()) : w, stream());
      }
      case RUST_MLX_QUANTIZED_PRODUCT:
        return mx::quantized_matmul(
            x,
            rows_of(inputs.at(1)),
            mx::astype(rows_of(inputs.at(2)), x.dtype(), stream()),
            mx::astype(rows_of(inputs.at(3)), x.dtype(), stream()),
            transpose,
            meaning_.group_size,
            meaning_.bits,
            "affine",
            stream());
      default:
        refuse("a derivative, or a version for batches");
    }
  }

  // Reorders interleaved rows: [row blocks, m, 8] -> [rows, m]
  mx::array rows_of(const mx::array& bands) {
    int all = bands.shape(0) * bands.shape(2);
    auto apart = mx::transpose(bands, {0, 2, 1}, stream());
    auto rows = mx::reshape(apart, {all, bands.shape(1)}, stream());
    return mx::slice(rows, {0, 0}, {meaning_.rows, bands.shape(1)}, stream());
  }

  // [.., m] -> [rows, m]
  mx::array as_matrix(const mx::array& x) {
    return mx::reshape(x, {-1, x.shape(-1)}, stream());
  }

  [[noreturn]] static void refuse(const char* what) {
    throw std::invalid_argument(
        std::string("[HostOp] this product, computed by rust-mlx's own kernel, does not have ") +
        what);
  }

  rust_mlx_meaning meaning_;
  rust_mlx_run run_;
  std::shared_ptr<void> payload_;
  size_t first_strided_;
  bool in_place_;
};

const mx::array& get(const mlx_array& a) {
  if (!a.ctx) {
    throw std::runtime_error("expected a non-empty mlx_array");
  }
  return *static_cast<mx::array*>(a.ctx);
}

void put(mlx_array* res, mx::array&& value) {
  if (res->ctx) {
    *static_cast<mx::array*>(res->ctx) = std::move(value);
  } else {
    res->ctx = new mx::array(std::move(value));
  }
}

mx::Dtype dtype_of(mlx_dtype dtype) {
  switch (dtype) {
    case MLX_FLOAT32:
      return mx::float32;
    case MLX_FLOAT16:
      return mx::float16;
    case MLX_BFLOAT16:
      return mx::bfloat16;
    // Words of packed KV caches.
    case MLX_UINT32:
      return mx::uint32;
    default:
      throw std::runtime_error("[HostOp] the output must be of a float type, or uint32");
  }
}

// Types for which every bit pattern is a valid value. Booleans are not among them.
mx::Dtype number_type_of(mlx_dtype dtype) {
  switch (dtype) {
    case MLX_UINT8:
      return mx::uint8;
    case MLX_UINT16:
      return mx::uint16;
    case MLX_INT8:
      return mx::int8;
    case MLX_INT16:
      return mx::int16;
    case MLX_INT32:
      return mx::int32;
    default:
      return dtype_of(dtype);
  }
}

} // namespace

extern "C" int rust_mlx_host_op(
    mlx_array* res,
    const mlx_array* inputs,
    size_t num_inputs,
    const int* shape,
    size_t ndim,
    mlx_dtype dtype,
    rust_mlx_meaning meaning,
    rust_mlx_run run,
    void* payload,
    void (*drop)(void*),
    size_t first_strided,
    bool in_place,
    mlx_stream stream) {
  try {
    std::shared_ptr<void> owned(payload, drop);
    if (in_place && num_inputs == 0) {
      throw std::runtime_error("[HostOp] nothing to write into");
    }
    std::vector<mx::array> arrays;
    arrays.reserve(num_inputs);
    for (size_t i = 0; i < num_inputs; i++) {
      arrays.push_back(get(inputs[i]));
    }
    auto s = *static_cast<mx::Stream*>(stream.ctx);
    if (s.device != mx::Device::cpu) {
      throw std::runtime_error("[HostOp] runs on the CPU only");
    }
    put(res,
        mx::array(
            mx::Shape(shape, shape + ndim),
            dtype_of(dtype),
            std::make_shared<HostOp>(s, meaning, run, std::move(owned), first_strided, in_place),
            std::move(arrays)));
    return 0;
  } catch (std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}

extern "C" int
rust_mlx_uninitialized(mlx_array* res, const int* shape, size_t ndim, mlx_dtype dtype) {
  try {
    auto type = number_type_of(dtype);
    size_t bytes = mx::size_of(type);
    for (size_t i = 0; i < ndim; i++) {
      if (shape[i] < 0 || __builtin_mul_overflow(bytes, size_t(shape[i]), &bytes)) {
        throw std::invalid_argument("[uninitialized] the shape has no size");
      }
    }
    auto buffer = allocate("uninitialized", bytes);
    put(res, mx::array(buffer, mx::Shape(shape, shape + ndim), type));
    return 0;
  } catch (std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}
