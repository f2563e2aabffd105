//! ImageNet, Deng et al., CVPR 2009 (ILSVRC-2012): train/ and val/ of class folders.

use std::sync::Arc;

use super::{Dataset, DatasetSpec, OwnOptions, Pixels, Request, Split, class_folders};
use crate::error::{Error, Result};

pub(super) const SPEC: DatasetSpec = DatasetSpec {
    name: "imagenet",
    about: "ImageNet: 1,281,167 + 50,000 images in 1000 classes, from folders train/ and val/",
    open,
    options: OwnOptions::NONE,
    compare: None,
    layouts: &[("imagenet", "train"), ("ILSVRC2012", "train"), ("ILSVRC/Data/CLS-LOC", "train")],
    recognise: |_| true,
    archives: &[],
    images: Some((1_281_167, 50_000)),
    md5s: &[],
};

/// The statistics everybody's ImageNet networks are trained with.
pub const MEAN: [f64; 3] = [0.485, 0.456, 0.406];
/// See `MEAN`.
pub const STD: [f64; 3] = [0.229, 0.224, 0.225];
/// Side of the square that is cut out.
pub(super) const CROP: usize = 224;

fn open(request: &Request) -> Result<Dataset> {
    let (home, _) = request.home()?;
    let (train, val) = (home.join("train"), home.join("val"));
    let classes = class_folders::class_names(&train)?;
    let known = class_folders::class_names(&val)?;
    if known.is_empty() {
        return Err(Error::file(
            val,
            "no class folders in it; sort the validation images into val/CLASS/ (valprep.sh of the PyTorch examples does it)",
        ));
    }
    if let Some(stranger) = known.iter().find(|class| !classes.contains(class)) {
        return Err(Error::file(val.join(stranger), format!("a class that {} does not have", train.display())));
    }
    let split = |dir| class_folders::labelled(dir, &classes).map(|(files, labels)| Split::new(Pixels::Files(Arc::new(files)), labels));
    Ok(Dataset {
        name: request.spec.name,
        train: split(&train)?,
        test: split(&val)?,
        classes,
        mean: MEAN,
        std: STD,
        image_size: request.options.size.unwrap_or(CROP),
        one_size: false,
        home: Some(home),
    })
}
