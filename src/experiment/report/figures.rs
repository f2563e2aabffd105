//! The figures of the report.

use super::{Pair, Results, paper_table};
use crate::error::{Error, Result};
use crate::eval::figures::{by_epoch, gate_figure, lambda_figures};
use crate::experiment::plan::Group;
use crate::experiment::rows::Question;
use crate::report::colours::Palette;
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
    /// Gains over the first setting.
    pub(super) fn gains(&self, pairs: &[Pair], group: &Group, questions: &[Question], place: &str) -> Figure {
        let first = &group.settings[0].name;
        let series: Vec<String> = group.settings[1..].iter().map(|s| s.name.clone()).collect();
        let rows: Vec<(String, Vec<Option<Whisker>>)> = questions
            .iter()
            .map(|m| {
                let whisker = |b: &String| {
                    let pair = pairs.iter().find(|p| p.question == *m && p.a == *first && p.b == *b)?;
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
            let runs = of_group.map(|(_, item)| self.run(item)).collect::<Result<Vec<_>>>()?;
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

    /// What was drawn over several runs.
    pub(super) fn pictures(&self) -> Result<Section> {
        let mut section = Section::new("Maps");
        for item in self.items.iter().filter(|i| i.run().is_none() && self.kept.has(i)) {
            for (file, caption) in self.kept.facts(&item.name)?.figures {
                let path = self.kept.item_folder(&item.name).join(&file);
                let svg = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
                section.figures(vec![Figure::new(item.name.clone(), caption, svg)]);
            }
        }
        Ok(section)
    }
}

/// The settings of a group of one seed beside the first one they are compared with, in what the paper questions too.
pub(super) fn differences(pairs: &[Pair], group: &Group, questions: &[Question], place: &str) -> Figure {
    let against = &group.against[0];
    let printed: Vec<&Question> = questions.iter().filter(|m| paper_table(m).is_some()).collect();
    let series: Vec<String> = printed.iter().map(|m| m.shown()).collect();
    let mut rows = vec![];
    for setting in &group.settings {
        let whisker = |m: &&Question| {
            let pair = pairs.iter().find(|p| p.question == **m && p.a == *against && p.b == setting.name)?;
            Some(Whisker { value: pair.difference, thick: pair.over_images, thin: None })
        };
        let row: Vec<Option<Whisker>> = printed.iter().map(whisker).collect();
        if row.iter().any(Option::is_some) {
            rows.push((setting.name.clone(), row));
        }
    }
    let title = format!("Difference to {against}");
    let svg =
        Whiskers { title: &title, x: "points of top-1 accuracy", series: &series, palette: &Palette::of(&series), rows: &rows }.draw();
    Figure::new(format!("differences{place}"), "One seed. Bars: 95 % interval over test images.", svg)
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
    };
    Figure::new("cohorts", "Two networks of one run on the test images, mean over pairs and seeds.", heat.draw())
}
