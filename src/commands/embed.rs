//! `mcl-eval embed`: features of a dataset with labels and names, or features, logits and stage maps of any images, by any network, as a file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use tch::{Kind, Tensor};

use crate::data::augment::Crop;
use crate::data::{self, Loader, Pixels, Split, Transform};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::TargetDataset;
use crate::eval::feature_file::{FeatureFile, Part};
use crate::eval::features::{self, Prepared};
use crate::eval::network::{NetworkArgs, Normalisation, PeerChoice, TrainedNetwork};
use crate::extractor::Answer;
use crate::limits::{self, LEAST_SIDE};
use crate::weights::safetensors::{Reader, Texts, Writer};

/// Features of a dataset with labels and names, or features, logits and stage maps of images
#[derive(Debug, Clone, Args)]
#[command(mut_arg("out", |argument| argument.required(true).value_name("FILE").help(OUT)))]
pub struct EmbedArgs {
    #[command(flatten)]
    network: NetworkArgs,
    /// A dataset, whose training and test images are embedded
    #[arg(long, conflicts_with_all = ["images", "stages", "resize"])]
    dataset: Option<String>,
    /// A safetensors file with `images` (`f32 [N,3,H,W]`, normalised), or a folder of images, with all folders in it
    #[arg(long, required_unless_present = "dataset")]
    images: Option<PathBuf>,
    /// Also write the map after every stage
    #[arg(long)]
    stages: bool,
    /// Side of the images [default: what the network says, or the architecture's own]
    #[arg(long, value_name = "PIXELS")]
    size: Option<usize>,
    /// What the shorter side of a file's image is resized to first [default: 8/7 of the size, or the size up to 64]
    #[arg(long, value_name = "PIXELS")]
    resize: Option<usize>,
}

const OUT: &str = "The file to write. For a dataset, .safetensors or .npz: `features`, `labels`, `names`, `split`. For images, .safetensors: `features`, `logits`, `stage.1`...; for a folder of images a .csv beside it names the rows";

/// Bytes of images in memory at a time; their stage maps take some ten times as much.
const AT_ONCE: usize = 16 << 20;
/// Up to this side the whole image is used, as small images are in training.
const SMALL: usize = 64;

/// Writes what the network answers to the images.
pub fn run(args: &EmbedArgs, common: &Common) -> Result<()> {
    let out = args.network.out.as_ref().expect("a required flag");
    check_out(out, args.dataset.is_some())?;
    let network = open(args, common)?;
    match (&args.dataset, &args.images) {
        (Some(dataset), _) => of_dataset(args, &network, dataset, out, common),
        (None, Some(images)) => of_images(args, &network, images, out, common),
        (None, None) => unreachable!("one of the two is required"),
    }
}

/// Says before anything is computed what would be said after it.
fn check_out(out: &Path, of_dataset: bool) -> Result<()> {
    let ending = out.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let accepted = match (ending, of_dataset) {
        ("safetensors", _) | ("npz", true) => return check_folder(out),
        ("npz", false) => ".npz is written for --dataset; accepted for --images: .safetensors",
        (_, true) => "its ending tells the format; accepted: .safetensors, .npz",
        (_, false) => "its ending tells the format; accepted: .safetensors",
    };
    Err(Error::input(format!("--out {}: {accepted}", out.display())))
}

fn check_folder(out: &Path) -> Result<()> {
    let missing = out.parent().is_some_and(|folder| !folder.as_os_str().is_empty() && !folder.is_dir());
    if missing { Err(Error::io("cannot write", out)(std::io::ErrorKind::NotFound.into())) } else { Ok(()) }
}

/// The one network that is asked for.
fn open(args: &EmbedArgs, common: &Common) -> Result<TrainedNetwork> {
    let mut asked = args.network.clone();
    let by_file = &mut asked.by_file;
    // Images in a file are normalised already: nothing needs to say with what.
    let ready = args.images.as_ref().is_some_and(|images| !images.is_dir());
    if ready && by_file.mean.is_empty() && by_file.std.is_empty() && by_file.normalisation.is_none() {
        by_file.normalisation = Some(Normalisation::NONE);
    }
    let mut networks = asked.open(common, PeerChoice::Best)?;
    if networks.len() != 1 {
        let names: Vec<&str> = networks.iter().map(|n| n.name.as_str()).collect();
        return Err(Error::input(format!("embed got {} networks ({}); accepted: one, e.g. by --peer 0", networks.len(), names.join(", "))));
    }
    let network = networks.remove(0);
    if let Some(loaded) = &network.loaded {
        common.say(format!("{}: {loaded}", network.file.display()));
    }
    Ok(network)
}

