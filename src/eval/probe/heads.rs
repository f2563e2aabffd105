//! Linear classifiers trained by SGD on frozen features, several learning rates side by side in one pass: weights [R, C, D].

use rand::Rng as _;
use tch::{Device, Kind, Tensor};

use crate::rng;

/// R classifiers that see the same batches, each with its own learning rate.
pub struct Heads {
    weight: Tensor,   // [R * C, D]
    bias: Tensor,     // [R * C]
    velocity: Tensor, // [R * C, D + 1]
    /// Base rates, [R, 1, 1].
    lrs: Tensor,
    rates: i64,
    classes: i64,
    momentum: f64,
    weight_decay: f64,
}

impl Heads {
    /// All start alike, as torch starts a linear layer: uniform within 1 / sqrt(D).
    pub fn new(lrs: &[f64], classes: i64, dim: i64, momentum: f64, weight_decay: f64, seed: u64, device: Device) -> Heads {
        let mut rng = rng::stream(seed, "head", &[]);
        let bound = 1.0 / (dim as f32).sqrt();
        let mut draw = |count: i64| Tensor::from_slice(&(0..count).map(|_| rng.gen_range(-bound..=bound)).collect::<Vec<f32>>());
        let rates = lrs.len() as i64;
        let weight = draw(classes * dim).view([1, classes, dim]).repeat([rates, 1, 1]).view([rates * classes, dim]).to_device(device);
        let bias = draw(classes).view([1, classes]).repeat([rates, 1]).view([rates * classes]).to_device(device);
        let lrs: Vec<f32> = lrs.iter().map(|&lr| lr as f32).collect();
        let lrs = Tensor::from_slice(&lrs).view([rates, 1, 1]).to_device(device);
        let velocity = Tensor::zeros([rates * classes, dim + 1], (Kind::Float, device));
        Heads { weight, bias, velocity, lrs, rates, classes, momentum, weight_decay }
    }

    /// One step of SGD with momentum, as torch does it, on the mean cross-entropy of a batch `x` `[B, D]`, `y` `[B]`; every rate times `factor`.
    pub fn step(&mut self, x: &Tensor, y: &Tensor, factor: f64) {
        let _guard = tch::no_grad_guard();
        let (b, dim) = (x.size()[0], x.size()[1]);
        // d(cross-entropy)/d(scores) = softmax - one-hot: no graph is needed for one linear layer.
        let mut p = x.linear(&self.weight, Some(&self.bias)).view([b, self.rates, self.classes]).softmax(-1, Kind::Float);
        let at = y.view([b, 1, 1]).expand([b, self.rates, 1], false);
        let _ = p.scatter_add_(2, &at, &Tensor::full([b, self.rates, 1], -1.0, (Kind::Float, x.device())));
        let p = p.view([b, self.rates * self.classes]) / b as f64;
        let mut weight_grad = p.transpose(0, 1).matmul(x); // [R * C, D]
        let mut bias_grad = p.sum_dim_intlist([0i64].as_slice(), false, Kind::Float);
        if self.weight_decay > 0.0 {
            weight_grad += &self.weight * self.weight_decay;
            bias_grad += &self.bias * self.weight_decay;
        }
        let grad = Tensor::cat(&[weight_grad, bias_grad.unsqueeze(1)], 1);
        let _ = self.velocity.g_mul_scalar_(self.momentum).g_add_(&grad);
        let scaled = self.velocity.view([self.rates, self.classes, dim + 1]) * (&self.lrs * factor);
        let scaled = scaled.view([self.rates * self.classes, dim + 1]);
        self.weight -= scaled.narrow(1, 0, dim);
        self.bias -= scaled.select(1, dim);
    }

    /// Steps on all rows of `x` `[N, D]`, `y` `[N]`, `batch` at a time and the last with what is left.
    pub fn steps(&mut self, x: &Tensor, y: &Tensor, batch: i64, factor: f64) {
        for (x, y) in x.split(batch, 0).iter().zip(y.split(batch, 0)) {
            self.step(x, &y, factor);
        }
    }

    /// Scores of `x` [N, D] under each rate: R tensors [N, C].
    pub fn scores(&self, x: &Tensor) -> Vec<Tensor> {
        let _guard = tch::no_grad_guard();
        let all = x.linear(&self.weight, Some(&self.bias));
        (0..self.rates).map(|r| all.narrow(1, r * self.classes, self.classes)).collect()
    }

    /// Does any classifier hold numbers that are not finite?
    pub fn diverged(&self) -> bool {
        self.weight.isfinite().all().int64_value(&[]) == 0
    }
}
