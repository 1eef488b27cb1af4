//! What a worker sends and receives: of every message the rows and blocks that it has, or needs.

use super::{
    setup::StepInput,
    sharing::{Blocks, Part, Piece},
    worker::{Shared, Worker},
};
use crate::ir::{Action, Payload};
use std::sync::Arc;
use zofo_hal::{DType, Error, Result, TensorArg};

impl Worker {
    /// Waits for what the action needs, except gradients that are here already.
    pub(super) fn receive(&mut self, position: usize, action: &Action, input: &StepInput) -> Result<Option<TensorArg>> {
        let stage = &self.stages[position];
        let (to, division, rank) = (stage.index, stage.division, self.shared.rank);
        let Some((from, payload)) = self.shared.workload.consumes(to, action) else { return Ok(None) };
        let m = payload.micro_batch();
        if matches!(payload, Payload::Delta { .. }) && stage.had_delta(m) {
            return Ok(None);
        }
        if let Some(tensor) = self.handed_over.remove(&(from, to, payload)) {
            return Ok(Some(tensor));
        }
        let ends = &input.batches[m as usize].cu_seqlens;
        let Part { rows, blocks } = self.shared.sharing.part(to, rank, &payload, ends);
        let batch = &self.shared.batches[division][m as usize];
        if blocks.len() == 0 || batch.rows() == 0 {
            return Ok(None);
        }
        let tensor = self.shared.runner.temp(DType::F32, blocks.len() * batch.block_rows(), self.hidden)?;
        if self.shared.rehearsing {
            return Ok(Some(tensor));
        }
        for (sender, pieces) in self.shared.sharing.routes(from, to, rank, &payload, ends)? {
            let data = self.links.receive(from, to, sender, payload)?;
            self.shared.place((division, m), &tensor, &blocks, rows.start, &pieces, &data)?;
        }
        Ok(Some(tensor))
    }

    /// Sends what an action put out to all that need a part of it.
    pub(super) fn send(&mut self, position: usize, action: &Action, own: &Action, out: &TensorArg, input: &StepInput) -> Result<()> {
        let stage = &self.stages[position];
        let (from, division, rank) = (stage.index, stage.division, self.shared.rank);
        let m = action.micro_batch().unwrap_or(0);
        let sharing = self.shared.sharing.clone();
        let blocks = Blocks::put_out(own, self.shared.workload.form);
        let ends = &input.batches[m as usize].cu_seqlens;
        let mut sent: Vec<(Vec<Piece>, Arc<Vec<f32>>)> = Vec::new();
        for (to, payload) in self.shared.workload.produces(from, action) {
            for reader in sharing.ranks(to) {
                if reader == rank && sharing.hands_over(from, to, rank, &payload) {
                    let tensor = self.part_of(division, m, out, &blocks, &sharing.blocks(to, rank, &payload))?;
                    self.handed_over.insert((from, to, payload), tensor);
                    continue;
                }
                if self.shared.rehearsing {
                    continue;
                }
                let routes = sharing.routes(from, to, reader, &payload, ends)?;
                let Some((_, pieces)) = routes.into_iter().find(|(sender, _)| *sender == rank) else { continue };
                let same = sent.iter().find(|(p, _)| *p == pieces).map(|(_, d)| d.clone());
                let data = match same {
                    Some(data) => data,
                    None => {
                        let first = sharing.part(from, rank, &payload, ends).rows.start;
                        self.shared.download((division, m), out, &blocks, first, &pieces)?
                    }
                };
                sent.push((pieces, data.clone()));
                match reader == rank {
                    true => self.links.keep(from, to, rank, payload, data),
                    false => self.links.send(from, to, reader, payload, data)?,
                }
            }
        }
        Ok(())
    }

    /// The blocks of a tensor that a message has.
    fn part_of(&self, division: usize, m: u32, out: &TensorArg, blocks: &Blocks, wanted: &Blocks) -> Result<TensorArg> {
        let rows = self.shared.batches[division][m as usize].block_rows();
        let first = blocks.within(wanted).ok_or_else(|| Error::execution(format!("{wanted:?} of a tensor of {blocks:?}")))?;
        Ok(out.rows(first * rows, wanted.len() * rows))
    }
}

impl Shared {
    /// Pieces of a tensor that holds `blocks` of rows from `first` on, as one vector.
    fn download(&mut self, batch: (usize, u32), t: &TensorArg, blocks: &Blocks, first: usize, pieces: &[Piece]) -> Result<Arc<Vec<f32>>> {
        let block = self.batches[batch.0][batch.1 as usize].block_rows();
        let mut data = Vec::with_capacity(pieces.iter().map(|p| p.rows.len() * t.spec.cols).sum());
        for piece in pieces {
            data.extend(self.runner.read_f32(&t.rows(start_of(piece, blocks, first, block)?, piece.rows.len()))?);
        }
        Ok(Arc::new(data))
    }

    /// The reverse of [`Shared::download`].
    fn place(&mut self, batch: (usize, u32), t: &TensorArg, blocks: &Blocks, first: usize, pieces: &[Piece], data: &[f32]) -> Result<()> {
        let block = self.batches[batch.0][batch.1 as usize].block_rows();
        let mut rest = data;
        for piece in pieces {
            let n = piece.rows.len() * t.spec.cols;
            let wrong = || Error::execution(format!("{} values arrived for {pieces:?} of {} columns", data.len(), t.spec.cols));
            let (values, behind) = rest.split_at_checked(n).ok_or_else(wrong)?;
            self.runner.upload_f32(&t.rows(start_of(piece, blocks, first, block)?, piece.rows.len()), values)?;
            rest = behind;
        }
        Ok(())
    }
}

/// Row of a tensor at which a piece starts.
fn start_of(piece: &Piece, blocks: &Blocks, first: usize, block_rows: usize) -> Result<usize> {
    let position = blocks.position(piece.block).ok_or_else(|| Error::execution(format!("a tensor without {:?}", piece.block)))?;
    Ok(position * block_rows + piece.rows.start - first)
}
