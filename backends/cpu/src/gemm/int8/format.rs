//! Where a panel's codes and scales are; see [`crate::gemm::format`] for the layouts.

use super::{NR, STEPS, dot::Dot};
use crate::simd::Simd;
use core::marker::PhantomData;

/// How codes become numbers.
pub(super) trait Kind {
    /// A code stands for itself less this.
    const OFFSET: i32 = 0;
    /// Codes are signed bytes, else at most 127.
    const SIGNED: bool = false;
    /// A minimum is added per block, the second of its scales.
    const MINIMUM: bool = false;
    /// The halves of a block have a scale each.
    const SPLIT: bool = false;
}

/// Signed bytes.
pub(super) struct Signed;
/// Around an offset.
pub(super) struct Plain<const OFFSET: i32>;
/// Above a minimum.
pub(super) struct Minimum;
/// Around an offset, with a scale per 16 steps.
pub(super) struct Split<const OFFSET: i32>;

impl Kind for Signed {
    const SIGNED: bool = true;
}
impl<const N: i32> Kind for Plain<N> {
    const OFFSET: i32 = N;
}
impl Kind for Minimum {
    const MINIMUM: bool = true;
}
impl<const N: i32> Kind for Split<N> {
    const OFFSET: i32 = N;
    const SPLIT: bool = true;
}

/// The codes and scales of a panel, by blocks of 32 steps.
///
/// # Safety of all functions
/// `panel` has block `b`; the tier's features are there.
#[allow(clippy::missing_safety_doc)]
pub(super) trait Format {
    /// How they become numbers.
    type Kind: Kind;

    /// The codes of steps `4 g .. 4 g + 4` of block `b`, as words of 16 rows; signed ones with [`Dot::BIAS`] added.
    unsafe fn codes<D: Dot>(panel: *const u8, b: usize, g: usize) -> <D::S as Simd>::I;
    /// The block's scale, or that of its first half.
    unsafe fn scale<S: Simd>(panel: *const u8, b: usize) -> S::V;
    /// Its minimum (`which` is 0), or the scale of its second half (1).
    unsafe fn second<S: Simd>(panel: *const u8, b: usize, which: usize) -> S::V;
}

/// A block that is ready to be multiplied.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Panel {
    codes: [[u32; NR]; STEPS / 4],
    scales: [[f32; NR]; 2],
}

#[cfg(test)]
impl Panel {
    pub(super) const ZERO: Self = Self { codes: [[0; NR]; STEPS / 4], scales: [[0.0; NR]; 2] };
}

// Safety: any bit pattern is a value.
unsafe impl crate::scratch::Plain for Panel {}

/// Makes a [`Panel`] of a block.
///
/// # Safety
/// As for [`Format`].
#[inline(always)]
pub(super) unsafe fn prepare<D: Dot, F: Format>(panel: *const u8, b: usize, out: &mut Panel) {
    // Safety: the caller's promise.
    unsafe {
        for (g, words) in out.codes.iter_mut().enumerate() {
            <D::S as Simd>::store_words(words.as_mut_ptr(), F::codes::<D>(panel, b, g));
        }
        <D::S as Simd>::store(out.scales[0].as_mut_ptr(), F::scale::<D::S>(panel, b));
        if F::Kind::MINIMUM || F::Kind::SPLIT {
            let second = F::second::<D::S>(panel, b, usize::from(F::Kind::SPLIT));
            <D::S as Simd>::store(out.scales[1].as_mut_ptr(), second);
        }
    }
}

/// [`Panel`]s one after the other.
pub(super) struct Codes<K>(PhantomData<K>);

impl<K: Kind> Format for Codes<K> {
    type Kind = K;

