//! Index orders, as pure functions of labels and a seed: the batches of an epoch, the part of a training set that is used, the part held out.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use rand::RngCore;
use rand::seq::{SliceRandom, index};

use super::{Sampling, Split};
use crate::error::{Error, Result};
use crate::files;
use crate::rng;

/// The batches of an epoch, as places in a split with these labels.
pub fn epoch(labels: &[i64], sampling: Sampling, batch: usize, seed: u64, epoch: u64) -> Result<Vec<Vec<u32>>> {
    if batch == 0 || labels.is_empty() {
        return Err(Error::input(format!("batch {batch} of {} training images: both must be at least 1", labels.len())));
    }
    match sampling {
        Sampling::Shuffled => Ok(shuffled(labels.len(), batch, seed, epoch)),
        Sampling::ClassPairs => class_pairs(labels, batch, seed, epoch),
    }
}

/// An epoch's batches as networks can train on them, this many ranks together.
///
/// Ranks take equal parts of each batch: images of a short last batch that do not divide are left out. A last batch that would leave a
/// rank one image joins the batch before it: no variance can be taken from one image (BatchNorm's would be 0/0). `whole`: contrast
/// samples are gathered, so a class may be split between ranks.
pub fn for_training(mut order: Vec<Vec<u32>>, labels: &[i64], sampling: Sampling, ranks: usize, whole: bool) -> Result<Vec<Vec<u32>>> {
    if order.len() > 1 && order.last().is_some_and(|last| last.len() / ranks == 1) {
        let last = order.pop().unwrap_or_default();
        order.last_mut().expect("there are two").extend(last);
    }
    if ranks == 1 {
        return Ok(order);
    }
    let full = order.first().map_or(0, Vec::len);
    let refuse = |why: String, accepted: String| Err(Error::input(format!("a batch of {full} images on {ranks} ranks: {why}; {accepted}")));
    if full < ranks || !full.is_multiple_of(ranks) {
        let (below, above) = (full / ranks * ranks, full.next_multiple_of(ranks));
        return refuse(
            "it does not divide".into(),
            format!("set train.batch to a multiple, for example {}", if below > 0 { below } else { above }),
        );
    }
    if sampling == Sampling::ClassPairs && !whole {
        // All batches are built alike: classes one after another.
        for part in order[0].chunks(full / ranks) {
            let classes = by_class(&part.iter().map(|&i| labels[i as usize]).collect::<Vec<_>>());
            if classes.values().any(|members| members.len() < 2) || classes.len() < 2 {
                return refuse(
                    format!("the {} images of a rank leave a class without a positive, or are all of one class", full / ranks),
                    format!("set train.batch to a multiple of {}, or train.gather_negatives=true", 4 * ranks),
                );
            }
        }
    }
    order.iter_mut().for_each(|batch| batch.truncate(batch.len() / ranks * ranks));
    order.retain(|batch| !batch.is_empty());
    Ok(order)
}

/// Every image once; the last batch may be short.
fn shuffled(count: usize, batch: usize, seed: u64, epoch: u64) -> Vec<Vec<u32>> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    order.shuffle(&mut rng::stream(seed, "order", &[epoch]));
    order.chunks(batch).map(<[u32]>::to_vec).collect()
}

/// floor(N / B) batches of B/2 random classes x 2 images, drawn without replacement inside a class: the released class-aware sampler.
/// With fewer than B/2 classes, all C of them x floor(B/C) images, so that every anchor keeps as many positives and as many negatives
/// (CIFAR-10 at batch 128: 12 of each of the 10, a batch of 120). Not a pass over the set: an image may come twice in an epoch, or not
/// at all.
fn class_pairs(labels: &[i64], batch: usize, seed: u64, epoch: u64) -> Result<Vec<Vec<u32>>> {
    let classes: Vec<(i64, Vec<u32>)> = by_class(labels).into_iter().collect();
    let (count, n) = (classes.len(), labels.len());
    let refuse = |why: String| Err(Error::input(format!("batch {batch} with class pairs: {why}")));
    if !batch.is_multiple_of(2) {
        return refuse(format!("the batch must be even; {} or {} would do", batch - 1, batch + 1));
    }
    if batch > n {
        return refuse(format!("there are {n} training images, and a batch may be no larger"));
    }
    let (taken, each) = if count >= batch / 2 { (batch / 2, 2) } else { (count, batch / count) };
    if count < 2 {
        return refuse("the training images are all of one class, and contrast needs two".into());
    }
    if let Some((class, members)) = classes.iter().find(|(_, members)| members.len() < each) {
        return refuse(format!("class {class} has {} training image(s), and a batch takes {each} of a class", members.len()));
    }
    let mut rng = rng::stream(seed, "order", &[epoch]);
    let mut draw = |_| {
        let mut order = Vec::with_capacity(taken * each);
        for class in index::sample(&mut rng, count, taken) {
            let members = &classes[class].1;
            order.extend(index::sample(&mut rng, members.len(), each).into_iter().map(|i| members[i]));
        }
        order
    };
    Ok((0..n / (taken * each)).map(&mut draw).collect())
}

