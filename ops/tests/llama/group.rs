//! Groups of devices that compute layers together: what the members' passes make is what one device makes.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use zofo_hal::{
    DType, DeviceRef, Error, ErrorKind, Result, TensorArg, Usage,
    op::Copies,
    perturb::TensorId,
    reference::{Hostile, HostileConfig},
};
use zofo_ops::{
    Runner,
    batch::MicroBatch,
    llama::{
        CachedInput, Collective, Factors, Importer, Input, KvCache, MemoryModel, ModelConfig, RankActivations, Shard, ShardedSource,
        SliceSpec, WeightSource,
    },
    lora::{GradScope, HostAdapter, Targets},
};

use crate::common::*;

/// A member of a group of threads: each sends its part to all, and all add up the parts in member order.
struct Member {
    to: Vec<Sender<Vec<f32>>>,
    from: Mutex<Vec<Receiver<Vec<f32>>>>,
    calls: AtomicUsize,
}

fn group(members: usize) -> Vec<Arc<Member>> {
    let mut to: Vec<Vec<_>> = (0..members).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<_>> = (0..members).map(|_| Vec::new()).collect();
    for (sender, receiver) in (0..members).flat_map(|s| (0..members).map(move |r| (s, r))) {
        let (tx, rx) = channel();
        to[sender].push(tx);
        from[receiver].push(rx);
    }
    let members = to.into_iter().zip(from);
    members.map(|(to, from)| Arc::new(Member { to, from: Mutex::new(from), calls: AtomicUsize::new(0) })).collect()
}

impl Collective for Member {
    fn all_reduce(&self, runner: &mut Runner, t: &TensorArg, block_rows: usize, live_rows: usize) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let gone = || Error::execution("a member of the group is gone");
        for first in (0..t.spec.rows).step_by(block_rows) {
            let live = t.rows(first, live_rows);
            let mine = runner.read_f32(&live)?;
            self.to.iter().try_for_each(|to| to.send(mine.clone())).map_err(|_| gone())?;
            let mut sum = vec![0.0_f32; mine.len()];
            for from in self.from.lock().unwrap().iter() {
                let part = from.recv().map_err(|_| gone())?;
                assert_eq!(part.len(), sum.len());
                sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
            }
            runner.upload_f32(&live, &sum)?;
            let dead = block_rows - live_rows;
            runner.upload_f32(&t.rows(first + live_rows, dead), &vec![f32::NAN; dead * t.spec.cols])?;
        }
        Ok(())
    }
}

/// What a training step makes.
#[derive(Clone, PartialEq)]
struct Step {
    hidden: Vec<f32>,
    losses: Vec<f32>,
    dx: Option<Vec<f32>>,
    grads: Vec<(TensorId, Vec<f32>)>,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    recompute: bool,
    /// Whether the backward pass is in two parts.
    parts: bool,
    /// Whether the slice starts from tokens, at the first layer; otherwise from hidden states, at the second, and gives their gradient.
    tokens: bool,
    compute: DType,
}

impl Way {
    const PLAIN: Self = Self { recompute: false, parts: false, tokens: false, compute: DType::F32 };

    fn spec(self, config: &ModelConfig) -> SliceSpec {
        let spec = SliceSpec::new(config, usize::from(!self.tokens)..config.layers).with_backward().with_compute(self.compute);
        if self.recompute { spec.with_recompute() } else { spec }
    }

    /// Rows past the live ones are no numbers.
    fn step(self, rig: &mut Rig, batch: &MicroBatch) -> Step {
        let batch = rig.batch(batch);
        let (d, t) = (rig.config().hidden, batch.block_rows());
        assert!(batch.rows() < t);
        let given = rig.runner.alloc(DType::F32, t, d, Usage::Activations).unwrap();
        rig.runner.upload_f32(&given, &vec![f32::NAN; t * d]).unwrap();
        rig.runner.upload_f32(&given.rows(0, batch.rows()), &noise(4, batch.rows() * d)).unwrap();
        let input = if self.tokens { Input::Tokens } else { Input::Hidden(&given) };
        let (runner, slice, adapters) = (&mut rig.runner, &rig.slice, &rig.adapters);
        let (h, saved) = slice.forward_saving(runner, &batch, adapters, input, !self.tokens).unwrap();
        let out = slice.loss(runner, &batch, &h, Copies::BASE, true).unwrap();
        let losses = runner.read_f32(&out.losses).unwrap();
        let dh = slice.loss_backward(runner, &batch, out.saved.unwrap()).unwrap();
        let dx = if self.parts {
            let (dx, kept) = slice.backward_input(runner, &batch, adapters, saved, &dh).unwrap();
            slice.backward_weight(runner, &batch, adapters, kept).unwrap();
            dx
        } else {
            slice.backward(runner, &batch, adapters, saved, &dh).unwrap()
        };
        let dx = dx.map(|dx| rig.rows(&dx, &batch));
        Step { hidden: rig.rows(&h, &batch), losses, dx, grads: rig.grads() }
    }
}

