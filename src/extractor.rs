//! What a frozen network says about images: one copy of the network a core, each on one thread with a share of the images, which on
//! small maps beats all threads on every operation. Weights are shared, BatchNorm is folded, nothing is tracked.

pub mod foreign;

use std::collections::VecDeque;
use std::str::FromStr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::nets::layers::{Pass, pool};
use crate::nets::{Arch, Branch, Network};
use crate::params::{Named, Params, Scope, check_finite};
use crate::system::exhausted;
use foreign::Foreign;

/// Rows in the order of the images, f32; on the CPU unless asked for where the network is.
pub struct Answer {
    /// The pooled feature, [N, D].
    pub features: Tensor,
    /// [N, C] of each branch, where the extractor has them, and of the network.
    pub logits: Vec<Tensor>,
    /// The map after each stage, [N, c, h, w]; empty unless asked for.
    pub stages: Vec<Tensor>,
}

impl Answer {
    fn cat(parts: &[Answer]) -> Answer {
        let join = |of: &dyn Fn(&Answer) -> &Tensor| Tensor::cat(&parts.iter().map(of).collect::<Vec<_>>(), 0);
        let each = |of: &dyn Fn(&Answer) -> &Vec<Tensor>| {
            let count = parts.first().map_or(0, |part| of(part).len());
            (0..count).map(|l| join(&|part| &of(part)[l])).collect()
        };
        Answer { features: join(&|part| &part.features), logits: each(&|part| &part.logits), stages: each(&|part| &part.stages) }
    }

    /// The network's own logits.
    pub fn logit(&self) -> &Tensor {
        self.logits.last().expect("a network has logits")
    }

    /// The first image whose answer holds a NaN or an infinity.
    fn not_finite(&self) -> Option<i64> {
        let of = |rows: &Tensor| {
            // Flat rows: the smallest place of a number that is not finite tells its image.
            let bad = rows.isfinite().logical_not().nonzero();
            (bad.size()[0] > 0).then(|| bad.select(1, 0).min().int64_value(&[]))
        };
        let all_finite = |rows: &&Tensor| bool::try_from(rows.isfinite().all()).unwrap_or(false);
        let rows = [&self.features].into_iter().chain(&self.logits).chain(&self.stages);
        rows.filter(|rows| !all_finite(rows)).filter_map(of).min()
    }
}

/// A part of a network whose output is a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tap {
    /// The map after this stage (from 1), averaged over its places.
    Stage(usize),
    /// The network's own pooled feature.
    Last,
}

impl FromStr for Tap {
    type Err = Error;

    fn from_str(text: &str) -> Result<Tap> {
        let number = || text.parse().ok().filter(|l| *l > 0).map(Tap::Stage);
        let tap = if text == "last" { Some(Tap::Last) } else { number() };
        tap.ok_or_else(|| Error::input(format!("layer `{text}`; accepted: the number of a stage from 1, or last")))
    }
}

impl std::fmt::Display for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Tap::Stage(l) => write!(f, "{l}"),
            Tap::Last => write!(f, "last"),
        }
    }
}

/// What of the stages is wanted.
#[derive(Clone, Copy, PartialEq)]
enum Stages {
    Nothing,
    /// Averaged over the places, [N, c].
    Pooled,
    Maps,
}

struct Job {
    images: Tensor,
    stages: Stages,
    /// Shall the answer be on the CPU?
    home: bool,
}

/// Images that workers were given and have not answered yet.
struct Asked {
    /// The first so many workers have a share.
    workers: usize,
    images: i64,
    maps: bool,
    /// Are features made of other parts than the last?
    tapped: bool,
}

struct Worker {
    /// None once the extractor is being dropped: the thread ends.
    jobs: Option<Sender<Job>>,
    answers: Receiver<Result<Answer>>,
    thread: Option<JoinHandle<()>>,
}

/// A network ready for inference. Its weights must not change while it lives.
pub struct Extractor {
    workers: Vec<Worker>,
    /// The weights and running statistics, to name one that is not finite.
    named: Named,
    /// libtorch's threads before the workers set their own.
    threads: i32,
    /// What features are made of, side by side; the network's own where there are none.
    taps: Vec<Tap>,
}

/// Pixels of one pass: a batch whose maps stay in a core's cache, but enough images to make use of the weights of large networks.
const PIXELS: i64 = 8 * 32 * 32;
const LEAST_IMAGES: i64 = 8;

