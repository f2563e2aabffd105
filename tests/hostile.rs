//! Hostile inputs: recipes, plans, checkpoints, weights, TorchScript, datasets, archives, results and metrics, damaged by seeds and read under a
//! memory limit, a time limit and without a network. What is accepted: exit code 0, 1, 2 or 75, one line of error at most, no panic, no
//! abort, no hang, nothing written elsewhere, what was there intact, and no checkpoint or kept feature that goes on as if nothing had happened.
//!
//! `cargo test` runs a small share; `make hostile N=100000` a large one. What fails is kept in tests/hostile/kept and tried every time.
//!
//! This program is its own worker: a fault of a reader ends a worker, which the program notices and replaces.

#[path = "hostile/formats.rs"]
mod formats;
#[path = "hostile/kinds.rs"]
mod kinds;
#[path = "hostile/mutate.rs"]
mod mutate;
#[path = "hostile/readers.rs"]
mod readers;
#[path = "hostile/sandbox.rs"]
mod sandbox;
#[path = "hostile/seeds.rs"]
mod seeds;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kinds::{Changes, KINDS, Kind, Tree};
use sandbox::{Event, Worker};

/// Inputs of all kinds together where nothing else is asked for.
const SHARE: u64 = 780;
/// Inputs of a worker before another takes over: starting one costs a third of a second.
const AT_ONCE: u64 = 200;
const KEPT: &str = "tests/hostile/kept";

/// What became of the inputs, by kind and how they were read: how many there were for each exit code.
type Counts = BTreeMap<(String, &'static str), BTreeMap<String, u64>>;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["seeds", root] => return seeds::write(Path::new(root)),
        ["worker", root, kind, seed, from, to, every] => {
            return sandbox::work(
                Path::new(root),
                find(kind),
                seed.parse().unwrap(),
                from.parse().unwrap()..to.parse().unwrap(),
                every.parse().unwrap(),
            );
        }
        ["replay", root, kind, file] => return sandbox::replay(Path::new(root), find(kind), Path::new(file)),
        _ => {}
    }
    // As the usual test programs do with a name that is none of theirs.
    if arguments.iter().any(|a| !a.starts_with('-') && !"hostile".contains(a.as_str())) {
        return;
    }
    let number = |name: &str, default: u64| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    let (inputs, seed) = (number("MCL_HOSTILE", SHARE), number("MCL_HOSTILE_SEED", 1));
    // One in so many is read by the program too, which takes a hundred times as long.
    let every = number("MCL_HOSTILE_EVERY", 20);
    let failures = run(inputs, seed, every);
    if failures > 0 {
        eprintln!("{failures} of the inputs did what none may; they are in {KEPT}");
        std::process::exit(1);
    }
}

fn find(name: &str) -> &'static Kind {
    KINDS.iter().find(|k| k.name == name).unwrap_or_else(|| panic!("no kind {name}"))
}

