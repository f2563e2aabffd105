//! Memory banks: what is drawn, what is remembered, how they start.

use std::collections::HashMap;

use mcl::error::Result;
use mcl::losses::contrast::BankLayout;
use mcl::methods::parts::memory_bank::{BankSetup, MemoryBank};
use mcl::rng;
use mcl::system::ranks::Ranks;
use tch::{Device, Kind, Tensor};

fn setup(labels: &[i64], dim: i64, negatives: usize, layout: BankLayout) -> BankSetup<'_> {
    BankSetup {
        networks: 2,
        dim,
        negatives,
        batch: 8,
        layout,
        labels,
        device: Device::Cpu,
        kind: Kind::Float,
        seed: 5,
        ranks: Ranks::ALONE,
    }
}

fn table(bank: &MemoryBank, name: &str) -> Tensor {
    bank.state().into_iter().find(|(n, _)| n == name).unwrap().1
}

fn lengths(t: &Tensor) -> Vec<f32> {
    Vec::<f32>::try_from(t.norm_scalaropt_dim(2.0, [-1i64].as_slice(), false)).unwrap()
}

/// Writes its own place into every slot, so that what is recalled says what was drawn.
fn numbered(bank: &MemoryBank) {
    for m in 0..2 {
        let mut t = table(bank, &format!("bank.{m}"));
        let rows = t.size()[0];
        let numbers = Tensor::arange(rows, (Kind::Float, Device::Cpu)).unsqueeze(1).expand(t.size(), false) + (1000 * m) as f64;
        t.copy_(&numbers);
    }
}

fn drawn(bank: &MemoryBank, labels: &[i64], index: &[i64], seed: u64) -> Result<Vec<Vec<i64>>> {
    numbered(bank);
    let draw = bank.draw(&Tensor::from_slice(labels), &Tensor::from_slice(index), &mut rng::stream(seed, "test", &[]))?;
    let recalled = bank.look_up(&draw);
    let shifted = (&recalled[1] - &recalled[0]).eq(1000.0).all().int64_value(&[]);
    assert_eq!(shifted, 1, "all networks layout the same images");
    Ok(Vec::<Vec<i64>>::try_from(recalled[0].select(2, 0).to_kind(Kind::Int64)).unwrap())
}

#[test]
fn the_paper_draws_one_class_mate_and_negatives_of_other_classes() {
    let labels: Vec<i64> = (0..30).map(|i| i % 3).collect();
    let bank = MemoryBank::index(setup(&labels, 4, 7, BankLayout::Paper)).unwrap();
    let mut mates: HashMap<i64, usize> = HashMap::new();
    for seed in 0..300 {
        for (row, (class, own)) in drawn(&bank, &[0, 1], &[3, 4], seed).unwrap().into_iter().zip([(0i64, 3i64), (1, 4)]) {
            assert_eq!(row.len(), 8);
            assert!(row[0] % 3 == class && row[0] != own, "the positive of {own} is {}", row[0]);
            assert!(row[1..].iter().all(|i| i % 3 != class));
            if own == 3 {
                *mates.entry(row[0]).or_default() += 1;
            }
        }
    }
    // Nine mates, 300 draws: about 33 each; a mate that never or always came would not be uniform.
    assert_eq!(mates.len(), 9);
    assert!(mates.values().all(|&n| (12..65).contains(&n)), "{mates:?}");
}

#[test]
fn the_released_code_draws_the_anchor_first_and_may_repeat_it() {
    let labels: Vec<i64> = (0..6).map(|i| i % 3).collect();
    let bank = MemoryBank::index(setup(&labels, 4, 5, BankLayout::Released)).unwrap();
    let mut repeated = 0;
    for seed in 0..40 {
        let row = drawn(&bank, &[2], &[5], seed).unwrap().remove(0);
        assert_eq!((row.len(), row[0]), (7, 5));
        assert_eq!(row[1] % 3, 2);
        assert!(row[2..].iter().all(|i| i % 3 != 2));
        repeated += usize::from(row[1] == 5);
    }
    assert!((8..32).contains(&repeated), "the positive is the anchor itself half the time, here {repeated} of 40");
}

#[test]
fn banks_start_as_unit_vectors_or_uniform() {
    let labels: Vec<i64> = (0..200).map(|i| i % 4).collect();
    let paper = MemoryBank::index(setup(&labels, 128, 5, BankLayout::Paper)).unwrap();
    assert!(lengths(&table(&paper, "bank.0")).iter().all(|l| (l - 1.0).abs() < 1e-5));
    assert!(!table(&paper, "bank.0").equal(&table(&paper, "bank.1")));
    let released = table(&MemoryBank::index(setup(&labels, 128, 5, BankLayout::Released)).unwrap(), "bank.0");
    let bound = (3.0f64 / 128.0).sqrt();
    assert!((bound - 0.1531).abs() < 1e-4 && released.abs().max().double_value(&[]) <= bound);
    let lengths = lengths(&released);
    let mean = lengths.iter().sum::<f32>() / lengths.len() as f32;
    assert!((mean - 1.0).abs() < 0.02 && lengths.iter().any(|l| (l - 1.0).abs() > 1e-3), "expected length 1, but no unit vectors: {mean}");
}

