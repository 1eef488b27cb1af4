//! The generators over whole blocks, for any [`Lanes`]; each is compiled once per instruction set by [`tier_table`].

use super::lanes::Lanes;
use super::normal::{COS, EIGHTH, EXPONENT_31, LOW, NEG_2_LN_2, NEG_2_LOG, SIGN, SIN, TURN};
use super::philox::{M, Stream};

/// The functions of one instruction set.
///
/// # Safety of the pointers
/// The CPU must have the instruction set, which holding a [`Tier`](super::Tier) proves.
pub(super) struct Table {
    pub name: &'static str,
    /// Words of the blocks from the given one up.
    pub words: unsafe fn(&Stream, u32, &mut [[u32; 4]]),
    /// Normals of the blocks from the given one up.
    pub normals: unsafe fn(&Stream, u32, &mut [[f32; 4]]),
    /// Signs of the blocks from the given one up.
    pub signs: unsafe fn(&Stream, u32, &mut [[f32; 4]]),
    /// `out = add(a, mul(c, z))`, over the shortest of the three.
    pub scaled_add: unsafe fn(&[f32], f32, &[f32], &mut [f32]),
    /// `acc = add(acc, mul(c, z))`, over the shorter of the two.
    pub accumulate: unsafe fn(&mut [f32], f32, &[f32]),
    /// [`radius`](super::normal::radius) of each word.
    pub radius: unsafe fn(&[u32], &mut [f32]),
    /// [`cos_sin`](super::normal::cos_sin) of each word.
    pub cos_sin: unsafe fn(&[u32], &mut [f32], &mut [f32]),
}

/// Defines `TABLE` with every kernel compiled for `$feature`.
macro_rules! tier_table {
    ($name:literal, $feature:literal, $lanes:ident) => {
        use super::kernels;
        use super::philox::Stream;

        pub(super) static TABLE: kernels::Table = kernels::Table {
            name: $name,
            words,
            normals,
            signs,
            scaled_add,
            accumulate,
            radius,
            cos_sin,
        };

        tier_table! { @ $feature, $lanes,
            fn words(s: &Stream, block: u32, out: &mut [[u32; 4]]);
            fn normals(s: &Stream, block: u32, out: &mut [[f32; 4]]);
            fn signs(s: &Stream, block: u32, out: &mut [[f32; 4]]);
            fn scaled_add(a: &[f32], c: f32, z: &[f32], out: &mut [f32]);
            fn accumulate(acc: &mut [f32], c: f32, z: &[f32]);
            fn radius(words: &[u32], out: &mut [f32]);
            fn cos_sin(words: &[u32], cos: &mut [f32], sin: &mut [f32]);
        }
    };
    (@ $feature:literal, $lanes:ident, $(fn $f:ident($($arg:ident: $t:ty),*);)*) => {
        $(
            #[target_feature(enable = $feature)]
            fn $f($($arg: $t),*) {
                // Safety: this function is compiled for the feature, so whoever called it knows that the CPU has it.
                kernels::$f(unsafe { $lanes::new() }, $($arg),*);
            }
        )*
    };
}
pub(super) use tier_table;

/// The four words of [`Lanes::BLOCKS`] blocks. The first two rounds are the short ones of [`Stream`].
#[inline(always)]
fn philox<L: Lanes>(l: L, s: &Stream, block: u32) -> [L::U; 4] {
    let (h0, l0) = l.product(l.blocks(block), M[0]);
    let (h1, l1) = l.product(l.xor_p(h0, l.splat_p(s.third)), M[1]);
    let mut c = [l.xor_p(h1, l.splat_p(s.a)), l1, l.xor_p(l0, l.splat_p(s.b)), l.splat_p(s.c)];
    for k in &s.keys {
        let (h0, l0) = l.product(c[0], M[0]);
        let (h1, l1) = l.product(c[2], M[1]);
        // The products come last: what can be combined before them is.
        let (k1, k3) = (l.xor_p(c[1], l.splat_p(k[0])), l.xor_p(c[3], l.splat_p(k[1])));
        c = [l.xor_p(h1, k1), l1, l.xor_p(h0, k3), l0];
    }
    [l.finish(c[0]), l.finish(c[1]), l.finish(c[2]), l.finish(c[3])]
}

