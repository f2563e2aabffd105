// BatchNorm in training, with what follows it (a residual sum, a ReLU) in the same pass over memory, and its derivative with a derivative
// of its own: libtorch writes the second derivative as some thirty passes. The loops are in norm/loops.rs.
#include "differentiable.h"

using namespace mcl;

// Maps are f32 in channels_last, [rows][c]; what may be missing is null. `y` is the answer after a ReLU (null without one): it tells
// where the ReLU let pass. `stats`: the means, then the inverse deviations.
extern "C" {
void mcl_norm(const float *x, const float *residual, const float *gamma, const float *beta, float *y, float *stats, float *running_mean,
              float *running_var, int64_t rows, int64_t c, bool relu, double momentum, double eps);
void mcl_norm_gradient(const float *g, const float *x, const float *y, const float *gamma, const float *stats, float *dx, float *dgamma,
                       float *dbeta, float *passed, int64_t rows, int64_t c);
void mcl_norm_second(const float *g, const float *x, const float *y, const float *gamma, const float *stats, const float *ddx,
                     const float *ddgamma, const float *ddbeta, const float *dpassed, float *dg, float *dx, float *dgamma, int64_t rows,
                     int64_t c);
}

namespace {

int64_t rows(const Tensor &map) { return map.numel() / map.size(1); }

// (dx, dgamma, dbeta), and with a residual what the ReLU lets pass of g.
struct Gradient : Function<Gradient> {
  static variable_list forward(AutogradContext *context, const Tensor &g, const Tensor &x, const Tensor &gamma, const Tensor &stats,
                               const std::optional<Tensor> &y, bool residual) {
    context->set_materialize_grads(false);
    context->save_for_backward({g, x, gamma, stats, y ? *y : Tensor()});
    Tensor g_last = last(g), x_last = last(x), scale = dense(gamma), dx = empty_map(x);
    Tensor dgamma = at::empty(gamma.sizes(), gamma.options()), dbeta = at::empty(gamma.sizes(), gamma.options());
    Tensor passed = residual ? empty_map(x) : Tensor();
    mcl_norm_gradient(read(g_last), read(x_last), y ? read(*y) : nullptr, read(scale), read(stats), write(dx), write(dgamma), write(dbeta),
                      write(passed), rows(x), x.size(1));
    if (residual) return {dx, dgamma, dbeta, passed};
    return {dx, dgamma, dbeta};
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(), "this BatchNorm can be differentiated twice, not three times");
    auto saved = context->get_saved_variables();
    const Tensor g = last(saved[0]), x = last(saved[1]), gamma = dense(saved[2]), &stats = saved[3], &y = saved[4];
    Tensor ddx = grads[0].defined() ? last(grads[0]) : at::zeros_like(x);
    Tensor dpassed = grads.size() > 3 && grads[3].defined() ? last(grads[3]) : Tensor();
    Tensor ddgamma = dense(grads[1]), ddbeta = dense(grads[2]);
    Tensor dg = empty_map(x), dx = empty_map(x), dgamma = at::empty(gamma.sizes(), gamma.options());
    mcl_norm_second(read(g), read(x), read(y), read(gamma), read(stats), read(ddx), read(ddgamma), read(ddbeta), read(dpassed), write(dg),
                    write(dx), write(dgamma), rows(x), x.size(1));
    return {dg, dx, dgamma, Tensor(), Tensor(), Tensor()};
  }
};

struct Norm : Function<Norm> {
  static Tensor forward(AutogradContext *context, const Tensor &x, const Tensor &gamma_given, const Tensor &beta_given,
                        const std::optional<Tensor> &residual, const Tensor &running_mean, const Tensor &running_var, bool relu,
                        double momentum, double eps) {
    TORCH_CHECK(relu || !residual, "a residual sum comes with a ReLU");
    TORCH_CHECK(running_mean.is_contiguous() && running_var.is_contiguous(), "running statistics are written number by number");
    Tensor gamma = dense(gamma_given), beta = dense(beta_given);
    Tensor x_last = last(x), added = residual ? last(*residual) : Tensor(), y = empty_map(x);
    Tensor stats = at::empty({2, x.size(1)}, gamma.options());
    mcl_norm(read(x_last), read(added), read(gamma), read(beta), write(y), write(stats), write(running_mean), write(running_var), rows(x),
             x.size(1), relu, momentum, eps);
    context->saved_data["residual"] = added.defined();
    context->save_for_backward({x, gamma_given, stats, relu ? y : Tensor()});
    return y;
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    auto saved = context->get_saved_variables();
    std::optional<Tensor> y = saved[3].defined() ? std::optional<Tensor>(saved[3].detach()) : std::nullopt;
    bool residual = context->saved_data["residual"].toBool();
    auto d = Gradient::apply(grads[0], saved[0], saved[1], saved[2], y, residual);
    return {d[0], d[1], d[2], residual ? d[3] : Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

} // namespace

namespace mcl {
variable_list norm_gradient(const Tensor &g, const Tensor &x, const Tensor &gamma, const Tensor &stats, const std::optional<Tensor> &y,
                            bool residual) {
  return Gradient::apply(g, x, gamma, stats, y, residual);
}
} // namespace mcl

// BatchNorm of x (running statistics move), plus `residual` unless null, then a ReLU if wanted; or null and a message the caller frees.
extern "C" Tensor *mcl_norm_train(const Tensor *x, const NormCall *n, char **error) {
  return answer(error, [&] {
    return Norm::apply(*x, *n->gamma, *n->beta, n->added(), *n->mean, *n->var, n->relu, n->momentum, n->eps);
  });
}
