//! A whole model of random weights, SmolLM2-135M by its shapes: forward, both kinds of training step, prefill and decoding.

use super::loaded::{FirstOrder, Labels, Loaded, SEED, Types, load};
use crate::{Case, Run, Subject, Unit, Work, random, shapes, synthetic::Synthetic};
use std::env;
use zofo_hal::{
    DType, DeviceRef, Result,
    op::Copies,
    perturb::{Direction, Distribution, Domain, NoiseParams},
};
use zofo_ops::{
    batch::DeviceBatch,
    llama::{CachedInput, Factors, Input, KvCache, Perturbation, SliceSpec},
    lora::Adapters,
    optim::{Optimiser, Rule, ZoStep},
};

/// Tokens of a prompt.
const PROMPT: usize = 512;
/// Tokens that a decoded one sees.
const CONTEXT: usize = 128;
const EPSILON: f32 = 1e-3;

/// Directions of a zeroth-order step: `ZOFO_BENCH_DIRECTIONS`, or 4.
fn directions() -> u32 {
    env::var("ZOFO_BENCH_DIRECTIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(4)
}

const TRAINING: [Types; 2] = [Types::F32, Types::BF16];

const INFERENCE: [Types; 5] = [
    TRAINING[0],
    TRAINING[1],
    Types { weights: DType::F16, compute: DType::F32 },
    Types { weights: DType::Q8_0, compute: DType::F32 },
    Types { weights: DType::Q4_1, compute: DType::F32 },
];

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let mut cases = Vec::new();
    for types in TRAINING {
        let batch = format!("{}/{}x{}", types.weights, shapes::SEQUENCES, shapes::TOKENS);
        let q = directions();
        let tokens = Unit::Tokens(shapes::ROWS as u64);
        let mut add = |group: String, variant: &str, work: Work, prepare: fn(Loaded, DeviceBatch) -> Result<Run>, labels: Labels| {
            for s in subjects {
                let who = if variant.is_empty() { s.who.clone() } else { format!("{}+{variant}", s.who) };
                let (device, work) = (s.device.clone(), types.work(work).per(tokens));
                cases.push(Case::new(&group, who, work, move || {
                    let mut model = Loaded::new(&device, &shapes::model(), types)?;
                    let ids = random::tokens(SEED, shapes::ROWS, shapes::VOCAB)?;
                    let sequences: Vec<_> = ids.chunks(shapes::TOKENS).map(|ids| labels.on(ids.to_vec())).collect();
                    let batch = model.batch(&sequences)?;
                    prepare(model, batch)
                }));
            }
        };
        let lengths = [shapes::TOKENS; shapes::SEQUENCES];
        let (all, last) = (Flops::of(&lengths, Labels::All), Flops::of(&lengths, Labels::Last));
        add(format!("forward-loss/{batch}"), "", all.forward(), forward_loss, Labels::All);
        add(format!("fo-step-qv/{batch}"), "", all.first_order(), first_order, Labels::All);
        add(format!("fo-step-qv-last/{batch}"), "", last.first_order(), first_order, Labels::Last);
        add(format!("zo-step-qv/{batch}xq{q}"), "value", all.value(q), zeroth_order_value, Labels::All);
        add(format!("zo-step-qv/{batch}xq{q}"), "tangent", all.tangent(q), zeroth_order_tangent, Labels::All);
        #[cfg(feature = "peers-candle")]
        if types.weights == DType::F32 {
            cases.extend(crate::peers::candle::cases(&format!("forward-loss/{batch}"), all.forward().per(tokens)));
        }
    }
    for types in INFERENCE {
        let bytes = Synthetic::new(shapes::model(), types.weights).bytes();
        for (op, context, tokens, prepare) in [
            ("prefill", PROMPT, PROMPT, prefill as fn(&DeviceRef, Types) -> Result<Run>),
            ("decode", CONTEXT, 1, decode as fn(&DeviceRef, Types) -> Result<Run>),
        ] {
            let flops = tokens * Flops::LINEAR + Flops::head(1) + if tokens > 1 { Flops::attention(1, tokens) } else { 0 };
            let work = types.work(Work::flops(flops, bytes)).per(Unit::Tokens(tokens as u64));
            for s in subjects {
                let device = s.device.clone();
                cases.push(Case::new(format!("{op}/{}/{context}", types.weights), &s.who, work, move || prepare(&device, types)));
            }
        }
    }
    cases
}

/// Operations of a batch; adapters of rank 8 do not count.
pub struct Flops {
    linear: usize,
    head: usize,
    attention: usize,
}

impl Flops {
    /// Of all projections, per row.
    const LINEAR: usize = {
        let (d, kv, f) = (shapes::HIDDEN, shapes::KV_HEADS * shapes::HEAD_DIM, shapes::FFN);
        2 * shapes::LAYERS * (2 * d * d + 2 * d * kv + 3 * d * f)
    };

    fn head(rows: usize) -> usize {
        2 * rows * shapes::HIDDEN * shapes::VOCAB
    }

    /// Of the pairs that the causal mask leaves.
    fn attention(sequences: usize, tokens: usize) -> usize {
        4 * shapes::LAYERS * shapes::HEADS * shapes::HEAD_DIM * sequences * tokens * (tokens + 1) / 2
    }