/// A model, its adapter, and the parts of it that members have.
struct Case {
    source: MemoryModel,
    config: ModelConfig,
    host: HostAdapter,
    batch: MicroBatch,
    shards: Vec<Shard>,
}

impl Case {
    fn new(config: ModelConfig, targets: Targets, shares: &[f64]) -> Self {
        let host = adapter(&config, &spec(3, targets));
        let (source, batch) = (model(config.clone()), packed(&config, &[7, 1, 5]));
        Self { source, host, batch, shards: Shard::split(&config, shares).unwrap(), config }
    }

    fn rig(&self, device: DeviceRef, importer: &mut Importer, way: Way, shard: &Shard) -> Rig {
        let source = ShardedSource::new(&self.source, shard.clone()).unwrap();
        let host = shard.adapter(&self.config, &self.host).unwrap();
        Rig::with(Runner::new(device).unwrap(), importer, &source, &way.spec(source.config()), &host)
    }

    fn whole(&self, device: DeviceRef, way: Way) -> Step {
        let mut rig = Rig::new(device, &self.source, &way.spec(&self.config), &self.host);
        way.step(&mut rig, &self.batch)
    }

    /// What `f` makes of every member, each on a thread of its own, and how often each called for a sum.
    fn members<T: Send>(&self, rigs: Vec<Rig>, f: impl Fn(&mut Rig) -> T + Sync) -> (Vec<T>, Vec<usize>) {
        let peers = group(self.shards.len());
        let f = &f;
        let made = thread::scope(|scope| {
            let run = |(mut rig, peer): (Rig, Arc<Member>)| {
                scope.spawn(move || {
                    rig.slice.join(peer.clone());
                    let made = f(&mut rig);
                    (made, peer.calls.load(Ordering::Relaxed))
                })
            };
            let threads: Vec<_> = rigs.into_iter().zip(peers).map(run).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
        });
        made.into_iter().unzip()
    }

    fn steps(&self, device: impl Fn() -> DeviceRef, way: Way) -> (Vec<Step>, Vec<usize>) {
        let rigs = self.shards.iter().map(|s| self.rig(device(), &mut Importer::new(), way, s)).collect();
        self.members(rigs, |rig| way.step(rig, &self.batch))
    }

    /// The members' gradients put together, in member order.
    fn grads(&self, members: &[Step]) -> Vec<(TensorId, Vec<f32>)> {
        let ids = members[0].grads.iter().map(|(id, _)| *id);
        let sum = |(i, id): (usize, TensorId)| {
            let mut sum = vec![0.0; self.host.factor(id).unwrap().len()];
            for (shard, step) in self.shards.iter().zip(members) {
                let (found, grad) = &step.grads[i];
                assert_eq!(*found, id);
                shard.add(&self.config, id, 3, grad, &mut sum).unwrap();
            }
            (id, sum)
        };
        ids.enumerate().map(sum).collect()
    }
}

/// All members have the same bits, and their step is the whole model's within `tolerance`.
fn check(case: &Case, whole: &Step, members: &[Step], tolerance: f64, what: &str) {
    let first = &members[0];
    for m in members {
        assert_eq!(bits(&m.hidden), bits(&first.hidden), "{what}");
        assert_eq!(bits(&m.losses), bits(&first.losses), "{what}");
        assert_eq!(m.dx.as_deref().map(bits), first.dx.as_deref().map(bits), "{what}");
    }
    let close = |found: &[f32], expected: &[f32], of: &str| {
        let error = relative(found, expected);
        assert!(error <= tolerance, "{what}: {of} differ by {error:e}, allowed are {tolerance:e}");
    };
    close(&first.hidden, &whole.hidden, "hidden states");
    close(&first.losses, &whole.losses, "losses");
    assert_eq!(first.dx.is_some(), whole.dx.is_some());
    if let (Some(found), Some(expected)) = (&first.dx, &whole.dx) {
        close(found, expected, "input gradients");
    }
    let grads = case.grads(members);
    assert_eq!(grads.len(), whole.grads.len());
    for ((id, found), (expected_id, expected)) in grads.iter().zip(&whole.grads) {
        assert_eq!(id, expected_id);
        assert!(norm(expected) > 1e-6, "{id:?}: no gradient");
        close(found, expected, &format!("gradients of {id:?}"));
    }
}

