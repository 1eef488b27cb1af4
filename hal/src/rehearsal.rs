//! A device that only counts memory.

use crate::{
    Buffer, BufferRef, DType, DTypeUsage, Device, DeviceInfo, DeviceRef, Error, EventRef, Features, Home, Limits, MapRead, MapWrite,
    MemorySpace, MemoryStats, Op, Queue, QueueId, RecordingRef, Result, Support, TensorArg, TensorSpec, Usage, WeightData, WeightRef,
    WeightSpec,
};
use alloc::{boxed::Box, sync::Arc, vec, vec::Vec};
use core::{
    any::Any,
    ops::{Deref, DerefMut, Range},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

/// Another device's stand-in for finding out what some work would allocate: it answers like that device, counts buffers and workspace as they
/// come and go, holds no memory and computes nothing. What is read from its buffers are zeros.
///
/// Whatever is run on it must not decide by values.
#[derive(Clone)]
pub struct Rehearsal {
    inner: DeviceRef,
    counters: Arc<Counters>,
}

#[derive(Default)]
struct Counters {
    in_use: AtomicUsize,
    peak: AtomicUsize,
    allocations: AtomicUsize,
}

impl Counters {
    fn take(&self, bytes: usize) {
        self.allocations.fetch_add(1, Relaxed);
        let now = self.in_use.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(now, Relaxed);
    }

    fn give_back(&self, bytes: usize) {
        self.in_use.fetch_sub(bytes, Relaxed);
    }
}

impl Rehearsal {
    /// A stand-in for `inner`.
    pub fn new(inner: DeviceRef) -> Arc<Self> {
        Arc::new(Self { inner, counters: Arc::default() })
    }
}

impl Device for Rehearsal {
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
        self.inner.supports(op)
    }
    fn workspace(&self, op: &Op<TensorSpec>) -> usize {
        self.inner.workspace(op)
    }
    fn create_queue(&self) -> Result<Box<dyn Queue>> {
        let queue = RehearsalQueue { id: QueueId::unique(), device: self.clone(), scratch: AtomicUsize::new(0), ops: AtomicUsize::new(0) };
        Ok(Box::new(queue))
    }
    fn import_weight(&self, _: &WeightSpec, _: WeightData<'_>) -> Result<WeightRef> {
        Err(Error::unsupported("weights are imported on the device itself, not at a rehearsal"))
    }
    fn weight_layout(&self) -> &str {
        self.inner.weight_layout()
    }
    fn memory(&self) -> MemoryStats {
        let count = |of: &AtomicUsize| of.load(Relaxed) as u64;
        let Counters { in_use, peak, allocations } = &*self.counters;
        MemoryStats { in_use: count(in_use), peak: count(peak), allocations: count(allocations), ..MemoryStats::default() }
    }
}

struct RehearsalQueue {
    id: QueueId,
    device: Rehearsal,
    /// Largest workspace so far.
    scratch: AtomicUsize,
    ops: AtomicUsize,
}

impl Drop for RehearsalQueue {
    fn drop(&mut self) {
        self.device.counters.give_back(self.scratch.load(Relaxed));
    }
}

fn nothing_to_replay<T>() -> Result<T> {
    Err(Error::unsupported("a rehearsal neither records nor replays"))
}

