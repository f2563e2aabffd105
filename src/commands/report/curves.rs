//! What the runs logged while they trained.

use crate::eval::figures::{by_epoch, gate_figure, lambda_figures};
use crate::report::plot::{Lines, Series};
use crate::report::{Figure, Section};
use crate::run::Run;

/// Accuracy and loss by epoch.
pub(super) fn section(runs: &[Run]) -> Section {
    let mut section = Section::new("Training curves");
    for run in runs {
        let columns = run.columns();
        let mut accuracy: Vec<Series> = (0..run.archs().len())
            .map(|m| by_epoch(format!("network {m}: {}", run.archs()[m]), &run.column(&format!("test.peer{m}.top1"))))
            .collect();
        if run.archs().len() > 1 {
            accuracy.push(by_epoch("ensemble".into(), &run.column("test.ensemble.top1")));
        }
        accuracy.extend(
            (0..run.archs().len())
                .filter(|m| columns.contains(&format!("holdout.peer{m}.top1").as_str()))
                .map(|m| by_epoch(format!("network {m}, held out"), &run.column(&format!("holdout.peer{m}.top1")))),
        );
        let terms: Vec<Series> = std::iter::once("loss")
            .chain(columns.iter().copied().filter(|c| c.starts_with("weighted.")))
            .map(|c| by_epoch(c.trim_start_matches("weighted.").into(), &run.column(c)))
            .collect();
        let title = format!("{}: test accuracy", run.name);
        let loss_title = format!("{}: loss and its weighted terms", run.name);
        section.figures(vec![
            Figure::new(
                format!("{}-accuracy", run.name),
                format!("{} on {}, by epoch", run.method(), run.dataset()),
                Lines { title: &title, x: "epoch", y: "top-1 (%)", series: &accuracy, dots: false }.draw(),
            ),
            Figure::new(
                format!("{}-loss", run.name),
                "Mean over the epoch's steps",
                Lines { title: &loss_title, x: "epoch", y: "loss", series: &terms, dots: false }.draw(),
            ),
        ]);
    }
    section
}

/// The weights between layers (Eq. 17) and of layers (Eq. 19) that a run learnt.
pub(super) fn matching(runs: &[Run]) -> Section {
    let mut section = Section::new("Layer matching");
    for run in runs {
        section.figures([lambda_figures(run), gate_figure(run).into_iter().collect()].concat());
    }
    section
}