impl Extractor {
    /// `params` are those of the network, `aux` those of its branches where they shall answer too; the copies share them.
    pub fn new(arch: &'static Arch, params: &Params, aux: Option<&Params>, classes: i64, threads: usize) -> Extractor {
        let device = params.vars.first().map_or(Device::Cpu, |(_, t)| t.device());
        let kind = params.vars.first().map_or(Kind::Float, |(_, t)| t.kind());
        let before = tch::get_num_threads();
        let copies = if device == Device::Cpu { threads.max(1) } else { 1 };
        let worker = |_| {
            let sharing = |params: &Params| {
                let scope = Scope::blank(device, kind);
                scope.share(Some(params.shallow_clone()));
                scope
            };
            let net = Network::new(arch, &sharing(params), classes);
            let branches = aux.map_or(vec![], |aux| Branch::all(arch, &sharing(aux), classes));
            let threads = (device == Device::Cpu).then_some(1);
            Worker::start(threads, move |job| answer(&net, &branches, job, device, kind))
        };
        let named = params.all().chain(aux.into_iter().flat_map(Params::all)).map(|(n, t)| (n.clone(), t.shallow_clone())).collect();
        Extractor { workers: (0..copies).map(worker).collect(), named, threads: before, taps: vec![] }
    }

    /// Of somebody's TorchScript: one copy with all threads. Its feature stands for its logits too, which they are where it is a classifier.
    pub fn foreign(network: Foreign, threads: usize) -> Result<Extractor> {
        let (before, named) = (tch::get_num_threads(), network.parameters()?);
        let worker = Worker::start(Some(threads.max(1) as i32), move |job| ask_foreign(&network, job));
        Ok(Extractor { workers: vec![worker], named, threads: before, taps: vec![] })
    }

    /// Features are made of these parts of the network, side by side.
    pub fn with_taps(mut self, taps: &[Tap]) -> Extractor {
        self.taps = taps.to_vec();
        self
    }

    /// All images [N, 3, H, W], normalised; N may be anything that fits into memory together with the answer. An answer that is not
    /// finite is an error: a number made from it would be no measurement.
    pub fn extract(&mut self, images: &Tensor, stages: bool) -> Result<Answer> {
        self.ask(images, stages, true)
    }

    /// The same without maps, the answer where the network is: nobody waits for a device. Of an answer there, nobody knows yet whether
    /// it is finite (`answers_badly`).
    pub(crate) fn extract_there(&mut self, images: &Tensor) -> Result<Answer> {
        self.ask(images, false, false)
    }

    /// Batch after batch, each images [N, 3, H, W] and what belongs to them. `then` is given the answers, without maps, in their order; the next
    /// batch is under way meanwhile, so that no core waits for `then`, or for the slower of two workers.
    pub fn each<T>(
        &mut self,
        batches: impl Iterator<Item = Result<(Tensor, T)>>,
        mut then: impl FnMut(Answer, T) -> Result<()>,
    ) -> Result<()> {
        let mut under_way = VecDeque::new();
        let ended = self.pass_on(batches, &mut under_way, &mut then);
        // After an error nobody wants the answers that are still to come, but the next call must not take them for its own.
        under_way.into_iter().for_each(|(asked, _)| drop(self.finish(asked)));
        ended
    }

    fn pass_on<T>(
        &mut self,
        batches: impl Iterator<Item = Result<(Tensor, T)>>,
        under_way: &mut VecDeque<(Asked, T)>,
        then: &mut impl FnMut(Answer, T) -> Result<()>,
    ) -> Result<()> {
        for batch in batches {
            let (images, with) = batch?;
            under_way.push_back((self.begin(&images, false, true)?, with));
            if under_way.len() > 1 {
                self.hand_over(under_way, then)?;
            }
        }
        while !under_way.is_empty() {
            self.hand_over(under_way, then)?;
        }
        Ok(())
    }

    fn hand_over<T>(&mut self, under_way: &mut VecDeque<(Asked, T)>, then: &mut impl FnMut(Answer, T) -> Result<()>) -> Result<()> {
        let Some((asked, with)) = under_way.pop_front() else { return Ok(()) };
        then(self.finish(asked)?, with)
    }

    fn ask(&mut self, images: &Tensor, maps: bool, home: bool) -> Result<Answer> {
        let asked = self.begin(images, maps, home)?;
        self.finish(asked)
    }

    /// Hands the images to the workers. What was begun must be finished, in the same order.
    fn begin(&mut self, images: &Tensor, maps: bool, home: bool) -> Result<Asked> {
        let tapped = self.taps.iter().any(|tap| *tap != Tap::Last);
        let stages = match (maps, tapped) {
            (true, _) => Stages::Maps,
            (false, true) => Stages::Pooled,
            (false, false) => Stages::Nothing,
        };
        let n = images.size()[0];
        let share = (n + self.workers.len() as i64 - 1) / self.workers.len() as i64;
        let mut workers = 0;
        for (i, worker) in self.workers.iter().enumerate() {
            let from = i as i64 * share;
            if from < n {
                let part = images.narrow(0, from, share.min(n - from));
                let job = Job { images: part, stages, home };
                worker.jobs.as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or_else(died)?;
                workers += 1;
            }
        }
        Ok(Asked { workers, images: n, maps, tapped })
    }

