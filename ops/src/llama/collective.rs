//! The sums that the members of a group form.

use zofo_hal::{Result, TensorArg};

use crate::run::Runner;

/// Sums over the members of a group that compute the same layers, each its own [`super::Shard`] of them.
///
/// All members run the same passes over the same micro-batches with the same adapters trained, so they call it in the same order and with
/// the same shapes. Per layer that is twice in a forward pass (what o_proj and down_proj wrote) and once or twice in a backward pass (the
/// gradient at the input of gate and up, and at that of q, k and v, where gradients go so far down); a slice that recomputes calls it for
/// o_proj again.
///
/// An implementation answers with an error, at every member, where one of them has failed: none may wait for ever.
pub trait Collective: Send + Sync {
    /// Replaces the live rows of each block of `t` by their sum over all members: the same bits for all of them.
    ///
    /// `t` has some blocks of `block_rows` rows, of which the first `live_rows` count; it is f32 or of the slice's compute type, to which a
    /// sum formed in f32 is rounded once. What is in the other rows is unspecified, and nobody reads it.
    ///
    /// # Errors
    /// Those of the runner; where a member has failed, or came with another shape.
    fn all_reduce(&self, runner: &mut Runner, t: &TensorArg, block_rows: usize, live_rows: usize) -> Result<()>;
}
