//! Where hostile inputs are read: a process of its own, with little memory, no network, and a folder in which nothing else may change.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::kinds::{self, Changes, Kind, Tree};

/// Address space of a reader and of a program. libtorch alone maps more than a gigabyte.
const MEMORY: u64 = 5 << 30;
/// A reader is not silent for longer than this, and a program has ended, by the clock of a machine that may be busy with other things.
const PATIENCE: Duration = Duration::from_secs(300);
/// CPU time after which a program is told to stop, and what it may take to save.
const WORK: Duration = Duration::from_secs(20);
const GRACE: Duration = Duration::from_secs(20);

/// All files below a folder; links are left out.
pub fn read_tree(root: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().map(|e| e.unwrap().path()) {
            if entry.is_symlink() {
                continue;
            } else if entry.is_dir() {
                open.push(entry);
            } else if let Ok(data) = fs::read(&entry) {
                tree.insert(entry.strip_prefix(root).unwrap().to_string_lossy().into_owned(), data);
            }
        }
    }
    tree
}

fn write_tree(root: &Path, tree: &Tree, changes: &Changes) {
    let write = |path: &str, data: &[u8]| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, data).unwrap();
    };
    tree.iter().for_each(|(path, data)| write(path, data));
    for (path, data) in changes {
        match data {
            Some(data) => write(path, data),
            None => fs::remove_file(root.join(path)).unwrap(),
        }
    }
}

/// Writes the seeds in a process of its own: this one never starts libtorch.
pub fn make_seeds(root: &Path) {
    let done = Command::new(std::env::current_exe().unwrap()).arg("seeds").arg(root).output().unwrap();
    assert!(done.status.success(), "the seeds cannot be made: {}", String::from_utf8_lossy(&done.stderr));
}

