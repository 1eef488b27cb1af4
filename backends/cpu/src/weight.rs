//! Frozen weights.
//!
//! | type | uses | layout | bytes |
//! |---|---|---|---|
//! | f32, f16, bf16 | a product | panels of 16 rows, `[rows / 16][cols][16]`, in the checkpoint's type | copied |
//! | f32, f16, bf16 | look-ups alone | as in the checkpoint | kept in place if shared |
//! | block-quantised | any | as in the checkpoint | kept in place if shared |
//!
//! A panel is what the micro-kernel of `x W^T` reads. `dy W` transposes 16 x 16 squares of it as it goes, and a look-up strides through it,
//! so one copy serves all uses. Quantised rows are unpacked into the panel that is being multiplied.

use crate::{
    convert,
    gemm::NR,
    memory::{Block, Counters},
    pool::Pool,
};
use alloc::{format, sync::Arc};
use core::any::Any;
use zofo_hal::{Error, ErrorKind, MemorySpace, Result, SharedBytes, Weight, WeightData, WeightRef, WeightSpec, quant::dequantise_row};

/// A weight of this backend.
pub(crate) struct CpuWeight {
    spec: WeightSpec,
    storage: Storage,
}

enum Storage {
    /// Panels of 16 rows; the last is filled up with zeros.
    Panels(Block),
    /// Row-major, copied.
    Rows(Block),
    /// Row-major, in place.
    Shared(SharedBytes, usize),
}

impl CpuWeight {
    /// # Errors
    /// `InvalidArgument` where the bytes do not match `spec`; `Unsupported` for u32; `OutOfMemory`.
    pub(crate) fn import(spec: &WeightSpec, data: WeightData<'_>, pool: &Pool, counters: &Arc<Counters>) -> Result<Self> {
        let &WeightSpec { dtype, rows, cols, uses } = spec;
        if !dtype.is_float() && !dtype.is_quantised() {
            return Err(Error::unsupported(format!("{dtype} is no weight type")));
        }
        let (expected, bytes) = (spec.host_bytes()?, data.bytes()?);
        if bytes.len() != expected {
            let m = format!("a {dtype} weight [{rows}, {cols}] has {expected} bytes, not {}", bytes.len());
            return Err(Error::invalid(m));
        }
        let storage = if dtype.is_float() && (uses.nt || uses.nn) {
            let size = dtype.block().1;
            let panels = rows.div_ceil(NR).checked_mul(NR * size).and_then(|n| n.checked_mul(cols));
            let panels = panels.ok_or_else(|| Error::invalid(format!("a weight [{rows}, {cols}] does not fit the address space")))?;
            let block = Block::new(panels, counters, "a weight")?;
            pack(bytes, rows, cols, size, &block, pool);
            Storage::Panels(block)
        } else {
            match data {
                WeightData::Shared(ref shared, ref range) => Storage::Shared(shared.clone(), range.start),
                WeightData::Borrowed(bytes) => {
                    let block = Block::new(bytes.len(), counters, "a weight")?;
                    // Safety: the block is as long as the bytes, and new.
                    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), block.ptr(), bytes.len()) };
                    Storage::Rows(block)
                }
            }
        };
        Ok(Self { spec: *spec, storage })
    }

    /// The weight behind a handle, if this backend made it.
    ///
    /// # Errors
    /// `ForeignBuffer`.
    pub(crate) fn of(weight: &WeightRef) -> Result<&Self> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a weight of another backend: import it on this device");
        // The object itself is asked, not `as_any`: a wrapper that forwards to one of ours is not one of ours.
        (&**weight as &dyn core::any::Any).downcast_ref().ok_or_else(foreign)
    }

    /// The weight's bytes, for the duration of an op.
    ///
    /// # Errors
    /// `Execution` where shared bytes have shrunk since the import.
    pub(crate) fn view(&self) -> Result<WeightView<'_>> {
        let (bytes, panels) = match &self.storage {
            Storage::Panels(b) => (b.as_slice(), true),
            Storage::Rows(b) => (b.as_slice(), false),
            Storage::Shared(bytes, start) => {
                let all = (**bytes).as_ref();
                let kept = all.get(*start..).and_then(|b| b.get(..self.bytes()));
                let shrunk = || Error::execution("the shared bytes of a weight are fewer than when it was imported");
                (kept.ok_or_else(shrunk)?, false)
            }
        };
        Ok(WeightView { spec: self.spec, bytes, panels })
    }
}

/// A weight's bytes in their layout.
#[derive(Clone, Copy)]
pub(crate) struct WeightView<'a> {
    pub(crate) spec: WeightSpec,
    pub(crate) bytes: &'a [u8],
    /// Whether the layout is panels, else row-major.
    pub(crate) panels: bool,
}

impl WeightView<'_> {
    /// Row `r` as f32, all of it.
    ///
    /// # Panics
    /// If there is no such row or `out` is not as long as it: a bug of this crate.
    #[inline(always)]
    pub(crate) fn row(&self, r: usize, out: &mut [f32]) {
        let WeightSpec { dtype, rows, cols, .. } = self.spec;
        assert!(r < rows && out.len() == cols);
        let size = dtype.block().1;
        if self.panels {
            let column = &self.bytes[(r / NR * cols * NR + r % NR) * size..];
            for (e, o) in column.chunks(NR * size).zip(out) {
                // Safety: each chunk begins with an element of this row.
                unsafe { convert::load(dtype, e[..size].as_ptr(), core::slice::from_mut(o)) };
            }
            return;
        }
        let row_bytes = dtype.bytes(cols).unwrap_or(0);
        let bytes = &self.bytes[r * row_bytes..][..row_bytes];
        if dtype.is_float() {
            // Safety: the row has as many elements as `out`.
            unsafe { convert::load(dtype, bytes.as_ptr(), out) };
        } else {
            // The sizes were checked at import.
            let _ = dequantise_row(dtype, bytes, out);
        }
    }
}

/// Row-major rows of `size`-byte elements into panels.
fn pack(bytes: &[u8], rows: usize, cols: usize, size: usize, block: &Block, pool: &Pool) {
    let place = Place(block.ptr());
    pool.split(rows.div_ceil(NR), cols * NR, &|panels, _| {
        let place = &place;
        for panel in panels {
            for j in 0..NR.min(rows - panel * NR) {
                let row = &bytes[(panel * NR + j) * cols * size..][..cols * size];
                // Safety: element (k, j) of this panel is within the block, and this task alone writes the panel.
                unsafe {
                    let first = place.0.add((panel * cols * NR + j) * size);
                    for (k, e) in row.chunks_exact(size).enumerate() {
                        core::ptr::copy_nonoverlapping(e.as_ptr(), first.add(k * NR * size), size);
                    }
                }
            }
        }
    });
}

/// Where panels are packed to.
struct Place(*mut u8);

// Safety: tasks write disjoint panels.
unsafe impl Sync for Place {}

impl Weight for CpuWeight {
    fn spec(&self) -> WeightSpec {
        self.spec
    }
    fn bytes(&self) -> usize {
        match &self.storage {
            Storage::Panels(b) | Storage::Rows(b) => b.bytes(),
            Storage::Shared(..) => self.spec.host_bytes().unwrap_or(0),
        }
    }
    fn space(&self) -> MemorySpace {
        MemorySpace::HOST
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
