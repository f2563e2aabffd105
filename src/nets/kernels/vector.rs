//! One register of the machine's own width, for kernels whose inner loops keep many of them: eight numbers with AVX2, sixteen with AVX-512.
//! (`lanes` makes sixteen of them on both, for kernels that are laid out for sixteen channels.)
//!
//! What is unsafe: as in `lanes`, a method is an instruction that not every machine has, on memory that is named by a pointer alone.

/// `WIDTH` numbers in a register. All methods are inlined into a function that has the instructions.
///
/// # Safety
/// Of every method: the machine has the instructions; what is read or written by a pointer is `WIDTH` numbers, aligned or not.
pub trait Vector: Copy {
    const WIDTH: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// Asks for the line of memory at `at`, which need not be there: it is only a wish.
    fn prefetch(at: *const f32);
    /// self * a + b, rounded once.
    unsafe fn mul_add(self, a: Self, b: Self) -> Self;
    /// The larger of self and 0. A NaN stays one: it must go on and be seen.
    unsafe fn relu(self) -> Self;
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Eight, Sixteen};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Vector;

    /// Of AVX2 with FMA.
    #[derive(Clone, Copy)]
    pub struct Eight(__m256);

    impl Vector for Eight {
        const WIDTH: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> Eight {
            unsafe { Eight(_mm256_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Eight {
            unsafe { Eight(_mm256_set1_ps(x)) }
        }
        #[inline(always)]
        fn prefetch(at: *const f32) {
            // SAFETY: every x86-64 has the instruction, and it cannot fail.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Eight {
            unsafe { Eight(_mm256_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Eight) -> Eight {
            unsafe { Eight(_mm256_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Eight) -> Eight {
            unsafe { Eight(_mm256_sub_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Eight) -> Eight {
            unsafe { Eight(_mm256_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, a: Eight, b: Eight) -> Eight {
            unsafe { Eight(_mm256_fmadd_ps(self.0, a.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Eight {
            unsafe {
                // The instruction alone gives 0 for a NaN.
                let larger = _mm256_max_ps(self.0, _mm256_setzero_ps());
                Eight(_mm256_blendv_ps(larger, self.0, _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0)))
            }
        }
    }

    /// Of AVX-512.
    #[derive(Clone, Copy)]
    pub struct Sixteen(__m512);

    impl Vector for Sixteen {
        const WIDTH: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> Sixteen {
            unsafe { Sixteen(_mm512_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Sixteen {
            unsafe { Sixteen(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        fn prefetch(at: *const f32) {
            // SAFETY: every x86-64 has the instruction, and it cannot fail.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Sixteen {
            unsafe { Sixteen(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Sixteen) -> Sixteen {
            unsafe { Sixteen(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Sixteen) -> Sixteen {
            unsafe { Sixteen(_mm512_sub_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Sixteen) -> Sixteen {
            unsafe { Sixteen(_mm512_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, a: Sixteen, b: Sixteen) -> Sixteen {
            unsafe { Sixteen(_mm512_fmadd_ps(self.0, a.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Sixteen {
            unsafe {
                // The instruction alone gives 0 for a NaN.
                let larger = _mm512_max_ps(self.0, _mm512_setzero_ps());
                Sixteen(_mm512_mask_mov_ps(larger, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0), self.0))
            }
        }
    }
}
