//! Every method: steps on the device against the CPU's, meta steps, half the bits, and a state that is saved and restored.

use mcl::cohort::FrozenPeer;
use mcl::data::{Batch, Mix};
use mcl::error::{Error, Result};
use mcl::methods::{self, Frozen, METHODS, Task, Views};
use mcl::nets::{LossScale, Network};
use mcl::system::device::Precision;
use mcl::train::step::{Engine, StepReport};
use tch::{Device, Kind, Tensor};

use crate::support::method_tests::{TRIALS, archs, batch_for, clock, holdout, labels, task};
use crate::{apart, cuda, long, support};

const GPU: Device = Device::Cuda(0);
/// In f64 the device and the CPU differ by the order of sums alone.
const F64: f64 = 1e-8;
/// Loss in half the bits, device against CPU: the two round other operators.
const HALF: [(Precision, f64); 2] = [(Precision::Bf16, 0.05), (Precision::F16, 0.02)];

fn engine(name: &str, options: &str, nets: &[&str], device: Device, kind: Kind, seed: u64) -> Result<Engine> {
    tch::set_num_threads(1);
    let (archs, labels) = (archs(nets), labels());
    let task = Task { device, kind, ..task(&archs, &labels, kind, seed) };
    let method = (methods::find(name)?.build)(&task, options.parse().unwrap())?;
    Ok(Engine::of(&task, method))
}

fn place(batch: &Batch, device: Device, kind: Kind) -> Batch {
    Batch { views: batch.views.iter().map(|v| v.to_kind(kind).to_device(device)).collect(), ..batch.to_device(device) }
}

/// The beginning of an epoch, with held-out images.
fn begin(engine: &mut Engine, epoch: usize, at: usize, device: Device, kind: Kind) {
    let mut held = holdout().into_iter().map(|b| Ok(place(&b?, device, kind)));
    engine.epoch_start(Some(&mut held), clock(epoch, at)).unwrap();
}

fn step(engine: &mut Engine, at: usize, device: Device, kind: Kind) -> StepReport {
    let batch = place(&batch_for(engine, at), device, kind);
    engine.step(&[batch], clock(0, at), None).unwrap()
}

/// Everything a checkpoint would hold, as it is now, on the CPU.
fn saved(engine: &Engine) -> Vec<(String, Tensor)> {
    engine.state().into_iter().map(|(name, t)| (name, t.detach().to_device(Device::Cpu).copy())).collect()
}

fn restore(engine: &Engine, state: &[(String, Tensor)]) {
    let live = engine.state();
    assert_eq!(live.len(), state.len());
    tch::no_grad(|| {
        live.iter().zip(state).for_each(|((name, t), (saved, value))| {
            assert_eq!(name, saved);
            t.shallow_clone().copy_(value);
        })
    });
}

/// The largest difference between two states, and the tensor it is in.
fn states_apart(got: &[(String, Tensor)], wanted: &[(String, Tensor)]) -> (f64, String) {
    let differences = got.iter().zip(wanted).map(|((name, got), (_, wanted))| (apart(got, wanted), name.clone()));
    differences.fold((0.0, String::new()), |worst, next| if next.0 > worst.0 { next } else { worst })
}

fn same_bits(got: &[(String, Tensor)], wanted: &[(String, Tensor)]) -> Option<String> {
    got.iter().zip(wanted).find(|((_, a), (_, b))| a.isclose(b, 0.0, 0.0, true).all().int64_value(&[]) == 0).map(|((n, _), _)| n.clone())
}

fn total(report: &StepReport) -> f64 {
    report.terms.iter().map(|t| t.weight * t.value.double_value(&[])).sum()
}

