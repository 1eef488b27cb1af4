//! Buffers: sizes, mapping, homes, foreign handles, memory.

use crate::{
    check::{Bench, Outcome, PATIENCE, ensure, upload},
    foreign::{ForeignBuffer, ForeignEvent},
    suite::Tests,
};
use std::sync::Arc;
use zofo_hal::{
    BufferRef, DType, DeviceRef, ErrorKind, Home, MemorySpace, Op, Queue, Result, Support, TensorArg, TensorSpec, Usage,
    op::{Copy, Fill, MatMul, Orientation, ScaledAdd},
    reference::Reference,
};

pub(super) fn tests(t: &mut Tests) {
    t.add("buffer/alloc/properties", properties);
    t.add("buffer/alloc/zero_size", zero_size);
    t.alone("buffer/alloc/out_of_memory", out_of_memory);
    t.add("buffer/map/round_trip", round_trip);
    t.add("buffer/map/bad_range", bad_range);
    t.add("buffer/map/locks", locks);
    t.add("buffer/map/refuses_submit", mapped_submit);
    t.add("buffer/home/freeze", freeze);
    t.add("buffer/home/other_queue", other_queue);
    t.add("buffer/home/hand_over", hand_over);
    t.add("buffer/home/bad_hand_over", bad_hand_over);
    t.add("buffer/foreign/other_space", other_space);
    t.add("buffer/foreign/impostor", impostor);
    t.add("buffer/range/outside", outside);
    t.add("buffer/drop/early", dropped_early);
    t.alone("buffer/memory/statistics", statistics);
    t.alone("buffer/memory/steady_state", steady_state);
}

/// That `result` is an error of the kind `kind`.
pub(crate) fn refuses<T>(what: &str, result: Result<T>, kind: &ErrorKind) -> Outcome {
    match result {
        Err(e) if e.kind() == kind => Ok(()),
        Err(e) => Err(format!("{what} must fail with {kind:?}, not with {e:?}").into()),
        Ok(_) => Err(format!("{what} must fail with {kind:?}").into()),
    }
}

/// The contents of `buffer` as f32.
pub(crate) fn read_f32(buffer: &BufferRef) -> Result<Vec<f32>> {
    Ok(buffer.map_read(0..buffer.bytes())?.cast().to_vec())
}

/// `[1, n]` f32 over all of `buffer`.
pub(crate) fn vector(buffer: &BufferRef) -> TensorArg {
    TensorArg::new(buffer.clone(), TensorSpec::vector(DType::F32, buffer.bytes() / 4))
}

/// A buffer of f32.
pub(crate) fn f32s(queue: &dyn Queue, values: &[f32]) -> Result<BufferRef> {
    upload(queue, bytemuck::cast_slice(values))
}

/// An op that copies one f32 buffer to another of the same size.
pub(crate) fn copy(src: &BufferRef, dst: &BufferRef) -> Op<TensorArg> {
    Copy::new(vector(src), vector(dst)).into()
}

/// Fills a buffer with an f32.
pub(crate) fn fill(dst: &BufferRef, value: f32) -> Op<TensorArg> {
    Fill::new(vector(dst), value).into()
}

/// Submits `op`, or says that the device lacks it: tests of buffers and queues need only copies and fills.
pub(crate) fn submit(queue: &dyn Queue, op: &Op<TensorArg>) -> Outcome<u64> {
    if let Support::Unsupported { reason, .. } = queue.device().supports(&op.spec()) {
        return Err(format!("a device must support contiguous f32 {}: {reason}", op.name()).into());
    }
    Ok(queue.submit(op)?)
}

fn properties(b: &Bench) -> Outcome {
    for (bytes, usage) in [(4, Usage::Parameters), (1000, Usage::Activations), (1 << 16, Usage::Weights), (64, Usage::Workspace)] {
        let buffer = b.queue.alloc(bytes, usage)?;
        ensure!(buffer.bytes() >= bytes, "asked for {bytes} bytes, got {}", buffer.bytes());
        ensure!(buffer.usage() == usage, "usage is {:?}, not {usage:?}", buffer.usage());
        ensure!(buffer.space() == b.device.space(), "a buffer is in {:?}, its device in {:?}", buffer.space(), b.device.space());
        ensure!(buffer.home() == Home::Queue(b.queue.id()), "a new buffer's home is {:?}", buffer.home());
        let map = buffer.map_read(0..bytes)?;
        let address = map.as_ptr().addr();
        ensure!(address.is_multiple_of(4), "a mapping at {address:#x} cannot be read as f32");
        if b.device.space() == MemorySpace::HOST {
            let alignment = b.device.limits().alignment;
            ensure!(address.is_multiple_of(alignment), "a buffer at {address:#x} is not aligned to the {alignment} bytes of the limits");
        }
    }
    ensure!(b.device.limits().alignment.is_power_of_two(), "an alignment is a power of two");
    Ok(())
}

