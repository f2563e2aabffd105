//! Ranks: the processes that train one cohort together. Started by `mpirun` or `srun`, a process is one of several; otherwise, and in a
//! build without the cargo feature `mpi`, it is the only one and every call here gives back what it was given.
//!
//! `join` is called once, in `main`; the `Ranks` it returns is handed down to whoever works with the others: the trainer, the loader,
//! the methods (in their `Task`), BatchNorm (in the `Pass`) and Reverse-HG. Nobody asks the process.
//!
//! The rule: a rank's objective is the mean over its own images, the run's is the mean over the ranks, so gradients are
//! averaged. What is written down in a run (weights, statistics, counters) is the same on every rank, to the bit.

#[cfg(feature = "mpi")]
mod mpi;

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use crate::error::{Error, Result};
use crate::files;
use crate::params::Named;
use crate::system::cpp;

/// Numbers in one all-reduce: large enough for the bandwidth to count and not the latency, small enough to stay in memory twice.
const BUCKET: usize = 16 << 20;

/// This process among the others, and among those on its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// From 0; rank 0 writes and speaks for all.
    pub rank: usize,
    /// How many ranks there are.
    pub count: usize,
    /// From 0, among the ranks on this machine.
    pub local_rank: usize,
    /// How many ranks are on this machine.
    pub local_count: usize,
}

/// A process among those that train together, and what they do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    place: Place,
    cuda_aware: bool,
    sync_norms: bool,
    gather_negatives: bool,
}

/// As many as a launcher says it started, from what it leaves in the environment: Open MPI, MPICH and Intel MPI, Slurm's srun.
pub fn launched() -> Option<usize> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let under_srun = || std::env::var("PMIX_RANK").is_ok() || std::env::var("SLURM_STEP_ID").is_ok();
    number("OMPI_COMM_WORLD_SIZE").or_else(|| number("PMI_SIZE")).or_else(|| number("SLURM_STEP_NUM_TASKS").filter(|_| under_srun()))
}

/// Joins the other ranks, where a launcher has started several. To be called once. `cuda_aware`: hand the tensors of a GPU to MPI as
/// they are, for an MPI that can read them.
pub fn join(cuda_aware: bool) -> Result<Ranks> {
    match launched() {
        None | Some(1) => Ok(Ranks::ALONE),
        Some(count) => Ok(Ranks { place: start(count)?, cuda_aware, ..Ranks::ALONE }),
    }
}

#[cfg(feature = "mpi")]
fn start(_: usize) -> Result<Place> {
    mpi::start()
}

#[cfg(not(feature = "mpi"))]
fn start(count: usize) -> Result<Place> {
    Err(Error::input(format!(
        "started as one of {count} processes, and this build runs alone; build with `cargo build --release --features mpi` (or `make pretrain RANKS={count}`)"
    )))
}

/// What `doctor` says: is MPI part of this build, and which; none without it.
pub fn library() -> Option<String> {
    #[cfg(feature = "mpi")]
    return Some(mpi::library());
    #[cfg(not(feature = "mpi"))]
    None
}

impl Ranks {
    /// The only process.
    pub const ALONE: Ranks = Ranks {
        place: Place { rank: 0, count: 1, local_rank: 0, local_count: 1 },
        cuda_aware: false,
        sync_norms: false,
        gather_negatives: false,
    };

    /// These ranks with what the recipe says of their work: do BatchNorms take the statistics of all ranks' images (`train.sync_bn`),
    /// are the contrast samples those of all ranks (`train.gather_negatives`)?
    pub fn sharing(self, sync_norms: bool, gather_negatives: bool) -> Ranks {
        Ranks { sync_norms, gather_negatives, ..self }
    }

    /// Where this process stands.
    pub fn place(self) -> Place {
        self.place
    }

    /// Which one this process is, from 0.
    pub fn rank(self) -> usize {
        self.place.rank
    }

    /// How many there are.
    pub fn count(self) -> usize {
        self.place.count
    }

