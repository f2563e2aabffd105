//! Tables: rows of cells as Markdown, HTML, CSV and plain text, and measurements grouped into mean and standard deviation (polars).

use polars::prelude::*;

use crate::error::{Error, Result};
use crate::system::output;

/// One value of a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    /// Nothing to say.
    Empty,
    /// Words.
    Text(String),
    /// A whole number.
    Count(i64),
    /// Shown with this many decimals.
    Score(f64, usize),
    /// Mean and standard deviation of n values; shown with two decimals.
    Spread {
        /// Of the values.
        mean: f64,
        /// Over n - 1; none for one value.
        std: Option<f64>,
        /// How many values; 0 where somebody else took the mean and does not say.
        n: usize,
    },
    /// A number with what belongs to it: its interval, the epoch it is of.
    Noted {
        /// What a column is sorted by.
        value: f64,
        /// The number as it is printed.
        shown: String,
        /// What stands after it, in less weight.
        note: String,
    },
}

impl Cell {
    /// Words.
    pub fn text(text: impl Into<String>) -> Cell {
        Cell::Text(text.into())
    }

    /// A score with two decimals, or nothing.
    pub fn score(value: Option<f64>) -> Cell {
        value.filter(|v| v.is_finite()).map_or(Cell::Empty, |v| Cell::Score(v, 2))
    }

    /// A difference in points with its sign, and its interval where there is one.
    pub fn difference(value: f64, interval: Option<(f64, f64)>) -> Cell {
        let note = interval.map_or(String::new(), |(low, high)| format!("[{}, {}]", signed(low), signed(high)));
        Cell::Noted { value, shown: signed(value), note }
    }

    /// The number a column is sorted by.
    pub fn number(&self) -> Option<f64> {
        match self {
            Cell::Empty | Cell::Text(_) => None,
            Cell::Count(n) => Some(*n as f64),
            Cell::Score(value, _) => Some(*value),
            Cell::Spread { mean, .. } => Some(*mean),
            Cell::Noted { value, .. } => Some(*value),
        }
    }

    /// The cell as it is printed.
    pub fn shown(&self) -> String {
        match self {
            Cell::Empty => String::new(),
            Cell::Text(text) => text.clone(),
            Cell::Count(n) => n.to_string(),
            Cell::Score(value, decimals) => format!("{value:.decimals$}"),
            // Of somebody else's, who does not say how many.
            Cell::Spread { mean, std: Some(std), n: 0 } => format!("{mean:.2} ± {std:.2}"),
            Cell::Spread { mean, std: Some(std), n } => format!("{mean:.2} ± {std:.2} (n = {n})"),
            Cell::Spread { mean, std: None, .. } => format!("{mean:.2}"),
            Cell::Noted { shown, note, .. } if note.is_empty() => shown.clone(),
            Cell::Noted { shown, note, .. } => format!("{shown} {note}"),
        }
    }
}

/// Two decimals with the sign; nothing lost and nothing gained is +0.00.
pub(crate) fn signed(value: f64) -> String {
    format!("{value:+.2}").replace("-0.00", "+0.00")
}

