//! What a weight panel holds, and how it becomes numbers.
//!
//! A panel is 16 rows of a weight, laid out so that step k of all of them is one vector:
//!
//! | type | layout |
//! |---|---|
//! | f32, f16 | `[k][16]` |
//! | bf16 | `[k / 2][16][2]`, as the dot-product instructions read it; filled up with a step of zeros |
//! | block-quantised | per block the checkpoint's fields, each `[16]`: codes as words of four bytes, scales as 16-bit units, sub-scales as bytes |
//!
//! Four codes of a row are one word because that is what integer dot products read (`int8`).
//!
//! Nothing is converted or rounded: 16 rows take the bytes of 16 rows. [`each`] gives the steps as f32, by the sequence of operations that
//! `zofo_hal::quant` defines.

use super::NR;
use crate::simd::Simd;
use zofo_hal::DType;

/// Fields of a quantised block: their size and how many follow each other.
fn fields(dtype: DType) -> &'static [(usize, usize)] {
    match dtype {
        DType::Q8_0 => &[(2, 1), (4, 8)],
        DType::Q4_0 => &[(2, 1), (4, 4)],
        DType::Q4_1 => &[(2, 2), (4, 4)],
        DType::Q5_0 => &[(2, 1), (4, 5)],
        DType::Q5_1 => &[(2, 2), (4, 5)],
        DType::Q4K => &[(2, 2), (1, 12), (4, 32)],
        DType::Q6K => &[(4, 48), (1, 16), (2, 1)],
        _ => &[],
    }
}

/// Bytes of a panel of rows of `cols` elements.
pub(crate) fn panel_bytes(dtype: DType, cols: usize) -> Option<usize> {
    let cols = if dtype == DType::Bf16 { cols.checked_next_multiple_of(2)? } else { cols };
    dtype.bytes(cols)?.checked_mul(NR)
}

/// Calls `unit(offset in the row, offset in the panel, size)` for every unit of row `r` of a panel that is moved as a whole.
#[inline(always)]
pub(crate) fn units(dtype: DType, cols: usize, r: usize, mut unit: impl FnMut(usize, usize, usize)) {
    let (block, bytes) = dtype.block();
    match dtype {
        DType::Bf16 => (0..cols).for_each(|k| unit(2 * k, (k / 2 * NR + r) * 4 + k % 2 * 2, 2)),
        _ if block == 1 => (0..cols).for_each(|k| unit(k * bytes, (k * NR + r) * bytes, bytes)),
        _ => {
            for b in 0..cols / block {
                let mut at = b * bytes;
                for &(size, count) in fields(dtype) {
                    for _ in 0..count {
                        unit(at, at * NR + r * size, size);
                        at += size;
                    }
                }
            }
        }
    }
}

/// Steps that are decoded together: `k0` and `kc` of [`each`] are multiples of it, but for the last step of a float.
pub(crate) const fn granularity(dtype: DType) -> usize {
    if dtype.is_quantised() { 32 } else { 2 }
}

/// What becomes of the steps of panels. A trait and not a closure: closures are not told to be inlined, and one that is not is compiled
/// without the tier's instructions.
pub(crate) trait Sink<S: Simd, const P: usize> {
    /// Step `k`, counted from the first that was asked for.
    ///
    /// # Safety
    /// The tier's features are there.
    unsafe fn step(&mut self, k: usize, v: [S::V; P]);
}

/// Gives step `k0 + k` of `P` panels to `sink`, for `k` in `0 .. kc` ascending.
///
/// # Safety
/// The panels have these steps; the tier's features are there.
#[inline(always)]
pub(crate) unsafe fn each<S: Simd, const P: usize>(dtype: DType, panels: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    // Safety: the caller's promise.
    unsafe {
        match dtype {
            DType::F16 => f16::<S, P>(panels, k0, kc, sink),
            DType::Bf16 => bf16::<S, P>(panels, k0, kc, sink),
            DType::Q8_0 => q8_0::<S, P>(panels, k0, kc, sink),
            DType::Q4_0 => q4_0::<S, P>(panels, k0, kc, sink),
            DType::Q4_1 => q4_1::<S, P>(panels, k0, kc, sink),
            DType::Q5_0 => q5_0::<S, P>(panels, k0, kc, sink),
            DType::Q5_1 => q5_1::<S, P>(panels, k0, kc, sink),
            DType::Q4K => q4_k::<S, P>(panels, k0, kc, sink),
            DType::Q6K => q6_k::<S, P>(panels, k0, kc, sink),
            _ => f32::<S, P>(panels, k0, kc, sink),
        }
    }
}

/// The value of an expression for every panel `p`. Loops and macros where others would write closures: see [`Sink`].
macro_rules! vectors {
    ($p:ident => $value:expr) => {{
        let mut all = {
            let $p = 0;
            [$value; P]
        };
        for $p in 1..P {
            all[$p] = $value;
        }
        all
    }};
}

