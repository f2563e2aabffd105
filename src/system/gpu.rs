//! What a GPU is set to and how much memory it has; and libtorch's part for GPUs, where the build did not link it.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use tch::Device;

use super::machine;

unsafe extern "C" {
    fn mcl_gpu_settings(tf32: bool, deterministic: bool);
    fn mcl_gpu_memory(device: i32, out: *mut i64) -> bool;
}

/// Loads libtorch's part for CUDA where it lies beside the libtorch this process runs on and there is a driver. A program that was built
/// with the CPU's libtorch and runs on one with CUDA (installed from a wheel) computes on the GPU then. To be called before anybody asks
/// for a device.
pub fn bring() {
    let library = machine::libtorch_folder().join("libtorch_cuda.so");
    let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|device| Path::new(device).exists());
    let Some(name) = CString::new(library.as_os_str().as_bytes()).ok().filter(|_| driver && library.exists()) else { return };
    // SAFETY: a library of libtorch's own, whose start-up code announces its kernels to the libtorch that is loaded. Where that fails
    // there is no GPU, which `mcl-eval doctor` says.
    unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
}

/// Sets how this process computes on GPUs. Without `tf32`, numbers of f32 stay so: libtorch by itself lets cuDNN round the factors of a
/// convolution to ten bits. `deterministic` takes cuDNN's deterministic algorithms; without it cuDNN tries all and takes the fastest.
/// Nothing changes on the CPU.
pub fn set(tf32: bool, deterministic: bool) {
    // SAFETY: sets four flags of libtorch.
    unsafe { mcl_gpu_settings(tf32, deterministic) }
}

/// The memory of a GPU, in MB (2^20 bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Held by this process's tensors.
    pub held_mb: u64,
    /// The most that this process's tensors held.
    pub peak_mb: u64,
    /// Free for everybody.
    pub free_mb: u64,
    /// In all.
    pub total_mb: u64,
}

/// Of a GPU; none for the CPU, and where libtorch does not say.
pub fn memory(device: Device) -> Option<Memory> {
    let Device::Cuda(number) = device else { return None };
    let mut bytes = [0i64; 4];
    // SAFETY: four numbers are written, and only where the answer is true.
    let known = unsafe { mcl_gpu_memory(number as i32, bytes.as_mut_ptr()) };
    let [held_mb, peak_mb, free_mb, total_mb] = bytes.map(|b| (b >> 20) as u64);
    known.then_some(Memory { held_mb, peak_mb, free_mb, total_mb })
}
