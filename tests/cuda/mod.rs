//! A CUDA device for tests and benches on machines without one: fake_cuda.cpp beside this file, compiled once and preloaded into programs
//! that know nothing of it. Its head says what it proves and what not.
#![allow(dead_code)]

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const SOURCE: &str = include_str!("fake_cuda.cpp");

/// Set in programs that `in_child` started.
const CHILD: &str = "MCL_TEST_ON_DEVICE";

/// The compiled device, or why there is none here. Kept below the target folder under a hash of everything it is made from.
pub fn library() -> Result<PathBuf, String> {
    static MADE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    MADE.get_or_init(make).clone()
}

fn make() -> Result<PathBuf, String> {
    let lib = mcl::system::machine::libtorch_folder();
    if lib.join("libtorch_cuda.so").exists() {
        return Err("the device that is not there: this libtorch has CUDA of its own".into());
    }
    let abi = std::env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".to_string());
    let flags = ["-O1", "-fPIC", "-shared", "-std=c++17", "-w"].map(String::from).into_iter();
    let include = lib.join("../include");
    let flags: Vec<String> = flags
        .chain([
            format!("-D_GLIBCXX_USE_CXX11_ABI={abi}"),
            format!("-I{}", include.display()),
            format!("-I{}", include.join("torch/csrc/api/include").display()),
            format!("-L{}", lib.display()),
            format!("-Wl,-rpath,{}", lib.display()),
        ])
        .collect();
    let hash = mcl::files::sha256(format!("{SOURCE}\n{}", flags.join("\n")).as_bytes());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let made = folder.join(format!("libfakecuda-{}.so", &hash[..16]));
    if made.exists() {
        return Ok(made);
    }
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_string());
    std::fs::create_dir_all(folder).map_err(|e| format!("the device that is not there: {}: {e}", folder.display()))?;
    // Names of their own until they are whole: other tests may be compiling it too.
    let source = folder.join(format!("fake_cuda-{}.cpp", std::process::id()));
    let partial = folder.join(format!("libfakecuda-{}.partial", std::process::id()));
    std::fs::write(&source, SOURCE).map_err(|e| format!("the device that is not there: {}: {e}", source.display()))?;
    let built = Command::new(&compiler).arg(&source).args(&flags).args(["-ltorch_cpu", "-lc10", "-ldl", "-o"]).arg(&partial).output();
    let _ = std::fs::remove_file(&source);
    match built {
        Err(e) => Err(format!("the device that is not there: no C++ compiler {compiler}: {e}")),
        // A compiler that is there and does not take the source is a fault, not a reason to skip.
        Ok(output) if !output.status.success() => panic!("{compiler} on fake_cuda.cpp: {}", String::from_utf8_lossy(&output.stderr)),
        Ok(_) => {
            std::fs::rename(&partial, &made).map_err(|e| format!("the device that is not there: {}: {e}", made.display()))?;
            Ok(made)
        }
    }
}

/// Lets a program see `cuda:0` and `cuda:1`.
pub fn preload<'a>(command: &'a mut Command, library: &Path) -> &'a mut Command {
    command.env("LD_PRELOAD", library)
}

/// What has happened on the device since the program started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Operators that would be kernels.
    pub launches: i64,
    /// Copies from the host.
    pub to_device: i64,
    /// Copies to the host.
    pub to_host: i64,
    /// Numbers read.
    pub reads: i64,
    /// Everything that stops the queue of a real GPU.
    pub waits: i64,
}

impl Counts {
    /// What happened since an earlier look.
    pub fn since(self, before: Counts) -> Counts {
        Counts {
            launches: self.launches - before.launches,
            to_device: self.to_device - before.to_device,
            to_host: self.to_host - before.to_host,
            reads: self.reads - before.reads,
            waits: self.waits - before.waits,
        }
    }
}

/// A function of the preloaded device; none where none is preloaded.
fn symbol(name: &std::ffi::CStr) -> Option<*mut libc::c_void> {
    // SAFETY: looks up a name.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// The counters of the device in this process; none where it is not preloaded.
pub fn counts() -> Option<Counts> {
    let found = symbol(c"fake_cuda_counts")?;
    let mut out = [0i64; 5];
    // SAFETY: the function of fake_cuda.cpp, which writes five numbers.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut i64)>(found)(out.as_mut_ptr()) };
    let [launches, to_device, to_host, reads, waits] = out;
    Some(Counts { launches, to_device, to_host, reads, waits })
}

/// From now on (or no longer) the device raises an error at everything that waits for it.
pub fn refuse_waits(on: bool) {
    let found = symbol(c"fake_cuda_refuse").expect("the device is preloaded");
    // SAFETY: the function of fake_cuda.cpp.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(c_int)>(found)(c_int::from(on)) }
}

/// libtorch's settings for CUDA in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Matrix products may round to TF32.
    pub tf32_matmul: bool,
    /// Convolutions may round to TF32.
    pub tf32_cudnn: bool,
    /// cuDNN takes deterministic algorithms alone.
    pub deterministic: bool,
    /// cuDNN tries its algorithms and takes the fastest.
    pub autotuner: bool,
}

/// What libtorch is set to; the device must be preloaded.
pub fn settings() -> Settings {
    let found = symbol(c"fake_cuda_settings").expect("the device is preloaded");
    let mut out: [c_int; 4] = [0; 4];
    // SAFETY: the function of fake_cuda.cpp, which writes four numbers.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut c_int)>(found)(out.as_mut_ptr()) };
    let [tf32_matmul, tf32_cudnn, deterministic, autotuner] = out.map(|n| n != 0);
    Settings { tf32_matmul, tf32_cudnn, deterministic, autotuner }
}

/// Runs `check`, the body of the test `path` (with its crate in front), where the device is: in a copy of this test program with the device preloaded and these
/// variables set. What it prints is printed here. Where the device cannot be made, `skip` is told why.
pub fn in_child(path: &str, variables: &[(&str, &str)], skip: impl FnOnce(&str), check: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        println!(); // the runner has begun a line
        assert!(tch::Cuda::is_available(), "the device was preloaded and libtorch does not see it");
        return check();
    }
    let library = match library() {
        Ok(library) => library,
        Err(why) => return skip(&why),
    };
    let name = path.split_once("::").expect("the path of a test begins with its crate").1;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads", "1"]).env(CHILD, "1").envs(variables.iter().copied());
    let output = preload(&mut command, &library).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let table: Vec<&str> = said.lines().filter(|line| line.starts_with("| ")).collect();
    table.iter().for_each(|line| println!("{line}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} on the device: {}\n{said}{errors}", output.status);
    assert!(said.contains("test result: ok. 1 passed"), "{name} did not run on the device: {said}{errors}");
}
