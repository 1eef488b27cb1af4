//! Room for a worker's micro-batches, and a rehearsal that finds out how much its list takes beside them.

use super::{
    setup::StepInput,
    stage::Stage,
    worker::{Outcome, Worker},
};
use std::time::Instant;
use zofo_hal::{Device, Rehearsal, Result};
use zofo_ops::{
    Runner,
    batch::{Capacity, DeviceBatch, MicroBatch},
};

impl Worker {
    /// One capacity for all micro-batches, so that their activations take turns in the same buffers. When it grows, those are of no more use.
    pub(super) fn make_room(&mut self, capacity: Capacity) -> Result<()> {
        let shared = &mut self.shared;
        let count = shared.workload.micro_batches as usize;
        if shared.batches.len() == count && shared.batches.iter().all(|b| b.capacity() == capacity) {
            return Ok(());
        }
        shared.batches.clear();
        shared.runner.trim();
        for _ in 0..count {
            shared.batches.push(DeviceBatch::new(&mut shared.runner, capacity)?);
        }
        Ok(())
    }

    /// Runs the list with micro-batches of `capacity` on a stand-in for the device; the bytes that it would allocate.
    pub(super) fn rehearse(&mut self, capacity: Capacity) -> Outcome<u64> {
        let device = Rehearsal::new(self.shared.runner.device().clone());
        let runner = std::mem::replace(&mut self.shared.runner, Runner::new(device.clone())?);
        let batches = std::mem::take(&mut self.shared.batches);
        let noise: Vec<_> = self.stages.iter_mut().map(Stage::take_noise).collect();
        self.shared.rehearsing = true;
        // The batches themselves are on the real device by now.
        let done = self.make_room(capacity).map_err(Into::into).and_then(|()| {
            let batches = device.memory().in_use;
            self.rehearse_list(capacity)?;
            Ok(device.memory().peak - batches)
        });
        self.stages.iter_mut().for_each(Stage::forget);
        self.handed_over.clear();
        self.shared.rehearsing = false;
        (self.shared.runner, self.shared.batches) = (runner, batches);
        self.stages.iter_mut().zip(noise).for_each(|(stage, noise)| stage.put_noise(noise));
        done
    }

    fn rehearse_list(&mut self, capacity: Capacity) -> Outcome<()> {
        let batch = MicroBatch::filling(capacity, self.positions);
        let input = StepInput::new(0, vec![batch; self.shared.workload.micro_batches as usize], 0.0, 0.0);
        self.upload(&input)?;
        // The update allocates nothing of a batch's size, and its optimiser keeps what it does allocate.
        self.follow(&input, Instant::now())
    }
}
