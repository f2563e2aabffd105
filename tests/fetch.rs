//! Fetching from a server on loopback that breaks, lies and sends hostile archives.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Cursor, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use mcl::data::Archive;
use mcl::data::fetch::{Fetch, bring, fetch};
use mcl::error::Error;
use md5::{Digest, Md5};

/// How the server answers its n-th request; the last entry holds for all further ones.
#[derive(Clone, Copy)]
enum Answer {
    /// As asked, ranges honoured.
    Well,
    /// The connection ends after this many bytes of the body.
    Broken(usize),
    /// The whole file, whatever range was asked for.
    WithoutRanges,
    Status(u16),
}

/// Serves `content` under any path; returns the address, and the Range headers it was sent ("" for none).
fn serve(content: Vec<u8>, answers: &[Answer]) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let ranges = Arc::new(Mutex::new(vec![]));
    let (seen, answers) = (ranges.clone(), answers.to_vec());
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let answer = answers[n.min(answers.len() - 1)];
            reply(stream.unwrap(), &content, answer, &seen);
        }
    });
    (address, ranges)
}

fn reply(mut stream: TcpStream, content: &[u8], answer: Answer, seen: &Mutex<Vec<String>>) {
    let lines: Vec<String> =
        BufReader::new(stream.try_clone().unwrap()).lines().map(|line| line.unwrap()).take_while(|line| !line.is_empty()).collect();
    let range = lines.iter().find_map(|line| line.to_lowercase().strip_prefix("range: ").map(str::to_string)).unwrap_or_default();
    seen.lock().unwrap().push(range.clone());
    let total = content.len();
    let asked: usize = range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap_or(0);
    let (head, body) = match answer {
        Answer::Status(status) => (format!("{status} Some Reason\r\nContent-Length: 0"), &content[..0]),
        Answer::Well | Answer::Broken(_) if asked >= total => {
            (format!("416 Range\r\nContent-Range: bytes */{total}\r\nContent-Length: 0"), &content[..0])
        }
        Answer::Well | Answer::Broken(_) if asked > 0 => {
            let head = format!("206 Partial\r\nContent-Range: bytes {asked}-{}/{total}\r\nContent-Length: {}", total - 1, total - asked);
            (head, &content[asked..])
        }
        _ => (format!("200 OK\r\nContent-Length: {total}"), content),
    };
    let sent = if let Answer::Broken(after) = answer { after.min(body.len()) } else { body.len() };
    // The other side may have gone: that is its affair.
    let _ = write!(stream, "HTTP/1.1 {head}\r\nConnection: close\r\n\r\n").and_then(|()| stream.write_all(&body[..sent]));
}

fn archive(file: &'static str, content: &[u8]) -> Archive {
    let md5: String = Md5::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    Archive { folder: "set", file, base: "", md5: md5.leak(), megabytes: 1 }
}

fn gzip(tar: Vec<u8>) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    out.write_all(&tar).unwrap();
    out.finish().unwrap()
}

/// Noise, so that the archive does not shrink.
fn noise() -> Vec<u8> {
    let mut state = 1u64;
    (0..200_000)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect()
}

fn good_tar() -> Vec<u8> {
    let mut tar = tar::Builder::new(vec![]);
    for (name, data) in [("set/deep/noise.bin", noise()), ("set/names.txt", b"a\nb\n".to_vec())] {
        let mut header = tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, data.as_slice()).unwrap();
    }
    gzip(tar.into_inner().unwrap())
}

/// The names in a folder, hidden ones too.
fn listing(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Run by the test below as a process of its own, so that its calls can be listed.
#[test]
#[ignore = "a process of what_was_unpacked_is_on_disk_before_it_has_its_name"]
fn bring_into_the_folder_of_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let root = std::env::var_os("BRING_INTO").map_or(dir.path().to_path_buf(), Into::into);
    let content = good_tar();
    let (address, _) = serve(content.clone(), &[Answer::Well]);
    let home = bring(&archive("set.tar.gz", &content), &root, &address, true).unwrap();
    assert_eq!(fs::read(home.join("deep/noise.bin")).unwrap(), noise());
}

