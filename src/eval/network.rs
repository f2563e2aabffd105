//! Trained networks: what is measured and exported, from a run folder or from anybody's weights, and the flags that name them.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use sha2::{Digest, Sha256};

use super::foreign::{self, Script};
pub use super::normalisation::Normalisation;
use super::runs::{self, Checkpoint};
use super::{Common, dataset, normalisation};
use crate::error::{Error, Result};
use crate::extractor::foreign::Pool;
use crate::extractor::{Extractor, Tap};
use crate::files;
use crate::nets::{self, Arch, Network};
use crate::params::Params;
use crate::run::{self, RunFolder};
use crate::weights::{self, Classifier, LoadOptions, LoadReport, Opened, torchscript};

/// The flags for networks given by file, the same in every command.
#[derive(Debug, Clone, Default, Args)]
pub struct WeightsArgs {
    /// Anybody's weights (safetensors, .pt or .pth); may be repeated where several networks are taken
    #[arg(long, value_name = "FILE")]
    pub weights: Vec<PathBuf>,
    /// The architecture of --weights (`mcl-train list archs`), where neither the file nor its tensors' names and shapes say
    #[arg(long)]
    pub arch: Option<String>,
    /// Anybody's network as TorchScript, whose code is run; may be repeated. A .json beside it says what protocols/import/trace.py writes
    #[arg(long, value_name = "FILE")]
    pub torchscript: Vec<PathBuf>,
    /// Which output of --torchscript is the feature, where it gives several: a key, or a place from 0
    #[arg(long, value_name = "NAME")]
    pub output: Option<String>,
    /// How that output becomes one vector: the mean over tokens or places, or the first token (cls)
    #[arg(long, value_name = "mean|cls")]
    pub pool: Option<Pool>,
    /// Channel means the network was trained with, where its file does not say, e.g. 0.507,0.487,0.441
    #[arg(long, value_delimiter = ',', num_args = 1, allow_hyphen_values = true, value_name = "R,G,B")]
    pub mean: Vec<f64>,
    /// Channel standard deviations, likewise
    #[arg(long, value_delimiter = ',', num_args = 1, allow_hyphen_values = true, value_name = "R,G,B")]
    pub std: Vec<f64>,
    /// What images are normalised with: imagenet, none or R,G,B/R,G,B (means/deviations) [default: what the weights say]
    #[arg(long, allow_hyphen_values = true, value_name = "imagenet|none|MEAN/STD", conflicts_with_all = ["mean", "std"])]
    pub normalisation: Option<Normalisation>,
    /// Load what matches of --weights, leave the rest at 0
    #[arg(long)]
    pub allow_partial: bool,
    /// What stands before the names in --weights, e.g. `module_list.1.backbone.`; found out unless given
    #[arg(long, value_name = "PREFIX")]
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
        let stored = opened.meta.as_ref();
        self.normalised(stored.map(|m| m.mean), stored.map(|m| m.std), file)
    }

    /// The same where these are what is stored of it.
    pub(super) fn normalised(&self, mean: Option<[f64; 3]>, std: Option<[f64; 3]>, file: &Path) -> Result<Normalisation> {
        if let Some(given) = self.normalisation {
            return Ok(given);
        }
        Normalisation::new(normalisation::three("--mean", &self.mean, mean, file)?, normalisation::three("--std", &self.std, std, file)?)
    }

    /// Is any network given by file?
    pub(crate) fn any(&self) -> bool {
        !self.weights.is_empty() || !self.torchscript.is_empty()
    }

    /// Refuses what is said about files where there are none of the kind.
    fn check(&self) -> Result<()> {
        let (weights, script) = (!self.weights.is_empty(), !self.torchscript.is_empty());
        let said = [
            ("--arch", self.arch.is_some(), weights, "--weights"),
            ("--strip", self.strip.is_some(), weights, "--weights"),
            ("--allow-partial", self.allow_partial, weights, "--weights"),
            ("--output", self.output.is_some(), script, "--torchscript"),
            ("--pool", self.pool.is_some(), script, "--torchscript"),
            ("--mean", !self.mean.is_empty(), self.any(), "--weights or --torchscript"),
            ("--std", !self.std.is_empty(), self.any(), "--weights or --torchscript"),
        ];
        match said.iter().find(|(_, given, there, _)| *given && !there) {
            Some((flag, _, _, of)) => Err(Error::input(format!("{flag} is of networks given by file; add {of} FILE"))),
            None => self.arch.as_deref().map(nets::find).transpose().map(drop),
        }
    }
}