/// Step (two of them, from the second batch on), then the first batch of an epoch, where l_mcl has its meta step; on both devices.
fn compared(name: &str, options: &str, nets: &[&str]) -> (f64, Option<f64>) {
    let what = || format!("{name} {options} {nets:?}");
    let of = |device| engine(name, options, nets, device, Kind::Double, 3).unwrap();
    let (mut here, mut there) = (of(Device::Cpu), of(GPU));
    begin(&mut here, 0, 0, Device::Cpu, Kind::Double);
    begin(&mut there, 0, 0, GPU, Kind::Double);
    let mut worst = 0f64;
    let mut meta = None;
    for at in [1, 2, 0] {
        let (a, b) = (step(&mut here, at, Device::Cpu, Kind::Double), step(&mut there, at, GPU, Kind::Double));
        assert_eq!(a.terms.len(), b.terms.len(), "{}", what());
        for (x, y) in a.terms.iter().zip(&b.terms) {
            assert!(x.name == y.name && y.value.device() == GPU, "{}: {} is not on the device", what(), y.name);
            let (x_value, y_value) = (x.value.double_value(&[]), y.value.double_value(&[]));
            assert!(
                (x_value - y_value).abs() <= F64 * x_value.abs().max(1.0),
                "{} at {at}: {} is {y_value}, not {x_value}",
                what(),
                x.name
            );
        }
        let (error, tensor) = states_apart(&saved(&there), &saved(&here));
        assert!(error <= F64, "{} after batch {at}: `{tensor}` is apart by {error:e}", what());
        match a.meta_seconds {
            Some(_) => meta = Some(error),
            None => worst = worst.max(error),
        }
    }
    (worst, meta)
}

/// A state after two steps, restored into an engine of another seed on the device: the next step is the same to the bit. And restored on
/// the CPU: it is near; how near is returned.
fn resumed(name: &str, options: &str, nets: &[&str]) -> f64 {
    let mut whole = engine(name, options, nets, GPU, Kind::Float, 3).unwrap();
    begin(&mut whole, 0, 0, GPU, Kind::Float);
    step(&mut whole, 0, GPU, Kind::Float);
    step(&mut whole, 1, GPU, Kind::Float);
    let state = saved(&whole);
    let mut other = engine(name, options, nets, GPU, Kind::Float, 4).unwrap();
    restore(&other, &state);
    step(&mut whole, 2, GPU, Kind::Float);
    step(&mut other, 2, GPU, Kind::Float);
    let differs = same_bits(&saved(&other), &saved(&whole));
    assert_eq!(differs, None, "{name} {options}: resumed on the device, a tensor has other bits");
    let mut here = engine(name, options, nets, Device::Cpu, Kind::Float, 5).unwrap();
    restore(&here, &state);
    let (on_cpu, on_gpu) = (step(&mut here, 2, Device::Cpu, Kind::Float), {
        restore(&other, &state);
        step(&mut other, 2, GPU, Kind::Float)
    });
    let (a, b) = (total(&on_cpu), total(&on_gpu));
    let error = (a - b).abs() / a.abs();
    assert!(error <= 1e-4, "{name} {options}: a state of the device gives {b} there and {a} on the CPU");
    error
}

/// One step in half the bits: the loss against the CPU's in as many, and the direction against the device's in f32.
fn half(name: &str, options: &str, nets: &[&str], precision: Precision, near: f64) -> f64 {
    let one = |device: Device, precision: Precision| {
        let mut engine = engine(name, options, nets, device, Kind::Float, 3).unwrap();
        begin(&mut engine, 0, 0, device, Kind::Float);
        engine.cohort.precision = precision;
        // Small enough that nothing overflows at once.
        engine.loss_scale = (precision == Precision::F16).then(|| LossScale { state: Tensor::from_slice(&[128f64, 0.0]) });
        let flat = |e: &Engine| {
            Tensor::cat(&e.theta.tensors().iter().map(|t| t.detach().to_device(Device::Cpu).flatten(0, -1).copy()).collect::<Vec<_>>(), 0)
        };
        let before = flat(&engine);
        let report = step(&mut engine, 1, device, Kind::Float);
        assert!(report.grad_norm.is_some(), "{name} {precision:?}: skipped");
        (flat(&engine) - before, total(&report))
    };
    let ((whole, _), (moved, loss), (_, wanted)) = (one(GPU, Precision::F32), one(GPU, precision), one(Device::Cpu, precision));
    let cosine = ((&moved * &whole).sum(None) / (moved.norm() * whole.norm())).double_value(&[]);
    assert!(cosine > 0.9, "{name} {precision:?}: the step's cosine with f32's is {cosine}");
    let error = (loss - wanted).abs() / wanted.abs();
    assert!(error < near, "{name} {precision:?}: loss {loss}, {wanted} on the CPU");
    error
}

