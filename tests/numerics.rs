//! The evaluation's numerics against scikit-learn, scipy and numpy. The constants come from tests/golden/evaluation.py, which makes the same
//! data by the same formulas.

use mcl::eval::features::Features;
use mcl::eval::measures::centroid::{self, Distance};
use mcl::eval::measures::knn;
use mcl::eval::measures::tsne::{self, Engine, Tsne, map};
use mcl::eval::probe::heads::Heads;
use mcl::eval::probe::logreg::{self, Options};
use mcl::eval::score::Score;
use mcl::eval::stats::{self, Pairs};
use mcl::rng;
use tch::{Device, Kind, Tensor};

const N: usize = 90;
const D: usize = 5;
const C: usize = 3;

/// sin(1.7 i + 0.9 j^2), and more where column j is the class of row i.
fn data(offset: f64) -> (Vec<f64>, Vec<i64>) {
    let value = |i: usize, j: usize| (1.7 * i as f64 + 0.9 * (j * j) as f64).sin() + if i % C == j { offset } else { 0.0 };
    ((0..N).flat_map(|i| (0..D).map(move |j| value(i, j))).collect(), (0..N).map(|i| (i % C) as i64).collect())
}

fn matrix(values: &[f64], columns: usize) -> Tensor {
    Tensor::from_slice(values).view([-1, columns as i64])
}

fn close(got: f64, expected: f64, tolerance: f64, what: &str) {
    assert!((got - expected).abs() <= tolerance * expected.abs().max(1.0), "{what}: {got}, expected {expected}");
}

#[test]
fn logistic_regression_finds_scikit_learns_optimum() {
    let (x, y) = data(0.8);
    let (x, labels) = (matrix(&x, D), Tensor::from_slice(&y));
    // C, loss, W[0, 0], W[2, 3], b[1] - b[0]
    for (c, loss, w00, w23, b10) in [
        (0.1, 0.8518074615170379, 0.6106394917717235, 0.02663864775242248, -0.049775467973554414),
        (1.0, 0.4519015060174266, 1.4288264836476465, 0.09238651197081553, -0.2349542301428868),
        (100.0, 0.030594944530325935, 3.5542082234875036, 0.18034468482946522, -0.5913317545471257),
    ] {
        let options = Options { c, tolerance: 1e-9, max_iterations: 1000 };
        let fitted = logreg::fit(&x, &labels, C as i64, options, None).unwrap();
        assert!(fitted.converged, "C = {c}");
        close(fitted.loss, loss, 1e-10, "loss");
        // The loss is flat around its minimum: parameters agree to half its digits.
        close(fitted.classifier.weight.double_value(&[0, 0]), w00, 1e-4, "W[0, 0]");
        close(fitted.classifier.weight.double_value(&[2, 3]), w23, 1e-4, "W[2, 3]");
        close(fitted.classifier.bias.double_value(&[1]) - fitted.classifier.bias.double_value(&[0]), b10, 1e-4, "bias");
        // In f32 the products are rougher, the optimum the same to their precision.
        let rough = logreg::fit(&x.to_kind(Kind::Float), &labels, C as i64, Options { tolerance: 1e-5, ..options }, None).unwrap();
        close(rough.loss, loss, 1e-6, "loss in f32");
    }
}

#[test]
fn logistic_regression_refuses_what_it_cannot_fit() {
    let (x, y) = data(0.8);
    let (x, labels) = (matrix(&x, D), Tensor::from_slice(&y));
    let options = Options { c: 1.0, tolerance: 1e-6, max_iterations: 10 };
    let message = |r: mcl::error::Result<logreg::Fitted>| r.err().expect("an error").to_string();
    assert!(message(logreg::fit(&x, &labels, 2, options, None)).contains("labels from 0 to 2 for 2 classes"));
    assert!(message(logreg::fit(&x, &labels, 3, Options { c: 0.0, ..options }, None)).contains("C = 0"));
    assert!(message(logreg::fit(&x.narrow(0, 0, 3), &labels, 3, options, None)).contains("[3, 5]"));
}

#[test]
fn linfa_agrees_on_the_classes() {
    let (x, y) = data(0.8);
    let array = ndarray::Array2::from_shape_vec((N, D), x).unwrap();
    let options = Options { c: 1.0, tolerance: 1e-6, max_iterations: 500 };
    // scikit-learn gets every row of this set right at C = 1.
    assert_eq!(logreg::linfa(&array, &y, &array, options).unwrap(), y);
}

