//! What the runs logged while they trained.

use crate::eval::figures::{by_epoch, gate_figure, lambda_figures, own_colours};
use crate::report::colours::Palette;
use crate::report::plot::{Lines, Series};
use crate::report::{Figure, Section};
use crate::run::Run;

/// Accuracy and loss by epoch.
pub(super) fn section(runs: &[Run]) -> Section {
    let mut section = Section::new("Training curves");
    if runs.len() > 1 {
        section.figures(together(runs));
    }
    for run in runs {
        let terms: Vec<Series> = std::iter::once("loss")
            .chain(run.columns().into_iter().filter(|c| c.starts_with("weighted.")))
            .map(|c| by_epoch(c.trim_start_matches("weighted.").into(), &run.column(c)))
            .collect();
        let loss = own_colours(&format!("{}: loss and its weighted terms", run.name), "loss", &terms, |lines| {
            lines.figure(format!("{}-loss", run.name), "Mean over the epoch's steps")
        });
        section.figures(vec![accuracy(run), loss]);
    }
    section
}

/// The networks of one run.
fn accuracy(run: &Run) -> Figure {
    let columns = run.columns();
    let mut series: Vec<Series> = (0..run.archs().len())
        .map(|m| by_epoch(format!("network {m}: {}", run.archs()[m]), &run.column(&format!("test.peer{m}.top1"))))
        .collect();
    if run.archs().len() > 1 {
        series.push(by_epoch("ensemble".into(), &run.column("test.ensemble.top1")));
    }
    series.extend(
        (0..run.archs().len())
            .filter(|m| columns.contains(&format!("holdout.peer{m}.top1").as_str()))
            .map(|m| by_epoch(format!("network {m}, held out"), &run.column(&format!("holdout.peer{m}.top1")))),
    );
    // The first network has the colour of the method; five lines of one colour would be told apart by nobody.
    let method = |i: usize| if i == 0 { run.method().to_string() } else { String::new() };
    let palette = Palette::by_method(series.iter().enumerate().map(|(i, s)| (s.name.clone(), method(i))));
    let title = format!("{}: test accuracy", run.name);
    Lines { title: &title, x: "epoch", y: "top-1 (%)", series: &series, palette: &palette, band: "" }
        .figure(format!("{}-accuracy", run.name), format!("{} on {}, by epoch", run.method(), run.dataset()))
}

/// All runs of a dataset in one figure, each the mean over its networks.
fn together(runs: &[Run]) -> Vec<Figure> {
    let mut datasets: Vec<&str> = runs.iter().map(Run::dataset).collect();
    datasets.sort_unstable();
    datasets.dedup();
    let mut figures = vec![];
    for dataset in datasets {
        let own: Vec<&Run> = runs.iter().filter(|r| r.dataset() == dataset).collect();
        if own.len() < 2 {
            continue;
        }
        let line = |run: &&Run| {
            let columns: Vec<Vec<f64>> = (0..run.archs().len()).map(|m| run.column(&format!("test.peer{m}.top1"))).collect();
            let mean = |e: usize| columns.iter().map(|c| c[e]).sum::<f64>() / columns.len() as f64;
            by_epoch(run.name.clone(), &(0..run.metrics.len()).map(mean).collect::<Vec<_>>())
        };
        let series: Vec<Series> = own.iter().map(line).collect();
        let palette = Palette::by_method(own.iter().map(|run| (run.name.clone(), run.method().to_string())));
        let title = format!("Test accuracy on {dataset}");
        let lines = Lines { title: &title, x: "epoch", y: "top-1 (%)", series: &series, palette: &palette, band: "" };
        let caption = "Mean over the networks of a run; runs of one method have one colour.";
        figures.push(lines.figure(format!("all-accuracy-{dataset}"), caption));
    }
    figures
}

/// The weights between layers (Eq. 17) and of layers (Eq. 19) that a run learnt.
pub(super) fn matching(runs: &[Run]) -> Section {
    let mut section = Section::new("Layer matching");
    for run in runs {
        section.figures([lambda_figures(run), gate_figure(run).into_iter().collect()].concat());
    }
    section
}