#[test]
fn golden_update() {
    // From the released class in float64: bank0_ij = sin(1+2i+j), bank1_ij = cos(1+i+2j), u_ij = sin(.5+ij+i), v_ij = cos(.3+2i+j).
    let unit = |rows: usize, f: fn(f64, f64) -> f64| {
        let t = Tensor::from_slice(&(0..rows * 3).map(|k| f((k / 3) as f64, (k % 3) as f64)).collect::<Vec<f64>>()).view([rows as i64, 3]);
        (&t / t.norm_scalaropt_dim(2.0, [-1i64].as_slice(), true)).to_kind(Kind::Float)
    };
    let labels = [0i64, 0, 1, 1, 1, 0];
    let mut bank = MemoryBank::index(setup(&labels, 3, 2, BankLayout::Released)).unwrap();
    table(&bank, "bank.0").copy_(&unit(6, |i, j| (1.0 + 2.0 * i + j).sin()));
    table(&bank, "bank.1").copy_(&unit(6, |i, j| (1.0 + i + 2.0 * j).cos()));
    let (u, v) = (unit(2, |i, j| (0.5 + i * j + i).sin()), unit(2, |i, j| (0.3 + 2.0 * i + j).cos()));
    let untouched = table(&bank, "bank.0").get(1).copy();
    bank.update(&[u, v], &Tensor::from_slice(&[0i64, 1]), &Tensor::from_slice(&[0i64, 3]));
    for (name, row, expected) in [("bank.0", 0, [0.6465, 0.6745, 0.3565]), ("bank.1", 3, [-0.9258, 0.0294, -0.3769])] {
        let actual = Vec::<f32>::try_from(table(&bank, name).get(row)).unwrap();
        assert!(actual.iter().zip(expected).all(|(a, e)| (a - e).abs() < 1e-4), "{name}[{row}] is {actual:?}");
    }
    assert!(table(&bank, "bank.0").get(1).equal(&untouched));
}

#[test]
fn a_queue_replaces_the_oldest_and_wraps_around() {
    let labels: Vec<i64> = (0..12).map(|i| i % 3).collect();
    let mut bank = MemoryBank::queue(setup(&labels, 2, 3, BankLayout::Paper), 5, 4).unwrap();
    let held = |bank: &MemoryBank| Vec::<i64>::try_from(table(bank, "bank.labels")).unwrap();
    assert_eq!(held(&bank), [0, 1, 2, 0, 1]);
    let embeds = |from: f64| Tensor::from_slice(&[from, 0.0, from + 1.0, 0.0, from + 2.0, 0.0]).view([3, 2]).to_kind(Kind::Float);
    for step in 0..3 {
        let labels = Tensor::from_slice(&[2i64, 2, 1]);
        bank.update(&[embeds(10.0 * step as f64), embeds(100.0)], &labels, &Tensor::from_slice(&[0i64, 0, 0]));
    }
    // Nine enqueued into five places: the last five of 0 1 2 10 11 12 20 21 22, at places 4 0 1 2 3.
    assert_eq!(Vec::<f32>::try_from(table(&bank, "bank.0").select(1, 0)).unwrap(), [12.0, 20.0, 21.0, 22.0, 11.0]);
    assert_eq!(held(&bank), [1, 2, 2, 1, 2]);
    assert_eq!(table(&bank, "bank.next").int64_value(&[]), 4);
    // Class 0 has left the queue: its anchors sit out, the others are served.
    let draw = bank.draw(&Tensor::from_slice(&[0i64, 1]), &Tensor::from_slice(&[0i64, 1]), &mut rng::stream(0, "t", &[])).unwrap();
    assert_eq!(Vec::<f32>::try_from(draw.usable.as_ref().unwrap()).unwrap(), [0.0, 1.0]);
}

#[test]
fn what_cannot_be_mined_is_refused() {
    let refusal = |result: Result<MemoryBank>| result.err().unwrap().to_string();
    let lonely = [0i64, 0, 1, 2, 2];
    assert!(refusal(MemoryBank::index(setup(&lonely, 2, 3, BankLayout::Paper))).contains("class 1 has one training image"));
    assert!(MemoryBank::index(setup(&lonely, 2, 3, BankLayout::Released)).is_ok(), "the released code lets the anchor be its own positive");
    assert!(refusal(MemoryBank::index(setup(&[0, 0, 0], 2, 3, BankLayout::Paper))).contains("two classes"));
    assert!(refusal(MemoryBank::queue(setup(&lonely, 2, 3, BankLayout::Paper), 3, 4)).contains("queue_length = 3"));
}

#[test]
fn draws_repeat_with_their_stream() {
    let labels: Vec<i64> = (0..30).map(|i| i % 3).collect();
    let bank = MemoryBank::index(setup(&labels, 4, 7, BankLayout::Paper)).unwrap();
    let draw = |seed| drawn(&bank, &[0, 1], &[3, 4], seed).unwrap();
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}
