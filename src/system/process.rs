//! Programs as processes of their own, so that a run's peak memory is its own and one that fails takes nothing with it: found, started,
//! waited for, told to stop. And the signals that tell this process to stop.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};

/// The exit code of a program that was told to stop and saved (EX_TEMPFAIL): the same command goes on.
pub(crate) const STOPPED: i32 = 75;

/// The running program.
pub(crate) fn own_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|e| Error::failed(format!("cannot find the running program: {e}")))
}

/// How a process ended.
pub(crate) struct Ended {
    /// None where a signal ended it.
    pub(crate) code: Option<i32>,
    /// Of all its threads. Unlike the clock, it does not count what others did meanwhile.
    pub(crate) cpu_seconds: f64,
}

/// Runs a command to its end. When `stop` is set it is told to stop, and its end is waited for.
pub(crate) fn run(mut command: Command, stop: &AtomicBool) -> Result<Ended> {
    // What a command prints at its end is for a person who runs it alone.
    command.stdout(Stdio::null());
    stop_with_parent(&mut command);
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

/// A child whose parent was killed saves and stops too, so that the next call finds its folder free.
#[cfg(target_os = "linux")]
fn stop_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let parent = std::process::id() as libc::pid_t;
    // SAFETY: prctl and getppid may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            // Killed in between: nobody is left to send the signal.
            if libc::getppid() == parent { Ok(()) } else { Err(std::io::Error::from_raw_os_error(libc::ESRCH)) }
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn stop_with_parent(_: &mut Command) {}

/// A flag that Ctrl-C, SIGTERM and SIGUSR1 (Slurm's warning) set: it asks for a stop at the next step. A second Ctrl-C ends at once with 130.
pub fn watch_signals() -> Result<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
    let stop = Arc::new(AtomicBool::new(false));
    let failed = |e: std::io::Error| Error::failed(format!("cannot watch for signals: {e}"));
    signal_hook::flag::register_conditional_shutdown(SIGINT, 130, stop.clone()).map_err(failed)?;
    for signal in [SIGINT, SIGTERM, SIGUSR1] {
        signal_hook::flag::register(signal, stop.clone()).map_err(failed)?;
    }
    Ok(stop)
}
