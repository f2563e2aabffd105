//! AFD: Feature-map-level Online Adversarial Knowledge Distillation, Chung et al., ICML 2020. Beside the exchange of predictions a
//! discriminator for each network tells its feature maps from those of the network before it in a cycle, and the network learns to
//! be taken for that one: maps are matched in distribution, not image by image.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{
    Clock, Frozen, Group, Method, MethodSpec, Rate, Reported, Task, at_least, mutual_rows, positive, read_options, resolved, task_rows,
    weights,
};
use crate::cohort::Cohort;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::terms::Terms;
use crate::nets::layers::{BatchNorm, Conv, ConvBn, ConvBnRelu, ConvShape, Layer, Pass};
use crate::nets::{Arch, Outputs};
use crate::optim::Rule;
use crate::params::{Params, Scope};
use crate::rng;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "afd",
    about: "Feature-map-level Online Adversarial Knowledge Distillation (Chung et al. 2020)",
    needs: "independent networks, M >= 2; two gradients a step, the adversarial one with Adam; ships all",
    reported: Reported::All,
    frozen: Frozen::Refused("networks also learn each other's feature maps in a cycle, in which every teacher is a student"),
    presets: &[],
    build,
};

/// The group that gets the adversarial gradient.
const ADVERSARIAL: &str = "adversarial";

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    temperature: f64,
    /// Of both Adams; divided by 10 at a quarter and at half of the run.
    adam_lr: f64,
    adam_weight_decay: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options { temperature: 3.0, adam_lr: 2e-5, adam_weight_decay: 0.1 }
    }
}

/// Convolution, normalisation, leaky ReLU, convolution, sigmoid: on maps larger than 4 x 4 a grid of verdicts.
struct Discriminator {
    first: Conv,
    norm: BatchNorm,
    last: Conv,
}

impl Discriminator {
    fn new(scope: Scope, channels: i64) -> Discriminator {
        let shape = |c_in, c_out, stride| ConvShape { padding: 0, ..ConvShape::new(c_in, c_out, 2, stride) };
        let conv = |name: &str, shape: ConvShape| Conv::biased(scope.sub(name), shape, shape.default_init());
        let half = channels / 2;
        Discriminator {
            first: conv("0", shape(channels, half, 1)),
            norm: BatchNorm::new(scope.sub("1"), half),
            last: conv("3", shape(half, 1, 2)),
        }
    }

    fn verdicts(&self, map: &Tensor) -> Tensor {
        let pass = Pass::train(0);
        let hidden = self.norm.forward(&self.first.forward(map, pass), pass).leaky_relu();
        self.last.forward(&hidden, pass).sigmoid()
    }
}

struct Afd {
    options: Options,
    archs: Vec<&'static Arch>,
    /// T_m: brings narrower maps to the width of the widest.
    transfers: Vec<Option<ConvBnRelu>>,
    transfer_params: Params,
    discriminators: Vec<Discriminator>,
    discriminator_params: Params,
    milestones: Vec<usize>,
    smoothing: f64,
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let options: Options = read_options(&SPEC, options)?;
    positive("temperature", options.temperature)?;
    positive("adam_lr", options.adam_lr)?;
    weights(&[("adam_weight_decay", options.adam_weight_decay)])?;
    at_least("afd", 2, task.archs.len(), "maps are told apart from those of another network")?;
    let width = task.archs.iter().map(|a| a.dim).max().expect("a cohort has networks");
    let scope = |name: &str| Scope::root(rng::derive(task.seed, name, 0), task.device, task.kind);
    let (transfer, discriminator) = (scope("afd transfer"), scope("afd discriminator"));
    let transfers = task.archs.iter().enumerate().map(|(m, arch)| {
        let shape = ConvShape::new(arch.dim, width, 3, 1);
        (arch.dim < width)
            .then(|| ConvBnRelu(ConvBn::new(transfer.sub(m).sub("conv"), transfer.sub(m).sub("bn"), shape, shape.default_init())))
    });
    Ok(Box::new(Afd {
        archs: task.archs.to_vec(),
        transfers: transfers.collect(),
        transfer_params: transfer.params(),
        discriminators: (0..task.archs.len()).map(|m| Discriminator::new(discriminator.sub(m), width)).collect(),
        discriminator_params: discriminator.params(),
        milestones: vec![task.epochs.div_ceil(4), task.epochs.div_ceil(2)],
        smoothing: task.label_smoothing,
        options,
    }))
}

