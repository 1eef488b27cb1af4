//! Room for a worker's micro-batches, and a rehearsal that finds out how much its list takes beside them.

use super::{
    setup::StepInput,
    stage::Stage,
    worker::{Outcome, Shared, Worker},
};
use std::time::Instant;
use zofo_hal::{Device, Rehearsal, Result};
use zofo_ops::{
    Runner,
    batch::{Capacity, DeviceBatch, MicroBatch},
};

impl Worker {
    /// What each division of a micro-batch of `whole` takes at most.
    pub(super) fn capacities(&self, whole: Capacity) -> Vec<Capacity> {
        let Shared { sharing, divisions, rank, .. } = &self.shared;
        divisions.iter().map(|stage| sharing.capacity(*stage, *rank, whole, self.positions)).collect()
    }

    /// One capacity for all micro-batches of a division, so that their activations take turns in the same buffers. When it grows, those are of no
    /// more use.
    pub(super) fn make_room(&mut self, capacities: &[Capacity]) -> Result<()> {
        let shared = &mut self.shared;
        let count = shared.workload.micro_batches as usize;
        let fits = |batches: &Vec<DeviceBatch>, c: &Capacity| batches.len() == count && batches.iter().all(|b| b.capacity() == *c);
        if shared.batches.iter().zip(capacities).all(|(b, c)| fits(b, c)) {
            return Ok(());
        }
        shared.batches.iter_mut().for_each(Vec::clear);
        shared.runner.trim();
        for (batches, capacity) in shared.batches.iter_mut().zip(capacities) {
            for _ in 0..count {
                batches.push(DeviceBatch::new(&mut shared.runner, *capacity)?);
            }
        }
        Ok(())
    }

    /// Runs the list with micro-batches of `capacity` on a stand-in for the device; the bytes that it would allocate.
    pub(super) fn rehearse(&mut self, capacities: &[Capacity]) -> Outcome<u64> {
        let device = Rehearsal::new(self.shared.runner.device().clone());
        let runner = std::mem::replace(&mut self.shared.runner, Runner::new(device.clone())?);
        let empty = vec![Vec::new(); capacities.len()];
        let batches = std::mem::replace(&mut self.shared.batches, empty);
        let noise: Vec<_> = self.stages.iter_mut().map(Stage::take_noise).collect();
        self.set_rehearsing(true);
        // The batches themselves are on the real device by now.
        let done = self.make_room(capacities).map_err(Into::into).and_then(|()| {
            let batches = device.memory().in_use;
            self.rehearse_list(capacities)?;
            Ok(device.memory().peak - batches)
        });
        self.stages.iter_mut().for_each(Stage::forget);
        self.handed_over.clear();
        self.set_rehearsing(false);
        (self.shared.runner, self.shared.batches) = (runner, batches);
        self.stages.iter_mut().zip(noise).for_each(|(stage, noise)| stage.put_noise(noise));
        done
    }

    fn set_rehearsing(&mut self, rehearsing: bool) {
        self.shared.rehearsing = rehearsing;
        self.stages.iter().for_each(|stage| stage.rehearse(rehearsing));
    }

    fn rehearse_list(&mut self, capacities: &[Capacity]) -> Outcome<()> {
        let count = self.shared.workload.micro_batches as usize;
        for (division, capacity) in capacities.iter().enumerate() {
            let batch = MicroBatch::filling(*capacity, self.positions);
            self.fill(division, std::iter::repeat_n(&batch, count), 1.0)?;
        }
        // The update allocates nothing of a batch's size, and its optimiser keeps what it does allocate.
        self.follow(&StepInput::new(0, vec![MicroBatch::default(); count], 0.0, 0.0), Instant::now())
    }
}
