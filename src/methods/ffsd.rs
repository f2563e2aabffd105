//! FFSD: Distilling a Powerful Student Model via Online Knowledge Distillation (feature fusion and self-distillation), Li et al.,
//! TNNLS 2022. Students learn from each other and to look elsewhere than the student before them; a module fuses their maps; a
//! leader, one more network of the same architecture, learns from the fusion and is what is kept. Formulas follow the official code.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{
    Clock, Frozen, Group, Method, MethodSpec, Needs, Rate, Reported, Task, at_least, map_shapes, mutual_rows, one_architecture, positive,
    read_options, resolved, task_rows, weights,
};
use crate::cohort::{Cohort, Peer};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::losses::logit;
use crate::losses::terms::Terms;
use crate::losses::unit::{Norm, lengths};
use crate::nets::Outputs;
use crate::nets::layers::{BatchNorm, Chain, ConvBn, ConvBnRelu, ConvShape, Layer, Linear, Pass, pool};
use crate::optim::{Rule, schedule::ramp};
use crate::params::{Init, Params, Scope};
use crate::rng;

pub(super) const SPEC: MethodSpec = MethodSpec {
    name: "ffsd",
    about: "Feature Fusion and Self-Distillation (Li et al. 2022)",
    needs: "independent networks of one architecture, M >= 2, and a leader it adds; ships the leader",
    reported: Reported::First,
    frozen: Frozen::Refused("its leader learns from the peers' feature maps, which are fused while they learn"),
    presets: &[],
    build,
};

/// Epochs over which the weights of the feature losses grow, counted from 1.
const WARMUP: usize = 5;

#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    temperature: f64,
    /// Of the students' diversity and self-distillation.
    lambda_div: f64,
    /// Of what the leader takes from the fused maps.
    lambda_fus: f64,
    /// Of the decoders' reconstruction.
    lambda_sd: f64,
    fusion_weight_decay: f64,
    /// Of the decoders' Adam; the rate is divided by 10 at half and at three quarters of the run.
    decoder_lr: f64,
    decoder_weight_decay: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            temperature: 2.0,
            lambda_div: 1e-5,
            lambda_fus: 10.0,
            lambda_sd: 1000.0,
            fusion_weight_decay: 1e-5,
            decoder_lr: 1e-3,
            decoder_weight_decay: 1e-4,
        }
    }
}

/// One step up: twice the size, half the channels.
struct Upscale {
    weight: Tensor,
    norm: BatchNorm,
}

impl Upscale {
    fn new(scope: Scope, c_in: i64) -> Upscale {
        let c_out = c_in / 2;
        // torch's default for transposed convolutions counts the fan of the output channels.
        let weight = scope.sub("convtranpose").var("weight", &[c_in, c_out, 3, 3], Init::Uniform(1.0 / (9.0 * c_out as f64).sqrt()));
        Upscale { weight, norm: BatchNorm::new(scope.sub("norm"), c_out) }
    }
}

impl Layer for Upscale {
    fn forward(&self, xs: &Tensor, pass: Pass) -> Tensor {
        let ys = xs.conv_transpose2d(&self.weight, None::<&Tensor>, [2, 2], [1, 1], [1, 1], 1, [1, 1]);
        self.norm.forward(&ys, pass).relu_()
    }
}

/// SD: from a last-stage map back to what earlier stages might have shown.
struct Decoder(Vec<Upscale>);

impl Decoder {
    /// In the order of the stages.
    fn forward(&self, map: &Tensor, pass: Pass) -> Vec<Tensor> {
        let mut maps: Vec<Tensor> = vec![];
        for layer in &self.0 {
            maps.push(layer.forward(maps.last().unwrap_or(map), pass));
        }
        maps.reverse();
        maps
    }
}