    /// Does this process write and speak for all?
    pub fn leads(self) -> bool {
        self.rank() == 0
    }

    /// Do BatchNorms take the statistics of all ranks' images (`train.sync_bn`)?
    pub fn sync_norms(self) -> bool {
        self.count() > 1 && self.sync_norms
    }

    /// Are the contrast samples those of all ranks (`train.gather_negatives`)?
    pub fn gather_negatives(self) -> bool {
        self.count() > 1 && self.gather_negatives
    }

    /// Seconds this rank has spent in collective calls, waiting for the others included.
    pub fn seconds(self) -> f64 {
        #[cfg(feature = "mpi")]
        return mpi::seconds();
        #[cfg(not(feature = "mpi"))]
        0.0
    }

    /// Says so when a collective call takes longer than `timeout` (and ends all ranks), or when a stop is asked for while one waits.
    pub fn watch(self, timeout: Duration, stop: &Arc<AtomicBool>) {
        #[cfg(feature = "mpi")]
        if self.count() > 1 {
            mpi::watch(self.rank(), timeout, stop.clone());
        }
        let _ = (timeout, stop);
    }

    /// Leaves the others in peace: every rank does this before it exits.
    pub fn leave(self) {
        #[cfg(feature = "mpi")]
        if self.count() > 1 {
            mpi::leave();
        }
    }

    /// Ends all ranks with this exit code.
    pub fn end_all(self, code: i32) -> ! {
        #[cfg(feature = "mpi")]
        if self.count() > 1 {
            mpi::abort(code);
        }
        std::process::exit(code)
    }

    /// The sum over ranks, the same on all of them. Not part of a graph: see `sum_live`.
    pub fn sum(self, own: &Tensor) -> Tensor {
        if self.count() == 1 { own.detach() } else { sum_of_all(own, self.cuda_aware) }
    }

    /// `sum` as part of the graph, differentiable any number of times; every rank must take the same derivatives in the same order.
    pub fn sum_live(self, own: &Tensor) -> Tensor {
        if self.count() == 1 {
            return own.shallow_clone();
        }
        // SAFETY: the tensor lives through the call; the answer is ours.
        unsafe {
            cpp::tensor(|| format!("sum over ranks of {:?}", own.size()), |error| mcl_ranks_sum_live(own.as_ptr(), self.cuda_aware, error))
        }
    }

    /// All ranks' tensors along `dim`, in the order of the ranks, as part of the graph: everybody has the same size.
    pub fn gather(self, own: &Tensor, dim: i64) -> Tensor {
        let Place { rank, count, .. } = self.place;
        if count == 1 {
            return own.shallow_clone();
        }
        let nothing = own.detach().zeros_like();
        let parts: Vec<&Tensor> = (0..count).map(|r| if r == rank { own } else { &nothing }).collect();
        self.sum_live(&Tensor::cat(&parts, dim))
    }

    /// What contrastive terms see of a rank's tensor: all ranks' where contrast samples are gathered, else its own. Every rank then
    /// evaluates the terms whole, and the sum of gradients in `sum_live`, averaged like the rest, is the gradient of the whole.
    pub fn for_contrast(self, own: &Tensor, dim: i64) -> Tensor {
        if self.gather_negatives() { self.gather(own, dim) } else { own.shallow_clone() }
    }

    /// The mean over ranks of each tensor, in few large all-reduces.
    pub fn mean(self, tensors: Vec<Tensor>) -> Vec<Tensor> {
        let count = self.count();
        if count == 1 {
            return tensors;
        }
        let _guard = tch::no_grad_guard();
        let mut answer: Vec<Option<Tensor>> = tensors.iter().map(|_| None).collect();
        for bucket in buckets(&tensors) {
            let flat: Vec<Tensor> = bucket.iter().map(|&i| tensors[i].detach().reshape([-1])).collect();
            let sizes: Vec<i64> = flat.iter().map(|t| t.numel() as i64).collect();
            let means = self.sum(&Tensor::cat(&flat, 0)) / count as f64;
            for (&i, part) in bucket.iter().zip(means.split_with_sizes(&sizes, 0)) {
                answer[i] = Some(part.view(tensors[i].size().as_slice()));
            }
        }
        answer.into_iter().map(|t| t.expect("every tensor is in a bucket")).collect()
    }

