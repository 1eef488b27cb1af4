//! Adapters on a device.

use alloc::{collections::BTreeMap, format, vec::Vec};
use core::ops::Range;

use zofo_hal::{
    DType, Error, Result, TensorArg, Usage,
    op::{Fill, MatMul, Orientation},
    perturb::{Distribution, Factor, Projection, Site, TensorId},
};

use super::{HostAdapter, HostLora, LoraSpec};
use crate::{
    batch::DeviceBatch,
    config::ModelConfig,
    llama::{RankActivations, Slice},
    run::Runner,
};

/// The factors of one adapted projection, f32, and their gradients where they are trained first-order.
#[derive(Clone, Debug)]
pub struct LoraTensors {
    /// A, `[r, in]`.
    pub a: TensorArg,
    /// B, `[out, r]`.
    pub b: TensorArg,
    /// Gradient of A, summed over micro-batches.
    pub da: Option<TensorArg>,
    /// Gradient of B, summed over micro-batches.
    pub db: Option<TensorArg>,
    /// What the product of the factors is multiplied by.
    pub scale: f32,
    /// Rank r.
    pub rank: usize,
}

/// Which gradients are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradScope {
    /// Of every factor: first-order training.
    All,
    /// Of B of the projections that write to the residual stream, o_proj and down_proj: guided zeroth-order training.
    Guided,
}

/// A trained tensor as optimisers see it.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Which one.
    pub id: TensorId,
    /// Its values, f32.
    pub param: TensorArg,
    /// Its gradient, where one is kept; shape of `param`, f32.
    pub grad: Option<TensorArg>,
}

impl Tensor {
    /// Where it lies for the perturbation: it is whole.
    pub fn site(&self, distribution: Distribution) -> Site {
        Site::new(self.id, self.param.spec.cols as u32).with(distribution)
    }
}

/// The adapters of a slice's layers.
#[derive(Clone, Debug, Default)]
pub struct Adapters {
    modules: BTreeMap<(usize, Projection), LoraTensors>,
}

impl Adapters {
    /// No adapter: the base model.
    pub fn none() -> Self {
        Self::default()
    }

    /// New adapters of the slice's layers, see [`HostAdapter::init`].
    ///
    /// # Errors
    /// Those of [`HostAdapter::init`]; `OutOfMemory`.
    pub fn init(runner: &mut Runner, slice: &Slice, spec: &LoraSpec, seed: u64) -> Result<Self> {
        Self::from_host(runner, slice, &HostAdapter::init(slice.config(), slice.layers(), spec, seed)?)
    }

    /// The part of `host` that concerns the slice's layers.
    ///
    /// # Errors
    /// Those of [`HostAdapter::check`]; `OutOfMemory`.
    pub fn from_host(runner: &mut Runner, slice: &Slice, host: &HostAdapter) -> Result<Self> {
        Self::upload(runner, slice.config(), slice.layers(), host)
    }

    fn upload(runner: &mut Runner, config: &ModelConfig, layers: Range<usize>, host: &HostAdapter) -> Result<Self> {
        let host = host.layers(layers);
        host.check(config)?;
        let mut modules = BTreeMap::new();
        for (key, m) in host.modules {
            let mut tensor = |rows: usize, cols: usize, values: &[f32]| -> Result<TensorArg> {
                let t = runner.alloc(DType::F32, rows, cols, Usage::Weights)?;
                runner.upload_f32(&t, values)?;
                Ok(t)
            };
            let a = tensor(m.rank, m.a.len() / m.rank, &m.a)?;
            let b = tensor(m.b.len() / m.rank, m.rank, &m.b)?;
            modules.insert(key, LoraTensors { a, b, da: None, db: None, scale: m.scale, rank: m.rank });
        }
        Ok(Self { modules })
    }

    /// Copies the factors to the host, exactly.
    ///
    /// # Errors
    /// The queue's sticky error.
    pub fn to_host(&self, runner: &mut Runner) -> Result<HostAdapter> {
        let mut host = HostAdapter::default();
        for (key, m) in &self.modules {
            let (a, b) = (runner.read_f32(&m.a)?, runner.read_f32(&m.b)?);
            host.modules.insert(*key, HostLora { rank: m.rank, scale: m.scale, a, b });
        }
        Ok(host)
    }

