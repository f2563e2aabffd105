//! What a plan would take on this machine: from the multiply-adds of its networks and a training pass of one network timed here.

use std::collections::BTreeMap;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

use crate::data;
use crate::error::Result;
use crate::nets::layers::Pass;
use crate::nets::{self, Arch, Network};
use crate::recipe::Recipe;

/// A step of each method in steps of the baseline with as many networks. L-MCL with an exact meta step every 50 batches: benches/README.md
/// has 2.05 s and 25.7 s / 50 where the baseline takes 0.96 s. MCL by the budget of protocols/plans/evidence.toml. The others are one more
/// pass over small tensors, and FFSD trains one network more.
fn factor(method: &str, networks: usize) -> f64 {
    match method {
        "baseline" | "dml" => 1.0,
        "mcl" => 1.2,
        "l_mcl" => 2.7,
        "ffsd" => 1.2 * (networks + 1) as f64 / networks as f64,
        _ => 1.2,
    }
}

/// Multiply-adds by which this machine trains, a second: a ResNet-20 forward and backward, the quickest of a few.
pub fn speed() -> Result<f64> {
    const BATCH: i64 = 64;
    let arch = nets::find("resnet20")?;
    let classes = arch.usual_classes();
    let (net, _) = Network::build(arch, classes, 1, Device::Cpu, Kind::Float);
    let images = Tensor::rand([BATCH, 3, arch.image_size, arch.image_size], (Kind::Float, Device::Cpu));
    let labels = Tensor::zeros([BATCH], (Kind::Int64, Device::Cpu));
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let began = Instant::now();
        net.forward(&images, Pass::train(1)).logit().cross_entropy_for_logits(&labels).backward();
        best = best.min(began.elapsed().as_secs_f64());
    }
    Ok(3.0 * nets::describe(arch, classes).macs as f64 * BATCH as f64 / best)
}

/// Counts multiply-adds; those of an architecture are counted once, because it takes a pass through the network.
#[derive(Default)]
pub struct Counter {
    of_arch: BTreeMap<String, f64>,
}

impl Counter {
    /// Of one image at the architecture's own size.
    fn forward(&mut self, arch: &'static Arch) -> f64 {
        *self.of_arch.entry(arch.name.to_string()).or_insert_with(|| nets::describe(arch, 100).macs as f64)
    }
}

/// Multiply-adds of a whole run: forward and twice as many backward, over all images and epochs; CKD-MKT trains twice.
pub fn multiply_adds(recipe: &Recipe, counter: &mut Counter) -> Result<f64> {
    let spec = data::find(&recipe.data.name)?;
    let images = spec.images.map_or(4000, |(train, _)| train) as f64 * recipe.data.fraction;
    let mut macs = 0.0;
    for name in &recipe.cohort.archs {
        let arch = nets::find(name)?;
        let scale = match recipe.data.image_size {
            0 => 1.0,
            side => (side as f64 / arch.image_size as f64).powi(2),
        };
        macs += counter.forward(arch) * scale;
    }
    let phases = if recipe.method_name() == "ckd_mkt" { 2.0 } else { 1.0 };
    Ok(3.0 * macs * images * recipe.train.epochs as f64 * phases * factor(recipe.method_name(), recipe.cohort.archs.len()))
}

/// Hours or days as a person says them.
pub fn in_words(seconds: f64) -> String {
    match seconds / 3600.0 {
        hours if hours < 1.0 => format!("{:.0} min", seconds / 60.0),
        hours if hours < 48.0 => format!("{hours:.0} h"),
        hours if hours < 24.0 * 700.0 => format!("{:.0} days", hours / 24.0),
        hours => format!("{:.0} years", hours / 24.0 / 365.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods;
    use crate::recipe::shipped;

    #[test]
    fn multiply_adds_are_counted_over_all_images_and_epochs() {
        let of = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
            let text = shipped::find("cifar100-resnet32").unwrap().text;
            multiply_adds(&Recipe::parse(text, "test", &sets, &methods::names()).unwrap(), &mut Counter::default()).unwrap()
        };
        // ResNet-32 has 69.1 million multiply-adds on 32 x 32 pixels (He et al. count 69 million).
        let one = of(&["method.name=baseline", "train.epochs=1"]);
        assert!((one / (3.0 * 2.0 * 69.1e6 * 50_000.0) - 1.0).abs() < 0.02, "{one}");
        assert!((of(&["method.name=baseline"]) / one - 300.0).abs() < 1e-6);
        assert!((of(&["method.name=baseline", "train.epochs=1", "data.fraction=0.5"]) / one - 0.5).abs() < 1e-9);
        assert!((of(&["method.name=l_mcl", "train.epochs=1"]) / one - 2.7).abs() < 1e-9);
    }

    #[test]
    fn times_are_said_as_a_person_says_them() {
        assert_eq!([60.0, 7200.0, 86400.0 * 30.0, 86400.0 * 1500.0].map(in_words), ["1 min", "2 h", "30 days", "4 years"]);
    }
}