/// The flags that name networks: of runs, or given by file.
#[derive(Debug, Clone, Default, Args)]
pub struct NetworkArgs {
    /// Run folder; may be repeated [default: runs/latest]
    #[arg(long = "run", value_name = "DIR", conflicts_with_all = ["weights", "torchscript"])]
    pub runs: Vec<PathBuf>,
    /// Networks of a checkpoint, also of a run that is stopped or still trains: last, best or step-N [default: those of the finished run]
    #[arg(long, value_name = "last|best|step-N", conflicts_with_all = ["weights", "torchscript"])]
    pub checkpoint: Option<Checkpoint>,
    /// Which networks of a run: a number from 0, `best` (chosen on held-out images) or `all` [default: best where one was chosen]
    #[arg(long, value_name = "N|best|all")]
    pub peer: Option<PeerChoice>,
    /// A stage of the networks instead of their own classifier, from 1: its auxiliary branch as a network of its own
    #[arg(long, value_name = "L", conflicts_with_all = ["weights", "torchscript"])]
    pub stage: Option<usize>,
    /// Which parts of the network features are taken from, several side by side: stages from 1, and `last` [default: last]
    #[arg(long, value_delimiter = ',', value_name = "1,..,last")]
    pub layers: Vec<Tap>,
    /// Networks given by file instead of a run.
    #[command(flatten)]
    pub by_file: WeightsArgs,
    /// Where results go [default: the run's folder, or results/ for --weights and --torchscript]
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
    pub(crate) fn of_runs(runs: &[PathBuf], peer: Option<PeerChoice>, stage: Option<usize>) -> NetworkArgs {
        NetworkArgs { runs: runs.to_vec(), peer, stage, ..Default::default() }
    }

    /// The flags for a network that is named by its path alone: a folder is a run, and a file is TorchScript if it holds code, else weights. What
    /// `flags` say of other kinds of networks is left out.
    pub(crate) fn at(path: &Path, flags: &NetworkArgs) -> NetworkArgs {
        let NetworkArgs { peer, stage, checkpoint, layers, by_file, out, .. } = flags.clone();
        let WeightsArgs { arch, output, pool, mean, std, normalisation, allow_partial, strip, .. } = by_file;
        let paths = vec![path.to_path_buf()];
        // What is not there is looked for as a run, and said to be none.
        let (runs, by_file) = if path.is_dir() || !path.exists() {
            (paths, WeightsArgs { normalisation, ..Default::default() })
        } else if torchscript::is_archive(path) {
            (vec![], WeightsArgs { torchscript: paths, output, pool, mean, std, normalisation, ..Default::default() })
        } else {
            (vec![], WeightsArgs { weights: paths, arch, mean, std, normalisation, allow_partial, strip, ..Default::default() })
        };
        NetworkArgs { runs, checkpoint, peer, stage, layers, by_file, out }
    }

    /// What can be refused without opening a file.
    pub(crate) fn check(&self) -> Result<()> {
        self.by_file.check()?;
        match self.layers.iter().enumerate().find(|(i, tap)| self.layers[..*i].contains(tap)) {
            Some((_, tap)) => Err(Error::input(format!("--layers names {tap} twice; accepted: each once"))),
            None => Ok(()),
        }
    }

    /// All networks asked for. `default` is what is taken of a run when nothing was chosen.
    pub fn open(&self, common: &Common, default: PeerChoice) -> Result<Vec<TrainedNetwork>> {
        self.check()?;
        let mut networks = vec![];
        if !self.by_file.any() {
            let latest = if self.runs.is_empty() { vec![runs::latest(self.checkpoint.as_ref(), common)?] } else { vec![] };
            for run in latest.iter().chain(&self.runs) {
                networks.extend(self.open_run(run, default, common)?);
            }
        }
        for file in &self.by_file.weights {
            networks.push(self.open_file(file, common)?);
        }
        for file in &self.by_file.torchscript {
            networks.push(foreign::open(&self.by_file, file, self.out(), common)?);
        }
        for network in &mut networks {
            network.tap(&self.layers)?;
        }
        make_unique(&mut networks);
        Ok(networks)
    }

    /// Where results of networks without a run go.
    fn out(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(|| PathBuf::from("results"))
    }

