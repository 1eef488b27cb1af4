//! The ceilings, as cases: so that a criterion run shows them beside everything else.

use crate::{
    Case, Run, Subject, Work,
    ceiling::{Kernel, Memory, Probe, READ_BYTES},
    threads,
};
use std::time::Duration;

/// Runs so long that waking threads does not count.
const TIME: Duration = Duration::from_millis(20);

pub fn cases(_: &[Subject]) -> Vec<Case> {
    let counts = if threads() > 1 { vec![1, threads()] } else { vec![1] };
    let mut cases = Vec::new();
    for n in counts {
        for (types, kernels) in [("f32", Kernel::fma()), ("bf16", Kernel::bf16().into_iter().collect())] {
            for kernel in kernels {
                let rounds = kernel.rounds(TIME);
                let work = Work::flops(kernel.flops(rounds) as usize * n, 0);
                cases.push(Case::new(format!("ceiling/{types}/{n}-threads"), kernel.name, work, move || {
                    let probe = Probe::new(n);
                    let run: Run = Box::new(move || {
                        probe.run(&kernel, rounds);
                        Ok(())
                    });
                    Ok(run)
                }));
            }
        }
        cases.push(Case::new(format!("ceiling/memory/{n}-threads"), "read", Work::bytes(READ_BYTES), move || {
            let (probe, memory) = (Probe::new(n), Memory::new());
            let run: Run = Box::new(move || {
                probe.read(&memory);
                Ok(())
            });
            Ok(run)
        }));
    }
    cases
}
