//! Perturbed copies: tangents are exact slopes, values are what the moved model gives, and differences tend to the slopes.

use zofo_hal::{
    DType,
    op::{BoundaryDot, Copies, Spread},
    perturb::{Direction, Domain},
};
use zofo_ops::{
    llama::{Factors, Importer, Input, Perturbation, SliceSpec, WeightSource},
    lora::Targets,
};

use crate::common::*;

const LENGTHS: [usize; 2] = [7, 5];

/// Slopes of the mean loss along `count` directions, by tangents through the whole model.
fn tangent_slopes(rig: &mut Rig, batch: &zofo_ops::batch::DeviceBatch, perturbation: &Perturbation, count: u32) -> Vec<f64> {
    let copies = Copies::tangent(count);
    let (runner, slice) = (&mut rig.runner, &rig.slice);
    let h = slice.forward_copies(runner, batch, &rig.adapters, Input::Tokens, copies, Some(perturbation), None).unwrap();
    let sums = slice.loss(runner, batch, &h, copies, false).unwrap().sums(runner).unwrap();
    sums[1..].iter().map(|s| s / batch.labels() as f64).collect()
}

/// A tangent and a gradient are the same sum of products in another order; each activation on the way is rounded to f32, so both differ from
/// the exact value by some 30 relative roundings of their terms: 30 * 2^-24 = 2e-6 of the sum of magnitudes, ten times that allowed.
#[test]
fn tangents_are_the_gradients_slopes_for_every_target_set() {
    let source = tiny();
    let config = source.config().clone();
    for targets in target_sets() {
        for factors in [Factors::B, Factors::Ab] {
            let host = adapter(&config, &spec(3, targets));
            let mut rig = Rig::whole(reference(), &source, &host);
            let batch = rig.batch(&packed(&config, &LENGTHS));
            rig.forward_backward(&batch);
            let grads = rig.grads();
            let params = directions(0.0);
            let perturbation = perturbation(&mut rig, &params, factors);
            for (q, found) in tangent_slopes(&mut rig, &batch, &perturbation, 3).into_iter().enumerate() {
                let (exact, size) = slope(&grads, &host, &params, q as u32, factors, 0..4);
                assert!((found - exact).abs() < 2e-5 * size, "{targets} {factors:?} {q}: {found}, {exact} of {size}");
            }
        }
    }
}

#[test]
fn the_readout_at_the_cut_is_the_slope_of_what_lies_above() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(3, Targets::ALL));
    let mut importer = Importer::new();
    let mut rig = Rig::whole(reference(), &source, &host);
    let batch = rig.batch(&packed(&config, &LENGTHS));
    rig.forward_backward(&batch);
    let grads = rig.grads();

    let device = rig.runner.device().clone();
    let part = |spec: &SliceSpec, importer: &mut Importer| {
        Rig::with(zofo_ops::Runner::new(device.clone()).unwrap(), importer, &source, spec, &host)
    };
    let mut upper = part(&SliceSpec::new(&config, 0..2), &mut importer);
    let mut lower = part(&SliceSpec::new(&config, 2..4).with_backward(), &mut importer);
    let (upper_batch, lower_batch) = (upper.batch(&packed(&config, &LENGTHS)), lower.batch(&packed(&config, &LENGTHS)));

    let params = directions(0.0);
    let noise = perturbation(&mut upper, &params, Factors::Ab);
    let copies = Copies::tangent(2);
    let h =
        upper.slice.forward_copies(&mut upper.runner, &upper_batch, &upper.adapters, Input::Tokens, copies, Some(&noise), None).unwrap();
    // What would be sent: the base block down, its gradient up.
    let t = upper_batch.block_rows();
    let base = upper.runner.read_f32(&h.rows(0, t)).unwrap();
    let base = lower.runner.constant_f32(t, config.hidden, &base).unwrap();
    let (_, delta) = lower.step(&lower_batch, Input::Hidden(&base), true);
    let delta = lower.runner.read_f32(&delta.unwrap()).unwrap();
    let delta = upper.runner.constant_f32(t, config.hidden, &delta).unwrap();

    let out = upper.runner.temp(DType::F32, 1, 2).unwrap();
    upper.runner.run(BoundaryDot::new(delta, h.rows(t, 2 * t), out.clone()).live(upper_batch.live.clone())).unwrap();
    for (q, found) in upper.runner.read_f32(&out).unwrap().into_iter().enumerate() {
        let (exact, size) = slope(&grads, &host, &params, q as u32, Factors::Ab, 0..2);
        assert!((f64::from(found) - exact).abs() < 2e-5 * size, "{q}: {found}, {exact} of {size}");
    }
}

