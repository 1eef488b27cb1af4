//! The runner itself: memory, transfers, recording, errors, and that asking and running agree.

use crate::harness::primitives;
use zofo_hal::{
    DType, DTypeUsage, Device, DeviceInfo, DeviceRef, ErrorKind, Features, Lacking, Limits, MemorySpace, MemoryStats, Op, Queue, Result,
    Support, TensorArg, TensorSpec, Usage, Uses, WeightData, WeightRef, WeightSpec,
    op::{
        Copies, CrossEntropy, Embedding, Fill, HyperParams, LoraMatMul, MapFunction, MatMul, Mul, Orientation, RmsNorm, ScaledAdd, Sgd,
        SwiGlu,
    },
    reference::{Fault, Hostile, HostileConfig, Reference},
};
use zofo_ops::{Runner, lookup_uses, support};

fn reference() -> DeviceRef {
    Reference::new()
}

fn runner() -> Runner {
    Runner::new(reference()).unwrap()
}

fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32 - 2.0).collect()
}

#[test]
fn temporaries_are_reused_once_dropped() {
    let mut r = runner();
    let first = r.temp(DType::F32, 10, 10).unwrap();
    let view = first.rows(2, 3);
    let second = r.temp(DType::F32, 10, 10).unwrap();
    assert!(!std::sync::Arc::ptr_eq(&first.buffer, &second.buffer));
    let old = first.buffer.clone();
    drop(first);
    let third = r.temp(DType::F32, 10, 10).unwrap();
    assert!(!std::sync::Arc::ptr_eq(&old, &third.buffer), "a view still holds it");
    let address = std::sync::Arc::as_ptr(&old).cast::<u8>();
    drop((view, old));
    // Another shape of the same size class.
    let fourth = r.temp(DType::F16, 7, 28).unwrap();
    assert_eq!(std::sync::Arc::as_ptr(&fourth.buffer).cast::<u8>(), address);
    assert_eq!((fourth.offset, fourth.buffer.usage()), (0, Usage::Activations));
}

#[test]
fn a_frozen_temporary_leaves_the_pool() {
    let mut r = runner();
    let t = r.temp(DType::F32, 4, 4).unwrap();
    t.buffer.freeze().unwrap();
    drop(t);
    let t = r.temp(DType::F32, 4, 4).unwrap();
    r.upload_f32(&t, &ramp(16)).unwrap();
    drop(t);
    r.trim();
    assert_eq!(r.stats().pool_bytes, 0);
}

fn step(r: &mut Runner, x: &TensorArg, gamma: &TensorArg) -> Result<TensorArg> {
    let [rows, cols] = x.spec.shape();
    let normed = r.temp(DType::F32, rows, cols)?;
    r.run(RmsNorm::new(x.clone(), gamma.clone(), normed.clone(), 1e-5))?;
    let out = r.temp(DType::F32, rows, cols)?;
    r.run(SwiGlu::new(normed.clone(), normed, out.clone()))?;
    Ok(out)
}

#[test]
fn a_steady_step_allocates_nothing() {
    for device in [reference(), primitives(reference())] {
        let (before, after, _) = steady(&device);
        assert_eq!(after, before, "{}", device.info().name);
    }
}

/// On an asynchronous device a buffer is free when its last op is done, so a step takes more buffers the further the device lags behind; one more
/// for each op at most, however many steps there are.
#[test]
fn steps_of_a_device_that_lags_take_no_more_buffers_than_they_have_ops() {
    let ((first, _), (later, _), ops) = steady(&primitives(Hostile::new(HostileConfig::seeded(7))));
    assert!(later <= first + ops, "{first} buffers after one step, {later} after four, of {ops} ops each");
}

/// Allocations and pooled bytes after one step and after four, and the ops of a step.
fn steady(device: &DeviceRef) -> ((u64, u64), (u64, u64), u64) {
    let mut r = Runner::new(device.clone()).unwrap();
    let (x, gamma) = (r.constant_f32(5, 8, &ramp(40)).unwrap(), r.constant_f32(1, 8, &ramp(8)).unwrap());
    let begin = r.stats().submitted;
    let out = step(&mut r, &x, &gamma).unwrap();
    let ops = r.stats().submitted - begin;
    let first = r.read_f32(&out).unwrap();
    drop(out);
    r.synchronize().unwrap();
    let before = (device.memory().allocations, r.stats().pool_bytes);
    for _ in 0..3 {
        let out = step(&mut r, &x, &gamma).unwrap();
        assert_eq!(r.read_f32(&out).unwrap(), first);
        r.synchronize().unwrap();
    }
    let after = (device.memory().allocations, r.stats().pool_bytes);
    r.close().unwrap();
    (before, after, ops)
}

