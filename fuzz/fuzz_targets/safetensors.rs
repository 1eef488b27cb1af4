//! A safetensors file: header, and every tensor.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zofo_ops::files::{Checkpoint, MappedBytes};

fuzz_target!(|data: &[u8]| {
    let Ok(checkpoint) = Checkpoint::from_bytes("fuzz.safetensors", MappedBytes::from(data.to_vec())) else { return };
    for name in checkpoint.names() {
        if let Ok(tensor) = checkpoint.tensor(name) {
            assert_eq!(tensor.to_f32().len(), tensor.elements());
        }
    }
});
