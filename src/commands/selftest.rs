//! `mcl-eval selftest`: does this build, on this device, compute the right thing? The whole objective and its gradients against golden
//! files in both modes and precisions, and the hypergradient against finite differences. A device other than the CPU is compared with it,
//! from single layers to training.

mod against_cpu;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use clap::Args;
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::losses::contrast::{self, BankLayout, Contrast, Pairs, SoftTerms, Targets};
use crate::losses::logit;
use crate::losses::unit::Norm;
use crate::methods::l_mcl::{LMcl, Mode, Options, Setting, Shape};
use crate::methods::parts::meta_network::MetaNetwork;
use crate::methods::{Clock, Method};
use crate::nets::Outputs;
use crate::optim::reverse_hg::{Adjoint, Buffers, Constants, Hvp, Unroll, hypergradient};
use crate::optim::{Rule, grads};
use crate::params::{Init, Params, Scope};
use crate::system::progress::Progress;
use crate::system::ranks::Ranks;

/// Golden files of the package, made by tests/golden/make.py.
const SHIPPED: &[(&str, &[u8])] = &[
    ("objective_m2_l3_b6", include_bytes!("../../tests/golden/objective_m2_l3_b6.safetensors")),
    ("objective_m3_l2_b8", include_bytes!("../../tests/golden/objective_m3_l2_b8.safetensors")),
    ("objective_m2_l1_b2", include_bytes!("../../tests/golden/objective_m2_l1_b2.safetensors")),
];

const F32_TOLERANCE: f64 = 1e-5;
const F64_TOLERANCE: f64 = 1e-10;
const HYPERGRADIENT_TOLERANCE: f64 = 1e-6;

/// Check that this build computes the objective, its gradients and the hypergradient right
#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// Folder of golden files (*.safetensors) instead of the built-in ones
    #[arg(long, value_name = "DIR")]
    pub fixtures: Option<PathBuf>,
}

/// One comparison: the largest difference over the largest expected value.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// The golden file, `hypergradient`, or what of a device was compared with the CPU.
    pub source: String,
    /// `paper` or `reference`, or `cpu` where that is what a device is compared with.
    pub mode: String,
    /// `f32`, `f64`, `bf16` or `f16`.
    pub precision: &'static str,
    /// What was compared: a term of the objective, a gradient, lambda.
    pub term: String,
    /// The largest difference over the largest expected value.
    pub error: f64,
    /// The error that is still accepted.
    pub tolerance: f64,
}

