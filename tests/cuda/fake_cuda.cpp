// A CUDA device that is not there: `cuda:0` and `cuda:1` in protected host memory, for machines without a GPU.
//
// tests/cuda/mod.rs compiles it against the CPU libtorch of the project and preloads it into unchanged programs, where it answers to the
// CUDA dispatch key. By hand:
//
//   LT=$(readlink -f .libtorch)
//   g++ -O1 -fPIC -shared -std=c++17 -w -D_GLIBCXX_USE_CXX11_ABI=1 -I$LT/include -I$LT/include/torch/csrc/api/include \
//       tests/cuda/fake_cuda.cpp -o libfakecuda.so -L$LT/lib -ltorch_cpu -lc10 -Wl,-rpath,$LT/lib
//   FAKE_CUDA_STATS=1 LD_PRELOAD=$PWD/libfakecuda.so mcl-train run ... --device cuda:0
//
// What it proves: where tensors are made and used (mixing devices raises libtorch's own error), that no host code reads device memory
// (it faults), that nothing relies on fresh memory being zero (it is full of NaN), device indices, saved and resumed state, paths taken on
// `is_cuda`, and what happens when memory runs out. Values come from the CPU kernels, so runs can be compared with the CPU's.
// What it counts: launches (operators that would be kernels; a fused or foreach operator is one), copies between host and device, reads of
// a scalar, and waits (everything that stops a real GPU's queue).
// What it does not prove: real kernels and their rounding, cuDNN, hazards between streams, speed.
//
// Environment:
//   FAKE_CUDA_STATS=1         counts and libtorch's settings for CUDA, on stderr, when the program ends
//   FAKE_CUDA_LIST=1          with it, how often each operator was launched
//   FAKE_CUDA_MEMORY_MB=n     so much memory a device, then c10::OutOfMemoryError as the real allocator raises it
//   FAKE_CUDA_LATE=1          non-blocking copies from or to pinned memory are performed as late as a real device may
//   FAKE_CUDA_TF32=1          where libtorch's settings allow TF32, convolutions and matrix products round their factors as it does
//   FAKE_CUDA_WRONG=1         convolutions round their factors whatever the settings say: a device that deviates
//   FAKE_CUDA_REFUSE=1        everything that waits for the device is refused from the start (see fake_cuda_refuse)
//
// For a program that knows of it (a bench or a test looks these up by name):
//   fake_cuda_counts(long out[5])   launches, copies to the device, copies to the host, reads, waits since the start
//   fake_cuda_refuse(int on)        refuse what waits for the device, from now on or no longer
//   fake_cuda_settings(int out[4])  TF32 in matrix products, TF32 in cuDNN, cuDNN deterministic, cuDNN autotuner
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {
using at::Tensor;
using std::optional;

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr int kDevices = 2;
thread_local c10::DeviceIndex current = 0;

bool flag(const char *name) {
  const char *value = getenv(name);
  return value && *value && strcmp(value, "0");
}

// ---- what is counted

std::atomic<long> launches{0}, to_device{0}, to_host{0}, reads{0}, waits{0};
std::atomic<bool> refusing{flag("FAKE_CUDA_REFUSE")};
std::mutex names_lock;
std::map<std::string, long> names;

void launched(const std::string &name) {
  launches++;
  static const bool listed = flag("FAKE_CUDA_LIST");
  if (!listed) return;
  std::lock_guard<std::mutex> guard(names_lock);
  names[name]++;
}

/// Counts what stops the queue of a real GPU; raises where that is refused.
void waited(const std::string &what) {
  waits++;
  TORCH_CHECK(!refusing, "fake CUDA: ", what, " waits for the device inside a counted step");
}

void settings(int out[4]) {
  auto &context = at::globalContext();
  out[0] = context.allowTF32CuBLAS();
  out[1] = context.allowTF32CuDNN();
  out[2] = context.deterministicCuDNN();
  out[3] = context.benchmarkCuDNN();
}

struct Report {
  Report() { at::globalContext(); } // made before this, so that it is still there when this ends
  ~Report() {
    if (!flag("FAKE_CUDA_STATS")) return;
    int set[4];
    settings(set);
    std::ostringstream line; // written at once: two ranks share one stderr
    line << "fake-cuda launches " << launches << " to_device " << to_device << " to_host " << to_host << " reads " << reads << " waits "
              << waits << " tf32_matmul " << set[0] << " tf32_cudnn " << set[1] << " deterministic " << set[2] << " autotuner " << set[3] << "\n";
    for (auto &name : names) line << "  " << name.second << " " << name.first << "\n";
    std::cerr << line.str() << std::flush;
  }
} report;

// ---- memory: pages nobody may touch, opened only while a kernel runs

struct Block {
  size_t bytes;
  int device;
  int opened;
};
std::mutex blocks_lock;
std::map<char *, Block> blocks;
/// Freed blocks by device and size, still closed: mapping pages anew costs more than most kernels.
std::map<std::pair<int, size_t>, std::vector<char *>> spare;
c10::CachingDeviceAllocator::DeviceStats stats[kDevices];

size_t whole_pages(size_t bytes) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

size_t capacity() {
  static const char *limit = getenv("FAKE_CUDA_MEMORY_MB");
  static const size_t bytes = limit ? strtoull(limit, nullptr, 10) << 20 : size_t(64) << 30;
  return bytes;
}

void release(void *p) {
  if (!p) return;
  std::lock_guard<std::mutex> guard(blocks_lock);
  auto it = blocks.find((char *)p);
  if (it == blocks.end()) return;
  auto [bytes, device, opened] = it->second;
  stats[device].allocated_bytes[0].decrease(bytes);
  stats[device].allocation[0].decrease(1);
  if (opened) mprotect(p, bytes, PROT_NONE);
  spare[{device, bytes}].push_back((char *)p);
  blocks.erase(it);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t asked) override {
    c10::Device device(kDevice, current);
    if (!asked) return {nullptr, nullptr, &release, device};
    size_t bytes = whole_pages(asked);
    std::lock_guard<std::mutex> guard(blocks_lock);
    auto &own = stats[current];
    size_t used = own.allocated_bytes[0].current;
    if (used + bytes > capacity()) {
      own.num_ooms++;
      auto mib = [](size_t n) { return std::to_string(n >> 20) + "." + std::to_string((n % (1 << 20)) * 100 >> 20) + " MiB"; };
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", mib(asked), ". GPU ", int(current),
                       " has a total capacity of ", mib(capacity()), " of which ", mib(capacity() - used), " is free.");
    }
    auto &free = spare[{current, bytes}];
    char *p;
    if (free.empty()) {
      p = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(p != MAP_FAILED, "fake CUDA: the host has no memory left");
    } else {
      p = free.back();
      free.pop_back();
      mprotect(p, bytes, PROT_READ | PROT_WRITE);
    }
    memset(p, 0xff, bytes); // NaN in every floating type, -1 in every other: nobody may rely on fresh memory
    mprotect(p, bytes, PROT_NONE);
    blocks[p] = {bytes, current, 0};
    own.allocated_bytes[0].increase(bytes);
    own.reserved_bytes[0].current = std::max(own.reserved_bytes[0].current, own.allocated_bytes[0].current);
    own.reserved_bytes[0].peak = own.reserved_bytes[0].current;
    own.allocation[0].increase(1);
    return {p, p, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *, const void *, std::size_t) const override { TORCH_CHECK(false, "fake CUDA: copy_data"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr &, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> guard(blocks_lock);
    return stats[d];
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> guard(blocks_lock);
    stats[d].allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> guard(blocks_lock);
    return {capacity() - stats[d].allocated_bytes[0].current, capacity()};
  }
} memory;

/// The block around an address can be read and written while this lives.
struct Opened {
  char *block = nullptr;
  explicit Opened(const void *address) {
    if (!address) return;
    std::lock_guard<std::mutex> guard(blocks_lock);
    auto it = blocks.upper_bound((char *)address);
    if (it == blocks.begin()) return;
    --it;
    if ((char *)address >= it->first + it->second.bytes) return;
    block = it->first;
    if (it->second.opened++ == 0) mprotect(block, it->second.bytes, PROT_READ | PROT_WRITE);
  }
  Opened(Opened &&other) : block(other.block) { other.block = nullptr; }
  Opened(const Opened &) = delete;
  ~Opened() {
    if (!block) return;
    std::lock_guard<std::mutex> guard(blocks_lock);
    auto it = blocks.find(block);
    if (it != blocks.end() && --it->second.opened == 0) mprotect(block, it->second.bytes, PROT_NONE);
  }
};

// ---- pinned memory, and copies that are performed late

std::mutex pinned_lock;
std::map<char *, size_t> pinned;

void unpin(void *p) {
  if (!p) return;
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase((char *)p);
  free(p);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &unpin, at::kCPU};
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[(char *)p] = bytes;
    return {p, p, &unpin, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void *to, const void *from, std::size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_memory;

bool is_pinned(const void *p) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto it = pinned.upper_bound((char *)p);
  if (it == pinned.begin()) return false;
  --it;
  return (char *)p < it->first + it->second;
}

/// A tensor of the host over the same memory; to be used while it is open.
Tensor host(const Tensor &t) {
  if (!t.defined() || !t.is_cuda()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

/// A copy that was asked for and is still to come. To the device: the host's memory is read when it is performed, so a buffer that was
/// written again too early gives wrong numbers. To the host: `from` holds what the device had when it was asked.
struct Late {
  uint64_t number;
  Tensor to, from;
};
std::recursive_mutex late_lock;
std::deque<Late> late;
uint64_t late_number = 0;

void perform(const Late &copy) {
  Opened a(copy.to.is_cuda() ? copy.to.storage().data() : nullptr);
  host(copy.to).copy_(copy.from);
}

/// The queue of a real device has got as far as `number`.
void reach(uint64_t number) {
  std::lock_guard<std::recursive_mutex> guard(late_lock);
  while (!late.empty() && late.front().number <= number) {
    perform(late.front());
    late.pop_front();
  }
}

void reach_all() { reach(UINT64_MAX); }

/// A kernel is about to use this tensor: what was to be copied into it is there now.
void arrive(const Tensor &t) {
  std::lock_guard<std::recursive_mutex> guard(late_lock);
  for (auto it = late.begin(); it != late.end();) {
    if (it->to.is_cuda() && it->to.storage().data() == t.storage().data()) {
      perform(*it);
      it = late.erase(it);
    } else {
      ++it;
    }
  }
}

struct OpenedTensor {
  Opened opened;
  Tensor host_;
  static const void *memory_of(const Tensor &t) {
    if (!t.defined() || !t.is_cuda() || !t.storage().data()) return nullptr;
    arrive(t);
    return t.storage().data();
  }
  explicit OpenedTensor(const Tensor &t) : opened(memory_of(t)), host_(host(t)) {}
};

// ---- the device

struct Event {
  uint64_t number;
  bool asked;
};
std::atomic<c10::StreamId> streams{0};
thread_local c10::StreamId stream_now[kDevices] = {};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    current = d.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, current); }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  static c10::Device whole(c10::Device d) { return d.has_index() ? d : c10::Device(kDevice, current); }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, whole(d), stream_now[whole(d).index()]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, whole(d)); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::UNSAFE, whole(d), ++streams); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    auto before = getStream(s.device());
    stream_now[s.device_index()] = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void **event, const c10::Stream &, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    std::lock_guard<std::recursive_mutex> guard(late_lock);
    *(Event *)*event = {late_number, false};
  }
  void block(void *, const c10::Stream &) const override {}
  /// False at first where something is still to come, true when asked again: whoever waits by asking gets through.
  bool queryEvent(void *event) const override {
    auto *e = (Event *)event;
    if (!e) return true;
    std::lock_guard<std::recursive_mutex> guard(late_lock);
    if (!e->asked && !late.empty() && late.front().number <= e->number) {
      e->asked = true;
      return false;
    }
    reach(e->number);
    return true;
  }
  void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override { delete (Event *)event; }
  bool queryStream(const c10::Stream &) const override {
    reach_all();
    return true;
  }
  void synchronizeStream(const c10::Stream &) const override {
    waited("a stream's synchronize");
    reach_all();
  }
  void synchronizeEvent(void *event) const override {
    waited("an event's synchronize");
    if (event) reach(((Event *)event)->number);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    waited("the device's synchronize");
    reach_all();
  }
  double elapsedTime(void *, void *, const c10::DeviceIndex) const override { return 0; }
};
}  // namespace

