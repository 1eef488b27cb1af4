//! After AdaPtis (Guo et al. 2025, arXiv 2509.23722; later OctoPipe): partition, placement and order tuned together by a performance model.

mod bubbles;
mod moves;

pub use bubbles::{Bubbles, bubbles};

use super::{Layout, Method, Outcome, Problem, Proposal, StageLayout, bounds, nothing_in_time, pipelines, ranked::drop_smallest, split};
use crate::{
    ir::{Credits, Role, Workload},
    order::ScheduleName,
    sim::{self, Class, HeadOrder, InFlight, Urgency},
};
use moves::Move;
use std::collections::HashMap;
use zofo_hal::{Error, Result};

/// Candidates that a search may simulate.
const SIMULATIONS: usize = 120;
/// Passes of a micro-batch through a stage that all simulations together may have.
const PASSES: usize = 200_000;
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
        let workers = workers(layout);
        let dealt = layout.placement.iter().enumerate().all(|(s, w)| *w == s % workers) && layout.placement.len().is_multiple_of(workers);
        match self.order {
            Order::Named(ScheduleName::Interleaved) if !dealt => ANYWHERE,
            Order::Named(name) if name != ScheduleName::Interleaved && workers < layout.placement.len() => ANYWHERE,
            order => order,
        }
    }

    /// No order takes less than the work of the busiest device.
    fn least(&self, p: &Problem) -> f64 {
        let mut busy = vec![0.0; p.devices()];
        let mut first = 0;
        for (d, end) in self.on.iter().zip(&self.ends) {
            busy[*d] += p.both(*d, &(first..*end));
            first = *end;
        }
        f64::from(p.micro_batches()) * busy.into_iter().fold(0.0, f64::max)
    }

    /// What list scheduling is given.
    fn listed(layout: &Layout, p: &Problem, first: Class, in_flight: InFlight, split_backward: bool) -> (Workload, Urgency) {
        let mut w = layout.workload(p, &Method::FROZEN);
        w.split_backward = split_backward;
        let mut urgency = Urgency::frugal(&w);
        (urgency.in_flight, urgency.credits, urgency.head) = (in_flight, Credits::ample(&w), HeadOrder::BaseFirst);
        if first == Class::Forward {
            urgency.classes = [Class::Forward, Class::Backward, Class::Perturbed];
        }
        (w, urgency)
    }

    /// Seconds of a step, if every device's memory is enough.
    fn seconds(&self, p: &Problem) -> Result<f64> {
        let layout = self.layout();
        let timing = layout.timing(p);
        let timeline = match self.order(&layout) {
            Order::Named(name) => sim::replay(&layout.schedule(p, &Method::FROZEN, name, &timing)?, &timing)?,
            Order::Listed { first, in_flight, split_backward } => {
                let (w, urgency) = Self::listed(&layout, p, first, in_flight, split_backward);
                sim::makespan_on(&w, &layout.placement, workers(&layout), &timing, &urgency)?
            }
        };
        layout.devices(p, &timeline).map(|_| timeline.makespan)
    }

    /// The whole of what [`Candidate::seconds`] is the time of.
    fn simulate(&self, p: &Problem) -> Result<Outcome> {
        let layout = self.layout();
        match self.order(&layout) {
            Order::Named(name) => layout.simulate(p, &Method::FROZEN, name),
            Order::Listed { first, in_flight, split_backward } => {
                let timing = layout.timing(p);
                let (w, urgency) = Self::listed(&layout, p, first, in_flight, split_backward);
                let (schedule, _) = sim::arrange_on(&w, &layout.placement, workers(&layout), &timing, &urgency)?;
                layout.run(p, schedule, &timing, ScheduleName::HybridopHead)
            }
        }
    }
}

fn workers(layout: &Layout) -> usize {
    layout.placement.iter().max().map_or(0, |w| w + 1)
}

/// A candidate with its simulated seconds.
type Timed = (Candidate, f64);

struct Search<'a> {
    p: &'a Problem,
    devices: Vec<usize>,
    left: usize,
    passes: usize,
    /// What was simulated; infinite where it does not fit.
    known: HashMap<Candidate, f64>,
    failure: Option<Error>,
}