impl Queue for RehearsalQueue {
    fn id(&self) -> QueueId {
        self.id
    }
    fn device(&self) -> &dyn Device {
        &self.device
    }
    fn alloc(&self, bytes: usize, usage: Usage) -> Result<BufferRef> {
        let bytes = bytes.next_multiple_of(self.device.limits().alignment.max(1));
        self.device.counters.take(bytes);
        Ok(Arc::new(Hollow { bytes, usage, queue: self.id, space: self.device.space(), counters: self.device.counters.clone() }))
    }
    fn submit(&self, op: &Op<TensorArg>) -> Result<u64> {
        self.reserve(self.device.workspace(&op.spec()))?;
        Ok(self.ops.fetch_add(1, Relaxed) as u64)
    }
    fn reserve(&self, workspace_bytes: usize) -> Result<()> {
        let before = self.scratch.fetch_max(workspace_bytes, Relaxed);
        if workspace_bytes > before {
            self.device.counters.take(workspace_bytes - before);
        }
        Ok(())
    }
    fn record_event(&self) -> Result<EventRef> {
        nothing_to_replay()
    }
    fn wait_event(&self, _: &EventRef) -> Result<()> {
        Ok(())
    }
    fn hand_over(&self, _: &BufferRef, _: &EventRef) -> Result<()> {
        Ok(())
    }
    fn synchronize(&self, _: Option<Duration>) -> Result<()> {
        Ok(())
    }
    fn reset(&self) -> Result<()> {
        Ok(())
    }
    fn begin_recording(&self) -> Result<()> {
        nothing_to_replay()
    }
    fn end_recording(&self) -> Result<RecordingRef> {
        nothing_to_replay()
    }
    fn replay(&self, _: &RecordingRef) -> Result<()> {
        nothing_to_replay()
    }
    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// A buffer of which there is only the size.
struct Hollow {
    bytes: usize,
    usage: Usage,
    queue: QueueId,
    space: MemorySpace,
    counters: Arc<Counters>,
}

impl Drop for Hollow {
    fn drop(&mut self) {
        self.counters.give_back(self.bytes);
    }
}

/// Zeros, aligned for every element type.
struct Zeros(Vec<u64>, usize);

impl Zeros {
    fn new(range: &Range<usize>, bytes: usize) -> Result<Self> {
        if range.start > range.end || range.end > bytes {
            return Err(Error::invalid(alloc::format!("bytes {range:?} of a buffer of {bytes}")));
        }
        Ok(Self(vec![0; range.len().div_ceil(8)], range.len()))
    }
}

impl Deref for Zeros {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..self.1]
    }
}

impl DerefMut for Zeros {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..self.1]
    }
}

impl Buffer for Hollow {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn space(&self) -> MemorySpace {
        self.space
    }
    fn usage(&self) -> Usage {
        self.usage
    }
    fn home(&self) -> Home {
        Home::Queue(self.queue)
    }
    fn freeze(&self) -> Result<()> {
        Ok(())
    }
    fn map_read(&self, range: Range<usize>) -> Result<MapRead<'_>> {
        Ok(MapRead::new(Zeros::new(&range, self.bytes)?))
    }
    fn map_write(&self, range: Range<usize>) -> Result<MapWrite<'_>> {
        Ok(MapWrite::new(Zeros::new(&range, self.bytes)?))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{alloc_tensor, reference::Reference};

    #[test]
    fn buffers_are_counted_and_are_zeros() {
        let device = Rehearsal::new(Reference::new());
        let queue = device.create_queue().unwrap();
        let a = alloc_tensor(&*queue, TensorSpec::new(DType::F32, 10, 100), Usage::Activations).unwrap();
        let b = alloc_tensor(&*queue, TensorSpec::new(DType::F32, 10, 50), Usage::Activations).unwrap();
        let most = (a.buffer.bytes() + b.buffer.bytes()) as u64;
        drop(b);
        assert_eq!((device.memory().in_use, device.memory().peak), (a.buffer.bytes() as u64, most));
        a.buffer.map_write(4..8).unwrap().copy_from_slice(&[1; 4]);
        assert!(a.buffer.map_read(0..400).unwrap().cast::<f32>().iter().all(|x| *x == 0.0));
        assert!(a.buffer.map_read(0..1 << 20).is_err());
        drop(a);
        assert_eq!(device.memory().in_use, 0);
    }

    #[test]
    fn a_queue_holds_the_largest_workspace() {
        let device = Rehearsal::new(Reference::new());
        let queue = device.create_queue().unwrap();
        for bytes in [100, 300, 200] {
            queue.reserve(bytes).unwrap();
        }
        assert_eq!(device.memory().in_use, 300);
        drop(queue);
        assert_eq!(device.memory().in_use, 0);
    }
}
