//! The rivals of the paper's tables: their losses against closed forms and numbers computed from the published formulas (or the
//! official code) in float64, their gradients' stops and flows, their sizes, and what every method must do: step, stay finite, resume.

use std::collections::HashMap;

use mcl::cohort::Cohort;
use mcl::data::Batch;
use mcl::losses::logit;
use mcl::methods::{self, Clock, Method, Task, Views, kdcl, okddip, one};
use mcl::nets::{self, Arch, Outputs};
use mcl::optim::{Rule, schedule::ramp};
use mcl::step::{Engine, StepReport};
use tch::{Device, Kind, Tensor};

const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };
const CLASSES: i64 = 4;

fn archs(names: &[&str]) -> Vec<&'static Arch> {
    names.iter().map(|name| nets::find(name).unwrap()).collect()
}

/// A task on four classes of ten images, in double precision unless networks run.
fn task<'a>(archs: &'a [&'static Arch], labels: &'a [i64], kind: Kind, seed: u64) -> Task<'a> {
    Task { archs, classes: CLASSES, train_labels: labels, batch: 8, rule: RULE, label_smoothing: 0.0, holdout: 5, epochs: 300, device: Device::Cpu, kind, seed }
}

fn labels() -> Vec<i64> {
    (0..40).map(|i| i % CLASSES).collect()
}

