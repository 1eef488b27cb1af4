//! Schedules, executor, estimators and training loop of zofo.
