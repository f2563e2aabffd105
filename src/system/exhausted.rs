//! Running out of memory: libtorch raises it wherever a tensor is made, and tch makes a panic of it. It becomes an error of one line.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

use crate::error::{Error, Result, libtorch_line};

/// Does `work`. Where a device or the machine ran out of memory on the way, that is the error, whether libtorch's answer was looked at or
/// not; all other panics go on.
pub fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(Err(Error::Torch(e))) => Err(match shortage(&e.to_string()) {
            Some(what) => Error::Exhausted(what),
            None => Error::Torch(e),
        }),
        Ok(answer) => answer,
        Err(payload) => match text(&*payload).and_then(shortage) {
            Some(what) => Err(Error::Exhausted(what)),
            None => panic::resume_unwind(payload),
        },
    }
}

fn text(payload: &(dyn Any + Send)) -> Option<&str> {
    payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied())
}

/// What libtorch says of memory that is not there, in its own words and without its page of frames; none where it speaks of something else.
fn shortage(message: &str) -> Option<String> {
    let start = message.find("CUDA out of memory").or_else(|| message.find("DefaultCPUAllocator: can't allocate memory"))?;
    let rest = &message[start..];
    // A panic shows the message with its line ends written out.
    let line = rest.split("\\n").next().unwrap_or(rest).lines().next().unwrap_or(rest);
    if line.starts_with("Default") {
        return Some(libtorch_line(line));
    }
    // What follows on a GPU is about the settings of the allocator.
    let end = line.find(" is free.").map_or(line.len(), |at| at + " is free".len());
    Some(line[..end].trim_end_matches('.').to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorchs_words_become_one_line() {
        let gpu = "called `Result::unwrap()` on an `Err` value: Torch(\"CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total \
                   capacity of 23.64 GiB of which 1.31 GiB is free. Process 77 has 22.3 GiB memory in use.\\nException raised from malloc\")";
        assert_eq!(
            shortage(gpu).unwrap(),
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 1.31 GiB is free"
        );
        let cpu = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000 bytes. \
                   Error code 12 (Cannot allocate memory)\nException raised from alloc_cpu";
        assert_eq!(shortage(cpu).unwrap(), "not enough memory: a tensor of 0.4 GB could not be made");
        assert_eq!(shortage("index out of range"), None);
    }

    #[test]
    fn a_panic_for_memory_is_an_error_and_others_are_not() {
        let raised: Result<()> = caught(|| panic!("CUDA out of memory. Tried to allocate 1 B."));
        assert_eq!(raised.unwrap_err().to_string(), "CUDA out of memory. Tried to allocate 1 B");
        assert!(panic::catch_unwind(|| caught::<()>(|| panic!("another fault"))).is_err());
        assert_eq!(caught(|| Ok(3)).unwrap(), 3);
    }
}
