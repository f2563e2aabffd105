//! Work shared among the threads libtorch has.
//!
//! What is unsafe: `Shared` hands the same memory to several threads, and the caller promises that their pieces do not overlap; and
//! `GOMP_parallel` is found by name, so that its type is our word (it is part of the interface between compilers and libgomp).

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Numbers below which a second thread costs more than it brings; libtorch's own grain.
const GRAIN: usize = 32768;

/// In how many parts to do a work that touches so many numbers: at most one for every thread libtorch uses inside an operation.
pub fn parts_of(numbers: usize) -> usize {
    (tch::get_num_threads().max(1) as usize).min(numbers / GRAIN).max(1)
}

/// Memory of which every part of a work writes its own piece.
#[derive(Clone, Copy)]
pub struct Shared(pub *mut f32);

// SAFETY: `slice` is where the promise is made.
unsafe impl Sync for Shared {}

impl Shared {
    /// The memory from the place `from` on.
    ///
    /// # Safety
    /// The place lies in the memory.
    pub unsafe fn at(&self, from: usize) -> *mut f32 {
        unsafe { self.0.add(from) }
    }

    /// One part's piece: `len` numbers from the place `from` on.
    ///
    /// # Safety
    /// The piece lies in the memory, which outlives it, and nobody else has any of it.
    pub unsafe fn slice<'a>(&self, from: usize, len: usize) -> &'a mut [f32] {
        unsafe { std::slice::from_raw_parts_mut(self.0.add(from), len) }
    }
}

/// `GOMP_parallel`: runs a function on each of so many threads of libtorch's own pool.
type GompParallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, u32, u32);

/// Runs `work` once for every part below `parts`, on the threads libtorch has: threads of our own would find the cores taken by
/// libtorch's, which wait for their next work by spinning.
pub fn in_parallel(parts: usize, work: &(dyn Fn(usize) + Sync)) {
    static GOMP: OnceLock<Option<GompParallel>> = OnceLock::new();
    // SAFETY: dlsym may be asked for any name; a symbol of this name has this type.
    let gomp = GOMP.get_or_init(|| unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"GOMP_parallel".as_ptr());
        (!found.is_null()).then(|| std::mem::transmute::<*mut c_void, GompParallel>(found))
    });
    if parts == 1 {
        return work(0);
    }
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                break;
            }
            work(part);
        }
    };
    match gomp {
        Some(parallel) => {
            unsafe extern "C" fn call(run: *mut c_void) {
                // SAFETY: `run` is the closure below, which outlives the parallel region.
                unsafe { (*run.cast::<&(dyn Fn() + Sync)>())() }
            }
            let mut run: &(dyn Fn() + Sync) = &run;
            // SAFETY: libgomp returns when every thread has run `call`, and `run` lives until then.
            unsafe { parallel(call, (&raw mut run).cast(), parts as u32, 0) }
        }
        None => std::thread::scope(|scope| (0..parts).for_each(|_| drop(scope.spawn(run)))),
    }
}
