//! What the tests of models share: a model on a device, a batch, one training step by hand.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::ops::Range;

use zofo_cpu::{CpuDevice, CpuOptions};
use zofo_hal::{DeviceRef, TensorArg, op::Copies, perturb::*, reference::Reference};
use zofo_ops::{
    Runner,
    batch::{Capacity, DeviceBatch, MicroBatch, Sequence},
    llama::{Factors, Importer, Input, MemoryModel, ModelConfig, Perturbation, Slice, SliceSpec, WeightSource},
    lora::{Adapters, GradScope, HostAdapter, LoraSpec, Targets},
};

pub fn reference() -> DeviceRef {
    Reference::new()
}

/// Two threads, the fastest instruction set.
pub fn cpu() -> DeviceRef {
    CpuDevice::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

/// Plain loops with f64 accumulation, and the SIMD backend.
pub fn devices() -> [DeviceRef; 2] {
    [reference(), cpu()]
}

pub fn model(config: ModelConfig) -> MemoryModel {
    MemoryModel::random(config, 3).unwrap()
}

/// Grouped queries, tied head.
pub fn tiny() -> MemoryModel {
    model(MemoryModel::tiny_config())
}

/// Numbers in -1 .. 1 that only `seed` decides.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    (0..n.div_ceil(4) as u32)
        .flat_map(|b| philox4x32_10([b, 0, 0, 77], [seed as u32, 5]))
        .take(n)
        .map(|w| (w >> 8) as f32 / 8_388_608.0 - 1.0)
        .collect()
}

pub fn tokens(seed: u64, n: usize, vocab: usize) -> Vec<u32> {
    noise(seed, n).iter().map(|x| ((x + 1.0) / 2.0 * vocab as f32) as u32 % vocab as u32).collect()
}

/// Sequences of these lengths, all but the first tokens labelled.
pub fn sequences(config: &ModelConfig, lengths: &[usize]) -> Vec<Sequence> {
    lengths.iter().enumerate().map(|(i, n)| Sequence::predicting(tokens(i as u64 + 1, *n, config.vocab), 0)).collect()
}

/// An adapter whose B is not 0, so that every gradient is not 0 either.
pub fn adapter(config: &ModelConfig, spec: &LoraSpec) -> HostAdapter {
    let mut host = HostAdapter::init(config, 0..config.layers, spec, 9).unwrap();
    for (i, m) in host.modules.values_mut().enumerate() {
        m.b = noise(100 + i as u64, m.b.len()).iter().map(|x| 0.3 * x).collect();
    }
    host
}

pub struct Rig {
    pub runner: Runner,
    pub slice: Slice,
    pub adapters: Adapters,
}

impl Rig {
    pub fn new(device: DeviceRef, source: &dyn WeightSource, spec: &SliceSpec, host: &HostAdapter) -> Self {
        Self::with(Runner::new(device).unwrap(), &mut Importer::new(), source, spec, host)
    }

    pub fn with(mut runner: Runner, importer: &mut Importer, source: &dyn WeightSource, spec: &SliceSpec, host: &HostAdapter) -> Self {
        let slice = Slice::load(&mut runner, importer, source, spec).unwrap();
        let mut adapters = Adapters::from_host(&mut runner, &slice, host).unwrap();
        if spec.backward {
            adapters.enable_grads(&mut runner, GradScope::All).unwrap();
        }
        Self { runner, slice, adapters }
    }

    pub fn whole(device: DeviceRef, source: &MemoryModel, host: &HostAdapter) -> Self {
        Self::new(device, source, &SliceSpec::whole(source.config()).with_backward(), host)
    }

    pub fn config(&self) -> ModelConfig {
        self.slice.config().clone()
    }

    pub fn batch(&mut self, batch: &MicroBatch) -> DeviceBatch {
        DeviceBatch::from_host(&mut self.runner, batch, 1.0 / batch.labels().max(1) as f32).unwrap()
    }

    pub fn batch_of(&mut self, batch: &MicroBatch, capacity: Capacity) -> DeviceBatch {
        let mut device = DeviceBatch::new(&mut self.runner, capacity).unwrap();
        device.upload(&mut self.runner, batch, 1.0 / batch.labels().max(1) as f32).unwrap();
        device
    }

    /// Live rows of an activation's first block.
    pub fn rows(&mut self, t: &TensorArg, batch: &DeviceBatch) -> Vec<f32> {
        self.runner.read_f32(&t.rows(0, batch.rows())).unwrap()
    }

    pub fn set(&mut self, host: &HostAdapter) {
        self.adapters.restore(&mut self.runner, host).unwrap();
    }

    /// Mean loss of the adapted model.
    pub fn mean_loss(&mut self, batch: &DeviceBatch) -> f64 {
        let h = self.slice.forward(&mut self.runner, batch, &self.adapters, Input::Tokens).unwrap();
        self.head_loss(batch, &h)
    }

    pub fn head_loss(&mut self, batch: &DeviceBatch, h: &TensorArg) -> f64 {
        let out = self.slice.loss(&mut self.runner, batch, h, Copies::BASE, false).unwrap();
        out.sums(&mut self.runner).unwrap()[0] / batch.labels() as f64
    }

