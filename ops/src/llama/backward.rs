//! The backward pass of a slice: gradients of adapters, and of hidden states through frozen weights.

use alloc::{format, vec::Vec};

use zofo_hal::{
    DType, Error, Result, TensorArg,
    op::{AttentionBackward, Copies, LoraMatMulBackward, MatMul, Orientation, Pairing, RmsNormBackward, Rope, SwiGluBackward},
    perturb::Projection,
};

use super::{
    pass::shape,
    saved::{Group, Kept, LayerSaved, Plan, Saved},
    slice::{Layer, Slice},
};
use crate::{batch::DeviceBatch, lora::Adapters, run::Runner};

/// Type of gradients inside a layer. Those of a loss divided by thousands of labels are too small for f16.
const fn gradient_type(compute: DType) -> DType {
    match compute {
        DType::F16 => DType::F32,
        other => other,
    }
}

/// What [`Slice::backward_weight`] needs: gradients at the outputs of adapted projections, and what the projections read.
#[derive(Debug)]
pub struct SavedGradients(Vec<OutputGradient>);

#[derive(Debug)]
struct OutputGradient {
    layer: usize,
    projection: Projection,
    dout: TensorArg,
    x: TensorArg,
    xa: TensorArg,
}

impl Slice {
    /// Takes the gradient at the slice's end, f32 `[T, d]`, down through it. Gradients of the adapters are added to what they hold; the
    /// gradient at the slice's input is returned where the forward pass was told so. A slice that recomputes runs each layer forward again
    /// first, with the adapters as they are: they must be those of the forward pass.
    ///
    /// # Errors
    /// `InvalidArgument` where `saved` is of another slice, or gradients were enabled after the forward pass; those of [`Runner::run`].
    pub fn backward(
        &self,
        runner: &mut Runner,
        batch: &DeviceBatch,
        adapters: &Adapters,
        saved: Saved,
        dh: &TensorArg,
    ) -> Result<Option<TensorArg>> {
        self.down(runner, batch, adapters, saved, dh, None)
    }

    /// The part of [`Slice::backward`] that others wait for: the gradient at the slice's input. With [`Slice::backward_weight`] of what it keeps the
    /// adapters' gradients have the same bits.
    ///
    /// Activations that the other part has no use for are free afterwards; what a slice that recomputes made again for it is kept.
    ///
    /// # Errors
    /// As [`Slice::backward`].
    pub fn backward_input(
        &self,
        runner: &mut Runner,
        batch: &DeviceBatch,
        adapters: &Adapters,
        saved: Saved,
        dh: &TensorArg,
    ) -> Result<(Option<TensorArg>, SavedGradients)> {
        let mut kept = SavedGradients(Vec::new());
        let dx = self.down(runner, batch, adapters, saved, dh, Some(&mut kept))?;
        Ok((dx, kept))
    }

    /// The part of [`Slice::backward`] that nobody waits for: gradients of the adapters, added to what they hold.
    ///
    /// # Errors
    /// `InvalidArgument` where `kept` is of another slice or the adapters have no gradients; those of [`Runner::run`].
    pub fn backward_weight(&self, runner: &mut Runner, batch: &DeviceBatch, adapters: &Adapters, kept: SavedGradients) -> Result<()> {
        for OutputGradient { layer, projection: p, dout, x, xa } in kept.0 {
            let missing = || Error::invalid(format!("layer {layer}, {}: the slice has no such adapter with gradients", p.name()));
            let of_layer = self.layers.iter().find(|l| l.index == layer).ok_or_else(missing)?;
            let m = adapters.get(layer, p).ok_or_else(missing)?;
            let (da, db) = (m.da.clone().ok_or_else(missing)?, m.db.clone().ok_or_else(missing)?);
            let op = LoraMatMulBackward::new(x, xa, m.a.clone(), m.b.clone(), dout, of_layer.weight(p), da, db, m.scale);
            runner.run(op.live(batch.live.clone()))?;
        }
        Ok(())
    }