#[test]
fn a_decomposed_step_is_recorded_and_replayed() {
    for device in [primitives(reference()), primitives(Hostile::new(HostileConfig::seeded(3)))] {
        let mut r = Runner::new(device.clone()).unwrap();
        let x = r.alloc(DType::F32, 5, 8, Usage::Activations).unwrap();
        let gamma = r.constant_f32(1, 8, &ramp(8)).unwrap();
        let out = r.alloc(DType::F32, 5, 8, Usage::Activations).unwrap();
        let record = |r: &mut Runner| -> Result<()> {
            let last = step(r, &x, &gamma)?;
            r.run(ScaledAdd::new(last, out.clone()))
        };
        let expect = |r: &mut Runner, scale: f32| {
            let values: Vec<f32> = ramp(40).iter().map(|v| v * scale).collect();
            r.upload_f32(&x, &values).unwrap();
            values
        };
        expect(&mut r, 1.0);
        record(&mut r).unwrap();
        r.synchronize().unwrap();
        let eager = r.read_f32(&out).unwrap();
        let pool = r.stats().pool_bytes;
        r.begin_recording().unwrap();
        record(&mut r).unwrap();
        let recording = r.end_recording().unwrap();
        assert_eq!(r.stats().pool_bytes, pool, "temporaries are reused within a recording");

        expect(&mut r, -3.0);
        r.replay(&recording).unwrap();
        let other = r.read_f32(&out).unwrap();
        assert_ne!(other, eager);
        // Ops between replays do not disturb the recording's memory, nor it theirs.
        let apart = step(&mut r, &x, &gamma).unwrap();
        expect(&mut r, 1.0);
        r.replay(&recording).unwrap();
        assert_eq!(r.read_f32(&out).unwrap(), eager);
        assert_eq!(r.read_f32(&apart).unwrap(), other);
        r.close().unwrap();
    }
}

#[test]
fn an_update_on_the_host_cannot_be_recorded() {
    let mut r = Runner::new(primitives(reference())).unwrap();
    let (grad, hyper) = (r.constant_f32(2, 2, &ramp(4)).unwrap(), r.constant_f32(1, HyperParams::LEN, &[0.5; 12]).unwrap());
    let param = r.alloc(DType::F32, 2, 2, Usage::Weights).unwrap();
    r.begin_recording().unwrap();
    let e = r.run(Sgd::new(grad.clone(), hyper.clone(), param.clone())).unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::Unsupported);
    assert!(e.to_string().contains("cannot be recorded"), "{e}");
    r.end_recording().unwrap();
    r.upload_f32(&param, &[1.0; 4]).unwrap();
    r.run(Sgd::new(grad, hyper, param.clone())).unwrap();
    // 0.5 * 1 - 0.5 * (0.5 * g)
    assert_eq!(r.read_f32(&param).unwrap(), [1.0, 0.75, 0.5, 0.25]);
}

#[test]
fn values_go_through_any_type_and_stride() {
    let mut r = runner();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let whole = r.constant(dtype, 4, 6, &ramp(24)).unwrap();
        assert_eq!(r.read_f32(&whole).unwrap(), ramp(24));
        let view = whole.rows(1, 2).cols(2, 3);
        assert_eq!(r.read_f32(&view).unwrap(), [6.0, 7.0, 8.0, 12.0, 13.0, 14.0]);
        assert_eq!(r.read_bytes(&view).unwrap().len(), 6 * dtype.block().1);
        assert!(r.upload_f32(&whole, &ramp(24)).is_err(), "frozen");
        let t = r.temp(dtype, 3, 4).unwrap();
        r.upload_f32(&t, &[1.0; 12]).unwrap();
        r.upload_f32(&t.cols(1, 2), &[2.0; 6]).unwrap();
        assert_eq!(r.read_f32(&t).unwrap(), [1.0, 2.0, 2.0, 1.0].repeat(3));
    }
    let words = r.constant_u32(1, 3, &[1, 2, u32::MAX]).unwrap();
    assert_eq!(r.read_u32(&words.cols(1, 2)).unwrap(), [2, u32::MAX]);
    assert!(r.read_f32(&words).is_err());
    assert!(r.constant_f32(2, 2, &[0.0; 3]).is_err());
    let empty = r.constant_f32(0, 7, &[]).unwrap();
    assert!(r.read_f32(&empty).unwrap().is_empty());
}

