//! The one error type of the library. A message names the thing, its value, where it came from and what would be accepted.

mod nearest;

use std::io;
use std::path::{Path, PathBuf};

pub use nearest::{counted, did_you_mean, in_words, nearest};

/// A result of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, by whose it is to mend.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user can mend it: a flag, a recipe key, a file that is not what it should be. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// A name that is in no registry. Exit code 2.
    #[error("unknown {kind} `{name}`{}; known: {known}", did_you_mean(name, known.split(", ")))]
    Unknown {
        /// What kind of thing was looked for: a method, a dataset.
        kind: &'static str,
        /// The name that was given.
        name: String,
        /// The names there are, with commas between.
        known: String,
    },
    /// A file of the user's that cannot be read as what it should be. Exit code 2.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A value of the call that was left out, or would do otherwise, mends it: `arch`, `allow_partial`. Exit code 2.
    #[error("{}", said(path.as_deref(), what, values, |value| format!("`{value}`")))]
    Value {
        /// The file it is about.
        path: Option<PathBuf>,
        /// What is wrong and what would mend it, with `{value}` where a value is named.
        what: String,
        /// The values that `what` names.
        values: &'static [&'static str],
    },
    /// The machine said no: full disk, read-only folder, broken connection. Exit code 1.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried: "cannot write".
        what: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The run failed. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// A term, a gradient or a weight is not finite. Exit code 1.
    #[error("diverged at step {step}: {what}")]
    Diverged {
        /// Steps since the beginning of the run, from 0.
        step: usize,
        /// Which one, and which weights had changed by then.
        what: String,
    },
    /// A device or the machine has no memory left; nothing that was saved is lost. Exit code 1.
    #[error("{0}")]
    Exhausted(String),
    /// Asked to stop; everything is saved. Exit code 75 (EX_TEMPFAIL: run the same command with --resume).
    #[error("{0}")]
    Interrupted(String),
    /// libtorch refused an operation. Exit code 1.
    #[error("libtorch: {}", libtorch_line(&.0.to_string()))]
    Torch(#[from] tch::TchError),
}

/// Why tch could not write a file: the system's words, which it gives inside its own.
pub fn disk_fault(e: &tch::TchError) -> String {
    let said = e.to_string();
    let words = said.split_once("message: \"").and_then(|(_, rest)| rest.split_once('"')).map(|(words, _)| words.to_string());
    words.unwrap_or(said)
}

impl Error {
    /// Something the user can mend, in one line that says what would be accepted.
    pub fn input(message: impl Into<String>) -> Error {
        Error::Input(message.into())
    }

    /// A run that failed, in one line.
    pub fn failed(message: impl Into<String>) -> Error {
        Error::Failed(message.into())
    }

    /// A fault in the content of a user's file.
    pub fn file(path: impl AsRef<Path>, what: impl Into<String>) -> Error {
        Error::File { path: path.as_ref().to_path_buf(), what: what.into() }
    }

