// Memory that a device reads and writes on its own, and when it has: tch binds neither pinned memory that is not a copy nor events. The
// classes are c10's, which every build of libtorch has.
#include <cstring>
#include <exception>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {
template <typename Work>
auto guarded(char **error, Work work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception &e) {
    *error = strdup(e.what());
    return nullptr;
  }
}
}  // namespace

/// `bytes` of page-locked host memory.
extern "C" at::Tensor *mcl_pinned(int64_t bytes, char **error) {
  return guarded(error, [&] { return new at::Tensor(at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true))); });
}

/// Copies `from`, on a device, into pinned `to` without waiting. The event happens when it is there.
extern "C" c10::Event *mcl_send_home(const at::Tensor *from, at::Tensor *to, char **error) {
  return guarded(error, [&] {
    to->copy_(*from, /*non_blocking=*/true);
    auto event = new c10::Event(from->device().type());
    event->record(c10::impl::VirtualGuardImpl(from->device().type()).getStream(from->device()));
    return event;
  });
}

extern "C" bool mcl_event_happened(const c10::Event *event) { return event->query(); }

extern "C" void mcl_event_drop(c10::Event *event) { delete event; }