impl Search<'_> {
    fn seconds(&mut self, candidate: &Candidate) -> f64 {
        if let Some(seconds) = self.known.get(candidate) {
            return *seconds;
        }
        if self.left == 0 || self.passes == 0 {
            return f64::INFINITY;
        }
        self.left -= 1;
        self.passes = self.passes.saturating_sub(candidate.ends.len() * self.p.micro_batches() as usize);
        let seconds = match candidate.seconds(self.p) {
            Ok(seconds) => seconds,
            Err(e) => {
                self.failure.get_or_insert(e);
                f64::INFINITY
            }
        };
        self.known.insert(candidate.clone(), seconds);
        seconds
    }

    /// The fastest, if it takes less than `than`.
    fn faster(&mut self, than: f64, candidates: impl IntoIterator<Item = Candidate>) -> Option<Timed> {
        let mut best: Option<Timed> = None;
        for candidate in candidates {
            let wanted = best.as_ref().map_or(than, |b| b.1) * STRICTLY;
            if candidate.least(self.p) < wanted {
                let seconds = self.seconds(&candidate);
                if seconds < wanted {
                    best = Some((candidate, seconds));
                }
            }
        }
        best
    }

    /// Where the search starts, fastest first: one stage on each device, and up to four, each in the best order; without the smallest devices
    /// where nothing fits. And everything on one device, which is hard to beat over slow links.
    fn starts(&mut self) -> Result<Vec<Timed>> {
        let mut starts = Vec::new();
        let mut on = self.devices.clone();
        while starts.is_empty() && !on.is_empty() {
            let (layers, n) = (self.p.layers(), on.len());
            let mut ends = vec![pipelines::ends(self.p, &on, pipelines::Cut::MinMax)?];
            ends.extend((1..=(layers / n).min(4)).map(|chunks| split::equal(layers, n * chunks)));
            for ends in ends {
                let dealt: Vec<usize> = (0..ends.len()).map(|s| on[s % n]).collect();
                let in_order = |order| Candidate { ends: ends.clone(), on: dealt.clone(), order };
                starts.extend(self.faster(f64::INFINITY, ORDERS.map(in_order)));
            }
            drop_smallest(self.p, &mut on);
        }
        let alone = |d: &usize| Candidate { ends: vec![self.p.layers()], on: vec![*d], order: Order::Named(ScheduleName::OneFOneB) };
        let alone: Vec<Candidate> = self.devices.iter().map(alone).collect();
        starts.extend(self.faster(f64::INFINITY, alone));
        starts.sort_by(|a, b| a.1.total_cmp(&b.1));
        Ok(starts)
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

    /// What a round finds that is faster: by the phase's moves, else in the whole neighbourhood.
    fn round(&mut self, (at, seconds): &Timed) -> Result<Option<Timed>> {
        let outcome = at.simulate(self.p)?;
        let device = |worker: usize| outcome.layout.placement.iter().position(|w| *w == worker).map(|s| at.on[s]);
        let found = bubbles(&outcome.timeline).into_iter().enumerate();
        let found: Vec<(usize, Bubbles)> = found.filter_map(|(w, b)| Some((device(w)?, b))).collect();
        let directed = match self.phase(&found) {
            Move::Partition => at.towards_idle(&found),
            phase => at.neighbours(phase, &self.devices),
        };
        if let Some(next) = self.faster(*seconds, directed) {
            return Ok(Some(next));
        }
        // Algorithm 1 alone stops here; single moves of a kind that its phase does not look at are often faster still.
        let devices = self.devices.clone();
        Ok(Move::ALL.into_iter().find_map(|kind| self.faster(*seconds, at.neighbours(kind, &devices))))
    }
}

pub(super) fn propose(p: &Problem, below: f64) -> Result<Proposal> {
    let (devices, mut notes) = pipelines::devices(p)?;
    if bounds::whole_layers(p, &devices) >= below {
        return Err(nothing_in_time());
    }
    notes.push("after AdaPtis, whose paper was not at hand: see docs/planners.md".into());
    let mut search = Search { p, devices, left: SIMULATIONS, passes: PASSES, known: HashMap::new(), failure: None };
    let mut best: Option<Timed> = None;
    for mut at in search.starts()? {
        while let Some(next) = search.round(&at)? {
            at = next;
        }
        if best.as_ref().is_none_or(|b| at.1 < b.1 * STRICTLY) {
            best = Some(at);
        }
    }
    let Some((best, _)) = best else {
        return Err(search.failure.unwrap_or_else(|| Error::invalid("no split")));
    };
    let outcome = best.simulate(p)?;
    let (stages, workers) = (best.ends.len(), outcome.schedule.workers());
    notes.push(format!("{stages} stages on {workers} devices after {} simulations", SIMULATIONS - search.left));
    if outcome.schedule.workload.split_backward {
        notes.push("backward passes in two parts".into());
    }
    Ok(Proposal { outcome, method: Method::FROZEN, notes })
}
