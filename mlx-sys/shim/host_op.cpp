// See host_op.h. The primitive keeps the caller's payload; copies of the graph share it.
#include "host_op.h"

#include <memory>
#include <stdexcept>
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

class HostOp : public mx::UnaryPrimitive {
 public:
  HostOp(mx::Stream stream, rust_mlx_run run, std::shared_ptr<void> payload, bool strided)
      : mx::UnaryPrimitive(stream), run_(run), payload_(std::move(payload)), strided_(strided) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override {
    std::vector<rust_mlx_view> views;
    views.reserve(inputs.size());
    // Shapes and strides of the inputs, copied: the work may outlive the handles.
    auto layouts = std::make_shared<std::vector<Layout>>();
    layouts->reserve(inputs.size());
    for (const auto& in : inputs) {
      if (!in.flags().row_contiguous && !(strided_ && walkable(in))) {
        throw std::runtime_error("[HostOp] an input is not row-contiguous");
      }
      layouts->push_back(
          {{in.shape().begin(), in.shape().end()}, {in.strides().begin(), in.strides().end()}});
      const auto& layout = layouts->back();
      views.push_back(
          {in.data<void>(), in.size(), in.ndim(), layout.shape.data(), layout.strides.data()});
    }
    output.set_data(mx::allocator::malloc(output.nbytes()));
    // The memory of inputs and output stays alive until the stream has done this: MLX holds it.
    auto work = [run = run_,
                 payload = payload_,
                 layouts = std::move(layouts),
                 views = std::move(views),
                 out = output.data<void>()]() {
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

  const char* name() const override {
    return "HostOp";
  }

 private:
  struct Layout {
    std::vector<int> shape;
    std::vector<int64_t> strides;
  };

  // Whether rows of neighbors can be found by adding strides.
  static bool walkable(const mx::array& in) {
    for (auto stride : in.strides()) {
      if (stride < 0) {
        return false;
      }
    }
    return in.ndim() > 0 && (in.shape(-1) == 1 || in.strides(-1) == 1);
  }

  rust_mlx_run run_;
  std::shared_ptr<void> payload_;
  bool strided_;
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
    default:
      throw std::runtime_error("[HostOp] the output must be of a float type");
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
    rust_mlx_run run,
    void* payload,
    void (*drop)(void*),
    bool strided,
    mlx_stream stream) {
  try {
    std::shared_ptr<void> owned(payload, drop);
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
            std::make_shared<HostOp>(s, run, std::move(owned), strided),
            std::move(arrays)));
    return 0;
  } catch (std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}
