//! Trained networks: what is measured and exported, from a run folder or from anybody's weights, and the flags that name them.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use sha2::{Digest, Sha256};

use super::Common;
use super::dataset;
use crate::data::imagenet;
use crate::error::{Error, Result};
use crate::extractor::Extractor;
use crate::files;
use crate::nets::{self, Arch, Network};
use crate::params::Params;
use crate::run::{self, RunFolder};
use crate::weights::{self, Classifier, LoadOptions, Opened};

/// The flags for networks given by file, the same in every command.
#[derive(Debug, Clone, Default, Args)]
pub struct WeightsArgs {
    /// Anybody's weights (safetensors, .pt or .pth); may be repeated where several networks are taken
    #[arg(long, value_name = "FILE")]
    pub weights: Vec<PathBuf>,
    /// The architecture of --weights (`mcl-train list archs`), where the file does not say
    #[arg(long, requires = "weights")]
    pub arch: Option<String>,
    /// Channel means the network was trained with, where its file does not say, e.g. 0.507,0.487,0.441
    #[arg(long, value_delimiter = ',', num_args = 1, allow_hyphen_values = true, requires = "weights", value_name = "R,G,B")]
    pub mean: Vec<f64>,
    /// Channel standard deviations, likewise
    #[arg(long, value_delimiter = ',', num_args = 1, allow_hyphen_values = true, requires = "weights", value_name = "R,G,B")]
    pub std: Vec<f64>,
    /// What images are normalised with: imagenet, none or R,G,B/R,G,B (means/deviations) [default: what the weights say]
    #[arg(long, value_name = "imagenet|none|MEAN/STD", conflicts_with_all = ["mean", "std"])]
    pub normalisation: Option<Normalisation>,
    /// Load what matches of --weights, leave the rest at 0
    #[arg(long, requires = "weights")]
    pub allow_partial: bool,
    /// What stands before the names in --weights, e.g. `module_list.1.backbone.`; found out unless given
    #[arg(long, value_name = "PREFIX", requires = "weights")]
    pub strip: Option<String>,
}

impl WeightsArgs {
    /// Builds the network a file holds. Features need no classifier.
    pub(crate) fn open(&self, file: &Path, common: &Common) -> Result<Opened> {
        let arch = self.arch.as_deref().map(nets::find).transpose()?;
        let options = LoadOptions { allow_partial: self.allow_partial, classifier: Classifier::Optional, strip: self.strip.clone() };
        weights::open(file, arch, common.device, &options)
    }

    /// What images for a network are normalised with: the flags first, then what its file says.
    pub(crate) fn normalisation(&self, opened: &Opened, file: &Path) -> Result<Normalisation> {
        if let Some(given) = self.normalisation {
            return Ok(given);
        }
        let stored = opened.meta.as_ref();
        let mean = three("--mean", &self.mean, stored.map(|m| m.mean), file)?;
        let std = three("--std", &self.std, stored.map(|m| m.std), file)?;
        Normalisation::new(mean, std)
    }
}

/// The three numbers of a flag, or what the file says.
fn three(flag: &str, given: &[f64], stored: Option<[f64; 3]>, file: &Path) -> Result<[f64; 3]> {
    match (given, stored) {
        ([], Some(stored)) => Ok(stored),
        ([], None) => Err(Error::input(format!(
            "{} does not say what its inputs were normalised with; add --normalisation imagenet (as most ImageNet networks want), or --mean R,G,B and --std R,G,B as in its training",
            file.display()
        ))),
        ([r, g, b], _) => Ok([*r, *g, *b]),
        (other, _) => Err(Error::input(format!("{flag} has {} numbers; accepted: three, for red, green and blue", other.len()))),
    }
}

/// What the channels of an image between 0 and 1 are normalised with: (x - mean) / std.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalisation {
    /// Of red, green and blue.
    pub mean: [f64; 3],
    /// Standard deviations, likewise.
    pub std: [f64; 3],
}

impl Normalisation {
    /// Refuses what no image can be normalised with.
    pub fn new(mean: [f64; 3], std: [f64; 3]) -> Result<Normalisation> {
        if let Some(bad) = mean.iter().find(|m| !m.is_finite()) {
            return Err(Error::input(format!("channel mean {bad}; accepted: finite numbers")));
        }
        if let Some(bad) = std.iter().find(|s| !(**s > 0.0 && s.is_finite())) {
            return Err(Error::input(format!("channel standard deviation {bad}; accepted: finite numbers above 0")));
        }
        Ok(Normalisation { mean, std })
    }
}

impl FromStr for Normalisation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Normalisation> {
        let three = |text: &str| -> Option<[f64; 3]> {
            let numbers: Option<Vec<f64>> = text.split(',').map(|n| n.trim().parse().ok()).collect();
            numbers?.try_into().ok()
        };
        match text {
            "imagenet" => Ok(Normalisation { mean: imagenet::MEAN, std: imagenet::STD }),
            "none" => Ok(Normalisation { mean: [0.0; 3], std: [1.0; 3] }),
            _ => text
                .split_once('/')
                .and_then(|(mean, std)| Normalisation::new(three(mean)?, three(std)?).ok())
                .ok_or_else(|| {
                    Error::input(format!(
                        "normalisation `{text}`; accepted: imagenet, none, or means and deviations above 0, e.g. 0.485,0.456,0.406/0.229,0.224,0.225"
                    ))
                }),
        }
    }
}

