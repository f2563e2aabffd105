//! Forward passes with convolutions and matrix products in half the bits; weights, losses and optimizers stay in f32.

use tch::{Device, Kind, Tensor};

use crate::nets::Outputs;
use crate::system::device::Precision;

unsafe extern "C" {
    fn mcl_autocast(cuda: bool, kind: i32);
}

/// Autocast on this thread, from `autocast` until this is dropped.
#[must_use]
pub struct Autocast {
    cuda: bool,
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // SAFETY: a call without arguments that could be wrong.
        unsafe { mcl_autocast(self.cuda, -1) }
    }
}

/// Nothing for f32.
pub fn autocast(precision: Precision, device: Device) -> Option<Autocast> {
    let kind = match precision {
        Precision::F32 => return None,
        Precision::F16 => 0,
        Precision::Bf16 => 1,
    };
    let cuda = device.is_cuda();
    // SAFETY: as above; dropping the guard undoes it.
    unsafe { mcl_autocast(cuda, kind) };
    Some(Autocast { cuda })
}

impl Outputs {
    /// Everything in f32, as losses take it.
    pub fn in_f32(self) -> Outputs {
        let whole = |t: Tensor| if t.kind() == Kind::Double { t } else { t.to_kind(Kind::Float) };
        let all = |list: Vec<Tensor>| list.into_iter().map(whole).collect();
        Outputs { maps: all(self.maps), pre_pool: whole(self.pre_pool), feats: all(self.feats), logits: all(self.logits) }
    }
}

/// The factor on the loss that keeps gradients inside f16's range: halved, and the step skipped, when one overflows; doubled after a
/// while without. Numbers as torch's GradScaler.
pub struct LossScale {
    /// [scale, steps since it changed]
    pub state: Tensor,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale { state: Tensor::from_slice(&[65536.0f64, 0.0]) }
    }
}

impl LossScale {
    const PATIENCE: f64 = 2000.0;

    /// The factor now.
    pub fn scale(&self) -> f64 {
        self.state.double_value(&[0])
    }

    /// After a step whose gradients were finite, or not.
    pub fn update(&mut self, finite: bool) {
        let (scale, steps) = (self.scale(), self.state.double_value(&[1]) + 1.0);
        let next = match finite {
            false => [scale / 2.0, 0.0],
            true if steps >= LossScale::PATIENCE => [scale * 2.0, 0.0],
            true => [scale, steps],
        };
        self.state.copy_(&Tensor::from_slice(&next));
    }
}
