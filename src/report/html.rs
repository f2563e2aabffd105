//! A report as one HTML file: it needs no network and may not use one, light and dark, phone width, tables one can sort and filter, figures
//! and their numbers inline. Style and script are in assets/.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::colours::{DARK, LIGHT};
use super::plot::escape;
use super::table::{Cell, Table};
use super::{Figure, Part, Report, Row};
use crate::error::Result;
use crate::files;

const STYLE: &str = include_str!("assets/page.css");
/// A cell of more letters is a sentence.
const SENTENCE: usize = 28;
const SCRIPT: &str = include_str!("assets/page.js");

/// The page; nothing in it is loaded from elsewhere, and a browser is told to refuse anything that would be.
pub(crate) fn page(report: &Report) -> Result<String> {
    let anchor = |i: usize| format!("s{i}");
    let link = |(i, title): (usize, &str)| format!("<li><a href=\"#{}\">{}</a></li>", anchor(i), escape(title));
    let links: String = report.sections.iter().map(|s| s.title.as_str()).enumerate().map(link).collect();
    let mut body = format!("<h1>{}</h1>\n<p class=\"about\">{}</p>\n", escape(&report.title), prose(&report.about));
    if !report.found.is_empty() {
        let lines: String = report.found.iter().map(|line| format!("<p>{}</p>\n", prose(line))).collect();
        let _ = write!(body, "<div class=\"found\" role=\"note\" aria-label=\"What was found\">\n{lines}</div>\n");
    }
    for (i, section) in report.sections.iter().enumerate() {
        let _ = writeln!(body, "<section id=\"{}\">\n<h2>{}</h2>", anchor(i), escape(&section.title));
        for part in &section.parts {
            body += &match part {
                Part::Text(text) => format!("<p>{}</p>\n", prose(text)),
                Part::Table(t) => table(t, &section.title)?,
                Part::Figures(figures) => group(figures)?,
                Part::Pictures(rows) => rows.iter().map(pictures).collect(),
                Part::Code(text) => format!("<pre tabindex=\"0\">{}</pre>\n", escape(text.trim_end())),
            };
        }
        body += "</section>\n";
    }
    let style = format!(
        "\n:root{{color-scheme:light dark;{}}}\n@media(prefers-color-scheme:dark){{:root{{{}}}}}\n{STYLE}",
        LIGHT.css(),
        DARK.css()
    );
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'",
        hash(SCRIPT),
        hash(&style)
    );
    let title = escape(&report.title);
    // The empty icon keeps browsers from asking for one.
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<a class=\"skip\" href=\"#main\">To the content</a>\n<div class=\"page\">\n<nav aria-label=\"Contents\"><ol>{links}</ol></nav>\n<main id=\"main\">\n{body}</main>\n</div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    ))
}

/// A sentence: what stands between backticks is code, and a number keeps its percent sign beside it.
fn prose(text: &str) -> String {
    let text = escape(text).replace(" %", "\u{a0}%");
    let pieces: Vec<&str> = text.split('`').collect();
    if pieces.len().is_multiple_of(2) {
        return text; // one of them has no partner
    }
    let piece = |(i, piece): (usize, &&str)| if i % 2 == 1 { format!("<code>{piece}</code>") } else { piece.to_string() };
    pieces.iter().enumerate().map(piece).collect()
}

/// How a policy names a text that may stand in the page.
fn hash(text: &str) -> String {
    let hex = files::sha256(text.as_bytes());
    let bytes: Vec<u8> = (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap_or(0)).collect();
    format!("'sha256-{}'", STANDARD.encode(bytes))
}

/// A link that saves a table.
fn csv(table: &Table, name: &str) -> Result<String> {
    let data = STANDARD.encode(table.csv()?);
    let file = escape(&super::plot::file_stem(name));
    Ok(format!("<a class=\"links\" download=\"{file}.csv\" href=\"data:text/csv;charset=utf-8;base64,{data}\">CSV</a>"))
}

