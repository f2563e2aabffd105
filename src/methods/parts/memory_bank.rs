//! Memory banks: what each network remembers of training images, to contrast with more samples than a batch holds (section 4.5).

use rand::Rng as _;
use rand_distr::{Distribution, StandardNormal};
use tch::{Device, Kind, Tensor};

use super::super::{Clock, Outcome};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::limits::{self, Need};
use crate::losses::contrast::BankLayout;
use crate::losses::unit::Norm;
use crate::params::Named;
use crate::rng;
use crate::system::arrival;
use crate::system::ranks::Ranks;

/// The share of the old vector that stays when an image is seen again.
const MOMENTUM: f64 = 0.5;

/// One table of embeddings for each network; all tables hold the same images at the same places.
pub struct MemoryBank {
    tables: Vec<Tensor>,
    slots: Slots,
    layout: BankLayout,
    negatives: usize,
    /// The contrast samples of the batch under way, from `prepare` on.
    drawn: Option<Draw>,
    /// What the step under way has written over, in order: places, and the rows of each table that were there.
    overwritten: Vec<(Tensor, Vec<Tensor>)>,
    ranks: Ranks,
}

enum Slots {
    /// A slot for every training image (Wu et al. 2018), averaged with what was there.
    Index { labels: Vec<i64>, mates: Vec<Vec<i64>> },
    /// The most recent images, oldest replaced first. Classes and the next place are tensors, so that they are saved like the rest.
    Queue { labels: Tensor, next: Tensor },
}

/// The contrast samples drawn for a batch, the same for all networks.
pub struct Draw {
    /// Places in the tables, [B, K'].
    columns: Tensor,
    /// 0 for anchors the queue has no positive or no negative for, else 1. `[B]`.
    pub usable: Option<Tensor>,
}

/// What a bank is made from.
pub struct BankSetup<'a> {
    /// How many networks have a table.
    pub networks: usize,
    /// d, the width of embeddings.
    pub dim: i64,
    /// K: how many contrast samples of other classes are drawn for an anchor.
    pub negatives: usize,
    /// Images in a batch: as many anchors draw at a time.
    pub batch: usize,
    /// What is drawn for an anchor, and how the tables start.
    pub layout: BankLayout,
    /// The classes of the training images, in their order.
    pub labels: &'a [i64],
    /// Where the tables are kept.
    pub device: Device,
    /// The precision of the tables.
    pub kind: Kind,
    /// Decides the starting values.
    pub seed: u64,
    /// Whose images it holds: those of all ranks.
    pub ranks: Ranks,
}

impl BankSetup<'_> {
    /// Refuses tables of so many rows that do not fit into memory, before anything of them is there.
    fn afford(&self, rows: usize) -> Result<()> {
        let (networks, dim) = (self.networks as u128, self.dim as usize);
        let drawn = self.batch.saturating_mul(self.negatives + 1);
        let need = Need::new()
            .and(format!("tables of {rows} embeddings"), networks * limits::matrix(rows, dim))
            .and(format!("the contrast samples of {} anchors", self.batch), networks * limits::matrix(drawn, dim) + 8 * drawn as u128);
        // A GPU says itself what it has.
        if self.device.is_cuda() { Ok(()) } else { need.check(&format!("[method] dim = {dim}, negatives = {}", self.negatives)) }
    }
}

impl MemoryBank {
    /// A slot for every image of the training split.
    pub fn index(setup: BankSetup) -> Result<MemoryBank> {
        let classes = setup.labels.iter().max().map_or(0, |&c| c as usize + 1);
        let mut mates = vec![vec![]; classes];
        for (i, &class) in setup.labels.iter().enumerate() {
            mates[class as usize].push(i as i64);
        }
        if setup.layout == BankLayout::Paper
            && let Some(class) = mates.iter().position(|m| m.len() == 1)
        {
            return Err(Error::input(format!(
                "class {class} has one training image: memory mining needs a positive beside the anchor, so two of each class"
            )));
        }
        let labels = setup.labels.to_vec();
        MemoryBank::new(&setup, setup.labels.len(), Slots::Index { labels, mates })
    }

    /// The last `length` images. It starts as if it had seen all classes in turn.
    pub fn queue(setup: BankSetup, length: usize, batch: usize) -> Result<MemoryBank> {
        let classes = setup.labels.iter().max().map_or(0, |&c| c + 1);
        if length < batch.max(classes as usize) {
            return Err(Error::input(format!(
                "[method] queue_length = {length}; accepted: at least the batch ({batch}) and the number of classes ({classes})"
            )));
        }
        setup.afford(length)?;
        let labels = Tensor::from_slice(&(0..length as i64).map(|i| i % classes).collect::<Vec<_>>());
        MemoryBank::new(&setup, length, Slots::Queue { labels, next: Tensor::from(0i64) })
    }