    fn open_file(&self, file: &Path, common: &Common) -> Result<TrainedNetwork> {
        let opened = self.by_file.open(file, common)?;
        if !opened.report.missing.is_empty() || !opened.report.misshapen.is_empty() {
            common.warn(format!("{}: {}", file.display(), opened.report));
        }
        let normalisation = self.by_file.normalisation(&opened, file)?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(TrainedNetwork::new(opened, normalisation, name, file.to_path_buf(), self.out()))
    }

    fn open_run(&self, run: &Path, default: PeerChoice, common: &Common) -> Result<Vec<TrainedNetwork>> {
        let folder = runs::folder(run)?;
        let files = match &self.checkpoint {
            Some(checkpoint) => checkpoint.networks(&folder)?,
            None => runs::shipped(&folder)?,
        };
        let best = folder.best_network();
        let chosen: Vec<PathBuf> = match self.peer {
            Some(PeerChoice::One(m)) => vec![files.get(m).cloned().ok_or_else(|| {
                Error::input(format!("--peer {m}: {} has {} networks, 0 to {}", run.display(), files.len(), files.len() - 1))
            })?],
            Some(PeerChoice::Best) if self.checkpoint.is_some() => {
                return Err(Error::input("--peer best is of finished runs, and --checkpoint names another; accepted: a number, all"));
            }
            Some(PeerChoice::Best) if !best.exists() => {
                return Err(Error::input(format!(
                    "--peer best: {} chose none, because it held no images out; accepted: a number, all",
                    run.display()
                )));
            }
            Some(PeerChoice::Best) => vec![best],
            None if default == PeerChoice::Best && self.checkpoint.is_none() && best.exists() => vec![best],
            Some(PeerChoice::All) | None => files,
        };
        chosen.iter().map(|file| self.open_peer(&folder, &self.stage_of(&folder, file, common)?, common)).collect()
    }

    /// The file of the stage that was asked for, of the network in `file`; that one itself where none was.
    fn stage_of(&self, folder: &RunFolder, file: &Path, common: &Common) -> Result<PathBuf> {
        let Some(asked) = self.stage else { return Ok(file.to_path_buf()) };
        let real = file.canonicalize().map_err(Error::open(file))?;
        let Some((m, _)) = run::network_number(&real) else { return Ok(real) };
        // Stages lie beside the networks, in the run and in its checkpoints.
        let own = real.with_file_name(run::network_file(m));
        let at = |l: usize| real.with_file_name(run::stage_file(m, l));
        let opened = self.by_file.open(&own, common)?;
        let depth = opened.arch.depth;
        if asked == depth {
            return Ok(own);
        }
        if at(asked).exists() {
            return Ok(at(asked));
        }
        let there: Vec<String> = (1..depth).filter(|l| at(*l).exists()).chain([depth]).map(|l| l.to_string()).collect();
        Err(Error::input(format!(
            "--stage {asked}: {} has no such stage of network {m} ({}); accepted: {} (stages ship from runs of methods with branches, where a branch has the network's own architecture)",
            folder.path().display(),
            opened.arch.name,
            there.join(", ")
        )))
    }

