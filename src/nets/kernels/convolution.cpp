// A convolution without bias as three bilinear maps, each the derivative of the other two:
//
//   Convolution(x, w) = y      Input(g, w) = dL/dx      Weight(x, g) = dL/dw
//
// Written as autograd functions they can be differentiated any number of times, at the price of one map for every derivative: a
// Hessian-vector product takes seven of them where libtorch's convolution_backward takes a detour. Weight has a kernel of its own
// (convolution.rs); the rest is libtorch's.
#include "differentiable.h"

using namespace mcl;

// sizes: b, h, w, c_in, h_out, w_out, c_out, stride. `dw` is [3][3][c_in][c_out]. False: not for this kernel, nothing was written.
extern "C" bool mcl_weight_gradient(const float *x, const float *g, float *dw, const int64_t *sizes);
// Winograd's convolution, 3 x 3 with padding 1 and stride 1 (winograd.rs). sizes: b, h, w, c_in, c_out. `w` and `dw` are [c_out][c_in][3][3];
// if `turned`, y is the gradient after the input, and x that after the output. False: not for this kernel, nothing was written.
extern "C" bool mcl_winograd(const float *x, const float *w, float *y, const int64_t *sizes, bool turned);
extern "C" bool mcl_winograd_weight(const float *x, const float *g, float *dw, const int64_t *sizes);

