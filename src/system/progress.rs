//! How far something long has come, for the person watching: a bar on a terminal, a plain line now and then elsewhere. Both say what is
//! done, how many of how many, how many a second, and the time that is left. What takes less than a moment shows nothing.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Nothing is shown before this: most counts are done by then.
const PATIENCE: Duration = Duration::from_secs(1);
/// The first plain line comes after this.
const FIRST_LINE: Duration = Duration::from_secs(2);
/// Plain lines after the first come this far apart.
const LINE_EVERY: Duration = Duration::from_secs(15);
/// How often a bar changes.
const BAR_EVERY: Duration = Duration::from_millis(200);
/// The longest name beside a bar: with the largest numbers a line still has 80 columns.
const LONGEST_NAME: usize = 30;

/// A count that is shown while it grows, by a thread of its own: something that takes long over one of many is seen too. Threads may
/// share it. The bar goes when this is dropped.
pub struct Progress {
    count: Arc<Count>,
    watcher: Option<JoinHandle<()>>,
}

struct Count {
    what: String,
    unit: &'static str,
    total: AtomicUsize,
    started: Instant,
    done: AtomicUsize,
    /// Whether it is over, and how the watcher hears of it.
    over: (Mutex<bool>, Condvar),
}

impl Progress {
    /// Of `total` things called `unit` ("images"); `what` is done with them. A total of 0 is not known: the time so far is shown. With
    /// `quiet` nothing is ever shown.
    pub fn new(quiet: bool, what: impl Into<String>, total: usize, unit: &'static str) -> Progress {
        let (done, over) = (AtomicUsize::new(0), (Mutex::new(false), Condvar::new()));
        let count = Arc::new(Count { what: what.into(), unit, total: AtomicUsize::new(total), started: Instant::now(), done, over });
        let watched = count.clone();
        // Where no thread can be started nothing is shown: the work itself goes on.
        let watcher = (!quiet).then(|| std::thread::Builder::new().name("progress".into()).spawn(move || watched.watch()).ok()).flatten();
        Progress { count, watcher }
    }

    /// There are so many in all: for those who find out on the way.
    pub fn expect(&self, total: usize) {
        self.count.total.store(total, Ordering::Relaxed);
    }

    /// So many more are done.
    pub fn add(&self, count: usize) {
        self.count.done.fetch_add(count, Ordering::Relaxed);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        *lock(&self.count.over.0) = true;
        self.count.over.1.notify_all();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join(); // it only prints
        }
    }
}

impl Count {
    /// Shows the count until it is over.
    fn watch(&self) {
        let terminal = std::io::stderr().is_terminal();
        let (mut shown, mut wait) = (None, if terminal { PATIENCE } else { FIRST_LINE });
        let mut said = false;
        while !self.over_within(wait) {
            let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
            let text = pace(done, total, self.started.elapsed(), self.unit);
            let of = if total > 0 { format!("{done}/{total} {}, ", self.unit) } else { String::new() };
            if terminal {
                let bar = shown.get_or_insert_with(|| bar(&short(&self.what), total as u64));
                if bar.length() != Some(total as u64) {
                    bar.set_style(style(total as u64));
                    bar.set_length(total as u64);
                }
                bar.set_position(done as u64);
                bar.set_message(text);
                wait = BAR_EVERY;
            } else {
                eprintln!("{}: {of}{text}", self.what);
                (said, wait) = (true, LINE_EVERY);
            }
        }
        if let Some(bar) = shown {
            bar.finish_and_clear();
        }
        let done = self.done.load(Ordering::Relaxed);
        if said && done == self.total.load(Ordering::Relaxed) && done > 0 {
            eprintln!("{}: {done} {} in {}", self.what, self.unit, clock_time(self.started.elapsed().as_secs_f64()));
        }
    }

    fn over_within(&self, time: Duration) -> bool {
        let waited = self.over.1.wait_timeout_while(lock(&self.over.0), time, |over| !*over);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Whoever panicked while holding it is reported elsewhere: here only a flag is at stake.
fn lock(flag: &Mutex<bool>) -> MutexGuard<'_, bool> {
    flag.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A bar that takes what the text beside it leaves of a line.
fn bar(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_style(style(total)).with_prefix(what.to_string());
    bar.tick();
    bar
}

/// Of a bar; of a line where nobody knows how many there are.
fn style(total: u64) -> ProgressStyle {
    let template = if total > 0 { "{prefix} {wide_bar} {pos}/{len} {msg}" } else { "{prefix}, {msg}" };
    ProgressStyle::with_template(template).expect("a valid template").progress_chars("=> ")
}

/// A name that leaves room for numbers: its end says most, `peer-0` or `stl10`.
fn short(what: &str) -> String {
    let letters: Vec<char> = what.chars().collect();
    match letters.len() <= LONGEST_NAME {
        true => what.to_string(),
        false => format!("..{}", letters[letters.len() - LONGEST_NAME + 2..].iter().collect::<String>()),
    }
}

/// `812 images/s, 0:09 left`; before the first is done, how long that takes already.
fn pace(done: usize, total: usize, elapsed: Duration, unit: &str) -> String {
    let seconds = elapsed.as_secs_f64();
    if done == 0 {
        return format!("{} so far", clock_time(seconds));
    }
    let rate = done as f64 / seconds.max(1e-9);
    let shown = if rate >= 10.0 { format!("{rate:.0}") } else { format!("{rate:.2}") };
    if total == 0 {
        return format!("{done} {unit}, {shown} {unit}/s");
    }
    format!("{shown} {unit}/s, {} left", clock_time(total.saturating_sub(done) as f64 / rate))
}

/// 3:07 or 1:02:45.
pub fn clock_time(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    if s >= 3600 { format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60) } else { format!("{}:{:02}", s / 60, s % 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_and_time_in_words() {
        assert_eq!(pace(2560, 10_000, Duration::from_secs(4), "images"), "640 images/s, 0:11 left");
        assert_eq!(pace(3, 10, Duration::from_secs(6), "fits"), "0.50 fits/s, 0:14 left");
        assert_eq!(pace(0, 10, Duration::from_secs(6), "fits"), "0:06 so far");
        assert_eq!(pace(30, 0, Duration::from_secs(2), "files"), "30 files, 15 files/s");
        assert_eq!((clock_time(187.0), clock_time(3765.4)), ("3:07".into(), "1:02:45".into()));
    }

    /// The longest text that stands beside a bar leaves a few columns of 80 for it.
    #[test]
    fn a_line_fits_80_columns() {
        let name = short("cifar100-resnet32-l_mcl-20261118-014700/peer-0: features of stl10");
        assert!(name.starts_with("..") && name.ends_with("features of stl10") && name.chars().count() == LONGEST_NAME, "{name}");
        let text = pace(1_000, 100_000, Duration::from_secs(7_200), "iterations");
        assert!(name.len() + " 100000/100000 ".len() + text.len() < 79, "{text}");
    }
}
