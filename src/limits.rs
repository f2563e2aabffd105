//! What a recipe, a protocol or a flag will need, and what there is. Whoever is about to allocate by a number that a user gave asks here
//! first: what cannot be is refused in one line that names the key, its value and what would be accepted, before anything is allocated.
//!
//! A need is a lower bound: the images, maps and tables that must be in memory at one time. What passes may still be slow, but what is
//! refused could never have worked here.

use std::fmt::Display;
use std::fs;

use crate::error::{Error, Result};

/// The least side of images that every architecture can halve as often as it does.
pub const LEAST_SIDE: usize = 8;
/// The largest side of images that are made: a batch of one takes 0.8 GB as floats.
pub const MOST_SIDE: usize = 8192;
/// Images of a batch, over all ranks.
pub const MOST_BATCH: usize = 1 << 20;
/// Batches whose gradients are averaged.
pub const MOST_ACCUMULATE: usize = 1 << 16;
/// Epochs, iterations, repetitions: a hundred times what anybody waits for.
pub const MOST_ROUNDS: usize = 1_000_000;
/// Networks of a cohort.
pub const MOST_NETWORKS: usize = 64;
/// Width of embeddings.
pub const MOST_DIM: i64 = 1 << 16;
/// Contrast samples of an anchor, and images of a queue.
pub const MOST_SAMPLES: usize = 1 << 28;
/// Threads where there are few cores; with many, sixteen a core.
const FEW_THREADS: usize = 64;
/// Pixels of an image file, twice Pillow's warning level.
const MOST_PIXELS: u64 = 1 << 28;
/// Bytes of one image while it is resized.
const MOST_RESIZED: u64 = 1 << 28;

/// Refuses a side that no image is brought to. `what` names the key: `[data] image_size`.
pub fn side(what: &str, side: i64) -> Result<usize> {
    match usize::try_from(side).ok().filter(|side| (LEAST_SIDE..=MOST_SIDE).contains(side)) {
        Some(side) => Ok(side),
        None => Err(Error::input(format!("{what} = {side}; accepted: {LEAST_SIDE} to {MOST_SIDE} pixels"))),
    }
}

/// Refuses a count outside `least` to `most`. `what` names the key: `[train] batch`.
pub fn count(what: &str, value: impl TryInto<i128> + Display + Copy, least: usize, most: usize) -> Result<()> {
    let fits = value.try_into().is_ok_and(|v| v >= least as i128 && v <= most as i128);
    if fits { Ok(()) } else { Err(Error::input(format!("{what} = {value}; accepted: {least} to {most}"))) }
}

/// Refuses more threads than this machine has any use for; 0 means one a core.
pub fn threads(what: &str, asked: usize) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = (16 * cores).max(FEW_THREADS);
    if asked <= most {
        return Ok(());
    }
    Err(Error::input(format!("{what} = {asked}; accepted: up to {most} here, where this process may use {cores} cores")))
}

/// Bytes of so many images as they are stored.
pub fn stored_images(count: usize, side: usize) -> u128 {
    count as u128 * 3 * (side as u128).pow(2)
}

/// Bytes of so many images as floats.
pub fn float_images(count: usize, side: usize) -> u128 {
    4 * stored_images(count, side)
}

/// Bytes of the maps a network keeps of a batch: (channels, stride) of each stage, as `Arch::maps` has them.
pub fn maps(count: usize, side: usize, stages: &[(i64, i64)]) -> u128 {
    let of_stage = |(channels, stride): &(i64, i64)| {
        let side = (side as u128).div_ceil((*stride).max(1) as u128);
        (*channels).max(0) as u128 * side * side
    };
    4 * count as u128 * stages.iter().map(of_stage).sum::<u128>()
}

/// Bytes of a matrix of floats.
pub fn matrix(rows: usize, columns: usize) -> u128 {
    4 * rows as u128 * columns as u128
}

/// What something will hold in memory at one time, part by part.
#[derive(Debug, Default)]
pub struct Need {
    parts: Vec<(String, u128)>,
}

impl Need {
    /// Nothing yet.
    pub fn new() -> Need {
        Need::default()
    }

    /// And so many bytes for this.
    pub fn and(mut self, what: impl Into<String>, bytes: u128) -> Need {
        self.parts.push((what.into(), bytes));
        self
    }

    /// Refuses what does not fit into the memory of this machine, container or process. `because` names what asks for it, with its value.
    pub fn check(&self, because: &str) -> Result<()> {
        self.check_against(because, memory())
    }

    fn check_against(&self, because: &str, available: u64) -> Result<()> {
        let all: u128 = self.parts.iter().map(|(_, bytes)| bytes).sum();
        if all <= u128::from(available) {
            return Ok(());
        }
        let listed: Vec<String> = self.parts.iter().map(|(what, bytes)| format!("{} for {what}", gigabytes(*bytes))).collect();
        Err(Error::input(format!(
            "{because}: needs at least {} of memory, and there are {} here ({})",
            gigabytes(all),
            gigabytes(u128::from(available)),
            listed.join(", ")
        )))
    }
}

fn gigabytes(bytes: u128) -> String {
    let giga = bytes as f64 / 1e9;
    if giga >= 1e6 { format!("{giga:.1e} GB") } else { format!("{giga:.1} GB") }
}

