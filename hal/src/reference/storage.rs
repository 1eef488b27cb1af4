//! Blocks of bytes, aligned, filled with garbage that shows.

use crate::{Error, ErrorKind, Result, Usage};
use alloc::{format, vec::Vec};
use bytemuck::{Pod, Zeroable};
use core::ops::Range;

/// Alignment of a buffer's start.
pub(super) const ALIGNMENT: usize = 64;

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Line([u8; ALIGNMENT]);

/// What fresh memory holds: NaN in every float type, and an index past the end of anything.
const FRESH: [u8; 4] = 0x7FFE_7FFD_u32.to_le_bytes();

/// A block of bytes.
#[derive(Clone, Default)]
pub(super) struct Block {
    lines: Vec<Line>,
    bytes: usize,
}

impl Block {
    /// A fresh block.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(bytes: usize) -> Result<Self> {
        let mut block = Self { lines: Vec::new(), bytes };
        let lines = bytes.div_ceil(ALIGNMENT);
        let out_of_memory = |_| Error::new(ErrorKind::OutOfMemory { requested: bytes as u64, available: None }, "host memory is exhausted");
        block.lines.try_reserve_exact(lines).map_err(out_of_memory)?;
        block.lines.resize(lines, Line([0; ALIGNMENT]));
        block.fill(FRESH);
        Ok(block)
    }

    /// Overwrites everything with a pattern.
    pub fn fill(&mut self, pattern: [u8; 4]) {
        self.bytes_mut().chunks_mut(4).for_each(|b| b.copy_from_slice(&pattern[..b.len()]));
    }

    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }
}

/// That a mapping lies within its buffer.
pub(super) fn check_range(range: &Range<usize>, bytes: usize) -> Result<()> {
    if range.start > range.end || range.end > bytes {
        return Err(Error::invalid(format!("bytes {}..{} of a buffer of {bytes}", range.start, range.end)));
    }
    Ok(())
}

/// Counters of an allocator with an optional limit.
#[derive(Debug, Default)]
pub(super) struct Allocator {
    limit: Option<u64>,
    stats: crate::MemoryStats,
}

impl Allocator {
    pub fn new(limit: Option<u64>) -> Self {
        let stats = crate::MemoryStats { owner: crate::unique::next(), ..Default::default() };
        Self { limit, stats }
    }

    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    pub fn stats(&self) -> crate::MemoryStats {
        self.stats
    }

    /// Takes `bytes`.
    pub fn take(&mut self, bytes: usize, what: &str) -> Result<()> {
        let requested = bytes as u64;
        let available = self.limit.map(|limit| limit.saturating_sub(self.stats.in_use));
        if available.is_some_and(|available| requested > available) {
            let message = format!("{what} does not fit the memory of this device: free something, or use a smaller batch");
            return Err(Error::new(ErrorKind::OutOfMemory { requested, available }, message));
        }
        self.stats.in_use += requested;
        self.stats.peak = self.stats.peak.max(self.stats.in_use);
        self.stats.allocations += 1;
        Ok(())
    }

    /// Gives `bytes` back.
    pub fn give(&mut self, bytes: usize) {
        self.stats.in_use -= bytes as u64;
    }
}

/// What an allocation is called in errors.
pub(super) fn usage_name(usage: Usage) -> &'static str {
    match usage {
        Usage::Weights => "a buffer of weights",
        Usage::Activations => "a buffer of activations",
        Usage::Workspace => "a workspace",
        Usage::Parameters => "a buffer of parameters",
    }
}

/// Who has a buffer mapped.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    readers: usize,
    writer: bool,
}

impl Mappings {
    /// Whether nobody has it mapped.
    pub fn is_free(&self) -> bool {
        self.readers == 0 && !self.writer
    }

    pub fn start_read(&mut self) -> Result<()> {
        if self.writer {
            return Err(Error::invalid("the buffer is mapped for writing: drop that mapping first"));
        }
        self.readers += 1;
        Ok(())
    }

    pub fn start_write(&mut self) -> Result<()> {
        if !self.is_free() {
            return Err(Error::invalid("the buffer is mapped already: drop that mapping first"));
        }
        self.writer = true;
        Ok(())
    }

    pub fn end_read(&mut self) {
        self.readers -= 1;
    }

    pub fn end_write(&mut self) {
        self.writer = false;
    }
}