    #[inline(always)]
    unsafe fn codes<D: Dot>(panel: *const u8, b: usize, g: usize) -> <D::S as Simd>::I {
        // Safety: the caller's promise.
        unsafe { <D::S as Simd>::words((*panel.cast::<Panel>().add(b)).codes[g].as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(panel: *const u8, b: usize) -> S::V {
        // Safety: the caller's promise.
        unsafe { S::load((*panel.cast::<Panel>().add(b)).scales[0].as_ptr()) }
    }
    #[inline(always)]
    unsafe fn second<S: Simd>(panel: *const u8, b: usize, _which: usize) -> S::V {
        // Safety: the caller's promise.
        unsafe { S::load((*panel.cast::<Panel>().add(b)).scales[1].as_ptr()) }
    }
}

/// Declares a format of blocks of 32 steps in `$bytes` bytes, with f16 scales in front.
macro_rules! format {
    ($name:ident, $kind:ty, $bytes:literal, |$d:ident, $at:ident, $g:ident| $codes:expr) => {
        #[allow(non_camel_case_types)]
        pub(super) struct $name;

        impl Format for $name {
            type Kind = $kind;

            #[inline(always)]
            unsafe fn codes<$d: Dot>(panel: *const u8, b: usize, $g: usize) -> <$d::S as Simd>::I {
                // Safety: the caller's promise; the offsets follow from the layout.
                unsafe {
                    let $at = panel.add(b * $bytes * NR);
                    $codes
                }
            }
            #[inline(always)]
            unsafe fn scale<S: Simd>(panel: *const u8, b: usize) -> S::V {
                // Safety: as above.
                unsafe { S::half(panel.add(b * $bytes * NR)) }
            }
            #[inline(always)]
            unsafe fn second<S: Simd>(panel: *const u8, b: usize, _which: usize) -> S::V {
                // Safety: as above.
                unsafe { S::half(panel.add((b * $bytes + 2) * NR)) }
            }
        }
    };
}

format!(Q8_0, Signed, 34, |D, at, g| D::biased(<D::S as Simd>::words(at.add((2 + 4 * g) * NR))));
format!(Q4_0, Plain<8>, 18, |D, at, g| nibbles::<D::S>(at.add(2 * NR), g));
format!(Q4_1, Minimum, 20, |D, at, g| nibbles::<D::S>(at.add(4 * NR), g));
format!(Q5_0, Plain<16>, 22, |D, at, g| fives::<D::S>(at.add(2 * NR), g));
format!(Q5_1, Minimum, 24, |D, at, g| fives::<D::S>(at.add(4 * NR), g));

/// Nibbles `4 g ..` of 4 vectors of words: the low ones are the first 16, the high ones the others.
#[inline(always)]
unsafe fn nibbles<S: Simd>(at: *const u8, g: usize) -> S::I {
    // Safety: the caller's promise.
    unsafe {
        let words = S::words(at.add(g % 4 * 4 * NR));
        S::and(if g < 4 { words } else { S::shr(words, 4) }, 0x0f0f_0f0f)
    }
}

/// As [`nibbles`], with a fifth bit each from the vector in front of them.
#[inline(always)]
unsafe fn fives<S: Simd>(at: *const u8, g: usize) -> S::I {
    // Safety: the caller's promise.
    unsafe {
        // Bits 4 g .. 4 g + 4 of a word are copied to places 7 apart, of which those are kept that lie in bit 4 of a byte.
        let four = S::and(S::shr(S::words(at), 4 * g as u32), 15);
        let copies = S::or(S::or(S::shl(four, 4), S::shl(four, 11)), S::or(S::shl(four, 18), S::shl(four, 25)));
        S::or(nibbles::<S>(at.add(4 * NR), g), S::and(copies, 0x1010_1010))
    }
}

/// Super-blocks of 256 steps in 144 bytes.
pub(super) struct Q4K;

impl Format for Q4K {
    type Kind = Minimum;

    #[inline(always)]
    unsafe fn codes<D: Dot>(panel: *const u8, b: usize, g: usize) -> <D::S as Simd>::I {
        // Safety: the caller's promise; the offsets follow from the layout.
        unsafe {
            let words = <D::S as Simd>::words(panel.add((b / 8 * 144 + 16 + b % 8 / 2 * 32 + 4 * g) * NR));
            <D::S as Simd>::and(<D::S as Simd>::shr(words, (b % 2 * 4) as u32), 0x0f0f_0f0f)
        }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(panel: *const u8, b: usize) -> S::V {
        // Safety: as above.
        unsafe { super::super::format::scale_min::<S>(panel.add(b / 8 * 144 * NR), b % 8).0 }
    }
    #[inline(always)]
    unsafe fn second<S: Simd>(panel: *const u8, b: usize, _which: usize) -> S::V {
        // Safety: as above.
        unsafe { S::sub(S::zero(), super::super::format::scale_min::<S>(panel.add(b / 8 * 144 * NR), b % 8).1) }
    }
}

/// Super-blocks of 256 steps in 210 bytes.
pub(super) struct Q6K;

impl Q6K {
    #[inline(always)]
    unsafe fn scale_of<S: Simd>(panel: *const u8, b: usize, half: usize) -> S::V {
        // Safety: the caller's promise; the offsets follow from the layout.
        unsafe {
            let at = panel.add(b / 8 * 210 * NR);
            S::mul(S::half(at.add(208 * NR)), S::float(S::signed_bytes(at.add((192 + 2 * (b % 8) + half) * NR))))
        }
    }
}

impl Format for Q6K {
    type Kind = Split<32>;

    #[inline(always)]
    unsafe fn codes<D: Dot>(panel: *const u8, b: usize, g: usize) -> <D::S as Simd>::I {
        // Safety: the caller's promise; the offsets follow from the layout.
        unsafe {
            let (at, half, quarter) = (panel.add(b / 8 * 210 * NR), b % 8 / 4, b % 4);
            let low = <D::S as Simd>::words(at.add((64 * half + 32 * (quarter % 2) + 4 * g) * NR));
            let low = <D::S as Simd>::and(<D::S as Simd>::shr(low, (quarter / 2 * 4) as u32), 0x0f0f_0f0f);
            let pairs = <D::S as Simd>::words(at.add((128 + 32 * half + 4 * g) * NR));
            let pairs = <D::S as Simd>::and(<D::S as Simd>::shr(pairs, 2 * quarter as u32), 0x0303_0303);
            <D::S as Simd>::or(low, <D::S as Simd>::shl(pairs, 4))
        }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(panel: *const u8, b: usize) -> S::V {
        // Safety: as above.
        unsafe { Self::scale_of::<S>(panel, b, 0) }
    }
    #[inline(always)]
    unsafe fn second<S: Simd>(panel: *const u8, b: usize, _which: usize) -> S::V {
        // Safety: as above.
        unsafe { Self::scale_of::<S>(panel, b, 1) }
    }
}
