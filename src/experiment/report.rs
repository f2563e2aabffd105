//! The report of an experiment, made of what is kept and of nothing else: the same rows give the same bytes.

use std::path::Path;

use serde_json::Value;

use super::plan::{Group, Plan, Unit, Work};
use super::rows::{Kept, Measure, Row};
use crate::error::{Error, Result};
use crate::eval::figures::{by_epoch, gate_figure, lambda_figures};
use crate::eval::score::RESAMPLES;
use crate::eval::stats;
use crate::report::colours::Palette;
use crate::report::plot::{Heat, Lines, Series, Whisker, Whiskers};
use crate::report::{Cell, Figure, Report, Section, Table, paper};
use crate::rng;
use crate::run::{Row as Epoch, Run, RunFolder};

/// What is kept, seen through the plan: rows of units whose hash it still asks for.
pub struct Found<'a> {
    plan: &'a Plan,
    units: &'a [Unit],
    kept: &'a Kept,
    rows: Vec<&'a Row>,
}

/// Two settings on one question, on the seeds both have.
pub struct Pair {
    pub measure: Measure,
    /// b minus a, in points: the mean over seeds of the mean over a cohort's networks.
    pub a: String,
    pub b: String,
    pub difference: f64,
    pub seeds: Vec<f64>,
    /// 95 %, Student's t over seeds; none for one seed.
    pub over_seeds: Option<(f64, f64)>,
    /// 95 %, bootstrap over test images with these networks held fixed; none where answers by image are not kept.
    pub over_images: Option<(f64, f64)>,
}

/// Lines over epochs: of every run the mean of some columns of its metrics.csv.
struct Curves {
    columns: fn(&Run) -> Vec<String>,
    title: &'static str,
    y: &'static str,
    /// What the caption says beyond how the mean was taken.
    more: &'static str,
}

/// Writes report.md, report.html and the figures; says which units are missing.
pub fn write(plan: &Plan, units: &[Unit], kept: &Kept, out: &Path) -> Result<Vec<String>> {
    let found = Found::new(plan, units, kept);
    let missing: Vec<String> = units.iter().filter(|u| !kept.has(u)).map(|u| u.name.clone()).collect();
    let mut report = Report {
        title: plan.title.clone(),
        about: "Made by `make evidence` from results.csv and units/. Accuracies in percent.".into(),
        sections: vec![],
    };
    report.push(found.scale(&missing)?);
    if !found.rows.is_empty() {
        report.push(found.compared(&plan.groups[0], "")?);
        report.push(notes(out)?);
        report.push(found.beside_the_paper()?);
        for (number, group) in plan.groups.iter().enumerate().skip(1) {
            let place = format!("-{number}");
            report.push(if group.seeds.len() > 1 { found.compared(group, &place)? } else { found.ablations(group, &place)? });
        }
        report.push(found.matching()?);
        report.push(found.cohorts()?);
        report.push(found.pictures()?);
        report.push(found.cost()?);
        report.push(found.provenance()?);
    }
    report.write(out)?;
    Ok(missing)
}

/// What a person wrote about the numbers, beside them.
fn notes(out: &Path) -> Result<Section> {
    let mut section = Section::new("What came out, and why");
    let path = out.join("notes.md");
    if path.exists() {
        let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
        for paragraph in text.split("\n\n").map(str::trim).filter(|p| !p.is_empty()) {
            section.text(paragraph.replace('\n', " "));
        }
    }
    Ok(section)
}

impl<'a> Found<'a> {
    pub fn new(plan: &'a Plan, units: &'a [Unit], kept: &'a Kept) -> Found<'a> {
        let wanted = |r: &&Row| units.iter().any(|u| u.name == r.unit && u.hash == r.hash);
        Found { plan, units, kept, rows: kept.rows.iter().filter(wanted).collect() }
    }

    /// The finished runs of a setting: seed and unit.
    fn runs(&self, setting: &str) -> Vec<(u64, &'a Unit)> {
        let of = |u: &'a Unit| match &u.work {
            Work::Run { setting: s, seed, .. } if s == setting && self.rows.iter().any(|r| r.unit == u.name) => Some((*seed, u)),
            _ => None,
        };
        self.units.iter().filter_map(of).collect()
    }

