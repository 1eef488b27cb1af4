//! A given order: every worker goes through its list.

use super::{
    engine::{Order, State},
    stuck,
};
use crate::ir::{Action, Step};
use zofo_hal::Result;

pub(super) struct FixedOrder<'a> {
    lists: &'a [Vec<Step>],
    next: Vec<usize>,
}

impl<'a> FixedOrder<'a> {
    pub fn new(lists: &'a [Vec<Step>]) -> Self {
        Self { lists, next: vec![0; lists.len()] }
    }
}

impl Order for FixedOrder<'_> {
    fn next(&mut self, state: &mut State<'_>, worker: usize) -> Option<Step> {
        let step = *self.lists[worker].get(self.next[worker])?;
        let ready = match step.action {
            Action::Update => state.may_update(step.stage()),
            _ => state.fetch(step.stage(), &step.action),
        };
        ready.then(|| {
            self.next[worker] += 1;
            step
        })
    }

    fn finished(&self, _state: &State<'_>) -> Result<()> {
        match self.lists.iter().zip(&self.next).find(|(list, next)| **next < list.len()) {
            Some((list, next)) => Err(stuck(list[*next].stage(), &format!("waits for ever at {}", list[*next].action))),
            None => Ok(()),
        }
    }
}