/// Why an image file of this many pixels is not decoded.
pub fn picture(width: u32, height: u32) -> Result<(), String> {
    if u64::from(width) * u64::from(height) <= MOST_PIXELS {
        return Ok(());
    }
    Err(format!("{width} x {height} pixels; accepted: up to {MOST_PIXELS} in all"))
}

/// Why an image of `from` (height, width) is not resized to `to`: an image one pixel high, brought to a height of 256, is as wide as a street.
pub fn resize(from: (usize, usize), to: (usize, usize)) -> Result<(), String> {
    let bytes = 3 * (from.0.max(to.0) as u128) * to.1 as u128;
    if bytes <= u128::from(MOST_RESIZED) {
        return Ok(());
    }
    Err(format!(
        "an image of {} x {} pixels would become {} x {}, {} of memory; accepted: up to {}",
        from.1,
        from.0,
        to.1,
        to.0,
        gigabytes(bytes),
        gigabytes(u128::from(MOST_RESIZED))
    ))
}

/// Bytes this process may use: the least of the machine's memory, its container's and its own limit.
pub fn memory() -> u64 {
    let machine = field("/proc/meminfo", "MemTotal:").map(|kb| kb * 1024);
    [machine, container(), own_limit()].into_iter().flatten().min().unwrap_or(u64::MAX)
}

/// A number of a file of lines `name number`.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// The smallest limit of the control groups this process is in, of either version.
fn container() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut least = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        // A limit of a group holds for all groups in it. Inside a container the path may be one of the host: its own root is asked too.
        let mut at = Some(std::path::Path::new(path));
        while let Some(group) = at {
            let file = format!("{root}{}/{file}", group.display().to_string().trim_end_matches('/'));
            let limit = fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u64>().ok());
            least = [least, limit].into_iter().flatten().min();
            at = group.parent();
        }
    }
    least
}

/// What is left of the address space where it is limited (`ulimit -v`).
#[cfg(target_os = "linux")]
fn own_limit() -> Option<u64> {
    let limit = address_space()?;
    let used = field("/proc/self/status", "VmSize:").unwrap_or(0) * 1024;
    Some(limit.saturating_sub(used))
}

#[cfg(not(target_os = "linux"))]
fn own_limit() -> Option<u64> {
    address_space()
}

/// The limit of the address space, where there is one.
pub(crate) fn address_space() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit fills the struct it is given.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused_by_name_and_number() {
        let said = |result: Result<()>| result.unwrap_err().to_string();
        assert_eq!(said(side("[data] image_size", 2).map(drop)), "[data] image_size = 2; accepted: 8 to 8192 pixels");
        assert_eq!(said(side("--size", -1).map(drop)), "--size = -1; accepted: 8 to 8192 pixels");
        assert_eq!(side("--size", 8192).unwrap(), 8192);
        assert_eq!(said(count("[train] batch", usize::MAX, 1, MOST_BATCH)), "[train] batch = 18446744073709551615; accepted: 1 to 1048576");
        assert!(count("[train] batch", 1usize, 1, 1).is_ok() && count("k", -1i64, 0, 9).is_err());
        assert!(said(threads("--threads", 1_000_000)).starts_with("--threads = 1000000; accepted: up to "));
        assert!(threads("--threads", 0).is_ok() && threads("--threads", 64).is_ok());
    }

    #[test]
    fn needs_add_up_and_are_compared_with_what_there_is() {
        // 1000 images of 100 x 100: 30 MB stored, 120 MB as floats; maps of 8 channels at half the side: 80 MB.
        assert_eq!((stored_images(1000, 100), float_images(1000, 100)), (30_000_000, 120_000_000));
        assert_eq!(maps(1000, 100, &[(8, 2)]), 80_000_000);
        assert_eq!(matrix(1000, 1000), 4_000_000);
        let need = Need::new().and("images", float_images(1000, 100)).and("maps", maps(1000, 100, &[(8, 2)]));
        assert!(need.check_against("train.batch = 1000", 200_000_000).is_ok());
        assert_eq!(
            need.check_against("train.batch = 1000", 199_999_999).unwrap_err().to_string(),
            "train.batch = 1000: needs at least 0.2 GB of memory, and there are 0.2 GB here (0.1 GB for images, 0.1 GB for maps)"
        );
        // No number overflows on the way.
        let wild = Need::new().and("tables", matrix(usize::MAX, usize::MAX / 8));
        assert!(wild.check("method.dim").unwrap_err().to_string().contains("GB"));
        assert!(memory() > 1 << 20);
    }

    #[test]
    fn images_as_wide_as_a_street_are_refused() {
        assert!(picture(8192, 8192).is_ok());
        assert_eq!(picture(65535, 65535).unwrap_err(), "65535 x 65535 pixels; accepted: up to 268435456 in all");
        assert!(resize((500, 375), (341, 256)).is_ok());
        let street = resize((1, 65535), (256, 256 * 65535)).unwrap_err();
        assert!(street.contains("65535 x 1") && street.contains("16776960 x 256") && street.contains("12.9 GB"), "{street}");
        assert!(resize((65535, 1), (256 * 65535, 256)).is_err());
    }
}
