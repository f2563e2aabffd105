//! Figures as SVG, drawn here: lines, heat maps, maps of points. Text stays text; what belongs to the page (ink, grid, ground) carries a
//! class, so that the HTML report can recolour it in the dark. PNG comes from the same SVG (resvg) with the font in report/assets/.

use std::fmt::Write as _;

use crate::error::{Error, Result};

/// A drawn figure. `name` is its file's stem.
#[derive(Debug, Clone)]
pub struct Figure {
    pub name: String,
    pub caption: String,
    pub svg: String,
}

/// Line charts are 560 wide and stay readable on a phone.
const WIDE: f64 = 600.0;

/// DejaVu Sans cut down to the characters figures use: pictures look the same on machines without fonts.
static FONT: &[u8] = include_bytes!("assets/DejaVuSans-subset.ttf");

impl Figure {
    pub fn new(name: impl Into<String>, caption: impl Into<String>, svg: String) -> Figure {
        Figure { name: file_stem(&name.into()), caption: caption.into(), svg }
    }

    /// Does it need a row of its own, and on a phone more width than there is?
    pub fn is_wide(&self) -> bool {
        let width = self.svg.split_once(" width=\"").and_then(|(_, rest)| rest.split('"').next()?.parse::<f64>().ok());
        width.is_some_and(|w| w > WIDE)
    }

    /// The figure as PNG, `scale` pixels per unit.
    pub fn png(&self, scale: f32) -> Result<Vec<u8>> {
        let failed = |e: String| Error::failed(format!("figure {}: {e}", self.name));
        let mut options = resvg::usvg::Options { font_family: "DejaVu Sans".into(), ..Default::default() };
        options.fontdb_mut().load_font_data(FONT.to_vec());
        // Every generic family means the one font there is.
        options.fontdb_mut().set_sans_serif_family("DejaVu Sans");
        let tree = resvg::usvg::Tree::from_str(&self.svg, &options).map_err(|e| failed(e.to_string()))?;
        let size = tree.size().to_int_size().scale_by(scale).ok_or_else(|| failed(format!("no size at scale {scale}")))?;
        let mut pixels = resvg::tiny_skia::Pixmap::new(size.width(), size.height()).ok_or_else(|| failed("too large".into()))?;
        resvg::render(&tree, resvg::tiny_skia::Transform::from_scale(scale, scale), &mut pixels.as_mut());
        pixels.encode_png().map_err(|e| failed(e.to_string()))
    }
}

/// Letters, digits, dots and dashes; anything else becomes a dash.
pub fn file_stem(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect()
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Ten colours that stay apart for colour-blind readers, on light and dark ground.
const COLOURS: [&str; 10] = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#e08214", "#8c6d5a", "#7f7f9f", "#44aa99"];

pub fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

/// An SVG being written.
struct Canvas {
    width: f64,
    height: f64,
    body: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Anchor {
    Start,
    Middle,
    End,
}

impl Canvas {
    fn new(width: f64, height: f64) -> Canvas {
        Canvas { width, height, body: String::new() }
    }

    fn text(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, text: &str) {
        self.styled(x, y, size, anchor, text, r##"class="ink" fill="#1f2328""##);
    }

    fn styled(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, text: &str, style: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ =
            writeln!(self.body, r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" text-anchor="{anchor}" {style}>{}</text>"#, escape(text));
    }

    fn upright(&mut self, x: f64, y: f64, size: f64, text: &str) {
        let style = format!(r##"class="ink" fill="#1f2328" transform="rotate(-90 {x:.1} {y:.1})""##);
        self.styled(x, y, size, Anchor::Middle, text, &style);
    }

    fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64) {
        let _ = writeln!(self.body, r##"<path class="grid" d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" stroke="#d0d7de" fill="none"/>"##);
    }

    fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, fill: &str, title: &str) {
        let _ = writeln!(
            self.body,
            r#"<rect x="{x:.2}" y="{y:.2}" width="{w:.2}" height="{h:.2}" fill="{fill}"><title>{}</title></rect>"#,
            escape(title)
        );
    }

    fn finish(self, label: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w:.0} {h:.0}\" width=\"{w:.0}\" height=\"{h:.0}\" font-family=\"DejaVu Sans, system-ui, sans-serif\" role=\"img\" aria-label=\"{}\">\n<rect class=\"ground\" width=\"{w:.0}\" height=\"{h:.0}\" fill=\"#ffffff\"/>\n{}</svg>\n",
            escape(label),
            self.body,
            w = self.width,
            h = self.height
        )
    }
}

/// Round numbers from `low` to `high`, about `count` of them.
fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let span = (high - low).max(1e-12);
    let raw = span / count.max(1) as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].iter().map(|m| m * power).find(|s| *s >= raw * 0.8).unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    (first..).map(|i| i as f64 * step).take_while(|t| *t <= high + step * 1e-6).collect()
}

