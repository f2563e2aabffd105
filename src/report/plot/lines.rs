//! Lines over a common axis: curves of training, accuracy against the number of images.

use std::fmt::Write as _;

use super::{Anchor, CHART, Canvas, DASHES, Figure, below, heading, label, legend, range, ticks};
use crate::report::colours::{LIGHT, Palette};
use crate::report::text;
use crate::report::{Cell, Table};

/// A line of a chart: points, and an interval around them where there is one.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// What it is called beside its line; the name brings the colour.
    pub name: String,
    /// (x, y), by x.
    pub points: Vec<(f64, f64)>,
    /// (low, high) at each point.
    pub band: Vec<(f64, f64)>,
}

/// Lines over a common axis. Points that are not finite break a line.
pub struct Lines<'a> {
    /// Above the chart.
    pub title: &'a str,
    /// What the lower axis counts.
    pub x: &'a str,
    /// What the left axis counts.
    pub y: &'a str,
    /// The lines.
    pub series: &'a [Series],
    /// The colours of the report.
    pub palette: &'a Palette,
    /// What the bands are; empty where there are none.
    pub band: &'a str,
}

const PLOT: f64 = 250.0;
/// Up to so many points a line each is marked.
const MARKED: usize = 16;
/// Up to so many lines each is named at its end; more are in a legend.
const NAMED: usize = 12;
/// From label to label.
const APART: f64 = 13.0;
/// What labels at the right may take of a chart's width; longer ones of a narrow chart are in a legend.
const LABELS: f64 = 0.34;

impl Series {
    fn end(&self) -> Option<(f64, f64)> {
        self.points.iter().rev().copied().find(|(x, y)| x.is_finite() && y.is_finite())
    }
}

impl Lines<'_> {
    /// The chart with its numbers.
    pub fn figure(&self, name: impl Into<String>, caption: impl Into<String>) -> Figure {
        Figure::chart(name, caption, |width| self.draw(width)).of(self.numbers())
    }

    fn numbers(&self) -> Table {
        let mut table = Table::new(self.title, &["line", self.x, self.y, "low", "high"]);
        for series in self.series {
            for (i, (x, y)) in series.points.iter().enumerate() {
                let number = |v: f64| if v.is_finite() { Cell::Score(v, 4) } else { Cell::Empty };
                let (low, high) = series.band.get(i).map_or((Cell::Empty, Cell::Empty), |(a, b)| (number(*a), number(*b)));
                table.push(vec![Cell::text(&series.name), number(*x), number(*y), low, high]);
            }
        }
        table.without_empty_columns()
    }

    fn draw(&self, width: f64) -> String {
        let finite = |v: &f64| v.is_finite();
        let xs: Vec<f64> = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).filter(finite).collect();
        let bands = |s: &Series| s.band.iter().flat_map(|b| [b.0, b.1]).collect::<Vec<_>>();
        let ys: Vec<f64> =
            self.series.iter().flat_map(|s| s.points.iter().map(|p| p.1).chain(bands(s)).collect::<Vec<_>>()).filter(finite).collect();
        let ((x0, x1), (y0, y1)) = (range(&xs, 0.0), range(&ys, 0.05));
        let lines = heading(self.title, width - 24.0);
        let top = below(&lines);
        let names: Vec<&str> = self.series.iter().map(|s| s.name.as_str()).collect();
        let (room, longest) = (LABELS * width, names.iter().map(|n| text::width(n, 11.0, false)).fold(0.0, f64::max));
        let direct = self.series.len() <= NAMED && self.series.iter().all(|s| s.end().is_some()) && (width == CHART || longest <= room);
        let longest = longest.min(room);
        let (left, right) = (62.0, if direct { longest + 26.0 } else { 14.0 });
        let px = |x: f64| left + (x - x0) / (x1 - x0) * (width - left - right);
        let py = |y: f64| top + PLOT - (y - y0) / (y1 - y0) * PLOT;
        let edge = if width < CHART { 12.0 } else { left };
        let places = if direct { vec![] } else { legend(&names, width - edge - 14.0, 38.0) };
        let rows = places.last().map_or(0, |p| p.1 + 1);
        // Of one run a band has no height: nothing is drawn that a legend could explain.
        let drawn = |s: &Series| s.band.len() > 1 && s.band.iter().any(|(low, high)| high > low);
        let banded = !self.band.is_empty() && self.series.iter().any(drawn);
        let mut c = Canvas::new(width, top + PLOT + 44.0 + 18.0 * (rows + usize::from(banded)) as f64);
        c.title(12.0, &lines);
        for y in ticks(y0, y1, 5) {
            c.line(left, py(y), width - right, py(y));
            c.text(left - 6.0, py(y) + 4.0, 11.0, Anchor::End, &label(y));
        }
        // Epochs are whole: no tick between them.
        let whole = xs.iter().all(|x| x.fract() == 0.0);
        for x in ticks(x0, x1, (width / 80.0) as usize).into_iter().filter(|x| !whole || x.fract() == 0.0) {
            c.line(px(x), top + PLOT, px(x), top + PLOT + 4.0);
            c.text(px(x), top + PLOT + 17.0, 11.0, Anchor::Middle, &label(x));
        }
        c.text((left + width - right) / 2.0, top + PLOT + 34.0, 12.0, Anchor::Middle, self.x);
        c.turned(14.0, top + PLOT / 2.0, 12.0, Anchor::Middle, self.y);
        let styles = self.palette.styles(&names);
        for (series, (colour, _)) in self.series.iter().zip(&styles) {
            band(&mut c, series, colour, &px, &py);
        }
        let marked = self.series.iter().all(|s| s.points.len() <= MARKED);
        for (series, (colour, style)) in self.series.iter().zip(&styles) {
            let mut path = String::new();
            let mut pen = 'M';
            for (x, y) in &series.points {
                if !(x.is_finite() && y.is_finite()) {
                    pen = 'M';
                    continue;
                }
                let _ = write!(path, "{pen}{:.1} {:.1}", px(*x), py(*y));
                pen = 'L';
                if marked || series.points.len() == 1 {
                    c.marker(px(*x), py(*y), 2.8, *style, colour, &format!("{}, {} {x}: {}", series.name, self.x, label(*y)));
                }
            }
            let _ = writeln!(
                c.body,
                r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"{}/>"#,
                dashed(*style)
            );
        }
        if direct {
            let ends: Vec<(f64, f64)> = self.series.iter().filter_map(Series::end).map(|(x, y)| (px(x), py(y))).collect();
            let at = apart(&ends.iter().map(|e| e.1).collect::<Vec<_>>(), top + 4.0, top + PLOT);
            for (((name, (colour, style)), end), y) in names.iter().zip(&styles).zip(ends).zip(at) {
                let x = width - right + 8.0;
                let _ = writeln!(
                    c.body,
                    r#"<path d="M{:.1} {:.1}L{x:.1} {y:.1}h6" fill="none" stroke="{colour}" stroke-dasharray="1 3"/>"#,
                    end.0 + 3.0,
                    end.1
                );
                c.marker(x + 6.0, y, 2.8, *style, colour, name);
                c.text(x + 12.0, y + 4.0, 11.0, Anchor::Start, &text::cut(name, 11.0, false, room));
            }
        }
        for ((name, (colour, style)), (x, line)) in names.iter().zip(&styles).zip(&places) {
            let (lx, ly) = (edge + x, top + PLOT + 54.0 + 18.0 * *line as f64);
            let _ = writeln!(c.body, r#"<path d="M{lx:.1} {:.1}h18" stroke="{colour}" stroke-width="2.4"{}/>"#, ly - 4.0, dashed(*style));
            c.text(lx + 22.0, ly, 11.0, Anchor::Start, &text::cut(name, 11.0, false, width - edge - 36.0));
        }
        if banded {
            let y = top + PLOT + 54.0 + 18.0 * rows as f64;
            let _ = writeln!(
                c.body,
                r#"<rect x="{edge:.1}" y="{:.1}" width="18" height="9" fill="{}" fill-opacity="0.3"/>"#,
                y - 8.0,
                LIGHT.soft
            );
            c.soft(edge + 22.0, y, 11.0, Anchor::Start, &text::cut(self.band, 11.0, false, width - edge - 30.0));
        }
        c.finish(self.title)
    }
}

