//! The rivals of the paper's tables: their losses against closed forms and numbers computed from the published formulas (or the
//! official code) in float64, their gradients' stops and flows, their sizes, and what every method must do: step, stay finite, resume.

use std::collections::HashMap;

use mcl::data::Batch;
use mcl::losses::contrast::{self, Contrast, Mimicry, Recall};
use mcl::losses::logit;
use mcl::losses::terms::Terms;
use mcl::methods::{self, Clock, Method, Task, Views, afd, ckd_mkt, ffsd, kdcl, okddip, one, pcl};
use mcl::nets::layers::{Mode, Pass};
use mcl::nets::{self, Arch, Outputs};
use mcl::optim::{Optimizer, Rule, grads, schedule::ramp};
use mcl::recipe::{Data, Recipe, Train};
use mcl::train::step::{Engine, StepReport};
use tch::{Device, Kind, Tensor};

const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };
const CLASSES: i64 = 4;

fn archs(names: &[&str]) -> Vec<&'static Arch> {
    names.iter().map(|name| nets::find(name).unwrap()).collect()
}

/// A task on four classes of ten images, in double precision unless networks run.
fn task<'a>(archs: &'a [&'static Arch], labels: &'a [i64], kind: Kind, seed: u64) -> Task<'a> {
    let train = Train { batch: 8, seed, ..Train::default() };
    let recipe = Recipe { train, data: Data { holdout: 5, ..Data::default() }, ..Recipe::default() };
    Task { kind, ..Task::new(&recipe, archs, CLASSES, labels, Device::Cpu) }
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
    Engine::of(&task, method)
}

fn engine(name: &str, options: &str, count: usize, seed: u64) -> Engine {
    engine_on(name, options, &vec!["resnet8"; count], CLASSES, seed)
}

fn clock(epoch: usize, step: usize) -> Clock {
    Clock { epoch, batch: step, step, lr: 0.05, seed: 7 }
}