pub enum Event {
    /// The number of the input that is read next.
    Began(u64),
    /// How it was read, and the exit code.
    Done(&'static str, String),
    /// It did what none may, and the worker goes on.
    Fault(String),
    /// The worker is gone, or hangs and was ended.
    Died(String),
    Finished,
}

pub struct Worker {
    child: Child,
    lines: Receiver<String>,
    said: Arc<Mutex<String>>,
}

impl Worker {
    pub fn start(mode: &str, seeds: &Path, folder: &Path, arguments: &[String]) -> Worker {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .arg(mode)
            .arg(folder)
            .args(arguments)
            .env("MCL_HOSTILE_SEEDS", seeds)
            .env("RAYON_NUM_THREADS", "1")
            .env("OMP_NUM_THREADS", "1");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null());
        // SAFETY: setrlimit, unshare and prctl may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: MEMORY, rlim_max: MEMORY };
                libc::setrlimit(libc::RLIMIT_AS, &limit);
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &none);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // A network of its own, in which there is only loopback. Without the right to it, nothing here asks for another address.
                libc::unshare(libc::CLONE_NEWNET);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let (send, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(Result::ok).for_each(|line| drop(send.send(line))));
        let said: Arc<Mutex<String>> = Arc::default();
        let (keep, err) = (said.clone(), BufReader::new(child.stderr.take().unwrap()));
        std::thread::spawn(move || {
            err.lines().map_while(Result::ok).for_each(|line| {
                let mut first = keep.lock().unwrap();
                if first.lines().count() < 3 {
                    *first += &format!("{line}\n");
                }
            })
        });
        Worker { child, lines, said }
    }

    pub fn event(&mut self) -> Event {
        let line = match self.lines.recv_timeout(2 * PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return Event::Died("it hangs".to_string());
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().unwrap();
                std::thread::sleep(Duration::from_millis(50));
                return match (status.signal(), status.code()) {
                    (None, Some(0)) => Event::Finished,
                    _ => Event::Died(format!("the reader ended with {status}: {}", self.said.lock().unwrap())),
                };
            }
        };
        let (what, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match what {
            "began" => Event::Began(rest.parse().unwrap()),
            "reader" => Event::Done("reader", rest.to_string()),
            "program" => Event::Done("program", rest.to_string()),
            "fault" => Event::Fault(rest.to_string()),
            _ => Event::Fault(format!("a reader printed: {line}")),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tell(line: &str) {
    let mut out = std::io::stdout();
    out.write_all(format!("{}\n", line.replace('\n', " ")).as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Brings loopback up, in the network of this process alone.
fn loopback() {
    // SAFETY: a socket of our own, and the struct that the call takes: a name and flags.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as _;
        request.ifr_name[1] = b'o' as _;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as _;
        libc::ioctl(socket, libc::SIOCSIFFLAGS as _, &request);
        libc::close(socket);
    }
}

/// What the panics of a reader said; only libtorch's refusals may be among them, and the programs make one line of those.
#[derive(Clone, Default)]
struct Panics(Arc<Mutex<Vec<String>>>);

impl Panics {
    fn listen() -> Panics {
        let panics = Panics::default();
        let heard = panics.0.clone();
        std::panic::set_hook(Box::new(move |told| {
            let text = told.payload().downcast_ref::<String>().cloned();
            let text = text.or_else(|| told.payload().downcast_ref::<&str>().map(|t| t.to_string())).unwrap_or_default();
            let place = told.location().map_or(String::new(), |p| format!("{}:{}", p.file(), p.line()));
            heard.lock().unwrap().push(format!("{text} ({place})"));
        }));
        panics
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

pub fn work(root: &Path, kind: &'static Kind, seed: u64, inputs: Range<u64>, every: u64) {
    let seeds = std::env::var("MCL_HOSTILE_SEEDS").unwrap();
    let tree = read_tree(&Path::new(&seeds).join(kind.seed));
    let bench = Bench::new(root, kind, &tree);
    for input in inputs {
        tell(&format!("began {input}"));
        let (changes, _) = kinds::damage(kind, &tree, &mut kinds::generator(seed, kind.name, input));
        bench.read(&changes);
        if input % every == every / 2 {
            bench.program(&changes);
        }
    }
}

pub fn replay(root: &Path, kind: &'static Kind, file: &Path) {
    let seeds = std::env::var("MCL_HOSTILE_SEEDS").unwrap();
    let tree = read_tree(&Path::new(&seeds).join(kind.seed));
    let bench = Bench::new(root, kind, &tree);
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(fs::File::open(file).unwrap()));
    let mut changes = Changes::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().to_string_lossy().into_owned();
        let mut data = vec![];
        std::io::Read::read_to_end(&mut entry, &mut data).unwrap();
        match path.strip_suffix(".deleted") {
            Some(gone) => changes.push((gone.to_string(), None)),
            None => changes.push((path, Some(data))),
        }
    }
    tell("began 0");
    if !bench.sealed && changes.iter().any(|(path, _)| path.ends_with("manifest.json")) {
        return; // see `kinds::sealed`
    }
    bench.read(&changes);
    bench.program(&changes);
}

/// A folder with the damaged input, and one beside it that nobody may touch.
struct Bench<'a> {
    root: &'a Path,
    kind: &'static Kind,
    tree: &'a Tree,
    panics: Panics,
    /// What reading the undamaged input ends with.
    whole: Option<String>,
    sealed: bool,
}

impl Bench<'_> {
    fn new<'a>(root: &'a Path, kind: &'static Kind, tree: &'a Tree) -> Bench<'a> {
        loopback();
        fs::create_dir_all(root.join("outside")).unwrap();
        fs::write(root.join("outside/kept.txt"), "not yours").unwrap();
        let mut bench = Bench { root, kind, tree, panics: Panics::default(), whole: None, sealed: kinds::sealed(tree) };
        let case = bench.lay(&vec![]);
        if kind.ends.is_none() {
            // What is undamaged is read, or damage would say nothing; of TorchScript the state dict is wanted.
            for file in bench.tree.keys().filter(|path| kind.hits(path)) {
                let read = (kind.read)(&case, file);
                let refused = kind.name == "torchscript pt";
                assert!(read.is_ok() != refused, "the undamaged {} with {file}: {:?}", kind.name, read.err().map(|e| e.line()));
                bench.lay(&vec![]);
            }
        } else {
            bench.whole = kind.ends.map(|ends| bench.undamaged_end(ends));
        }
        bench.panics = Panics::listen();
        bench
    }

    /// What reading the undamaged input ends with: a resumed run, or a measurement.
    fn undamaged_end(&self, ends: fn(&Path) -> String) -> String {
        let case = self.lay(&vec![]);
        (self.kind.read)(&case, "").expect("the undamaged input is read");
        let whole = ends(&case);
        // Were it not the same every time, a difference would say nothing.
        let again = self.lay(&vec![]);
        (self.kind.read)(&again, "").expect("the undamaged input is read again");
        assert_eq!(whole, ends(&again), "two readings of one input end alike");
        whole
    }

    /// The case's folder, made anew.
    fn lay(&self, changes: &Changes) -> std::path::PathBuf {
        let case = self.root.join("case");
        let _ = fs::remove_dir_all(&case);
        write_tree(&case, self.tree, changes);
        for folder in self.kind.writes {
            fs::create_dir_all(case.join(folder)).unwrap();
        }
        // A tree has no links.
        let checkpoints = case.join("run/checkpoints");
        for step in fs::read_dir(&checkpoints).into_iter().flatten().map(|e| e.unwrap().file_name()).collect::<Vec<_>>() {
            for link in [mcl::run::LAST, mcl::run::BEST] {
                let _ = std::os::unix::fs::symlink(&step, checkpoints.join(link));
            }
        }
        case
    }

    /// By the library, in this process.
    fn read(&self, changes: &Changes) {
        let case = self.lay(changes);
        let before = self.untouched();
        let file = &changes[0].0;
        self.panics.take();
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.kind.read)(&case, file)));
        let panics = self.panics.take();
        let code = match &outcome {
            Ok(Ok(())) => 0,
            Ok(Err(e)) => e.exit_code(),
            Err(_) => 1,
        };
        if let Some(panic) = panics.iter().find(|p| !p.contains("Torch(\"")) {
            return tell(&format!("fault panic in a reader: {panic}"));
        }
        // For whoever starts a worker by hand.
        if std::env::var_os("MCL_HOSTILE_SAY").is_some() {
            eprintln!(
                "{file}: {code} {}{}",
                panics.join("; "),
                outcome.as_ref().ok().and_then(|o| o.as_ref().err()).map_or(String::new(), |e| e.line())
            );
        }
        if let Ok(Err(e)) = &outcome
            && (e.line().lines().count() != 1 || e.line().contains("frame #"))
        {
            return tell(&format!("fault an error that is not one line: {e}"));
        }
        self.judge("reader", code, changes, &before, &case);
    }

    /// By the program, as a user starts it.
    fn program(&self, changes: &Changes) {
        let case = self.lay(changes);
        let before = self.untouched();
        let mut command = (self.kind.command)(&case, &changes[0].0);
        let out = fs::File::create(self.root.join("stdout")).unwrap();
        let err = fs::File::create(self.root.join("stderr")).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn().unwrap();
        let (status, told) = wait(&mut child);
        let said = String::from_utf8_lossy(&fs::read(self.root.join("stderr")).unwrap()).into_owned();
        let last = said.lines().last().unwrap_or_default().to_string();
        let Some(status) = status else {
            // A step of fifty networks takes minutes: that is work, which is counted apart, and not a hang.
            let worked = self.kind.may_last && told == Told::Working;
            return tell(&if worked { "program working".to_string() } else { format!("fault a program that hangs: {last}") });
        };
        let code = match (status.code(), status.signal()) {
            (Some(code), _) => code,
            // Not every program saves: one that works for long ends when it is told to, and is counted apart.
            (None, Some(libc::SIGTERM)) if told != Told::Nothing && self.kind.may_last => return tell("program stopped"),
            _ => return tell(&format!("fault a program that ended with {status}: {last}")),
        };
        let errors = said.lines().filter(|line| !line.starts_with("warning: ") && !line.starts_with("note: ")).count();
        let hidden = ["panicked at", "internal error", "frame #", "RUST_BACKTRACE"].iter().find(|sign| said.contains(**sign));
        if let Some(sign) = hidden {
            return tell(&format!("fault a program that says `{sign}`: {last}"));
        }
        if errors > 1 || (code != 0 && errors != 1) {
            return tell(&format!("fault {errors} lines of error with code {code}: {said}"));
        }
        self.judge("program", code, changes, &before, &case);
    }

    fn judge(&self, how: &str, code: i32, changes: &Changes, before: &BTreeMap<String, String>, case: &Path) {
        if ![0, 1, 2, 75].contains(&code) {
            return tell(&format!("fault {how}: exit code {code}"));
        }
        let after = self.untouched();
        if let Some(path) = before.keys().chain(after.keys()).find(|path| before.get(*path) != after.get(*path)) {
            return tell(&format!("fault {how}: {path} was changed, and lies outside of what it may write to"));
        }
        if let (Some(whole), Some(ends)) = (&self.whole, self.kind.ends) {
            let of_manifest = changes.iter().any(|(path, _)| path.ends_with("manifest.json"));
            if code == 0 && (self.sealed || !of_manifest) && ends(case) != *whole {
                return tell(&format!("fault {how}: went on with a damaged file ({}) and ended elsewhere", changes[0].0));
            }
            // Refused: the checkpoint is as it was, damage and all.
            if code != 0 {
                let expected = changed(self.tree, changes);
                let lost =
                    expected.iter().find(|(path, data)| path.contains("/step-") && fs::read(case.join(path)).ok().as_ref() != Some(data));
                if let Some((path, _)) = lost.filter(|_| code == 2) {
                    return tell(&format!("fault {how}: {path} was changed though the checkpoint was refused"));
                }
            }
        }
        tell(&format!("{how} {code}"));
    }

    /// Names and checksums of everything that may not be written to.
    fn untouched(&self) -> BTreeMap<String, String> {
        let own = ["stdout", "stderr"];
        let writable = |path: &str| {
            path.strip_prefix("case/").is_some_and(|inside| self.kind.writes.iter().any(|w| inside.starts_with(&format!("{w}/"))))
        };
        let tree = read_tree(self.root).into_iter().filter(|(path, _)| !own.contains(&path.as_str()) && !writable(path));
        tree.map(|(path, data)| (path, mcl::files::sha256(&data))).collect()
    }
}

