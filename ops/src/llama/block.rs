//! One decoder layer, forward, in value and tangent form.

use zofo_hal::{
    DType, Result, TensorArg,
    op::{RmsNorm, ScaledAdd, SwiGlu},
    perturb::Projection,
};

use super::{
    pass::{Act, Pass},
    saved::{Kept, LayerSaved},
    slice::Layer,
};

/// The residual stream, f32, and what the last projection wrote and the next norm will add to it.
pub(super) struct Stream {
    h: Act,
    /// Whether `h` is a temporary of this pass that may be overwritten: nobody keeps it.
    owned: bool,
    pending: Option<Act>,
}

impl Stream {
    pub fn new(h: Act, owned: bool) -> Self {
        Self { h, owned, pending: None }
    }

    fn keep(&mut self, kept: Kept, saved: &mut LayerSaved) {
        saved.put(kept, &self.h);
        self.owned &= !saved.wants(kept);
    }
}

impl Pass<'_> {
    /// Adds what is pending and normalises, in one op.
    fn norm(&mut self, stream: &mut Stream, gamma: &TensorArg) -> Result<Act> {
        let eps = self.slice.config.rms_norm_eps;
        let d = self.slice.config.hidden;
        let Some(pending) = stream.pending.take() else {
            let out = self.act(d, stream.h.shared)?;
            let norm = RmsNorm::new(stream.h.tensor.clone(), gamma.clone(), out.tensor.clone(), eps);
            self.runner.run(norm.live(self.live.clone()).copies(self.blocks(out.shared)))?;
            return Ok(out);
        };
        let before = stream.h.shared;
        let [h, pending] = self.meet([stream.h.clone(), pending])?;
        let in_place = stream.owned || h.shared != before && self.copies.total() > 1;
        let sum = if in_place { h.clone() } else { self.typed(DType::F32, d, h.shared)? };
        let out = self.act(d, h.shared)?;
        let norm = RmsNorm::new(pending.tensor, gamma.clone(), out.tensor.clone(), eps).residual(h.tensor).sum(sum.tensor.clone());
        self.runner.run(norm.live(self.live.clone()).copies(self.blocks(out.shared)))?;
        (stream.h, stream.owned) = (sum, true);
        Ok(out)
    }

    /// The stream with what is pending.
    pub fn end(&mut self, mut stream: Stream) -> Result<Act> {
        let Some(pending) = stream.pending.take() else {
            return Ok(stream.h);
        };
        let [h, pending] = self.meet([stream.h, pending])?;
        let out = self.typed(DType::F32, h.tensor.spec.cols, h.shared)?;
        let sum = ScaledAdd::new(h.tensor, out.tensor.clone()).b(pending.tensor).live(self.live.clone());
        self.runner.run(sum.blocks(self.blocks(out.shared).total()))?;
        Ok(out)
    }

    /// One decoder layer. What `saved` plans for is put into it.
    pub fn layer(&mut self, layer: &Layer, stream: &mut Stream, saved: Option<&mut LayerSaved>) -> Result<()> {
        let mut nothing = LayerSaved::default();
        let saved = saved.unwrap_or(&mut nothing);
        self.attend(layer, stream, saved)?;
        let gated = self.gate(layer, stream, saved)?;
        let written = self.down(layer, gated, saved)?;
        self.all_reduce(&written)?;
        stream.pending = Some(written);
        Ok(())
    }

    /// Puts what `saved` plans for into it again, from the layer's input. What comes after the last of it is not done.
    pub fn recompute(&mut self, layer: &Layer, input: TensorArg, saved: &mut LayerSaved) -> Result<()> {
        let mut stream = Stream::new(Act { tensor: input, shared: true }, false);
        self.attend(layer, &mut stream, saved)?;
        let gated = self.gate(layer, &mut stream, saved)?;
        if saved.wants(Kept::Act) {
            // What it would write to the stream has no reader here.
            self.down(layer, gated, saved)?;
        }
        Ok(())
    }

    fn attend(&mut self, layer: &Layer, stream: &mut Stream, saved: &mut LayerSaved) -> Result<()> {
        let n = self.norm(stream, &layer.input_norm)?;
        stream.keep(Kept::Stream1, saved);
        let q = self.saving_linear(layer, Projection::Q, &n, saved)?;
        let k = self.saving_linear(layer, Projection::K, &n, saved)?;
        let v = self.saving_linear(layer, Projection::V, &n, saved)?;
        saved.put(Kept::Norm1, &n);
        drop(n);
        self.rope(&q)?;
        self.rope(&k)?;
        let [q, k, v] = self.meet([q, k, v])?;
        let heads = self.slice.config.heads;
        let lse = saved.wants(Kept::Lse).then(|| self.typed(DType::F32, heads, true)).transpose()?;
        let o = self.attention(layer, [&q, &k, &v], lse.as_ref().map(|l| l.tensor.clone()))?;
        for (kept, act) in [(Kept::Q, &q), (Kept::K, &k), (Kept::V, &v), (Kept::O, &o)] {
            saved.put(kept, act);
        }
        if let Some(lse) = &lse {
            saved.put(Kept::Lse, lse);
        }
        drop([q, k, v]);
        let written = self.saving_linear(layer, Projection::O, &o, saved)?;
        self.all_reduce(&written)?;
        stream.pending = Some(written);
        Ok(())
    }

    fn gate(&mut self, layer: &Layer, stream: &mut Stream, saved: &mut LayerSaved) -> Result<[Act; 2]> {
        let n = self.norm(stream, &layer.post_attention_norm)?;
        stream.keep(Kept::Stream2, saved);
        let gate = self.saving_linear(layer, Projection::Gate, &n, saved)?;
        let up = self.saving_linear(layer, Projection::Up, &n, saved)?;
        saved.put(Kept::Norm2, &n);
        drop(n);
        let gated = self.meet([gate, up])?;
        saved.put(Kept::Gate, &gated[0]);
        saved.put(Kept::Up, &gated[1]);
        Ok(gated)
    }

    /// What the feed-forward network writes to the stream: this member's part of it.
    fn down(&mut self, layer: &Layer, [gate, up]: [Act; 2], saved: &mut LayerSaved) -> Result<Act> {
        let act = if saved.wants(Kept::Gate) { self.act(gate.tensor.spec.cols, gate.shared)? } else { gate.clone() };
        let copies = self.blocks(act.shared);
        self.runner.run(SwiGlu::new(gate.tensor, up.tensor, act.tensor.clone()).live(self.live.clone()).copies(copies))?;
        let written = self.saving_linear(layer, Projection::Down, &act, saved)?;
        saved.put(Kept::Act, &act);
        Ok(written)
    }

    fn saving_linear(&mut self, layer: &Layer, p: Projection, x: &Act, saved: &mut LayerSaved) -> Result<Act> {
        let (out, xa) = self.linear(layer, p, x, saved.wants_rank(p))?;
        saved.put_rank(p, xa);
        Ok(out)
    }
}
