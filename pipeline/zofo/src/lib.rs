//! Fine-tune LLaMA-family models with LoRA over mixed edge accelerators.
