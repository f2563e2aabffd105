//! Sixteen numbers at a time, for the kernels of `direct`, `winograd` and `convolution`.
//!
//! What is unsafe: a method of `Lanes` is one or two instructions that not every x86-64 has, on memory that is named by a pointer alone. A
//! caller promises both, that the machine has the instructions (`instructions` or `available` named them) and that `LANES` numbers are there.

use std::sync::OnceLock;

use super::vector::Vector;

/// Channels computed together: two registers of AVX2, one of AVX-512.
pub const LANES: usize = 16;

/// `COUNT` numbers in registers. All methods are inlined into a function that has the instructions.
pub trait Lanes: Copy {
    /// `LANES`, or half of them.
    const COUNT: usize;
    /// All of them 0.
    ///
    /// # Safety
    /// The machine has the instructions, here and below.
    unsafe fn zero() -> Self;
    /// The numbers at `from`, which need not be aligned.
    ///
    /// # Safety
    /// `COUNT` numbers can be read there, and the machine has the instructions.
    unsafe fn load(from: *const f32) -> Self;
    /// Writes them to `to`, which need not be aligned.
    ///
    /// # Safety
    /// `COUNT` numbers can be written there, and the machine has the instructions.
    unsafe fn store(self, to: *mut f32);
    /// self + x * weights
    ///
    /// # Safety
    /// As above.
    unsafe fn add_product(self, x: f32, weights: Self) -> Self;
    /// self + other
    ///
    /// # Safety
    /// As above.
    unsafe fn add(self, other: Self) -> Self;
    /// self - other
    ///
    /// # Safety
    /// As above.
    unsafe fn sub(self, other: Self) -> Self;
    /// The larger of self and 0. A NaN stays one: it must go on and be seen.
    ///
    /// # Safety
    /// As above.
    unsafe fn relu(self) -> Self;
}

/// `WIDE` registers from memory. A loop, not a closure: what the compiler does not inline has not the instructions.
///
/// # Safety
/// As `Lanes::load`, for all of them.
#[inline(always)]
pub unsafe fn load<L: Lanes, const WIDE: usize>(from: *const f32) -> [L; WIDE] {
    unsafe {
        let mut loaded = [L::zero(); WIDE];
        for (i, lanes) in loaded.iter_mut().enumerate() {
            *lanes = L::load(from.add(i * L::COUNT));
        }
        loaded
    }
}

/// What the instructions compute, in words that every machine has: the tests hold the others to it.
#[cfg(test)]
#[derive(Clone, Copy)]
pub struct Plain([f32; LANES]);

#[cfg(test)]
impl Plain {
    fn with(self, other: Plain, of: impl Fn(f32, f32) -> f32) -> Plain {
        Plain(std::array::from_fn(|i| of(self.0[i], other.0[i])))
    }
}

#[cfg(test)]
impl Lanes for Plain {
    const COUNT: usize = LANES;

    unsafe fn zero() -> Plain {
        Plain([0.0; LANES])
    }

    unsafe fn load(from: *const f32) -> Plain {
        unsafe { Plain(from.cast::<[f32; LANES]>().read_unaligned()) }
    }

    unsafe fn store(self, to: *mut f32) {
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    unsafe fn add_product(self, x: f32, weights: Plain) -> Plain {
        self.with(weights, |sum, weight| x.mul_add(weight, sum))
    }

    unsafe fn add(self, other: Plain) -> Plain {
        self.with(other, |a, b| a + b)
    }

    unsafe fn sub(self, other: Plain) -> Plain {
        self.with(other, |a, b| a - b)
    }

    unsafe fn relu(self) -> Plain {
        Plain(self.0.map(|x| if x < 0.0 { 0.0 } else { x }))
    }
}

/// `LANES` numbers in one line of the cache: what is laid out in these is never read across two.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [f32; LANES]);

/// So many lines of zeros.
pub fn lines(count: usize) -> Vec<Line> {
    vec![Line([0.0; LANES]); count]
}

#[cfg(target_arch = "x86_64")]
pub use super::vector::{Eight as HalfAvx2, Sixteen as Avx512};

/// One register is as many lanes as it is wide.
impl<V: Vector> Lanes for V {
    const COUNT: usize = V::WIDTH;

