//! A report as one HTML file: no network, light and dark, phone width, sortable tables, figures inline.

use super::colours::{DARK, LIGHT};
use super::plot::escape;
use super::table::Table;
use super::{Part, Report};

const STYLE: &str = r#"
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 16px 64px;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.6rem;margin:0 0 4px}h2{font-size:1.2rem;margin:36px 0 8px;border-bottom:1px solid var(--grid);padding-bottom:4px}
p{margin:8px 0;overflow-wrap:anywhere}.about{color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:4px 14px;margin:12px 0}nav a{color:var(--link);text-decoration:none}nav a:hover{text-decoration:underline}
.wide{overflow-x:auto;margin:12px 0;border:1px solid var(--grid);border-radius:6px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.87rem}
caption{text-align:left;padding:8px 10px;font-weight:600;position:sticky;left:0}
th,td{padding:5px 10px;text-align:left;white-space:nowrap;border-top:1px solid var(--grid)}
th{background:var(--card);cursor:pointer;user-select:none}th:focus-visible{outline:2px solid var(--link);outline-offset:-2px}
th[aria-sort=ascending]::after{content:" \25B2"}th[aria-sort=descending]::after{content:" \25BC"}
.n{text-align:right}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:16px;margin:12px 0}
.figures.one{grid-template-columns:minmax(0,1fr)}
figure{margin:0;border:1px solid var(--grid);border-radius:6px;padding:8px;min-width:0}figure{overflow-x:auto}figure svg{display:block;max-width:100%;height:auto}.figures.one svg{min-width:min(520px,150vw)}
figcaption{color:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
svg .ink{fill:var(--ink)}svg .grid{stroke:var(--grid)}svg .ground{fill:none}
pre{background:var(--card);border:1px solid var(--grid);border-radius:6px;padding:10px;overflow-x:auto;font-size:.8rem;white-space:pre-wrap;overflow-wrap:anywhere}
@media print{nav{display:none}.wide{overflow:visible}}
"#;

/// Sorts by `data-v` (numbers) or by text; a click turns the order round.
const SCRIPT: &str = r#"
document.querySelectorAll('table').forEach(function(t){var hs=t.querySelectorAll('th');hs.forEach(function(h,c){
function go(){var up=h.getAttribute('aria-sort')==='descending';hs.forEach(function(o){o.removeAttribute('aria-sort')});h.setAttribute('aria-sort',up?'ascending':'descending');
var b=t.tBodies[0],rows=Array.from(b.rows);rows.sort(function(x,y){var p=x.cells[c],q=y.cells[c],m=p.dataset.v,n=q.dataset.v,d;
if(m!==undefined&&n!==undefined)d=m-n;else if(m!==undefined)return -1;else if(n!==undefined)return 1;else d=p.textContent.localeCompare(q.textContent);return up?d:-d});
rows.forEach(function(r){b.appendChild(r)})}
h.addEventListener('click',go);h.addEventListener('keydown',function(e){if(e.key==='Enter'||e.key===' '){e.preventDefault();go()}})})});
"#;

/// The page; nothing in it is loaded from elsewhere.
pub(crate) fn page(report: &Report) -> String {
    let anchor = |i: usize| format!("s{i}");
    let links: String =
        report.sections.iter().enumerate().map(|(i, s)| format!("<a href=\"#{}\">{}</a>", anchor(i), escape(&s.title))).collect();
    let mut body = format!("<h1>{}</h1>\n<p class=\"about\">{}</p>\n<nav>{links}</nav>\n", escape(&report.title), escape(&report.about));
    for (i, section) in report.sections.iter().enumerate() {
        body += &format!("<section id=\"{}\">\n<h2>{}</h2>\n", anchor(i), escape(&section.title));
        for part in &section.parts {
            body += &match part {
                Part::Text(text) => format!("<p>{}</p>\n", escape(text)),
                Part::Table(t) => table(t),
                Part::Figures(figures) => {
                    let each: String = figures
                        .iter()
                        .map(|f| format!("<figure>{}<figcaption>{}</figcaption></figure>\n", f.svg, escape(&f.caption)))
                        .collect();
                    format!(
                        "<div class=\"figures{}\">\n{each}</div>\n",
                        match &figures[..] {
                            [one] if one.is_wide() => " one",
                            _ => "",
                        }
                    )
                }
                Part::Code(text) => format!("<pre>{}</pre>\n", escape(text.trim_end())),
            };
        }
        body += "</section>\n";
    }
    // The empty icon keeps browsers from asking for one.
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<link rel=\"icon\" href=\"data:,\">\n<title>{}</title>\n<style>\n:root{{color-scheme:light dark;{}}}\n@media(prefers-color-scheme:dark){{:root{{{}}}}}{STYLE}</style>\n</head>\n<body>\n{body}<script>{SCRIPT}</script>\n</body>\n</html>\n",
        escape(&report.title),
        LIGHT.css(),
        DARK.css()
    )
}

fn table(table: &Table) -> String {
    let class = |c: usize| if table.numeric(c) { " class=\"n\"" } else { "" };
    let head: String = table
        .columns
        .iter()
        .enumerate()
        .map(|(c, name)| format!("<th scope=\"col\" tabindex=\"0\"{}>{}</th>", class(c), escape(name)))
        .collect();
    let mut rows = String::new();
    for row in &table.rows {
        rows += "<tr>";
        for (c, cell) in row.iter().enumerate() {
            let value = cell.number().map_or(String::new(), |v| format!(" data-v=\"{v}\""));
            rows += &format!("<td{}{value}>{}</td>", class(c), escape(&cell.shown()));
        }
        rows += "</tr>\n";
    }
    let caption = if table.name.is_empty() { String::new() } else { format!("<caption>{}</caption>", escape(&table.name)) };
    format!("<div class=\"wide\"><table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n")
}
