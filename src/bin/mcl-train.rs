//! `mcl-train`: pre-trains a cohort from a recipe. Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 75 stopped and saved.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use mcl::commands::shell::{ShellCommand, parse};
use mcl::commands::{list, next};
use mcl::error::{Error, Result, counted};
use mcl::experiment::compare::{self, Comparison};
use mcl::methods;
use mcl::recipe::Recipe;
use mcl::report::{Cell, Table};
use mcl::run::{FOUR_WAYS, RunFolder, Summary};
use mcl::system::device::{self, DeviceChoice};
use mcl::system::panics;
use mcl::system::process;
use mcl::system::progress::clock_time;
use mcl::system::ranks::{self, Ranks};
use mcl::train::{self, Job};
use mcl::{print, println};

/// What this program was built from; `make` says.
const COMMIT: &str = match option_env!("MCL_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

#[derive(Parser)]
#[command(
    name = "mcl-train",
    version,
    about = "Pre-train cohorts of vision networks with layer-wise Mutual Contrastive Learning and its rivals"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pre-train a cohort from a recipe
    Run(RunArgs),
    /// Run several methods and seeds of one recipe, one after another, and print one table
    Compare(CompareArgs),
    /// List what can be named in a recipe, and the recipes
    List {
        #[arg(value_enum)]
        what: What,
    },
    #[command(flatten)]
    Shell(ShellCommand),
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// Architectures, with their sizes
    Archs,
    /// Methods, with their papers
    Methods,
    /// Datasets
    Datasets,
    /// Recipes that ship; each runs by its name
    #[value(alias = "protocols")]
    Recipes,
    /// Plans of the paper's tables and figures, with what they would take here
    Plans,
}

#[derive(Args)]
struct RunArgs {
    /// Recipe file, or the name of one that ships, e.g. quickstart (`mcl-train list recipes`)
    recipe: PathBuf,
    /// Run folder [default: runs/RECIPE-METHOD-DATE-TIME]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Where datasets are looked for first (then $MCL_DATA, then ./data)
    #[arg(long)]
    data: Option<PathBuf>,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// libtorch's intra-op threads; 0 means one per core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Override a recipe key, e.g. --set train.epochs=3 (may be repeated)
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Go on from the last checkpoint of the run folder (--out); start from the beginning where there is none
    #[arg(long)]
    resume: bool,
    /// With --resume: the checkpoint to go on from, e.g. step-390
    #[arg(long, requires = "resume", value_name = "CHECKPOINT")]
    from: Option<String>,
    /// Weights every network starts from (safetensors, .pt or .pth)
    #[arg(long, value_name = "WEIGHTS")]
    init: Option<PathBuf>,
    /// Print nothing but errors and the final table
    #[arg(long)]
    quiet: bool,
    /// On several ranks: end them all when one waits this long for the others
    #[arg(long, default_value_t = 600.0, value_name = "SECONDS", value_parser = seconds)]
    rank_timeout: f64,
    /// On several ranks with GPUs: hand GPU memory to MPI as it is, for an MPI built with CUDA
    #[arg(long)]
    cuda_aware_mpi: bool,
}

#[derive(Args)]
struct CompareArgs {
    /// Recipe file; its [method.NAME] tables count for each method in turn
    recipe: PathBuf,
    /// Methods, with commas between them, e.g. baseline,dml,l_mcl
    #[arg(long, value_delimiter = ',', required = true)]
    methods: Vec<String>,
    /// How many seeds: the recipe's and those after it
    #[arg(long, default_value_t = 1)]
    seeds: usize,
    /// Folder of all runs; given again, finished runs are skipped and unfinished ones go on [default: runs/compare-RECIPE]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Where datasets are looked for first (then $MCL_DATA, then ./data)
    #[arg(long)]
    data: Option<PathBuf>,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// libtorch's intra-op threads; 0 means one per core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Override a recipe key for all runs, e.g. --set train.epochs=3 (may be repeated)
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Print nothing but errors, which run is under way, and the table
    #[arg(long)]
    quiet: bool,
}

fn main() -> ExitCode {
    mcl::system::allocator::keep_large_blocks();
    mcl::system::gpu::bring();
    let cli: Cli = match parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let joined = match &cli.command {
        Command::Run(args) => ranks::join(args.cuda_aware_mpi),
        _ => Ok(Ranks::ALONE),
    };
    let ranks = match joined {
        Ok(ranks) => ranks,
        Err(e) => return fail(e, Ranks::ALONE),
    };
    let work = || act(cli, ranks).map(|()| ranks.leave());
    panics::guarded(work, |e| fail(e, ranks))
}

/// One message, whatever the number of ranks.
fn fail(e: Error, ranks: Ranks) -> ExitCode {
    let code = e.exit_code();
    // In one piece: launchers weave the output of ranks together as it comes.
    let say = |who: String| {
        let _ = std::io::stderr().write_all(format!("mcl-train: {who}{}\n", e.line_in_flags()).as_bytes());
    };
    // Every rank knows of these: they leave together.
    if ranks.count() == 1 || matches!(e, Error::Interrupted(_) | Error::Diverged { .. }) {
        if ranks.leads() {
            say(String::new());
        }
        ranks.leave();
        return ExitCode::from(code as u8);
    }
    if ranks.leads() {
        say(String::new());
        std::thread::sleep(Duration::from_millis(200)); // so that the message is through before the launcher's own
    } else {
        // What went wrong on every rank is rank 0's to say; what went wrong here alone is said here.
        std::thread::sleep(Duration::from_secs(3));
        say(format!("rank {}: ", ranks.rank()));
    }
    ranks.end_all(code)
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds.is_finite() => Ok(seconds),
        _ => Err("accepted: seconds, above 0".into()),
    }
}

