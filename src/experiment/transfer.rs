//! `mcl-eval transfer NETWORKS... --to DATASETS`: the same measurements of many networks, made by the one runner and shown in one table and one figure:
//! every network against the first, on the same test images. What is measured is not measured again; a kill costs the measurement under way.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use tch::{Kind, Tensor};

use super::plan::{Item, Measurement, Work, hash};
use super::rows::Question;
use super::runner::make_below;
use crate::data;
use crate::error::{Error, Result, counted};
use crate::eval::measures;
use crate::eval::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::eval::score::RESAMPLES;
use crate::eval::stats::{self, Pairs};
use crate::eval::{Common, record};
use crate::files;
use crate::report::colours::Palette;
use crate::report::plot::{Whisker, Whiskers, file_stem};
use crate::report::{Cell, Figure, Table};
use crate::rng;
use crate::run::RunFolder;

/// What the command does.
pub const ABOUT: &str = "Measure many networks on other datasets: probes, neighbours, few shots, in one paired table";

/// The flags of the command.
#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Run folders, files of weights, TorchScript files; the others are compared with the first
    #[arg(required = true)]
    networks: Vec<PathBuf>,
    /// The datasets they are measured on, e.g. stl10,tiny_imagenet
    #[arg(long, required = true, value_delimiter = ',')]
    to: Vec<String>,
    /// A measurement instead of the usual ones, as a line of `mcl-eval` without network and dataset, e.g. "knn --k 5" (may be repeated)
    #[arg(long, value_name = "LINE")]
    evaluate: Vec<String>,
    /// Side the images are brought to in every measurement [default: the protocol's, or the network's own]
    #[arg(long)]
    image_size: Option<i64>,
    /// How the networks are to be opened.
    #[command(flatten)]
    how: NetworkArgs,
}

/// What the intervals of the figure are.
const SAME_IMAGES: &str = "95 % over the same test images, or the same draws";

/// What is measured of every network on every dataset: the paper's probe, logistic regression, neighbours, few labelled images.
const USUAL: [&str; 4] = ["linear-probe --protocol paper", "linear-probe --protocol lbfgs", "knn", "few-shot"];

/// Measures what is not measured yet, then shows all networks beside the first.
pub fn run(args: &Args, common: &Common) -> Result<()> {
    for dataset in &args.to {
        data::find(dataset)?;
    }
    let given = &args.how;
    if !given.runs.is_empty() || given.by_file.any() {
        return Err(Error::input(
            "transfer takes its networks by their paths alone: runs, weights and TorchScript files, one after another",
        ));
    }
    let folder = given.out.clone().unwrap_or_else(|| PathBuf::from("results/transfer"));
    let lines = lines(args)?;
    let mut items: Vec<Item> = vec![];
    for path in &args.networks {
        if path.is_dir() && !RunFolder::at(path).recipe().exists() {
            let recipe = RunFolder::at(path).recipe();
            return Err(Error::input(format!("{} is no run: there is no {}; accepted: {NETWORKS}", path.display(), recipe.display())));
        }
        if !path.exists() {
            return Err(Error::input(format!("no run at {}, and no file; accepted: {NETWORKS}", path.display())));
        }
        for network in NetworkArgs::at(path, given).open(common, PeerChoice::Best)? {
            try_out(&network, &lines, common)?;
            let item = item(&network, given, &lines, &folder);
            if items.iter().any(|other| other.hash == item.hash) {
                return Err(Error::input(format!("{} stands twice: the same weights, measured alike", path.display())));
            }
            items.push(item);
        }
    }
    let mut pending = vec![];
    for (place, item) in items.iter().enumerate() {
        if !item.measured()? {
            pending.push(place);
        }
    }
    common.say(format!("{}, {} measured before", counted(items.len(), "network"), items.len() - pending.len()));
    let made = if pending.is_empty() { Ok(()) } else { make_below(&folder, "--out", &items, pending, 1, &|_, _| Ok(()), common) };
    // What is measured is shown even when something failed or a stop was asked for.
    show(&items, &folder, common)?;
    made
}

/// What the command takes, in messages.
const NETWORKS: &str = "folders that `mcl-train run` made, files of weights, TorchScript files";

/// Asks somebody's TorchScript about one image of each side that a line brings images to: what it cannot answer is told before anything is measured.
fn try_out(network: &TrainedNetwork, lines: &[Line], common: &Common) -> Result<()> {
    let mut tried = vec![];
    for line in lines.iter().filter(|_| network.is_foreign()) {
        let side = network.image_size(line.side) as i64;
        if tried.contains(&side) {
            continue;
        }
        tried.push(side);
        let image = Tensor::zeros([1, 3, side, side], (Kind::Float, common.device));
        network.extractor(common)?.extract(&image, false).map_err(|e| {
            let own = network.meta.image_size;
            let hint = if side == own {
                String::new()
            } else {
                format!("; --image-size {own} brings the images of every measurement to its own side")
            };
            Error::input(format!("`{}`: {e}{hint}", line.text))
        })?;
    }
    Ok(())
}

