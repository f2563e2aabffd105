//! `mcl-eval data list | check | fetch`: which datasets are here, whether they are whole, and how the others come.

use clap::Subcommand;
use serde_json::json;

use crate::data::check;
use crate::data::fetch::{self, Fetch};
use crate::error::Result;
use crate::eval::Common;

/// What `mcl-eval data` can do.
#[derive(Subcommand)]
pub enum DataCommand {
    /// Every dataset, where it was found, or what brings it
    List,
    /// Count, decode and hash a dataset
    Check {
        /// A dataset, e.g. cifar100
        name: String,
    },
    /// Download, verify and unpack a dataset
    Fetch {
        /// A dataset (cifar100) or one of its archives (cifar-100-python)
        name: String,
        /// Address to take the archive from instead of the official one (also $MCL_DATA_MIRROR)
        #[arg(long)]
        mirror: Option<String>,
    },
}

/// Does it and prints what came of it.
pub fn run(command: &DataCommand, common: &Common) -> Result<()> {
    let data = common.data.as_deref();
    match command {
        DataCommand::List => {
            let all = check::list(data);
            if common.json {
                println!("{}", json!({ "datasets": all }));
            } else {
                all.iter().for_each(|entry| println!("{entry}"));
            }
            Ok(())
        }
        DataCommand::Check { name } => {
            let progress = common.progress(format!("checking {name}"), 0, "images");
            let found = check::check_watched(name, data, &Default::default(), &progress)?;
            drop(progress);
            if common.json {
                println!("{}", json!(found))
            } else {
                println!("{found}")
            }
            found.verdict()
        }
        DataCommand::Fetch { name, mirror } => {
            let said = fetch::fetch(name, &Fetch { data, mirror: mirror.as_deref(), quiet: common.quiet })?;
            if common.json {
                println!("{}", json!({ "name": name, "message": said }))
            } else {
                println!("{said}")
            }
            Ok(())
        }
    }
}
