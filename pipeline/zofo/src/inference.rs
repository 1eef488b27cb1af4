//! A whole model on one device, for scoring and generating.

use zofo_hal::{DType, DeviceRef, Result, TensorArg};
use zofo_ops::{
    Runner,
    batch::{DeviceBatch, MicroBatch, Sequence},
    llama::{CachedInput, Importer, Input, KvCache, Slice, SliceSpec, WeightTypes},
    lora::{Adapters, HostAdapter},
};

use crate::model::Model;

/// A model that only runs forward.
pub struct Inference {
    pub(crate) runner: Runner,
    pub(crate) slice: Slice,
    pub(crate) adapters: Adapters,
    weights: Vec<WeightTypes>,
}

impl Inference {
    /// Loads a model onto `device`, for sequences of up to `positions` tokens, computing in `compute` (f32, f16 or bf16).
    ///
    /// # Errors
    /// Those of [`Slice::load`]; `InvalidArgument` where the adapter does not fit the model.
    pub fn load(device: DeviceRef, model: &Model, adapter: Option<&HostAdapter>, positions: usize, compute: DType) -> Result<Self> {
        let mut runner = Runner::new(device)?;
        let mut spec = SliceSpec::whole(model.config()).with_compute(compute);
        spec.positions = positions;
        let mut importer = Importer::new();
        let slice = Slice::load(&mut runner, &mut importer, &**model.source(), &spec)?;
        let adapters = match adapter {
            Some(host) => Adapters::from_host(&mut runner, &slice, host)?,
            None => Adapters::none(),
        };
        Ok(Self { runner, slice, adapters, weights: importer.types() })
    }

    /// What types of base weights were read as what.
    pub fn weight_types(&self) -> &[WeightTypes] {
        &self.weights
    }

    /// Puts another adapter on, or none.
    ///
    /// # Errors
    /// `InvalidArgument` where it does not fit the model; `OutOfMemory`.
    pub fn set_adapter(&mut self, adapter: Option<&HostAdapter>) -> Result<()> {
        self.adapters = match adapter {
            Some(host) => Adapters::from_host(&mut self.runner, &self.slice, host)?,
            None => Adapters::none(),
        };
        Ok(())
    }

    /// Loss of each labelled token, in the order of the sequences and of their tokens.
    ///
    /// # Errors
    /// Those of [`MicroBatch::pack`] and of the device.
    pub fn losses(&mut self, sequences: &[Sequence]) -> Result<Vec<f32>> {
        let (batch, host) = self.batch(sequences)?;
        let h = self.hidden(&batch)?;
        self.losses_of(&batch, &h, host.labels())
    }

    pub(crate) fn batch(&mut self, sequences: &[Sequence]) -> Result<(DeviceBatch, MicroBatch)> {
        let host = MicroBatch::pack(self.slice.config(), sequences)?;
        Ok((self.upload(&host)?, host))
    }

    pub(crate) fn upload(&mut self, host: &MicroBatch) -> Result<DeviceBatch> {
        DeviceBatch::from_host(&mut self.runner, host, 1.0)
    }

    pub(crate) fn hidden(&mut self, batch: &DeviceBatch) -> Result<TensorArg> {
        self.slice.forward(&mut self.runner, batch, &self.adapters, Input::Tokens)
    }

    pub(crate) fn losses_of(&mut self, batch: &DeviceBatch, h: &TensorArg, labels: usize) -> Result<Vec<f32>> {
        let out = self.slice.loss(&mut self.runner, batch, h, zofo_hal::op::Copies::BASE, false)?;
        let mut losses = self.runner.read_f32(&out.losses)?;
        losses.truncate(labels);
        Ok(losses)
    }

    /// An empty cache for `capacity` tokens.
    pub(crate) fn cache(&mut self, capacity: usize) -> Result<KvCache> {
        KvCache::new(&mut self.runner, &self.slice, capacity)
    }

    /// Logits of the token behind `ids`, which go into the cache.
    pub(crate) fn next_logits(&mut self, cache: &mut KvCache, ids: &[u32]) -> Result<Vec<f32>> {
        let h = self.slice.forward_cached(&mut self.runner, &self.adapters, cache, CachedInput::Tokens(ids))?;
        let logits = self.slice.logits(&mut self.runner, &h.rows(ids.len() - 1, 1))?;
        self.runner.read_f32(&logits)
    }
}
