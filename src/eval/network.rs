//! Subjects: the networks that are measured, from a run folder or from anybody's weights.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use sha2::{Digest, Sha256};
use tch::Tensor;

use super::Common;
use super::dataset;
use crate::error::{Error, Result};
use crate::extractor::Extractor;
use crate::nets::{self, Arch, Network};
use crate::params::Params;
use crate::weights::{self, Classifier, LoadOptions, Opened};

/// The flags that name subjects.
#[derive(Debug, Clone, Default, Args)]
pub struct SubjectArgs {
    /// Run folder; may be repeated [default: runs/latest]
    #[arg(long = "run", value_name = "DIR")]
    pub runs: Vec<PathBuf>,
    /// Which networks of a run: a number from 0, `best` (chosen on held-out images) or `all` [default: best where one was chosen]
    #[arg(long, value_name = "N|best|all")]
    pub peer: Option<PeerChoice>,
    /// Anybody's weights instead of a run (safetensors, .pt or .pth); may be repeated
    #[arg(long, value_name = "FILE", conflicts_with = "runs")]
    pub weights: Vec<PathBuf>,
    /// The architecture of --weights, where the file does not say
    #[arg(long, requires = "weights")]
    pub arch: Option<String>,
    /// Channel means the network was trained with, where its file does not say, e.g. 0.507,0.487,0.441
    #[arg(long, value_delimiter = ',', num_args = 1, requires = "weights", value_name = "R,G,B")]
    pub mean: Vec<f64>,
    /// Channel standard deviations, likewise
    #[arg(long, value_delimiter = ',', num_args = 1, requires = "weights", value_name = "R,G,B")]
    pub std: Vec<f64>,
    /// Where results go [default: the run's folder, or results/ for --weights]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerChoice {
    One(usize),
    Best,
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

/// What a network is fed with and answers, from its file, its run and the flags.
#[derive(Debug, Clone)]
pub struct Meta {
    /// Empty where the file has no classifier.
    pub classes: Vec<String>,
    pub image_size: i64,
    pub mean: [f64; 3],
    pub std: [f64; 3],
    /// What it was trained on.
    pub dataset: Option<String>,
    pub recipe: String,
    pub epoch: Option<usize>,
}

/// A frozen network and what is known about it.
pub struct Subject {
    /// Short and unique among the subjects of a command: `RUN/peer-0`.
    pub name: String,
    pub run: Option<PathBuf>,
    pub peer: Option<usize>,
    /// How it was pre-trained, where that is known.
    pub method: String,
    pub arch: &'static Arch,
    pub file: PathBuf,
    pub meta: Meta,
    pub net: Network,
    pub params: Params,
    /// Of all weights and buffers.
    pub hash: String,
    /// Where its results are written.
    pub out: PathBuf,
}

impl SubjectArgs {
    /// All subjects asked for. `default` is what --peer means when it is not given.
    pub fn open(&self, common: &Common, default: PeerChoice) -> Result<Vec<Subject>> {
        let mut subjects = vec![];
        if self.weights.is_empty() {
            let latest = [PathBuf::from("runs/latest")];
            for run in if self.runs.is_empty() { &latest[..] } else { &self.runs } {
                subjects.extend(open_run(run, self, default, common)?);
            }
        }
        for file in &self.weights {
            subjects.push(self.open_file(file, common)?);
        }
        make_unique(&mut subjects);
        Ok(subjects)
    }