namespace at {
/// The registry looks for a class of this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto before = current;
    current = d;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    auto before = current;
    if (d >= 0) current = d;
    return before;
  }
  const Generator &getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Device getDeviceFromPtr(void *p) const override {
    std::lock_guard<std::mutex> guard(blocks_lock);
    auto it = blocks.upper_bound((char *)p);
    TORCH_CHECK(it != blocks.begin(), "fake CUDA: not device memory");
    return Device(kDevice, (--it)->second.device);
  }
  bool isPinnedPtr(const void *p) const override { return is_pinned(p); }
  Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator *getCUDADeviceAllocator() const override { return &memory; }
  void deviceSynchronize(DeviceIndex) const override {
    waited("the device's synchronize");
    reach_all();
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace {
REGISTER_ALLOCATOR(kDevice, &memory);
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- kernels that need to know about the memory

Tensor empty(c10::IntArrayRef size, optional<at::ScalarType> kind, optional<at::Layout>, optional<at::Device> d, optional<bool>,
             optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(d));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(kind), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, optional<at::ScalarType> kind, optional<at::Layout>,
                     optional<at::Device> d, optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(d));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(kind));
}

Tensor &copy_(Tensor &to, const Tensor &from, bool non_blocking) {
  static const bool copies_late = flag("FAKE_CUDA_LATE");
  if (to.is_cuda() && from.is_cuda()) {
    launched("aten::copy_");
    OpenedTensor a(to), b(from);
    a.host_.copy_(b.host_);
    return to;
  }
  (to.is_cuda() ? to_device : to_host)++;
  const Tensor &on_host = to.is_cuda() ? from : to;
  // As the real one: anything but a non-blocking copy of pinned memory makes the host wait for the queue.
  if (!non_blocking || !is_pinned(on_host.data_ptr())) {
    if (!to.is_cuda() || !non_blocking) {
      waited(to.is_cuda() ? "a blocking copy to the device" : "a copy to the host");
      reach_all();
    }
    OpenedTensor a(to), b(from);
    a.host_.copy_(b.host_);
    return to;
  }
  OpenedTensor a(to), b(from);
  if (!copies_late) {
    a.host_.copy_(b.host_);
    return to;
  }
  std::lock_guard<std::recursive_mutex> guard(late_lock);
  // `detach` keeps the memory alive, as the allocator of pinned memory does until the copy is through.
  late.push_back({++late_number, to.detach(), to.is_cuda() ? from.detach() : b.host_.clone()});
  return to;
}