impl Check {
    /// Is it within its tolerance?
    pub fn passed(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// Prints the largest error by term; fails when one is above its tolerance.
pub fn run(args: &SelftestArgs, common: &Common) -> Result<()> {
    let device = format!("{:?}", common.device);
    let progress = common.progress("checking the objective", 0, "parts");
    let checks = all_watched(args.fixtures.as_deref(), common.device, &progress)?;
    drop(progress);
    let bad: Vec<&Check> = checks.iter().filter(|c| !c.passed()).collect();
    if common.json {
        println!("{}", serde_json::json!({ "device": device, "passed": bad.is_empty(), "checks": checks }));
    } else {
        // One row a term: the largest error over all files, by mode and precision.
        let mut rows: BTreeMap<&str, BTreeMap<String, f64>> = BTreeMap::new();
        for c in &checks {
            let worst = rows.entry(&c.term).or_default().entry(format!("{} {}", c.mode, c.precision)).or_default();
            *worst = worst.max(c.error);
        }
        for (term, errors) in &rows {
            let cells: Vec<String> = errors.iter().map(|(column, error)| format!("{column} {error:.0e}")).collect();
            println!("{term:<32} {}", cells.join("   "));
        }
        let allowed =
            format!("{F32_TOLERANCE:.0e} in f32, {F64_TOLERANCE:.0e} in f64, {HYPERGRADIENT_TOLERANCE:.0e} for the hypergradient");
        for c in &bad {
            println!(
                "deviates: {} of {} ({}, {}): {:.1e}, accepted up to {:.0e}",
                c.term, c.source, c.mode, c.precision, c.error, c.tolerance
            );
        }
        println!("{} of {} checks within tolerance ({allowed})", checks.len() - bad.len(), checks.len());
    }
    match bad.first() {
        None => Ok(()),
        Some(worst) => Err(Error::failed(format!(
            "{} of {} checks are above their tolerance on {}, first: {} of {} ({}, {}) is off by {:.1e}; this build or device does not compute the objective right",
            bad.len(),
            checks.len(),
            device,
            worst.term,
            worst.source,
            worst.mode,
            worst.precision,
            worst.error
        ))),
    }
}

/// Every check, from the files of `fixtures` or the built-in ones.
pub fn all(fixtures: Option<&Path>, device: Device) -> Result<Vec<Check>> {
    all_watched(fixtures, device, &Progress::new(true, "", 0, ""))
}

fn all_watched(fixtures: Option<&Path>, device: Device, progress: &Progress) -> Result<Vec<Check>> {
    let files: Vec<(String, Golden)> = match fixtures {
        None => SHIPPED.iter().map(|(name, bytes)| Ok((name.to_string(), Golden::read(Path::new(name), bytes)?))).collect::<Result<_>>()?,
        Some(dir) => read_folder(dir)?,
    };
    // MPS has no f64.
    let kinds: &[(Kind, &str, f64)] = if device == Device::Mps {
        &[(Kind::Float, "f32", F32_TOLERANCE)]
    } else {
        &[(Kind::Float, "f32", F32_TOLERANCE), (Kind::Double, "f64", F64_TOLERANCE)]
    };
    let modes = [(Mode::Paper, "paper"), (Mode::Reference, "reference")];
    let hypergradients: &[(f64, f64, f64)] =
        if device == Device::Mps { &[] } else { &[(0.0, 0.0, 0.0), (0.0, 0.9, 5e-3), (1.0, 0.0, 0.0), (1.0, 0.9, 5e-3)] };
    progress.expect(files.len() * modes.len() * kinds.len() + hypergradients.len() + usize::from(device != Device::Cpu));
    let mut checks = vec![];
    for (source, golden) in &files {
        for (mode, mode_name) in modes {
            for &(kind, precision, tolerance) in kinds {
                for (term, error) in golden.errors(mode, mode_name, kind, device)? {
                    checks.push(Check { source: source.clone(), mode: mode_name.into(), precision, term, error, tolerance });
                }
                progress.add(1);
            }
        }
    }
    for &(beta, momentum, weight_decay) in hypergradients {
        let error = hypergradient_error(device, beta, momentum, weight_decay)?;
        let term = format!("d pi, beta={beta} mu={momentum} wd={weight_decay}");
        checks.push(Check {
            source: "hypergradient".into(),
            mode: "paper".into(),
            precision: "f64",
            term,
            error,
            tolerance: HYPERGRADIENT_TOLERANCE,
        });
        progress.add(1);
    }
    if device != Device::Cpu {
        checks.extend(against_cpu::checks(device)?);
        progress.add(1);
    }
    Ok(checks)
}

fn read_folder(dir: &Path) -> Result<Vec<(String, Golden)>> {
    let entries = std::fs::read_dir(dir).map_err(Error::open(dir))?;
    let mut paths: Vec<PathBuf> = vec![];
    for entry in entries {
        paths.push(entry.map_err(Error::open(dir))?.path());
    }
    paths.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    if paths.is_empty() {
        return Err(Error::file(dir, "holds no golden file (*.safetensors)"));
    }
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path).map_err(Error::open(&path))?;
        Ok((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), Golden::read(&path, &bytes)?))
    };
    paths.into_iter().map(read).collect()
}

/// A golden file: inputs, weights and expected values by name, and its sizes.
struct Golden {
    path: PathBuf,
    tensors: HashMap<String, Tensor>,
    numbers: HashMap<String, f64>,
}

