//! `mcl-eval`: measures trained networks, and the build itself.

use clap::{Parser, Subcommand};
use mcl::eval::selftest;

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Selftest(selftest::SelftestArgs),
}

fn main() {
    let result = match Cli::parse().command {
        Command::Selftest(args) => selftest::run(&args),
    };
    if let Err(error) = result {
        eprintln!("error: {error}");
        std::process::exit(error.exit_code());
    }
}
