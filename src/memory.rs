//! The process's own resources: how the allocator treats the large blocks libtorch asks for, memory and CPU time used.

/// Keeps freed blocks for the next step instead of giving them back to the system. A training step frees and asks for the same large
/// tensors again and again; by default glibc maps and unmaps each, and every page is faulted in and zeroed anew. Call it first in
/// `main`, before libtorch allocates.
pub fn keep_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt only sets parameters of the allocator; no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
}

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
    // Linux counts in KiB, macOS in bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    (usage().ru_maxrss as u64 * unit) >> 20
}
