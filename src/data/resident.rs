//! Small sets that live on a device as bytes. The host draws as it always does; crop, flip, erasing and normalisation happen on the device,
//! by the same table, so a batch is the one the host would have made.

use tch::{Device, Kind, Tensor};

use super::augment::{Crop, Transform};
use super::{Batch, Pixels, Placed, Split};
use crate::error::{Error, Result};
use crate::rng::Rng;
use crate::system::arrival;

/// What "auto" brings to a device: CIFAR and STL-10, not Tiny ImageNet.
const AUTO_BYTES: usize = 1 << 30;

/// Pixels on a device, and what is needed to make views of them.
pub struct Resident {
    /// u8 [count, height, width, 3].
    pixels: Tensor,
    /// f32 [256 * 3]: `Transform::table`.
    table: Tensor,
    /// 0, 1, ... int64 `[size]`.
    places: Tensor,
    /// 0, 1, 2, int64.
    channels: Tensor,
    size: i64,
    pad: i64,
}

/// Why a set cannot live on a device, in words that end a sentence.
fn hindrance(split: &Split, transform: &Transform) -> Option<String> {
    let Pixels::Memory(raw) = &split.pixels else { return Some("its images are files of many sizes".into()) };
    if transform.rand_augment.is_some() {
        return Some("train.rand_augment works on the host".into());
    }
    let fits = raw.height == transform.size && raw.width == transform.size;
    let known = matches!(transform.crop, Crop::None | Crop::Pad { .. });
    (!known || !fits).then(|| "its images are resized one by one".into())
}

impl Resident {
    /// The set on the device, where that can be and is worth it. `asked`: what the recipe says of it, None for "auto".
    pub fn wanted(asked: Option<bool>, split: &Split, transform: &Transform, device: Device) -> Result<Option<Resident>> {
        if !device.is_cuda() || asked == Some(false) {
            return Ok(None); // the host's memory is the CPU's
        }
        match hindrance(split, transform) {
            Some(why) if asked == Some(true) => {
                Err(Error::input(format!("data.on_device = true, but {why}; accepted here: \"auto\", false")))
            }
            Some(_) => Ok(None),
            None => {
                let Pixels::Memory(raw) = &split.pixels else { return Ok(None) };
                let small = asked == Some(true) || raw.data.len() <= AUTO_BYTES;
                Ok(small.then(|| Resident::new(raw, transform, device)))
            }
        }
    }

    fn new(raw: &super::Raw, transform: &Transform, device: Device) -> Resident {
        let size = transform.size as i64;
        Resident {
            pixels: Tensor::from_slice(&raw.data).view([-1, raw.height as i64, raw.width as i64, 3]).to_device(device),
            table: Tensor::from_slice(transform.table().values()).to_device(device),
            places: Tensor::arange(size, (Kind::Int64, device)),
            channels: Tensor::arange(3, (Kind::Int64, device)),
            size,
            pad: if let Crop::Pad { pad } = transform.crop { pad as i64 } else { 0 },
        }
    }

