//! `mcl-eval doctor`: is everything there that a run needs? One line each, and the command that mends what is not.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tch::{Cuda, Device, Kind, Tensor};

use crate::data::{self, check};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::system::gpu;
use crate::system::machine;
use crate::system::ranks;

/// The libtorch tch 0.26 is made for.
const LIBTORCH: &str = "2.13.0";
/// Less than this much free space is worth a word.
const ENOUGH_MB: u64 = 2048;

#[derive(PartialEq)]
enum State {
    Ok,
    /// Not there, and nothing is wrong with that.
    Absent,
    Broken,
}

struct Finding {
    name: &'static str,
    state: State,
    what: String,
    mend: Option<String>,
}

fn ok(name: &'static str, what: String) -> Finding {
    Finding { name, state: State::Ok, what, mend: None }
}

fn broken(name: &'static str, what: String, mend: &str) -> Finding {
    Finding { name, state: State::Broken, what, mend: Some(mend.to_string()) }
}

/// Prints every finding; fails when something that a run needs is broken.
pub fn run(common: &Common) -> Result<()> {
    let mut findings = vec![version(), loaded(), arithmetic(), cuda(), mps(), mpi(), cores(common)];
    findings.extend(datasets(common));
    findings.extend(disk());
    if common.json {
        let state = |f: &Finding| match f.state {
            State::Ok => "ok",
            State::Absent => "absent",
            State::Broken => "broken",
        };
        let all: Vec<_> = findings.iter().map(|f| json!({ "name": f.name, "state": state(f), "what": f.what, "mend": f.mend })).collect();
        println!("{}", json!({ "findings": all }));
    } else {
        for f in &findings {
            let mark = match f.state {
                State::Ok => "ok",
                State::Absent => "--",
                State::Broken => "!!",
            };
            println!("{mark}  {:<13} {}{}", f.name, f.what, f.mend.as_ref().map_or(String::new(), |m| format!("; {m}")));
        }
    }
    match findings.iter().filter(|f| f.state == State::Broken).count() {
        0 => Ok(()),
        n => Err(Error::failed(format!("{n} of {} checks failed", findings.len()))),
    }
}

fn version() -> Finding {
    let found = machine::libtorch_version();
    let folder = machine::libtorch_folder();
    let folder = folder.display();
    if found.split('+').next() == Some(LIBTORCH) {
        return ok("libtorch", format!("{found} in {folder}"));
    }
    let mend = match machine::built_with().exists() {
        true => "mend: unset LIBTORCH and LD_LIBRARY_PATH, then `make build`",
        // Installed from a wheel.
        false => "mend: `pip install torch==2.13.0`",
    };
    broken("libtorch", format!("{found} in {folder}, tch 0.26 needs {LIBTORCH}"), mend)
}

/// The library this process really runs on, against the one it was built with (a stray LD_LIBRARY_PATH). A program from a wheel was built
/// with one that is not here.
fn loaded() -> Finding {
    let (built, runs_on) = (machine::built_with(), machine::libtorch_folder());
    if runs_on == built || !built.exists() || runs_on.canonicalize().ok() == built.canonicalize().ok() {
        return ok("rpath", format!("loaded from {}", runs_on.display()));
    }
    broken(
        "rpath",
        format!("the libtorch in {} is loaded, the build was made with {}", runs_on.display(), built.display()),
        "mend: unset LD_LIBRARY_PATH, or `make build` again",
    )
}

fn arithmetic() -> Finding {
    let a = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    let sum = a.matmul(&a.tr()).sum(Kind::Double).double_value(&[]);
    if sum == 83.0 {
        ok("arithmetic", "a matrix product comes out right".into())
    } else {
        broken("arithmetic", format!("a matrix product that is 83 gave {sum}"), "mend: `make build` with another libtorch")
    }
}

fn cuda() -> Finding {
    let count = Cuda::device_count();
    if Cuda::is_available() {
        let cudnn = if Cuda::cudnn_is_available() { "there" } else { "missing" };
        let room = |n: usize| {
            let memory = gpu::memory(Device::Cuda(n));
            memory.map_or(format!("cuda:{n} does not say its memory"), |m| format!("cuda:{n} {} MB free of {}", m.free_mb, m.total_mb))
        };
        let rooms: Vec<String> = (0..count as usize).map(room).collect();
        return ok("CUDA", format!("{count} devices, cuDNN {cudnn}, {}", rooms.join(", ")));
    }
    let gpu = Path::new("/proc/driver/nvidia/version").exists();
    if gpu {
        return Finding {
            name: "CUDA",
            state: State::Absent,
            what: "an NVIDIA driver is here, but this build has no CUDA".into(),
            mend: Some("to use it: `make build TORCH=cuda`".into()),
        };
    }
    Finding { name: "CUDA", state: State::Absent, what: "no GPU: everything runs on the CPU".into(), mend: None }
}

