//! The calls to MPI, on the crate `mpi`. Everything goes over the world communicator; faults of MPI end the program, as MPI's default is.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::{self, Universe};
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use tch::{Kind, Tensor};

use super::Place;
use crate::error::{Error, Result};

/// MPI ends when this is dropped.
static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);
/// Milliseconds since the start (and 1) at which the call under way began; 0 between calls.
static WAITING: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds spent in calls that wait for the others.
static SPENT: AtomicU64 = AtomicU64::new(0);
/// When this rank joined the others.
static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();

/// MPI counts in C's int.
const MOST: usize = 1 << 30;

/// Starts MPI and asks where this process stands.
pub fn start() -> Result<Place> {
    let (universe, threads) = mpi::initialize_with_threading(Threading::Multiple).ok_or_else(|| Error::failed("MPI was started before"))?;
    // On a GPU libtorch runs the backward pass, and the sums in it, on a thread of its own.
    if threads < Threading::Serialized {
        return Err(Error::failed(format!("this MPI allows {threads:?} only; `Serialized` is needed (build it with thread support)")));
    }
    let world = universe.world();
    let local = world.split_shared(world.rank());
    let number = |n: i32| n as usize;
    let place = Place {
        rank: number(world.rank()),
        count: number(world.size()),
        local_rank: number(local.rank()),
        local_count: number(local.size()),
    };
    START.get_or_init(Instant::now);
    *UNIVERSE.lock().unwrap_or_else(|e| e.into_inner()) = Some(universe);
    Ok(place)
}

/// Waits for the others, so that no rank is taken for dead because it was first to go.
pub fn leave() {
    SimpleCommunicator::world().barrier();
    drop(UNIVERSE.lock().unwrap_or_else(|e| e.into_inner()).take());
}

/// Ends all ranks.
pub fn abort(code: i32) -> ! {
    let _ = std::io::stderr().flush();
    SimpleCommunicator::world().abort(code)
}

/// Which MPI this is, in a few words.
pub fn library() -> String {
    let text = environment::library_version().unwrap_or_else(|_| "unknown".into());
    text.trim_end_matches('\0').lines().next().unwrap_or_default().split(',').next().unwrap_or_default().to_string()
}

/// `received` = the sum over ranks of `sent`: two contiguous tensors of one size and kind, on the CPU or where a CUDA-aware MPI reads.
pub fn all_reduce(sent: &Tensor, received: &Tensor) {
    // SAFETY: constants of the MPI library.
    let (datatype, size) = unsafe {
        match sent.kind() {
            Kind::Float => (ffi::RSMPI_FLOAT, 4),
            Kind::Double => (ffi::RSMPI_DOUBLE, 8),
            Kind::Int64 => (ffi::RSMPI_INT64_T, 8),
            other => unreachable!("{other:?} is converted before"),
        }
    };
    let _waiting = Waiting::begin();
    let mut done = 0;
    while done < sent.numel() {
        let count = (sent.numel() - done).min(MOST);
        // SAFETY: both tensors hold `count` numbers from there on; they do not overlap and outlive the call.
        unsafe {
            let (from, to) = (sent.data_ptr().byte_add(done * size), received.data_ptr().byte_add(done * size));
            ffi::MPI_Allreduce(from, to, count as i32, datatype, ffi::RSMPI_SUM, ffi::RSMPI_COMM_WORLD);
        }
        done += count;
    }
}

/// Rank `from`'s bytes for everybody; all have as many.
pub fn broadcast(from: usize, bytes: &mut [u8]) {
    let _waiting = Waiting::begin();
    let world = SimpleCommunicator::world();
    bytes.chunks_mut(MOST).for_each(|part| world.process_at_rank(from as i32).broadcast_into(part));
}

/// Seconds spent in calls that wait for the others.
pub fn seconds() -> f64 {
    Duration::from_nanos(SPENT.load(Ordering::Relaxed)).as_secs_f64()
}

/// A call is under way while it lives.
struct Waiting {
    began: Instant,
}

impl Waiting {
    fn begin() -> Waiting {
        WAITING.store(START.get().map_or(0, |s| s.elapsed().as_millis() as u64) + 1, Ordering::Relaxed);
        Waiting { began: Instant::now() }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.store(0, Ordering::Relaxed);
        SPENT.fetch_add(self.began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

/// A thread that looks at the call under way: one that waits for longer than `timeout` waits for the dead.
pub fn watch(rank: usize, timeout: Duration, stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let mut said = false;
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let since = WAITING.load(Ordering::Relaxed);
            let now = START.get().map_or(0, |s| s.elapsed().as_millis() as u64);
            let waited = Duration::from_millis(if since == 0 { 0 } else { (now + 1).saturating_sub(since) });
            if stop.load(Ordering::Relaxed) && !said && waited > Duration::from_millis(300) {
                said = true;
                eprintln!("mcl-train: rank {rank} was asked to stop and waits for the other ranks to finish their step");
            }
            if waited > timeout {
                eprintln!(
                    "mcl-train: rank {rank} has waited {:.0} s for the other ranks, one of which is dead or stuck; the last checkpoint is good: the same command with --resume goes on",
                    waited.as_secs_f64()
                );
                abort(1);
            }
        }
    });
}
