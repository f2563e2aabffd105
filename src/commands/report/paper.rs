//! Our numbers beside the paper's.

use crate::error::Result;
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::report::paper::{Printed, printed, table_of};
use crate::report::table::{self, Group};
use crate::report::{Cell, Section, Table};
use crate::run::Run;

/// Our numbers in the paper's layout: networks down, methods across, the paper's under ours and the gap.
pub(super) fn section(runs: &[Run], records: &[&Record]) -> Result<Section> {
    let mut section = Section::new("Beside the paper");
    let printed = printed()?;
    let groups = table::group(&[of_runs(runs), of_probes(records), of_detection(records)].concat())?;
    for own in table::together(&groups.iter().collect::<Vec<_>>(), |g| vec![g.keys[0].clone()])? {
        let theirs: Vec<&Printed> = printed.iter().filter(|p| p.table == own[0].keys[0]).collect();
        section.table(beside(&own, &theirs)?);
    }
    if !section.parts.is_empty() {
        section.text("Ours: the last epoch, mean ± standard deviation over networks and seeds of a setting. The paper trains 300 epochs on CIFAR-100 and says neither which epoch nor which network its numbers are of; short runs are not expected to reach them.");
    }
    Ok(section)
}

/// One of our values, and where it belongs: the paper's table, dataset, network with its peer, method.
type Ours = (Vec<String>, f64);

/// Test accuracies after the last epoch.
fn of_runs(runs: &[Run]) -> Vec<Ours> {
    let mut ours = vec![];
    for run in runs {
        let Some(name) = table_of(run.dataset(), &run.archs()) else { continue };
        let same = run.archs().windows(2).all(|w| w[0] == w[1]);
        for (m, arch) in run.archs().iter().enumerate() {
            let network = if same { arch.clone() } else { format!("{arch} (net {})", m + 1) };
            if let Some(value) = run.accuracy(m).map(|a| a.last) {
                ours.push((vec![name.clone(), run.dataset().to_string(), network, run.method().to_string()], value));
            }
        }
    }
    ours
}

/// Linear classifiers on features of CIFAR-100 networks, trained as the paper trains them.
fn of_probes(records: &[&Record]) -> Vec<Ours> {
    let asked = |r: &&&Record| {
        let transfer = r.pretrained_on == "cifar100" && ["stl10", "tiny_imagenet"].contains(&r.dataset.as_str());
        r.command == "linear-probe" && r.options["kind"] == "paper" && transfer
    };
    let place = |r: &Record| {
        let changed = protocol_of(r).split_once(", ").map_or(String::new(), |(_, keys)| format!(", {keys}"));
        vec!["transfer-linear".into(), r.dataset.clone(), format!("{}{changed}", r.arch), r.method.clone()]
    };
    records.iter().filter(asked).map(|r| (place(r), r.value)).collect()
}

/// Detection on COCO. What is not as in the paper is said: `coco box_map, pre-trained on synthetic, limit=20`.
fn of_detection(records: &[&Record]) -> Vec<Ours> {
    let place = |r: &Record| {
        let mut measured = format!("{} {}", r.dataset, r.metric);
        if r.pretrained_on != "imagenet" {
            measured += &format!(", pre-trained on {}", if r.pretrained_on.is_empty() { "unknown" } else { &r.pretrained_on });
        }
        if !r.variant.is_empty() {
            measured += &format!(", {}", r.variant);
        }
        vec!["transfer-coco".into(), measured, r.arch.clone(), r.method.clone()]
    };
    records.iter().filter(|r| r.command == "detect" && r.dataset == "coco").map(|r| (place(r), r.value)).collect()
}

/// One of the paper's tables: our groups of it, and its rows.
fn beside(own: &[&Group], theirs: &[&Printed]) -> Result<Table> {
    // The paper's order, then methods it does not have.
    let all: Vec<&str> = theirs.iter().map(|p| p.method.as_str()).chain(own.iter().map(|g| g.keys[3].as_str())).collect();
    let methods: Vec<&str> = table::together(&all, |method| vec![method.to_string()])?.iter().map(|same| same[0]).collect();
    let mut shown = Table::new(&own[0].keys[0], &[&["dataset", "network", ""], &methods[..]].concat());
    let mut sorted = own.to_vec();
    sorted.sort_by(|a, b| a.keys[1..3].cmp(&b.keys[1..3]));
    for of_network in table::together(&sorted, |g| g.keys[1..3].to_vec())? {
        let [dataset, network] = [&of_network[0].keys[1], &of_network[0].keys[2]];
        let (arch, peer) = match network.split_once(" (net ") {
            Some((arch, rest)) => (arch, rest.trim_end_matches(')').parse::<usize>().ok()),
            None => (network.split(',').next().unwrap_or_default(), None),
        };
        let ours = |m: &str| of_network.iter().find(|g| g.keys[3] == m);
        let theirs = |m: &str| {
            let asked = |p: &&&Printed| Some(p.dataset.as_str()) == dataset.split(", ").next() && p.network == arch && p.peer == peer;
            theirs.iter().filter(asked).find(|p| p.method == m)
        };
        let mut row = |what: &str, cell: &dyn Fn(&str) -> Cell| {
            let cells: Vec<Cell> = methods.iter().map(|m| cell(m)).collect();
            if cells.iter().any(|c| *c != Cell::Empty) {
                shown.push([vec![Cell::text(dataset), Cell::text(network), Cell::text(what)], cells].concat());
            }
        };
        row("ours", &|m| ours(m).map_or(Cell::Empty, |g| g.cell()));
        row("paper", &|m| theirs(m).map_or(Cell::Empty, |p| Cell::Spread { mean: p.value, std: p.std, n: 0 }));
        row("gap", &|m| Cell::score(ours(m).zip(theirs(m)).map(|(g, p)| g.mean - p.value)));
    }
    Ok(shown)
}
