//! ImageNet, Deng et al., CVPR 2009 (ILSVRC-2012): train/ and val/ of class folders.

use super::{Dataset, DatasetSpec, Request, class_folders};
use crate::error::{Error, Result};

pub(super) const SPEC: DatasetSpec = DatasetSpec {
    layouts: &[("imagenet", "train"), ("ILSVRC2012", "train"), ("ILSVRC/Data/CLS-LOC", "train")],
    images: Some((1_281_167, 50_000)),
    ..DatasetSpec::new("imagenet", "ImageNet: 1,281,167 + 50,000 images in 1000 classes, from folders train/ and val/", open)
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
    if class_folders::class_names(&val)?.is_empty() {
        return Err(Error::file(
            val,
            "no class folders in it; sort the validation images into val/CLASS/ (valprep.sh of the PyTorch examples does it)",
        ));
    }
    Ok(class_folders::photos(request, home, class_folders::train_and_test(&train, &val)?))
}
