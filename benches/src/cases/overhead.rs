//! What an op costs beside its arithmetic: training steps of a model so small that there is next to none.

use super::loaded::{FirstOrder, Labels, Loaded, SEED, Types};
use crate::{Case, Run, Subject, Unit, Work, random, shapes};
use zofo_hal::{DeviceRef, Rehearsal, Result};
use zofo_ops::{Runner, batch::DeviceBatch};

/// Sequences and tokens of each: products of next to nothing, and those of a small batch.
const BATCHES: [(usize, usize); 2] = [(1, 2), (8, 32)];

/// What the ops of a step run on.
#[derive(Clone, Copy)]
enum On {
    /// The device.
    Device,
    /// Its stand-in, which checks and counts every op and computes nothing.
    Nothing,
}

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (sequences, tokens) in BATCHES {
        let group = format!("tiny-fo-step/f32/{sequences}x{tokens}");
        for s in subjects {
            let ops = Step::new(&s.device, On::Nothing, sequences, tokens).and_then(|mut step| step.ops()).unwrap_or(0);
            let work = Work::flops(0, 0).per(Unit::Ops(ops));
            let mut add = |who: String, device: DeviceRef, on| {
                let prepare = move || -> Result<Run> {
                    let mut step = Step::new(&device, on, sequences, tokens)?;
                    Ok(Box::new(move || step.run()))
                };
                cases.push(Case::new(&group, who, work, prepare));
            };
            add(s.who.clone(), s.device.clone(), On::Device);
            if let Some(single) = s.single_threaded() {
                add(format!("{}+1-thread", s.who), single, On::Device);
            }
            add(format!("{}+no-kernels", s.who), s.device.clone(), On::Nothing);
        }
    }
    cases
}

struct Step {
    trained: FirstOrder,
    batch: DeviceBatch,
}

impl Step {
    fn new(device: &DeviceRef, on: On, sequences: usize, tokens: usize) -> Result<Self> {
        let mut trained = FirstOrder::new(Loaded::new(device, &shapes::tiny(), Types::F32)?)?;
        let ids = random::tokens(SEED, sequences * tokens, shapes::tiny().vocab)?;
        let all: Vec<_> = ids.chunks(tokens).map(|ids| Labels::All.on(ids.to_vec())).collect();
        let batch = trained.model.batch(&all)?;
        if let On::Nothing = on {
            trained.model.runner = Runner::new(Rehearsal::new(device.clone()))?;
        }
        Ok(Self { trained, batch })
    }

    fn run(&mut self) -> Result<()> {
        self.trained.step(&self.batch)
    }

    /// How many ops a step submits.
    fn ops(&mut self) -> Result<u64> {
        self.run()?;
        let before = self.trained.model.runner.stats().submitted;
        self.run()?;
        Ok(self.trained.model.runner.stats().submitted - before)
    }
}
