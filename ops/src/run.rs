//! Running ops on one device, whatever it lacks.

use crate::{
    convert,
    decompose::{self, Constant},
    pool::Pool,
};
use alloc::{boxed::Box, collections::BTreeMap, format, string::ToString, vec, vec::Vec};
use core::ops::Range;
use zofo_hal::{
    DType, Device, DeviceRef, Error, ErrorKind, Lacking, Op, Queue, RecordingRef, Result, Support, TensorArg, TensorSpec, Usage, Uses,
    WeightSpec, alloc_tensor,
    op::{Embedding, OpClass},
};

/// What a runner has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunStats {
    /// Ops submitted to the queue, those of decompositions among them.
    pub submitted: u64,
    /// Ops that the device lacks and that ran as others, or as an update on the host.
    pub decomposed: u64,
    /// Device bytes held by the pool, free or in use.
    pub pool_bytes: u64,
}

/// One queue of a device, with pooled temporaries, host transfers, and decompositions of the ops that the device lacks.
///
/// # Decompositions
/// [`Runner::run`] submits what the device supports. Any other forward or backward op runs as primitives ([`OpClass::Primitive`]) in f32
/// temporaries; an update runs on the host, by the very sequence that its descriptor documents, so it stays bit-exact. [`support`] tells
/// beforehand which it will be.
///
/// # Recording
/// [`Runner::begin_recording`] to [`Runner::end_recording`]. Allocation is refused meanwhile, so run the same ops once before: that
/// fills the pool. Temporaries of a recording are reused within it and belong to it until it is dropped. Updates on the host cannot be
/// recorded and answer `Unsupported`.
pub struct Runner {
    queue: Box<dyn Queue>,
    device: DeviceRef,
    pool: Pool,
    constants: BTreeMap<Constant, TensorArg>,
    submitted: u64,
    decomposed: u64,
    recording: bool,
}

impl Runner {
    /// A runner on a new queue of `device`.
    ///
    /// # Errors
    /// Those of [`Device::create_queue`].
    pub fn new(device: DeviceRef) -> Result<Self> {
        let queue = device.create_queue()?;
        Ok(Self { queue, device, pool: Pool::default(), constants: BTreeMap::new(), submitted: 0, decomposed: 0, recording: false })
    }

    /// The device.
    pub fn device(&self) -> &DeviceRef {
        &self.device
    }

    /// The queue. Record through the runner, not through it.
    pub fn queue(&self) -> &dyn Queue {
        &*self.queue
    }

    /// Runs or enqueues `op`.
    ///
    /// # Errors
    /// Those of [`Queue::submit`]; `Unsupported` with the device's reason where there is no decomposition, or with the primitive that a
    /// decomposition lacks.
    pub fn run(&mut self, op: impl Into<Op<TensorArg>>) -> Result<()> {
        self.run_op(&op.into())
    }

    fn run_op(&mut self, op: &Op<TensorArg>) -> Result<()> {
        op.check()?;
        let Support::Unsupported { reason, .. } = self.device.supports(&op.spec()) else {
            return self.submit(op);
        };
        // A decomposition submits other ops, so the op as it was asked for is checked here.
        op.check_submit(self.queue.id(), self.device.space())?;
        let done = if op.class() == OpClass::Update { decompose::update(self, op) } else { decompose::run(self, op) };
        let error = match done {
            Some(Ok(())) => {
                self.decomposed += 1;
                return Ok(());
            }
            Some(Err(e)) if *e.kind() == ErrorKind::Unsupported => e.context(format_args!("{} runs as other ops here", op.name())),
            Some(Err(e)) => e,
            None => Error::unsupported(reason),
        };
        Err(error.with_op(op.name(), None).with_device(self.device.info().name.as_str()))
    }

    fn submit(&mut self, op: &Op<TensorArg>) -> Result<()> {
        let counts = if self.recording { self.pool.counts() } else { Vec::new() };
        self.queue.submit(op)?;
        self.submitted += 1;
        self.pool.recorded(&counts);
        Ok(())
    }