impl Golden {
    fn read(path: &Path, bytes: &[u8]) -> Result<Golden> {
        let broken = |e: safetensors::SafeTensorError| Error::file(path, format!("is no safetensors file: {e}"));
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
        let file = SafeTensors::deserialize(bytes).map_err(broken)?;
        let numbers = header.metadata().iter().flatten().filter_map(|(k, v)| Some((k.clone(), v.parse().ok()?))).collect();
        let mut tensors = HashMap::new();
        for (name, view) in file.tensors() {
            let kind = match view.dtype() {
                Dtype::F32 => Kind::Float,
                Dtype::F64 => Kind::Double,
                Dtype::I64 => Kind::Int64,
                other => return Err(Error::file(path, format!("`{name}` is {other:?}; accepted: F32, F64, I64"))),
            };
            let size: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            tensors.insert(name, Tensor::f_from_data_size(view.data(), &size, kind)?);
        }
        Ok(Golden { path: path.to_path_buf(), tensors, numbers })
    }

    fn get(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| Error::file(&self.path, format!("has no tensor `{name}`")))
    }

    fn number(&self, name: &str) -> Result<f64> {
        self.numbers.get(name).copied().ok_or_else(|| Error::file(&self.path, format!("has no number `{name}` in its metadata")))
    }

    /// Largest relative error by term.
    fn errors(&self, mode: Mode, mode_name: &str, kind: Kind, device: Device) -> Result<BTreeMap<String, f64>> {
        let (networks, stages) = (self.number("M")? as usize, self.number("L")? as usize);
        let input = |name: String| -> Result<Tensor> { Ok(self.get(&name)?.to_device(device).to_kind(kind)) };
        let leaf = |name: String| -> Result<Tensor> { Ok(input(name)?.set_requires_grad(true)) };
        let mut outs = vec![];
        for m in 0..networks {
            let feats = (0..stages).map(|l| leaf(format!("feats.{m}.{l}"))).collect::<Result<Vec<_>>>()?;
            let logits = (0..stages).map(|l| leaf(format!("logits.{m}.{l}"))).collect::<Result<Vec<_>>>()?;
            outs.push(Outputs { maps: vec![], pre_pool: Tensor::zeros([0], (kind, device)), feats, logits });
        }
        let labels = self.get("labels")?.to_device(device);
        let options = Options {
            mode,
            alpha: Some(self.number("alpha")?),
            beta: self.number("beta")?,
            tau: self.number("tau")?,
            temperature: self.number("T")?,
            dim: self.number("d")? as i64,
            ..Options::default()
        };
        let tau = self.number("tau")?;
        let method = self.method(options, &outs, kind, device)?;
        let batch = Batch { views: vec![], index: labels.shallow_clone(), labels, noise: 0 };
        let terms = method.losses(&outs, &batch, Clock { epoch: 0, batch: 0, step: 0, lr: 0.1, seed: 0 })?;

        let mut errors = BTreeMap::new();
        let mut compare = |term: &str, actual: &Tensor, expected: &str| -> Result<()> {
            let error = relative(actual, self.get(expected)?);
            let worst: &mut f64 = errors.entry(term.to_string()).or_default();
            *worst = worst.max(error);
            Ok(())
        };
        let named = |name: &str| {
            Tensor::stack(&terms.rows.iter().filter(|r| r.name == name).map(|r| r.value.view([1])).collect::<Vec<_>>(), 0).sum(None)
        };
        for name in ["task", "task_gate"] {
            compare(name, &named(name), &format!("expected.{name}"))?;
        }
        if mode == Mode::Paper {
            compare("ens", &named("ens"), "expected.ens")?;
        }
        for name in ["vcl", "icl", "soft_vcl", "soft_icl"] {
            compare(name, &named(name), &format!("expected.{mode_name}.l_mcl.{name}"))?;
        }
        compare("total", &terms.total(), &format!("expected.{mode_name}.total"))?;
        for ((a, b, k, z), lambda) in method.lambdas(&outs) {
            compare("lambda", &lambda, &format!("expected.{mode_name}.lambda.{a}.{b}.{k}.{z}"))?;
        }
        let leaves =
            |pick: fn(&Outputs) -> &Vec<Tensor>| outs.iter().flat_map(|o| pick(o).iter().map(Tensor::shallow_clone)).collect::<Vec<_>>();
        for (what, inputs) in [("feats", leaves(|o| &o.feats)), ("logits", leaves(|o| &o.logits))] {
            let gradient = Tensor::run_backward(&[terms.total()], &inputs, true, false);
            for (i, g) in gradient.iter().enumerate() {
                let (m, l) = (i / stages, i % stages);
                compare(&format!("gradient of {what}"), g, &format!("expected.{mode_name}.grad.{what}.{m}.{l}"))?;
            }
        }

        let embeds = method.embed(&outs);
        let last: Vec<&Tensor> = (0..networks).map(|m| &embeds[(m + 1) * stages - 1]).collect();
        let soft_terms = if mode == Mode::Paper { SoftTerms::PAPER } else { SoftTerms::RELEASED };
        let contrast = Contrast::in_batch(&batch.labels, tau, kind);
        let (all, pairs) = (Tensor::stack(&last, 0), Pairs::of_networks(last.len(), last[0]));
        for (name, value) in contrast::mcl(&all, &pairs, &contrast, soft_terms).named() {
            compare(&format!("mcl {name}"), value, &format!("expected.{mode_name}.mcl.{name}"))?;
        }
        if mode == Mode::Paper {
            // One unordered pair counts twice in the loss; the file has it once.
            let two = Tensor::stack(&last[..2], 0);
            let pairs = Pairs::new(vec![(0, 1)], 2, &two);
            let ones = Tensor::ones([1, two.size()[1]], (kind, device));
            let banks = [input("bank.0".into())?, input("bank.1".into())?];
            let (memory, _) = contrast::l_mcl_memory(&two, &[0, 1], &pairs, &ones, &banks, tau, soft_terms, BankLayout::Paper, None);
            for (name, value) in memory.named() {
                compare(&format!("memory {name}"), &(value / 2.0), &format!("expected.paper.memory.{name}"))?;
            }
        }
        Ok(errors)
    }

    /// The method with the file's weights.
    fn method(&self, options: Options, outs: &[Outputs], kind: Kind, device: Device) -> Result<LMcl> {
        let mode = options.mode;
        let shapes: Vec<Shape> = outs.iter().map(|o| Shape { stages: o.feats.len(), width: o.feat().size()[1] }).collect();
        let labels = Vec::<i64>::try_from(self.get("labels")?)?;
        let rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };
        let setting =
            Setting { shapes: &shapes, train_labels: &labels, batch: labels.len(), rule, device, kind, seed: 0, ranks: Ranks::ALONE };
        let method = LMcl::new(options, &setting)?;
        let _guard = tch::no_grad_guard();
        let write = |var: Option<&Tensor>, name: String| -> Result<()> {
            let (Some(var), value) = (var, self.get(&name)?) else { return Ok(()) };
            if var.size() != value.size() {
                return Err(Error::file(&self.path, format!("`{name}` is {:?}, expected {:?}", value.size(), var.size())));
            }
            var.shallow_clone().copy_(&value.to_device(device));
            Ok(())
        };
        let places: Vec<(usize, usize)> = shapes.iter().enumerate().flat_map(|(m, s)| (0..s.stages).map(move |l| (m, l))).collect();
        for (head, (m, l)) in method.heads.iter().zip(&places) {
            for (layer, n) in [(&head.first, 1), (&head.second, 2)] {
                write(Some(&layer.weight), format!("head.{m}.{l}.w{n}"))?;
                write(layer.bias.as_ref(), format!("head.{m}.{l}.b{n}"))?;
            }
        }
        for (m, gate) in method.gates.iter().enumerate() {
            for (layer, n) in [(&gate.first, 1), (&gate.second, 2)] {
                write(Some(&layer.weight), format!("gate.{m}.w{n}"))?;
                write(layer.bias.as_ref(), format!("gate.{m}.b{n}"))?;
            }
        }
        let meta = method.meta.as_ref().expect("weighted matching has a meta-network");
        for (xi, (m, l)) in meta.projections.iter().zip(&places) {
            let which = if mode == Mode::Paper { "xi_v" } else { "xi_f" };
            write(Some(&xi.weight), format!("{which}.{m}.{l}.w"))?;
            if let Some(bias) = &xi.bias {
                write(Some(bias), format!("{which}.{m}.{l}.b"))?;
            }
        }
        Ok(method)
    }
}

