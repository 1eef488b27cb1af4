//! z has the law it should, and no part of an address repeats another's numbers. Seeds are fixed, so a bound of some standard errors
//! cannot fail by chance.

use zofo_hal::perturb::{Direction, Distribution, Domain, Factor, Noise, Projection, Site, TensorId, Tier};

const N: usize = 1 << 20;

fn noise() -> Noise {
    let tensor = TensorId::new(4, Projection::V, Factor::A).unwrap();
    Noise::new(20_240_607, 12, Direction::new(Domain::Main, 3, 1).unwrap(), Site::new(tensor, N as u32), Tier::detect())
}

fn z(noise: Noise) -> Vec<f64> {
    let mut z = vec![0.0; N];
    noise.z_into(0, 0, &mut z);
    z.into_iter().map(f64::from).collect()
}

fn mean(x: impl Iterator<Item = f64>) -> f64 {
    x.sum::<f64>() / N as f64
}

/// The mean of N terms of the given expectation and variance, within 4 standard errors.
fn assert_mean(what: &str, got: f64, expected: f64, variance: f64) {
    let error = (variance / N as f64).sqrt();
    assert!((got - expected).abs() < 4.0 * error, "{what} is {got}, not {expected} within 4 standard errors of {error}");
}

/// Moments of the standard normal are 0, 1, 0, 3, and the variance of z^k is E z^2k - (E z^k)^2 with E z^6 = 15, E z^8 = 105.
#[test]
fn moments() {
    let z = z(noise());
    for (k, expected, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
        assert_mean(&format!("moment {k}"), mean(z.iter().map(|z| z.powi(k))), expected, variance);
    }
}

/// Kolmogorov-Smirnov: sqrt(N) D exceeds 1.95 with probability 0.001 under the law tested. All elements, and each word position alone.
#[test]
fn kolmogorov_smirnov() {
    let z = z(noise());
    let samples = (0..4).map(|j| z.iter().skip(j).step_by(4).copied().collect()).chain([z.clone()]);
    for mut sample in samples.collect::<Vec<Vec<f64>>>() {
        sample.sort_by(f64::total_cmp);
        let n = sample.len() as f64;
        let d = sample.iter().enumerate().fold(0f64, |d, (i, z)| {
            let phi = 0.5 * libm::erfc(-z / std::f64::consts::SQRT_2);
            d.max(phi - i as f64 / n).max((i + 1) as f64 / n - phi)
        });
        assert!(n.sqrt() * d < 1.95, "{}", n.sqrt() * d);
    }
}

#[test]
fn tails() {
    let z = z(noise());
    for bound in [3.0, 4.0, 4.5] {
        let p = libm::erfc(bound / std::f64::consts::SQRT_2);
        let share = mean(z.iter().map(|z| f64::from(u8::from(z.abs() > bound))));
        assert_mean(&format!("share beyond {bound}"), share, p, p * (1.0 - p));
    }
}

/// Every field of the address, changed by itself, gives numbers that do not correlate; neither do their squares, which would show
/// radii in common.
#[test]
fn addresses_are_uncorrelated() {
    let base = noise();
    let at = |layer, projection, factor| Noise { site: Site::new(TensorId::new(layer, projection, factor).unwrap(), N as u32), ..base };
    let others = [
        ("seed lo", Noise { seed: [base.seed[0] + 1, base.seed[1]], ..base }),
        ("seed hi", Noise { seed: [base.seed[0], base.seed[1] + 1], ..base }),
        ("step", Noise { step: base.step + 1, ..base }),
        ("q", Noise { direction: base.direction + 1, ..base }),
        ("micro-batch", Noise { direction: base.direction + (1 << 16), ..base }),
        ("domain", Noise { direction: base.direction + (1 << 30), ..base }),
        ("layer", at(5, Projection::V, Factor::A)),
        ("projection", at(4, Projection::O, Factor::A)),
        ("factor", at(4, Projection::V, Factor::B)),
        ("row", Noise { site: base.site.at(1, 0), ..base }),
    ];
    let a = z(base);
    for (name, other) in others {
        let b = z(other);
        assert_mean(name, mean(a.iter().zip(&b).map(|(a, b)| a * b)), 0.0, 1.0);
        let squares = mean(a.iter().zip(&b).map(|(a, b)| (a * a - 1.0) * (b * b - 1.0)));
        assert_mean(&format!("{name}, squares"), squares, 0.0, 4.0);
    }
}

/// Neighbours share a block, and pairs share a radius.
#[test]
fn neighbours_are_uncorrelated() {
    let z = z(noise());
    for lag in 1..9 {
        let pairs = || z.iter().zip(z.iter().cycle().skip(lag));
        assert_mean(&format!("lag {lag}"), mean(pairs().map(|(a, b)| a * b)), 0.0, 1.0);
        let squares = mean(pairs().map(|(a, b)| (a * a - 1.0) * (b * b - 1.0)));
        assert_mean(&format!("lag {lag}, squares"), squares, 0.0, 4.0);
    }
}

#[test]
fn rademacher_is_a_fair_sign() {
    let base = noise();
    let z = z(Noise { site: base.site.with(Distribution::Rademacher), ..base });
    assert!(z.iter().all(|z| z.abs() == 1.0));
    assert_mean("mean", mean(z.iter().copied()), 0.0, 1.0);
    for lag in 1..9 {
        let products = mean(z.iter().zip(z.iter().cycle().skip(lag)).map(|(a, b)| a * b));
        assert_mean(&format!("lag {lag}"), products, 0.0, 1.0);
    }
}
