use crate::util::*;
use zofo_hal::op::{
    Cast, Copy, Fill, GatherRows, Map, MapFunction, Mul, NO_INDEX, Perturb, PhiloxWords, Reduction, RowReduce, ScaledAdd, ScatterRows,
    SumSquares,
};
use zofo_hal::perturb::{Direction, Distribution, Domain, Factor, Noise, NoiseParams, Projection, Site, TensorId, Tier};
use zofo_hal::{DType, TensorSpec};

#[test]
fn copy_moves_blocks_of_columns_bit_for_bit() {
    let rig = Rig::new();
    let src = rig.words(2, 3, &[1, 2, 0x7F80_0001, 4, 5, 0xFFFF_FFFF]);
    let dst = rig.words(2, 4, &[9; 8]);
    rig.run(Copy::new(src.cols(1, 2), dst.cols(2, 2)));
    assert_eq!(rig.get_words(&dst), [9, 9, 2, 0x7F80_0001, 9, 9, 5, 0xFFFF_FFFF]);
}

#[test]
fn fill_rounds_and_refuses_what_is_no_index() {
    let rig = Rig::new();
    let t = rig.alloc(TensorSpec::new(DType::Bf16, 1, 3));
    rig.run(Fill::new(t.clone(), 1.0 / 3.0));
    assert_eq!(rig.get_float(&t), [half::bf16::from_f32(1.0 / 3.0).to_f32(); 3]);
    let words = rig.alloc(TensorSpec::new(DType::U32, 1, 2));
    rig.run(Fill::new(words.clone(), 16_777_216.0));
    assert_eq!(rig.get_words(&words), [1 << 24; 2]);
    rig.refused(Fill::new(words, 0.5));
}

#[test]
fn cast_rounds_to_nearest_even() {
    let rig = Rig::new();
    // Half way between two bf16 values, and a hair above: the hair is in the last bits of f32.
    let tie = f32::from_bits(0x3F80_8000);
    let above = f32::from_bits(0x3F80_8001);
    let odd_tie = f32::from_bits(0x3F81_8000);
    let bf16 = rig.float(DType::Bf16, 1, 3, &[tie, above, odd_tie]);
    assert_eq!(rig.get_float(&bf16), [0x3F80_0000, 0x3F81_0000, 0x3F82_0000].map(f32::from_bits));
    // 65520 is half way to the value after the largest f16: infinity. 2^-25 is half the smallest f16: zero.
    let f16 = rig.float(DType::F16, 1, 4, &[65519.0, 65520.0, 1.0 / 33_554_432.0, 1.5 / 33_554_432.0]);
    assert_eq!(rig.get_float(&f16), [65504.0, f32::INFINITY, 0.0, 1.0 / 16_777_216.0]);
}

#[test]
fn a_result_is_rounded_once() {
    let rig = Rig::new();
    // 1 + 2^-8 is half way between bf16 values; 2^-40 more must round up, though f32 cannot hold it.
    let a = rig.f32(1, 2, &[1.0 + 1.0 / 256.0, 1.0 / 1_048_576.0]);
    let b = rig.f32(1, 2, &[1.0, 1.0 / 1_048_576.0]);
    let out = rig.alloc(TensorSpec::new(DType::Bf16, 1, 1));
    rig.run(zofo_hal::op::MatMul::new(a, b, out.clone(), zofo_hal::op::Orientation::Nt));
    assert_eq!(rig.get_float(&out), [1.0 + 1.0 / 128.0]);
}

#[test]
fn scaled_add_broadcasts_and_leaves_dead_rows() {
    let rig = Rig::new();
    let a = rig.f32(4, 2, &[1., 2., 3., 4., 5., 6., 7., 8.]);
    let live = rig.u32(&[1]);
    let old = [-1.0; 8];
    for (b, want) in [
        (None, [2., 4., -1., -1., 10., 12., -1., -1.]),
        (Some(rig.f32(1, 2, &[10., 20.])), [32., 64., -1., -1., 40., 72., -1., -1.]),
        (Some(rig.f32(4, 1, &[1., 2., 3., 4.])), [5., 7., -1., -1., 19., 21., -1., -1.]),
        (Some(rig.f32(4, 2, &[1.; 8])), [5., 7., -1., -1., 13., 15., -1., -1.]),
    ] {
        let out = rig.f32(4, 2, &old);
        rig.run(ScaledAdd::new(a.clone(), out.clone()).b(b).live(live.clone()).blocks(2).alpha(2.0).beta(3.0));
        let got = rig.get(&out);
        assert_eq!(got, want);
    }
}

