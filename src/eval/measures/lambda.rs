//! `mcl-eval lambda`: how much two layers of two networks learn from each other (Eq. 17), as the mean over all training images at one state
//! of a run, by pair of layers; and whether the paper's claim holds there, that layers of one level match with larger weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;
use tch::{Kind, Tensor};

use super::Measurement;
use crate::data::sampler;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::TargetDataset;
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::record::{self, Record};
use crate::eval::restored::Restored;
use crate::eval::stats;
use crate::files;
use crate::report::plot::Heat;
use crate::report::{Cell, Figure, Table};
use crate::run::{self, RunFolder};

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Run folder; may be repeated
    #[arg(long = "run", value_name = "DIR", default_value = "runs/latest")]
    runs: Vec<PathBuf>,
    /// The state that is looked at: best (what ships), last or step-N
    #[arg(long, default_value = run::BEST)]
    checkpoint: String,
    /// About so many training images, alike of every class; 0 takes all
    #[arg(long, default_value_t = 0)]
    images: usize,
}

/// lambda between the layers of two networks.
struct Between {
    /// Mean over the images, layers of the first network down.
    means: Vec<Vec<f64>>,
    /// Mean over pairs of one level less the mean over the others, image by image.
    gain: Vec<f64>,
}

impl Between {
    /// From lambda of each pair of layers (la, lb), `[images]` each. None of one network has more layers than the other where a level is meant.
    fn new(pairs: &BTreeMap<(usize, usize), Tensor>) -> Between {
        let size = |pick: fn(&(usize, usize)) -> usize| pairs.keys().map(pick).max().map_or(0, |last| last + 1);
        let mut means = vec![vec![f64::NAN; size(|p| p.1)]; size(|p| p.0)];
        pairs.iter().for_each(|((k, z), lambda)| means[*k][*z] = lambda.mean(Kind::Double).double_value(&[]));
        let mean_of = |same: bool| {
            let chosen: Vec<&Tensor> = pairs.iter().filter(|((k, z), _)| (k == z) == same).map(|(_, lambda)| lambda).collect();
            Tensor::stack(&chosen, 0).to_kind(Kind::Double).mean_dim(0i64, false, None)
        };
        let gain = Vec::try_from(mean_of(true) - mean_of(false)).expect("a vector of doubles");
        Between { means, gain }
    }

    /// In how many layers of either network the largest weight is that of the same level, and how many layers there are.
    fn largest(&self) -> (usize, usize) {
        let rows = self.means.len();
        let columns = self.means.first().map_or(0, Vec::len);
        let most = |values: Vec<f64>| (0..values.len()).max_by(|&a, &b| values[a].total_cmp(&values[b]));
        let down = (0..rows).filter(|&k| most(self.means[k].clone()) == Some(k)).count();
        let across = (0..columns).filter(|&z| most((0..rows).map(|k| self.means[k][z]).collect()) == Some(z)).count();
        (down + across, rows + columns)
    }

    /// The claim in numbers.
    fn sentence(&self) -> String {
        let (mean, half) = stats::mean_interval(&self.gain);
        let half = half.unwrap_or(f64::NAN);
        let larger = 100.0 * self.gain.iter().filter(|g| **g > 0.0).count() as f64 / self.gain.len().max(1) as f64;
        let (largest, layers) = self.largest();
        let verdict = match (mean - half > 0.0, mean + half < 0.0) {
            (true, _) => "layers of one level have larger weights",
            (_, true) => "layers of one level have smaller weights",
            _ => "layers of one level have weights like the others",
        };
        format!(
            "{verdict}: {mean:+.4} on average ({:+.4} to {:+.4}, 95 % over images), larger on {larger:.0} % of the images; the largest weight is that of the same level in {largest} of {layers} layers",
            mean - half,
            mean + half
        )
    }
}

impl Measurement for Args {
    const NAME: &'static str = "lambda";
    const ABOUT: &'static str = "Mean weights between layers over all training images, and whether those of one level are larger";

