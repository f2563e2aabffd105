//! Split + order + transform -> batches, made ahead of their use by one thread.

use std::ops::Range;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use rand::{RngCore, SeedableRng};
use rayon::prelude::*;
use tch::{Device, Tensor};

use super::augment::{Table, Transform};
use super::resident::{Plan, Resident};
use super::{Batch, Pixels, Placed, Split, packed};
use crate::error::{Error, Result};
use crate::rng::{self, Rng};
use crate::system::ranks::Ranks;

/// Batches made but not yet taken.
const AHEAD: usize = 2;

/// The batches of one epoch in order. Each depends on nothing but (seed, epoch, its place in the epoch), so a loader may start anywhere.
pub struct Loader {
    batches: Option<Receiver<Result<Made>>>,
    thread: Option<JoinHandle<()>>,
    left: usize,
    /// The pixels, where they are on a device already.
    resident: Option<Rc<Resident>>,
}

impl Loader {
    /// `order` holds places in the split, batch by batch; `first` is the batch to start at. Every view is an augmentation of its own.
    pub fn new(split: &Split, order: Vec<Vec<u32>>, transform: Transform, views: usize, seed: u64, epoch: u64, first: usize) -> Loader {
        let table = transform.table();
        let (ranks, device, planned) = (Ranks::ALONE, Device::Cpu, false);
        Loader::start(Maker { split: split.clone(), transform, table, views, seed, epoch, ranks, device, planned }, order, first)
    }

    /// The same batches, of each the part that falls to this rank (`Ranks::part`): all ranks' parts are what `new` makes. For a CUDA device
    /// they are in pinned memory, for `next_on` to send; where its pixels are there already, only what was drawn is.
    #[allow(clippy::too_many_arguments)]
    pub fn of_rank(
        split: &Split,
        order: Vec<Vec<u32>>,
        transform: Transform,
        views: usize,
        seed: u64,
        epoch: u64,
        first: usize,
        ranks: Ranks,
        device: Device,
        resident: Option<Rc<Resident>>,
    ) -> Loader {
        let (table, planned) = (transform.table(), resident.is_some());
        let maker = Maker { split: split.clone(), transform, table, views, seed, epoch, ranks, device, planned };
        let mut loader = Loader::start(maker, order, first);
        loader.resident = resident;
        loader
    }

    fn start(maker: Maker, order: Vec<Vec<u32>>, first: usize) -> Loader {
        let left = order.len().saturating_sub(first);
        let (sender, batches) = sync_channel(AHEAD);
        let thread = std::thread::spawn(move || {
            for (at, indices) in order.iter().enumerate().skip(first) {
                let batch = maker.batch(at as u64, indices);
                let failed = batch.is_err();
                // Nobody takes any more: the loader was dropped.
                if sender.send(batch).is_err() || failed {
                    return;
                }
            }
        });
        Loader { batches: Some(batches), thread: Some(thread), left, resident: None }
    }

    /// The next batch on a device. Nobody waits for the copy.
    pub fn next_on(&mut self, device: Device) -> Option<Result<Placed>> {
        let made = self.made()?;
        Some(made.map(|mut made| match (made.plan.take(), &self.resident) {
            (Some(plan), Some(resident)) => resident.place(&plan),
            _ => Placed::on(device, &made.batch()),
        }))
    }

    fn made(&mut self) -> Option<Result<Made>> {
        if self.left == 0 {
            return None;
        }
        let made = self.batches.as_ref().expect("open until the loader is dropped").recv();
        let made = made.unwrap_or_else(|_| Err(Error::failed("the thread that makes batches has died")));
        // After a fault there is nothing more to come.
        self.left = if made.is_ok() { self.left - 1 } else { 0 };
        Some(made)
    }

    /// All images in the order of the split, the last batch possibly short.
    pub fn eval(split: &Split, batch: usize, transform: Transform) -> Loader {
        let places: Vec<u32> = (0..split.len() as u32).collect();
        Loader::new(split, places.chunks(batch.max(1)).map(<[u32]>::to_vec).collect(), transform, 1, 0, 0, 0)
    }
}

impl Iterator for Loader {
    type Item = Result<Batch>;

    /// In host memory. A loader of planned batches has none there: `next_on` is for those.
    fn next(&mut self) -> Option<Result<Batch>> {
        let made = self.made()?;
        Some(made.and_then(|made| match made.plan {
            Some(_) => Err(Error::failed("a batch of pixels that are on a device was asked for in host memory")),
            None => Ok(made.batch()),
        }))
    }

    /// As many batches as are still to come, fewer after a fault.
    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Closing the channel first: the thread may be waiting to hand over a batch.
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic of the thread was reported by `next`
        }
    }
}