    /// Mean loss, and gradients left in the adapters, which are cleared first.
    pub fn forward_backward(&mut self, batch: &DeviceBatch) -> f64 {
        self.adapters.zero_grad(&mut self.runner).unwrap();
        let (loss, dx) = self.step(batch, Input::Tokens, false);
        assert!(dx.is_none());
        loss
    }

    pub fn step(&mut self, batch: &DeviceBatch, input: Input<'_>, input_grad: bool) -> (f64, Option<TensorArg>) {
        let (h, saved) = self.slice.forward_saving(&mut self.runner, batch, &self.adapters, input, input_grad).unwrap();
        let out = self.slice.loss(&mut self.runner, batch, &h, Copies::BASE, true).unwrap();
        let loss = out.sums(&mut self.runner).unwrap()[0] / batch.labels() as f64;
        let dh = self.slice.loss_backward(&mut self.runner, batch, out.saved.unwrap()).unwrap();
        let dx = self.slice.backward(&mut self.runner, batch, &self.adapters, saved, &dh).unwrap();
        (loss, dx)
    }

    /// Gradients by tensor, in canonical order.
    pub fn grads(&mut self) -> Vec<(TensorId, Vec<f32>)> {
        let tensors = self.adapters.tensors().unwrap();
        let with = tensors.into_iter().filter_map(|t| t.grad.map(|g| (t.id, g)));
        with.map(|(id, g)| (id, self.runner.read_f32(&g).unwrap())).collect()
    }
}

pub fn packed(config: &ModelConfig, lengths: &[usize]) -> MicroBatch {
    MicroBatch::pack(config, &sequences(config, lengths)).unwrap()
}

/// z of a whole tensor, as the contract defines it.
pub fn z(params: &NoiseParams, copy: u32, id: TensorId, cols: usize, len: usize) -> Vec<f32> {
    let noise = params.noise(copy, Site::new(id, cols as u32), Tier::detect());
    let mut out = vec![0.0; len];
    noise.z_into(0, 0, &mut out);
    out
}

/// The adapter moved along a direction, by the contract's two roundings.
pub fn moved(host: &HostAdapter, params: &NoiseParams, copy: u32, factors: Factors) -> HostAdapter {
    let mut host = host.clone();
    for ((layer, p), m) in &mut host.modules {
        for (factor, values) in [(Factor::A, &mut m.a), (Factor::B, &mut m.b)] {
            if factors.contains(factor) {
                let cols = if factor == Factor::A { values.len() / m.rank } else { m.rank };
                let id = TensorId::new(*layer as u32, *p, factor).unwrap();
                let z = z(params, copy, id, cols, values.len());
                values.iter_mut().zip(z).for_each(|(v, z)| *v += params.epsilon * z);
            }
        }
    }
    host
}

/// Inner product of gradients and a direction, over the layers in `layers`, and the sum of its terms' magnitudes.
pub fn slope(
    grads: &[(TensorId, Vec<f32>)],
    host: &HostAdapter,
    params: &NoiseParams,
    copy: u32,
    factors: Factors,
    layers: Range<usize>,
) -> (f64, f64) {
    let (mut sum, mut size) = (0.0, 0.0);
    for (id, g) in grads.iter().filter(|(id, _)| factors.contains(id.factor()) && layers.contains(&(id.layer() as usize))) {
        let m = &host.modules[&(id.layer() as usize, id.projection())];
        let cols = if id.factor() == Factor::A { g.len() / m.rank } else { m.rank };
        for (g, z) in g.iter().zip(z(params, copy, *id, cols, g.len())) {
            let term = f64::from(*g) * f64::from(z);
            (sum, size) = (sum + term, size + term.abs());
        }
    }
    (sum, size)
}

pub fn directions(epsilon: f32) -> NoiseParams {
    NoiseParams::new(0x1234_5678_9abc, 17, Direction::new(Domain::Main, 3, 5).unwrap(), epsilon)
}

pub fn perturbation(rig: &mut Rig, params: &NoiseParams, factors: Factors) -> Perturbation {
    Perturbation::new(&mut rig.runner, params, factors, Distribution::Gaussian).unwrap()
}

pub fn spec(rank: usize, targets: Targets) -> LoraSpec {
    LoraSpec::new(rank, 2.0 * rank as f32, targets)
}

/// Every single projection, the usual pair, one of every group, all.
pub fn target_sets() -> Vec<Targets> {
    let mut sets: Vec<Targets> = Projection::ALL.iter().map(|p| Targets::NONE.with(*p)).collect();
    sets.extend(["q,v", "k,o,up,down", "o,down", "all"].map(|t| t.parse::<Targets>().unwrap()));
    sets
}

pub fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

pub fn norm(v: &[f32]) -> f64 {
    v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// Norm of the difference over the norm of `b`.
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let d: Vec<f32> = a.iter().zip(b).map(|(x, y)| x - y).collect();
    norm(&d) / norm(b).max(1e-30)
}
