//! Methods that teach by features, maps or embeddings (CKD-MKT, AFD, FFSD, MCL): their losses against closed forms and numbers computed
//! in float64 from the published formulas or by the official code (torch 2.13), where gradients stop and flow, and their sizes.

mod support;

use mcl::losses::contrast::{self, BankLayout, Contrast, SoftTerms};
use mcl::losses::logit;
use mcl::methods::{afd, ckd_mkt, ffsd};
use mcl::nets::layers::Pass;
use mcl::nets::{self, Outputs};
use mcl::optim::{Optimizer, Rule, grads};
use mcl::train::step::Engine;
use support::RULE;
use support::method_tests::*;
use tch::{Device, Kind, Tensor};

// CKD-MKT.

fn triangles() -> (Tensor, Tensor) {
    (rows(&[&[0.0, 0.0], &[3.0, 0.0], &[0.0, 4.0]]), rows(&[&[0.0, 0.0], &[1.0, 0.0], &[0.0, 1.0]]))
}

#[test]
fn ckd_mkt_relations() {
    let (a, b) = triangles();
    // A triangle of sides 3, 4 and 5 has distances of 3/4, 1 and 5/4 of their mean. The other numbers, and the Huber losses between the
    // relations of the two triangles, are RKD's formulas (Park et al. 2019) by torch in float64.
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
    // The formulas of the official code on these two rows, in float64 (torch 2.13).
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
    // Fusion: 3 x 3 on 128 maps, 1 x 1 to 64, their norms, and 64 x 100 + 100 of the classifier: 1152 + 256 + 8192 + 128 + 6500.
    // Transform: 576 + 128 + 8192 + 256. A decoder: 64 x 32 x 9 + 64 + 32 x 16 x 9 + 32. Below the same for 512 channels.
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
    // exp(-5 (1 - (e + 1)/5)^2), to four places.
    for (epoch, wanted) in [(0, 0.0408), (1, 0.1653), (2, 0.4493), (3, 0.8187), (4, 1.0), (20, 1.0)] {
        let (_, terms, _) = evaluated(&mut engine, clock(epoch, 0));
        for (name, base) in [("diversity", 1e-5), ("self_distillation", 1e-5), ("fusion", 10.0), ("decoder", 1000.0)] {
            let weight = terms.rows.iter().find(|r| r.name == name).unwrap().weight;
            close(weight / base, wanted, 5e-5);
        }
    }
}

// MCL.

fn table(rows: i64, f: impl Fn(f64, f64) -> f64) -> Tensor {
    let values: Vec<f64> = (0..rows).flat_map(|i| (0..3).map(move |j| (i as f64, j as f64))).map(|(i, j)| f(i, j)).collect();
    unit(&Tensor::from_slice(&values).view([rows, 3]))
}

#[test]
fn mcl_from_memory_uses_own_banks() {
    // In float64 (torch 2.13) on these tables: ICL and soft ICL from running the released L-MCL memory class, VCL with each network's own
    // bank from a transcription of the text.
    let banks = [table(6, |i, j| (1.0 + 2.0 * i + j).sin()), table(6, |i, j| (1.0 + i + 2.0 * j).cos())];
    let embeds = Tensor::stack(&[table(2, |i, j| (0.5 + i * j + i).sin()), table(2, |i, j| (0.3 + 2.0 * i + j).cos())], 0);
    // Two positives (the image itself and a class mate), then two negatives.
    let columns = Tensor::from_slice(&[0i64, 1, 3, 5, 3, 4, 0, 2]);
    let recalled = banks.each_ref().map(|b| b.index_select(0, &columns).view([2, 4, 3]));
    let released = SoftTerms { temperature: 3.0, diagonal: true };
    let parts = contrast::mcl_memory(&embeds, &recalled, 0.07, released, BankLayout::Released);
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
    let ours = contrast::mcl_memory(&embeds, &recalled, 0.07, SoftTerms::PAPER, BankLayout::Paper);
    let pairs = contrast::Pairs::new(vec![(0, 1)], 2, &embeds);
    let ones = Tensor::ones([1, 2], (Kind::Double, Device::Cpu));
    let (layered, _) = contrast::l_mcl_memory(&embeds, &[0, 1], &pairs, &ones, &recalled, 0.07, SoftTerms::PAPER, BankLayout::Paper, None);
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
    let soft = contrast::soft_icl(&a, &b, &contrast, SoftTerms::PAPER) + contrast::soft_icl(&b, &a, &contrast, SoftTerms::PAPER);
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
