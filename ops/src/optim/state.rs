//! Optimiser state as bytes, so that a checkpoint continues bit for bit.
//!
//! Little-endian words: magic (8 bytes), rule, steps, number of tensors; then per tensor its id, its element count, and with AdamW the bits of
//! both moments.

use alloc::{format, vec::Vec};

use zofo_hal::{Error, Result};

use super::{Optimiser, Rule};
use crate::run::Runner;

const MAGIC: &[u8; 8] = b"zofoopt1";

fn rule_word(rule: Rule) -> u32 {
    match rule {
        Rule::Sgd { .. } => 0,
        Rule::AdamW { .. } => 1,
    }
}

impl Optimiser {
    /// The state, exactly. Constants of the rule are not in it.
    ///
    /// # Errors
    /// The queue's sticky error.
    pub fn export(&self, runner: &mut Runner) -> Result<Vec<u8>> {
        let mut bytes = MAGIC.to_vec();
        let word = |bytes: &mut Vec<u8>, w: u32| bytes.extend(w.to_le_bytes());
        word(&mut bytes, rule_word(self.rule));
        word(&mut bytes, self.t);
        word(&mut bytes, self.slots.len() as u32);
        for slot in &self.slots {
            word(&mut bytes, slot.tensor.id.word());
            word(&mut bytes, slot.tensor.param.spec.len() as u32);
            for moment in slot.moments.iter().flat_map(|(m, v)| [m, v]) {
                let values = runner.read_f32(moment)?;
                values.iter().for_each(|v| word(&mut bytes, v.to_bits()));
            }
        }
        Ok(bytes)
    }

    /// Takes up a state that an optimiser of the same rule over the same tensors exported.
    ///
    /// # Errors
    /// `Format` where the bytes are no state, or one of other tensors or another rule; nothing is changed then. The queue's sticky error.
    pub fn import(&mut self, runner: &mut Runner, bytes: &[u8]) -> Result<()> {
        let Some(body) = bytes.strip_prefix(MAGIC) else {
            return Err(Error::format("this is no optimiser state: it does not begin with its magic word"));
        };
        let (words, rest) = body.as_chunks::<4>();
        let words: Vec<u32> = words.iter().map(|w| u32::from_le_bytes(*w)).collect();
        let mut rest_of = Words { words: &words };
        if !rest.is_empty() {
            return Err(Error::format("the optimiser state is cut short"));
        }
        rest_of.expect("rule", rule_word(self.rule))?;
        let t = rest_of.next()?;
        rest_of.expect("number of tensors", self.slots.len() as u32)?;
        let mut moments = Vec::new();
        for slot in &self.slots {
            let n = slot.tensor.param.spec.len();
            rest_of.expect("tensor", slot.tensor.id.word())?;
            rest_of.expect("size of a tensor", n as u32)?;
            for to in slot.moments.iter().flat_map(|(m, v)| [m, v]) {
                moments.push((to, rest_of.take(n)?));
            }
        }
        if !rest_of.words.is_empty() {
            return Err(Error::format(format!("the optimiser state has {} words too many", rest_of.words.len())));
        }
        for (to, values) in moments {
            runner.upload_f32(to, &values.iter().map(|w| f32::from_bits(*w)).collect::<Vec<_>>())?;
        }
        self.t = t;
        Ok(())
    }
}

struct Words<'a> {
    words: &'a [u32],
}

impl<'a> Words<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u32]> {
        let (taken, rest) = self.words.split_at_checked(n).ok_or_else(|| Error::format("the optimiser state is cut short"))?;
        self.words = rest;
        Ok(taken)
    }

    fn next(&mut self) -> Result<u32> {
        Ok(self.take(1)?[0])
    }

    fn expect(&mut self, what: &str, expected: u32) -> Result<()> {
        match self.next()? {
            found if found == expected => Ok(()),
            found => Err(Error::format(format!(
                "the optimiser state is of another run: {what} is {found}, this run has {expected}; resume with the same rank, targets, layer \
                 split and optimiser"
            ))),
        }
    }
}
