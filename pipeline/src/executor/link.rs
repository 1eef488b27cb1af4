//! Bounded channels between stages: one per link and lane, with the schedule's credits as capacity.

use crate::ir::{Lane, Payload, Schedule};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
};
use zofo_hal::{Error, ErrorKind, Result};

/// What travels: live rows of every block, f32, one block after the other.
pub(super) struct Message {
    pub payload: Payload,
    pub data: std::sync::Arc<Vec<f32>>,
}

/// The ends of all links that one stage holds.
#[derive(Default)]
pub(super) struct Links {
    outgoing: HashMap<(usize, Lane), SyncSender<Message>>,
    incoming: HashMap<(usize, Lane), Receiver<Message>>,
    /// Messages read before they were wanted.
    early: HashMap<(usize, Payload), std::sync::Arc<Vec<f32>>>,
}

fn gone(stage: usize) -> Error {
    Error::new(ErrorKind::Cancelled, format!("stage {stage} has stopped"))
}

impl Links {
    /// One set per stage.
    pub fn connect(schedule: &Schedule) -> Vec<Links> {
        let w = &schedule.workload;
        let mut all: Vec<Links> = (0..w.stages()).map(|_| Links::default()).collect();
        for from in 0..w.stages() {
            for (to, payload) in schedule.actions(from).flat_map(|a| w.produces(from, &a)) {
                let lane = payload.lane();
                if let Entry::Vacant(sender) = all[from].outgoing.entry((to, lane)) {
                    let (tx, rx) = sync_channel(schedule.credits.lane(lane));
                    sender.insert(tx);
                    all[to].incoming.insert((from, lane), rx);
                }
            }
        }
        all
    }

    /// Sends, blocking while the lane is full.
    ///
    /// # Errors
    /// `Cancelled` where the other stage has stopped.
    pub fn send(&self, to: usize, payload: Payload, data: std::sync::Arc<Vec<f32>>) -> Result<()> {
        let tx =
            self.outgoing.get(&(to, payload.lane())).ok_or_else(|| Error::invalid(format!("the schedule has no link to stage {to}")))?;
        tx.send(Message { payload, data }).map_err(|_| gone(to))
    }

    /// Receives `payload`, keeping what arrives before it.
    ///
    /// # Errors
    /// `Cancelled` where the other stage has stopped.
    pub fn receive(&mut self, from: usize, payload: Payload) -> Result<std::sync::Arc<Vec<f32>>> {
        if let Some(data) = self.early.remove(&(from, payload)) {
            return Ok(data);
        }
        let rx = (self.incoming.get(&(from, payload.lane())))
            .ok_or_else(|| Error::invalid(format!("the schedule has no link from stage {from}")))?;
        loop {
            let message = rx.recv().map_err(|_| gone(from))?;
            if message.payload == payload {
                return Ok(message.data);
            }
            self.early.insert((from, message.payload), message.data);
        }
    }
}
