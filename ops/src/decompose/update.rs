//! Optimiser updates on the host.

use crate::Runner;
use zofo_hal::{Op, Result, TensorArg};

/// Runs the update `op` on the host; `None` for another op.
pub(crate) fn update(runner: &mut Runner, op: &Op<TensorArg>) -> Option<Result<()>> {
    let _ = (runner, op);
    None
}