/// Class pairs of 16 x 16 images, other ones for each step and view.
fn batch(step: usize, views: usize) -> Batch {
    let wave = |v: usize| {
        (Tensor::arange(8 * 3 * 16 * 16, (Kind::Float, Device::Cpu)) * (0.37 + 0.11 * (step * 3 + v) as f64)).sin().view([8, 3, 16, 16])
    };
    let (labels, index) = ([0i64, 0, 1, 1, 2, 2, 3, 3], [0i64, 4, 1, 5, 2, 6, 3, 7]);
    Batch {
        views: (0..views).map(wave).collect(),
        labels: Tensor::from_slice(&labels),
        index: Tensor::from_slice(&index),
        noise: step as u64,
    }
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
    Outputs {
        maps: vec![map.shallow_clone(), map.shallow_clone(), map.shallow_clone()],
        pre_pool: map,
        feats: vec![Tensor::zeros([size, 64], (logits.kind(), Device::Cpu))],
        logits: vec![logits.shallow_clone()],
    }
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
    ("afd", "", &[2, 3]),
    ("pcl", "", &[2, 3]),
    ("pcl", "branch = false", &[2, 3]),
    ("ffsd", "", &[2, 3]),
    ("ckd_mkt", "pretrain_epochs = 1", &[2, 3]),
    ("ckd_mkt", "pretrain_epochs = 0\ngamma = 0.0", &[2]),
    ("mcl", "", &[2, 3]),
    ("mcl", "branch = true", &[3]),
    ("mcl", "logit = 'ensemble'", &[2, 3]),
    ("mcl", "logit = 'dml'", &[2]),
    ("mcl", "mode = 'reference'\nlogit = 'ensemble'", &[2, 3]),
    ("mcl", "mining = 'memory'\nnegatives = 20", &[2, 3]),
    ("mcl", "mode = 'reference'\nmining = 'memory'\nnegatives = 20", &[2]),
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
            for i in 0..15 {
                let report = engine
                    .step(
                        &[Batch { views: batch.views.iter().map(Tensor::shallow_clone).collect(), ..labelled(&batch.labels) }],
                        Clock { lr: 0.02, ..clock(0, i) },
                        None,
                    )
                    .unwrap();
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
    let error =
        try_build(name, options, &archs(names), Kind::Float, 1).err().unwrap_or_else(|| panic!("{name} {options} {names:?} was accepted"));
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn what_a_method_cannot_do_is_refused_with_the_reason() {
    refused("dml", "", &["resnet8"], "dml needs 2 networks or more and [cohort] archs has 1");
    refused("dml", "temperature = 0.0", &["resnet8", "resnet8"], "[method] temperature = 0; accepted: a number above 0");
    refused("dml", "temprature = 2.0", &["resnet8", "resnet8"], "unknown field `temprature`, expected `temperature`");
    refused("dml", "preset = 'mine'", &["resnet8", "resnet8"], "[method] preset = \"mine\"; accepted: \"paper\", \"original\"");
    refused(
        "one",
        "",
        &["resnet8", "resnet20"],
        "one needs networks of one architecture and [cohort] archs has resnet8 and resnet20: they are branches of one trunk",
    );
    refused("one", "weight = -1.0", &["resnet8", "resnet8"], "[method] weight = -1; accepted: 0 or more");
    refused("okddip", "", &["resnet8", "resnet8"], "okddip needs 3 networks or more");
    refused("okddip", "", &["resnet8", "resnet8", "resnet20"], "set method.branch=false");
    refused("okddip", "branch = false", &["resnet8", "resnet110", "resnet8"], "resnet8 has 64 and resnet110 has 256");
    refused("kdcl", "teacher = 'best'", &["resnet8", "resnet8"], "unknown variant `best`");
    refused("afd", "adam_lr = -1.0", &["resnet8", "resnet8"], "[method] adam_lr = -1; accepted: a number above 0");
    refused("pcl", "branch = true", &["resnet8", "resnet20"], "set method.branch=false");
    refused("pcl", "momentum = 1.0", &["resnet8", "resnet8"], "[method] momentum = 1; accepted: 0 up to, but without, 1");
    refused("ffsd", "", &["resnet8", "resnet20"], "ffsd needs networks of one architecture");
    refused("mcl", "branch = true", &["resnet8", "resnet20"], "set method.branch=false");
    refused("mcl", "dim = 0", &["resnet8", "resnet8"], "[method] dim = 0; accepted: 1 or more");
    refused("ckd_mkt", "", &["resnet8"], "ckd_mkt needs 2 networks or more");
    refused("ckd_mkt", "pretrain_epochs = 0", &["resnet8", "resnet8"], "self-teachers that know nothing");
    let (nets, labels) = (archs(&["resnet8", "resnet8"]), labels());
    let error = (methods::find("kdcl").unwrap().build)(&Task { holdout: 0, ..task(&nets, &labels, Kind::Float, 1) }, toml::Table::new())
        .err()
        .unwrap();
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
    for (arch, count, wanted) in [
        ("resnet32", 2, 832_990),
        ("resnet32", 3, 1_193_189),
        ("resnet110", 2, 2_066_718),
        ("resnet110", 3, 2_962_437),
        ("hcgnet_a1", 2, 1_596_413),
        ("hcgnet_a1", 3, 2_090_046),
    ] {
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
    let outs = okddip.cohort.forward(&batch, Mode::Train);
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
    let whole = tch::no_grad(|| engine.cohort.forward(&batch, Mode::Eval));
    let mut frozen = engine.frozen(CLASSES, 1);
    for (m, peer) in engine.shipped().into_iter().enumerate() {
        let (net, params) = nets::Network::build(peer.arch, CLASSES, 99, Device::Cpu, Kind::Float);
        params.copy_from(&peer.params);
        let alone = tch::no_grad(|| net.forward(&batch.views[0], Pass::EVAL));
        let shipped = tch::no_grad(|| peer.forward(&batch.views[0], Pass::EVAL));
        assert!(same(alone.logit(), whole[m].logit()) && same(alone.logit(), shipped.logit()));
        // Folding BatchNorm into convolutions rounds differently.
        let asked = frozen[m].extract(&batch.views[0], false).unwrap();
        assert!((asked.logit() - alone.logit()).abs().max().double_value(&[]) < 1e-5 && asked.logits.len() == 1);
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
        let outs = tch::no_grad(|| engine.cohort.forward(&held, Mode::Eval));
        let errors: Vec<Vec<f64>> =
            outs.iter().map(|o| values(&(o.logit().softmax(-1, Kind::Double) - held.labels.one_hot(CLASSES)))).collect();
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

/// The forward pass of an engine on a batch and its losses, with their graph.
fn evaluated(engine: &mut Engine, at: Clock) -> (Vec<Outputs>, Terms, Batch) {
    let batch = batch_for(engine, 0);
    engine.method.prepare(&batch, at).unwrap();
    let outs = engine.cohort.forward(&batch, Mode::Train);
    let terms = engine.method.losses(&outs, &batch, at).unwrap();
    (outs, terms, batch)
}

fn row<'a>(terms: &'a Terms, name: &str, peer: Option<usize>) -> &'a Tensor {
    &terms.rows.iter().find(|r| r.name == name && r.peer == peer).unwrap_or_else(|| panic!("no row {name} of {peer:?}")).value
}

fn group<'a>(engine: &'a Engine, name: &str) -> &'a mcl::methods::Group {
    &engine.groups.iter().find(|(g, _)| g.name == name).unwrap().0
}

// CKD-MKT.

fn triangles() -> (Tensor, Tensor) {
    (rows(&[&[0.0, 0.0], &[3.0, 0.0], &[0.0, 4.0]]), rows(&[&[0.0, 0.0], &[1.0, 0.0], &[0.0, 1.0]]))
}

#[test]
fn ckd_mkt_relations() {
    let (a, b) = triangles();
    all_close(&ckd_mkt::distances(&a), &[0.0, 0.75, 1.0, 0.75, 0.0, 1.25, 1.0, 1.25, 0.0], 1e-12);
    all_close(&ckd_mkt::distances(&b), &[0.0, 0.8787, 0.8787, 0.8787, 0.0, 1.2426, 0.8787, 1.2426, 0.0], 5e-5);
    close(value(&ckd_mkt::relation(&ckd_mkt::distances(&b), &ckd_mkt::distances(&a))), 0.0034812488, 1e-9);
    close(value(&ckd_mkt::relation(&ckd_mkt::angles(&b), &ckd_mkt::angles(&a))), 0.0007444820, 1e-9);
    // The angle at (0, 0) between (3, 0) and (0, 4) is a right one, at (3, 0) between (0, 0) and (0, 4) it has cosine 3/5.
    close(ckd_mkt::angles(&a).double_value(&[0, 1, 2]), 0.0, 1e-12);
    close(ckd_mkt::angles(&a).double_value(&[1, 0, 2]), 0.6, 1e-12);
}

#[test]
fn ckd_mkt_relations_do_not_see_scale_and_rotation() {
    let (a, b) = triangles();
    let turn = rows(&[&[0.6, 0.8], &[-0.8, 0.6]]);
    let moved = a.matmul(&turn) * 7.0;
    for psi in [ckd_mkt::distances, ckd_mkt::angles] {
        close(value(&ckd_mkt::relation(&psi(&b), &psi(&moved))), value(&ckd_mkt::relation(&psi(&b), &psi(&a))), 1e-12);
    }
}

#[test]
fn ckd_mkt_survives_equal_features() {
    let equal = rows(&[&[1.0, 2.0], &[1.0, 2.0], &[0.0, 4.0]]).set_requires_grad(true);
    for psi in [ckd_mkt::distances, ckd_mkt::angles] {
        let loss = ckd_mkt::relation(&psi(&triangles().0), &psi(&equal));
        let grad = Tensor::run_backward(&[&loss], &[&equal], false, false).remove(0);
        assert!(values(&grad).iter().chain(&values(&loss)).all(|v| v.is_finite()), "{grad:?}");
    }
}

#[test]
fn ckd_mkt_trains_alone_first_and_then_from_new_weights() {
    let mut engine = engine("ckd_mkt", "pretrain_epochs = 2", 2, 3);
    assert_eq!(engine.method.extra_epochs(), 2);
    assert_eq!(method("ckd_mkt", "", 2).extra_epochs(), 300, "as many epochs as the recipe has");
    for epoch in 0..2 {
        begin(&mut engine, epoch, epoch);
        let report = step(&mut engine, epoch, epoch);
        assert!(report.terms.iter().all(|t| t.name == "task" && t.weight == 1.0));
    }
    let first = copies(&engine);
    begin(&mut engine, 2, 2);
    let second = copies(&engine);
    for (name, t) in engine.theta.vars.iter().filter(|(n, _)| n.ends_with("conv1.weight")) {
        assert!(same(&second[&format!("method.teacher.{name}")], &first[name]), "the self-teacher is the network of the first phase");
        assert!(!same(t, &first[name]), "{name} starts anew");
        assert!(value(&first[&format!("optimizer.first.{name}")].abs().max()) > 0.0);
        assert_eq!(value(&second[&format!("optimizer.first.{name}")].abs().max()), 0.0, "momentum of the first phase is gone");
    }
    let (outs, terms, batch) = evaluated(&mut engine, clock(2, 2));
    for name in ["task", "distance", "angle", "mutual", "self"] {
        for k in 0..2 {
            assert!(reaches(row(&terms, name, Some(k)), outs[k].feat()), "{name}");
            assert!(!reaches(row(&terms, name, Some(k)), outs[1 - k].feat()), "{name} teaches one network alone");
        }
    }
    // The self-teacher answers in eval mode with the weights of the first phase.
    let arch = engine.cohort.peers[0].arch;
    let (net, params) = nets::Network::build(arch, CLASSES, 1, Device::Cpu, Kind::Float);
    let saved = |name: &str| first[&format!("peer.0.net.{name}")].shallow_clone();
    tch::no_grad(|| params.all().for_each(|(n, t)| t.shallow_clone().copy_(&saved(n))));
    let target = tch::no_grad(|| net.forward(&batch.views[0], Pass::EVAL));
    close(value(row(&terms, "self", Some(0))), value(&logit::kl(target.logit(), outs[0].logit(), 3.0)), 1e-6);
    begin(&mut engine, 3, 3);
    assert!(same(&engine.theta.vars[0].1, &second[&engine.theta.vars[0].0]), "only the boundary starts anew");
}

// PCL.

#[test]
fn pcl_mean_teachers_are_running_averages() {
    for (step, wanted) in [(0, 0.0), (1, 0.5), (9, 0.9), (998, 0.998998998998999), (999, 0.999), (5000, 0.999)] {
        close(pcl::kept(step, 0.999), wanted, 1e-12);
    }
    let mut engine = engine("pcl", "", 2, 3);
    begin(&mut engine, 0, 0);
    let mean = |e: &Engine, name: &str| e.method.state().into_iter().find(|(n, _)| n == &format!("teacher.{name}")).unwrap().1.copy();
    let name = "peer.1.net.layer3.0.conv1.weight";
    let live = |e: &Engine| e.theta.vars.iter().find(|(n, _)| n == name).unwrap().1.copy();
    assert!(same(&mean(&engine, name), &live(&engine)), "mean teachers start as the networks");
    step(&mut engine, 0, 0);
    let first = live(&engine);
    assert!(same(&mean(&engine, name), &first), "after one step they are copies");
    step(&mut engine, 0, 1);
    let error = mean(&engine, name) - (first + live(&engine)) / 2.0;
    assert!(value(&error.abs().max()) < 1e-7);
    step(&mut engine, 0, 2);
    assert!(
        !same(&mean(&engine, "peer.0.net.bn1.running_mean"), &copies(&engine)["peer.0.net.bn1.running_mean"]),
        "running statistics are their own"
    );
    assert_eq!(engine.shipped().len(), 2);
    assert!(
        same(&engine.shipped()[1].params.vars.iter().find(|(n, _)| n == "layer3.0.conv1.weight").unwrap().1, &mean(&engine, name)),
        "and they are what ships"
    );
}

#[test]
fn pcl_losses() {
    let mut engine = engine("pcl", "", 2, 3);
    begin(&mut engine, 0, 0);
    // Before any step the mean teacher of a network answers as it does, on its view: KL of the other's logits.
    let (outs, terms, _) = evaluated(&mut engine, clock(40, 0));
    close(value(row(&terms, "mean_teacher", Some(0))), value(&logit::kl(outs[1].logit(), outs[0].logit(), 3.0)), 1e-6);
    assert!(
        terms.rows.iter().filter(|r| ["ens", "mean_teacher"].contains(&r.name)).all(|r| (r.weight - 0.2865047969).abs() < 1e-9),
        "80 of 300 epochs"
    );
    for m in 0..2 {
        for name in ["ens", "mean_teacher", "task"] {
            assert!(
                reaches(row(&terms, name, Some(m)), outs[m].logit()) && !reaches(row(&terms, name, Some(m)), outs[1 - m].logit()),
                "{name}"
            );
        }
        assert!(reaches(row(&terms, "task_ensemble", None), outs[m].feat()));
    }
}

#[test]
fn pcl_runs_a_shared_trunk_once_per_view_and_counts_its_parameters() {
    let mut engine = engine("pcl", "", 3, 3);
    begin(&mut engine, 0, 0);
    step(&mut engine, 0, 0);
    let state = copies(&engine);
    assert_eq!(state["peer.0.net.bn1.num_batches_tracked"].int64_value(&[]), 3);
    assert_eq!(state["method.teacher.peer.0.net.bn1.num_batches_tracked"].int64_value(&[]), 3);
    assert_eq!(state["peer.0.net.layer3.0.bn1.num_batches_tracked"].int64_value(&[]), 1);
    let engine = engine_on("pcl", "", &["resnet32"; 3], 100, 1);
    assert_eq!((trained(&engine), group(&engine, "ensemble").params.count()), (1_212_384, 19_300));
    let mixed = try_build("pcl", "", &archs(&["resnet8", "resnet20"]), Kind::Float, 1).unwrap();
    assert_eq!(mixed.needs().shared_stages, 0, "different architectures are independent networks");
}

// AFD.

#[test]
fn afd_losses() {
    let half = Tensor::full([4, 1, 3, 3], 0.5, (Kind::Double, Device::Cpu));
    close(value(&afd::discriminator_loss(&half, &half)), 0.5, 1e-15);
    close(value(&afd::generator_loss(&half)), 0.25, 1e-15);
    close(value(&afd::discriminator_loss(&half.ones_like(), &half.zeros_like())), 0.0, 1e-15);
    close(value(&afd::generator_loss(&half.zeros_like())), 1.0, 1e-15);
}

#[test]
fn afd_matches_distributions_along_a_cycle() {
    let (z, y) = example();
    let y = Tensor::cat(&[&y, &y], 0);
    let map = |m: usize| {
        (Tensor::arange(4 * 64 * 16, (Kind::Double, Device::Cpu)) * (0.3 + 0.1 * m as f64))
            .sin()
            .view([4, 64, 4, 4])
            .set_requires_grad(true)
    };
    let maps: Vec<Tensor> = (0..3).map(map).collect();
    let afd = method("afd", "", 3);
    let with = |maps: &[Tensor]| {
        let outs: Vec<Outputs> =
            maps.iter().zip(&z).map(|(map, z)| Outputs { pre_pool: map.shallow_clone(), ..answer(&Tensor::cat(&[z, z], 0)) }).collect();
        afd.losses(&outs, &labelled(&y), clock(0, 0)).unwrap()
    };
    let plain = with(&maps);
    let order = Tensor::from_slice(&[2i64, 0, 3, 1]);
    let shuffled = with(&[maps[0].index_select(0, &order), maps[1].shallow_clone(), maps[2].shallow_clone()]);
    for m in 0..3 {
        close(value(row(&shuffled, "discriminator", Some(m))), value(row(&plain, "discriminator", Some(m))), 1e-12);
    }
    // Network m is told apart from m - 1: other maps of network 0 change the verdict on 0 and on 1, not on 2.
    let other = with(&[map(7), maps[1].shallow_clone(), maps[2].shallow_clone()]);
    let moved = |m: usize| (value(row(&other, "discriminator", Some(m))) - value(row(&plain, "discriminator", Some(m)))).abs() > 1e-9;
    assert_eq!([moved(0), moved(1), moved(2)], [true, true, false]);
    for m in 0..3 {
        for (n, map) in maps.iter().enumerate() {
            assert!(!reaches(row(&plain, "discriminator", Some(m)), map), "discriminators learn from constants");
            assert_eq!(reaches(row(&plain, "adversarial", Some(m)), map), m == n);
        }
    }
    assert!(plain.rows.iter().all(|r| (r.name == "adversarial") == (r.apart == Some("adversarial"))));
}

#[test]
fn afd_steps_with_two_gradients_from_one_forward_pass() {
    let mut engine_a = engine("afd", "", 2, 3);
    step(&mut engine_a, 0, 0);
    // The same by hand: both gradients at the same weights, SGD with the one, then Adam with the other, then the discriminators.
    let mut engine_b = engine("afd", "", 2, 3);
    let (_, terms, _) = evaluated(&mut engine_b, clock(0, 0));
    let adam = Rule::Adam { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.1 };
    let (extractors, judges) =
        (group(&engine_b, "adversarial").params.shallow_clone(), group(&engine_b, "discriminator").params.shallow_clone());
    assert!(extractors.vars.iter().all(|(n, _)| !n.contains(".fc.")), "classifiers are no feature extractors");
    let sum = |names: &[&str]| {
        terms.rows.iter().filter(|r| names.contains(&r.name)).map(|r| r.value.shallow_clone()).reduce(|a, b| a + b).unwrap()
    };
    let (logit, generator, judge) = (sum(&["task", "mutual"]), sum(&["adversarial"]), sum(&["discriminator"]));
    let keep = |loss: &Tensor, vars: &mcl::params::Params| mcl::optim::grads_keeping_graph(loss, &vars.tensors());
    let (a, b) = (keep(&logit, &engine_b.theta), keep(&generator, &extractors));
    let c = grads(&judge, &judges.tensors(), false);
    assert!(b.iter().any(|g| value(&g.abs().max()) > 0.0));
    Optimizer::new(RULE, &engine_b.theta).step(&engine_b.theta, &a, 0.05);
    Optimizer::new(adam, &extractors).step(&extractors, &b, 2e-5);
    Optimizer::new(adam, &judges).step(&judges, &c, 2e-5);
    let (got, wanted) = (copies(&engine_a), copies(&engine_b));
    for (name, t) in got.iter().filter(|(n, _)| !n.contains("optimizer")) {
        let error = value(&(t - &wanted[name]).abs().max());
        assert!(error < 1e-6, "{name} is off by {error}");
    }
}

#[test]
fn afd_brings_maps_to_one_width_and_decays_its_rates() {
    let engine = engine_on("afd", "", &["resnet8", "resnet110"], CLASSES, 1);
    let transfer: Vec<&String> =
        group(&engine, "adversarial").params.vars.iter().map(|(n, _)| n).filter(|n| n.starts_with("transfer.")).collect();
    assert_eq!(
        transfer,
        ["transfer.0.bn.bias", "transfer.0.bn.weight", "transfer.0.conv.weight"],
        "only the narrower network's maps are widened"
    );
    assert_eq!(group(&engine, "discriminator").params.count(), 2 * (256 * 128 * 4 + 128 + 2 * 128 + 128 * 4 + 1));
    for name in ["adversarial", "discriminator"] {
        for (epoch, wanted) in [(0, 2e-5), (74, 2e-5), (75, 2e-6), (149, 2e-6), (150, 2e-7), (299, 2e-7)] {
            close(group(&engine, name).rate.at(clock(epoch, 0)), wanted, 1e-18);
        }
    }
    let mut engine = engine_on("afd", "", &["resnet8", "resnet110"], CLASSES, 1);
    let report = step(&mut engine, 0, 0);
    assert!(report.terms.iter().all(|t| value(&t.value).is_finite()));
}

// FFSD.

#[test]
fn ffsd_attention_losses() {
    let (x, y) = (rows(&[&[2.0, 1.0, 1.0, 1.0, 3.0, 2.0]]), rows(&[&[1.0, 2.0, 2.0, 4.0, 0.5, 3.0]]));
    all_close(&ffsd::opposite(&y), &[2.9262, 5.5106, 5.5106, 5.1689, 0.0854, 5.3397], 5e-5);
    close(value(&ffsd::diversity(&x, &y)), 18.4641668376, 1e-9);
    close(value(&ffsd::difference(&x, &y)), 0.1104531234, 1e-9);
    close(value(&ffsd::difference(&x, &(&x * 5.0))), 0.0, 1e-15);
    let map = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).view([1, 2, 1, 2]);
    all_close(&ffsd::attention(&map), &[(1.0 + 9.0) / 2.0, (4.0 + 16.0) / 2.0], 1e-12);
}

