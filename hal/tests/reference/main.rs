//! The reference devices: arithmetic against hand-made numbers and finite differences, the contract, injected faults.

mod attention;
mod backward;
mod contract;
mod forward;
mod hostile;
mod loss;
mod matmul;
mod primitive;
mod quant;
mod restricted;
mod update;
mod util;
