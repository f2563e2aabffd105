//! Brings the official archives: download with resumption, checksum, safe extraction. Nothing half-done ever has the final name.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use md5::{Digest, Md5};

use super::{DATASETS, roots};
use crate::error::{Error, Result};
use crate::files;
use crate::system::progress::{Progress as Watched, clock_time};

/// An official archive of a dataset.
#[derive(Debug)]
pub struct Archive {
    /// The one folder it unpacks to; also its name for `data fetch`.
    pub folder: &'static str,
    /// Its own name.
    pub file: &'static str,
    /// The address without the file, ending in a slash.
    pub base: &'static str,
    /// Its published checksum, in hexadecimal.
    pub md5: &'static str,
    /// How much there is to download.
    pub megabytes: u32,
}

/// How to fetch.
#[derive(Debug, Clone, Default)]
pub struct Fetch<'a> {
    /// Where to put it; `MCL_DATA`, then `./data` otherwise.
    pub data: Option<&'a Path>,
    /// Takes the place of the official address; `MCL_DATA_MIRROR` otherwise.
    pub mirror: Option<&'a str>,
    /// Says nothing while it works.
    pub quiet: bool,
}

/// Brings a dataset (`cifar100`) or one of its archives (`cifar-100-python`) and returns what to tell the user.
pub fn fetch(name: &str, how: &Fetch) -> Result<String> {
    let archive = find(name)?;
    let (root, _) = roots(how.data).remove(0);
    let home = root.join(archive.folder);
    if home.exists() {
        return Ok(format!("{name} is already in {}; `mcl-eval data check` looks into it", home.display()));
    }
    let from_env = std::env::var("MCL_DATA_MIRROR").ok().filter(|mirror| !mirror.is_empty());
    let base = how.mirror.map(str::to_string).or(from_env).unwrap_or_else(|| archive.base.to_string());
    let home = bring(archive, &root, &base, how.quiet)?;
    Ok(format!("{name} is in {} (md5 of {}: {})", home.display(), archive.file, archive.md5))
}

/// Downloads `base/FILE`, verifies it and unpacks it below `root`; returns its folder. Called again after a fault, it goes on from there.
pub fn bring(archive: &Archive, root: &Path, base: &str, quiet: bool) -> Result<PathBuf> {
    let home = root.join(archive.folder);
    let address = format!("{}/{}", base.trim_end_matches('/'), archive.file);
    fs::create_dir_all(root).map_err(Error::io("cannot make", root))?;
    let part = root.join(format!(".{}.part", archive.file));
    // The lock is on what is being downloaded: a second process would write into the same bytes.
    let mut file = files::try_lock(&part)?
        .ok_or_else(|| Error::failed(format!("another process is fetching {} into {}", archive.file, root.display())))?;
    download(&address, &mut file, &part, quiet)?;

    let found = md5_of(&mut file, &part)?;
    if found != archive.md5 {
        fs::remove_file(&part).map_err(Error::io("cannot remove", &part))?;
        let size = file.metadata().map_err(Error::io("cannot read", &part))?.len();
        return Err(Error::failed(format!(
            "{address}: its {size} bytes have md5 {found}, the official archive has {}; the download was deleted, nothing was unpacked",
            archive.md5
        )));
    }
    let unpacking = Watched::new(quiet, format!("unpacking {}", archive.file), 0, "files");
    let unpack = Unpacking(root.join(format!(".{}.unpack", archive.folder)));
    unpack.clear()?;
    fs::create_dir(&unpack.0).map_err(Error::io("cannot make", &unpack.0))?;
    file.seek(SeekFrom::Start(0)).map_err(Error::io("cannot read", &part))?;
    let mut room = Room { left: UNPACKED * size_of(&file, &part)?.max(1 << 20) };
    if archive.file.ends_with(".zip") {
        unzip(file, &part, &unpack.0, &mut room, &unpacking)?
    } else {
        untar(file, &part, &unpack.0, &mut room, &unpacking)?
    }
    let unpacked = unpack.0.join(archive.folder);
    if !unpacked.is_dir() {
        return Err(Error::failed(format!("{address}: no folder {} in it", archive.folder)));
    }
    // On disk before it has the name by which it counts as whole; the name before the archive goes.
    files::sync_tree(&unpacked)?;
    fs::rename(&unpacked, &home).map_err(Error::io("cannot make", &home))?;
    files::sync_folder(root)?;
    fs::remove_file(&part).map_err(Error::io("cannot remove", &part))?;
    Ok(home)
}

