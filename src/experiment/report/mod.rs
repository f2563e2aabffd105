//! The report of an experiment, made of what is kept and of nothing else: the same rows give the same bytes.

mod fewer;
mod figures;
mod found;
mod hypotheses;
mod tables;
mod training;

use std::path::Path;

use serde_json::{Value, json};

pub use hypotheses::{Judged, Verdict};

use super::plan::{Group, Item, Plan};
use super::rows::{Question, Row, Rows};
use crate::error::{Error, Result};
use crate::eval::score::RESAMPLES;
use crate::eval::stats;
use crate::report::colours::Palette;
use crate::report::{Cell, Report, Section};
use crate::rng;
use crate::run::{Row as Epoch, Run, RunFolder};

/// What is kept, seen through the plan: rows of items whose hash it still asks for.
pub struct Results<'a> {
    plan: &'a Plan,
    items: &'a [Item],
    kept: &'a Rows,
    rows: Vec<&'a Row>,
    /// One colour a setting, in all figures.
    palette: Palette,
}

/// Two settings on one question, on the seeds both have.
pub struct Pair {
    question: Question,
    a: String,
    b: String,
    /// b minus a, in points: the mean over seeds of the mean over a cohort's networks.
    pub difference: f64,
    /// The difference of each seed.
    pub seeds: Vec<f64>,
    /// 95 %, Student's t over seeds; none for one seed.
    pub over_seeds: Option<(f64, f64)>,
    /// 95 %, bootstrap over test images with these networks held fixed; none where answers by image are not kept.
    pub over_images: Option<(f64, f64)>,
}

