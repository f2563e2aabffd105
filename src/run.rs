//! The folder a run leaves behind: recipe, environment, log, metrics, and the lock that keeps a second trainer out.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::error::{Error, Result};
use crate::files;
use crate::system::ranks;

/// An open run folder; the lock goes with the process.
pub struct RunFolder {
    pub path: PathBuf,
    log: File,
    _lock: File,
}

impl RunFolder {
    /// Makes or opens the folder and locks it.
    pub fn open(path: &Path) -> Result<RunFolder> {
        fs::create_dir_all(path).map_err(Error::io("cannot make the run folder", path))?;
        let lock_path = path.join("lock");
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path).map_err(Error::io("cannot write", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                return Err(Error::input(format!(
                    "another process is training in {}; choose another --out or wait for it",
                    path.display()
                )));
            }
            Err(fs::TryLockError::Error(e)) => return Err(Error::io("cannot lock", &lock_path)(e)),
        }
        let log_path = path.join("log.txt");
        let log = OpenOptions::new().create(true).append(true).open(&log_path).map_err(Error::io("cannot write", &log_path))?;
        Ok(RunFolder { path: path.to_path_buf(), log, _lock: lock })
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Appends a line to log.txt with the time in front.
    pub fn log(&mut self, line: &str) -> Result<()> {
        let stamp = chrono::Local::now().format("%Y-%m-%d %H:%M:%S");
        writeln!(self.log, "{stamp} {line}").map_err(Error::io("cannot write", self.path.join("log.txt")))
    }

    /// `latest` beside the run, where the run stands in a folder called `runs`.
    pub fn point_latest(&self) -> Result<()> {
        let full = self.path.canonicalize().map_err(Error::io("cannot find", &self.path))?;
        match (full.parent(), full.file_name()) {
            (Some(parent), Some(name)) if parent.file_name().is_some_and(|p| p == "runs") => {
                files::point(&parent.join("latest"), &name.to_string_lossy())
            }
            _ => Ok(()),
        }
    }
}

/// What a number was computed with.
pub fn environment(device: &str, threads: usize) -> serde_json::Value {
    json!({
        "mcl": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("MCL_COMMIT").unwrap_or("unknown"),
        "tch": "0.26",
        "libtorch": libtorch_version(),
        "device": device,
        "threads": threads,
        "ranks": ranks::count(),
        "cpu": cpu_model(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_mb": memory_mb(),
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
        "command": std::env::args().collect::<Vec<_>>().join(" "),
        "started": chrono::Local::now().to_rfc3339(),
    })
}

/// The version the build was made against; torch-sys refuses others.
pub fn libtorch_version() -> String {
    let file = Path::new(env!("MCL_LIBTORCH_LIB")).join("../build-version");
    fs::read_to_string(file).map_or_else(|_| "unknown".to_string(), |v| v.trim().to_string())
}

pub fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':'));
    model.map_or_else(|| "unknown".to_string(), |(_, name)| name.trim().to_string())
}

fn memory_mb() -> u64 {
    proc_kb("/proc/meminfo", "MemTotal:") / 1024
}

/// Peak resident memory of this process.
pub fn peak_mb() -> u64 {
    proc_kb("/proc/self/status", "VmHWM:") / 1024
}

/// A "Key:  123 kB" line; 0 where there is no /proc.
fn proc_kb(file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().find_map(|l| l.strip_prefix(key)).and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
