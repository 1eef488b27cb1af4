//! Every tier gives the bits of the scalar text, for any run, and meets no subnormal on the way.

use proptest::prelude::*;
use zofo_hal::perturb::{Direction, Distribution, Noise, Site, TensorId, Tier, normal};

fn noise(seed: u64, step: u32, direction: u32, tensor: u32, site: (u32, u32, u32), law: Distribution, tier: Tier) -> Noise {
    let tensor = TensorId::from_word(tensor).unwrap();
    let (row0, col0, ld) = site;
    let direction = Direction::from_word(direction).unwrap();
    Noise::new(seed, step, direction, Site::new(tensor, ld).at(row0, col0).with(law), tier)
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn law() -> impl Strategy<Value = Distribution> {
    prop_oneof![Just(Distribution::Gaussian), Just(Distribution::Rademacher)]
}

prop_compose! {
    fn any_noise()(
        seed: u64, step: u32, direction in 0u32..1 << 31, tensor in (0u32..1 << 28, 0u32..14),
        site in (0u32..50, 0u32..50, 50u32..70_000), law in law(),
    ) -> Noise {
        noise(seed, step, direction, tensor.0 * 16 + tensor.1, site, law, Tier::SCALAR)
    }
}

proptest! {
    #[test]
    fn a_run_is_its_elements(noise in any_noise(), row in 0u32..9, col in 0u32..40, n in 0usize..700) {
        let expected: Vec<f32> = (0..n as u32).map(|i| noise.normal(row, col + i)).collect();
        for tier in Tier::available() {
            let mut z = vec![0.0; n];
            Noise { tier, ..noise }.z_into(row, col, &mut z);
            prop_assert_eq!(bits(&z), bits(&expected), "{}", tier);
        }
    }

    #[test]
    fn words_agree(noise in any_noise(), col in 0u32..40, n in 0usize..300) {
        let mut expected = vec![0; n];
        noise.words_into(0, col, &mut expected);
        for tier in Tier::available() {
            let mut words = vec![0; n];
            Noise { tier, ..noise }.words_into(0, col, &mut words);
            prop_assert_eq!(&words, &expected, "{}", tier);
        }
    }

    #[test]
    fn perturbation_is_add_of_mul(noise in any_noise(), col in 0u32..9, a in prop::collection::vec(-2.0f32..2.0, 0..600), eps in 1e-4f32..1.0) {
        let expected: Vec<f32> = a.iter().enumerate().map(|(i, a)| a + eps * noise.normal(0, col + i as u32)).collect();
        for tier in Tier::available() {
            let mut out = vec![0.0; a.len()];
            Noise { tier, ..noise }.perturb_into(0, col, &a, eps, &mut out).unwrap();
            prop_assert_eq!(bits(&out), bits(&expected), "{}", tier);
        }
    }

    #[test]
    fn update_adds_directions_in_order(
        noise in any_noise(), col in 0u32..9, n in 0usize..600,
        terms in prop::collection::vec((-2.0f32..2.0, 0u32..1 << 31), 0..4),
    ) {
        let (coeffs, directions): (Vec<f32>, Vec<u32>) = terms.into_iter().unzip();
        let expected: Vec<f32> = (0..n as u32)
            .map(|i| {
                coeffs.iter().zip(&directions).fold(0.5, |acc, (c, &direction)| acc + c * Noise { direction, ..noise }.normal(0, col + i))
            })
            .collect();
        for tier in Tier::available() {
            let mut acc = vec![0.5; n];
            Noise { tier, ..noise }.accumulate(0, col, &mut acc, &coeffs, &directions).unwrap();
            prop_assert_eq!(bits(&acc), bits(&expected), "{}", tier);
        }
    }

    /// Cut a matrix into shards at any row and column: each shard's z is the whole's.
    #[test]
    fn shards_equal_the_whole(rows in 1usize..9, cols in 1usize..40, cut in (0.0f64..1.0, 0.0f64..1.0), law in law()) {
        for tier in Tier::available() {
            let whole = noise(7, 3, 11, 5, (0, 0, cols as u32), law, tier);
            let mut z = vec![0.0; rows * cols];
            whole.z_into(0, 0, &mut z);
            let (r, c) = ((cut.0 * rows as f64) as usize, (cut.1 * cols as f64) as usize);
            for (r0, nr) in [(0, r), (r, rows - r)] {
                for (c0, nc) in [(0, c), (c, cols - c)] {
                    let shard = Noise { site: whole.site.at(r0 as u32, c0 as u32), ..whole };
                    shard.site.check(nr, nc).unwrap();
                    let mut local = vec![f32::NAN; nr * nc];
                    for run in shard.site.runs(nr, nc) {
                        shard.z_into(run.row, 0, &mut local[run.start..][..run.len]);
                    }
                    for (i, &local) in local.iter().enumerate() {
                        let there = (r0 + i / nc) * cols + c0 + i % nc;
                        prop_assert_eq!(local.to_bits(), z[there].to_bits());
                    }
                }
            }
        }
    }
}

#[test]
fn the_last_elements_of_the_largest_tensor_agree() {
    let last = noise(1, 2, 3, 4, (65535, 65536 - 70, 65536), Distribution::Gaussian, Tier::SCALAR);
    last.site.check(1, 70).unwrap();
    let mut expected = [0.0; 70];
    last.z_into(0, 0, &mut expected);
    for tier in Tier::available() {
        let mut z = [0.0; 70];
        Noise { tier, ..last }.z_into(0, 0, &mut z);
        assert_eq!(bits(&z), bits(&expected), "{tier}");
    }
}

/// Sticky exception flags of the SSE unit: an operand was subnormal, or a result was.
#[cfg(target_arch = "x86_64")]
mod sticky {
    use std::arch::asm;

    pub fn clear() {
        let status = read() & !0x3f;
        // Safety: only the exception flags change, which Rust gives no meaning.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &status) };
    }

    pub fn subnormal() -> bool {
        read() & 0b1_0010 != 0
    }

    fn read() -> u32 {
        let mut status = 0u32;
        // Safety: stores 32 bits where they belong.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut status) };
        status
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod sticky {
    pub fn clear() {}

    pub fn subnormal() -> bool {
        false
    }
}

const PAGE: usize = 1 << 16;

/// Compares the per-word functions of every tier on these words, and their values with f64.
fn compare(words: &[u32]) {
    let (mut r, mut c, mut s) = (vec![0f32; words.len()], vec![0f32; words.len()], vec![0f32; words.len()]);
    let expected: Vec<(f32, (f32, f32))> = words.iter().map(|&w| (normal::radius(w), normal::cos_sin(w))).collect();
    for tier in Tier::available() {
        sticky::clear();
        tier.radius_into(words, &mut r);
        tier.cos_sin_into(words, &mut c, &mut s);
        assert!(!sticky::subnormal(), "{tier}: subnormal between words {:#x} and {:#x}", words[0], words[words.len() - 1]);
        for (i, &(er, (ec, es))) in expected.iter().enumerate() {
            let same = r[i].to_bits() == er.to_bits() && c[i].to_bits() == ec.to_bits() && s[i].to_bits() == es.to_bits();
            assert!(same, "{tier}: word {:#x}: {} {} {} for {er} {ec} {es}", words[i], r[i], c[i], s[i]);
        }
    }
    for (&word, &(r, (c, s))) in words.iter().zip(&expected) {
        check_value(word, r, c, s);
    }
}

/// The error bounds of the module's documentation, and that a product of radius and sine is far from subnormal.
fn check_value(word: u32, r: f32, c: f32, s: f32) {
    let u = f64::from((word >> 1) as i32 as f32 + 0.5) / 2f64.powi(31);
    let exact = (-2.0 * u.ln()).sqrt();
    assert!((f64::from(r) - exact).abs() <= 1.62e-7 * exact, "radius({word:#x}) = {r}, not {exact}");
    // Exact in f64: 32 bits, less than a turn. Reduced to an eighth of a turn, so that the yardstick's own error stays small.
    let quarter = (u64::from(word) + (1 << 29)) >> 30;
    let rest = (i64::from(word) - ((quarter as i64) << 30)) as f64 * std::f64::consts::TAU / 2f64.powi(32);
    let (sin, cos) = rest.sin_cos();
    let (ec, es) = [(cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos)][(quarter & 3) as usize];
    assert!((f64::from(c) - ec).abs() <= 1.15e-7, "cos({word:#x}) = {c}, not {ec}");
    assert!((f64::from(s) - es).abs() <= 1.15e-7, "sin({word:#x}) = {s}, not {es}");
    assert!(r == 0.0 || (3e-4..6.6605).contains(&r), "radius({word:#x}) = {r}");
    for x in [c, s] {
        assert!(x == 0.0 || x.abs() > 1e-9, "{x} of {word:#x}");
    }
}

/// 2^20 words: one of every 4096, and both ends, where radius and angle have their extremes.
#[test]
fn words_of_every_tier_on_a_million() {
    let ends = (0..PAGE as u32).chain(u32::MAX - (PAGE as u32 - 1)..=u32::MAX);
    let spread = (0..1u32 << 20).map(|i| i * 4096 + i.wrapping_mul(0x9e37_79b1) % 4096);
    for page in ends.chain(spread).collect::<Vec<u32>>().chunks(PAGE) {
        compare(page);
    }
}

#[test]
#[ignore = "exhaustive: all 2^32 words on every tier, up to half an hour"]
fn words_of_every_tier_on_all() {
    let mut words = vec![0; PAGE];
    for page in 0..1u32 << 16 {
        words.iter_mut().zip(0u32..).for_each(|(w, i)| *w = page << 16 | i);
        compare(&words);
    }
}

#[test]
fn per_word_functions_take_any_length() {
    for tier in Tier::available() {
        for n in 0..40 {
            let words: Vec<u32> = (0..n).map(|i: u32| i.wrapping_mul(0x1357_9bdf)).collect();
            let (mut r, mut c, mut s) = (vec![0.0; n as usize], vec![0.0; n as usize], vec![0.0; n as usize]);
            tier.radius_into(&words, &mut r);
            tier.cos_sin_into(&words, &mut c, &mut s);
            for (i, &w) in words.iter().enumerate() {
                assert_eq!((r[i], (c[i], s[i])), (normal::radius(w), normal::cos_sin(w)), "{tier}");
            }
        }
    }
}

#[test]
fn the_ends_of_the_radius() {
    assert_eq!(normal::radius(u32::MAX), 0.0);
    assert!((6.6604..6.6605).contains(&normal::radius(0)));
    assert_eq!(normal::radius(0), normal::radius(1));
}

#[test]
fn quarter_turns_are_exact() {
    for (quarter, expected) in [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)].into_iter().enumerate() {
        assert_eq!(normal::cos_sin((quarter as u32) << 30), expected);
    }
}