/// A power cut after the rename must not leave a dataset whose files are empty: they are synced first, and the name before the archive goes.
#[test]
fn what_was_unpacked_is_on_disk_before_it_has_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (shim, root, count) = (support::disk::shim(dir.path()), dir.path().join("data"), dir.path().join("count"));
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "bring_into_the_folder_of_the_environment", "--ignored"]).env("BRING_INTO", &root);
    let output = command.env("LD_PRELOAD", shim).env("SHIM_UNDER", &root).env("SHIM_COUNT", &count).output().unwrap();
    assert!(output.status.success(), "{}", support::text(&output));
    let text = fs::read_to_string(&count).unwrap();
    let calls: Vec<&str> = text.lines().skip(1).collect();
    let place = |found: &dyn Fn(&str) -> bool| calls.iter().rposition(|call| found(call)).unwrap();
    let named = place(&|call| call == format!("rename {}", root.join("set").display()));
    let written = place(&|call| call.starts_with("write"));
    let gone = place(&|call| call.starts_with("unlink ") && call.ends_with(".part"));
    let syncs = |from: usize, to: usize| calls[from..to].iter().filter(|call| call.starts_with("fsync")).count();
    assert!(written < named && named < gone, "{calls:?}");
    assert_eq!(syncs(written, named), 4, "two files and two folders: {calls:?}");
    assert_eq!(syncs(named, gone), 1, "{calls:?}");
}

#[test]
fn an_archive_is_fetched_and_unpacked_and_leaves_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let content = good_tar();
    let (address, ranges) = serve(content.clone(), &[Answer::Well]);
    let home = bring(&archive("set.tar.gz", &content), dir.path(), &address, true).unwrap();
    assert_eq!(home, dir.path().join("set"));
    assert_eq!(fs::read(home.join("deep/noise.bin")).unwrap(), noise());
    assert_eq!(fs::read_to_string(home.join("names.txt")).unwrap(), "a\nb\n");
    assert_eq!(listing(dir.path()), ["set"]);
    assert_eq!(*ranges.lock().unwrap(), [""]);
}

#[test]
fn a_zip_is_unpacked_too() {
    let dir = tempfile::tempdir().unwrap();
    let mut zip = zip::ZipWriter::new(Cursor::new(vec![]));
    zip.add_directory("set/", Default::default()).unwrap();
    zip.start_file("set/deep/noise.bin", Default::default()).unwrap();
    zip.write_all(&noise()).unwrap();
    let content = zip.finish().unwrap().into_inner();
    let (address, _) = serve(content.clone(), &[Answer::Well]);
    let home = bring(&archive("set.zip", &content), dir.path(), &address, true).unwrap();
    assert_eq!(fs::read(home.join("deep/noise.bin")).unwrap(), noise());
    assert_eq!(listing(dir.path()), ["set"]);
}

#[test]
fn a_broken_connection_is_resumed_where_it_broke() {
    let dir = tempfile::tempdir().unwrap();
    let content = good_tar();
    let (address, ranges) = serve(content.clone(), &[Answer::Broken(70_000), Answer::Status(503), Answer::Broken(50_000), Answer::Well]);
    let home = bring(&archive("set.tar.gz", &content), dir.path(), &address, true).unwrap();
    assert_eq!(fs::read(home.join("deep/noise.bin")).unwrap(), noise());
    assert_eq!(*ranges.lock().unwrap(), ["", "bytes=70000-", "bytes=70000-", "bytes=120000-"]);
}

