//! Ours beside a peer's, in turns, as one table. The peer is a Python process that is given a task a line and answers with a number a line;
//! `PEER_PYTHON` names the Python, and requirements.txt what must be installed there. Without it our half is printed alone.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A peer's process; it ends with the bench, when its input does.
pub struct Peer {
    _process: Child,
    tasks: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts a script of benches/peers; None, and a line that says how to get it, where there is no Python for it.
    pub fn start(script: &str, threads: usize) -> Option<Peer> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers");
        let Some(python) = std::env::var_os("PEER_PYTHON").filter(|python| !python.is_empty()) else {
            println!("no peers: PEER_PYTHON names no Python; `make peers` installs one with {}", folder.join("requirements.txt").display());
            return None;
        };
        let started = Command::new(&python).arg(folder.join(script)).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = match started {
            Ok(process) => process,
            Err(e) => {
                println!("no peers: cannot start PEER_PYTHON={}: {e}", python.display());
                return None;
            }
        };
        let (tasks, answers) = (process.stdin.take()?, BufReader::new(process.stdout.take()?).lines());
        let mut peer = Peer { _process: process, tasks, answers };
        match peer.ask(&threads.to_string()) {
            Ok(_) => Some(peer),
            Err(why) => {
                println!("no peers: {} does not run with PEER_PYTHON={}: {why}", folder.join(script).display(), python.display());
                None
            }
        }
    }

    /// What the peer needs for a task, in the task's unit.
    pub fn ask(&mut self, task: &str) -> Result<f64, String> {
        let gone = || "the process has ended".to_string();
        writeln!(self.tasks, "{task}").and_then(|()| self.tasks.flush()).map_err(|_| gone())?;
        let answer = self.answers.next().ok_or_else(gone)?.map_err(|e| e.to_string())?;
        answer.trim().parse().map_err(|_| answer.trim_start_matches('!').trim().to_string())
    }
}

/// What is measured. Not every bench has both.
#[allow(dead_code)]
#[derive(Clone, Copy, PartialEq)]
pub enum Unit {
    /// Less is better.
    Seconds,
    /// More is better.
    ImagesPerSecond,
}

impl Unit {
    fn format(self, value: f64) -> String {
        match self {
            Unit::Seconds if value < 1.0 => format!("{value:.3} s"),
            Unit::Seconds => format!("{value:.2} s"),
            Unit::ImagesPerSecond if value < 100.0 => format!("{value:.1} images/s"),
            Unit::ImagesPerSecond => format!("{value:.0} images/s"),
        }
    }
}

/// The first two lines of a table.
pub fn head() {
    println!("| | mcl | range | peer | range | mcl / peer | n |\n|---|---|---|---|---|---|---|");
}

/// Threads of either side go on spinning for a while after their work; the other waits until they sleep.
const REST: Duration = Duration::from_millis(300);
/// Seconds from which the first of several rounds counts like the others: such works are not made shorter by what is warm already.
const LONG: f64 = 3.0;

/// One line: `rounds` times ours and the peer's in turns, after one of each that does not count, unless they take long; medians.
pub fn row(name: &str, unit: Unit, rounds: usize, mut ours: impl FnMut() -> f64, peer: Option<&mut Peer>, task: &str) {
    let (mut mine, mut theirs) = (vec![], vec![]);
    let mut peer = peer.filter(|_| !task.is_empty());
    let mut failed = None;
    let mut counts = false;
    while mine.len() < rounds {
        thread::sleep(REST);
        let began = Instant::now();
        let value = ours();
        counts |= began.elapsed().as_secs_f64() > LONG;
        thread::sleep(REST);
        let answer = peer.as_mut().map(|peer| peer.ask(task));
        if std::mem::replace(&mut counts, true) {
            mine.push(value);
            match answer {
                Some(Ok(answer)) => theirs.push(answer),
                Some(Err(why)) => failed = Some(why),
                None => {}
            }
        }
    }
    let text = |values: &[f64]| match range(values) {
        None => ("".to_string(), "".to_string()),
        Some([low, high]) => (unit.format(median(values)), format!("{} to {}", unit.format(low), unit.format(high))),
    };
    let ratio = if theirs.is_empty() { String::new() } else { format!("{:.2}", median(&mine) / median(&theirs)) };
    let ((ours, ours_range), (theirs, theirs_range)) = (text(&mine), text(&theirs));
    println!("| {name} | {ours} | {ours_range} | {theirs} | {theirs_range} | {ratio} | {rounds} |");
    if let Some(why) = failed {
        println!("the peer of {name} failed: {why}");
    }
}

fn range(values: &[f64]) -> Option<[f64; 2]> {
    let low = values.iter().copied().reduce(f64::min)?;
    Some([low, values.iter().copied().fold(low, f64::max)])
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { 0.5 * (sorted[middle - 1] + sorted[middle]) }
}