    /// For each flag: does any rank raise it?
    pub fn any<const N: usize>(self, flags: [bool; N]) -> [bool; N] {
        if self.count() == 1 {
            return flags;
        }
        let raised = self.sum(&Tensor::from_slice(&flags.map(i64::from)));
        std::array::from_fn(|i| raised.int64_value(&[i as i64]) > 0)
    }

    /// The sum of counters over ranks.
    pub fn sum_counts(self, counters: &[u64]) -> Vec<u64> {
        if self.count() == 1 {
            return counters.to_vec();
        }
        let sums = self.sum(&Tensor::from_slice(&counters.iter().map(|&c| c as i64).collect::<Vec<_>>()));
        (0..counters.len()).map(|i| sums.int64_value(&[i as i64]) as u64).collect()
    }

    /// What rank `from` says. The others' text is not read.
    pub fn broadcast_text(self, from: usize, text: &str) -> String {
        let Place { rank, count, .. } = self.place;
        if count == 1 {
            return text.to_string();
        }
        let length = self.sum_counts(&[if rank == from { text.len() as u64 } else { 0 }])[0] as usize;
        let mut bytes = if rank == from { text.as_bytes().to_vec() } else { vec![0; length] };
        broadcast(from, &mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The message of the first rank that has one, and that rank.
    pub fn first_message(self, message: Option<String>) -> Option<(usize, String)> {
        let Place { rank, count, .. } = self.place;
        let mut raised = vec![0u64; count];
        raised[rank] = u64::from(message.is_some());
        let from = self.sum_counts(&raised).iter().position(|&r| r > 0)?;
        Some((from, self.broadcast_text(from, message.as_deref().unwrap_or(""))))
    }

    /// Writes rank 0's values through everybody's handles.
    pub fn broadcast_state(self, state: &Named) {
        if self.count() == 1 {
            return;
        }
        let _guard = tch::no_grad_guard();
        for (_, live) in state {
            let mut bytes = files::tensor_bytes(live);
            broadcast(0, &mut bytes);
            live.shallow_clone().copy_(&Tensor::from_data_size(&bytes, &live.size(), live.kind()));
        }
    }

    /// Refuses states that are not the same on all ranks: averaged gradients keep them so, and a method that forgets to average must not
    /// pass unseen.
    pub fn check_same_state(self, state: &Named, step: usize) -> Result<()> {
        let Place { rank, count, .. } = self.place;
        if count == 1 {
            return Ok(());
        }
        let sums: Vec<String> = state.iter().map(|(_, t)| files::sha256(&files::tensor_bytes(t))).collect();
        let Some(leader) = self.first_message(Some(serde_json::to_string(&sums).expect("texts serialise"))) else { return Ok(()) };
        let leader: Vec<String> = serde_json::from_str(&leader.1).map_err(|e| Error::failed(format!("rank 0 sent no checksums: {e}")))?;
        let other = state.iter().zip(sums.iter().zip(&leader)).find(|(_, (own, theirs))| own != theirs);
        match self.first_message(other.map(|((name, _), _)| name.clone())) {
            None => Ok(()),
            Some((from, name)) => Err(Error::failed(format!(
                "step {step}: `{name}` of rank {from} is no longer that of rank 0 (this is rank {rank} of {count})"
            ))),
        }
    }

    /// The part of `count` things that falls to this rank: equal parts in order, and the last ones to nobody where they do not divide.
    pub fn part(self, count: usize) -> std::ops::Range<usize> {
        let Place { rank, count: ranks, .. } = self.place;
        let each = count / ranks;
        rank * each..(rank + 1) * each
    }
}

/// The sum over several ranks. Not part of a graph. `cuda_aware`: MPI reads a GPU's memory itself.
fn sum_of_all(own: &Tensor, cuda_aware: bool) -> Tensor {
    let kind = own.kind();
    let known = matches!(kind, Kind::Float | Kind::Double | Kind::Int64);
    let device = if cuda_aware { own.device() } else { Device::Cpu }; // on the CPU: MPI reads it there
    let sent = own.detach().to_device(device).to_kind(if known { kind } else { Kind::Float }).contiguous();
    let received = sent.empty_like();
    if let Device::Cuda(n) = device {
        tch::Cuda::synchronize(n as i64);
    }
    all_reduce(&sent, &received);
    received.to_kind(kind).to_device(own.device())
}

#[cfg(feature = "mpi")]
use mpi::{all_reduce, broadcast};

#[cfg(not(feature = "mpi"))]
fn all_reduce(_: &Tensor, _: &Tensor) {
    unreachable!("a build without MPI has one rank")
}

#[cfg(not(feature = "mpi"))]
fn broadcast(_: usize, _: &mut [u8]) {
    unreachable!("a build without MPI has one rank")
}

unsafe extern "C" {
    fn mcl_ranks_sum_live(own: *const C_tensor, cuda_aware: bool, error: *mut *mut c_char) -> *mut C_tensor;
}

/// # Safety
/// `own` points to a tensor; the caller owns what comes back.
#[unsafe(no_mangle)]
unsafe extern "C" fn mcl_ranks_sum(own: *const C_tensor, cuda_aware: bool) -> *mut C_tensor {
    // SAFETY: a handle of our own to the tensor, and then a handle given away.
    let own = unsafe { Tensor::clone_from_ptr(own.cast_mut()) };
    let mut answer = sum_of_all(&own, cuda_aware);
    let given = answer.as_mut_ptr();
    std::mem::forget(answer);
    given
}

/// Which tensors travel together: of one kind and device, in order, up to `BUCKET` numbers.
fn buckets(tensors: &[Tensor]) -> Vec<Vec<usize>> {
    let mut buckets: Vec<(Kind, Device, usize, Vec<usize>)> = vec![];
    for (i, t) in tensors.iter().enumerate() {
        let (kind, device, numbers) = (t.kind(), t.device(), t.numel());
        match buckets.iter_mut().rev().find(|b| b.0 == kind && b.1 == device && b.2 + numbers <= BUCKET) {
            Some(bucket) => {
                bucket.2 += numbers;
                bucket.3.push(i);
            }
            None => buckets.push((kind, device, numbers, vec![i])),
        }
    }
    buckets.into_iter().map(|b| b.3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_keep_kinds_apart_and_every_tensor_once() {
        let of = |n: i64, kind| Tensor::zeros([n], (kind, Device::Cpu));
        let big = BUCKET as i64 - 10;
        let tensors = [of(8, Kind::Float), of(3, Kind::Double), of(big, Kind::Float), of(2, Kind::Float), of(5, Kind::Float)];
        let found = buckets(&tensors);
        let mut seen: Vec<usize> = found.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        assert_eq!(found, [vec![0, 2, 3], vec![1], vec![4]]);
    }

    #[test]
    fn alone_everything_is_as_given() {
        let t = Tensor::from_slice(&[1.0f32, 2.0]).set_requires_grad(true);
        let alone = Ranks::ALONE.sharing(true, true);
        let loss = (alone.gather(&t, 0) * alone.sum_live(&t)).sum(None);
        let slope = Tensor::run_backward(&[&loss], &[&t], false, false);
        assert_eq!(Vec::<f32>::try_from(&slope[0]).unwrap(), [2.0, 4.0]);
        assert_eq!(alone.any([true, false]), [true, false]);
        assert_eq!(alone.first_message(Some("a".into())), Some((0, "a".to_string())));
        assert_eq!(alone.first_message(None), None);
        assert_eq!(alone.part(7), 0..7);
    }
}