fn changed(tree: &Tree, changes: &Changes) -> Tree {
    let mut tree = tree.clone();
    for (path, data) in changes {
        match data {
            Some(data) => drop(tree.insert(path.clone(), data.clone())),
            None => drop(tree.remove(path)),
        }
    }
    tree
}

/// What a program was told.
#[derive(Clone, Copy, PartialEq)]
enum Told {
    Nothing,
    ToStop,
    /// To stop, and it went on working.
    Working,
}

/// Waits; a program that works for long is told to stop, one that does not listen is ended. Says how it ended and whether it was told.
fn wait(child: &mut Child) -> (Option<std::process::ExitStatus>, Told) {
    let started = Instant::now();
    let mut told = Told::Nothing;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return (Some(status), told);
        }
        let worked = cpu_time(child.id());
        if told == Told::Nothing && (worked > WORK || started.elapsed() > PATIENCE / 2) {
            // SAFETY: the child has not been waited for, so the number is its own.
            unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
            told = Told::ToStop;
        }
        if worked > WORK + GRACE || started.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return (None, if worked > WORK + GRACE { Told::Working } else { told });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What a process has worked so far, in all its threads.
fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name in brackets: user and system time are the 12th and 13th field, in hundredths of a second.
    let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').skip(11).take(2);
    Duration::from_millis(10 * fields.filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>())
}