fn label(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    if value.abs() >= 1e5 || value.abs() < 1e-3 {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// A line of a chart: points, and an interval around them where there is one.
#[derive(Debug, Clone, Default)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// (low, high) at each point.
    pub band: Vec<(f64, f64)>,
}

/// Lines over a common axis. Points that are not finite break a line.
pub struct Lines<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    pub series: &'a [Series],
    /// Draw the points too (few of them).
    pub dots: bool,
}

impl Lines<'_> {
    pub fn draw(&self) -> String {
        let (width, left, right, top, plot) = (560.0, 62.0, 14.0, 34.0, 250.0);
        let finite = |v: &f64| v.is_finite();
        let xs: Vec<f64> = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).filter(finite).collect();
        let ys: Vec<f64> = self
            .series
            .iter()
            .flat_map(|s| s.points.iter().map(|p| p.1).chain(s.band.iter().flat_map(|b| [b.0, b.1])))
            .filter(finite)
            .collect();
        let (x0, x1) = range(&xs, 0.0);
        let (y0, y1) = range(&ys, 0.05);
        let px = |x: f64| left + (x - x0) / (x1 - x0) * (width - left - right);
        let py = |y: f64| top + plot - (y - y0) / (y1 - y0) * plot;
        let rows = self.series.len().div_ceil(3);
        let mut c = Canvas::new(width, top + plot + 44.0 + 18.0 * rows as f64);
        c.styled(left, 20.0, 14.0, Anchor::Start, self.title, r##"class="ink" fill="#1f2328" font-weight="bold""##);
        for y in ticks(y0, y1, 5) {
            c.line(left, py(y), width - right, py(y));
            c.text(left - 6.0, py(y) + 4.0, 11.0, Anchor::End, &label(y));
        }
        // Epochs are whole: no tick between them.
        let whole = xs.iter().all(|x| x.fract() == 0.0);
        for x in ticks(x0, x1, 7).into_iter().filter(|x| !whole || x.fract() == 0.0) {
            c.line(px(x), top + plot, px(x), top + plot + 4.0);
            c.text(px(x), top + plot + 17.0, 11.0, Anchor::Middle, &label(x));
        }
        c.text((left + width - right) / 2.0, top + plot + 34.0, 12.0, Anchor::Middle, self.x);
        c.upright(14.0, top + plot / 2.0, 12.0, self.y);
        for (i, series) in self.series.iter().enumerate() {
            let colour = colour(i);
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
                let _ = writeln!(
                    c.body,
                    r#"<path d="M{}Z" fill="{colour}" fill-opacity="0.15"/>"#,
                    up.chain(down).collect::<Vec<_>>().join("L")
                );
            }
            let mut path = String::new();
            let mut pen = 'M';
            for (x, y) in &series.points {
                if !(x.is_finite() && y.is_finite()) {
                    pen = 'M';
                    continue;
                }
                let _ = write!(path, "{pen}{:.1} {:.1}", px(*x), py(*y));
                pen = 'L';
                if self.dots || series.points.len() == 1 {
                    let _ = writeln!(c.body, r#"<circle cx="{:.1}" cy="{:.1}" r="3" fill="{colour}"/>"#, px(*x), py(*y));
                }
            }
            let _ = writeln!(c.body, r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>"#);
            let (lx, ly) = (left + (i % 3) as f64 * 165.0, top + plot + 54.0 + 18.0 * (i / 3) as f64);
            let _ = writeln!(c.body, r#"<path d="M{lx:.1} {:.1}h16" stroke="{colour}" stroke-width="3"/>"#, ly - 4.0);
            c.text(lx + 21.0, ly, 11.0, Anchor::Start, &cut(&series.name, 24));
        }
        c.finish(self.title)
    }
}

fn cut(text: &str, count: usize) -> String {
    if text.chars().count() <= count { text.to_string() } else { text.chars().take(count - 1).collect::<String>() + "…" }
}

/// From the least to the greatest, widened by a share of the span; something where there is nothing.
fn range(values: &[f64], margin: f64) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !low.is_finite() {
        return (0.0, 1.0);
    }
    let span = if high > low { high - low } else { low.abs().max(1.0) * 0.1 };
    let pad = if high > low { span * margin } else { span };
    (low - pad, high + pad)
}

