//! The perturbation contract.
