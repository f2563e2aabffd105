//! What our C++ files answer: a tensor to be owned, or null and a message to be freed.

use std::ffi::{CStr, c_char};

use tch::Tensor;
use torch_sys::C_tensor;

/// Takes over the answer of `call`, which gets the place for a message. A message is a fault in our own use of libtorch: it panics, as
/// tch's own calls do.
///
/// # Safety
/// `call` returns a new tensor that nobody else owns, or null with a message made by `strdup`.
pub unsafe fn tensor(what: impl FnOnce() -> String, call: impl FnOnce(*mut *mut c_char) -> *mut C_tensor) -> Tensor {
    let mut error = std::ptr::null_mut();
    let answer = call(&mut error);
    // SAFETY: as the caller promises.
    unsafe {
        if answer.is_null() {
            let message = CStr::from_ptr(error).to_string_lossy().into_owned();
            libc::free(error.cast());
            // In the form of tch's own, so that what libtorch refused is told from a fault of ours.
            panic!("{}: {:?}", what(), tch::TchError::Torch(message));
        }
        Tensor::from_ptr(answer)
    }
}