    fn check(&self) -> Result<()> {
        match self.checkpoint.as_str() {
            run::BEST | run::LAST => Ok(()),
            name if run::checkpoint_step(name).is_some() => Ok(()),
            other => Err(Error::input(format!("--checkpoint {other}; accepted: best, last, step-N"))),
        }
    }

    fn run(&self, common: &Common) -> Result<()> {
        self.check()?;
        let mut records = vec![];
        for folder in &self.runs {
            records.extend(self.one(folder, common)?);
        }
        if common.json {
            common.print_json(&record::json(&records, common));
        }
        Ok(())
    }
}

impl Args {
    fn one(&self, folder: &Path, common: &Common) -> Result<Vec<Record>> {
        let networks = NetworkArgs::of_runs(&[folder.to_path_buf()], Some(PeerChoice::All), None).open(common, PeerChoice::All)?;
        let began = Instant::now();
        let restored = Restored::read(folder, &self.checkpoint, common)?;
        let split = match self.images {
            0 => restored.train.clone(),
            asked => {
                let part = (asked as f64 / restored.train.len() as f64).min(1.0);
                restored.train.subset(&sampler::stratified(&restored.train.labels, part, restored.recipe.train.seed))
            }
        };
        let mut found: BTreeMap<(usize, usize, usize, usize), Vec<Tensor>> = BTreeMap::new();
        restored.each_batch(&split, common, |outs| {
            for (pair, lambda) in restored.method.layer_weights(outs).into_iter().filter(|((a, b, ..), _)| a < b) {
                found.entry(pair).or_default().push(lambda.to_device(tch::Device::Cpu));
            }
        })?;
        if found.is_empty() {
            return Err(Error::input(format!(
                "{} learnt no lambda (method {}); accepted: runs of l_mcl with matching = \"weighted\"",
                folder.display(),
                restored.recipe.method_name()
            )));
        }
        let mut between: BTreeMap<(usize, usize), BTreeMap<(usize, usize), Tensor>> = BTreeMap::new();
        for ((a, b, k, z), parts) in found {
            between.entry((a, b)).or_default().insert((k, z), Tensor::cat(&parts, 0));
        }
        let seconds = began.elapsed().as_secs_f64();
        let name = networks[0].cohort().to_string();
        let mut records = vec![];
        for ((a, b), pairs) in &between {
            let between = Between::new(pairs);
            let figure = figure(&name, (*a, *b), &between, &networks, split.len(), &self.checkpoint);
            let path = write(&networks[0], &figure)?;
            let detail = json!({ "figures": [{ "svg": path, "caption": figure.caption }] });
            let target = TargetDataset::source(&restored.recipe.data.name, &networks[0], common)?;
            records.extend(rows((*a, *b), &between).into_iter().map(|(metric, variant, value, interval)| {
                let record = Record::new(Self::NAME, &networks[0], common).of_cohort(&networks[0]).on(&target, restored.dataset.image_size);
                Record {
                    metric,
                    variant,
                    value,
                    ci_low: interval.map(|(low, _)| low),
                    ci_high: interval.map(|(_, high)| high),
                    n_train: split.len(),
                    n_test: 0,
                    seconds,
                    options: json!({ "checkpoint": self.checkpoint, "images": self.images }),
                    detail: detail.clone(),
                    ..record
                }
            }));
            if !common.json {
                print!("{}", table(&between).plain());
                println!("{name}, networks {a} and {b}, {} training images: {}", split.len(), between.sentence());
                println!("{}", path.display());
            }
        }
        record::keep(&records, common)?;
        Ok(records)
    }
}

type Number = (String, String, f64, Option<(f64, f64)>);

