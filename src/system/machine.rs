//! What a number was computed with: versions, processor, memory.

use std::fs;
use std::path::{Path, PathBuf};

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

/// The environment of a run that was stopped and goes on after `step` steps. What it began with stays: command, start, machine. What
/// goes on now is added to `resumed`. What the recipe and the data are is said anew.
pub fn over_sittings(first: Option<Value>, now: Value, step: usize) -> Value {
    let Some(mut first) = first.filter(|first| first["command"].is_string()) else { return now };
    let mut sitting = json!({ "step": step });
    for (key, value) in now.as_object().into_iter().flatten() {
        if ABOUT_THE_SITTING.contains(&key.as_str()) {
            sitting[key] = value.clone();
        } else {
            first[key] = value.clone();
        }
    }
    let mut sittings = first["resumed"].as_array().cloned().unwrap_or_default();
    sittings.push(sitting);
    first["resumed"] = sittings.into();
    first
}

/// Keys of `environment` that one process of a run may have otherwise than another.
const ABOUT_THE_SITTING: &[&str] =
    &["mcl", "commit", "tch", "libtorch", "device", "threads", "ranks", "cpu", "cores", "memory_mb", "os", "arch", "command", "started"];

/// The command this process was started with.
pub fn command() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

/// The version of the libtorch this process runs on, as its own folder says: a libtorch in build-version, Python's package in version.py.
pub fn libtorch_version() -> String {
    let read = |file: &str| fs::read_to_string(libtorch_folder().join("..").join(file)).ok();
    let of_python = |text: String| text.lines().find_map(|l| Some(l.strip_prefix("__version__ = ")?.trim_matches(['\'', '"']).to_string()));
    let found = read("build-version").map(|text| text.trim().to_string()).or_else(|| read("version.py").and_then(of_python));
    found.unwrap_or_else(|| "unknown".to_string())
}

/// The folder of the libtorch this process runs on; where the system does not say, that of the build.
pub fn libtorch_folder() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let loaded = maps.lines().find_map(|l| l.split_whitespace().last().filter(|path| path.contains("/libtorch_cpu.")));
    loaded.and_then(|path| Path::new(path).parent()).unwrap_or(built_with()).to_path_buf()
}

/// The folder of the libtorch that the build was made with.
pub fn built_with() -> &'static Path {
    Path::new(env!("MCL_LIBTORCH_LIB"))
}

/// The processor's name, with family and model: a virtual machine may hide the rest of the name, and roundings differ by kind.
pub fn cpu_model() -> String {
    processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// The first processor of a /proc/cpuinfo.
fn processor(info: &str) -> String {
    let value = |key: &str| info.lines().find_map(|l| l.split_once(':').filter(|(k, _)| k.trim() == key).map(|(_, v)| v.trim()));
    match (value("model name"), value("cpu family"), value("model")) {
        (Some(name), Some(family), Some(model)) => format!("{name} (family {family}, model {model})"),
        (Some(name), ..) => name.to_string(),
        _ => "unknown".to_string(),
    }
}

/// All memory of the machine; 0 where there is no /proc.
fn memory_mb() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|l| l.strip_prefix("MemTotal:"));
    total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_told_by_family_and_model_where_its_name_is_hidden() {
        let info = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n";
        assert_eq!(processor(info), "AMD EPYC (family 26, model 2)");
        assert_eq!(processor("model name\t: Apple M1\n"), "Apple M1");
        assert_eq!(processor(""), "unknown");
    }

    #[test]
    fn a_run_that_goes_on_keeps_how_it_began() {
        let began = json!({ "command": "a", "started": "monday", "cores": 2, "recipe_hash": "1" });
        let next = |command: &str, hash: &str| json!({ "command": command, "started": "tuesday", "cores": 8, "recipe_hash": hash });
        let second = over_sittings(Some(began), next("b", "2"), 30);
        assert_eq!(
            second,
            json!({ "command": "a", "started": "monday", "cores": 2, "recipe_hash": "2",
                "resumed": [{ "step": 30, "command": "b", "started": "tuesday", "cores": 8 }] })
        );
        let third = over_sittings(Some(second), next("c", "2"), 60);
        assert_eq!((&third["command"], third["resumed"].as_array().unwrap().len()), (&json!("a"), 2));
        assert_eq!(over_sittings(Some(Value::Null), next("d", "1"), 60)["command"], "d");
    }
}
