use crate::{
    buffers::{copy, f32s, fill, read_f32, submit},
    check::{Bench, Outcome, PATIENCE, ensure},
    suite::Tests,
};
use std::time::Duration;
use zofo_hal::{DeviceRef, ErrorKind, Usage};

pub(super) fn tests(t: &mut Tests) {
    t.add("queue/order/sequence", sequence);
    t.add("queue/order/chain", chain);
    t.add("queue/order/two_queues", two_queues);
    t.alone("queue/order/threads", threads);
    t.add("queue/event/complete", complete);
    t.add("queue/event/other_thread", other_thread);
    t.add("queue/time/limits", limits);
    t.alone("queue/close/waits", close_waits);
    t.alone("queue/close/keeps_buffers", close_keeps_buffers);
}

/// Sequence numbers rise, names are unique.
fn sequence(b: &Bench) -> Outcome {
    let x = b.queue.alloc(64, Usage::Activations)?;
    let mut last = None;
    for i in 0..10 {
        let n = submit(&*b.queue, &fill(&x, i as f32))?;
        ensure!(last.is_none_or(|l| n > l), "op {n} was submitted after op {last:?}");
        last = Some(n);
    }
    let other = b.device.create_queue()?;
    ensure!(other.id() != b.queue.id(), "two queues are called {:?}", other.id());
    ensure!(other.device().space() == b.device.space(), "a queue works in another space than its device");
    Ok(())
}

/// A value goes round a ring of buffers; any op out of order loses it.
fn chain(b: &Bench) -> Outcome {
    let ring = (0..5).map(|i| f32s(&*b.queue, &[i as f32; 333])).collect::<Result<Vec<_>, _>>()?;
    for i in 0..50 {
        submit(&*b.queue, &copy(&ring[i % 5], &ring[(i + 1) % 5]))?;
        if i % 7 == 3 {
            submit(&*b.queue, &fill(&ring[(i + 3) % 5], -1.0))?;
        }
    }
    for (i, x) in ring.iter().enumerate() {
        ensure!(read_f32(x)? == [0.0; 333], "buffer {i} holds {} after values went round", read_f32(x)?[0]);
    }
    Ok(())
}

fn two_queues(b: &Bench) -> Outcome {
    let other = b.device.create_queue()?;
    let x = f32s(&*b.queue, &[0.0; 500])?;
    let seen = other.alloc(2000, Usage::Activations)?;
    for i in 1..20 {
        for _ in 0..5 {
            submit(&*b.queue, &fill(&x, -7.0))?;
        }
        submit(&*b.queue, &fill(&x, i as f32))?;
        let done = b.queue.record_event()?;
        ensure!(done.queue() == b.queue.id(), "an event of {:?} says it is of {:?}", b.queue.id(), done.queue());
        other.wait_event(&done)?;
        other.hand_over(&x, &done)?;
        submit(&*other, &copy(&x, &seen))?;
        b.queue.hand_over(&x, &other.record_event()?)?;
    }
    other.synchronize(PATIENCE)?;
    ensure!(read_f32(&seen)? == [19.0; 500], "the second queue saw {}, not 19", read_f32(&seen)?[0]);
    Ok(())
}

fn threads(device: &DeviceRef) -> Outcome {
    let run = |seed: usize| -> Outcome {
        let queue = device.create_queue()?;
        let (a, b) = (f32s(&*queue, &[0.0; 777])?, f32s(&*queue, &[0.0; 777])?);
        for i in 0..30 {
            let value = (seed * 100 + i) as f32;
            submit(&*queue, &fill(&a, value))?;
            submit(&*queue, &copy(&a, &b))?;
            if i % 5 == 0 {
                ensure!(read_f32(&b)? == [value; 777], "a queue on another thread sees {}, not {value}", read_f32(&b)?[0]);
            }
        }
        queue.close()?;
        Ok(())
    };
    let run = &run;
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..4).map(|seed| s.spawn(move || run(seed))).collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".into())))
    })
}

fn complete(b: &Bench) -> Outcome {
    let x = b.queue.alloc(64, Usage::Activations)?;
    let empty = b.queue.record_event()?;
    empty.wait(PATIENCE)?;
    submit(&*b.queue, &fill(&x, 1.0))?;
    let event = b.queue.record_event()?;
    event.wait(PATIENCE)?;
    ensure!(event.is_complete() && empty.is_complete(), "an event that was waited for is not complete");
    event.wait(Some(Duration::ZERO))?;
    b.queue.wait_event(&event)?;
    submit(&*b.queue, &fill(&x, 2.0))?;
    let last = b.queue.record_event()?;
    b.queue.synchronize(PATIENCE)?;
    ensure!(last.is_complete(), "an event is not complete after its queue was synchronised");
    Ok(())
}

fn other_thread(b: &Bench) -> Outcome {
    let x = f32s(&*b.queue, &[0.0; 256])?;
    submit(&*b.queue, &fill(&x, 4.0))?;
    let event = b.queue.record_event()?;
    std::thread::spawn(move || event.wait(PATIENCE)).join().map_err(|_| "a wait panicked on another thread")??;
    let seen = std::thread::scope(|s| s.spawn(|| read_f32(&x)).join()).map_err(|_| "a mapping panicked on another thread")??;
    ensure!(seen == [4.0; 256], "another thread sees {}", seen[0]);
    Ok(())
}

/// A wait of no time either finds the work done or says `Timeout`; either way the queue goes on.
fn limits(b: &Bench) -> Outcome {
    let x = f32s(&*b.queue, &[0.0; 4096])?;
    for i in 0..50 {
        submit(&*b.queue, &fill(&x, i as f32))?;
    }
    let event = b.queue.record_event()?;
    for (what, result) in
        [("synchronize", b.queue.synchronize(Some(Duration::ZERO))), ("Event::wait", event.wait(Some(Duration::from_nanos(1))))]
    {
        if let Err(e) = result {
            ensure!(*e.kind() == ErrorKind::Timeout, "{what} with next to no time failed with {e:?}");
        }
    }
    // A time beyond what a clock can hold is a wait without end, not an overflow.
    b.queue.synchronize(Some(Duration::MAX))?;
    event.wait(Some(Duration::MAX))?;
    b.queue.synchronize(None)?;
    ensure!(read_f32(&x)?[0] == 49.0, "a wait that timed out lost work");
    Ok(())
}

fn close_waits(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let x = f32s(&*queue, &[0.0; 4096])?;
    for i in 0..20 {
        submit(&*queue, &fill(&x, i as f32))?;
    }
    queue.close()?;
    ensure!(read_f32(&x)?[0] == 19.0, "closing a queue lost work");
    Ok(())
}

/// Buffers, weights and events keep what they need of the device alive.
fn close_keeps_buffers(device: &DeviceRef) -> Outcome {
    let queue = device.create_queue()?;
    let x = f32s(&*queue, &[3.0; 16])?;
    let event = queue.record_event()?;
    drop(queue);
    ensure!(read_f32(&x)? == [3.0; 16], "a buffer died with its queue");
    event.wait(PATIENCE)?;
    let second = device.create_queue()?;
    x.freeze()?;
    let y = second.alloc(64, Usage::Activations)?;
    submit(&*second, &copy(&x, &y))?;
    ensure!(read_f32(&y)? == [3.0; 16], "a frozen buffer is of no use once its queue is gone");
    Ok(())
}
