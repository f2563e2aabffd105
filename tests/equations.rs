//! The losses against closed forms and hand-sized numbers. Origins: values marked "released" come from running the released L-MCL
//! classes in float64 (torch 2.13), those marked "paper" from a transcription of the paper's equations.

use mcl::losses::contrast::{BankLayout, Contrast, Pairs, Parts, SoftTerms, icl, l_mcl, l_mcl_memory, mcl, soft_icl, soft_vcl, vcl};
use mcl::losses::logit;
use mcl::optim::grads;
use tch::{Device, Kind, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn table(rows: usize, cols: usize, f: impl Fn(f64, f64) -> f64) -> Tensor {
    let values: Vec<f64> = (0..rows * cols).map(|k| f((k / cols) as f64, (k % cols) as f64)).collect();
    Tensor::from_slice(&values).view([rows as i64, cols as i64])
}

fn unit(t: &Tensor) -> Tensor {
    t / t.norm_scalaropt_dim(2.0, [-1i64].as_slice(), true)
}

fn value(t: &Tensor) -> f64 {
    t.double_value(&[])
}

#[track_caller]
fn close(actual: f64, expected: f64, tolerance: f64) {
    assert!((actual - expected).abs() <= tolerance * expected.abs().max(1.0), "{actual} is not {expected}");
}

/// In the order of the tables: VCL, soft VCL, ICL, soft ICL.
fn four(parts: &Parts) -> [f64; 4] {
    [value(&parts.vcl), value(&parts.soft_vcl), value(&parts.icl), value(&parts.soft_icl)]
}

/// a_ij = sin(1 + 3i + j), b_ij = cos(2 + ij + i/2), B = 4, d = 3, labels 0 0 1 1, tau 0.1.
fn small() -> (Tensor, Tensor, Contrast) {
    let a = unit(&table(4, 3, |i, j| (1.0 + 3.0 * i + j).sin()));
    let b = unit(&table(4, 3, |i, j| (2.0 + i * j + 0.5 * i).cos()));
    (a, b, Contrast::in_batch(&Tensor::from_slice(&[0i64, 0, 1, 1]), 0.1, Kind::Double))
}

fn pair(a: &Tensor, b: &Tensor, lambda: &Tensor, contrast: &Contrast, soft_terms: SoftTerms) -> Parts {
    let embeds = Tensor::stack(&[a, b], 0);
    l_mcl(&embeds, &Pairs::new(vec![(0, 1)], 2, &embeds), &lambda.unsqueeze(0), contrast, soft_terms, None).0
}

#[test]
fn golden_pair_in_all_three_forms() {
    let (a, b, contrast) = small();
    let ones = Tensor::ones([4], F64);
    let lambda = Tensor::from_slice(&[0.5f64, 0.6, 0.7, 0.8]);
    let neither = SoftTerms { temperature: 1.0, diagonal: true };
    // The rows of `RELEASED` are from running the released class, the others from a transcription of the equations; float64, torch 2.13.
    let cases = [
        (SoftTerms::RELEASED, &ones, [20.1306930324, 27.2331496938, 11.3189756776, 23.5895687070]),
        (SoftTerms::RELEASED, &lambda, [13.1511269619, 16.7337751615, 7.2126002608, 14.6031495397]),
        (SoftTerms::PAPER, &ones, [20.1306930324, 24.7878030141, 11.3189756776, 11.7969846706]),
        (SoftTerms::PAPER, &lambda, [13.1511269619, 15.7330909931, 7.2126002608, 7.3737975495]),
        (neither, &ones, [20.1306930324, 6.5051498428, 11.3189756776, 7.2453214555]),
        (neither, &lambda, [13.1511269619, 3.9710855747, 7.2126002608, 4.7166439708]),
    ];
    for (soft_terms, lambda, expected) in cases {
        // The numbers are of one pair (u, v), both directions; the loss counts ordered pairs of networks, so every pair twice.
        for (actual, expected) in four(&pair(&a, &b, lambda, &contrast, soft_terms)).into_iter().zip(expected) {
            close(actual, 2.0 * expected, 1e-10);
        }
    }
}

#[test]
fn one_layer_with_lambda_one_is_twice_mcl_for_two_networks() {
    let (a, b, contrast) = small();
    let by_pair = four(&pair(&a, &b, &Tensor::ones([4], F64), &contrast, SoftTerms::PAPER));
    let single = [
        value(&(vcl(&a, &contrast) + vcl(&b, &contrast))),
        value(&(soft_vcl(&a, &b, &contrast, SoftTerms::PAPER) + soft_vcl(&b, &a, &contrast, SoftTerms::PAPER))),
        value(&(icl(&a, &b, &contrast) + icl(&b, &a, &contrast))),
        value(&(soft_icl(&a, &b, &contrast, SoftTerms::PAPER) + soft_icl(&b, &a, &contrast, SoftTerms::PAPER))),
    ];
    let whole = four(&mcl(&Tensor::stack(&[&a, &b], 0), &Pairs::of_networks(2, &a), &contrast, SoftTerms::PAPER));
    for k in 0..4 {
        close(by_pair[k], 2.0 * single[k], 1e-12);
        close(whole[k], single[k], 1e-12);
    }
}

#[test]
fn mcl_of_three_networks_is_the_sum_of_its_parts() {
    let (a, b, contrast) = small();
    let c = unit(&table(4, 3, |i, j| (0.4 + i - 2.0 * j).sin() + 0.1 * i));
    let nets = [&a, &b, &c];
    let mut expected = [0.0; 4];
    for (m, own) in nets.iter().enumerate() {
        expected[0] += value(&vcl(own, &contrast));
        for (_, other) in nets.iter().enumerate().filter(|(l, _)| *l != m) {
            expected[1] += value(&soft_vcl(other, own, &contrast, SoftTerms::RELEASED));
            expected[2] += value(&icl(own, other, &contrast));
            expected[3] += value(&soft_icl(own, other, &contrast, SoftTerms::RELEASED));
        }
    }
    let actual = four(&mcl(&Tensor::stack(&nets, 0), &Pairs::of_networks(nets.len(), nets[0]), &contrast, SoftTerms::RELEASED));
    for k in 0..4 {
        close(actual[k], expected[k], 1e-12);
    }
}

#[test]
fn golden_memory_pair() {
    let bank = |f: fn(f64, f64) -> f64| unit(&table(6, 3, f));
    let (bank0, bank1) = (bank(|i, j| (1.0 + 2.0 * i + j).sin()), bank(|i, j| (1.0 + i + 2.0 * j).cos()));
    let u = unit(&table(2, 3, |i, j| (0.5 + i * j + i).sin()));
    let v = unit(&table(2, 3, |i, j| (0.3 + 2.0 * i + j).cos()));
    let columns = Tensor::from_slice(&[0i64, 1, 3, 5, 3, 4, 0, 2]); // own image, class mate, two negatives
    let recalled = |bank: &Tensor| bank.index_select(0, &columns).view([2, 4, 3]);
    let embeds = Tensor::stack(&[&u, &v], 0);
    let pairs = Pairs::new(vec![(0, 1)], 2, &embeds);
    let run = |banks: [&Tensor; 2], lambda: &[f64], layout: BankLayout, skip: i64| {
        let banks = banks.map(|b| recalled(b).slice(1, skip, 4, 1));
        four(
            &l_mcl_memory(
                &embeds,
                &[0, 1],
                &pairs,
                &Tensor::from_slice(lambda).unsqueeze(0),
                &banks,
                0.07,
                SoftTerms::RELEASED,
                layout,
                None,
            )
            .0,
        )
    };
    // From running the released memory class on these tables in float64 (torch 2.13).
    let cases = [
        ([1.0, 1.0], [16.9758668264, 69.9415917931, 10.2643782526, 25.9041556117]),
        ([0.5, 0.7], [9.3898165835, 45.5923379814, 6.7480832754, 16.0751948310]),
    ];
    for (lambda, expected) in cases {
        // The released class at (a, b) = (0, 1) scores both vanilla terms with bank 0: bank 0 on both sides gives that order twice.
        let vanilla = run([&bank0, &bank0], &lambda, BankLayout::Released, 0);
        let cross = run([&bank0, &bank1], &lambda, BankLayout::Released, 0);
        close(vanilla[0], 2.0 * expected[0], 1e-10);
        close(vanilla[1], 2.0 * expected[1], 1e-10);
        close(cross[2], 2.0 * expected[2], 1e-10);
        close(cross[3], 2.0 * expected[3], 1e-10);
    }
    // The paper's vanilla term, each network with its own bank; the columns without the anchor's own image. From a transcription of the
    // equation in float64 (torch 2.13).
    close(run([&bank0, &bank1], &[1.0, 1.0], BankLayout::Paper, 1)[0], 2.0 * 33.8962417828, 1e-10);
}

#[test]
fn identical_embeddings_give_the_log_of_the_contrast_samples() {
    // Eq. 2 with equal similarities: -log 1/(K + 1), K + 1 = B - 1.
    for b in [2i64, 4, 16] {
        let v = unit(&Tensor::ones([b, 5], F64));
        let contrast = Contrast::in_batch(&Tensor::arange(b, (Kind::Int64, Device::Cpu)).floor_divide_scalar(2), 0.1, Kind::Double);
        close(value(&vcl(&v, &contrast)), ((b - 1) as f64).ln(), 1e-12);
        close(value(&contrast.negatives()), (b - 2) as f64, 0.0);
    }
}

#[test]
fn equal_networks_have_icl_equal_to_vcl_and_nothing_to_mimic() {
    let (a, _, contrast) = small();
    close(value(&icl(&a, &a, &contrast)), value(&vcl(&a, &contrast)), 1e-14);
    for soft_terms in [SoftTerms::PAPER, SoftTerms::RELEASED] {
        let [_, soft_vcl, _, soft_icl] = four(&pair(&a, &a.copy(), &Tensor::ones([4], F64), &contrast, soft_terms));
        close(soft_vcl, 0.0, 1e-12);
        close(soft_icl, 0.0, 1e-12);
    }
}

#[test]
fn soft_terms_are_divergences_and_stop_at_the_teacher() {
    let (a, b, contrast) = small();
    let leaf = |t: &Tensor| t.copy().set_requires_grad(true);
    for soft_terms in [SoftTerms::PAPER, SoftTerms::RELEASED] {
        let (teacher, student) = (leaf(&a), leaf(&b));
        let loss = soft_vcl(&teacher, &student, &contrast, soft_terms);
        assert!(value(&loss) > 0.0);
        let g = grads(&loss, &[teacher, student], false);
        assert_eq!(value(&g[0].abs().max()), 0.0, "the teacher of Eq. 8 is detached");
        assert!(value(&g[1].abs().max()) > 0.0);
    }
    // Eq. 9 has both networks in both distributions: the gradient is that of q_{a->b} against a constant.
    let (x, y) = (leaf(&a), leaf(&b));
    let g = grads(&soft_icl(&x, &y, &contrast, SoftTerms::PAPER), &[x.shallow_clone(), y.shallow_clone()], false);
    let own = Tensor::eye(4, (Kind::Bool, Device::Cpu));
    let log_q = |s: Tensor| s.masked_fill(&own, f64::NEG_INFINITY).log_softmax(-1, None).masked_fill(&own, 0.0);
    let target = log_q(y.matmul(&x.tr()) / 0.1).detach();
    let student = log_q(x.matmul(&y.tr()) / 0.1);
    let prob = target.exp().masked_fill(&own, 0.0);
    let direct = (&prob * (target - student)).sum(None) / 4.0;
    let expected = grads(&direct, &[x, y], false);
    for (g, e) in g.iter().zip(&expected) {
        close(value(&(g - e).abs().max()), 0.0, 1e-12);
    }
}

#[test]
fn several_positives_are_averaged() {
    // Labels 0 0 0 1 1: the loss of row 0 is the mean over its two positives.
    let v = unit(&table(5, 4, |i, j| (1.0 + i * 1.7 + j * 0.9).sin()));
    let contrast = Contrast::in_batch(&Tensor::from_slice(&[0i64, 0, 0, 1, 1]), 0.2, Kind::Double);
    let s = Vec::<Vec<f64>>::try_from(v.matmul(&v.tr()) / 0.2).unwrap();
    let mates: [&[usize]; 5] = [&[1, 2], &[0, 2], &[0, 1], &[4], &[3]];
    let mut expected = 0.0;
    for i in 0..5 {
        let denominator: f64 = (0..5).filter(|&j| j != i).map(|j| s[i][j].exp()).sum();
        expected -= mates[i].iter().map(|&j| s[i][j] - denominator.ln()).sum::<f64>() / mates[i].len() as f64 / 5.0;
    }
    close(value(&vcl(&v, &contrast)), expected, 1e-12);
    close(value(&contrast.negatives()), (2.0 * 3.0 + 3.0 * 2.0) / 5.0, 1e-12);
}

#[test]
fn permuting_the_batch_or_swapping_networks_changes_nothing() {
    let (a, b, contrast) = small();
    let lambda = Tensor::from_slice(&[0.5f64, 0.6, 0.7, 0.8]);
    let order = Tensor::from_slice(&[2i64, 0, 3, 1]);
    let moved = |t: &Tensor| t.index_select(0, &order);
    let labels = Tensor::from_slice(&[0i64, 0, 1, 1]);
    for soft_terms in [SoftTerms::PAPER, SoftTerms::RELEASED] {
        let base = four(&pair(&a, &b, &lambda, &contrast, soft_terms));
        let permuted =
            four(&pair(&moved(&a), &moved(&b), &moved(&lambda), &Contrast::in_batch(&moved(&labels), 0.1, Kind::Double), soft_terms));
        let swapped = four(&pair(&b, &a, &lambda, &contrast, soft_terms));
        for k in 0..4 {
            close(permuted[k], base[k], 1e-12);
            close(swapped[k], base[k], 1e-12);
        }
    }
}

#[test]
fn logits_of_a_hundred_stay_finite() {
    let hot = Tensor::from_slice(&[100f32, -100.0, 0.0, -100.0, 100.0, 0.0]).view([2, 3]).set_requires_grad(true);
    let cold = Tensor::from_slice(&[-100f32, 100.0, 0.0, 0.0, -100.0, 100.0]).view([2, 3]).set_requires_grad(true);
    let labels = Tensor::from_slice(&[1i64, 0]);
    let loss = logit::ce(&hot, &labels) + logit::kl(&cold, &hot, 1.0);
    // -log sigma(hot)[y] = 200 in both rows; KL = 200 and, in row 1, where the teacher is sure of a logit that is 100 below, 100.
    close(value(&loss), 200.0 + 150.0, 1e-6);
    let g = grads(&loss, &[hot, cold], false);
    assert!(g.iter().all(|g| g.isfinite().all().int64_value(&[]) == 1));
    assert_eq!(value(&g[1].abs().max()), 0.0, "the teacher of Eq. 21 is detached");
}

#[test]
fn golden_divergences_of_logits() {
    // torch.nn.functional.kl_div in float64 on these logits.
    let z1 = Tensor::from_slice(&[2.0f64, 0.5, -1.0, 0.1, 0.2, 0.3]).view([2, 3]);
    let z2 = Tensor::from_slice(&[1.0f64, 1.5, 0.0, -0.4, 0.9, 0.2]).view([2, 3]);
    let z3 = Tensor::from_slice(&[0.3f64, -0.2, 0.8, 1.1, 0.4, -0.6]).view([2, 3]);
    for (t, expected) in [(1.0, [0.2981140681, 0.2785074919]), (2.0, [0.3044571900, 0.3090028744]), (3.0, [0.3013942399, 0.3086737510])] {
        close(value(&logit::kl(&z2, &z1, t)), expected[0], 1e-10);
        close(value(&logit::kl(&z1, &z2, t)), expected[1], 1e-10);
    }
    let mean = logit::mean(&[z1.copy(), z2.copy(), z3.copy()]);
    close(value(&logit::kl(&mean, &z1, 3.0)), 0.1540593262, 1e-9);
    // Equal weights of a gate are the mean of the stages.
    let uniform = Tensor::full([2, 3], 1.0 / 3.0, F64);
    close(value(&(logit::ensemble(&uniform, &[z1.copy(), z2, z3]) - mean).abs().max()), 0.0, 1e-14);
    // Two classifiers: the sum of their cross-entropies; by hand for z1 and y = (0, 2).
    let labels = Tensor::from_slice(&[0i64, 2]);
    let by_hand = |row: [f64; 3], y: usize| row.iter().map(|z| z.exp()).sum::<f64>().ln() - row[y];
    let expected = (by_hand([2.0, 0.5, -1.0], 0) + by_hand([0.1, 0.2, 0.3], 2)) / 2.0;
    close(value(&logit::task(&[z1.copy(), z1], &labels, 0.0)), 2.0 * expected, 1e-12);
}

#[test]
fn fixed_targets_are_constants() {
    // With the targets of one place held, the soft terms at another are KL against those, and they are least where they were taken.
    let (a, b, contrast) = small();
    let embeds = Tensor::stack(&[&a, &b], 0);
    let pairs = Pairs::new(vec![(0, 1)], 2, &embeds);
    let ones = Tensor::ones([1, 4], F64);
    let (_, targets) = l_mcl(&embeds, &pairs, &ones, &contrast, SoftTerms::PAPER, None);
    let moved = Tensor::stack(&[&b, &a], 0);
    let (parts, _) = l_mcl(&moved, &pairs, &ones, &contrast, SoftTerms::PAPER, Some(&targets));
    // The student 0 (= b) now meets its own former distribution as the teacher, so both directions vanish.
    close(value(&parts.soft_vcl), 0.0, 1e-12);
    close(value(&parts.soft_icl), 0.0, 1e-12);
}
