//! Maps of points, coloured by class: t-SNE.

use std::fmt::Write as _;

use super::{Anchor, Canvas, Figure, below, escape, heading};
use crate::report::colours::{self, LIGHT};
use crate::report::map::{Map, Panel, in_unit_square};
use crate::report::text;

/// Maps of the same points side by side, coloured by class.
pub struct Points<'a> {
    /// Above all maps.
    pub title: &'a str,
    /// What is drawn.
    pub map: &'a Map,
}

/// The colour of a class, and which of five shapes it has. Up to ten classes have a colour each and one shape.
pub(crate) fn marker(class: usize, count: usize) -> (String, usize) {
    if count <= colours::APART {
        return (colours::numbered(class), 0);
    }
    let hues = count.div_ceil(SHAPES.len());
    (colours::hue(class % hues, hues), (class / hues).min(SHAPES.len() - 1))
}

/// Circle, square, triangle, diamond, cross; the script of the page draws the same.
pub(super) const SHAPES: [&str; 5] = [
    "m-1.7 0a1.7 1.7 0 1 0 3.4 0a1.7 1.7 0 1 0 -3.4 0z",
    "m-1.6 -1.6h3.2v3.2h-3.2z",
    "m0 -2.1l2 3.5h-4z",
    "m0 -2.3l2 2.3l-2 2.3l-2 -2.3z",
    "m-2.1 -.6h1.5v-1.5h1.2v1.5h1.5v1.2h-1.5v1.5h-1.2v-1.5h-1.5z",
];
/// A panel's side.
pub(super) const SIDE: f64 = 380.0;
const GAP: f64 = 18.0;
/// A line of the note above a panel.
const NOTE: f64 = 15.0;
/// What a name may take in the legend.
const LABEL: f64 = 140.0;

/// A line of a legend: a name, its colour and its shape.
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    pub(super) colour: String,
    pub(super) shape: &'static str,
}

/// Square panels, two in a row, with a heading above them and a legend below. `head` gives a panel's title and the note under it, `draw`
/// fills its square from the upper left corner.
pub(super) fn side_by_side<P>(
    title: &str,
    panels: &[P],
    head: impl Fn(&P) -> (&str, &str),
    legend: &[Entry],
    draw: impl Fn(&mut Canvas, &P, f64, f64),
) -> String {
    let columns = panels.len().clamp(1, 2);
    let width = GAP + columns as f64 * (SIDE + GAP);
    let lines = heading(title, width - 2.0 * GAP);
    // A note says how far a map may be believed: it is wrapped, never cut.
    let notes: Vec<Vec<String>> = panels.iter().map(|panel| text::wrap(head(panel).1, 11.0, false, SIDE)).collect();
    let note = NOTE * notes.iter().map(Vec::len).max().unwrap_or(0) as f64;
    let (first, height) = (below(&lines), SIDE + 33.0 + note);
    // As many columns of the legend as the longest name leaves room for.
    let longest = legend.iter().map(|e| text::width(e.name, 10.0, false)).fold(0.0, f64::max).min(LABEL);
    let legend_columns = ((width - 2.0 * GAP) / (longest + 24.0)).floor().clamp(1.0, 8.0) as usize;
    let legend_rows = legend.len().div_ceil(legend_columns);
    let legend_top = first + panels.len().div_ceil(columns) as f64 * height + 10.0;
    let mut c = Canvas::new(width, legend_top + legend_rows as f64 * 14.0 + 12.0);
    c.title(GAP, &lines);
    for (i, panel) in panels.iter().enumerate() {
        let (x, y) = (GAP + (i % columns) as f64 * (SIDE + GAP), first + (i / columns) as f64 * height);
        c.text(x, y + 14.0, 12.5, Anchor::Start, &text::cut(head(panel).0, 12.5, false, SIDE));
        for (k, line) in notes[i].iter().enumerate() {
            c.text(x, y + 30.0 + NOTE * k as f64, 11.0, Anchor::Start, line);
        }
        let top = y + 23.0 + note;
        let grid = LIGHT.grid;
        let _ =
            writeln!(c.body, r#"<rect class="grid" x="{x:.1}" y="{top:.1}" width="{SIDE}" height="{SIDE}" fill="none" stroke="{grid}"/>"#);
        draw(&mut c, panel, x, top);
    }
    for (k, Entry { name, colour, shape }) in legend.iter().enumerate() {
        let x = GAP + (k / legend_rows) as f64 * (width - 2.0 * GAP) / legend_columns as f64;
        let y = legend_top + (k % legend_rows) as f64 * 14.0 + 8.0;
        let (px, py) = (x + 5.0, y - 4.0);
        // A shape in the colour of text is seen on light and on dark.
        let class = if *colour == LIGHT.ink { r#" class="ink""# } else { "" };
        let _ = writeln!(c.body, r#"<path{class} transform="translate({px:.1} {py:.1}) scale(2)" d="M0 0{shape}" fill="{colour}"/>"#);
        c.text(x + 14.0, y, 10.0, Anchor::Start, &text::cut(name, 10.0, false, LABEL));
    }
    c.finish(title)
}

/// The points of one class as one path that tells its name; nothing where there are none.
pub(super) fn class_path(c: &mut Canvas, places: impl Iterator<Item = (f64, f64)>, shape: &str, colour: &str, name: &str) {
    let path: String = places.map(|(x, y)| format!("M{x:.1} {y:.1}{shape}")).collect();
    if !path.is_empty() {
        let name = escape(name);
        let _ = writeln!(c.body, r#"<path d="{path}" fill="{colour}" fill-opacity="0.8"><title>{name}</title></path>"#);
    }
}

impl Points<'_> {
    /// The maps with their points.
    pub fn figure(&self, name: impl Into<String>, caption: impl Into<String>) -> Figure {
        Figure { map: Some(self.map.clone()), ..Figure::new(name, caption, self.draw()) }.of(self.map.table())
    }

    fn draw(&self) -> String {
        let Map { panels, classes, labels, .. } = self.map;
        let marker = |class: usize| marker(class, classes.len());
        let mut legend = vec![];
        for (class, name) in classes.iter().enumerate() {
            let (colour, shape) = marker(class);
            legend.push(Entry { name, colour, shape: SHAPES[shape] });
        }
        side_by_side(
            self.title,
            panels,
            |panel: &Panel| (&panel.title, &panel.note),
            &legend,
            |c, panel, x, top| {
                let places = in_unit_square(&panel.points);
                for (class, name) in classes.iter().enumerate() {
                    let (colour, shape) = marker(class);
                    let own = places.iter().zip(labels).filter(|(_, label)| **label == class);
                    class_path(c, own.map(|(p, _)| (x + SIDE * p[0], top + SIDE * p[1])), SHAPES[shape], &colour, name);
                }
            },
        )
    }
}
