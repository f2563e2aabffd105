//! Tables: rows of cells as Markdown, HTML, CSV and plain text, and measurements grouped into mean and standard deviation (polars).

use polars::prelude::*;

use crate::error::{Error, Result};

/// One value of a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    Empty,
    Text(String),
    Count(i64),
    /// Shown with this many decimals.
    Score(f64, usize),
    /// Mean and standard deviation of n values; shown with two decimals.
    Spread {
        mean: f64,
        std: Option<f64>,
        n: usize,
    },
    /// A measurement with its 95 % interval.
    Interval {
        value: f64,
        low: f64,
        high: f64,
    },
}

impl Cell {
    pub fn text(text: impl Into<String>) -> Cell {
        Cell::Text(text.into())
    }

    /// A score with two decimals, or nothing.
    pub fn score(value: Option<f64>) -> Cell {
        value.filter(|v| v.is_finite()).map_or(Cell::Empty, |v| Cell::Score(v, 2))
    }

    /// The number a column is sorted and marked by.
    pub fn number(&self) -> Option<f64> {
        match self {
            Cell::Empty | Cell::Text(_) => None,
            Cell::Count(n) => Some(*n as f64),
            Cell::Score(value, _) | Cell::Interval { value, .. } => Some(*value),
            Cell::Spread { mean, .. } => Some(*mean),
        }
    }

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
            Cell::Interval { value, low, high } => format!("{value:.2} [{low:.2}, {high:.2}]"),
        }
    }
}

/// How the paper marks its tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Best,
    Second,
}

#[derive(Debug, Clone, Default)]
pub struct Table {
    pub name: String,
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Cell>>,
    /// Columns in which the highest value is bold and the second underlined.
    pub marked: Vec<usize>,
}

impl Table {
    pub fn new(name: impl Into<String>, columns: &[&str]) -> Table {
        Table { name: name.into(), columns: columns.iter().map(|c| c.to_string()).collect(), rows: vec![], marked: vec![] }
    }

    pub fn push(&mut self, row: Vec<Cell>) {
        assert_eq!(row.len(), self.columns.len(), "a cell for each column of table {}", self.name);
        self.rows.push(row);
    }

    /// Best and second of the marked columns. Nothing is marked where there is nothing to choose from.
    pub fn mark(&self, row: usize, column: usize) -> Option<Mark> {
        if !self.marked.contains(&column) {
            return None;
        }
        let own = self.rows[row][column].number()?;
        let mut values: Vec<f64> = self.rows.iter().filter_map(|r| r[column].number()).collect();
        values.sort_by(|a, b| b.total_cmp(a));
        values.dedup();
        match values.iter().position(|v| *v == own) {
            Some(0) if values.len() > 1 => Some(Mark::Best),
            Some(1) if values.len() > 2 => Some(Mark::Second),
            _ => None,
        }
    }

    /// The table without the columns that say nothing in any row.
    pub fn without_empty_columns(self) -> Table {
        let says = |c: usize| self.rows.iter().any(|r| !r[c].shown().is_empty());
        let kept: Vec<usize> = (0..self.columns.len()).filter(|&c| says(c)).collect();
        Table {
            columns: kept.iter().map(|&c| self.columns[c].clone()).collect(),
            rows: self.rows.iter().map(|r| kept.iter().map(|&c| r[c].clone()).collect()).collect(),
            marked: self.marked.iter().filter_map(|m| kept.iter().position(|k| k == m)).collect(),
            name: self.name,
        }
    }

    /// Is this a column of numbers? Then it is set flush right.
    pub fn numeric(&self, column: usize) -> bool {
        self.rows.iter().any(|r| r[column].number().is_some())
    }