    fn finish(&mut self, asked: Asked) -> Result<Answer> {
        let Asked { workers, images: n, maps, tapped } = asked;
        let of = |worker: &Worker| worker.answers.recv().unwrap_or_else(|_| Err(died()));
        let parts: Vec<Result<Answer>> = self.workers[..workers].iter().map(of).collect();
        let mut answer = Answer::cat(&parts.into_iter().collect::<Result<Vec<_>>>()?);
        if tapped {
            let of = |tap: &Tap| match tap {
                Tap::Last => answer.features.shallow_clone(),
                Tap::Stage(l) if maps => pool(&answer.stages[l - 1]),
                Tap::Stage(l) => answer.stages[l - 1].shallow_clone(),
            };
            answer.features = Tensor::cat(&self.taps.iter().map(of).collect::<Vec<_>>(), 1);
            answer.stages.truncate(if maps { answer.stages.len() } else { 0 });
        }
        // An answer that stays on a device is not looked at here: that would wait for it.
        let found = if answer.features.device().is_cuda() { None } else { answer.not_finite() };
        match found {
            None => Ok(answer),
            Some(image) => Err(self.answers_badly(&format!("image {image} of a batch of {n}"))),
        }
    }

    /// What is said of a network that answers `images` with numbers that are not finite.
    pub(crate) fn answers_badly(&self, images: &str) -> Error {
        let why = match check_finite(&self.named) {
            Err(found) => found.to_string(),
            Ok(()) => "all its weights are, so they overflow".to_string(),
        };
        Error::failed(format!("the network answers {images} with numbers that are not finite: {why}"))
    }
}

fn died() -> Error {
    Error::failed("a thread of the forward pass has died")
}

impl Worker {
    /// A thread that does `work` for as long as somebody asks, with so many of libtorch's threads where a number is given.
    fn start(threads: Option<i32>, work: impl Fn(&Job) -> Result<Answer> + Send + 'static) -> Worker {
        let (jobs, inbox) = channel::<Job>();
        let (outbox, answers) = channel();
        let thread = std::thread::spawn(move || {
            if let Some(threads) = threads {
                tch::set_num_threads(threads);
            }
            let _guard = tch::no_grad_guard();
            for job in inbox {
                // Nobody waits any more: the extractor was dropped.
                if outbox.send(exhausted::caught(|| work(&job))).is_err() {
                    return;
                }
            }
        });
        Worker { jobs: Some(jobs), answers, thread: Some(thread) }
    }
}

impl Drop for Extractor {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            drop(worker.jobs.take());
            if let Some(thread) = worker.thread.take() {
                let _ = thread.join(); // a panic of the thread was reported by `extract`
            }
        }
        tch::set_num_threads(self.threads);
    }
}

/// One worker's share, batch by batch.
fn answer(net: &Network, branches: &[Branch], job: &Job, device: Device, kind: Kind) -> Result<Answer> {
    let size = job.images.size();
    // A GPU takes all of them at once.
    let batch = if device == Device::Cpu { (PIXELS / (size[2] * size[3]).max(1)).max(LEAST_IMAGES) } else { size[0] };
    let mut parts = vec![];
    for images in job.images.f_split(batch, 0)? {
        // Channels last is how the convolutions want it.
        let images = images.to_device(device).to_kind(kind).permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
        let outs = net.answer(net.maps(&images, Pass::FROZEN), branches, Pass::FROZEN);
        let home = |t: &Tensor| t.to_kind(Kind::Float).to_device(if job.home { Device::Cpu } else { device });
        let stages = match job.stages {
            Stages::Nothing => vec![],
            Stages::Pooled => outs.maps.iter().map(|map| home(&pool(map))).collect(),
            Stages::Maps => outs.maps.iter().map(|map| home(map).contiguous()).collect(),
        };
        parts.push(Answer { features: home(outs.feat()), logits: outs.logits.iter().map(home).collect(), stages });
    }
    Ok(Answer::cat(&parts))
}

/// The answer of somebody's network, some images at a time.
fn ask_foreign(network: &Foreign, job: &Job) -> Result<Answer> {
    let size = job.images.size();
    let batch = (PIXELS / (size[2] * size[3]).max(1)).max(LEAST_IMAGES);
    let mut parts = vec![];
    for images in job.images.f_split(batch, 0)? {
        let features = network.features(&images)?;
        let features = if job.home { features.to_device(Device::Cpu) } else { features };
        parts.push(Answer { logits: vec![features.shallow_clone()], features, stages: vec![] });
    }
    Ok(Answer::cat(&parts))
}
