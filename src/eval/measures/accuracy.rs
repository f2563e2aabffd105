//! `mcl-eval accuracy`: each network's own classifier on the test split it was made for, and the ensemble of a run's networks.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args as ClapArgs;
use tch::{Kind, Tensor};

use crate::data::Loader;
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::Target;
use crate::eval::features::Prepared;
use crate::eval::network::{PeerChoice, Subject, SubjectArgs};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::report::{Cell, Table};

pub const ABOUT: &str = "Test each network's own classifier, and the ensemble of a run";

#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    #[command(flatten)]
    pub subjects: SubjectArgs,
    /// The dataset whose test split is used [default: what the network was trained on]
    #[arg(long)]
    pub dataset: Option<String>,
    /// Side the images are brought to [default: the network's own]
    #[arg(long)]
    pub image_size: Option<i64>,
}

const BATCH: usize = 256;

/// Logits of a network's own classifier on a test split, [N, C] on the CPU.
pub fn logits(subject: &Subject, target: &Target, image_size: i64, common: &Common) -> Result<Tensor> {
    let classes = target.dataset.classes.len();
    if subject.meta.classes.len() != classes {
        return Err(Error::input(format!(
            "{} answers with {} classes and {} has {classes}: its classifier was made for another dataset; `mcl-eval linear-probe` trains one for this",
            subject.name,
            subject.meta.classes.len(),
            target.dataset.name
        )));
    }
    let prepared = Prepared::new(&target.dataset, subject, subject.image_size(image_size))?;
    let mut extractor = subject.extractor(common);
    let mut parts = vec![];
    for batch in Loader::eval(&prepared.dataset.test, BATCH, prepared.transform) {
        parts.push(extractor.extract(&batch?.views[0], false)?.logit().shallow_clone());
    }
    drop(extractor);
    subject.check_unchanged()?;
    Ok(Tensor::cat(&parts, 0))
}

/// The answer of several networks together: the mean of their probabilities, as the trainer's ensemble.
pub fn ensemble(logits: &[Tensor], labels: &[i64]) -> Score {
    let probabilities: Vec<Tensor> = logits.iter().map(|z| z.softmax(-1, Kind::Float)).collect();
    Score::new(&Tensor::stack(&probabilities, 0).mean_dim(0, false, None), labels)
}

/// The dataset asked for, or the one a network was trained on.
pub fn own_dataset<'a>(asked: Option<&'a str>, subject: &'a Subject) -> Result<&'a str> {
    asked
        .or(subject.meta.dataset.as_deref())
        .ok_or_else(|| Error::input(format!("{} does not say what it was trained on; add --dataset NAME", subject.file.display())))
}

pub fn run(args: &Args, common: &Common) -> Result<()> {
    let subjects = args.subjects.open(common, PeerChoice::All)?;
    let mut records: Vec<Record> = vec![];
    // The networks of one run, for the ensemble.
    let mut cohorts: Vec<(PathBuf, String, Vec<Tensor>)> = vec![];
    let mut opened: Vec<Target> = vec![];
    for subject in &subjects {
        let name = own_dataset(args.dataset.as_deref(), subject)?;
        if !opened.iter().any(|t| t.dataset.name == name) {
            opened.push(Target::source(name, common)?);
        }
        let target = opened.iter().find(|t| t.dataset.name == name).expect("just opened");
        let began = Instant::now();
        let logits = logits(subject, target, args.image_size.unwrap_or(0), common)?;
        let score = Score::new(&logits, &target.dataset.test.labels);
        let record = measured(&score, subject, target, args, began.elapsed().as_secs_f64(), common);
        record::keep(std::slice::from_ref(&record), std::slice::from_ref(subject), common)?;
        records.push(record);
        if let Some(run) = &subject.run {
            match cohorts.iter_mut().find(|(r, n, _)| r == run && n == name) {
                Some((.., all)) => all.push(logits),
                None => cohorts.push((run.clone(), name.to_string(), vec![logits])),
            }
        }
    }
    for (run, name, all) in cohorts.iter().filter(|(.., all)| all.len() > 1) {
        let target = opened.iter().find(|t| t.dataset.name == name).expect("opened above");
        let subject = subjects.iter().find(|s| s.run.as_ref() == Some(run)).expect("it is a run of one of the subjects");
        let score = ensemble(all, &target.dataset.test.labels);
        let mut record = measured(&score, subject, target, args, 0.0, common);
        record.variant = format!("ensemble of {}", all.len());
        record.peer = None;
        record.subject = subject.cohort().to_string();
        record::append(&subject.out, std::slice::from_ref(&record))?;
        records.push(record);
    }
    if common.json {
        common.print_json(&record::json(&records, common));
        return Ok(());
    }
    let mut shown = Table::new("", &["network", "dataset", "method", "top-1", "95 % interval", "top-5", "images"]);
    for r in &records {
        let name = if r.variant.is_empty() { r.subject.clone() } else { format!("{} ({})", r.subject, r.variant) };
        let interval = format!("{:.2} to {:.2}", r.ci_low.unwrap_or(f64::NAN), r.ci_high.unwrap_or(f64::NAN));
        shown.push(vec![
            Cell::text(name),
            Cell::text(&r.dataset),
            Cell::text(&r.method),
            Cell::Score(r.value, 2),
            Cell::text(interval),
            Cell::score(r.top5),
            Cell::Count(r.n_test as i64),
        ]);
    }
    print!("{}", shown.plain());
    Ok(())
}

fn measured(score: &Score, subject: &Subject, target: &Target, args: &Args, seconds: f64, common: &Common) -> Record {
    let (low, high) = score.interval(1);
    Record {
        dataset: target.dataset.name.into(),
        value: score.top1(),
        ci_low: Some(low),
        ci_high: Some(high),
        top5: Some(score.top5()),
        n_test: target.dataset.test.len(),
        split_hash: target.hash.clone(),
        image_size: subject.image_size(args.image_size.unwrap_or(0)),
        seconds,
        warnings: score.at_chance().then(|| "at chance level".to_string()).into_iter().collect(),
        detail: score.detail(&target.dataset.classes),
        ..Record::new("accuracy", subject, common)
    }
}