    fn open_peer(&self, folder: &RunFolder, file: &Path, common: &Common) -> Result<TrainedNetwork> {
        let opened = self.by_file.open(file, common)?;
        let normalisation = self.by_file.normalisation(&opened, file)?;
        // `best` is a link to the network it means.
        let real = file.canonicalize().map_err(Error::open(file))?;
        let number = run::network_number(&real);
        let (peer, stage) = (number.map(|n| n.0), number.and_then(|n| n.1));
        let label = folder.name()?;
        let own = real.file_stem().unwrap_or_default().to_string_lossy();
        let mut name = if peer.is_some() { format!("{label}/{own}") } else { label };
        if self.checkpoint.is_some() {
            // `last` is a link to the checkpoint it means.
            let step = real.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
            name = format!("{name} at {step}");
        }
        let recipe = dataset::recipe(folder)?;
        let out = self.out.clone().unwrap_or_else(|| folder.path().to_path_buf());
        let mut network = TrainedNetwork::new(opened, normalisation, name, real, out);
        network.run = Some(folder.path().to_path_buf());
        (network.peer, network.stage) = (peer, stage);
        (network.method, network.meta.dataset) = (recipe.method, Some(recipe.dataset));
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
    /// How its images are resized.
    pub interpolation: String,
}

/// A frozen network and what is known about it.
pub struct TrainedNetwork {
    /// Short and unique among the networks of a command: `RUN/peer-0`.
    pub name: String,
    /// The folder of its run.
    pub run: Option<PathBuf>,
    /// Its place in the cohort.
    pub peer: Option<usize>,
    /// The stage it ends at, from 1, where it is an auxiliary branch shipped as a network of its own.
    pub stage: Option<usize>,
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
    /// Parts that features are taken from; the network's own pooled feature where there are none.
    pub taps: Vec<Tap>,
    /// For a network that is somebody's TorchScript; `arch`, `net` and `params` tell nothing of it but its parameters.
    pub(super) script: Option<Script>,
    /// What its file held of it; none for TorchScript, which is whole or is not there.
    pub loaded: Option<LoadReport>,
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
            interpolation: stored.map_or("bilinear".to_string(), |m| m.interpolation.clone()),
        };
        let hash = hash(&opened.params, None);
        let Opened { arch, net, params, report, .. } = opened;
        let (taps, script, loaded) = (vec![], None, Some(report));
        TrainedNetwork {
            name,
            run: None,
            peer: None,
            stage: None,
            method: String::new(),
            arch,
            file,
            meta,
            net,
            params,
            hash,
            out,
            taps,
            script,
            loaded,
        }
    }

    /// The network ready for inference.
    pub fn extractor(&self, common: &Common) -> Result<Extractor> {
        if let Some(script) = &self.script {
            return Extractor::foreign(script.open(&self.file, common.device)?, common.threads);
        }
        let extractor = Extractor::new(self.arch, &self.params, None, self.meta.classes.len().max(1) as i64, common.threads);
        Ok(extractor.with_taps(&self.taps))
    }

    /// What it is called by those who know it: its architecture, or the name beside a TorchScript file.
    pub fn architecture(&self) -> &str {
        self.script.as_ref().map_or(self.arch.name, |script| &script.name)
    }

    /// Is it somebody's TorchScript?
    pub(crate) fn is_foreign(&self) -> bool {
        self.script.is_some()
    }

    /// What its features are made of, beyond its weights.
    pub(crate) fn features_of(&self) -> String {
        let taps: Vec<String> = self.taps.iter().map(Tap::to_string).collect();
        let script = self.script.as_ref().map_or(String::new(), Script::described);
        format!("{}{script}{}", self.arch.name, if taps.is_empty() { String::new() } else { format!(" layers {}", taps.join(",")) })
    }

    /// Refuses a TorchScript network where a network of ours is needed: to train it, or to take it apart.
    pub(crate) fn needs_ours(&self, what: &str) -> Result<()> {
        match self.script {
            None => Ok(()),
            Some(_) => {
                Err(Error::input(format!("{}: {what} needs one of our architectures; accepted: --run, --weights", self.file.display())))
            }
        }
    }

    /// Takes features from these parts.
    fn tap(&mut self, taps: &[Tap]) -> Result<()> {
        if taps.is_empty() {
            return Ok(());
        }
        self.needs_ours("--layers (--output chooses what a TorchScript network gives)")?;
        if let Some(Tap::Stage(l)) = taps.iter().find(|tap| matches!(tap, Tap::Stage(l) if *l > self.arch.depth)) {
            return Err(Error::input(format!(
                "--layers {l}: {} has {n} stages; accepted: 1 to {n}, last",
                self.arch.name,
                n = self.arch.depth
            )));
        }
        if taps != [Tap::Last] {
            let shown: Vec<String> = taps.iter().map(Tap::to_string).collect();
            self.name = format!("{} layers {}", self.name, shown.join("+"));
            self.taps = taps.to_vec();
        }
        Ok(())
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
        let now = hash(&self.params, self.script.as_ref());
        if now == self.hash {
            return Ok(());
        }
        Err(Error::failed(format!(
            "{}: the backbone's weights or buffers changed while it was measured ({} before, {now} after)",
            self.name, self.hash
        )))
    }
}

/// sha256 of the names, shapes and bytes of all weights and buffers; of a TorchScript network, of its file too, which holds its code.
pub(super) fn hash(params: &Params, script: Option<&Script>) -> String {
    let mut hash = Sha256::new();
    if let Some(script) = script {
        hash.update(&script.file_hash);
    }
    for (name, tensor) in params.named() {
        hash.update(format!("{name} {:?} {:?}\n", tensor.kind(), tensor.size()));
        hash.update(files::tensor_bytes(&tensor));
    }
    format!("{:x}", hash.finalize())
}
