//! Figures of what a run logged while it trained.

use std::collections::BTreeMap;

use crate::report::Figure;
use crate::report::colours::Palette;
use crate::report::plot::{Heat, Lines, Series};
use crate::run::Run;

/// Values of the epochs 1, 2, ... as a line.
pub fn by_epoch(name: String, values: &[f64]) -> Series {
    Series { name, points: values.iter().enumerate().map(|(i, v)| ((i + 1) as f64, *v)).collect(), band: vec![] }
}

/// Mean lambda of each pair of layers (Eq. 17), in the last epoch and over time, from the trainer's `lambda.A.B.LA.LB` columns.
pub fn lambda_figures(run: &Run) -> Vec<Figure> {
    let columns = run.columns();
    let mut pairs: BTreeMap<(usize, usize), Vec<(usize, usize, Vec<f64>)>> = BTreeMap::new();
    for name in columns {
        let parts: Vec<usize> =
            name.strip_prefix("lambda.").map_or(vec![], |rest| rest.split('.').filter_map(|p| p.parse().ok()).collect());
        if let [a, b, la, lb] = parts[..] {
            pairs.entry((a, b)).or_default().push((la, lb, run.column(name)));
        }
    }
    let mut figures = vec![];
    for ((a, b), cells) in pairs {
        let (rows, cols) = (cells.iter().map(|c| c.0).max().unwrap_or(0) + 1, cells.iter().map(|c| c.1).max().unwrap_or(0) + 1);
        let mut last = vec![vec![f64::NAN; cols]; rows];
        let mut series = vec![];
        for (la, lb, values) in &cells {
            last[*la][*lb] = values.iter().rev().copied().find(|v| v.is_finite()).unwrap_or(f64::NAN);
            series.push(by_epoch(format!("layer {} to {}", la + 1, lb + 1), values));
        }
        let stage = |n: usize| (1..=n).map(|l| format!("layer {l}")).collect::<Vec<_>>();
        let title = format!("{}: lambda, network {a} to {b}", run.name);
        let (x, y) = (format!("layers of network {b}"), format!("layers of network {a}"));
        let heat = Heat {
            title: &title,
            x: &x,
            y: &y,
            columns: &stage(cols),
            rows: &stage(rows),
            values: &last,
            limits: None,
            decimals: 3,
            unit: "lambda",
            root: false,
        };
        let caption = "Mean over the last epoch. Between 0.269 and 0.731, because it is the sigmoid of a product of unit vectors.";
        figures.push(heat.figure(format!("{}-lambda-{a}-{b}", run.name), caption));
        let title = format!("{}: lambda over time, network {a} to {b}", run.name);
        let lines = own_colours(&title, "lambda", &series, |lines| {
            lines.figure(format!("{}-lambda-time-{a}-{b}", run.name), "Mean over each epoch")
        });
        figures.push(lines);
    }
    figures
}

/// Mean gate weight of each stage (Eq. 19) over time, from the trainer's `gate.M.L` columns.
pub fn gate_figure(run: &Run) -> Option<Figure> {
    let mut series = vec![];
    for name in run.columns() {
        let parts: Vec<usize> = name.strip_prefix("gate.").map_or(vec![], |rest| rest.split('.').filter_map(|p| p.parse().ok()).collect());
        if let [m, l] = parts[..] {
            series.push(by_epoch(format!("network {m}, layer {}", l + 1), &run.column(name)));
        }
    }
    let title = format!("{}: gate weights", run.name);
    let caption = "Share of each layer in the network's own ensemble; mean over each epoch";
    (!series.is_empty()).then(|| own_colours(&title, "weight", &series, |lines| lines.figure(format!("{}-gates", run.name), caption)))
}

/// Lines by epoch of what no other figure shows.
pub fn own_colours(title: &str, y: &str, series: &[Series], figure: impl Fn(&Lines) -> Figure) -> Figure {
    let palette = Palette::of(series.iter().map(|s| &s.name));
    figure(&Lines { title, x: "epoch", y, series, palette: &palette, band: "" })
}
