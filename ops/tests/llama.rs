//! Models over synthetic weights: gradients, tangents, and everything that must give the same bits.

#[path = "llama/common.rs"]
mod common;
#[path = "llama/copies.rs"]
mod copies;
#[path = "llama/decode.rs"]
mod decode;
#[path = "llama/devices.rs"]
mod devices;
#[path = "llama/gradients.rs"]
mod gradients;
#[path = "llama/group.rs"]
mod group;
#[path = "llama/guided.rs"]
mod guided;
#[path = "llama/invariance.rs"]
mod invariance;
#[path = "llama/refusals.rs"]
mod refusals;
#[path = "llama/shards.rs"]
mod shards;
#[path = "llama/sharing.rs"]
mod sharing;