    /// Down through the layers. Gradients of adapters are computed on the way, or what they need is kept in `later`.
    fn down(
        &self,
        runner: &mut Runner,
        batch: &DeviceBatch,
        adapters: &Adapters,
        mut saved: Saved,
        dh: &TensorArg,
        mut later: Option<&mut SavedGradients>,
    ) -> Result<Option<TensorArg>> {
        if saved.layers.len() != self.layers.len() {
            return Err(Error::invalid(format!("activations of {} layers for a slice of {}", saved.layers.len(), self.layers.len())));
        }
        let mut dh = Gradient { tensor: dh.clone(), owned: false };
        for layer in self.layers.iter().rev() {
            // Each layer's activations are free again once it is done.
            let Some(mut saved_layer) = saved.layers.pop() else { break };
            if self.spec.recompute
                && let Some(input) = saved_layer.get(Kept::Stream1)
            {
                saved_layer = LayerSaved::new(&saved.plan, layer.index, adapters.trained(layer.index));
                self.pass(runner, batch, adapters, Copies::BASE).recompute(layer, input, &mut saved_layer)?;
            }
            let later = later.as_deref_mut();
            let mut back =
                Backward { runner: &mut *runner, slice: self, batch, adapters, plan: &saved.plan, layer, saved: saved_layer, later };
            back.layer(&mut dh)?;
        }
        Ok(saved.plan.input_grad.then_some(dh.tensor))
    }
}

/// The gradient of the residual stream.
struct Gradient {
    tensor: TensorArg,
    /// Whether it may be overwritten.
    owned: bool,
}

struct Backward<'a> {
    runner: &'a mut Runner,
    slice: &'a Slice,
    batch: &'a DeviceBatch,
    adapters: &'a Adapters,
    plan: &'a Plan,
    layer: &'a Layer,
    saved: LayerSaved,
    later: Option<&'a mut SavedGradients>,
}