/// [`estrin`](super::normal::estrin), step by step.
#[inline(always)]
fn estrin<L: Lanes>(l: L, c: [f32; 9], x: L::F) -> L::F {
    let x2 = l.mul(x, x);
    let x4 = l.mul(x2, x2);
    let p01 = l.add(l.mul(splat(l, c[1]), x), splat(l, c[0]));
    let p23 = l.add(l.mul(splat(l, c[3]), x), splat(l, c[2]));
    let p45 = l.add(l.mul(splat(l, c[5]), x), splat(l, c[4]));
    let p67 = l.add(l.mul(splat(l, c[7]), x), splat(l, c[6]));
    let p03 = l.add(l.mul(p23, x2), p01);
    let p47 = l.add(l.mul(p67, x2), p45);
    let p48 = l.add(l.mul(splat(l, c[8]), x4), p47);
    l.add(l.mul(p48, x4), p03)
}

#[inline(always)]
fn horner<L: Lanes, const N: usize>(l: L, c: [f32; N], x: L::F) -> L::F {
    let mut p = splat(l, c[N - 1]);
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        p = l.add(l.mul(p, x), splat(l, c[i]));
    }
    p
}

#[inline(always)]
fn splat<L: Lanes>(l: L, x: f32) -> L::F {
    l.of_bits(l.splat(x.to_bits()))
}

#[inline(always)]
fn radius_of<L: Lanes>(l: L, word: L::U) -> L::F {
    let x = l.add(l.float(l.shr1(word)), splat(l, 0.5));
    let t = l.add_u(l.bits(x), l.splat((LOW + EXPONENT_31).wrapping_neg()));
    let k = l.float(l.sar23(t));
    let m = l.of_bits(l.add_u(l.and(t, l.splat(0x007f_ffff)), l.splat(LOW)));
    let f = l.add(m, splat(l, -1.0));
    let p = estrin(l, NEG_2_LOG, f);
    l.sqrt(l.add(l.mul(k, splat(l, NEG_2_LN_2)), l.mul(f, p)))
}

#[inline(always)]
fn cos_sin_of<L: Lanes>(l: L, word: L::U) -> (L::F, L::F) {
    let v = l.mul(l.float(l.shl2(word)), splat(l, TURN));
    let w = l.mul(v, v);
    let (sin, cos) = (l.mul(v, horner(l, SIN, w)), horner(l, COS, w));
    let quarter = l.add_u(word, l.splat(EIGHTH));
    let odd = l.shl1(quarter);
    let sign = l.splat(SIGN);
    let (c, s) = (l.select(odd, cos, sin), l.select(odd, sin, cos));
    (l.of_bits(l.xor(l.bits(c), l.and(l.xor(quarter, odd), sign))), l.of_bits(l.xor(l.bits(s), l.and(quarter, sign))))
}

/// What becomes of a block's words. A trait and not closures, because each of these must be inlined into the function compiled for the
/// instruction set.
trait Stage {
    fn of<L: Lanes>(l: L, w: [L::U; 4]) -> [L::F; 4];
}

/// Nothing: words travel as the bits of f32, which stores and shuffles do not look at.
struct Words;

impl Stage for Words {
    #[inline(always)]
    fn of<L: Lanes>(l: L, w: [L::U; 4]) -> [L::F; 4] {
        [l.of_bits(w[0]), l.of_bits(w[1]), l.of_bits(w[2]), l.of_bits(w[3])]
    }
}

/// [`normals`](super::normal::normals).
struct Normals;

impl Stage for Normals {
    #[inline(always)]
    fn of<L: Lanes>(l: L, w: [L::U; 4]) -> [L::F; 4] {
        let (r0, (c0, s0)) = (radius_of(l, w[0]), cos_sin_of(l, w[1]));
        let (r1, (c1, s1)) = (radius_of(l, w[2]), cos_sin_of(l, w[3]));
        [l.mul(r0, c0), l.mul(r0, s0), l.mul(r1, c1), l.mul(r1, s1)]
    }
}

/// [`rademacher`](super::normal::rademacher).
struct Signs;

