//! Properties of every order: complete, causal, free of deadlock, within credits.

use proptest::prelude::*;
use zofo_hal::op::Form;
use zofo_pipeline::{
    check::check,
    ir::{Action, Credits, Readout, Role, Step, Workload},
    order::ScheduleName,
};

fn workload() -> impl Strategy<Value = Workload> {
    let readout = prop_oneof![Just(Readout::Loss), Just(Readout::Cut), Just(Readout::Guide)];
    (0usize..4, 1usize..4, 1u32..7, 0u32..9, 1u32..5, readout, any::<[bool; 4]>(), 0u32..4).prop_map(
        |(zo, fo, micro_batches, directions, group, readout, [tangent, two_sided, frozen, merge], exit)| {
            let head = if frozen || directions == 0 { Role::Frozen } else { Role::ZerothOrder };
            let tangent = tangent && readout == Readout::Cut;
            Workload {
                roles: [vec![head; zo], vec![Role::FirstOrder; fo]].concat(),
                merge_base: merge || tangent,
                directions,
                group,
                form: if tangent { Form::Tangent } else { Form::Value },
                readout,
                two_sided: two_sided && !tangent,
                exit_directions: exit,
                ..Workload::first_order(zo + fo, micro_batches)
            }
        },
    )
}

proptest! {
    #[test]
    fn hybridop_head_is_sound(w in workload()) {
        let schedule = ScheduleName::HybridopHead.build(&w).unwrap();
        let peaks = check(&schedule).unwrap();
        for s in w.cut()..w.stages() {
            prop_assert!(peaks.in_flight[s] <= (w.micro_batches as usize).min(w.stages() - s), "stage {s}: {peaks:?}");
        }
        prop_assert!((0..w.stages()).all(|s| schedule.actions(s).last() == Some(Action::Update)));
    }

    #[test]
    fn gpipe_is_sound(stages in 1usize..6, m in 1u32..9) {
        let w = Workload::first_order(stages, m);
        let peaks = check(&ScheduleName::Gpipe.build(&w).unwrap()).unwrap();
        prop_assert!(peaks.in_flight.iter().all(|n| *n == m as usize));
    }

    #[test]
    fn gradients_accumulate_in_micro_batch_order(w in workload()) {
        let schedule = ScheduleName::HybridopHead.build(&w).unwrap();
        for s in 0..w.stages() {
            let order: Vec<_> = schedule.actions(s).filter_map(|a| match a {
                Action::Backward { m } | Action::Guide { m } => Some(m),
                _ => None,
            }).collect();
            prop_assert!(order.is_sorted(), "{order:?}");
        }
    }

    /// Any single action dropped, doubled or moved to the front of its causes is noticed.
    #[test]
    fn damage_is_noticed(w in workload(), stage in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), how in 0..2) {
        let mut schedule = ScheduleName::HybridopHead.build(&w).unwrap();
        let list = &mut schedule.lists[stage.index(w.stages())];
        let i = at.index(list.len());
        match how {
            0 => drop(list.remove(i)),
            _ => list.insert(i, list[i]),
        }
        prop_assert!(check(&schedule).is_err());
    }
}

#[test]
fn deadlock_is_found() {
    // A stage that wants the second gradient before it sent the second activation.
    let w = Workload::first_order(2, 2);
    let mut schedule = ScheduleName::Gpipe.build(&w).unwrap();
    let order = [Action::Forward { m: 0 }, Action::Backward { m: 0 }, Action::Forward { m: 1 }, Action::Backward { m: 1 }, Action::Update];
    schedule.lists[0] = order.map(|a| Step::new(0, a)).to_vec();
    let e = check(&schedule).unwrap_err();
    assert!(e.message().starts_with("deadlock: stage"), "{e}");
}

#[test]
fn too_few_credits_are_a_deadlock() {
    let w = Workload::first_order(2, 4);
    let mut schedule = ScheduleName::Gpipe.build(&w).unwrap();
    schedule.credits = Credits { delta: 0, ..schedule.credits };
    assert!(check(&schedule).is_err());
}

#[test]
fn roles_that_cannot_learn_are_refused_by_name() {
    let mut w = Workload::first_order(3, 1);
    w.roles = vec![Role::FirstOrder, Role::ZerothOrder, Role::FirstOrder];
    let e = ScheduleName::HybridopHead.build(&w).unwrap_err();
    assert!(e.message().contains("stage 1 is ZO behind first-order stage 0"), "{e}");
    w.roles = vec![Role::ZerothOrder; 2];
    let e = ScheduleName::HybridopHead.build(&w).unwrap_err();
    assert!(e.message().contains("hybridop-tail"), "{e}");
    w.roles = vec![Role::ZerothOrder, Role::FirstOrder];
    w.directions = 1;
    let e = ScheduleName::Gpipe.build(&w).unwrap_err();
    assert!(e.message().contains("gpipe") && e.message().contains("stage 0 is ZO"), "{e}");
}

proptest! {
    /// Orders are written to files and read back.
    #[test]
    fn steps_have_a_text(w in workload()) {
        let schedule = ScheduleName::HybridopHead.build(&w).unwrap();
        for step in schedule.lists.iter().flatten() {
            prop_assert_eq!(step.to_string().parse::<Step>().unwrap(), *step);
        }
    }

    /// Any text is a step or an error.
    #[test]
    fn any_text_is_read(text in "[FLBIWGPXDU0-9@\\[\\].+base-]{0,12}") {
        if let Ok(step) = text.parse::<Step>() {
            prop_assert_eq!(step.to_string().parse::<Step>().unwrap(), step);
        }
    }
}