fn zero_size(b: &Bench) -> Outcome {
    let buffer = b.queue.alloc(0, Usage::Activations)?;
    ensure!(buffer.map_read(0..0)?.is_empty(), "an empty buffer maps to nothing");
    drop(buffer.map_write(0..0)?);
    submit(&*b.queue, &copy(&buffer, &b.queue.alloc(0, Usage::Activations)?))?;
    b.queue.synchronize(PATIENCE)?;
    Ok(())
}

fn out_of_memory(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let limits = device.limits();
    let mut sizes = vec![isize::MAX as usize, usize::MAX];
    sizes.extend(limits.memory_bytes.map(|m| (m as usize).saturating_mul(2)));
    sizes.extend(limits.max_buffer_bytes.checked_add(1).map(|m| m as usize));
    for bytes in sizes {
        match queue.alloc(bytes, Usage::Activations) {
            Ok(_) => return Err(format!("got a buffer of {bytes} bytes").into()),
            Err(e) => match e.kind() {
                ErrorKind::OutOfMemory { requested, .. } => {
                    ensure!(*requested >= bytes as u64, "asked for {bytes} bytes, the error says {requested}");
                }
                _ => return Err(format!("asking for {bytes} bytes must fail with OutOfMemory, not with {e:?}").into()),
            },
        }
    }
    let small = f32s(&*queue, &[1.0])?;
    ensure!(read_f32(&small)? == [1.0], "the queue is of no use after running out of memory");
    Ok(())
}

fn round_trip(b: &Bench) -> Outcome {
    let bytes: Vec<u8> = (0..1001u32).map(|i| (i * 7) as u8).collect();
    let buffer = upload(&*b.queue, &bytes)?;
    ensure!(buffer.map_read(0..1001)?[..] == bytes, "what was written is not what is read");
    buffer.map_write(10..13)?.copy_from_slice(&[1, 2, 3]);
    let map = buffer.map_read(9..14)?;
    ensure!(map[..] == [bytes[9], 1, 2, 3, bytes[13]], "a mapping of a part changed other bytes: {:?}", &map[..]);
    drop(map);
    let mut map = buffer.map_write(0..1001)?;
    ensure!(map[500] == bytes[500] && map[11] == 2, "a mapping for writing does not hold the present contents");
    map[0] = 99;
    drop(map);
    ensure!(buffer.map_read(0..1)?[0] == 99, "a change through a mapping is lost");
    Ok(())
}

#[allow(clippy::reversed_empty_ranges)]
fn bad_range(b: &Bench) -> Outcome {
    let buffer = b.queue.alloc(16, Usage::Activations)?;
    let end = buffer.bytes();
    for range in [0..end + 1, end + 1..end + 1, 8..4, 0..usize::MAX, usize::MAX..usize::MAX] {
        refuses(&format!("map_read({range:?}) of {end} bytes"), buffer.map_read(range.clone()), &ErrorKind::InvalidArgument)?;
        refuses(&format!("map_write({range:?}) of {end} bytes"), buffer.map_write(range), &ErrorKind::InvalidArgument)?;
    }
    Ok(())
}

fn locks(b: &Bench) -> Outcome {
    let buffer = f32s(&*b.queue, &[1.0; 4])?;
    let written = buffer.map_write(0..4)?;
    refuses("map_read of a buffer mapped for writing", buffer.map_read(8..12), &ErrorKind::InvalidArgument)?;
    refuses("map_write of a buffer mapped for writing", buffer.map_write(8..12), &ErrorKind::InvalidArgument)?;
    drop(written);
    let (one, two) = (buffer.map_read(0..4)?, buffer.map_read(0..8)?);
    refuses("map_write of a buffer mapped for reading", buffer.map_write(8..12), &ErrorKind::InvalidArgument)?;
    drop((one, two));
    drop(buffer.map_write(0..16)?);
    Ok(())
}

fn mapped_submit(b: &Bench) -> Outcome {
    let (src, dst) = (f32s(&*b.queue, &[1.0; 4])?, f32s(&*b.queue, &[2.0; 4])?);
    let op = copy(&src, &dst);
    let map = src.map_write(0..16)?;
    refuses("submit of an op that reads a buffer mapped for writing", b.queue.submit(&op), &ErrorKind::InvalidArgument)?;
    drop(map);
    let map = dst.map_read(0..16)?;
    refuses("submit of an op that writes a buffer mapped for reading", b.queue.submit(&op), &ErrorKind::InvalidArgument)?;
    drop(map);
    submit(&*b.queue, &op)?;
    ensure!(read_f32(&dst)? == [1.0; 4], "the copy did not run once the mappings were gone");
    Ok(())
}

