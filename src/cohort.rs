//! The networks that learn together: peers, their auxiliary branches, and the forward pass of all of them.

use tch::{Device, Kind, Tensor};

use crate::data::Batch;
use crate::nets::layers::{Mode, Pass};
use crate::nets::{Arch, Branch, Network, Outputs, autocast};
use crate::params::{Named, Params, Scope};
use crate::rng;
use crate::system::device::Precision;
use crate::system::ranks::Ranks;

/// One network of the cohort. `params` is exactly the deployable network; `aux` holds the branches, thrown away at inference.
pub struct Peer {
    /// What it is.
    pub arch: &'static Arch,
    /// The network that ships.
    pub net: Network,
    /// An auxiliary classifier on every stage but the last; none where the method needs none.
    pub branches: Vec<Branch>,
    /// Of `net`.
    pub params: Params,
    /// Of `branches`.
    pub aux: Params,
}

/// A network of anybody's that teaches and does not learn: no optimizer, checkpoint or table knows of it.
pub struct FrozenPeer {
    /// What it is.
    pub arch: &'static Arch,
    /// Of as many classes as the cohort's.
    pub net: Network,
    /// Of `net`.
    pub params: Params,
    /// Factor and summand, [1, 3, 1, 1], that turn the cohort's images into those it was trained on; none where they are the same.
    pub input: Option<(Tensor, Tensor)>,
}

/// M peers. The first `shared_stages` stages of every peer are peer 0's (ONE, OKDDip, PCL); 0 means independent networks.
pub struct Cohort {
    /// The networks, in the order of the recipe.
    pub peers: Vec<Peer>,
    /// Those that teach and do not learn.
    pub frozen: Vec<FrozenPeer>,
    /// How many stages are peer 0's for all.
    pub shared_stages: usize,
    /// Peers run on threads of their own when above 1.
    pub threads: usize,
    /// Stochastic depth in training, for architectures that have it.
    pub drop_path: bool,
    /// What forward passes in training are autocast to.
    pub precision: Precision,
    /// The processes that train this cohort together.
    pub ranks: Ranks,
}

/// What a cohort is made from.
pub struct CohortOptions<'a> {
    /// One for each peer.
    pub archs: &'a [&'static Arch],
    /// Outputs of every classifier.
    pub classes: i64,
    /// With auxiliary branches on every stage but the last?
    pub branches: bool,
    /// How many stages are peer 0's for all.
    pub shared_stages: usize,
    /// Where the weights live.
    pub device: Device,
    /// What they are kept in.
    pub kind: Kind,
    /// Every peer derives its own from it.
    pub seed: u64,
    /// The processes that train it together.
    pub ranks: Ranks,
}

impl Peer {
    /// Its answer to images [B, 3, H, W], in f32.
    pub fn forward(&self, images: &Tensor, pass: Pass) -> Outputs {
        let _scope = autocast(pass.precision, images.device());
        self.net.answer(self.net.maps(images, pass), &self.branches, pass).in_f32()
    }

    /// Stage l as a network of its own, under the plain network's names: the stages up to l (from 0), the branch behind them and its
    /// classifier. None for the last stage, without branches, and where the branch is not what the architecture has after stage l.
    pub fn stage(&self, l: usize) -> Option<Named> {
        let mut twins = (self.arch.twins)(l);
        if l >= self.branches.len() || twins.is_empty() {
            return None;
        }
        twins.push((format!("fc{}", l + 1), self.arch.classifier.to_string()));
        let branch: std::collections::BTreeMap<String, Tensor> = self.aux.named().into_iter().collect();
        let of = |(name, own): (String, Tensor)| {
            let below = |part: &str| name.strip_prefix(part).filter(|rest| rest.is_empty() || rest.starts_with('.'));
            match twins.iter().find_map(|(theirs, ours)| Some(format!("{theirs}{}", below(ours)?))) {
                None => Some((name, own)),
                Some(theirs) => branch.get(&theirs).filter(|t| t.size() == own.size()).map(|t| (name, t.shallow_clone())),
            }
        };
        self.params.named().into_iter().map(of).collect()
    }
}

impl FrozenPeer {
    /// Its logits on images [B, 3, H, W] that are normalised as the cohort's, in f32 and without a graph. Running statistics stay.
    pub fn logits(&self, images: &Tensor, precision: Precision) -> Tensor {
        let _guard = tch::no_grad_guard();
        let _scope = autocast(precision, images.device());
        let own = self.input.as_ref().map(|(factor, summand)| images * factor + summand);
        // Folding BatchNorm saves launches on a device. On the CPU what is folded runs on one thread, in `Extractor` a copy a core.
        let mode = if images.device().is_cuda() { Mode::Frozen } else { Mode::Eval };
        let answer = self.net.forward(own.as_ref().unwrap_or(images), Pass { mode, precision, ..Pass::EVAL });
        answer.logit().to_kind(Kind::Float)
    }
}

