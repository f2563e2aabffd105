//! What a person watching a run sees: a bar on a terminal that fits 80 columns, a plain line now and then elsewhere. The log has the line
//! with every term in either case.

use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::error::Result;
use crate::system::progress::{Progress, clock_time};
use crate::train::metrics::Meter;

/// How often a line is logged, and printed where there is no terminal.
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
    /// Which steps of this epoch end in a meta step.
    pub metas: Vec<bool>,
}

/// How long things took so far in this process, by the clock: what is left of the run is told by it.
#[derive(Default)]
pub struct Pace {
    /// Steps without what follows below, the wait for their images included.
    steps: Mean,
    metas: Mean,
    /// What comes between two epochs: answers to the test images, and saving.
    between: Mean,
    images: Mean,
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn value(&self) -> f64 {
        if self.count > 0 { self.sum / self.count as f64 } else { 0.0 }
    }
}

impl Pace {
    /// After a step that took so long, so many seconds of it in a meta step.
    pub fn step(&mut self, seconds: f64, meta: Option<f64>, images: usize) {
        if let Some(meta) = meta {
            self.metas.add(meta);
        }
        self.steps.add((seconds - meta.unwrap_or(0.0)).max(0.0));
        self.images.add(images as f64);
    }

    /// After what comes between two epochs.
    pub fn between(&mut self, seconds: f64) {
        self.between.add(seconds);
    }

    /// Images a second, meta steps counted as often as they come.
    fn rate(&self, epoch: &Epoch) -> f64 {
        let share = epoch.metas.iter().filter(|due| **due).count() as f64 / epoch.metas.len().max(1) as f64;
        self.images.value() / (self.steps.value() + share * self.metas.value()).max(1e-9)
    }

    /// Seconds until the run is over, when `done` steps of the epoch are taken.
    fn left(&self, epoch: &Epoch, done: usize) -> f64 {
        let later = epoch.epochs - epoch.number - 1;
        let metas = |from: usize| epoch.metas.iter().skip(from).filter(|due| **due).count();
        let steps = epoch.steps - done + later * epoch.steps;
        let metas = metas(done) + later * metas(0);
        steps as f64 * self.steps.value() + metas as f64 * self.metas.value() + (later + 1) as f64 * self.between.value()
    }
}

/// What stands at the end of the bar: shared with the thread that draws it.
#[derive(Default)]
struct Text {
    message: String,
    /// When the meta step under way began, and how long one took so far (0: not known).
    meta: Option<(Instant, f64)>,
}

/// `meta step, 0:33 of about 0:45`; of the first one nobody knows how long it takes.
fn meta_step(seconds: f64, usual: f64) -> String {
    let of = if usual > 0.0 { format!(" of about {}", clock_time(usual)) } else { String::new() };
    format!("meta step, {}{of}", clock_time(seconds))
}

/// How far the epoch under way has come.
pub struct Display {
    bar: Option<ProgressBar>,
    text: Arc<Mutex<Text>>,
    quiet: bool,
    epoch: Epoch,
    label: String,
    last_line: Instant,
    last_text: Instant,
    last_step: Instant,
}