/// A matrix as coloured cells.
pub struct Heat<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    pub columns: &'a [String],
    pub rows: &'a [String],
    /// [row][column]; not finite is left blank.
    pub values: &'a [Vec<f64>],
    /// Where the colours start and end; the data's own range for none.
    pub limits: Option<(f64, f64)>,
    pub decimals: usize,
}

/// Cells from this side on hold their number.
const LETTERED: f64 = 30.0;

impl Heat<'_> {
    pub fn draw(&self) -> String {
        let (nr, nc) = (self.rows.len(), self.columns.len());
        let cell = (460.0 / nc.max(nr).max(1) as f64).clamp(3.0, 54.0);
        let letters = |names: &[String]| names.iter().map(|n| n.chars().count()).max().unwrap_or(0).min(18) as f64;
        // Names only where there is room for them.
        let named = cell >= 11.0;
        let (left, head) = if named { (letters(self.rows) * 6.6 + 34.0, letters(self.columns) * 6.6 + 14.0) } else { (40.0, 12.0) };
        let top = 30.0 + head;
        let width = (left + cell * nc as f64 + 20.0).max(self.title.chars().count() as f64 * 8.2 + 20.0);
        let mut c = Canvas::new(width, top + cell * nr as f64 + 34.0);
        let all: Vec<f64> = self.values.iter().flatten().copied().filter(|v| v.is_finite()).collect();
        let (low, high) = self.limits.unwrap_or_else(|| range(&all, 0.0));
        c.styled(10.0, 20.0, 14.0, Anchor::Start, self.title, r##"class="ink" fill="#1f2328" font-weight="bold""##);
        // One ground for the lowest colour: most cells of a large confusion matrix are 0 and need none of their own.
        let grounded = cell < LETTERED && all.len() == nr * nc;
        if grounded {
            c.rect(left, top, cell * nc as f64, cell * nr as f64, &heat_colour(0.0), "");
        }
        for (r, row) in self.values.iter().enumerate() {
            let y = top + cell * r as f64;
            if named {
                c.text(left - 6.0, y + cell / 2.0 + 4.0, 11.0, Anchor::End, &cut(&self.rows[r], 18));
            }
            for (k, &value) in row.iter().enumerate().filter(|(_, v)| v.is_finite()) {
                let x = left + cell * k as f64;
                let part = ((value - low) / (high - low)).clamp(0.0, 1.0);
                if part == 0.0 && grounded {
                    continue;
                }
                let title = format!("{} / {}: {value:.d$}", self.rows[r], self.columns[k], d = self.decimals);
                c.rect(x, y, cell, cell, &heat_colour(part), &title);
                if cell >= LETTERED {
                    let ink = if part > 0.55 { "#ffffff" } else { "#1f2328" };
                    c.styled(
                        x + cell / 2.0,
                        y + cell / 2.0 + 4.0,
                        11.0,
                        Anchor::Middle,
                        &format!("{value:.d$}", d = self.decimals),
                        &format!("fill=\"{ink}\""),
                    );
                }
            }
        }
        if named {
            for (k, name) in self.columns.iter().enumerate() {
                let (x, y) = (left + cell * (k as f64 + 0.5) + 4.0, top - 6.0);
                c.styled(
                    x,
                    y,
                    11.0,
                    Anchor::Start,
                    &cut(name, 18),
                    &format!(r##"class="ink" fill="#1f2328" transform="rotate(-90 {x:.1} {y:.1})""##),
                );
            }
        }
        c.text(left + cell * nc as f64 / 2.0, top + cell * nr as f64 + 20.0, 12.0, Anchor::Middle, self.x);
        c.upright(14.0, top + cell * nr as f64 / 2.0, 12.0, self.y);
        c.finish(self.title)
    }
}

/// From near white over blue to near black (0 to 1), readable in grey too.
fn heat_colour(part: f64) -> String {
    const STOPS: [[f64; 3]; 4] = [[244.0, 247.0, 251.0], [143.0, 190.0, 220.0], [43.0, 110.0, 170.0], [12.0, 32.0, 76.0]];
    let at = part * 3.0;
    let (i, f) = ((at as usize).min(2), at - (at as usize).min(2) as f64);
    let mix = |k: usize| (STOPS[i][k] + (STOPS[i + 1][k] - STOPS[i][k]) * f).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mix(0), mix(1), mix(2))
}

