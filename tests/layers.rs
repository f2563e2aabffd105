//! Who may import whom: downwards only. A room may use those listed for it.

use std::fs;
use std::path::{Path, PathBuf};

/// Every room, lowest first, and the rooms it may use.
const MAY_USE: &[(&str, &str)] = &[
    ("error", ""),
    ("limits", "error"),
    ("registry", "error"),
    ("settings", "error"),
    ("rng", ""),
    ("files", "error limits"),
    ("pickle", "error"),
    ("params", "rng"),
    ("system", "error files limits params"),
    ("losses", ""),
    ("optim", "error params system"),
    ("nets", "error params registry rng system"),
    ("extractor", "error nets params system"),
    ("report", "error files system"),
    ("run", "error files report"),
    ("data", "error files limits pickle registry rng system"),
    ("recipe", "data error files limits optim settings system"),
    ("weights", "error files limits nets params pickle"),
    ("cohort", "data nets params rng system"),
    ("methods", "cohort data error limits losses nets optim params recipe registry rng system"),
    ("train", "cohort data error extractor files limits losses methods nets optim params recipe rng run system weights"),
    ("eval", "cohort data error extractor files limits losses methods nets optim params recipe report rng run settings system weights"),
    ("export", "error eval files nets params registry report rng run weights"),
    ("experiment", "data error eval files limits methods nets params recipe registry report rng run system weights"),
    (
        "commands",
        "cohort data error eval experiment export extractor files limits losses methods nets optim params recipe report rng run system train weights",
    ),
];

fn rust_files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, out)
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path)
        }
    }
}

fn sources() -> Vec<(String, PathBuf, String)> {
    let mut files = vec![];
    rust_files(Path::new("src"), &mut files);
    let module = |path: &Path| {
        path.strip_prefix("src").unwrap().components().next().unwrap().as_os_str().to_string_lossy().trim_end_matches(".rs").to_string()
    };
    files
        .into_iter()
        .map(|path| (module(&path), path.clone(), fs::read_to_string(&path).unwrap()))
        .filter(|(m, ..)| m != "lib" && m != "bin")
        .collect()
}

/// `crate::a::b`, and the `a, b` of `crate::{a::x, b}`.
fn imports(text: &str) -> Vec<String> {
    let mut found = vec![];
    for line in text.lines().filter(|l| !l.trim_start().starts_with("//")) {
        for piece in line.split("crate::").skip(1) {
            let names: Vec<&str> = match piece.strip_prefix('{') {
                Some(list) => list.split('}').next().unwrap_or_default().split(',').map(str::trim).collect(),
                None => vec![piece],
            };
            found.extend(names.iter().map(|n| n.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()));
        }
    }
    found
}

