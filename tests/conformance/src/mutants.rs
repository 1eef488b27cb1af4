//! Does the kit notice? Devices that are wrong in one way each, and the tests that must fail on them.

use crate::{
    check::{Bench, Outcome},
    suite::{Body, Tests},
};
use std::{sync::Arc, time::Duration};
use zofo_hal::{
    BufferRef, DType, DTypeUsage, Device, DeviceInfo, DeviceRef, EventRef, Features, Limits, MemorySpace, MemoryStats, Op, Queue, QueueId,
    RecordingRef, Result, Support, TensorArg, TensorSpec, Usage, WeightData, WeightRef, WeightSpec, op::Form, reference::Reference,
};

/// What is wrong with a device.
#[derive(Clone, Copy)]
struct Fault {
    /// Changes ops on their way in.
    op: fn(&mut Op<TensorArg>),
    /// Changes what `supports` answers.
    support: fn(Support) -> Support,
}

const NONE: Fault = Fault { op: |_| {}, support: |s| s };

struct Mutant {
    inner: DeviceRef,
    fault: Fault,
}

struct MutantQueue {
    device: Mutant,
    inner: Box<dyn Queue>,
}

impl Device for Mutant {
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
        (self.fault.support)(self.inner.supports(op))
    }
    fn workspace(&self, op: &Op<TensorSpec>) -> usize {
        self.inner.workspace(op)
    }
    fn create_queue(&self) -> Result<Box<dyn Queue>> {
        let device = Mutant { inner: Arc::clone(&self.inner), fault: self.fault };
        Ok(Box::new(MutantQueue { inner: self.inner.create_queue()?, device }))
    }
    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef> {
        self.inner.import_weight(spec, data)
    }
    fn memory(&self) -> MemoryStats {
        self.inner.memory()
    }
}

impl Queue for MutantQueue {
    fn id(&self) -> QueueId {
        self.inner.id()
    }
    fn device(&self) -> &dyn Device {
        &self.device
    }
    fn alloc(&self, bytes: usize, usage: Usage) -> Result<BufferRef> {
        self.inner.alloc(bytes, usage)
    }
    fn submit(&self, op: &Op<TensorArg>) -> Result<u64> {
        let mut op = op.clone();
        (self.device.fault.op)(&mut op);
        self.inner.submit(&op)
    }
    fn reserve(&self, bytes: usize) -> Result<()> {
        self.inner.reserve(bytes)
    }
    fn record_event(&self) -> Result<EventRef> {
        self.inner.record_event()
    }
    fn wait_event(&self, event: &EventRef) -> Result<()> {
        self.inner.wait_event(event)
    }
    fn hand_over(&self, buffer: &BufferRef, event: &EventRef) -> Result<()> {
        self.inner.hand_over(buffer, event)
    }
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.synchronize(timeout)
    }
    fn reset(&self) -> Result<()> {
        self.inner.reset()
    }
    fn begin_recording(&self) -> Result<()> {
        self.inner.begin_recording()
    }
    fn end_recording(&self) -> Result<RecordingRef> {
        self.inner.end_recording()
    }
    fn replay(&self, recording: &RecordingRef) -> Result<()> {
        self.inner.replay(recording)
    }
    fn close(self: Box<Self>) -> Result<()> {
        self.inner.close()
    }
}

/// Runs the test called `name` against a device with `fault`.
fn run(name: &str, fault: Fault) -> Outcome {
    let mut tests = Tests::default();
    crate::tests(&mut tests);
    let (_, body) = tests.list().iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no test is called {name}"));
    let device: DeviceRef = Arc::new(Mutant { inner: Reference::new(), fault });
    match body {
        Body::Shared(f) => f(&Bench::new(device)?),
        Body::Alone(f) => f(&device),
    }
}

#[track_caller]
fn caught(name: &str, fault: Fault) {
    run(name, NONE).unwrap_or_else(|e| panic!("{name} fails without a fault: {e}"));
    assert!(run(name, fault).is_err(), "{name} did not notice");
}

#[track_caller]
fn op_caught(name: &str, op: fn(&mut Op<TensorArg>)) {
    caught(name, Fault { op, ..NONE });
}

macro_rules! change {
    ($kind:ident, $op:ident => $change:expr) => {
        |op| {
            if let Op::$kind($op) = op {
                $change
            }
        }
    };
}

#[test]
fn answers_that_are_not_kept() {
    // Refuses what it would run, and runs what it refuses.
    let deny = |_| Support::lacking(zofo_hal::Lacking::Op, "in a mood");
    caught("copy/f32/bits", Fault { support: deny, ..NONE });
    caught("matmul/f32/nt", Fault { support: deny, ..NONE });
}