/// Features of both parts of a dataset, with labels, names and part.
fn of_dataset(args: &EmbedArgs, network: &TrainedNetwork, name: &str, out: &Path, common: &Common) -> Result<()> {
    let target = TargetDataset::open(name, common)?;
    let side = network.image_size(args.size.map_or(0, |size| i64::try_from(size).unwrap_or(i64::MAX)));
    let prepared = Prepared::new(&target.dataset, network, side)?;
    let began = Instant::now();
    let of = |part| features::features(network, &prepared, part, true, common);
    let (train, test) = (of(Part::Train)?, of(Part::Test)?);
    network.check_unchanged()?;
    let parts = vec![(Part::Train, &train.x), (Part::Test, &test.x)];
    FeatureFile { dataset: &target.dataset, network, side, parts }.write(out)?;
    let (n, dim) = (train.y.len() + test.y.len(), train.x.size()[1]);
    if common.json {
        common.print_json(&serde_json::json!({
            "arch": network.architecture(), "weights": network.file, "dataset": name, "images": n, "features": dim, "image_size": side,
            "train": train.y.len(), "test": test.y.len(), "seconds": began.elapsed().as_secs_f64(), "out": out,
        }));
    } else {
        common.say(format!("{n} images of {name}, {dim} features each, with labels, names and split; written to {}", out.display()));
    }
    Ok(())
}

fn of_images(args: &EmbedArgs, network: &TrainedNetwork, from: &Path, out: &Path, common: &Common) -> Result<()> {
    if args.stages {
        network.needs_ours("--stages")?;
    }
    let mut images = Images::open(args, network, from, common.threads)?;
    let n = images.count();
    let classes = network.meta.classes.len();
    let mut extractor = network.extractor(common)?;
    let mut writer: Option<Writer> = None;
    let (mut done, mut dim, mut forward) = (0, 0, Duration::ZERO);
    let progress = common.progress("embedding", n, "images");
    while let Some(batch) = images.next()? {
        let started = Instant::now();
        let answer = extractor.extract(&batch, args.stages)?;
        forward += started.elapsed();
        dim = answer.features.size()[1];
        let named = named(&answer, classes > 0);
        let writer = match &mut writer {
            Some(writer) => writer,
            none => none.insert(create(out, &named, n, network.architecture(), &network.file)?),
        };
        for (name, rows) in &named {
            writer.rows(name, done, rows)?;
        }
        done += batch.size()[0] as usize;
        progress.add(batch.size()[0] as usize);
    }
    drop(progress);
    let writer = writer.ok_or_else(|| Error::file(from, "holds no images"))?;
    writer.finish()?;
    let listed = images.list(out)?;
    let rate = n as f64 / forward.as_secs_f64();
    if common.json {
        let loaded = network.loaded.as_ref();
        let report = serde_json::json!({
            "arch": network.architecture(), "weights": network.file, "images": n, "features": dim, "classes": (classes > 0).then_some(classes),
            "matched": loaded.map(|l| l.matched), "wanted": loaded.map(|l| l.wanted), "seconds": forward.as_secs_f64(),
            "images_per_second": rate, "threads": common.threads, "out": out, "rows": listed,
        });
        common.print_json(&report);
    } else {
        common.say(format!("{n} images, {rate:.1} images/s in the forward pass; written to {}", out.display()));
    }
    Ok(())
}

fn named(answer: &Answer, logits: bool) -> Vec<(String, Tensor)> {
    let mut named = vec![("features".to_string(), answer.features.shallow_clone())];
    if logits {
        named.push(("logits".to_string(), answer.logit().shallow_clone()));
    }
    named.extend(answer.stages.iter().enumerate().map(|(l, map)| (format!("stage.{}", l + 1), map.shallow_clone())));
    named
}

fn create(out: &Path, first: &[(String, Tensor)], n: usize, arch: &str, weights: &Path) -> Result<Writer> {
    let whole = |rows: &Tensor| std::iter::once(n as i64).chain(rows.size()[1..].iter().copied()).collect();
    let layout = first.iter().map(|(name, rows)| (name.clone(), rows.kind(), whole(rows))).collect();
    let texts: Texts = [("architecture".to_string(), arch.to_string()), ("weights".to_string(), weights.display().to_string())].into();
    Writer::create(out, layout, &texts)
}

/// How many images of so many numbers are in memory at a time: enough for all threads.
fn at_once(numbers: usize, threads: usize) -> usize {
    (AT_ONCE / (numbers * size_of::<f32>())).clamp(8 * threads.max(1), 1024.max(8 * threads))
}

/// Images in their order, some at a time.
enum Images {
    File { reader: Reader, path: PathBuf, count: usize, done: usize, at_once: usize },
    Folder { loader: Loader, files: Arc<Vec<PathBuf>>, folder: PathBuf },
}

