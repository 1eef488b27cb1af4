//! What both devices promise beside arithmetic.

use crate::util::*;
use zofo_hal::op::{Copy, Embedding, Fill, GatherRows, MatMul, Mul, Orientation, RmsNorm, ScaledAdd, SwiGluBackward};
use zofo_hal::reference::{Hostile, HostileConfig, Reference, ReferenceDriver};
use zofo_hal::{DType, Device, ErrorKind, Home, OpenOptions, Registry, TensorSpec, Usage, Uses, WeightData, WeightSpec};

fn invalid(e: &zofo_hal::Error) {
    assert_eq!(*e.kind(), ErrorKind::InvalidArgument, "{e}");
}

#[test]
fn outputs_overlap_only_where_the_op_allows_it() {
    for rig in rigs() {
        let t = rig.f32(2, 4, &[1.; 8]);
        invalid(&rig.refused(Copy::new(t.cols(0, 2), t.cols(1, 2))));
        invalid(&rig.refused(Copy::new(t.rows(0, 1), t.rows(0, 1))));
        rig.run(Copy::new(t.cols(0, 2), t.cols(2, 2)));
        rig.run(ScaledAdd::new(t.clone(), t.clone()).b(t.rows(0, 2)));
        assert_eq!(rig.get(&t), [2.; 8]);
        invalid(&rig.refused(ScaledAdd::new(t.rows(1, 1), t.rows(1, 1)).b(t.rows(1, 1).cols(0, 1))));
        invalid(&rig.refused(Mul::new(t.clone(), t.rows(0, 1), t.clone()).accumulate(true)));
        let d = rig.f32(2, 4, &[1.; 8]);
        invalid(&rig.refused(SwiGluBackward::new(t.clone(), t.clone(), d.clone(), d.clone(), d)));
    }
}

#[test]
fn shapes_are_checked() {
    for rig in rigs() {
        let e = rig.refused(MatMul::new(rig.out(2, 3), rig.out(4, 5), rig.out(2, 4), Orientation::Nt));
        invalid(&e);
        assert!(e.to_string().contains("matmul"), "{e}");
        let beyond = zofo_hal::TensorArg::new(rig.out(2, 2).buffer, TensorSpec::new(DType::F32, 3, 2));
        invalid(&rig.refused(Fill::new(beyond, 0.0)));
    }
}

#[test]
fn buffers_have_one_home() {
    for rig in rigs() {
        let other = Rig::on(rig.device.clone());
        let t = rig.f32(1, 2, &[1., 2.]);
        assert_eq!(t.buffer.home(), Home::Queue(rig.queue.id()));
        let out = other.out(1, 2);
        invalid(&other.refused(Copy::new(t.clone(), out.clone())));
        let event = rig.queue.record_event().unwrap();
        invalid(&rig.queue.hand_over(&out.buffer, &event).unwrap_err());
        other.queue.hand_over(&t.buffer, &event).unwrap();
        assert_eq!(t.buffer.home(), Home::Queue(other.queue.id()));
        other.run(Copy::new(t.clone(), out.clone()));
        assert_eq!(other.get(&out), [1., 2.]);
        invalid(&rig.refused(Fill::new(t, 0.0)));
    }
}

#[test]
fn frozen_buffers_are_read_by_all_and_written_by_none() {
    for rig in rigs() {
        let other = Rig::on(rig.device.clone());
        let t = rig.f32(1, 2, &[0.; 2]);
        rig.run(Fill::new(t.clone(), 3.0));
        t.buffer.freeze().unwrap();
        t.buffer.freeze().unwrap();
        assert_eq!(t.buffer.home(), Home::Frozen);
        let out = other.out(1, 2);
        // Also while it is mapped: nothing about it can change.
        let mapped = t.buffer.map_read(0..8).unwrap();
        other.run(Copy::new(t.clone(), out.clone()));
        assert_eq!(other.get(&out), [3.; 2]);
        drop(mapped);
        invalid(&rig.refused(Fill::new(t.clone(), 0.0)));
        invalid(&t.buffer.map_write(0..8).map(drop).unwrap_err());
        let event = rig.queue.record_event().unwrap();
        invalid(&other.queue.hand_over(&t.buffer, &event).unwrap_err());
    }
}