#[test]
fn a_download_given_up_is_continued_by_the_next_command() {
    let dir = tempfile::tempdir().unwrap();
    let content = good_tar();
    let set = archive("set.tar.gz", &content);
    let (address, _) = serve(content.clone(), &[Answer::Broken(90_000), Answer::Broken(0)]);
    let fault = bring(&set, dir.path(), &address, true).unwrap_err();
    assert!(fault.to_string().contains("90000 bytes are kept, the same command continues from there"), "{fault}");
    assert_eq!(fault.exit_code(), 1);
    assert_eq!(listing(dir.path()), [".set.tar.gz.part"]);
    let (address, ranges) = serve(content, &[Answer::Well]);
    bring(&set, dir.path(), &address, true).unwrap();
    assert_eq!(*ranges.lock().unwrap(), ["bytes=90000-"]);
}

#[test]
fn a_server_without_ranges_starts_over() {
    let dir = tempfile::tempdir().unwrap();
    let content = good_tar();
    let (address, ranges) = serve(content.clone(), &[Answer::Broken(70_000), Answer::WithoutRanges]);
    let home = bring(&archive("set.tar.gz", &content), dir.path(), &address, true).unwrap();
    assert_eq!(fs::read(home.join("deep/noise.bin")).unwrap(), noise());
    assert_eq!(ranges.lock().unwrap().len(), 2);
}

#[test]
fn a_whole_download_is_not_asked_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let content = good_tar();
    fs::write(dir.path().join(".set.tar.gz.part"), &content).unwrap();
    let (address, ranges) = serve(content.clone(), &[Answer::Well]);
    bring(&archive("set.tar.gz", &content), dir.path(), &address, true).unwrap();
    assert_eq!(*ranges.lock().unwrap(), [format!("bytes={}-", content.len())]);
}

#[test]
fn a_wrong_checksum_unpacks_nothing_and_the_next_try_starts_over() {
    let dir = tempfile::tempdir().unwrap();
    let content = good_tar();
    let set = archive("set.tar.gz", &content);
    let mut forged = content.clone();
    forged[1000] ^= 1;
    let (address, _) = serve(forged, &[Answer::Well]);
    let fault = bring(&set, dir.path(), &address, true).unwrap_err().to_string();
    assert!(fault.contains(&format!("the official archive has {}", set.md5)) && fault.contains("nothing was unpacked"), "{fault}");
    assert!(listing(dir.path()).is_empty());
    let (address, ranges) = serve(content, &[Answer::Well]);
    bring(&set, dir.path(), &address, true).unwrap();
    assert_eq!(*ranges.lock().unwrap(), [""]);
}

#[test]
fn the_official_checksum_guards_a_mirror() {
    let dir = tempfile::tempdir().unwrap();
    let (address, _) = serve(good_tar(), &[Answer::Well]);
    let how = Fetch { data: Some(dir.path()), mirror: Some(&address), quiet: true };
    let fault = fetch("cifar100", &how).unwrap_err().to_string();
    assert!(fault.starts_with(&format!("{address}/cifar-100-binary.tar.gz: ")), "{fault}");
    assert!(fault.contains("the official archive has 03b5dce01913d631647c71ecec9e9cb8"), "{fault}");
    assert!(listing(dir.path()).is_empty());

    fs::create_dir(dir.path().join("cifar-100-binary")).unwrap();
    assert!(fetch("cifar100", &how).unwrap().contains("is already in"));
    let unknown = fetch("cifar", &how).unwrap_err();
    assert!(
        unknown.to_string().contains(
            "unknown dataset `cifar` (did you mean `cifar10`?); known: cifar10, cifar100, stl10, tiny_imagenet, cifar-10-batches-bin"
        ),
        "{unknown}"
    );
    assert!(matches!(fetch("imagenet", &how), Err(Error::Input(text)) if text.contains("cannot be fetched")));
}

#[test]
fn a_missing_file_is_not_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let (address, ranges) = serve(vec![], &[Answer::Status(404)]);
    let fault = bring(&archive("set.tar.gz", b""), dir.path(), &address, true).unwrap_err().to_string();
    assert_eq!(fault, format!("{address}/set.tar.gz: the server answered 404"));
    assert_eq!(ranges.lock().unwrap().len(), 1);
}

