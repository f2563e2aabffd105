//! Subjects: the networks that are measured, from a run folder or from anybody's weights.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use sha2::{Digest, Sha256};
use tch::{Kind, Tensor};

use super::Common;
use crate::error::{Error, Result};
use crate::nets::{self, Arch, Network};
use crate::params::Params;
use crate::weights::{self, LoadOptions, Meta};

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
    /// Where results of --weights go
    #[arg(long = "results", value_name = "DIR", default_value = "results")]
    pub results: PathBuf,
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
                subjects.extend(open_run(run, self.peer, default, common)?);
            }
        }
        for file in &self.weights {
            subjects.push(self.open_file(file, common)?);
        }
        make_unique(&mut subjects);
        Ok(subjects)
    }

    fn open_file(&self, file: &Path, common: &Common) -> Result<Subject> {
        let read = weights::read(file)?;
        let arch_name = self.arch.clone().or(read.meta.as_ref().map(|m| m.arch.clone()));
        let arch_name = arch_name.ok_or_else(|| {
            Error::input(format!("{} does not say its architecture; add --arch NAME (`mcl-train list archs` names them)", file.display()))
        })?;
        let arch = nets::find(&arch_name)?;
        let meta = match &read.meta {
            Some(meta) if self.mean.is_empty() && self.std.is_empty() => meta.clone(),
            stored => {
                let [mean, std] =
                    [("--mean", &self.mean, stored.as_ref().map(|m| m.mean)), ("--std", &self.std, stored.as_ref().map(|m| m.std))]
                        .map(|(flag, given, stored)| three(flag, given, stored, file));
                let rows = read
                    .tensors
                    .iter()
                    .find(|(name, _)| name.ends_with(&format!("{}.weight", arch.classifier)))
                    .map_or(0, |(_, t)| t.size()[0]);
                let classes = stored.as_ref().map_or_else(|| (0..rows).map(|c| c.to_string()).collect(), |m| m.classes.clone());
                Meta {
                    arch: arch.name.into(),
                    classes,
                    image_size: stored.as_ref().map_or(arch.image_size, |m| m.image_size),
                    mean: mean?,
                    std: std?,
                    interpolation: "bilinear".into(),
                    run: String::new(),
                    recipe: String::new(),
                    peer: None,
                    dataset: stored.as_ref().and_then(|m| m.dataset.clone()),
                    epoch: None,
                }
            }
        };
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        build(name, None, None, "".into(), arch, file, meta, &read, self.results.clone(), common)
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

fn open_run(run: &Path, choice: Option<PeerChoice>, default: PeerChoice, common: &Common) -> Result<Vec<Subject>> {
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
    let chosen: Vec<PathBuf> = match choice {
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
    chosen.iter().map(|file| open_peer(run, file, common)).collect()
}

fn open_peer(run: &Path, file: &Path, common: &Common) -> Result<Subject> {
    let read = weights::read(file)?;
    let meta =
        read.meta.clone().ok_or_else(|| Error::file(file, "has no metadata, so it is not a network of ours; use --weights and --arch"))?;
    let arch = nets::find(&meta.arch)?;
    let label =
        run.canonicalize().ok().and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned())).unwrap_or_else(|| meta.run.clone());
    let name = meta.peer.map_or(label.clone(), |m| format!("{label}/peer-{m}"));
    let method = super::target::run_method(run)?;
    build(name, Some(run), meta.peer, method, arch, file, meta, &read, run.to_path_buf(), common)
}

#[allow(clippy::too_many_arguments)]
fn build(
    name: String,
    run: Option<&Path>,
    peer: Option<usize>,
    method: String,
    arch: &'static Arch,
    file: &Path,
    meta: Meta,
    read: &weights::Weights,
    out: PathBuf,
    common: &Common,
) -> Result<Subject> {
    let classes = meta.classes.len().max(1) as i64;
    let (net, params) = Network::build(arch, classes, 0, common.device, Kind::Float);
    // Every tensor of the network must be there: a probe of a half-loaded network measures nothing.
    weights::load_into(&params, read, arch, &LoadOptions::default()).map_err(|e| Error::file(file, e.to_string()))?;
    let hash = hash(&params);
    Ok(Subject { name, run: run.map(Path::to_path_buf), peer, method, arch, file: file.to_path_buf(), meta, net, params, hash, out })
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
