//! A training step on a CUDA device that is not there (tests/cuda): how little it asks of the device, that it never waits for it, that its
//! numbers are the CPU's, and what is left of a step that was not finite.

mod cuda;
mod support;

use std::path::Path;
use std::process::{Command, Output};
use std::rc::Rc;
use std::sync::Arc;

use mcl::data::{Batch, Loader, Pixels, Raw, Resident, Split, Transform};
use mcl::error::Error;
use mcl::methods::{self, Clock, Task};
use mcl::nets;
use mcl::optim::{Optimizer, Rule};
use mcl::params::Params;
use mcl::recipe::{Recipe, Train};
use mcl::system::ranks::Ranks;
use mcl::train::step::Engine;
use rand::Rng as _;
use support::{SMALL, TRAIN, method_tests, recipe, text};
use tch::{Device, Kind, Tensor};

macro_rules! on_device {
    ($(#[$what:meta])* [$($variable:expr),*] fn $name:ident() $body:block) => {
        $(#[$what])*
        #[test]
        fn $name() {
            cuda::in_child(concat!(module_path!(), "::", stringify!($name)), &[$($variable),*], support::skip, || $body)
        }
    };
}

const CUDA: Device = Device::Cuda(0);

/// Two ResNet-8 and a method on four classes.
fn engine(device: Device, method: &str, options: &str, rule: Rule) -> Engine {
    engine_of("resnet8", 2, device, method, options, rule)
}

fn engine_of(arch: &str, networks: usize, device: Device, method: &str, options: &str, rule: Rule) -> Engine {
    tch::set_num_threads(1);
    let archs = vec![nets::find(arch).unwrap(); networks];
    let labels: Vec<i64> = (0..40).map(|i| i % 4).collect();
    let recipe = Recipe { train: Train { batch: 8, epochs: 2, seed: 7, ..Train::default() }, ..Recipe::default() };
    let task = Task { rule, ..Task::new(&recipe, &archs, 4, &labels, device) };
    let method = (methods::find(method).unwrap().build)(&task, options.parse().unwrap()).unwrap();
    Engine::of(&task, method)
}

/// Two images of each of four classes, other ones at every step.
fn batch(step: usize) -> Batch {
    let side = 16;
    // Noise: where all images look alike, embeddings do too, and the contrastive gradient is a small difference of large numbers.
    let mut rng = mcl::rng::stream(step as u64, "images", &[]);
    let noise: Vec<f32> = (0..8 * 3 * side * side).map(|_| rng.gen_range(-1.7..1.7)).collect();
    let (labels, index) = (Tensor::from_slice(&[0i64, 0, 1, 1, 2, 2, 3, 3]), Tensor::from_slice(&[0i64, 4, 1, 5, 2, 6, 3, 7]));
    let images = Tensor::from_slice(&noise).view([8, side, side, 3]).permute([0, 3, 1, 2]);
    Batch { views: vec![images], labels, index, noise: step as u64 }
}

/// No meta step: those may wait.
fn clock(step: usize) -> Clock {
    Clock { epoch: 0, batch: 1, step, lr: 0.01, seed: 7 }
}

fn step(engine: &mut Engine, number: usize, batch: &Batch, clip: Option<f64>) -> mcl::error::Result<()> {
    engine.step(&[batch.shallow_clone()], clock(number), clip).map(drop)
}

fn state(engine: &Engine) -> Vec<(String, Tensor)> {
    engine.state().into_iter().map(|(name, t)| (name, t.detach().to_device(Device::Cpu).copy())).collect()
}

const SGD: Rule = support::RULE;
const ADAMW: Rule = Rule::AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.05 };

/// Method and options of everything that remembers something between steps.
const REMEMBERING: [(&str, &str); 5] = [
    ("baseline", ""),
    ("l_mcl", ""),
    ("l_mcl", "mining = \"memory\"\nnegatives = 6"),
    ("l_mcl", "mining = \"queue\"\nnegatives = 6\nqueue_length = 16"),
    ("pcl", ""),
];

on_device! {
    /// The counts that the CHANGELOG gives: what a step of two ResNet-8 starts. Nothing is read, and the batch
    /// comes in one copy.
    []
    fn a_plain_step_asks_little_of_the_device_and_waits_for_nothing() {
        for (method, most) in [("l_mcl", 640), ("baseline", 160)] {
            let mut engine = engine(CUDA, method, "", SGD);
            let (batches, steps): (Vec<Batch>, usize) = ((0..16).map(|i| batch(i).pinned()).collect(), 8);
            (0..steps).for_each(|i| step(&mut engine, i, &batches[i], None).unwrap());
            let before = cuda::counts().unwrap();
            cuda::refuse_waits(true);
            let taken: Result<Vec<()>, _> = (steps..2 * steps).map(|i| step(&mut engine, i, &batches[i], None)).collect();
            cuda::refuse_waits(false);
            taken.unwrap();
            let counts = cuda::counts().unwrap().since(before);
            engine.confirm().unwrap();
            println!("{method}, {steps} steps: {counts:?}");
            assert_eq!((counts.reads, counts.waits), (0, 0), "{method}");
            assert_eq!(counts.to_device, steps as i64, "{method}: a batch is one copy");
            assert!(counts.to_host <= 2, "{method}: the flag comes home every four steps, and nothing else: {}", counts.to_host);
            assert!(counts.launches <= most * steps as i64, "{method}: {} launches a step", counts.launches as f64 / steps as f64);
        }
    }
}

/// An engine of a line of TRIALS on the device, begun, after so many steps of its second epoch: methods with phases have come to their last.
fn tried(name: &str, options: &str, networks: usize, device: Device, rule: Rule, steps: usize) -> Engine {
    tch::set_num_threads(1);
    let (archs, labels) = (method_tests::archs(&vec!["resnet8"; networks]), method_tests::labels());
    let task = Task { device, rule, ..method_tests::task(&archs, &labels, Kind::Float, 3) };
    let mut engine = Engine::of(&task, (methods::find(name).unwrap().build)(&task, options.parse().unwrap()).unwrap());
    for epoch in 0..2 {
        let mut held = method_tests::holdout().into_iter().map(|batch| Ok(batch?.to_device(device)));
        engine.epoch_start(Some(&mut held), Clock { epoch, ..clock(0) }).unwrap();
    }
    for i in 0..steps {
        let batch = method_tests::batch_for(&engine, i);
        step_tried(&mut engine, i, &batch).unwrap();
    }
    engine
}

/// A step of such an engine, in its second epoch.
fn step_tried(engine: &mut Engine, number: usize, batch: &Batch) -> mcl::error::Result<()> {
    engine.step(&[batch.shallow_clone()], Clock { epoch: 1, ..clock(number) }, None).map(drop)
}

/// The lines of TRIALS, with the smallest cohort of each. Every method has one: tests/every_method.rs holds that.
fn trials() -> impl Iterator<Item = (&'static str, &'static str, usize)> {
    method_tests::TRIALS.iter().map(|(name, options, sizes)| (*name, *options, sizes[0]))
}

on_device! {
    /// No method waits in a plain step. Beyond the batch, those that draw from a memory bring what they drew, and KDCL its teacher's weights.
    []
    fn no_method_waits_in_a_plain_step() {
        println!("| method | options | kernels | copies to the device | numbers read | waits |");
        println!("| --- | --- | --- | --- | --- | --- |");
        for (name, options, networks) in trials() {
            let mut engine = tried(name, options, networks, CUDA, SGD, 8);
            let batches: Vec<Batch> = (8..16).map(|i| method_tests::batch_for(&engine, i).pinned()).collect();
            let before = cuda::counts().unwrap();
            cuda::refuse_waits(true);
            let taken: Result<Vec<()>, _> = batches.iter().zip(8..).map(|(batch, i)| step_tried(&mut engine, i, batch)).collect();
            cuda::refuse_waits(false);
            taken.unwrap_or_else(|e| panic!("{name} {options}: {e}"));
            let counts = cuda::counts().unwrap().since(before);
            engine.confirm().unwrap();
            let each = |n: i64| n as f64 / batches.len() as f64;
            println!(
                "| {name} | {} | {:.0} | {:.2} | {} | {} |",
                options.replace('\n', " "),
                each(counts.launches),
                each(counts.to_device),
                counts.reads,
                counts.waits
            );
            assert_eq!((counts.reads, counts.waits), (0, 0), "{name} {options}");
            let brings = options.contains("mining") || name == "kdcl";
            assert!(brings || counts.to_device == batches.len() as i64, "{name} {options}: {} copies", counts.to_device);
        }
    }
}

on_device! {
    /// Masks of shifted windows are made once; what drop-path drops comes in one copy a pass.
    []
    fn a_step_of_swin_waits_for_nothing_either() {
        let mut engine = engine_of("swin_t", 1, CUDA, "baseline", "", ADAMW);
        engine.cohort.drop_path = true;
        // Maps of two windows a side in the first stage.
        let images = |i: usize| Tensor::rand([2, 56, 56, 3], (Kind::Float, Device::Cpu)).permute([0, 3, 1, 2]) + i as f64;
        let labels = || Tensor::from_slice(&[0i64, 1]);
        let batches: Vec<Batch> =
            (0..3).map(|i| Batch { views: vec![images(i)], labels: labels(), index: labels(), noise: i as u64 }.pinned()).collect();
        (0..2).for_each(|i| step(&mut engine, i, &batches[i], None).unwrap());
        let before = cuda::counts().unwrap();
        cuda::refuse_waits(true);
        let taken = step(&mut engine, 2, &batches[2], None);
        cuda::refuse_waits(false);
        taken.unwrap();
        let counts = cuda::counts().unwrap().since(before);
        engine.confirm().unwrap();
        println!("swin_t: {counts:?}");
        assert_eq!((counts.to_device, counts.to_host, counts.reads, counts.waits), (2, 0, 0, 0), "the batch, and what is dropped");
    }
}

on_device! {
    [("FAKE_CUDA_LATE", "1")]
    fn steps_are_the_cpus() {
        let sets = REMEMBERING.map(|(method, options)| (method, options, SGD, None)).into_iter();
        let more = [("l_mcl", "", SGD, Some(0.5)), ("afd", "", SGD, None)];
        for (method, options, rule, clip) in sets.chain(more) {
            let make = |device: Device| engine(device, method, options, rule);
            let (mut cpu, mut cuda, mut nudged) = (make(Device::Cpu), make(CUDA), [make(Device::Cpu), make(Device::Cpu)]);
            let (mut worst, mut allowed) = ((0f64, String::new()), 0f64);
            for i in 0..4 {
                // From the same state each time: what rounding does to one step is the question, not what it becomes over several.
                let from = cpu.state();
                let follow = |other: &Engine| {
                    tch::no_grad(|| from.iter().zip(other.state()).for_each(|((_, from), (_, mut to))| to.copy_(from)));
                };
                nudged.iter().chain([&cuda]).for_each(follow);
                step(&mut cuda, i, &batch(i).pinned(), clip).unwrap();
                cuda.confirm().unwrap();
                // What the CPU itself makes of weights that are two roundings off: a unit of a ReLU may fall on the other side.
                for (other, by) in nudged.iter_mut().zip([1.0 + 2f64.powi(-22), 1.0 - 2f64.powi(-22)]) {
                    tch::no_grad(|| other.theta.tensors().iter_mut().for_each(|t| drop(t.g_mul_scalar_(by))));
                    step(other, i, &batch(i), clip).unwrap();
                }
                step(&mut cpu, i, &batch(i), clip).unwrap();
                let want = state(&cpu);
                allowed = nudged.iter().map(|other| difference(&want, &state(other)).0).fold(allowed, f64::max);
                let found = difference(&want, &state(&cuda));
                worst = if found.0 > worst.0 { found } else { worst };
            }
            let (worst, at) = worst;
            println!("{method} {options:?} {rule:?} clip {clip:?}: largest difference {worst:.1e}, in {at}; of a rounding {allowed:.1e}");
            assert!(worst < 2e-5 + 3.0 * allowed, "{method} {options}: {worst} in {at}; two roundings of the weights give {allowed}");
        }
    }
}

/// A list as networks have it: weights of convolutions, also of 1 x 1, matrices and vectors; and gradients for five steps.
fn variables(device: Device) -> (Params, Vec<Vec<Tensor>>) {
    let mut rng = mcl::rng::stream(3, "variables", &[]);
    let mut draw = |shape: &[i64]| {
        let values: Vec<f32> = (0..shape.iter().product::<i64>()).map(|_| rng.gen_range(-1.0..1.0)).collect();
        Tensor::from_slice(&values).view(shape).to_device(device)
    };
    let shapes: [&[i64]; 4] = [&[4, 3, 3, 3], &[5, 4, 1, 1], &[6, 5], &[7]];
    let turned = |t: Tensor| if t.dim() == 4 { t.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]) } else { t };
    let vars = shapes.iter().map(|shape| (format!("v{}", shape.len() + shape[0] as usize), turned(draw(shape)))).collect();
    let mut gradients: Vec<Vec<Tensor>> = (0..5).map(|_| shapes.iter().map(|shape| draw(shape)).collect()).collect();
    // Every second one in the layout of the variables.
    gradients.iter_mut().step_by(2).flatten().for_each(|t| *t = turned(t.shallow_clone()));
    (Params { vars, buffers: vec![] }, gradients)
}

