//! Choosing the device, the number of threads and the precision.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tch::{Cuda, Device};

use crate::error::{Error, Result};
use crate::limits;
use crate::system::ranks::Place;

/// What the networks compute in while they train.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything as it is.
    #[default]
    F32,
    /// Eight bits of mantissa and the range of f32: nothing else changes.
    Bf16,
    /// Eleven bits and a small range: the loss is scaled (`nets::LossScale`).
    F16,
}

/// `auto | cpu | cuda | cuda:N`, checked against what libtorch sees. The device of the first rank on a machine, see `of_rank`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceChoice(pub Device);

impl DeviceChoice {
    /// One rank per GPU: the ranks of a machine take the one asked for and those after it, in turn.
    pub fn of_rank(self, place: Place) -> Device {
        match self.0 {
            Device::Cuda(first) => Device::Cuda((first + place.local_rank) % Cuda::device_count().max(1) as usize),
            other => other,
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<DeviceChoice> {
        let count = Cuda::device_count();
        let cuda = |n: i64| -> Result<DeviceChoice> {
            if n < count {
                return Ok(DeviceChoice(Device::Cuda(n as usize)));
            }
            let why = if count == 0 {
                "libtorch sees no CUDA device here".to_string()
            } else {
                format!("there are {count} CUDA devices, 0 to {}", count - 1)
            };
            Err(Error::input(format!("device {text}: {why}; accepted: auto, cpu{}", if count > 0 { ", cuda:N" } else { "" })))
        };
        match text {
            "auto" => Ok(DeviceChoice(if count > 0 { Device::Cuda(0) } else { Device::Cpu })),
            "cpu" => Ok(DeviceChoice(Device::Cpu)),
            "cuda" => cuda(0),
            _ => match text.strip_prefix("cuda:").and_then(|n| n.parse::<i64>().ok()).filter(|&n| n >= 0) {
                Some(n) => cuda(n),
                None => Err(Error::input(format!("device `{text}`; accepted: auto, cpu, cuda:N"))),
            },
        }
    }
}

/// A device as it is asked for: `cpu`, `cuda:0`.
pub fn name(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".into(),
        Device::Cuda(n) => format!("cuda:{n}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Sets libtorch's intra-op threads: `asked`, or for 0 the number of cores this process may use. Returns what was set; more than the
/// machine has any use for is refused.
pub fn set_threads(asked: usize) -> Result<usize> {
    set_threads_among(asked, 1)
}

/// The same where `processes` of this machine share its cores, as the ranks of a run do.
pub fn set_threads_among(asked: usize, processes: usize) -> Result<usize> {
    limits::threads("threads", asked)?;
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    // A launcher that binds ranks to cores has divided them already.
    let bound = own < cores();
    let share = if bound { own } else { (own / processes).max(1) };
    let threads = if asked > 0 { asked } else { share };
    tch::set_num_threads(threads as i32);
    Ok(threads)
}

/// Cores of the machine, whatever this process may use of them.
fn cores() -> usize {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(1) as usize
}

/// While it lives libtorch works on one thread: for many small operations, where more threads would wait for each other longer than they work.
pub struct Alone {
    threads: i32,
}

/// Sets libtorch to one thread until the answer is dropped.
pub fn alone() -> Alone {
    let threads = tch::get_num_threads();
    tch::set_num_threads(1);
    Alone { threads }
}

impl Drop for Alone {
    fn drop(&mut self) {
        tch::set_num_threads(self.threads);
    }
}