/// What a discriminator minimises: verdicts of 1 on the other network's maps, of 0 on its own network's.
pub fn discriminator_loss(real: &Tensor, fake: &Tensor) -> Tensor {
    (real - 1.0).square().mean(None) + fake.square().mean(None)
}

/// What a network minimises: verdicts of 1 on its maps.
pub fn generator_loss(fake: &Tensor) -> Tensor {
    (fake - 1.0).square().mean(None)
}

impl Afd {
    /// T_m(G_m): the maps before pooling, of one width and, by averaging, of the smallest size.
    fn maps(&self, outs: &[Outputs]) -> Result<Vec<Tensor>> {
        let side = |d: usize| outs.iter().map(|o| o.pre_pool.size()[d]).min().expect("a cohort has networks");
        let (height, width) = (side(2), side(3));
        if height < 3 || width < 3 {
            return Err(Error::input(format!(
                "afd's discriminators need maps of 3 x 3 or more and the smallest here is {height} x {width}; set data.image_size higher"
            )));
        }
        let fit =
            |map: &Tensor| if map.size()[2..] == [height, width] { map.shallow_clone() } else { map.adaptive_avg_pool2d([height, width]) };
        Ok(outs
            .iter()
            .zip(&self.transfers)
            .map(|(o, t)| fit(&t.as_ref().map_or_else(|| o.pre_pool.shallow_clone(), |t| t.forward(&o.pre_pool, Pass::train(0)))))
            .collect())
    }
}

impl Method for Afd {
    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, _: Clock) -> Result<Terms> {
        let mut terms = Terms::default();
        task_rows(&mut terms, outs, &batch.labels, self.smoothing);
        mutual_rows(&mut terms, outs, &[], self.options.temperature);
        let maps = self.maps(outs)?;
        for (m, (map, judge)) in maps.iter().zip(&self.discriminators).enumerate() {
            let before = &maps[(m + maps.len() - 1) % maps.len()];
            terms.add_apart(ADVERSARIAL, m, "adversarial", 1.0, generator_loss(&judge.verdicts(map)));
            // Real and fake maps are normalised apart, each by its own batch.
            terms.add_for(m, "discriminator", 1.0, discriminator_loss(&judge.verdicts(&before.detach()), &judge.verdicts(&map.detach())));
        }
        Ok(terms)
    }

    /// The adversarial part needs much smaller steps than SGD's, hence its own gradient and Adam on the same feature extractors.
    fn groups(&self, cohort: &Cohort) -> Vec<Group> {
        let rule = Rule::Adam { betas: (0.9, 0.999), eps: 1e-8, weight_decay: self.options.adam_weight_decay };
        let rate = Rate::Steps { base: self.options.adam_lr, milestones: self.milestones.clone() };
        let mut extractors = Params { vars: cohort.params().vars, buffers: vec![] };
        extractors.vars.retain(|(name, _)| {
            !self.archs.iter().enumerate().any(|(m, arch)| name.starts_with(&format!("peer.{m}.net.{}.", arch.classifier)))
        });
        vec![
            Group {
                rate: rate.clone(),
                apart: true,
                ..Group::new(ADVERSARIAL, extractors.chain(&self.transfer_params.prefixed("transfer.")), rule)
            },
            Group { rate, ..Group::new("discriminator", self.discriminator_params.shallow_clone(), rule) },
        ]
    }
}