/// Rows of cells under the names of their columns.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// What stands above it; may be empty.
    pub name: String,
    /// The names of the columns.
    pub columns: Vec<String>,
    /// As many cells as columns in each.
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table without rows.
    pub fn new(name: impl Into<String>, columns: &[&str]) -> Table {
        Table { name: name.into(), columns: columns.iter().map(|c| c.to_string()).collect(), rows: vec![] }
    }

    /// Adds a row with a cell for each column.
    pub fn push(&mut self, row: Vec<Cell>) {
        assert_eq!(row.len(), self.columns.len(), "a cell for each column of table {}", self.name);
        self.rows.push(row);
    }

    /// The table without the columns that say nothing in any row.
    pub fn without_empty_columns(self) -> Table {
        let says = |c: usize| self.rows.iter().any(|r| !r[c].shown().is_empty());
        let kept: Vec<usize> = (0..self.columns.len()).filter(|&c| says(c)).collect();
        Table {
            columns: kept.iter().map(|&c| self.columns[c].clone()).collect(),
            rows: self.rows.iter().map(|r| kept.iter().map(|&c| r[c].clone()).collect()).collect(),
            name: self.name,
        }
    }

    /// Of how many values each mean of a column is, where all are of as many; then the head can say it once.
    pub(crate) fn same_n(&self, column: usize) -> Option<usize> {
        let mut counts = self.rows.iter().filter_map(|r| match &r[column] {
            Cell::Spread { n, std: Some(_), .. } if *n > 0 => Some(*n),
            _ => None,
        });
        let first = counts.next()?;
        counts.all(|n| n == first).then_some(first)
    }

    /// Is this a column of numbers? Then it is set flush right.
    pub fn numeric(&self, column: usize) -> bool {
        self.rows.iter().any(|r| r[column].number().is_some())
    }

    /// The table as Markdown.
    pub fn markdown(&self) -> String {
        let escape = |s: &str| markdown(s).replace('|', "\\|");
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut out = line(self.columns.iter().map(|c| escape(c)).collect());
        out += &line((0..self.columns.len()).map(|c| if self.numeric(c) { "---:" } else { "---" }.to_string()).collect());
        out.extend(self.rows.iter().map(|row| line(row.iter().map(|cell| escape(&cell.shown())).collect())));
        out
    }

    /// Aligned columns for a terminal: no wider than it is, as far as words allow.
    pub fn plain(&self) -> String {
        self.no_wider_than(output::width().unwrap_or(usize::MAX))
    }

    /// Aligned columns; where they are too wide together, cells of the widest take several lines.
    fn no_wider_than(&self, most: usize) -> String {
        let rows: Vec<Vec<String>> =
            std::iter::once(self.columns.clone()).chain(self.rows.iter().map(|r| r.iter().map(Cell::shown).collect())).collect();
        let count = |text: &str| text.chars().count();
        let widest = |c: usize| rows.iter().map(|r| count(&r[c])).max().unwrap_or(0);
        let word = |c: usize| rows.iter().flat_map(|r| words(&r[c])).map(|w| count(w.trim_end())).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..self.columns.len()).map(widest).collect();
        let least: Vec<usize> = (0..self.columns.len()).map(word).collect();
        while widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1) > most {
            let narrower = (0..widths.len()).filter(|&c| widths[c] > least[c]).max_by_key(|&c| widths[c]);
            let Some(c) = narrower else { break };
            widths[c] -= 1;
        }
        let pad = |c: usize, text: &str| {
            if self.numeric(c) { format!("{text:>w$}", w = widths[c]) } else { format!("{text:<w$}", w = widths[c]) }
        };
        let mut out = String::new();
        for row in &rows {
            let cells: Vec<Vec<String>> = row.iter().zip(&widths).map(|(text, width)| folded(text, *width)).collect();
            for line in 0..cells.iter().map(Vec::len).max().unwrap_or(0) {
                let shown = cells.iter().enumerate().map(|(c, lines)| pad(c, lines.get(line).map_or("", String::as_str)));
                out += &format!("{}\n", shown.collect::<Vec<_>>().join("  ").trim_end());
            }
        }
        out
    }

    /// The table as CSV, numbers with all their digits.
    pub fn csv(&self) -> Result<String> {
        let failed = |e: csv::Error| Error::failed(format!("table {}: {e}", self.name));
        let mut out = csv::Writer::from_writer(vec![]);
        out.write_record(&self.columns).map_err(failed)?;
        for row in &self.rows {
            out.write_record(row.iter().map(|cell| match cell {
                Cell::Score(value, _) => value.to_string(),
                other => other.shown(),
            }))
            .map_err(failed)?;
        }
        let bytes = out.into_inner().map_err(|e| Error::failed(format!("table {}: {e}", self.name)))?;
        Ok(String::from_utf8(bytes).expect("cells are text"))
    }
}

/// The pieces between which a line may end: after a space, and inside names after `/` and `-`.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive([' ', '/', '-'])
}

/// The text in lines of at most `width` letters; a longer word stays whole.
fn folded(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words(text) {
        let line = lines.last_mut().expect("never empty");
        if !line.is_empty() && line.chars().count() + word.trim_end().chars().count() > width {
            lines.push(word.to_string());
        } else {
            line.push_str(word);
        }
    }
    lines.iter().map(|line| line.trim_end().to_string()).collect()
}

/// Text as it stands in Markdown: no HTML, no links or pictures of its own, one line.
pub(crate) fn markdown(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace("](", "]\\(").replace(['\n', '\r'], " ")
}

/// Items with equal keys together (polars), in the order in which their keys first occur. Every item has equally many keys.
pub fn together<T: Copy>(items: &[T], key: impl Fn(T) -> Vec<String>) -> Result<Vec<Vec<T>>> {
    let keys: Vec<Vec<String>> = items.iter().map(|item| key(*item)).collect();
    let Some(width) = keys.first().map(Vec::len) else { return Ok(vec![]) };
    let names: Vec<String> = (0..width).map(|k| format!("key{k}")).collect();
    let column =
        |(k, name): (usize, &String)| Column::new(name.as_str().into(), keys.iter().map(|own| own[k].as_str()).collect::<Vec<_>>());
    let found = || -> PolarsResult<Vec<Vec<T>>> {
        let frame = DataFrame::new(items.len(), names.iter().enumerate().map(column).collect())?;
        let groups = frame.group_by_stable(names.iter().map(String::as_str))?;
        let rows = |group: GroupsIndicator| -> Vec<T> {
            match group {
                GroupsIndicator::Idx((_, rows)) => rows.iter().map(|&row| items[row as usize]).collect(),
                GroupsIndicator::Slice([first, count]) => items[first as usize..(first + count) as usize].to_vec(),
            }
        };
        Ok(groups.get_groups().iter().map(rows).collect())
    };
    found().map_err(|e| Error::failed(format!("cannot group the measurements: {e}")))
}