#[test]
fn mapped_buffers_are_not_computed_on() {
    for rig in rigs() {
        let t = rig.f32(1, 4, &[1., 2., 3., 4.]);
        let out = rig.out(1, 4);
        let read = t.buffer.map_read(4..12).unwrap();
        let again = t.buffer.map_read(0..16).unwrap();
        assert_eq!(read.cast::<f32>(), [2., 3.]);
        invalid(&t.buffer.map_write(0..4).map(drop).unwrap_err());
        invalid(&rig.refused(Copy::new(t.clone(), out.clone())));
        drop((read, again));
        let mut write = t.buffer.map_write(4..8).unwrap();
        assert_eq!(write.cast::<f32>(), [2.]);
        write.cast::<f32>()[0] = 20.0;
        invalid(&t.buffer.map_read(0..4).map(drop).unwrap_err());
        invalid(&t.buffer.map_write(0..4).map(drop).unwrap_err());
        invalid(&t.buffer.freeze().unwrap_err());
        invalid(&rig.refused(Fill::new(t.clone(), 0.0)));
        drop(write);
        rig.run(Copy::new(t.clone(), out.clone()));
        assert_eq!(rig.get(&out), [1., 20., 3., 4.]);
        invalid(&t.buffer.map_read(0..17).map(drop).unwrap_err());
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = 8..4;
        invalid(&t.buffer.map_read(reversed).map(drop).unwrap_err());
    }
}

#[test]
fn other_spaces_and_other_backends_are_foreign() {
    let [reference, hostile] = rigs();
    for (rig, other) in [(&reference, &hostile), (&hostile, &reference)] {
        let (ours, theirs) = (rig.out(1, 2), other.out(1, 2));
        assert_eq!(*rig.refused(Copy::new(theirs.clone(), ours.clone())).kind(), ErrorKind::ForeignBuffer);
        let event = other.queue.record_event().unwrap();
        assert_eq!(*rig.queue.hand_over(&theirs.buffer, &event).unwrap_err().kind(), ErrorKind::ForeignBuffer);
        let weight = other.weight_f32(1, 2, Uses::ALL, &[1., 2.]);
        assert_eq!(*rig.refused(MatMul::new(ours, weight, rig.out(1, 1), Orientation::Nt)).kind(), ErrorKind::ForeignBuffer);
    }
}

#[test]
fn devices_of_a_group_share_memory() {
    let group = Reference::group(2);
    let [a, b] = [Rig::on(group[0].clone()), Rig::on(group[1].clone())];
    assert_eq!(group[0].space(), group[1].space());
    assert_ne!(group[0].space(), Reference::new().space());
    let weight = a.weight_f32(1, 2, Uses::ALL, &[3., 4.]);
    let out = b.out(1, 1);
    b.run(MatMul::new(b.f32(1, 2, &[1., 10.]), weight, out.clone(), Orientation::Nt));
    assert_eq!(b.get(&out), [43.]);
    let t = a.f32(1, 1, &[5.]);
    b.queue.hand_over(&t.buffer, &a.queue.record_event().unwrap()).unwrap();
    b.run(Copy::new(t, out.clone()));
    assert_eq!(b.get(&out), [5.]);
}

#[test]
fn a_bad_index_sticks_until_reset() {
    for rig in rigs() {
        let (src, out, t) = (rig.f32(2, 1, &[1., 2.]), rig.out(1, 1), rig.f32(1, 1, &[8.]));
        let ids = rig.u32(&[9]);
        rig.run(Fill::new(t.clone(), 7.0));
        let op = GatherRows::new(src, ids, out.clone()).into();
        let sequence = rig.queue.submit(&op).unwrap();
        let e = rig.queue.synchronize(None).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::Execution { poisoned: false });
        assert_eq!(e.op().unwrap().op, "gather_rows");
        assert_eq!(e.op().unwrap().sequence, Some(sequence));
        let e = rig.refused(Fill::new(t.clone(), 1.0));
        assert_eq!(*e.kind(), ErrorKind::Execution { poisoned: true });
        assert_eq!(e.op().unwrap().sequence, Some(sequence));
        assert_eq!(*rig.queue.record_event().map(drop).unwrap_err().kind(), ErrorKind::Execution { poisoned: true });
        assert!(t.buffer.map_read(0..4).is_err() && t.buffer.map_write(0..4).is_err() && t.buffer.freeze().is_err());
        rig.queue.reset().unwrap();
        rig.queue.synchronize(None).unwrap();
        assert_eq!(rig.get(&t), [7.0]);
        rig.run(Fill::new(t.clone(), 1.0));
        assert_eq!(rig.get(&t), [1.0]);
        rig.queue.close().unwrap();
        // The buffer outlives its queue.
        assert_eq!(t.buffer.map_read(0..4).unwrap().cast::<f32>(), [1.0]);
    }
}

