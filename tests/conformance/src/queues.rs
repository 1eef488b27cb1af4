//! Queues: order, events, errors, recording.

mod errors;
mod order;
mod recording;

use crate::suite::Tests;

pub(super) fn tests(t: &mut Tests) {
    order::tests(t);
    errors::tests(t);
    recording::tests(t);
}