#[test]
fn neighbours_vote_as_in_scikit_learn() {
    let (x, y) = data(0.25);
    let x = matrix(&x, D).to_kind(Kind::Float);
    let part = |first: i64, count: i64| Features { x: x.narrow(0, first, count), y: y[first as usize..(first + count) as usize].to_vec() };
    let scores = knn::scores(&part(0, 60), &part(60, 30), &[1, 5, 20], 0.07, C as i64);
    let expected = ["012012012012012012012012012012", "022010210021010020022212011221", "120012010021010020222212011211"];
    for (scores, expected) in scores.iter().zip(expected) {
        let predicted = Vec::<i64>::try_from(scores.argmax(1, false)).unwrap();
        assert_eq!(predicted.iter().map(|c| c.to_string()).collect::<String>(), expected);
    }
}

/// By hand: one neighbour of class 0 at cosine 1, two of class 1 at cosine 0.6, none of the others. With one neighbour only its class has a
/// vote, so no other class can be among the five.
#[test]
fn a_class_without_a_vote_is_no_answer_at_any_temperature() {
    let train = Features { x: matrix(&[1.0, 0.0, 0.6, 0.8, 0.6, -0.8], 2).to_kind(Kind::Float), y: vec![0, 1, 1] };
    let test = Features { x: matrix(&[1.0, 0.0, 2.0, 0.0], 2).to_kind(Kind::Float), y: vec![0, 4] };
    for temperature in [0.07, 1e-3, 1e-30, 10.0] {
        let scores = knn::scores(&train, &test, &[1, 3], temperature, 6);
        for (scores, in_five) in scores.iter().zip([[true, false], [true, false]]) {
            let score = Score::new(scores, &test.y);
            // exp(-0.4 / T) of either, so class 1 wins only where 2 exp(-0.4 / T) > 1.
            let other = if temperature > 0.4 / 2f64.ln() && scores.double_value(&[0, 1]).is_finite() { 1 } else { 0 };
            assert_eq!((score.predicted.clone(), &score.in_five[..]), (vec![other; 2], &in_five[..]), "temperature {temperature}");
        }
        let unvoted = Vec::<f64>::try_from(scores[1].select(0, 0).narrow(0, 2, 4)).unwrap();
        assert_eq!(unvoted, [f64::NEG_INFINITY; 4]);
        assert_eq!(Score::new(&scores[0], &test.y).top5(), Score::new(&scores[0], &test.y).top1());
    }
}

/// By hand: the means are (1, 0) and (0, 6), the third class has no training row, and the point (1, 3) is nearer to the first by distance
/// (9 against 10, squared) and to the second by angle (cosines 1 and 3 over the root of 10).
#[test]
fn the_nearest_class_mean_is_the_one_found_by_hand() {
    let train = Features { x: matrix(&[0.0, 0.0, 0.0, 4.0, 2.0, 0.0, 0.0, 8.0], 2).to_kind(Kind::Float), y: vec![0, 1, 0, 1] };
    let test = Features { x: matrix(&[1.0, 3.0, -2.0, 0.5], 2).to_kind(Kind::Float), y: vec![0, 1] };
    let row = |scores: &Tensor, i: i64| Vec::<f64>::try_from(scores.select(0, i)).unwrap();
    let euclidean = centroid::scores(&train, &test, Distance::Euclidean, 3);
    // (|x|^2 - |x - m|^2) / 2 with |x|^2 = 10 and 4.25.
    assert_eq!(row(&euclidean, 0), [(10.0 - 9.0) / 2.0, (10.0 - 10.0) / 2.0, f64::NEG_INFINITY]);
    assert_eq!(row(&euclidean, 1), [(4.25 - 9.25) / 2.0, (4.25 - 34.25) / 2.0, f64::NEG_INFINITY]);
    let cosine = centroid::scores(&train, &test, Distance::Cosine, 3);
    for (i, expected) in [(0, [1.0 / 10f64.sqrt(), 3.0 / 10f64.sqrt()]), (1, [-2.0 / 4.25f64.sqrt(), 0.5 / 4.25f64.sqrt()])] {
        for (got, expected) in row(&cosine, i).iter().zip(expected) {
            close(*got, expected, 1e-12, "cosine");
        }
        assert_eq!(row(&cosine, i)[2], f64::NEG_INFINITY);
    }
    let chosen = |scores: &Tensor| Vec::<i64>::try_from(scores.argmax(1, false)).unwrap();
    assert_eq!((chosen(&euclidean), chosen(&cosine)), (vec![0, 0], vec![1, 1]));
}

#[test]
fn the_start_of_a_map_is_pca() {
    let (x, _) = data(0.8);
    let start = map::pca_start(&matrix(&x, D));
    for (i, expected) in [(0, [1.18334920e-04, -3.59746569e-05]), (41, [8.97817417e-05, -3.34841331e-05])] {
        for k in 0..2 {
            assert!((start[i][k] - expected[k]).abs() < 1e-11, "{i}: {:?}, expected {expected:?}", start[i]);
        }
    }
}