impl Display {
    /// With `quiet` nothing is printed; lines are logged all the same.
    pub fn new(quiet: bool, epoch: Epoch) -> Display {
        let label = format!("epoch {}/{}", epoch.number + 1, epoch.epochs);
        let text = Arc::new(Mutex::new(Text::default()));
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let shown = text.clone();
            let end = move |_: &indicatif::ProgressState, out: &mut dyn std::fmt::Write| {
                let text = shown.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = match text.meta {
                    Some((began, usual)) => write!(out, "{}", meta_step(began.elapsed().as_secs_f64(), usual)),
                    None => write!(out, "{}", text.message),
                };
            };
            let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {end}").expect("a valid template");
            let style = style.with_key("end", end).progress_chars("=> ");
            let bar = ProgressBar::new(epoch.steps as u64).with_style(style).with_prefix(label.clone()).with_position(epoch.first as u64);
            // A meta step may take a minute: the bar lives meanwhile.
            bar.enable_steady_tick(BAR_EVERY);
            bar
        });
        let now = Instant::now();
        Display { bar, text, quiet, epoch, label, last_line: now, last_text: now, last_step: now }
    }

    /// Before a step. While the guard lives, a meta step that takes long is shown.
    pub fn begin(&mut self, done: usize, pace: &Pace) -> Option<Progress> {
        let due = self.epoch.metas.get(done).copied().unwrap_or(false);
        if !due {
            return None;
        }
        if self.bar.is_some() {
            self.text.lock().unwrap_or_else(PoisonError::into_inner).meta = Some((Instant::now(), pace.metas.value()));
            return None;
        }
        let usual = if pace.metas.count > 0 { format!(" of about {}", clock_time(pace.metas.value())) } else { String::new() };
        Some(Progress::new(self.quiet, format!("{} {done}/{}: meta step{usual}", self.label, self.epoch.steps), 0, ""))
    }

    /// After a step on so many images, when `done` steps of the epoch are taken. The line with every term is logged now and then.
    pub fn tick(
        &mut self,
        meter: &mut Meter,
        pace: &mut Pace,
        (images, meta): (usize, Option<f64>),
        done: usize,
        log: impl FnOnce(&str) -> Result<()>,
    ) -> Result<()> {
        pace.step(self.last_step.elapsed().as_secs_f64(), meta, images);
        self.last_step = Instant::now();
        let line_due = self.last_line.elapsed() >= LINE_EVERY;
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
            let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
            text.meta = None;
            if text.message.is_empty() || self.last_text.elapsed() >= BAR_EVERY {
                self.last_text = Instant::now();
                text.message = self.short(meter, pace, done);
            }
        }
        if line_due {
            self.last_line = Instant::now();
            let terms: Vec<String> =
                meter.means().into_iter().filter_map(|(n, v)| Some(format!("{} {v:.3}", n.strip_prefix("term.")?))).collect();
            let line = format!("{} {done}/{}: {}, {}", self.label, self.epoch.steps, self.short(meter, pace, done), terms.join(" "));
            if !self.quiet && self.bar.is_none() {
                eprintln!("{line}");
            }
            log(&line)?;
        }
        Ok(())
    }

    /// What fits beside a bar: the loss, the training images told right so far in this epoch, the speed, the time left of the run.
    fn short(&self, meter: &mut Meter, pace: &Pace, done: usize) -> String {
        let (rate, left) = (pace.rate(&self.epoch), clock_time(pace.left(&self.epoch, done)));
        let accuracies: Vec<f64> =
            meter.means().iter().filter(|(name, _)| name.starts_with("train.peer")).map(|(_, value)| *value).collect();
        let accuracy = match accuracies.len() {
            0 => String::new(),
            count => format!("{:.1} %, ", accuracies.iter().sum::<f64>() / count as f64),
        };
        format!("loss {:.2}, {accuracy}{rate:.0} images/s, {left} left", meter.mean("loss").unwrap_or(f64::NAN))
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(number: usize) -> Epoch {
        Epoch { number, epochs: 3, steps: 10, first: 0, metas: (0..10).map(|batch| batch % 5 == 0).collect() }
    }

    /// Ten steps of a second an epoch, two meta steps of ten seconds, five seconds between epochs.
    #[test]
    fn the_time_left_counts_meta_steps_and_evaluations() {
        let mut pace = Pace::default();
        pace.step(11.0, Some(10.0), 128);
        // The first epoch: nine steps, one meta step; then two whole ones. Evaluation has not been seen yet.
        assert_eq!(pace.left(&epoch(0), 1), 9.0 + 10.0 + 2.0 * (10.0 + 20.0));
        (1..5).for_each(|_| pace.step(1.0, None, 128));
        pace.between(5.0);
        assert_eq!(pace.left(&epoch(1), 6), 4.0 + (10.0 + 20.0) + 2.0 * 5.0);
        assert_eq!(pace.left(&epoch(2), 10), 5.0);
        // 128 images in a second and a fifth of ten.
        assert!((pace.rate(&epoch(1)) - 128.0 / 3.0).abs() < 1e-9);
        assert_eq!(meta_step(3.0, pace.metas.value()), "meta step, 0:03 of about 0:10");
        assert_eq!(meta_step(3.0, 0.0), "meta step, 0:03");
    }

    /// The widest text of a run of ImageNet's size leaves columns for the bar.
    #[test]
    fn the_bar_fits_80_columns() {
        let mut meter = Meter::default();
        meter.add_value("loss", 123.456);
        meter.add_value("train.peer0.top1", 12.3);
        meter.add_value("train.peer1.top1", 99.9);
        let display = Display::new(true, Epoch { number: 99, epochs: 300, steps: 5004, first: 0, metas: vec![false; 5004] });
        let mut pace = Pace::default();
        pace.step(0.35, None, 1024);
        let text = display.short(&mut meter, &pace, 17);
        assert_eq!(text, "loss 123.46, 56.1 %, 2926 images/s, 97:47:05 left");
        assert!("epoch 100/300".len() + " 5004/5004 ".len() + text.len() < 76);
    }
}