struct Ffsd {
    options: Options,
    students: usize,
    /// The stages whose maps are used: these, and the last one or the map that is pooled.
    earlier: std::ops::Range<usize>,
    pooled: bool,
    /// F: from the students' concatenated maps to one map, and its classifier.
    fusion: Chain,
    classifier: Linear,
    fusion_params: Params,
    /// T: from the leader's map to as many channels as the students have together.
    transform: Chain,
    transform_params: Params,
    /// Of students 1 .. M, then of the leader.
    decoders: Vec<Decoder>,
    decoder_params: Params,
    rule: Rule,
    milestones: Vec<usize>,
    smoothing: f64,
}

/// Depthwise 3 x 3, then 1 x 1, each with normalisation and ReLU.
fn separable(scope: &Scope, c_in: i64, c_out: i64, init: fn(ConvShape) -> Init) -> Chain {
    let layer = |i: usize, shape: ConvShape| -> Box<dyn Layer> {
        Box::new(ConvBnRelu(ConvBn::new(scope.sub(3 * i), scope.sub(3 * i + 1), shape, init(shape))))
    };
    Chain(vec![layer(0, ConvShape::depthwise(c_in, 3, 1)), layer(1, ConvShape::new(c_in, c_out, 1, 1))])
}

fn build(task: &Task, options: toml::Table) -> Result<Box<dyn Method>> {
    let options: Options = read_options(&SPEC, options)?;
    positive("temperature", options.temperature)?;
    positive("decoder_lr", options.decoder_lr)?;
    let Options { lambda_div, lambda_fus, lambda_sd, fusion_weight_decay, decoder_weight_decay, .. } = options;
    weights(&[
        ("lambda_div", lambda_div),
        ("lambda_fus", lambda_fus),
        ("lambda_sd", lambda_sd),
        ("fusion_weight_decay", fusion_weight_decay),
        ("decoder_weight_decay", decoder_weight_decay),
    ])?;
    at_least("ffsd", 2, task.archs.len(), "the maps of several students are fused")?;
    one_architecture("ffsd", task.archs, "their maps are compared stage by stage, and the leader is one more of them")?;
    let arch = task.archs[0];
    let shapes = map_shapes(arch);
    let (head, pre_pool) = (arch.depth - 1, shapes[arch.depth]);
    // The normalised map (WRN) rather than the raw one, but not one that a neck has widened (ShuffleNetV2).
    let pooled = pre_pool == shapes[head];
    let mut first = head;
    while first > 0 && shapes[first - 1][0] * 2 == shapes[first][0] && shapes[first - 1][1] == 2 * shapes[first][1] {
        first -= 1;
    }
    if first == head {
        return Err(Error::input(format!(
            "ffsd's decoders double a map and halve its channels from stage to stage, and {} goes from {:?} to {:?} (channels, height, width); ResNets, WRNs and ShuffleNetV2 fit",
            arch.name,
            shapes[head - 1],
            shapes[head]
        )));
    }
    let (students, channels) = (task.archs.len(), shapes[head][0]);
    let all = channels * students as i64;
    let scope = |name: &str| Scope::root(rng::derive(task.seed, name, 0), task.device, task.kind);
    let (fusion_scope, transform_scope, decoder_scope) = (scope("ffsd fusion"), scope("ffsd transform"), scope("ffsd decoders"));
    // As the official code starts them: over k^2 c_out, in depthwise convolutions too.
    let fan_out: fn(ConvShape) -> Init = |s| Init::Normal((2.0 / (s.kernel * s.kernel * s.c_out) as f64).sqrt());
    let fusion = separable(&fusion_scope.sub("fuse"), all, channels, fan_out);
    let classifier = Linear::new(fusion_scope.sub("fc"), channels, task.classes);
    let transform = separable(&transform_scope, channels, all, ConvShape::fan_out_init);
    let decoders = (1..=students)
        .map(|m| Decoder((0..head - first).map(|i| Upscale::new(decoder_scope.sub(m).sub(format!("layer{i}")), channels >> i)).collect()));
    Ok(Box::new(Ffsd {
        options,
        students,
        earlier: first..head,
        pooled,
        fusion,
        classifier,
        fusion_params: fusion_scope.params(),
        transform,
        transform_params: transform_scope.params(),
        decoders: decoders.collect(),
        decoder_params: decoder_scope.params(),
        rule: task.rule,
        milestones: vec![task.epochs.div_ceil(2), (3 * task.epochs).div_ceil(4)],
        smoothing: task.label_smoothing,
    }))
}

