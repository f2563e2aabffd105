//! Named tensors: what a network, a head or a method owns, in one order everywhere. Handles share storage with the live layers.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use rand::Rng as _;
use rand_distr::{Distribution, StandardNormal};
use tch::{Device, Kind, Tensor};

use crate::rng;

/// Tensors by name. Shallow clones: handles onto live storage.
pub type Named = Vec<(String, Tensor)>;

/// Trained variables and buffers (running statistics), each in the order of their names.
#[derive(Debug, Default)]
pub struct Params {
    /// What is trained.
    pub vars: Named,
    /// What is saved and loaded but not trained.
    pub buffers: Named,
}

/// A deep copy of some Params, to be written back bit by bit.
#[derive(Debug)]
pub(crate) struct Snapshot(Vec<Tensor>);

impl Params {
    /// All names get `prefix` in front; the tensors stay shared.
    pub fn prefixed(&self, prefix: &str) -> Params {
        let rename = |named: &Named| named.iter().map(|(n, t)| (format!("{prefix}{n}"), t.shallow_clone())).collect();
        Params { vars: rename(&self.vars), buffers: rename(&self.buffers) }
    }

    /// The union, in the order of the names.
    pub fn chain(&self, other: &Params) -> Params {
        let join = |a: &Named, b: &Named| {
            let mut all: Named = a.iter().chain(b).map(|(n, t)| (n.clone(), t.shallow_clone())).collect();
            all.sort_by(|x, y| x.0.cmp(&y.0));
            all
        };
        Params { vars: join(&self.vars, &other.vars), buffers: join(&self.buffers, &other.buffers) }
    }

    /// Other handles onto the same tensors.
    pub fn shallow_clone(&self) -> Params {
        self.prefixed("")
    }

    /// Variables, then buffers.
    pub fn all(&self) -> impl Iterator<Item = &(String, Tensor)> {
        self.vars.iter().chain(&self.buffers)
    }

    /// Variables and buffers in the order of their names, as they are written to a file.
    pub fn named(&self) -> Named {
        let mut all: Named = self.all().map(|(n, t)| (n.clone(), t.shallow_clone())).collect();
        all.sort_by(|x, y| x.0.cmp(&y.0));
        all
    }

    /// Handles onto the variables, in order.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.vars.iter().map(|(_, t)| t.shallow_clone()).collect()
    }

    /// How many numbers are trained.
    pub fn count(&self) -> i64 {
        self.vars.iter().map(|(_, t)| t.numel() as i64).sum()
    }

    /// A copy of the values of variables and buffers.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let _guard = tch::no_grad_guard();
        Snapshot(self.all().map(|(_, t)| t.detach().copy()).collect())
    }

    /// Takes over the values of `other`, which has the same variables and buffers.
    pub fn copy_from(&self, other: &Params) {
        let _guard = tch::no_grad_guard();
        for ((name, live), (from, value)) in self.all().zip(other.all()) {
            assert_eq!(name, from, "two parameter lists of one network");
            live.shallow_clone().copy_(value);
        }
    }

    /// Writes a snapshot of these parameters back.
    pub(crate) fn restore(&self, snapshot: &Snapshot) {
        let _guard = tch::no_grad_guard();
        for ((_, live), saved) in self.all().zip(&snapshot.0) {
            live.shallow_clone().copy_(saved);
        }
    }
}

/// What `check_finite` found: the first tensor that holds something else than finite numbers, and how many do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotFinite {
    /// The first such tensor, in the order of the list.
    pub name: String,
    /// How many of its numbers are not finite.
    pub count: i64,
    /// How many numbers it has.
    pub of: i64,
    /// How many tensors of the list are so, this one included.
    pub tensors: usize,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "`{}` is not finite: {} of its {} numbers are NaN or infinite", self.name, self.count, self.of)?;
        match self.tensors {
            1 => Ok(()),
            2 => write!(f, ", and so is 1 other tensor"),
            n => write!(f, ", and so are {} other tensors", n - 1),
        }
    }
}

/// Refuses weights, running statistics or optimizer state that hold a NaN or an infinity, and names the first tensor that does. For every
/// load and every save: what is computed from such a tensor is no measurement.
pub fn check_finite<'a>(tensors: impl IntoIterator<Item = &'a (String, Tensor)>) -> Result<(), NotFinite> {
    let _guard = tch::no_grad_guard();
    let mut first: Option<NotFinite> = None;
    for (name, tensor) in tensors {
        if !tensor.is_floating_point() || tensor.numel() == 0 || bool::try_from(tensor.isfinite().all()).unwrap_or(false) {
            continue;
        }
        match &mut first {
            Some(found) => found.tensors += 1,
            None => {
                let count = tensor.isfinite().logical_not().sum(Kind::Int64).int64_value(&[]);
                first = Some(NotFinite { name: name.clone(), count, of: tensor.numel() as i64, tensors: 1 });
            }
        }
    }
    first.map_or(Ok(()), Err)
}

