//! What a member of a group that shares layers by heads and columns has of them.

use crate::executor::peers::Peers;
use std::{sync::Arc, time::Duration};
use zofo_hal::{Error, Result, perturb::TensorId};
use zofo_ops::{
    Runner,
    config::ModelConfig,
    llama::{Importer, Shard, ShardedSource, Slice, SliceSpec, WeightSource, linear_name},
    lora::{Adapters, HostAdapter},
};

pub(in crate::executor) struct LayerPart {
    whole: ModelConfig,
    shard: Shard,
    peers: Arc<Peers>,
    /// Sums of squares of the whole gradients, once they are added up.
    pub square_sums: Vec<f32>,
}

impl LayerPart {
    pub fn new(whole: &ModelConfig, shard: &Shard, peers: Arc<Peers>) -> Self {
        Self { whole: whole.clone(), shard: shard.clone(), peers, square_sums: Vec::new() }
    }

    pub fn load(
        &self,
        runner: &mut Runner,
        importer: &mut Importer,
        source: &dyn WeightSource,
        adapter: &HostAdapter,
        spec: &SliceSpec,
    ) -> Result<(Slice, Adapters)> {
        let mut slice = Slice::load(runner, importer, &ShardedSource::new(source, self.shard.clone())?, spec)?;
        slice.join(self.peers.clone());
        let adapters = Adapters::from_host(runner, &slice, &self.adapter(&adapter.layers(spec.layers.clone()))?)?;
        Ok((slice, adapters))
    }

    pub fn leave_alone(&self, alone: bool) {
        self.peers.leave_alone(alone);
    }

    pub fn waited(&self) -> Duration {
        self.peers.waited()
    }

    /// Its part of an adapter.
    pub fn adapter(&self, whole: &HostAdapter) -> Result<HostAdapter> {
        self.shard.adapter(&self.whole, whole)
    }

    fn rank(adapters: &Adapters, id: TensorId) -> Result<usize> {
        let (layer, projection) = (id.layer() as usize, id.projection());
        let found = adapters.get(layer, projection).map(|m| m.rank);
        found.ok_or_else(|| Error::execution(format!("no adapter of layer {layer}, {}", projection.name())))
    }

    /// A gradient of its part of a factor as one of the whole factor: what it adds to the sum of all members.
    pub fn widen(&self, adapters: &Adapters, id: TensorId, own: &[f32]) -> Result<Vec<f32>> {
        let rank = Self::rank(adapters, id)?;
        let (out, inp) = linear_name(id.projection()).shape(&self.whole);
        let width = match id.factor() {
            zofo_hal::perturb::Factor::A => inp,
            zofo_hal::perturb::Factor::B => out,
        };
        let mut whole = vec![0.0; rank * width];
        self.shard.add(&self.whole, id, rank, own, &mut whole)?;
        Ok(whole)
    }

    /// The reverse: its part of the sum.
    pub fn narrow(&self, adapters: &Adapters, id: TensorId, whole: &[f32]) -> Result<Vec<f32>> {
        self.shard.take(&self.whole, id, Self::rank(adapters, id)?, whole)
    }
}
