//! TorchScript archives: a tree of modules with real parameters and buffers, which `torch.jit.load` opens in Python and C++ and which
//! can be trained on. Built by the C++ API, because tracing turns weights into constants and bakes the mode of BatchNorm in.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{Error, Result};
use crate::files;
use crate::nets::graph::Module;

mod archive;
mod source;

pub use archive::check;

/// A `torch::jit::Module`, see torchscript.cpp.
#[repr(C)]
struct Raw {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn mcl_script_free_text(text: *mut c_char);
    fn mcl_script_free(module: *mut Raw);
    fn mcl_script_new(class: *const c_char, error: *mut *mut c_char) -> *mut Raw;
    fn mcl_script_tensor(module: *mut Raw, name: *const c_char, tensor: *const C_tensor, trained: bool, error: *mut *mut c_char);
    fn mcl_script_int(module: *mut Raw, name: *const c_char, value: i64, error: *mut *mut c_char);
    fn mcl_script_child(parent: *mut Raw, name: *const c_char, child: *const Raw, error: *mut *mut c_char);
    fn mcl_script_define(module: *mut Raw, source: *const c_char, error: *mut *mut c_char);
    fn mcl_script_save(module: *const Raw, size: *mut usize, error: *mut *mut c_char) -> *mut c_char;
    fn mcl_script_load(path: *const c_char, error: *mut *mut c_char) -> *mut Raw;
    fn mcl_script_names(module: *const Raw, error: *mut *mut c_char) -> *mut c_char;
}

/// An owned module.
struct Handle(*mut Raw);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by mcl_script_new or mcl_script_load, freed once; null is allowed.
        unsafe { mcl_script_free(self.0) }
    }
}

/// Takes over a text of the C++ side.
fn owned(text: *mut c_char) -> String {
    // SAFETY: callers pass a text the C++ side has made with strdup and given up.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        mcl_script_free_text(text);
        copy
    }
}

/// Runs a call that may leave a message behind.
fn checked<T>(what: &str, call: impl FnOnce(*mut *mut c_char) -> T) -> Result<T> {
    let mut message = std::ptr::null_mut();
    let value = call(&mut message);
    if message.is_null() {
        return Ok(value);
    }
    Err(Error::failed(format!("TorchScript, {what}: {}", owned(message).trim())))
}

fn c_text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::failed(format!("TorchScript: `{text}` has a zero byte in it")))
}

fn build(module: &Module) -> Result<Handle> {
    let class = c_text(&format!("__torch__.mcl.{}", module.class))?;
    let here = module.class.as_str();
    // SAFETY, here and below: the handles are live, the texts end with 0, the tensors are tch's, and no exception crosses (`guarded`).
    let raw = Handle(checked(here, |error| unsafe { mcl_script_new(class.as_ptr(), error) })?);
    for (tensors, trained) in [(&module.parameters, true), (&module.buffers, false)] {
        for (name, tensor) in tensors {
            let name = c_text(name)?;
            checked(here, |error| unsafe { mcl_script_tensor(raw.0, name.as_ptr(), tensor.as_ptr(), trained, error) })?;
        }
    }
    for (name, value) in &module.ints {
        let name = c_text(name)?;
        checked(here, |error| unsafe { mcl_script_int(raw.0, name.as_ptr(), *value, error) })?;
    }
    for (name, child) in &module.children {
        let (child, name) = (build(child)?, c_text(name)?);
        checked(here, |error| unsafe { mcl_script_child(raw.0, name.as_ptr(), child.0, error) })?;
    }
    let source = c_text(&source::forward(&module.body))?;
    checked(here, |error| unsafe { mcl_script_define(raw.0, source.as_ptr(), error) })?;
    Ok(raw)
}

/// Writes the archive, in evaluation mode.
pub fn save(path: &Path, module: &Module) -> Result<()> {
    let raw = build(module)?;
    let mut size = 0;
    let bytes = checked("saving", |error| unsafe { mcl_script_save(raw.0, &mut size, error) })?;
    // SAFETY: no message was left, so `bytes` holds `size` bytes, ours until they are given back.
    let written = files::write(path, unsafe { std::slice::from_raw_parts(bytes.cast(), size) });
    unsafe { mcl_script_free_text(bytes) };
    written
}

/// Does a file hold TorchScript: an archive of torch's with code in it? Nothing of it is run.
pub fn is_archive(path: &Path) -> bool {
    let archive = std::fs::File::open(path).ok().and_then(|file| zip::ZipArchive::new(file).ok());
    archive.is_some_and(|archive| archive.file_names().any(|name| name.split('/').nth(1) == Some("code")))
}

/// What an archive holds, by libtorch's own account, in the order of registration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// Tensors that are trained.
    pub parameters: Vec<String>,
    /// Tensors that are not.
    pub buffers: Vec<String>,
    /// Submodules of all levels.
    pub children: Vec<String>,
}

/// What the archive at `path` holds.
pub fn names(path: &Path) -> Result<Names> {
    let name = c_text(&path.to_string_lossy())?;
    let foreign = |e: Error| Error::file(path, format!("no TorchScript archive: {e}"));
    let raw = Handle(checked("loading", |error| unsafe { mcl_script_load(name.as_ptr(), error) }).map_err(foreign)?);
    let text = owned(checked("listing", |error| unsafe { mcl_script_names(raw.0, error) })?);
    let mut names = Names::default();
    for (kind, name) in text.lines().filter_map(|line| line.split_once(' ')) {
        let list = match kind {
            "parameter" => &mut names.parameters,
            "buffer" => &mut names.buffers,
            _ => &mut names.children,
        };
        list.push(name.to_string());
    }
    Ok(names)
}

/// What a loaded module's `forward` gives: its maps in order, or one tensor.
pub fn forward(module: &tch::CModule, images: &Tensor) -> Result<Vec<Tensor>> {
    use tch::IValue;
    match module.forward_is(&[IValue::Tensor(images.shallow_clone())])? {
        IValue::Tensor(tensor) => Ok(vec![tensor]),
        IValue::GenericDict(pairs) => {
            let maps = pairs.into_iter().filter_map(|(_, value)| match value {
                IValue::Tensor(map) => Some(map),
                _ => None,
            });
            Ok(maps.collect())
        }
        other => Err(Error::failed(format!("TorchScript: forward gave {other:?}; a tensor or a dict of tensors is wanted"))),
    }
}
