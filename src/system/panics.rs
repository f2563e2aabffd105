//! A program that ends with one line whatever happens: libtorch's refusals reach Rust as panics, some of them on threads of their own, and
//! a page of frames helps nobody.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result, libtorch_line, one_line};

/// Runs `work` and says how it failed with `say`, once. A panic, here or on another thread, is a failure like others (exit code 1): what
/// libtorch refused is said in its words, all else is a fault of this program and says so.
pub fn guarded(work: impl FnOnce() -> Result<()>, say: impl FnOnce(Error) -> ExitCode) -> ExitCode {
    let first: Arc<Mutex<Option<String>>> = Arc::default();
    let heard = first.clone();
    panic::set_hook(Box::new(move |told| {
        let place = told.location().map_or(String::new(), |place| format!("{}:{}", place.file(), place.line()));
        if let Ok(mut first) = heard.lock() {
            first.get_or_insert_with(|| describe(told.payload(), &place));
        }
    }));
    let outcome = panic::catch_unwind(AssertUnwindSafe(work));
    let _ = panic::take_hook();
    let panicked = first.lock().ok().and_then(|mut first| first.take());
    match (outcome, panicked) {
        (Ok(Ok(())), _) => ExitCode::SUCCESS,
        // A thread died and the one that waited for it says only that.
        (Ok(Err(Error::Failed(_))) | Err(_), Some(why)) => say(Error::failed(why)),
        (Ok(Err(e)), _) => say(e),
        (Err(_), None) => say(Error::failed("internal error: it panicked without a word")),
    }
}

/// What a panic was about, in one line.
fn describe(payload: &(dyn Any + Send), place: &str) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default();
    // `unwrap` shows the error as Rust would write it: Torch("...\\nException raised from ...").
    match text.split_once("Torch(\"") {
        Some((_, refused)) => {
            let refused = refused.strip_suffix("\")").unwrap_or(refused).replace("\\n", "\n").replace("\\\"", "\"").replace("\\'", "'");
            format!("libtorch: {}", libtorch_line(&refused))
        }
        None => format!("internal error, please report it: {} ({place})", one_line(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorchs_refusals_are_told_from_our_faults() {
        let shape = tch::Tensor::from_slice(&[1f32, 2.0, 3.0]);
        let refused = panic::catch_unwind(|| shape.view([2i64])).map(drop).unwrap_err();
        let said = describe(&*refused, "here");
        assert_eq!(said, "libtorch: shape '[2]' is invalid for input of size 3");
        let fault: Box<dyn Any + Send> = Box::new("index out of bounds\nat length 3".to_string());
        assert_eq!(describe(&*fault, "src/x.rs:7"), "internal error, please report it: index out of bounds at length 3 (src/x.rs:7)");
    }
}
