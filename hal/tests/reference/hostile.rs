//! What only the hostile device does.

use crate::util::*;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use zofo_hal::op::{Copy, Fill, GatherRows, Mul, ScaledAdd};
use zofo_hal::reference::{Fault, Hostile, HostileConfig};
use zofo_hal::{Device, Error, ErrorKind, Event, EventRef, QueueId, Result, TensorArg, Usage};

fn rig(config: HostileConfig) -> Rig {
    Rig::on(Hostile::new(config))
}

const EXECUTION: ErrorKind = ErrorKind::Execution { poisoned: false };
const POISONED: ErrorKind = ErrorKind::Execution { poisoned: true };

#[test]
fn it_says_that_it_is_asynchronous() {
    assert!(Hostile::new(HostileConfig::default()).features().asynchronous);
}

/// One queue doubles, the other adds; only events keep them in order.
#[test]
fn queues_interleave_but_events_hold() {
    for seed in 0..40 {
        let a = rig(HostileConfig::seeded(seed));
        let b = Rig::on(a.device.clone());
        let t = a.f32(1, 1, &[1.0]);
        let noise = b.f32(1, 1, &[0.0]);
        let (mut from, mut to) = (&a, &b);
        let mut want = 1.0;
        for step in 0..12 {
            if step % 2 == 0 {
                from.run(ScaledAdd::new(t.clone(), t.clone()).alpha(2.0));
                want *= 2.0;
            } else {
                from.run(ScaledAdd::new(t.clone(), t.clone()).gamma(1.0));
                want += 1.0;
            }
            // Work that has nothing to do with it.
            b.run(ScaledAdd::new(noise.clone(), noise.clone()).gamma(1.0));
            let event = from.queue.record_event().unwrap();
            to.queue.hand_over(&t.buffer, &event).unwrap();
            (from, to) = (to, from);
        }
        assert_eq!(from.get(&t), [want]);
        assert_eq!(b.get(&noise), [12.0]);
    }
}

#[test]
fn waiting_for_events_across_queues_never_deadlocks() {
    for seed in 0..20 {
        let rigs: Vec<Rig> = {
            let first = rig(HostileConfig::seeded(seed));
            let device = first.device.clone();
            std::iter::once(first).chain((1..4).map(|_| Rig::on(device.clone()))).collect()
        };
        let tensors: Vec<TensorArg> = rigs.iter().map(|r| r.f32(1, 1, &[0.0])).collect();
        let mut events: Vec<EventRef> = Vec::new();
        for step in 0..40 {
            let r = step * 7 % 4;
            // An event of every queue so far, its own among them.
            events.iter().rev().take(3).for_each(|e| rigs[r].queue.wait_event(e).unwrap());
            rigs[r].run(ScaledAdd::new(tensors[r].clone(), tensors[r].clone()).gamma(1.0));
            events.push(rigs[r].queue.record_event().unwrap());
        }
        // The last one alone forces all that it depends on.
        events[39].wait(None).unwrap();
        for (r, t) in tensors.iter().enumerate() {
            assert_eq!(rigs[r].get(t), [10.0]);
        }
    }
}

#[test]
fn many_submits_without_a_wait() {
    let rig = rig(HostileConfig::seeded(3));
    let t = rig.f32(1, 1, &[0.0]);
    for _ in 0..1000 {
        rig.run(ScaledAdd::new(t.clone(), t.clone()).gamma(1.0));
    }
    assert_eq!(rig.get(&t), [1000.0]);
}

#[test]
fn polling_an_event_comes_to_an_end() {
    let rig = rig(HostileConfig::seeded(4));
    let t = rig.out(1, 1);
    rig.run(Fill::new(t, 1.0));
    let event = rig.queue.record_event().unwrap();
    while !event.is_complete() {
        std::thread::yield_now();
    }
    event.wait(Some(Duration::ZERO)).unwrap();
}

/// An event of another backend, which happens when the test says so.
#[derive(Default)]
struct Foreign {
    done: AtomicBool,
    fails: AtomicBool,
    waits: AtomicUsize,
}

