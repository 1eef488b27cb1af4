//! Bounded channels between workers: one per pair of stages and lane, with the schedule's credits as capacity.

use crate::ir::{Lane, Payload, Schedule};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};
use zofo_hal::{Error, ErrorKind, Result};

/// What travels: live rows of every block, f32, one block after the other.
struct Message {
    payload: Payload,
    data: Arc<Vec<f32>>,
}

/// From a stage to a stage.
type Channel = (usize, usize, Lane);

/// The ends of all links that one worker holds. What its own stages say to each other never gets here.
#[derive(Default)]
pub(super) struct Links {
    outgoing: HashMap<Channel, SyncSender<Message>>,
    incoming: HashMap<Channel, Receiver<Message>>,
    /// Messages read before they were wanted.
    early: HashMap<(usize, usize, Payload), Arc<Vec<f32>>>,
}

fn gone(stage: usize) -> Error {
    Error::new(ErrorKind::Cancelled, format!("stage {stage} has stopped"))
}

impl Links {
    /// One set per worker.
    pub fn connect(schedule: &Schedule) -> Vec<Links> {
        let mut all: Vec<Links> = (0..schedule.workers()).map(|_| Links::default()).collect();
        let workload = &schedule.workload;
        // Credits may be without limit; room for more than ever comes would be taken all the same.
        let mut messages: HashMap<(usize, usize, Lane), usize> = HashMap::new();
        for s in schedule.lists.iter().flatten() {
            workload.produces(s.stage(), &s.action).for_each(|(to, p)| *messages.entry((s.stage(), to, p.lane())).or_default() += 1);
        }
        for (worker, list) in schedule.lists.iter().enumerate() {
            for (from, (to, payload)) in
                list.iter().flat_map(|s| workload.produces(s.stage(), &s.action).map(move |message| (s.stage(), message)))
            {
                let (reader, lane) = (schedule.placement[to], payload.lane());
                if reader != worker
                    && let Entry::Vacant(sender) = all[worker].outgoing.entry((from, to, lane))
                {
                    let (tx, rx) = sync_channel(schedule.credits.lane(lane).min(messages[&(from, to, lane)]));
                    sender.insert(tx);
                    all[reader].incoming.insert((from, to, lane), rx);
                }
            }
        }
        all
    }

    /// Sends, blocking while the lane is full.
    ///
    /// # Errors
    /// `Cancelled` where the other stage has stopped.
    pub fn send(&self, from: usize, to: usize, payload: Payload, data: Arc<Vec<f32>>) -> Result<()> {
        let tx = self.outgoing.get(&(from, to, payload.lane()));
        let tx = tx.ok_or_else(|| Error::invalid(format!("the schedule has no link from stage {from} to stage {to}")))?;
        tx.send(Message { payload, data }).map_err(|_| gone(to))
    }

    /// Receives `payload`, keeping what arrives before it.
    ///
    /// # Errors
    /// `Cancelled` where the other stage has stopped.
    pub fn receive(&mut self, from: usize, to: usize, payload: Payload) -> Result<Arc<Vec<f32>>> {
        if let Some(data) = self.early.remove(&(from, to, payload)) {
            return Ok(data);
        }
        let rx = self.incoming.get(&(from, to, payload.lane()));
        let rx = rx.ok_or_else(|| Error::invalid(format!("the schedule has no link from stage {from} to stage {to}")))?;
        loop {
            let message = rx.recv().map_err(|_| gone(from))?;
            if message.payload == payload {
                return Ok(message.data);
            }
            self.early.insert((from, to, message.payload), message.data);
        }
    }
}
