//! The method as a whole: its parts at known values, its options, its refusals.

use mcl::cohort::Cohort;
use mcl::data::{Batch, Sampling};
use mcl::losses::contrast::Pairs;
use mcl::losses::terms::Terms;
use mcl::losses::unit::Norm;
use mcl::methods::l_mcl::{LMcl, Matching, Options, Setting, Shape};
use mcl::methods::parts::meta_network::MetaNetwork;
use mcl::methods::{self, Clock, Method, Needs, Task};
use mcl::nets::{self, Outputs};
use mcl::optim::Rule;
use mcl::params::Scope;
use mcl::recipe::{Recipe, Train};
use mcl::system::ranks::Ranks;
use tch::{Device, Kind, Tensor};

const RULE: Rule = Rule::Sgd { momentum: 0.9, weight_decay: 5e-4, nesterov: true };
const CLOCK: Clock = Clock { epoch: 0, batch: 0, step: 0, lr: 0.1, seed: 0 };
const LABELS: [i64; 6] = [0, 0, 1, 1, 2, 2];

fn method(options: Options, shapes: &[Shape]) -> LMcl {
    LMcl::new(
        options,
        &Setting {
            shapes,
            train_labels: &LABELS,
            batch: 6,
            rule: RULE,
            device: Device::Cpu,
            kind: Kind::Double,
            seed: 1,
            ranks: Ranks::ALONE,
        },
    )
    .unwrap()
}

fn parsed(text: &str) -> Options {
    Options::read(text.parse().unwrap()).unwrap()
}

fn outs(shapes: &[Shape]) -> Vec<Outputs> {
    let wave = |rows: i64, cols: i64, phase: f64| {
        ((Tensor::arange(rows * cols, (Kind::Double, Device::Cpu)) * 1.37 + phase).sin()).view([rows, cols])
    };
    let net = |(m, s): (usize, &Shape)| {
        let make = |cols: i64, shift: f64| (0..s.stages).map(|l| wave(6, cols, shift + m as f64 + 0.7 * l as f64)).collect();
        Outputs { maps: vec![], pre_pool: wave(1, 1, 0.0), feats: make(s.width, 0.2), logits: make(3, 5.1) }
    };
    shapes.iter().enumerate().map(net).collect()
}

fn batch() -> Batch {
    Batch { views: vec![], labels: Tensor::from_slice(&LABELS), index: Tensor::arange(6, (Kind::Int64, Device::Cpu)), noise: 3 }
}

fn sum(terms: &Terms, name: &str) -> f64 {
    terms.rows.iter().filter(|r| r.name == name).map(|r| r.value.double_value(&[])).sum()
}

fn names(terms: &Terms) -> Vec<&'static str> {
    let mut names: Vec<&str> = terms.rows.iter().map(|r| r.name).collect();
    names.dedup();
    names
}

const TWO: [Shape; 2] = [Shape { stages: 2, width: 4 }, Shape { stages: 3, width: 5 }];

/// Its groups are its own modules: it asks nothing of the cohort.
fn nobody() -> Cohort {
    Task::new(&Recipe::default(), &[], 4, &[], Device::Cpu).cohort(Needs::default())
}

#[test]
fn lambda_of_equal_and_opposite_projections() {
    let scope = Scope::root(0, Device::Cpu, Kind::Double);
    let meta = MetaNetwork::on_embeddings((0..2).map(|i| scope.sub(i)).collect(), 3, Norm::Guarded);
    for xi in &meta.projections {
        tch::no_grad(|| xi.weight.shallow_clone().copy_(&Tensor::eye(3, (Kind::Double, Device::Cpu))));
    }
    let v = Tensor::from_slice(&[0.6f64, 0.8, 0.0]).view([1, 3]);
    let pairs = Pairs::new(vec![(0, 1)], 2, &v);
    let lambda = |a: &Tensor, b: &Tensor| meta.lambda(&[a.copy(), b.copy()], &pairs).double_value(&[0, 0]);
    // The sigmoid of a cosine of 1, -1 and 0 (Eq. 17).
    assert!((lambda(&v, &v) - 0.7310585786).abs() < 1e-10);
    assert!((lambda(&v, &-&v) - 0.2689414214).abs() < 1e-10);
    assert!((lambda(&v, &Tensor::from_slice(&[0.0f64, 0.0, 1.0]).view([1, 3])) - 0.5).abs() < 1e-12);
}