impl Stage for Signs {
    #[inline(always)]
    fn of<L: Lanes>(l: L, w: [L::U; 4]) -> [L::F; 4] {
        let (one, sign) = (l.splat(0x3f80_0000), l.splat(SIGN));
        let w = [l.and(w[0], sign), l.and(w[1], sign), l.and(w[2], sign), l.and(w[3], sign)];
        Words::of(l, [l.or(w[0], one), l.or(w[1], one), l.or(w[2], one), l.or(w[3], one)])
    }
}

/// Stores what `S` makes of the blocks from `block` up, [`Lanes::BLOCKS`] at a time; the last may be fewer.
#[inline(always)]
fn generate<L: Lanes, S: Stage>(l: L, s: &Stream, block: u32, out: &mut [[f32; 4]]) {
    let mut block = block;
    let mut chunks = out.chunks_exact_mut(L::BLOCKS);
    for chunk in &mut chunks {
        let z = S::of(l, philox(l, s, block));
        // Safety: the chunk has BLOCKS blocks of four numbers.
        unsafe { l.store4(z, chunk.as_mut_ptr().cast()) };
        block = block.wrapping_add(L::BLOCKS as u32);
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let mut last = [[0.0; 4]; 16];
        debug_assert!(L::BLOCKS <= last.len());
        let z = S::of(l, philox(l, s, block));
        // Safety: no instruction set has more than 16 lanes.
        unsafe { l.store4(z, last.as_mut_ptr().cast()) };
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

#[inline(always)]
pub(super) fn words<L: Lanes>(l: L, s: &Stream, block: u32, out: &mut [[u32; 4]]) {
    generate::<L, Words>(l, s, block, bytemuck::cast_slice_mut(out));
}

#[inline(always)]
pub(super) fn normals<L: Lanes>(l: L, s: &Stream, block: u32, out: &mut [[f32; 4]]) {
    generate::<L, Normals>(l, s, block, out);
}

#[inline(always)]
pub(super) fn signs<L: Lanes>(l: L, s: &Stream, block: u32, out: &mut [[f32; 4]]) {
    generate::<L, Signs>(l, s, block, out);
}

/// A plain loop: the compiler vectorises it for the instruction set and never contracts it.
#[inline(always)]
pub(super) fn scaled_add<L>(_: L, a: &[f32], c: f32, z: &[f32], out: &mut [f32]) {
    for ((o, a), z) in out.iter_mut().zip(a).zip(z) {
        *o = a + c * z;
    }
}

/// A plain loop, as [`scaled_add`].
#[inline(always)]
pub(super) fn accumulate<L>(_: L, acc: &mut [f32], c: f32, z: &[f32]) {
    for (a, z) in acc.iter_mut().zip(z) {
        *a += c * z;
    }
}

#[inline(always)]
pub(super) fn radius<L: Lanes>(l: L, words: &[u32], out: &mut [f32]) {
    for (words, out) in words.chunks(L::BLOCKS).zip(out.chunks_mut(L::BLOCKS)) {
        let r = radius_of(l, load(l, words));
        store(l, r, out);
    }
}

#[inline(always)]
pub(super) fn cos_sin<L: Lanes>(l: L, words: &[u32], cos: &mut [f32], sin: &mut [f32]) {
    let outs = cos.chunks_mut(L::BLOCKS).zip(sin.chunks_mut(L::BLOCKS));
    for (words, (cos, sin)) in words.chunks(L::BLOCKS).zip(outs) {
        let (c, s) = cos_sin_of(l, load(l, words));
        store(l, c, cos);
        store(l, s, sin);
    }
}

/// A register of words, zeros past the end.
#[inline(always)]
fn load<L: Lanes>(l: L, from: &[u32]) -> L::U {
    let mut all = [0; 16];
    all[..from.len()].copy_from_slice(from);
    // Safety: no instruction set has more than 16 lanes.
    unsafe { l.load(all.as_ptr()) }
}

/// As much of a register as there is room for.
#[inline(always)]
fn store<L: Lanes>(l: L, a: L::F, to: &mut [f32]) {
    let mut all = [0.0; 16];
    // Safety: no instruction set has more than 16 lanes.
    unsafe { l.store(a, all.as_mut_ptr()) };
    to.copy_from_slice(&all[..to.len()]);
}