#[test]
fn close_gives_the_sticky_error() {
    for rig in rigs() {
        let t = rig.f32(1, 1, &[1.0]);
        let out = rig.f32(1, 1, &[1.0]);
        rig.run(GatherRows::new(t, rig.u32(&[3]), out.clone()));
        assert_eq!(*rig.queue.close().unwrap_err().kind(), ErrorKind::Execution { poisoned: false });
        assert!(out.buffer.map_read(0..4).is_err());
    }
}

#[test]
fn a_recording_is_replayed_with_other_parameters() {
    for rig in rigs() {
        let (table, ids, sum) = (rig.f32(3, 1, &[1., 10., 100.]), rig.u32(&[0]), rig.f32(1, 1, &[0.]));
        let row = rig.out(1, 1);
        let before = rig.device.memory().allocations;
        rig.queue.begin_recording().unwrap();
        invalid(&rig.queue.begin_recording().unwrap_err());
        invalid(&rig.queue.alloc(4, Usage::Workspace).map(drop).unwrap_err());
        invalid(&rig.queue.reserve(4).unwrap_err());
        invalid(&rig.queue.synchronize(None).unwrap_err());
        invalid(&rig.queue.record_event().map(drop).unwrap_err());
        invalid(&sum.buffer.map_read(0..4).map(drop).unwrap_err());
        invalid(&sum.buffer.map_write(0..4).map(drop).unwrap_err());
        invalid(&sum.buffer.freeze().unwrap_err());
        rig.run(Embedding::new(ids.clone(), table, row.clone()));
        rig.run(Mul::new(row.clone(), row.clone(), sum.clone()).accumulate(true));
        let recording = rig.queue.end_recording().unwrap();
        invalid(&rig.queue.end_recording().map(drop).unwrap_err());
        assert_eq!(recording.len(), 2);
        assert_eq!(rig.get(&sum), [0.0], "a recorded op ran");
        // sum += row^2
        for (id, want) in [(0, 1.0), (1, 101.0), (2, 10101.0)] {
            ids.buffer.map_write(0..4).unwrap().cast::<u32>()[0] = id;
            rig.queue.replay(&recording).unwrap();
            assert_eq!(rig.get(&sum), [want]);
        }
        assert_eq!(rig.device.memory().allocations, before, "a replay allocated");
        let mapped = ids.buffer.map_read(0..4).unwrap();
        invalid(&rig.queue.replay(&recording).unwrap_err());
        drop(mapped);
        assert_eq!(rig.get(&sum), [10101.0], "a refused replay ran in part");
        ids.buffer.map_write(0..4).unwrap().cast::<u32>()[0] = 3;
        rig.queue.replay(&recording).unwrap();
        assert_eq!(rig.queue.synchronize(None).unwrap_err().op().unwrap().op, "embedding");
        let other = Rig::on(rig.device.clone());
        assert_eq!(*other.queue.replay(&recording).unwrap_err().kind(), ErrorKind::ForeignBuffer);
    }
}

#[test]
fn reset_ends_a_recording() {
    for rig in rigs() {
        let t = rig.f32(1, 1, &[1.0]);
        rig.queue.begin_recording().unwrap();
        rig.run(Fill::new(t.clone(), 2.0));
        rig.queue.reset().unwrap();
        assert_eq!(rig.get(&t), [1.0]);
    }
}

