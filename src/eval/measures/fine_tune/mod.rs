//! `mcl-eval fine-tune`: all weights of a network trained on another dataset, or on a thousand images of it, with a fresh classifier. The
//! learning rate is chosen on a held-out part of those images; then the network is trained on all of them and tested once.

pub mod training;

use std::str::FromStr;
use std::time::Instant;

use serde::Deserialize;
use serde_json::{Value, json};
use tch::Tensor;

use super::Measurement;
use crate::data::{Split, sampler};
use crate::error::{Error, Result};
use crate::eval::features::Prepared;
use crate::eval::network::TrainedNetwork;
use crate::eval::probe::{best, check_choice, check_counts, check_seeds, check_sgd, edge_warning};
use crate::eval::protocol::{Protocol, Shipped, require};
use crate::eval::record::Record;
use crate::eval::score::Score;
use crate::eval::target::{Subjects, TargetArgs};
use crate::eval::{Common, seeds};
use crate::extractor::Tap;
use crate::limits::{self, Need};
use crate::optim::Rule;
use crate::rng;
use crate::run::RunFolder;
use training::{Course, Ended, Tuned};

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    on: TargetArgs,
    /// Labelled images to learn from, drawn by class, or all [default: the protocol's]
    #[arg(long, value_name = "N|all")]
    images: Option<Images>,
    /// Seeds to repeat with, e.g. 1,2,3 [default: the protocol's]
    #[arg(long, value_delimiter = ',')]
    seeds: Vec<u64>,
}

/// How many images are learned from; none for all of them.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "toml::Value")]
struct Images(Option<usize>);

impl TryFrom<toml::Value> for Images {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Images, String> {
        match &value {
            toml::Value::String(text) if text == "all" => Ok(Images(None)),
            // Some to train on and some to choose on.
            toml::Value::Integer(count) if *count >= 4 => Ok(Images(Some(*count as usize))),
            _ => Err(format!("images = {value}; accepted: a number from 4, or \"all\"")),
        }
    }
}

impl FromStr for Images {
    type Err = String;

    fn from_str(text: &str) -> Result<Images, String> {
        Images::try_from(text.parse().map_or_else(|_| toml::Value::from(text), |count: i64| count.into()))
    }
}

/// The keys of the protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FineTune {
    image_size: i64,
    images: Images,
    holdout: f64,
    augment: bool,
    batch: usize,
    epochs: usize,
    lrs: Vec<f64>,
    warmup: f64,
    momentum: f64,
    weight_decay: f64,
    seeds: Vec<u64>,
}

impl FineTune {
    fn check(&self) -> Result<()> {
        check_counts(self.batch, self.epochs)?;
        require(self.batch > 1, "batch", self.batch, "2 or more: BatchNorm cannot take statistics from one image")?;
        check_choice(&self.lrs, self.holdout)?;
        require((0.0..1.0).contains(&self.warmup), "warmup", self.warmup, "a part of all steps, 0 or more and below 1")?;
        check_sgd(self.momentum, self.weight_decay)?;
        check_seeds(&self.seeds)
    }

    /// Refuses batches whose images and maps do not fit into memory. A GPU says itself what it has.
    fn check_memory(&self, network: &TrainedNetwork, side: usize, common: &Common) -> Result<()> {
        let need = Need::new()
            .and(format!("batches of {} images of {side} x {side}", self.batch), 3 * limits::float_images(self.batch, side))
            .and("the maps of the network", limits::maps(self.batch, side, network.arch.maps));
        if common.device.is_cuda() { Ok(()) } else { need.check(&format!("protocol: batch = {}", self.batch)) }
    }
}

impl Args {
    fn protocol(&self) -> Result<(Protocol, FineTune)> {
        let mut protocol = self.on.how.protocol(Self::PROTOCOLS, Self::DEFAULT_PROTOCOL)?;
        if let Some(Images(images)) = self.images {
            protocol.set("images", images.map_or_else(|| toml::Value::from("all"), |count| toml::Value::from(count as i64)));
        }
        if !self.seeds.is_empty() {
            protocol.set("seeds", self.seeds.iter().map(|&s| s as i64).collect::<Vec<_>>());
        }
        let p: FineTune = protocol.options()?;
        p.check()?;
        Ok((protocol, p))
    }
}

