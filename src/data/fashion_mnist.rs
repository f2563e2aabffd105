//! Fashion-MNIST, Xiao et al., 2017: the official IDX files, as they are or as .gz. The grey images of 28 x 28 get a border of two black pixels
//! and three equal channels, so that networks for 32 x 32 images take them.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use super::{Dataset, DatasetSpec, Pixels, Raw, Request, Split};
use crate::error::{Error, Result};
use crate::files;

pub const SPEC: DatasetSpec = DatasetSpec {
    layouts: &[
        ("FashionMNIST/raw", "train-images-idx3-ubyte"),
        ("fashion-mnist", "train-images-idx3-ubyte"),
        ("fashion-mnist", "train-images-idx3-ubyte.gz"),
    ],
    // MNIST and its other relatives have files of the same names and sizes: only the folder's name tells.
    recognise: |_| false,
    images: Some((60_000, 10_000)),
    md5s: &[
        ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ],
    ..DatasetSpec::new("fashion_mnist", "Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 in 10 classes, as 32 x 32", open)
};

const CLASSES: [&str; 10] = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"];
/// How much larger than its file an unpacked IDX may be; the official ones are about twice as large.
const UNPACKED: u64 = 64;
const STORED: usize = 28;
const BORDER: usize = 2;
const SIDE: usize = STORED + 2 * BORDER;

fn open(request: &Request) -> Result<Dataset> {
    let (home, _) = request.home()?;
    Ok(Dataset {
        name: request.spec.name,
        train: split(&home, "train")?,
        test: split(&home, "t10k")?,
        classes: CLASSES.map(str::to_string).to_vec(),
        // 0.2860 and 0.3530 of the images without their border, which is a quarter (240 of 1024 pixels) of zeros.
        mean: [0.2190; 3],
        std: [0.3318; 3],
        image_size: SIDE,
        one_size: true,
        home: Some(home),
    })
}

fn split(home: &Path, part: &str) -> Result<Split> {
    let (images, count, grey) = idx(home, &format!("{part}-images-idx3-ubyte"), [STORED, STORED].as_slice())?;
    let (labels, named, classes) = idx(home, &format!("{part}-labels-idx1-ubyte"), &[])?;
    if named != count {
        return Err(Error::file(labels, format!("{named} labels for the {count} images of {}", images.display())));
    }
    if let Some((i, label)) = classes.iter().enumerate().find(|(_, label)| **label as usize >= CLASSES.len()) {
        return Err(Error::file(labels, format!("label {label} of image {i}; 0 to 9 are expected")));
    }
    let mut data = vec![0; count * SIDE * SIDE * 3];
    for (image, out) in grey.chunks_exact(STORED * STORED).zip(data.chunks_exact_mut(SIDE * SIDE * 3)) {
        for (y, line) in image.chunks_exact(STORED).enumerate() {
            let row = &mut out[((y + BORDER) * SIDE + BORDER) * 3..][..STORED * 3];
            row.chunks_exact_mut(3).zip(line).for_each(|(pixel, shade)| pixel.fill(*shade));
        }
    }
    Ok(Split::new(Pixels::Memory(Arc::new(Raw { height: SIDE, width: SIDE, data })), classes.iter().map(|&c| i64::from(c)).collect()))
}

/// The path, count and bytes of an IDX file whose entries have this shape: 0 0 8 (bytes), the number of dimensions, each of them in four
/// bytes, big endian, then the entries.
fn idx(home: &Path, name: &str, entry: &[usize]) -> Result<(std::path::PathBuf, usize, Vec<u8>)> {
    let plain = home.join(name);
    let packed = home.join(format!("{name}.gz"));
    let path = if plain.is_file() || !packed.is_file() { plain } else { packed };
    let file = File::open(&path).map_err(Error::open(&path))?;
    let mut bytes = vec![];
    let most = UNPACKED.saturating_mul(files::fits(&path)?.max(1 << 10));
    let read = if path.extension().is_some_and(|e| e == "gz") {
        flate2::read::GzDecoder::new(file).take(most + 1).read_to_end(&mut bytes)
    } else {
        std::io::BufReader::new(file).take(most + 1).read_to_end(&mut bytes)
    };
    read.map_err(Error::open(&path))?;
    if bytes.len() as u64 > most {
        return Err(Error::file(path, format!("unpacks to more than {UNPACKED} times its size: no set of images does")));
    }
    let start = 4 + 4 * (1 + entry.len());
    let sizes: Vec<usize> = bytes
        .get(4..start)
        .unwrap_or_default()
        .chunks_exact(4)
        .map(|size| u32::from_be_bytes(size.try_into().expect("four bytes")) as usize)
        .collect();
    if !bytes.starts_with(&[0, 0, 8, 1 + entry.len() as u8]) || sizes.get(1..) != Some(entry) {
        return Err(Error::file(path, format!("no IDX file of bytes whose entries have shape {entry:?}")));
    }
    let want = start + sizes[0] * entry.iter().product::<usize>();
    if bytes.len() != want {
        return Err(Error::file(path, format!("{} bytes where its header promises {want}: truncated?", bytes.len())));
    }
    Ok((path, sizes[0], bytes.split_off(start)))
}