#[test]
fn scaled_add_is_a_sequence_of_f32_operations() {
    let rig = Rig::new();
    let (a, b) = (random(1, 64), random(2, 64));
    let (ta, tb, out) = (rig.f32(8, 8, &a), rig.f32(8, 8, &b), rig.out(8, 8));
    rig.run(ScaledAdd::new(ta, out.clone()).b(tb).alpha(0.1).beta(0.7).gamma(0.3));
    let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 0.1 * a + 0.7 * b + 0.3).collect();
    assert_eq!(rig.get(&out), want);
}

#[test]
fn live_past_the_block_fails() {
    let rig = Rig::new();
    let (a, out, live) = (rig.f32(2, 1, &[1., 2.]), rig.out(2, 1), rig.u32(&[3]));
    assert!(rig.fails(ScaledAdd::new(a, out).live(live)).to_string().contains("3 live rows in blocks of 2"));
}

#[test]
fn mul_in_place_and_accumulated() {
    let rig = Rig::new();
    let (a, b) = (rig.f32(2, 2, &[1., 2., 3., 4.]), rig.f32(1, 2, &[10., 100.]));
    rig.run(Mul::new(a.clone(), b.clone(), a.clone()));
    assert_eq!(rig.get(&a), [10., 200., 30., 400.]);
    let out = rig.f32(2, 2, &[1.; 4]);
    rig.run(Mul::new(a, b, out.clone()).accumulate(true));
    assert_eq!(rig.get(&out), [101., 20001., 301., 40001.]);
}