/// The largest difference over the largest expected value; the difference itself where zeros are expected.
fn relative(actual: &Tensor, expected: &Tensor) -> f64 {
    let actual = actual.detach().to_device(Device::Cpu).to_kind(Kind::Double).view_as(expected);
    let (difference, largest) = ((actual - expected).abs().max().double_value(&[]), expected.abs().max().double_value(&[]));
    let error = if largest == 0.0 { difference } else { difference / largest };
    // A NaN is an error of any size; `max` would pass over it.
    if error.is_nan() { f64::INFINITY } else { error }
}

/// A cohort without kinks: two networks of tanh layers with two stages each, heads and classifiers, and a meta-network, in f64.
struct Smooth {
    theta: Params,
    pi: Params,
    meta: MetaNetwork,
    pairs: Pairs,
    images: Tensor,
    labels: Tensor,
    beta: f64,
    /// The soft targets remembered for each inner step.
    targets: Vec<Option<Targets>>,
}

impl Smooth {
    fn new(device: Device, beta: f64) -> Smooth {
        let scope = Scope::root(3, device, Kind::Double);
        for (m, (name, rows, cols)) in (0..2).flat_map(|m| SMOOTH_LAYERS.iter().map(move |l| (m, *l))) {
            let _ = scope.sub(m).var(name, &[rows, cols], Init::Normal(1.2 / (rows as f64).sqrt()));
        }
        let pi_scope = Scope::root(4, device, Kind::Double);
        let meta = MetaNetwork::on_embeddings((0..4).map(|i| pi_scope.sub(i)).collect(), 3, Norm::Guarded);
        let place = (Kind::Double, device);
        // Near the identity: a projection that nearly vanishes would make lambda too curved for finite differences.
        tch::no_grad(|| meta.projections.iter().for_each(|xi| drop(xi.weight.shallow_clone().g_add_(&Tensor::eye(3, place)))));
        let pairs = Pairs::new(vec![(0, 2), (0, 3), (1, 2), (1, 3)], 4, &Tensor::zeros([0], place));
        let images = (Tensor::arange(30, place) * 1.7 + 0.3).sin().view([6, 5]);
        let labels = Tensor::from_slice(&[0i64, 0, 1, 1, 2, 2]).to_device(device);
        Smooth { theta: scope.params(), pi: pi_scope.params(), meta, pairs, images, labels, beta, targets: (0..2).map(|_| None).collect() }
    }

