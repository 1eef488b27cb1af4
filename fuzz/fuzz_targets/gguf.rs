//! A GGUF file: header, configuration, every tensor that the model asks for, and the tokenizer inside.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use zofo_ops::{
    files::{Gguf, GgufModel, MappedBytes, Tokenizer},
    llama::{ParamName, WeightSource},
};

fuzz_target!(|data: &[u8]| {
    let Ok(file) = Gguf::parse(Path::new("fuzz.gguf"), MappedBytes::from(data.to_vec())) else { return };
    for name in file.names() {
        let _ = file.tensor(name);
    }
    if let Ok(tokenizer) = Tokenizer::from_gguf(file.metadata())
        && let Ok(ids) = tokenizer.encode("Once upon a time, 1234 <|im_end|>\n", true)
    {
        let _ = tokenizer.decode(&ids);
    }
    let Ok(model) = GgufModel::new(file) else { return };
    for name in ParamName::all(model.config()) {
        let _ = model.require(name).and_then(|t| t.to_f32());
    }
});
