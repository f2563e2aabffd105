//! STL-10, Coates et al., AISTATS 2011: the official binaries. The unlabelled images are not used.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::{Archive, Dataset, DatasetSpec, Pixels, Raw, Request, Split};
use crate::error::{Error, Result};
use crate::files;

pub const SPEC: DatasetSpec = DatasetSpec {
    layouts: &[("stl10_binary", "train_X.bin")],
    recognise: is_stl10,
    archives: &[Archive {
        folder: "stl10_binary",
        file: "stl10_binary.tar.gz",
        base: "http://ai.stanford.edu/~acoates/stl10/",
        md5: "91f7769df0f17e558f3565bffb0c7dfb",
        megabytes: 2640,
    }],
    images: Some((5000, 8000)),
    md5s: &[
        ("train_X.bin", "918c2871b30a85fa023e0c44e0bee87f"),
        ("train_y.bin", "5a34089d4802c674881badbb80307741"),
        ("test_X.bin", "7f263ba9f9e0b06b93213547f721ac82"),
        ("test_y.bin", "36f9794fa4beb8a2c72628de14fa638e"),
    ],
    ..DatasetSpec::new("stl10", "STL-10: 5,000 + 8,000 images of 96 x 96 in 10 classes", open)
};

const CLASSES: usize = 10;
const SIDE: usize = 96;
const IMAGE: usize = SIDE * SIDE * 3;

/// Other sets come as train_X.bin too: this one has ten class names beside it, and images of 96 x 96.
fn is_stl10(home: &Path) -> bool {
    let names = files::read_text(&home.join("class_names.txt")).map(|text| text.split_whitespace().count());
    let size = std::fs::metadata(home.join("train_X.bin")).map(|file| file.len());
    names.is_ok_and(|n| n == CLASSES) && size.is_ok_and(|size| size > 0 && size.is_multiple_of(IMAGE as u64))
}

fn open(request: &Request) -> Result<Dataset> {
    let (home, _) = request.home()?;
    let names = home.join("class_names.txt");
    let text = files::read_text(&names)?;
    let classes: Vec<String> = text.split_whitespace().map(str::to_string).collect();
    if classes.len() != CLASSES {
        return Err(Error::file(names, format!("{} class names; stl10 has {CLASSES}", classes.len())));
    }
    Ok(Dataset {
        name: request.spec.name,
        train: split(&home.join("train_X.bin"), &home.join("train_y.bin"))?,
        test: split(&home.join("test_X.bin"), &home.join("test_y.bin"))?,
        classes,
        mean: [0.4467, 0.4398, 0.4066],
        std: [0.2603, 0.2566, 0.2713],
        image_size: SIDE,
        one_size: true,
        home: Some(home),
    })
}

/// The number of images follows from the file's size.
fn split(images: &Path, labels: &Path) -> Result<Split> {
    let mut data = files::read(images)?;
    let stored = files::read(labels)?;
    if data.is_empty() || data.len() % IMAGE != 0 {
        let what =
            format!("{} bytes are no whole number of {IMAGE}-byte images ({} and a part): truncated?", data.len(), data.len() / IMAGE);
        return Err(Error::file(images, what));
    }
    let count = data.len() / IMAGE;
    if stored.len() != count {
        return Err(Error::file(labels, format!("{} labels for the {count} images of {}", stored.len(), images.display())));
    }
    if let Some((i, label)) = stored.iter().enumerate().find(|(_, label)| !(1..=10).contains(*label)) {
        return Err(Error::file(labels, format!("label {label} of image {i}; 1 to 10 are expected")));
    }
    data.par_chunks_exact_mut(IMAGE).for_each(upright);
    let labels = stored.iter().map(|&label| i64::from(label) - 1).collect();
    Ok(Split::new(Pixels::Memory(Arc::new(Raw { height: SIDE, width: SIDE, data })), labels))
}

/// Planes whose columns follow each other (Matlab's order) become rows of pixels, in place.
fn upright(image: &mut [u8]) {
    let stored = image.to_vec();
    for y in 0..SIDE {
        for x in 0..SIDE {
            for c in 0..3 {
                image[(y * SIDE + x) * 3 + c] = stored[(c * SIDE + x) * SIDE + y];
            }
        }
    }
}
