//! Backward passes of a stage, and what is read at the cut.

use super::{Shared, Stage};
use crate::{executor::protocol::ReportKind, ir::Group};
use zofo_hal::{
    DType, Error, Result, TensorArg,
    op::{BoundaryDot, Form},
};
use zofo_ops::llama::Saved;

impl Stage {
    pub(super) fn backward(&mut self, shared: &mut Shared, m: u32, received: Option<TensorArg>) -> Result<Option<TensorArg>> {
        let dh = self.output_gradient(shared, m, received)?;
        let saved = self.saved(m)?;
        self.slice.backward(&mut shared.runner, &shared.batches[self.division][m as usize], &self.adapters, saved, &dh)
    }

    pub(super) fn backward_input(&mut self, shared: &mut Shared, m: u32, received: Option<TensorArg>) -> Result<Option<TensorArg>> {
        let dh = self.output_gradient(shared, m, received)?;
        let saved = self.saved(m)?;
        let batch = &shared.batches[self.division][m as usize];
        let (dx, gradients) = self.slice.backward_input(&mut shared.runner, batch, &self.adapters, saved, &dh)?;
        self.kept.gradients.insert(m, gradients);
        Ok(dx)
    }

    pub(super) fn backward_weight(&mut self, shared: &mut Shared, m: u32) -> Result<()> {
        let missing = || Error::execution("a second part of a backward pass before its first");
        let gradients = self.kept.gradients.remove(&m).ok_or_else(missing)?;
        self.slice.backward_weight(&mut shared.runner, &shared.batches[self.division][m as usize], &self.adapters, gradients)
    }

    /// What the forward pass kept.
    fn saved(&mut self, m: u32) -> Result<Saved> {
        self.kept.saved.remove(&m).ok_or_else(|| Error::execution("a backward pass before its forward pass"))
    }

    /// The gradient at the stage's end: what the stage behind sent, or that of the loss.
    fn output_gradient(&mut self, shared: &mut Shared, m: u32, received: Option<TensorArg>) -> Result<TensorArg> {
        if let Some(dh) = received {
            return Ok(dh);
        }
        let saved = self.kept.loss.remove(&m).ok_or_else(|| Error::execution("a backward pass before its loss"))?;
        self.slice.loss_backward(&mut shared.runner, &shared.batches[self.division][m as usize], saved)
    }

    /// The gradient at the cut, which is kept for those who read it later.
    fn delta(&mut self, m: u32, received: Option<TensorArg>) -> Result<TensorArg> {
        if let Some(delta) = received {
            self.keep_delta(m, delta);
        }
        self.kept.delta.get(&m).cloned().ok_or_else(|| Error::execution("a gradient that never came"))
    }

    pub(super) fn guide(&mut self, shared: &mut Shared, m: u32, received: Option<TensorArg>) -> Result<()> {
        let delta = self.delta(m, received)?;
        let missing = || Error::execution("nothing was kept for a guided estimate");
        let kept = self.kept.rank.remove(&m).ok_or_else(missing)?;
        self.adapters.guide(&mut shared.runner, &shared.batches[self.division][m as usize], &delta, &kept)
    }

    pub(super) fn boundary_dot(&mut self, shared: &mut Shared, g: Group, received: Option<TensorArg>) -> Result<()> {
        let delta = self.delta(g.m, received)?;
        let missing = || Error::execution("a readout before its forward pass");
        let h = self.kept.copies.remove(&g).ok_or_else(missing)?;
        let base = match shared.workload.form {
            Form::Value => Some(self.kept.base.get(&g.m).cloned().ok_or_else(missing)?),
            Form::Tangent => None,
        };
        let out = shared.runner.temp(DType::F32, 1, g.n as usize)?;
        let live = shared.batches[self.division][g.m as usize].live.clone();
        shared.runner.run(BoundaryDot::new(delta, h, out.clone()).base(base).live(live))?;
        let values = shared.runner.read_f32(&out)?;
        // The base is free once every group of its micro-batch has been read, those to come included.
        let read = self.kept.read.entry(g.m).or_default();
        *read += 1;
        if *read == shared.sharing.readouts(self.index, shared.rank, g.m) {
            self.kept.base.remove(&g.m);
            self.kept.delta.remove(&g.m);
        }
        self.tell(shared, ReportKind::Dots { group: g, values });
        Ok(())
    }
}