/// A line of `mcl-eval` without its network.
struct Line {
    text: String,
    /// What it brings images to; 0 for the network's own side.
    side: i64,
}

/// Every line of `mcl-eval`, with its dataset; refused here, not after the first network.
fn lines(args: &Args) -> Result<Vec<Line>> {
    let usual: Vec<String> = USUAL.map(String::from).to_vec();
    let asked = if args.evaluate.is_empty() { &usual } else { &args.evaluate };
    let side = args.image_size.map_or(String::new(), |side| format!(" --image-size {side}"));
    let mut lines = vec![];
    for dataset in &args.to {
        for line in asked {
            let text = format!("{line} --dataset {dataset}{side}");
            let side = measures::check_line(&text).map_err(|e| Error::input(format!("`{text}`: {e}")))?;
            lines.push(Line { text, side });
        }
    }
    Ok(lines)
}

/// A network with its measurements. Its hash is of everything that decides its numbers.
fn item(network: &TrainedNetwork, given: &NetworkArgs, lines: &[Line], folder: &Path) -> Item {
    let (mean, std) = (network.meta.mean, network.meta.std);
    let own = hash(&[network.hash.clone(), network.features_of(), format!("{mean:?} {std:?}")]);
    let name = format!("{}-{own}", file_stem(&network.name));
    let mut all = vec![own.clone()];
    all.extend(lines.iter().map(|line| line.text.clone()));
    Item {
        hash: hash(&all),
        work: Work::Network(flags(network, given)),
        measurements: lines.iter().map(|line| Measurement::new(&name, &line.text)).collect(),
        folder: RunFolder::at(folder.join(&name)),
        name,
    }
}

/// The flags that open the same network again.
fn flags(network: &TrainedNetwork, given: &NetworkArgs) -> Vec<String> {
    let file = &given.by_file;
    let path = |path: &Path| path.display().to_string();
    let three = |numbers: [f64; 3]| numbers.map(|n| n.to_string()).join(",");
    let mut flags: Vec<String> = vec![];
    let mut add = |flag: &str, value: String| flags.extend([flag.to_string(), value]);
    match (&network.run, network.peer) {
        (Some(run), peer) => {
            add("--run", path(run));
            peer.into_iter().for_each(|peer| add("--peer", peer.to_string()));
            given.checkpoint.iter().for_each(|checkpoint| add("--checkpoint", checkpoint.to_string()));
            network.stage.iter().for_each(|stage| add("--stage", stage.to_string()));
            if file.normalisation.is_some() {
                add("--normalisation", format!("{}/{}", three(network.meta.mean), three(network.meta.std)));
            }
        }
        (None, _) => {
            if network.is_foreign() {
                add("--torchscript", path(&network.file));
                file.output.iter().for_each(|output| add("--output", output.clone()));
                file.pool.iter().for_each(|pool| add("--pool", pool.to_string()));
            } else {
                add("--weights", path(&network.file));
                add("--arch", network.arch.name.to_string());
                file.strip.iter().for_each(|prefix| add("--strip", prefix.clone()));
            }
            add("--mean", three(network.meta.mean));
            add("--std", three(network.meta.std));
        }
    }
    if !network.taps.is_empty() {
        add("--layers", network.taps.iter().map(|tap| tap.to_string()).collect::<Vec<_>>().join(","));
    }
    if file.allow_partial && network.run.is_none() && !network.is_foreign() {
        flags.push("--allow-partial".to_string());
    }
    flags
}

/// A row of the table: a network's answer to a question, and how much it leads the first one's.
struct Shown {
    question: Question,
    record: Record,
    lead: Option<Lead>,
}

/// A difference with its 95 % interval, both on the same images.
struct Lead {
    points: f64,
    interval: Option<(f64, f64)>,
}

/// How much `b` leads `a`: by image where answers were kept, by draw where the same images were drawn for both.
fn lead(a: &Record, b: &Record) -> Option<Lead> {
    let numbers = |r: &Record, key: &str| serde_json::from_value::<Vec<f64>>(r.detail[key].clone()).ok();
    if let (Some(a), Some(b)) = (numbers(a, "tries"), numbers(b, "tries"))
        && a.len() == b.len()
    {
        let (points, half) = stats::mean_interval(&a.iter().zip(&b).map(|(a, b)| b - a).collect::<Vec<_>>());
        return Some(Lead { points, interval: half.map(|half| (points - half, points + half)) });
    }
    let right = |r: &Record| Some(numbers(r, "labels")?.iter().zip(&numbers(r, "predicted")?).map(|(l, p)| l == p).collect::<Vec<bool>>());
    let (of_a, of_b) = (right(a)?, right(b)?);
    if of_a.len() != of_b.len() || a.split_hash != b.split_hash {
        return None;
    }
    let pairs = Pairs::new(&of_a, &of_b);
    let (low, high) = pairs.bootstrap(RESAMPLES, &mut rng::stream(1, "transfer", &[]));
    Some(Lead { points: 100.0 * pairs.difference(), interval: Some((100.0 * low, 100.0 * high)) })
}

