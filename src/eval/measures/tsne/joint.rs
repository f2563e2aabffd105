//! One map of all networks of a run: the paper's figure. Points of one class should lie together whichever network they are of.

use std::path::{Path, PathBuf};
use std::time::Instant;

use tch::{Kind, Tensor};

use super::{Tsne, embed_shown, map, output};
use crate::data::sampler;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::TargetDataset;
use crate::eval::feature_file::Part;
use crate::eval::features::{self, Prepared};
use crate::eval::network::TrainedNetwork;
use crate::eval::protocol::Protocol;
use crate::eval::record::Record;
use crate::eval::restored::Restored;
use crate::files;
use crate::report::plot::{Joint, JointPanel};
use crate::report::{Cell, Figure, Table};
use crate::run::{BEST, RunFolder};

/// The unit vectors of one run's networks, and what they are.
struct Space {
    /// One [N, d] a network.
    vectors: Vec<Tensor>,
    /// "embeddings" or "features".
    what: &'static str,
}

/// Draws a panel a run and keeps the numbers that say how far it may be believed.
pub(super) fn run(
    networks: &[TrainedNetwork],
    target: &TargetDataset,
    rows: &[usize],
    labels: &[usize],
    protocol: &Protocol,
    p: &Tsne,
    common: &Common,
) -> Result<()> {
    let mut runs: Vec<(PathBuf, Vec<&TrainedNetwork>)> = vec![];
    for network in networks {
        let run = network.run.clone().ok_or_else(|| Error::input("--joint maps the networks of a run; accepted: --run DIR"))?;
        match runs.iter_mut().find(|(known, _)| *known == run) {
            Some((_, own)) => own.push(network),
            None => runs.push((run, vec![network])),
        }
    }
    let most = runs.iter().map(|(_, own)| own.len()).max().unwrap_or(0);
    if let Some((run, own)) = runs.iter().find(|(_, own)| own.len() != most || most < 2) {
        return Err(Error::input(format!(
            "--joint: {} gives {} network(s); accepted: at least two a run, as many of each (--peer all)",
            run.display(),
            own.len()
        )));
    }
    let (mut panels, mut each, mut records) = (vec![], vec![], vec![]);
    let mut shown =
        Table::new("", &["run", "method", "mapped", "KL divergence", "neighbours kept (%)", "nearest of another network in class (%)"]);
    for (run, own) in &runs {
        let Space { vectors, what } = space(run, own, target, rows, p, common)?;
        let all = Tensor::cat(&vectors, 0);
        let began = Instant::now();
        let points = embed_shown(&all, &map::pca_start(&all), p, "all networks", common)?;
        let seconds = began.elapsed().as_secs_f64();
        let kl = map::kl(&all, &points, p.perplexity)?;
        let kept = 100.0 * map::neighbours_kept(&all, &points, p.neighbours.min(all.size()[0] as usize - 1));
        let in_class = across(&vectors, labels);
        let (name, method) = (own[0].cohort(), &own[0].method);
        shown.push(vec![
            Cell::text(name),
            Cell::text(method),
            Cell::text(what),
            Cell::Score(kl, 3),
            Cell::Score(kept, 1),
            Cell::Score(in_class, 1),
        ]);
        let note = format!(
            "{what}; KL {kl:.3}, {kept:.0} % of {} neighbours kept; {in_class:.0} % nearest across networks in class",
            p.neighbours
        );
        for (network, own) in own.iter().zip(points.chunks(rows.len())) {
            each.push((network.name.clone(), own.to_vec()));
        }
        panels.push(JointPanel { title: format!("{name} ({method}, {})", own[0].arch.name), note, points });
        for (metric, value) in [("kl", kl), ("neighbours_kept", kept), ("across_in_class", in_class)] {
            let record =
                Record::new("tsne", own[0], common).of_cohort(own[0]).on(target, own[0].image_size(p.image_size)).protocol(protocol);
            let split_hash = sampler::hash(rows);
            let variant = format!("joint map of {what}");
            records.push(Record {
                metric: metric.into(),
                variant,
                value,
                n_test: rows.len(),
                seed: Some(p.seed),
                split_hash,
                seconds,
                ..record
            });
        }
    }
    let joined: Vec<&str> = runs.iter().map(|(_, own)| own[0].cohort()).collect();
    let stem = format!("tsne-joint-{}-{}", target.dataset.name, &files::sha256(format!("{joined:?}{}", protocol.hash()).as_bytes())[..8]);
    let title = format!("t-SNE of all networks of a run, {} test images of {}", rows.len(), target.dataset.name);
    let groups: Vec<String> = (0..most).map(|m| format!("network {m}")).collect();
    let svg = Joint { title: &title, panels: &panels, labels, networks: &groups, classes: &target.dataset.classes }.draw();
    let caption = format!("{title}: one map a run. A marker is an image as one network sees it; colours are classes.");
    let figure = Figure::new(stem, caption, svg);
    let folder = RunFolder::at(&networks[0].out).figures();
    let written = write(&folder, &figure, &each, rows, labels, &target.dataset.classes)?;
    output::finish(records, &figure, &written, &shown, common)
}

