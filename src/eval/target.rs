//! What measurements on another dataset share: the flags that say what is measured, and the walk over the networks.

use super::Common;
use super::dataset::TargetDataset;
use super::features::{self, Features};
use super::network::{NetworkArgs, PeerChoice, TrainedNetwork};
use super::protocol::{HowArgs, Protocol};
use super::record::{self, Record};
use crate::data;
use crate::error::Result;

/// The flags of a measurement that learns from a dataset's training images and answers about its test images.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    /// Which networks.
    #[command(flatten)]
    pub networks: NetworkArgs,
    /// The dataset: its training images are learned from, its test images are classified
    #[arg(long)]
    pub dataset: String,
    /// By which protocol.
    #[command(flatten)]
    pub how: HowArgs,
}

impl TargetArgs {
    /// Refuses names that nothing has, looking at no network and no data.
    pub(crate) fn check(&self) -> Result<()> {
        self.networks.check()?;
        data::find(&self.dataset).map(drop)
    }

    /// Opens the networks and the dataset.
    pub(crate) fn open(&self, common: &Common) -> Result<Subjects> {
        Subjects::open(&self.networks, &self.dataset, &self.how, common)
    }
}

/// The networks of a measurement and the dataset they are measured on.
pub(crate) struct Subjects {
    networks: Vec<TrainedNetwork>,
    /// What they are measured on.
    pub(crate) target: TargetDataset,
    cached: bool,
}

impl Subjects {
    /// The best network of a run unless others are asked for.
    pub(crate) fn open(networks: &NetworkArgs, dataset: &str, how: &HowArgs, common: &Common) -> Result<Subjects> {
        let networks = networks.open(common, PeerChoice::Best)?;
        Ok(Subjects { networks, target: TargetDataset::open(dataset, common)?, cached: !how.no_cache })
    }

    /// Measures one network after the other. Its rows are kept at once: a later network that fails does not take them with it. A network
    /// that its measurement changed has none.
    pub(crate) fn each(&self, common: &Common, mut measure: impl FnMut(&TrainedNetwork) -> Result<Vec<Record>>) -> Result<Vec<Record>> {
        let mut records = vec![];
        for network in &self.networks {
            let own = measure(network)?;
            network.check_unchanged()?;
            record::keep(&own, common)?;
            records.extend(own);
        }
        Ok(records)
    }

    /// Features of the training and the test images, brought to a side; from the cache where that is wanted.
    pub(crate) fn features(&self, network: &TrainedNetwork, side: usize, common: &Common) -> Result<(Features, Features)> {
        features::of_dataset(network, &self.target, side, self.cached, common)
    }

    /// The row of a measurement that learned from all training images.
    pub(crate) fn record(&self, command: &str, network: &TrainedNetwork, side: usize, protocol: &Protocol, common: &Common) -> Record {
        Record::new(command, network, common).on(&self.target, side).trained_on(&self.target).protocol(protocol)
    }

    /// Are features taken from the cache and kept in it?
    pub(crate) fn cached(&self) -> bool {
        self.cached
    }
}
