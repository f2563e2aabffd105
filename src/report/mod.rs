//! Reports: tables and figures gathered under titles, written as Markdown, CSV and one self-contained HTML file.

pub(crate) mod colours;
mod html;
pub(crate) mod paper;
pub(crate) mod plot;
pub(crate) mod table;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;
pub(crate) use plot::Figure;
pub use table::{Cell, Table};

/// A report as it is read from top to bottom.
pub struct Report {
    /// Its heading.
    pub title: String,
    /// One line under the title.
    pub about: String,
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
    /// Commands, hashes: text to copy.
    Code(String),
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

    /// Writes report.md, report.html and figures/*.svg in `folder`, and says which files there are.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let figures = folder.join("figures");
        fs::create_dir_all(&figures).map_err(Error::io("cannot make", &figures))?;
        let mut written = vec![folder.join("report.html"), folder.join("report.md")];
        files::write(&written[0], html::page(self).as_bytes())?;
        files::write(&written[1], self.markdown().as_bytes())?;
        for figure in self.figures() {
            let path = figures.join(format!("{}.svg", figure.name));
            files::write(&path, figure.svg.as_bytes())?;
            written.push(path);
        }
        Ok(written)
    }

    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut out = format!("# {}\n\n{}\n", self.title, self.about);
        for section in &self.sections {
            out += &format!("\n## {}\n", section.title);
            for part in &section.parts {
                out += "\n";
                match part {
                    Part::Text(text) => out += &format!("{text}\n"),
                    Part::Table(table) => {
                        if !table.name.is_empty() {
                            out += &format!("**{}**\n\n", table.name);
                        }
                        out += &table.markdown();
                    }
                    Part::Figures(figures) => {
                        let each: Vec<String> =
                            figures.iter().map(|f| format!("![{}](figures/{}.svg)\n\n{}\n", f.caption, f.name, f.caption)).collect();
                        out += &each.join("\n");
                    }
                    Part::Code(text) => out += &format!("```\n{}\n```\n", text.trim_end()),
                }
            }
        }
        out
    }
}