const Tensor &resize_(const Tensor &t, c10::IntArrayRef size, optional<at::MemoryFormat>) {
  if (t.sizes() != size) const_cast<Tensor &>(t).set_(at::empty(size, t.options()));
  return t;
}

Tensor copy_from(const Tensor &from, const Tensor &to, bool non_blocking) { return copy_(const_cast<Tensor &>(to), from, non_blocking); }

Tensor copy_from_and_resize(const Tensor &from, const Tensor &to) {
  resize_(to, from.sizes(), {});
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const Tensor &t) {
  reads++;
  waited("reading a number");
  reach_all();
  OpenedTensor a(t);
  return a.host_.item();
}

Tensor &set_tensor(Tensor &t, const Tensor &source) {
  auto *impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return t;
}

Tensor as_strided(const Tensor &t, c10::IntArrayRef size, c10::IntArrayRef stride, optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
Tensor view(const Tensor &t, c10::IntArrayRef size) { return at::native::view(t, size); }
Tensor reshape_alias(const Tensor &t, c10::IntArrayRef size, c10::IntArrayRef stride) { return at::native::_reshape_alias(t, size, stride); }
Tensor unfold(const Tensor &t, int64_t d, int64_t size, int64_t step) { return at::native::unfold(t, d, size, step); }
void record_stream(Tensor &, c10::Stream) {}

// ---- everything else: the CPU's kernel on the same memory

/// Operators whose answer has a size that only the device knows, or a number for the host: a real GPU stops for them.
bool stops(const std::string &name, c10::ArrayRef<c10::IValue> args) {
  static const std::set<std::string> known = {"aten::nonzero",          "aten::masked_select", "aten::_unique2",  "aten::unique_dim",
                                              "aten::unique_consecutive", "aten::bincount",      "aten::equal",     "aten::_unique",
                                              "aten::repeat_interleave",  "aten::histc",         "aten::nonzero_static"};
  if (known.count(name)) return true;
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  for (const c10::IValue &index : args[1].toListRef())
    if (index.isTensor() && index.toTensor().defined() && (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte))
      return true;
  return false;
}

/// The factors of an operator that a real GPU would compute in TF32.
bool in_tf32(const std::string &name) {
  static const bool asked = flag("FAKE_CUDA_TF32");
  static const std::set<std::string> products = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::mv"};
  static const bool wrong = flag("FAKE_CUDA_WRONG");
  if (wrong && name == "aten::convolution") return true;
  if (!asked) return false;
  if (name == "aten::convolution" || name == "aten::convolution_backward") return at::globalContext().allowTF32CuDNN();
  return products.count(name) && at::globalContext().allowTF32CuBLAS();
}

/// Ten bits of mantissa instead of 23, to the nearest.
Tensor rounded(const Tensor &t) {
  return t.contiguous().view(at::kInt).add(0x1000).bitwise_and(~0x1fff).view(at::kFloat);
}

struct Call {
  std::string name;
  std::deque<OpenedTensor> opened;
  /// Outputs that the kernel may give a size: theirs on the device, and what the kernel fills instead.
  std::vector<std::pair<Tensor, Tensor>> sized;
  optional<c10::Device> device;

  /// The device of the call; libtorch's kernels raise this where tensors are on several. Numbers may come from the host, and indices.
  void meet(const Tensor &t, bool may_be_on_host) {
    if (!t.defined() || (!t.is_cuda() && may_be_on_host)) return;
    TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                " and ", t.device(), "! (in ", name, ")");
    device = t.device();
  }

  Tensor take(const Tensor &t, bool is_output) {
    if (!t.defined() || !t.is_cuda()) return t;
    // Some kernels of the CPU resize what they are given on the way (smooth_l1_loss), even where only one number is left in the end.
    if (is_output && t.numel() <= 1) {
      sized.push_back({t, at::empty({0}, t.options().device(at::kCPU))});
      return sized.back().second;
    }
    opened.emplace_back(t);
    return opened.back().host_;
  }

  Tensor give(const Tensor &t) {
    if (!t.defined()) return t;
    Tensor out = at::empty_strided(t.sizes(), t.strides(), t.options().device(*device));
    OpenedTensor a(out);
    a.host_.copy_(t);
    return out;
  }
};