#[test]
fn memory_is_counted_and_limited() {
    for device in [Reference::with_memory_limit(1000) as zofo_hal::DeviceRef, Hostile::new(HostileConfig::seeded(0).memory_limit(1000))] {
        let rig = Rig::on(device);
        assert_eq!(rig.device.limits().memory_bytes, Some(1000));
        let a = rig.queue.alloc(600, Usage::Activations).unwrap();
        let e = rig.queue.alloc(401, Usage::Activations).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::OutOfMemory { requested: 401, available: Some(400) });
        let b = rig.queue.alloc(400, Usage::Parameters).unwrap();
        drop(a);
        let m = rig.device.memory();
        assert_eq!((m.in_use, m.peak, m.allocations), (400, 1000, 2));
        rig.queue.reserve(100).unwrap();
        rig.queue.reserve(50).unwrap();
        assert_eq!(rig.device.memory().in_use, 500);
        assert!(rig.queue.reserve(601).is_err());
        let spec = WeightSpec { dtype: DType::F16, rows: 10, cols: 5, uses: Uses::ALL };
        let weight = rig.device.import_weight(&spec, WeightData::Borrowed(&[0; 100])).unwrap();
        assert_eq!(rig.device.memory().in_use, 500 + weight.bytes() as u64);
        let spec = WeightSpec { rows: 1000, ..spec };
        let e = rig.device.import_weight(&spec, WeightData::Borrowed(&[0; 10000])).map(drop).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::OutOfMemory { .. }));
        drop((weight, b, rig.queue));
        assert_eq!(rig.device.memory().in_use, 0);
    }
}

#[test]
fn weights_of_the_wrong_size_are_refused() {
    for rig in rigs() {
        let spec = WeightSpec { dtype: DType::Q4_0, rows: 2, cols: 32, uses: Uses::ALL };
        invalid(&rig.device.import_weight(&spec, WeightData::Borrowed(&[0; 35])).map(drop).unwrap_err());
        let odd = WeightSpec { cols: 33, ..spec };
        invalid(&rig.device.import_weight(&odd, WeightData::Borrowed(&[0; 36])).map(drop).unwrap_err());
        let words = WeightSpec { dtype: DType::U32, ..spec };
        let e = rig.device.import_weight(&words, WeightData::Borrowed(&[0; 256])).map(drop).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::Unsupported);
    }
}

#[test]
fn empty_buffers_exist() {
    for rig in rigs() {
        let t = rig.out(0, 5);
        assert_eq!(t.buffer.bytes(), 0);
        assert!(t.buffer.map_read(0..0).unwrap().is_empty());
        assert!(t.buffer.map_write(0..0).unwrap().is_empty());
        rig.run(Fill::new(t, 1.0));
    }
}

#[test]
fn fresh_memory_shows() {
    for rig in rigs() {
        let (t, ids) = (rig.out(1, 3), rig.alloc(TensorSpec::new(DType::U32, 1, 1)));
        assert!(rig.get(&t).iter().all(|x| x.is_nan()));
        rig.fails(GatherRows::new(rig.f32(1, 1, &[1.0]), ids, rig.out(1, 1)));
    }
}

#[test]
fn mapped_memory_is_aligned() {
    for rig in rigs() {
        for bytes in [1, 63, 64, 65, 1000] {
            let buffer = rig.queue.alloc(bytes, Usage::Workspace).unwrap();
            assert!(buffer.map_read(0..bytes).unwrap().as_ptr().addr().is_multiple_of(rig.device.limits().alignment));
        }
    }
}

#[test]
fn the_driver_opens_one_device() {
    let mut registry = Registry::new();
    registry.register(Box::new(ReferenceDriver));
    let device = registry.open("reference", &OpenOptions::default()).unwrap();
    assert_eq!(device.info().name, "reference");
    assert!(registry.open("reference:1", &OpenOptions::default()).is_err());
    let f = device.features();
    assert!(f.row_invariant && f.deterministic && f.exact_updates && f.backward && !f.asynchronous);
}

#[test]
fn both_devices_give_the_same_bits() {
    let results = rigs().map(|rig| {
        let x = rig.f32(5, 33, &random(1, 165));
        let out = rig.out(5, 33);
        rig.run(RmsNorm::new(x, rig.f32(1, 33, &random(2, 33)), out.clone(), 1e-5));
        rig.get(&out)
    });
    assert_eq!(results[0], results[1]);
}