#[test]
fn modules_import_downwards_only() {
    let mut faults = vec![];
    for (module, path, text) in sources() {
        let Some((_, allowed)) = MAY_USE.iter().find(|(m, _)| *m == module) else {
            faults.push(format!("{}: room {module} is not on the list", path.display()));
            continue;
        };
        for used in imports(&text) {
            if used != module && !allowed.split(' ').any(|room| room == used) {
                faults.push(format!("{} uses crate::{used}; {module} may use: {allowed}", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The map in src/lib.rs has a line for every room.
#[test]
fn the_map_names_every_room() {
    let map = fs::read_to_string("src/lib.rs").unwrap();
    for (room, _) in MAY_USE {
        assert!(map.contains(&format!("//! | [`{room}`] |")), "src/lib.rs: the map has no line for {room}");
    }
}

/// Tensors are made where their inputs live: no GPU is needed to keep this rule, only to notice that it was broken.
#[test]
fn no_fixed_device_in_the_maths() {
    let mut faults = vec![];
    for (module, path, text) in sources() {
        if ["nets", "losses", "methods", "optim"].contains(&module.as_str()) {
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for (i, line) in code.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with("//")) {
                // Random numbers and counters are drawn on the CPU and moved; those lines say so.
                let fixed = line.contains("Device::Cpu") || line.contains("Device::Cuda") || line.contains("Kind::Float, tch::Device");
                if fixed && !line.contains("// on the CPU") {
                    faults.push(format!("{}:{}: {}", path.display(), i + 1, line.trim()));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The names in a run folder, as code would spell them.
const RUN_FILES: &[&str] = &[
    "recipe.toml",
    "asked.toml",
    "environment.json",
    "metrics.csv",
    "metrics.jsonl",
    "metrics-steps.jsonl",
    "log.txt",
    "tfevents",
    "(\"checkpoints\")",
    "manifest.json",
    "state.safetensors",
    "(\"networks\")",
    "peer-",
    "best.safetensors",
    "summary.json",
    "results.csv",
    "results.jsonl",
    "evidence.json",
];

/// A file's code without its comments and its own tests, line by line with the number.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.split("#[cfg(test)]").next().unwrap_or_default().lines().enumerate();
    lines.filter(|(_, line)| !line.trim_start().starts_with("//")).map(|(i, line)| (i + 1, line.split(" // ").next().unwrap_or_default()))
}

/// The run folder has one owner: whoever needs a path, or a name for a message, asks `RunFolder`.
#[test]
fn only_run_spells_the_names_in_a_run_folder() {
    let mut files = vec![];
    rust_files(Path::new("src"), &mut files);
    let mut faults = vec![];
    for path in files.iter().filter(|path| !path.starts_with("src/run") && !path.ends_with("src/run.rs")) {
        let text = fs::read_to_string(path).unwrap();
        for (number, line) in code(&text) {
            if let Some(name) = RUN_FILES.iter().find(|name| line.contains(*name)) {
                faults.push(format!("{}:{number}: spells {name}", path.display()));
            }
        }
    }
    faults.sort();
    assert!(faults.is_empty(), "{} places outside src/run.rs:\n{}", faults.len(), faults.join("\n"));
}

/// Statics that may change: scratch of a thread, and what is written once.
const MAY_CHANGE: &[(&str, &str)] = &[
    ("src/nets/layers.rs", "MACS"), // counts the multiply-adds of one thread
    // A thread's scratch, kept for the next convolution.
    ("src/nets/kernels/fused/direct.rs", "BLOCKED"),
    ("src/nets/kernels/fused/winograd.rs", "SCRATCH"),
    ("src/nets/kernels/winograd.rs", "TILE_SPACE"),
    ("src/nets/kernels/winograd.rs", "WEIGHT_SPACE"),
    ("src/nets/kernels/winograd.rs", "SUM_SPACE"),
    ("src/nets/kernels/conv_norm.rs", "GRADIENT_SPACE"),
    // Found once.
    ("src/nets/kernels/lanes.rs", "ALLOWED"),
    ("src/nets/kernels/parallel.rs", "GOMP"),
    ("src/weights/mod.rs", "ALL"),
];

/// What changes while the program runs is handed down, so that two runs in one process do not meet. MPI is one for the whole process.
#[test]
fn no_static_that_changes_outside_ranks() {
    let changes = ["Atomic", "Mutex", "RwLock", "Cell", "OnceLock", "LazyLock", "mut "];
    let mut files = vec![];
    rust_files(Path::new("src"), &mut files);
    let mut faults = vec![];
    for path in files.iter().filter(|path| !path.ends_with("system/ranks/mpi.rs")) {
        let text = fs::read_to_string(path).unwrap();
        for (number, line) in code(&text) {
            let words = line.trim_start().trim_start_matches("pub(crate) ").trim_start_matches("pub ");
            let Some(words) = words.strip_prefix("static ") else { continue };
            let listed = MAY_CHANGE.iter().any(|(file, name)| path.ends_with(file) && words.starts_with(&format!("{name}:")));
            if !listed && changes.iter().any(|kind| words.contains(kind)) {
                faults.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// No architecture, method or dataset is named outside its file, its registry and the recipes.
#[test]
fn the_trainer_names_no_method_architecture_or_dataset() {
    let names = mcl::methods::METHODS
        .iter()
        .map(|m| m.name)
        .chain(mcl::nets::archs().map(|a| a.name))
        .chain(mcl::data::DATASETS.iter().map(|d| d.name));
    let mut files = vec![PathBuf::from("src/cohort.rs")];
    rust_files(Path::new("src/train"), &mut files);
    let text: String =
        files.iter().map(|path| code(&fs::read_to_string(path).unwrap()).map(|(_, line)| line).collect::<String>()).collect();
    for name in names {
        assert!(!text.contains(&format!("\"{name}\"")), "the trainer names {name}");
    }
}

/// What two measurements need stands in eval/, where both find it.
#[test]
fn a_measurement_does_not_import_a_measurement() {
    let modules: Vec<String> = mcl::eval::measures::MEASURES.iter().map(|m| m.name.replace('-', "_")).collect();
    let mut faults = vec![];
    for (_, path, text) in sources() {
        let Ok(below) = path.strip_prefix("src/eval") else { continue };
        let own = below.strip_prefix("measures").ok().map(|p| p.components().next().unwrap().as_os_str().to_string_lossy().to_string());
        let own = own.unwrap_or_default().trim_end_matches(".rs").to_string();
        if own == "mod" {
            continue; // the registry
        }
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with("//")) {
            let after =
                line.split("measures::").nth(1).or_else(|| line.trim().strip_prefix("use super::").filter(|_| modules.contains(&own)));
            let words = after.unwrap_or_default().split(|c: char| !(c.is_alphanumeric() || c == '_'));
            if let Some(other) = words.filter(|w| *w != own).find(|w| modules.iter().any(|m| m == w)) {
                faults.push(format!("{}:{} uses the measurement {other}", path.display(), i + 1));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