fn dashed(style: usize) -> String {
    match DASHES[style % DASHES.len()] {
        "" => String::new(),
        dash => format!(r#" stroke-dasharray="{dash}""#),
    }
}

fn band(c: &mut Canvas, series: &Series, colour: &str, px: &dyn Fn(f64) -> f64, py: &dyn Fn(f64) -> f64) {
    let known: Vec<(f64, f64, f64)> = series
        .points
        .iter()
        .zip(&series.band)
        .filter(|(p, b)| p.0.is_finite() && b.0.is_finite() && b.1.is_finite())
        .map(|(p, b)| (p.0, b.0, b.1))
        .collect();
    if known.len() > 1 {
        let up = known.iter().map(|(x, _, high)| format!("{:.1} {:.1}", px(*x), py(*high)));
        let down = known.iter().rev().map(|(x, low, _)| format!("{:.1} {:.1}", px(*x), py(*low)));
        let edge = up.chain(down).collect::<Vec<_>>().join("L");
        let _ = writeln!(c.body, r#"<path d="M{edge}Z" fill="{colour}" fill-opacity="0.15"/>"#);
    }
}

/// Heights of labels near where they belong, none closer to the next than a line, all between `top` and `bottom` if there is room.
fn apart(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut at = wanted.to_vec();
    let mut least = top;
    for &i in &order {
        at[i] = at[i].max(least);
        least = at[i] + APART;
    }
    let mut most = bottom;
    for &i in order.iter().rev() {
        at[i] = at[i].min(most);
        most = at[i] - APART;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_lines_that_end_together_do_not_lie_on_each_other() {
        let at = apart(&[100.0, 99.0, 250.0, 101.0, 249.0], 10.0, 250.0);
        let mut sorted = at.clone();
        sorted.sort_by(f64::total_cmp);
        assert!(sorted.windows(2).all(|w| w[1] - w[0] >= APART - 1e-9) && sorted[0] >= 10.0 && sorted[4] <= 250.0, "{at:?}");
        // In the order of the ends.
        assert!(at[1] < at[0] && at[0] < at[3] && at[4] < at[2], "{at:?}");
    }

    #[test]
    fn a_long_title_is_wrapped_and_few_points_are_marked() {
        let palette = Palette::of(["dml", "l_mcl"]);
        let series = ["dml", "l_mcl"].map(|name| Series { name: name.into(), points: vec![(1.0, 2.0), (2.0, 3.0)], band: vec![] });
        let title = "a title that is longer than any figure of this page is wide, because a run may be called what its owner likes";
        let figure = Lines { title, x: "epoch", y: "top-1 (%)", series: &series, palette: &palette, band: "" }.figure("f", "");
        assert_eq!(figure.svg.matches("font-weight=\"bold\"").count(), 2, "{}", figure.svg);
        // Two points and the mark beside the name, of each line.
        assert_eq!(figure.svg.matches("<title>").count(), 6, "{}", figure.svg);
        assert_eq!(figure.numbers.unwrap().csv().unwrap(), "line,epoch,top-1 (%)\ndml,1,2\ndml,2,3\nl_mcl,1,2\nl_mcl,2,3\n");
    }
}