    /// Embeddings 4 x [6, 3] and logits 4 x [6, 3].
    fn forward(&self) -> (Vec<Tensor>, Vec<Tensor>) {
        let var = |m: usize, name: &str| -> &Tensor {
            let full = format!("{m}.{name}");
            &self.theta.vars.iter().find(|(n, _)| *n == full).expect("a layer of the list").1
        };
        let (mut embeds, mut logits) = (vec![], vec![]);
        for m in 0..2 {
            let stage = self.images.matmul(var(m, "stage1")).tanh();
            for (l, next) in ["branch", "stage2"].into_iter().enumerate() {
                let feat = stage.matmul(var(m, next)).tanh();
                logits.push(feat.matmul(var(m, &format!("classifier{l}"))));
                embeds.push(Norm::Guarded.apply(&feat.matmul(var(m, &format!("in{l}"))).tanh().matmul(var(m, &format!("out{l}")))));
            }
        }
        (embeds, logits)
    }

    /// Two steps of L_MCL (0, 1), then the task (2 and the outer 3).
    fn objective(&mut self, k: usize, constants: Constants) -> Tensor {
        let (embeds, logits) = self.forward();
        if k >= 2 {
            return logit::task(&logits, &self.labels, 0.0);
        }
        let lambda = self.meta.lambda(&embeds, &self.pairs);
        let contrast = Contrast::in_batch(&self.labels, 0.5, Kind::Double);
        let fixed = if constants == Constants::Remembered { self.targets[k].as_ref() } else { None };
        let (parts, targets) = contrast::l_mcl(&Tensor::stack(&embeds, 0), &self.pairs, &lambda, &contrast, SoftTerms::PAPER, fixed);
        if constants == Constants::Fresh {
            self.targets[k] = Some(targets);
        }
        (parts.vcl + parts.icl) * 0.1 + (parts.soft_vcl + parts.soft_icl) * self.beta
    }