impl Backward<'_> {
    fn layer(&mut self, dh: &mut Gradient) -> Result<()> {
        let (index, c) = (self.layer.index, &self.slice.config);
        let gradients = gradient_type(self.slice.spec.compute);
        if !self.plan.reaches(index, Group::Down) {
            return Ok(());
        }

        let Some(dact) = self.group(Group::Down, &[&dh.tensor], Kept::Act, gradients, c.intermediate)? else {
            return Ok(());
        };
        let dup = self.temp(gradients, c.intermediate)?;
        let (gate, up) = (self.kept(Kept::Gate)?, self.kept(Kept::Up)?);
        // The gradient of the gate takes the place of that of the product.
        let swiglu = SwiGluBackward::new(gate, up, dact.clone(), dact.clone(), dup.clone()).live(self.batch.live.clone());
        self.runner.run(swiglu)?;
        let Some(dn) = self.group(Group::GateUp, &[&dact, &dup], Kept::Norm2, DType::F32, c.hidden)? else {
            return Ok(());
        };
        drop((dact, dup));
        self.norm(dh, Kept::Stream2, &self.layer.post_attention_norm, dn)?;

        let Some(dout) = self.group(Group::O, &[&dh.tensor], Kept::O, gradients, c.q_width())? else {
            return Ok(());
        };
        let [dq, dk, dv] = self.attention(dout, gradients)?;
        let Some(dn) = self.group(Group::Qkv, &[&dq, &dk, &dv], Kept::Norm1, DType::F32, c.hidden)? else {
            return Ok(());
        };
        drop([dq, dk, dv]);
        self.norm(dh, Kept::Stream1, &self.layer.input_norm, dn)
    }

    fn temp(&mut self, dtype: DType, cols: usize) -> Result<TensorArg> {
        self.runner.temp(dtype, self.batch.block_rows(), cols)
    }

    fn kept(&self, kept: Kept) -> Result<TensorArg> {
        self.saved.get(kept).ok_or_else(|| self.missing(&format!("{kept:?}")))
    }

    fn missing(&self, what: &str) -> Error {
        let layer = self.layer.index;
        Error::invalid(format!("layer {layer}: the forward pass did not keep {what}; enable gradients before it, and keep them enabled"))
    }

    /// Projections that read the same input: their adapters' gradients, and the sum of the gradients at that input if it is wanted.
    fn group(&mut self, group: Group, douts: &[&TensorArg], input: Kept, dtype: DType, cols: usize) -> Result<Option<TensorArg>> {
        if !self.plan.reaches(self.layer.index, group) {
            return Ok(None);
        }
        let dx = self.plan.passes(self.layer.index, group).then(|| self.temp(dtype, cols)).transpose()?;
        for (i, (p, dout)) in group.projections().iter().zip(douts).enumerate() {
            self.linear(*p, dout, input, dx.clone(), if i == 0 { 0.0 } else { 1.0 })?;
        }
        // Members share out the outputs of these groups, so each has a part of the gradient at their common input.
        if let (Some(peers), Some(dx), Group::Qkv | Group::GateUp) = (&self.slice.peers, &dx, group) {
            peers.all_reduce(self.runner, dx, self.batch.block_rows(), self.batch.rows())?;
        }
        Ok(dx)
    }

    fn linear(&mut self, p: Projection, dout: &TensorArg, input: Kept, dx: Option<TensorArg>, beta: f32) -> Result<()> {
        let (w, live) = (self.layer.weight(p), self.batch.live.clone());
        let lora = self.adapters.get(self.layer.index, p);
        if let Some(m) = lora
            && let (Some(da), Some(db)) = (&m.da, &m.db)
        {
            let xa = self.saved.rank(p).ok_or_else(|| self.missing(p.name()))?;
            let (x, a, b) = (self.kept(input)?, m.a.clone(), m.b.clone());
            if let Some(later) = &mut self.later {
                let (x, xa, dout) = (x.clone(), xa.clone(), dout.clone());
                later.0.push(OutputGradient { layer: self.layer.index, projection: p, dout, x, xa });
                if dx.is_none() {
                    return Ok(());
                }
            }
            let factors = self.later.is_none();
            let op = LoraMatMulBackward::new(x, xa, a, b, dout.clone(), w, da.clone(), db.clone(), m.scale);
            return self.runner.run(op.dx(dx).beta(beta).live(live).factors(factors));
        }
        let Some(dx) = dx else { return Ok(()) };
        self.runner.run(MatMul::new(dout.clone(), w, dx.clone(), Orientation::Nn).beta(beta).live(live.clone()))?;
        let Some(m) = lora else { return Ok(()) };
        let u = self.temp(DType::F32, m.rank)?;
        self.runner.run(MatMul::new(dout.clone(), m.b.clone(), u.clone(), Orientation::Nn).alpha(m.scale).live(live.clone()))?;
        self.runner.run(MatMul::new(u, m.a.clone(), dx, Orientation::Nn).beta(1.0).live(live))
    }

    fn norm(&mut self, dh: &mut Gradient, stream: Kept, gamma: &TensorArg, dn: TensorArg) -> Result<()> {
        let h = self.kept(stream)?;
        let dx = if dh.owned { dh.tensor.clone() } else { self.temp(DType::F32, h.spec.cols)? };
        let op = RmsNormBackward::new(h, gamma.clone(), dn, dx.clone(), self.slice.config.rms_norm_eps);
        self.runner.run(op.dresidual(dh.tensor.clone()).live(self.batch.live.clone()))?;
        // What is kept for later holds gradients of the stream as they were.
        *dh = Gradient { tensor: dx, owned: self.later.is_none() };
        Ok(())
    }

    /// Gradients of q and k before rotation, and of v.
    fn attention(&mut self, dout: TensorArg, gradients: DType) -> Result<[TensorArg; 3]> {
        let (q, k, v) = (self.kept(Kept::Q)?, self.kept(Kept::K)?, self.kept(Kept::V)?);
        let (o, lse, cu) = (self.kept(Kept::O)?, self.kept(Kept::Lse)?, self.batch.cu_seqlens.clone());
        let dq = self.temp(gradients, q.spec.cols)?;
        let dk = self.temp(gradients, k.spec.cols)?;
        let dv = self.temp(gradients, v.spec.cols)?;
        let outputs = (dq.clone(), dk.clone(), dv.clone());
        let op = AttentionBackward::new(q, k, v, o, lse, dout, cu.clone(), cu, outputs.0, outputs.1, outputs.2, shape(self.slice));
        self.runner.run(op)?;
        for t in [&dq, &dk] {
            let (cos, sin) = (self.slice.rope.cos.clone(), self.slice.rope.sin.clone());
            let positions = self.batch.positions.clone();
            let rope = Rope::new(t.clone(), positions, cos, sin, t.clone(), self.slice.config.head_dim, Pairing::Half).inverse(true);
            self.runner.run(rope.live(self.batch.live.clone()))?;
        }
        Ok([dq, dk, dv])
    }
}
