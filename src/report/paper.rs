//! The paper's numbers, to print beside ours.

use crate::error::{Error, Result};

/// The paper's tables, compiled in.
const PAPER: &[&str] = &[
    include_str!("../../protocols/paper/cifar100-same.csv"),
    include_str!("../../protocols/paper/cifar100-different.csv"),
    include_str!("../../protocols/paper/cifar100-three.csv"),
    include_str!("../../protocols/paper/imagenet-same.csv"),
    include_str!("../../protocols/paper/imagenet-different.csv"),
    include_str!("../../protocols/paper/imagenet-swin.csv"),
    include_str!("../../protocols/paper/transfer-linear.csv"),
    include_str!("../../protocols/paper/transfer-coco.csv"),
    include_str!("../../protocols/paper/ablation-terms.csv"),
    include_str!("../../protocols/paper/ablation-levels.csv"),
    include_str!("../../protocols/paper/ablation-matching.csv"),
    include_str!("../../protocols/paper/ablation-dim.csv"),
];

/// A row of the paper's tables.
pub struct Printed {
    /// The file's name, for pairs of architectures with the pair.
    pub table: String,
    /// What it was measured on.
    pub dataset: String,
    /// The architecture.
    pub network: String,
    /// 1 or 2 where the table tells two networks apart.
    pub peer: Option<usize>,
    /// How it was trained.
    pub method: String,
    /// In percent.
    pub value: f64,
    /// Over three runs, where the paper says.
    pub std: Option<f64>,
}

/// All rows of accuracies and of mean average precisions. The dataset of the latter says which: `coco box_map`.
pub fn printed() -> Result<Vec<Printed>> {
    let mut rows = vec![];
    for text in PAPER {
        for row in csv::Reader::from_reader(text.as_bytes()).records() {
            let row = row.map_err(|e| Error::failed(format!("the paper's tables: {e}")))?;
            let dataset = match &row[5] {
                "top1" => row[1].to_string(),
                metric @ ("box_map" | "mask_map") => format!("{} {metric}", &row[1]),
                _ => continue,
            };
            if !row[4].is_empty() {
                let number = |text: &str| text.parse().map_err(|_| Error::failed(format!("the paper's tables: `{text}` is no number")));
                rows.push(Printed {
                    table: row[0].into(),
                    dataset,
                    network: row[2].into(),
                    peer: row[3].parse().ok(),
                    method: row[4].into(),
                    value: number(&row[6])?,
                    std: if row[7].is_empty() { None } else { Some(number(&row[7])?) },
                });
            }
        }
    }
    Ok(rows)
}

/// Numbers that the paper gives in its text, as rows of `protocols/paper/NAME.csv`: network, method, metric, value.
pub fn in_text(name: &str) -> Result<Vec<[String; 4]>> {
    let (_, text) = TEXT.iter().find(|(known, _)| *known == name).ok_or_else(|| {
        let known: Vec<&str> = TEXT.iter().map(|(known, _)| *known).collect();
        Error::input(format!("no numbers `{name}` of the paper's text; known: {}", known.join(", ")))
    })?;
    let mut rows = vec![];
    for row in csv::Reader::from_reader(text.as_bytes()).records() {
        let row = row.map_err(|e| Error::failed(format!("the paper's text: {e}")))?;
        let part = row[0].split_once(':').map_or(String::new(), |(_, part)| format!(", {part} of the images"));
        rows.push([format!("{}{part}", &row[2]), row[4].into(), row[5].into(), row[6].into()]);
    }
    Ok(rows)
}

const TEXT: &[(&str, &str)] = &[
    ("text-cost", include_str!("../../protocols/paper/text-cost.csv")),
    ("text-few-shot", include_str!("../../protocols/paper/text-few-shot.csv")),
];

impl Printed {
    /// The cohort of different architectures that the row is of, `resnet32+resnet110`.
    pub fn pair(&self) -> Option<&str> {
        self.table.split_once(':').map(|(_, pair)| pair)
    }

    /// The value as the paper prints it.
    pub fn shown(&self) -> String {
        self.std.map_or(format!("{:.2}", self.value), |s| format!("{:.2} ± {s:.2}", self.value))
    }
}

/// The paper's table a cohort belongs to, by its dataset and architectures.
pub fn table_of(dataset: &str, archs: &[String]) -> Option<String> {
    let same = archs.windows(2).all(|w| w[0] == w[1]);
    // The paper gives transformers a table of their own: whichever networks stand in it belong there.
    let transformers = format!("{dataset}-swin");
    let among_them = || printed().is_ok_and(|rows| rows.iter().any(|row| row.table == transformers && row.network == archs[0]));
    match (dataset, archs.len(), same) {
        ("cifar100" | "imagenet", 1 | 2, true) if among_them() => Some(transformers),
        ("cifar100" | "imagenet", 1 | 2, true) => Some(format!("{dataset}-same")),
        ("cifar100", 3, true) => Some("cifar100-three".into()),
        ("cifar100" | "imagenet", 2, false) => Some(format!("{dataset}-different:{}", archs.join("+"))),
        _ => None,
    }
}