/// Runs a body for every block of 32 steps, with the address of each panel's (super-)block of `elements` in `bytes` and the first step.
macro_rules! blocks {
    ($panels:ident, $elements:literal in $bytes:literal, $k0:ident, $kc:ident, |$b:ident, $k:ident| $body:block) => {
        for $k in (0..$kc).step_by(32) {
            let $b: [*const u8; P] = vectors!(p => $panels[p].wrapping_add(($k0 + $k) / $elements * $bytes * NR));
            $body
        }
    };
}

/// Runs a body for each of the four codes of a word, whose shift must be known to the compiler.
macro_rules! four {
    (|$t:ident| $body:expr) => {
        four!(@ $t $body; 0 1 2 3)
    };
    (@ $t:ident $body:expr; $($n:literal)*) => {
        $({
            const $t: usize = $n;
            $body
        })*
    };
}

/// Runs a body for the nibbles of 4 vectors of words from `at`: the low ones are elements 0..16, the high ones 16..32.
macro_rules! nibbles {
    ($b:ident, $at:expr, |$j:ident, $q:ident| $body:expr) => {
        for high in [0, 16] {
            for g in 0..4 {
                let words: [S::I; P] = vectors!(p => S::shr(S::words($b[p].add(($at + 4 * g) * NR)), high / 4));
                four!(|T| {
                    let $j = high as usize + 4 * g + T;
                    let $q: [S::I; P] = vectors!(p => S::and(S::shr(words[p], 8 * T as u32), 15));
                    $body
                });
            }
        }
    };
}

/// As [`nibbles`], with a fifth bit each from the words in front of them.
macro_rules! fives {
    ($b:ident, $at:expr, |$j:ident, $q:ident| $body:expr) => {
        // All 32 fifth bits of a row are one word, which a shift brings to bit 4 in turn.
        let mut high: [S::I; P] = vectors!(p => S::words($b[p].add($at * NR)));
        nibbles!($b, $at + 4, |$j, $q| {
            let $q: [S::I; P] = vectors!(p => S::or($q[p], S::and(S::shl(high[p], 4), 16)));
            high = vectors!(p => S::shr(high[p], 1));
            $body
        });
    };
}

// Safety of the functions below: as for `each`. Offsets follow from the layouts above.

#[inline(always)]
unsafe fn f32<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    for k in 0..kc {
        unsafe { sink.step(k, vectors!(p => S::load(b[p].add((k0 + k) * NR * 4).cast()))) };
    }
}

#[inline(always)]
unsafe fn f16<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    for k in 0..kc {
        unsafe { sink.step(k, vectors!(p => S::half(b[p].add((k0 + k) * NR * 2)))) };
    }
}

#[inline(always)]
unsafe fn bf16<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    for k in (0..kc).step_by(2) {
        unsafe {
            let pairs: [S::I; P] = vectors!(p => S::words(b[p].add((k0 + k) / 2 * NR * 4)));
            sink.step(k, vectors!(p => S::bits(S::shl(pairs[p], 16))));
            if k + 1 < kc {
                sink.step(k + 1, vectors!(p => S::bits(S::and(pairs[p], 0xffff_0000))));
            }
        }
    }
}

/// 2^-24.
const SMALL: u32 = (127 - 24) << 23;

#[inline(always)]
unsafe fn q8_0<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    unsafe {
        blocks!(b, 32 in 34, k0, kc, |b, k| {
            // Codes are converted from the tops of words, 2^24 times too large, which changes no bit of the products.
            let d: [S::V; P] = vectors!(p => S::mul(S::half(b[p]), S::bits(S::splat_word(SMALL))));
            for g in 0..8 {
                let words: [S::I; P] = vectors!(p => S::words(b[p].add((2 + 4 * g) * NR)));
                four!(|T| sink.step(k + 4 * g + T, vectors!(p => S::mul(S::float(S::top(words[p], T as u32)), d[p]))));
            }
        });
    }
}

#[inline(always)]
unsafe fn q4_0<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    unsafe {
        blocks!(b, 32 in 18, k0, kc, |b, k| {
            let d: [S::V; P] = vectors!(p => S::half(b[p]));
            nibbles!(b, 2, |j, q| sink.step(k + j, vectors!(p => S::mul(S::float(S::minus(q[p], 8)), d[p]))));
        });
    }
}

#[inline(always)]
unsafe fn q4_1<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    unsafe {
        blocks!(b, 32 in 20, k0, kc, |b, k| {
            let d: [S::V; P] = vectors!(p => S::half(b[p]));
            let m: [S::V; P] = vectors!(p => S::half(b[p].add(2 * NR)));
            nibbles!(b, 4, |j, q| sink.step(k + j, vectors!(p => S::add(S::mul(S::float(q[p]), d[p]), m[p]))));
        });
    }
}