    /// A fault that other values of the call would mend; `what` names them in braces: `{arch}`.
    pub fn value(values: &'static [&'static str], what: impl Into<String>) -> Error {
        Error::Value { path: None, what: what.into(), values }
    }

    /// The same about a user's file.
    pub fn value_for(path: impl AsRef<Path>, values: &'static [&'static str], what: impl Into<String>) -> Error {
        Error::Value { path: Some(path.as_ref().to_path_buf()), what: what.into(), values }
    }

    /// For `map_err` on writes and other operations on our own files: `.map_err(Error::io("cannot write", &path))`.
    pub fn io(what: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Error {
        let path = path.as_ref().to_path_buf();
        move |source| Error::Io { what, path, source }
    }

    /// For `map_err` on opening what the user named: a file that is missing or unreadable is theirs to mend (exit code 2).
    pub fn open(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Error {
        let path = path.as_ref().to_path_buf();
        move |source| Error::File { path, what: format!("cannot be read: {source}") }
    }

    /// For `map_err` on a method's or protocol's own options: names the table they stand in, in one line (the reader of TOML says the
    /// place of a nested key on a line of its own).
    pub fn options<E: std::fmt::Display>(table: &str) -> impl FnOnce(E) -> Error {
        let table = table.to_string();
        move |e| Error::Input(format!("[{table}]: {}", in_words(&e.to_string())))
    }

    /// The message as the one line that a program prints: without libtorch's list of frames, and cut where a hostile file put a novel.
    pub fn line(&self) -> String {
        one_line(&self.to_string())
    }

    /// The same line as a program prints it whose flags are the values of the call: `--allow-partial` for `allow_partial`.
    pub fn line_in_flags(&self) -> String {
        match self {
            Error::Value { path, what, values } => {
                one_line(&said(path.as_deref(), what, values, |value| format!("--{}", value.replace('_', "-"))))
            }
            other => other.line(),
        }
    }

    /// The exit code of a command that ends with this error.
    pub fn exit_code(&self) -> i32 {
        match self {
            Error::Input(_) | Error::Unknown { .. } | Error::File { .. } | Error::Value { .. } => 2,
            Error::Interrupted(_) => 75,
            Error::Io { .. } | Error::Failed(_) | Error::Exhausted(_) | Error::Diverged { .. } | Error::Torch(_) => 1,
        }
    }
}

/// A message about a file with its values said in some way.
fn said(path: Option<&Path>, what: &str, values: &[&str], how: impl Fn(&str) -> String) -> String {
    let what = values.iter().fold(what.to_string(), |what, value| what.replace(&format!("{{{value}}}"), &how(value)));
    path.map_or(String::new(), |path| format!("{}: ", path.display())) + &what
}

/// How long a message may be.
const LONGEST: usize = 2000;

/// A text as one line of everyday length, without what follows libtorch's "Exception raised from".
pub fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Exception raised from"));
    let line = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    // Control characters would let a file's names write to the terminal.
    let mut shown: String = line.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).take(LONGEST).collect();
    if shown.len() < line.len() {
        shown.push_str("...");
    }
    shown
}

/// What libtorch says, in our words where it is about memory.
pub fn libtorch_line(text: &str) -> String {
    let line = one_line(text).trim_start_matches("Internal torch error: ").to_string();
    match line.split_once("you tried to allocate ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok()) {
        Some(bytes) => format!("not enough memory: a tensor of {:.1} GB could not be made", bytes as f64 / 1e9),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSAL: &str = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)\nException raised from alloc_cpu at ../c10/core/impl/alloc_cpu.cpp:127 (most recent call first):\nframe #0: c10::Error::Error(c10::SourceLocation) + 0x57";

    #[test]
    fn a_program_says_values_as_its_flags() {
        let error = Error::value_for("a/{pool}.pth", &["allow_partial"], "does not fit; {allow_partial} loads what matches");
        assert_eq!(error.line(), "a/{pool}.pth: does not fit; `allow_partial` loads what matches");
        assert_eq!(error.line_in_flags(), "a/{pool}.pth: does not fit; --allow-partial loads what matches");
        assert_eq!(error.exit_code(), 2);
        assert_eq!(Error::input("{arch}").line_in_flags(), "{arch}");
    }

    #[test]
    fn a_page_of_frames_becomes_one_line() {
        assert_eq!(libtorch_line(REFUSAL), "not enough memory: a tensor of 400.0 GB could not be made");
        let error =
            Error::Torch(tch::TchError::Torch("shape '[2]' is invalid for input of size 3\nException raised from view\nframe #0".into()));
        assert_eq!(error.line(), "libtorch: shape '[2]' is invalid for input of size 3");
        assert_eq!(Error::input("a\n  b\u{1b}[2J").line(), "a b\u{fffd}[2J");
        assert_eq!(Error::input("x".repeat(5000)).line().len(), 2003);
    }
}
