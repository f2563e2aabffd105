//! Index orders: what every batch and every part must hold, counted.

use std::collections::{BTreeMap, BTreeSet};

use mcl::data::Sampling::{ClassPairs, Shuffled};
use mcl::data::sampler::{drawn, epoch, for_training, hash, holdout, stratified, write_index};

fn labels(classes: usize, each: usize) -> Vec<i64> {
    (0..classes * each).map(|i| (i % classes) as i64).collect()
}

#[test]
fn shuffled_is_every_image_once_with_the_short_batch_kept() {
    let labels = labels(10, 53);
    let batches = epoch(&labels, Shuffled, 128, 1, 0).unwrap();
    assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [128, 128, 128, 128, 18]);
    let seen: BTreeSet<u32> = batches.iter().flatten().copied().collect();
    assert_eq!((seen.len(), seen.last()), (530, Some(&529)));
    assert_eq!(batches, epoch(&labels, Shuffled, 128, 1, 0).unwrap());
    assert_ne!(batches, epoch(&labels, Shuffled, 128, 1, 1).unwrap());
    assert_ne!(batches, epoch(&labels, Shuffled, 128, 2, 0).unwrap());
}

/// Of classes of 60, 30, 9 and 1 images: as many as asked for, each class within one of its share, a part of the next larger draw.
#[test]
fn a_draw_has_the_number_asked_for_and_every_class_its_share() {
    let sizes = [60usize, 30, 9, 1];
    let labels: Vec<i64> = sizes.iter().enumerate().flat_map(|(class, &n)| vec![class as i64; n]).collect();
    let mut smaller = vec![];
    for count in 0..=100 {
        let part = drawn(&labels, count, 3, "images");
        assert!(part.len() == count && part.is_sorted() && smaller.iter().all(|i| part.contains(i)), "{count}");
        for (class, &n) in sizes.iter().enumerate() {
            let share = (count * n) as f64 / 100.0;
            let got = part.iter().filter(|&&i| labels[i] == class as i64).count() as f64;
            assert!((got - share).abs() < 1.0, "{got} of class {class} in {count}: its share is {share}");
        }
        smaller = part;
    }
    // 10 of each of 100 classes, as VTAB-1k would have of CIFAR-100.
    let even = drawn(&(0..50_000).map(|i| i % 100).collect::<Vec<_>>(), 1000, 1, "images");
    assert!((0..100).all(|class| even.iter().filter(|&&i| i % 100 == class).count() == 10));
    assert_ne!(even, drawn(&(0..50_000).map(|i| i % 100).collect::<Vec<_>>(), 1000, 2, "images"));
    assert_eq!(drawn(&labels, 1000, 1, "images").len(), 100);
}

#[test]
fn class_pairs_hold_half_as_many_classes_twice() {
    let labels = labels(100, 500);
    let batches = epoch(&labels, ClassPairs, 128, 1, 3).unwrap();
    assert_eq!(batches.len(), 390); // floor(50000 / 128), as the released sampler
    let mut classes_drawn = vec![0u32; 100];
    for batch in &batches {
        assert_eq!(batch.iter().collect::<BTreeSet<_>>().len(), 128, "an image twice in a batch");
        let mut classes: BTreeMap<i64, usize> = BTreeMap::new();
        batch.iter().for_each(|&i| *classes.entry(labels[i as usize]).or_default() += 1);
        assert_eq!(classes.len(), 64);
        assert!(classes.values().all(|&n| n == 2));
        classes.keys().for_each(|&c| classes_drawn[c as usize] += 1);
    }
    // Each class comes with probability 0.64: mean 249.6, deviation 9.5.
    assert!(classes_drawn.iter().all(|n| (205..295).contains(n)), "{classes_drawn:?}");
    assert_ne!(batches, epoch(&labels, ClassPairs, 128, 1, 4).unwrap());
}

#[test]
fn few_classes_give_equal_shares() {
    let labels = labels(10, 100);
    // 128 is no multiple of ten classes: 12 of each are what fits.
    for batch in [120, 128] {
        let batches = epoch(&labels, ClassPairs, batch, 1, 0).unwrap();
        assert_eq!(batches.len(), 8);
        for batch in batches {
            let mut counts = [0; 10];
            batch.iter().for_each(|&i| counts[labels[i as usize] as usize] += 1);
            assert_eq!(counts, [12; 10]);
            assert_eq!(batch.iter().collect::<BTreeSet<_>>().len(), 120);
        }
    }
}

