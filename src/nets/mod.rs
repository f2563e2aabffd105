//! Architectures and the networks built from them. A network is a list of stages and a neck; the auxiliary branches of L-MCL come
//! from the same bricks with fresh weights. What others must know of an architecture (its maps, its norms, which frameworks have it) it
//! says itself, on `Arch`.
//!
//! A new architecture is one entry in the `ARCHS` of its family's file; a new family is a file and its line in `FAMILIES`. The tests of
//! tests/nets.rs go through the registry: they hold the entry to what it says of itself.

mod drop_path;
mod elsewhere;
pub mod graph;
mod hcgnet;
mod kernels;
pub mod layers;
mod mobile_half;
mod residual;
mod resnet_cifar;
mod resnet_imagenet;
mod shufflenet_v1;
mod shufflenet_v2;
mod swin;
mod vgg_cifar;
mod wrn;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::params::{Params, Scope};
use crate::registry;
use layers::{Layer, Linear, Pass, pool};

pub use elsewhere::{Detectron2, Elsewhere, Mmdet, Timm, Torchvision, TorchvisionMaps};
pub use kernels::autocast::{Autocast, LossScale, autocast};
pub use kernels::{Instructions, available, check_instructions, instructions};

/// All an architecture file exports.
pub struct Arch {
    /// Lower snake case, as torchvision or the released code calls it.
    pub name: &'static str,
    /// The file it stands in: architectures of one family start alike and are described alike.
    pub family: &'static str,
    /// Side of the square images it was made for; other sizes work where the family allows them.
    pub image_size: i64,
    /// Number of stages, L.
    pub depth: usize,
    /// (channels, stride) of the map after each stage: the map of an image of side s has side s / stride.
    pub maps: &'static [(i64, i64)],
    /// Width of the pooled feature, D: the network's own and that of every branch.
    pub dim: i64,
    /// What the family calls its last linear layer: `fc`, `linear`, `classifier` or `head`.
    pub classifier: &'static str,
    /// Its normalisation layers.
    pub norm: Norm,
    /// What the released classes call the same variables.
    pub released: Released,
    /// Which other frameworks have it, and how.
    pub elsewhere: Elsewhere,
    /// Batch, height and width of the two inputs an export is compared on; the first is shipped with it. Neither is square.
    pub golden: [[i64; 3]; 2],
    /// `phi^[l]`, the l-th stage (from 0): map -> map. The first one takes images.
    pub stage: fn(&Scope, usize) -> Box<dyn Layer>,
    /// From the last stage's map to the map that is pooled, [B, dim, h, w].
    pub neck: fn(&Scope) -> Box<dyn Layer>,
    /// `r^[l]`, from the map of stage l < L - 1 to a map that is pooled, [B, dim, h, w].
    pub branch: fn(&Scope, usize) -> Box<dyn Layer>,
    /// Where a branch is what the network itself has after stage l, weights apart: what each part of the branch is called, and what the
    /// same part of the network. Empty where it is not; classifiers are not listed.
    pub twins: fn(usize) -> Vec<(String, String)>,
    /// g, the classifier on a pooled feature: (scope, dim, classes).
    pub head: fn(Scope, i64, i64) -> Linear,
    /// `g^[l]`, the classifiers of the branches.
    pub branch_head: fn(Scope, i64, i64) -> Linear,
    /// The same network, without branches, as an operator graph: what every written file is made from.
    pub graph: fn(&graph::Place) -> graph::Tree,
}

/// The normalisation layers of an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// BatchNorm, eps 1e-5, momentum 0.1: running statistics are part of the network.
    Batch,
    /// LayerNorm, eps 1e-5; the maps come before the last one.
    Layer,
}

/// `Arch::golden` of most networks for small images, and of those for large ones.
const GOLDEN_SMALL: [[i64; 3]; 2] = [[2, 32, 48], [3, 40, 24]];
const GOLDEN_LARGE: [[i64; 3]; 2] = [[2, 96, 128], [1, 256, 160]];