/// A device rounds a sum once; n members round each of n parts, and n - 1 sums of them: 2 n roundings, of parts that are some times larger
/// than the sum, say 4. A path goes through 2 such sums per layer forward, and 2 backward, and each meets an error that the ones before
/// have made, which gains of about 1 carry on.
fn tolerance(layers: usize, members: usize, compute: DType) -> f64 {
    let unit = if compute == DType::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-24) };
    (4 * layers * 2 * members * 4) as f64 * unit
}

/// Six query heads in two groups.
fn grouped() -> ModelConfig {
    ModelConfig { heads: 6, kv_heads: 2, intermediate: 40, qkv_bias: true, tie_word_embeddings: false, ..MemoryModel::tiny_config() }
}

const SHARES: [&[f64]; 5] = [&[1.0], &[1.0, 1.0], &[1.0, 2.0], &[5.0, 1.0], &[1.0, 3.0, 2.0]];

#[test]
fn a_group_computes_what_one_device_computes() {
    for shares in SHARES {
        let case = Case::new(grouped(), Targets::ALL, shares);
        for recompute in [false, true] {
            for (parts, tokens) in [(false, false), (true, false), (false, true), (true, true)] {
                let way = Way { recompute, parts, tokens, ..Way::PLAIN };
                let what = format!("{shares:?}, {way:?}");
                let whole = case.whole(reference(), way);
                let (members, calls) = case.steps(reference, way);
                check(&case, &whole, &members, tolerance(4, shares.len(), DType::F32), &what);
                if shares.len() == 1 {
                    assert!(members[0] == whole, "{what}: a group of one is the device itself");
                }
                // Two sums per layer each way, o_proj's again where it is recomputed; below the first layer's q, k and v nobody asks for
                // gradients.
                let layers = if tokens { 4 } else { 3 };
                let expected = layers * (4 + usize::from(recompute)) - usize::from(tokens);
                assert!(calls.iter().all(|c| *c == expected), "{what}: {calls:?} sums, expected {expected}");
            }
        }
    }
}

#[test]
fn every_target_set_and_kind_of_group() {
    let eight = ModelConfig { heads: 8, intermediate: 64, ..MemoryModel::tiny_config() };
    for targets in target_sets() {
        // Two copies of the second key head beside one of the first; one key head for all; a key head each.
        for (config, shares) in [
            (eight.clone(), [1.0, 3.0]),
            (ModelConfig { kv_heads: 1, ..MemoryModel::tiny_config() }, [1.0, 2.0]),
            (ModelConfig { kv_heads: 4, ..MemoryModel::tiny_config() }, [3.0, 1.0]),
        ] {
            let case = Case::new(config, targets, &shares);
            let whole = case.whole(reference(), Way::PLAIN);
            let (members, _) = case.steps(reference, Way::PLAIN);
            check(&case, &whole, &members, tolerance(4, 2, DType::F32), &format!("{targets}"));
        }
    }
}

#[test]
fn a_group_of_cpu_devices() {
    let case = Case::new(grouped(), Targets::ALL, &[1.0, 3.0, 2.0]);
    for compute in [DType::F32, DType::Bf16] {
        let way = Way { compute, recompute: true, ..Way::PLAIN };
        let whole = case.whole(cpu(), way);
        let (members, _) = case.steps(cpu, way);
        // In bf16 every activation is rounded, not the sums alone: some ten roundings per layer and direction, as on one device.
        let tolerance = if compute == DType::F32 { tolerance(4, 3, compute) } else { 40.0 / 256.0 };
        check(&case, &whole, &members, tolerance, &format!("{compute}"));
    }
}

#[test]
fn members_on_one_device_with_one_importer() {
    let case = Case::new(grouped(), Targets::ALL, &[1.0, 2.0]);
    let (apart, _) = case.steps(reference, Way::PLAIN);
    let (device, mut importer) = (reference(), Importer::new());
    let rigs = case.shards.iter().map(|s| case.rig(device.clone(), &mut importer, Way::PLAIN, s)).collect();
    let (together, _) = case.members(rigs, |rig| Way::PLAIN.step(rig, &case.batch));
    assert!(apart == together);
}

/// A queue that runs late and out of step with its host sees the sums in their place.
#[test]
fn a_group_of_hostile_devices() {
    let case = Case::new(grouped(), Targets::ALL, &[1.0, 3.0, 2.0]);
    let way = Way { recompute: true, parts: true, ..Way::PLAIN };
    let (expected, _) = case.steps(reference, way);
    let (found, _) = case.steps(|| Hostile::new(HostileConfig::seeded(5)), way);
    assert!(found == expected);
}

