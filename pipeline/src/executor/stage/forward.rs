//! Forward passes of a stage and the losses at their end.

use super::{Shared, Stage, factors};
use crate::{
    estimator::Scope,
    executor::protocol::ReportKind,
    ir::{Group, Readout, Role},
};
use zofo_hal::{
    Error, Result, TensorArg,
    op::{Copies, Form},
    perturb::{Direction, Distribution, Domain, NoiseParams},
};
use zofo_ops::llama::{Input, Perturbation, RankActivations};

impl Stage {
    pub(super) fn forward(&mut self, shared: &mut Shared, m: u32, hidden: Option<TensorArg>) -> Result<TensorArg> {
        let start = hidden.as_ref().map_or(Input::Tokens, Input::Hidden);
        let Shared { runner, batches, workload, .. } = shared;
        let batch = &batches[self.division][m as usize];
        let h = if self.slice.spec().backward {
            let input_grad = workload.needs_input_gradient(self.index);
            let (h, saved) = self.slice.forward_saving(runner, batch, &self.adapters, start, input_grad)?;
            self.kept.saved.insert(m, saved);
            h
        } else {
            let mut kept = RankActivations::new();
            let guided = self.role == Role::ZerothOrder && workload.readout == Readout::Guide;
            let keep = guided.then_some(&mut kept);
            let h = self.slice.forward_copies(runner, batch, &self.adapters, start, Copies::BASE, None, keep)?;
            if guided {
                self.kept.rank.insert(m, kept);
            }
            h
        };
        let read_at_cut = workload.readout == Readout::Cut && workload.form == Form::Value && workload.estimates();
        if workload.is_last(self.index) || (self.index + 1 == workload.cut() && read_at_cut) {
            self.kept.base.insert(m, h.clone());
        }
        Ok(h)
    }

    fn perturbation(&mut self, shared: &mut Shared, domain: Domain, g: Group, step: u32) -> Result<Perturbation> {
        let e = &shared.estimator;
        let m = if e.scope == Scope::MiniBatch { 0 } else { g.m };
        let eps = if g.minus { -e.eps } else { e.eps };
        let params = NoiseParams::new(shared.seed, step, Direction::new(domain, m, g.q0)?, eps);
        if let Some(p) = self.noise.get(&(domain, g)) {
            p.set(&mut shared.runner, &params)?;
            return Ok(p.clone());
        }
        let p = Perturbation::new(&mut shared.runner, &params, factors(e), Distribution::Gaussian)?;
        self.noise.insert((domain, g), p.clone());
        Ok(p)
    }

    fn copies(&mut self, shared: &mut Shared, domain: Domain, g: Group, step: u32, hidden: Option<TensorArg>) -> Result<TensorArg> {
        let start = hidden.as_ref().map_or(Input::Tokens, Input::Hidden);
        // Past the cut the copies run on through adapters as they are, and a frozen stage has no direction of its own.
        let perturbation = match self.role {
            Role::ZerothOrder => Some(self.perturbation(shared, domain, g, step)?),
            _ => None,
        };
        let copies = g.copies(shared.workload.form);
        let batch = &shared.batches[self.division][g.m as usize];
        self.slice.forward_copies(&mut shared.runner, batch, &self.adapters, start, copies, perturbation.as_ref(), None)
    }

    pub(super) fn perturbed(&mut self, shared: &mut Shared, g: Group, step: u32, hidden: Option<TensorArg>) -> Result<TensorArg> {
        let h = self.copies(shared, Domain::Main, g, step, hidden)?;
        let workload = &shared.workload;
        if workload.is_last(self.index) {
            let rows = self.copy_losses(shared, g, &h, false)?;
            self.tell(shared, ReportKind::CopyLosses { group: g, rows });
        } else if self.index + 1 == workload.cut() && workload.readout == Readout::Cut {
            let block = shared.batches[self.division][g.m as usize].block_rows();
            if g.with_base && workload.form == Form::Value {
                self.kept.base.insert(g.m, h.rows(0, block));
            }
            let first = g.copies(workload.form).first_copy() * block;
            self.kept.copies.insert(g, h.rows(first, h.spec.rows - first));
        }
        Ok(h)
    }

    pub(super) fn exit(&mut self, shared: &mut Shared, g: Group, step: u32, hidden: Option<TensorArg>) -> Result<TensorArg> {
        let h = self.copies(shared, Domain::Exit, g, step, hidden)?;
        if self.index + 1 == shared.workload.cut() {
            let rows = self.copy_losses(shared, g, &h, true)?;
            self.tell(shared, ReportKind::ExitLosses { group: g, rows });
        }
        Ok(h)
    }

    /// Losses of each block, one per labelled row.
    fn copy_losses(&self, shared: &mut Shared, g: Group, h: &TensorArg, exit: bool) -> Result<Vec<Vec<f32>>> {
        let copies = g.copies(shared.workload.form);
        let batch = &shared.batches[self.division][g.m as usize];
        let out = match exit {
            true => self.slice.exit_losses(&mut shared.runner, batch, h, copies)?,
            false => self.slice.loss(&mut shared.runner, batch, h, copies, false)?,
        };
        let (width, labels) = (out.losses.spec.cols, batch.labels());
        Ok(shared.runner.read_f32(&out.losses)?.chunks(width).map(|row| row[..labels].to_vec()).collect())
    }

    pub(super) fn loss(&mut self, shared: &mut Shared, m: u32) -> Result<()> {
        let h = self.kept.base.remove(&m).ok_or_else(|| Error::execution("a loss before its forward pass"))?;
        let batch = &shared.batches[self.division][m as usize];
        let labels = batch.labels();
        let out = self.slice.loss(&mut shared.runner, batch, &h, Copies::BASE, true)?;
        let mut rows = shared.runner.read_f32(&out.losses)?;
        rows.truncate(labels);
        if let Some(saved) = out.saved {
            self.kept.loss.insert(m, saved);
        }
        self.tell(shared, ReportKind::Losses { m, rows });
        Ok(())
    }
}
