//! `mcl-eval accuracy`: each network's own classifier on the test split it was made for, and the ensemble of a run's networks.

use std::path::PathBuf;
use std::time::Instant;

use tch::Tensor;

use super::Measurement;
use crate::data;
use crate::error::Result;
use crate::eval::Common;
use crate::eval::answers::{ensemble, logits, own_dataset};
use crate::eval::dataset::TargetDataset;
use crate::eval::network::{NetworkArgs, PeerChoice};
use crate::eval::record::{self, Record};
use crate::eval::score::Score;
use crate::limits;
use crate::report::{Cell, Table};

/// The flags of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    networks: NetworkArgs,
    /// The dataset whose test split is used [default: what the network was trained on]
    #[arg(long)]
    dataset: Option<String>,
    /// Side the images are brought to [default: the network's own]
    #[arg(long)]
    image_size: Option<i64>,
}

impl Measurement for Args {
    const NAME: &'static str = "accuracy";
    const ABOUT: &'static str = "Test each network's own classifier, and the ensemble of a run";

    fn check(&self) -> Result<()> {
        self.networks.check()?;
        self.image_size.map(|side| limits::side("--image-size", side)).transpose()?;
        self.dataset.as_deref().map(data::find).transpose().map(drop)
    }

    fn run(&self, common: &Common) -> Result<()> {
        let networks = self.networks.open(common, PeerChoice::All)?;
        let asked = self.image_size.unwrap_or(0);
        let mut records: Vec<Record> = vec![];
        // The networks of one run on one of the datasets opened, for the ensemble.
        let mut cohorts: Vec<(PathBuf, usize, Vec<Tensor>)> = vec![];
        let mut opened: Vec<TargetDataset> = vec![];
        for network in &networks {
            let name = own_dataset(self.dataset.as_deref(), network)?;
            let mut known = None;
            for (i, target) in opened.iter().enumerate() {
                known = known.or(target.is_source(name, network)?.then_some(i));
            }
            let at = match known {
                Some(at) => at,
                None => {
                    opened.push(TargetDataset::source(name, network, common)?);
                    opened.len() - 1
                }
            };
            let target = &opened[at];
            let began = Instant::now();
            let logits = logits(network, target, asked, common)?;
            let score = Score::new(&logits, &target.dataset.test.labels);
            let record = Record::new(Self::NAME, network, common).on(target, network.image_size(asked));
            let record = Record { seconds: began.elapsed().as_secs_f64(), ..record.score(&score, 1, &target.dataset.classes) };
            record::keep(std::slice::from_ref(&record), common)?;
            records.push(record);
            if let Some(run) = &network.run {
                match cohorts.iter_mut().find(|(r, t, _)| r == run && *t == at) {
                    Some((.., all)) => all.push(logits),
                    None => cohorts.push((run.clone(), at, vec![logits])),
                }
            }
        }
        for (run, at, all) in cohorts.iter().filter(|(.., all)| all.len() > 1) {
            let target = &opened[*at];
            let network = networks.iter().find(|n| n.run.as_ref() == Some(run)).expect("it is a run of one of the networks");
            let score = ensemble(all, &target.dataset.test.labels);
            let record = Record::new(Self::NAME, network, common)
                .of_cohort(network)
                .variant(format!("ensemble of {}", all.len()))
                .on(target, network.image_size(asked))
                .score(&score, 1, &target.dataset.classes);
            record::keep(std::slice::from_ref(&record), common)?;
            records.push(record);
        }
        if common.json {
            common.print_json(&record::json(&records, common));
            return Ok(());
        }
        let mut shown = Table::new("", &["network", "dataset", "method", "top-1", "95 % over images", "top-5", "images"]);
        for r in &records {
            let name = if r.variant.is_empty() { r.subject.clone() } else { format!("{} ({})", r.subject, r.variant) };
            shown.push(vec![
                Cell::text(name),
                Cell::text(&r.dataset),
                Cell::text(&r.method),
                Cell::Score(r.value, 2),
                r.interval(),
                Cell::score(r.top5),
                Cell::Count(r.n_test as i64),
            ]);
        }
        print!("{}", shown.plain());
        Ok(())
    }
}