#[test]
fn close_returns_what_failed() {
    let device = Hostile::new(HostileConfig::seeded(1).fault(Fault::ExecutionOf { op: "mul", nth: 0 }));
    let mut r = Runner::new(primitives(device)).unwrap();
    let gate = r.constant_f32(2, 2, &ramp(4)).unwrap();
    let out = r.temp(DType::F32, 2, 2).unwrap();
    r.run(SwiGlu::new(gate.clone(), gate, out)).unwrap();
    let e = r.close().unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Execution { .. }), "{e}");
    assert_eq!(e.op().unwrap().op, "mul");
}

#[test]
fn wrong_arguments_of_a_composite_are_named() {
    let mut r = Runner::new(primitives(reference())).unwrap();
    let x = r.constant_f32(2, 2, &ramp(4)).unwrap();
    let e = r.run(SwiGlu::new(x.clone(), x.clone(), x.clone())).unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::InvalidArgument, "a frozen output: {e}");
    let wide = r.temp(DType::F32, 2, 3).unwrap();
    let e = r.run(SwiGlu::new(x.clone(), x, wide)).unwrap_err();
    assert_eq!((e.kind(), e.op().unwrap().op), (&ErrorKind::InvalidArgument, "swiglu"), "{e}");
    assert_eq!(r.stats().submitted, 0);
}

/// A device without some ops.
struct Without {
    inner: DeviceRef,
    lacks: fn(&Op<TensorSpec>) -> bool,
}

impl Device for Without {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn features(&self) -> Features {
        self.inner.features()
    }
    fn space(&self) -> MemorySpace {
        self.inner.space()
    }
    fn dtype_usage(&self, dtype: DType) -> DTypeUsage {
        self.inner.dtype_usage(dtype)
    }
    fn supports(&self, op: &Op<TensorSpec>) -> Support {
        if (self.lacks)(op) { Support::lacking(Lacking::Op, "taken away") } else { self.inner.supports(op) }
    }
    fn workspace(&self, op: &Op<TensorSpec>) -> usize {
        self.inner.workspace(op)
    }
    fn create_queue(&self) -> Result<Box<dyn Queue>> {
        self.inner.create_queue()
    }
    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef> {
        self.inner.import_weight(spec, data)
    }
    fn memory(&self) -> MemoryStats {
        self.inner.memory()
    }
}

fn without(lacks: fn(&Op<TensorSpec>) -> bool) -> DeviceRef {
    std::sync::Arc::new(Without { inner: primitives(reference()), lacks })
}

fn weight(r: &Runner, rows: usize, cols: usize, uses: Uses) -> WeightRef {
    let spec = WeightSpec { dtype: DType::F32, rows, cols, uses };
    let values: Vec<u8> = (0..rows * cols).flat_map(|i| ((i % 7) as f32 - 3.0).to_ne_bytes()).collect();
    r.device().import_weight(&spec, WeightData::Borrowed(&values)).unwrap()
}

/// A few ops of every kind of decomposition, over small tensors.
fn samples(r: &mut Runner) -> Vec<Op<TensorArg>> {
    let x = r.constant_f32(4, 6, &ramp(24)).unwrap();
    let half = r.constant(DType::F16, 4, 6, &ramp(24)).unwrap();
    let [a, b] = [r.constant_f32(2, 6, &ramp(12)).unwrap(), r.constant_f32(5, 2, &ramp(10)).unwrap()];
    let gamma = r.constant_f32(1, 6, &ramp(6)).unwrap();
    let ids = r.constant_u32(1, 4, &[0, 3, 1, 1]).unwrap();
    let live = r.constant_u32(1, 1, &[2]).unwrap();
    let w = [Uses::FORWARD, Uses::TRAINING, Uses { gather: true, ..Uses::default() }, Uses::ALL].map(|u| weight(r, 5, 6, u));
    let mut out = |rows, cols| r.alloc(DType::F32, rows, cols, Usage::Activations).unwrap();
    let mut ops: Vec<Op<TensorArg>> = vec![
        RmsNorm::new(x.clone(), gamma.clone(), out(4, 6), 1e-5).into(),
        RmsNorm::new(half.clone(), gamma, out(4, 6), 1e-5).copies(Copies::tangent(1)).live(live.clone()).into(),
        SwiGlu::new(half, x.clone(), out(4, 6)).into(),
    ];
    for w in &w {
        ops.push(Embedding::new(ids.clone(), w, out(4, 6)).into());
        ops.push(Embedding::new(ids.clone(), w, out(4, 6)).live(live.clone()).into());
        ops.push(LoraMatMul::new(x.clone(), a.clone(), b.clone(), w, out(4, 5), 1.0).into());
        ops.push(MatMul::new(out(4, 5), w, out(4, 6), Orientation::Nn).into());
        ops.push(CrossEntropy::new(x.clone(), ids.cols(0, 3), ids.cols(0, 3), w, out(1, 3)).into());
    }
    ops
}