fn question(r: &Record) -> Question {
    Question { command: r.command.clone(), dataset: r.dataset.clone(), protocol: protocol_of(r), variant: r.variant.clone() }
}

/// Every question with the answers of all networks, in the order of the first that was asked it.
fn gather(items: &[Item]) -> Result<(Vec<Shown>, Vec<Record>)> {
    let mut all: Vec<Vec<Record>> = vec![];
    for item in items {
        // Before its first measurement a folder has no rows of it.
        let begun = record::read(item.folder.path())?.iter().any(|r| item.measurement_ids().any(|id| id == r.id));
        all.push(if begun { item.records()? } else { vec![] });
    }
    let mut questions: Vec<Question> = vec![];
    for r in all.iter().flatten().filter(|r| r.metric == "top1" || r.metric.is_empty()) {
        let question = question(r);
        if !questions.contains(&question) {
            questions.push(question);
        }
    }
    let mut shown = vec![];
    for asked in &questions {
        let answer = |own: &Vec<Record>| own.iter().find(|r| question(r) == *asked).cloned();
        let first = all.first().and_then(answer);
        for (place, own) in all.iter().enumerate() {
            let Some(record) = answer(own) else { continue };
            let lead = first.as_ref().filter(|_| place > 0).and_then(|first| lead(first, &record));
            shown.push(Shown { question: asked.clone(), record, lead });
        }
    }
    Ok((shown, all.into_iter().flatten().collect()))
}

/// The table on the terminal and as CSV and Markdown, and the figure beside them.
fn show(items: &[Item], folder: &Path, common: &Common) -> Result<()> {
    let (shown, records) = gather(items)?;
    let Some(first) = shown.first().map(|row| row.record.subject.clone()) else { return Ok(()) };
    let against = format!("minus {first}");
    let mut table = Table::new("transfer", &["measured", "network", "architecture", "top-1", "95 %", &against, "95 % on the same images"]);
    for row in &shown {
        let interval = row.lead.as_ref().and_then(|lead| lead.interval);
        table.push(vec![
            Cell::text(row.question.shown()),
            Cell::text(&row.record.subject),
            Cell::text(&row.record.arch),
            Cell::Score(row.record.value, 2),
            row.record.interval(),
            row.lead.as_ref().map_or(Cell::Empty, |lead| Cell::text(format!("{:+.2}", lead.points))),
            interval.map_or(Cell::Empty, |(low, high)| Cell::text(format!("{low:+.2} to {high:+.2}"))),
        ]);
    }
    let path = |ending: &str| folder.join(format!("transfer.{ending}"));
    files::write(&path("csv"), table.csv()?.as_bytes())?;
    files::write(&path("md"), table.markdown().as_bytes())?;
    if let Some(figure) = figure(&shown, &first) {
        files::write(&path("svg"), figure.svg.as_bytes())?;
        files::write(&path("png"), &figure.png(2.0)?)?;
    }
    if common.json {
        common.print_json(&record::json(&records, common));
    } else {
        print!("{}", table.plain());
        println!("{} and .md, .svg, .png beside it; rows of results in the folders there", path("csv").display());
    }
    Ok(())
}

/// How much every other network leads the first, question by question; none for a single network.
fn figure(shown: &[Shown], first: &str) -> Option<Figure> {
    let mut series: Vec<String> = vec![];
    let mut rows: Vec<(String, Vec<Option<Whisker>>)> = vec![];
    for row in shown.iter().filter(|row| row.lead.is_some()) {
        if !series.contains(&row.record.subject) {
            series.push(row.record.subject.clone());
        }
    }
    if series.is_empty() {
        return None;
    }
    for row in shown {
        let name = row.question.shown();
        if !rows.iter().any(|(known, _)| *known == name) {
            rows.push((name.clone(), vec![None; series.len()]));
        }
        if let (Some(lead), Some(place)) = (&row.lead, series.iter().position(|s| *s == row.record.subject)) {
            let own = rows.iter_mut().find(|(known, _)| *known == name).expect("just added");
            own.1[place] = Some(Whisker { value: lead.points, thick: lead.interval, thin: None });
        }
    }
    let title = format!("Top-1 compared with {first}");
    let palette = Palette::of(&series);
    let drawn = Whiskers { title: &title, x: "points", series: &series, palette: &palette, rows: &rows, thick: SAME_IMAGES, thin: "" };
    Some(drawn.figure("transfer", format!("{title}; intervals of {SAME_IMAGES}")))
}
