//! Gives every binary, test and bench an rpath to libtorch, so that they run with an empty environment and outlive the clone. Compiles
//! the C++ files: tch has no way to build a TorchScript module or an autograd function.

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
    cpp(&dir);
}

/// Compiled with the headers that lie beside the library folder, as torch-sys compiles its own.
fn cpp(lib: &Path) {
    let sources = [
        "src/nets/kernels/autocast.cpp",
        "src/weights/torchscript.cpp",
        "src/nets/kernels/convolution.cpp",
        "src/nets/kernels/norm.cpp",
        "src/nets/kernels/conv_norm.cpp",
        "src/optim/lists.cpp",
        "src/system/arrival.cpp",
        "src/system/gpu.cpp",
        "src/system/ranks/sum.cpp",
    ];
    let headers = ["src/nets/kernels/differentiable.h"];
    sources.iter().chain(&headers).for_each(|source| println!("cargo:rerun-if-changed={source}"));
    println!("cargo:rerun-if-env-changed=LIBTORCH_INCLUDE");
    println!("cargo:rerun-if-env-changed=LIBTORCH_CXX11_ABI");
    let include = std::env::var("LIBTORCH_INCLUDE").map_or_else(|_| lib.join("../include"), |dir| Path::new(&dir).join("include"));
    if !include.join("torch/script.h").exists() {
        panic!("no torch/script.h in {}; run `make build`, or set LIBTORCH_INCLUDE to the folder that holds include/", include.display());
    }
    let abi = std::env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".to_string());
    cc::Build::new()
        .cpp(true)
        .files(sources)
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .flag("-std=c++17")
        .flag(format!("-D_GLIBCXX_USE_CXX11_ABI={abi}"))
        .warnings(false) // of torch's headers
        .compile("mcl_cpp");
}