    /// Every question that was put to single networks, in the order of the plan.
    pub fn measures(&self) -> Vec<Measure> {
        let mut measures = vec![];
        for row in self.rows.iter().filter(|r| r.peer.is_some() && r.metric == "top1") {
            let measure = row.measure();
            if !measures.contains(&measure) {
                measures.push(measure);
            }
        }
        measures
    }

    fn of(&self, unit: &str, measure: &Measure) -> Vec<&Row> {
        let asked = |r: &&&Row| r.unit == unit && r.peer.is_some() && r.metric == "top1" && r.measure() == *measure;
        self.rows.iter().filter(asked).copied().collect()
    }

    /// The mean over a cohort's networks, by seed.
    fn values(&self, setting: &str, measure: &Measure) -> Vec<(u64, f64)> {
        let mean = |(seed, unit): (u64, &Unit)| {
            let own = self.of(&unit.name, measure);
            (!own.is_empty()).then(|| (seed, own.iter().map(|r| r.value).sum::<f64>() / own.len() as f64))
        };
        self.runs(setting).into_iter().filter_map(mean).collect()
    }

    fn cell(&self, setting: &str, measure: &Measure) -> Cell {
        let values: Vec<f64> = self.values(setting, measure).iter().map(|v| v.1).collect();
        if values.is_empty() {
            return Cell::Empty;
        }
        let (mean, std) = stats::mean_std(&values);
        Cell::Spread { mean, std, n: values.len() }
    }

    pub fn pair(&self, measure: &Measure, a: &str, b: &str) -> Result<Option<Pair>> {
        let (of_a, of_b) = (self.values(a, measure), self.values(b, measure));
        let both: Vec<(u64, f64)> =
            of_b.iter().filter_map(|(s, vb)| of_a.iter().find(|(t, _)| t == s).map(|(_, va)| (*s, vb - va))).collect();
        if both.is_empty() {
            return Ok(None);
        }
        let seeds: Vec<f64> = both.iter().map(|d| d.1).collect();
        let (difference, half) = stats::mean_interval(&seeds);
        let used: Vec<u64> = both.iter().map(|d| d.0).collect();
        let over_images = match (self.by_image(a, &used, measure)?, self.by_image(b, &used, measure)?) {
            (Some(a), Some(b)) if a.len() == b.len() => {
                let differences: Vec<f64> = a.iter().zip(&b).map(|(a, b)| 100.0 * (b - a)).collect();
                Some(stats::bootstrap_mean(&differences, RESAMPLES, &mut rng::stream(1, "paired images", &[])))
            }
            _ => None,
        };
        let over_seeds = half.map(|h| (difference - h, difference + h));
        Ok(Some(Pair { measure: measure.clone(), a: a.into(), b: b.into(), difference, seeds, over_seeds, over_images }))
    }

    /// How often each test image was answered right, over seeds and networks.
    fn by_image(&self, setting: &str, seeds: &[u64], measure: &Measure) -> Result<Option<Vec<f64>>> {
        let mut sums: Vec<f64> = vec![];
        let mut networks = 0;
        for (_, unit) in self.runs(setting).into_iter().filter(|(seed, _)| seeds.contains(seed)) {
            for row in self.of(&unit.name, measure) {
                let Some(right) = self.kept.right(&unit.name, measure, row.peer.unwrap_or(0))? else { return Ok(None) };
                sums.resize(right.len(), 0.0);
                sums.iter_mut().zip(&right).for_each(|(sum, right)| *sum += f64::from(u8::from(*right)));
                networks += 1;
            }
        }
        // Rounded, so that equal shares are equal numbers.
        Ok((networks > 0).then(|| sums.iter().map(|s| (s / f64::from(networks) * 1e9).round() / 1e9).collect()))
    }

    /// Every setting of a group against those before it that the plan names.
    fn pairs(&self, group: &Group, measures: &[Measure]) -> Result<Vec<Pair>> {
        let names: Vec<&str> = self.plan.settings().map(|(_, s)| s.name.as_str()).collect();
        let place = |name: &str| names.iter().position(|n| *n == name);
        let mut pairs = vec![];
        for setting in &group.settings {
            for against in group.against.iter().filter(|a| place(a) < place(&setting.name)) {
                for measure in measures {
                    pairs.extend(self.pair(measure, against, &setting.name)?);
                }
            }
        }
        Ok(pairs)
    }