/// Values that belong together, as mean and standard deviation (over n - 1).
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// What they have in common.
    pub keys: Vec<String>,
    /// Of the values.
    pub mean: f64,
    /// None for one value.
    pub std: Option<f64>,
    /// How many values.
    pub n: usize,
}

impl Group {
    /// Mean and standard deviation of at least one value.
    fn of(keys: Vec<String>, values: Vec<f64>) -> Group {
        let values = Float64Chunked::from_vec("value".into(), values);
        let std = if values.len() > 1 { values.std(1) } else { None };
        Group { keys, mean: values.mean().unwrap_or(f64::NAN), std, n: values.len() }
    }

    /// The group as a cell.
    pub fn cell(&self) -> Cell {
        Cell::Spread { mean: self.mean, std: self.std, n: self.n }
    }
}

/// Groups values by their keys, in the order the keys first occur.
pub fn group(measurements: &[(Vec<String>, f64)]) -> Result<Vec<Group>> {
    let all: Vec<&(Vec<String>, f64)> = measurements.iter().collect();
    let groups = together(&all, |(keys, _)| keys.clone())?;
    Ok(groups.iter().map(|own| Group::of(own[0].0.clone(), own.iter().map(|(_, value)| *value).collect())).collect())
}

/// Mean and standard deviation of values, as a cell; empty for none.
pub fn spread(values: &[f64]) -> Cell {
    if values.is_empty() { Cell::Empty } else { Group::of(vec![], values.to_vec()).cell() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_mean_and_sample_deviation() {
        let rows: Vec<(Vec<String>, f64)> =
            [("b", 1.0), ("a", 70.0), ("b", 2.0), ("b", 4.0)].iter().map(|(k, v)| (vec![k.to_string()], *v)).collect();
        let groups = group(&rows).unwrap();
        assert_eq!(groups[0].keys, ["b"]);
        // statistics.stdev([1, 2, 4]) = 1.5275252316519468
        assert!(
            (groups[0].mean - 7.0 / 3.0).abs() < 1e-12 && (groups[0].std.unwrap() - 1.5275252316519468).abs() < 1e-12 && groups[0].n == 3
        );
        assert_eq!(groups[1], Group { keys: vec!["a".into()], mean: 70.0, std: None, n: 1 });
    }

    #[test]
    fn a_table_is_no_wider_than_the_terminal_and_loses_no_word() {
        let mut table = Table::new("", &["test top-1 (%)", "epoch chosen on held-out images", "best"]);
        table.push(vec![Cell::text("network 0"), Cell::Score(6.41, 2), Cell::text("6.56 (stage 2, epoch 20)")]);
        let wide = "test top-1 (%)  epoch chosen on held-out images  best\n\
                    network 0                                  6.41  6.56 (stage 2, epoch 20)\n";
        assert_eq!((table.no_wider_than(usize::MAX), table.no_wider_than(73)), (wide.to_string(), wide.to_string()));
        for most in [30, 40, 50, 60, 72] {
            let narrow = table.no_wider_than(most);
            assert!(narrow.lines().all(|line| line.chars().count() <= most), "{most}:\n{narrow}");
            let letters = |text: &str| {
                let mut all: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
                all.sort_unstable();
                all
            };
            assert_eq!(letters(&narrow), letters(wide), "{most}:\n{narrow}");
        }
        // Where words alone are wider, they stay whole.
        assert!(table.no_wider_than(5).contains("network"));
    }

    #[test]
    fn pipes_do_not_break_rows_and_csv_keeps_all_digits() {
        let mut table = Table::new("t", &["method|x", "top-1"]);
        for (name, value) in [("a", 1.0), ("b|c", 3.0), ("d", 2.0)] {
            table.push(vec![Cell::text(name), Cell::Score(value, 2)]);
        }
        assert_eq!(table.markdown(), "| method\\|x | top-1 |\n| --- | ---: |\n| a | 1.00 |\n| b\\|c | 3.00 |\n| d | 2.00 |\n");
        assert_eq!(table.csv().unwrap(), "method|x,top-1\na,1\nb|c,3\nd,2\n");
    }
}