on_device! {
    /// Every method of the registry, every line of TRIALS.
    [("FAKE_CUDA_TF32", "1")]
    fn every_method_steps_as_on_the_cpu() {
        mcl::system::gpu::set(false, true);
        println!("| method | options | networks | step | meta step |");
        println!("| --- | --- | --- | --- | --- |");
        for spec in METHODS {
            let trials: Vec<_> = TRIALS.iter().filter(|(name, ..)| *name == spec.name).collect();
            assert!(!trials.is_empty(), "method {} has no trial: add a line to TRIALS in tests/support/method_tests.rs", spec.name);
            for (name, options, sizes) in trials {
                for &count in *sizes {
                    let (worst, meta) = compared(name, options, &vec!["resnet8"; count]);
                    let meta = meta.map_or("none".to_string(), |error| format!("{error:.0e}"));
                    println!("| {name} | {} | {count} x resnet8 | {worst:.0e} | {meta} |", options.replace('\n', " "));
                }
            }
        }
    }
}

on_device! {
    /// Two architectures in a cohort, where a method takes that; what it refuses, it refuses as on the CPU.
    fn cohorts_of_two_architectures_step_as_on_the_cpu() {
        let pair = ["resnet8", "wrn_16_2"];
        for spec in METHODS {
            let options = TRIALS.iter().find(|t| t.0 == spec.name).unwrap().1;
            match engine(spec.name, options, &pair, GPU, Kind::Double, 3) {
                Ok(_) => {
                    let (worst, _) = compared(spec.name, options, &pair);
                    println!("| {} | {} | resnet8, wrn_16_2 | {worst:.0e} | |", spec.name, options.replace('\n', " "));
                }
                Err(e) => {
                    assert_eq!(e.exit_code(), 2, "{e}");
                    println!("| {} | refuses two architectures, or fewer than three networks | | | |", spec.name);
                }
            }
        }
        for hvp in ["exact", "difference"] {
            let options = format!("hvp = '{hvp}'");
            let (worst, meta) = compared("l_mcl", &options, &pair);
            println!("| l_mcl | {options} | resnet8, wrn_16_2 | {worst:.0e} | {:.0e} |", meta.expect("l_mcl has a meta step"));
        }
    }
}

on_device! {
    /// What a checkpoint holds is all a method needs, on the device as on the CPU.
    fn every_method_resumes_on_the_device_to_the_bit() {
        for spec in METHODS {
            for (name, options, sizes) in TRIALS.iter().filter(|t| t.0 == spec.name) {
                let error = resumed(name, options, &vec!["resnet8"; sizes[0]]);
                println!("| {name} | {} | resumed to the bit | and on the CPU {error:.0e} |", options.replace('\n', " "));
            }
        }
    }
}

on_device! {
    /// bf16 and f16.
    fn every_method_steps_in_half_the_bits() {
        println!("| method | loss in bf16 | loss in f16 |");
        for spec in METHODS {
            let (name, options, sizes) = TRIALS.iter().find(|t| t.0 == spec.name).unwrap();
            let [bf16, f16] = HALF.map(|(precision, near)| half(name, options, &vec!["resnet8"; sizes[0]], precision, near));
            println!("| {name} | {bf16:.0e} | {f16:.0e} |");
        }
    }
}