/// How a variable starts.
#[derive(Debug, Clone, Copy)]
pub enum Init {
    /// All this number.
    Const(f64),
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform in [-bound, bound].
    Uniform(f64),
    /// Normal with this standard deviation, cut at two units (not two deviations), as torch's `trunc_normal_` with its defaults.
    TruncNormal(f64),
}

struct Build {
    params: Params,
    device: Device,
    kind: Kind,
    /// None: every variable starts at 0, for networks that are loaded or only measured.
    seed: Option<u64>,
    /// See `Scope::common`.
    common: Vec<Box<dyn Any>>,
    /// Variables of these names are taken from there instead of being made (a trunk shared by several peers).
    shared: Option<Params>,
}

/// Where layers register their variables while a network is built: `scope.sub("layer1").sub(0).var("weight", ...)`.
#[derive(Clone)]
pub struct Scope {
    build: Rc<RefCell<Build>>,
    prefix: String,
}

impl Scope {
    /// Starting values come from the stream (seed, "init", name), drawn on the CPU: they depend on nothing but the seed and the name.
    pub fn root(seed: u64, device: Device, kind: Kind) -> Scope {
        Scope::with_seed(Some(seed), device, kind)
    }

    /// All variables 0, for networks whose weights come from a file.
    pub fn blank(device: Device, kind: Kind) -> Scope {
        Scope::with_seed(None, device, kind)
    }

    fn with_seed(seed: Option<u64>, device: Device, kind: Kind) -> Scope {
        let build = Build { params: Params::default(), device, kind, seed, common: vec![], shared: None };
        Scope { build: Rc::new(RefCell::new(build)), prefix: String::new() }
    }

    /// The names that lead here, with a dot after each.
    pub fn path(&self) -> &str {
        &self.prefix
    }

    /// The scope of a part called `name`.
    pub fn sub(&self, name: impl std::fmt::Display) -> Scope {
        Scope { build: self.build.clone(), prefix: format!("{}{name}.", self.prefix) }
    }

    /// What all layers made from one root have in common: the same value for each type.
    pub(crate) fn common<T: Any + Clone + Default>(&self) -> T {
        let mut build = self.build.borrow_mut();
        if let Some(found) = build.common.iter().find_map(|value| value.downcast_ref::<T>()) {
            return found.clone();
        }
        let new = T::default();
        build.common.push(Box::new(new.clone()));
        new
    }

    /// From here until `share(None)`, variables and buffers are the ones in `from`, under the same names.
    pub fn share(&self, from: Option<Params>) {
        self.build.borrow_mut().shared = from;
    }

    /// A new trained variable that starts by `init`, or the shared one of this name.
    pub fn var(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        let name = format!("{}{name}", self.prefix);
        let mut build = self.build.borrow_mut();
        if let Some(shared) = build.shared_tensor(&name) {
            build.push(name, shared.shallow_clone(), true);
            return shared;
        }
        let values = match build.seed {
            Some(seed) => draw(shape, init, &mut rng::stream(seed, "init", &[name_hash(&name)])),
            None => Tensor::zeros(shape, (Kind::Float, Device::Cpu)),
        };
        let values = if build.device.is_cuda() && shape.len() == 4 { channels_last(&values) } else { values };
        let var = values.to_kind(build.kind).to_device(build.device).set_requires_grad(true);
        build.push(name, var.shallow_clone(), true);
        var
    }

    /// A tensor that is saved and loaded but not trained.
    pub fn buffer(&self, name: &str, value: Tensor) -> Tensor {
        let name = format!("{}{name}", self.prefix);
        let mut build = self.build.borrow_mut();
        if let Some(shared) = build.shared_tensor(&name) {
            build.push(name, shared.shallow_clone(), false);
            return shared;
        }
        let kind = if value.is_floating_point() { build.kind } else { value.kind() };
        let value = value.to_kind(kind).to_device(build.device);
        build.push(name, value.shallow_clone(), false);
        value
    }

