// Autocast of this thread: tch can switch it on for CUDA alone, and in f16 alone.
#include <ATen/autocast_mode.h>

// kind: 0 f16, 1 bf16, -1 off again.
extern "C" void mcl_autocast(bool cuda, int kind) {
  auto device = cuda ? at::kCUDA : at::kCPU;
  if (kind >= 0) {
    at::autocast::set_autocast_dtype(device, kind == 1 ? at::kBFloat16 : at::kHalf);
    at::autocast::increment_nesting();
  } else if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache(); // of weights in the low precision: they change with the next step
  }
  at::autocast::set_autocast_enabled(device, kind >= 0);
}