fn act(cli: Cli, ranks: Ranks) -> Result<()> {
    match cli.command {
        Command::Run(args) => run(args, ranks),
        Command::Compare(args) => compare(args),
        Command::Shell(command) => command.run(Cli::command()),
        Command::List { what } => {
            print!(
                "{}",
                match what {
                    What::Archs => list::archs(),
                    What::Methods => list::methods(),
                    What::Datasets => list::datasets(),
                    What::Recipes => list::recipes()?,
                    What::Plans => list::plans()?,
                }
            );
            Ok(())
        }
    }
}

fn run(args: RunArgs, ranks: Ranks) -> Result<()> {
    let recipe = Recipe::read(&args.recipe, &args.sets, &methods::names())?;
    let (dataset, data) = (recipe.data.name.clone(), args.data.clone());
    if args.resume && args.out.is_none() {
        let newest = next::newest().map_or("runs/r32".to_string(), |run| run.display().to_string());
        return Err(Error::input(format!("--resume goes on with a run, and none is named; accepted: --out DIR, e.g. --out {newest}")));
    }
    let out = args.out.unwrap_or_else(|| {
        let stem = args.recipe.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let stamp = chrono::Local::now().format("%Y%m%d-%H%M%S");
        PathBuf::from("runs").join(format!("{stem}-{}-{stamp}", recipe.method_name()))
    });
    let stop = process::watch_signals()?;
    ranks.watch(Duration::from_secs_f64(args.rank_timeout), &stop);
    mcl::nets::check_instructions()?;
    let threads = device::set_threads_among(args.threads, ranks.place().local_count).map_err(|e| Error::input(format!("--{e}")))?;
    let job = Job {
        recipe,
        out,
        data: args.data,
        device: args.device.of_rank(ranks.place()),
        threads,
        resume: args.resume,
        from: args.from,
        init: args.init,
        quiet: args.quiet,
        commit: COMMIT,
        ranks,
        stop: &stop,
    };
    let summary = train::run(job)?;
    if ranks.leads() {
        print_summary(&summary, &dataset, data.as_deref());
    }
    Ok(())
}

fn compare(args: CompareArgs) -> Result<()> {
    if let Some(count) = ranks::launched().filter(|&count| count > 1) {
        return Err(Error::input(format!(
            "compare was started as {count} ranks, and it starts its runs itself; start it once, or each `mcl-train run` on {count} ranks"
        )));
    }
    let stop = process::watch_signals()?;
    let stem = args.recipe.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let out = args.out.unwrap_or_else(|| PathBuf::from("runs").join(format!("compare-{stem}")));
    let comparison = Comparison {
        recipe: &args.recipe,
        methods: &args.methods,
        seeds: args.seeds,
        out: &out,
        sets: &args.sets,
        data: args.data.as_deref(),
        device: &args.device,
        threads: args.threads,
        quiet: args.quiet,
        stop: &stop,
    };
    let (table, failed) = compare::run(&comparison)?;
    println!("\nTest top-1 (%), mean ± standard deviation over seeds; also in {}\n", out.join("comparison.md").display());
    print!("{}", table.plain());
    if failed.is_empty() { Ok(()) } else { Err(Error::failed(format!("failed: {}", failed.join("; ")))) }
}

fn print_summary(summary: &Summary, dataset: &str, data: Option<&Path>) {
    println!();
    let mut shown = Table::new("", &[&["test top-1 (%)"], &FOUR_WAYS[..]].concat());
    for (m, network) in summary.networks.iter().enumerate() {
        let name = Cell::text(format!("network {m} {}", network.arch));
        shown.push(std::iter::once(name).chain(network.accuracy.cells()).collect());
    }
    let ensemble = vec![Cell::text("ensemble"), Cell::Score(summary.ensemble_top1, 2), Cell::Empty, Cell::Empty, Cell::Empty];
    shown.push(ensemble);
    print!("{}", shown.plain());
    match summary.best {
        Some(best) => println!(
            "The held-out part chose network {}{} at epoch {} ({:.2} % there): {}",
            best.peer,
            best.stage.map_or(String::new(), |stage| format!(", stage {stage},")),
            best.epoch,
            best.holdout_top1,
            RunFolder::at(&summary.out).best_network().display()
        ),
        None => println!("No choice was made: the last epoch ships (data.holdout = 0, or train.choose = \"last\")."),
    }
    println!("{}, {}, {}", counted(summary.epochs, "epoch"), counted(summary.steps, "step"), clock_time(summary.seconds));
    println!();
    let out = summary.out.display();
    println!("Run folder   {out}");
    println!("Networks     {}", summary.shipped.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join("  "));
    for (i, line) in next::lines(&next::after_run(&summary.out, dataset, data)).iter().enumerate() {
        println!("{:<12} {line}", if i == 0 { "Next" } else { "" });
    }
}