void kernel(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  const auto &schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  Call call;
  call.name = schema.name();
  launched(toString(op.operator_name()));
  if (stops(call.name, c10::ArrayRef<c10::IValue>(stack->data() + first, count))) {
    waited(call.name);
    reach_all();
  }
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  const bool tf32 = in_tf32(call.name);
  const bool indexes = call.name.find("index") != std::string::npos;
  for (size_t i = 0; i < count; i++) {
    const auto &argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    const bool is_output = written && argument.kwarg_only();
    c10::IValue &slot = (*stack)[first + i];
    if (slot.isTensor()) {
      const Tensor &t = given[i].toTensor();
      call.meet(t, !written && t.defined() && t.dim() == 0);
      slot = call.take(t, is_output);
      if (tf32 && !written && t.defined() && t.scalar_type() == at::kFloat && t.dim() > 1) slot = rounded(slot.toTensor());
    } else if (slot.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &t : given[i].toTensorList().vec()) {
        call.meet(t, !written && t.dim() == 0);
        list.push_back(call.take(t, is_output));
      }
      slot = list;
    } else if (slot.isOptionalTensorList()) {
      c10::List<optional<Tensor>> list;
      for (const optional<Tensor> &t : given[i].toOptionalTensorList().vec()) {
        if (t) call.meet(*t, indexes || t->dim() == 0);
        if (t && t->defined() && !t->is_cuda()) {
          to_device++;
          waited("an index in host memory");
        }
        list.push_back(t ? optional<Tensor>(call.take(*t, false)) : optional<Tensor>());
      }
      slot = list;
    } else if (slot.isDevice()) {
      if (!call.device && slot.toDevice().is_cuda()) call.device = slot.toDevice();
      slot = c10::Device(at::kCPU);
    }
  }
  if (!call.device) call.device = c10::Device(kDevice, current);
  if (!call.device->has_index()) call.device = c10::Device(kDevice, current);
  for (const auto &answer : schema.returns()) {
    TORCH_CHECK(!answer.alias_info() || answer.alias_info()->isWrite(), "fake CUDA: the view ", call.name, " is not known yet");
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto &[theirs, filled] : call.sized) {
    resize_(theirs, filled.sizes(), {});
    OpenedTensor a(theirs);
    a.host_.copy_(filled);
  }
  // What an argument aliases is given back as that argument; what is new goes to the device.
  const auto answers = schema.returns().size();
  for (size_t i = 0; i < answers; i++) {
    c10::IValue &slot = (*stack)[stack->size() - answers + i];
    const auto *alias = schema.returns()[i].alias_info();
    if (alias) {
      for (size_t j = 0; j < count; j++) {
        const auto *own = schema.arguments()[j].alias_info();
        if (own && own->beforeSets() == alias->beforeSets()) slot = given[j];
      }
    } else if (slot.isTensor()) {
      slot = call.give(slot.toTensor());
    } else if (slot.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &t : slot.toTensorList().vec()) list.push_back(call.give(t));
      slot = list;
    }
  }
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(read_scalar));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  // One kernel (or one call of cuDNN) on a GPU, but taken apart by libtorch for a device it does not know.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  for (const auto &op : c10::Dispatcher::singleton().getAllOpNames()) {
    for (const char *start : {"aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "aten::_amp_"}) {
      if (op.name.rfind(start, 0) == 0) m.impl(toString(op).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    }
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

extern "C" void fake_cuda_counts(long out[5]) {
  out[0] = launches, out[1] = to_device, out[2] = to_host, out[3] = reads, out[4] = waits;
}
extern "C" void fake_cuda_refuse(int on) { refusing = on; }
extern "C" void fake_cuda_settings(int out[4]) { settings(out); }

/// A CUDA-aware MPI reads and writes device memory itself: this one stands before the MPI of the program, if it has one. Handles of Open
/// MPI and MPICH pass through registers alike.
extern "C" int MPI_Allreduce(const void *sent, void *received, int count, void *type, void *operation, void *communicator) {
  using Call = int (*)(const void *, void *, int, void *, void *, void *);
  static const auto real = (Call)dlsym(RTLD_NEXT, "MPI_Allreduce");
  reach_all();
  Opened from(sent), to(received);
  return real(sent, received, count, type, operation, communicator);
}