#[test]
fn lambda_stays_within_the_sigmoid_of_a_cosine() {
    for mode in ["paper", "reference"] {
        let method = method(parsed(&format!("mode = \"{mode}\"\ndim = 4")), &TWO);
        let rows = method.lambdas(&outs(&TWO));
        assert_eq!(rows.len(), 2 * 2 * 3);
        for (_, lambda) in rows {
            let (low, high) = (lambda.min().double_value(&[]), lambda.max().double_value(&[]));
            assert!(low >= 0.26894 && high <= 0.73106, "{low} {high}");
        }
    }
}

#[test]
fn a_gate_of_zeros_is_the_mean_of_the_stages() {
    let outs = outs(&TWO);
    let gated = method(parsed("dim = 4"), &TWO);
    for gate in &gated.gates {
        for layer in [&gate.first, &gate.second] {
            tch::no_grad(|| {
                let _ = layer.weight.shallow_clone().zero_();
                let _ = layer.bias.as_ref().unwrap().shallow_clone().zero_();
            });
        }
        let weights = gate.forward(&outs[if gate.second.weight.size()[0] == 2 { 0 } else { 1 }].feats);
        assert!((weights.sum_dim_intlist(1i64, false, None) - 1.0).abs().max().double_value(&[]) < 1e-12);
        assert!((weights.max() - weights.min()).double_value(&[]) == 0.0);
    }
    let ungated = method(parsed("dim = 4\nterms = { gate = false }"), &TWO);
    let (a, b) = (gated.losses(&outs, &batch(), CLOCK).unwrap(), ungated.losses(&outs, &batch(), CLOCK).unwrap());
    assert!((sum(&a, "ens") - sum(&b, "ens")).abs() < 1e-12 && sum(&a, "ens") > 0.0);
    assert!(names(&a).contains(&"task_gate") && !names(&b).contains(&"task_gate"));
    assert!(ungated.groups(&nobody()).iter().all(|g| g.name != "gates"));
}

#[test]
fn one_to_one_is_the_sum_over_equal_stages() {
    // Eq. 24 by hand: stages (0,0) and (1,1); the third stage of the longer network is left out.
    let outs = outs(&TWO);
    let one = method(parsed("dim = 4\nmatching = \"one_to_one\""), &TWO);
    let embeds = one.embed(&outs);
    let contrast = mcl::losses::contrast::Contrast::in_batch(&batch().labels, 0.1, Kind::Double);
    let icl = |a: usize, b: usize| mcl::losses::contrast::icl(&embeds[a], &embeds[b], &contrast).double_value(&[]);
    let expected = 2.0 * (icl(0, 2) + icl(2, 0) + icl(1, 3) + icl(3, 1));
    let terms = one.losses(&outs, &batch(), CLOCK).unwrap();
    assert!((sum(&terms, "icl") - expected).abs() < 1e-12 * expected.abs());
    let all = method(parsed("dim = 4\nmatching = \"all_to_all\""), &TWO);
    let expected: f64 = (0..2).flat_map(|i| (2..5).map(move |j| (i, j))).map(|(i, j)| 2.0 * (icl(i, j) + icl(j, i))).sum();
    let terms = all.losses(&outs, &batch(), CLOCK).unwrap();
    assert!((sum(&terms, "icl") - expected).abs() < 1e-12 * expected.abs());
    assert!(terms.notes.iter().all(|(n, _)| !n.starts_with("lambda")), "fixed matching has no lambda to log");
}

