//! The process's own resources: how the allocator treats the large blocks libtorch asks for, memory and CPU time used.

use crate::limits;

/// Keeps freed blocks for the next step instead of giving them back to the system. A training step frees and asks for the same large
/// tensors again and again; by default glibc maps and unmaps each, and every page is faulted in and zeroed anew. Call it first in
/// `main`, before libtorch allocates.
pub fn keep_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt only sets parameters of the allocator; no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1); // never
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
    // Where the address space is limited, a stretch of it that is kept for later would count against the limit.
    if limits::address_space().is_none() {
        ask_for_huge_pages();
    }
}

/// The heap of a training step in pages of 2 MB: some 4 to 7 % of a plain step on the CPU. The heap is stretched once, the system told, and
/// the stretch given back to the allocator, which keeps it; memory that nobody touches costs nothing.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn ask_for_huge_pages() {
    /// Below the threshold above which the allocator maps blocks of their own (`M_MMAP_THRESHOLD`).
    const STRETCH: usize = 1900 << 20;
    /// Enough for a meta step of a ResNet-32 pair with exact Hessian-vector products (4.4 GB).
    const STRETCHES: usize = 3;
    const PAGE: usize = 2 << 20;
    // SAFETY: blocks of our own, advised about between their first and last whole pages, not touched, and freed.
    unsafe {
        let blocks = [(); STRETCHES].map(|()| libc::malloc(STRETCH));
        for block in blocks.into_iter().filter(|block| !block.is_null()) {
            let first = (block as usize).next_multiple_of(PAGE);
            libc::madvise(first as *mut libc::c_void, STRETCH - PAGE, libc::MADV_HUGEPAGE);
        }
        blocks.into_iter().for_each(|block| libc::free(block));
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn ask_for_huge_pages() {}

fn usage() -> libc::rusage {
    // SAFETY: getrusage fills the struct it is given.
    unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    }
}

/// CPU seconds this process has used, in all its threads.
pub fn cpu_seconds() -> f64 {
    let usage = usage();
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// The largest resident size so far, in MB (2^20 bytes).
pub fn peak_mb() -> u64 {
    // What getrusage says of a child includes its parent's memory before the program was exchanged; /proc does not.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    if let Some(kb) = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()) {
        return kb / 1024;
    }
    // Linux counts in KiB, macOS in bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    (usage().ru_maxrss as u64 * unit) >> 20
}