#[test]
fn impossible_class_pairs_are_refused_with_their_numbers() {
    let refused = |labels: &[i64], batch| epoch(labels, ClassPairs, batch, 0, 0).unwrap_err();
    let ten = labels(10, 100);
    assert_eq!(refused(&ten, 127).to_string(), "batch 127 with class pairs: the batch must be even; 126 or 128 would do");
    assert!(refused(&[3; 40], 8).to_string().contains("all of one class"));
    let mut lonely = labels(4, 5);
    lonely.push(9);
    let text = refused(&lonely, 4).to_string();
    assert_eq!(text, "batch 4 with class pairs: class 9 has 1 training image(s), and a batch takes 2 of a class");
    assert!(refused(&labels(4, 1), 8).to_string().contains("there are 4 training images"));
    assert_eq!(refused(&ten, 127).exit_code(), 2);
    assert_eq!(epoch(&[], Shuffled, 8, 0, 0).unwrap_err().exit_code(), 2);
}

#[test]
fn fractions_are_stratified_nested_and_seeded() {
    let labels = labels(10, 40);
    let quarter = stratified(&labels, 0.25, 5);
    let half = stratified(&labels, 0.5, 5);
    assert_eq!((quarter.len(), half.len(), stratified(&labels, 1.0, 5).len()), (100, 200, 400));
    for class in 0..10 {
        assert_eq!(quarter.iter().filter(|&&i| labels[i] == class).count(), 10);
    }
    assert!(quarter.iter().all(|i| half.contains(i)));
    assert!(quarter.is_sorted());
    assert_eq!(quarter, stratified(&labels, 0.25, 5));
    assert_ne!(quarter, stratified(&labels, 0.25, 6));
}

#[test]
fn holdout_takes_as_many_of_every_class() {
    let labels = labels(10, 40);
    let (train, held) = holdout(&labels, 7, 5).unwrap();
    assert_eq!((train.len(), held.len()), (330, 70));
    for class in 0..10 {
        assert_eq!(held.iter().filter(|&&i| labels[i] == class).count(), 7);
    }
    let all: BTreeSet<usize> = train.iter().chain(&held).copied().collect();
    assert_eq!(all.len(), 400);
    assert_eq!(holdout(&labels, 0, 5).unwrap(), ((0..400).collect(), vec![]));
    let refused = holdout(&labels, 40, 5).unwrap_err();
    assert_eq!(refused.to_string(), "holdout 40: class 0 has 40 training image(s), and at least one must stay; at most 39 can be held out");
}

#[test]
fn index_files_carry_their_hash() {
    // printf '0\n1\n2\n' | sha256sum
    assert_eq!(hash(&[0, 1, 2]), "b78a1987bcbdc0903ba6ba29ee3e1f4e7cc1ca868a60889beb141e26e06cb005");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("split.txt");
    let part = stratified(&labels(10, 40), 0.25, 5);
    assert_eq!(write_index(&path, &part).unwrap(), hash(&part));
    let text = std::fs::read_to_string(&path).unwrap();
    let (header, lines) = text.split_once('\n').unwrap();
    assert_eq!(lines.lines().map(|line| line.parse::<usize>().unwrap()).collect::<Vec<_>>(), part);
    // Whoever reads it checks it with `tail -n +2 FILE | sha256sum`.
    assert_eq!(header, format!("# sha256 of the lines below: {}", mcl::files::sha256(lines.as_bytes())));
}

/// No rank of any step has one image to take a variance from; which images an epoch has does not change for that.
#[test]
fn a_last_batch_of_one_image_a_rank_joins_the_one_before() {
    let sizes = |images: usize, batch: usize, ranks: usize| {
        let labels = labels(1, images);
        let drawn = epoch(&labels, Shuffled, batch, 1, 0).unwrap();
        let order = for_training(drawn.clone(), &labels, Shuffled, ranks, false).unwrap();
        let (drawn, order): (Vec<u32>, Vec<Vec<u32>>) = (drawn.concat(), order);
        assert!(drawn.starts_with(&order.concat()) && drawn.len() - order.concat().len() < ranks);
        order.iter().map(Vec::len).collect::<Vec<_>>()
    };
    assert_eq!(sizes(128, 127, 1), [128]);
    assert_eq!(sizes(129, 64, 1), [64, 65]);
    assert_eq!(sizes(130, 64, 1), [64, 64, 2]);
    assert_eq!(sizes(1, 64, 1), [1]); // nothing to join: the trainer refuses it where there is a BatchNorm
    assert_eq!(sizes(64 + 2, 32, 2), [32, 34]);
    assert_eq!(sizes(64 + 3, 32, 2), [32, 34]); // an image is left out, as before
    assert_eq!(sizes(64 + 4, 32, 2), [32, 32, 4]);
    assert_eq!(sizes(64 + 1, 32, 2), [32, 32]);
    assert_eq!(sizes(64 + 7, 32, 4), [32, 36]);
}