/// Where the names of the released L-MCL code differ from ours: ours are those of its L-MCL classes for CIFAR networks and torchvision's
/// for ImageNet networks, without the prefixes `BACKBONE` and `AUXILIARY`. Each row is a whole part of a dotted name and what stands there instead.
pub struct Released {
    /// The rows for the classes without branches.
    pub baseline: &'static [(&'static str, &'static str)],
    /// The rows for the L-MCL classes.
    pub lmcl: &'static [(&'static str, &'static str)],
}

/// Before the names of a network and of its branches in a state dict of a released L-MCL class, after `module_list.{m}.`.
pub const BACKBONE: &str = "backbone.";
/// See `BACKBONE`.
pub const AUXILIARY: &str = "auxiliary_classifier.";

/// One of our names as a released class has it.
pub fn rename(name: &str, rows: &[(&str, &str)]) -> String {
    let dotted = format!(".{name}.");
    let renamed = rows.iter().fold(dotted, |name, (ours, theirs)| name.replacen(&format!(".{ours}."), &format!(".{theirs}."), 1));
    renamed[1..renamed.len() - 1].to_string()
}

/// One family of architectures a file.
pub const FAMILIES: &[&[Arch]] = &[
    resnet_cifar::ARCHS,
    wrn::ARCHS,
    shufflenet_v2::ARCHS,
    hcgnet::ARCHS,
    resnet_imagenet::ARCHS,
    swin::ARCHS,
    vgg_cifar::ARCHS,
    mobile_half::ARCHS,
    shufflenet_v1::ARCHS,
];

/// What stands where an architecture does for a network that is none of ours, a TorchScript file of anybody's: it is in no list, has no stages, and
/// nothing is built from it.
pub static FOREIGN: Arch = Arch {
    name: "torchscript",
    family: "foreign",
    image_size: 224,
    depth: 0,
    maps: &[],
    dim: 1,
    classifier: "classifier",
    norm: Norm::Batch,
    released: Released { baseline: &[], lmcl: &[] },
    elsewhere: Elsewhere::NOWHERE,
    golden: GOLDEN_LARGE,
    stage: |_, _| Box::new(layers::Identity),
    neck: |_| Box::new(layers::Identity),
    branch: |_, _| Box::new(layers::Identity),
    twins: |_| vec![],
    head: Linear::new,
    branch_head: Linear::new,
    graph: |_| graph::Tree::default(),
};

/// Every architecture, family by family.
pub fn archs() -> impl Iterator<Item = &'static Arch> {
    FAMILIES.iter().flat_map(|family| family.iter())
}

/// The architecture of this name, or the error that lists all.
pub fn find(name: &str) -> Result<&'static Arch> {
    registry::find("architecture", name, archs(), |arch| arch.name)
}

impl Arch {
    /// The number of classes its published counts are for: CIFAR-100's or ImageNet's.
    pub fn usual_classes(&self) -> i64 {
        if self.image_size == 32 { 100 } else { 1000 }
    }
}

/// What `list archs` prints of an architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Its name in the registry.
    pub name: &'static str,
    /// Side of the images it was made for.
    pub image_size: i64,
    /// Trained numbers of the network, without branches.
    pub parameters: i64,
    /// Multiply-adds of its convolutions and linear layers for one image of its usual size.
    pub macs: i64,
    /// Number of stages, L.
    pub stages: usize,
    /// Width of the pooled feature.
    pub dim: i64,
}

/// Counts of the network with this many classes, by building it and running one blank image through it.
pub fn describe(arch: &'static Arch, classes: i64) -> Description {
    let _guard = tch::no_grad_guard();
    let (kind, device) = (Kind::Float, Device::Cpu); // on the CPU: nothing is kept
    let scope = Scope::blank(device, kind);
    let net = Network::new(arch, &scope, classes);
    let image = Tensor::zeros([1, 3, arch.image_size, arch.image_size], (kind, device));
    let macs = layers::macs(|| drop(net.forward(&image, Pass::EVAL)));
    Description {
        name: arch.name,
        image_size: arch.image_size,
        parameters: scope.params().count(),
        macs,
        stages: arch.depth,
        dim: arch.dim,
    }
}