    /// Overwrites the factors with those of `host`, which must have every module that is here, in the same shape.
    ///
    /// # Errors
    /// `InvalidArgument` naming the module that is missing or differs; the queue's sticky error.
    pub fn restore(&mut self, runner: &mut Runner, host: &HostAdapter) -> Result<()> {
        for ((layer, p), m) in &self.modules {
            let new = host.modules.get(&(*layer, *p)).filter(|n| n.rank == m.rank && n.a.len() == m.a.spec.len());
            let new = new.filter(|n| n.b.len() == m.b.spec.len() && n.scale == m.scale).ok_or_else(|| {
                Error::invalid(format!("the adapter to restore has no module of layer {layer}, {} in the shape that is trained", p.name()))
            })?;
            runner.upload_f32(&m.a, &new.a)?;
            runner.upload_f32(&m.b, &new.b)?;
        }
        Ok(())
    }

    /// Makes room for gradients, all 0.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn enable_grads(&mut self, runner: &mut Runner, scope: GradScope) -> Result<()> {
        for ((_, p), m) in &mut self.modules {
            let mut like = |t: &TensorArg| runner.alloc(DType::F32, t.spec.rows, t.spec.cols, Usage::Weights);
            (m.da, m.db) = match scope {
                GradScope::All => (Some(like(&m.a)?), Some(like(&m.b)?)),
                GradScope::Guided if matches!(p, Projection::O | Projection::Down) => (None, Some(like(&m.b)?)),
                GradScope::Guided => (None, None),
            };
        }
        self.zero_grad(runner)
    }

    /// Sets all gradients to 0.
    ///
    /// # Errors
    /// The queue's sticky error.
    pub fn zero_grad(&self, runner: &mut Runner) -> Result<()> {
        for grad in self.tensors()?.into_iter().filter_map(|t| t.grad) {
            runner.run(Fill::new(grad, 0.0))?;
        }
        Ok(())
    }

    /// Whether there is no adapter.
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty()
    }

    /// The adapter of one projection.
    pub fn get(&self, layer: usize, projection: Projection) -> Option<&LoraTensors> {
        self.modules.get(&(layer, projection))
    }

    /// The adapted projections in canonical order.
    pub fn modules(&self) -> impl Iterator<Item = (usize, Projection, &LoraTensors)> {
        self.modules.iter().map(|((layer, p), m)| (*layer, *p, m))
    }

    /// All tensors in canonical order.
    ///
    /// # Errors
    /// `InvalidArgument` for a layer number that a tensor id cannot hold.
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut tensors = Vec::with_capacity(2 * self.modules.len());
        for ((layer, p), m) in &self.modules {
            for (factor, param, grad) in [(Factor::A, &m.a, &m.da), (Factor::B, &m.b, &m.db)] {
                tensors.push(Tensor { id: TensorId::new(*layer as u32, *p, factor)?, param: param.clone(), grad: grad.clone() });
            }
        }
        Ok(tensors)
    }

    /// Guided estimate of the gradient of B of every o_proj and down_proj: `db += scale delta^T (x A^T)`, with delta the loss gradient at the
    /// cut, f32 `[T, d]`, handed unchanged down the residual stream, and `x A^T` what the forward pass kept. Exact for the layer at the cut's
    /// down_proj, an estimate below it (compare direct feedback alignment, Nøkland 2016).
    ///
    /// # Errors
    /// `InvalidArgument` where gradients are not enabled or the forward pass did not keep an activation.
    pub fn guide(&self, runner: &mut Runner, batch: &DeviceBatch, delta: &TensorArg, kept: &RankActivations) -> Result<()> {
        for (layer, p, m) in self.modules().filter(|(_, p, _)| matches!(p, Projection::O | Projection::Down)) {
            let missing = |what: &str| Error::invalid(format!("layer {layer}, {}: a guided estimate needs {what}", p.name()));
            let db = m.db.clone().ok_or_else(|| missing("its gradient enabled"))?;
            let xa = kept.get(layer, p).ok_or_else(|| missing("the rank-r activation that a forward pass keeps on request"))?;
            let product = MatMul::new(delta.clone(), xa.clone(), db, Orientation::Tn).alpha(m.scale).beta(1.0).live(batch.live.clone());
            runner.run(product)?;
        }
        Ok(())
    }
}