/// The first archive of a dataset, or the archive of this name.
fn find(name: &str) -> Result<&'static Archive> {
    if let Some(spec) = DATASETS.iter().find(|spec| spec.name == name) {
        return spec.archives.first().ok_or_else(|| Error::input(format!("dataset {name} cannot be fetched: {}", spec.about)));
    }
    let all = || DATASETS.iter().flat_map(|spec| spec.archives);
    all().find(|archive| archive.folder == name || archive.file == name).ok_or_else(|| {
        let sets = DATASETS.iter().filter(|spec| !spec.archives.is_empty()).map(|spec| spec.name);
        Error::Unknown {
            kind: "dataset",
            name: name.to_string(),
            known: sets.chain(all().map(|a| a.folder)).collect::<Vec<_>>().join(", "),
        }
    })
}

/// How much larger than itself an archive may become; datasets of images hardly shrink.
const UNPACKED: u64 = 20;

/// Bytes that may still be unpacked.
struct Room {
    left: u64,
}

fn size_of(file: &File, path: &Path) -> Result<u64> {
    file.metadata().map(|known| known.len()).map_err(Error::io("cannot read", path))
}

/// The folder an archive is unpacked in, gone when the work is done or has failed.
struct Unpacking(PathBuf);

impl Unpacking {
    fn clear(&self) -> Result<()> {
        if self.0.exists() { fs::remove_dir_all(&self.0).map_err(Error::io("cannot remove", &self.0)) } else { Ok(()) }
    }
}

impl Drop for Unpacking {
    fn drop(&mut self) {
        if let Err(e) = self.clear() {
            eprintln!("warning: {e}");
        }
    }
}

/// Tries in a row without a single new byte before giving up.
const TRIES: u32 = 4;
/// A server that says nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(60);

/// Completes `file` from `address`: what is there already is not asked for again.
fn download(address: &str, file: &mut File, part: &Path, quiet: bool) -> Result<()> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_connect(Some(SILENCE))
        .timeout_recv_response(Some(SILENCE))
        .timeout_per_read(Some(SILENCE))
        .http_status_as_error(false)
        .build()
        .into();
    let mut progress = Progress::new(quiet, address);
    let mut failures = 0;
    loop {
        let before = file.seek(SeekFrom::End(0)).map_err(Error::io("cannot write", part))?;
        let broken = match attempt(&agent, address, file, part, before, &mut progress)? {
            Attempt::Complete => break,
            Attempt::Broken(why) => why,
        };
        let size = file.metadata().map_err(Error::io("cannot read", part))?.len();
        failures = if size > before { 0 } else { failures + 1 };
        if failures == TRIES {
            let kept = match size {
                0 => "nothing was written; --mirror takes another address".to_string(),
                _ => format!("{size} bytes are kept, the same command continues from there"),
            };
            return Err(Error::failed(format!("{address}: {broken}; {kept}")));
        }
        let again = if size > 0 { format!(" from byte {size}") } else { String::new() };
        progress.note(&format!("{broken}; trying again{again}"));
        std::thread::sleep(Duration::from_millis(250 << failures));
    }
    progress.done();
    file.sync_all().map_err(Error::io("cannot write", part))
}

enum Attempt {
    Complete,
    /// The connection, not the file: worth another try.
    Broken(String),
}