impl Measurement for Args {
    const NAME: &'static str = "fine-tune";
    const ABOUT: &'static str = "Train all weights on another dataset, the learning rate chosen on held-out images";
    const PROTOCOLS: &'static [Shipped] =
        &[Shipped { name: "fine-tune", text: include_str!("../../../../protocols/eval/fine-tune.toml"), repeats: &["seeds"] }];

    fn check(&self) -> Result<()> {
        self.on.check()?;
        let networks = &self.on.networks;
        if let Some(file) = networks.by_file.torchscript.first() {
            return Err(Error::input(format!(
                "--torchscript {}: fine-tune trains all weights, and a TorchScript file is frozen as it was traced, BatchNorm included; accepted: --run, --weights",
                file.display()
            )));
        }
        if let Some(layer) = networks.layers.iter().find(|layer| **layer != Tap::Last) {
            return Err(Error::input(format!(
                "--layers {layer}: fine-tune trains the whole network with a classifier on its last feature; accepted: last, or --stage for a stage as a network of its own"
            )));
        }
        self.protocol().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let (protocol, p) = self.protocol()?;
        let subjects = self.on.open(common)?;
        let records = subjects.each(common, |network| measure(network, &subjects, &protocol, &p, common))?;
        let target = &subjects.target;
        let images = records.first().map_or(0, |r| r.n_train);
        let heading = format!(
            "fine-tuning of all weights -> {}, {images} of {} training and {} test images, split {}",
            target.dataset.name,
            target.dataset.train.len(),
            target.dataset.test.len(),
            &target.hash[..16]
        );
        seeds::show(&records, &heading, "fine-tuning", common)
    }
}

/// All seeds of one network, one record each.
fn measure(network: &TrainedNetwork, subjects: &Subjects, protocol: &Protocol, p: &FineTune, common: &Common) -> Result<Vec<Record>> {
    network.needs_ours("fine-tune")?;
    let dataset = &subjects.target.dataset;
    let side = network.image_size(p.image_size);
    p.check_memory(network, side, common)?;
    let prepared = Prepared::new(dataset, network, side)?;
    let all = &prepared.dataset.train;
    let mut records = vec![];
    for &seed in &p.seeds {
        let began = Instant::now();
        let count = p.images.0.map_or(all.len(), |asked| asked.min(all.len()));
        let drawn = sampler::drawn(&all.labels, count, seed, "images");
        let tuner = Tuner { network, prepared: &prepared, train: all.subset(&drawn), p, seed, common };
        let (score, mut chosen, mut warnings) = tuner.tune()?;
        chosen["images"] = count.into();
        if let Some(asked) = p.images.0.filter(|asked| *asked > count) {
            warnings.push(format!("{asked} images were asked for, and {} has {count} to learn from", dataset.name));
        }
        if count < all.len() {
            let folder = RunFolder::at(&network.out).draws();
            std::fs::create_dir_all(&folder).map_err(Error::io("cannot make", &folder))?;
            let path = folder.join(format!("{}-images{count}-seed{seed}.txt", dataset.name));
            chosen["draw"] = json!({ "sha256": sampler::write_index(&path, &drawn)?, "file": path });
        }
        let record = subjects.record(Args::NAME, network, side, protocol, common).variant(format!("images={count}"));
        let record = Record { seed: Some(seed), seconds: began.elapsed().as_secs_f64(), n_train: count, warnings, ..record };
        let mut record = record.score(&score, seed, &dataset.classes);
        record.detail["chosen"] = chosen;
        seeds::say(&record, common);
        records.push(record);
    }
    Ok(records)
}

/// One network and the images it is fine-tuned on.
struct Tuner<'a> {
    network: &'a TrainedNetwork,
    prepared: &'a Prepared,
    train: Split,
    p: &'a FineTune,
    seed: u64,
    common: &'a Common,
}