    fn new(setup: &BankSetup, rows: usize, slots: Slots) -> Result<MemoryBank> {
        let first = setup.labels.first().copied();
        if setup.labels.iter().all(|&c| Some(c) == first) {
            return Err(Error::input("memory mining needs training images of at least two classes"));
        }
        setup.afford(rows)?;
        let tables = (0..setup.networks).map(|m| {
            let mut rng = rng::stream(setup.seed, "bank", &[m as u64]);
            let count = rows * setup.dim as usize;
            let values: Vec<f32> = match setup.layout {
                BankLayout::Paper => (0..count).map(|_| StandardNormal.sample(&mut rng)).collect(),
                // Expected length 1, as the released code starts.
                BankLayout::Released => {
                    let bound = (3.0 / setup.dim as f32).sqrt();
                    (0..count).map(|_| rng.gen_range(-bound..bound)).collect()
                }
            };
            let table = Tensor::from_slice(&values).view([rows as i64, setup.dim]).to_kind(setup.kind);
            let table = if setup.layout == BankLayout::Paper { Norm::Guarded.apply(&table) } else { table };
            table.to_device(setup.device)
        });
        Ok(MemoryBank {
            tables: tables.collect(),
            slots,
            layout: setup.layout,
            negatives: setup.negatives,
            drawn: None,
            overwritten: vec![],
            ranks: setup.ranks,
        })
    }

    /// Draws the contrast samples of the batch under way, for `samples`. One step and one noise number of the batch give one draw.
    pub(crate) fn prepare(&mut self, batch: &Batch, clock: Clock) -> Result<()> {
        let mut rng = rng::stream(clock.seed, "contrast", &[clock.step as u64, batch.noise]);
        self.drawn = Some(self.draw(&batch.labels, &batch.index, &mut rng)?);
        Ok(())
    }

    /// What each network remembers of the contrast samples of the batch under way, M x [B, K', d].
    pub(crate) fn samples(&self) -> Result<Vec<Tensor>> {
        match &self.drawn {
            Some(draw) => Ok(self.look_up(draw)),
            None => Err(Error::failed("losses were asked for before `prepare` drew contrast samples from the memory bank")),
        }
    }

    /// 0 for the anchors of the batch under way that have no positive or no negative in a queue, else 1; None where all have. `[B]`.
    pub(crate) fn usable(&self) -> Option<&Tensor> {
        self.drawn.as_ref()?.usable.as_ref()
    }

    /// Draws the contrast samples of a batch: positives, then negatives of other classes with replacement. `labels`, `index`: `[B]`.
    pub fn draw(&self, labels: &Tensor, index: &Tensor, rng: &mut rng::Rng) -> Result<Draw> {
        let (labels, index) = (numbers(labels)?, numbers(index)?);
        let mut columns: Vec<i64> = Vec::with_capacity(labels.len() * (self.negatives + 2));
        let mut usable: Option<Vec<f32>> = None;
        match &self.slots {
            Slots::Index { labels: all, mates } => {
                for (&class, &own) in labels.iter().zip(&index) {
                    if self.layout == BankLayout::Released {
                        columns.push(own);
                    }
                    columns.push(positive(&mates[class as usize], (self.layout == BankLayout::Paper).then_some(own), rng));
                    self.push_negatives(&mut columns, all, class, rng);
                }
            }
            Slots::Queue { labels: held, .. } => {
                let held = numbers(held)?;
                let mut mask = vec![1f32; labels.len()];
                for (row, &class) in labels.iter().enumerate() {
                    let mates: Vec<i64> = (0..held.len()).filter(|&i| held[i] == class).map(|i| i as i64).collect();
                    // Without a positive or without negatives in the queue the anchor sits this batch out.
                    if mates.is_empty() || mates.len() == held.len() {
                        columns.extend(std::iter::repeat_n(0, self.negatives + 1));
                        mask[row] = 0.0;
                        continue;
                    }
                    columns.push(mates[rng.gen_range(0..mates.len())]);
                    self.push_negatives(&mut columns, &held, class, rng);
                }
                usable = Some(mask);
            }
        }
        let like = &self.tables[0];
        let columns = arrival::send(&Tensor::from_slice(&columns).view([labels.len() as i64, -1]), like.device());
        Ok(Draw { columns, usable: usable.map(|mask| arrival::send(&Tensor::from_slice(&mask).to_kind(like.kind()), like.device())) })
    }