#[test]
fn a_value_copy_is_the_model_with_moved_adapters() {
    let source = tiny();
    let config = source.config().clone();
    for targets in target_sets() {
        for (factors, has_base) in [(Factors::B, true), (Factors::Ab, false)] {
            let host = adapter(&config, &spec(3, targets));
            let mut rig = Rig::whole(reference(), &source, &host);
            let batch = rig.batch(&packed(&config, &LENGTHS));
            let params = directions(1e-2);
            let noise = perturbation(&mut rig, &params, factors);
            let copies = Copies::value(2, has_base);
            let h = rig.slice.forward_copies(&mut rig.runner, &batch, &rig.adapters, Input::Tokens, copies, Some(&noise), None).unwrap();
            for block in 0..copies.total() {
                let moved = if has_base && block == 0 {
                    host.clone()
                } else {
                    moved(&host, &params, (block - copies.first_copy()) as u32, factors)
                };
                rig.set(&moved);
                let alone = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
                let alone = rig.rows(&alone, &batch);
                let found = rig.rows(&h.rows(block * batch.block_rows(), batch.block_rows()), &batch);
                // The reference device computes both in f64 and rounds each output once.
                assert_eq!(bits(&found), bits(&alone), "{targets} {factors:?} block {block}");
            }
        }
    }
}

/// (L(theta + eps z) - L(theta)) / eps = slope + eps/2 z^T H z + noise. At eps 1e-2 the curvature term is below eps times some units (z is long:
/// some 1900 entries of order 1), at eps 1e-3 a tenth of that. The noise is 1e-6 / eps.
#[test]
fn differences_tend_to_the_slope() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(3, Targets::ALL));
    let mut rig = Rig::whole(reference(), &source, &host);
    let batch = rig.batch(&packed(&config, &LENGTHS));
    let noise = perturbation(&mut rig, &directions(0.0), Factors::Ab);
    let slopes = tangent_slopes(&mut rig, &batch, &noise, 2);
    let mut errors = Vec::new();
    for eps in [1e-2f32, 1e-3] {
        noise.set(&mut rig.runner, &directions(eps)).unwrap();
        let copies = Copies::value(2, true);
        let h = rig.slice.forward_copies(&mut rig.runner, &batch, &rig.adapters, Input::Tokens, copies, Some(&noise), None).unwrap();
        let sums = rig.slice.loss(&mut rig.runner, &batch, &h, copies, false).unwrap().sums(&mut rig.runner).unwrap();
        let error = |q: usize| ((sums[q + 1] - sums[0]) / batch.labels() as f64 / f64::from(eps) - slopes[q]).abs();
        errors.push([error(0), error(1)]);
    }
    for (coarse, fine) in errors[0].iter().zip(errors[1]) {
        assert!(fine < coarse / 5.0 + 2e-3, "{coarse} at 1e-2, {fine} at 1e-3");
    }
}