#[inline(always)]
unsafe fn q5_0<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    unsafe {
        blocks!(b, 32 in 22, k0, kc, |b, k| {
            let d: [S::V; P] = vectors!(p => S::half(b[p]));
            fives!(b, 2, |j, q| sink.step(k + j, vectors!(p => S::mul(S::float(S::minus(q[p], 16)), d[p]))));
        });
    }
}

#[inline(always)]
unsafe fn q5_1<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    unsafe {
        blocks!(b, 32 in 24, k0, kc, |b, k| {
            let d: [S::V; P] = vectors!(p => S::half(b[p]));
            let m: [S::V; P] = vectors!(p => S::half(b[p].add(2 * NR)));
            fives!(b, 4, |j, q| sink.step(k + j, vectors!(p => S::add(S::mul(S::float(q[p]), d[p]), m[p]))));
        });
    }
}

/// Scale and minimum of sub-block `j` of eight.
#[inline(always)]
pub(in crate::gemm) unsafe fn scale_min<S: Simd>(b: *const u8, j: usize) -> (S::V, S::V) {
    // The sub-block's 6-bit numbers are plane j for the first four; of the others, low nibbles and the top bits of those.
    unsafe {
        let s = b.add(4 * NR);
        let (near, far) = (S::bytes(s.add(j * NR)), S::bytes(s.add((j + 4) * NR)));
        let (scale, min) = if j < 4 {
            (S::and(near, 63), S::and(far, 63))
        } else {
            let (scale_top, min_top) = (S::shr(S::bytes(s.add((j - 4) * NR)), 6), S::shr(near, 6));
            (S::or(S::and(far, 15), S::shl(scale_top, 4)), S::or(S::shr(far, 4), S::shl(min_top, 4)))
        };
        (S::mul(S::half(b), S::float(scale)), S::mul(S::half(b.add(2 * NR)), S::float(min)))
    }
}

#[inline(always)]
unsafe fn q4_k<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    unsafe {
        blocks!(b, 256 in 144, k0, kc, |b, k| {
            let j = (k0 + k) % 256 / 32;
            let scales: [(S::V, S::V); P] = vectors!(p => scale_min::<S>(b[p], j));
            // 32 bytes of a row hold two sub-blocks: the low nibbles are the even one, the high nibbles the odd one.
            for g in 0..8 {
                let words: [S::I; P] = vectors!(p => S::shr(S::words(b[p].add((16 + j / 2 * 32 + 4 * g) * NR)), (j % 2 * 4) as u32));
                four!(|T| {
                    let q: [S::I; P] = vectors!(p => S::and(S::shr(words[p], 8 * T as u32), 15));
                    sink.step(k + 4 * g + T, vectors!(p => S::sub(S::mul(scales[p].0, S::float(q[p])), scales[p].1)));
                });
            }
        });
    }
}

#[inline(always)]
unsafe fn q6_k<S: Simd, const P: usize>(b: [*const u8; P], k0: usize, kc: usize, sink: &mut impl Sink<S, P>) {
    unsafe {
        blocks!(b, 256 in 210, k0, kc, |b, k| {
            // Half of 128, quarter of 32 within it: quarters share 64 bytes of low nibbles and 32 bytes of bit pairs.
            let j = (k0 + k) % 256 / 32;
            let (half, quarter) = (j / 4, j % 4);
            for sixteen in 0..2 {
                let d: [S::V; P] = vectors!(p => S::half(b[p].add(208 * NR)));
                let scales: [S::V; P] =
                    vectors!(p => S::mul(d[p], S::float(S::signed_bytes(b[p].add((192 + 2 * j + sixteen) * NR)))));
                for g in 4 * sixteen..4 * sixteen + 4 {
                    let low: [S::I; P] = vectors!(p => S::words(b[p].add((64 * half + 32 * (quarter % 2) + 4 * g) * NR)));
                    let low: [S::I; P] = vectors!(p => S::shr(low[p], (quarter / 2 * 4) as u32));
                    let pairs: [S::I; P] = vectors!(p => S::words(b[p].add((128 + 32 * half + 4 * g) * NR)));
                    let pairs: [S::I; P] = vectors!(p => S::shr(pairs[p], 2 * quarter as u32));
                    four!(|T| {
                        let low: [S::I; P] = vectors!(p => S::and(S::shr(low[p], 8 * T as u32), 15));
                        let high: [S::I; P] = vectors!(p => S::shl(S::and(S::shr(pairs[p], 8 * T as u32), 3), 4));
                        let q: [S::V; P] = vectors!(p => S::float(S::minus(S::or(low[p], high[p]), 32)));
                        sink.step(k + 4 * g + T, vectors!(p => S::mul(scales[p], q[p])));
                    });
                }
            }
        });
    }
}