    /// Of sequences of these lengths.
    pub fn of(lengths: &[usize], labels: Labels) -> Self {
        let sum = |f: &dyn Fn(usize) -> usize| lengths.iter().map(|n| f(*n)).sum();
        let linear = sum(&|n| n * Self::LINEAR);
        let head = sum(&|n| Self::head(labels.count(n)));
        Self { linear, head, attention: sum(&|n| Self::attention(1, n)) }
    }

    pub fn forward(&self) -> Work {
        Work::flops(self.linear + self.head + self.attention, 0)
    }

    /// Gradients of activations alone; the head forms its logits again.
    pub fn first_order(&self) -> Work {
        Work::flops(2 * self.linear + 3 * self.head + self.attention * 7 / 2, 0)
    }

    /// The base and its copies.
    fn value(&self, directions: u32) -> Work {
        let forward = self.forward();
        Work { flops: forward.flops * u64::from(directions + 1), ..forward }
    }

    /// Copies that need twice the products of attention.
    fn tangent(&self, directions: u32) -> Work {
        let value = self.value(directions);
        Work { flops: value.flops + u64::from(directions) * self.attention as u64, ..value }
    }
}

fn forward_loss(mut model: Loaded, batch: DeviceBatch) -> Result<Run> {
    Ok(Box::new(move || model.forward_loss(&batch)))
}

fn first_order(model: Loaded, batch: DeviceBatch) -> Result<Run> {
    let mut model = FirstOrder::new(model)?;
    Ok(Box::new(move || model.step(&batch)))
}

fn zeroth_order_value(model: Loaded, batch: DeviceBatch) -> Result<Run> {
    zeroth_order(model, batch, Copies::value(directions(), true))
}

fn zeroth_order_tangent(model: Loaded, batch: DeviceBatch) -> Result<Run> {
    zeroth_order(model, batch, Copies::tangent(directions()))
}

/// A step on the losses of all copies, A and B perturbed.
fn zeroth_order(model: Loaded, batch: DeviceBatch, copies: Copies) -> Result<Run> {
    let Loaded { mut runner, slice, adapters } = model;
    let noise = NoiseParams::new(SEED, 0, Direction::default(), EPSILON);
    let perturbation = Perturbation::new(&mut runner, &noise, Factors::Ab, Distribution::Gaussian)?;
    let mut optimiser = Optimiser::zeroth_order(&mut runner, &adapters, Rule::SGD, Factors::Ab)?;
    let words: Vec<u32> = (0..copies.count).map(|q| Direction::new(Domain::Main, 0, q).map(Direction::word)).collect::<Result<_>>()?;
    Ok(Box::new(move || {
        let h = slice.forward_copies(&mut runner, &batch, &adapters, Input::Tokens, copies, Some(&perturbation), None)?;
        let sums = slice.loss(&mut runner, &batch, &h, copies, false)?.sums(&mut runner)?;
        let slope = |copy: &f64| match copies.is_tangent(1) {
            true => *copy,
            false => (copy - sums[0]) / f64::from(EPSILON),
        };
        let mean = (copies.count as usize * batch.labels()) as f64;
        let coefficients: Vec<f32> = sums[1..].iter().map(|copy| (slope(copy) / mean) as f32).collect();
        let step = ZoStep { coefficients: &coefficients, directions: &words, noise, distribution: Distribution::Gaussian };
        // So small that the model stays what it is, however often it is run.
        optimiser.step_zo(&mut runner, 1e-9, &step)
    }))
}

/// Logits behind a prompt.
fn prefill(device: &DeviceRef, types: Types) -> Result<Run> {
    let (mut runner, slice) = load(device, &shapes::model(), types, SliceSpec::whole(&shapes::model()))?;
    let mut cache = KvCache::new(&mut runner, &slice, PROMPT)?;
    let (ids, adapters) = (random::tokens(SEED, PROMPT, shapes::VOCAB)?, Adapters::none());
    Ok(Box::new(move || {
        cache.truncate(0);
        let h = slice.forward_cached(&mut runner, &adapters, &mut cache, CachedInput::Tokens(&ids))?;
        let logits = slice.logits(&mut runner, &h.rows(PROMPT - 1, 1))?;
        runner.read_f32(&logits).map(drop)
    }))
}

/// Logits behind one more token.
fn decode(device: &DeviceRef, types: Types) -> Result<Run> {
    let (mut runner, slice) = load(device, &shapes::model(), types, SliceSpec::whole(&shapes::model()))?;
    let mut cache = KvCache::new(&mut runner, &slice, CONTEXT + 1)?;
    let (ids, adapters) = (random::tokens(SEED, CONTEXT + 1, shapes::VOCAB)?, Adapters::none());
    slice.forward_cached(&mut runner, &adapters, &mut cache, CachedInput::Tokens(&ids[..CONTEXT]))?;
    Ok(Box::new(move || {
        cache.truncate(CONTEXT);
        let h = slice.forward_cached(&mut runner, &adapters, &mut cache, CachedInput::Tokens(&ids[CONTEXT..]))?;
        let logits = slice.logits(&mut runner, &h)?;
        runner.read_f32(&logits).map(drop)
    }))
}
