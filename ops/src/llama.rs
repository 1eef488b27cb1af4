//! LLaMA-family models over the op vocabulary, with explicit forward and backward passes.
//!
//! | file | job |
//! |---|---|
//! | `weights` | parameters by name, where they come from, their import once per memory |
//! | `memory` | a model in memory |
//! | `cut` | a part of a matrix, taken, put back, added |
//! | `shard` | one member's part of layers that a group of devices computes together |
//! | `sharded` | that part of a source of weights |
//! | `collective` | the sums that the members form |
//! | `slice` | contiguous layers on one device, with the embedding or the head where they are the model's ends |
//! | `rope` | rotary tables |
//! | `pass` | what a forward pass carries: copies, perturbation, residual stream |
//! | `block` | one decoder layer, forward |
//! | `saved` | what the backward pass needs, planned and counted |
//! | `backward` | one decoder layer, backward |
//! | `head` | final norm, loss, logits |
//! | `cache` | decoding with a KV cache |
//!
//! The residual stream and its gradient are f32; other activations have the slice's compute type. Row counts are a micro-batch's bucket, the
//! rows that count are `live`.
//!
//! A group of devices may share layers (tensor parallelism): each loads a [`Slice`] from its [`ShardedSource`], [joins](Slice::join) the
//! others through a [`Collective`], takes its part of the adapter ([`Shard::adapter`]), and all run the same passes; gradients of its
//! adapter are put together by [`Shard::add`].

mod backward;
mod block;
mod cache;
mod collective;
mod cut;
mod head;
mod memory;
mod pass;
mod rope;
mod saved;
mod shard;
mod sharded;
mod slice;
#[cfg(feature = "std")]
mod source;
mod weights;

pub use backward::SavedGradients;
pub use cache::{CachedInput, KvCache};
pub use collective::Collective;
pub use cut::Cut;
pub use head::{LossOut, SavedLoss};
pub use memory::MemoryModel;
pub(crate) use memory::uniform;
pub use pass::{Factors, Input, Perturbation, RankActivations};
#[cfg(feature = "std")]
pub(crate) use rope::rope_frequencies;
pub use rope::rope_tables;
pub use saved::Saved;
pub use shard::Shard;
pub use sharded::ShardedSource;
pub use slice::{Slice, SliceSpec};
pub use weights::{Importer, ParamName, SourceTensor, WeightSource, WeightTypes};

pub use crate::config::{ModelConfig, RopeScaling};

use crate::config::LinearName;
use zofo_hal::perturb::Projection;

/// The same projection as the configuration names it.
pub fn linear_name(projection: Projection) -> LinearName {
    LinearName::ALL[projection as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_and_linear_layers_are_numbered_alike() {
        for p in Projection::ALL {
            assert_eq!(p.name(), linear_name(p).hf_name());
        }
    }
}
