//! A batch in one piece of memory: places, labels, then the views. One copy brings it to a device.

use tch::{Device, Kind, Tensor};

use super::Batch;
use crate::system::arrival;

/// The parts in pinned memory, u8. Views are [images, height, width, channels].
pub(super) fn pack(index: &[i64], labels: &[i64], views: &[Vec<f32>]) -> Tensor {
    let bytes = 8 * (index.len() + labels.len()) + views.iter().map(|view| 4 * view.len()).sum::<usize>();
    let piece = arrival::pinned(bytes);
    let mut at = piece.data_ptr().cast::<u8>();
    let mut put = |from: *const u8, bytes: usize| {
        // SAFETY: the parts fill the piece, which nobody else has seen yet, from its beginning to its end.
        unsafe {
            std::ptr::copy_nonoverlapping(from, at, bytes);
            at = at.add(bytes);
        }
    };
    put(index.as_ptr().cast(), 8 * index.len());
    put(labels.as_ptr().cast(), 8 * labels.len());
    views.iter().for_each(|view| put(view.as_ptr().cast(), 4 * view.len()));
    piece
}

/// The batch that lies in a piece. `shape`: [images, height, width, channels].
pub(super) fn unpack(piece: &Tensor, views: usize, shape: [i64; 4], noise: u64) -> Batch {
    let (images, floats) = (shape[0], shape.iter().product::<i64>());
    let part = |from: i64, bytes: i64, kind: Kind| piece.narrow(0, from, bytes).view_dtype(kind);
    let view = |v: i64| part(16 * images + v * 4 * floats, 4 * floats, Kind::Float).view(shape).permute([0, 3, 1, 2]);
    Batch {
        views: (0..views as i64).map(view).collect(),
        labels: part(8 * images, 8 * images, Kind::Int64),
        index: part(0, 8 * images, Kind::Int64),
        noise,
    }
}

/// The batch on a CUDA device by one copy, if it lies in one piece; nobody waits for it if that is pinned.
pub(super) fn send(batch: &Batch, device: Device) -> Option<Batch> {
    let (images, kind) = (batch.labels.size()[0], batch.index.kind());
    let [_, channels, height, width] = batch.views.first()?.size()[..] else { return None };
    if images == 0 || kind != Kind::Int64 || batch.index.device() != Device::Cpu {
        return None;
    }
    let shape = [images, height, width, channels];
    let floats = shape.iter().product::<i64>();
    // Does every part begin where the one before it ends?
    let begin = batch.index.data_ptr() as usize;
    let places = [(8 * images, &batch.labels)].into_iter();
    let places = places.chain(batch.views.iter().enumerate().map(|(v, t)| (16 * images + v as i64 * 4 * floats, t)));
    let laid = |t: &Tensor| t.kind() == Kind::Int64 || (t.kind() == Kind::Float && t.permute([0, 2, 3, 1]).is_contiguous());
    if !places.into_iter().all(|(at, t)| t.data_ptr() as usize == begin + at as usize && laid(t)) {
        return None;
    }
    let bytes = 16 * images + batch.views.len() as i64 * 4 * floats;
    let piece = batch.index.view_dtype(Kind::Uint8).f_as_strided([bytes], [1], 0).ok()?;
    Some(unpack(&piece.to_device_(device, Kind::Uint8, true, false), batch.views.len(), shape, batch.noise))
}