#[test]
fn ffsd_counts_its_parameters() {
    let engine = engine_on("ffsd", "", &["resnet32"; 2], 100, 1);
    assert_eq!(engine.cohort.peers.len(), 3, "two students and the leader");
    assert_eq!(group(&engine, "fusion").params.count(), 16_228);
    assert_eq!(group(&engine, "transform").params.count(), 9_152);
    assert_eq!(group(&engine, "decoders").params.count(), 2 * 23_136);
    let wide = engine_on("ffsd", "", &["resnet18"; 2], 1000, 1);
    assert_eq!(group(&wide, "fusion").params.count(), 1_049_576);
    assert_eq!(group(&wide, "transform").params.count(), 531_968);
    assert_eq!(group(&wide, "decoders").params.count(), 2 * 1_549_184);
    assert!(engine.shipped().len() == 1 && std::ptr::eq(engine.shipped()[0], &engine.cohort.peers[2]));
    for (epoch, wanted) in [(0, 1e-3), (149, 1e-3), (150, 1e-4), (225, 1e-5)] {
        close(group(&engine, "decoders").rate.at(clock(epoch, 0)), wanted, 1e-15);
    }
    assert_eq!(group(&engine, "fusion").rule, Rule::Sgd { momentum: 0.9, weight_decay: 1e-5, nesterov: true });
}

