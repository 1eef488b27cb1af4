//! A device that offers less than it has: the forward-only devices of a virtual cluster, and the ground that decompositions are tested on.

use crate::op::OpClass;
use crate::{
    BufferRef, DType, DTypeUsage, Device, DeviceInfo, DeviceRef, EventRef, Features, Lacking, Limits, MemorySpace, MemoryStats, Op, Queue,
    QueueId, RecordingRef, Result, Support, TensorArg, TensorSpec, Usage, WeightData, WeightRef, WeightSpec,
};
use alloc::{boxed::Box, string::String, sync::Arc};
use core::time::Duration;

/// What a [`Restricted`] device still offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Allow {
    /// All but backward ops: an accelerator made for inference, whose host runs the updates.
    Forward,
    /// Primitives alone: everything else must decompose.
    Primitives,
}

impl Allow {
    /// Why ops of `class` are refused, if they are.
    fn refuses(self, class: OpClass) -> Option<Support> {
        match (self, class) {
            (_, OpClass::Backward) => Some(Support::lacking(Lacking::Backward, "this device has no backward ops")),
            (Self::Primitives, OpClass::Forward) => {
                Some(Support::lacking(Lacking::Op, "this device has primitives alone: decompose the op"))
            }
            (Self::Primitives, OpClass::Update) => {
                Some(Support::lacking(Lacking::Op, "this device has primitives alone: decompose the update or run it on the host"))
            }
            _ => None,
        }
    }
}

/// Another device with some of its ops taken away.
///
/// Buffers, weights, events and memory are those of the inner device, so several restricted devices over one device share a model, and hand
/// buffers to each other.
#[derive(Clone)]
pub struct Restricted {
    inner: DeviceRef,
    allow: Allow,
    info: Arc<DeviceInfo>,
}

impl Restricted {
    /// `inner` with only what `allow` leaves, called `label`. The fingerprint stays the inner one: what it does run, it
    /// runs as fast and with the same bits, and weights imported through either serve both.
    pub fn new(inner: DeviceRef, allow: Allow, label: impl Into<String>) -> Arc<Self> {
        let mut info = inner.info().clone();
        info.name = label.into();
        Arc::new(Self { inner, allow, info: Arc::new(info) })
    }

    /// The device underneath.
    pub fn inner(&self) -> &DeviceRef {
        &self.inner
    }

    /// What is left of it.
    pub fn allow(&self) -> Allow {
        self.allow
    }
}

impl Device for Restricted {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn features(&self) -> Features {
        let inner = self.inner.features();
        Features { backward: false, exact_updates: inner.exact_updates && self.allow == Allow::Forward, ..inner }
    }
    fn space(&self) -> MemorySpace {
        self.inner.space()
    }
    fn dtype_usage(&self, dtype: DType) -> DTypeUsage {
        self.inner.dtype_usage(dtype)
    }
    fn supports(&self, op: &Op<TensorSpec>) -> Support {
        self.allow.refuses(op.class()).unwrap_or_else(|| self.inner.supports(op))
    }
    fn workspace(&self, op: &Op<TensorSpec>) -> usize {
        self.inner.workspace(op)
    }
    fn create_queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(RestrictedQueue { inner: self.inner.create_queue()?, device: self.clone() }))
    }
    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef> {
        self.inner.import_weight(spec, data)
    }
    fn weight_layout(&self) -> &str {
        self.inner.weight_layout()
    }
    fn memory(&self) -> MemoryStats {
        self.inner.memory()
    }
}

/// A queue of the inner device that refuses at `submit` what [`Device::supports`] refuses.
struct RestrictedQueue {
    inner: Box<dyn Queue>,
    device: Restricted,
}

impl Queue for RestrictedQueue {
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
        if let Some(Support::Unsupported { reason, .. }) = self.device.allow.refuses(op.class()) {
            return Err(crate::Error::unsupported(reason).with_op(op.name(), None).with_device(self.device.info.name.clone()));
        }
        self.inner.submit(op)
    }
    fn reserve(&self, workspace_bytes: usize) -> Result<()> {
        self.inner.reserve(workspace_bytes)
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