/// Metric, variant, value and interval of every number.
fn rows((a, b): (usize, usize), between: &Between) -> Vec<Number> {
    let of = format!("networks {a} and {b}");
    let mut rows: Vec<Number> = vec![];
    for (k, row) in between.means.iter().enumerate() {
        rows.extend(
            row.iter().enumerate().map(|(z, mean)| ("lambda".into(), format!("{of}, layers {} and {}", k + 1, z + 1), *mean, None)),
        );
    }
    let (mean, half) = stats::mean_interval(&between.gain);
    rows.push(("same_level_gain".into(), of.clone(), mean, half.map(|half| (mean - half, mean + half))));
    let (largest, layers) = between.largest();
    rows.push(("same_level_largest".into(), of, largest as f64 / layers.max(1) as f64, None));
    rows
}

fn stages(count: usize) -> Vec<String> {
    (1..=count).map(|l| format!("layer {l}")).collect()
}

fn table(between: &Between) -> Table {
    let names = stages(between.means.first().map_or(0, Vec::len));
    let columns: Vec<&str> = std::iter::once("mean lambda").chain(names.iter().map(String::as_str)).collect();
    let mut shown = Table::new("", &columns);
    for (name, row) in stages(between.means.len()).iter().zip(&between.means) {
        shown.push(std::iter::once(Cell::text(name)).chain(row.iter().map(|v| Cell::Score(*v, 4))).collect());
    }
    shown
}

fn figure(name: &str, (a, b): (usize, usize), between: &Between, networks: &[TrainedNetwork], images: usize, state: &str) -> Figure {
    let arch = |m: usize| networks.get(m).map_or("", |n| n.arch.name);
    let (rows, columns) = (stages(between.means.len()), stages(between.means.first().map_or(0, Vec::len)));
    let title = format!("{name}: lambda, mean over {images} training images");
    let (x, y) = (format!("network {b} ({})", arch(b)), format!("network {a} ({})", arch(a)));
    let values = &between.means;
    let (columns, rows) = (&columns, &rows);
    let heat = Heat { title: &title, x: &x, y: &y, columns, rows, values, limits: None, decimals: 3, unit: "lambda", root: false };
    let caption = format!("At the checkpoint `{state}`. Between 0.269 and 0.731. {}.", between.sentence());
    heat.figure(format!("{name}-lambda-all-{a}-{b}"), caption)
}

fn write(network: &TrainedNetwork, figure: &Figure) -> Result<PathBuf> {
    let folder = RunFolder::at(&network.out).figures();
    std::fs::create_dir_all(&folder).map_err(Error::io("cannot make", &folder))?;
    let path = folder.join(format!("{}.svg", figure.name));
    files::write(&path, figure.file().as_bytes())?;
    path.canonicalize().map_err(Error::io("cannot find", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claim_is_tested_by_numbers() {
        // Two images, two layers each: 0.7 and 0.6 on the diagonal, 0.5 beside it.
        let of = |values: [f64; 2]| Tensor::from_slice(&values);
        let pairs = BTreeMap::from([((0, 0), of([0.7, 0.6])), ((1, 1), of([0.7, 0.6])), ((0, 1), of([0.5; 2])), ((1, 0), of([0.5; 2]))]);
        let between = Between::new(&pairs);
        assert!((between.means[0][0] - 0.65).abs() < 1e-12 && (between.means[0][1] - 0.5).abs() < 1e-12);
        assert!((between.gain[0] - 0.2).abs() < 1e-12 && (between.gain[1] - 0.1).abs() < 1e-12);
        assert_eq!(between.largest(), (4, 4));
        // Mean 0.15, t(1) = 12.706, half width 12.706 x 0.05: the interval holds 0, so nothing is claimed.
        assert!(
            between.sentence().starts_with("layers of one level have weights like the others: +0.1500 on average (-0.4853"),
            "{}",
            between.sentence()
        );
        let many = BTreeMap::from([
            ((0, 0), Tensor::full([9], 0.6, (Kind::Double, tch::Device::Cpu))),
            ((0, 1), Tensor::full([9], 0.4, (Kind::Double, tch::Device::Cpu))),
        ]);
        assert!(Between::new(&many).sentence().starts_with("layers of one level have larger weights"));
    }
}
