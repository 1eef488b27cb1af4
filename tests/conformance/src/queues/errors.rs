use crate::{
    buffers::{copy, f32s, fill, read_f32, refuses, submit},
    check::{Bench, Outcome, PATIENCE, ensure, upload},
    suite::Tests,
};
use zofo_hal::{
    BufferRef, DType, DeviceRef, Error, ErrorKind, Op, Queue, TensorArg, TensorSpec,
    op::{Embedding, GatherRows},
};

pub(super) fn tests(t: &mut Tests) {
    t.alone("queue/error/sticks", sticks);
    t.alone("queue/error/mapping", mapping);
    t.alone("queue/error/reset", reset);
    t.alone("queue/error/other_queue", other_queue);
    t.alone("queue/error/close", close);
    t.add("queue/error/refused_is_not_sticky", refused_is_not_sticky);
}

/// An op that reads an index out of range, and the buffer it writes. `None` where the device has none such.
fn failing(queue: &dyn Queue) -> Outcome<Option<(Op<TensorArg>, BufferRef)>> {
    let (table, out) = (f32s(queue, &[1.0; 12])?, f32s(queue, &[2.0; 8])?);
    let index = upload(queue, bytemuck::cast_slice(&[1u32, 7]))?;
    let tensor = |b: &BufferRef, dtype, rows, cols| TensorArg::new(b.clone(), TensorSpec::new(dtype, rows, cols));
    let (table, index, written) = (tensor(&table, DType::F32, 3, 4), tensor(&index, DType::U32, 1, 2), tensor(&out, DType::F32, 2, 4));
    let gather: Op<TensorArg> = GatherRows::new(table.clone(), index.clone(), written.clone()).into();
    let embedding: Op<TensorArg> = Embedding::new(index, table, written).into();
    let op = [gather, embedding].into_iter().find(|op| queue.device().supports(&op.spec()).runs());
    Ok(op.map(|op| (op, out)))
}

/// That `error` is the failure of op `sequence`, called `name`.
fn is_failure(what: &str, error: &Error, name: &str, sequence: u64, poisoned: bool) -> Outcome {
    ensure!(
        *error.kind() == ErrorKind::Execution { poisoned },
        "{what} must fail with Execution {{ poisoned: {poisoned} }}, not with {error:?}"
    );
    let tag = error.op().ok_or_else(|| format!("{what} does not name the op: {error:?}"))?;
    ensure!(tag.op == name, "{what} blames {}, but {name} failed", tag.op);
    ensure!(tag.sequence == Some(sequence), "{what} blames op {:?} of the queue, but op {sequence} failed", tag.sequence);
    Ok(())
}

fn must_fail<T>(what: &str, result: zofo_hal::Result<T>, name: &str, sequence: u64, poisoned: bool) -> Outcome {
    match result {
        Ok(_) => Err(format!("{what} must fail after op {sequence}, {name}, failed").into()),
        Err(e) => is_failure(what, &e, name, sequence, poisoned),
    }
}

fn sticks(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let Some((op, _)) = failing(&*queue)? else { return Ok(()) };
    let before = queue.record_event()?;
    let x = f32s(&*queue, &[0.0; 4])?;
    submit(&*queue, &fill(&x, 1.0))?;
    let name = op.name();
    let sequence = queue.submit(&op).map_err(|e| format!("an index out of range is found while the op runs, submit said {e:?}"))?;
    let after = queue.record_event();
    for _ in 0..2 {
        must_fail("synchronize", queue.synchronize(PATIENCE), name, sequence, false)?;
    }
    must_fail("submit", queue.submit(&fill(&x, 2.0)), name, sequence, true)?;
    must_fail("record_event", queue.record_event(), name, sequence, true)?;
    before.wait(PATIENCE).map_err(|e| format!("an event before the failure must be complete, but: {e:?}"))?;
    // A synchronous device knows of the failure when the event is to be recorded.
    match after {
        Ok(event) => must_fail("a wait for an event after the failure", event.wait(PATIENCE), name, sequence, false),
        Err(e) => is_failure("record_event", &e, name, sequence, true),
    }
}

fn mapping(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let Some((op, out)) = failing(&*queue)? else { return Ok(()) };
    let sequence = queue.submit(&op)?;
    must_fail("map_read of what the op writes", out.map_read(0..4), op.name(), sequence, false)?;
    must_fail("map_write of what the op writes", out.map_write(0..4), op.name(), sequence, false)?;
    must_fail("freeze of what the op writes", out.freeze(), op.name(), sequence, false)
}

fn reset(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let Some((op, out)) = failing(&*queue)? else { return Ok(()) };
    queue.submit(&op)?;
    ensure!(queue.synchronize(PATIENCE).is_err(), "an index out of range went unnoticed");
    match queue.reset() {
        Err(e) if *e.kind() == ErrorKind::DeviceLost => return Ok(()),
        other => other?,
    }
    queue.synchronize(PATIENCE).map_err(|e| format!("after reset the queue still has {e:?}"))?;
    submit(&*queue, &fill(&out, 6.0))?;
    ensure!(read_f32(&out)? == [6.0; 8], "a queue is of no use after reset");
    queue.reset()?;
    ensure!(read_f32(&out)? == [6.0; 8], "reset of a queue without an error changed a buffer");
    queue.close()?;
    Ok(())
}

fn other_queue(device: &DeviceRef) -> Outcome {
    let (queue, other) = (device.create_queue()?, device.create_queue()?);
    let Some((op, _)) = failing(&*queue)? else { return Ok(()) };
    queue.submit(&op)?;
    ensure!(queue.synchronize(PATIENCE).is_err(), "an index out of range went unnoticed");
    let x = f32s(&*other, &[0.0; 4])?;
    submit(&*other, &fill(&x, 1.0))?;
    ensure!(read_f32(&x)? == [1.0; 4], "a failure on one queue reached another");
    other.close()?;
    Ok(())
}

fn close(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let Some((op, _)) = failing(&*queue)? else { return Ok(()) };
    let sequence = queue.submit(&op)?;
    must_fail("close", queue.close(), op.name(), sequence, false)
}

fn refused_is_not_sticky(b: &Bench) -> Outcome {
    let (x, y) = (f32s(&*b.queue, &[1.0; 4])?, f32s(&*b.queue, &[1.0; 5])?);
    for _ in 0..2 {
        refuses("a copy between unequal shapes", b.queue.submit(&copy(&x, &y)), &ErrorKind::InvalidArgument)?;
    }
    b.queue.synchronize(PATIENCE)?;
    submit(&*b.queue, &fill(&x, 3.0))?;
    ensure!(read_f32(&x)? == [3.0; 4], "a refused op stuck to the queue");
    Ok(())
}
