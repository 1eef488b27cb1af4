//! Validated ops, decompositions, LLaMA blocks with explicit forward and backward, LoRA, losses, optimisers.
