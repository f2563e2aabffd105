//! Every architecture: forward, backward and frozen, on the device against the CPU. And two loaders with a device each.

use mcl::extractor::Extractor;
use mcl::nets::layers::Pass;
use mcl::nets::{self, Arch, Branch, Network};
use mcl::optim::grads;
use mcl::params::Scope;
use tch::{Device, Kind, Tensor};

use crate::{apart, cuda, long, support};

const GPU: Device = Device::Cuda(0);

/// In f64, device against CPU: the order of sums alone. Gradients of deep networks at their start pass through many BatchNorms.
const FORWARD: f64 = 1e-9;
const BACKWARD: f64 = 1e-6;
/// In f32, as measurements take it.
const FROZEN: f64 = 1e-4;

/// More parameters than this are tried when there is time.
const SMALL: i64 = 4_000_000;

struct Answers {
    forward: Vec<Tensor>,
    gradients: Vec<Tensor>,
}

/// Training pass of a network with all its branches, and the gradient of everything.
fn trained(arch: &'static Arch, device: Device) -> Answers {
    let kind = Kind::Double;
    let (net, params) = Network::build(arch, 7, 7, device, kind);
    let scope = Scope::root(8, device, kind);
    let branches = Branch::all(arch, &scope, 7);
    let side = if arch.image_size == 32 { 32 } else { 64 };
    let images = (Tensor::arange(2 * 3 * side * side, (kind, Device::Cpu)) * 0.37).sin().view([2, 3, side, side]).to_device(device);
    let pass = Pass::train(1);
    let outs = net.answer(net.maps(&images, pass), &branches, pass);
    assert!(outs.maps.iter().chain(&outs.logits).all(|t| t.device() == device), "{}: an answer is not on {device:?}", arch.name);
    let weights =
        |t: &Tensor| (Tensor::arange(t.numel() as i64, (kind, Device::Cpu)) * 1.3).sin().view(t.size().as_slice()).to_device(device);
    let loss = outs.logits.iter().map(|z| (z * weights(z)).sum(None)).reduce(|a, b| a + b).unwrap();
    let vars: Vec<Tensor> = params.tensors().into_iter().chain(scope.params().tensors()).collect();
    let gradients = grads(&loss, &vars, false);
    let statistics = params.buffers.iter().map(|(_, t)| t.shallow_clone());
    Answers { forward: outs.logits.into_iter().chain(outs.maps).chain(statistics).collect(), gradients }
}

fn worst(got: &[Tensor], wanted: &[Tensor]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    got.iter().zip(wanted).map(|(got, wanted)| apart(got, wanted)).fold(0.0, f64::max)
}

/// Gradients have very different sizes: the difference over the largest of all.
fn worst_gradient(got: &[Tensor], wanted: &[Tensor]) -> f64 {
    let home = |t: &Tensor| t.to_device(Device::Cpu).flatten(0, -1);
    let flat = |all: &[Tensor]| Tensor::cat(&all.iter().map(home).collect::<Vec<_>>(), 0);
    apart(&flat(got), &flat(wanted))
}

fn frozen(arch: &'static Arch, device: Device) -> Vec<Tensor> {
    let scope = Scope::root(7, device, Kind::Float);
    let _network = Network::new(arch, &scope, 7);
    let side = if arch.image_size == 32 { 32 } else { 64 };
    let images = (Tensor::arange(2 * 3 * side * side, (Kind::Float, Device::Cpu)) * 0.37).sin().view([2, 3, side, side]);
    let answer = Extractor::new(arch, &scope.params(), None, 7, 1).extract(&images, true).unwrap();
    [&answer.features, answer.logit()].into_iter().chain(&answer.stages).map(Tensor::shallow_clone).collect()
}

fn compared(wanted: impl Fn(&Arch) -> bool) {
    tch::set_num_threads(1);
    mcl::system::gpu::set(false, true);
    println!("| architecture | forward | backward | extractor |");
    println!("| --- | --- | --- | --- |");
    for arch in nets::archs().filter(|arch| wanted(arch)) {
        let (here, there) = (trained(arch, Device::Cpu), trained(arch, GPU));
        // Zeros would be equal everywhere.
        let moves = |all: &[Tensor]| all.iter().any(|t| t.abs().max().double_value(&[]) > 1e-3);
        assert!(moves(&here.forward[..1]) && moves(&here.gradients), "{}: nothing to compare", arch.name);
        let (forward, backward) = (worst(&there.forward, &here.forward), worst_gradient(&there.gradients, &here.gradients));
        let extractor = worst(&frozen(arch, GPU), &frozen(arch, Device::Cpu));
        println!("| {} | {forward:.0e} | {backward:.0e} | {extractor:.0e} |", arch.name);
        assert!(forward <= FORWARD && backward <= BACKWARD, "{}: forward {forward:e}, backward {backward:e}", arch.name);
        assert!(extractor <= FROZEN, "{}: extractor {extractor:e}", arch.name);
    }
}

fn parameters(arch: &Arch) -> i64 {
    let scope = Scope::blank(Device::Cpu, Kind::Float);
    let _network = Network::new(arch, &scope, 7);
    scope.params().count()
}

on_device! {
    /// Every architecture that is small.
    [("FAKE_CUDA_TF32", "1")]
    fn every_small_architecture_computes_as_on_the_cpu() {
        compared(|arch| parameters(arch) <= SMALL);
    }
}

on_device! {
    /// And the others: together no architecture of the registry is left out.
    [("FAKE_CUDA_TF32", "1")]
    fn every_large_architecture_computes_as_on_the_cpu() {
        if long() {
            compared(|arch| parameters(arch) > SMALL);
        }
    }
}

on_device! {
    /// Two loaders at once, the batches of each on a device of its own: nothing lands on the other's, and both see what the CPU sees.
    [("FAKE_CUDA_LATE", "1")]
    fn two_loaders_feed_a_device_each() {
        let data = mcl::data::open("synthetic", None, &mcl::data::Options { size: Some(16), ..Default::default() }).unwrap();
        let batches = |seed: u64, device: Device| -> Vec<(Tensor, Tensor)> {
            let order: Vec<Vec<u32>> = (0..4).map(|b| (0..8).map(|i| (b * 8 + i + seed as u32) % 32).collect()).collect();
            let transform = mcl::data::Transform { erase: 0.5, ..data.train_transform() };
            let loader = mcl::data::Loader::new(&data.train, order, transform, 2, seed, 0, 0);
            loader
                .map(|batch| {
                    let batch = batch.unwrap().to_device(device);
                    assert!(batch.views.iter().chain([&batch.labels, &batch.index]).all(|t| t.device() == device));
                    let sum = (&batch.views[0] * 2.0 + &batch.views[1]).sum_dim_intlist([1i64, 2, 3].as_slice(), false, Kind::Double);
                    (sum, batch.labels)
                })
                .collect()
        };
        let wanted = [1u64, 2].map(|seed| batches(seed, Device::Cpu));
        let found = std::thread::scope(|scope| {
            let batches = &batches;
            [1u64, 2].map(|seed| scope.spawn(move || batches(seed, Device::Cuda(seed as usize - 1)))).map(|thread| thread.join().unwrap())
        });
        for (wanted, found) in wanted.iter().flatten().zip(found.iter().flatten()) {
            assert!(apart(&found.0, &wanted.0) < 1e-6);
            assert_eq!(found.1.to_device(Device::Cpu), wanted.1);
        }
    }
}
