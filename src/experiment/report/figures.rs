//! The figures of the report.

use super::{Pair, Results};
use crate::error::{Error, Result};
use crate::eval::figures::{by_epoch, gate_figure, lambda_figures};
use crate::experiment::plan::Group;
use crate::experiment::rows::Question;
use crate::report::map::Map;
use crate::report::plot::{Heat, Lines, Series, Whisker, Whiskers};
use crate::report::{Figure, Section};
use crate::run::Run;

/// Lines over epochs: of every run the mean of some columns of its metrics.csv.
struct Curves {
    columns: fn(&Run) -> Vec<String>,
    title: &'static str,
    y: &'static str,
    /// What the caption says beyond how the mean was taken.
    more: &'static str,
}

impl Results<'_> {
    /// Settings of a group beside one that they are compared with.
    pub(super) fn gains(&self, pairs: &[Pair], group: &Group, against: &str, questions: &[&Question], name: String) -> Figure {
        let of = |m: &Question, b: &str| pairs.iter().find(|p| p.question == *m && p.a == against && p.b == b);
        let compared = |s: &&String| questions.iter().any(|m| of(m, s).is_some());
        let series: Vec<String> =
            group.settings.iter().map(|s| s.name.clone()).collect::<Vec<_>>().iter().filter(compared).cloned().collect();
        let whisker = |m: &Question, b: &String| {
            of(m, b).map(|pair| Whisker { value: pair.difference, thick: pair.over_images, thin: pair.over_seeds })
        };
        let rows: Vec<(String, Vec<Option<Whisker>>)> =
            questions.iter().map(|m| (m.shown(), series.iter().map(|b| whisker(m, b)).collect())).collect();
        let title = format!("Difference to {against}");
        let drawn = Whiskers {
            title: &title,
            x: "points of top-1 accuracy",
            series: &series,
            palette: &self.palette,
            rows: &rows,
            thick: "95 % over test images",
            thin: "95 % over seeds (Student's t)",
        };
        let counts = pairs.iter().filter(|p| p.a == against && questions.contains(&&p.question)).map(|p| p.seeds.len());
        let caption = match &group.seeds[..] {
            [one] => format!("Seed {one} alone: the bars say nothing about other seeds."),
            _ => format!("Paired by seed (n = {}).", from_to(counts)),
        };
        drawn.figure(name, caption)
    }

    /// The weights that the meta-network gave to pairs of layers, and the gates to layers.
    pub(super) fn matching(&self) -> Result<Section> {
        let mut section = Section::new("Layer matching");
        for setting in &self.plan.groups[0].settings {
            if let Some((_, item)) = self.runs(&setting.name).first() {
                let run = self.run(item)?;
                section.figures(lambda_figures(&run).into_iter().chain(gate_figure(&run)).collect());
            }
        }
        Ok(section)
    }

    /// A group's settings by epoch: test accuracy, and what the networks' embeddings know of each other where that was logged.
    pub(super) fn curves(&self, group: &Group, place: &str) -> Result<Vec<Figure>> {
        let accuracy = Curves {
            columns: |run| (0..run.archs().len()).map(|m| format!("test.peer{m}.top1")).collect(),
            title: "Test accuracy while training",
            y: "top-1 (%)",
            more: "",
        };
        let information = Curves {
            // Of the last stages; the others have two numbers more in their names.
            columns: |run| {
                let last = |c: &&str| c.starts_with("mutual_information.") && c.matches('.').count() == 2;
                run.columns().into_iter().filter(last).map(String::from).collect()
            },
            title: "What embeddings of different networks know of each other",
            y: "log K - L_ICL",
            more: " Lower bound on the mutual information (Eq. 6), mean over the epoch. Just below 0, the embeddings of all images are one point.",
        };
        let likeness = Curves {
            columns: |run| {
                run.columns().into_iter().filter(|c| c.starts_with("likeness.") && c.matches('.').count() == 1).map(String::from).collect()
            },
            title: "How alike embeddings of different images are",
            y: "mean cosine",
            more: " Of the last stages, mean over the epoch. At 1, the embeddings of all images are one point.",
        };
        let mut drawn = vec![];
        for (name, curves) in [("training", accuracy), ("information", information), ("likeness", likeness)] {
            drawn.extend(self.draw(group, &format!("{name}{place}"), &curves)?);
        }
        Ok(drawn)
    }

    fn draw(&self, group: &Group, name: &str, curves: &Curves) -> Result<Option<Figure>> {
        let (mut series, mut counts) = (vec![], vec![]);
        for name in group.shown() {
            let of_group = self.runs(name).into_iter().filter(|(seed, _)| group.seeds.contains(seed));
            let runs = of_group.map(|(_, item)| self.run(item)).collect::<Result<Vec<_>>>()?;
            let curve = |run: &Run| -> Option<Vec<f64>> {
                let columns: Vec<Vec<f64>> = (curves.columns)(run).iter().map(|c| run.column(c)).collect();
                let mean = |e: usize| columns.iter().map(|c| c[e]).sum::<f64>() / columns.len() as f64;
                (!columns.is_empty()).then(|| (0..run.metrics.len()).map(mean).collect())
            };
            let lines: Vec<Vec<f64>> = runs.iter().filter_map(curve).collect();
            let Some(epochs) = lines.iter().map(Vec::len).min() else { continue };
            counts.push(lines.len());
            let at = |e: usize| lines.iter().map(move |c| c[e]);
            let mean: Vec<f64> = (0..epochs).map(|e| at(e).sum::<f64>() / lines.len() as f64).collect();
            // Where a seed lacks the number there is no mean, and no band either: `min` and `max` would step over it.
            let edge = |e: usize, value: f64| if mean[e].is_finite() { value } else { f64::NAN };
            let low = |e: usize| edge(e, at(e).fold(f64::INFINITY, f64::min));
            let high = |e: usize| edge(e, at(e).fold(f64::NEG_INFINITY, f64::max));
            let band = (0..epochs).map(|e| (low(e), high(e))).collect();
            let band = if lines.len() > 1 { band } else { vec![] };
            series.push(Series { band, ..by_epoch(name.to_string(), &mean) });
        }
        if series.is_empty() {
            return Ok(None);
        }
        let (over, band) = match group.seeds.len() {
            1 => ("Mean over the networks of a run.".to_string(), ""),
            _ => (format!("Mean over networks and seeds (n = {}).", from_to(counts)), "from the lowest to the highest seed"),
        };
        let lines = Lines { title: curves.title, x: "epoch", y: curves.y, series: &series, palette: &self.palette, band };
        Ok(Some(lines.figure(name, format!("{over}{}", curves.more))))
    }

    /// What was drawn over several runs.
    pub(super) fn pictures(&self) -> Result<Section> {
        let mut section = Section::new("Maps");
        for item in self.items.iter().filter(|i| i.run().is_none() && self.kept.has(i)) {
            for (file, caption) in self.kept.facts(&item.name)?.figures {
                let path = self.kept.item_folder(&item.name).join(&file);
                let svg = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
                let points = path.with_extension("json");
                let map = std::fs::read_to_string(&points).ok().and_then(|text| Map::read(&text));
                let numbers = map.as_ref().map(Map::table);
                section.figures(vec![Figure { map, numbers, ..Figure::foreign(item.name.clone(), caption, svg) }]);
            }
        }
        Ok(section)
    }
}

/// `3`, or `2 to 3` where some are not finished.
fn from_to(counts: impl IntoIterator<Item = usize>) -> String {
    let mut counts: Vec<usize> = counts.into_iter().collect();
    counts.sort_unstable();
    match (counts.first(), counts.last()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
        (Some(all), _) => all.to_string(),
        _ => "0".to_string(),
    }
}

/// How alike the networks of a cohort are, by setting: same answers and CKA of features, in percent.
pub(super) fn cohort_figure(settings: &[String], values: &[Vec<f64>]) -> Figure {
    let heat = Heat {
        title: "Alike within a cohort (%)",
        x: "",
        y: "",
        columns: &["same answer".to_string(), "linear CKA".to_string()],
        rows: settings,
        values,
        limits: Some((0.0, 100.0)),
        decimals: 1,
        unit: "%",
        root: false,
    };
    heat.figure("cohorts", "Two networks of one run on the test images, mean over pairs and seeds.")
}