on_device! {
    []
    fn fused_rules_are_the_cpus() {
        let (betas, eps) = ((0.9, 0.999), 1e-8);
        let sgd = |momentum: f64, weight_decay: f64, nesterov: bool| Rule::Sgd { momentum, weight_decay, nesterov };
        let adams = [Rule::Adam { betas, eps, weight_decay: 0.1 }, Rule::AdamW { betas, eps, weight_decay: 0.1 }];
        for rule in [sgd(0.0, 0.0, false), sgd(0.0, 0.1, false), sgd(0.9, 0.1, false), sgd(0.9, 0.1, true)].into_iter().chain(adams) {
            let run = |device: Device| {
                let (params, gradients) = variables(device);
                let mut optimizer = Optimizer::new(rule, &params);
                gradients.iter().for_each(|gradient| optimizer.step(&params, gradient, 0.05));
                let all = params.vars.into_iter().chain(optimizer.state());
                all.map(|(name, t)| (name, t.to_device(Device::Cpu))).collect::<Vec<_>>()
            };
            let (worst, at) = difference(&run(Device::Cpu), &run(CUDA));
            println!("{rule:?}: largest difference {worst:.1e} in {at}");
            assert!(worst < 2e-6, "{rule:?}: {worst} in {at}");
        }
    }
}