impl Cohort {
    /// Fresh networks, which train in f32 one after another and without stochastic depth until the fields say otherwise.
    pub fn new(options: &CohortOptions) -> Cohort {
        let CohortOptions { archs, classes, branches, shared_stages, device, kind, seed, ranks } = *options;
        let mut peers: Vec<Peer> = vec![];
        for (m, &arch) in archs.iter().enumerate() {
            // Every peer starts from its own seed: copies would kill the diversity mutual learning lives on.
            let seed = rng::derive(seed, "peer", m as u64);
            let scope = Scope::root(seed, device, kind);
            let trunk = peers.first().map(|first| first.params.shallow_clone());
            let mut stages = vec![];
            for l in 0..arch.depth {
                scope.share(if l < shared_stages { trunk.as_ref().map(Params::shallow_clone) } else { None });
                stages.push((arch.stage)(&scope, l));
            }
            scope.share(None);
            let net = Network { stages, neck: (arch.neck)(&scope), classifier: (arch.head)(scope.sub(arch.classifier), arch.dim, classes) };
            let aux_scope = Scope::root(rng::derive(seed, "branches", 0), device, kind);
            let branches = if branches { Branch::all(arch, &aux_scope, classes) } else { vec![] };
            peers.push(Peer { arch, net, branches, params: scope.params(), aux: aux_scope.params() });
        }
        Cohort { peers, frozen: vec![], shared_stages, threads: 1, drop_path: false, precision: Precision::F32, ranks }
    }

    /// All peers on one batch, each on its own view if there are several.
    pub fn forward(&mut self, batch: &Batch, mode: Mode) -> Vec<Outputs> {
        let (drop_path, ranks) = (self.drop_path, self.ranks);
        let precision = if mode == Mode::Train { self.precision } else { Precision::F32 };
        let pass = move |m: usize| Pass { mode, noise: rng::derive(batch.noise, "peer", m as u64), drop_path, precision, ranks };
        let view = |m: usize| batch.views[m % batch.views.len()].shallow_clone();
        if self.shared_stages > 0 && batch.views.len() == 1 {
            return self.forward_trunk(batch, pass(0));
        }
        // Peers that share a trunk and see views of their own run it in turn: its running statistics take in every view.
        if self.threads < 2 || self.shared_stages > 0 {
            return self.peers.iter().enumerate().map(|(m, peer)| peer.forward(&view(m), pass(m))).collect();
        }
        // Grad mode is thread-local in libtorch, so workers are told; a Tensor may move to a thread but not be shared with one.
        let tracked = tracking();
        std::thread::scope(|scope| {
            let workers: Vec<_> = self
                .peers
                .iter_mut()
                .enumerate()
                .map(|(m, peer)| {
                    let (images, pass) = (view(m), pass(m));
                    scope.spawn(move || {
                        let _guard = (!tracked).then(tch::no_grad_guard);
                        peer.forward(&images, pass)
                    })
                })
                .collect();
            workers.into_iter().map(|w| w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    /// The logits of the networks that do not learn on the same batch, F x [B, C]. Where peers have a view each, so have they.
    pub fn frozen_logits(&self, batch: &Batch, precision: Precision) -> Vec<Tensor> {
        let view = |f: usize| &batch.views[(self.peers.len() + f) % batch.views.len()];
        self.frozen.iter().enumerate().map(|(f, peer)| peer.logits(view(f), precision)).collect()
    }

    /// The shared stages once, then every peer from there.
    fn forward_trunk(&self, batch: &Batch, pass: Pass) -> Vec<Outputs> {
        let _scope = autocast(pass.precision, batch.views[0].device());
        let mut trunk: Vec<Tensor> = vec![];
        for stage in &self.peers[0].net.stages[..self.shared_stages] {
            trunk.push(stage.forward(trunk.last().unwrap_or(&batch.views[0]), pass));
        }
        let from_trunk = |peer: &Peer| {
            let mut maps: Vec<Tensor> = trunk.iter().map(Tensor::shallow_clone).collect();
            for stage in &peer.net.stages[self.shared_stages..] {
                maps.push(stage.forward(maps.last().expect("a trunk has stages"), pass));
            }
            peer.net.answer(maps, &peer.branches, pass).in_f32()
        };
        self.peers.iter().map(from_trunk).collect()
    }

    /// Everything trained: `peer.0.net.*`, `peer.0.aux.*`, ...; what peers share is listed once, under the first.
    pub fn params(&self) -> Params {
        let mut all = Params::default();
        for (m, peer) in self.peers.iter().enumerate() {
            let mut own = peer.params.shallow_clone();
            if m > 0 && self.shared_stages > 0 {
                let first = &self.peers[0].params;
                let shared = |t: &Tensor| first.all().any(|(_, f)| f.data_ptr() == t.data_ptr());
                own.vars.retain(|(_, t)| !shared(t));
                own.buffers.retain(|(_, t)| !shared(t));
            }
            all = all.chain(&own.prefixed(&format!("peer.{m}.net."))).chain(&peer.aux.prefixed(&format!("peer.{m}.aux.")));
        }
        all
    }
}

/// Is autograd recording on this thread? libtorch is asked by doing something: tch has no getter.
fn tracking() -> bool {
    let probe = Tensor::zeros([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    (probe * 1.0).requires_grad()
}