impl Event for Foreign {
    fn is_complete(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }
    fn wait(&self, _timeout: Option<Duration>) -> Result<()> {
        self.waits.fetch_add(1, Ordering::SeqCst);
        std::thread::yield_now();
        match (self.fails.load(Ordering::SeqCst), self.is_complete()) {
            (true, _) => Err(Error::execution("foreign trouble")),
            (_, true) => Ok(()),
            _ => Err(Error::new(ErrorKind::Timeout, "not yet")),
        }
    }
    fn queue(&self) -> QueueId {
        QueueId(u64::MAX)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[test]
fn foreign_events_hold_one_queue_and_not_the_other() {
    let a = rig(HostileConfig::seeded(5));
    let b = Rig::on(a.device.clone());
    let foreign = Arc::new(Foreign::default());
    let (t, u) = (a.f32(1, 1, &[0.0]), b.f32(1, 1, &[0.0]));
    a.queue.wait_event(&(foreign.clone() as EventRef)).unwrap();
    a.run(Fill::new(t.clone(), 1.0));
    b.run(Fill::new(u.clone(), 2.0));
    assert_eq!(*a.queue.synchronize(Some(Duration::from_millis(20))).unwrap_err().kind(), ErrorKind::Timeout);
    let event = a.queue.record_event().unwrap();
    assert_eq!(*event.wait(Some(Duration::ZERO)).unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(b.get(&u), [2.0]);
    foreign.done.store(true, Ordering::SeqCst);
    assert_eq!(a.get(&t), [1.0]);
    event.wait(Some(Duration::ZERO)).unwrap();
    assert!(foreign.waits.load(Ordering::SeqCst) > 0);
}

#[test]
fn the_failure_of_a_foreign_event_sticks() {
    let a = rig(HostileConfig::seeded(5));
    let foreign = Arc::new(Foreign::default());
    foreign.fails.store(true, Ordering::SeqCst);
    a.queue.wait_event(&(foreign as EventRef)).unwrap();
    let e = a.queue.synchronize(None).unwrap_err();
    assert!(e.to_string().contains("foreign trouble"), "{e}");
}

#[test]
fn two_hostile_devices_wait_for_each_other() {
    for seed in 0..10 {
        let (a, b) = (rig(HostileConfig::seeded(seed)), rig(HostileConfig::seeded(seed + 100)));
        let (t, u) = (a.f32(1, 1, &[0.0]), b.f32(1, 1, &[0.0]));
        for _ in 0..5 {
            a.run(ScaledAdd::new(t.clone(), t.clone()).gamma(1.0));
            b.queue.wait_event(&a.queue.record_event().unwrap()).unwrap();
            b.run(ScaledAdd::new(u.clone(), u.clone()).gamma(1.0));
            a.queue.wait_event(&b.queue.record_event().unwrap()).unwrap();
        }
        a.queue.synchronize(None).unwrap();
        assert_eq!((a.get(&t), b.get(&u)), (vec![5.0], vec![5.0]));
    }
}

#[test]
fn reset_drops_what_waits() {
    let a = rig(HostileConfig::seeded(6));
    let t = a.f32(1, 1, &[0.0]);
    let never = Arc::new(Foreign::default());
    a.queue.wait_event(&(never as EventRef)).unwrap();
    a.run(Fill::new(t.clone(), 1.0));
    let event = a.queue.record_event().unwrap();
    assert!(a.queue.synchronize(Some(Duration::from_millis(5))).is_err());
    a.queue.reset().unwrap();
    assert_eq!(*event.wait(None).unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(a.get(&t), [0.0]);
    a.run(Fill::new(t.clone(), 2.0));
    assert_eq!(a.get(&t), [2.0]);
}

#[test]
fn an_injected_failure_surfaces_where_the_host_waits() {
    // Both mean the third addition: nothing else runs on the device before it.
    let faults = [Fault::Execution { nth: 2 }, Fault::ExecutionOf { op: "scaled_add", nth: 2 }];
    for (seed, fault) in faults.into_iter().cycle().take(10).enumerate() {
        let a = rig(HostileConfig::seeded(seed as u64).fault(fault));
        let b = Rig::on(a.device.clone());
        let t = a.f32(1, 1, &[0.0]);
        let add = || ScaledAdd::new(t.clone(), t.clone()).gamma(1.0);
        a.run(add());
        a.run(add());
        let early = a.queue.record_event().unwrap();
        early.wait(None).unwrap();
        let sequence = a.queue.submit(&add().into()).unwrap();
        // The op has been accepted; it fails when it runs.
        let (late, rest) = (a.queue.record_event(), a.queue.submit(&add().into()));
        if let Err(e) = &rest {
            assert_eq!(*e.kind(), POISONED);
        }
        let e = a.queue.synchronize(None).unwrap_err();
        assert_eq!(*e.kind(), EXECUTION);
        assert_eq!(e.op().unwrap().op, "scaled_add");
        assert_eq!(e.op().unwrap().sequence, Some(sequence));
        assert_eq!(e.device(), Some("hostile"));
        early.wait(None).unwrap();
        if let Ok(late) = late {
            assert_eq!(*late.wait(None).unwrap_err().kind(), EXECUTION);
            assert!(late.is_complete());
            assert_eq!(*b.queue.wait_event(&late).unwrap_err().kind(), EXECUTION);
        }
        assert_eq!(*a.queue.submit(&add().into()).unwrap_err().kind(), POISONED);
        assert_eq!(*t.buffer.map_read(0..4).map(drop).unwrap_err().kind(), EXECUTION);
        // Another queue is not concerned.
        let u = b.f32(1, 1, &[3.0]);
        b.run(Fill::new(u.clone(), 4.0));
        assert_eq!(b.get(&u), [4.0]);
        a.queue.reset().unwrap();
        assert_eq!(a.get(&t), [2.0], "an op behind the failed one ran");
    }
}

#[test]
fn a_failure_travels_with_a_hand_over() {
    let mut travelled = 0;
    for seed in 0..10 {
        let a = rig(HostileConfig::seeded(seed).fault(Fault::ExecutionOf { op: "fill", nth: 0 }));
        let b = Rig::on(a.device.clone());
        let t = a.out(1, 1);
        a.run(Fill::new(t.clone(), 1.0));
        let Ok(event) = a.queue.record_event() else { continue };
        if b.queue.hand_over(&t.buffer, &event).is_ok() {
            assert!(b.queue.synchronize(None).unwrap_err().to_string().contains("injected fault"));
            assert!(t.buffer.map_read(0..4).is_err());
            travelled += 1;
        }
    }
    assert!(travelled > 0, "the failure always showed before the hand-over");
}

#[test]
fn hand_over_before_the_last_use_is_noticed() {
    let a = rig(HostileConfig::seeded(7));
    let b = Rig::on(a.device.clone());
    let t = a.f32(1, 1, &[0.0]);
    // The queue is held, so that the late use is still waiting.
    let held = Arc::new(Foreign::default());
    a.queue.wait_event(&(held.clone() as EventRef)).unwrap();
    let event = a.queue.record_event().unwrap();
    a.run(Fill::new(t.clone(), 1.0));
    assert!(b.queue.hand_over(&t.buffer, &event).unwrap_err().to_string().contains("after the event"));
    held.done.store(true, Ordering::SeqCst);
    b.queue.hand_over(&t.buffer, &a.queue.record_event().unwrap()).unwrap();
    assert_eq!(b.get(&t), [1.0]);
}

#[test]
fn a_lost_device_stays_lost() {
    let a = rig(HostileConfig::seeded(8).fault(Fault::DeviceLost { after: 1 }));
    let b = Rig::on(a.device.clone());
    let (t, u) = (a.f32(1, 1, &[0.0]), b.f32(1, 1, &[0.0]));
    let frozen = a.f32(1, 1, &[0.0]);
    frozen.buffer.freeze().unwrap();
    a.run(Fill::new(t.clone(), 1.0));
    assert_eq!(a.get(&t), [1.0]);
    a.run(Fill::new(t.clone(), 2.0));
    let lost = |e: Error| assert_eq!(*e.kind(), ErrorKind::DeviceLost, "{e}");
    lost(a.queue.synchronize(None).unwrap_err());
    lost(b.queue.synchronize(None).unwrap_err());
    lost(b.refused(Fill::new(u.clone(), 1.0)));
    lost(a.queue.reset().unwrap_err());
    lost(a.queue.alloc(4, Usage::Workspace).map(drop).unwrap_err());
    lost(u.buffer.map_read(0..4).map(drop).unwrap_err());
    lost(frozen.buffer.map_read(0..4).map(drop).unwrap_err());
    lost(a.device.create_queue().map(drop).unwrap_err());
    lost(a.queue.close().unwrap_err());
}

#[test]
fn allocations_and_imports_fail_on_demand() {
    let a = rig(HostileConfig::seeded(9).fault(Fault::AllocFailure { nth: 1 }).fault(Fault::ImportFailure { nth: 0 }));
    a.out(1, 1);
    let e = a.queue.alloc(12, Usage::Activations).map(drop).unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::OutOfMemory { requested: 12, available: None });
    a.out(1, 1);
    let spec = zofo_hal::WeightSpec { dtype: zofo_hal::DType::F32, rows: 1, cols: 1, uses: zofo_hal::Uses::ALL };
    let import = || a.device.import_weight(&spec, zofo_hal::WeightData::Borrowed(&[0; 4]));
    assert!(matches!(import().map(drop).unwrap_err().kind(), ErrorKind::OutOfMemory { .. }));
    import().unwrap();
}

#[test]
fn a_stalled_op_ends() {
    let a = rig(HostileConfig::seeded(10).fault(Fault::Stall { nth: 0, duration: Duration::from_millis(200) }));
    let t = a.out(1, 1);
    a.run(Fill::new(t.clone(), 1.0));
    // A slow machine may be past it already; otherwise the wait ends early, and says so.
    if let Err(e) = a.queue.synchronize(Some(Duration::ZERO)) {
        assert_eq!(*e.kind(), ErrorKind::Timeout);
    }
    assert_eq!(a.get(&t), [1.0]);
}

#[test]
fn dropping_waits_for_the_work() {
    for seed in 0..10 {
        let a = rig(HostileConfig::seeded(seed));
        let t = a.out(1, 1);
        for i in 0..20 {
            a.run(Fill::new(t.clone(), i as f32));
        }
        drop(a);
        // Neither the queue nor the device is there any more; the memory is.
        assert_eq!(t.buffer.map_read(0..4).unwrap().cast::<f32>(), [19.0]);
    }
}

#[test]
fn operands_live_until_their_op_has_run() {
    for seed in 0..10 {
        let a = rig(HostileConfig::seeded(seed));
        let out = a.f32(1, 8, &[0.0; 8]);
        for i in 0..8 {
            // Dropped before it is used, and its memory wanted by the next one.
            let x = a.f32(1, 1, &[i as f32]);
            a.run(Copy::new(x, out.cols(i, 1)));
        }
        assert_eq!(a.get(&out), [0., 1., 2., 3., 4., 5., 6., 7.]);
    }
}

#[test]
fn freed_memory_is_overwritten() {
    let a = rig(HostileConfig::seeded(11));
    drop(a.f32(1, 100, &[5.0; 100]));
    let t = a.out(1, 100);
    assert!(a.get(&t).iter().all(|x| x.is_nan()));
    let words = a.alloc(zofo_hal::TensorSpec::new(zofo_hal::DType::U32, 1, 1));
    a.fails(GatherRows::new(a.f32(1, 1, &[1.0]), words, a.out(1, 1)));
}

#[test]
fn threads_share_a_device() {
    let a = rig(HostileConfig::seeded(12));
    std::thread::scope(|scope| {
        for k in 1..4 {
            let device = a.device.clone();
            scope.spawn(move || {
                let rig = Rig::on(device);
                let (t, one) = (rig.f32(1, 1, &[0.0]), rig.f32(1, 1, &[k as f32]));
                for _ in 0..50 {
                    rig.run(Mul::new(one.clone(), one.clone(), t.clone()).accumulate(true));
                }
                assert_eq!(rig.get(&t), [(50 * k * k) as f32]);
                rig.queue.close().unwrap();
            });
        }
    });
}
