//! The program as a user runs it: exit codes, messages, files.
#![cfg(feature = "cli")]

#[path = "program/bad_input.rs"]
mod bad_input;
#[path = "program/commands.rs"]
mod commands;
#[path = "program/config.rs"]
mod config;
#[cfg(feature = "embedded")]
#[path = "program/embedded.rs"]
mod embedded;
#[path = "program/interrupt.rs"]
mod interrupt;
#[path = "program/names.rs"]
mod names;
#[path = "program/planning.rs"]
mod planning;
#[path = "program/shared.rs"]
mod shared;
#[path = "program/support.rs"]
mod support;