fn some_map() -> Vec<[f64; 2]> {
    (0..N).map(|i| [10.0 * (0.37 * i as f64).sin(), 7.0 * (1.1 * i as f64).cos()]).collect()
}

#[test]
fn divergence_of_a_map_is_scikit_learns() {
    let (x, _) = data(0.8);
    // Its bandwidths are found in f32 to 1e-5 of the entropy.
    close(map::kl(&matrix(&x, D), &some_map(), 10.0).unwrap(), 3.5173767180947872, 1e-4, "KL");
    assert!(map::kl(&matrix(&x, D), &some_map()[..50], 10.0).is_err());
}

/// Many columns make all distances alike, and the bandwidths hard to find.
#[test]
fn divergence_is_exact_in_many_dimensions_too() {
    let x: Vec<f64> = (0..300).flat_map(|i| (0..96).map(move |j| (1.7 * (i * (j + 1)) as f64 + 0.3 * (j * j) as f64).sin())).collect();
    let map: Vec<[f64; 2]> = (0..300).map(|i| [10.0 * (0.37 * i as f64).sin(), 7.0 * (1.1 * i as f64).cos()]).collect();
    close(map::kl(&matrix(&x, 96), &map, 20.0).unwrap(), 2.7285368121016034, 1e-6, "KL");
}

#[test]
fn kept_neighbours_are_counted() {
    let (x, _) = data(0.8);
    close(map::neighbours_kept(&matrix(&x, D), &some_map(), 7), 0.053968253968253964, 1e-12, "kept");
    let plane: Vec<f64> = some_map().into_iter().flatten().collect();
    assert_eq!(map::neighbours_kept(&matrix(&plane, 2), &some_map(), 7), 1.0);
}

/// bhtsne knows nothing of our forces: two ways to the same place. What is compared is computed from the definition, over all pairs.
#[test]
fn a_map_of_all_pairs_is_as_good_as_bhtsnes_and_the_same_on_any_number_of_threads() {
    let (n, dim) = (600, 8);
    let value = |i: usize, j: usize| (1.7 * i as f64 + 0.9 * (j * j) as f64).sin() + if i % 6 == j { 2.5 } else { 0.0 };
    let values: Vec<f64> = (0..n).flat_map(|i| (0..dim).map(move |j| value(i, j))).collect();
    let x = matrix(&values, dim);
    let start = map::pca_start(&x);
    let made = |engine: Engine, threads: usize| {
        let p = Tsne {
            image_size: 0,
            samples: n,
            perplexity: 20.0,
            exaggeration: 12.0,
            learning_rate: 0.0,
            iterations: 500,
            engine,
            seed: 1,
            neighbours: 15,
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| tsne::embed(&matrix(&values, dim), &start, &p).unwrap())
    };
    let ours = made(Engine::Exact, 1);
    assert_eq!(ours, made(Engine::Exact, 3));
    assert_eq!(ours, made(Engine::Auto, 2));
    let theirs = made(Engine::Bhtsne, 1);
    let judged = |y: &[[f64; 2]]| (map::kl(&x, y, 20.0).unwrap(), map::neighbours_kept(&x, y, 15));
    let ((kl, kept), (their_kl, their_kept)) = (judged(&ours), judged(&theirs));
    assert!(kl < 1.02 * their_kl, "KL {kl}, bhtsne's {their_kl}");
    assert!(kept > their_kept - 0.02, "neighbours kept {kept}, bhtsne's {their_kept}");
}

#[test]
fn mcnemar_is_the_binomial_test() {
    for (only_a, only_b, p) in [(3, 9, 0.14599609375), (0, 0, 1.0), (10, 10, 1.0), (121, 80, 0.004660051974640136), (0, 6, 0.03125)] {
        close(Pairs { only_a, only_b, count: 500 }.mcnemar(), p, 1e-10, "p");
    }
    let pairs = Pairs::new(&[true, true, false, false], &[true, false, true, true]);
    assert_eq!(pairs, Pairs { only_a: 1, only_b: 2, count: 4 });
    assert_eq!(pairs.difference(), 0.25);
}

#[test]
fn students_quantiles() {
    for (freedom, t) in [
        (1, 12.706204736174694),
        (2, 4.302652729749462),
        (3, 3.1824463052837078),
        (4, 2.7764451051977934),
        (9, 2.262157162798205),
        (30, 2.0422724563012378),
    ] {
        close(stats::t_975(freedom), t, 1e-9, "t");
    }
}