    /// The batch that was planned, on the device: one copy brings the plan there.
    pub(super) fn place(&self, plan: &Plan) -> Placed {
        let _guard = tch::no_grad_guard();
        let (images, size) = (plan.images, self.size);
        let there = plan.piece.to_device_(self.pixels.device(), Kind::Uint8, true, false);
        let numbers = |piece: &Tensor, at: i64, count: i64| piece.narrow(0, 8 * at, 8 * count).view_dtype(Kind::Int64);
        let pixels = self.pixels.index_select(0, &numbers(&there, 2 * images, images)); // [B, h, w, 3]
        let pixels = if self.pad > 0 { pixels.constant_pad_nd([0, 0, self.pad, self.pad, self.pad, self.pad]) } else { pixels };
        let width = pixels.size()[2];
        let pixels = pixels.view([images, -1, 3]);
        let mut at = 3 * images; // in numbers of eight bytes
        let mut next = |count: i64| {
            let found = numbers(&there, at, count);
            at += count;
            found
        };
        let windows: Vec<[Tensor; 3]> = plan.erased.iter().map(|_| [next(images), next(images), next(images)]).collect();
        let places: Vec<Tensor> = plan.erased.iter().map(|&count| next(count as i64)).collect();
        let mut noise = there.narrow(0, 8 * at, there.size()[0] - 8 * at).view_dtype(Kind::Float);
        let views = windows.into_iter().zip(places).map(|([row, column, step], places)| {
            let y = row.unsqueeze(1) + &self.places; // [B, size]
            let x = column.unsqueeze(1) + step.unsqueeze(1) * &self.places;
            let from = (y * width).unsqueeze(2) + x.unsqueeze(1);
            let bytes = pixels.gather(1, &from.view([images, -1, 1]).expand([-1, -1, 3], false), false);
            let values = self.table.index_select(0, &(bytes.to_kind(Kind::Int64) * 3 + &self.channels).view([-1]));
            let erased = places.size()[0];
            if erased > 0 {
                let _ = values.shallow_clone().index_copy_(0, &places, &noise.narrow(0, 0, erased));
                noise = noise.narrow(0, erased, noise.size()[0] - erased);
            }
            values.view([images, size, size, 3]).permute([0, 3, 1, 2])
        });
        let batch =
            Batch { views: views.collect(), labels: numbers(&there, images, images), index: numbers(&there, 0, images), noise: plan.noise };
        Placed { batch, labels: numbers(&plan.piece, images, images), index: numbers(&plan.piece, 0, images) }
    }
}

/// A batch as it was drawn: places, labels and rows; of each view the crop's first row and column and which way columns go; what is erased,
/// and the noise there. In one piece of pinned memory.
pub(super) struct Plan {
    piece: Tensor,
    images: i64,
    /// Numbers erased in each view.
    erased: Vec<usize>,
    noise: u64,
}

impl Plan {
    /// Draws for images `rows` of a set; `streams`: for each view the generator of each image.
    pub fn draw(transform: &Transform, index: &[i64], labels: &[i64], rows: &[i64], streams: Vec<Vec<Rng>>, noise: u64) -> Plan {
        let pad = if let Crop::Pad { pad } = transform.crop { pad as i64 } else { 0 };
        let size = transform.size as i64;
        let mut numbers: Vec<i64> = [index, labels, rows].concat();
        let (mut places, mut values, mut erased) = (vec![], vec![], vec![]);
        for stream in streams {
            let before = places.len();
            let mut window: [Vec<i64>; 3] = Default::default();
            for (i, mut rng) in stream.into_iter().enumerate() {
                let drawn = transform.draw(&mut rng);
                let (first, step) = if drawn.mirrored { (size - 1, -1) } else { (0, 1) };
                window[0].push(drawn.top as i64 + pad);
                window[1].push(drawn.left as i64 + pad + first);
                window[2].push(step);
                if let Some(part) = drawn.erased {
                    places.extend(part.places(transform.size).map(|place| (i * transform.floats() + place) as i64));
                    values.extend(part.noise);
                }
            }
            window.iter().for_each(|part| numbers.extend(part));
            erased.push(places.len() - before);
        }
        numbers.extend(places);
        let piece = arrival::pinned(8 * numbers.len() + 4 * values.len());
        let start = piece.data_ptr().cast::<u8>();
        // SAFETY: the two lists fill the piece, which nobody else has seen yet.
        unsafe {
            std::ptr::copy_nonoverlapping(numbers.as_ptr().cast(), start, 8 * numbers.len());
            std::ptr::copy_nonoverlapping(values.as_ptr().cast(), start.add(8 * numbers.len()), 4 * values.len());
        }
        Plan { piece, images: index.len() as i64, erased, noise }
    }
}