    /// A pooled activation; its memory is free again when the last clone of the handle is dropped. Contents are unspecified.
    ///
    /// # Errors
    /// Those of [`Queue::alloc`], where no buffer is free.
    pub fn temp(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<TensorArg> {
        self.pooled(TensorSpec::new(dtype, rows, cols), false)
    }

    /// As [`Runner::temp`], counted as [`Usage::Workspace`].
    pub(crate) fn scratch(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<TensorArg> {
        self.pooled(TensorSpec::new(dtype, rows, cols), true)
    }

    fn pooled(&mut self, spec: TensorSpec, scratch: bool) -> Result<TensorArg> {
        spec.check()?;
        Ok(TensorArg::new(self.pool.take(&*self.queue, spec.span_bytes(), scratch)?, spec))
    }

    /// Gives the pool's free buffers back to the device, for example once all shapes have changed.
    pub fn trim(&mut self) {
        self.pool.trim();
    }

    /// A tensor of its own, outside the pool. Contents are unspecified.
    ///
    /// # Errors
    /// Those of [`Queue::alloc`].
    pub fn alloc(&mut self, dtype: DType, rows: usize, cols: usize, usage: Usage) -> Result<TensorArg> {
        alloc_tensor(&*self.queue, TensorSpec::new(dtype, rows, cols), usage)
    }

    /// A frozen f32 tensor of these values.
    ///
    /// # Errors
    /// As [`Runner::constant`].
    pub fn constant_f32(&mut self, rows: usize, cols: usize, values: &[f32]) -> Result<TensorArg> {
        self.constant(DType::F32, rows, cols, values)
    }

    /// A frozen tensor of these values, rounded to float type `dtype`.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of values or type; those of [`Queue::alloc`].
    pub fn constant(&mut self, dtype: DType, rows: usize, cols: usize, values: &[f32]) -> Result<TensorArg> {
        let t = self.alloc(dtype, rows, cols, Usage::Weights)?;
        self.upload_f32(&t, values)?;
        t.buffer.freeze()?;
        Ok(t)
    }

    /// A frozen u32 tensor of these values.
    ///
    /// # Errors
    /// As [`Runner::constant`].
    pub fn constant_u32(&mut self, rows: usize, cols: usize, values: &[u32]) -> Result<TensorArg> {
        let t = self.alloc(DType::U32, rows, cols, Usage::Weights)?;
        self.upload_u32(&t, values)?;
        t.buffer.freeze()?;
        Ok(t)
    }

    /// A small table that decompositions share, made once.
    pub(crate) fn shared(&mut self, constant: Constant) -> Result<TensorArg> {
        if let Some(t) = self.constants.get(&constant) {
            return Ok(t.clone());
        }
        let [rows, cols] = constant.shape();
        let t = self.constant_f32(rows, cols, &constant.values())?;
        self.constants.insert(constant, t.clone());
        Ok(t)
    }

    /// Writes row-major values, rounded to the tensor's float type. Waits for queued uses of the buffer.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of values or another type; those of [`zofo_hal::Buffer::map_write`].
    pub fn upload_f32(&mut self, t: &TensorArg, values: &[f32]) -> Result<()> {
        expect_len(t, values.len(), t.spec.len())?;
        write_rows(t, |row, bytes| convert::encode(t.spec.dtype, &values[row * t.spec.cols..][..t.spec.cols], bytes))
    }

    /// Writes row-major u32 values. Waits for queued uses of the buffer.
    ///
    /// # Errors
    /// As [`Runner::upload_f32`].
    pub fn upload_u32(&mut self, t: &TensorArg, values: &[u32]) -> Result<()> {
        expect_type(t, DType::U32)?;
        self.write_bytes(t, bytemuck::cast_slice(values))
    }

    /// Writes row-major elements in the machine's byte order, without gaps between rows. Waits for queued uses of the buffer.
    ///
    /// # Errors
    /// As [`Runner::upload_f32`].
    pub fn write_bytes(&mut self, t: &TensorArg, bytes: &[u8]) -> Result<()> {
        let row_bytes = row_bytes(t);
        expect_len(t, bytes.len(), t.spec.rows * row_bytes)?;
        write_rows(t, |row, to| {
            to.copy_from_slice(&bytes[row * row_bytes..][..row_bytes]);
            Ok(())
        })
    }

    /// Row-major values of a float tensor of any type. Waits for queued writes to the buffer.
    ///
    /// # Errors
    /// `InvalidArgument` for another type; those of [`zofo_hal::Buffer::map_read`].
    pub fn read_f32(&mut self, t: &TensorArg) -> Result<Vec<f32>> {
        let mut values = vec![0.0; t.spec.len()];
        read_rows(t, |row, bytes| convert::decode(t.spec.dtype, bytes, &mut values[row * t.spec.cols..][..t.spec.cols]))?;
        Ok(values)
    }

    /// Row-major values of a u32 tensor. Waits for queued writes to the buffer.
    ///
    /// # Errors
    /// As [`Runner::read_f32`].
    pub fn read_u32(&mut self, t: &TensorArg) -> Result<Vec<u32>> {
        expect_type(t, DType::U32)?;
        let bytes = self.read_bytes(t)?;
        Ok(bytes.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect())
    }

    /// Row-major elements in the machine's byte order, without gaps between rows. Waits for queued writes to the buffer.
    ///
    /// # Errors
    /// Those of [`zofo_hal::Buffer::map_read`].
    pub fn read_bytes(&mut self, t: &TensorArg) -> Result<Vec<u8>> {
        let mut all = Vec::with_capacity(t.spec.rows * row_bytes(t));
        read_rows(t, |_, bytes| {
            all.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(all)
    }

    /// From now on ops are recorded, not run.
    ///
    /// # Errors
    /// Those of [`Queue::begin_recording`].
    pub fn begin_recording(&mut self) -> Result<()> {
        self.queue.begin_recording()?;
        self.recording = true;
        Ok(())
    }

    /// The ops since [`Runner::begin_recording`].
    ///
    /// # Errors
    /// Those of [`Queue::end_recording`].
    pub fn end_recording(&mut self) -> Result<RecordingRef> {
        self.recording = false;
        self.pool.end_recording();
        self.queue.end_recording()
    }

    /// Whether ops are recorded now.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording
    }

    /// Runs a recording made here; parameter buffers are read as they are then.
    ///
    /// # Errors
    /// Those of [`Queue::replay`].
    pub fn replay(&mut self, recording: &RecordingRef) -> Result<()> {
        self.queue.replay(recording)
    }

    /// Waits for everything submitted.
    ///
    /// # Errors
    /// The queue's sticky error.
    pub fn synchronize(&mut self) -> Result<()> {
        self.queue.synchronize(None)
    }

    /// Waits, then frees the queue and the pool.
    ///
    /// # Errors
    /// The queue's sticky error.
    pub fn close(self) -> Result<()> {
        self.queue.close()
    }

    /// Counters.
    pub fn stats(&self) -> RunStats {
        RunStats { submitted: self.submitted, decomposed: self.decomposed, pool_bytes: self.pool.bytes() }
    }
}

/// Whether [`Runner::run`] on `device` runs `op`, and how: the device's own answer, or `Emulated` where a decomposition into what the device
/// does support exists, or the device's reason why not.
///
/// An op whose shapes or types do not fit together is `Unsupported`, with [`Op::check`]'s message.
pub fn support(device: &dyn Device, op: &Op<TensorSpec>) -> Support {
    if let Err(e) = op.check() {
        return Support::lacking(Lacking::Layout, e.message().to_string());
    }
    match device.supports(op) {
        Support::Unsupported { reason, lacking } => decompose::plan(device, op).unwrap_or(Support::Unsupported { reason, lacking }),
        runs => runs,
    }
}

/// What to import a look-up table `[rows, cols]` for, so that [`Embedding`] runs on `device`: gathering where the
/// device has the op, products where it is decomposed.
pub fn lookup_uses(device: &dyn Device, dtype: DType, rows: usize, cols: usize) -> Uses {
    let gather = Uses { gather: true, ..Uses::default() };
    let runs = |uses: &Uses| {
        let table = WeightSpec { dtype, rows, cols, uses: *uses };
        let (ids, out) = (TensorSpec::vector(DType::U32, 1), TensorSpec::new(DType::F32, 1, cols));
        support(device, &Embedding::new(ids, table, out).into()).runs()
    };
    [gather, Uses { nn: true, ..Uses::default() }, Uses::FORWARD].into_iter().find(runs).unwrap_or(gather)
}

fn row_bytes(t: &TensorArg) -> usize {
    t.spec.cols * t.spec.dtype.block().1
}

fn expect_len(t: &TensorArg, got: usize, expected: usize) -> Result<()> {
    if got != expected {
        return Err(Error::invalid(format!("{got} host elements for {:?}, which takes {expected}", t.spec)));
    }
    Ok(())
}

fn expect_type(t: &TensorArg, dtype: DType) -> Result<()> {
    if t.spec.dtype != dtype {
        return Err(Error::invalid(format!("{:?} is not {dtype}", t.spec)));
    }
    Ok(())
}

/// Bytes of each row within the tensor's mapped span.
fn row_ranges(t: &TensorArg) -> impl Iterator<Item = Range<usize>> {
    let (row, pitch) = (row_bytes(t), t.spec.stride * t.spec.dtype.block().1);
    (0..t.spec.rows).map(move |r| r * pitch..r * pitch + row)
}

fn write_rows(t: &TensorArg, mut f: impl FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
    if t.spec.is_empty() {
        return Ok(());
    }
    let mut map = t.buffer.map_write(t.byte_range())?;
    row_ranges(t).enumerate().try_for_each(|(row, range)| f(row, &mut map[range]))
}

fn read_rows(t: &TensorArg, mut f: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
    if t.spec.is_empty() {
        return Ok(());
    }
    let map = t.buffer.map_read(t.byte_range())?;
    row_ranges(t).enumerate().try_for_each(|(row, range)| f(row, &map[range]))
}
