//! Curves of tables whose rows or columns are values of one quantity: `25 %` of the images, `alpha = 0.1`, `memory, K = 1024`.

use std::collections::BTreeMap;

use super::beside::Ours;
use crate::report::Figure;
use crate::report::colours::Palette;
use crate::report::plot::{Lines, Series};

/// The quantity and its value in a name: `memory, K = 1024` is 1024 of `memory, K`; `25 %` is 25 of nothing.
fn quantity(name: &str) -> Option<(&str, f64)> {
    match (name.split_once(" = "), name.strip_suffix(" %")) {
        (Some((what, value)), _) => Some((what, value.parse().ok()?)),
        (None, Some(value)) => Some(("", value.parse().ok()?)),
        _ => None,
    }
}

/// A wider range than this is drawn over logarithms.
const WIDE: f64 = 50.0;

/// A figure for each quantity; none for tables of methods.
pub(super) fn figures(name: &str, title: &str, ours: &[Ours]) -> Vec<Figure> {
    // Figure, then line, then x with the numbers of all runs there.
    let mut found: BTreeMap<(String, String), BTreeMap<String, Vec<(f64, f64)>>> = BTreeMap::new();
    for own in ours {
        let row = own.network.row.as_deref().and_then(quantity);
        let arch = &own.network.arch;
        let (what, line, x) = match (row, quantity(&own.column)) {
            (Some((_, x)), _) => ("% of the images", &own.column[..], x),
            // `batch, K` and `memory, K` are two lines over K; `alpha` and `beta` have an axis each.
            (None, Some((what, x))) => match what.rsplit_once(", ") {
                Some((line, what)) => (what, line, x),
                None => (what, &arch[..], x),
            },
            (None, None) => continue,
        };
        found.entry((arch.clone(), what.to_string())).or_default().entry(line.to_string()).or_default().push((x, own.value));
    }
    let mut figures = vec![];
    for (i, ((arch, what), lines)) in found.into_iter().enumerate() {
        let xs: Vec<f64> = lines.values().flatten().map(|p| p.0).collect();
        let (least, most) = (xs.iter().copied().fold(f64::INFINITY, f64::min), xs.iter().copied().fold(0.0, f64::max));
        let wide = least > 0.0 && most / least > WIDE;
        let series: Vec<Series> = lines.into_iter().map(|(line, points)| series(line, points, wide)).collect();
        let x = if wide { format!("log10 of {what} ({arch})") } else { format!("{what} ({arch})") };
        let palette = Palette::of(series.iter().map(|line| &line.name));
        let lines = Lines { title, x: &x, y: "top-1 (%)", series: &series, palette: &palette, band: "range of the runs" };
        figures.push(lines.figure(format!("{name}-{}", i + 1), format!("{title}: {x}; mean over runs")));
    }
    figures
}

/// Means over runs by x, with their range.
fn series(name: String, points: Vec<(f64, f64)>, wide: bool) -> Series {
    let mut xs: Vec<f64> = points.iter().map(|p| p.0).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let at = |x: f64| points.iter().filter(|p| p.0 == x).map(|p| p.1).collect::<Vec<f64>>();
    let mut line = Series { name, ..Series::default() };
    for x in xs {
        let values = at(x);
        line.points.push((if wide { x.log10() } else { x }, values.iter().sum::<f64>() / values.len() as f64));
        line.band.push((values.iter().copied().fold(f64::INFINITY, f64::min), values.iter().copied().fold(f64::NEG_INFINITY, f64::max)));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::super::beside::Who;
    use super::*;

    fn ours(column: &str, row: Option<&str>, value: f64) -> Ours {
        let network = Who { arch: "resnet20".into(), among: None, row: row.map(String::from) };
        Ours { dataset: "cifar100".into(), network, column: column.into(), value, best_stage: None }
    }

    #[test]
    fn a_curve_for_each_quantity() {
        assert_eq!(quantity("memory, K = 1024"), Some(("memory, K", 1024.0)));
        assert_eq!((quantity("25 %"), quantity("l_mcl:dim=32")), (Some(("", 25.0)), None));
        let runs = [
            ours("alpha = 0.1", None, 60.0),
            ours("alpha = 0.1", None, 62.0),
            ours("alpha = 0.2", None, 63.0),
            ours("beta = 1.5", None, 59.0),
        ];
        assert_eq!(figures("f", "t", &runs).len(), 2);
        let line = series("a".into(), vec![(0.2, 63.0), (0.1, 60.0), (0.1, 62.0)], false);
        assert_eq!((line.points, line.band), (vec![(0.1, 61.0), (0.2, 63.0)], vec![(60.0, 62.0), (63.0, 63.0)]));
        let mining = figures("f", "t", &[ours("batch, K = 30", None, 1.0), ours("memory, K = 16384", None, 2.0)]);
        assert_eq!((mining.len(), &mining[0].caption[..]), (1, "t: log10 of K (resnet20); mean over runs"));
        assert_eq!(figures("f", "t", &[ours("dml", Some("25 %"), 1.0), ours("dml", Some("50 %"), 2.0)]).len(), 1);
        assert!(figures("f", "t", &[ours("dml", None, 1.0)]).is_empty());
    }
}
