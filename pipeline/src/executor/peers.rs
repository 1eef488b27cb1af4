//! The all-reduce of a group that shares layers by heads and columns: sums in the order of the members, the same bits for all.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};
use zofo_hal::{Error, ErrorKind, Result, TensorArg};
use zofo_ops::{Runner, llama::Collective};

type Values = Arc<Vec<f32>>;

/// One member's ends of the channels to the others.
pub(super) struct Peers {
    /// Its place among the members.
    member: usize,
    /// To and from every other member, in their order. A pass may only be at one point, so nobody is ahead by more than one sum.
    ends: Mutex<Vec<(Sender<Values>, Receiver<Values>)>>,
    /// While a worker rehearses its list, its peers are not there.
    alone: AtomicBool,
    /// Nanoseconds that it waited for the others.
    waited: AtomicU64,
}

impl Peers {
    /// The ends of a group.
    pub fn group(members: usize) -> Vec<Arc<Self>> {
        // The two ends between every two members, by the member that holds them and the one at the other side.
        let mut ends: BTreeMap<(usize, usize), (Sender<Values>, Receiver<Values>)> = BTreeMap::new();
        for (a, b) in (0..members).flat_map(|a| (a + 1..members).map(move |b| (a, b))) {
            let ((to_b, from_a), (to_a, from_b)) = (channel(), channel());
            ends.insert((a, b), (to_b, from_b));
            ends.insert((b, a), (to_a, from_a));
        }
        let mut all: Vec<Vec<_>> = (0..members).map(|_| Vec::new()).collect();
        ends.into_iter().for_each(|((member, _), end)| all[member].push(end));
        let peers = |(member, ends)| Self { member, ends: Mutex::new(ends), alone: AtomicBool::new(false), waited: AtomicU64::new(0) };
        all.into_iter().enumerate().map(peers).map(Arc::new).collect()
    }

    /// Time that it waited for the others since this was last asked.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.swap(0, Ordering::Relaxed))
    }

    /// Leaves sums as they are, or adds up again.
    pub fn leave_alone(&self, alone: bool) {
        self.alone.store(alone, Ordering::Relaxed);
    }
}

impl Collective for Peers {
    fn all_reduce(&self, runner: &mut Runner, t: &TensorArg, block_rows: usize, live_rows: usize) -> Result<()> {
        if self.alone.load(Ordering::Relaxed) || live_rows == 0 {
            return Ok(());
        }
        let gone = || Error::new(ErrorKind::Cancelled, "another member of the group has stopped");
        let ends = self.ends.lock().map_err(|_| gone())?;
        for block in (0..t.spec.rows).step_by(block_rows.max(1)) {
            let live = t.rows(block, live_rows);
            let own: Values = Arc::new(runner.read_f32(&live)?);
            for (to, _) in ends.iter() {
                to.send(own.clone()).map_err(|_| gone())?;
            }
            let begin = Instant::now();
            let others = ends.iter().map(|(_, from)| from.recv().map_err(|_| gone())).collect::<Result<Vec<Values>>>()?;
            self.waited.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
            let (before, behind) = others.split_at(self.member);
            let mut in_order = before.iter().chain([&own]).chain(behind);
            let mut sum = in_order.next().map_or_else(Vec::new, |first| first.to_vec());
            for part in in_order {
                if part.len() != sum.len() {
                    return Err(Error::execution(format!("members of a group add up {} and {} values", sum.len(), part.len())));
                }
                sum.iter_mut().zip(part.iter()).for_each(|(s, p)| *s += p);
            }
            runner.upload_f32(&live, &sum)?;
        }
        Ok(())
    }
}