#[test]
fn ffsd_stops_every_gradient_between_networks() {
    let mut engine = engine("ffsd", "", 2, 3);
    let (outs, terms, _) = evaluated(&mut engine, clock(0, 0));
    assert!(!terms.rows.iter().any(|r| r.name == "diversity" && r.peer == Some(0)), "the first student has nobody to look away from");
    let reached =
        |name: &str, peer: Option<usize>| (0..3).filter(|&n| reaches(row(&terms, name, peer), &outs[n].maps[0])).collect::<Vec<_>>();
    for (name, peer, wanted) in [
        ("task", Some(0), vec![0]),
        ("mutual", Some(0), vec![0]),
        ("mutual", Some(1), vec![1]),
        ("diversity", Some(1), vec![1]),
        ("self_distillation", Some(1), vec![1]),
        ("task_fusion", None, vec![]),
        ("ens", None, vec![]),
        ("task", Some(2), vec![2]),
        ("leader", Some(2), vec![2]),
        ("fusion", Some(2), vec![2]),
        ("decoder", Some(1), vec![]),
        ("decoder", Some(2), vec![]),
    ] {
        assert_eq!(reached(name, peer), wanted, "{name} of {peer:?}");
    }
    let trains = |name: &str, peer, of: &str| group(&engine, of).params.vars.iter().any(|(_, v)| reaches(row(&terms, name, peer), v));
    assert!(trains("task_fusion", None, "fusion") && !trains("leader", Some(2), "fusion") && !trains("fusion", Some(2), "fusion"));
    assert!(trains("fusion", Some(2), "transform") && trains("decoder", Some(1), "decoders"));
    assert!(
        !trains("fusion", Some(2), "decoders") && !trains("self_distillation", Some(1), "decoders"),
        "decoders are trained by their own rows alone"
    );
}