on_device! {
    /// Gradients of two batches, bounded; a loss that is not finite; and an overflow of f16.
    fn accumulation_clipping_and_divergence_are_as_on_the_cpu() {
        let run = |device: Device| {
            let mut engine = engine("l_mcl", "", &["resnet8", "resnet8"], device, Kind::Double, 3).unwrap();
            let batches = [1, 2].map(|at| place(&batch_for(&engine, at), device, Kind::Double));
            let report = engine.step(&batches, clock(0, 1), Some(0.5)).unwrap();
            (saved(&engine), report.grad_norm.unwrap().double_value(&[]))
        };
        let ((here, norm), (there, other)) = (run(Device::Cpu), run(GPU));
        assert!(norm > 0.5, "nothing was clipped: {norm}");
        assert!((norm - other).abs() < F64 * norm, "{norm} {other}");
        let (error, tensor) = states_apart(&there, &here);
        assert!(error <= F64, "`{tensor}` is apart by {error:e}");
        println!("| l_mcl | two batches, clipped | 2 x resnet8 | {error:.0e} | |");

        let mut engine = engine("baseline", "", &["resnet8", "resnet8"], GPU, Kind::Float, 3).unwrap();
        step(&mut engine, 1, GPU, Kind::Float);
        let (_, weight) = engine.theta.vars.iter().find(|(n, _)| n == "peer.1.net.fc.weight").unwrap();
        let _ = tch::no_grad(|| weight.get(0).get(0).fill_(f64::NAN));
        let weights = |e: &Engine| saved(e).into_iter().filter(|(n, _)| !n.contains("running") && !n.contains("tracked")).collect::<Vec<_>>();
        let before = weights(&engine);
        let batch = place(&batch_for(&engine, 2), GPU, Kind::Float);
        // The device skips the step on its own; the host hears of it when it asks.
        match engine.step(&[batch], clock(0, 2), None).and_then(|_| engine.confirm()) {
            Err(Error::Diverged { step: 2, what }) => {
                assert_eq!(what, "the term `task` of network 1 is NaN; no weight was changed by this step")
            }
            other => panic!("expected a divergence, got {other:?}"),
        }
        assert_eq!(same_bits(&weights(&engine), &before), None, "a weight moved");

        let mut engine = self::engine("baseline", "", &["resnet8", "resnet8"], GPU, Kind::Float, 3).unwrap();
        engine.cohort.precision = Precision::F16;
        engine.loss_scale = Some(LossScale { state: Tensor::from_slice(&[1e30f64, 7.0]) });
        let before = weights(&engine).into_iter().filter(|(n, _)| n != "loss_scale").collect::<Vec<_>>();
        let report = step(&mut engine, 1, GPU, Kind::Float);
        assert!(report.grad_norm.is_none() && total(&report).is_finite());
        let after = weights(&engine).into_iter().filter(|(n, _)| n != "loss_scale").collect::<Vec<_>>();
        assert_eq!(same_bits(&after, &before), None, "an overflow moved a weight");
        assert_eq!(engine.loss_scale.as_ref().unwrap().scale(), 5e29);
    }
}

/// Methods that networks teach in which do not learn, with options that let them. Every such method of the registry has a line.
const TAUGHT: &[(&str, &str)] =
    &[("dml", ""), ("kdcl", ""), ("kdcl", "teacher = 'linear'"), ("mcl", "logit = 'dml'"), ("mcl", "logit = 'ensemble'"), ("l_mcl", "")];

/// Two ResNet-8 and two that teach them: the same images, and images normalised otherwise.
fn taught(name: &str, options: &str, device: Device, kind: Kind) -> Engine {
    let (archs, labels) = (archs(&["resnet8", "resnet8"]), labels());
    let task = Task { device, kind, frozen: 2, ..task(&archs, &labels, kind, 3) };
    let mut engine = Engine::of(&task, (methods::find(name).unwrap().build)(&task, options.parse().unwrap()).unwrap());
    let by_channel = |values: [f64; 3]| Tensor::from_slice(&values).view([1, 3, 1, 1]).to_kind(kind).to_device(device);
    for (arch, input) in [("wrn_16_2", None), ("vgg8", Some((by_channel([1.1, 0.9, 1.2]), by_channel([0.1, -0.2, 0.0]))))] {
        let arch = mcl::nets::find(arch).unwrap();
        let (net, params) = Network::build(arch, 4, 9, device, kind);
        engine.cohort.frozen.push(FrozenPeer { arch, net, params, input });
    }
    engine
}