/// The largest difference of two states as a part of the largest number of its tensor, and which tensor that is.
fn difference(want: &[(String, Tensor)], got: &[(String, Tensor)]) -> (f64, String) {
    let mut worst = (0f64, String::new());
    for ((name, want), (other, got)) in want.iter().zip(got) {
        assert_eq!((name, want.size(), want.kind()), (other, got.size(), got.kind()));
        let (want, got) = (want.to_kind(Kind::Double), got.to_kind(Kind::Double));
        let size = want.abs().max().double_value(&[]).max(1e-3);
        let error = (&want - &got).abs().max().double_value(&[]) / size;
        if error > worst.0 {
            worst = (error, name.clone());
        }
    }
    worst
}

/// A split of bytes and its transform, with everything that a device can do to an image.
fn small_set() -> (Split, Transform) {
    let side = 12;
    let data: Vec<u8> = (0..20 * side * side * 3).map(|i| (i * 37 % 251) as u8).collect();
    let split = Split::new(Pixels::Memory(Arc::new(Raw { height: side, width: side, data })), (0..20).map(|i| i % 4).collect());
    // Not all of the set, and not in its order.
    let split = split.subset(&(0..16).map(|i| 19 - i).collect::<Vec<_>>());
    (split, Transform { erase: 0.7, ..Transform::pad_crop(side, [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]) })
}