impl Images {
    fn open(args: &EmbedArgs, network: &TrainedNetwork, from: &Path, threads: usize) -> Result<Images> {
        if from.is_dir() {
            return Images::folder(args, network, from, threads);
        }
        let reader = Reader::open(from)?;
        let shape = reader
            .shape("images")
            .ok_or_else(|| Error::file(from, format!("holds no tensor `images`; it holds: {}", reader.names().join(", "))))?;
        let kind = reader.kind("images")?;
        let [n, 3, h, w] = shape[..] else {
            return Err(Error::file(from, format!("`images` has shape {shape:?}; [N, 3, H, W] is wanted")));
        };
        if kind != Kind::Float {
            return Err(Error::file(from, format!("`images` is of type {kind:?}; f32, already normalised, is wanted")));
        }
        if (h.min(w) as usize) < LEAST_SIDE {
            return Err(Error::file(from, format!("images of {w} x {h} pixels; at least {LEAST_SIDE} x {LEAST_SIDE} are wanted")));
        }
        limits::side("the larger side of `images`", h.max(w)).map_err(|e| Error::file(from, e.to_string()))?;
        let path = from.to_path_buf();
        Ok(Images::File { reader, path, count: n as usize, done: 0, at_once: at_once((3 * h * w) as usize, threads) })
    }

    fn folder(args: &EmbedArgs, network: &TrainedNetwork, folder: &Path, threads: usize) -> Result<Images> {
        let transform = transform(args, network)?;
        let files = Arc::new(data::images_below(folder)?);
        if files.is_empty() {
            return Err(Error::file(folder, "holds no images (.jpg, .jpeg, .png)"));
        }
        let split = Split::new(Pixels::Files(files.clone()), vec![0; files.len()]);
        let batch = at_once(transform.floats(), threads);
        Ok(Images::Folder { loader: Loader::eval(&split, batch, transform), files, folder: folder.to_path_buf() })
    }

    fn count(&self) -> usize {
        match self {
            Images::File { count, .. } => *count,
            Images::Folder { files, .. } => files.len(),
        }
    }

    fn next(&mut self) -> Result<Option<Tensor>> {
        match self {
            Images::File { reader, path, count, done, at_once } => {
                let rows = (*count - *done).min(*at_once);
                if rows == 0 {
                    return Ok(None);
                }
                let images = reader.rows("images", *done, rows)?;
                if !bool::try_from(images.isfinite().all()).unwrap_or(false) {
                    return Err(Error::file(path, format!("images {done} to {} hold a number that is not finite", *done + rows - 1)));
                }
                *done += rows;
                Ok(Some(images))
            }
            Images::Folder { loader, .. } => Ok(loader.next().transpose()?.map(|mut batch| batch.views.swap_remove(0))),
        }
    }

    /// For a folder: writes beside `out` which file each row comes from.
    fn list(&self, out: &Path) -> Result<Option<PathBuf>> {
        let Images::Folder { files, folder, .. } = self else { return Ok(None) };
        let path = out.with_extension("csv");
        let mut table = csv::Writer::from_writer(vec![]);
        let fault = |e: csv::Error| Error::failed(format!("cannot write {}: {e}", out.with_extension("csv").display()));
        table.write_record(["row", "file"]).map_err(fault)?;
        for (row, file) in files.iter().enumerate() {
            let name = file.strip_prefix(folder).unwrap_or(file);
            table.write_record([row.to_string(), name.display().to_string()]).map_err(fault)?;
        }
        let bytes = table.into_inner().expect("a table in memory");
        crate::files::write(&path, &bytes)?;
        Ok(Some(path))
    }
}

/// What happens to the images of a folder: as the network's metadata say, flags first.
fn transform(args: &EmbedArgs, network: &TrainedNetwork) -> Result<Transform> {
    let meta = &network.meta;
    if meta.interpolation != "bilinear" {
        return Err(Error::file(&network.file, format!("wants images resized by {}; only bilinear is there", meta.interpolation)));
    }
    let asked = args.size.map_or(meta.image_size, |size| i64::try_from(size).unwrap_or(i64::MAX));
    let size = limits::side("the size of images", asked)?;
    let resize = args.resize.unwrap_or(if size <= SMALL { size } else { size * 8 / 7 });
    if size < LEAST_SIDE || resize < size {
        return Err(Error::input(format!(
            "--size {size} with --resize {resize}: a size of at least {LEAST_SIDE} and at most what is resized to is wanted"
        )));
    }
    limits::side("--resize", i64::try_from(resize).unwrap_or(i64::MAX))?;
    Ok(Transform { crop: Crop::Centre { resize }, ..Transform::plain(size, meta.mean, meta.std) })
}
