//! Host memory that a CUDA device reads and writes on its own while this thread goes on, and how to ask whether it has.

use std::ffi::{CStr, c_char, c_void};

use tch::Tensor;
use torch_sys::C_tensor;

use super::cpp;

unsafe extern "C" {
    fn mcl_pinned(bytes: i64, error: *mut *mut c_char) -> *mut C_tensor;
    fn mcl_send_home(from: *const C_tensor, to: *mut C_tensor, error: *mut *mut c_char) -> *mut c_void;
    fn mcl_event_happened(event: *const c_void) -> bool;
    fn mcl_event_drop(event: *mut c_void);
}

/// Page-locked host memory, u8 `[bytes]`: copies between it and a device need not be waited for.
pub fn pinned(bytes: usize) -> Tensor {
    // SAFETY: the answer is ours.
    unsafe { cpp::tensor(|| format!("{bytes} bytes of pinned memory"), |error| mcl_pinned(bytes as i64, error)) }
}

/// A small tensor of the host on a device; nobody waits for the copy.
pub fn send(values: &Tensor, device: tch::Device) -> Tensor {
    if !device.is_cuda() || values.device().is_cuda() {
        return values.to_device(device);
    }
    let bytes = values.numel() * values.kind().elt_size_in_bytes();
    let mut locked = pinned(bytes).view_dtype(values.kind()).view(values.size().as_slice());
    locked.copy_(values);
    locked.to_device_(device, values.kind(), true, false)
}

/// A scalar on its way from a device to the host.
pub struct Arrival {
    value: Tensor,
    event: *mut c_void,
}

impl Arrival {
    /// Sends the f32 scalar as it will be when the device has done all it was asked to do so far. Nobody waits.
    pub fn of(scalar: &Tensor) -> Arrival {
        let mut value = pinned(4).view_dtype(tch::Kind::Float).squeeze();
        let mut error = std::ptr::null_mut();
        // SAFETY: the tensors live through the call; what comes back is ours until `drop`, or a message made by `strdup`.
        let event = unsafe { mcl_send_home(scalar.as_ptr(), value.as_mut_ptr(), &mut error) };
        if event.is_null() {
            // SAFETY: as above.
            let message = unsafe { CStr::from_ptr(error).to_string_lossy().into_owned() };
            // SAFETY: as above.
            unsafe { libc::free(error.cast()) };
            panic!("a number from {:?}: {message}", scalar.device());
        }
        Arrival { value, event }
    }

    /// The scalar, once it is there.
    pub fn value(&self) -> Option<f64> {
        // SAFETY: the event lives as long as this.
        unsafe { mcl_event_happened(self.event) }.then(|| self.value.double_value(&[]))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        // SAFETY: made by `mcl_event`, dropped once.
        unsafe { mcl_event_drop(self.event) }
    }
}