on_device! {
    /// Crop, flip, erasing and normalisation on the device, from the draws of the host: every number is the CPU's, to the bit.
    [("FAKE_CUDA_LATE", "1")]
    fn a_set_on_the_device_gives_the_batches_of_the_host() {
        let (split, transform) = small_set();
        let resident = Rc::new(Resident::wanted(None, &split, &transform, CUDA).unwrap().expect("a small set fits"));
        let order: Vec<Vec<u32>> = vec![vec![3, 1, 4, 15, 9, 2], vec![6, 5, 8, 0, 7, 10], vec![11, 12, 13]];
        let host = Loader::new(&split, order.clone(), transform.clone(), 2, 5, 1, 0);
        let of = |resident| Loader::of_rank(&split, order.clone(), transform.clone(), 2, 5, 1, 0, Ranks::ALONE, CUDA, resident);
        for mut there in [of(Some(resident)), of(None)] {
            let host = Loader::new(&split, order.clone(), transform.clone(), 2, 5, 1, 0);
            for want in host {
                let want = want.unwrap();
                let before = cuda::counts().unwrap();
                let got = there.next_on(CUDA).unwrap().unwrap();
                let counts = cuda::counts().unwrap().since(before);
                assert_eq!((counts.to_device, counts.to_host, counts.waits), (1, 0, 0), "one copy brings a batch");
                assert_eq!((&got.labels, &got.index, got.batch.noise), (&want.labels, &want.index, want.noise));
                assert_eq!(got.batch.labels.to_device(Device::Cpu), want.labels);
                assert_eq!(got.batch.index.to_device(Device::Cpu), want.index);
                assert_eq!(got.batch.views.len(), 2);
                for (got, want) in got.batch.views.iter().zip(&want.views) {
                    assert_eq!(got.stride(), want.stride());
                    assert_eq!(&got.to_device(Device::Cpu), want);
                }
            }
            assert!(there.next_on(CUDA).is_none());
        }
        assert_eq!(host.count(), 3);
    }
}