#[test]
fn terms_can_be_switched_and_weighted() {
    let outs = outs(&TWO);
    let weights = |options: &str| -> Vec<(&'static str, f64)> {
        let terms = method(parsed(options), &TWO).losses(&outs, &batch(), CLOCK).unwrap();
        let mut rows: Vec<(&str, f64)> = terms.rows.iter().map(|r| (r.name, r.weight)).collect();
        rows.dedup();
        rows
    };
    assert_eq!(
        weights("dim = 4"),
        [("task", 1.0), ("task_gate", 1.0), ("ens", 1.0), ("vcl", 0.1), ("icl", 0.1), ("soft_vcl", 1.0), ("soft_icl", 1.0)]
    );
    assert_eq!(
        weights("dim = 4\nalpha = 0.2\nbeta = 0.5\n[terms]\nvcl = false\nsoft_icl = 3\nens = 0.25\ntask_gate = false"),
        [("task", 1.0), ("ens", 0.25), ("icl", 0.2), ("soft_vcl", 0.5), ("soft_icl", 1.5)]
    );
    let logits_only = method(parsed("dim = 4\nalpha = 0\nbeta = 0"), &TWO);
    assert_eq!(names(&logits_only.losses(&outs, &batch(), CLOCK).unwrap()), ["task", "task_gate", "ens"]);
    assert!(logits_only.groups(&nobody()).iter().all(|g| g.name != "heads"), "heads that nothing trains are no group");
}

#[test]
fn losses_do_not_change_what_they_are_computed_from() {
    let outs = outs(&TWO);
    for options in
        ["dim = 4", "dim = 4\nmining = \"memory\"\nnegatives = 3", "dim = 4\nmode = \"reference\"\nmining = \"memory\"\nnegatives = 3"]
    {
        let mut method = method(parsed(options), &TWO);
        method.prepare(&batch(), CLOCK).unwrap();
        let state = |m: &LMcl| -> Vec<Tensor> { m.state().iter().map(|(_, t)| t.copy()).collect() };
        let before = state(&method);
        let total = |m: &LMcl| m.losses(&outs, &batch(), CLOCK).unwrap().total().double_value(&[]);
        assert_eq!(total(&method), total(&method));
        assert!(before.iter().zip(state(&method)).all(|(a, b)| a.equal(&b)));
    }
}

#[test]
fn the_mutual_information_bound_is_log_k_minus_icl() {
    let outs = outs(&TWO);
    let method = method(parsed("dim = 4"), &TWO);
    let terms = method.losses(&outs, &batch(), CLOCK).unwrap();
    let embeds = method.embed(&outs);
    let contrast = mcl::losses::contrast::Contrast::in_batch(&batch().labels, 0.1, Kind::Double);
    for (name, a, b) in [("mutual_information.0.1", 1, 4), ("mutual_information.1.0", 4, 1)] {
        let note = terms.notes.iter().find(|(n, _)| n == name).unwrap().1.double_value(&[]);
        // K = B - 2 negatives.
        let expected = 4f64.ln() - mcl::losses::contrast::icl(&embeds[a], &embeds[b], &contrast).double_value(&[]);
        assert!((note - expected).abs() < 1e-12, "{name}: {note} is not {expected}");
    }
    // Every stage of one network to every stage of the other, both ways: 2 x 3 x 2.
    let of =
        |prefix: &str, dots: usize| terms.notes.iter().filter(|(n, _)| n.starts_with(prefix) && n.matches('.').count() == dots).count();
    assert_eq!((of("mutual_information.", 4), of("likeness.", 2)), (12, 5));
    let places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)];
    let noted = |name: &str| terms.notes.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}")).1.double_value(&[]);
    for (i, (a, k)) in places.iter().enumerate() {
        let cosines = embeds[i].matmul(&embeds[i].tr());
        let rows = embeds[i].size()[0] as f64;
        let expected = (cosines.sum(Kind::Double) - cosines.diag(0).sum(Kind::Double)).double_value(&[]) / (rows * (rows - 1.0));
        assert!((noted(&format!("likeness.{a}.{k}")) - expected).abs() < 1e-12);
        for (j, (b, z)) in places.iter().enumerate().filter(|(_, (b, _))| b != a) {
            let expected = 4f64.ln() - mcl::losses::contrast::icl(&embeds[i], &embeds[j], &contrast).double_value(&[]);
            assert!((noted(&format!("mutual_information.{a}.{b}.{k}.{z}")) - expected).abs() < 1e-12);
        }
    }
    let lambdas = terms.notes.iter().filter(|(n, _)| n.starts_with("lambda.0.1.")).count();
    let gates: Vec<f64> = terms.notes.iter().filter(|(n, _)| n.starts_with("gate.1.")).map(|(_, t)| t.double_value(&[])).collect();
    assert_eq!((lambdas, gates.len()), (6, 3));
    assert!((gates.iter().sum::<f64>() - 1.0).abs() < 1e-12);
}

