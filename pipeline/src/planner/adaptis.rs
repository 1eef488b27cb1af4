//! After AdaPtis (Guo et al. 2025, arXiv 2509.23722; later OctoPipe): partition, placement and order tuned together by a performance model.

mod bubbles;
mod moves;

pub use bubbles::{Bubbles, bubbles};

use super::{Layout, Method, Outcome, Problem, Proposal, StageLayout, pipelines, ranked::drop_smallest, split};
use crate::{
    ir::{Credits, Role},
    order::ScheduleName,
    sim::{self, Class, HeadOrder, InFlight, Urgency},
};
use moves::Move;
use std::collections::HashSet;
use zofo_hal::{Error, Result};

/// Simulations that a search may take.
const SIMULATIONS: usize = 2_000;
/// What counts as faster: rounding does not.
const STRICTLY: f64 = 1.0 - 1e-9;

/// How an order of work is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Order {
    /// The list that the field knows by this name.
    Named(ScheduleName),
    /// List scheduling at the simulated times, which goes with any placement: what is more urgent, how much is kept, and whether weight
    /// gradients are put off until nothing else is ready.
    Listed { first: Class, in_flight: InFlight, split_backward: bool },
}

const fn listed(first: Class, in_flight: InFlight, split_backward: bool) -> Order {
    Order::Listed { first, in_flight, split_backward }
}

/// Where an order by name does not go with a placement.
const ANYWHERE: Order = listed(Class::Backward, InFlight::Depth, false);

/// What the schedule phase chooses from.
const ORDERS: [Order; 10] = [
    Order::Named(ScheduleName::OneFOneB),
    Order::Named(ScheduleName::Gpipe),
    Order::Named(ScheduleName::ZbH1),
    Order::Named(ScheduleName::Interleaved),
    ANYWHERE,
    listed(Class::Backward, InFlight::Depth, true),
    listed(Class::Backward, InFlight::All, false),
    listed(Class::Backward, InFlight::All, true),
    listed(Class::Forward, InFlight::All, false),
    listed(Class::Forward, InFlight::All, true),
];

/// A point of the search.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Candidate {
    /// Ends of stages.
    ends: Vec<usize>,
    /// Device of each stage.
    on: Vec<usize>,
    order: Order,
}

impl Candidate {
    fn layout(&self) -> Layout {
        let (mut first, mut workers) = (0, Vec::new());
        let mut layout = Layout { stages: Vec::new(), chains: Vec::new(), placement: Vec::new() };
        for (d, end) in self.on.iter().zip(&self.ends) {
            layout.stages.push(StageLayout::single(*d, first..*end, Role::FirstOrder));
            first = *end;
            let worker = workers.iter().position(|w| w == d).unwrap_or_else(|| {
                workers.push(*d);
                workers.len() - 1
            });
            layout.placement.push(worker);
        }
        layout
    }

    /// The order that goes with the placement.
    fn order(&self, layout: &Layout) -> Order {
        let workers = layout.placement.iter().max().map_or(0, |w| w + 1);
        let dealt = layout.placement.iter().enumerate().all(|(s, w)| *w == s % workers) && layout.placement.len().is_multiple_of(workers);
        match self.order {
            Order::Named(ScheduleName::Interleaved) if !dealt => ANYWHERE,
            Order::Named(name) if name != ScheduleName::Interleaved && workers < layout.placement.len() => ANYWHERE,
            order => order,
        }
    }

    fn simulate(&self, p: &Problem) -> Result<Outcome> {
        let layout = self.layout();
        match self.order(&layout) {
            Order::Named(name) => layout.simulate(p, &Method::FROZEN, name),
            Order::Listed { first, in_flight, split_backward } => {
                let (mut w, timing) = (layout.workload(p, &Method::FROZEN), layout.timing(p));
                w.split_backward = split_backward;
                let mut urgency = Urgency::frugal(&w);
                (urgency.in_flight, urgency.credits, urgency.head) = (in_flight, Credits::ample(&w), HeadOrder::BaseFirst);
                if first == Class::Forward {
                    urgency.classes = [Class::Forward, Class::Backward, Class::Perturbed];
                }
                let workers = layout.placement.iter().max().map_or(0, |w| w + 1);
                let (schedule, _) = sim::arrange_on(&w, &layout.placement, workers, &timing, &urgency)?;
                layout.run(p, schedule, &timing, ScheduleName::HybridopHead)
            }
        }
    }
}

struct Search<'a> {
    p: &'a Problem,
    devices: Vec<usize>,
    left: usize,
    seen: HashSet<Candidate>,
    best: Option<(Candidate, Outcome)>,
    failure: Option<Error>,
}

