//! What the runs say of themselves: accuracy by every convention, and what embeddings of the stages came to.

use super::Results;
use crate::error::Result;
use crate::report::table::spread;
use crate::report::{Cell, Section, Table};
use crate::run::{FOUR_WAYS, FOUR_WAYS_NOTE, Run};

/// A number of a network, where it has it.
type OfNetwork<'a> = &'a dyn Fn(&Run, usize) -> Option<f64>;

impl Results<'_> {
    /// Papers print test accuracy in different ways: every setting in all of them, and with the stage that held-out images choose.
    pub(super) fn conventions(&self) -> Result<Section> {
        let mut section = Section::new("Accuracy by every convention");
        let columns = [&["setting"], &FOUR_WAYS[..], &["epoch and stage chosen on held-out images"]].concat();
        let mut table = Table::new("", &columns);
        let ways: [OfNetwork; 5] = [
            &|run, m| Some(run.accuracy(m)?.last),
            &|run, m| Some(run.accuracy(m)?.by_holdout?.0),
            &|run, m| Some(run.accuracy(m)?.best_epoch.0),
            &|run, m| Some(run.accuracy(m)?.best_stage?.0),
            &|run, m| Some(run.stage_choice(m)?.test),
        ];
        for (setting, runs) in self.trained()? {
            let cells = ways.iter().map(|of| over_seeds(&runs, |run| mean((0..run.archs().len()).map(|m| of(run, m)))));
            table.push(std::iter::once(Cell::text(setting)).chain(cells).collect());
        }
        section.table(table.without_empty_columns());
        if !section.parts.is_empty() {
            section.text(format!("{FOUR_WAYS_NOTE} The last column takes the best stage and epoch by the held-out images; a method without auxiliary classifiers has none. Mean ± standard deviation over seeds of the mean over a cohort's networks. Verdicts are about the last epoch."));
        }
        Ok(section)
    }

    /// How alike the embeddings of different images are in each stage, and what those of two networks know of each other.
    pub(super) fn stages(&self) -> Result<Section> {
        let mut section = Section::new("Embeddings by stage");
        let all = self.trained()?;
        let stages = all.iter().flat_map(|(_, runs)| runs).map(stages_of).max().unwrap_or(0);
        let mut names = vec!["setting".to_string()];
        names.extend((1..=stages).map(|l| format!("likeness, stage {l}")));
        names.extend((1..=stages).map(|l| format!("information, stage {l}")));
        let mut table = Table::new("", &names.iter().map(String::as_str).collect::<Vec<_>>());
        for (setting, runs) in &all {
            // A method with one embedding a network has it at its last stage.
            let stage = |run: &Run, l: usize| if stages_of(run) == 0 { (l + 1 == stages).then_some(None) } else { Some(Some(l)) };
            let likeness = |run: &Run, l: usize| {
                let of = |m: usize| stage(run, l)?.map_or(run.last(&format!("likeness.{m}")), |l| run.last(&format!("likeness.{m}.{l}")));
                mean((0..run.archs().len()).map(of))
            };
            let information = |run: &Run, l: usize| {
                let count = run.archs().len();
                let pairs = (0..count).flat_map(|a| (0..count).filter(move |b| a != *b).map(move |b| (a, b)));
                mean(pairs.map(|(a, b)| {
                    let name = format!("mutual_information.{a}.{b}");
                    stage(run, l)?.map_or(run.last(&name), |l| run.last(&format!("{name}.{l}.{l}")))
                }))
            };
            let alike = (0..stages).map(|l| over_seeds(runs, |run| likeness(run, l)));
            let known = (0..stages).map(|l| over_seeds(runs, |run| information(run, l)));
            let cells: Vec<Cell> = alike.chain(known).collect();
            if cells.iter().any(|c| *c != Cell::Empty) {
                table.push(std::iter::once(Cell::text(*setting)).chain(cells).collect());
            }
        }
        section.table(table);
        if !section.parts.is_empty() {
            section.text("Of the last epoch, mean ± standard deviation over seeds; a method that embeds only the last stage has numbers only there. Likeness is the mean cosine between embeddings of two different images: at 1 they are all one point. Information is the lower bound log K - L_ICL on the mutual information between the same stage of two networks (Eq. 6), in nats.");
        }
        Ok(section)
    }

    /// Every setting that has finished runs, with them.
    fn trained(&self) -> Result<Vec<(&str, Vec<Run>)>> {
        let mut found = vec![];
        for (_, setting) in self.plan.settings() {
            let runs = self.runs(&setting.name).into_iter().map(|(_, item)| self.run(item)).collect::<Result<Vec<_>>>()?;
            if !runs.is_empty() {
                found.push((setting.name.as_str(), runs));
            }
        }
        Ok(found)
    }
}

/// Stages that a run logged the likeness of; none where it has one embedding a network, or no embeddings.
fn stages_of(run: &Run) -> usize {
    run.columns().iter().filter(|c| c.starts_with("likeness.0.")).count()
}

/// Of all networks; none where one lacks it.
fn mean(of: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let values = of.collect::<Option<Vec<f64>>>()?;
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn over_seeds(runs: &[Run], of: impl Fn(&Run) -> Option<f64>) -> Cell {
    spread(&runs.iter().filter_map(of).collect::<Vec<_>>())
}