#[test]
fn map_applies_its_function_to_a_scaled_argument() {
    let rig = Rig::new();
    let values = [0.25f32, 1.0, 3.5];
    let x = rig.f32(1, 3, &values);
    type Function = fn(f64) -> f64;
    let table: [(MapFunction, Function); 7] = [
        (MapFunction::Exp, f64::exp),
        (MapFunction::Ln, f64::ln),
        (MapFunction::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        (MapFunction::Silu, |x| x / (1.0 + (-x).exp())),
        (MapFunction::Rsqrt, |x| 1.0 / x.sqrt()),
        (MapFunction::Recip, |x| 1.0 / x),
        (MapFunction::Sqrt, f64::sqrt),
    ];
    for (function, f) in table {
        let out = rig.out(1, 3);
        rig.run(Map::new(x.clone(), out.clone(), function).scale(2.0).shift(0.5));
        let want: Vec<f64> = values.iter().map(|x| f(2.0 * f64::from(*x) + 0.5)).collect();
        assert_close(&rig.get(&out), &want, ROUNDING);
    }
}

#[test]
fn reductions_of_rows() {
    let rig = Rig::new();
    let x = rig.f32(2, 3, &[1., -5., 2., f32::NAN, 7., 8.]);
    let out = rig.out(2, 1);
    rig.run(RowReduce::new(x.clone(), out.clone(), Reduction::Sum));
    assert_eq!(rig.get(&out)[0], -2.0);
    rig.run(RowReduce::new(x, out.clone(), Reduction::Max));
    assert_eq!(rig.get(&out)[0], 2.0);
    assert!(rig.get(&out)[1].is_nan());
    let (none, out) = (rig.out(2, 0), rig.out(2, 1));
    rig.run(RowReduce::new(none.clone(), out.clone(), Reduction::Sum));
    assert_eq!(rig.get(&out), [0.0; 2]);
    rig.run(RowReduce::new(none, out.clone(), Reduction::Max));
    assert_eq!(rig.get(&out), [f32::NEG_INFINITY; 2]);
}

#[test]
fn sum_of_squares() {
    let rig = Rig::new();
    let (x, out) = (rig.f32(2, 2, &[1., 2., 3., -4.]), rig.out(1, 1));
    rig.run(SumSquares::new(x.cols(1, 1), out.clone()));
    assert_eq!(rig.get(&out), [20.0]);
    rig.run(SumSquares::new(rig.out(0, 5), out.clone()));
    assert_eq!(rig.get(&out), [0.0]);
}

#[test]
fn gather_and_scatter_rows() {
    let rig = Rig::new();
    let src = rig.f32(3, 2, &[1., 2., 3., 4., 5., 6.]);
    let out = rig.out(4, 2);
    rig.run(GatherRows::new(src.clone(), rig.u32(&[2, NO_INDEX, 0, 2]), out.clone()));
    assert_eq!(rig.get(&out), [5., 6., 0., 0., 1., 2., 5., 6.]);
    assert!(rig.fails(GatherRows::new(src.clone(), rig.u32(&[0, 0, 3, 0]), out)).to_string().contains("index[2] is 3"));

    let dst = rig.f32(4, 2, &[10.; 8]);
    rig.run(ScatterRows::new(src.clone(), rig.u32(&[3, NO_INDEX, 1]), dst.clone()));
    assert_eq!(rig.get(&dst), [10., 10., 5., 6., 10., 10., 1., 2.]);
    rig.run(ScatterRows::new(src.clone(), rig.u32(&[1, 0, NO_INDEX]), dst.clone()).accumulate(true));
    assert_eq!(rig.get(&dst), [13., 14., 6., 8., 10., 10., 1., 2.]);
    rig.fails(ScatterRows::new(src.clone(), rig.u32(&[4, 0, 1]), dst.clone()));
    assert!(rig.fails(ScatterRows::new(src, rig.u32(&[1, 0, 1]), dst)).to_string().contains("distinct"));
}

pub fn site(factor: Factor, ld: u32) -> Site {
    Site::new(TensorId::new(2, Projection::V, factor).unwrap(), ld)
}

/// Noise parameters in device memory.
pub fn noise(rig: &Rig, q: u32, epsilon: f32) -> (NoiseParams, zofo_hal::TensorArg) {
    let params = NoiseParams::new(0x1234_5678_9ABC_DEF0, 7, Direction::new(Domain::Main, 1, q).unwrap(), epsilon);
    let words: Vec<u32> = bytemuck::cast_slice(&[params]).to_vec();
    (params, rig.u32(&words))
}

#[test]
fn perturb_adds_noise_of_the_site() {
    let rig = Rig::new();
    let (params, noise) = noise(&rig, 5, 0.125);
    for distribution in [Distribution::Gaussian, Distribution::Rademacher] {
        // A shard that begins in the middle of a block.
        let site = site(Factor::A, 11).at(1, 3).with(distribution);
        let z = |copy: u32, r, c| -> f32 {
            let direction = Direction::from_word(params.direction).unwrap().copy(copy).unwrap();
            Noise::new(0x1234_5678_9ABC_DEF0, 7, direction, site, Tier::SCALAR).normal(r, c)
        };
        let a = random(3, 15);
        let (ta, out) = (rig.f32(3, 5, &a), rig.out(3, 5));
        rig.run(Perturb::new(noise.clone(), out.clone(), site).a(ta.clone()).copy(2));
        let want: Vec<f32> = (0..15).map(|i| a[i] + 0.125 * z(2, i as u32 / 5, i as u32 % 5)).collect();
        assert_eq!(rig.get(&out), want);
        rig.run(Perturb::new(noise.clone(), out.clone(), site));
        let want: Vec<f32> = (0..15).map(|i| z(0, i / 5, i % 5)).collect();
        assert_eq!(rig.get(&out), want);
        rig.run(Perturb::new(noise.clone(), ta.clone(), site).a(ta.clone()));
        assert_eq!(rig.get(&ta)[4], a[4] + 0.125 * z(0, 0, 4));
    }
}

#[test]
fn philox_words_of_a_site() {
    let rig = Rig::new();
    let (params, noise) = noise(&rig, 0, 1.0);
    let out = rig.words(2, 4, &[0; 8]);
    rig.run(PhiloxWords::new(noise, out.clone(), site(Factor::B, 4)));
    let site = site(Factor::B, 4);
    for block in 0..2 {
        let counter = [block, site.tensor.word(), params.direction, params.step];
        let want = zofo_hal::perturb::philox4x32_10(counter, [params.seed_lo, params.seed_hi]);
        assert_eq!(rig.get_words(&out)[4 * block as usize..][..4], want);
    }
}

#[test]
fn a_direction_that_does_not_exist_fails() {
    let rig = Rig::new();
    let (_, noise) = noise(&rig, Direction::MAX_Q, 1.0);
    let out = rig.out(1, 4);
    rig.fails(Perturb::new(noise, out, site(Factor::A, 4)).copy(1));
}

#[test]
fn empty_tensors_run() {
    let rig = Rig::new();
    let (none, wide) = (rig.out(0, 4), rig.out(3, 0));
    rig.run(Cast::new(none.clone(), rig.out(0, 4)));
    rig.run(Copy::new(wide.clone(), rig.out(3, 0)));
    rig.run(GatherRows::new(none, rig.u32(&[NO_INDEX]), rig.out(1, 4)));
    rig.run(ScaledAdd::new(wide, rig.out(3, 0)));
    rig.queue.synchronize(None).unwrap();
}
