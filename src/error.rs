//! The one error type of the library. A message names the thing, its value, where it came from and what would be accepted.

use std::io;
use std::path::{Path, PathBuf};

/// What may fail with an `Error`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, and by its kind which exit code a program ends with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user can mend it: a flag, a recipe key, a file that is not what it should be. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// A name that is in no registry. Exit code 2.
    #[error("unknown {kind} `{name}`; known: {known}")]
    Unknown {
        /// Of what registry, e.g. `method`.
        kind: &'static str,
        /// What was asked for.
        name: String,
        /// What could have been.
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
    /// The machine said no: full disk, read-only folder, broken connection. Exit code 1.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried, e.g. `cannot write`.
        what: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The run failed. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// A term or a gradient is not finite; the weights were not touched. Exit code 1.
    #[error("diverged at step {step}: {what}")]
    Diverged {
        /// The step that was not taken.
        step: usize,
        /// Which number was not finite.
        what: String,
    },
    /// Asked to stop; everything is saved. Exit code 75 (EX_TEMPFAIL: run the same command with --resume).
    #[error("{0}")]
    Interrupted(String),
    /// A call of libtorch failed. Exit code 1.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

impl Error {
    /// Something the user can mend.
    pub fn input(message: impl Into<String>) -> Error {
        Error::Input(message.into())
    }

    /// Something the user cannot mend.
    pub fn failed(message: impl Into<String>) -> Error {
        Error::Failed(message.into())
    }

    /// A fault in the content of a user's file.
    pub fn file(path: impl AsRef<Path>, what: impl Into<String>) -> Error {
        Error::File { path: path.as_ref().to_path_buf(), what: what.into() }
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

    /// For `map_err` on a method's or protocol's own options: names the table they stand in.
    pub fn options<E: std::fmt::Display>(table: &str) -> impl FnOnce(E) -> Error {
        let table = table.to_string();
        move |e| Error::Input(format!("[{table}]: {}", e.to_string().trim_end()))
    }

    /// What a program ends with: 2 the input is wrong, 75 stopped and saved, 1 anything else.
    pub fn exit_code(&self) -> i32 {
        match self {
            Error::Input(_) | Error::Unknown { .. } | Error::File { .. } => 2,
            Error::Interrupted(_) => 75,
            Error::Io { .. } | Error::Failed(_) | Error::Diverged { .. } | Error::Torch(_) => 1,
        }
    }
}
