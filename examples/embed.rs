//! Loads a network that a run shipped, embeds images with it, and evaluates a contrastive loss on the embeddings.
//!
//! ```sh
//! make pretrain OUT=runs/first
//! cargo run --release --example embed -- runs/first/networks/peer-0.safetensors
//! ```

use std::path::PathBuf;

use mcl::data::{self, Loader, Transform};
use mcl::error::{Error, Result};
use mcl::extractor::Extractor;
use mcl::losses::contrast::{self, Contrast};
use mcl::losses::unit::Norm;
use mcl::tch::{Device, Kind};
use mcl::weights::{self, LoadOptions};

fn main() -> Result<()> {
    let file: PathBuf = std::env::args().nth(1).ok_or_else(|| Error::input("name a network, e.g. peer-0.safetensors"))?.into();
    let network = weights::open(&file, None, Device::Cpu, &LoadOptions::default())?;
    let meta = network.meta.ok_or_else(|| Error::file(&file, "does not say how its images were normalised"))?;

    // Test images of the synthetic dataset, normalised as the network's training images were.
    let dataset = data::open("synthetic", None, &data::Options::default())?;
    let transform = Transform::plain(dataset.image_size, meta.mean, meta.std);
    let mut extractor = Extractor::new(network.arch, &network.params, None, network.classes.unwrap_or(1), 1);
    let batch = Loader::eval(&dataset.test, 256, transform).next().ok_or_else(|| Error::failed("the dataset has no test images"))??;
    let features = extractor.extract(&batch.views[0], false)?.features; // [256, D]

    // Unit vectors, as the contrastive losses want them. Images of one class are each other's positives (Eq. 2).
    let embeddings = Norm::Guarded.apply(&features);
    let loss = contrast::vcl(&embeddings, &Contrast::in_batch(&batch.labels, 0.1, Kind::Float));
    println!("{} images, features of {} numbers, VCL {:.3}", batch.labels.size()[0], network.arch.dim, loss.double_value(&[]));
    Ok(())
}