    fn scale(&self, missing: &[String]) -> Result<Section> {
        let mut section = Section::new("What was done");
        section.text(self.plan.about.trim().replace('\n', " "));
        let made = self.units.iter().filter(|u| self.rows.iter().any(|r| r.unit == u.name)).count();
        let none = if missing.is_empty() { "none is missing".to_string() } else { format!("missing: {}", missing.join(", ")) };
        section.text(format!("{made} of {} units are finished; {none}.", self.units.len()));
        Ok(section)
    }

    /// The table of the first group.
    pub fn main_table(&self) -> Result<Table> {
        self.across(&self.plan.groups[0])
    }

    /// Questions down, the settings of a group across, and the last one's gain over the first.
    fn across(&self, group: &Group) -> Result<Table> {
        let names: Vec<&str> = group.settings.iter().map(|s| s.name.as_str()).collect();
        let (first, last) = (names[0], *names.last().expect("a group has settings"));
        let gain = format!("{last} - {first}");
        let mut table = Table::new("", &[&["top-1 (%)", "test images"], &names[..], &[&gain]].concat());
        for measure in self.measures() {
            let images = self.rows.iter().find(|r| r.measure() == measure && r.peer.is_some()).map_or(0, |r| r.n_test);
            let mut row = vec![Cell::text(measure.shown()), Cell::Count(images as i64)];
            row.extend(names.iter().map(|name| self.cell(name, &measure)));
            let pair = if first == last { None } else { self.pair(&measure, first, last)? };
            row.push(pair.map_or(Cell::Empty, |p| Cell::text(shown(p.difference, p.over_seeds))));
            table.push(row);
        }
        Ok(table)
    }

    /// A group of several seeds. `place` ends the names of its figures.
    fn compared(&self, group: &Group, place: &str) -> Result<Section> {
        let measures = self.measures();
        let mut section = Section::new(&group.title);
        let pairs = self.pairs(group, &measures)?;
        if pairs.is_empty() {
            return Ok(section);
        }
        section.table(self.across(group)?);
        section.text("Mean ± standard deviation over seeds; the value of a seed is the mean over the cohort's networks. The last column is the paired difference with its 95 % interval (Student's t over seeds).");
        section.figures(vec![self.gains(&pairs, group, &measures, place)]);
        section.figures(self.curves(group, place)?);
        section.table(pair_table("Paired differences", &pairs));
        section.text("Two intervals for two questions. Over seeds: another draw of training images, weights and order; with three seeds Student's t has two degrees of freedom and the interval is wide. Over images: other test images with these very networks (bootstrap of the per-image difference, averaged over seeds and networks). An effect is shown for this setting when both leave out zero; the many comparisons of this table are not corrected for.");
        self.unfinished(group, &mut section);
        Ok(section)
    }

    /// Gains over the first setting.
    fn gains(&self, pairs: &[Pair], group: &Group, measures: &[Measure], place: &str) -> Figure {
        let first = &group.settings[0].name;
        let series: Vec<String> = group.settings[1..].iter().map(|s| s.name.clone()).collect();
        let rows: Vec<(String, Vec<Option<Whisker>>)> = measures
            .iter()
            .map(|m| {
                let whisker = |b: &String| {
                    let pair = pairs.iter().find(|p| p.measure == *m && p.a == *first && p.b == *b)?;
                    Some(Whisker { value: pair.difference, thick: pair.over_images, thin: pair.over_seeds })
                };
                (m.shown(), series.iter().map(whisker).collect())
            })
            .collect();
        let title = format!("Gain over {first}");
        // The colours of the curves, which show the first setting too.
        let palette = Palette::of(group.shown());
        let svg = Whiskers { title: &title, x: "points of top-1 accuracy", series: &series, palette: &palette, rows: &rows }.draw();
        Figure::new(
            format!("gains{place}"),
            "Paired by seed. Thick: 95 % interval over test images; thin: 95 % interval over seeds (Student's t).",
            svg,
        )
    }