impl Search<'_> {
    /// Simulates what was not simulated before; takes the fastest where it is faster than the best so far.
    fn improve(&mut self, candidates: impl IntoIterator<Item = Candidate>) -> bool {
        let mut improved = false;
        for candidate in candidates {
            if self.left == 0 || !self.seen.insert(candidate.clone()) {
                continue;
            }
            self.left -= 1;
            match candidate.simulate(self.p) {
                Ok(outcome) if self.best.as_ref().is_none_or(|(_, b)| outcome.makespan() < b.makespan() * STRICTLY) => {
                    self.best = Some((candidate, outcome));
                    improved = true;
                }
                Ok(_) => {}
                Err(e) => self.failure = self.failure.take().or(Some(e)),
            }
        }
        improved
    }

    /// Where the search starts: one stage on each device, and up to four, in every order; without the smallest devices where nothing fits.
    fn start(&mut self) -> Result<()> {
        let mut on = self.devices.clone();
        while self.best.is_none() && !on.is_empty() {
            let (layers, n) = (self.p.layers(), on.len());
            let mut ends = vec![pipelines::ends(self.p, &on, pipelines::Cut::MinMax)?];
            ends.extend((1..=(layers / n).min(4)).map(|chunks| split::equal(layers, n * chunks)));
            for ends in ends {
                let dealt: Vec<usize> = (0..ends.len()).map(|s| on[s % n]).collect();
                self.improve(ORDERS.map(|order| Candidate { ends: ends.clone(), on: dealt.clone(), order }));
            }
            drop_smallest(self.p, &mut on);
        }
        Ok(())
    }

    /// Least seconds of a layer's passes on any device in use (`t_layer`).
    fn shortest_layer(&self) -> f64 {
        let all = (0..self.p.layers()).flat_map(|l| self.devices.iter().map(move |d| (*d, l)));
        all.map(|(d, l)| self.p.both(d, &(l..l + 1))).fold(f64::INFINITY, f64::min)
    }

    /// The phase that the performance model asks for (Algorithm 1).
    fn phase(&self, found: &[(usize, Bubbles)]) -> Move {
        let all = |f: fn(&Bubbles) -> f64| found.iter().map(move |(_, b)| f(b));
        let spread = all(Bubbles::sum).fold(0.0, f64::max) - all(Bubbles::sum).fold(f64::INFINITY, f64::min);
        match all(Bubbles::boundary).sum::<f64>() > all(|b| b.residual).sum() {
            _ if spread > self.shortest_layer() => Move::Partition,
            true => Move::Placement,
            false => Move::Schedule,
        }
    }

    /// One round: what the phase asks for, else the whole neighbourhood. Whether anything was found.
    fn round(&mut self) -> bool {
        let Some((best, outcome)) = self.best.clone() else { return false };
        let found: Vec<(usize, Bubbles)> = {
            let device = |worker: usize| outcome.layout.placement.iter().position(|w| *w == worker).map(|s| best.on[s]);
            bubbles(&outcome.timeline).into_iter().enumerate().filter_map(|(w, b)| Some((device(w)?, b))).collect()
        };
        let directed = match self.phase(&found) {
            Move::Partition => best.towards_idle(&found),
            phase => best.neighbours(phase, &self.devices),
        };
        // Algorithm 1 alone stops here; single moves of a kind that its phase does not look at are often faster still.
        self.improve(directed) || Move::ALL.into_iter().any(|kind| self.improve(best.neighbours(kind, &self.devices)))
    }
}

pub(super) fn propose(p: &Problem) -> Result<Proposal> {
    let (devices, mut notes) = pipelines::devices(p)?;
    notes.push("after AdaPtis, whose paper was not at hand: see docs/planners.md".into());
    let mut search = Search { p, devices, left: SIMULATIONS, seen: HashSet::new(), best: None, failure: None };
    search.start()?;
    while search.left > 0 && search.round() {}
    let taken = SIMULATIONS - search.left;
    match (search.best, search.failure) {
        (Some((best, outcome)), _) => {
            let workers = outcome.schedule.workers();
            notes.push(format!("{} stages on {workers} devices after {taken} simulations", best.ends.len()));
            if outcome.schedule.workload.split_backward {
                notes.push("backward passes in two parts".into());
            }
            Ok(Proposal { outcome, method: Method::FROZEN, notes })
        }
        (None, failure) => Err(failure.unwrap_or_else(|| Error::invalid("no split"))),
    }
}
