//! Who may import whom: downwards only. A room may use those listed for it.

use std::fs;
use std::path::{Path, PathBuf};

/// Every room, lowest first, and the rooms it may use.
const MAY_USE: &[(&str, &str)] = &[
    ("error", ""),
    ("registry", "error"),
    ("rng", ""),
    ("files", "error"),
    ("pickle", "error"),
    ("params", "rng"),
    ("system", "error params"),
    ("losses", ""),
    ("optim", "error params system"),
    ("nets", "error params registry rng system"),
    ("extractor", "error nets params"),
    ("report", "error files"),
    ("run", "error files report"),
    ("recipe", "error optim system"),
    ("data", "error pickle registry rng system"),
    ("weights", "error files nets params pickle"),
    ("cohort", "data nets params rng system"),
    ("methods", "cohort data error losses nets optim params registry rng system"),
    ("train", "cohort data error extractor files losses methods nets optim params recipe rng run system weights"),
    ("eval", "data error extractor files nets params report rng run system weights"),
    ("export", "commands data error eval files nets params registry rng weights"),
    ("experiment", "error eval files methods nets recipe report rng run system weights"),
    ("commands", "data error eval experiment export extractor files losses methods nets optim params report run system weights"),
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

/// No architecture, method or dataset is named outside its file, its registry and the recipes.
#[test]
fn the_trainer_names_no_method_architecture_or_dataset() {
    let names = mcl::methods::METHODS
        .iter()
        .map(|m| m.name)
        .chain(mcl::nets::archs().map(|a| a.name))
        .chain(mcl::data::DATASETS.iter().map(|d| d.name));
    let text = fs::read_to_string("src/train/mod.rs").unwrap()
        + &fs::read_to_string("src/train/step.rs").unwrap()
        + &fs::read_to_string("src/cohort.rs").unwrap();
    for name in names {
        assert!(!text.contains(&format!("\"{name}\"")), "the trainer names {name}");
    }
}