    pub fn markdown(&self) -> String {
        let escape = |s: &str| s.replace('|', "\\|").replace('\n', " ");
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut out = line(self.columns.iter().map(|c| escape(c)).collect());
        out += &line((0..self.columns.len()).map(|c| if self.numeric(c) { "---:" } else { "---" }.to_string()).collect());
        for (r, row) in self.rows.iter().enumerate() {
            let cell = |(c, cell): (usize, &Cell)| match self.mark(r, c) {
                Some(Mark::Best) => format!("**{}**", escape(&cell.shown())),
                Some(Mark::Second) => format!("<u>{}</u>", escape(&cell.shown())),
                None => escape(&cell.shown()),
            };
            out += &line(row.iter().enumerate().map(cell).collect());
        }
        out
    }

    /// Aligned columns for a terminal.
    pub fn plain(&self) -> String {
        let rows: Vec<Vec<String>> =
            std::iter::once(self.columns.clone()).chain(self.rows.iter().map(|r| r.iter().map(Cell::shown).collect())).collect();
        let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let pad = |(c, text): (usize, &String)| {
            if self.numeric(c) { format!("{text:>w$}", w = widths[c]) } else { format!("{text:<w$}", w = widths[c]) }
        };
        rows.iter().map(|r| format!("{}\n", r.iter().enumerate().map(pad).collect::<Vec<_>>().join("  ").trim_end())).collect()
    }

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

/// Values that belong together, as mean and standard deviation (over n - 1).
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub keys: Vec<String>,
    pub mean: f64,
    pub std: Option<f64>,
    pub n: usize,
}

impl Group {
    pub fn cell(&self) -> Cell {
        Cell::Spread { mean: self.mean, std: self.std, n: self.n }
    }
}

/// Groups measurements by their keys, in the order the keys first occur.
pub fn group(measurements: &[(Vec<String>, f64)]) -> Result<Vec<Group>> {
    let Some(width) = measurements.first().map(|(keys, _)| keys.len()) else { return Ok(vec![]) };
    let failed = |e: PolarsError| Error::failed(format!("cannot group the measurements: {e}"));
    let names: Vec<String> = (0..width).map(|k| format!("key{k}")).collect();
    let mut columns: Vec<Column> = names
        .iter()
        .enumerate()
        .map(|(k, name)| Column::new(name.as_str().into(), measurements.iter().map(|(keys, _)| keys[k].as_str()).collect::<Vec<_>>()))
        .collect();
    columns.push(Column::new("value".into(), measurements.iter().map(|(_, value)| *value).collect::<Vec<_>>()));
    let frame = DataFrame::new(measurements.len(), columns).map_err(failed)?;
    let groups = frame.group_by_stable(names.iter().map(String::as_str)).map_err(failed)?;
    let one = |group: GroupsIndicator| -> PolarsResult<Group> {
        let rows: Vec<IdxSize> = match group {
            GroupsIndicator::Idx((_, rows)) => rows.iter().copied().collect(),
            GroupsIndicator::Slice([first, count]) => (first..first + count).collect(),
        };
        let first = rows[0] as usize;
        let keys = names
            .iter()
            .map(|n| Ok(frame.column(n)?.str()?.get(first).unwrap_or_default().to_string()))
            .collect::<PolarsResult<Vec<_>>>()?;
        let values = frame.column("value")?.f64()?.take(rows.as_slice())?;
        Ok(Group { keys, mean: values.mean().unwrap_or(f64::NAN), std: if rows.len() > 1 { values.std(1) } else { None }, n: rows.len() })
    };
    groups.get_groups().iter().map(|group| one(group).map_err(failed)).collect()
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
    fn best_is_bold_second_underlined_and_pipes_do_not_break_rows() {
        let mut table = Table::new("t", &["method|x", "top-1"]);
        for (name, value) in [("a", 1.0), ("b|c", 3.0), ("d", 2.0)] {
            table.push(vec![Cell::text(name), Cell::Score(value, 2)]);
        }
        table.marked = vec![1];
        assert_eq!(table.markdown(), "| method\\|x | top-1 |\n| --- | ---: |\n| a | 1.00 |\n| b\\|c | **3.00** |\n| d | <u>2.00</u> |\n");
        assert_eq!(table.csv().unwrap(), "method|x,top-1\na,1\nb|c,3\nd,2\n");
    }
}
