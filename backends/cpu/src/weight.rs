//! Frozen weights.
//!
//! | uses | layout | bytes |
//! |---|---|---|
//! | a product | panels of 16 rows in the checkpoint's type ([`crate::gemm::units`]) | copied |
//! | look-ups alone | as in the checkpoint | kept in place if shared |
//!
//! A panel is what the micro-kernel of `x W^T` reads. `dy W` transposes 16 x 16 squares of it as it goes, and a look-up picks a row out of it,
//! so one copy serves all uses.

use crate::{
    convert,
    gemm::{NR, panel_bytes, units},
    memory::{Block, Counters},
    pool::Pool,
};
use alloc::{format, sync::Arc};
use core::any::Any;
use zofo_hal::{
    DType, Error, ErrorKind, MemorySpace, Result, SharedBytes, Weight, WeightData, WeightRef, WeightSpec, quant::dequantise_row,
};

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
        let storage = if uses.nt || uses.nn {
            let panel = panel_bytes(dtype, cols).and_then(|n| n.checked_mul(rows.div_ceil(NR)));
            let panels = panel.ok_or_else(|| Error::invalid(format!("a weight [{rows}, {cols}] does not fit the address space")))?;
            let block = Block::new(panels, counters, "a weight")?;
            pack(bytes, spec, &block, pool);
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
        if self.panels {
            return self.panel_row(r, out);
        }
        let row_bytes = dtype.bytes(cols).unwrap_or(0);
        let bytes = &self.bytes[r * row_bytes..][..row_bytes];
        convert_row(dtype, bytes, out);
    }

    /// As [`row`](Self::row), from panels.
    #[inline(always)]
    fn panel_row(&self, r: usize, out: &mut [f32]) {
        let WeightSpec { dtype, cols, .. } = self.spec;
        let panel = panel_bytes(dtype, cols).unwrap_or(0);
        let panel = &self.bytes[r / NR * panel..][..panel];
        // As many whole blocks of the row as there is room for, put together again.
        let mut room = [0u8; 512];
        let (block, block_bytes) = dtype.block();
        let at_once = room.len() / block_bytes * block;
        let (mut done, mut filled) = (0, 0);
        units(dtype, cols, r % NR, |from, to, size| {
            let start = done / block * block_bytes;
            room[from - start..][..size].copy_from_slice(&panel[to..to + size]);
            filled = from - start + size;
            let n = filled / block_bytes * block;
            if filled.is_multiple_of(block_bytes) && (n == at_once || done + n == cols) {
                convert_row(dtype, &room[..filled], &mut out[done..done + n]);
                done += n;
            }
        });
    }
}

/// `bytes`, which are exactly `out.len()` elements, as f32.
#[inline(always)]
fn convert_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    if dtype.is_float() {
        debug_assert_eq!(dtype.bytes(out.len()), Some(bytes.len()));
        // Safety: there are as many elements as in `out`.
        unsafe { convert::load(dtype, bytes.as_ptr(), out) };
    } else {
        // The sizes were checked at import.
        let _ = dequantise_row(dtype, bytes, out);
    }
}

/// Row-major rows into panels. The last panel is filled up with zeros: a block is new, and new memory is zero.
fn pack(bytes: &[u8], spec: &WeightSpec, block: &Block, pool: &Pool) {
    let &WeightSpec { dtype, rows, cols, .. } = spec;
    let place = Place(block.ptr());
    let (row_bytes, panel) = (dtype.bytes(cols).unwrap_or(0), panel_bytes(dtype, cols).unwrap_or(0));
    pool.split(rows.div_ceil(NR), cols * NR, &|panels, _| {
        let place = &place;
        for p in panels {
            for r in 0..NR.min(rows - p * NR) {
                let row = &bytes[(p * NR + r) * row_bytes..][..row_bytes];
                // Safety: units of row r of panel p are within the block, and this task alone writes the panel.
                let first = unsafe { place.0.add(p * panel) };
                units(dtype, cols, r, |from, to, size| {
                    let unit = &row[from..from + size];
                    // Safety: as above.
                    unsafe { core::ptr::copy_nonoverlapping(unit.as_ptr(), first.add(to), size) };
                });
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
