//! What a method adds to its networks while they train: branches, heads, gates, the meta-network. None of it ships.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::methods::{self, Task};
use crate::nets::layers::{self, Pass};
use crate::nets::{self, Branch};
use crate::params::{Named, Scope};
use crate::recipe::Recipe;

/// A part of what is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// `networks`, `branches`, or what the method calls its module: `heads`, `gates`, `pi`.
    pub name: String,
    /// Trained numbers, of all networks together.
    pub parameters: i64,
    /// Multiply-adds for one image; none where the part has convolutions whose maps only the method knows.
    pub macs: Option<i64>,
}

/// The networks of a recipe first, then what its method adds. Nothing is trained and no image is read; classifiers are counted with the
/// architecture's usual number of classes.
pub fn parts(recipe: &Recipe) -> Result<Vec<Part>> {
    let _guard = tch::no_grad_guard();
    let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
    let classes = archs.first().map_or(100, |arch| arch.usual_classes());
    let labels: Vec<i64> = (0..2 * classes).map(|i| i % classes).collect();
    let task = Task::new(recipe, &archs, classes, &labels, Device::Cpu);
    let method = (methods::find(recipe.method_name())?.build)(&task, recipe.method_options())?;
    let needs = method.needs();
    let (mut networks, mut branches) = (Part::named("plain networks"), Part::named("branches"));
    for arch in needs.archs(&archs) {
        let side = if recipe.data.image_size > 0 { recipe.data.image_size as i64 } else { arch.image_size };
        let image = Tensor::zeros([1, 3, side, side], (Kind::Float, Device::Cpu));
        let (own, aux) = (Scope::blank(Device::Cpu, Kind::Float), Scope::blank(Device::Cpu, Kind::Float));
        let net = nets::Network::new(arch, &own, classes);
        let behind = if needs.branches { Branch::all(arch, &aux, classes) } else { vec![] };
        let plain = layers::macs(|| drop(net.forward(&image, Pass::EVAL)));
        let all = layers::macs(|| drop(net.answer(net.maps(&image, Pass::EVAL), &behind, Pass::EVAL)));
        networks.add(own.params().count(), plain);
        branches.add(aux.params().count(), all - plain);
    }
    let mut parts = vec![networks];
    parts.extend(Some(branches).filter(|b| b.parameters > 0));
    let cohort = task.cohort(needs);
    for group in method.groups(&cohort).iter().filter(|g| !g.apart) {
        parts.push(Part::of(group.name, &group.params.vars));
    }
    let pi: Named = method.state().into_iter().filter(|(name, _)| name.starts_with("pi.") && !name.starts_with("pi.optimizer.")).collect();
    parts.extend((!pi.is_empty()).then(|| Part::of("pi", &pi)));
    Ok(parts)
}

impl Part {
    fn named(name: &str) -> Part {
        Part { name: name.into(), parameters: 0, macs: Some(0) }
    }

    /// Linear layers, each asked once an image.
    fn of(name: &str, vars: &Named) -> Part {
        let mut part = Part::named(name);
        for (_, tensor) in vars {
            let count = tensor.numel() as i64;
            part.parameters += count;
            match tensor.dim() {
                2 => part.macs = part.macs.map(|m| m + count),
                0 | 1 => {}
                _ => part.macs = None,
            }
        }
        part
    }

    fn add(&mut self, parameters: i64, macs: i64) {
        self.parameters += parameters;
        self.macs = self.macs.map(|m| m + macs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::shipped;

    fn of(name: &str, sets: &[&str]) -> Vec<Part> {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        let recipe = Recipe::parse(shipped::find(name).unwrap().text, "test", &sets, &methods::names()).unwrap();
        parts(&recipe).unwrap()
    }

    #[test]
    fn parts_are_counted_as_by_hand() {
        let parts = of("cifar100-resnet32", &[]);
        let names: Vec<&str> = parts.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["plain networks", "branches", "heads", "gates", "pi"]);
        // Six heads from 64 to 128 to 128 with biases; two gates from 192 to 64 to 3; six matrices of 128 x 128.
        let numbers: Vec<(i64, Option<i64>)> = parts.iter().skip(2).map(|p| (p.parameters, p.macs)).collect();
        let head = 64 * 128 + 128 * 128;
        assert_eq!(numbers[0], (6 * (head + 256), Some(6 * head)));
        assert_eq!(numbers[1], (2 * (192 * 64 + 64 + 64 * 3 + 3), Some(2 * (192 * 64 + 64 * 3))));
        assert_eq!(numbers[2], (6 * 128 * 128, Some(6 * 128 * 128)));
        // The branches of one network repeat stages 2 and 3, then stage 3: more than half of the network again.
        assert!(parts[1].parameters > parts[0].parameters / 2 && parts[1].macs > parts[0].macs.map(|m| m / 2), "{parts:?}");
        assert_eq!(of("cifar100-resnet32", &["method.name=baseline"]).len(), 1);
    }
}
