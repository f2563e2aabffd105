//! What is printed. Whoever read it may be gone: `mcl-train run ... | head -1` closes the pipe after a line. Training goes on then and
//! everything is saved; a program that only prints has nothing left to do and ends as if all had been read, without a word, as `rg` and
//! `git` do.
//!
//! The macros below have the names of the standard ones, which panic there, and take their place in the whole library and both programs.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::process;

/// Prints results. A disk that is full, unlike a reader that has left, is a failure: what was asked for did not arrive.
pub fn to_stdout(text: Arguments) {
    if let Err(e) = io::stdout().lock().write_fmt(text).and_then(|()| io::stdout().lock().flush())
        && e.kind() != ErrorKind::BrokenPipe
    {
        to_stderr(format_args!("cannot write to the standard output: {e}\n"));
        process::exit(1);
    }
}

/// Prints what a person may want to know. Nothing depends on whether it arrives: where a run must remember, it has its log.
pub fn to_stderr(text: Arguments) {
    // In one piece: several processes may share the place it goes to.
    let _ = io::stderr().lock().write_all(text.to_string().as_bytes());
}

/// How many letters a line of the terminal holds that results are printed on; none where they go to a file or a pipe.
pub fn width() -> Option<usize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call fills the struct it is given, and only where it succeeds is it read.
    let asked = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    (asked == 0 && size.ws_col > 0).then_some(size.ws_col.into())
}

/// As the standard one; a closed pipe is no reason to end.
#[doc(hidden)]
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => { $crate::system::output::to_stdout(format_args!($($text)*)) };
}

/// As the standard one; a closed pipe is no reason to end.
#[doc(hidden)]
#[macro_export]
macro_rules! println {
    () => { $crate::system::output::to_stdout(format_args!("\n")) };
    ($($text:tt)*) => { $crate::system::output::to_stdout(format_args!("{}\n", format_args!($($text)*))) };
}

/// As the standard one; a closed pipe is no reason to end.
#[doc(hidden)]
#[macro_export]
macro_rules! eprint {
    ($($text:tt)*) => { $crate::system::output::to_stderr(format_args!($($text)*)) };
}

/// As the standard one; a closed pipe is no reason to end.
#[doc(hidden)]
#[macro_export]
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::system::output::to_stderr(format_args!("{}\n", format_args!($($text)*))) };
}