#[test]
fn ffsd_weights_warm_up_over_five_epochs() {
    let mut engine = engine("ffsd", "", 2, 3);
    for (epoch, wanted) in [(0, 0.0408), (1, 0.1653), (2, 0.4493), (3, 0.8187), (4, 1.0), (20, 1.0)] {
        let (_, terms, _) = evaluated(&mut engine, clock(epoch, 0));
        for (name, base) in [("diversity", 1e-5), ("self_distillation", 1e-5), ("fusion", 10.0), ("decoder", 1000.0)] {
            let weight = terms.rows.iter().find(|r| r.name == name).unwrap().weight;
            close(weight / base, wanted, 5e-5);
        }
    }
}

// MCL.

/// Rows brought to length 1.
fn unit(t: &Tensor) -> Tensor {
    t / t.norm_scalaropt_dim(2.0, [-1i64].as_slice(), true)
}

fn table(rows: i64, f: impl Fn(f64, f64) -> f64) -> Tensor {
    let values: Vec<f64> = (0..rows).flat_map(|i| (0..3).map(move |j| (i as f64, j as f64))).map(|(i, j)| f(i, j)).collect();
    unit(&Tensor::from_slice(&values).view([rows, 3]))
}

#[test]
fn mcl_from_memory_uses_own_banks() {
    let banks = [table(6, |i, j| (1.0 + 2.0 * i + j).sin()), table(6, |i, j| (1.0 + i + 2.0 * j).cos())];
    let embeds = Tensor::stack(&[table(2, |i, j| (0.5 + i * j + i).sin()), table(2, |i, j| (0.3 + 2.0 * i + j).cos())], 0);
    // Two positives (the image itself and a class mate), then two negatives.
    let columns = Tensor::from_slice(&[0i64, 1, 3, 5, 3, 4, 0, 2]);
    let recalled = banks.each_ref().map(|b| b.index_select(0, &columns).view([2, 4, 3]));
    let released = Mimicry { temperature: 3.0, diagonal: true };
    let parts = contrast::mcl_memory(&embeds, &recalled, 0.07, released, Recall::Released);
    close(value(&parts.vcl), 33.8962417828, 1e-8);
    close(value(&parts.icl), 10.2643782526, 1e-8);
    close(value(&parts.soft_icl), 25.9041556117, 1e-8);
    // soft VCL by its definition: each network's distribution over its own bank, without the image itself.
    let log_p = |m: usize| {
        (recalled[m].slice(1, 1, 4, 1).matmul(&embeds.get(m as i64).unsqueeze(-1)).squeeze_dim(-1) / 0.07 / 3.0).log_softmax(-1, None)
    };
    let kl = |t: &Tensor, s: &Tensor| value(&(t.exp() * (t - s)).sum_dim_intlist(-1i64, false, None).mean(None)) * 9.0;
    close(value(&parts.soft_vcl), kl(&log_p(0), &log_p(1)) + kl(&log_p(1), &log_p(0)), 1e-9);
    // With one positive it is the text's loss: half of the layer-wise loss of one layer with lambda 1.
    let recalled = recalled.map(|b| b.slice(1, 1, 4, 1));
    let ours = contrast::mcl_memory(&embeds, &recalled, 0.07, Mimicry::PAPER, Recall::Paper);
    let pairs = contrast::Pairs::new(vec![(0, 1)], 2, &embeds);
    let ones = Tensor::ones([1, 2], (Kind::Double, Device::Cpu));
    let (layered, _) = contrast::l_mcl_memory(&embeds, &[0, 1], &pairs, &ones, &recalled, 0.07, Mimicry::PAPER, Recall::Paper, None);
    for (a, b) in
        [(&ours.vcl, &layered.vcl), (&ours.icl, &layered.icl), (&ours.soft_vcl, &layered.soft_vcl), (&ours.soft_icl, &layered.soft_icl)]
    {
        close(value(a), value(b) / 2.0, 1e-9);
    }
}

