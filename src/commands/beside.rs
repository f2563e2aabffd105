//! Our numbers in the layout of the paper's tables: networks down, methods across, the paper's under ours and the gap. A cell that was not
//! run is empty.

use crate::error::Result;
use crate::eval::record::Record;
use crate::eval::stats;
use crate::methods;
use crate::report::paper::Printed;
use crate::report::{Cell, Table, table};
use crate::run::{FourWays, Run};

/// One run's number in a cell of a table.
#[derive(Debug, Clone)]
pub(super) struct Ours {
    /// Measured on.
    pub(super) dataset: String,
    /// The network, as the table's rows tell them apart.
    pub(super) network: Who,
    /// The column, as the paper's numbers call it.
    pub(super) column: String,
    /// What counts: the last epoch of the own classifier, the mean over a run's networks of this architecture.
    pub(super) value: f64,
    /// The best of all stages' classifiers at its best epoch on the test images, likewise: what the released code prints.
    pub(super) best_stage: Option<f64>,
}

/// A network as rows tell them apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Who {
    /// Its architecture.
    pub(super) arch: String,
    /// In a cohort of different architectures: all of them, and its place from 1.
    pub(super) among: Option<(String, usize)>,
    /// What a plan calls the row, where one recipe has several.
    pub(super) row: Option<String>,
}

impl Who {
    pub(super) fn of(printed: &Printed) -> Who {
        let among = printed.pair().zip(printed.peer).map(|(pair, peer)| (pair.to_string(), peer));
        Who { arch: printed.network.clone(), among, row: None }
    }

    pub(super) fn shown(&self) -> String {
        let other = |(pair, place): &(String, usize)| {
            let others = pair.split('+').enumerate().filter(|(i, _)| i + 1 != *place).map(|(_, arch)| arch);
            format!(" with {}", others.collect::<Vec<_>>().join(", "))
        };
        let row = self.row.as_ref().map_or(String::new(), |row| format!(", {row}"));
        format!("{}{}{row}", self.arch, self.among.as_ref().map_or(String::new(), other))
    }
}

/// The numbers of a finished run in one column: for each architecture the mean over the networks that the method reports. Two different
/// architectures are told apart by their place.
pub(super) fn of_run(run: &Run, column: &str) -> Result<Vec<Ours>> {
    let archs = run.archs();
    let different = archs.windows(2).any(|w| w[0] != w[1]);
    let reported = methods::find(run.method())?.reported;
    let counted = (0..archs.len()).filter(|m| reported.counts(*m));
    let counted: Vec<(usize, FourWays)> = counted.filter_map(|m| Some((m, run.accuracy(m)?))).collect();
    let ours = |network: Who, of: &[FourWays]| {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let stages: Option<Vec<f64>> = of.iter().map(|a| a.best_stage.map(|(value, ..)| value)).collect();
        Ours {
            dataset: run.dataset().to_string(),
            network,
            column: column.to_string(),
            value: mean(&of.iter().map(|a| a.last).collect::<Vec<_>>()),
            best_stage: stages.map(|values| mean(&values)),
        }
    };
    Ok(if different {
        let who = |m: usize| Who { arch: archs[m].clone(), among: Some((archs.join("+"), m + 1)), row: None };
        counted.iter().map(|(m, a)| ours(who(*m), &[*a])).collect()
    } else if counted.is_empty() {
        vec![]
    } else {
        vec![ours(Who { arch: archs[0].clone(), among: None, row: None }, &counted.iter().map(|(_, a)| *a).collect::<Vec<_>>())]
    })
}

/// What was measured of a run's networks, in one column. One run is one draw: its networks and probe seeds on one dataset are averaged, as
/// far as the method reports them.
pub(super) fn of_records<'a>(records: impl Iterator<Item = &'a Record>, column: &str) -> Vec<Ours> {
    let mut means: Vec<(Ours, usize)> = vec![];
    let reported = |r: &&Record| match (r.peer, methods::find(&r.method)) {
        (Some(m), Ok(method)) => method.reported.counts(m),
        _ => true,
    };
    // The paper's tables are of whole networks.
    for r in records.filter(|r| r.stage().is_none()).filter(reported) {
        // Detection has two numbers a network; the paper's are told apart by the dataset's name too.
        let dataset = if r.metric == "top1" { r.dataset.clone() } else { format!("{} {}", r.dataset, r.metric) };
        let network = Who { arch: r.arch.clone(), among: None, row: None };
        match means.iter_mut().find(|(mean, _)| mean.dataset == dataset && mean.network == network) {
            Some((mean, n)) => {
                mean.value += r.value;
                *n += 1;
            }
            None => means.push((Ours { dataset, network, column: column.to_string(), value: r.value, best_stage: None }, 1)),
        }
    }
    means.into_iter().map(|(sum, n)| Ours { value: sum.value / n as f64, ..sum }).collect()
}

