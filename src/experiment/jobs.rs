//! Runs and measurements as processes of their own, so that a run's peak memory is its own and one that fails takes nothing with it:
//! planned, started, waited for, told to stop.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tch::Device;

use crate::error::{Error, Result};
use crate::files;
use crate::methods::{self, Task};
use crate::nets;
use crate::recipe::Recipe;
use crate::run::{RunFolder, Summary};

/// A run to be made: its recipe, the overrides that ask for it, its folder.
pub struct Planned {
    pub sets: Vec<String>,
    pub recipe: Recipe,
    pub out: PathBuf,
}

impl Planned {
    /// How the run came out, if it is finished; refused where its folder holds a run of another recipe (`flag` chooses another folder).
    pub fn summary(&self, flag: &str) -> Result<Option<Summary>> {
        let (asked, path) = (RunFolder::at(&self.out).asked(), RunFolder::at(&self.out).summary());
        if asked.exists() {
            let before = std::fs::read_to_string(&asked).map_err(Error::open(&asked))?;
            if before != self.recipe.to_toml() {
                return Err(Error::input(format!(
                    "{} was begun with another recipe (compare it with {}); choose another {flag}",
                    self.out.display(),
                    asked.display()
                )));
            }
        }
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).map_err(Error::open(&path))?;
        serde_json::from_str(&text).map(Some).map_err(|e| Error::file(&path, format!("is no summary of a run: {e}")))
    }

    /// `mcl-train run` that starts the run or goes on with it; `flags` are handed on.
    pub fn command(&self, program: &Path, protocol: &Path, flags: &[String]) -> Result<Command> {
        std::fs::create_dir_all(&self.out).map_err(Error::io("cannot make", &self.out))?;
        files::write(&RunFolder::at(&self.out).asked(), self.recipe.to_toml().as_bytes())?;
        let mut command = Command::new(program);
        command.arg("run").arg(protocol).arg("--out").arg(&self.out).arg("--resume").args(flags);
        for set in &self.sets {
            command.args(["--set", set]);
        }
        Ok(command)
    }
}

/// Does the method take this cohort and these options? Asked with ten classes of two images: the data are opened by the run.
pub fn accepts(recipe: &Recipe) -> Result<()> {
    let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
    let labels: Vec<i64> = (0..20).map(|i| i % 10).collect();
    let task = Task::new(recipe, &archs, 10, &labels, Device::Cpu);
    (methods::find(recipe.method_name())?.build)(&task, recipe.method_options()).map(drop)
}

/// How a process ended.
pub struct Ended {
    /// None where a signal ended it.
    pub code: Option<i32>,
    /// Of all its threads. Unlike the clock, it does not count what others did meanwhile.
    pub cpu_seconds: f64,
}

/// Runs a command to its end. When `stop` is set it is told to stop, and its end is waited for.
pub fn run(mut command: Command, stop: &AtomicBool) -> Result<Ended> {
    // What a command prints at its end is for a person who runs it alone.
    command.stdout(Stdio::null());
    die_with_parent(&mut command);
    let program = PathBuf::from(command.get_program());
    let pid = command.spawn().map_err(Error::io("cannot start", &program))?.id() as libc::pid_t;
    let mut told = false;
    loop {
        // SAFETY: all-zero bytes are a valid rusage.
        let (mut status, mut used) = (0, unsafe { std::mem::zeroed::<libc::rusage>() });
        // SAFETY: nobody else waits for the child, so the number is its own until this call says that it ended.
        match unsafe { libc::wait4(pid, &mut status, libc::WNOHANG, &mut used) } {
            0 => {}
            ended if ended == pid => {
                let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
                let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
                return Ok(Ended { code, cpu_seconds: seconds(used.ru_utime) + seconds(used.ru_stime) });
            }
            _ => {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(Error::io("cannot wait for", &program)(error));
                }
            }
        }
        if !told && stop.load(Ordering::Relaxed) {
            // SAFETY: the child has not been waited for, so the number is still its own.
            unsafe { libc::kill(pid, libc::SIGTERM) };
            told = true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A run whose comparison was killed saves and stops too, so that the next call finds its folder free.
#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: prctl may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent(_: &mut Command) {}

/// Ctrl-C, SIGTERM and SIGUSR1 (Slurm's warning) ask for a stop at the next step; a second Ctrl-C ends at once with 130.
pub fn watch_signals(stop: &Arc<AtomicBool>) -> Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
    let failed = |e: std::io::Error| Error::failed(format!("cannot watch for signals: {e}"));
    signal_hook::flag::register_conditional_shutdown(SIGINT, 130, stop.clone()).map_err(failed)?;
    for signal in [SIGINT, SIGTERM, SIGUSR1] {
        signal_hook::flag::register(signal, stop.clone()).map_err(failed)?;
    }
    Ok(())
}
