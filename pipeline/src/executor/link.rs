//! Bounded channels between devices: one per pair of stages, their members, and lane, with the schedule's credits as capacity.

use super::sharing::Sharing;
use crate::ir::{Lane, Payload, Schedule};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};
use zofo_hal::{Error, ErrorKind, Result};

/// What travels: live rows of blocks, f32, one block after the other.
struct Message {
    payload: Payload,
    data: Arc<Vec<f32>>,
}

/// From a stage to a stage.
type Channel = (usize, usize, Lane);

/// The ends of all links that one device holds, by the rank of the device at the other end. What its own stages say to each other gets here only
/// where it is one part of a message of several.
#[derive(Default)]
pub(super) struct Links {
    outgoing: HashMap<(Channel, usize), SyncSender<Message>>,
    incoming: HashMap<(Channel, usize), Receiver<Message>>,
    /// Messages read before they were wanted, and those from itself.
    early: HashMap<(usize, usize, Payload, usize), Arc<Vec<f32>>>,
}

fn gone(stage: usize) -> Error {
    Error::new(ErrorKind::Cancelled, format!("stage {stage} has stopped"))
}

fn missing(from: usize, to: usize) -> Error {
    Error::invalid(format!("the schedule has no link from stage {from} to stage {to}"))
}

impl Links {
    /// One set per rank.
    pub fn connect(schedule: &Schedule, sharing: &Sharing, ranks: usize) -> Vec<Links> {
        let mut all: Vec<Links> = (0..ranks).map(|_| Links::default()).collect();
        let workload = &schedule.workload;
        let steps = || schedule.lists.iter().flatten();
        let channels = steps().flat_map(|s| workload.produces(s.stage(), &s.action).map(|(to, p)| (s.stage(), to, p.lane())));
        // Credits may be without limit; room for more than ever comes would be taken all the same.
        let mut messages: HashMap<Channel, usize> = HashMap::new();
        channels.for_each(|c| *messages.entry(c).or_default() += 1);
        for ((from, to, lane), most) in messages {
            let room = schedule.credits.lane(lane).min(most);
            for (sender, reader) in sharing.ranks(from).flat_map(|s| sharing.ranks(to).map(move |r| (s, r))).filter(|(s, r)| s != r) {
                if let Entry::Vacant(end) = all[sender].outgoing.entry(((from, to, lane), reader)) {
                    let (tx, rx) = sync_channel(room);
                    end.insert(tx);
                    all[reader].incoming.insert(((from, to, lane), sender), rx);
                }
            }
        }
        all
    }

    /// Sends to the device of rank `reader`, blocking while the lane is full.
    ///
    /// # Errors
    /// `Cancelled` where the other stage has stopped.
    pub fn send(&self, from: usize, to: usize, reader: usize, payload: Payload, data: Arc<Vec<f32>>) -> Result<()> {
        let tx = self.outgoing.get(&((from, to, payload.lane()), reader)).ok_or_else(|| missing(from, to))?;
        tx.send(Message { payload, data }).map_err(|_| gone(to))
    }

    /// Keeps what the device of rank `own` says to itself.
    pub fn keep(&mut self, from: usize, to: usize, own: usize, payload: Payload, data: Arc<Vec<f32>>) {
        self.early.insert((from, to, payload, own), data);
    }

    /// Receives `payload` from the device of rank `sender`, keeping what arrives before it.
    ///
    /// # Errors
    /// `Cancelled` where the other stage has stopped.
    pub fn receive(&mut self, from: usize, to: usize, sender: usize, payload: Payload) -> Result<Arc<Vec<f32>>> {
        if let Some(data) = self.early.remove(&(from, to, payload, sender)) {
            return Ok(data);
        }
        let rx = self.incoming.get(&((from, to, payload.lane()), sender)).ok_or_else(|| missing(from, to))?;
        loop {
            let message = rx.recv().map_err(|_| gone(from))?;
            if message.payload == payload {
                return Ok(message.data);
            }
            self.early.insert((from, to, message.payload, sender), message.data);
        }
    }
}