/// The flags that name networks: of runs, or given by file.
#[derive(Debug, Clone, Default, Args)]
pub struct NetworkArgs {
    /// Run folder; may be repeated [default: runs/latest]
    #[arg(long = "run", value_name = "DIR", conflicts_with = "weights")]
    pub runs: Vec<PathBuf>,
    /// Which networks of a run: a number from 0, `best` (chosen on held-out images) or `all` [default: best where one was chosen]
    #[arg(long, value_name = "N|best|all")]
    pub peer: Option<PeerChoice>,
    /// Networks given by file instead of a run.
    #[command(flatten)]
    pub by_file: WeightsArgs,
    /// Where results go [default: the run's folder, or results/ for --weights]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Which networks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerChoice {
    /// The one with this number.
    One(usize),
    /// The one chosen on held-out images.
    Best,
    /// Every one.
    All,
}

impl FromStr for PeerChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<PeerChoice> {
        match text {
            "best" => Ok(PeerChoice::Best),
            "all" => Ok(PeerChoice::All),
            _ => {
                text.parse().map(PeerChoice::One).map_err(|_| Error::input(format!("peer `{text}`; accepted: a number from 0, best, all")))
            }
        }
    }
}

impl NetworkArgs {
    /// The flags that name these runs and networks of theirs.
    pub(crate) fn of_runs(runs: &[PathBuf], peer: Option<PeerChoice>) -> NetworkArgs {
        NetworkArgs { runs: runs.to_vec(), peer, ..Default::default() }
    }

    /// What can be refused without opening a file.
    pub(crate) fn check(&self) -> Result<()> {
        self.by_file.arch.as_deref().map(nets::find).transpose().map(drop)
    }

    /// All networks asked for. `default` is what is taken of a run when nothing was chosen.
    pub fn open(&self, common: &Common, default: PeerChoice) -> Result<Vec<TrainedNetwork>> {
        let mut networks = vec![];
        if self.by_file.weights.is_empty() {
            let latest = [PathBuf::from("runs/latest")];
            for run in if self.runs.is_empty() { &latest[..] } else { &self.runs } {
                networks.extend(self.open_run(run, default, common)?);
            }
        }
        for file in &self.by_file.weights {
            networks.push(self.open_file(file, common)?);
        }
        make_unique(&mut networks);
        Ok(networks)
    }

    fn open_file(&self, file: &Path, common: &Common) -> Result<TrainedNetwork> {
        let opened = self.by_file.open(file, common)?;
        if !opened.report.missing.is_empty() || !opened.report.misshapen.is_empty() {
            common.warn(format!("{}: {}", file.display(), opened.report));
        }
        let normalisation = self.by_file.normalisation(&opened, file)?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let out = self.out.clone().unwrap_or_else(|| PathBuf::from("results"));
        Ok(TrainedNetwork::new(opened, normalisation, name, file.to_path_buf(), out))
    }

    fn open_run(&self, run: &Path, default: PeerChoice, common: &Common) -> Result<Vec<TrainedNetwork>> {
        if !run.is_dir() {
            let hint = if run == Path::new("runs/latest") {
                "train one (`mcl-train run ...`) or name it with --run"
            } else {
                "accepted: a folder `mcl-train run` made"
            };
            return Err(Error::input(format!("no run at {}; {hint}", run.display())));
        }
        let folder = RunFolder::at(run);
        let files = folder.shipped();
        if files.is_empty() {
            return Err(Error::input(format!(
                "{} holds no finished networks (no {}); let the run finish first",
                run.display(),
                folder.network(0).display()
            )));
        }
        let best = folder.best_network();
        let chosen: Vec<PathBuf> = match self.peer {
            Some(PeerChoice::One(m)) => vec![files.get(m).cloned().ok_or_else(|| {
                Error::input(format!("--peer {m}: {} has {} networks, 0 to {}", run.display(), files.len(), files.len() - 1))
            })?],
            Some(PeerChoice::Best) if !best.exists() => {
                return Err(Error::input(format!(
                    "--peer best: {} chose none, because it held no images out; accepted: a number, all",
                    run.display()
                )));
            }
            Some(PeerChoice::Best) => vec![best],
            None if default == PeerChoice::Best && best.exists() => vec![best],
            Some(PeerChoice::All) | None => files,
        };
        chosen.iter().map(|file| self.open_peer(&folder, file, common)).collect()
    }

