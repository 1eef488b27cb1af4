//! A schedule on stages that are given, or as balanced as can be: what `zofo simulate` is asked for.

use super::{Layout, Method, Outcome, PlannerName, Problem, StageLayout, bounds::Shape, split};
use crate::{
    cluster::Kind,
    ir::{Chain, Readout, Role},
    order::ScheduleName,
};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// Simulates the schedule called `name` on the partition of the costs. Without one, layers go to the devices in their order (bp-free ones in front
/// for `hybridop-head`, behind for `hybridop-tail`) so that the busiest stage has as little to do as can be.
///
/// # Errors
/// `InvalidArgument` naming the device that cannot do its part, or whose memory is short.
pub fn simulate(p: &Problem, method: &Method, name: ScheduleName) -> Result<Outcome> {
    let parts = p.costs().partition.as_ref();
    match (name, parts.is_some()) {
        (ScheduleName::Interleaved, true) => {
            return Err(Error::invalid("schedule `interleaved-1f1b` cuts the layers itself; leave the partition out"));
        }
        (ScheduleName::Interleaved, false) => return PlannerName::Interleaved.propose(p, method).map(|f| f.outcome),
        (ScheduleName::Chimera, false) => return PlannerName::Chimera.propose(p, method).map(|f| f.outcome),
        _ => {}
    }
    let devices = devices(p, name)?;
    let tail = name == ScheduleName::HybridopTail;
    let free = |d: &usize| p.device(*d).kind == Kind::BpFree;
    let role = |d: &usize, cut: usize, i: usize| match name {
        ScheduleName::HybridopHead if i < cut => method.head_role(),
        ScheduleName::HybridopTail if free(d) => Role::ZerothOrder,
        _ => Role::FirstOrder,
    };
    let cut = if tail { 0 } else { devices.iter().rposition(free).map_or(0, |i| i + 1) };
    let roles: Vec<Role> = devices.iter().enumerate().map(|(i, d)| role(d, cut, i)).collect();
    for (d, role) in devices.iter().zip(&roles) {
        if *role == Role::FirstOrder && !p.device(*d).can_backpropagate() {
            return Err(Error::invalid(format!(
                "schedule `{}` backpropagates on `{}`, which is bp-free and has no fo_speed that says what that would cost",
                name.name(),
                p.device(*d).name
            )));
        }
    }
    let ends = match parts {
        Some(parts) => parts.iter().map(|(_, _, end)| *end).collect(),
        None => balanced(p, method, &devices, &roles)?,
    };
    let mut first = 0;
    let stages: Vec<StageLayout> = (devices.iter().zip(&roles).zip(&ends))
        .map(|((d, role), end)| {
            let layers = first..*end;
            first = *end;
            StageLayout::single(*d, layers, *role)
        })
        .collect();
    let layout = if name == ScheduleName::Chimera { both_ways(p, stages)? } else { Layout::line(stages) };
    layout.simulate(p, method, name)
}

fn devices(p: &Problem, name: ScheduleName) -> Result<Vec<usize>> {
    if let Some(parts) = &p.costs().partition {
        let index = |n: &String| p.costs().devices.iter().position(|d| d.name == *n).unwrap_or(0);
        return Ok(parts.iter().map(|(n, _, _)| index(n)).collect());
    }
    let mut all: Vec<usize> = (0..p.devices()).collect();
    let behind = |d: &usize| match name {
        ScheduleName::HybridopHead => p.device(*d).kind == Kind::Bp,
        ScheduleName::HybridopTail => p.device(*d).kind == Kind::BpFree,
        _ => false,
    };
    all.sort_by_key(behind);
    match all.len() > p.layers() {
        true => Err(Error::invalid(format!("{} devices for {} layers; each device needs at least one", all.len(), p.layers()))),
        false => Ok(all),
    }
}

fn balanced(p: &Problem, method: &Method, devices: &[usize], roles: &[Role]) -> Result<Vec<usize>> {
    let (n, cut) = (devices.len(), roles.iter().take_while(|r| **r != Role::FirstOrder).count());
    let mut w = p.workload(roles.to_vec(), method);
    if roles[0] == Role::FirstOrder && roles[n - 1] == Role::ZerothOrder {
        w.readout = Readout::Tail;
    }
    let shape = Shape::new(&w);
    let load = |s: usize, l: &Range<usize>| {
        shape.load(&w, &p.stage(devices[s], l, roles[s]), roles[s] != Role::FirstOrder, s + 1 == cut, s + 1 == n)
    };
    let fits = |s: usize, l: &Range<usize>| split::short_by(p, devices[s], l, usize::from(roles[s] == Role::FirstOrder)).is_none();
    let found = split::min_max(p.layers(), n, |s, l| if fits(s, l) { load(s, l) } else { f64::INFINITY });
    // Where nothing fits, simulating the split that ignores memory says which device is short and by how much.
    let found = found.or_else(|| split::min_max(p.layers(), n, load));
    found.map(|(_, ends)| ends).ok_or_else(|| Error::invalid("no split"))
}

/// The same stages a second time, from the other end.
fn both_ways(p: &Problem, down: Vec<StageLayout>) -> Result<Layout> {
    let (n, all) = (down.len(), p.micro_batches());
    let up = (0..n).map(|i| StageLayout { members: down[n - 1 - i].members.clone(), ..down[i].clone() });
    let half = all.div_ceil(2);
    let chains = vec![Chain { stages: 0..n, micro_batches: 0..half }, Chain { stages: n..2 * n, micro_batches: half..all }];
    let stages = down.iter().cloned().chain(up).collect();
    Ok(Layout { stages, chains, placement: (0..n).chain((0..n).rev()).collect() })
}