fn mps() -> Finding {
    let there = tch::utils::has_mps();
    Finding {
        name: "MPS",
        state: if there { State::Ok } else { State::Absent },
        what: if there { "there, not used: training was not tried on it" } else { "not there" }.into(),
        mend: None,
    }
}

/// Is MPI in this build, and how many ranks would a launcher start here?
fn mpi() -> Finding {
    let Some(library) = ranks::library() else {
        return Finding {
            name: "MPI",
            state: State::Absent,
            what: "not in this build: one process trains a cohort".into(),
            mend: Some("for several ranks: `make build FEATURES=mpi` (needs mpicc and libclang)".into()),
        };
    };
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let slots = match (number("SLURM_NTASKS"), number("OMPI_UNIVERSE_SIZE")) {
        (Some(tasks), _) => format!("{tasks} slots (tasks of this Slurm job)"),
        (None, Some(slots)) => format!("{slots} slots (of this mpirun)"),
        (None, None) => format!("{cores} slots (cores here; a hostfile or a Slurm job has more)"),
    };
    let found = |dir: PathBuf| dir.join("mpirun").exists() || dir.join("srun").exists();
    if std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(found)) {
        return ok("MPI", format!("{library}, {slots}"));
    }
    broken(
        "MPI",
        format!("{library}, but neither mpirun nor srun is on the PATH"),
        "mend: on Debian or Ubuntu `apt-get install openmpi-bin`",
    )
}

fn cores(common: &Common) -> Finding {
    ok(
        "threads",
        format!(
            "{} cores, libtorch uses {} ({})",
            std::thread::available_parallelism().map_or(0, usize::from),
            common.threads,
            machine::cpu_model()
        ),
    )
}

fn datasets(common: &Common) -> Vec<Finding> {
    let roots = data::roots(common.data.as_deref());
    let places: Vec<String> = roots.iter().map(|(path, from)| format!("{} ({from})", path.display())).collect();
    let mut findings = vec![ok("data", format!("looked for in {}", places.join(", ")))];
    // What a person named and is not there is a slip of the pen; ./data need not exist.
    for (path, from) in roots.iter().filter(|(path, from)| !path.is_dir() && *from != "./data") {
        let what = format!("{} ({from}) is no folder", path.display());
        findings.push(Finding { name: "data", state: State::Absent, what, mend: Some("look at its spelling".into()) });
    }
    for set in check::list(common.data.as_deref()) {
        findings.push(match (set.home, set.bring) {
            (Some(home), _) => ok(set.name, home.display().to_string()),
            (None, Some(bring)) => Finding { name: set.name, state: State::Absent, what: "not here".into(), mend: Some(bring) },
            (None, None) => ok(set.name, "needs no files".into()),
        });
    }
    findings
}

/// Can runs be written here, and is there room?
fn disk() -> Vec<Finding> {
    let folder = if Path::new("runs").is_dir() { PathBuf::from("runs") } else { PathBuf::from(".") };
    let shown = folder.canonicalize().unwrap_or_else(|_| folder.clone());
    let probe = folder.join(format!(".mcl-doctor-{}", std::process::id()));
    let writable = fs::write(&probe, b"x").and_then(|_| fs::remove_file(&probe));
    let mut findings = vec![match writable {
        Ok(()) => ok("write access", shown.display().to_string()),
        Err(e) => broken("write access", format!("{}: {e}", shown.display()), "mend: run in a folder of yours, or give --out"),
    }];
    if let Some(free) = free_mb(&folder) {
        let what = format!("{free} MB free in {}", shown.display());
        findings.push(if free >= ENOUGH_MB {
            ok("disk", what)
        } else {
            broken("disk", what, "mend: free some space, or give --out on another disk")
        });
    }
    findings
}

/// Free space for this user, where the system tells.
fn free_mb(folder: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // Safe: a valid C string and a struct that is read only after the call filled it.
    let stat = unsafe { (libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) == 0).then(|| stat.assume_init())? };
    Some(stat.f_bavail as u64 * stat.f_frsize as u64 / (1 << 20))
}
