//! Pooled device memory: buffers that are handed out again once nobody holds them.
//!
//! A buffer is free when the pool holds the only handle to it. Queues keep clones of the handles that their unfinished ops use, so a free
//! buffer is really unused, also on an asynchronous queue; there a step that runs ahead of the device takes more buffers than one that
//! waits, up to a high-water mark.

use alloc::{collections::BTreeMap, sync::Arc, vec::Vec};
use zofo_hal::{BufferRef, ErrorKind, Home, Queue, Result, Usage};

/// Smallest size class, in bytes.
const SMALLEST: usize = 256;

struct Entry {
    buffer: BufferRef,
    /// Clones that the recording in progress holds. Ops of a recording run in order, so these do not keep a buffer from being used again
    /// by a later op of the same recording.
    recorded: usize,
}

impl Entry {
    fn is_free(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1 + self.recorded
    }
}

/// Which shelf a buffer lies on: scratch or not, and its size class in bytes.
type Shelf = (bool, usize);

/// Buffers of one queue by use and size class.
#[derive(Default)]
pub(crate) struct Pool {
    shelves: BTreeMap<Shelf, Vec<Entry>>,
}

/// Rounds up to a power of two or one of three sizes between: at most a quarter is wasted, and similar requests share buffers.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(SMALLEST);
    let step = (1 << bytes.ilog2()) / 4;
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

impl Pool {
    /// A free buffer of at least `bytes` for [`Usage::Workspace`] (`scratch`) or [`Usage::Activations`], or a new one.
    pub(crate) fn take(&mut self, queue: &dyn Queue, bytes: usize, scratch: bool) -> Result<BufferRef> {
        let class = size_class(bytes);
        let home = Home::Queue(queue.id());
        let entries = self.shelves.entry((scratch, class)).or_default();
        // A buffer that was frozen or handed to another queue is its new owner's alone.
        entries.retain(|e| !(e.is_free() && e.buffer.home() != home));
        if let Some(free) = entries.iter().find(|e| e.is_free()) {
            return Ok(free.buffer.clone());
        }
        let usage = if scratch { Usage::Workspace } else { Usage::Activations };
        let buffer = match queue.alloc(class, usage) {
            Err(e) if matches!(e.kind(), ErrorKind::OutOfMemory { .. }) && self.trim() => queue.alloc(class, usage)?,
            other => other?,
        };
        self.shelves.entry((scratch, class)).or_default().push(Entry { buffer: buffer.clone(), recorded: 0 });
        Ok(buffer)
    }

    /// Gives free buffers back to the device; whether there was one.
    pub(crate) fn trim(&mut self) -> bool {
        let before = self.bytes();
        self.shelves.values_mut().for_each(|entries| entries.retain(|e| Arc::strong_count(&e.buffer) > 1));
        self.bytes() < before
    }

    /// Bytes of all pooled buffers, free or not.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries().map(|e| e.buffer.bytes() as u64).sum()
    }

    /// Handle counts of all buffers, to be given to [`Pool::recorded`] once an op was recorded.
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.entries().map(|e| Arc::strong_count(&e.buffer)).collect()
    }

    /// Notes which handles the recording in progress took since `counts`.
    pub(crate) fn recorded(&mut self, counts: &[usize]) {
        for (entry, before) in self.shelves.values_mut().flatten().zip(counts) {
            entry.recorded += Arc::strong_count(&entry.buffer).saturating_sub(*before);
        }
    }

    /// From now on the handles that the finished recording holds count like any other.
    pub(crate) fn end_recording(&mut self) {
        self.shelves.values_mut().flatten().for_each(|e| e.recorded = 0);
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.shelves.values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn classes_hold_the_request_and_waste_at_most_a_quarter() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, (3 << 20) - 7, usize::MAX]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class >= 256, "{bytes} -> {class}");
            assert!(bytes < 256 || class - bytes <= bytes / 4, "{bytes} -> {class}");
            assert_eq!(size_class(class), class, "{bytes}");
        }
    }
}