impl Tuner<'_> {
    /// Chooses a learning rate, trains with it on all images, and tests once: the score, what was chosen, and what makes it doubtful.
    fn tune(&self) -> Result<(Score, Value, Vec<String>)> {
        let (lrs, test) = (&self.p.lrs, &self.prepared.dataset.test);
        let mut warnings = vec![];
        let held = ((self.train.len() as f64 * self.p.holdout).round() as usize).max(1);
        // Nothing is held out where there is nothing to choose.
        let tried = if lrs.len() > 1 { self.try_all(held)? } else { vec![] };
        let chosen = if tried.is_empty() { 0 } else { best(&tried.iter().map(|t| t.unwrap_or(-1.0)).collect::<Vec<_>>()) };
        let lr = lrs[chosen];
        warnings.extend(edge_warning("learning rate", chosen, lrs));
        let mut tuned = self.fresh();
        let what = format!("{}: seed {}: learning rate {lr:?}, all images", self.network.name, self.seed);
        let loss = match self.train(&mut tuned, &self.train, lr, what)? {
            Ended::Finite(loss) => loss,
            Ended::Diverged(epoch) => return Err(self.diverged(&format!("learning rate {lr:?} on all images"), epoch)),
        };
        let scores = self.scores(&tuned, test, lr)?;
        let held = if tried.is_empty() { 0 } else { held };
        let chosen = json!({ "lr": lr, "lrs": lrs, "holdout_top1": tried, "held_out": held, "epochs": self.p.epochs, "loss": loss });
        Ok((Score::new(&scores, &test.labels), chosen, warnings))
    }

    /// The accuracy of each rate on `held` images that it did not see; none where it diverged.
    fn try_all(&self, held: usize) -> Result<Vec<Option<f64>>> {
        let labels = &self.train.labels;
        let out = sampler::drawn(labels, held, self.seed, "held out");
        let kept: Vec<usize> = (0..labels.len()).filter(|i| out.binary_search(i).is_err()).collect();
        if kept.len() < 2 {
            return Err(Error::input(format!("holdout = {} of {} images leaves {} to train on", self.p.holdout, labels.len(), kept.len())));
        }
        let (kept, out) = (self.train.subset(&kept), self.train.subset(&out));
        let mut tried = vec![];
        let mut last = 0;
        for &lr in &self.p.lrs {
            let mut tuned = self.fresh();
            let who = format!("{}: seed {}: learning rate {lr:?}", self.network.name, self.seed);
            match self.train(&mut tuned, &kept, lr, who.clone())? {
                Ended::Finite(_) => {
                    let top1 = Score::new(&self.scores(&tuned, &out, lr)?, &out.labels).top1();
                    self.common.say(format!("{who}: {top1:.2} % of {held} held-out images"));
                    tried.push(Some(top1));
                }
                Ended::Diverged(epoch) => {
                    self.common.say(format!("{who}: not finite any more in epoch {epoch}, not chosen"));
                    tried.push(None);
                    last = epoch;
                }
            }
        }
        if tried.iter().all(Option::is_none) {
            return Err(self.diverged(&format!("any learning rate of {:?}", self.p.lrs), last));
        }
        Ok(tried)
    }

    /// The network as it was pre-trained, with a classifier of its own: the same for every rate.
    fn fresh(&self) -> Tuned {
        let TrainedNetwork { arch, params, .. } = self.network;
        let rule = Rule::Sgd { momentum: self.p.momentum, weight_decay: self.p.weight_decay, nesterov: false };
        let classes = self.prepared.dataset.classes.len() as i64;
        Tuned::new(arch, params, classes, rule, rng::derive(self.seed, "classifier", 0), self.common.device)
    }

    fn train(&self, tuned: &mut Tuned, split: &Split, lr: f64, what: String) -> Result<Ended> {
        let FineTune { epochs, batch, warmup, .. } = *self.p;
        let progress = self.common.progress(what, epochs * split.len(), "images");
        let transform = self.prepared.training_transform(self.p.augment);
        tuned.train(split, &transform, Course { lr, epochs, batch, warmup, seed: self.seed }, &progress)
    }

    fn scores(&self, tuned: &Tuned, split: &Split, lr: f64) -> Result<Tensor> {
        let scores = tuned.scores(split, &self.prepared.transform, self.common.threads);
        scores.map_err(|e| match e {
            Error::Failed(what) => Error::failed(format!("{}: seed {}: learning rate {lr:?}: {what}", self.network.name, self.seed)),
            other => other,
        })
    }

    fn diverged(&self, with: &str, epoch: usize) -> Error {
        Error::failed(format!(
            "{}: seed {}: fine-tuned with {with}, it is not finite any more in epoch {epoch}; lower rates may do: --set lrs=[0.0001,0.001]",
            self.network.name, self.seed
        ))
    }
}
