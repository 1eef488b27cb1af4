//! Direction-parallel: every bp-free device holds all layers in front of the cut and takes some of the directions, so that nothing but scalars and the
//! outputs at the cut leave it; those that backpropagate are a pipeline behind (compare DistZO2, arXiv 2507.03211, which shares out the two sides
//! of a difference).
//!
//! A pipeline in front has to be filled, which costs most where micro-batches are few, and every group of directions crosses all its links. Here the
//! base pass is repeated on every device instead, and each has to hold all those layers.

use super::{
    Layout, Member, Method, Problem, Proposal, Split, StageLayout, hybridop, nothing_in_time,
    ranked::{Ranked, fastest},
    split::{min_max, short_by},
    xronos::{Worker, assign},
};
use crate::ir::{Readout, Role};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// Cuts that are simulated, best predicted first.
const SIMULATED: usize = 4;
/// Cuts that are looked at on either side of the one predicted best.
const AROUND: usize = 4;

struct Search<'a> {
    p: &'a Problem,
    method: &'a Method,
    free: Vec<usize>,
    exact: Vec<usize>,
}

impl Search<'_> {
    /// The head's members with their directions, and the seconds of the slowest; `None` where nobody holds it.
    fn head(&self, layers: &Range<usize>) -> Option<(StageLayout, f64)> {
        let (p, m, q) = (self.p, f64::from(self.p.micro_batches()), self.method.directions);
        let worker = |d: &usize| {
            let t = p.stage(*d, layers, Role::ZerothOrder);
            let holds = p.device(*d).memory_bytes.is_none_or(|limit| t.state_bytes <= limit);
            // Both sides of a difference are not planned for: a direction is one copy.
            Worker { fixed_s: m * t.forward, per_unit_s: m * t.perturbed_beta, most: if holds { q } else { 0 } }
        };
        let workers: Vec<Worker> = self.free.iter().map(worker).collect();
        let given = assign(&workers, q)?;
        let members = self.free.iter().zip(&given).filter(|(_, n)| **n > 0);
        let members = members.map(|(d, n)| Member { device: *d, share: f64::from(*n) / f64::from(q) }).collect();
        let slowest = workers.iter().zip(&given).map(|(w, n)| w.seconds(*n)).fold(0.0, f64::max);
        Some((StageLayout::group(members, layers.clone(), Split::Directions, Role::ZerothOrder), slowest))
    }

    /// The stages of a cut, and the seconds of the slowest device.
    fn cut(&self, cut: usize) -> Option<(Vec<StageLayout>, f64)> {
        let ((head, ahead), (tail, behind)) = self.head(&(0..cut)).zip(self.tail(cut))?;
        Some(([&[head][..], &tail].concat(), ahead.max(behind)))
    }

    /// The first cut at which the head is no faster than the tail. With more layers in front the head takes longer and the tail less, so the slowest
    /// device is fastest here or at the cut before.
    fn meets(&self) -> usize {
        let head_is_slower = |cut: usize| match (self.head(&(0..cut)), self.tail(cut)) {
            (Some((_, ahead)), Some((_, behind))) => ahead >= behind,
            (head, _) => head.is_none(),
        };
        let (mut below, mut meets) = (0, self.p.layers());
        while meets - below > 1 {
            let cut = below + (meets - below) / 2;
            *if head_is_slower(cut) { &mut meets } else { &mut below } = cut;
        }
        meets
    }

    /// The pipeline behind, its slowest stage as fast as can be, and the seconds of that; `None` where a device cannot hold its part.
    fn tail(&self, from: usize) -> Option<(Vec<StageLayout>, f64)> {
        let (p, layers) = (self.p, self.p.layers() - from);
        let devices = &self.exact[..self.exact.len().min(layers)];
        let at_loss = self.method.estimator.readout() == Readout::Loss;
        let cost = |s: usize, l: &Range<usize>| {
            let (own, kept) = (from + l.start..from + l.end, (devices.len() - s).min(p.micro_batches() as usize));
            let copies =
                if at_loss { f64::from(self.method.directions) * p.stage(devices[s], &own, Role::FirstOrder).perturbed_beta } else { 0.0 };
            match short_by(p, devices[s], &own, kept) {
                None => f64::from(p.micro_batches()) * (p.both(devices[s], &own) + copies),
                Some(_) => f64::INFINITY,
            }
        };
        let (slowest, ends) = min_max(layers, devices.len(), cost)?;
        let mut first = from;
        let stage = |(d, end): (&usize, &usize)| {
            let layers = first..from + end;
            first = layers.end;
            StageLayout::single(*d, layers, Role::FirstOrder)
        };
        Some((devices.iter().zip(&ends).map(stage).collect(), slowest))
    }
}

/// What the search starts from.
///
/// # Errors
/// `InvalidArgument` where no directions are taken, fewer than two devices could share them, or none backpropagates.
fn search<'a>(p: &'a Problem, method: &'a Method) -> Result<Search<'a>> {
    if method.directions == 0 || method.estimator.readout() == Readout::Guide {
        return Err(Error::invalid(
            "direction-parallel devices share random directions, and there are none to share; give `directions` and another estimator",
        ));
    }
    let (free, exact) = hybridop::groups(p)?;
    if free.len() < 2 {
        return Err(Error::invalid("directions are shared by several bp-free devices, and there is one; plan by `hybridop`"));
    }
    Ok(Search { p, method, free, exact })
}

/// The best of the few cuts whose slowest device is predicted to be fastest.
///
/// # Errors
/// As [`search`]; `InvalidArgument` where nothing fits.
pub(super) fn plan(p: &Problem, method: &Method, below: f64) -> Result<Proposal> {
    let search = search(p, method)?;
    let meets = search.meets();
    let mut ranked = Ranked::new(2 * AROUND);
    for cut in meets.saturating_sub(AROUND).max(1)..(meets + AROUND).min(p.layers()) {
        if let Some((stages, slowest)) = search.cut(cut)
            && slowest < below
        {
            ranked.offer(slowest, || Layout::line(stages));
        }
    }
    let found = fastest(ranked.into_iter(), SIMULATED, |layout| layout.best(p, method))?;
    let (layout, outcome) = found.ok_or_else(|| match below.is_finite() {
        true => nothing_in_time(),
        false => Error::invalid("no cut leaves every device what it can hold"),
    })?;
    let directions = |m: &Member| format!("{:.0} on {}", m.share * f64::from(method.directions), p.device(m.device).name);
    let directions: Vec<String> = layout.stages[0].members.iter().map(directions).collect();
    Ok(Proposal { outcome, method: *method, notes: vec![format!("directions: {}", directions.join(", "))] })
}
