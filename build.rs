//! Gives every binary, test and bench an rpath to libtorch, so that they run with an empty environment and outlive the clone.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let Ok(dir) = std::env::var("DEP_TCH_LIBTORCH_LIB") else {
        return; // torch-sys built with `doc-only`: nothing is linked
    };
    // Canonical: `.libtorch` is a link inside the clone to the per-user cache.
    let dir = Path::new(&dir).canonicalize().unwrap_or_else(|e| panic!("libtorch folder {dir}: {e}; run `make build`"));
    println!("cargo:rustc-env=MCL_LIBTORCH_LIB={}", dir.display());
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", dir.display());
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // Nothing in torch-sys refers to the CUDA library, so the linker would drop it without a word.
        println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
        println!("cargo:rustc-link-arg=-ltorch");
    }
}
