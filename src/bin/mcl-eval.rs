//! `mcl-eval`: looks at what was trained. Exit codes: 0 done, 1 it failed, 2 the input is wrong, 75 stopped
//! (`evidence`: the same command goes on).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use mcl::commands::EvalCommand;
use mcl::eval::Common;
use mcl::eval::measures::one_line;
use mcl::system::device::{self, DeviceChoice};

/// What this program was built from; `make` says.
const COMMIT: &str = match option_env!("MCL_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

#[derive(Parser)]
#[command(name = "mcl-eval", version, about = "Measure how well pre-trained networks transfer; look after data and set-up")]
struct Cli {
    #[command(subcommand)]
    command: EvalCommand,
    /// Where datasets are looked for first (then $MCL_DATA, then ./data)
    #[arg(long, global = true)]
    data: Option<PathBuf>,
    /// auto, cpu or cuda:N
    #[arg(long, global = true, default_value = "auto")]
    device: DeviceChoice,
    /// libtorch's intra-op threads; 0 means one per core
    #[arg(long, global = true, default_value_t = 0)]
    threads: usize,
    /// Print one JSON object on stdout; logs go to stderr
    #[arg(long, global = true)]
    json: bool,
    /// What the experiment that asks for it calls this measurement; kept in its rows
    #[arg(long, global = true, hide = true)]
    id: Option<String>,
    /// Print results only
    #[arg(long, global = true)]
    quiet: bool,
}

fn main() -> ExitCode {
    mcl::system::allocator::keep_large_blocks();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version, asked for or in place of a missing command.
        Err(e) if !e.use_stderr() || e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => e.exit(),
        Err(e) => {
            eprintln!("mcl-eval: {} (--help shows what is accepted)", one_line(&e));
            return ExitCode::from(2);
        }
    };
    let threads = device::set_threads(cli.threads);
    let common = Common { data: cli.data, device: cli.device.0, threads, json: cli.json, quiet: cli.quiet, commit: COMMIT, id: cli.id };
    match cli.command.run(&common) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("mcl-eval: {e}");
            ExitCode::from(e.exit_code() as u8)
        }
    }
}