/// Where a map looks: the mean of squares over its channels. [B, C, H, W] -> [B, H W].
pub fn attention(map: &Tensor) -> Tensor {
    map.square().mean_dim(1i64, false, None).flatten(1, -1)
}

fn unit(rows: &Tensor) -> Tensor {
    Norm::Guarded.apply(rows)
}

/// d: the mean squared difference of rows brought to length 1. Both [B, K]; detach what is a target.
pub fn difference(x: &Tensor, y: &Tensor) -> Tensor {
    (unit(x) - unit(y)).square().mean(None)
}

/// Where to look instead of `y` [B, K]: its lowest third stays, what is above gets the complement to its length. As in the official
/// code the length is that of the raw row while the row is normalised: lambda_div is made for that scale.
pub fn opposite(y: &Tensor) -> Tensor {
    let (rows, half) = (unit(y), lengths(y) / 2.0);
    let (lowest, _) = rows.topk(rows.size()[1] / 3, 1, false, true);
    let threshold = lowest.slice(1, -1, i64::MAX, 1);
    (&half - &rows) * (&rows - threshold).sign() + half
}

/// div: how far `x` is from looking elsewhere than `y`. Both [B, K].
pub fn diversity(x: &Tensor, y: &Tensor) -> Tensor {
    (unit(x) - opposite(&y.detach())).square().mean(None)
}

/// A map changed so that its attention moves to the opposite one.
fn shifted(map: &Tensor) -> Tensor {
    let size = map.size();
    let rows = attention(map);
    let moved = (opposite(&rows) - unit(&rows)) * lengths(&rows) / size[1] as f64;
    map + moved.view([size[0], 1, size[2], size[3]])
}

impl Ffsd {
    fn last<'a>(&self, outs: &'a Outputs) -> &'a Tensor {
        if self.pooled { &outs.pre_pool } else { outs.maps.last().expect("a network has stages") }
    }

    /// Sum over earlier stages of d between a network's attention and that of what its decoder makes of `map`: a constant target,
    /// decoded with running statistics.
    fn imitation(&self, decoder: &Decoder, map: &Tensor, outs: &Outputs) -> Result<Tensor> {
        let targets = {
            let _guard = tch::no_grad_guard();
            decoder.forward(map, Pass::EVAL)
        };
        let mut sum: Option<Tensor> = None;
        for (own, target) in outs.maps[self.earlier.clone()].iter().zip(&targets) {
            if own.size() != target.size() {
                return Err(Error::input(format!(
                    "ffsd decodes a map of {:?} where the network has {:?}: images must be of a side that halves evenly from stage to stage; set data.image_size",
                    target.size(),
                    own.size()
                )));
            }
            let row = difference(&attention(own), &attention(target));
            sum = Some(sum.map_or(row.shallow_clone(), |sum| sum + row));
        }
        Ok(sum.expect("there are earlier stages"))
    }

    /// What trains a decoder: maps and attention of its own network, from that network's last map, all constants.
    fn reconstruction(&self, decoder: &Decoder, outs: &Outputs) -> Tensor {
        let decoded = decoder.forward(&self.last(outs).detach(), Pass::train(0));
        let rows = decoded.iter().zip(&outs.maps[self.earlier.clone()]).map(|(made, own)| {
            let own = own.detach();
            difference(&made.flatten(1, -1), &own.flatten(1, -1)) + difference(&attention(made), &attention(&own))
        });
        rows.reduce(|sum, row| sum + row).expect("there are earlier stages")
    }
}