/// The same share of every class (at least one image), in the order of the split. Of two fractions the smaller is part of the larger.
pub fn stratified(labels: &[i64], fraction: f64, seed: u64) -> Vec<usize> {
    let keep = |members: usize| ((members as f64 * fraction).round() as usize).clamp(1, members);
    parts(labels, seed, "fraction", keep).0
}

/// Exactly `count` images, of every class as near to its share as whole images allow (Sainte-Laguë's rule), in the order of the split.
/// `what` names the draw; of two counts the smaller is part of the larger.
pub fn drawn(labels: &[i64], count: usize, seed: u64, what: &str) -> Vec<usize> {
    let mut places: Vec<(f64, u32, u32)> = vec![];
    for (class, mut members) in by_class(labels) {
        let mut rng = rng::stream(seed, what, &[class as u64]);
        members.shuffle(&mut rng);
        // Where two classes have the same claim to an image, chance decides.
        let lot = rng.next_u32();
        let each = members.len() as f64;
        places.extend(members.into_iter().enumerate().map(|(k, i)| ((k as f64 + 0.5) / each, lot, i)));
    }
    places.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut taken: Vec<usize> = places.into_iter().take(count).map(|(.., i)| i as usize).collect();
    taken.sort_unstable();
    taken
}

/// What a run learns from and what it holds out: `holdout` images of every class by seed first, then `fraction` of the rest.
pub fn for_run(split: &Split, fraction: f64, per_class: usize, seed: u64) -> Result<(Split, Option<Split>)> {
    let (kept, held) = holdout(&split.labels, per_class, seed)?;
    let mut train = split.subset(&kept);
    if fraction < 1.0 {
        train = train.subset(&stratified(&train.labels, fraction, seed));
    }
    Ok((train, (per_class > 0).then(|| split.subset(&held))))
}

/// (training part, held-out part) with `per_class` images of every class held out, each in the order of the split.
pub fn holdout(labels: &[i64], per_class: usize, seed: u64) -> Result<(Vec<usize>, Vec<usize>)> {
    let smallest = by_class(labels).into_iter().min_by_key(|(_, members)| members.len());
    if let Some((class, members)) = smallest.filter(|(_, members)| members.len() <= per_class) {
        return Err(Error::input(format!(
            "holdout {per_class}: class {class} has {} training image(s), and at least one must stay; at most {} can be held out",
            members.len(),
            members.len() - 1
        )));
    }
    let (held, train) = parts(labels, seed, "holdout", |_| per_class);
    Ok((train, held))
}

/// (first, rest): of each class, shuffled, the first `keep(images)` and the others; each in the order of the split.
fn parts(labels: &[i64], seed: u64, name: &str, keep: impl Fn(usize) -> usize) -> (Vec<usize>, Vec<usize>) {
    let (mut first, mut rest) = (vec![], vec![]);
    for (class, mut members) in by_class(labels) {
        members.shuffle(&mut rng::stream(seed, name, &[class as u64]));
        let (kept, others) = members.split_at(keep(members.len()));
        first.extend(kept.iter().map(|&i| i as usize));
        rest.extend(others.iter().map(|&i| i as usize));
    }
    first.sort_unstable();
    rest.sort_unstable();
    (first, rest)
}

fn by_class(labels: &[i64]) -> BTreeMap<i64, Vec<u32>> {
    let mut classes: BTreeMap<i64, Vec<u32>> = BTreeMap::new();
    for (i, &label) in labels.iter().enumerate() {
        classes.entry(label).or_default().push(i as u32);
    }
    classes
}

/// sha256 of the indices, one to a line: the same for everyone who drew the same part.
pub fn hash(indices: &[usize]) -> String {
    files::sha256(lines(indices).as_bytes())
}

fn lines(indices: &[usize]) -> String {
    indices.iter().fold(String::new(), |mut out, i| {
        writeln!(out, "{i}").expect("a String takes all");
        out
    })
}

/// Writes an index file, which says in its first line what the others hash to, and returns that hash.
pub fn write_index(path: &Path, indices: &[usize]) -> Result<String> {
    let lines = lines(indices);
    let hash = files::sha256(lines.as_bytes());
    files::write(path, format!("# sha256 of the lines below: {hash}\n{lines}").as_bytes())?;
    Ok(hash)
}
