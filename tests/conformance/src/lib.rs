//! Conformance kit for zofo backends.