fn attempt(agent: &ureq::Agent, address: &str, file: &mut File, part: &Path, have: u64, progress: &mut Progress) -> Result<Attempt> {
    // Compression on the way would make byte ranges mean something else.
    let request = agent.get(address).header("Accept-Encoding", "identity");
    let request = if have > 0 { request.header("Range", format!("bytes={have}-")) } else { request };
    let response = match request.call() {
        Ok(response) => response,
        Err(e) => return Ok(Attempt::Broken(format!("cannot be reached ({})", e.to_string().trim_start_matches("io: ")))),
    };
    let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    let length: Option<u64> = header("content-length").and_then(|text| text.parse().ok());
    let (start, total) = match response.status().as_u16() {
        200 => (0, length),
        // bytes 100-199/200
        206 => match header("content-range").and_then(|range| range.strip_prefix("bytes ")).and_then(|range| range.split_once('-')) {
            Some((start, rest)) if start.parse() == Ok(have) => (have, rest.split_once('/').and_then(|(_, total)| total.parse().ok())),
            _ => return Ok(Attempt::Broken("the server sent another part than was asked for".to_string())),
        },
        // Nothing beyond what is there: complete, or a leftover of something else. The checksum will tell.
        416 => return Ok(Attempt::Complete),
        status @ (408 | 429 | 500..=599) => return Ok(Attempt::Broken(format!("the server answered {status}"))),
        status => return Err(Error::failed(format!("{address}: the server answered {status}"))),
    };
    file.set_len(start).and_then(|()| file.seek(SeekFrom::Start(start))).map_err(Error::io("cannot write", part))?;
    progress.start(address, start, total);
    let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
    let mut buffer = vec![0; 1 << 16];
    let mut at = start;
    loop {
        match body.read(&mut buffer) {
            Ok(0) if total.is_some_and(|total| at < total) => return Ok(Attempt::Broken("the connection broke".to_string())),
            Ok(0) => return Ok(Attempt::Complete),
            Ok(n) => {
                file.write_all(&buffer[..n]).map_err(Error::io("cannot write", part))?;
                at += n as u64;
                progress.at(at);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Ok(Attempt::Broken(format!("the connection broke: {e}"))),
        }
    }
}

/// A bar on a terminal, a line now and then elsewhere; both with the name of what comes, how much of how much, how fast, and the time left.
struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    what: String,
    /// Where this attempt began, and when.
    start: (u64, Instant),
    total: Option<u64>,
    last: Instant,
}

const BETWEEN_LINES: Duration = Duration::from_secs(10);

impl Progress {
    fn new(quiet: bool, address: &str) -> Progress {
        let what = address.rsplit('/').next().unwrap_or(address).to_string();
        Progress { bar: None, quiet, what, start: (0, Instant::now()), total: None, last: Instant::now() }
    }

    fn start(&mut self, address: &str, at: u64, total: Option<u64>) {
        if self.quiet {
            return;
        }
        (self.start, self.total) = ((at, Instant::now()), total);
        if io::stderr().is_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                let known = "{prefix} {wide_bar} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
                let style = if total.is_some() { known } else { "{prefix} {bytes}, {bytes_per_sec}" };
                let style = ProgressStyle::with_template(style).expect("a fixed template").progress_chars("=> ");
                ProgressBar::new(total.unwrap_or(0)).with_style(style).with_prefix(self.what.clone())
            });
            bar.set_position(at);
            bar.reset_eta();
        } else {
            let size = total.map_or(String::new(), |total| format!(", {:.1} MB", total as f64 / 1e6));
            let from = if at > 0 { format!(", from byte {at}") } else { String::new() };
            eprintln!("fetching {address}{size}{from}");
        }
    }

    fn at(&mut self, at: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(at);
        } else if !self.quiet && self.last.elapsed() > BETWEEN_LINES {
            self.last = Instant::now();
            let rate = (at - self.start.0) as f64 / self.start.1.elapsed().as_secs_f64().max(1e-9);
            let left = |total: u64| clock_time(total.saturating_sub(at) as f64 / rate.max(1e-9));
            let of = self.total.map_or(String::new(), |total| format!(" of {:.1}", total as f64 / 1e6));
            let left = self.total.map_or(String::new(), |total| format!(", {} left", left(total)));
            eprintln!("{}: {:.1}{of} MB, {:.1} MB/s{left}", self.what, at as f64 / 1e6, rate / 1e6);
        }
    }

    fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(format!("{}: {text}", self.what)),
            None if !self.quiet => eprintln!("{}: {text}", self.what),
            None => {}
        }
    }

    fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// md5 of a whole file, in hexadecimal.
