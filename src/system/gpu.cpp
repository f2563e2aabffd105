// libtorch's settings for CUDA and the memory of a GPU: tch binds neither. Nothing here needs a libtorch with CUDA to link.
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>

// Convolutions and matrix products of f32 in f32, or in TF32; cuDNN's deterministic algorithms, or those its autotuner finds fastest.
extern "C" void mcl_gpu_settings(bool tf32, bool deterministic) {
  auto &context = at::globalContext();
  context.setAllowTF32CuBLAS(tf32);
  context.setAllowTF32CuDNN(tf32);
  context.setDeterministicCuDNN(deterministic);
  context.setBenchmarkCuDNN(!deterministic);
}

// Bytes: held by tensors now, the most that was held, free on the device, on the device in all. False where nobody can say.
extern "C" bool mcl_gpu_memory(int device, int64_t out[4]) {
  try {
    if (!at::hasCUDA()) return false;
    at::globalContext().lazyInitDevice(at::kCUDA);
    auto *allocator = c10::getDeviceAllocator(at::kCUDA);
    const auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto &held = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    const auto [free, all] = allocator->getMemoryInfo(static_cast<c10::DeviceIndex>(device));
    out[0] = held.current, out[1] = held.peak, out[2] = static_cast<int64_t>(free), out[3] = static_cast<int64_t>(all);
    return true;
  } catch (const std::exception &) {
    return false;
  }
}