/// A value with a thick and a thin interval, of two kinds.
#[derive(Debug, Clone, Copy)]
pub struct Whisker {
    pub value: f64,
    pub thick: Option<(f64, f64)>,
    pub thin: Option<(f64, f64)>,
}

/// Values with their intervals, in rows that share an axis; zero is marked.
pub struct Whiskers<'a> {
    pub title: &'a str,
    pub x: &'a str,
    /// A colour each.
    pub series: &'a [String],
    /// The number of the first one's colour: what other figures show beside these keeps its own.
    pub first_colour: usize,
    /// A name, and the value of each series; none where there is none.
    pub rows: &'a [(String, Vec<Option<Whisker>>)],
}

impl Whiskers<'_> {
    pub fn draw(&self) -> String {
        let letters = self.rows.iter().map(|r| r.0.chars().count()).max().unwrap_or(0);
        let (left, right, top, each) = (letters as f64 * 6.6 + 20.0, 16.0, 34.0, 11.0);
        let width = left + 500.0;
        let height = |row: &(String, Vec<Option<Whisker>>)| 12.0 + each * row.1.len() as f64;
        let plot: f64 = self.rows.iter().map(height).sum();
        let ends =
            |w: &Whisker| [Some((w.value, w.value)), w.thick, w.thin].into_iter().flatten().flat_map(|(a, b)| [a, b]).collect::<Vec<_>>();
        let all: Vec<f64> =
            self.rows.iter().flat_map(|r| r.1.iter().flatten().flat_map(ends)).chain([0.0]).filter(|v| v.is_finite()).collect();
        let (x0, x1) = range(&all, 0.04);
        let px = |x: f64| left + (x - x0) / (x1 - x0) * (width - left - right);
        let places = legend(self.series, width - 30.0);
        let lines = places.last().map_or(0, |p| p.1);
        let mut c = Canvas::new(width, top + plot + 66.0 + 18.0 * lines as f64);
        c.styled(10.0, 20.0, 14.0, Anchor::Start, self.title, r##"class="ink" fill="#1f2328" font-weight="bold""##);
        for x in ticks(x0, x1, 8) {
            c.line(px(x), top, px(x), top + plot);
            c.text(px(x), top + plot + 16.0, 11.0, Anchor::Middle, &label(x));
        }
        let _ = writeln!(c.body, r##"<path d="M{x:.1} {top:.1}V{:.1}" stroke="#7f7f9f" stroke-width="1.5"/>"##, top + plot, x = px(0.0));
        let mut y = top;
        for row in self.rows {
            c.text(left - 10.0, y + height(row) / 2.0 + 4.0, 11.0, Anchor::End, &row.0);
            for (i, whisker) in row.1.iter().enumerate() {
                let at = y + 6.0 + each * (i as f64 + 0.5);
                let Some(w) = whisker else { continue };
                for (interval, stroke) in [(w.thin, 1.2), (w.thick, 3.5)] {
                    if let Some((low, high)) = interval {
                        let _ = writeln!(
                            c.body,
                            r#"<path d="M{:.1} {at:.1}H{:.1}" stroke="{}" stroke-width="{stroke}"/>"#,
                            px(low),
                            px(high),
                            colour(self.first_colour + i)
                        );
                    }
                }
                let _ = writeln!(
                    c.body,
                    r#"<circle cx="{:.1}" cy="{at:.1}" r="4" fill="{}"><title>{:+.2}</title></circle>"#,
                    px(w.value),
                    colour(self.first_colour + i),
                    w.value
                );
            }
            y += height(row);
        }
        c.text((left + width - right) / 2.0, top + plot + 34.0, 12.0, Anchor::Middle, self.x);
        for (i, (name, (x, line))) in self.series.iter().zip(places).enumerate() {
            let (lx, ly) = (20.0 + x, top + plot + 56.0 + 18.0 * line as f64);
            let _ = writeln!(c.body, r#"<circle cx="{lx:.1}" cy="{:.1}" r="4" fill="{}"/>"#, ly - 4.0, colour(self.first_colour + i));
            c.text(lx + 9.0, ly, 11.0, Anchor::Start, name);
        }
        c.finish(self.title)
    }
}

/// Where the names of a legend go: from the left, and on which line.
fn legend(names: &[String], width: f64) -> Vec<(f64, usize)> {
    let (mut x, mut line) = (0.0, 0);
    let mut places = vec![];
    for name in names {
        let own = name.chars().count() as f64 * 6.6 + 32.0;
        if x > 0.0 && x + own > width {
            (x, line) = (0.0, line + 1);
        }
        places.push((x, line));
        x += own;
    }
    places
}

/// One map of a `Points` figure.
pub struct Panel {
    pub title: String,
    /// Printed under the title: how far the map may be believed.
    pub note: String,
    pub points: Vec<[f64; 2]>,
}

/// Maps of the same points side by side, coloured by class.
pub struct Points<'a> {
    pub title: &'a str,
    pub panels: &'a [Panel],
    /// The class of each point.
    pub labels: &'a [i64],
    pub classes: &'a [String],
}

/// Up to ten classes have a colour each; more of them have a colour and one of five shapes, told apart in the legend.
fn marker(class: usize, count: usize) -> (String, &'static str) {
    if count <= COLOURS.len() {
        return (COLOURS[class].to_string(), "m-1.6 0a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0z");
    }
    const SHAPES: [&str; 5] = [
        "m-1.7 0a1.7 1.7 0 1 0 3.4 0a1.7 1.7 0 1 0 -3.4 0z",
        "m-1.6 -1.6h3.2v3.2h-3.2z",
        "m0 -2.1l2 3.5h-4z",
        "m0 -2.3l2 2.3l-2 2.3l-2 -2.3z",
        "m-2.1 -.6h1.5v-1.5h1.2v1.5h1.5v1.2h-1.5v1.5h-1.2v-1.5h-1.5z",
    ];
    let hues = count.div_ceil(SHAPES.len());
    let (hue, shape) = (class % hues, class / hues);
    let colour = hsl(hue as f64 / hues as f64 * 360.0, 0.62, if hue % 2 == 0 { 0.42 } else { 0.58 });
    (colour, SHAPES[shape.min(SHAPES.len() - 1)])
}

fn hsl(h: f64, s: f64, l: f64) -> String {
    let a = s * l.min(1.0 - l);
    let f = |n: f64| {
        let k = (n + h / 30.0) % 12.0;
        ((l - a * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0)) * 255.0).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", f(0.0), f(8.0), f(4.0))
}

impl Points<'_> {
    pub fn draw(&self) -> String {
        let (side, gap, columns) = (380.0, 18.0, self.panels.len().clamp(1, 2));
        let width = gap + columns as f64 * (side + gap);
        let rows = self.panels.len().div_ceil(columns);
        let top = 34.0;
        let panel_height = side + 48.0;
        // As many legend columns as the longest name leaves room for.
        let longest = self.classes.iter().map(|n| n.chars().count()).max().unwrap_or(0).min(22) as f64;
        let legend_columns = ((width - 2.0 * gap) / (longest * 6.0 + 24.0)).floor().clamp(1.0, 8.0) as usize;
        let legend_rows = self.classes.len().div_ceil(legend_columns);
        let legend_top = top + rows as f64 * panel_height + 10.0;
        let mut c = Canvas::new(width, legend_top + legend_rows as f64 * 14.0 + 12.0);
        c.styled(gap, 22.0, 14.0, Anchor::Start, self.title, r##"class="ink" fill="#1f2328" font-weight="bold""##);
        for (i, panel) in self.panels.iter().enumerate() {
            let (x, y) = (gap + (i % columns) as f64 * (side + gap), top + (i / columns) as f64 * panel_height);
            self.panel(&mut c, panel, x, y, side);
        }
        for (k, name) in self.classes.iter().enumerate() {
            let (x, y) = (
                gap + (k / legend_rows) as f64 * (width - 2.0 * gap) / legend_columns as f64,
                legend_top + (k % legend_rows) as f64 * 14.0 + 8.0,
            );
            let (colour, shape) = marker(k, self.classes.len());
            let _ = writeln!(
                c.body,
                r#"<path transform="translate({:.1} {:.1}) scale(2)" d="M0 0{shape}" fill="{colour}"/>"#,
                x + 5.0,
                y - 4.0
            );
            c.text(x + 14.0, y, 10.0, Anchor::Start, &cut(name, 22));
        }
        c.finish(self.title)
    }

    fn panel(&self, c: &mut Canvas, panel: &Panel, x: f64, y: f64, side: f64) {
        c.text(x, y + 14.0, 12.5, Anchor::Start, &cut(&panel.title, 54));
        c.text(x, y + 30.0, 11.0, Anchor::Start, &panel.note);
        let top = y + 38.0;
        let _ = writeln!(
            c.body,
            r##"<rect class="grid" x="{x:.1}" y="{top:.1}" width="{side}" height="{side}" fill="none" stroke="#d0d7de"/>"##
        );
        // One scale for both axes: distances in a map mean the same in every direction.
        let (x0, x1) = range(&panel.points.iter().map(|p| p[0]).collect::<Vec<_>>(), 0.03);
        let (y0, y1) = range(&panel.points.iter().map(|p| p[1]).collect::<Vec<_>>(), 0.03);
        let span = (x1 - x0).max(y1 - y0);
        let (cx, cy) = ((x0 + x1) / 2.0, (y0 + y1) / 2.0);
        let place = |p: &[f64; 2]| (x + side * (0.5 + (p[0] - cx) / span), top + side * (0.5 - (p[1] - cy) / span));
        for class in 0..self.classes.len() {
            let (colour, shape) = marker(class, self.classes.len());
            let mut path = String::new();
            for (p, _) in panel.points.iter().zip(self.labels).filter(|(_, l)| **l as usize == class) {
                let (px, py) = place(p);
                let _ = write!(path, "M{px:.1} {py:.1}{shape}");
            }
            if !path.is_empty() {
                let _ = writeln!(
                    c.body,
                    r#"<path d="{path}" fill="{colour}" fill-opacity="0.8"><title>{}</title></path>"#,
                    escape(&self.classes[class])
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 100.0, 5), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        let found = ticks(0.12, 0.38, 5);
        assert!(found.iter().zip([0.15, 0.2, 0.25, 0.3, 0.35]).all(|(a, b)| (a - b).abs() < 1e-12) && found.len() == 5, "{found:?}");
        assert_eq!(label(0.25), "0.25");
        assert_eq!(label(1.0), "1");
    }

    #[test]
    fn figures_hold_their_text_escaped_and_become_png() {
        let series = [Series { name: "a < b & c".into(), points: vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)], band: vec![] }];
        let svg = Lines { title: "T", x: "epoch", y: "%", series: &series, dots: true }.draw();
        assert!(svg.contains("a &lt; b &amp; c") && !svg.contains("NaN"), "{svg}");
        let figure = Figure::new("x/y", "", svg);
        assert!(!figure.is_wide());
        let png = figure.png(1.0).unwrap();
        assert_eq!(&png[1..4], b"PNG");
    }
}