/// The deployable network f_m.
pub struct Network {
    /// `phi^[1]` to `phi^[L]`.
    pub stages: Vec<Box<dyn Layer>>,
    /// What lies between the last map and the pooling.
    pub neck: Box<dyn Layer>,
    /// g.
    pub classifier: Linear,
}

/// One auxiliary branch: `r^[l]` and `g^[l]`.
pub struct Branch {
    /// `r^[l]`: from a stage's map to a map that is pooled.
    pub body: Box<dyn Layer>,
    /// `g^[l]`.
    pub classifier: Linear,
}

/// One network's answer to one batch. The last entry of `feats` and `logits` is the network's own, earlier ones are branches (Eq. 11-12).
pub struct Outputs {
    /// The map after each stage, [B, c_l, h_l, w_l].
    pub maps: Vec<Tensor>,
    /// The last map before pooling, [B, D, h, w].
    pub pre_pool: Tensor,
    /// `F^[l]`, [B, D].
    pub feats: Vec<Tensor>,
    /// `z^[l]`, [B, C].
    pub logits: Vec<Tensor>,
}

impl Outputs {
    /// The network's own pooled feature.
    pub fn feat(&self) -> &Tensor {
        self.feats.last().expect("a network has a feature")
    }

    /// The network's own logits.
    pub fn logit(&self) -> &Tensor {
        self.logits.last().expect("a network has logits")
    }
}

impl Network {
    /// Its variables are made in `scope`, under the family's names.
    pub fn new(arch: &Arch, scope: &Scope, classes: i64) -> Network {
        Network {
            stages: (0..arch.depth).map(|l| (arch.stage)(scope, l)).collect(),
            neck: (arch.neck)(scope),
            classifier: (arch.head)(scope.sub(arch.classifier), arch.dim, classes),
        }
    }

    /// With its parameters; starting values follow from the seed.
    pub fn build(arch: &Arch, classes: i64, seed: u64, device: Device, kind: Kind) -> (Network, Params) {
        let scope = Scope::root(seed, device, kind);
        let net = Network::new(arch, &scope, classes);
        (net, scope.params())
    }

    /// The map after each stage.
    pub fn maps(&self, images: &Tensor, pass: Pass) -> Vec<Tensor> {
        let mut maps: Vec<Tensor> = Vec::with_capacity(self.stages.len());
        for stage in &self.stages {
            let map = stage.forward(maps.last().unwrap_or(images), pass);
            maps.push(map);
        }
        maps
    }

    /// Maps, pooled feature and logits of the network alone.
    pub fn forward(&self, images: &Tensor, pass: Pass) -> Outputs {
        self.answer(self.maps(images, pass), &[], pass)
    }

    /// From the stage maps on: neck, branches, classifiers.
    pub fn answer(&self, maps: Vec<Tensor>, branches: &[Branch], pass: Pass) -> Outputs {
        let (mut feats, mut logits) = (vec![], vec![]);
        for (branch, map) in branches.iter().zip(&maps) {
            let feat = pool(&branch.body.forward(map, pass));
            logits.push(branch.classifier.forward(&feat, pass));
            feats.push(feat);
        }
        let pre_pool = self.neck.forward(maps.last().expect("a network has stages"), pass);
        let feat = pool(&pre_pool);
        logits.push(self.classifier.forward(&feat, pass));
        feats.push(feat);
        Outputs { maps, pre_pool, feats, logits }
    }
}

impl Branch {
    /// The branches of an architecture, for stages 0 .. L - 1, under the released names `block_extractor{l}`, `fc{l}` (l from 1).
    pub fn all(arch: &Arch, scope: &Scope, classes: i64) -> Vec<Branch> {
        (0..arch.depth - 1)
            .map(|l| Branch {
                body: (arch.branch)(scope, l),
                classifier: (arch.branch_head)(scope.sub(format!("fc{}", l + 1)), arch.dim, classes),
            })
            .collect()
    }
}
