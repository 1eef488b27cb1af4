//! Lower bounds of a step's time that hold for any order of work.
//!
//! A stage cannot start before the first micro-batch has come through everything in front of it, has all its work to do, and whatever it does
//! last still has to go on from there: down to the losses, back up, or nowhere.

use super::Problem;
use crate::{
    ir::{Group, Readout, Workload},
    sim::{StageTiming, Timing},
};
use zofo_hal::op::Form;

/// What the bound needs to know of the directions.
pub(super) struct Shape {
    groups: f64,
    copies: f64,
    smallest: f64,
    exits: f64,
    exit_groups: f64,
    first: Option<Group>,
    m: f64,
    tangents: bool,
}

impl Shape {
    pub fn new(w: &Workload) -> Self {
        let groups = w.groups(0);
        let exits = w.exit_groups(0);
        let sum = |g: &[Group]| g.iter().map(|g| f64::from(g.n)).sum::<f64>();
        Self {
            groups: groups.len() as f64,
            copies: sum(&groups),
            smallest: groups.iter().map(|g| f64::from(g.n)).fold(f64::INFINITY, f64::min),
            exits: sum(&exits),
            exit_groups: exits.len() as f64,
            first: groups.first().copied().filter(|g| g.with_base),
            m: f64::from(w.micro_batches),
            tangents: w.form == Form::Tangent,
        }
    }

    fn estimates(&self) -> bool {
        self.groups > 0.0
    }

    /// Seconds of the action that makes a zeroth-order stage's base output.
    pub fn base(&self, t: &StageTiming) -> f64 {
        match self.first {
            Some(g) => t.forward + t.perturbed_alpha + t.perturbed_beta * f64::from(g.n),
            None => t.forward,
        }
    }

    /// Seconds of the smallest group of copies.
    fn copy(&self, t: &StageTiming) -> f64 {
        t.perturbed_alpha + t.perturbed_beta * self.smallest + if self.tangents { t.forward } else { 0.0 }
    }

    /// All work of a stage in a step, its update not counted.
    pub fn load(&self, w: &Workload, t: &StageTiming, head: bool, last_head: bool, last: bool) -> f64 {
        let alone = if self.tangents { self.groups - f64::from(u8::from(self.first.is_some())) } else { 0.0 };
        let copies = self.groups * t.perturbed_alpha + self.copies * t.perturbed_beta + alone * t.forward;
        let each = if head {
            let mut each = t.forward + copies;
            if self.exits > 0.0 {
                // Every exit group has its base along.
                each += self.exit_groups * (t.perturbed_alpha + t.forward) + self.exits * t.perturbed_beta;
                each += if last_head { (self.exits + self.exit_groups) * t.exit } else { 0.0 };
            }
            if last_head && w.readout == Readout::Cut {
                each += t.dot * self.copies;
            }
            if w.guides() {
                each += t.guide;
            }
            each
        } else {
            let perturbed = if w.readout == Readout::Loss { copies } else { 0.0 };
            t.forward + t.backward_input + t.backward_weight + perturbed + if last { t.loss } else { 0.0 }
        };
        self.m * each
    }
}

