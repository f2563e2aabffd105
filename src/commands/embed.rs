//! `mcl-eval embed`: features, logits and stage maps of any images by any weights, into a safetensors file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use tch::{Kind, Tensor};

use crate::data::augment::Crop;
use crate::data::{self, Loader, Pixels, Split, Transform};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::network::WeightsArgs;
use crate::extractor::{Answer, Extractor};
use crate::weights::Opened;
use crate::weights::safetensors::{Reader, Texts, Writer};

/// Features, logits and stage maps of images
#[derive(Debug, Clone, Args)]
#[command(mut_arg("weights", |argument| argument.required(true)))]
pub struct EmbedArgs {
    #[command(flatten)]
    network: WeightsArgs,
    /// A safetensors file with `images` (`f32 [N,3,H,W]`, normalised), or a folder of images, with all folders in it
    #[arg(long)]
    images: PathBuf,
    /// The safetensors file to write: `features`, `logits`, `stage.1`...; for a folder of images a .csv beside it names the rows
    #[arg(long)]
    out: PathBuf,
    /// Also write the map after every stage
    #[arg(long)]
    stages: bool,
    /// Side of the images cut out of files [default: what the weights say, or the architecture's own]
    #[arg(long, value_name = "PIXELS")]
    size: Option<usize>,
    /// What the shorter side of a file's image is resized to first [default: 8/7 of the size, or the size up to 64]
    #[arg(long, value_name = "PIXELS")]
    resize: Option<usize>,
}

/// Bytes of images in memory at a time; their stage maps take some ten times as much.
const AT_ONCE: usize = 16 << 20;
/// The least side that every architecture can halve as often as it does.
const LEAST_SIDE: usize = 8;
/// Up to this side the whole image is used, as small images are in training.
const SMALL: usize = 64;

/// Writes what the network answers to the images.
pub fn run(args: &EmbedArgs, common: &Common) -> Result<()> {
    let [weights] = &args.network.weights[..] else {
        return Err(Error::input(format!("embed got {} files of weights; accepted: one", args.network.weights.len())));
    };
    let opened = args.network.open(weights, common)?;
    common.say(format!("{}: {}", weights.display(), opened.report));
    let mut images = Images::open(args, &opened, weights, common.threads)?;
    let n = images.count();
    let mut extractor = Extractor::new(opened.arch, &opened.params, None, opened.classes.unwrap_or(1), common.threads);
    let mut writer: Option<Writer> = None;
    let (mut done, mut forward) = (0, Duration::ZERO);
    while let Some(batch) = images.next()? {
        let started = Instant::now();
        let answer = extractor.extract(&batch, args.stages)?;
        forward += started.elapsed();
        let named = named(&answer, opened.classes.is_some());
        let writer = match &mut writer {
            Some(writer) => writer,
            none => none.insert(create(&args.out, &named, n, opened.arch.name, weights)?),
        };
        for (name, rows) in &named {
            writer.rows(name, done, rows)?;
        }
        done += batch.size()[0] as usize;
    }
    let writer = writer.ok_or_else(|| Error::file(&args.images, "holds no images"))?;
    writer.finish()?;
    let listed = images.list(&args.out)?;
    let rate = n as f64 / forward.as_secs_f64();
    if common.json {
        let report = serde_json::json!({
            "arch": opened.arch.name, "weights": weights, "images": n, "features": opened.arch.dim, "classes": opened.classes,
            "matched": opened.report.matched, "wanted": opened.report.wanted, "seconds": forward.as_secs_f64(), "images_per_second": rate,
            "threads": common.threads, "out": args.out, "rows": listed,
        });
        println!("{report}");
    } else {
        common.say(format!("{n} images, {rate:.1} images/s in the forward pass; written to {}", args.out.display()));
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
    File { reader: Reader, count: usize, done: usize, at_once: usize },
    Folder { loader: Loader, files: Arc<Vec<PathBuf>>, folder: PathBuf },
}

impl Images {
    fn open(args: &EmbedArgs, opened: &Opened, weights: &Path, threads: usize) -> Result<Images> {
        if args.images.is_dir() {
            return Images::folder(args, opened, weights, threads);
        }
        let reader = Reader::open(&args.images)?;
        let shape = reader
            .shape("images")
            .ok_or_else(|| Error::file(&args.images, format!("holds no tensor `images`; it holds: {}", reader.names().join(", "))))?;
        let kind = reader.kind("images")?;
        let [n, 3, h, w] = shape[..] else {
            return Err(Error::file(&args.images, format!("`images` has shape {shape:?}; [N, 3, H, W] is wanted")));
        };
        if kind != Kind::Float {
            return Err(Error::file(&args.images, format!("`images` is of type {kind:?}; f32, already normalised, is wanted")));
        }
        if (h.min(w) as usize) < LEAST_SIDE {
            return Err(Error::file(&args.images, format!("images of {w} x {h} pixels; at least {LEAST_SIDE} x {LEAST_SIDE} are wanted")));
        }
        Ok(Images::File { reader, count: n as usize, done: 0, at_once: at_once((3 * h * w) as usize, threads) })
    }

    fn folder(args: &EmbedArgs, opened: &Opened, weights: &Path, threads: usize) -> Result<Images> {
        let transform = transform(args, opened, weights)?;
        let files = Arc::new(data::images_below(&args.images)?);
        if files.is_empty() {
            return Err(Error::file(&args.images, "holds no images (.jpg, .jpeg, .png)"));
        }
        let split = Split::new(Pixels::Files(files.clone()), vec![0; files.len()]);
        let batch = at_once(transform.floats(), threads);
        Ok(Images::Folder { loader: Loader::eval(&split, batch, transform), files, folder: args.images.clone() })
    }

    fn count(&self) -> usize {
        match self {
            Images::File { count, .. } => *count,
            Images::Folder { files, .. } => files.len(),
        }
    }

    fn next(&mut self) -> Result<Option<Tensor>> {
        match self {
            Images::File { reader, count, done, at_once } => {
                let rows = (*count - *done).min(*at_once);
                if rows == 0 {
                    return Ok(None);
                }
                let images = reader.rows("images", *done, rows)?;
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

/// What happens to the images of a folder: as the weights' metadata say, flags first.
fn transform(args: &EmbedArgs, opened: &Opened, weights: &Path) -> Result<Transform> {
    let meta = opened.meta.as_ref();
    if let Some(meta) = meta.filter(|meta| meta.interpolation != "bilinear") {
        return Err(Error::file(weights, format!("wants images resized by {}; only bilinear is there", meta.interpolation)));
    }
    let size = args.size.unwrap_or(meta.map_or(opened.arch.image_size, |meta| meta.image_size) as usize);
    let resize = args.resize.unwrap_or(if size <= SMALL { size } else { size * 8 / 7 });
    if size < LEAST_SIDE || resize < size {
        return Err(Error::input(format!(
            "--size {size} with --resize {resize}: a size of at least {LEAST_SIDE} and at most what is resized to is wanted"
        )));
    }
    let normalisation = args.network.normalisation(opened, weights)?;
    Ok(Transform { crop: Crop::Centre { resize }, ..Transform::plain(size, normalisation.mean, normalisation.std) })
}