fn try_build(name: &str, options: &str, archs: &[&'static Arch], kind: Kind, seed: u64) -> mcl::error::Result<Box<dyn Method>> {
    tch::set_num_threads(1);
    (methods::find(name).unwrap().build)(&task(archs, &labels(), kind, seed), options.parse().unwrap())
}

/// A method by itself, in double precision, for M networks of resnet8.
fn method(name: &str, options: &str, count: usize) -> Box<dyn Method> {
    try_build(name, options, &archs(&vec!["resnet8"; count]), Kind::Double, 1).unwrap()
}

fn engine_on(name: &str, options: &str, names: &[&str], classes: i64, seed: u64) -> Engine {
    tch::set_num_threads(1);
    let archs = archs(names);
    let labels = labels();
    let task = Task { classes, ..task(&archs, &labels, Kind::Float, seed) };
    let method = (methods::find(name).unwrap().build)(&task, options.parse().unwrap()).unwrap();
    let needs = method.needs();
    let cohort = Cohort::new(&needs.archs(&archs), classes, needs.branches, needs.shared_stages, 1, Device::Cpu, Kind::Float, seed);
    Engine::new(cohort, method, RULE)
}

fn engine(name: &str, options: &str, count: usize, seed: u64) -> Engine {
    engine_on(name, options, &vec!["resnet8"; count], CLASSES, seed)
}

fn clock(epoch: usize, step: usize) -> Clock {
    Clock { epoch, batch: step, step, lr: 0.05, seed: 7 }
}

/// Class pairs of 16 x 16 images, other ones for each step and view.
fn batch(step: usize, views: usize) -> Batch {
    let wave = |v: usize| (Tensor::arange(8 * 3 * 16 * 16, (Kind::Float, Device::Cpu)) * (0.37 + 0.11 * (step * 3 + v) as f64)).sin().view([8, 3, 16, 16]);
    let (labels, index) = ([0i64, 0, 1, 1, 2, 2, 3, 3], [0i64, 4, 1, 5, 2, 6, 3, 7]);
    Batch { views: (0..views).map(wave).collect(), labels: Tensor::from_slice(&labels), index: Tensor::from_slice(&index), noise: step as u64 }
}

fn batch_for(engine: &Engine, step: usize) -> Batch {
    let per_peer = engine.method.needs().views == Views::PerPeer;
    batch(step, if per_peer { engine.cohort.peers.len() } else { 1 })
}

fn step(engine: &mut Engine, epoch: usize, step: usize) -> StepReport {
    let batch = batch_for(engine, step);
    engine.step(&[batch], clock(epoch, step), None).unwrap()
}

fn rows(values: &[&[f64]]) -> Tensor {
    Tensor::from_slice2(values)
}

/// An answer made by hand: logits with gradients, features of a given width, and maps that pool to `map`.
fn answer(logits: &Tensor) -> Outputs {
    let size = logits.size()[0];
    let map = Tensor::zeros([size, 2, 1, 1], (logits.kind(), Device::Cpu));
    Outputs { maps: vec![map.shallow_clone(), map.shallow_clone(), map.shallow_clone()], pre_pool: map, feats: vec![Tensor::zeros([size, 64], (logits.kind(), Device::Cpu))], logits: vec![logits.shallow_clone()] }
}

/// The three networks' logits on two samples of three classes that the published numbers were computed for.
fn example() -> (Vec<Tensor>, Tensor) {
    let z1 = rows(&[&[2.0, 0.5, -1.0], &[0.1, 0.2, 0.3]]);
    let z2 = rows(&[&[1.0, 1.5, 0.0], &[-0.4, 0.9, 0.2]]);
    let z3 = rows(&[&[0.3, -0.2, 0.8], &[1.1, 0.4, -0.6]]);
    (vec![z1, z2, z3].into_iter().map(|z| z.set_requires_grad(true)).collect(), Tensor::from_slice(&[0i64, 2]))
}

fn labelled(labels: &Tensor) -> Batch {
    Batch { views: vec![], labels: labels.shallow_clone(), index: labels.shallow_clone(), noise: 0 }
}

fn value(t: &Tensor) -> f64 {
    t.double_value(&[])
}

fn values(t: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(t.flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

#[track_caller]
fn close(got: f64, wanted: f64, tolerance: f64) {
    assert!((got - wanted).abs() <= tolerance, "got {got}, wanted {wanted}");
}

#[track_caller]
fn all_close(got: &Tensor, wanted: &[f64], tolerance: f64) {
    let got = values(got);
    assert!(got.len() == wanted.len() && got.iter().zip(wanted).all(|(g, w)| (g - w).abs() <= tolerance), "got {got:?}, wanted {wanted:?}");
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    a.size() == b.size() && a.isclose(b, 0.0, 0.0, true).all().int64_value(&[]) != 0
}

fn copies(engine: &Engine) -> HashMap<String, Tensor> {
    engine.state().into_iter().map(|(name, t)| (name, t.copy())).collect()
}

/// Is the gradient of `loss` for `var` there and not zero?
fn reaches(loss: &Tensor, var: &Tensor) -> bool {
    let grad = Tensor::run_backward(&[loss], std::slice::from_ref(var), true, false).remove(0);
    grad.defined() && value(&grad.abs().max()) > 0.0
}

fn trained(engine: &Engine) -> i64 {
    engine.theta.count() + engine.groups.iter().filter(|(g, _)| !g.apart).map(|(g, _)| g.params.count()).sum::<i64>()
}

// Every method.

/// Name, options, and the sizes of cohort it is tried with.
const TRIALS: &[(&str, &str, &[usize])] = &[
    ("baseline", "", &[1, 2]),
    ("dml", "", &[2, 3]),
    ("one", "", &[2, 3]),
    ("okddip", "", &[3]),
    ("okddip", "branch = false", &[3]),
    ("kdcl", "", &[2, 3]),
    ("kdcl", "teacher = 'naive'", &[2, 3]),
    ("kdcl", "teacher = 'minlogit'", &[2, 3]),
    ("kdcl", "teacher = 'linear'", &[2, 3]),
];

fn holdout() -> Vec<mcl::error::Result<Batch>> {
    vec![Ok(batch(90, 1)), Ok(batch(91, 1))]
}

fn begin(engine: &mut Engine, epoch: usize, at: usize) {
    engine.epoch_start(Some(&mut holdout().into_iter()), clock(epoch, at)).unwrap();
}

#[test]
fn every_method_steps_with_finite_terms_and_lowers_the_loss_of_the_networks() {
    for (name, options, sizes) in TRIALS {
        for &count in *sizes {
            let mut engine = engine(name, options, count, 3);
            begin(&mut engine, 0, 0);
            let task_of = |report: &StepReport| report.terms.iter().filter(|t| t.name == "task").map(|t| value(&t.value)).sum::<f64>();
            let batch = batch_for(&engine, 0);
            let mut last = f64::NAN;
            let mut first = f64::NAN;
            for i in 0..10 {
                let report = engine.step(&[Batch { views: batch.views.iter().map(Tensor::shallow_clone).collect(), ..labelled(&batch.labels) }], clock(0, i), None).unwrap();
                assert!(report.terms.iter().all(|t| value(&t.value).is_finite()), "{name} {options} M={count}");
                last = task_of(&report);
                if i == 0 {
                    first = last;
                }
            }
            assert!(last < 0.7 * first, "{name} {options} M={count}: task went from {first} to {last}");
        }
    }
}

#[test]
fn a_saved_state_restored_elsewhere_steps_to_the_same_bits() {
    for (name, options, sizes) in TRIALS {
        for &count in *sizes {
            let mut one = engine(name, options, count, 3);
            begin(&mut one, 0, 0);
            step(&mut one, 0, 0);
            begin(&mut one, 1, 1);
            step(&mut one, 1, 1);
            let saved = copies(&one);
            // Another seed: nothing may come from anywhere but the state.
            let mut two = engine(name, options, count, 4);
            let live = two.state();
            assert_eq!(live.len(), saved.len(), "{name} {options}: names of the state are not unique, or depend on the seed");
            tch::no_grad(|| live.iter().for_each(|(n, t)| t.shallow_clone().copy_(&saved[n])));
            let (a, b) = (step(&mut one, 1, 2), step(&mut two, 1, 2));
            for (x, y) in a.terms.iter().zip(&b.terms) {
                assert!(x.name == y.name && same(&x.value, &y.value), "{name} {options} M={count}: {} differs", x.name);
            }
            let (a, b) = (copies(&one), copies(&two));
            for (n, t) in &a {
                assert!(same(t, &b[n]), "{name} {options} M={count}: {n} differs after the step");
            }
        }
    }
}

#[test]
fn resolved_options_build_the_same_method() {
    for (name, options, sizes) in TRIALS {
        let archs = archs(&vec!["resnet8"; sizes[0]]);
        let first = try_build(name, options, &archs, Kind::Float, 1).unwrap().options();
        let again = try_build(name, &first.to_string(), &archs, Kind::Float, 1).unwrap().options();
        assert_eq!(first, again, "{name}");
        for key in options.parse::<toml::Table>().unwrap().keys() {
            assert!(first.contains_key(key), "{name}: {key} is not among its resolved options");
        }
    }
}

#[track_caller]
fn refused(name: &str, options: &str, names: &[&str], message: &str) {
    let error = try_build(name, options, &archs(names), Kind::Float, 1).err().unwrap_or_else(|| panic!("{name} {options} {names:?} was accepted"));
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn what_a_method_cannot_do_is_refused_with_the_reason() {
    refused("dml", "", &["resnet8"], "dml needs 2 networks or more and [cohort] archs has 1");
    refused("dml", "temperature = 0.0", &["resnet8", "resnet8"], "[method] temperature = 0; accepted: a number above 0");
    refused("dml", "temprature = 2.0", &["resnet8", "resnet8"], "unknown field `temprature`, expected `temperature`");
    refused("dml", "preset = 'mine'", &["resnet8", "resnet8"], "[method] preset = \"mine\"; accepted: \"paper\", \"original\"");
    refused("one", "", &["resnet8", "resnet20"], "one needs networks of one architecture and [cohort] archs has resnet8 and resnet20: they are branches of one trunk");
    refused("one", "weight = -1.0", &["resnet8", "resnet8"], "[method] weight = -1; accepted: 0 or more");
    refused("okddip", "", &["resnet8", "resnet8"], "okddip needs 3 networks or more");
    refused("okddip", "", &["resnet8", "resnet8", "resnet20"], "set method.branch=false");
    refused("okddip", "branch = false", &["resnet8", "resnet110", "resnet8"], "resnet8 has 64 and resnet110 has 256");
    refused("kdcl", "teacher = 'best'", &["resnet8", "resnet8"], "unknown variant `best`");
    let (nets, labels) = (archs(&["resnet8", "resnet8"]), labels());
    let error = (methods::find("kdcl").unwrap().build)(&Task { holdout: 0, ..task(&nets, &labels, Kind::Float, 1) }, toml::Table::new()).err().unwrap();
    assert!(error.exit_code() == 2 && error.to_string().contains("set data.holdout=20"), "{error}");
}

#[test]
fn the_ramp() {
    for (epoch, wanted) in [(0, 0.0067379470), (20, 0.0600546679), (40, 0.2865047969), (60, 0.7316156289), (80, 1.0), (200, 1.0)] {
        close(ramp(epoch, 80), wanted, 1e-10);
    }
    assert_eq!(ramp(0, 0), 1.0);
}

// Deep Mutual Learning.

#[test]
fn kl_of_logits_at_temperatures() {
    let (z, _) = example();
    for (t, forth, back) in [(1.0, 0.2981140681, 0.2785074919), (2.0, 0.3044571900, 0.3090028744), (3.0, 0.3013942399, 0.3086737510)] {
        close(value(&logit::kl(&z[1], &z[0], t)), forth, 1e-9);
        close(value(&logit::kl(&z[0], &z[1], t)), back, 1e-9);
        close(value(&logit::kl_through(&z[1], &z[0], t)), forth, 1e-9);
    }
    close(value(&logit::kl(&z[0], &z[0], 2.0)), 0.0, 1e-15);
}

#[test]
fn dml_sums_task_and_the_mean_over_peers() {
    let (z, y) = example();
    for (count, wanted) in [(2, 2.3855542384), (3, 4.8061658600)] {
        let outs: Vec<Outputs> = z[..count].iter().map(answer).collect();
        let dml = method("dml", "preset = 'original'", count);
        close(value(&dml.losses(&outs, &labelled(&y), clock(0, 0)).unwrap().total()), wanted, 1e-9);
    }
    assert_eq!(method("dml", "", 2).options()["temperature"].as_float(), Some(2.0));
    assert_eq!(method("dml", "preset = 'original'", 2).options()["temperature"].as_float(), Some(1.0));
    assert_eq!(method("dml", "preset = 'original'\ntemperature = 4.0", 2).options()["temperature"].as_float(), Some(4.0));
}

#[test]
fn dml_teaches_a_network_by_its_own_rows_only() {
    let (z, y) = example();
    let outs: Vec<Outputs> = z.iter().map(answer).collect();
    let terms = method("dml", "", 3).losses(&outs, &labelled(&y), clock(0, 0)).unwrap();
    for row in &terms.rows {
        for (n, logits) in z.iter().enumerate() {
            assert_eq!(reaches(&row.value, logits), Some(n) == row.peer, "{} of network {:?} and logits {n}", row.name, row.peer);
        }
    }
}

// ONE.

#[test]
fn gate_of_one() {
    all_close(&one::gate_weights(&Tensor::from_slice(&[1.0, -2.0, 0.5]).unsqueeze(0)), &[0.5065, 0.1863, 0.3072], 5e-5);
    all_close(&one::gate_weights(&Tensor::from_slice(&[-1.0, -2.0, 0.0]).unsqueeze(0)), &[1.0 / 3.0; 3], 1e-15);
}

/// A branch on a trunk whose output is zero, as wide as resnet8's.
fn on_empty_trunk(z: &Tensor) -> Outputs {
    Outputs { maps: (0..3).map(|_| Tensor::zeros([2, 32, 1, 1], (Kind::Double, Device::Cpu))).collect(), ..answer(z) }
}

#[test]
fn one_with_a_closed_gate_averages_its_branches() {
    let (z, y) = example();
    // A trunk of zeros and a gate bias that is the same for all samples: after BatchNorm all scores are 0, so weights are uniform.
    let outs: Vec<Outputs> = z.iter().map(on_empty_trunk).collect();
    let terms = method("one", "", 3).losses(&outs, &labelled(&y), clock(0, 0)).unwrap();
    let mean = (&z[0] + &z[1] + &z[2]) / 3.0;
    let of = |name: &str, peer| terms.rows.iter().find(|r| r.name == name && r.peer == peer).unwrap();
    close(value(&of("task_gate", None).value), value(&logit::ce(&mean, &y)), 1e-12);
    close(value(&of("ens", Some(0)).value), 0.1540593262, 1e-9);
    for row in terms.rows.iter().filter(|r| r.name == "ens") {
        for (n, logits) in z.iter().enumerate() {
            assert_eq!(reaches(&row.value, logits), Some(n) == row.peer, "the ensemble is a constant target");
        }
    }
    assert!(z.iter().all(|z| reaches(&of("task_gate", None).value, z)), "the ensemble's own loss trains every branch");
    let equal: Vec<Outputs> = z.iter().map(|_| on_empty_trunk(&z[0])).collect();
    let terms = method("one", "", 3).losses(&equal, &labelled(&y), clock(0, 0)).unwrap();
    assert!(terms.rows.iter().filter(|r| r.name == "ens").all(|r| value(&r.value).abs() < 1e-12));
}

#[test]
fn one_ramps_up_in_the_original_only() {
    let (z, y) = example();
    let outs: Vec<Outputs> = z.iter().map(on_empty_trunk).collect();
    for (options, wanted) in [("", 1.0), ("preset = 'original'", 0.2865047969)] {
        let terms = method("one", options, 3).losses(&outs, &labelled(&y), clock(40, 0)).unwrap();
        assert!(terms.rows.iter().filter(|r| r.name == "ens").all(|r| (r.weight - wanted).abs() < 1e-9));
    }
}

#[test]
fn one_trains_its_gate_and_counts_its_parameters() {
    for (arch, count, wanted) in [("resnet32", 2, 832_990), ("resnet32", 3, 1_193_189), ("resnet110", 2, 2_066_718), ("resnet110", 3, 2_962_437)] {
        assert_eq!(trained(&engine_on("one", "", &vec![arch; count], 100, 1)), wanted, "{arch} x {count}");
    }
    let mut engine = engine("one", "", 2, 1);
    let before = engine.groups[0].0.params.vars.iter().map(|(_, t)| t.copy()).collect::<Vec<_>>();
    step(&mut engine, 0, 0);
    assert!(engine.groups[0].0.params.vars.iter().zip(&before).any(|((_, t), old)| !same(t, old)));
}

// OKDDip.

#[test]
fn okddip_attends_to_its_peers() {
    let (z, _) = example();
    let logits = Tensor::stack(&z, 0);
    let equal = Tensor::ones([3, 2, 4], (Kind::Double, Device::Cpu));
    let targets = okddip::aggregate(&equal, &equal, &logits);
    let mean = logits.mean_dim(0i64, false, None);
    for a in 0..3 {
        all_close(&targets.get(a), &values(&mean), 1e-12);
    }
    close(value(&logit::kl_through(&targets.get(0), &z[0], 3.0)), 0.1540593262, 1e-9);
    // Attention over logits of 1 is 1 whatever the features: its rows sum to 1.
    let features = (Tensor::arange(24, (Kind::Double, Device::Cpu)) * 0.7).sin().view([3, 2, 4]);
    all_close(&okddip::aggregate(&features, &features.roll([1], [2]), &logits.ones_like()), &[1.0; 18], 1e-12);
    // Peer 0 of sample 0 by hand: softmax of its query's products with the keys.
    let targets = okddip::aggregate(&features, &features, &logits);
    let (query, keys) = (features.get(0).get(0), features.select(1, 0));
    let attention = keys.mv(&query).softmax(0, None);
    all_close(&targets.get(0).get(0), &values(&attention.unsqueeze(0).matmul(&logits.select(1, 0))), 1e-12);
}

#[test]
fn okddip_stops_no_gradient() {
    let mut okddip = engine("okddip", "", 3, 1);
    let batch = batch(0, 1);
    let outs = okddip.cohort.forward(&batch, mcl::nets::layers::Mode::Train);
    let terms = okddip.method.losses(&outs, &batch, clock(80, 0)).unwrap();
    let of = |name: &str, peer| &terms.rows.iter().find(|r| r.name == name && r.peer == Some(peer)).unwrap().value;
    let find = |name: &str| okddip.groups[0].0.params.vars.iter().find(|(n, _)| n == name).unwrap().1.shallow_clone();
    for weight in ["query.weight", "key.weight"] {
        assert!(reaches(of("aggregate", 0), &find(weight)), "{weight} is trained through the targets");
        assert!(!reaches(of("leader", 2), &find(weight)));
    }
    assert!(reaches(of("leader", 2), outs[0].logit()) && reaches(of("leader", 2), outs[2].logit()));
    assert!(reaches(of("aggregate", 0), outs[1].logit()) && !reaches(of("aggregate", 0), outs[2].logit()), "the leader teaches nobody");
}

#[test]
fn okddip_counts_its_parameters_and_ships_the_leader_first() {
    assert_eq!(trained(&engine_on("okddip", "", &["resnet32"; 3], 100, 1)), 1_194_108);
    assert_eq!(trained(&engine_on("okddip", "", &["resnet110"; 3], 100, 1)), 2_978_428);
    let engine = engine("okddip", "", 3, 1);
    let leader = &engine.cohort.peers[2].params.vars[0].1;
    assert!(same(&engine.shipped()[0].params.vars[0].1, leader) && engine.shipped().len() == 3);
    assert!(std::ptr::eq(engine.shipped()[0], &engine.cohort.peers[2]) && std::ptr::eq(engine.shipped()[1], &engine.cohort.peers[0]));
}

#[test]
fn the_shipped_branch_is_the_plain_network() {
    let mut engine = engine("one", "", 2, 1);
    step(&mut engine, 0, 0);
    let batch = batch(5, 1);
    let whole = tch::no_grad(|| engine.cohort.forward(&batch, mcl::nets::layers::Mode::Eval));
    for (m, peer) in engine.shipped().into_iter().enumerate() {
        let (net, params) = nets::Network::build(peer.arch, CLASSES, 99, Device::Cpu, Kind::Float);
        params.copy_from(&peer.params);
        let alone = tch::no_grad(|| net.forward(&batch.views[0], mcl::nets::layers::Pass::EVAL));
        assert!(same(alone.logit(), whole[m].logit()) && same(alone.logit(), engine.answers(&batch)[m].logit()));
    }
}

// KDCL.

#[test]
fn kdcl_teachers() {
    let (z, y) = example();
    let logits = tch::no_grad(|| Tensor::stack(&z, 0));
    all_close(&kdcl::naive(&logits, &y), &values(&z[0].detach()), 1e-15);
    let ties = Tensor::stack(&[&z[1], &z[1], &z[2]].map(|t| t.detach()), 0);
    all_close(&kdcl::naive(&ties, &y), &values(&z[1].detach()), 1e-15);
    let teacher = kdcl::minlogit(&logits, &y);
    all_close(&teacher, &[0.0, -1.5, -3.0, -0.6, -0.1, 0.0], 1e-12);
    let ce = |z: &Tensor| -z.log_softmax(-1, None).gather(1, &y.unsqueeze(1), false);
    all_close(&ce(&teacher), &[0.2413, 0.8976], 5e-5);
    for (z, wanted) in z.iter().zip([[0.2413, 1.0019], [1.1041, 1.2705], [1.1803, 2.2184]]) {
        all_close(&ce(z), &wanted, 5e-5);
    }
    let products = kdcl::error_products(&logits.slice(0, 0, 2, 1), &y) / 2.0;
    all_close(&kdcl::general(&products), &[1.5845, -0.5845], 5e-5);
    all_close(&kdcl::general(&rows(&[&[2.0, 0.5], &[0.5, 1.0]])), &[0.25, 0.75], 2e-6);
    all_close(&kdcl::general(&rows(&[&[0.3, 0.3, 0.3], &[0.3, 0.3, 0.3], &[0.3, 0.3, 0.3]])), &[1.0 / 3.0; 3], 1e-9);
}

#[test]
fn kdcl_linear_finds_the_best_mixture() {
    let (z, y) = example();
    // Among two networks whose best mixture is inside, and one whose best is a corner.
    let inside = Tensor::stack(&[rows(&[&[3.0, 0.0, 0.0], &[3.0, 0.0, 0.0]]), rows(&[&[0.0, 0.5, 2.0], &[0.0, 0.2, 2.0]])], 0);
    let corner = tch::no_grad(|| Tensor::stack(&[&z[0], &z[1]], 0));
    let loss = |logits: &Tensor, a: f64| value(&logit::ce(&(logits.get(0) * a + logits.get(1) * (1.0 - a)), &y));
    for logits in [inside, corner] {
        let best = (0..=10_000).map(|i| i as f64 / 1e4).min_by(|a, b| loss(&logits, *a).total_cmp(&loss(&logits, *b))).unwrap();
        let alpha = values(&kdcl::linear(&logits, &y));
        close(alpha[0] + alpha[1], 1.0, 1e-12);
        assert!(loss(&logits, alpha[0]) <= loss(&logits, best) + 1e-6, "{alpha:?}, grid says {best}");
    }
    let three = tch::no_grad(|| Tensor::stack(&z, 0));
    let alpha = values(&kdcl::linear(&three, &y));
    assert!(alpha.iter().all(|&a| a >= 0.0) && (alpha.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{alpha:?}");
}

#[test]
fn kdcl_general_takes_its_weights_from_the_held_out_images() {
    let mut engine = engine("kdcl", "", 2, 5);
    let mixture = |e: &Engine| values(&e.method.state()[0].1);
    begin(&mut engine, 0, 0);
    assert_eq!(mixture(&engine), [0.5, 0.5]);
    step(&mut engine, 0, 0);
    begin(&mut engine, 1, 1);
    // By the definition, sample by sample.
    let mut c = [[0.0; 2]; 2];
    let mut count = 0.0;
    for held in holdout() {
        let held = held.unwrap();
        let outs = tch::no_grad(|| engine.cohort.forward(&held, mcl::nets::layers::Mode::Eval));
        let errors: Vec<Vec<f64>> = outs.iter().map(|o| values(&(o.logit().softmax(-1, Kind::Double) - held.labels.one_hot(CLASSES)))).collect();
        for (m, n) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            c[m][n] += errors[m].iter().zip(&errors[n]).map(|(a, b)| a * b).sum::<f64>();
        }
        count += 8.0;
    }
    let (a, b, d) = (c[0][0] / count, c[0][1] / count, c[1][1] / count);
    let w0 = (d - b) / (a + d - 2.0 * b);
    let got = mixture(&engine);
    close(got[0], w0, 1e-3 * w0.abs().max(1.0));
    close(got[0] + got[1], 1.0, 1e-9);
}

#[test]
fn kdcl_teacher_is_a_constant() {
    let (z, y) = example();
    let outs: Vec<Outputs> = z.iter().map(answer).collect();
    for teacher in ["naive", "minlogit", "linear", "general"] {
        let terms = method("kdcl", &format!("teacher = '{teacher}'"), 3).losses(&outs, &labelled(&y), clock(0, 0)).unwrap();
        for row in terms.rows.iter().filter(|r| r.name == "ens" && value(&r.value) > 1e-9) {
            for (n, logits) in z.iter().enumerate() {
                assert_eq!(reaches(&row.value, logits), Some(n) == row.peer, "{teacher}");
            }
        }
    }
}
