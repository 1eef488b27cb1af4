//! The Gaussian of the contract, written as one word at a time: the text that every other implementation matches bit for bit.
//!
//! Two words make two independent normals (Box and Muller, 1958): `radius(u) * cos(v)` and `radius(u) * sin(v)`.
//!
//! # Radius
//! `u = (float(word >> 1) + 0.5) * 2^-31`, in `[2^-32, 1]`, so the logarithm is always finite; `radius = sqrt(-2 log u)`.
//! The sum is kept at the scale of 2^31, where nothing is lost, and split into `2^k * (1 + f)` with f in `[-1/3, 1/3)` by integer
//! arithmetic on its bits. `-2 log u = k * (-2 log 2) + f * P(f)`, P from [`NEG_2_LOG`]. The largest radius, and so the largest |z|, is
//! `sqrt(64 log 2) = 6.6604`; one normal in 4e10 would lie beyond.
//!
//! # Angle
//! A whole turn is 2^32. `v = float(signed(word << 2)) * 2^-32`, in `[-1/2, 1/2]`, is the distance from the nearest quarter turn, in
//! quarter turns, and that quarter is bits 30 and 31 of `word + 2^29`; `sin(v pi/2) = v * S(v^2)` from [`SIN`],
//! `cos(v pi/2) = C(v^2)` from [`COS`]; an odd quarter swaps the two, and the quarter's bits give the signs.
//!
//! # Coefficients
//! Weighted minimax fits with the coefficients rounded to f32 in turn (`hal/tests/perturb_coefficients.py` derives them). P is evaluated by
//! Estrin's scheme, in the order of `estrin` in this file; S and C by Horner's rule, a multiplication and an addition per step.
//!
//! | polynomial | c0 | c1 | c2 | c3 | c4 | c5 | c6 | c7 | c8 | fit error |
//! |---|---|---|---|---|---|---|---|---|---|---|
//! | [`NEG_2_LOG`] | c0000000 | 3f7fffeb | bf2aaa7e | 3f000a28 | becce9d3 | 3ea81c47 | be8f54ae | 3e9d86fe | be8f922b | 2.6e-8 relative |
//! | [`SIN`] | 3fc90fdb | bf255e12 | 3da34052 | bb998cc6 | | | | | | 2.8e-8 relative |
//! | [`COS`] | 3f800000 | bf9de9d1 | 3e81d8c7 | bca75889 | | | | | | 3.3e-8 absolute |
//!
//! With all roundings, over all 2^32 words, against f64 (of the rounded u, and of the exact angle):
//!
//! | function | largest error | smallest magnitude but 0 | largest |
//! |---|---|---|---|
//! | [`radius`] | 1.61e-7 relative, 2.0 units in the last place | 3.45e-4 | 6.6604 |
//! | [`cos_sin`] | 1.15e-7 absolute, 2.4 units in the last place | 1.46e-9 | 1 |
//!
//! So z is 0 or at least 5e-13 in magnitude; no operand, intermediate or result is subnormal, on any word.

/// Coefficients of `-2 log(1 + f) / f` in f, for f in `[-1/3, 1/3]`, lowest degree first.
pub const NEG_2_LOG: [f32; 9] = [
    -2.0,
    f32::from_bits(0x3f7f_ffeb),
    f32::from_bits(0xbf2a_aa7e),
    f32::from_bits(0x3f00_0a28),
    f32::from_bits(0xbecc_e9d3),
    f32::from_bits(0x3ea8_1c47),
    f32::from_bits(0xbe8f_54ae),
    f32::from_bits(0x3e9d_86fe),
    f32::from_bits(0xbe8f_922b),
];

/// `-2 log 2`, rounded.
pub const NEG_2_LN_2: f32 = f32::from_bits(0xbfb1_7218);

/// Coefficients of `sin(v pi/2) / v` in v^2, for v in `[-1/2, 1/2]`, lowest degree first.
pub const SIN: [f32; 4] =
    [f32::from_bits(0x3fc9_0fdb), f32::from_bits(0xbf25_5e12), f32::from_bits(0x3da3_4052), f32::from_bits(0xbb99_8cc6)];

/// Coefficients of `cos(v pi/2)` in v^2, for v in `[-1/2, 1/2]`, lowest degree first.
pub const COS: [f32; 4] = [1.0, f32::from_bits(0xbf9d_e9d1), f32::from_bits(0x3e81_d8c7), f32::from_bits(0xbca7_5889)];

/// Bits of 2/3, rounded up: the lower end of `1 + f`.
pub const LOW: u32 = 0x3f2a_aaab;

/// The exponent of 2^31, in place.
pub const EXPONENT_31: u32 = 31 << 23;

/// 2^-32.
pub const TURN: f32 = f32::from_bits(0x2f80_0000);

/// Half of a quarter turn.
pub const EIGHTH: u32 = 1 << 29;

/// The sign bit.
pub const SIGN: u32 = 1 << 31;

/// `sqrt(-2 log u)` of a word, at most 6.6604; zero may carry either sign.
pub fn radius(word: u32) -> f32 {
    let x = (word >> 1) as i32 as f32 + 0.5;
    let t = x.to_bits().wrapping_sub(LOW + EXPONENT_31);
    let k = (t as i32) >> 23;
    let f = f32::from_bits((t & 0x007f_ffff) + LOW) + -1.0;
    libm::sqrtf(k as f32 * NEG_2_LN_2 + f * estrin(NEG_2_LOG, f))
}

/// `(cos, sin)` of a word, a whole turn being 2^32.
pub fn cos_sin(word: u32) -> (f32, f32) {
    let v = (word << 2) as i32 as f32 * TURN;
    let w = v * v;
    let (sin, cos) = (v * horner(SIN, w), horner(COS, w));
    let quarter = word.wrapping_add(EIGHTH);
    let odd = quarter << 1;
    let (c, s) = if odd & SIGN != 0 { (sin, cos) } else { (cos, sin) };
    (f32::from_bits(c.to_bits() ^ ((quarter ^ odd) & SIGN)), f32::from_bits(s.to_bits() ^ (quarter & SIGN)))
}

/// The four normals of a block's words.
pub fn normals(words: [u32; 4]) -> [f32; 4] {
    let (r0, (c0, s0)) = (radius(words[0]), cos_sin(words[1]));
    let (r1, (c1, s1)) = (radius(words[2]), cos_sin(words[3]));
    [r0 * c0, r0 * s0, r1 * c1, r1 * s1]
}

/// 1 with the top bit of the word as its sign.
pub const fn rademacher(word: u32) -> f32 {
    f32::from_bits(0x3f80_0000 | (word & SIGN))
}

/// A polynomial of degree 8 by Estrin's scheme: pairs first, so that no chain of operations is long.
pub(super) fn estrin(c: [f32; 9], x: f32) -> f32 {
    let x2 = x * x;
    let x4 = x2 * x2;
    let (p01, p23) = (c[1] * x + c[0], c[3] * x + c[2]);
    let (p45, p67) = (c[5] * x + c[4], c[7] * x + c[6]);
    let (p03, p47) = (p23 * x2 + p01, p67 * x2 + p45);
    let p48 = c[8] * x4 + p47;
    p48 * x4 + p03
}

fn horner<const N: usize>(c: [f32; N], x: f32) -> f32 {
    let mut p = c[N - 1];
    for &c in c[..N - 1].iter().rev() {
        p = p * x + c;
    }
    p
}
