//! What a number was computed with: versions, processor, memory.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tch::Device;

/// Machine, versions and command, as kept beside every number. `commit` is what the program was built from. A run
/// on several ranks says so itself.
pub fn environment(device: Device, threads: usize, commit: &str) -> Value {
    json!({
        "mcl": env!("CARGO_PKG_VERSION"),
        "commit": commit,
        "tch": "0.26",
        "libtorch": libtorch_version(),
        "device": format!("{device:?}"),
        "threads": threads,
        "ranks": 1,
        "cpu": cpu_model(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_mb": memory_mb(),
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
        "command": command(),
        "started": chrono::Local::now().to_rfc3339(),
    })
}

/// The command this process was started with.
pub fn command() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

/// The version the build was made against; torch-sys refuses others.
pub fn libtorch_version() -> String {
    let file = Path::new(libtorch_folder()).join("../build-version");
    fs::read_to_string(file).map_or_else(|_| "unknown".to_string(), |v| v.trim().to_string())
}

/// The folder of the libraries the build was made against.
pub fn libtorch_folder() -> &'static str {
    env!("MCL_LIBTORCH_LIB")
}

/// The processor's name.
pub fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':'));
    model.map_or_else(|| "unknown".to_string(), |(_, name)| name.trim().to_string())
}

/// All memory of the machine; 0 where there is no /proc.
fn memory_mb() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|l| l.strip_prefix("MemTotal:"));
    total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}
