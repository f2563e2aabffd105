//! `mcl-eval`: looks at what was trained. Exit codes: 0 done, 1 it failed, 2 the input is wrong, 75 stopped
//! (`evidence`: the same command goes on).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use mcl::commands::shell::{ShellCommand, parse};
use mcl::commands::{EvalCommand, next};
use mcl::eprintln;
use mcl::error::Error;
use mcl::eval::Common;
use mcl::system::device::{self, DeviceChoice};
use mcl::system::{exhausted, gpu, panics};

/// What this program was built from; `make` says.
const COMMIT: &str = match option_env!("MCL_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

#[derive(Parser)]
#[command(name = "mcl-eval", version, about = "Measure how well pre-trained networks transfer; look after data and set-up")]
struct Cli {
    /// Without a command: what can be done with what is here
    #[command(subcommand)]
    command: Option<Command>,
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

#[allow(clippy::large_enum_variant)] // one value, made once
#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Eval(EvalCommand),
    #[command(flatten)]
    Shell(ShellCommand),
}

fn main() -> ExitCode {
    mcl::system::allocator::keep_large_blocks();
    mcl::system::gpu::bring();
    let cli: Cli = match parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let work = || {
        mcl::nets::check_instructions()?;
        let threads = device::set_threads(cli.threads).map_err(|e| Error::input(format!("--{e}")))?;
        let common = Common { data: cli.data, device: cli.device.0, threads, json: cli.json, quiet: cli.quiet, commit: COMMIT, id: cli.id };
        // What is measured does not depend on how a run was trained.
        gpu::set(false, true);
        let command = || match &cli.command {
            None => next::overview(&common),
            Some(Command::Eval(command)) => command.run(&common),
            Some(Command::Shell(command)) => command.run(Cli::command()),
        };
        exhausted::caught(command).map_err(|e| match e {
            Error::Exhausted(what) if common.device.is_cuda() => {
                Error::Exhausted(format!("{what}; --device cpu takes the machine's memory instead"))
            }
            other => other,
        })
    };
    panics::guarded(work, |e| {
        eprintln!("mcl-eval: {}", e.line_in_flags());
        ExitCode::from(e.exit_code() as u8)
    })
}
