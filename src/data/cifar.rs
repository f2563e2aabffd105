//! CIFAR-10 and CIFAR-100, Krizhevsky 2009: the official binary files, or the python pickles that torchvision downloads.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Archive, Dataset, DatasetSpec, Pixels, Raw, Request, Split};
use crate::error::{Error, Result};
use crate::files;
use crate::pickle;

pub const CIFAR10: DatasetSpec = DatasetSpec {
    compare: Some(|set| compare(set, &TEN)),
    layouts: &[("cifar-10-batches-bin", "data_batch_1.bin"), ("cifar-10-batches-py", "data_batch_1")],
    archives: &[
        Archive {
            folder: "cifar-10-batches-bin",
            file: "cifar-10-binary.tar.gz",
            base: BASE,
            md5: "c32a1d4ab5d03f1284b67883e8d87530",
            megabytes: 170,
        },
        Archive {
            folder: "cifar-10-batches-py",
            file: "cifar-10-python.tar.gz",
            base: BASE,
            md5: "c58f30108f718f92721af3b95e74349a",
            megabytes: 170,
        },
    ],
    images: Some((50_000, 10_000)),
    md5s: &[
        ("data_batch_1", "c99cafc152244af753f735de768cd75f"),
        ("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
        ("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
        ("data_batch_4", "634d18415352ddfa80567beed471001a"),
        ("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
        ("test_batch", "40351d587109b95175f43aff81a1287e"),
        ("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
    ],
    ..DatasetSpec::new("cifar10", "CIFAR-10: 50,000 + 10,000 images of 32 x 32 in 10 classes", |request| open(request, &TEN))
};

pub const CIFAR100: DatasetSpec = DatasetSpec {
    compare: Some(|set| compare(set, &HUNDRED)),
    layouts: &[("cifar-100-binary", "train.bin"), ("cifar-100-python", "train")],
    archives: &[
        Archive {
            folder: "cifar-100-binary",
            file: "cifar-100-binary.tar.gz",
            base: BASE,
            md5: "03b5dce01913d631647c71ecec9e9cb8",
            megabytes: 169,
        },
        Archive {
            folder: "cifar-100-python",
            file: "cifar-100-python.tar.gz",
            base: BASE,
            md5: "eb9058c3a382ffc7106e4002c42a8d85",
            megabytes: 169,
        },
    ],
    images: Some((50_000, 10_000)),
    md5s: &[
        ("train", "16019d7e3df5f24257cddd939b257f8d"),
        ("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
        ("meta", "7973b15100ade9c7d40fb424638fde48"),
    ],
    ..DatasetSpec::new("cifar100", "CIFAR-100: 50,000 + 10,000 images of 32 x 32 in 100 classes", |request| open(request, &HUNDRED))
};

const BASE: &str = "https://www.cs.toronto.edu/~kriz/";

const SIDE: usize = 32;
const IMAGE: usize = SIDE * SIDE * 3;

/// How one of the two sets is laid out.
struct Layout {
    binary: Files,
    python: Files,
    classes: usize,
    /// Bytes before the pixels of a binary record; the last of them is the label (CIFAR-100 puts the coarse one first).
    label_bytes: usize,
    /// The pickles' key for the labels, and for the names in their meta file.
    label_key: &'static str,
    names_key: &'static str,
    mean: [f64; 3],
    std: [f64; 3],
}

struct Files {
    folder: &'static str,
    read: Reader,
    train: &'static [&'static str],
    test: &'static str,
    names: &'static str,
}

static TEN: Layout = Layout {
    binary: Files {
        folder: "cifar-10-batches-bin",
        read: read_binary,
        train: &["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"],
        test: "test_batch.bin",
        names: "batches.meta.txt",
    },
    python: Files {
        folder: "cifar-10-batches-py",
        read: read_pickle,
        train: &["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"],
        test: "test_batch",
        names: "batches.meta",
    },
    classes: 10,
    label_bytes: 1,
    label_key: "labels",
    names_key: "label_names",
    mean: [0.4914, 0.4822, 0.4465],
    std: [0.2470, 0.2435, 0.2616],
};

static HUNDRED: Layout = Layout {
    binary: Files { folder: "cifar-100-binary", read: read_binary, train: &["train.bin"], test: "test.bin", names: "fine_label_names.txt" },
    python: Files { folder: "cifar-100-python", read: read_pickle, train: &["train"], test: "test", names: "meta" },
    classes: 100,
    label_bytes: 2,
    label_key: "fine_labels",
    names_key: "fine_label_names",
    // As in the paper's released code.
    mean: [0.5071, 0.4867, 0.4408],
    std: [0.2675, 0.2565, 0.2761],
};

fn open(request: &Request, layout: &Layout) -> Result<Dataset> {
    let (home, which) = request.home()?;
    let (files, names) = if which == 0 {
        (&layout.binary, binary_names(&home.join(layout.binary.names))?)
    } else {
        (&layout.python, pickled_names(&home.join(layout.python.names), layout.names_key)?)
    };
    if names.len() != layout.classes {
        return Err(Error::file(
            home.join(files.names),
            format!("{} class names; {} has {}", names.len(), request.spec.name, layout.classes),
        ));
    }
    Ok(Dataset {
        name: request.spec.name,
        train: split(&home, files, files.train, layout)?,
        test: split(&home, files, &[files.test], layout)?,
        classes: names,
        mean: layout.mean,
        std: layout.std,
        image_size: SIDE,
        one_size: true,
        home: Some(home),
    })
}

fn split(home: &Path, files: &Files, parts: &[&str], layout: &Layout) -> Result<Split> {
    let (mut data, mut labels) = (vec![], vec![]);
    for part in parts {
        (files.read)(&home.join(part), layout, &mut data, &mut labels)?;
    }
    Ok(Split::new(Pixels::Memory(Arc::new(Raw { height: SIDE, width: SIDE, data })), labels))
}

/// None beyond the last.
fn image(split: &Split, i: usize) -> Option<&[u8]> {
    let Pixels::Memory(raw) = &split.pixels else { return None };
    raw.data.chunks_exact(IMAGE).nth(i)
}

/// Where the other layout lies beside the one that was opened, the two must hold the same images.
fn compare(set: &Dataset, layout: &Layout) -> Result<Vec<String>> {
    let mut said = vec![];
    let Some(home) = &set.home else { return Ok(said) };
    for files in [&layout.binary, &layout.python] {
        let other = home.with_file_name(files.folder);
        if other == *home {
            continue;
        }
        for (name, parts, mine) in [("train", files.train, &set.train), ("test", &[files.test][..], &set.test)] {
            if !parts.iter().all(|part| other.join(part).is_file()) {
                continue;
            }
            let twin = split(&other, files, parts, layout)?;
            let differs = |&i: &usize| twin.labels.get(i) != mine.labels.get(i) || image(&twin, i) != image(mine, i);
            if let Some(i) = (0..twin.len().max(mine.len())).find(differs) {
                return Err(Error::file(&other, format!("image {i} of its {name} split is not the one in {}", home.display())));
            }
            said.push(format!("{}: {} {name} images, each the same as here", other.display(), twin.len()));
        }
    }
    Ok(said)
}

/// Appends the images and labels of one file.
type Reader = fn(&Path, &Layout, &mut Vec<u8>, &mut Vec<i64>) -> Result<()>;

fn read_binary(path: &Path, layout: &Layout, data: &mut Vec<u8>, labels: &mut Vec<i64>) -> Result<()> {
    let mut file = File::open(path).map_err(Error::open(path))?;
    let size = files::fits(path)?;
    let record = layout.label_bytes + IMAGE;
    if size == 0 || size % record as u64 != 0 {
        let whole = size / record as u64;
        return Err(Error::file(
            path,
            format!("{size} bytes are no whole number of {record}-byte records ({whole} and a part): truncated?"),
        ));
    }
    let count = (size / record as u64) as usize;
    data.reserve_exact(count * IMAGE);
    // A thousand records at a time: the set is in memory once, not twice.
    let mut buffer = vec![0; record * 1000.min(count)];
    for start in (0..count).step_by(1000) {
        let chunk = &mut buffer[..record * 1000.min(count - start)];
        file.read_exact(chunk).map_err(Error::open(path))?;
        for record in chunk.chunks_exact(record) {
            let (label, planes) = record.split_at(layout.label_bytes);
            labels.push(checked(i64::from(label[layout.label_bytes - 1]), layout, path, labels.len())?);
            interleave(planes, data);
        }
    }
    Ok(())
}

fn read_pickle(path: &Path, layout: &Layout, data: &mut Vec<u8>, labels: &mut Vec<i64>) -> Result<()> {
    let fault = |what: String| Error::file(path, what);
    let value = unpickle(path)?;
    let array = value
        .get("data")
        .ok_or_else(|| fault("no `data` in it".to_string()))?
        .as_array()
        .map_err(|what| fault(format!("`data` is {what}")))?;
    let values =
        value.get(layout.label_key).and_then(|v| v.as_slice()).ok_or_else(|| fault(format!("no list `{}` in it", layout.label_key)))?;
    let [count, IMAGE] = array.shape[..] else {
        return Err(fault(format!("`data` has shape {:?}; [N, {IMAGE}] is expected", array.shape)));
    };
    if array.dtype != "u1" || values.len() != count {
        return Err(fault(format!(
            "{count} images of dtype {} with {} labels; as many labels as u1 images are expected",
            array.dtype,
            values.len()
        )));
    }
    for value in values {
        let label = value.as_int().ok_or_else(|| fault(format!("a label that is no integer: {value:?}")))?;
        labels.push(checked(label, layout, path, labels.len())?);
    }
    data.reserve_exact(count * IMAGE);
    array.data.chunks_exact(IMAGE).for_each(|planes| interleave(planes, data));
    Ok(())
}

fn checked(label: i64, layout: &Layout, path: &Path, image: usize) -> Result<i64> {
    if !(0..layout.classes as i64).contains(&label) {
        return Err(Error::file(path, format!("label {label} of image {image}; 0 to {} are expected", layout.classes - 1)));
    }
    Ok(label)
}

/// From one plane a channel to one pixel after another.
fn interleave(planes: &[u8], out: &mut Vec<u8>) {
    let (red, rest) = planes.split_at(SIDE * SIDE);
    let (green, blue) = rest.split_at(SIDE * SIDE);
    out.extend(red.iter().zip(green).zip(blue).flat_map(|((&r, &g), &b)| [r, g, b]));
}

fn unpickle(path: &Path) -> Result<pickle::Value> {
    let bytes = files::read(path)?;
    pickle::read(&bytes).map(|(value, _)| value).map_err(|what| Error::file(path, format!("no pickle that can be read: {what}")))
}

fn binary_names(path: &Path) -> Result<Vec<String>> {
    let text = files::read_text(path)?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string).collect())
}

fn pickled_names(path: &PathBuf, key: &str) -> Result<Vec<String>> {
    let value = unpickle(path)?;
    let names =
        value.get(key).and_then(|v| v.as_slice()).map(|v| v.iter().map(|n| n.as_str().map(str::to_string)).collect::<Option<Vec<_>>>());
    names.flatten().ok_or_else(|| Error::file(path, format!("no list of texts `{key}` in it")))
}
