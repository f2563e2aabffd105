// The sum of a tensor over all ranks as an autograd function: what every rank adds to is read by every rank, so the gradient of a rank's
// part is the sum of all ranks' gradients, and so on for every derivative. The sum itself is taken in mod.rs beside this file.
#include <cstring>
#include <memory>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// A new tensor that the caller owns.
extern "C" Tensor *mcl_ranks_sum(const Tensor *own, bool cuda_aware);

namespace {

struct Sum : Function<Sum> {
  static Tensor forward(AutogradContext *context, const Tensor &own, bool cuda_aware) {
    context->saved_data["cuda_aware"] = cuda_aware;
    return *std::unique_ptr<Tensor>(mcl_ranks_sum(&own, cuda_aware));
  }
  // Missing gradients come as zeros, so that every rank takes part.
  static variable_list backward(AutogradContext *context, variable_list grads) {
    return {Sum::apply(grads[0], context->saved_data["cuda_aware"].toBool()), Tensor()};
  }
};

} // namespace

// The sum, or null and a message that the caller frees.
extern "C" Tensor *mcl_ranks_sum_live(const Tensor *own, bool cuda_aware, char **error) {
  try {
    return new Tensor(Sum::apply(*own, cuda_aware));
  } catch (const std::exception &e) {
    *error = strdup(e.what());
    return nullptr;
  }
}