#[test]
fn the_reference_lets_a_network_teach_itself() {
    let outs = outs(&TWO);
    let (paper, reference) = (method(parsed("dim = 4"), &TWO), method(parsed("dim = 4\nmode = \"reference\""), &TWO));
    let terms = paper.losses(&outs, &batch(), CLOCK).unwrap();
    let own: f64 = paper
        .gates
        .iter()
        .zip(&outs)
        .map(|(gate, o)| {
            let ensemble = mcl::losses::logit::ensemble(&gate.forward(&o.feats), &o.logits);
            mcl::losses::logit::kl(&ensemble, o.logit(), 3.0).double_value(&[])
        })
        .sum();
    let both = sum(&reference.losses(&outs, &batch(), CLOCK).unwrap(), "ens");
    assert!((both - sum(&terms, "ens") - own).abs() < 1e-12 && own > 0.0);
}

#[test]
fn mining_decides_how_batches_are_drawn() {
    let sampling = |options: &str| method(parsed(options), &TWO).needs().sampling;
    assert_eq!(sampling("dim = 4"), Sampling::ClassPairs);
    assert_eq!(sampling("dim = 4\nmining = \"memory\""), Sampling::Shuffled);
    assert_eq!(sampling("dim = 4\nmining = \"queue\""), Sampling::Shuffled);
    assert_eq!(sampling("dim = 4\npreset = \"imagenet\""), Sampling::Shuffled);
    assert!(method(Options { dim: 4, matching: Matching::Weighted, ..Options::default() }, &TWO).needs().branches);
}

#[test]
fn what_it_cannot_do_is_refused_by_name() {
    let archs = [nets::find("resnet8").unwrap(), nets::find("resnet8").unwrap()];
    let refusal = |networks: usize, labels: &[i64], options: &str| {
        let train = Train { batch: 6, epochs: 1, seed: 0, ..Train::default() };
        let recipe = Recipe { train, ..Recipe::default() };
        let task = Task::new(&recipe, &archs[..networks], 3, labels, Device::Cpu);
        let error = (methods::find("l_mcl").unwrap().build)(&task, options.parse().unwrap()).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let cases = [
        (1, &LABELS[..], "", "l_mcl needs 2 networks or more and [cohort] archs has 1: networks learn from each other"),
        (2, &[0, 0, 1, 2, 2], "", "class 1 has one training image"),
        (2, &LABELS[..], "taau = 0.1", "unknown field `taau`"),
        (2, &LABELS[..], "tau = 0", "[method] tau = 0; accepted: a number above 0"),
        (2, &LABELS[..], "alpha = -0.1", "[method] alpha = -0.1; accepted: 0 or more"),
        (2, &LABELS[..], "meta_every = 0", "[method] meta_every = 0; accepted: 1 to 1000000"),
        (2, &LABELS[..], "dim = 0", "[method] dim = 0"),
        (2, &LABELS[..], "matching = \"some\"", "one_to_one"),
        (2, &LABELS[..], "terms = { vcl = -1 }", "-1 is no weight"),
        (2, &LABELS[..], "terms = { vlc = 1 }", "unknown field `vlc`"),
        (2, &LABELS[..], "preset = \"swin\"", "[method] preset = \"swin\"; accepted: \"paper\", \"cifar\", \"imagenet\""),
        (2, &LABELS[..], "mode = \"reference\"\nmining = \"queue\"", "released code has no queue"),
        (2, &LABELS[..], "mining = \"memory\"\nnegatives = 0", "[method] negatives = 0"),
        (2, &LABELS[..], "inner_momentum = 1", "[method] inner_momentum = 1; accepted: 0 up to, but without, 1"),
    ];
    for (networks, labels, options, expected) in cases {
        let message = refusal(networks, labels, options);
        assert!(message.contains(expected), "`{options}`: {message}");
        assert!(!message.contains('\n'), "`{options}`: more than one line: {message}");
    }
    let mut lonely = method(parsed("dim = 4"), &TWO);
    let bad = Batch { labels: Tensor::from_slice(&[0i64, 0, 1, 1, 2, 0]), ..batch() };
    assert!(lonely.prepare(&bad, CLOCK).unwrap_err().to_string().contains("holds a class only once"));
}