    fn push_negatives(&self, columns: &mut Vec<i64>, held: &[i64], class: i64, rng: &mut rng::Rng) {
        let mut missing = self.negatives;
        while missing > 0 {
            let i = rng.gen_range(0..held.len());
            if held[i] != class {
                columns.push(i as i64);
                missing -= 1;
            }
        }
    }

    /// What each network remembers of the drawn samples, M x [B, K', d]. Never part of a graph.
    pub fn look_up(&self, draw: &Draw) -> Vec<Tensor> {
        let size = draw.columns.size();
        self.tables.iter().map(|table| table.index_select(0, &draw.columns.flatten(0, 1)).view([size[0], size[1], -1])).collect()
    }

    /// Takes in the batch's last-layer embeddings, one [B, d] for each network; those of all ranks, so that their banks stay equal.
    pub fn update(&mut self, embeds: &[Tensor], labels: &Tensor, index: &Tensor) {
        let _guard = tch::no_grad_guard();
        let ranks = self.ranks;
        let (labels, index) = (ranks.gather(labels, 0), ranks.gather(index, 0));
        let embeds: Vec<Tensor> = embeds.iter().map(|own| ranks.gather(own, 0)).collect();
        match &mut self.slots {
            Slots::Index { .. } => {
                let index = arrival::send(&index, self.tables[0].device());
                let before: Vec<Tensor> = self.tables.iter().map(|table| table.index_select(0, &index)).collect();
                for ((table, old), fresh) in self.tables.iter_mut().zip(&before).zip(&embeds) {
                    let mixed = old * MOMENTUM + fresh.detach() * (1.0 - MOMENTUM);
                    let _ = table.index_copy_(0, &index, &Norm::Guarded.apply(&mixed));
                }
                self.overwritten.push((index, before));
            }
            Slots::Queue { labels: held, next } => {
                let (length, count) = (held.size()[0], labels.size()[0]);
                let places = (Tensor::arange(count, (Kind::Int64, Device::Cpu)) + &*next).remainder(length); // on the CPU: labels and places are drawn from there
                let _ = held.index_copy_(0, &places, &labels.to_device(Device::Cpu)); // on the CPU: labels and places are drawn from there
                next.copy_(&(&*next + count).remainder(length));
                let places = arrival::send(&places, self.tables[0].device());
                let before = self.tables.iter().map(|table| table.index_select(0, &places)).collect();
                for (table, fresh) in self.tables.iter_mut().zip(&embeds) {
                    let _ = table.index_copy_(0, &places, &fresh.detach());
                }
                self.overwritten.push((places, before));
            }
        }
    }

    /// The tables are as before the step where it is undone. A queue's classes and next place are in host memory: whoever undoes the
    /// step puts them back with the rest of `state`.
    pub(crate) fn settle(&mut self, outcome: Outcome) {
        let _guard = tch::no_grad_guard();
        for (places, before) in std::mem::take(&mut self.overwritten).into_iter().rev() {
            for (table, old) in self.tables.iter_mut().zip(before) {
                let rows = match outcome {
                    Outcome::Stands => continue,
                    Outcome::Undone => old,
                    Outcome::UndoneWhere(skip) => old.where_self(&skip.to_kind(Kind::Bool), &table.index_select(0, &places)),
                };
                let _ = table.index_copy_(0, &places, &rows);
            }
        }
    }

    /// Handles onto the tables (and a queue's classes and next place): saving reads them, resuming writes through them.
    pub fn state(&self) -> Named {
        let mut state: Named = self.tables.iter().enumerate().map(|(m, t)| (format!("bank.{m}"), t.shallow_clone())).collect();
        if let Slots::Queue { labels, next } = &self.slots {
            state.push(("bank.labels".into(), labels.shallow_clone()));
            state.push(("bank.next".into(), next.shallow_clone()));
        }
        state
    }
}

/// One of `mates`, other than `except`.
fn positive(mates: &[i64], except: Option<i64>, rng: &mut rng::Rng) -> i64 {
    let place = except.and_then(|own| mates.iter().position(|&i| i == own));
    match place {
        None => mates[rng.gen_range(0..mates.len())],
        Some(place) => {
            let i = rng.gen_range(0..mates.len() - 1);
            mates[if i < place { i } else { i + 1 }]
        }
    }
}

fn numbers(t: &Tensor) -> Result<Vec<i64>> {
    Ok(Vec::<i64>::try_from(t.to_device(Device::Cpu))?) // on the CPU: labels and places are drawn from there
}