/// A tar entry with a name as no honest writer would make it.
fn tar_entry(kind: tar::EntryType, name: &str, link: &str, data: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(data.len() as u64);
    header.set_mode(0o644);
    header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_cksum();
    let padding = vec![0; data.len().next_multiple_of(512) - data.len()];
    [header.as_bytes().as_slice(), data, &padding].concat()
}

#[test]
fn hostile_archives_write_nothing_outside_and_nothing_under_the_final_name() {
    use tar::EntryType::{Fifo, Link, Regular, Symlink};
    let honest = || tar_entry(Regular, "set/a.txt", "", b"a");
    let tar = |entries: &[Vec<u8>]| gzip([entries.concat(), vec![0; 1024]].concat());
    let zip = |entries: &[(&str, u32)]| {
        let mut zip = zip::ZipWriter::new(Cursor::new(vec![]));
        zip.start_file("set/a.txt", Default::default()).unwrap();
        for (name, mode) in entries {
            if mode & 0o170_000 == 0o120_000 {
                zip.add_symlink(*name, "../..", Default::default()).unwrap();
            } else {
                zip.start_file(*name, zip::write::FileOptions::default().unix_permissions(*mode)).unwrap();
                zip.write_all(b"evil").unwrap();
            }
        }
        zip.finish().unwrap().into_inner()
    };
    let outer = tempfile::tempdir().unwrap();
    let absolute = outer.path().join("absolute.txt").to_str().unwrap().to_string();
    let cases: Vec<(&'static str, Vec<u8>, &str)> = vec![
        ("set.tar.gz", tar(&[honest(), tar_entry(Regular, &absolute, "", b"evil")]), "an absolute path"),
        ("set.tar.gz", tar(&[honest(), tar_entry(Regular, "set/../../up.txt", "", b"evil")]), "a path with `..`"),
        ("set.tar.gz", tar(&[tar_entry(Symlink, "set/out", "../../..", b""), tar_entry(Regular, "set/out/up.txt", "", b"evil")]), "a link"),
        ("set.tar.gz", tar(&[honest(), tar_entry(Link, "set/passwd", "/etc/passwd", b"")]), "a link"),
        ("set.tar.gz", tar(&[honest(), tar_entry(Fifo, "set/pipe", "", b"")]), "neither a file nor a folder"),
        ("set.zip", zip(&[(&absolute, 0o644)]), "an absolute path"),
        ("set.zip", zip(&[("set/../../up.txt", 0o644)]), "a path with `..`"),
        ("set.zip", zip(&[("set/out", 0o120_777), ("set/out/up.txt", 0o644)]), "a link"),
    ];
    for (file, content, why) in cases {
        let root = outer.path().join("root/data");
        let (address, _) = serve(content.clone(), &[Answer::Well]);
        let fault = bring(&archive(file, &content), &root, &address, true).unwrap_err();
        assert!(fault.to_string().contains(why), "{file}: {fault}");
        assert_eq!(fault.exit_code(), 1);
        assert_eq!(listing(&root), [format!(".{file}.part")], "{why}");
        assert_eq!(listing(outer.path()), ["root"], "{why}");
        assert_eq!(listing(&outer.path().join("root")), ["data"], "{why}");
        fs::remove_dir_all(outer.path().join("root")).unwrap();
    }
}

#[test]
fn an_archive_without_its_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let content = gzip([tar_entry(tar::EntryType::Regular, "other/a.txt", "", b"a"), vec![0; 1024]].concat());
    let (address, _) = serve(content.clone(), &[Answer::Well]);
    let fault = bring(&archive("set.tar.gz", &content), dir.path(), &address, true).unwrap_err();
    assert!(fault.to_string().ends_with("no folder set in it"), "{fault}");
    assert!(!dir.path().join("set").exists());
}
