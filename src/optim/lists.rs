//! Lists of tensors stepped, measured and scaled in a handful of launches, for CUDA: small networks are bound there by how many kernels
//! are started, not by what these compute. Roundings may differ from the loops that the CPU keeps.

use std::ffi::{CStr, c_char};

use tch::Tensor;
use torch_sys::C_tensor;

type Pointers = *const *mut C_tensor;

unsafe extern "C" {
    fn mcl_lists_sgd(
        vars: Pointers,
        grads: Pointers,
        buffers: Pointers,
        count: usize,
        lr: f64,
        momentum: f64,
        weight_decay: f64,
        nesterov: bool,
        skip: *const C_tensor,
    ) -> *mut c_char;
    fn mcl_lists_adam(
        vars: Pointers,
        grads: Pointers,
        first: Pointers,
        second: Pointers,
        count: usize,
        steps: i64,
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        skip: *const C_tensor,
    ) -> *mut c_char;
    fn mcl_lists_norms(tensors: Pointers, count: usize, answer: *mut *mut C_tensor) -> *mut c_char;
    fn mcl_lists_scale(tensors: Pointers, count: usize, factor: *const C_tensor) -> *mut c_char;
    fn mcl_lists_add(tensors: Pointers, others: Pointers, count: usize) -> *mut c_char;
    fn mcl_lists_approach(tensors: Pointers, others: Pointers, count: usize, share: f64, skip: *const C_tensor) -> *mut c_char;
}

fn pointers<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*mut C_tensor> {
    tensors.into_iter().map(|t| t.as_ptr().cast_mut()).collect()
}

/// A message is a fault in our own use of libtorch, or a device out of memory: it panics, as tch's own calls do.
fn checked(what: &str, message: *mut c_char) {
    if !message.is_null() {
        // SAFETY: made by `strdup`, and ours to free.
        let text = unsafe {
            let text = CStr::from_ptr(message).to_string_lossy().into_owned();
            libc::free(message.cast());
            text
        };
        panic!("{what}: {text}");
    }
}

fn or_null(t: Option<&Tensor>) -> *const C_tensor {
    t.map_or(std::ptr::null(), Tensor::as_ptr)
}

/// What all steps of a list have in common: the variables, their gradients, the rate, and a scalar that is 1 where nothing may move.
pub(super) struct Step<'a> {
    pub vars: Vec<&'a Tensor>,
    pub grads: Vec<&'a Tensor>,
    pub lr: f64,
    pub skip: Option<&'a Tensor>,
}

/// SGD as torch has it; `buffers` are empty without momentum.
pub(super) fn sgd(step: &Step, buffers: &[Tensor], momentum: f64, weight_decay: f64, nesterov: bool) {
    let (vars, grads, buffers) = (pointers(step.vars.iter().copied()), pointers(step.grads.iter().copied()), pointers(buffers));
    let buffers = if buffers.is_empty() { std::ptr::null() } else { buffers.as_ptr() };
    // SAFETY: lists of equal length of tensors that live through the call.
    let message = unsafe {
        let (v, g, n) = (vars.as_ptr(), grads.as_ptr(), vars.len());
        mcl_lists_sgd(v, g, buffers, n, step.lr, momentum, weight_decay, nesterov, or_null(step.skip))
    };
    checked("SGD", message);
}

/// Adam, or AdamW where `decoupled`; the moments are of these variables alone. Nothing for an empty list.
#[allow(clippy::too_many_arguments)]
pub(super) fn adam(
    step: &Step,
    first: &[&Tensor],
    second: &[&Tensor],
    steps: i64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    decoupled: bool,
) {
    if step.vars.is_empty() {
        return;
    }
    let (vars, grads) = (pointers(step.vars.iter().copied()), pointers(step.grads.iter().copied()));
    let (first, second) = (pointers(first.iter().copied()), pointers(second.iter().copied()));
    // SAFETY: as above.
    let message = unsafe {
        let (v, g, a, b, n) = (vars.as_ptr(), grads.as_ptr(), first.as_ptr(), second.as_ptr(), vars.len());
        mcl_lists_adam(v, g, a, b, n, steps, step.lr, betas.0, betas.1, eps, weight_decay, decoupled, or_null(step.skip))
    };
    checked("Adam", message);
}

/// The l2 norm of each tensor, `[count]`.
pub fn norms(tensors: &[Tensor]) -> Tensor {
    if !on_device(tensors) {
        return Tensor::stack(&tensors.iter().map(|t| t.norm()).collect::<Vec<_>>(), 0);
    }
    let list = pointers(tensors);
    let mut answer = std::ptr::null_mut();
    // SAFETY: as above; the answer is ours.
    unsafe {
        checked("norms", mcl_lists_norms(list.as_ptr(), list.len(), &mut answer));
        Tensor::from_ptr(answer)
    }
}

/// Each tensor times a scalar tensor, in place.
pub fn scale(tensors: &mut [Tensor], factor: &Tensor) {
    if !on_device(tensors) {
        return tensors.iter_mut().for_each(|t| drop(t.g_mul_(factor)));
    }
    let list = pointers(&*tensors);
    // SAFETY: as above.
    checked("scale", unsafe { mcl_lists_scale(list.as_ptr(), list.len(), factor.as_ptr()) });
}

/// Each tensor and its partner, added; the first list's memory may be used for the sums.
pub fn sums(own: Vec<Tensor>, others: Vec<Tensor>) -> Vec<Tensor> {
    if !on_device(&own) {
        return own.iter().zip(others).map(|(a, b)| a + b).collect();
    }
    let (list, added) = (pointers(&own), pointers(&others));
    // SAFETY: as above.
    checked("sums", unsafe { mcl_lists_add(list.as_ptr(), added.as_ptr(), list.len()) });
    own
}

/// Each tensor moves towards its partner by `share` of the way; nothing moves where `skip` is 1. A list on a device.
pub fn approach(own: &[Tensor], others: &[Tensor], share: f64, skip: Option<&Tensor>) {
    if !on_device(own) {
        assert!(skip.is_none(), "on the CPU whoever steps knows whether to step");
        return own.iter().zip(others).for_each(|(a, b)| drop(a.shallow_clone().lerp_(b, share)));
    }
    let (list, aims) = (pointers(own), pointers(others));
    // SAFETY: as above.
    checked("approach", unsafe { mcl_lists_approach(list.as_ptr(), aims.as_ptr(), list.len(), share, or_null(skip)) });
}

fn on_device(tensors: &[Tensor]) -> bool {
    tensors.first().is_some_and(|t| t.device().is_cuda())
}