/// In closed form: P(|T| > t) is 1 - t / sqrt(2 + t^2) with two degrees of freedom, 1 - 2 atan(t) / pi with one.
#[test]
fn paired_differences_have_students_p() {
    let t = 12f64.sqrt();
    close(stats::paired_t(&[1.0, 2.0, 3.0]).unwrap(), 1.0 - t / (2.0 + t * t).sqrt(), 1e-12, "three");
    close(stats::paired_t(&[-1.0, -3.0]).unwrap(), 1.0 - 2.0 * 2f64.atan() / std::f64::consts::PI, 1e-12, "two");
    assert_eq!(stats::paired_t(&[1.0]), None);
    assert_eq!((stats::paired_t(&[0.0, 0.0]), stats::paired_t(&[1.0, 1.0])), (Some(1.0), Some(0.0)));
}

/// Holm 1979: the least of m times m, the next times m - 1, never below the one before, never above 1.
#[test]
fn holm_corrects_for_the_number_of_tests() {
    let corrected = stats::holm(&[0.01, 0.04, 0.03, 0.5]);
    for (got, want) in corrected.iter().zip([0.04, 0.09, 0.09, 0.5]) {
        close(*got, want, 1e-12, "corrected");
    }
    assert_eq!(stats::holm(&[0.4, 0.7]), [0.8, 0.8]);
    assert!(stats::holm(&[]).is_empty());
}

#[test]
fn intervals_are_scipys_within_their_own_noise() {
    let mut rng = rng::stream(1, "test", &[]);
    let (low, high) = stats::bootstrap(137, 200, 20_000, &mut rng);
    // scipy with 200,000 resamples: 0.62, 0.75; one image is 0.005.
    assert!((low - 0.62).abs() <= 0.005 && (high - 0.75).abs() <= 0.005, "{low} {high}");
    let (low, high) = Pairs { only_a: 30, only_b: 45, count: 200 }.bootstrap(20_000, &mut rng);
    assert!((low + 0.01).abs() <= 0.005 && (high - 0.16).abs() <= 0.005, "{low} {high}");
    assert_eq!(stats::bootstrap(200, 200, 100, &mut rng), (1.0, 1.0));
}

#[test]
fn cka_is_the_ratio_of_centred_gram_matrices() {
    let (x, _) = data(0.8);
    let other: Vec<f64> =
        (0..N).flat_map(|i| (0..3).map(move |j| (i, j))).map(|(i, j)| (0.3 * i as f64 * (j + 1) as f64).cos() + x[i * D + j]).collect();
    let (u, v) = (matrix(&x, D), matrix(&other, 3));
    close(stats::linear_cka(&u, &v), 0.5933518739814703, 1e-10, "CKA");
    close(stats::linear_cka(&u, &(&u * 3.0 + 2.0)), 1.0, 1e-10, "CKA of a scaled copy");
}

/// Two steps of torch's own SGD on a linear layer with the same start: the classifiers side by side must not disturb each other.
#[test]
fn heads_step_as_torch_sgd_on_a_linear_layer() {
    let (x, y) = data(0.8);
    let (x, y) = (matrix(&x, D).to_kind(Kind::Float), Tensor::from_slice(&y));
    let lrs = [0.05, 0.7];
    let mut heads = Heads::new(&lrs, C as i64, D as i64, 0.9, 0.01, 3, Device::Cpu);
    let start = heads.scores(&Tensor::eye(D as i64, (Kind::Float, Device::Cpu)));
    let bias = heads.scores(&Tensor::zeros([1, D as i64], (Kind::Float, Device::Cpu)));
    let weights: Vec<Tensor> = start.iter().zip(&bias).map(|(s, b)| (s - b).transpose(0, 1).contiguous()).collect();
    for step in 0..3 {
        heads.step(&x.narrow(0, step * 30, 30), &y.narrow(0, step * 30, 30), 1.0);
    }
    for (r, lr) in lrs.into_iter().enumerate() {
        let w = weights[r].copy().set_requires_grad(true);
        let b = bias[r].reshape([C as i64]).copy().set_requires_grad(true);
        let mut velocity: Option<(Tensor, Tensor)> = None;
        for step in 0..3 {
            let loss = x.narrow(0, step * 30, 30).linear(&w, Some(&b)).cross_entropy_for_logits(&y.narrow(0, step * 30, 30));
            let grads = Tensor::run_backward(&[loss], &[&w, &b], false, false);
            let _guard = tch::no_grad_guard();
            let (gw, gb) = (&grads[0] + &w * 0.01, &grads[1] + &b * 0.01);
            let (vw, vb) = velocity.map_or((gw.copy(), gb.copy()), |(vw, vb)| (vw * 0.9 + &gw, vb * 0.9 + &gb));
            w.shallow_clone().copy_(&(&w - &vw * lr));
            b.shallow_clone().copy_(&(&b - &vb * lr));
            velocity = Some((vw, vb));
        }
        let expected = x.linear(&w, Some(&b));
        let difference = (&heads.scores(&x)[r] - &expected).abs().max().double_value(&[]);
        assert!(difference < 1e-5, "rate {lr}: {difference}");
    }
}
