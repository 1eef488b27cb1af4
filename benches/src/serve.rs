//! A case that is run when it is told to, so that contestants in other processes can take turns with it, or run beside it.
//!
//! `{"ready": NAME}` is written once the case has run for the first time. Each line that is read then asks for runs: so many seconds of them,
//! at least one. Each is answered by a line `{"runs": N, "seconds": S, "amount": A}`, with the amount of one run in the case's unit.

use crate::{
    Case,
    cases::{SUITES, Suite},
    selected,
};
use serde_json::json;
use std::{
    io::{BufRead, Write},
    time::Instant,
};
use zofo_hal::{Error, Result};

/// Finds the case of this whole name on the selected devices, or the first of the group of this name.
///
/// # Errors
/// `InvalidArgument` where there is none; those of [`selected`].
pub fn find(name: &str) -> Result<Case> {
    let subjects = selected()?;
    let all = |suite: &Suite| (suite.cases)(&subjects).into_iter().find(|c| c.id.group == name || c.id.to_string() == name);
    SUITES.iter().find_map(all).ok_or_else(|| Error::invalid(format!("there is no case `{name}`; a report shows their names, GROUP/WHO")))
}

/// Runs `case` as it is asked to, until there is nothing more to read.
///
/// # Errors
/// What the case gives; `Io`; `InvalidArgument` for a line that is no number.
pub fn serve(case: &Case, asked: impl BufRead, mut answers: impl Write) -> Result<()> {
    let mut run = case.prepare()?;
    run()?;
    let mut answer =
        |line: serde_json::Value| writeln!(answers, "{line}").and_then(|()| answers.flush()).map_err(|e| Error::io("standard output", e));
    answer(json!({ "ready": case.id.to_string() }))?;
    for line in asked.lines() {
        let line = line.map_err(|e| Error::io("standard input", e))?;
        let wanted: f64 = line.trim().parse().map_err(|_| Error::invalid(format!("`{line}` is no number of seconds")))?;
        let (start, mut runs) = (Instant::now(), 0u64);
        while runs == 0 || start.elapsed().as_secs_f64() < wanted {
            run()?;
            runs += 1;
        }
        answer(json!({ "runs": runs, "seconds": start.elapsed().as_secs_f64(), "amount": case.work.amount() }))?;
    }
    Ok(())
}
