//! Methods that teach by logits (DML, ONE, OKDDip, KDCL, PCL): their losses against closed forms and numbers computed in float64 from
//! the published formulas or by the official code (torch 2.13), where gradients stop and flow, and their sizes.

mod support;

use mcl::losses::logit;
use mcl::methods::{kdcl, okddip, one, pcl};
use mcl::nets::layers::{Mode, Pass};
use mcl::nets::{self, Outputs};
use mcl::train::step::Engine;
use support::method_tests::*;
use tch::{Device, Kind, Tensor};

// Deep Mutual Learning.

#[test]
fn kl_of_logits_at_temperatures() {
    let (z, _) = example();
    // torch.nn.functional.kl_div in float64 on these logits, times T^2.
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
    // cross_entropy plus the mean kl_div to each peer, summed over the networks, by torch in float64.
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
    // softmax(relu(scores)) by torch in float64, to four places.
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
    // T^2 KL of the mean of the three networks' logits to the first's at T = 3: torch.nn.functional.kl_div in float64.
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
    // Half of 80 epochs: exp(-5/4).
    for (options, wanted) in [("", 1.0), ("preset = 'original'", 0.2865047969)] {
        let terms = method("one", options, 3).losses(&outs, &labelled(&y), clock(40, 0)).unwrap();
        assert!(terms.rows.iter().filter(|r| r.name == "ens").all(|r| (r.weight - wanted).abs() < 1e-9));
    }
}

#[test]
fn one_trains_its_gate_and_counts_its_parameters() {
    // The sum of the plain network's parameters with 100 classes, the trunk once, the last stage and the classifier M times, and of the
    // gate's: Linear(the trunk's width -> M) and a BatchNorm of M.
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
    // As for ONE's ensemble: the mean of the logits is the target.
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
    // The trunk once, the last stage and the classifier three times, and two projections of dim x dim/8 without bias.
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
    // Cross-entropies by torch in float64, to four places; the weights of `general` from C^-1 1 / (1' C^-1 1) by torch.linalg.solve.
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

// PCL.

#[test]
fn pcl_mean_teachers_are_running_averages() {
    // min(1 - 1/(g + 1), 0.999) at step g.
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
    // The ramp in epoch 40 of 80: exp(-5/4).
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
    // The trunk once, the last stage and the classifier three times, and the ensemble: Linear(3 x 64 -> 100).
    assert_eq!((trained(&engine), group(&engine, "ensemble").params.count()), (1_212_384, 19_300));
    let mixed = try_build("pcl", "", &archs(&["resnet8", "resnet20"]), Kind::Float, 1).unwrap();
    assert_eq!(mixed.needs().shared_stages, 0, "different architectures are independent networks");
}
