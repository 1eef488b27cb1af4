//! CPU backend of zofo.
