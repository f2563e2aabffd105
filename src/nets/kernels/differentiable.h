// The maps that are differentiated in training, each an autograd function that has derivatives of its own: convolution.cpp, norm.cpp.
#pragma once

#include <cstring>
#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace mcl {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Of a convolution: the same in both directions.
struct Window {
  int64_t stride, padding, dilation, groups;
};

// The gradient of a convolution of x and w after x (`like`: a tensor of its size and layout), and after w (`like`: one of its size).
Tensor input_gradient(const Tensor &g, const Tensor &w, const Tensor &like, Window window);
Tensor weight_gradient(const Tensor &x, const Tensor &g, const Tensor &like, Window window);

// What a BatchNorm in training is told beside its map: gamma, beta and the running statistics (which move), what is added before the ReLU
// (null: nothing), and whether there is one. norm.rs has the same.
struct NormCall {
  const Tensor *gamma, *beta, *mean, *var, *residual;
  bool relu;
  double momentum, eps;

  std::optional<Tensor> added() const { return residual ? std::optional<Tensor>(*residual) : std::nullopt; }
};

// A tensor for the caller to own, or null and a message that the caller frees.
template <typename Make> Tensor *answer(char **error, Make make) {
  try {
    return new Tensor(make());
  } catch (const std::exception &e) {
    *error = strdup(e.what());
    return nullptr;
  }
}

// Of a BatchNorm: (dx, dgamma, dbeta), and with a residual what the ReLU lets pass of g. `y`: the answer after a ReLU; `stats` as the norm left them.
variable_list norm_gradient(const Tensor &g, const Tensor &x, const Tensor &gamma, const Tensor &stats, const std::optional<Tensor> &y,
                            bool residual);

inline Tensor last(const Tensor &t) { return t.contiguous(at::MemoryFormat::ChannelsLast); }
inline Tensor empty_map(const Tensor &like) {
  return at::empty(like.sizes(), like.options().memory_format(at::MemoryFormat::ChannelsLast));
}
// The loops read numbers one after another; a gradient may be one number seen many times (an expanded view).
inline Tensor dense(const Tensor &t) { return t.defined() ? t.contiguous() : t; }
inline const float *read(const Tensor &t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }
inline float *write(const Tensor &t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; }

} // namespace mcl