fn group(figures: &[Figure]) -> Result<String> {
    let roomy = |f: &Figure| f.is_wide() || f.map.is_some();
    let alone = matches!(figures, [one] if roomy(one));
    let mut out = format!("<div class=\"figures{}\">\n", if alone { " one" } else { "" });
    for f in figures {
        let numbers = f.numbers.as_ref().map(|t| csv(t, &f.name)).transpose()?.unwrap_or_default();
        let caption = format!("<figcaption>{} {numbers}</figcaption>", prose(&f.caption));
        let map = f.map.as_ref().map_or(String::new(), |map| format!(" data-map=\"{}\"", escape(&map.for_page().to_string())));
        let sprite = f.map.as_ref().and_then(|map| map.pictures.as_ref()).map_or(String::new(), |sprite| {
            format!("<img class=\"sprite\" hidden alt=\"\" src=\"data:image/jpeg;base64,{}\">", STANDARD.encode(&sprite.data))
        });
        let class = if roomy(f) { " class=\"roomy\"" } else { "" };
        let _ = writeln!(out, "<figure{class}{map}><div class=\"still\">{}</div>{sprite}{caption}</figure>", picture(f));
    }
    Ok(out + "</div>\n")
}

/// A figure of ours stands in the page itself, so that it follows its colours; one that was read from a file is an image. A map is drawn by
/// the page's script: its picture, which is as large as all the rest, is a file beside the page.
fn picture(figure: &Figure) -> String {
    if figure.map.is_some() {
        return format!("<p>The page's script draws this map. Without it: figures/{}.svg</p>", escape(&figure.name));
    }
    if let Some(narrow) = &figure.narrow {
        return format!("<div class=\"desk\">{}</div><div class=\"phone\">{narrow}</div>", figure.svg);
    }
    if !figure.foreign {
        return figure.svg.clone();
    }
    let data = STANDARD.encode(&figure.svg);
    format!("<img alt=\"{}\" src=\"data:image/svg+xml;base64,{data}\">", escape(&figure.caption))
}

fn pictures(row: &Row) -> String {
    let one = |(jpeg, what): &(Vec<u8>, String)| {
        let what = escape(what);
        format!(
            "<figure><img alt=\"{what}\" src=\"data:image/jpeg;base64,{}\"><figcaption>{what}</figcaption></figure>",
            STANDARD.encode(jpeg)
        )
    };
    format!("<h3>{}</h3>\n<div class=\"shots\">{}</div>\n", escape(&row.title), row.pictures.iter().map(one).collect::<String>())
}

fn table(table: &Table, section: &str) -> Result<String> {
    let class = |c: usize| if table.numeric(c) { " class=\"n\"" } else { "" };
    let same: Vec<Option<usize>> = (0..table.columns.len()).map(|c| table.same_n(c)).collect();
    let head = |(c, name): (usize, &String)| {
        let n = same[c].map_or(String::new(), |n| format!("<small>mean ± std, n = {n}</small>"));
        format!("<th scope=\"col\"{}><button type=\"button\"><span>{}</span>{n}</button></th>", class(c), escape(name))
    };
    let heads: String = table.columns.iter().enumerate().map(head).collect();
    let mut rows = String::new();
    for row in &table.rows {
        rows += "<tr>";
        for (c, cell) in row.iter().enumerate() {
            let value = cell.number().map_or(String::new(), |v| format!(" data-v=\"{v}\""));
            let shown = shown(cell, same[c]);
            let _ = match c {
                0 => write!(rows, "<th scope=\"row\"{value}>{shown}</th>"),
                _ if table.numeric(c) && matches!(cell, Cell::Noted { .. }) => write!(rows, "<td class=\"n b\"{value}>{shown}</td>"),
                // Squeezed to its longest word, a sentence would make a tall row.
                _ if !table.numeric(c) && cell.shown().chars().count() > SENTENCE => write!(rows, "<td class=\"l\">{shown}</td>"),
                _ => write!(rows, "<td{}{value}>{shown}</td>", class(c)),
            };
        }
        rows += "</tr>\n";
    }
    let name = if table.name.is_empty() { section } else { &table.name };
    Ok(format!(
        "<div class=\"table\"><div class=\"bar\"><strong>{}</strong>{}</div>\n<div class=\"wide\" role=\"region\" tabindex=\"0\" aria-label=\"{}\"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div></div>\n",
        escape(&table.name),
        csv(table, name)?,
        escape(name)
    ))
}

/// A cell; how many values its mean is of stands in the head where it does for all.
fn shown(cell: &Cell, same: Option<usize>) -> String {
    match cell {
        Cell::Spread { mean, std: Some(std), .. } if same.is_some() => format!("{mean:.2} <small>± {std:.2}</small>"),
        Cell::Noted { shown, note, .. } => format!("<span class=\"k\">{}</span> <small>{}</small>", escape(shown), escape(note)),
        other => escape(&other.shown()),
    }
}