    /// The outer objective after the unroll, by hand, with soft targets as remembered.
    fn outer(&mut self, lr: f64, momentum: f64, weight_decay: f64) -> f64 {
        let start = self.theta.snapshot();
        let vars = self.theta.tensors();
        let mut velocity: Vec<Tensor> = vars.iter().map(Tensor::zeros_like).collect();
        for k in 0..3 {
            let gradient = grads(&self.objective(k, Constants::Remembered), &vars, false);
            let _guard = tch::no_grad_guard();
            for ((var, v), g) in vars.iter().zip(&mut velocity).zip(gradient) {
                *v = &*v * momentum + g + var * weight_decay;
                let _ = var.shallow_clone().g_sub_(&(&*v * lr));
            }
        }
        let value = self.objective(3, Constants::Remembered).double_value(&[]);
        self.theta.restore(&start);
        value
    }
}

/// Layers of one network of `Smooth`: name, rows, columns.
const SMOOTH_LAYERS: [(&str, i64, i64); 9] = [
    ("stage1", 5, 4),
    ("branch", 4, 4),
    ("stage2", 4, 4),
    ("classifier0", 4, 3),
    ("classifier1", 4, 3),
    ("in0", 4, 3),
    ("in1", 4, 3),
    ("out0", 3, 3),
    ("out1", 3, 3),
];

/// The relative error of the hypergradient (exact products) against finite differences, on a small smooth cohort in f64: two steps on
/// L_MCL, one on the task. The soft targets of each inner step stay those of the unperturbed unroll, as they are constants in the
/// hypergradient: without that, finite differences would see them move with pi.
pub fn hypergradient_error(device: Device, beta: f64, momentum: f64, weight_decay: f64) -> Result<f64> {
    let lr = 0.05;
    let mut cohort = Smooth::new(device, beta);
    let (theta, pi) = (cohort.theta.shallow_clone(), cohort.pi.tensors());
    let unroll = Unroll {
        steps: 3,
        lr,
        momentum,
        weight_decay,
        hvp: Hvp::Exact,
        adjoint: Adjoint::Exact,
        buffers: Buffers::Restored,
        ranks: Ranks::ALONE,
    };
    let gradient = hypergradient(&theta, &pi, unroll, &mut |k, how| Ok(cohort.objective(k, how)))?;
    let start = cohort.pi.snapshot();
    let (mut worst, mut largest) = (0f64, 0f64);
    for probe in 0..6 {
        // A direction through all of pi; six of them, none along an axis.
        let direction = |i: usize, var: &Tensor| (var.ones_like().cumsum(0, None).cumsum(1, None) * (1.3 + probe as f64) + i as f64).sin();
        let along: Vec<Tensor> = tch::no_grad(|| pi.iter().enumerate().map(|(i, var)| direction(i, var)).collect());
        let mut at = |shift: f64| {
            cohort.pi.restore(&start);
            tch::no_grad(|| pi.iter().zip(&along).for_each(|(var, d)| drop(var.shallow_clone().g_add_(&(d * shift)))));
            cohort.outer(lr, momentum, weight_decay)
        };
        // Fourth order, so that a step large enough for rounding is small enough for the series.
        let h = 2e-4;
        let slope = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
        let exact: f64 = gradient.iter().zip(&along).map(|(g, d)| (g * d).sum(None).double_value(&[])).sum();
        worst = worst.max((slope - exact).abs());
        largest = largest.max(slope.abs());
    }
    cohort.pi.restore(&start);
    Ok(worst / largest)
}