#[test]
fn rows_that_must_not_be_touched() {
    op_caught("scaled_add/f32/broadcast", change!(ScaledAdd, op => op.live = None));
    op_caught("matmul/f32/nt_options", change!(MatMul, op => op.live = None));
    op_caught("matmul/f32/tn_options", change!(MatMul, op => op.live = None));
    op_caught("rms_norm/f32/forms", change!(RmsNorm, op => op.live = None));
    op_caught("spread/f32/forms", change!(Spread, op => op.live = None));
    op_caught("lora_matmul_backward/f32/rows", change!(LoraMatMulBackward, op => op.live = None));
    op_caught("boundary_dot/f32/copies", change!(BoundaryDot, op => op.live = None));
}

/// Errors of one part in ten thousand or less; long sums have more room.
#[test]
fn small_errors() {
    op_caught("matmul/f32/nt_options", change!(MatMul, op => op.alpha *= 1.0001));
    op_caught("lora_matmul/f32/forms", change!(LoraMatMul, op => op.scale *= 1.0001));
    op_caught("lora_matmul/f32xq4_k/weight", change!(LoraMatMul, op => op.scale *= 1.001));
    op_caught("perturb_lora_matmul/f32/forms", change!(PerturbLoraMatMul, op => op.scale *= 1.0001));
    op_caught("rms_norm/f32/forms", change!(RmsNorm, op => op.eps *= 2.0));
    op_caught("rms_norm_backward/f32/rows", change!(RmsNormBackward, op => op.eps *= 2.0));
    op_caught("attention/f32/base", change!(Attention, op => op.shape.scale *= 1.001));
    op_caught("attention/f32/tangent", change!(Attention, op => op.shape.scale *= 1.001));
    op_caught("attention_backward/f32/sequences", change!(AttentionBackward, op => op.shape.scale *= 1.0001));
    op_caught("masked_softmax/f32/sequences", change!(MaskedSoftmax, op => op.scale *= 1.0001));
    op_caught("map/f32/functions", change!(Map, op => op.scale *= 1.00001));
    op_caught("scaled_add/f32/broadcast", change!(ScaledAdd, op => op.gamma += 1e-7));
}

#[test]
fn wrong_variants() {
    op_caught("rope/f32/forms", change!(Rope, op => op.inverse ^= true));
    op_caught("attention/f32/base", change!(Attention, op => op.shape.causal ^= true));
    op_caught("matmul/f32/nt_options", change!(MatMul, op => op.bias = None));
    op_caught("lora_matmul/f32/forms", change!(LoraMatMul, op => op.bias = None));
    op_caught("rms_norm/f32/forms", change!(RmsNorm, op => op.copies.form = Form::Value));
    op_caught("swiglu/f32/forms", change!(SwiGlu, op => op.copies.form = Form::Value));
    op_caught("attention/f32/tangent", change!(Attention, op => op.copies.form = Form::Value));
    op_caught("cross_entropy/f32/tensor", change!(CrossEntropy, op => op.copies.form = Form::Value));
    op_caught("perturb_lora_matmul/f32/forms", change!(PerturbLoraMatMul, op => op.site_b = None));
    op_caught("perturb_lora_matmul/f32/shared_input", change!(PerturbLoraMatMul, op => op.site_a = None));
    op_caught("perturb/f32/exact", change!(Perturb, op => op.copy += 1));
    op_caught("philox_words/u32/known_answers", change!(PhiloxWords, op => op.site.row0 += 1));
    op_caught("zo_update/f32/adamw", change!(ZoUpdate, op => op.site.col0 = op.site.ld - op.param.spec.cols as u32 - op.site.col0));
}

#[test]
fn wrong_slopes() {
    op_caught("slope/rms_norm/tangent", change!(RmsNorm, op => op.copies.form = Form::Value));
    op_caught("slope/attention/tangent", change!(Attention, op => op.copies.form = Form::Value));
    op_caught(
        "slope/perturb_lora_matmul/tangent",
        change!(PerturbLoraMatMul, op => if op.copies.form == Form::Tangent { op.scale *= 1.1 }),
    );
    op_caught("slope/rms_norm_backward/differences", change!(RmsNormBackward, op => op.gamma = op.x.rows(0, 1)));
    op_caught("slope/attention_backward/differences", change!(AttentionBackward, op => op.shape.scale *= 1.1));
    op_caught("slope/lora_matmul_backward/differences", change!(LoraMatMulBackward, op => op.scale *= 1.1));
}

/// An op that reads what it should only write shows, because outputs hold NaN.
#[test]
fn reading_an_output() {
    op_caught("mul/f32/broadcast", change!(Mul, op => op.accumulate = true));
    op_caught("matmul/f32/nt", change!(MatMul, op => op.beta = 1.0));
}

#[test]
fn lost_work() {
    op_caught("queue/order/two_queues", change!(Fill, op => op.value = 1.0));
    op_caught("queue/recording/parameters", change!(ScaledAdd, op => op.live = None));
}