#[test]
fn a_set_that_cannot_live_on_a_device_is_refused_if_it_is_asked_to() {
    let (split, transform) = small_set();
    let random = Transform::random_resized(12, [0.5; 3], [0.2; 3]);
    // Asking needs no device: what cannot be is seen before anything is copied.
    let refused = Resident::wanted(Some(true), &split, &random, CUDA).err().expect("images are resized one by one").to_string();
    assert!(refused.contains("data.on_device = true") && refused.contains("\"auto\""), "{refused}");
    assert!(Resident::wanted(None, &split, &random, CUDA).unwrap().is_none());
    assert!(Resident::wanted(Some(false), &split, &transform, CUDA).unwrap().is_none());
    assert!(Resident::wanted(Some(true), &split, &transform, Device::Cpu).unwrap().is_none(), "the CPU's memory is the host's");
}

/// `mcl-train run` on the device.
fn train(library: &Path, folder: &Path, out: &str, more: &[&str]) -> Output {
    let mut command = Command::new(TRAIN);
    let (recipe, out) = (recipe(folder, SMALL), folder.join(out));
    command.arg("run").arg(recipe).arg("--out").arg(out).args(["--threads", "1", "--quiet", "--device", "cuda:0"]).args(more);
    cuda::preload(&mut command, library).output().unwrap()
}

#[test]
fn a_run_is_the_same_wherever_its_images_live() {
    let library = match cuda::library() {
        Ok(library) => library,
        Err(why) => return support::skip(&why),
    };
    let folder = tempfile::tempdir().unwrap();
    let states = ["true", "false"].map(|on_device| {
        let set = format!("data.on_device={on_device}");
        let output = train(&library, folder.path(), on_device, &["--set", "train.epochs=1", "--set", &set]);
        assert!(output.status.success(), "{}", text(&output));
        std::fs::read(folder.path().join(on_device).join("checkpoints/last/state.safetensors")).unwrap()
    });
    assert!(states[0] == states[1], "the runs ended in different states");
    // A run may go on with its images elsewhere.
    let resumed = train(&library, folder.path(), "true", &["--set", "train.epochs=1", "--set", "data.on_device=false", "--resume"]);
    assert!(resumed.status.success(), "{}", text(&resumed));
}

