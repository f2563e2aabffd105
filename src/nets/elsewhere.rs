//! What other frameworks have of an architecture: under which class, built with which arguments. An architecture says it about itself, and
//! export reads it; no format knows an architecture by its name.

use serde::Serialize;

/// The frameworks besides ours that have an architecture. TorchScript and safetensors take all of them and are not listed.
#[derive(Debug, Clone, Copy)]
pub struct Elsewhere {
    /// torchvision, whose names of tensors are then ours.
    pub torchvision: Option<Torchvision>,
    /// timm, and with it transformers' TimmBackbone.
    pub timm: Option<Timm>,
    /// MMDetection 3.
    pub mmdet: Option<Mmdet>,
    /// Detectron2.
    pub detectron2: Option<Detectron2>,
}

impl Elsewhere {
    /// Nobody else has it.
    pub const NOWHERE: Elsewhere = Elsewhere { torchvision: None, timm: None, mmdet: None, detectron2: None };
}

/// A function of `torchvision.models` of the architecture's own name.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Torchvision {
    /// How its maps are had.
    pub maps: TorchvisionMaps,
    /// Does it take `norm_layer`, by which detectors freeze BatchNorm?
    pub norm_layer: bool,
}

/// How the maps after the stages are had from a torchvision network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TorchvisionMaps {
    /// The network's own children give them: `IntermediateLayerGetter` takes it as it is.
    Children,
    /// Every second child of `features` gives one, with the channels last.
    Features,
}

/// A name of `timm.list_models()`, whose tensors are called as torchvision's or as timm's Swin's.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Timm {
    /// What `timm.create_model` is asked for.
    pub name: &'static str,
    /// Its first convolution.
    pub first_conv: &'static str,
    /// Its last linear layer.
    pub classifier: &'static str,
    /// Has it the names of timm's Swin? `weights::frameworks` has both.
    pub swin: bool,
}

/// A class of `mmdet.models.backbones` and its arguments.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(tag = "class")]
pub enum Mmdet {
    /// `style="pytorch"`: the stride lies on the 3 x 3 convolution.
    ResNet {
        /// Number of layers: 18, 34 or 50.
        depth: u32,
    },
    /// Its names are not torchvision's: `weights::frameworks` has both.
    SwinTransformer {
        /// Channels of the first map.
        embed_dims: i64,
        /// Blocks of each stage.
        depths: [usize; 4],
        /// Heads of each stage.
        num_heads: [i64; 4],
        /// Side of a window.
        window_size: i64,
        /// Hidden channels of a block for each of its own.
        mlp_ratio: i64,
        /// How often the last block's residual branches are dropped in training.
        drop_path_rate: f64,
    },
}

/// `build_resnet_backbone` with `STRIDE_IN_1X1: False`.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Detectron2 {
    /// `MODEL.RESNETS.DEPTH`.
    pub depth: u32,
}
