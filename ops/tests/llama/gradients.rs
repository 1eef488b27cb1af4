//! Gradients against finite differences, and the activation list.

use zofo_hal::{
    DType, Usage,
    perturb::{Factor, TensorId},
};
use zofo_ops::{
    llama::{Input, MemoryModel, ModelConfig, RopeScaling, Saved, SliceSpec, WeightSource},
    lora::{Adapters, GradScope, HostAdapter, Targets},
};

use crate::common::*;

fn shifted(host: &HostAdapter, id: TensorId, direction: &[f64], by: f64) -> HostAdapter {
    let mut host = host.clone();
    let m = host.modules.get_mut(&(id.layer() as usize, id.projection())).unwrap();
    let values = if id.factor() == Factor::A { &mut m.a } else { &mut m.b };
    values.iter_mut().zip(direction).for_each(|(v, d)| *v = (f64::from(*v) + by * d) as f32);
    host
}

/// For each tensor, along its gradient and along a random direction, both of length 1.
///
/// Central differences D at eps and eps / 2 are extrapolated, (4 D(eps/2) - D(eps)) / 3, which leaves an error of order eps^4. What remains is
/// noise: each loss is rounded through the layers (some 30 roundings of relative size 2^-24 along a path, of a loss of about 4: 1e-6 or a few)
/// over eps / 2 = 5e-3, so some 4e-4 at worst.
fn check_against_differences(source: &MemoryModel, targets: Targets, tensors: impl Fn(usize) -> bool) {
    let config = source.config().clone();
    let host = adapter(&config, &spec(3, targets));
    let mut rig = Rig::whole(reference(), source, &host);
    let batch = packed(&config, &[7, 4]);
    let batch = rig.batch(&batch);
    rig.forward_backward(&batch);
    let grads = rig.grads();
    assert_eq!(grads.len(), 2 * host.modules.len());
    let eps = 1e-2;
    for (i, (id, g)) in grads.iter().enumerate().filter(|(i, _)| tensors(*i)) {
        assert!(norm(g) > 1e-5, "{id:?}: no gradient");
        for direction in [g.clone(), noise(i as u64, g.len())] {
            let length = norm(&direction);
            let unit: Vec<f64> = direction.iter().map(|d| f64::from(*d) / length).collect();
            let mut at = |by: f64| {
                rig.set(&shifted(&host, *id, &unit, by));
                rig.mean_loss(&batch)
            };
            let mut central = |eps: f64| (at(eps) - at(-eps)) / (2.0 * eps);
            let difference = (4.0 * central(eps / 2.0) - central(eps)) / 3.0;
            let exact: f64 = g.iter().zip(&unit).map(|(g, u)| f64::from(*g) * u).sum();
            assert!(
                (difference - exact).abs() < 4e-4 + 1e-4 * exact.abs(),
                "{targets}, {id:?}: {difference} by differences, {exact} by gradient"
            );
        }
    }
}

#[test]
fn every_target_set_against_finite_differences() {
    for targets in target_sets() {
        // The first and the last layer's tensors, and one between.
        let n = 8 * targets.iter().count();
        check_against_differences(&tiny(), targets, |i| i < n / 4 || i >= n - n / 4 || i == n / 2);
    }
}

#[test]
fn biases_an_untied_head_and_stretched_rotation() {
    let config = ModelConfig {
        qkv_bias: true,
        tie_word_embeddings: false,
        layers: 2,
        rope_scaling: RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 16 },
        ..MemoryModel::tiny_config()
    };
    check_against_differences(&model(config), Targets::ALL, |_| true);
}

#[test]
fn one_key_head_per_query_head_and_one_for_all() {
    for kv_heads in [4, 1] {
        let config = ModelConfig { kv_heads, layers: 2, ..MemoryModel::tiny_config() };
        check_against_differences(&model(config), "k,v".parse().unwrap(), |_| true);
    }
}

#[test]
fn gradients_add_up_over_micro_batches() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let mut rig = Rig::whole(reference(), &source, &host);
    let all = sequences(&config, &[6, 5, 9]);
    let labels = 5 + 4 + 8;
    let whole = zofo_ops::batch::MicroBatch::pack(&config, &all).unwrap();
    let batch = rig.batch(&whole);
    rig.forward_backward(&batch);
    let expected = rig.grads();
    rig.adapters.zero_grad(&mut rig.runner).unwrap();
    for part in [&all[..1], &all[1..]] {
        let part = zofo_ops::batch::MicroBatch::pack(&config, part).unwrap();
        let part = zofo_ops::batch::DeviceBatch::from_host(&mut rig.runner, &part, 1.0 / labels as f32).unwrap();
        rig.step(&part, Input::Tokens, false);
    }
    for ((id, a), (_, b)) in rig.grads().iter().zip(&expected) {
        // The sums are the same but for the place of one rounding.
        assert!(relative(a, b) < 1e-6, "{id:?}: {}", relative(a, b));
    }
}