#[test]
fn what_support_promises_runs_and_nothing_else() {
    let lacks: [fn(&Op<TensorSpec>) -> bool; 8] = [
        |_| false,
        |op| matches!(op, Op::MatMul(_)),
        |op| matches!(op, Op::MatMul(m) if m.orientation == Orientation::Nn),
        |op| matches!(op, Op::Map(m) if m.function == MapFunction::Rsqrt),
        |op| matches!(op, Op::ArgMax(_) | Op::GatherRows(_)),
        |op| matches!(op, Op::ScaledAdd(_) | Op::Copy(_)),
        |op| matches!(op, Op::Mul(Mul { live: Some(_), .. })),
        |op| matches!(op, Op::Fill(_)),
    ];
    let (mut ran, mut refused) = (0, 0);
    for lacks in lacks {
        let device = without(lacks);
        let mut r = Runner::new(device.clone()).unwrap();
        for op in samples(&mut r) {
            let answer = support(&*device, &op.spec());
            let outcome = r.run(op.clone()).and_then(|()| r.synchronize());
            match (&answer, &outcome) {
                (Support::Unsupported { reason, .. }, Err(e)) => {
                    refused += 1;
                    assert_eq!(*e.kind(), ErrorKind::Unsupported, "{e}");
                    assert!(!reason.is_empty() && e.op().is_some() && e.device() == Some("primitives"), "{e}");
                }
                (Support::Native | Support::Emulated { .. }, Ok(())) => ran += 1,
                _ => panic!("{op:?}: promised {answer:?}, came {outcome:?}"),
            }
        }
    }
    assert!(ran > 50 && refused > 50, "{ran} ran, {refused} were refused");
}

#[test]
fn support_refuses_what_does_not_fit_together() {
    let device = reference();
    let op = Fill::new(TensorSpec::new(DType::Q8_0, 1, 32), 0.0);
    assert!(!support(&*device, &op.into()).runs());
}

#[test]
fn a_product_with_the_transposed_weight_goes_through_the_weight() {
    let mut r = runner();
    let w = weight(&r, 5, 300, Uses::FORWARD);
    let x = r.constant_f32(3, 5, &ramp(15)).unwrap();
    let bias = r.constant_f32(1, 300, &[0.5; 300]).unwrap();
    let out = r.temp(DType::F32, 3, 300).unwrap();
    r.upload_f32(&out, &[2.0; 900]).unwrap();
    let op = MatMul::new(x, w, out.clone(), Orientation::Nn).alpha(3.0).beta(0.25).bias(bias);
    r.run(op).unwrap();
    assert_eq!(r.stats().decomposed, 1);
    let got = r.read_f32(&out).unwrap();
    for (i, row) in got.chunks_exact(300).enumerate() {
        for (j, got) in row.iter().enumerate() {
            // Whole numbers and halves: exact.
            let product: f32 = (0..5).map(|k| ((i * 5 + k) as f32 - 2.0) * (((k * 300 + j) % 7) as f32 - 3.0)).sum();
            assert_eq!(*got, 3.0 * product + 0.5 + 0.5, "[{i}, {j}]");
        }
    }
}

#[test]
fn tables_are_imported_for_what_the_device_can_do_with_them() {
    let gather = Uses { gather: true, ..Uses::default() };
    assert_eq!(lookup_uses(&*reference(), DType::F16, 100, 8), gather);
    assert_eq!(lookup_uses(&*primitives(reference()), DType::F16, 100, 8), Uses { nn: true, ..Uses::default() });
    let device = without(|op| matches!(op, Op::MatMul(m) if m.orientation == Orientation::Nn));
    assert_eq!(lookup_uses(&*device, DType::F16, 100, 8), Uses::FORWARD);
}