    #[inline(always)]
    unsafe fn zero() -> V {
        unsafe { <V as Vector>::zero() }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        unsafe { <V as Vector>::load(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { Vector::store(self, to) }
    }

    #[inline(always)]
    unsafe fn add_product(self, x: f32, weights: V) -> V {
        unsafe { V::splat(x).mul_add(weights, self) }
    }

    #[inline(always)]
    unsafe fn add(self, other: V) -> V {
        unsafe { Vector::add(self, other) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: V) -> V {
        unsafe { Vector::sub(self, other) }
    }

    #[inline(always)]
    unsafe fn relu(self) -> V {
        unsafe { Vector::relu(self) }
    }
}

/// Two registers of eight.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Avx2(HalfAvx2, HalfAvx2);

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    const COUNT: usize = LANES;

    #[inline(always)]
    unsafe fn zero() -> Avx2 {
        unsafe { Avx2(Lanes::zero(), Lanes::zero()) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Avx2 {
        unsafe { Avx2(Lanes::load(from), Lanes::load(from.add(HalfAvx2::COUNT))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe {
            Lanes::store(self.0, to);
            Lanes::store(self.1, to.add(HalfAvx2::COUNT));
        }
    }

    #[inline(always)]
    unsafe fn add_product(self, x: f32, weights: Avx2) -> Avx2 {
        unsafe { Avx2(self.0.add_product(x, weights.0), self.1.add_product(x, weights.1)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Avx2) -> Avx2 {
        unsafe { Avx2(Lanes::add(self.0, other.0), Lanes::add(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Avx2) -> Avx2 {
        unsafe { Avx2(Lanes::sub(self.0, other.0), Lanes::sub(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn relu(self) -> Avx2 {
        unsafe { Avx2(Lanes::relu(self.0), Lanes::relu(self.1)) }
    }
}

/// The instructions there is code for. On other machines than x86-64 there are none, and libtorch serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instructions {
    /// The foundation alone (avx512f).
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// With fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Instructions {
    /// The fastest first.
    pub const ALL: &[Instructions] = &[
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512,
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2,
    ];

    /// As `MCL_ISA` has it.
    pub const fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => "avx2",
        }
    }

    /// How many registers of `LANES` output channels a kernel computes together: two where there are 32 registers and the channels are even.
    pub fn wide(self, c_out: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 if c_out.is_multiple_of(2 * LANES) => 2,
            _ => 1,
        }
    }
}

/// Those that this machine has, the fastest first.
pub fn available() -> impl Iterator<Item = Instructions> {
    Instructions::ALL.iter().copied().filter(|with| match *with {
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => is_x86_feature_detected!("avx512f"),
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
    })
}

/// Those that kernels may use, the fastest first: all that the machine has, or what the environment's `MCL_ISA` says. An error names what it
/// says and what it may say.
pub fn allowed() -> Result<&'static [Instructions], String> {
    static ALLOWED: OnceLock<Result<Vec<Instructions>, String>> = OnceLock::new();
    let found = ALLOWED.get_or_init(|| match std::env::var("MCL_ISA").ok().filter(|asked| !asked.is_empty()) {
        None => Ok(available().collect()),
        Some(asked) => chosen(&asked, available().collect()),
    });
    found.as_deref().map_err(String::clone)
}

/// What `MCL_ISA=asked` leaves of what the machine has.
fn chosen(asked: &str, here: Vec<Instructions>) -> Result<Vec<Instructions>, String> {
    if asked == "none" {
        return Ok(vec![]);
    }
    match here.iter().position(|with| with.name() == asked) {
        Some(first) => Ok(here[first..].to_vec()),
        None => {
            let names: Vec<&str> = here.iter().map(|with| with.name()).chain(["none"]).collect();
            Err(format!("MCL_ISA={asked} in the environment: this machine can run {}", names.join(", ")))
        }
    }
}

/// The promise that this machine has AVX2 and FMA: only `has_avx2` makes one, so what takes it can be called safely.
#[derive(Clone, Copy)]
pub struct HasAvx2(());

/// None where the instructions are missing, or must not be used.
pub fn has_avx2() -> Option<HasAvx2> {
    #[cfg(target_arch = "x86_64")]
    return may_use().contains(&Instructions::Avx2).then_some(HasAvx2(()));
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Programs refuse an `MCL_ISA` that they do not know before any kernel runs; elsewhere it is as "none".
fn may_use() -> &'static [Instructions] {
    allowed().unwrap_or(&[])
}

/// The fastest that kernels may use.
pub fn instructions() -> Option<Instructions> {
    may_use().first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_takes_instructions_away() {
        let all = Instructions::ALL.to_vec();
        let names = |asked: &str| chosen(asked, all.clone()).map(|left| left.iter().map(|with| with.name()).collect::<Vec<_>>());
        assert_eq!(names("none").unwrap(), Vec::<&str>::new());
        if cfg!(target_arch = "x86_64") {
            assert_eq!(names("avx512").unwrap(), ["avx512", "avx2"]);
            assert_eq!(names("avx2").unwrap(), ["avx2"]);
            assert_eq!(names("sse").unwrap_err(), "MCL_ISA=sse in the environment: this machine can run avx512, avx2, none");
        }
        assert_eq!(chosen("avx512", vec![]).unwrap_err(), "MCL_ISA=avx512 in the environment: this machine can run none");
    }
}