#[test]
fn what_is_kept_is_what_was_announced() {
    let source = tiny();
    let config = source.config().clone();
    for targets in target_sets() {
        let lora = spec(3, targets);
        let host = adapter(&config, &lora);
        let slice = SliceSpec::new(&config, 0..3).with_backward();
        let plain_and_recomputing = [slice.clone(), slice.with_recompute()];
        for (slice, input_grad) in plain_and_recomputing.into_iter().flat_map(|s| [(s.clone(), false), (s, true)]) {
            let mut rig = Rig::new(reference(), &source, &slice, &host);
            let batch = packed(&config, &[5, 6]);
            let batch = rig.batch(&batch);
            let (_, saved) = rig.slice.forward_saving(&mut rig.runner, &batch, &rig.adapters, Input::Tokens, input_grad).unwrap();
            assert_eq!(saved.held_bytes(), Saved::bytes(&config, &slice, &lora, batch.block_rows(), input_grad), "{targets} {input_grad}");
        }
    }
}

#[test]
fn recomputed_activations_are_the_same_bits() {
    let source = tiny();
    let config = source.config().clone();
    let batch = packed(&config, &[5, 6]);
    let input = noise(2, batch.rows() * config.hidden);
    for (device, compute) in devices().into_iter().flat_map(|d| [DType::F32, DType::Bf16].map(|t| (d.clone(), t))) {
        for targets in target_sets() {
            let host = adapter(&config, &spec(3, targets));
            let plain = SliceSpec::new(&config, 1..4).with_backward().with_compute(compute);
            let [kept, recomputed] = [plain.clone(), plain.with_recompute()].map(|slice| {
                let mut rig = Rig::new(device.clone(), &source, &slice, &host);
                let batch = rig.batch(&batch);
                let h = rig.runner.alloc(DType::F32, batch.block_rows(), config.hidden, Usage::Activations).unwrap();
                rig.runner.upload_f32(&h.rows(0, batch.rows()), &input).unwrap();
                [false, true].map(|input_grad| {
                    let (loss, dx) = rig.step(&batch, Input::Hidden(&h), input_grad);
                    (loss, dx.map(|dx| rig.rows(&dx, &batch)), rig.grads())
                })
            });
            assert!(kept == recomputed, "{targets}, {compute}");
        }
    }
}

#[test]
fn nothing_is_kept_below_the_lowest_adapter() {
    let config = MemoryModel::tiny_config();
    let slice = SliceSpec::whole(&config).with_backward();
    let bytes = |targets: &str| Saved::bytes(&config, &slice, &spec(1, targets.parse().unwrap()), 1, false);
    // Four layers, d = q = 16, k = 8, h = 4, f = 24. A layer that is passed through keeps 4 (2 d) + 4 (q + 2 k) + 4 h + 4 q + 4 (2 f)
    // = 128 + 128 + 16 + 64 + 192 = 528 bytes per row, each adapter 4, and a projection's input where it is not kept anyway.
    assert_eq!(bytes("down"), 3 * 528 + 4 * (4 * 24 + 4));
    assert_eq!(bytes("o"), 3 * 528 + (4 * 16 + 4 * 16 + 4 * 48) + 4 * 4);
    assert_eq!(bytes("q"), 3 * (528 + 64 + 4) + (528 - 64) + 64 + 4);
    // One stream of each layer.
    let slice = SliceSpec::whole(&config).with_backward().with_recompute();
    assert_eq!(Saved::bytes(&config, &slice, &spec(1, Targets::ALL), 1, false), 4 * 64);
}

#[test]
fn gradients_pass_through_adapters_that_are_not_trained() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let top = SliceSpec::new(&config, 2..4).with_backward();
    let input = noise(1, 16 * config.hidden);
    let dx = |trained: bool| {
        let mut rig = Rig::new(reference(), &source, &top, &host);
        if !trained {
            rig.adapters = Adapters::from_host(&mut rig.runner, &rig.slice, &host).unwrap();
        }
        let batch = packed(&config, &[7, 6]);
        let batch = rig.batch(&batch);
        let h = rig.runner.constant_f32(16, config.hidden, &input).unwrap();
        let (loss, dx) = rig.step(&batch, Input::Hidden(&h), true);
        (loss, rig.rows(&dx.unwrap(), &batch))
    };
    let ((loss, with), (same, without)) = (dx(true), dx(false));
    assert_eq!(loss, same);
    // The same sums, rounded in between.
    assert!(relative(&without, &with) < 1e-6);
}

#[test]
fn a_scope_of_gradients_is_what_it_says() {
    let source = tiny();
    let host = adapter(source.config(), &spec(2, Targets::ALL));
    let mut rig = Rig::whole(reference(), &source, &host);
    rig.adapters.enable_grads(&mut rig.runner, GradScope::Guided).unwrap();
    let names: Vec<_> = rig.grads().iter().map(|(id, _)| (id.layer(), id.projection().name(), id.factor())).collect();
    let expected: Vec<_> = (0..4).flat_map(|l| ["o_proj", "down_proj"].map(|p| (l, p, Factor::B))).collect();
    assert_eq!(names, expected);
}