    fn beside_the_paper(&self) -> Result<Section> {
        let mut section = Section::new("Beside the paper");
        let printed = paper::printed()?;
        let group = &self.plan.groups[0];
        let first = &group.settings[0].name;
        let mut table = Table::new(
            "Gain over baseline, in points",
            &["measured", "method", "paper: mean", "paper: least", "paper: most", "paper's networks", "here"],
        );
        for measure in self.measures() {
            let Some(name) = paper_table(&measure) else { continue };
            for setting in &group.settings[1..] {
                let own: Vec<&paper::Printed> = printed.iter().filter(|p| p.table == name && p.dataset == measure.dataset).collect();
                let base = |network: &str| own.iter().find(|p| p.network == network && p.method == *first).map(|p| p.value);
                let gains: Vec<f64> =
                    own.iter().filter(|p| p.method == setting.name).filter_map(|p| Some(p.value - base(&p.network)?)).collect();
                let Some(here) = self.pair(&measure, first, &setting.name)? else { continue };
                if gains.is_empty() {
                    continue;
                }
                let (least, most) =
                    (gains.iter().copied().fold(f64::INFINITY, f64::min), gains.iter().copied().fold(f64::NEG_INFINITY, f64::max));
                table.push(vec![
                    Cell::text(measure.shown()),
                    Cell::text(&setting.name),
                    Cell::Score(stats::mean_std(&gains).0, 2),
                    Cell::Score(least, 2),
                    Cell::Score(most, 2),
                    Cell::Count(gains.len() as i64),
                    Cell::text(shown(here.difference, here.over_seeds)),
                ]);
            }
        }
        section.table(table);
        if !section.parts.is_empty() {
            section.text("The paper's networks are larger and train on all of CIFAR-100 for 300 epochs: its gains are what to look for, not what a run of this size must reach.");
        }
        Ok(section)
    }