    /// A buffer that counts, kept in host memory wherever the rest is: counting on a device would cost a launch each time.
    pub fn counter(&self, name: &str) -> Tensor {
        let name = format!("{}{name}", self.prefix);
        let mut build = self.build.borrow_mut();
        let value = build.shared_tensor(&name).unwrap_or_else(|| Tensor::from(0i64));
        build.push(name, value.shallow_clone(), false);
        value
    }

    /// What was registered so far, in the order of the names.
    pub fn params(&self) -> Params {
        self.build.borrow().params.chain(&Params::default())
    }
}

impl Build {
    fn push(&mut self, name: String, tensor: Tensor, trained: bool) {
        assert!(!self.params.all().any(|(n, _)| *n == name), "two variables are called {name}");
        if trained { self.params.vars.push((name, tensor)) } else { self.params.buffers.push((name, tensor)) }
    }

    fn shared_tensor(&self, name: &str) -> Option<Tensor> {
        let shared = self.shared.as_ref()?;
        let (_, tensor) = shared.all().find(|(n, _)| n == name).unwrap_or_else(|| panic!("shared variable {name} does not exist"));
        Some(tensor.shallow_clone())
    }
}

/// Gives tensors one memory, so that they are copied and chosen between at once: one flat tensor for each kind of number. Handles stay
/// what they are.
pub(crate) fn in_one_piece(tensors: &mut [Tensor]) -> Vec<Tensor> {
    let _guard = tch::no_grad_guard();
    let mut kinds: Vec<Kind> = vec![];
    tensors.iter().map(Tensor::kind).for_each(|kind| {
        if !kinds.contains(&kind) {
            kinds.push(kind)
        }
    });
    let mut pieces = vec![];
    for kind in kinds {
        let mut of_kind: Vec<&mut Tensor> = tensors.iter_mut().filter(|t| t.kind() == kind).collect();
        let flat = Tensor::cat(&of_kind.iter().map(|t| t.reshape([-1])).collect::<Vec<_>>(), 0);
        let sizes: Vec<i64> = of_kind.iter().map(|t| t.numel() as i64).collect();
        for (live, part) in of_kind.iter_mut().zip(flat.split_with_sizes(&sizes, 0)) {
            let part = part.view(live.size().as_slice());
            live.set_data(&part);
        }
        pieces.push(flat);
    }
    pieces
}

/// The same numbers with channels innermost, as cuDNN wants weights for images that lie so: else it turns them over in every pass, and
/// their gradients come out in another layout than they have.
fn channels_last(weight: &Tensor) -> Tensor {
    weight.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

fn name_hash(name: &str) -> u64 {
    use sha2::{Digest, Sha256};
    u64::from_le_bytes(Sha256::digest(name)[..8].try_into().expect("eight bytes"))
}

fn draw(shape: &[i64], init: Init, rng: &mut rng::Rng) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    let values: Vec<f32> = match init {
        Init::Const(value) => vec![value as f32; count],
        Init::Normal(std) => (0..count)
            .map(|_| {
                let z: f64 = StandardNormal.sample(rng);
                (z * std) as f32
            })
            .collect(),
        Init::Uniform(bound) => (0..count).map(|_| rng.gen_range(-bound..=bound) as f32).collect(),
        Init::TruncNormal(std) => (0..count)
            .map(|_| {
                loop {
                    let z: f64 = StandardNormal.sample(rng);
                    if (z * std).abs() <= 2.0 {
                        break (z * std) as f32;
                    }
                }
            })
            .collect(),
    };
    Tensor::from_slice(&values).reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, values: &[f32]) -> (String, Tensor) {
        (name.to_string(), Tensor::from_slice(values))
    }

    #[test]
    fn the_first_tensor_that_is_not_finite_is_named_and_the_others_counted() {
        let counter = ("num_batches_tracked".to_string(), Tensor::from(i64::MAX));
        let good = [named("a", &[1.0, -0.0, f32::MAX]), counter, named("empty", &[])];
        assert_eq!(check_finite(&good), Ok(()));
        let bad = [named("a", &[1.0]), named("b", &[f32::NAN, 2.0, f32::NEG_INFINITY]), named("c", &[f32::INFINITY])];
        let found = check_finite(&bad).unwrap_err();
        assert_eq!(found, NotFinite { name: "b".into(), count: 2, of: 3, tensors: 2 });
        assert_eq!(found.to_string(), "`b` is not finite: 2 of its 3 numbers are NaN or infinite, and so is 1 other tensor");
        let half = [("h".to_string(), Tensor::from_slice(&[1e30f64]).to_kind(Kind::Half))];
        assert_eq!(check_finite(&half).unwrap_err().to_string(), "`h` is not finite: 1 of its 1 numbers are NaN or infinite");
    }
}
