//! The end of a run: the networks that ship, and how it came out.

use std::path::PathBuf;

use super::Trainer;
use crate::cohort::Peer;
use crate::error::{Error, Result};
use crate::files;
use crate::run::{FourWays, NetworkSummary, Summary, column, network_file, stage_file};

impl Trainer<'_> {
    /// Copies the networks that ship to their folder: the epoch the held-out part chose, or the last one.
    pub(super) fn ship(&mut self) -> Result<Summary> {
        let Some(open) = &self.folder else { return self.summary(vec![]) };
        let folder = open.folder.clone();
        let step = self.progress.best.map_or(self.progress.step, |best| best.step);
        let peers = self.engine.shipped();
        let names: Vec<String> = (0..peers.len()).map(network_file).collect();
        let networks = self.checkpoints.networks(step, &names)?;
        let stages = |(m, peer): (usize, &&Peer)| (0..peer.branches.len()).map(|l| stage_file(m, l + 1)).collect::<Vec<_>>();
        let stages = peers.iter().enumerate().flat_map(stages).collect::<Vec<_>>();
        // Checkpoints made before stages shipped have none.
        let stages = self.checkpoints.networks_there(step, &stages)?;
        let to = folder.networks();
        std::fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?;
        let mut shipped = vec![];
        for (m, network) in networks.iter().enumerate() {
            files::write(&folder.network(m), network)?;
            shipped.push(folder.network(m));
        }
        for (file, network) in &stages {
            files::write(&to.join(file), network)?;
        }
        if let Some(best) = self.progress.best {
            let chosen = best.stage.map_or_else(|| network_file(best.peer), |stage| stage_file(best.peer, stage));
            files::point(&folder.best_network(), &chosen)?;
        }
        let summary = self.summary(shipped)?;
        folder.write_summary(&summary)?;
        self.log(&format!("finished: {} steps", self.progress.step))?;
        Ok(summary)
    }

    /// How the run came out.
    fn summary(&self, shipped: Vec<PathBuf>) -> Result<Summary> {
        // What a first phase trained is not what ships.
        let extra = self.engine.method.extra_epochs();
        let rows = &self.progress.rows;
        let counted = rows.get(extra..).unwrap_or_default();
        let last = |name: &str| column(counted, name).last().copied().unwrap_or(f64::NAN);
        let mean = |name: &str| column(counted, name).iter().sum::<f64>() / counted.len() as f64;
        let mut networks = vec![];
        for (m, peer) in self.engine.shipped().into_iter().enumerate() {
            let missing = || Error::failed(format!("no row of metrics has the test accuracy of network {m} ({})", peer.arch.name));
            let accuracy = FourWays::of(rows, m, extra).ok_or_else(missing)?;
            networks.push(NetworkSummary { arch: peer.arch.name.to_string(), accuracy });
        }
        Ok(Summary {
            out: self.job.out.clone(),
            networks,
            ensemble_top1: last("test.ensemble.top1"),
            best: self.progress.best,
            epochs: self.progress.rows.len(),
            steps: self.progress.step,
            seconds: self.before + self.started.elapsed().as_secs_f64(),
            seconds_per_step: mean("seconds.step_and_meta"),
            peak_mb: column(counted, "peak_mb").into_iter().fold(0.0, f64::max),
            device_peak_mb: column(counted, "device_peak_mb").into_iter().reduce(f64::max),
            shipped,
        })
    }
}