#[test]
fn mcl_weighs_the_contrastive_terms_and_adds_a_logit_level() {
    let mut engine = engine("mcl", "logit = 'ensemble'", 2, 3);
    let (outs, terms, batch) = evaluated(&mut engine, clock(0, 0));
    let weight = |name: &str| terms.rows.iter().find(|r| r.name == name).unwrap().weight;
    assert_eq!([weight("vcl"), weight("icl"), weight("soft_vcl"), weight("soft_icl"), weight("ens")], [0.1, 0.1, 1.0, 1.0, 1.0]);
    // zeta by hand from the group's weights.
    let find = |name: String| group(&engine, "heads").params.vars.iter().find(|(n, _)| *n == name).unwrap().1.detach();
    let embed = |m: usize| {
        let linear = |x: &Tensor, layer: usize| x.linear(&find(format!("{m}.{layer}.weight")), Some(&find(format!("{m}.{layer}.bias"))));
        unit(&linear(&linear(&outs[m].feat().detach(), 0).relu(), 2))
    };
    let contrast = Contrast::in_batch(&batch.labels, 0.1, Kind::Float);
    let (a, b) = (embed(0), embed(1));
    close(value(row(&terms, "vcl", None)), value(&(contrast::vcl(&a, &contrast) + contrast::vcl(&b, &contrast))), 1e-4);
    close(value(row(&terms, "icl", None)), value(&(contrast::icl(&a, &b, &contrast) + contrast::icl(&b, &a, &contrast))), 1e-4);
    let soft = contrast::soft_icl(&a, &b, &contrast, Mimicry::PAPER) + contrast::soft_icl(&b, &a, &contrast, Mimicry::PAPER);
    close(value(row(&terms, "soft_icl", None)), value(&soft), 1e-4);
    let mean = (outs[0].logit() + outs[1].logit()) / 2.0;
    close(value(row(&terms, "ens", Some(1))), value(&logit::kl(&mean, outs[1].logit(), 3.0)), 1e-6);
    assert!(!reaches(row(&terms, "ens", Some(1)), outs[0].logit()));
    assert_eq!(group(&engine, "heads").params.count(), 2 * (64 * 128 + 128 + 128 * 128 + 128));
}