/// A batch before it becomes tensors, which is left to the thread that trains. Were they made here, libtorch would start OpenMP workers for
/// this thread too; OpenMP then counts more threads than cores and lets those of the networks sleep between any two pieces of work. A step
/// of two ResNet-32 on two cores took 3.2 s that way and takes 2.5 s (medians of three interleaved pairs).
struct Made {
    views: Vec<Vec<f32>>,
    /// [images, height, width, channels]
    shape: [i64; 4],
    labels: Vec<i64>,
    index: Vec<i64>,
    noise: u64,
    /// All of it in pinned memory, for a CUDA device.
    piece: Option<Tensor>,
    /// Instead of all of it, where the pixels are on the device.
    plan: Option<Plan>,
}

impl Made {
    fn batch(self) -> Batch {
        if let Some(piece) = &self.piece {
            return packed::unpack(piece, self.views.len(), self.shape, self.noise);
        }
        let views = self.views.iter().map(|view| Tensor::from_slice(view).view(self.shape).permute([0, 3, 1, 2])).collect();
        Batch { views, labels: Tensor::from_slice(&self.labels), index: Tensor::from_slice(&self.index), noise: self.noise }
    }
}

struct Maker {
    split: Split,
    transform: Transform,
    table: Table,
    views: usize,
    seed: u64,
    epoch: u64,
    /// Who make a batch together.
    ranks: Ranks,
    /// Where it will be used.
    device: Device,
    /// Are the pixels there already?
    planned: bool,
}

impl Maker {
    fn batch(&self, at: u64, indices: &[u32]) -> Result<Made> {
        let part = self.ranks.part(indices.len());
        let side = self.transform.size as i64;
        let shape = [part.len() as i64, side, side, 3];
        let own = &indices[part.clone()];
        let labels: Vec<i64> = own.iter().map(|&i| self.split.labels[i as usize]).collect();
        let index: Vec<i64> = own.iter().map(|&i| i64::from(i)).collect();
        let mut noise = rng::stream(self.seed, "noise", &[self.epoch, at]).next_u64();
        // What is dropped or drawn for one rank's images is not what is dropped for another's.
        if !self.ranks.leads() {
            noise = rng::derive(noise, "rank", self.ranks.rank() as u64);
        }
        if self.planned {
            let rows: Vec<i64> = own.iter().map(|&i| i64::from(self.split.rows[i as usize])).collect();
            let streams = self.seeds(at, indices.len(), part);
            let streams = streams.into_iter().map(|view| view.into_iter().map(Rng::seed_from_u64).collect()).collect();
            let plan = Some(Plan::draw(&self.transform, &index, &labels, &rows, streams, noise));
            return Ok(Made { views: vec![], shape, labels, index, noise, piece: None, plan });
        }
        let mut views = self.floats(at, indices, part)?;
        let piece = self.device.is_cuda().then(|| packed::pack(&index, &labels, &views));
        if piece.is_some() {
            views.iter_mut().for_each(|view| *view = vec![]);
        }
        Ok(Made { views, shape, labels, index, noise, piece, plan: None })
    }

    /// One seed for each view and image in `part` of a batch, so that images may be made in any order.
    fn seeds(&self, at: u64, images: usize, part: Range<usize>) -> Vec<Vec<u64>> {
        let view = |view: u64| {
            let mut stream = rng::stream(self.seed, "augment", &[self.epoch, at, view]);
            let all: Vec<u64> = (0..images).map(|_| stream.next_u64()).collect();
            all[part.clone()].to_vec()
        };
        (0..self.views as u64).map(view).collect()
    }

    /// The pixels of every view of the images in `part`, [part, size, size, 3].
    fn floats(&self, at: u64, indices: &[u32], part: Range<usize>) -> Result<Vec<Vec<f32>>> {
        let size = self.transform.floats();
        let mut views = vec![vec![0f32; part.len() * size]; self.views];
        let seeds = self.seeds(at, indices.len(), part.clone());
        let indices = &indices[part];
        let mut rows: Vec<Vec<&mut [f32]>> = indices.iter().map(|_| Vec::with_capacity(self.views)).collect();
        for view in &mut views {
            rows.iter_mut().zip(view.chunks_exact_mut(size)).for_each(|(row, out)| row.push(out));
        }
        // All views of an image at once: it is decoded once.
        let make = |(k, row): (usize, Vec<&mut [f32]>)| {
            let i = indices[k] as usize;
            let image = self.split.image(i)?;
            for (out, seeds) in row.into_iter().zip(&seeds) {
                let applied = self.transform.apply(&image, &self.table, &mut Rng::seed_from_u64(seeds[k]), out);
                applied.map_err(|e| {
                    self.split.path(i).map_or_else(|| Error::input(format!("image {i}: {e}")), |path| Error::file(path, e.to_string()))
                })?;
            }
            Ok::<(), Error>(())
        };
        match self.split.pixels {
            // A few microseconds an image: one core is plenty, and the others belong to the networks.
            Pixels::Memory(_) => rows.into_iter().enumerate().try_for_each(make)?,
            Pixels::Files(_) => rows.into_par_iter().enumerate().try_for_each(make)?,
        }
        Ok(views)
    }
}
