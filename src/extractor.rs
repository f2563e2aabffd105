//! What a frozen network says about images: one copy of the network a core, each on one thread with a share of the images, which on
//! small maps beats all threads on every operation. Weights are shared, BatchNorm is folded, nothing is tracked.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::nets::layers::Pass;
use crate::nets::{Arch, Branch, Network};
use crate::params::{Params, Scope};

/// Rows in the order of the images, f32 on the CPU.
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
}

struct Job {
    images: Tensor,
    stages: bool,
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
    /// libtorch's threads before the workers set their own.
    threads: i32,
}

/// Pixels of one pass: a batch whose maps stay in a core's cache, but enough images to make use of the weights of large networks.
const PIXELS: i64 = 16 * 32 * 32;
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
            let (jobs, inbox) = channel::<Job>();
            let (outbox, answers) = channel();
            let thread = std::thread::spawn(move || {
                if device == Device::Cpu {
                    tch::set_num_threads(1);
                }
                let _guard = tch::no_grad_guard();
                for job in inbox {
                    // Nobody waits any more: the extractor was dropped.
                    if outbox.send(answer(&net, &branches, &job, device, kind)).is_err() {
                        return;
                    }
                }
            });
            Worker { jobs: Some(jobs), answers, thread: Some(thread) }
        };
        Extractor { workers: (0..copies).map(worker).collect(), threads: before }
    }

    /// All images [N, 3, H, W], normalised; N may be anything that fits into memory together with the answer.
    pub fn extract(&mut self, images: &Tensor, stages: bool) -> Result<Answer> {
        let n = images.size()[0];
        let share = (n + self.workers.len() as i64 - 1) / self.workers.len() as i64;
        let mut asked = vec![];
        for (i, worker) in self.workers.iter().enumerate() {
            let from = i as i64 * share;
            if from < n {
                let part = images.narrow(0, from, share.min(n - from));
                let job = Job { images: part, stages };
                worker.jobs.as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or_else(died)?;
                asked.push(worker);
            }
        }
        let parts: Vec<Result<Answer>> = asked.iter().map(|worker| worker.answers.recv().unwrap_or_else(|_| Err(died()))).collect();
        Ok(Answer::cat(&parts.into_iter().collect::<Result<Vec<_>>>()?))
    }
}

fn died() -> Error {
    Error::failed("a thread of the forward pass has died")
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
        let home = |t: &Tensor| t.to_kind(Kind::Float).to_device(Device::Cpu);
        let stages = if job.stages { outs.maps.iter().map(|map| home(map).contiguous()).collect() } else { vec![] };
        parts.push(Answer { features: home(outs.feat()), logits: outs.logits.iter().map(home).collect(), stages });
    }
    Ok(Answer::cat(&parts))
}