    fn open_peer(&self, folder: &RunFolder, file: &Path, common: &Common) -> Result<TrainedNetwork> {
        let opened = self.by_file.open(file, common)?;
        let normalisation = self.by_file.normalisation(&opened, file)?;
        // `best` is a link to the network it means.
        let real = file.canonicalize().map_err(Error::open(file))?;
        let peer = run::network_number(&real);
        let label = folder.name()?;
        let name = peer.map_or(label.clone(), |m| format!("{label}/{}", run::network_name(m)));
        let recipe = dataset::recipe(folder)?;
        let out = self.out.clone().unwrap_or_else(|| folder.path().to_path_buf());
        let mut network = TrainedNetwork::new(opened, normalisation, name, real, out);
        network.run = Some(folder.path().to_path_buf());
        (network.peer, network.method, network.meta.dataset) = (peer, recipe.method, Some(recipe.dataset));
        Ok(network)
    }
}

/// Two runs of one name get their place in the list.
fn make_unique(networks: &mut [TrainedNetwork]) {
    let names: Vec<String> = networks.iter().map(|n| n.name.clone()).collect();
    for (i, network) in networks.iter_mut().enumerate() {
        if names[..i].contains(&network.name) {
            network.name = format!("{} ({})", network.name, names[..i].iter().filter(|n| **n == names[i]).count() + 1);
        }
    }
}

/// What a network is fed with and answers, from its file, its run and the flags.
#[derive(Debug, Clone)]
pub struct Meta {
    /// Empty where the file has no classifier.
    pub classes: Vec<String>,
    /// Side of the images it was trained on.
    pub image_size: i64,
    /// Of the channels, as it was trained.
    pub mean: [f64; 3],
    /// Standard deviations, likewise.
    pub std: [f64; 3],
    /// What it was trained on.
    pub dataset: Option<String>,
    /// Hash of the recipe it was trained by; empty where nothing says.
    pub recipe: String,
    /// The epoch it is of.
    pub epoch: Option<usize>,
}

/// A frozen network and what is known about it.
pub struct TrainedNetwork {
    /// Short and unique among the networks of a command: `RUN/peer-0`.
    pub name: String,
    /// The folder of its run.
    pub run: Option<PathBuf>,
    /// Its place in the cohort.
    pub peer: Option<usize>,
    /// How it was pre-trained, where that is known.
    pub method: String,
    /// Its architecture.
    pub arch: &'static Arch,
    /// Where its weights are.
    pub file: PathBuf,
    /// What it is fed with and answers.
    pub meta: Meta,
    /// The network itself.
    pub net: Network,
    /// Its weights and buffers.
    pub params: Params,
    /// Of all weights and buffers.
    pub hash: String,
    /// Where its results are written.
    pub out: PathBuf,
}

impl TrainedNetwork {
    /// A network read from `file`, of no run.
    fn new(opened: Opened, normalisation: Normalisation, name: String, file: PathBuf, out: PathBuf) -> TrainedNetwork {
        let stored = opened.meta.as_ref();
        let numbered = || (0..opened.classes.unwrap_or(0)).map(|c| c.to_string()).collect();
        let meta = Meta {
            classes: stored.filter(|_| opened.classes.is_some()).map_or_else(numbered, |m| m.classes.clone()),
            image_size: stored.map_or(opened.arch.image_size, |m| m.image_size),
            mean: normalisation.mean,
            std: normalisation.std,
            dataset: stored.and_then(|m| m.dataset.clone()),
            epoch: stored.and_then(|m| m.epoch),
            recipe: stored.map_or(String::new(), |m| m.recipe.clone()),
        };
        let hash = hash(&opened.params);
        let Opened { arch, net, params, .. } = opened;
        TrainedNetwork { name, run: None, peer: None, method: String::new(), arch, file, meta, net, params, hash, out }
    }

    /// The network ready for inference.
    pub(crate) fn extractor(&self, common: &Common) -> Extractor {
        Extractor::new(self.arch, &self.params, None, self.meta.classes.len().max(1) as i64, common.threads)
    }

    /// The name of its run, for what is measured of all its networks together.
    pub(crate) fn cohort(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }

    /// The side of the images it is measured on: what was asked for, or its own for 0.
    pub(crate) fn image_size(&self, asked: i64) -> usize {
        if asked > 0 { asked as usize } else { self.meta.image_size.max(1) as usize }
    }

    /// Still the network that was loaded? Anything a measurement changed would make its number worthless.
    pub fn check_unchanged(&self) -> Result<()> {
        let now = hash(&self.params);
        if now == self.hash {
            return Ok(());
        }
        Err(Error::failed(format!(
            "{}: the backbone's weights or buffers changed while it was measured ({} before, {now} after)",
            self.name, self.hash
        )))
    }
}

/// sha256 of the names, shapes and bytes of all weights and buffers.
fn hash(params: &Params) -> String {
    let mut hash = Sha256::new();
    for (name, tensor) in params.named() {
        hash.update(format!("{name} {:?} {:?}\n", tensor.kind(), tensor.size()));
        hash.update(files::tensor_bytes(&tensor));
    }
    format!("{:x}", hash.finalize())
}
