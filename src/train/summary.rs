//! The end of a run: the networks that ship, and how it came out.

use std::path::PathBuf;

use super::Trainer;
use crate::error::{Error, Result};
use crate::files;
use crate::run::{self, FourWays, NetworkSummary, Summary, column, network_file};

impl Trainer<'_> {
    /// Copies the networks that ship to their folder: the epoch the held-out part chose, or the last one.
    pub(super) fn ship(&mut self) -> Result<Summary> {
        let Some(open) = &self.folder else { return Ok(self.summary(vec![])) };
        let folder = open.folder.clone();
        let from = folder.checkpoint(if self.data.held.is_some() { run::BEST } else { run::LAST });
        let to = folder.networks();
        std::fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?;
        let mut shipped = vec![];
        for m in 0..self.engine.shipped().len() {
            let (source, target) = (from.network(m), folder.network(m));
            files::write(&target, &std::fs::read(&source).map_err(Error::io("cannot read", &source))?)?;
            shipped.push(target);
        }
        if let Some(best) = self.progress.best {
            files::point(&folder.best_network(), &network_file(best.peer))?;
        }
        let summary = self.summary(shipped);
        folder.write_summary(&summary)?;
        self.log(&format!("finished: {} steps", self.progress.step))?;
        Ok(summary)
    }

    /// How the run came out.
    fn summary(&self, shipped: Vec<PathBuf>) -> Summary {
        // What a first phase trained is not what ships.
        let extra = self.engine.method.extra_epochs();
        let rows = &self.progress.rows;
        let counted = &rows[extra..];
        let last = |name: &str| column(counted, name).last().copied().unwrap_or(f64::NAN);
        let mean = |name: &str| column(counted, name).iter().sum::<f64>() / counted.len() as f64;
        let networks = self.engine.shipped().into_iter().enumerate().map(|(m, peer)| NetworkSummary {
            arch: peer.arch.name.to_string(),
            accuracy: FourWays::of(rows, m, extra).expect("a finished run has rows"),
        });
        Summary {
            out: self.job.out.clone(),
            networks: networks.collect(),
            ensemble_top1: last("test.ensemble.top1"),
            best: self.progress.best,
            epochs: self.progress.rows.len(),
            steps: self.progress.step,
            seconds: self.before + self.started.elapsed().as_secs_f64(),
            seconds_per_step: mean("seconds.step_and_meta"),
            peak_mb: column(counted, "peak_mb").into_iter().fold(0.0, f64::max),
            shipped,
        }
    }
}
