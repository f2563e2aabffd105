// Lists of tensors at once, for devices where every launch costs more than the numbers in it: tch binds none of libtorch's foreach and
// fused operators. On the CPU nothing here is used.
#include <cstring>
#include <exception>
#include <functional>
#include <vector>

#include <ATen/ATen.h>

namespace {
using at::Tensor;
using List = std::vector<Tensor>;

List list(Tensor *const *tensors, size_t count) {
  List all;
  all.reserve(count);
  for (size_t i = 0; i < count; i++) all.push_back(*tensors[i]);
  return all;
}

/// Fused kernels want gradients of their variables' memory layout. A gradient of another one (a convolution may answer in
/// channels_last) is copied into it.
void like(const List &vars, List &grads) {
  for (size_t i = 0; i < vars.size(); i++) {
    if (grads[i].strides() == vars[i].strides() && grads[i].is_non_overlapping_and_dense()) continue;
    Tensor same = at::empty_strided(vars[i].sizes(), vars[i].strides(), grads[i].options());
    grads[i] = same.copy_(grads[i]);
  }
}

/// Fused kernels change values without telling autograd, which must still refuse graphs that were made with the old ones.
void changed(const List &vars) {
  for (auto &var : vars) var.unsafeGetTensorImpl()->bump_version();
}

char *guarded(const std::function<void()> &work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception &e) {
    return strdup(e.what());
  }
}

c10::optional<Tensor> optional(const Tensor *t) { return t ? c10::optional<Tensor>(*t) : c10::optional<Tensor>(); }
}  // namespace

/// One SGD step of all variables, left out whole where `*skip` is 1. `buffers` may be null: no momentum.
extern "C" char *mcl_lists_sgd(Tensor *const *vars, Tensor *const *grads, Tensor *const *buffers, size_t count, double lr, double momentum,
                               double weight_decay, bool nesterov, const Tensor *skip) {
  return guarded([&] {
    List params = list(vars, count), slopes = list(grads, count), state = buffers ? list(buffers, count) : List();
    like(params, slopes);
    at::_fused_sgd_(params, slopes, state, weight_decay, momentum, lr, /*dampening=*/0.0, nesterov, /*maximize=*/false,
                    /*is_first_step=*/false, /*grad_scale=*/{}, optional(skip));
    changed(params);
  });
}

/// One Adam or AdamW step (`decoupled`), the `steps`th, left out whole where `*skip` is 1.
extern "C" char *mcl_lists_adam(Tensor *const *vars, Tensor *const *grads, Tensor *const *first, Tensor *const *second, size_t count,
                                int64_t steps, double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                                const Tensor *skip) {
  return guarded([&] {
    List params = list(vars, count), slopes = list(grads, count);
    like(params, slopes);
    // One counter for all: it is only read.
    List counts(count, at::full({}, static_cast<double>(steps), params[0].options().dtype(at::kFloat)));
    List m = list(first, count), v = list(second, count), none;
    constexpr bool amsgrad = false, maximize = false;
    if (decoupled)
      at::_fused_adamw_(params, slopes, m, v, none, counts, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, {}, optional(skip));
    else
      at::_fused_adam_(params, slopes, m, v, none, counts, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, {}, optional(skip));
    changed(params);
  });
}

/// The l2 norm of each, [count].
extern "C" char *mcl_lists_norms(Tensor *const *tensors, size_t count, Tensor **answer) {
  return guarded([&] { *answer = new Tensor(at::stack(at::_foreach_norm(list(tensors, count), 2))); });
}

/// Each times a scalar tensor, in place.
extern "C" char *mcl_lists_scale(Tensor *const *tensors, size_t count, const Tensor *factor) {
  return guarded([&] { at::_foreach_mul_(list(tensors, count), *factor); });
}

/// Each gets its partner added, in place.
extern "C" char *mcl_lists_add(Tensor *const *tensors, Tensor *const *others, size_t count) {
  return guarded([&] { at::_foreach_add_(list(tensors, count), list(others, count)); });
}

/// Each moves towards its partner by a share of the way, left out whole where `*skip` is 1.
extern "C" char *mcl_lists_approach(Tensor *const *tensors, Tensor *const *others, size_t count, double share, const Tensor *skip) {
  return guarded([&] {
    List own = list(tensors, count), ways = at::_foreach_sub(own, list(others, count));
    like(own, ways);
    at::_fused_sgd_(own, ways, {}, /*weight_decay=*/0.0, /*momentum=*/0.0, share, /*dampening=*/0.0, /*nesterov=*/false,
                    /*maximize=*/false, /*is_first_step=*/false, /*grad_scale=*/{}, optional(skip));
    changed(own);
  });
}