/// One table. `columns`: those to show, in order. Every row that is ours or the paper's is shown; `whole` also shows the paper's where
/// nothing is ours.
pub(super) fn beside(name: &str, columns: &[&str], ours: &[Ours], theirs: &[Printed], whole: bool) -> Result<Table> {
    let mut shown = Table::new(name, &[&["network", "whose (%)"], columns, &["dataset"]].concat());
    let mut rows: Vec<(String, Who)> = vec![];
    let printed = theirs.iter().filter(|p| whole && columns.contains(&p.method.as_str())).map(|p| (p.dataset.clone(), Who::of(p)));
    for row in ours.iter().map(|o| (o.dataset.clone(), o.network.clone())).chain(printed) {
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    for (dataset, who) in rows {
        let of = |column: &str| -> Vec<&Ours> {
            ours.iter().filter(|o| o.dataset == dataset && o.network == who && o.column == column).collect()
        };
        let values = |column: &str| of(column).iter().map(|o| o.value).collect::<Vec<f64>>();
        let paper = |column: &str| theirs.iter().find(|p| p.dataset == dataset && Who::of(p) == who && p.method == column);
        let mut row = |what: &str, cell: &dyn Fn(&str) -> Cell| {
            let cells: Vec<Cell> = columns.iter().map(|c| cell(c)).collect();
            if cells.iter().any(|c| *c != Cell::Empty) {
                shown.push([vec![Cell::text(who.shown()), Cell::text(what)], cells, vec![Cell::text(&dataset)]].concat());
            }
        };
        row("ours", &|c| table::spread(&values(c)));
        row("ours, 95 % over runs", &|c| match stats::mean_interval(&values(c)) {
            (mean, Some(half)) => Cell::text(format!("{:.2} to {:.2}", mean - half, mean + half)),
            _ => Cell::Empty,
        });
        row("ours, best stage and epoch", &|c| table::spread(&of(c).iter().filter_map(|o| o.best_stage).collect::<Vec<_>>()));
        row("paper", &|c| paper(c).map_or(Cell::Empty, |p| Cell::Spread { mean: p.value, std: p.std, n: 0 }));
        row("gap", &|c| match (&values(c)[..], paper(c)) {
            ([], _) | (_, None) => Cell::Empty,
            (values, Some(p)) => Cell::difference(values.iter().sum::<f64>() / values.len() as f64 - p.value, None),
        });
    }
    Ok(shown)
}

/// What stands under such a table of what was measured of the networks.
pub(super) const NOTE_MEASURED: &str = "Ours: what was measured of the networks that ship, mean ± standard deviation; n counts runs, and a run's number is the mean of its networks of an architecture (of OKDDip and FFSD the leader). Cells that were not run are empty.";

/// What stands under such a table of test accuracies.
pub(super) const NOTE: &str = "Ours: own classifier after the last epoch, mean ± standard deviation; n counts runs, and a run's number is the mean of its networks of an architecture (of OKDDip and FFSD the leader, of CKD-MKT the second phase, of PCL the mean teachers). The paper says neither which epoch nor which network its numbers are of; the released code prints the best stage and epoch on the test images, which is the line of that name. Cells that were not run are empty.";

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(value: f64) -> Ours {
        Ours {
            dataset: "cifar100".into(),
            network: Who { arch: "resnet32".into(), among: None, row: None },
            column: "dml".into(),
            value,
            best_stage: None,
        }
    }

    #[test]
    fn of_a_leader_and_its_peers_the_leader_counts() {
        let of = |method: &str| {
            let row = |peer: usize, value: f64| Record {
                method: method.into(),
                arch: "resnet32".into(),
                dataset: "stl10".into(),
                metric: "top1".into(),
                peer: Some(peer),
                value,
                ..Record::default()
            };
            let rows = [row(0, 60.0), row(1, 50.0)];
            of_records(rows.iter(), method).iter().map(|o| o.value).collect::<Vec<f64>>()
        };
        assert_eq!([of("okddip"), of("ffsd"), of("dml")], [[60.0], [60.0], [55.0]]);
    }

    #[test]
    fn n_counts_runs_and_cells_that_were_not_run_are_empty() {
        let theirs = crate::report::paper::printed().unwrap();
        let theirs: Vec<Printed> = theirs.into_iter().filter(|p| p.table == "cifar100-same").collect();
        let table = beside("t", &["baseline", "dml"], &[ours(71.0), ours(73.0)], &theirs, false).unwrap();
        let lines: Vec<Vec<String>> = table.rows.iter().map(|r| r[1..r.len() - 1].iter().map(Cell::shown).collect()).collect();
        assert_eq!(lines[0], ["ours", "", "72.00 ± 1.41 (n = 2)"]);
        // t(1) = 12.706, deviation 1.4142 over the root of 2: 12.71 on either side.
        assert_eq!(lines[1], ["ours, 95 % over runs", "", "59.29 to 84.71"]);
        assert_eq!(lines[2], ["paper", "70.91 ± 0.14", "72.14 ± 0.35"]);
        assert_eq!(lines[3], ["gap", "", "-0.14"]);
        assert_eq!(lines.len(), 4);
        let whole = beside("t", &["dml"], &[], &theirs, true).unwrap();
        assert_eq!(whole.rows.len(), 9, "nine architectures, the paper's line each");
    }
}