    fn open_file(&self, file: &Path, common: &Common) -> Result<Subject> {
        let arch = self.arch.as_deref().map(nets::find).transpose()?;
        let opened = weights::open(file, arch, common.device, &options())?;
        let stored = opened.meta.as_ref();
        let mean = three("--mean", &self.mean, stored.map(|m| m.mean), file)?;
        let std = three("--std", &self.std, stored.map(|m| m.std), file)?;
        let meta = Meta { mean, std, ..meta(&opened, None) };
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let hash = hash(&opened.params);
        let Opened { arch, net, params, .. } = opened;
        Ok(Subject {
            name,
            run: None,
            peer: None,
            method: String::new(),
            arch,
            file: file.to_path_buf(),
            meta,
            net,
            params,
            hash,
            out: self.out.clone().unwrap_or_else(|| PathBuf::from("results")),
        })
    }
}

/// Every tensor of the network must be in the file: a probe of a half-loaded network measures nothing. Features need no classifier.
fn options() -> LoadOptions {
    LoadOptions { classifier: Classifier::Optional, ..Default::default() }
}

fn meta(opened: &Opened, dataset: Option<String>) -> Meta {
    let stored = opened.meta.as_ref();
    let numbered = || (0..opened.classes.unwrap_or(0)).map(|c| c.to_string()).collect();
    Meta {
        classes: stored.filter(|_| opened.classes.is_some()).map_or_else(numbered, |m| m.classes.clone()),
        image_size: stored.map_or(opened.arch.image_size, |m| m.image_size),
        mean: stored.map_or([0.0; 3], |m| m.mean),
        std: stored.map_or([1.0; 3], |m| m.std),
        dataset: dataset.or_else(|| stored.and_then(|m| m.dataset.clone())),
        epoch: stored.and_then(|m| m.epoch),
        recipe: stored.map_or(String::new(), |m| m.recipe.clone()),
    }
}

fn three(flag: &str, given: &[f64], stored: Option<[f64; 3]>, file: &Path) -> Result<[f64; 3]> {
    match (given, stored) {
        ([], Some(stored)) => Ok(stored),
        ([], None) => Err(Error::input(format!(
            "{} does not say what its inputs were normalised with; add {flag} R,G,B as in its training (ImageNet networks mostly: --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225)",
            file.display()
        ))),
        ([r, g, b], _) => Ok([*r, *g, *b]),
        (other, _) => Err(Error::input(format!("{flag} has {} numbers; accepted: three, for red, green and blue", other.len()))),
    }
}

fn open_run(run: &Path, args: &SubjectArgs, default: PeerChoice, common: &Common) -> Result<Vec<Subject>> {
    if !run.is_dir() {
        let hint = if run == Path::new("runs/latest") {
            "train one (`mcl-train run ...`) or name it with --run"
        } else {
            "accepted: a folder `mcl-train run` made"
        };
        return Err(Error::input(format!("no run at {}; {hint}", run.display())));
    }
    let folder = run.join("networks");
    let files: Vec<PathBuf> = (0..).map(|m| folder.join(format!("peer-{m}.safetensors"))).take_while(|f| f.exists()).collect();
    if files.is_empty() {
        return Err(Error::input(format!(
            "{} holds no finished networks (no {}); let the run finish first",
            run.display(),
            folder.join("peer-0.safetensors").display()
        )));
    }
    let best = folder.join("best.safetensors");
    let chosen: Vec<PathBuf> = match args.peer {
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
        _ => files,
    };
    chosen.iter().map(|file| open_peer(run, file, args.out.as_deref().unwrap_or(run), common)).collect()
}

fn open_peer(run: &Path, file: &Path, out: &Path, common: &Common) -> Result<Subject> {
    let opened = weights::open(file, None, common.device, &options())?;
    // `best` is a link to the network it means.
    let real = file.canonicalize().map_err(Error::open(file))?;
    let peer = real.file_stem().and_then(|n| n.to_string_lossy().strip_prefix("peer-")?.parse().ok());
    let full = run.canonicalize().map_err(Error::open(run))?;
    let label = full.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = peer.map_or(label.clone(), |m: usize| format!("{label}/peer-{m}"));
    let recipe = dataset::recipe(run)?;
    let meta = meta(&opened, Some(recipe.dataset));
    let hash = hash(&opened.params);
    let Opened { arch, net, params, .. } = opened;
    Ok(Subject {
        name,
        run: Some(run.to_path_buf()),
        peer,
        method: recipe.method,
        arch,
        file: real,
        meta,
        net,
        params,
        hash,
        out: out.to_path_buf(),
    })
}

/// Two runs of one name get their place in the list.
fn make_unique(subjects: &mut [Subject]) {
    let names: Vec<String> = subjects.iter().map(|s| s.name.clone()).collect();
    for (i, subject) in subjects.iter_mut().enumerate() {
        if names[..i].contains(&subject.name) {
            subject.name = format!("{} ({})", subject.name, names[..i].iter().filter(|n| **n == names[i]).count() + 1);
        }
    }
}

/// sha256 of the names, shapes and bytes of all weights and buffers.
pub fn hash(params: &Params) -> String {
    let mut hash = Sha256::new();
    for (name, tensor) in params.named() {
        hash.update(format!("{name} {:?} {:?}\n", tensor.kind(), tensor.size()));
        hash.update(bytes(&tensor));
    }
    format!("{:x}", hash.finalize())
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.detach().to_device(tch::Device::Cpu).contiguous();
    let mut out = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut out, tensor.numel());
    out
}

impl Subject {
    /// The network ready for inference.
    pub fn extractor(&self, common: &Common) -> Extractor {
        Extractor::new(self.arch, &self.params, None, self.meta.classes.len().max(1) as i64, common.threads)
    }

    /// The name of its run, for what is measured of all its networks together.
    pub fn cohort(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }

    /// The side of the images it is measured on: what was asked for, or its own for 0.
    pub fn image_size(&self, asked: i64) -> usize {
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