#[test]
fn a_run_that_diverges_on_the_device_ends_as_on_the_cpu() {
    let library = match cuda::library() {
        Ok(library) => library,
        Err(why) => return support::skip(&why),
    };
    let folder = tempfile::tempdir().unwrap();
    let output = train(&library, folder.path(), "out", &["--set", "train.lr=1e30", "--set", "method.name=baseline"]);
    support::assert_refused(&output, 1, &["step 1", "network 0", "no weight was changed by this step", "diverged-step-1.safetensors"]);
    let kept = Tensor::read_safetensors(folder.path().join("out/diverged-step-1.safetensors")).unwrap();
    assert!(kept.iter().any(|(name, t)| name == "batch.0.view.0" && t.dim() == 4));
}

/// Steps 0 to 2 are good, step 3 has a NaN in its images. Everything is then as after step 2, to the bit, however many steps were asked for
/// before the host heard of it.
fn a_nan_leaves_the_step_before(device: Device) {
    let queue = ("l_mcl", "mining = \"queue\"\nnegatives = 6\nqueue_length = 16", 2); // turns round in these steps
    for ((method, options, networks), rule) in trials().chain([queue]).flat_map(|trial| [(trial, SGD), (trial, ADAMW)]) {
        if rule == ADAMW && method != "l_mcl" {
            continue; // one method is enough to see the other moments
        }
        let mut engine = tried(method, options, networks, device, rule, 3);
        engine.confirm().unwrap();
        let before = state(&engine);
        let good: Vec<Batch> = (0..24).map(|i| method_tests::batch_for(&engine, i)).collect();
        let bad = method_tests::batch_for(&engine, 3);
        let _ = bad.views[0].get(5).get(0).get(0).get(0).fill_(f64::NAN);
        let mut told = step_tried(&mut engine, 3, &bad).err().map(|e| (3, e));
        for i in 4..24 {
            told = told.or_else(|| step_tried(&mut engine, i, &good[i]).err().map(|e| (i, e)));
        }
        let (when, error) = told.unwrap_or_else(|| panic!("{method} {options}: nobody heard of it"));
        let Error::Diverged { step: 3, what } = &error else { panic!("{method} {options}: {error}") };
        assert!(what.starts_with("the term `task` of network 0 is NaN"), "{what}");
        assert!(if device.is_cuda() { (4..14).contains(&when) } else { when == 3 }, "heard at step {when}");
        let kept = &engine.faulty_batches()[0].views[0];
        assert!(kept.isnan().any().int64_value(&[]) != 0, "the batch that is kept is another one");
        for ((name, old), (_, new)) in before.iter().zip(state(&engine)) {
            assert!(old == &new, "{method} {options}: {name} is not as before the step");
        }
    }
}

#[test]
fn a_nan_on_the_cpu_leaves_the_step_before() {
    a_nan_leaves_the_step_before(Device::Cpu);
}

on_device! {
    [("FAKE_CUDA_LATE", "1")]
    fn a_nan_on_the_device_leaves_the_step_before() {
        a_nan_leaves_the_step_before(CUDA);
    }
}

on_device! {
    []
    fn a_graph_made_before_a_step_is_refused_after_it() {
        let mut engine = engine(CUDA, "baseline", "", SGD);
        let there = batch(0).to_device(CUDA);
        let outs = engine.cohort.forward(&there, nets::layers::Mode::Train);
        let loss = outs[0].logit().square().sum(None);
        step(&mut engine, 0, &batch(0), None).unwrap();
        let vars = engine.theta.tensors();
        let stale = Tensor::f_run_backward(&[&loss], &vars, false, false);
        let message = stale.expect_err("the weights have moved since").to_string();
        assert!(message.contains("modified by an inplace operation"), "{message}");
    }
}
