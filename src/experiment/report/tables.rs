//! The tables of the report, with the sentences around them.

use std::collections::BTreeSet;

use super::figures::cohort_figure;
use super::{Pair, Results, paper_table};
use crate::error::Result;
use crate::eval::stats;
use crate::experiment::plan::{Group, Item};
use crate::experiment::rows::{ItemFacts, Question, Row};
use crate::report::{Cell, Figure, Section, Table, paper};
use crate::run::network_name;

impl Results<'_> {
    /// The table of the first group.
    pub fn main_table(&self) -> Result<Table> {
        self.across(&self.plan.groups[0])
    }

    /// Questions down, the settings of a group across. Of a group that is compared within itself, the last one's gain over the first, too.
    fn across(&self, group: &Group) -> Result<Table> {
        let names: Vec<&str> = group.shown().collect();
        let (first, last) = (names[0], *names.last().expect("a group has settings"));
        // The difference stands where a phone shows it too.
        let gain = (first != last && group.outside().next().is_none()).then(|| format!("{last} - {first}"));
        let columns: Vec<&str> =
            ["top-1 (%)"].into_iter().chain(gain.as_deref()).chain(names.iter().copied()).chain(["test images"]).collect();
        let mut table = Table::new("", &columns);
        for question in self.questions() {
            let images = self.rows.iter().find(|r| r.question() == question && r.record.peer.is_some()).map_or(0, |r| r.record.n_test);
            let mut row = vec![Cell::text(question.shown())];
            if gain.is_some() {
                row.push(self.pair(&question, first, last)?.map_or(Cell::Empty, |p| Cell::difference(p.difference, p.over_seeds)));
            }
            row.extend(names.iter().map(|name| self.cell(name, &question)));
            row.push(Cell::Count(images as i64));
            table.push(row);
        }
        Ok(table)
    }

    /// A group of several seeds. `place` ends the names of its figures.
    pub(super) fn compared(&self, group: &Group, place: &str) -> Result<Section> {
        let questions = self.questions();
        let mut section = Section::new(&group.title);
        let pairs = self.pairs(group, &questions)?;
        if pairs.is_empty() {
            return Ok(section);
        }
        about(group, &mut section);
        section.table(self.across(group)?);
        section.text("Mean ± standard deviation over seeds; the value of a seed is the mean over the cohort's networks.");
        let all: Vec<&Question> = questions.iter().collect();
        let mut figures: Vec<Figure> = group
            .outside()
            .filter(|to| pairs.iter().any(|p| p.a == **to))
            .map(|to| self.gains(&pairs, group, to, &all, format!("gains{place}-{to}")))
            .collect();
        if figures.is_empty() {
            section.text("The first number is the difference in points on the seeds that both have, with its 95 % interval (Student's t over seeds).");
            figures.push(self.gains(&pairs, group, &group.settings[0].name, &all, format!("gains{place}")));
        }
        section.figures([figures, self.curves(group, place)?].concat());
        section.table(pair_table("Paired differences", &pairs));
        section.text("Two intervals for two questions. Over seeds: another draw of training images, weights and order; with three seeds Student's t has two degrees of freedom and the interval is wide. Over images: other test images with these very networks (bootstrap of the per-image difference, averaged over seeds and networks). An effect is shown for this setting when both leave out zero; the many comparisons of this table are not corrected for.");
        self.unfinished(group, &mut section);
        Ok(section)
    }

    /// A group of one seed. `place` ends the names of its figures.
    pub(super) fn ablations(&self, group: &Group, place: &str) -> Result<Section> {
        let mut section = Section::new(&group.title);
        let questions = self.questions();
        let titles: Vec<String> = questions.iter().map(|q| format!("{} (%)", q.shown())).collect();
        let in_points: Vec<String> = questions.iter().map(|q| format!("{} (points)", q.shown())).collect();
        let columns: Vec<&str> = std::iter::once("setting").chain(titles.iter().map(String::as_str)).collect();
        let mut table = Table::new("", &columns);
        for name in group.shown() {
            let value = |m: &Question| {
                let own: Vec<f64> = self.values(name, m).iter().filter(|(s, _)| group.seeds.contains(s)).map(|v| v.1).collect();
                if own.is_empty() { Cell::Empty } else { Cell::Score(stats::mean_std(&own).0, 2) }
            };
            let row: Vec<Cell> = questions.iter().map(value).collect();
            if row.iter().any(|c| *c != Cell::Empty) {
                table.push(std::iter::once(Cell::text(name)).chain(row).collect());
            }
        }
        let pairs = self.pairs(group, &questions)?;
        if pairs.is_empty() {
            return Ok(section);
        }
        about(group, &mut section);
        section.table(table);
        // Of what the paper asks too: nine rows of ten settings would be read by nobody.
        let printed: Vec<&Question> = questions.iter().filter(|m| paper_table(m).is_some()).collect();
        let asked = if printed.is_empty() { questions.iter().collect() } else { printed };
        let gains = self.gains(&pairs, group, &group.against[0], &asked, format!("differences{place}"));
        section.figures([vec![gains], self.curves(group, place)?].concat());
        for against in &group.against {
            let columns: Vec<&str> = std::iter::once("setting").chain(in_points.iter().map(String::as_str)).collect();
            let mut table = Table::new(format!("Difference to {against}, with its 95 % interval over test images"), &columns);
            for setting in &group.settings {
                let of = |m: &Question| pairs.iter().find(|p| p.question == *m && p.a == *against && p.b == setting.name);
                let cell = |m: &Question| of(m).map_or(Cell::Empty, |p| Cell::difference(p.difference, p.over_images));
                let row: Vec<Cell> = questions.iter().map(cell).collect();
                if row.iter().any(|c| *c != Cell::Empty) {
                    table.push(std::iter::once(Cell::text(&setting.name)).chain(row).collect());
                }
            }
            section.table(table);
        }
        let seeds: Vec<String> = group.seeds.iter().map(u64::to_string).collect();
        section.text(format!(
            "Seed {} only: the interval over images says nothing about other seeds, whose spread is in the main table.",
            seeds.join(", ")
        ));
        self.unfinished(group, &mut section);
        Ok(section)
    }

    fn unfinished(&self, group: &Group, section: &mut Section) {
        let undone: Vec<&str> = group.settings.iter().map(|s| s.name.as_str()).filter(|s| self.runs(s).is_empty()).collect();
        if !undone.is_empty() {
            section.text(format!("Not finished: {}.", undone.join(", ")));
        }
    }

    pub(super) fn beside_the_paper(&self) -> Result<Section> {
        let mut section = Section::new("Beside the paper");
        let printed = paper::printed()?;
        let group = &self.plan.groups[0];
        let first = &group.settings[0].name;
        let mut table = Table::new(
            "Gain over baseline, in points",
            &["measured", "method", "here", "paper: mean", "paper: least", "paper: most", "paper's networks"],
        );
        for question in self.questions() {
            let Some(name) = paper_table(&question) else { continue };
            for setting in &group.settings[1..] {
                let own: Vec<&paper::Printed> = printed.iter().filter(|p| p.table == name && p.dataset == question.dataset).collect();
                let base = |network: &str| own.iter().find(|p| p.network == network && p.method == *first).map(|p| p.value);
                let gains: Vec<f64> =
                    own.iter().filter(|p| p.method == setting.name).filter_map(|p| Some(p.value - base(&p.network)?)).collect();
                let Some(here) = self.pair(&question, first, &setting.name)? else { continue };
                if gains.is_empty() {
                    continue;
                }
                let (least, most) =
                    (gains.iter().copied().fold(f64::INFINITY, f64::min), gains.iter().copied().fold(f64::NEG_INFINITY, f64::max));
                table.push(vec![
                    Cell::text(question.shown()),
                    Cell::text(&setting.name),
                    Cell::difference(here.difference, here.over_seeds),
                    Cell::difference(stats::mean_std(&gains).0, None),
                    Cell::difference(least, None),
                    Cell::difference(most, None),
                    Cell::Count(gains.len() as i64),
                ]);
            }
        }
        section.table(table);
        if !section.parts.is_empty() {
            section.text("The paper's networks are larger and train on all of CIFAR-100 for 300 epochs: its gains are what to look for, not what a run of this size must reach.");
        }
        Ok(section)
    }

    /// What the networks of a cohort have become to each other.
    pub(super) fn cohorts(&self) -> Result<Section> {
        let mut section = Section::new("Cohorts");
        let mut table =
            Table::new("", &["setting", "same answer (%)", "linear CKA (%)", "ensemble top-1 (%)", "ensemble over best network (points)"]);
        let (mut names, mut values) = (vec![], vec![]);
        for (_, setting) in self.plan.settings() {
            let runs: Vec<&str> = self.runs(&setting.name).iter().map(|(_, i)| i.name.as_str()).collect();
            let of = |asked: &dyn Fn(&Row) -> bool| {
                let own: Vec<f64> = self
                    .rows
                    .iter()
                    .filter(|r| runs.contains(&r.item.as_str()) && r.record.peer.is_none() && asked(r))
                    .map(|r| r.record.value)
                    .collect();
                (!own.is_empty()).then(|| (stats::mean_std(&own), own.len()))
            };
            let agreement = of(&|r| r.record.metric == "agreement");
            let percent = |((mean, std), n): ((f64, Option<f64>), usize)| ((100.0 * mean, std.map(|s| 100.0 * s)), n);
            let cka = of(&|r| r.record.metric == "linear_cka").map(percent);
            let together = of(&|r| r.record.command == "accuracy");
            let gain = of(&|r| r.record.metric == "ensemble_gain");
            let spread =
                |found: Option<((f64, Option<f64>), usize)>| found.map_or(Cell::Empty, |((mean, std), n)| Cell::Spread { mean, std, n });
            let (Some(agree), Some(similar)) = (agreement, cka) else { continue };
            table.push(vec![Cell::text(&setting.name), spread(agreement), spread(cka), spread(together), spread(gain)]);
            names.push(setting.name.clone());
            values.push(vec![agree.0.0, similar.0.0]);
        }
        if names.is_empty() {
            return Ok(section);
        }
        section.table(table);
        section.figures(vec![cohort_figure(&names, &values)]);
        Ok(section)
    }

    pub(super) fn cost(&self) -> Result<Section> {
        let mut section = Section::new("Cost");
        let mut table = Table::new(
            "",
            &[
                "setting",
                "runs",
                "steps",
                "seconds a step",
                "seconds a meta step",
                "minutes of training",
                "processor minutes of training",
                "minutes of measuring",
                "processor minutes of measuring",
                "peak MB",
            ],
        );
        let mut all = 0.0;
        for (_, setting) in self.plan.settings() {
            let runs = self.runs(&setting.name);
            let facts = runs.iter().map(|(_, i)| self.kept.facts(&i.name)).collect::<Result<Vec<_>>>()?;
            let mean = |of: &dyn Fn(&ItemFacts) -> f64| facts.iter().map(of).sum::<f64>() / facts.len() as f64;
            let Some(first) = facts.first() else { continue };
            all += facts.iter().map(|m| m.train_cpu_seconds + m.evaluate_cpu_seconds).sum::<f64>();
            let column = |name: &str| -> Result<Cell> {
                let mut values = vec![];
                for (_, item) in &runs {
                    values.extend(self.run(item)?.column(name).into_iter().filter(|v| v.is_finite()));
                }
                Ok(if values.is_empty() { Cell::Empty } else { Cell::Score(stats::mean_std(&values).0, 3) })
            };
            table.push(vec![
                Cell::text(&setting.name),
                Cell::Count(facts.len() as i64),
                Cell::Count(first.steps as i64),
                column("seconds.step")?,
                column("seconds.meta_step")?,
                Cell::Score(mean(&|m| m.train_seconds) / 60.0, 1),
                Cell::Score(mean(&|m| m.train_cpu_seconds) / 60.0, 1),
                Cell::Score(mean(&|m| m.evaluate_seconds) / 60.0, 1),
                Cell::Score(mean(&|m| m.evaluate_cpu_seconds) / 60.0, 1),
                Cell::Score(mean(&|m| m.peak_mb), 0),
            ]);
        }
        section.table(table);
        section.text(format!("Means over runs. By the clock, a run shares the machine with those beside it; processor minutes do not depend on that, but lack those of a sitting that was killed. All runs together: {:.1} processor hours.", all / 3600.0));
        Ok(section)
    }

    pub(super) fn provenance(&self) -> Result<Section> {
        let mut section = Section::new("Where the numbers come from");
        let mut table = Table::new(
            "",
            &[
                "name",
                "hash",
                "recipe",
                "training images",
                "training split",
                "commit",
                "libtorch",
                "processor",
                "cores",
                "threads",
                "side by side",
                "seconds of training",
                "seconds of measuring",
            ],
        );
        for item in self.items.iter().filter(|i| self.kept.has(i)) {
            let facts = self.kept.facts(&item.name)?;
            let of = |key: &str| facts.machine.get(key).map_or(String::new(), |v| v.as_str().map_or(v.to_string(), String::from));
            let recipe = self.rows.iter().find(|r| r.item == item.name).map_or("", |r| r.record.recipe_hash.as_str());
            let alone = item.run().is_some();
            table.push(vec![
                Cell::text(&item.name),
                Cell::text(&item.hash),
                Cell::text(if alone { recipe } else { "" }),
                if alone { Cell::Count(facts.train_images as i64) } else { Cell::Empty },
                Cell::text(facts.train_split_hash.chars().take(16).collect::<String>()),
                Cell::text(of("commit")),
                Cell::text(of("libtorch")),
                Cell::text(of("cpu")),
                Cell::text(of("cores")),
                Cell::text(of("threads")),
                Cell::Count(facts.side_by_side as i64),
                Cell::Score(facts.train_seconds, 0),
                Cell::Score(facts.evaluate_seconds, 0),
            ]);
        }
        section.table(table);
        for line in self.mixed_processors()? {
            section.text(line);
        }
        section.table(self.warnings());
        section.text("Of every run, units/NAME holds the resolved recipe, the metrics of each epoch, the answers to every test image (predictions.safetensors) and unit.json; the rows are in one CSV file. `make evidence` makes this report from them.");
        section.code(self.plan.evaluate.iter().map(|l| format!("mcl-eval {l}")).collect::<Vec<_>>().join("\n"));
        Ok(section)
    }

    /// A difference between settings of one seed should not be one between processors, so a mixture is told.
    fn mixed_processors(&self) -> Result<Vec<String>> {
        let seeds: BTreeSet<u64> = self.items.iter().filter_map(Item::run).map(|run| run.seed).collect();
        let mut lines = vec![];
        for seed in seeds {
            let kinds = self.kept.processors(self.items, seed)?;
            if kinds.len() > 1 {
                let parts: Vec<String> = kinds.iter().map(|(kind, settings)| format!("{} on {kind}", settings.join(", "))).collect();
                lines.push(format!("The runs of seed {seed} were made on {} kinds of processor: {}.", kinds.len(), parts.join("; ")));
            }
        }
        Ok(lines)
    }

    /// What makes numbers doubtful: every warning of a measurement, and of which networks it is.
    fn warnings(&self) -> Table {
        let mut found: Vec<(String, &str, Vec<String>)> = vec![];
        for row in &self.rows {
            let question = row.question().shown();
            let network = row.record.peer.map_or(row.item.clone(), |peer| format!("{}/{}", row.item, network_name(peer)));
            for warning in &row.record.warnings {
                match found.iter_mut().find(|(q, w, _)| *q == question && w == warning) {
                    Some((_, _, networks)) => networks.push(network.clone()),
                    None => found.push((question.clone(), warning, vec![network.clone()])),
                }
            }
        }
        let mut table = Table::new("Warnings of measurements", &["measured", "times", "warning", "of"]);
        for (question, warning, networks) in found {
            table.push(vec![
                Cell::text(question),
                Cell::Count(networks.len() as i64),
                Cell::text(warning),
                Cell::text(networks.join(", ")),
            ]);
        }
        table
    }
}

/// What the settings of a group are, where the plan says it.
fn about(group: &Group, section: &mut Section) {
    if !group.about.is_empty() {
        section.text(group.about.trim().replace('\n', " "));
    }
}

fn pair_table(name: &str, pairs: &[Pair]) -> Table {
    let mut table =
        Table::new(name, &["measured", "difference (points)", "compared", "95 % over seeds", "95 % over images", "seeds", "by seed"]);
    let interval = |i: Option<(f64, f64)>| i.map_or(Cell::Empty, |(low, high)| Cell::text(format!("{low:+.2} to {high:+.2}")));
    for p in pairs {
        let by_seed: Vec<String> = p.seeds.iter().map(|d| format!("{d:+.2}")).collect();
        table.push(vec![
            Cell::text(p.question.shown()),
            Cell::difference(p.difference, None),
            Cell::text(format!("{} - {}", p.b, p.a)),
            interval(p.over_seeds),
            interval(p.over_images),
            Cell::Count(p.seeds.len() as i64),
            Cell::text(by_seed.join(", ")),
        ]);
    }
    table.without_empty_columns()
}