on_device! {
    /// Networks of `[cohort] frozen`: what they teach is what they teach on the CPU, they stay as they are, and nothing waits for them.
    fn networks_that_do_not_learn_teach_as_on_the_cpu() {
        tch::set_num_threads(1);
        for spec in METHODS.iter().filter(|spec| matches!(spec.frozen, Frozen::Teach(_))) {
            assert!(TAUGHT.iter().any(|(name, _)| *name == spec.name), "{}: add a line to TAUGHT in tests/device/methods.rs", spec.name);
        }
        for (name, options) in TAUGHT {
            let run = |device: Device, precision: Precision, steps: std::ops::Range<usize>| {
                let mut engine = taught(name, options, device, Kind::Float);
                engine.cohort.precision = precision;
                begin(&mut engine, 0, 0, device, Kind::Float);
                let teachers = || engine.cohort.frozen.iter().flat_map(|f| f.params.named()).map(|(n, t)| (n, t.to_device(Device::Cpu).copy()));
                let before: Vec<_> = teachers().collect();
                let mut losses = vec![];
                for at in steps {
                    let views = if engine.method.needs().views == Views::PerPeer { 4 } else { 1 };
                    let batch = crate::support::method_tests::batch(at, views);
                    losses.push(total(&engine.step(&[batch.to_device(device)], clock(0, at), None).unwrap()));
                }
                engine.confirm().unwrap();
                let teachers = engine.cohort.frozen.iter().flat_map(|f| f.params.named()).map(|(n, t)| (n, t.to_device(Device::Cpu)));
                assert_eq!(same_bits(&teachers.collect::<Vec<_>>(), &before), None, "{name} {options}: a teacher learnt");
                (losses, engine)
            };
            // The first batch of an epoch has l_mcl's meta step.
            let ((here, _), (there, mut engine)) = (run(Device::Cpu, Precision::F32, 0..3), run(GPU, Precision::F32, 0..3));
            let error = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
            let apart = error(&here[..1], &there[..1]);
            assert!(apart < 1e-5, "{name} {options}: {there:?}, on the CPU {here:?}");
            assert!(error(&here, &there) < 1e-2, "{name} {options}: {there:?}, on the CPU {here:?}");
            let half = HALF.map(|(precision, near)| {
                let ((here, _), (there, _)) = (run(Device::Cpu, precision, 1..2), run(GPU, precision, 1..2));
                let apart = error(&here, &there);
                assert!(apart < near, "{name} {options} {precision:?}: {there:?}, on the CPU {here:?}");
                apart
            });
            println!("| {name} | {} | two frozen teachers | {apart:.0e} | bf16 {:.0e}, f16 {:.0e} |", options.replace('\n', " "), half[0], half[1]);
            let views = if engine.method.needs().views == Views::PerPeer { 4 } else { 1 };
            let batch = crate::support::method_tests::batch(3, views).pinned();
            cuda::refuse_waits(true);
            let taken = engine.step(&[batch], clock(0, 3), None);
            cuda::refuse_waits(false);
            taken.unwrap_or_else(|e| panic!("{name} {options}: {e}"));
        }
    }
}

on_device! {
    /// Two Swin networks with mixup, CutMix and drop-path.
    fn a_swin_pair_learns_from_mixed_images_as_on_the_cpu() {
        if !long() {
            return;
        }
        for method in ["baseline", "l_mcl"] {
            let run = |device: Device| {
                let mut engine = engine(method, "", &["swin_t", "swin_t"], device, Kind::Float, 3).unwrap();
                (engine.mix, engine.cohort.drop_path) = (Some(Mix::default()), true);
                let wave = (Tensor::arange(4 * 3 * 32 * 32, (Kind::Float, Device::Cpu)) * 0.37).sin().view([4, 3, 32, 32]);
                let index = Tensor::from_slice(&[0i64, 4, 1, 5]);
                let batch = Batch { views: vec![wave], labels: index.remainder(4), index, noise: 1 }.to_device(device);
                let report = engine.step(&[batch], clock(0, 1), None).unwrap();
                (total(&report), report.grad_norm.unwrap().double_value(&[]))
            };
            let ((here, norm), (there, other)) = (run(Device::Cpu), run(GPU));
            let error = ((here - there) / here).abs().max(((norm - other) / norm).abs());
            assert!(error < 1e-3, "{method}: loss {there}, {here} on the CPU; norm of the gradient {other}, {norm}");
            println!("| {method} | mixup, CutMix, drop-path | 2 x swin_t | {error:.0e} | |");
        }
    }
}