/// Each block of an activation has its own live rows.
#[test]
fn copies_that_start_apart() {
    let case = Case::new(grouped(), Targets::ALL, &[1.0, 2.0]);
    let forward = |rig: &mut Rig, copies: Copies| {
        let batch = rig.batch(&case.batch);
        let (t, n) = (batch.block_rows(), batch.rows());
        let given = rig.runner.alloc(DType::F32, 2 * t, 16, Usage::Activations).unwrap();
        rig.runner.upload_f32(&given, &vec![f32::NAN; 2 * t * 16]).unwrap();
        for block in [0, 1] {
            rig.runner.upload_f32(&given.rows(block * t, n), &noise(4 + block as u64, n * 16)).unwrap();
        }
        let (runner, slice) = (&mut rig.runner, &rig.slice);
        let h = slice.forward_copies(runner, &batch, &rig.adapters, Input::Hidden(&given), copies, None, None).unwrap();
        [0, 1].map(|block| runner.read_f32(&h.rows(block * t, n)).unwrap())
    };
    for copies in [Copies::value(1, true), Copies::tangent(1)] {
        let whole = forward(&mut Rig::new(reference(), &case.source, &Way::PLAIN.spec(&case.config), &case.host), copies);
        let rigs = case.shards.iter().map(|s| case.rig(reference(), &mut Importer::new(), Way::PLAIN, s)).collect();
        let (members, _) = case.members(rigs, |rig| forward(rig, copies));
        assert_eq!(members[0].each_ref().map(|h| bits(h)), members[1].each_ref().map(|h| bits(h)));
        for (found, expected) in members[0].iter().zip(&whole) {
            assert!(relative(found, expected) <= tolerance(3, 2, DType::F32), "{copies:?}: {:e}", relative(found, expected));
        }
    }
}

/// The guided estimate is linear in the rank-r activations, of which each member has its part of the sum.
#[test]
fn guided_estimates_add_up() {
    let case = Case::new(grouped(), Targets::ALL, &[1.0, 3.0, 2.0]);
    let way = Way { tokens: true, ..Way::PLAIN };
    let guide = |rig: &mut Rig| {
        rig.adapters.enable_grads(&mut rig.runner, GradScope::Guided).unwrap();
        let batch = rig.batch(&case.batch);
        let delta = rig.runner.constant_f32(batch.block_rows(), 16, &noise(8, batch.block_rows() * 16)).unwrap();
        let (runner, slice, adapters) = (&mut rig.runner, &rig.slice, &rig.adapters);
        let mut kept = RankActivations::new();
        let h = slice.forward_copies(runner, &batch, adapters, Input::Tokens, Copies::value(1, true), None, Some(&mut kept)).unwrap();
        adapters.guide(runner, &batch, &delta, &kept).unwrap();
        let copy = runner.read_f32(&h.rows(batch.block_rows(), batch.rows())).unwrap();
        let hidden = rig.rows(&h, &batch);
        assert_eq!(bits(&copy), bits(&hidden));
        Step { hidden, losses: Vec::new(), dx: None, grads: rig.grads() }
    };
    let whole = guide(&mut Rig::new(reference(), &case.source, &way.spec(&case.config), &case.host));
    let rigs = case.shards.iter().map(|s| case.rig(reference(), &mut Importer::new(), way, s)).collect();
    let (members, _) = case.members(rigs, guide);
    check(&case, &whole, &members, tolerance(4, 3, DType::F32), "guided");
}

#[test]
fn what_a_group_does_not_do_is_refused() {
    let case = Case::new(grouped(), Targets::ALL, &[1.0]);
    let way = Way { tokens: true, ..Way::PLAIN };
    let mut rig = case.rig(reference(), &mut Importer::new(), way, &case.shards[0]);
    rig.slice.join(group(1).remove(0));
    let mut cache = KvCache::new(&mut rig.runner, &rig.slice, 8).unwrap();
    let cached = rig.slice.forward_cached(&mut rig.runner, &rig.adapters, &mut cache, CachedInput::Tokens(&[1, 2]));
    let e = cached.unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::InvalidArgument);
    assert!(e.to_string().contains("do not decode"), "{e}");
    let noise = perturbation(&mut rig, &directions(1e-3), Factors::B);
    let batch = rig.batch(&case.batch);
    let mut run = |copies: Copies| {
        rig.slice.forward_copies(&mut rig.runner, &batch, &rig.adapters, Input::Tokens, copies, Some(&noise), None).map(|_| ())
    };
    let e = run(Copies::tangent(2)).unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::Unsupported);
    assert!(e.to_string().contains("cannot be perturbed"), "{e}");
    run(Copies::BASE).unwrap();
}