fn freeze(b: &Bench) -> Outcome {
    let (src, dst) = (f32s(&*b.queue, &[0.0; 8])?, f32s(&*b.queue, &[2.0; 8])?);
    submit(&*b.queue, &fill(&src, 5.0))?;
    src.freeze()?;
    ensure!(src.home() == Home::Frozen, "a frozen buffer's home is {:?}", src.home());
    ensure!(read_f32(&src)? == [5.0; 8], "freezing lost a queued write");
    refuses("map_write of a frozen buffer", src.map_write(0..4), &ErrorKind::InvalidArgument)?;
    refuses("an op that writes a frozen buffer", b.queue.submit(&fill(&src, 1.0)), &ErrorKind::InvalidArgument)?;
    submit(&*b.queue, &copy(&src, &dst))?;
    let other = b.device.create_queue()?;
    let theirs = other.alloc(32, Usage::Activations)?;
    submit(&*other, &copy(&src, &theirs))?;
    ensure!(read_f32(&dst)? == [5.0; 8] && read_f32(&theirs)? == [5.0; 8], "queues read other values than the frozen ones");
    Ok(())
}

fn other_queue(b: &Bench) -> Outcome {
    let other = b.device.create_queue()?;
    let (mine, theirs) = (f32s(&*b.queue, &[1.0; 4])?, f32s(&*other, &[2.0; 4])?);
    for (what, op) in [("reads", copy(&theirs, &mine)), ("writes", copy(&mine, &theirs))] {
        refuses(&format!("an op that {what} a buffer of another queue"), b.queue.submit(&op), &ErrorKind::InvalidArgument)?;
    }
    Ok(())
}

fn hand_over(b: &Bench) -> Outcome {
    let other = b.device.create_queue()?;
    let buffer = f32s(&*b.queue, &[1.0; 4])?;
    let sink = other.alloc(16, Usage::Activations)?;
    for round in 0..4 {
        let value = round as f32;
        submit(&*b.queue, &fill(&buffer, value))?;
        let event = b.queue.record_event()?;
        other.hand_over(&buffer, &event)?;
        ensure!(buffer.home() == Home::Queue(other.id()), "after hand_over the home is {:?}", buffer.home());
        refuses("an op of the old home", b.queue.submit(&fill(&buffer, 9.0)), &ErrorKind::InvalidArgument)?;
        submit(&*other, &copy(&buffer, &sink))?;
        submit(&*other, &fill(&buffer, -1.0))?;
        let back = other.record_event()?;
        b.queue.hand_over(&buffer, &back)?;
        ensure!(read_f32(&sink)? == [value; 4], "the new home saw {:?}, the old one wrote {value}", read_f32(&sink)?);
        ensure!(read_f32(&buffer)? == [-1.0; 4], "the old home sees {:?} after the way back", read_f32(&buffer)?);
    }
    Ok(())
}

fn bad_hand_over(b: &Bench) -> Outcome {
    let other = b.device.create_queue()?;
    let buffer = f32s(&*b.queue, &[1.0; 4])?;
    let theirs = other.record_event()?;
    refuses("hand_over with an event of a queue that is not the home", other.hand_over(&buffer, &theirs), &ErrorKind::InvalidArgument)?;
    let event = b.queue.record_event()?;
    let foreign: BufferRef = Arc::new(ForeignBuffer { space: b.device.space(), home: b.queue.id(), bytes: 16 });
    refuses("hand_over of a foreign buffer", other.hand_over(&foreign, &event), &ErrorKind::ForeignBuffer)?;
    buffer.freeze()?;
    refuses("hand_over of a frozen buffer", other.hand_over(&buffer, &event), &ErrorKind::InvalidArgument)
}

fn other_space(b: &Bench) -> Outcome {
    let stranger: DeviceRef = Reference::new();
    if stranger.space() == b.device.space() {
        return Ok(());
    }
    let queue = stranger.create_queue()?;
    let (theirs, mine) = (f32s(&*queue, &[1.0; 4])?, f32s(&*b.queue, &[1.0; 4])?);
    refuses("an op on a buffer of another space", b.queue.submit(&copy(&theirs, &mine)), &ErrorKind::ForeignBuffer)?;
    theirs.freeze()?;
    refuses("an op on a frozen buffer of another space", b.queue.submit(&copy(&theirs, &mine)), &ErrorKind::ForeignBuffer)?;
    refuses("hand_over from another space", b.queue.hand_over(&f32s(&*queue, &[1.0])?, &queue.record_event()?), &ErrorKind::ForeignBuffer)
}