fn run(inputs: u64, seed: u64, every: u64) -> u64 {
    let started = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let seeds = folder.path().join("seeds");
    sandbox::make_seeds(&seeds);
    let trees: BTreeMap<&str, Tree> = KINDS.iter().map(|k| (k.seed, sandbox::read_tree(&seeds.join(k.seed)))).collect();
    if !kinds::sealed(&trees["run"]) {
        println!(
            "note: manifests are not sealed here: they are left alone, and what a resume with a new checksum in one ends with is not compared"
        );
    }
    let counts: Mutex<Counts> = Mutex::default();
    let failures = Mutex::new(replay_kept(&seeds, &counts));
    let each = inputs.div_ceil(KINDS.len() as u64);
    // Kinds in turn, so that a run cut short has seen them all.
    let mut jobs: Vec<(u64, &'static Kind)> =
        (0..each).step_by(AT_ONCE as usize).flat_map(|from| KINDS.iter().map(move |kind| (from, kind))).collect();
    jobs.reverse();
    let jobs = Mutex::new(jobs);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some((from, kind)) = jobs.lock().unwrap().pop() else { return };
                    let to = (from + AT_ONCE).min(each);
                    let failed = share(kind, &trees[kind.seed], &seeds, seed, from, to, every, &counts);
                    *failures.lock().unwrap() += failed;
                    if inputs > SHARE {
                        println!("{:6.0} s  {} {from} to {to}: {failed} failed", started.elapsed().as_secs_f64(), kind.name);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    print(&counts.into_inner().unwrap(), started.elapsed(), failures);
    failures
}

/// Runs workers until the inputs `from..to` of a kind are through. Returns how many failed; each is kept.
#[allow(clippy::too_many_arguments)]
fn share(kind: &'static Kind, tree: &Tree, seeds: &Path, seed: u64, from: u64, to: u64, every: u64, counts: &Mutex<Counts>) -> u64 {
    let (mut next, mut failures) = (from, 0);
    while next < to {
        let folder = tempfile::tempdir().unwrap();
        let arguments = [kind.name.to_string(), seed.to_string(), next.to_string(), to.to_string(), every.to_string()];
        let mut worker = Worker::start("worker", seeds, folder.path(), &arguments);
        loop {
            let (fault, goes_on) = match worker.event() {
                Event::Began(input) => {
                    next = input;
                    continue;
                }
                Event::Done(how, code) => {
                    *counts.lock().unwrap().entry((kind.name.into(), how)).or_default().entry(code).or_default() += 1;
                    continue;
                }
                Event::Finished => {
                    next = to;
                    break;
                }
                Event::Fault(why) => (why, true),
                Event::Died(why) => (why, false),
            };
            failures += 1;
            *counts.lock().unwrap().entry((kind.name.into(), "failed")).or_default().entry("failed".into()).or_default() += 1;
            let (changes, _) = kinds::damage(kind, tree, &mut kinds::generator(seed, kind.name, next));
            let kept = keep(kind, &changes);
            println!("FAILED {} {next} (seed {seed}): {fault}; kept as {}", kind.name, kept.display());
            if !goes_on {
                next += 1;
                break;
            }
        }
    }
    failures
}

/// Writes what was damaged as a tar, under the name of its kind and content.
fn keep(kind: &Kind, changes: &Changes) -> PathBuf {
    let mut tar = tar::Builder::new(vec![]);
    for (path, content) in changes {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.as_ref().map_or(0, Vec::len) as u64);
        header.set_mode(0o644);
        let name = if content.is_some() { path.clone() } else { format!("{path}.deleted") };
        tar.append_data(&mut header, name, content.as_deref().unwrap_or_default()).unwrap();
    }
    let bytes = formats::gzip(&tar.into_inner().unwrap());
    let path = Path::new(KEPT).join(format!("{}-{}.tar.gz", kind.name.replace(' ', "_"), &mcl::files::sha256(&bytes)[..8]));
    std::fs::create_dir_all(KEPT).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Tries everything that failed once, in both ways.
fn replay_kept(seeds: &Path, counts: &Mutex<Counts>) -> u64 {
    let mut failures = 0;
    let mut files: Vec<PathBuf> = std::fs::read_dir(KEPT).into_iter().flatten().map(|e| e.unwrap().path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(".tar.gz"));
    files.sort();
    for file in files {
        let stem = file.file_name().unwrap().to_string_lossy().into_owned();
        let kind = find(
            &stem
                .rsplit_once('-')
                .unwrap()
                .0
                .replace('_', " ")
                .replace("fashion mnist", "fashion_mnist")
                .replace("tiny imagenet", "tiny_imagenet"),
        );
        let folder = tempfile::tempdir().unwrap();
        let mut worker = Worker::start("replay", seeds, folder.path(), &[kind.name.to_string(), file.display().to_string()]);
        loop {
            match worker.event() {
                Event::Began(_) => {}
                Event::Done(_, code) => *counts.lock().unwrap().entry(("kept".into(), "both")).or_default().entry(code).or_default() += 1,
                Event::Finished => break,
                Event::Fault(why) => {
                    failures += 1;
                    println!("FAILED again: {}: {why}", file.display());
                }
                Event::Died(why) => {
                    failures += 1;
                    println!("FAILED again: {}: {why}", file.display());
                    break;
                }
            }
        }
    }
    failures
}

fn print(counts: &Counts, took: Duration, failures: u64) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:18} {:12} {:>7}  by exit code", "kind", "read by", "inputs").unwrap();
    let (mut all, mut programs) = (0, 0);
    for ((kind, how), codes) in counts {
        let sum: u64 = codes.values().sum();
        match *how {
            "reader" => all += sum,
            "program" => programs += sum,
            _ => {}
        }
        let codes: Vec<String> = codes.iter().map(|(code, n)| format!("{code}: {n}")).collect();
        writeln!(out, "{kind:18} {how:12} {sum:7}  {}", codes.join("  ")).unwrap();
    }
    writeln!(out, "{all} inputs, {programs} of them read by the programs too, {failures} failed, {:.0} s", took.as_secs_f64()).unwrap();
}