#[test]
fn mcl_of_three_teaches_only_the_last_in_the_released_code() {
    for (mode, wanted) in [("paper", vec![0, 1, 2]), ("reference", vec![2])] {
        let mut engine = engine("mcl", &format!("mode = '{mode}'\nlogit = 'ensemble'"), 3, 3);
        let (_, terms, _) = evaluated(&mut engine, clock(0, 0));
        assert_eq!(terms.rows.iter().filter(|r| r.name == "ens").map(|r| r.peer.unwrap()).collect::<Vec<_>>(), wanted);
    }
    assert_eq!(method("mcl", "branch = true", 3).needs().shared_stages, 1);
    assert_eq!(method("mcl", "preset = 'original'", 2).options()["mode"].as_str(), Some("reference"));
    assert_eq!(method("mcl", "mining = 'memory'", 2).options()["tau"].as_float(), Some(0.07));
}

#[test]
fn mcl_bank_takes_in_the_batch() {
    let mut engine = engine("mcl", "mining = 'memory'\nnegatives = 20", 2, 3);
    let bank = |e: &Engine| e.method.state().into_iter().find(|(n, _)| n == "bank.0").unwrap().1.copy();
    let before = bank(&engine);
    let (outs, ..) = evaluated(&mut engine, clock(0, 0));
    let head = |layer: usize, part: &str| {
        group(&engine, "heads").params.vars.iter().find(|(n, _)| *n == format!("0.{layer}.{part}")).unwrap().1.detach()
    };
    let feats = outs[0].feat().detach();
    let v = unit(&feats.linear(&head(0, "weight"), Some(&head(0, "bias"))).relu().linear(&head(2, "weight"), Some(&head(2, "bias"))));
    let wanted = unit(&((before.get(4) + v.get(1)) / 2.0));
    step(&mut engine, 0, 0);
    let after = bank(&engine);
    assert!(value(&(after.get(4) - wanted).abs().max()) < 1e-5, "image 4 is the second of the batch");
    assert!(same(&after.get(20), &before.get(20)), "an image that was not in the batch stays");
}
