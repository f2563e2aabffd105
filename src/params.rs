//! Named tensors: what a network, a head or a method owns, in one order everywhere. Handles share storage with the live layers.

use std::cell::RefCell;
use std::rc::Rc;

use rand::Rng as _;
use rand_distr::{Distribution, StandardNormal};
use tch::{Device, Kind, Tensor};

use crate::rng;

/// Shallow clones: handles onto live storage.
pub type Named = Vec<(String, Tensor)>;

/// Trained variables and buffers (running statistics), each in the order of their names.
#[derive(Debug, Default)]
pub struct Params {
    /// What an optimizer moves.
    pub vars: Named,
    /// What a forward pass moves.
    pub buffers: Named,
}

/// A deep copy of some Params, to be written back bit by bit.
#[derive(Debug)]
pub struct Snapshot(Vec<Tensor>);

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

    /// Handles onto the same tensors.
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

    /// The variables without their names.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.vars.iter().map(|(_, t)| t.shallow_clone()).collect()
    }

    /// How many numbers are trained.
    pub fn count(&self) -> i64 {
        self.vars.iter().map(|(_, t)| t.numel() as i64).sum()
    }

    /// A copy of all values as they are now.
    pub fn snapshot(&self) -> Snapshot {
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

    /// Writes the values of a snapshot of these tensors back.
    pub fn restore(&self, snapshot: &Snapshot) {
        let _guard = tch::no_grad_guard();
        for ((_, live), saved) in self.all().zip(&snapshot.0) {
            live.shallow_clone().copy_(saved);
        }
    }
}

/// How a variable starts.
#[derive(Debug, Clone, Copy)]
pub enum Init {
    /// The same number everywhere.
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
        let build = Build { params: Params::default(), device, kind, seed, shared: None };
        Scope { build: Rc::new(RefCell::new(build)), prefix: String::new() }
    }

    /// The names that lead here, with a dot after each.
    pub fn path(&self) -> &str {
        &self.prefix
    }

    /// A part of what is built here: its names get `name.` in front.
    pub fn sub(&self, name: impl std::fmt::Display) -> Scope {
        Scope { build: self.build.clone(), prefix: format!("{}{name}.", self.prefix) }
    }

    /// From here until `share(None)`, variables and buffers are the ones in `from`, under the same names.
    pub fn share(&self, from: Option<Params>) {
        self.build.borrow_mut().shared = from;
    }

    /// A variable that is trained.
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
