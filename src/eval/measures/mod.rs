//! The measurements: one file and one entry each. The registry makes the subcommands of `mcl-eval`, their `--protocol`, the lists, and the
//! checks of a plan's lines. A measurement uses what stands in `eval`, never another measurement.

pub mod accuracy;
pub mod centroid;
pub mod cohort;
pub mod compare;
pub mod few_shot;
pub mod fine_tune;
pub mod knn;
pub mod lambda;
pub mod linear_probe;
pub mod tsne;

use clap::{ArgMatches, Command, FromArgMatches};
use serde_json::Value;

use super::Common;
use super::protocol::{HowArgs, Shipped};
use crate::error::{Error, Result};

/// Every measurement.
pub const MEASURES: &[Measure] = &[
    Measure::of::<accuracy::Args>(),
    Measure::of::<linear_probe::Args>(),
    Measure::of::<knn::Args>(),
    Measure::of::<centroid::Args>(),
    Measure::of::<few_shot::Args>(),
    Measure::of::<fine_tune::Args>(),
    Measure::of::<tsne::Args>(),
    Measure::of::<cohort::Args>(),
    Measure::of::<lambda::Args>(),
    Measure::of::<compare::Args>(),
];

/// What a measurement's file says: its arguments are the type this is implemented for.
pub trait Measurement: clap::Args {
    /// Its subcommand, and `command` in its rows.
    const NAME: &'static str;
    /// What it does, in a line.
    const ABOUT: &'static str;
    /// The protocols that ship; a file that names no kind has the keys of the first. With any, the arguments flatten `HowArgs`.
    const PROTOCOLS: &'static [Shipped] = &[];
    /// The protocol that is followed when none is named.
    const DEFAULT_PROTOCOL: &'static str = match Self::PROTOCOLS.first() {
        Some(first) => first.name,
        None => "",
    };

    /// Refuses arguments and protocols that make no sense, looking at no network and no data.
    fn check(&self) -> Result<()>;

    /// Measures, keeps the rows and shows them.
    fn run(&self, common: &Common) -> Result<()>;
}

/// An entry of the registry.
#[derive(Debug)]
pub struct Measure {
    /// Its subcommand, and `command` in its rows.
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// The protocols that ship.
    pub protocols: &'static [Shipped],
    default_protocol: &'static str,
    arguments: fn(Command) -> Command,
    check: fn(&ArgMatches) -> Result<()>,
    run: fn(&ArgMatches, &Common) -> Result<()>,
}

impl Measure {
    /// The entry of a measurement.
    const fn of<M: Measurement>() -> Measure {
        Measure {
            name: M::NAME,
            about: M::ABOUT,
            protocols: M::PROTOCOLS,
            default_protocol: M::DEFAULT_PROTOCOL,
            arguments: M::augment_args,
            check: |matches| read::<M>(matches)?.check(),
            // All that is wrong with the words is said before a network is opened.
            run: |matches, common| {
                let arguments = read::<M>(matches)?;
                arguments.check()?;
                arguments.run(common)
            },
        }
    }

    /// Its subcommand with all arguments.
    pub fn command(&self) -> Command {
        let command = (self.arguments)(Command::new(self.name)).about(self.about);
        if self.protocols.is_empty() {
            return command;
        }
        let names: Vec<&str> = self.protocols.iter().map(|p| p.name).collect();
        let help = format!("{} or a TOML file [default: {}]", names.join(", "), self.default_protocol);
        command.mut_arg("protocol", |argument| argument.help(help))
    }

    /// Measures as its arguments say.
    pub fn run(&self, arguments: &ArgMatches, common: &Common) -> Result<()> {
        (self.run)(arguments, common)
    }
}

fn read<M: Measurement>(matches: &ArgMatches) -> Result<M> {
    M::from_arg_matches(matches).map_err(|e| Error::input(one_line(&e)))
}

/// What clap complains about, in a line: without the usage it appends, its tip as we ask elsewhere.
pub fn one_line(complaint: &clap::Error) -> String {
    let text = complaint.to_string();
    let ends = |line: &&str| !line.starts_with("Usage:") && !line.starts_with("For more information");
    let (mut said, mut tip) = (String::new(), String::new());
    for line in text.lines().map(str::trim).take_while(ends).filter(|line| !line.is_empty()) {
        if let Some(given) = line.strip_prefix("tip: ") {
            let names = given.split_once(": ").filter(|(what, _)| what.contains("similar")).map(|(_, names)| names.replace('\'', "`"));
            tip = names.map_or(tip, |names| format!(" (did you mean {names}?)"));
        } else if let Some(values) = line.strip_prefix("[possible values: ") {
            said += &format!("; known: {}", values.trim_end_matches(']'));
        } else {
            said += if said.is_empty() {
                ""
            } else if said.ends_with(':') {
                " "
            } else {
                ", "
            };
            said += line;
        }
    }
    for (theirs, ours) in NUMBERS {
        said = said.replace(theirs, ours);
    }
    said.trim_start_matches("error: ").to_string() + &tip
}

/// What Rust's readers of numbers say, and what a person would.
const NUMBERS: &[(&str, &str)] = &[
    ("invalid digit found in string", "accepted: a whole number, 0 or more"),
    ("number too large to fit in target type", "the number is too large"),
    ("invalid float literal", "accepted: a number"),
    ("cannot parse integer from empty string", "accepted: a whole number, 0 or more"),
    ("cannot parse float from empty string", "accepted: a number"),
];

/// The shipped protocol of this kind; none for a kind that no measurement follows.
pub fn shipped(kind: &str) -> Option<&'static Shipped> {
    MEASURES.iter().flat_map(|m| m.protocols).find(|p| p.name == kind)
}

/// What the options of a row changed of the protocol that ships under their kind, as `key=value`; keys that only say how many rows are
/// made do not count.
pub fn changed_keys(options: &Value) -> Vec<String> {
    let Some(shipped) = options["kind"].as_str().and_then(shipped) else { return vec![] };
    let ships = shipped.protocol().json();
    let counts = |key: &str| key != "kind" && !shipped.repeats.contains(&key);
    let changed = |(key, value): (&String, &Value)| {
        let changed = counts(key) && ships.get(key).is_some_and(|ships| ships != value);
        changed.then(|| format!("{key}={value}"))
    };
    options.as_object().into_iter().flatten().filter_map(changed).collect()
}

/// Refuses a line of a plan (`linear-probe --dataset stl10 --protocol lbfgs`, without `--run`) that `mcl-eval` would refuse: an unknown
/// measurement, a wrong flag, a protocol with values that make no sense. Looks at no network and no data. Gives the side that its protocol brings
/// images to; 0 where that is the network's own.
pub fn check_line(line: &str) -> Result<i64> {
    let known = || MEASURES.iter().map(|m| m.name).collect::<Vec<_>>().join(", ");
    let Some(name) = line.split_whitespace().next() else {
        return Err(Error::input(format!("an empty line names no measurement; known: {}", known())));
    };
    let measure = MEASURES.iter().find(|m| m.name == name).ok_or_else(|| Error::Unknown {
        kind: "measurement",
        name: name.to_string(),
        known: known(),
    })?;
    // The first word stands where a program's name does.
    let matches = measure.command().try_get_matches_from(line.split_whitespace()).map_err(|e| Error::input(one_line(&e)))?;
    (measure.check)(&matches)?;
    if measure.protocols.is_empty() {
        return Ok(0);
    }
    let how = HowArgs::from_arg_matches(&matches).map_err(|e| Error::input(one_line(&e)))?;
    Ok(how.protocol(measure.protocols, measure.default_protocol)?.image_size())
}