namespace {

Window window(AutogradContext *context) {
  auto all = context->saved_data["window"].toIntVector();
  return {all[0], all[1], all[2], all[3]};
}

void save(AutogradContext *context, Window w) {
  context->saved_data["window"] = std::vector<int64_t>{w.stride, w.padding, w.dilation, w.groups};
}

std::array<int64_t, 2> both(int64_t n) { return {n, n}; }

Tensor libtorch_backward(const Tensor &g, const Tensor &x, const Tensor &w, Window win, bool of_input) {
  auto grads = at::convolution_backward(g, x, w, c10::nullopt, both(win.stride), both(win.padding), both(win.dilation), false, both(0),
                                        win.groups, {of_input, !of_input, false});
  return of_input ? std::get<0>(grads) : std::get<1>(grads);
}

bool plain_floats(const Tensor &t) { return t.device().is_cpu() && t.scalar_type() == at::kFloat; }

// The window that kernels of ours are for, whatever the stride.
bool three_by_three(const Tensor &w, Window win) {
  return w.size(2) == 3 && w.size(3) == 3 && win.padding == 1 && win.dilation == 1 && win.groups == 1;
}

// Our kernel where it serves; an undefined tensor otherwise. `turned`: the gradient after the input, from that after the output.
Tensor by_winograd(const Tensor &x, const Tensor &w, Window win, bool turned) {
  if (!plain_floats(x) || !plain_floats(w) || !three_by_three(w, win) || win.stride != 1 || x.dim() != 4) return {};
  int64_t sizes[] = {x.size(0), x.size(2), x.size(3), w.size(1), w.size(0)};
  Tensor last_x = last(x), dense_w = w.contiguous();
  Tensor y = at::empty({x.size(0), turned ? w.size(1) : w.size(0), x.size(2), x.size(3)}, x.options().memory_format(at::MemoryFormat::ChannelsLast));
  bool done = mcl_winograd(last_x.const_data_ptr<float>(), dense_w.const_data_ptr<float>(), y.mutable_data_ptr<float>(), sizes, turned);
  return done ? y : Tensor();
}

// As above; with stride 2 another kernel.
Tensor weight_by_kernel(const Tensor &x, const Tensor &g, const Tensor &w, Window win) {
  if (!plain_floats(x) || !plain_floats(g) || !three_by_three(w, win)) return {};
  Tensor last_x = last(x), last_g = last(g);
  if (win.stride == 1) {
    int64_t sizes[] = {x.size(0), x.size(2), x.size(3), w.size(1), w.size(0)};
    Tensor dw = at::empty(w.sizes(), w.options().memory_format(c10::nullopt));
    if (mcl_winograd_weight(last_x.const_data_ptr<float>(), last_g.const_data_ptr<float>(), dw.mutable_data_ptr<float>(), sizes)) return dw;
  }
  Tensor dw = at::empty({3, 3, w.size(1), w.size(0)}, w.options().memory_format(c10::nullopt));
  int64_t sizes[] = {x.size(0), x.size(2), x.size(3), x.size(1), g.size(2), g.size(3), g.size(1), win.stride};
  if (!mcl_weight_gradient(last_x.const_data_ptr<float>(), last_g.const_data_ptr<float>(), dw.mutable_data_ptr<float>(), sizes)) return {};
  return dw.permute({3, 2, 0, 1}).contiguous();
}

struct Weight;
struct Input;

struct Convolution : Function<Convolution> {
  static Tensor forward(AutogradContext *context, const Tensor &x, const Tensor &w, Window win) {
    save(context, win);
    context->save_for_backward({x, w});
    Tensor y = by_winograd(x, w, win, false);
    if (y.defined()) return y;
    return at::convolution(x, w, c10::nullopt, both(win.stride), both(win.padding), both(win.dilation), false, both(0), win.groups);
  }
  static variable_list backward(AutogradContext *context, variable_list grads);
};

// `like`: a tensor of the input's size and layout.
struct Input : Function<Input> {
  static Tensor forward(AutogradContext *context, const Tensor &g, const Tensor &w, const Tensor &like, Window win) {
    save(context, win);
    context->save_for_backward({g, w});
    Tensor dx = by_winograd(g, w, win, true);
    return dx.defined() ? dx : libtorch_backward(g, like, w, win, true);
  }
  static variable_list backward(AutogradContext *context, variable_list grads);
};

// `like`: a tensor of the weight's size.
struct Weight : Function<Weight> {
  static Tensor forward(AutogradContext *context, const Tensor &x, const Tensor &g, const Tensor &like, Window win) {
    save(context, win);
    context->save_for_backward({x, g});
    Tensor dw = weight_by_kernel(x, g, like, win);
    return dw.defined() ? dw : libtorch_backward(g, x, like, win, false);
  }
  static variable_list backward(AutogradContext *context, variable_list grads);
};

variable_list Convolution::backward(AutogradContext *context, variable_list grads) {
  auto saved = context->get_saved_variables();
  auto win = window(context);
  const Tensor &x = saved[0], &w = saved[1], &dy = grads[0];
  Tensor dx, dw;
  if (context->needs_input_grad(0)) dx = Input::apply(dy, w, x.detach(), win);
  if (context->needs_input_grad(1)) dw = Weight::apply(x, dy, w.detach(), win);
  return {dx, dw, Tensor()};
}

variable_list Input::backward(AutogradContext *context, variable_list grads) {
  auto saved = context->get_saved_variables();
  auto win = window(context);
  const Tensor &g = saved[0], &w = saved[1], &ddx = grads[0];
  Tensor dg, dw;
  if (context->needs_input_grad(0)) dg = Convolution::apply(ddx, w, win);
  if (context->needs_input_grad(1)) dw = Weight::apply(ddx, g, w.detach(), win);
  return {dg, dw, Tensor(), Tensor()};
}

variable_list Weight::backward(AutogradContext *context, variable_list grads) {
  auto saved = context->get_saved_variables();
  auto win = window(context);
  const Tensor &x = saved[0], &g = saved[1], &ddw = grads[0];
  Tensor dx, dg;
  if (context->needs_input_grad(0)) dx = Input::apply(g, ddw, x.detach(), win);
  if (context->needs_input_grad(1)) dg = Convolution::apply(x, ddw, win);
  return {dx, dg, Tensor(), Tensor()};
}

} // namespace

namespace mcl {
Tensor input_gradient(const Tensor &g, const Tensor &w, const Tensor &like, Window win) { return Input::apply(g, w, like, win); }
Tensor weight_gradient(const Tensor &x, const Tensor &g, const Tensor &like, Window win) { return Weight::apply(x, g, like, win); }
} // namespace mcl

// The convolution of x and w, or null and a message that the caller frees.
extern "C" Tensor *mcl_convolution(const Tensor *x, const Tensor *w, int64_t stride, int64_t padding, int64_t dilation, int64_t groups,
                                   char **error) {
  return answer(error, [&] { return Convolution::apply(*x, *w, Window{stride, padding, dilation, groups}); });
}