/// SVG, PNG and the coordinates: two columns a network.
fn write(
    folder: &Path,
    figure: &Figure,
    each: &[(String, Vec<[f64; 2]>)],
    rows: &[usize],
    labels: &[usize],
    classes: &[String],
) -> Result<Vec<PathBuf>> {
    let mut table = Table::new(figure.name.clone(), &["image", "label", "class"]);
    for (name, _) in each {
        table.columns.extend([format!("{name}.x"), format!("{name}.y")]);
    }
    for (i, (row, label)) in rows.iter().zip(labels).enumerate() {
        let mut cells = vec![Cell::Count(*row as i64), Cell::Count(*label as i64), Cell::text(classes[*label].clone())];
        cells.extend(each.iter().flat_map(|(_, points)| points[i].map(|v| Cell::Score(v, 4))));
        table.push(cells);
    }
    output::write_all(folder, figure, &[("csv", table.csv()?)])
}

/// Where the networks of a run are compared: the embeddings of a contrastive method at what ships, else the pooled features, which must be
/// of one width to lie in one map.
fn space(run: &Path, own: &[&TrainedNetwork], target: &TargetDataset, rows: &[usize], p: &Tsne, common: &Common) -> Result<Space> {
    let contrastive = ["l_mcl", "mcl"].contains(&own[0].method.as_str());
    if contrastive && own.iter().all(|n| n.stage.is_none()) {
        let restored = Restored::read(run, BEST, common)?;
        let split = target.dataset.test.subset(rows);
        let split = if restored.dataset.one_size { split.resized(restored.dataset.image_size)? } else { split };
        let mut parts: Vec<Vec<Tensor>> = own.iter().map(|_| vec![]).collect();
        restored.each_batch(&split, common, |outs| {
            let embeds = restored.method.last_embeddings(outs).unwrap_or_default();
            for (network, parts) in own.iter().zip(&mut parts) {
                parts.extend(network.peer.and_then(|m| embeds.get(m)).map(|v| v.to_device(tch::Device::Cpu).to_kind(Kind::Float)));
            }
        })?;
        if parts.iter().all(|parts| !parts.is_empty()) {
            return Ok(Space { vectors: parts.iter().map(|parts| Tensor::cat(parts, 0)).collect(), what: "embeddings" });
        }
    }
    if let Some(other) = own.iter().find(|n| n.arch.dim != own[0].arch.dim) {
        return Err(Error::input(format!(
            "--joint: features of {} have {} numbers and those of {} have {}; they lie in no common space",
            own[0].arch.name, own[0].arch.dim, other.arch.name, other.arch.dim
        )));
    }
    let mut vectors = vec![];
    for network in own {
        let prepared = Prepared::new(&target.dataset, network, network.image_size(p.image_size))?;
        let x = features::features(network, &prepared, Part::Test, true, common)?.rows(rows).x;
        vectors.push(&x / x.norm_scalaropt_dim(2, 1i64, true).clamp_min(1e-12));
    }
    Ok(Space { vectors, what: "features" })
}

/// How often the nearest vector of another network, of another image, is of the same class, in percent: the mean over ordered pairs of
/// networks. One space for all networks gives what one network alone would; spaces that have nothing to do with each other give chance.
fn across(vectors: &[Tensor], labels: &[usize]) -> f64 {
    let labels = Tensor::from_slice(&labels.iter().map(|&l| l as i64).collect::<Vec<_>>());
    let mut shares = vec![];
    for (a, own) in vectors.iter().enumerate() {
        for (_, other) in vectors.iter().enumerate().filter(|(b, _)| *b != a) {
            let mut cosines = own.matmul(&other.tr());
            let _ = cosines.fill_diagonal_(f64::NEG_INFINITY, false);
            let nearest = cosines.argmax(1, false);
            let hits = labels.index_select(0, &nearest).eq_tensor(&labels);
            shares.push(100.0 * hits.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]));
        }
    }
    shares.iter().sum::<f64>() / shares.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_across_networks_counts_classes_not_images() {
        // Two classes on two axes, two images each; the second network sees the same, so the nearest other image is of the class.
        let axes = Tensor::from_slice(&[1f32, 0.0, 0.99, 0.1, 0.0, 1.0, 0.1, 0.99]).view([4, 2]);
        assert_eq!(across(&[axes.copy(), axes.copy()], &[0, 0, 1, 1]), 100.0);
        // Turned by a right angle: the nearest is of the other class.
        let turned = axes.flip([1]);
        assert_eq!(across(&[axes, turned], &[0, 0, 1, 1]), 0.0);
    }
}