#[test]
fn copies_that_start_apart_and_copies_that_start_together_agree() {
    let source = tiny();
    let config = source.config().clone();
    let part = SliceSpec::new(&config, 1..3);
    for targets in target_sets() {
        let host = adapter(&config, &spec(2, targets));
        let mut rig = Rig::new(reference(), &source, &part, &host);
        let batch = rig.batch(&packed(&config, &LENGTHS));
        let t = batch.block_rows();
        let h = rig.runner.constant_f32(t, config.hidden, &noise(4, t * config.hidden)).unwrap();
        for copies in [Copies::tangent(2), Copies::value(2, true), Copies::value(1, false)] {
            let perturbation = perturbation(&mut rig, &directions(1e-2), Factors::Ab);
            let spread = rig.runner.temp(DType::F32, t * copies.total(), config.hidden).unwrap();
            rig.runner.run(Spread::new(h.clone(), spread.clone(), copies)).unwrap();
            let mut run = |input: &zofo_hal::TensorArg| {
                let input = Input::Hidden(input);
                let out =
                    rig.slice.forward_copies(&mut rig.runner, &batch, &rig.adapters, input, copies, Some(&perturbation), None).unwrap();
                let blocks = (0..copies.total()).map(|c| out.rows(c * t, batch.rows()));
                blocks.flat_map(|b| rig.runner.read_f32(&b).unwrap()).collect::<Vec<f32>>()
            };
            assert_eq!(bits(&run(&h)), bits(&run(&spread)), "{targets} {copies:?}");
        }
    }
}

#[test]
fn copies_run_on_through_layers_that_are_not_perturbed() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, "q,v".parse().unwrap()));
    let mut rig = Rig::new(reference(), &source, &SliceSpec::new(&config, 2..4), &host);
    let batch = rig.batch(&packed(&config, &LENGTHS));
    let t = batch.block_rows();
    let all = noise(4, 3 * t * config.hidden);
    let h = rig.runner.constant_f32(3 * t, config.hidden, &all).unwrap();
    let copies = Copies::value(3, false);
    let out = rig.slice.forward_copies(&mut rig.runner, &batch, &rig.adapters, Input::Hidden(&h), copies, None, None).unwrap();
    for c in 0..3 {
        let alone = rig.runner.constant_f32(t, config.hidden, &all[c * t * config.hidden..][..t * config.hidden]).unwrap();
        let alone = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Hidden(&alone)).unwrap();
        let found = rig.rows(&out.rows(c * t, t), &batch);
        assert_eq!(bits(&found), bits(&rig.rows(&alone, &batch)), "copy {c}");
    }
}

#[test]
fn an_exit_head_gives_the_losses_of_a_shorter_model() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let mut rig = Rig::new(reference(), &source, &SliceSpec::new(&config, 0..2).with_exit_head(), &host);
    let batch = rig.batch(&packed(&config, &LENGTHS));
    let params = zofo_hal::perturb::NoiseParams { direction: Direction::new(Domain::Exit, 0, 0).unwrap().word(), ..directions(0.0) };
    let noise = perturbation(&mut rig, &params, Factors::Ab);
    let copies = Copies::tangent(1);
    let (runner, slice) = (&mut rig.runner, &rig.slice);
    let h = slice.forward_copies(runner, &batch, &rig.adapters, Input::Tokens, copies, Some(&noise), None).unwrap();
    let exit = slice.exit_losses(runner, &batch, &h, copies).unwrap().sums(runner).unwrap();

    // The same layers as a whole model.
    let short = zofo_ops::llama::ModelConfig { layers: 2, ..config };
    let mut model = zofo_ops::llama::MemoryModel::new(short.clone());
    for name in zofo_ops::llama::ParamName::all(&short) {
        model.set_f32(name, &source.require(name).unwrap().to_f32().unwrap());
    }
    let mut whole = Rig::whole(reference(), &model, &host.layers(0..2));
    let batch = whole.batch(&packed(&short, &LENGTHS));
    let loss = whole.forward_backward(&batch);
    assert_eq!(exit[0] / batch.labels() as f64, loss);
    let (exact, size) = slope(&whole.grads(), &host, &params, 0, Factors::Ab, 0..2);
    assert!((exit[1] / batch.labels() as f64 - exact).abs() < 2e-5 * size);
}
