//! Sixteen numbers at a time, for the kernels of `direct` and `convolution`.
//!
//! What is unsafe: a method of `Lanes` is one or two instructions that not every x86-64 has, on memory that is named by a pointer alone. A
//! caller promises both, that the machine has the instructions (`instructions` or `available` named them) and that `LANES` numbers are there.

/// Channels computed together: two registers of AVX2, one of AVX-512.
pub const LANES: usize = 16;

/// `LANES` numbers in registers. All methods are inlined into a function that has the instructions.
pub trait Lanes: Copy {
    /// The numbers at `from`, which need not be aligned.
    ///
    /// # Safety
    /// `LANES` numbers can be read there, and the machine has the instructions.
    unsafe fn load(from: *const f32) -> Self;
    /// Writes them to `to`, which need not be aligned.
    ///
    /// # Safety
    /// `LANES` numbers can be written there, and the machine has the instructions.
    unsafe fn store(self, to: *mut f32);
    /// self + x * weights
    ///
    /// # Safety
    /// The machine has the instructions, here and below.
    unsafe fn add_product(self, x: f32, weights: Self) -> Self;
    /// self + other
    ///
    /// # Safety
    /// As above.
    unsafe fn add(self, other: Self) -> Self;
    /// The larger of self and 0.
    ///
    /// # Safety
    /// As above.
    unsafe fn relu(self) -> Self;
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// Two registers of eight.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256, __m256);

    impl Lanes for Avx2 {
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Avx2 {
            unsafe { Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(8), self.1);
            }
        }

        #[inline(always)]
        unsafe fn add_product(self, x: f32, weights: Avx2) -> Avx2 {
            unsafe {
                let x = _mm256_set1_ps(x);
                Avx2(_mm256_fmadd_ps(x, weights.0, self.0), _mm256_fmadd_ps(x, weights.1, self.1))
            }
        }

        #[inline(always)]
        unsafe fn add(self, other: Avx2) -> Avx2 {
            unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn relu(self) -> Avx2 {
            unsafe { Avx2(_mm256_max_ps(self.0, _mm256_setzero_ps()), _mm256_max_ps(self.1, _mm256_setzero_ps())) }
        }
    }

    /// One register of sixteen.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    impl Lanes for Avx512 {
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Avx512 {
            unsafe { Avx512(_mm512_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn add_product(self, x: f32, weights: Avx512) -> Avx512 {
            unsafe { Avx512(_mm512_fmadd_ps(_mm512_set1_ps(x), weights.0, self.0)) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Avx512) -> Avx512 {
            unsafe { Avx512(_mm512_add_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn relu(self) -> Avx512 {
            unsafe { Avx512(_mm512_max_ps(self.0, _mm512_setzero_ps())) }
        }
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

/// The fastest that this machine has.
pub fn instructions() -> Option<Instructions> {
    available().next()
}