impl Method for Ffsd {
    fn needs(&self) -> Needs {
        Needs { extra_peers: 1, ..Needs::default() }
    }

    fn options(&self) -> toml::Table {
        resolved(&self.options)
    }

    fn losses(&self, outs: &[Outputs], batch: &Batch, clock: Clock) -> Result<Terms> {
        let Options { temperature, lambda_div, lambda_fus, lambda_sd, .. } = self.options;
        let warm = ramp(clock.epoch + 1, WARMUP);
        let (leader_at, students) = (self.students, &outs[..self.students]);
        let leader = &outs[leader_at];
        let mut terms = Terms::default();
        task_rows(&mut terms, outs, &batch.labels, self.smoothing);
        mutual_rows(&mut terms, students, &[], temperature);
        for (m, pair) in students.windows(2).enumerate().map(|(i, pair)| (i + 1, pair)) {
            let before = self.last(&pair[0]).detach();
            terms.add_for(m, "diversity", lambda_div * warm, diversity(&attention(self.last(&pair[1])), &attention(&before)));
            terms.add_for(m, "self_distillation", lambda_div * warm, self.imitation(&self.decoders[m - 1], &shifted(&before), &pair[1])?);
        }

        let maps = Tensor::cat(&students.iter().map(|o| self.last(o).detach()).collect::<Vec<_>>(), 1);
        let fused = self.fusion.forward(&maps, Pass::train(0));
        let logits = self.classifier.forward(&pool(&fused), Pass::train(0));
        let mean = logit::mean(&students.iter().map(|o| o.logit().detach()).collect::<Vec<_>>());
        terms.add("task_fusion", 1.0, logit::smooth_ce(&logits, &batch.labels, self.smoothing));
        terms.add("ens", 1.0, logit::kl(&mean, &logits, temperature));

        let fused = fused.detach();
        let own = self.last(leader);
        let transformed = self.transform.forward(own, Pass::train(0));
        terms.add_for(leader_at, "leader", 1.0, logit::kl(&logits, leader.logit(), temperature));
        let feature = difference(&attention(own), &attention(&fused)) + difference(&attention(&transformed), &attention(&maps));
        let decoder = self.decoders.last().expect("the leader has a decoder");
        terms.add_for(leader_at, "fusion", lambda_fus * warm, feature + self.imitation(decoder, &fused, leader)?);

        for (m, decoder) in self.decoders.iter().enumerate() {
            terms.add_for(m + 1, "decoder", lambda_sd * warm, self.reconstruction(decoder, &outs[m + 1]));
        }
        Ok(terms)
    }

    fn groups(&self, _: &Cohort) -> Vec<Group> {
        let fusion_rule = match self.rule {
            Rule::Sgd { momentum, nesterov, .. } => Rule::Sgd { momentum, nesterov, weight_decay: self.options.fusion_weight_decay },
            Rule::Adam { betas, eps, .. } => Rule::Adam { betas, eps, weight_decay: self.options.fusion_weight_decay },
            Rule::AdamW { betas, eps, .. } => Rule::AdamW { betas, eps, weight_decay: self.options.fusion_weight_decay },
        };
        let decoder_rule = Rule::Adam { betas: (0.9, 0.999), eps: 1e-8, weight_decay: self.options.decoder_weight_decay };
        let rate = Rate::Steps { base: self.options.decoder_lr, milestones: self.milestones.clone() };
        vec![
            Group::new("fusion", self.fusion_params.shallow_clone(), fusion_rule),
            Group::new("transform", self.transform_params.shallow_clone(), self.rule),
            Group { rate, ..Group::new("decoders", self.decoder_params.shallow_clone(), decoder_rule) },
        ]
    }

    fn shipped<'a>(&'a self, cohort: &'a Cohort) -> Vec<&'a Peer> {
        cohort.peers[self.students..].iter().collect()
    }
}
