//! Words against Random123 and another crate; normals against `normals_reference.py`.

use proptest::prelude::*;
use zofo_hal::perturb::{Direction, Noise, Site, TensorId, Tier, philox4x32_10};

/// The philox4x32-10 lines of `kat_vectors` in Random123: counter, key, words.
const RANDOM123: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
    ([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
    ([u32::MAX; 4], [u32::MAX; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
    ([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0], [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]),
];

#[test]
fn random123() {
    for (counter, key, words) in RANDOM123 {
        assert_eq!(philox4x32_10(counter, key), words);
    }
}

/// A shipped address that has the first vector's counter and key, so that every tier's own rounds meet a published answer.
#[test]
fn random123_through_every_tier() {
    for tier in Tier::available() {
        let site = Site::new(TensorId::from_word(0).unwrap(), 64);
        let noise = Noise::new(0, 0, Direction::from_word(0).unwrap(), site, tier);
        let mut words = [0; 64];
        noise.words_into(0, 0, &mut words);
        assert_eq!(words[..4], RANDOM123[0].2, "{tier}");
    }
}

proptest! {
    #[test]
    fn words_are_those_of_rand_philox(counter: [u32; 4], key: [u32; 2]) {
        let packed = counter.iter().rev().fold(0u128, |n, &w| n << 32 | u128::from(w));
        let mut other = rand_philox::Philox::new(key, packed);
        prop_assert_eq!(philox4x32_10(counter, key), core::array::from_fn(|_| other.next_u32()));
    }
}

/// Name, seed, step, direction, tensor, `[row0, col0, ld]`, first column, bits of z.
type Case = (&'static str, u64, u32, u32, u32, [u32; 3], u32, &'static [u32]);

/// Printed by `normals_reference.py`.
const NORMALS: &[Case] = &[
    (
        "origin",
        0x0,
        0,
        0x00000000,
        0x0,
        [0, 0, 64],
        0,
        &[
            0x3f7dbb33, 0xbf6cb6af, 0xbf1e1ba1, 0xbef6d1b3, 0xbe1d5354, 0x3e392a68, 0x3f54ec99, 0x3e4a2da3, 0xbf97da92, 0x4022d27d,
            0xbe8a0f8f, 0x3ffb065c, 0xbf186c98, 0x3eb4029c, 0xbf661975, 0x3ee40c4d,
        ],
    ),
    (
        "all_fields",
        0x123456789abcdef,
        1000,
        0x00050009,
        0x1dd,
        [17, 0, 576],
        0,
        &[0xbfa4476e, 0x3f9da3e0, 0xbfd3c451, 0xbefb7bd8, 0x3f9046da, 0xbf3dc547, 0xbef1fd2a, 0x3ebe1092],
    ),
    (
        "exit_domain",
        0x2a,
        3,
        0x7fffffff,
        0x24,
        [0, 0, 288],
        4,
        &[0xbf93337f, 0x3f0a92eb, 0xbf7de7b2, 0xbf3e8526, 0x3f757be1, 0x3f6b3e05, 0xbebd21a8, 0xbf946507],
    ),
    (
        "top_of_every_field",
        0xffffffffffffffff,
        4294967295,
        0x7fffffff,
        0xfffffffd,
        [65535, 0, 65536],
        65528,
        &[0x3fb6ff03, 0x3f00f7c0, 0xbeb0e271, 0xbeca19e3, 0x3f6f23ce, 0x3eb56bfc, 0x3fa89207, 0x3fab4b4b],
    ),
    (
        "shard_at_1",
        0x2a,
        7,
        0x00010002,
        0x47,
        [3, 0, 9],
        2,
        &[
            0xbf3e4484, 0xbfac41f0, 0xbe109996, 0x3db6d9ca, 0x3ed76c1d, 0xbf2e6b0a, 0x3fef42ee, 0x3f359cf8, 0xbe753ada, 0xbf26e921,
            0xbf5029a9,
        ],
    ),
    (
        "shard_at_2",
        0x2a,
        7,
        0x00010002,
        0x46,
        [2, 101, 301],
        3,
        &[0x3fde0fca, 0xbf314ccc, 0x3fe22988, 0xbe97eb24, 0x3e313f12, 0x3c8d3325, 0x3f30ceed, 0xbd90a46d, 0x3f5b9951, 0xc011aee0],
    ),
    (
        "shard_at_3",
        0x2a,
        7,
        0x00010002,
        0x48,
        [5, 1000, 8192],
        3,
        &[0x3fed50ee, 0x3f8fe641, 0x3f81101b, 0x3f0a4cae, 0x3e9de6b2, 0x3f48c5fd, 0x3eba2d0a, 0x3f85a51a, 0xbf3c6301],
    ),
];

#[test]
fn normals() {
    for &(name, seed, step, direction, tensor, [row0, col0, ld], col, bits) in NORMALS {
        let site = Site::new(TensorId::from_word(tensor).unwrap(), ld).at(row0, col0);
        site.check(1, col as usize + bits.len()).unwrap_or_else(|_| site.check(2, (ld - col0) as usize).unwrap());
        for tier in Tier::available() {
            let noise = Noise::new(seed, step, Direction::from_word(direction).unwrap(), site, tier);
            let mut z = vec![0.0; bits.len()];
            noise.z_into(0, col, &mut z);
            let got: Vec<u32> = z.iter().map(|z| z.to_bits()).collect();
            assert_eq!(got, bits, "{name} on {tier}");
            for (i, &want) in bits.iter().enumerate() {
                assert_eq!(noise.normal(0, col + i as u32).to_bits(), want, "{name}, element {i}");
            }
        }
    }
}