pub fn md5_of(file: &mut File, path: &Path) -> Result<String> {
    file.seek(SeekFrom::Start(0)).map_err(Error::io("cannot read", path))?;
    let mut hash = Md5::new();
    io::copy(file, &mut hash).map_err(Error::io("cannot read", path))?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The place of an entry below `into`, or why there is none.
fn place(into: &Path, name: &Path) -> std::result::Result<PathBuf, String> {
    let mut inside = PathBuf::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => inside.push(part),
            Component::CurDir => {}
            Component::ParentDir => return Err("a path with `..`".to_string()),
            Component::RootDir | Component::Prefix(_) => return Err("an absolute path".to_string()),
        }
    }
    Ok(into.join(inside))
}

fn hostile(archive: &Path, entry: &Path, why: &str) -> Error {
    Error::failed(format!("{}: the entry {} is refused: {why}; nothing was unpacked", archive.display(), entry.display()))
}

/// Writes one file of an archive. An entry that comes twice is refused with the rest: `create_new` follows no link and overwrites nothing.
fn write_entry(content: &mut impl Read, to: &Path, room: &mut Room) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(Error::io("cannot make", parent))?;
    }
    let mut out = File::create_new(to).map_err(Error::io("cannot write", to))?;
    let written = io::copy(&mut content.take(room.left + 1), &mut out).map_err(Error::io("cannot unpack", to))?;
    room.left = room
        .left
        .checked_sub(written)
        .ok_or_else(|| Error::failed(format!("{}: the archive unpacks to more than {UNPACKED} times its size", to.display())))?;
    Ok(())
}

/// Unpacks a .tar.gz of plain files and folders.
fn untar(file: File, path: &Path, into: &Path, room: &mut Room, progress: &Watched) -> Result<()> {
    let broken = |e: io::Error| Error::failed(format!("{}: {e}", path.display()));
    // Long names are read into memory whole: the stream itself ends where the room does.
    let stream = flate2::read::MultiGzDecoder::new(io::BufReader::with_capacity(1 << 18, file)).take(room.left);
    let mut archive = tar::Archive::new(stream);
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let name = entry.path().map_err(broken)?.into_owned();
        let to = place(into, &name).map_err(|why| hostile(path, &name, &why))?;
        match entry.header().entry_type() {
            tar::EntryType::Directory => fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?,
            tar::EntryType::Regular | tar::EntryType::Continuous => write_entry(&mut entry, &to, room)?,
            tar::EntryType::XGlobalHeader => {}
            tar::EntryType::Symlink | tar::EntryType::Link => {
                return Err(hostile(path, &name, "a link, which may lead out of the folder and which no dataset needs"));
            }
            _ => return Err(hostile(path, &name, "neither a file nor a folder")),
        }
        progress.add(1);
    }
    Ok(())
}

/// Unpacks a .zip of plain files and folders.
fn unzip(file: File, path: &Path, into: &Path, room: &mut Room, progress: &Watched) -> Result<()> {
    let broken = |e: zip::result::ZipError| Error::failed(format!("{}: {e}", path.display()));
    let mut archive = zip::ZipArchive::new(io::BufReader::with_capacity(1 << 18, file)).map_err(broken)?;
    const TYPE: u32 = 0o170_000;
    progress.expect(archive.len());
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(broken)?;
        let name = PathBuf::from(entry.name());
        let to = place(into, &name).map_err(|why| hostile(path, &name, &why))?;
        match entry.unix_mode().map(|mode| mode & TYPE) {
            Some(0o120_000) => return Err(hostile(path, &name, "a link, which may lead out of the folder and which no dataset needs")),
            None | Some(0 | 0o100_000 | 0o040_000) if entry.is_dir() => fs::create_dir_all(&to).map_err(Error::io("cannot make", &to))?,
            None | Some(0 | 0o100_000) => write_entry(&mut entry, &to, room)?,
            Some(_) => return Err(hostile(path, &name, "neither a file nor a folder")),
        }
        progress.add(1);
    }
    Ok(())
}