/// Writes report.md, report.html and the figures; says which items are missing.
pub(crate) fn write(plan: &Plan, items: &[Item], kept: &Rows, out: &Path) -> Result<Vec<String>> {
    let results = Results::new(plan, items, kept);
    let missing: Vec<String> = items.iter().filter(|i| !kept.has(i)).map(|i| i.name.clone()).collect();
    let mut report = Report {
        title: plan.title.clone(),
        about: "Made by `make evidence` from the rows and the folder units/ beside it. Accuracies are in percent, differences in points."
            .into(),
        found: results.found()?,
        sections: vec![],
    };
    report.push(results.scale(&missing)?);
    // What is expected is told before there is a number.
    report.push(results.hypotheses()?);
    if !results.rows.is_empty() {
        report.push(results.compared(&plan.groups[0], "")?);
        report.push(notes(out)?);
        report.push(results.beside_the_paper()?);
        report.push(results.conventions()?);
        for (number, group) in plan.groups.iter().enumerate().skip(1).filter(|(_, group)| !results.is_fewer(group)) {
            let place = format!("-{number}");
            report.push(if group.seeds.len() > 1 { results.compared(group, &place)? } else { results.ablations(group, &place)? });
        }
        report.push(results.fewer_images()?);
        report.push(results.stages()?);
        report.push(results.matching()?);
        report.push(results.cohorts()?);
        report.push(results.pictures()?);
        report.push(results.cost()?);
        report.push(results.provenance()?);
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

impl<'a> Results<'a> {
    /// Rows of items that the plan no longer asks for are left out.
    pub fn new(plan: &'a Plan, items: &'a [Item], kept: &'a Rows) -> Results<'a> {
        let wanted = |r: &&Row| items.iter().any(|i| i.name == r.item && i.hash == r.hash);
        let palette = Palette::of(plan.settings().map(|(_, s)| s.name.as_str()));
        Results { plan, items, kept, rows: kept.all.iter().filter(wanted).collect(), palette }
    }

    /// The finished runs of a setting, with their seeds.
    fn runs(&self, setting: &str) -> Vec<(u64, &'a Item)> {
        let of = |i: &'a Item| {
            let run = i.run().filter(|run| run.setting == setting && self.rows.iter().any(|r| r.item == i.name))?;
            Some((run.seed, i))
        };
        self.items.iter().filter_map(of).collect()
    }

    /// Every question that was put to single networks, in the order of the plan.
    pub fn questions(&self) -> Vec<Question> {
        let mut questions = vec![];
        for row in self.rows.iter().filter(|r| r.record.peer.is_some() && r.record.metric == "top1") {
            let question = row.question();
            if !questions.contains(&question) {
                questions.push(question);
            }
        }
        questions
    }

    fn of(&self, item: &str, question: &Question) -> Vec<&Row> {
        let asked = |r: &&&Row| r.item == item && r.record.peer.is_some() && r.record.metric == "top1" && r.question() == *question;
        self.rows.iter().filter(asked).copied().collect()
    }

    /// The mean over a cohort's networks, by seed.
    fn values(&self, setting: &str, question: &Question) -> Vec<(u64, f64)> {
        let mean = |(seed, item): (u64, &Item)| {
            let own = self.of(&item.name, question);
            (!own.is_empty()).then(|| (seed, own.iter().map(|r| r.record.value).sum::<f64>() / own.len() as f64))
        };
        self.runs(setting).into_iter().filter_map(mean).collect()
    }

    fn cell(&self, setting: &str, question: &Question) -> Cell {
        let values: Vec<f64> = self.values(setting, question).iter().map(|v| v.1).collect();
        if values.is_empty() {
            return Cell::Empty;
        }
        let (mean, std) = stats::mean_std(&values);
        Cell::Spread { mean, std, n: values.len() }
    }

    /// How much setting `b` leads setting `a` on a question; none where no seed has both.
    pub fn pair(&self, question: &Question, a: &str, b: &str) -> Result<Option<Pair>> {
        self.pair_on(question, a, b, &|_| true)
    }

    /// The same on some seeds.
    fn pair_on(&self, question: &Question, a: &str, b: &str, wanted: &dyn Fn(u64) -> bool) -> Result<Option<Pair>> {
        let (of_a, mut of_b) = (self.values(a, question), self.values(b, question));
        of_b.retain(|(seed, _)| wanted(*seed));
        let both: Vec<(u64, f64)> =
            of_b.iter().filter_map(|(s, vb)| of_a.iter().find(|(t, _)| t == s).map(|(_, va)| (*s, vb - va))).collect();
        if both.is_empty() {
            return Ok(None);
        }
        let seeds: Vec<f64> = both.iter().map(|d| d.1).collect();
        let (difference, half) = stats::mean_interval(&seeds);
        let used: Vec<u64> = both.iter().map(|d| d.0).collect();
        let over_images = match (self.by_image(a, &used, question)?, self.by_image(b, &used, question)?) {
            (Some(a), Some(b)) if a.len() == b.len() => {
                let differences: Vec<f64> = a.iter().zip(&b).map(|(a, b)| 100.0 * (b - a)).collect();
                Some(stats::bootstrap_mean(&differences, RESAMPLES, &mut rng::stream(1, "paired images", &[])))
            }
            _ => None,
        };
        let over_seeds = half.map(|h| (difference - h, difference + h));
        Ok(Some(Pair { question: question.clone(), a: a.into(), b: b.into(), difference, seeds, over_seeds, over_images }))
    }

    /// How often each test image was answered right, over seeds and networks.
    fn by_image(&self, setting: &str, seeds: &[u64], question: &Question) -> Result<Option<Vec<f64>>> {
        let mut sums: Vec<f64> = vec![];
        let mut networks = 0;
        for (_, item) in self.runs(setting).into_iter().filter(|(seed, _)| seeds.contains(seed)) {
            for row in self.of(&item.name, question) {
                let Some(right) = self.kept.right(&item.name, question, row.record.peer.unwrap_or(0))? else { return Ok(None) };
                sums.resize(right.len(), 0.0);
                sums.iter_mut().zip(&right).for_each(|(sum, right)| *sum += f64::from(u8::from(*right)));
                networks += 1;
            }
        }
        // Rounded, so that equal shares are equal numbers.
        Ok((networks > 0).then(|| sums.iter().map(|s| (s / f64::from(networks) * 1e9).round() / 1e9).collect()))
    }

    /// Every setting of a group against those before it that the plan names.
    fn pairs(&self, group: &Group, questions: &[Question]) -> Result<Vec<Pair>> {
        let names: Vec<&str> = self.plan.settings().map(|(_, s)| s.name.as_str()).collect();
        let place = |name: &str| names.iter().position(|n| *n == name);
        let mut pairs = vec![];
        for setting in &group.settings {
            for against in group.against.iter().filter(|a| place(a) < place(&setting.name)) {
                for question in questions {
                    pairs.extend(self.pair(question, against, &setting.name)?);
                }
            }
        }
        Ok(pairs)
    }

    fn scale(&self, missing: &[String]) -> Result<Section> {
        let mut section = Section::new("What was done");
        section.text(self.plan.about.trim().replace('\n', " "));
        let made = self.items.iter().filter(|i| self.rows.iter().any(|r| r.item == i.name)).count();
        let none = if missing.is_empty() { "none is missing".to_string() } else { format!("missing: {}", missing.join(", ")) };
        section.text(format!("{made} of {} runs and joint measurements are finished; {none}.", self.items.len()));
        Ok(section)
    }

    /// A finished run as the figures of single runs want it.
    fn run(&self, item: &Item) -> Result<Run> {
        let folder = RunFolder::at(self.kept.item_folder(&item.name));
        let path = folder.metrics_csv();
        let fault = |e: csv::Error| Error::file(&path, e.to_string());
        let mut reader = csv::Reader::from_path(&path).map_err(fault)?;
        let names = reader.headers().map_err(fault)?.clone();
        let mut metrics = vec![];
        for row in reader.records() {
            let row = row.map_err(fault)?;
            let number = |(name, cell): (&str, &str)| (name.to_string(), cell.parse::<f64>().map_or(Value::Null, Value::from));
            metrics.push(names.iter().zip(row.iter()).map(number).collect::<Epoch>());
        }
        let extra = self.kept.facts(&item.name)?.extra_epochs;
        Ok(Run { name: item.name.clone(), recipe: folder.read_recipe()?, environment: json!({ "extra_epochs": extra }), metrics, folder })
    }
}

/// Where the paper prints this question.
fn paper_table(question: &Question) -> Option<&'static str> {
    match question.command.as_str() {
        "accuracy" => Some("cifar100-same"),
        "linear-probe" if question.protocol.starts_with("paper") => Some("transfer-linear"),
        _ => None,
    }
}
