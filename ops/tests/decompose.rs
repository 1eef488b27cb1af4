//! Every composite op on a device with primitives alone, against the same op run natively.
//!
//! A case draws an op with random shapes, forms, types, strides and live counts, the same one on every device from the same seed. Rows that
//! an op must not read hold NaN or indices out of range; rows that it must not write, and the gaps between rows, hold a pattern that must
//! still be there afterwards.

#[path = "decompose/cases.rs"]
mod cases;
#[path = "decompose/harness.rs"]
mod harness;
#[path = "decompose/runner.rs"]
mod runner;