    /// A group of one seed. `place` ends the names of its figures.
    fn ablations(&self, group: &Group, place: &str) -> Result<Section> {
        let mut section = Section::new(&group.title);
        let measures = self.measures();
        let titles: Vec<String> = measures.iter().map(Measure::shown).collect();
        let columns: Vec<&str> = std::iter::once("setting").chain(titles.iter().map(String::as_str)).collect();
        let mut table = Table::new("", &columns);
        for name in group.shown() {
            let value = |m: &Measure| {
                let own: Vec<f64> = self.values(name, m).iter().filter(|(s, _)| group.seeds.contains(s)).map(|v| v.1).collect();
                if own.is_empty() { Cell::Empty } else { Cell::Score(stats::mean_std(&own).0, 2) }
            };
            let row: Vec<Cell> = measures.iter().map(value).collect();
            if row.iter().any(|c| *c != Cell::Empty) {
                table.push(std::iter::once(Cell::text(name)).chain(row).collect());
            }
        }
        let pairs = self.pairs(group, &measures)?;
        if pairs.is_empty() {
            return Ok(section);
        }
        section.table(table);
        section.figures(vec![differences(&pairs, group, &measures, place)]);
        section.figures(self.curves(group, place)?);
        for against in &group.against {
            let mut table = Table::new(format!("Difference to {against}, with its 95 % interval over test images"), &columns);
            for setting in &group.settings {
                let of = |m: &Measure| pairs.iter().find(|p| p.measure == *m && p.a == *against && p.b == setting.name);
                let cell = |m: &Measure| of(m).map_or(Cell::Empty, |p| Cell::text(shown(p.difference, p.over_images)));
                let row: Vec<Cell> = measures.iter().map(cell).collect();
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

    /// A finished unit as the figures of single runs want it.
    fn run(&self, unit: &Unit) -> Result<Run> {
        let folder = self.kept.unit_folder(&unit.name);
        let path = folder.join("metrics.csv");
        let fault = |e: csv::Error| Error::file(&path, e.to_string());
        let mut reader = csv::Reader::from_path(&path).map_err(fault)?;
        let names = reader.headers().map_err(fault)?.clone();
        let mut metrics = vec![];
        for row in reader.records() {
            let row = row.map_err(fault)?;
            let number = |(name, cell): (&str, &str)| (name.to_string(), cell.parse::<f64>().map_or(Value::Null, Value::from));
            metrics.push(names.iter().zip(row.iter()).map(number).collect::<Epoch>());
        }
        let folder = RunFolder::at(folder);
        Ok(Run { name: unit.name.clone(), recipe: folder.read_recipe()?, environment: Value::Null, metrics, folder })
    }

    /// The weights that the meta-network gave to pairs of layers, and the gates to layers.
    fn matching(&self) -> Result<Section> {
        let mut section = Section::new("Layer matching");
        for setting in &self.plan.groups[0].settings {
            if let Some((_, unit)) = self.runs(&setting.name).first() {
                let run = self.run(unit)?;
                section.figures(lambda_figures(&run).into_iter().chain(gate_figure(&run)).collect());
            }
        }
        Ok(section)
    }

    /// A group's settings by epoch: test accuracy, and what the networks' embeddings know of each other where that was logged.
    fn curves(&self, group: &Group, place: &str) -> Result<Vec<Figure>> {
        let accuracy = Curves {
            columns: |run| (0..run.archs().len()).map(|m| format!("test.peer{m}.top1")).collect(),
            title: "Test accuracy while training",
            y: "top-1 (%)",
            more: "",
        };
        let information = Curves {
            columns: |run| run.columns().into_iter().filter(|c| c.starts_with("mutual_information.")).map(String::from).collect(),
            title: "What embeddings of different networks know of each other",
            y: "log K - L_ICL",
            more: " Lower bound on the mutual information (Eq. 6), mean over the epoch. Just below 0, the embeddings of all images are one point.",
        };
        let drawn =
            [self.draw(group, &format!("training{place}"), &accuracy)?, self.draw(group, &format!("information{place}"), &information)?];
        Ok(drawn.into_iter().flatten().collect())
    }

    fn draw(&self, group: &Group, name: &str, curves: &Curves) -> Result<Option<Figure>> {
        let mut series = vec![];
        for name in group.shown() {
            let of_group = self.runs(name).into_iter().filter(|(seed, _)| group.seeds.contains(seed));
            let runs = of_group.map(|(_, unit)| self.run(unit)).collect::<Result<Vec<_>>>()?;
            let curve = |run: &Run| -> Option<Vec<f64>> {
                let columns: Vec<Vec<f64>> = (curves.columns)(run).iter().map(|c| run.column(c)).collect();
                let mean = |e: usize| columns.iter().map(|c| c[e]).sum::<f64>() / columns.len() as f64;
                (!columns.is_empty()).then(|| (0..run.metrics.len()).map(mean).collect())
            };
            let lines: Vec<Vec<f64>> = runs.iter().filter_map(curve).collect();
            let Some(epochs) = lines.iter().map(Vec::len).min() else { continue };
            let at = |e: usize| lines.iter().map(move |c| c[e]);
            let mean: Vec<f64> = (0..epochs).map(|e| at(e).sum::<f64>() / lines.len() as f64).collect();
            let band = (0..epochs).map(|e| (at(e).fold(f64::INFINITY, f64::min), at(e).fold(f64::NEG_INFINITY, f64::max))).collect();
            series.push(Series { band, ..by_epoch(name.to_string(), &mean) });
        }
        if series.is_empty() {
            return Ok(None);
        }
        let svg = Lines { title: curves.title, x: "epoch", y: curves.y, series: &series, dots: false }.draw();
        let over = match group.seeds.len() {
            1 => "Mean over the networks of a run.",
            _ => "Mean over networks and seeds; the band is from the lowest to the highest seed.",
        };
        Ok(Some(Figure::new(name, format!("{over}{}", curves.more), svg)))
    }

    /// What the networks of a cohort have become to each other.
    fn cohorts(&self) -> Result<Section> {
        let mut section = Section::new("Cohorts");
        let mut table =
            Table::new("", &["setting", "same answer (%)", "linear CKA of features", "ensemble top-1", "ensemble over best network"]);
        let (mut names, mut values) = (vec![], vec![]);
        for (_, setting) in self.plan.settings() {
            let units: Vec<&str> = self.runs(&setting.name).iter().map(|(_, u)| u.name.as_str()).collect();
            let of = |asked: &dyn Fn(&Row) -> bool| {
                let own: Vec<f64> = self
                    .rows
                    .iter()
                    .filter(|r| units.contains(&r.unit.as_str()) && r.peer.is_none() && asked(r))
                    .map(|r| r.value)
                    .collect();
                (!own.is_empty()).then(|| (stats::mean_std(&own), own.len()))
            };
            let agreement = of(&|r| r.metric == "agreement");
            let cka = of(&|r| r.metric == "linear_cka");
            let together = of(&|r| r.command == "accuracy");
            let gain = of(&|r| r.metric == "ensemble_gain");
            let spread =
                |found: Option<((f64, Option<f64>), usize)>| found.map_or(Cell::Empty, |((mean, std), n)| Cell::Spread { mean, std, n });
            let (Some(agree), Some(similar)) = (agreement, cka) else { continue };
            let text =
                similar.0.1.map_or(format!("{:.3}", similar.0.0), |std| format!("{:.3} ± {std:.3} (n = {})", similar.0.0, similar.1));
            table.push(vec![Cell::text(&setting.name), spread(agreement), Cell::text(text), spread(together), spread(gain)]);
            names.push(setting.name.clone());
            values.push(vec![agree.0.0, 100.0 * similar.0.0]);
        }
        if names.is_empty() {
            return Ok(section);
        }
        section.table(table);
        let columns = ["same answer".to_string(), "linear CKA".to_string()];
        let heat = Heat {
            title: "Alike within a cohort (%)",
            x: "",
            y: "",
            columns: &columns,
            rows: &names,
            values: &values,
            limits: Some((0.0, 100.0)),
            decimals: 1,
        };
        section.figures(vec![Figure::new(
            "cohorts",
            "Two networks of one run on the test images, mean over pairs and seeds.",
            heat.draw(),
        )]);
        Ok(section)
    }

    /// What was drawn over several runs.
    fn pictures(&self) -> Result<Section> {
        let mut section = Section::new("Maps");
        for unit in self.units.iter().filter(|u| matches!(u.work, Work::Over(_)) && self.kept.has(u)) {
            for (file, caption) in self.kept.made(&unit.name)?.figures {
                let path = self.kept.unit_folder(&unit.name).join(&file);
                let svg = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
                section.figures(vec![Figure::new(unit.name.clone(), caption, svg)]);
            }
        }
        Ok(section)
    }

    fn cost(&self) -> Result<Section> {
        let mut section = Section::new("Cost");
        let mut table = Table::new(
            "",
            &[
                "setting",
                "units",
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
            let made = runs.iter().map(|(_, u)| self.kept.made(&u.name)).collect::<Result<Vec<_>>>()?;
            let mean = |of: &dyn Fn(&super::rows::Made) -> f64| made.iter().map(of).sum::<f64>() / made.len() as f64;
            let Some(first) = made.first() else { continue };
            all += made.iter().map(|m| m.train_cpu_seconds + m.evaluate_cpu_seconds).sum::<f64>();
            let column = |name: &str| -> Result<Cell> {
                let mut values = vec![];
                for (_, unit) in &runs {
                    values.extend(self.run(unit)?.column(name).into_iter().filter(|v| v.is_finite()));
                }
                Ok(if values.is_empty() { Cell::Empty } else { Cell::Score(stats::mean_std(&values).0, 3) })
            };
            table.push(vec![
                Cell::text(&setting.name),
                Cell::Count(made.len() as i64),
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
        section.text(format!("Means over units. By the clock, a unit shares the machine with those beside it; processor minutes do not depend on that, but lack those of a sitting that was killed. All units together: {:.1} processor hours.", all / 3600.0));
        Ok(section)
    }

    fn provenance(&self) -> Result<Section> {
        let mut section = Section::new("Where the numbers come from");
        let mut table = Table::new(
            "",
            &[
                "unit",
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
        for unit in self.units.iter().filter(|u| self.kept.has(u)) {
            let made = self.kept.made(&unit.name)?;
            let of = |key: &str| made.machine.get(key).map_or(String::new(), |v| v.as_str().map_or(v.to_string(), String::from));
            let recipe = self.rows.iter().find(|r| r.unit == unit.name).map_or("", |r| r.recipe_hash.as_str());
            let alone = matches!(unit.work, Work::Run { .. });
            table.push(vec![
                Cell::text(&unit.name),
                Cell::text(&unit.hash),
                Cell::text(if alone { recipe } else { "" }),
                if alone { Cell::Count(made.train_images as i64) } else { Cell::Empty },
                Cell::text(made.train_split_hash.chars().take(16).collect::<String>()),
                Cell::text(of("commit")),
                Cell::text(of("libtorch")),
                Cell::text(of("cpu")),
                Cell::text(of("cores")),
                Cell::text(of("threads")),
                Cell::Count(made.jobs as i64),
                Cell::Score(made.train_seconds, 0),
                Cell::Score(made.evaluate_seconds, 0),
            ]);
        }
        section.table(table);
        section.text("Of every unit, units/NAME holds the resolved recipe, the metrics of each epoch, the answers to every test image (predictions.safetensors) and unit.json; results.csv holds the rows. `make evidence` makes this report from them.");
        section.code(self.plan.evaluate.iter().map(|l| format!("mcl-eval {l}")).collect::<Vec<_>>().join("\n"));
        Ok(section)
    }
}

/// Where the paper prints this question.
fn paper_table(measure: &Measure) -> Option<&'static str> {
    match measure.command.as_str() {
        "accuracy" => Some("cifar100-same"),
        "linear-probe" if measure.protocol.starts_with("paper") => Some("transfer-linear"),
        _ => None,
    }
}

fn shown(difference: f64, interval: Option<(f64, f64)>) -> String {
    // Nothing lost and nothing gained is +0.00.
    let signed = |value: f64| format!("{value:+.2}").replace("-0.00", "+0.00");
    interval.map_or(signed(difference), |(low, high)| format!("{} [{}, {}]", signed(difference), signed(low), signed(high)))
}

/// The settings of a group of one seed beside the first one they are compared with, in what the paper measures too.
fn differences(pairs: &[Pair], group: &Group, measures: &[Measure], place: &str) -> Figure {
    let against = &group.against[0];
    let printed: Vec<&Measure> = measures.iter().filter(|m| paper_table(m).is_some()).collect();
    let series: Vec<String> = printed.iter().map(|m| m.shown()).collect();
    let mut rows = vec![];
    for setting in &group.settings {
        let whisker = |m: &&Measure| {
            let pair = pairs.iter().find(|p| p.measure == **m && p.a == *against && p.b == setting.name)?;
            Some(Whisker { value: pair.difference, thick: pair.over_images, thin: None })
        };
        let row: Vec<Option<Whisker>> = printed.iter().map(whisker).collect();
        if row.iter().any(Option::is_some) {
            rows.push((setting.name.clone(), row));
        }
    }
    let title = format!("Difference to {against}");
    let palette = Palette::of(&series);
    let svg = Whiskers { title: &title, x: "points of top-1 accuracy", series: &series, palette: &palette, rows: &rows }.draw();
    Figure::new(format!("differences{place}"), "One seed. Bars: 95 % interval over test images.", svg)
}

fn pair_table(name: &str, pairs: &[Pair]) -> Table {
    let mut table = Table::new(name, &["measured", "compared", "difference", "95 % over seeds", "95 % over images", "seeds", "by seed"]);
    let interval = |i: Option<(f64, f64)>| i.map_or(Cell::Empty, |(low, high)| Cell::text(format!("{low:+.2} to {high:+.2}")));
    for p in pairs {
        let by_seed: Vec<String> = p.seeds.iter().map(|d| format!("{d:+.2}")).collect();
        table.push(vec![
            Cell::text(p.measure.shown()),
            Cell::text(format!("{} - {}", p.b, p.a)),
            Cell::Score(p.difference, 2),
            interval(p.over_seeds),
            interval(p.over_images),
            Cell::Count(p.seeds.len() as i64),
            Cell::text(by_seed.join(", ")),
        ]);
    }
    table.without_empty_columns()
}
