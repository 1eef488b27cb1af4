//! Fields of an address: packing, and refusal of what does not fit.

use proptest::prelude::*;
use zofo_hal::ErrorKind;
use zofo_hal::perturb::{Direction, Distribution, Domain, Factor, Noise, NoiseParams, Projection, Site, TensorId, Tier};

fn invalid<T: std::fmt::Debug>(result: zofo_hal::Result<T>) -> String {
    let error = result.unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::InvalidArgument, "{error}");
    error.to_string()
}

fn tensor() -> TensorId {
    TensorId::new(1, Projection::V, Factor::B).unwrap()
}

#[test]
fn direction_is_domain_micro_batch_q() {
    let d = Direction::new(Domain::Exit, 3, 5).unwrap();
    assert_eq!(d.word(), 0x4003_0005);
    assert_eq!((d.domain(), d.micro_batch(), d.q()), (Domain::Exit, 3, 5));
    assert_eq!(Direction::from_word(d.word()).unwrap(), d);
    assert_eq!(Direction::new(Domain::Main, 16383, 65535).unwrap().word(), 0x3fff_ffff);
}

#[test]
fn direction_refuses_overflow() {
    assert!(invalid(Direction::new(Domain::Main, 1 << 14, 0)).contains("micro-batch 16384"));
    assert!(invalid(Direction::new(Domain::Main, 0, 1 << 16)).contains("direction 65536"));
    assert!(invalid(Direction::from_word(0x8000_0000)).contains("domain 2"));
}

#[test]
fn copies_count_up_and_do_not_spill_into_the_micro_batch() {
    let first = Direction::new(Domain::Main, 2, 65534).unwrap();
    assert_eq!(first.copy(1).unwrap().word(), first.word() + 1);
    invalid(first.copy(2));
    invalid(first.copy(u32::MAX));
}

#[test]
fn tensor_is_layer_projection_factor() {
    let t = TensorId::new(29, Projection::Down, Factor::B).unwrap();
    assert_eq!(t.word(), 29 * 16 + 6 * 2 + 1);
    assert_eq!((t.layer(), t.projection(), t.factor()), (29, Projection::Down, Factor::B));
    assert_eq!(TensorId::from_word(t.word()).unwrap(), t);
    invalid(TensorId::new(1 << 28, Projection::Q, Factor::A));
    invalid(TensorId::from_word(14));
    invalid(TensorId::from_word(u32::MAX));
}

#[test]
fn projections_have_their_peft_names() {
    for (i, p) in Projection::ALL.into_iter().enumerate() {
        assert_eq!(p as usize, i);
        assert_eq!(Projection::from_name(p.name()), Some(p));
    }
    assert_eq!(Projection::Gate.name(), "gate_proj");
    assert_eq!(Projection::from_name("lm_head"), None);
}

#[test]
fn site_refuses_what_leaves_the_tensor() {
    let site = Site::new(tensor(), 64).at(10, 32);
    site.check(4, 32).unwrap();
    assert!(invalid(site.check(4, 33)).contains("32..65"));
    invalid(Site::new(tensor(), 0).check(1, 1));
}

#[test]
fn site_refuses_elements_beyond_32_bits() {
    let site = Site::new(tensor(), 1 << 16);
    site.check(1 << 16, 1 << 16).unwrap();
    assert!(invalid(site.check((1 << 16) + 1, 1)).contains("4294967296"));
    invalid(site.at(1, 0).check(1 << 16, 1));
    invalid(Site::new(tensor(), u32::MAX).at(u32::MAX, 0).check(usize::MAX, 1));
    invalid(Site::new(tensor(), u32::MAX).check(1, usize::MAX));
}

#[test]
fn an_empty_site_is_fine() {
    let site = Site::new(tensor(), 0).at(u32::MAX, u32::MAX);
    site.check(0, 7).unwrap();
    site.check(usize::MAX, 0).unwrap();
    assert_eq!(Site::new(tensor(), 4).runs(usize::MAX, 0).count(), 0);
}

#[test]
fn params_are_eight_words_in_order() {
    let p = NoiseParams::new(0x1122_3344_5566_7788, 9, Direction::new(Domain::Main, 1, 2).unwrap(), 1e-3);
    let words: [u32; NoiseParams::WORDS] = bytemuck::cast(p);
    assert_eq!(words, [0x5566_7788, 0x1122_3344, 9, 0x0001_0002, 1e-3f32.to_bits(), 0, 0, 0]);
    let site = Site::new(tensor(), 64);
    let third = Direction::new(Domain::Main, 1, 4).unwrap();
    assert_eq!(p.noise(2, site, Tier::SCALAR), Noise::new(0x1122_3344_5566_7788, 9, third, site, Tier::SCALAR));
}

#[test]
fn lengths_that_differ_are_refused() {
    let noise = Noise::new(0, 0, Direction::default(), Site::new(tensor(), 64), Tier::detect());
    invalid(noise.perturb_into(0, 0, &[0.0; 3], 1.0, &mut [0.0; 4]));
    invalid(noise.accumulate(0, 0, &mut [0.0; 4], &[1.0], &[]));
}

#[test]
fn tiers_end_with_scalar() {
    assert_eq!(Tier::available().last(), Some(Tier::SCALAR));
    assert_eq!(Some(Tier::detect()), Tier::available().next());
}

proptest! {
    #[test]
    fn runs_cover_a_packed_matrix(rows in 0usize..9, cols in 0usize..9, col0 in 0u32..3, spare in 0u32..3) {
        let ld = col0 + cols as u32 + spare;
        let site = Site::new(tensor(), ld).at(5, col0).with(Distribution::Rademacher);
        let covered: Vec<u32> = site
            .runs(rows, cols)
            .flat_map(|r| {
                let first = site.element(r.row, 0);
                (0..r.len as u32).map(move |i| first + i)
            })
            .collect();
        let expected: Vec<u32> =
            (0..rows as u32).flat_map(|r| (0..cols as u32).map(move |c| (5 + r) * ld + col0 + c)).collect();
        prop_assert_eq!(covered, expected);
        let starts: Vec<usize> = site.runs(rows, cols).map(|r| r.start).collect();
        let mut end = 0;
        for (start, run) in starts.into_iter().zip(site.runs(rows, cols)) {
            prop_assert_eq!(start, end);
            end += run.len;
        }
    }
}
