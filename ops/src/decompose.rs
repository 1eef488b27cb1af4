//! Composite ops as primitives, for devices that lack them.
//!
//! Each decomposition is written once, over [`Emit`], and used twice: [`Runner`] runs it on tensors, and [`plan`] walks it on shapes alone
//! to ask the device about every primitive, so that asking and running cannot drift.

mod emit;
mod update;

pub(crate) use emit::{Constant, Emit, Values};
pub(crate) use update::update;

use alloc::{format, string::ToString};
use zofo_hal::{Device, Lacking, Op, Result, Support, TensorSpec};

/// Runs `op` as other ops on `e`; `None` where there is no way.
pub(crate) fn run<E: Emit>(e: &mut E, op: &Op<E::T>) -> Option<Result<()>> {
    let _ = e;
    Some(match op {
        _ => return None,
    })
}

/// How the device runs `op`, which it lacks; `None` where there is no decomposition.
pub(crate) fn plan(device: &dyn Device, op: &Op<TensorSpec>) -> Option<Support> {
    if op.class() == zofo_hal::op::OpClass::Update {
        return Some(Support::Emulated { note: "runs on the host".into() });
    }
    let mut plan = emit::Plan::new(device);
    Some(match run(&mut plan, op)? {
        Ok(()) => Support::Emulated { note: format!("runs as {}", plan.ops().join(", ")).into() },
        Err(e) => Support::lacking(Lacking::Op, e.message().to_string()),
    })
}
