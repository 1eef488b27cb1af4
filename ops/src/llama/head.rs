//! The end of a model: final norm and LM head, with losses, their gradient, and logits. An exit head is the same, earlier.

use alloc::vec::Vec;

use zofo_hal::{
    DType, Error, Result, TensorArg, WeightRef,
    op::{CandidateScores, Copies, CrossEntropy, CrossEntropyBackward, MatMul, Orientation, RmsNorm, RmsNormBackward},
};

use super::slice::Slice;
use crate::{batch::DeviceBatch, run::Runner};

pub(super) struct Head {
    pub norm: TensorArg,
    pub weight: WeightRef,
}

/// Losses of a micro-batch.
#[derive(Clone, Debug)]
pub struct LossOut {
    /// Loss of each labelled row, or its tangent, per copy, f32 `[C, R]`; 0 past the rows that count.
    pub losses: TensorArg,
    /// What the backward pass needs, where it was asked for.
    pub saved: Option<SavedLoss>,
}

impl LossOut {
    /// Sum of each copy's losses in f64, ascending by row: of values, or of tangents.
    ///
    /// # Errors
    /// The queue's sticky error.
    pub fn sums(&self, runner: &mut Runner) -> Result<Vec<f64>> {
        let [copies, labels] = self.losses.spec.shape();
        let losses = runner.read_f32(&self.losses)?;
        Ok((0..copies).map(|c| losses[c * labels..][..labels].iter().map(|l| f64::from(*l)).sum()).collect())
    }
}

/// What the backward pass of the head needs.
#[derive(Clone, Debug)]
pub struct SavedLoss {
    h: TensorArg,
    slope: TensorArg,
}

impl Slice {
    fn missing_head(&self, what: &str) -> Error {
        Error::invalid(alloc::format!("layers {:?} were loaded without {what}", self.spec.layers))
    }

    fn head(&self) -> Result<&Head> {
        self.head.as_ref().ok_or_else(|| self.missing_head("the head"))
    }

    /// Losses of the labelled rows. `h` is what a forward pass over `copies` returned, f32 `[C T, d]`. With `save`, what
    /// [`Slice::loss_backward`] needs is kept: of a base pass alone.
    ///
    /// # Errors
    /// `InvalidArgument` where the slice has no head, or is to save and has copies; those of [`Runner::run`].
    pub fn loss(&self, runner: &mut Runner, batch: &DeviceBatch, h: &TensorArg, copies: Copies, save: bool) -> Result<LossOut> {
        self.losses(self.head()?, runner, batch, h, copies, save)
    }

    /// Losses of the labelled rows at the exit head, f32 `[C, R]`.
    ///
    /// # Errors
    /// `InvalidArgument` where the slice has no exit head; those of [`Runner::run`].
    pub fn exit_losses(&self, runner: &mut Runner, batch: &DeviceBatch, h: &TensorArg, copies: Copies) -> Result<LossOut> {
        let exit = self.exit.as_ref().ok_or_else(|| self.missing_head("an exit head"))?;
        self.losses(exit, runner, batch, h, copies, false)
    }

    fn losses(&self, head: &Head, runner: &mut Runner, batch: &DeviceBatch, h: &TensorArg, copies: Copies, save: bool) -> Result<LossOut> {
        let normed = self.final_norm(head, runner, h, Some(&batch.live), copies)?;
        let labels = batch.capacity().labels;
        let losses = runner.temp(DType::F32, copies.total(), labels)?;
        let slope = save.then(|| runner.temp(DType::F32, labels, h.spec.cols)).transpose()?;
        let (rows, targets) = (batch.label_rows.clone(), batch.targets.clone());
        let op = CrossEntropy::new(normed, rows, targets, &head.weight, losses.clone()).slope(slope.clone()).copies(copies);
        runner.run(op)?;
        Ok(LossOut { losses, saved: slope.map(|slope| SavedLoss { h: h.clone(), slope }) })
    }

    fn final_norm(&self, head: &Head, runner: &mut Runner, h: &TensorArg, live: Option<&TensorArg>, copies: Copies) -> Result<TensorArg> {
        let normed = runner.temp(self.spec.compute, h.spec.rows, h.spec.cols)?;
        let norm = RmsNorm::new(h.clone(), head.norm.clone(), normed.clone(), self.config.rms_norm_eps);
        runner.run(norm.live(live.cloned()).copies(copies))?;
        Ok(normed)
    }

    /// Gradient of the scaled sum of losses at the head's input, f32 `[T, d]`.
    ///
    /// # Errors
    /// `InvalidArgument` where the slice has no head or was loaded without backward; those of [`Runner::run`].
    pub fn loss_backward(&self, runner: &mut Runner, batch: &DeviceBatch, saved: SavedLoss) -> Result<TensorArg> {
        let head = self.head()?;
        if !self.spec.backward {
            return Err(self.missing_head("backward"));
        }
        let SavedLoss { h, slope } = saved;
        let [rows, cols] = h.spec.shape();
        let dnormed = runner.temp(DType::F32, rows, cols)?;
        runner.run(CrossEntropyBackward::new(slope, batch.label_rows.clone(), batch.loss_scale.clone(), dnormed.clone()))?;
        let dh = runner.temp(DType::F32, rows, cols)?;
        let op = RmsNormBackward::new(h, head.norm.clone(), dnormed, dh.clone(), self.config.rms_norm_eps);
        runner.run(op.live(batch.live.clone()))?;
        Ok(dh)
    }

    /// Logits of hidden states, `[rows, d]` to f32 `[rows, vocab]`. All rows are taken: give it those that count.
    ///
    /// # Errors
    /// `InvalidArgument` where the slice has no head; those of [`Runner::run`].
    pub fn logits(&self, runner: &mut Runner, h: &TensorArg) -> Result<TensorArg> {
        let head = self.head()?;
        let normed = self.final_norm(head, runner, h, None, Copies::BASE)?;
        let logits = runner.temp(DType::F32, h.spec.rows, self.config.vocab)?;
        runner.run(MatMul::new(normed, &head.weight, logits.clone(), Orientation::Nt))?;
        Ok(logits)
    }

    /// Logits of a few tokens at a few rows of `h`, f32 `[R, K]`: `rows` is u32 `[1, R]`, `candidates` u32 `[1, K]`.
    ///
    /// # Errors
    /// `InvalidArgument` where the slice has no head; those of [`Runner::run`].
    pub fn candidate_scores(
        &self,
        runner: &mut Runner,
        batch: &DeviceBatch,
        h: &TensorArg,
        rows: &TensorArg,
        candidates: &TensorArg,
    ) -> Result<TensorArg> {
        let head = self.head()?;
        let normed = self.final_norm(head, runner, h, Some(&batch.live), Copies::BASE)?;
        let out = runner.temp(DType::F32, rows.spec.cols, candidates.spec.cols)?;
        runner.run(CandidateScores::new(normed, rows.clone(), candidates.clone(), &head.weight, out.clone()))?;
        Ok(out)
    }
}
