use crate::util::*;
use zofo_hal::op::{BoundaryDot, Copy, MatMul, Orientation, RmsNorm, RmsNormBackward, Sgd};
use zofo_hal::reference::Reference;
use zofo_hal::{Allow, Device, DeviceRef, ErrorKind, Lacking, Op, Restricted, Support, TensorArg, Uses};

fn ops(rig: &Rig) -> [(Op<TensorArg>, &'static str); 4] {
    let (x, g) = (rig.f32(1, 2, &[1., 2.]), rig.f32(1, 2, &[1., 1.]));
    [
        (Copy::new(x.clone(), rig.out(1, 2)).into(), "primitive"),
        (RmsNorm::new(x.clone(), g.clone(), rig.out(1, 2), 1.0).into(), "forward"),
        (RmsNormBackward::new(x.clone(), g.clone(), x.clone(), rig.out(1, 2), 1.0).into(), "backward"),
        (Sgd::new(x, rig.f32(1, 12, &[0.; 12]), g).into(), "update"),
    ]
}

#[test]
fn each_class_is_refused_for_its_reason_at_both_places() {
    let answers = |allow, class: &str| match (allow, class) {
        (_, "backward") => Some(Lacking::Backward),
        (Allow::Primitives, "forward" | "update") => Some(Lacking::Op),
        _ => None,
    };
    for allow in [Allow::Forward, Allow::Primitives] {
        let rig = Rig::on(Restricted::new(Reference::new(), allow, "npu"));
        for (op, class) in ops(&rig) {
            match (rig.device.supports(&op.spec()), answers(allow, class)) {
                (Support::Native, None) => drop(rig.queue.submit(&op).unwrap()),
                (Support::Unsupported { reason, lacking }, Some(want)) => {
                    assert_eq!(lacking, want);
                    let e = rig.queue.submit(&op).unwrap_err();
                    assert_eq!(*e.kind(), ErrorKind::Unsupported);
                    assert_eq!(e.message(), reason);
                    assert_eq!(e.device(), Some("npu"));
                }
                (answer, _) => panic!("{allow:?} {class}: {answer:?}"),
            }
        }
        rig.queue.synchronize(None).unwrap();
    }
}

#[test]
fn it_has_a_name_of_its_own() {
    let inner: DeviceRef = Reference::new();
    let forward = Restricted::new(inner.clone(), Allow::Forward, "npu0");
    let primitives = Restricted::new(inner.clone(), Allow::Primitives, "npu1");
    assert_eq!(forward.info().name, "npu0");
    assert_eq!(forward.info().fingerprint, "reference");
    assert_eq!(primitives.info().fingerprint, "reference");
    assert!(!forward.features().backward && forward.features().exact_updates);
    assert!(!primitives.features().exact_updates);
    assert_eq!(forward.space(), inner.space());
}

#[test]
fn memory_is_shared_with_the_inner_device() {
    let inner: DeviceRef = Reference::new();
    let whole = Rig::on(inner.clone());
    let part = Rig::on(Restricted::new(inner, Allow::Forward, "npu"));
    let weight = whole.weight_f32(1, 2, Uses::ALL, &[2., 3.]);
    let out = part.out(1, 1);
    part.run(MatMul::new(part.f32(1, 2, &[1., 1.]), weight, out.clone(), Orientation::Nt));
    whole.queue.hand_over(&out.buffer, &part.queue.record_event().unwrap()).unwrap();
    let dot = whole.out(1, 1);
    whole.run(BoundaryDot::new(whole.f32(1, 1, &[10.]), out, dot.clone()));
    assert_eq!(whole.get(&dot), [50.]);
    assert_eq!(part.queue.device().info().name, "npu");
    part.queue.close().unwrap();
}
