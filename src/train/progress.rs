//! What a person watching a run sees: a bar on a terminal, a plain line now and then elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::error::Result;
use crate::train::metrics::Meter;

/// How often a plain line is printed where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(20);
/// How often the text beside a bar changes.
const BAR_EVERY: Duration = Duration::from_millis(500);

/// The steps of one epoch.
pub struct Epoch {
    /// From 0.
    pub number: usize,
    /// Of the whole run.
    pub epochs: usize,
    /// Of this epoch.
    pub steps: usize,
    /// Steps that were taken before the run was resumed.
    pub first: usize,
}

/// How far the epoch under way has come.
pub struct Display {
    bar: Option<ProgressBar>,
    quiet: bool,
    epoch: Epoch,
    label: String,
    last_line: Instant,
    started: Instant,
    images: usize,
}

impl Display {
    /// With `quiet` nothing is printed; lines are logged all the same.
    pub fn new(quiet: bool, epoch: Epoch) -> Display {
        let label = format!("epoch {}/{}", epoch.number + 1, epoch.epochs);
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {msg}").expect("a valid template");
            let bar = ProgressBar::new(epoch.steps as u64).with_style(style).with_prefix(label.clone()).with_position(epoch.first as u64);
            bar.tick();
            bar
        });
        Display { bar, quiet, epoch, label, last_line: Instant::now(), started: Instant::now(), images: 0 }
    }

    /// After a step on so many images, when `done` steps of the epoch are taken. A plain line is logged too.
    pub fn tick(&mut self, meter: &Meter, images: usize, done: usize, log: impl FnOnce(&str) -> Result<()>) -> Result<()> {
        self.images += images;
        let due = self.last_line.elapsed() >= if self.bar.is_some() { BAR_EVERY } else { LINE_EVERY };
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
        if !due {
            return Ok(());
        }
        self.last_line = Instant::now();
        let elapsed = self.started.elapsed().as_secs_f64();
        let Epoch { number, epochs, steps, first } = self.epoch;
        let per_step = elapsed / (done - first).max(1) as f64;
        let left = per_step * (steps - done + (epochs - number - 1) * steps) as f64;
        let terms: Vec<String> =
            meter.means().into_iter().filter_map(|(n, v)| Some(format!("{} {v:.3}", n.strip_prefix("term.")?))).collect();
        let message = format!("{:.0} images/s, {} left, {}", self.images as f64 / elapsed, clock_time(left), terms.join(" "));
        match &self.bar {
            Some(bar) => bar.set_message(message),
            None => {
                let line = format!("{} {done}/{steps}: {message}", self.label);
                if !self.quiet {
                    eprintln!("{line}");
                }
                log(&line)?;
            }
        }
        Ok(())
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// 3:07 or 1:02:45.
pub fn clock_time(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    if s >= 3600 { format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60) } else { format!("{}:{:02}", s / 60, s % 60) }
}
