//! Reports: tables and figures gathered under titles, written as Markdown, CSV and one self-contained HTML file.

pub(crate) mod colours;
mod html;
pub(crate) mod map;
pub(crate) mod paper;
pub(crate) mod plot;
pub(crate) mod table;
mod text;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;
pub use colours::Palette;
pub use map::Map;
pub use plot::{Figure, Lines, Series};
use table::markdown;
pub use table::{Cell, Table};

/// A report as it is read from top to bottom.
pub struct Report {
    /// Its heading.
    pub title: String,
    /// One line under the title.
    pub about: String,
    /// What was found, in about three lines: who leads, by how much, how sure that is.
    pub found: Vec<String>,
    /// In the order they are read.
    pub sections: Vec<Section>,
}

/// What stands under one heading.
#[derive(Default)]
pub struct Section {
    /// The heading.
    pub title: String,
    /// In the order they are read.
    pub parts: Vec<Part>,
}

/// What a section is made of.
pub enum Part {
    /// A paragraph.
    Text(String),
    /// A table with at least one row.
    Table(Table),
    /// Figures that are looked at together.
    Figures(Vec<Figure>),
    /// Small pictures of the user's own images, in rows.
    Pictures(Vec<Row>),
    /// Commands, hashes: text to copy.
    Code(String),
}

/// Pictures that belong together.
pub struct Row {
    /// What they have in common.
    pub title: String,
    /// A JPEG each, and what it shows.
    pub pictures: Vec<(Vec<u8>, String)>,
}

impl Section {
    /// A section with nothing in it yet.
    pub fn new(title: impl Into<String>) -> Section {
        Section { title: title.into(), parts: vec![] }
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: impl Into<String>) -> &mut Section {
        self.parts.push(Part::Text(text.into()));
        self
    }

    /// Adds a table; one without rows is left out.
    pub fn table(&mut self, table: Table) -> &mut Section {
        if !table.rows.is_empty() {
            self.parts.push(Part::Table(table));
        }
        self
    }

    /// Adds figures that are looked at together; none are left out.
    pub fn figures(&mut self, figures: Vec<Figure>) -> &mut Section {
        if !figures.is_empty() {
            self.parts.push(Part::Figures(figures));
        }
        self
    }

    /// Adds rows of small pictures.
    pub fn pictures(&mut self, rows: Vec<Row>) -> &mut Section {
        if !rows.is_empty() {
            self.parts.push(Part::Pictures(rows));
        }
        self
    }

    /// Adds text to copy.
    pub fn code(&mut self, text: impl Into<String>) -> &mut Section {
        self.parts.push(Part::Code(text.into()));
        self
    }
}

impl Report {
    /// Adds a section unless nothing is in it.
    pub fn push(&mut self, section: Section) {
        if !section.parts.is_empty() {
            self.sections.push(section);
        }
    }

    fn figures(&self) -> impl Iterator<Item = &Figure> {
        self.sections.iter().flat_map(|s| &s.parts).flat_map(|part| match part {
            Part::Figures(figures) => figures.as_slice(),
            _ => &[],
        })
    }

    /// Writes report.md, report.html, and figures/*.svg with their numbers (*.csv) in `folder`, and says which files there are.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let figures = folder.join("figures");
        fs::create_dir_all(&figures).map_err(Error::io("cannot make", &figures))?;
        let mut written = vec![folder.join("report.html"), folder.join("report.md")];
        files::write(&written[0], html::page(self)?.as_bytes())?;
        files::write(&written[1], self.markdown().as_bytes())?;
        for figure in self.figures() {
            let path = figures.join(format!("{}.svg", figure.name));
            files::write(&path, figure.file().as_bytes())?;
            written.push(path);
            if let Some(numbers) = &figure.numbers {
                let path = figures.join(format!("{}.csv", figure.name));
                files::write(&path, numbers.csv()?.as_bytes())?;
                written.push(path);
            }
        }
        Ok(written)
    }

    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut out = format!("# {}\n\n{}\n", markdown(&self.title), markdown(&self.about));
        if !self.found.is_empty() {
            out += "\n";
            out.extend(self.found.iter().map(|line| format!("- {}\n", markdown(line))));
        }
        for section in &self.sections {
            out += &format!("\n## {}\n", markdown(&section.title));
            for part in &section.parts {
                out += "\n";
                match part {
                    Part::Text(text) => out += &format!("{}\n", markdown(text)),
                    Part::Table(table) => {
                        if !table.name.is_empty() {
                            out += &format!("**{}**\n\n", markdown(&table.name));
                        }
                        out += &table.markdown();
                    }
                    Part::Figures(figures) => {
                        let one = |f: &Figure| {
                            let caption = markdown(&f.caption);
                            let numbers = f.numbers.as_ref().map_or(String::new(), |_| format!(" ([CSV](figures/{}.csv))", f.name));
                            format!("![{caption}](figures/{}.svg)\n\n{caption}{numbers}\n", f.name)
                        };
                        out += &figures.iter().map(one).collect::<Vec<_>>().join("\n");
                    }
                    // They stand in the page alone.
                    Part::Pictures(rows) => {
                        let titles: Vec<String> = rows.iter().map(|row| markdown(&row.title)).collect();
                        out += &format!("Pictures in report.html: {}.\n", titles.join("; "));
                    }
                    Part::Code(text) => {
                        // A fence longer than any run of backticks inside.
                        let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
                        let fence = "`".repeat(longest.max(2) + 1);
                        out += &format!("{fence}\n{}\n{fence}\n", text.trim_end());
                    }
                }
            }
        }
        out
    }
}