fn impostor(b: &Bench) -> Outcome {
    let foreign: BufferRef = Arc::new(ForeignBuffer { space: b.device.space(), home: b.queue.id(), bytes: 16 });
    let mine = f32s(&*b.queue, &[1.0; 4])?;
    refuses("an op that reads a buffer of another backend", b.queue.submit(&copy(&foreign, &mine)), &ErrorKind::ForeignBuffer)?;
    refuses("an op that writes a buffer of another backend", b.queue.submit(&copy(&mine, &foreign)), &ErrorKind::ForeignBuffer)?;
    // Events of other backends are fine: waiting is all that is needed of them.
    b.queue.wait_event(&(Arc::new(ForeignEvent(zofo_hal::QueueId::unique())) as _))?;
    submit(&*b.queue, &fill(&mine, 3.0))?;
    ensure!(read_f32(&mine)? == [3.0; 4], "the queue is of no use after it refused a foreign buffer");
    Ok(())
}

fn outside(b: &Bench) -> Outcome {
    let buffer = f32s(&*b.queue, &[1.0; 8])?;
    let end = buffer.bytes();
    let tensor = |offset, spec| TensorArg { buffer: buffer.clone(), offset, spec };
    let bad = [
        ("past the end", tensor(end - 12, TensorSpec::vector(DType::F32, 4))),
        ("of a size that overflows", tensor(0, TensorSpec::new(DType::F32, usize::MAX / 2, 3))),
        ("at an offset that overflows", tensor(usize::MAX - 3, TensorSpec::vector(DType::F32, 4))),
        ("at a misaligned offset", tensor(2, TensorSpec::vector(DType::F32, 4))),
        ("with a stride shorter than its rows", tensor(0, TensorSpec::new(DType::F32, 2, 3).with_stride(2))),
    ];
    for (what, t) in bad {
        refuses(&format!("a tensor {what}"), b.queue.submit(&Fill::new(t, 0.0).into()), &ErrorKind::InvalidArgument)?;
    }
    let (low, high) = (tensor(0, TensorSpec::vector(DType::F32, 4)), tensor(8, TensorSpec::vector(DType::F32, 4)));
    refuses("an output that overlaps an input", b.queue.submit(&Copy::new(low, high).into()), &ErrorKind::InvalidArgument)?;
    ensure!(read_f32(&buffer)?[..8] == [1.0; 8], "a refused op wrote");
    Ok(())
}

fn dropped_early(b: &Bench) -> Outcome {
    let dst = f32s(&*b.queue, &[0.0; 1000])?;
    for i in 0..20 {
        let src = f32s(&*b.queue, &[i as f32; 1000])?;
        submit(&*b.queue, &copy(&src, &dst))?;
    }
    ensure!(read_f32(&dst)? == [19.0; 1000], "a handle was dropped while its op was queued, and the op saw other bytes");
    Ok(())
}

fn statistics(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let before = device.memory();
    let buffer = queue.alloc(1 << 20, Usage::Activations)?;
    let during = device.memory();
    ensure!(
        during.in_use >= before.in_use + (1 << 20),
        "{} bytes in use before, {} after 1 MiB was allocated",
        before.in_use,
        during.in_use
    );
    ensure!(during.peak >= during.in_use, "the peak is {}, but {} bytes are in use", during.peak, during.in_use);
    ensure!(during.allocations > before.allocations, "an allocation was not counted");
    drop(buffer);
    queue.synchronize(PATIENCE)?;
    let after = device.memory();
    ensure!(after.in_use == before.in_use, "{} bytes in use before, {} after the buffer was dropped", before.in_use, after.in_use);
    ensure!(after.peak >= during.in_use, "the peak was forgotten");
    Ok(())
}

/// A step of whatever the device runs: a product, an element-wise op, copies.
fn steady_state(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let n = 96;
    let [a, w, h, out] = [0, 1, 2, 3].map(|_| f32s(&*queue, &vec![0.5; n * n]));
    let (a, w, h, out) = (a?, w?, h?, out?);
    let square = |b: &BufferRef| TensorArg::new(b.clone(), TensorSpec::new(DType::F32, n, n));
    let ops: Vec<Op<TensorArg>> = vec![
        copy(&a, &h),
        MatMul::new(square(&h), square(&w), square(&out), Orientation::Nt).into(),
        ScaledAdd::new(square(&out), square(&h)).b(square(&a)).alpha(0.01).into(),
        copy(&h, &a),
    ];
    let ops: Vec<_> = ops.into_iter().filter(|op| device.supports(&op.spec()).runs()).collect();
    queue.reserve(ops.iter().map(|op| device.workspace(&op.spec())).max().unwrap_or(0))?;
    let step = || -> Outcome {
        for op in &ops {
            queue.submit(op)?;
        }
        queue.synchronize(PATIENCE)?;
        drop(a.map_read(0..4)?);
        Ok(())
    };
    step()?;
    let warm = device.memory();
    for _ in 0..20 {
        step()?;
    }
    let end = device.memory();
    ensure!(warm == end, "twenty more steps changed the memory from {warm:?} to {end:?}");
    Ok(())
}