/// The bound of a pipeline of one worker per stage, zeroth-order stages in front.
pub(super) fn line(w: &Workload, timing: &Timing) -> f64 {
    let shape = Shape::new(w);
    let (stages, cut, n) = (&timing.stages, w.cut(), w.stages());
    let hop = |from: usize, to: usize, bytes: f64| timing.links.get(from, to).transfer(bytes);
    let down = |s: usize| if s + 1 < n { hop(s, s + 1, stages[s].boundary_bytes) } else { 0.0 };
    let up = |s: usize| if s > 0 { hop(s, s - 1, stages[s - 1].boundary_bytes) } else { 0.0 };
    let back = |t: &StageTiming| t.backward_input + t.backward_weight;
    let base = |s: usize| if s < cut { shape.base(&stages[s]) } else { stages[s].forward };
    // What is left when the gradient of a micro-batch has left the cut.
    let read = match (cut > 0, w.readout) {
        (true, Readout::Cut) if shape.estimates() => up(cut) + stages[cut - 1].dot * shape.smallest,
        (true, Readout::Guide) if w.guides() => {
            up(cut).min(hop(cut, 0, stages[cut - 1].boundary_bytes)) + stages[cut - 1].guide.min(stages[0].guide)
        }
        _ => 0.0,
    };
    // Suffix sums: from behind stage s to the losses, for the base, for a copy.
    let mut base_down = vec![0.0; n + 1];
    let mut copy_down = vec![0.0; n + 1];
    for s in (0..n).rev() {
        base_down[s] = base(s) + down(s) + base_down[s + 1];
        let goes_on = s + 1 < cut || w.readout == Readout::Loss;
        copy_down[s] =
            if goes_on || s < cut { shape.copy(&stages[s]) + if goes_on { down(s) + copy_down[s + 1] } else { 0.0 } } else { 0.0 };
    }
    // From the losses up to the cut.
    let mut back_up = vec![0.0; n + 1];
    for s in cut..n {
        back_up[s + 1] = back_up[s] + back(&stages[s]) + if s > cut { up(s) } else { 0.0 };
    }
    let loss = stages[n - 1].loss;
    let mut bound = 0.0f64;
    let mut ahead = 0.0;
    for s in 0..n {
        let t = &stages[s];
        let load = shape.load(w, t, s < cut, s + 1 == cut, s + 1 == n);
        let after_base = base_down[s + 1] + down(s) + loss + back_up[n] + read;
        let after = if s < cut {
            let mut after = after_base;
            if shape.estimates() {
                let goes_on = s + 1 < cut || w.readout == Readout::Loss;
                let dot = if s + 1 < cut && w.readout == Readout::Cut { stages[cut - 1].dot * shape.smallest } else { 0.0 };
                after = after.min(if goes_on { down(s) + copy_down[s + 1] + dot } else { 0.0 });
            }
            if shape.exits > 0.0 || w.guides() || (s + 1 == cut && w.readout == Readout::Cut && shape.estimates()) {
                after = 0.0;
            }
            after
        } else {
            let after_back = back_up[s] + if s > cut { up(s) } else { 0.0 } + read;
            match w.readout == Readout::Loss && shape.estimates() {
                true => after_back.min(if s + 1 < n { down(s) + copy_down[s + 1] } else { 0.0 }),
                false => after_back,
            }
        };
        bound = bound.max(ahead + load + after);
        if s >= cut {
            // Nothing comes back before the first micro-batch has been to the losses.
            let first_back = ahead + base_down[s] + loss + (back_up[n] - back_up[s + 1]);
            bound = bound.max(first_back + shape.m * back(t) + back_up[s] + if s > cut { up(s) } else { 0.0 } + read);
        }
        ahead += base(s) + down(s);
    }
    // The last base pass leaves the head no earlier than its slowest stage lets it.
    let slowest = (0..n).map(base).fold(0.0, f64::max);
    bound.max(base_down[0] + (shape.m - 1.0) * slowest + loss + back_up[n] + read)
}

/// Least seconds of a step in which every layer is trained first-order, by one of `devices` for all micro-batches: no device takes more layers in that
/// time than those that are quickest on it, and all layers have to be taken.
pub(super) fn whole_layers(p: &Problem, devices: &[usize]) -> f64 {
    let m = f64::from(p.micro_batches());
    // Every device's layers, quickest first, and when each would be done.
    let ends = devices.iter().flat_map(|d| {
        let mut times: Vec<f64> = (0..p.layers()).map(|l| p.both(*d, &(l..l + 1))).collect();
        times.sort_by(f64::total_cmp);
        times.into_iter().scan(0.0, move |at, t| {
            *at += m * t;
            Some(*at)
        })
    });
    let mut ends: Vec<f64> = ends.collect();
    ends.sort_by(f64::total_cmp);
    ends.get(p.layers().wrapping_sub(1)).copied().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cluster::Kind,
        costs::{Costs, DeviceCosts, LayerCosts},
    };

    /// One layer takes 3 on the first device and 6 on the second: four layers are two and one in 6, and a third on the first or a second on the other
    /// makes it 9.
    #[test]
    fn layers_are_not_cut() {
        let devices = [("a", 1.0), ("b", 0.5)].map(|(name, speed)| DeviceCosts::new(name, Kind::Bp, speed));
        let p = Problem::new(Costs::new(vec![LayerCosts::new(1.0); 4], devices.to_vec(), 1)).unwrap();
        assert_eq!(whole_layers(&p, &[0, 1]), 9.0);
        assert_eq!(whole_layers(&p, &[0]), 12.0);
        assert_eq!(whole_layers(&p, &[1]), 24.0);
        assert_eq!(whole_layers(&p, &[]), f64::INFINITY);
    }
}
