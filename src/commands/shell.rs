//! What a shell and `man` want to know of a program, from the same arguments that the program reads: `completions`, `man`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{Command, Parser, Subcommand};
use clap_complete::Shell;

use crate::error::{Error, Result};
use crate::eval::measures::{MEASURES, one_line};
use crate::experiment::table::PLANS;
use crate::recipe::shipped::RECIPES;
use crate::{data, export, files, methods, nets};

/// The arguments a program was started with. Help and version are printed, asked for or in place of a missing command; what is wrong is said
/// in a line, and the code to leave with comes back.
pub fn parse<P: Parser>() -> Result<P, ExitCode> {
    P::try_parse().map_err(|e| {
        if !e.use_stderr() || e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            e.exit();
        }
        eprintln!("{}: {} (--help shows what is accepted)", P::command().get_name(), one_line(&e));
        ExitCode::from(2)
    })
}

/// Commands of both programs.
#[derive(Subcommand)]
pub enum ShellCommand {
    /// Print a script with which a shell completes commands, flags and names
    Completions {
        /// Which shell
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print the manual page, e.g. `mcl-eval man | man -l -`
    Man {
        /// Write a page for every command to this folder instead
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

impl ShellCommand {
    /// Prints or writes it for `program`.
    pub fn run(&self, program: Command) -> Result<()> {
        match self {
            ShellCommand::Completions { shell } => {
                let name = program.get_name().to_string();
                let hidden: Vec<String> =
                    program.get_arguments().filter(|a| a.is_hide_set()).filter_map(|a| Some(format!("--{}", a.get_long()?))).collect();
                let mut script = vec![];
                clap_complete::generate(*shell, &mut with_names(program), name.clone(), &mut script);
                // clap_complete 4.6 has two spellings for the commands of a program with a hyphen in its name: bash would find none.
                let spelt = |hyphen: &str| format!("{}__subcmd__", name.replace('-', hyphen));
                let script = String::from_utf8_lossy(&script).replace(&spelt("__subcmd__"), &spelt("__"));
                print!("{}", without_hidden(script, &hidden));
                Ok(())
            }
            ShellCommand::Man { out: None } => {
                print!("{}", String::from_utf8_lossy(&page(&program)?));
                Ok(())
            }
            ShellCommand::Man { out: Some(folder) } => {
                std::fs::create_dir_all(folder).map_err(Error::io("cannot make", folder))?;
                let name = program.get_name().to_string();
                let written = pages(program, folder)?;
                println!("{written} pages in {0}; `man {0}/{name}.1` shows one", folder.display());
                Ok(())
            }
        }
    }
}

/// The script without the flags that help does not show either: bash has them in lists of words, zsh in lines of their own.
fn without_hidden(script: String, hidden: &[String]) -> String {
    let about = |line: &str| hidden.iter().any(|flag| line.starts_with(&format!("'{flag}=")));
    let kept: String = script.lines().filter(|line| !about(line)).map(|line| format!("{line}\n")).collect();
    hidden.iter().fold(kept, |script, flag| script.replace(&format!(" {flag} "), " "))
}

/// The same program, in which flags for names know the names. Only for completions: what is typed is checked where the names are used.
fn with_names(program: Command) -> Command {
    let measure = MEASURES.iter().find(|measure| measure.name == program.get_name());
    let command = program.get_name().to_string();
    let known = |id: &str| -> Vec<&'static str> {
        match id {
            "protocol" => measure.map_or(vec![], |measure| measure.protocols.iter().map(|protocol| protocol.name).collect()),
            // `evidence` takes a file under this word.
            "plan" if command == "table" => PLANS.iter().map(|plan| plan.name).collect(),
            "to" if command == "export" => export::formats(),
            "dataset" | "to" => data::DATASETS.iter().map(|set| set.name).collect(),
            "name" if ["check", "fetch"].contains(&command.as_str()) => data::DATASETS.iter().map(|set| set.name).collect(),
            "device" => vec!["auto", "cpu", "cuda:0"],
            "arch" => nets::archs().map(|arch| arch.name).collect(),
            "recipe" => RECIPES.iter().map(|recipe| recipe.name).collect(),
            "methods" => methods::names(),
            _ => vec![],
        }
    };
    let program = program.mut_args(|argument| match known(argument.get_id().as_str()) {
        names if names.is_empty() => argument,
        names => argument.value_parser(PossibleValuesParser::new(names)),
    });
    program.mut_subcommands(with_names)
}

/// The manual page of a command.
fn page(command: &Command) -> Result<Vec<u8>> {
    let mut page = vec![];
    let written = clap_mangen::Man::new(command.clone()).render(&mut page);
    written.map_err(|e| Error::failed(format!("cannot make a manual page: {e}"))).map(|()| page)
}

/// Writes the pages of a command and of all below it: mcl-eval.1, mcl-eval-knn.1. Returns how many.
fn pages(mut command: Command, folder: &Path) -> Result<usize> {
    command.build(); // names what is below it: `mcl-eval knn`
    fn write(command: &Command, folder: &Path) -> Result<usize> {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_string();
        files::write(&folder.join(format!("{name}.1")), &page(command)?)?;
        let below = command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help");
        below.map(|c| write(c, folder)).sum::<Result<usize>>().map(|count| count + 1)
    }
    write(&command, folder)
}
