// A convolution and the BatchNorm that takes its output and nobody else's, with a residual sum and a ReLU, as one autograd function: the
// gradient after the convolution's output never goes to memory (conv_norm.rs). The output of the convolution is an output of the function
// as well, so that second derivatives find their way through it.
#include "differentiable.h"

using namespace mcl;

// Maps are f32 in channels_last; what may be missing is null. sizes: b, h, w, c_in, c_out. The window is 3 x 3 with stride 1 and padding 1.
extern "C" {
// z: the convolution; y: after BatchNorm, sum and ReLU; `stats`: means, then inverse deviations.
void mcl_conv_norm(const float *x, const float *w, const float *residual, const float *gamma, const float *beta, float *z, float *y,
                   float *stats, float *running_mean, float *running_var, const int64_t *sizes, bool relu, double momentum, double eps);
// From the gradients after y and after z (one of them may be missing). `y` is null without a ReLU; `dx`, `dw`, `passed` where not wanted.
void mcl_conv_norm_gradient(const float *gy, const float *gz, const float *x, const float *w, const float *z, const float *y,
                            const float *gamma, const float *stats, float *dx, float *dw, float *dgamma, float *dbeta, float *passed,
                            const int64_t *sizes);
}

namespace {

const Window WINDOW{1, 1, 1, 1};

std::array<int64_t, 5> sizes(const Tensor &x, const Tensor &w) { return {x.size(0), x.size(2), x.size(3), w.size(1), w.size(0)}; }

struct ConvNorm : Function<ConvNorm> {
  static variable_list forward(AutogradContext *context, const Tensor &x, const Tensor &w, const Tensor &gamma_given,
                               const Tensor &beta_given, const std::optional<Tensor> &residual, const Tensor &running_mean,
                               const Tensor &running_var, bool relu, double momentum, double eps) {
    TORCH_CHECK(relu || !residual, "a residual sum comes with a ReLU");
    TORCH_CHECK(running_mean.is_contiguous() && running_var.is_contiguous(), "running statistics are written number by number");
    context->set_materialize_grads(false);
    Tensor gamma = dense(gamma_given), beta = dense(beta_given), x_last = last(x), w_dense = w.contiguous();
    Tensor added = residual ? last(*residual) : Tensor();
    Tensor z = at::empty({x.size(0), w.size(0), x.size(2), x.size(3)}, x.options().memory_format(at::MemoryFormat::ChannelsLast));
    Tensor y = empty_map(z), stats = at::empty({2, w.size(0)}, gamma.options());
    mcl_conv_norm(read(x_last), read(w_dense), read(added), read(gamma), read(beta), write(z), write(y), write(stats), write(running_mean),
                  write(running_var), sizes(x, w).data(), relu, momentum, eps);
    context->saved_data["residual"] = added.defined();
    context->save_for_backward({x, w, gamma_given, z, stats, relu ? y : Tensor()});
    return {y, z};
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &w = saved[1], &gamma = saved[2], &z = saved[3], &stats = saved[4], &gy = grads[0], &gz = grads[1];
    std::optional<Tensor> y = saved[5].defined() ? std::optional<Tensor>(saved[5].detach()) : std::nullopt;
    bool residual = context->saved_data["residual"].toBool();
    bool for_x = context->needs_input_grad(0), for_w = context->needs_input_grad(1);
    Tensor dx, dw, dgamma, dbeta, passed;
    if (at::GradMode::is_enabled()) { // to be differentiated again: map by map
      Tensor dz = gz;
      if (gy.defined()) {
        auto d = norm_gradient(gy, z, gamma, stats, y, residual);
        dz = gz.defined() ? d[0] + gz : d[0];
        dgamma = d[1], dbeta = d[2], passed = residual ? d[3] : Tensor();
      }
      if (for_x && dz.defined()) dx = input_gradient(dz, w, x.detach(), WINDOW);
      if (for_w && dz.defined()) dw = weight_gradient(x, dz, w.detach(), WINDOW);
    } else if (gy.defined() || gz.defined()) {
      Tensor gy_last = gy.defined() ? last(gy) : gy, gz_last = gz.defined() ? last(gz) : gz;
      Tensor x_last = last(x), w_dense = w.contiguous(), z_last = last(z), scale = dense(gamma);
      if (for_x) dx = empty_map(x);
      if (for_w) dw = at::empty(w.sizes(), w.options().memory_format(c10::nullopt));
      if (gy.defined()) dgamma = at::empty(gamma.sizes(), gamma.options()), dbeta = at::empty(gamma.sizes(), gamma.options());
      if (gy.defined() && residual && context->needs_input_grad(4)) passed = empty_map(z);
      mcl_conv_norm_gradient(read(gy_last), read(gz_last), read(x_last), read(w_dense), read(z_last), y ? read(*y) : nullptr, read(scale),
                             read(stats), write(dx), write(dw), write(dgamma), write(dbeta), write(passed), sizes(x, w).data());
    }
    return {dx, dw, dgamma, dbeta, passed, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

} // namespace

// ReLU(BN(conv(x, w)) + residual), without the sum where it is null and without the ReLU if not wanted; or null and a message.
extern "C" Tensor *mcl_conv_norm_train(const Tensor *x, const Tensor *w, const NormCall *n, char **error) {
  return answer(error, [&] {
    return ConvNorm::apply(*x, *w, *n->gamma, *n->beta, n->added(), *n->mean, *n->var, n->relu, n->momentum, n->eps)[0];
  });
}
