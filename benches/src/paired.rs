//! Cases of a group in turns: A B C A B C. A machine that slows down for a while then slows all of them.

use crate::Case;
use std::time::Instant;
use zofo_hal::Result;

/// Runs are repeated until a turn takes this long, so that the clock's grain and cold caches do not count.
const TURN_SECONDS: f64 = 0.01;
const MOST_REPEATS: usize = 1 << 20;
/// A run of this length is a turn, cold or not.
const LONG_SECONDS: f64 = 0.5;

/// Median seconds of one run of each case, over `rounds` turns. A case that fails has its error.
pub fn medians(cases: &[Case], rounds: usize) -> Vec<Result<f64>> {
    let mut turns: Vec<Result<Turn>> = cases.iter().map(Turn::new).collect();
    for _ in 0..rounds {
        for turn in &mut turns {
            if let Ok(t) = turn
                && let Err(e) = t.take()
            {
                *turn = Err(e);
            }
        }
    }
    turns.into_iter().map(|t| t.map(Turn::median)).collect()
}

struct Turn {
    run: crate::Run,
    repeats: usize,
    seconds: Vec<f64>,
}

impl Turn {
    fn new(case: &Case) -> Result<Self> {
        let mut turn = Self { run: case.prepare()?, repeats: 1, seconds: Vec::new() };
        // The first run fills pools and caches; the second says how many make a turn.
        turn.take()?;
        if turn.seconds[0] < LONG_SECONDS {
            turn.take()?;
            turn.repeats = ((TURN_SECONDS / turn.seconds[1]).ceil() as usize).clamp(1, MOST_REPEATS);
        }
        turn.seconds.clear();
        Ok(turn)
    }

    fn take(&mut self) -> Result<()> {
        let start = Instant::now();
        for _ in 0..self.repeats {
            (self.run)()?;
        }
        self.seconds.push(start.elapsed().as_secs_f64() / self.repeats as f64);
        Ok(())
    }

    fn median(mut self) -> f64 {
        self.seconds.sort_by(f64::total_cmp);
        let n = self.seconds.len();
        (self.seconds[(n - 1) / 2] + self.seconds[n / 2]) / 2.0
    }
}
