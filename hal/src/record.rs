//! Recordings in software: the list of ops, submitted again on replay. A backend without native graphs needs nothing else.

use crate::{Error, ErrorKind, Op, QueueId, Recording, RecordingRef, Result, TensorArg};
use alloc::{format, sync::Arc, vec::Vec};
use core::any::Any;

/// A recording that is a list of ops.
#[derive(Debug)]
pub struct OpList {
    queue: QueueId,
    ops: Vec<Op<TensorArg>>,
}

impl OpList {
    /// The ops of `recording`, which was made on `queue`.
    ///
    /// # Errors
    /// `ForeignBuffer` for a recording of another kind or another queue.
    pub fn of(recording: &RecordingRef, queue: QueueId) -> Result<&[Op<TensorArg>]> {
        let foreign = |m| Error::new(ErrorKind::ForeignBuffer, m);
        match recording.as_any().downcast_ref::<Self>() {
            Some(list) if list.queue == queue => Ok(&list.ops),
            Some(list) => Err(foreign(format!("the recording was made on {:?}, not on {queue:?}: replay it there", list.queue))),
            None => Err(foreign("the recording was made by another backend: replay it on the queue that made it".into())),
        }
    }
}

impl Recording for OpList {
    fn len(&self) -> usize {
        self.ops.len()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Whether a queue is recording, and what it has recorded.
#[derive(Debug, Default)]
pub struct Recorder(Option<Vec<Op<TensorArg>>>);

impl Recorder {
    /// Starts.
    ///
    /// # Errors
    /// `InvalidArgument` while recording.
    pub fn begin(&mut self) -> Result<()> {
        self.refuse("begin_recording")?;
        self.0 = Some(Vec::new());
        Ok(())
    }

    /// Whether submits are recorded now.
    pub fn is_recording(&self) -> bool {
        self.0.is_some()
    }

    /// Records `op` and returns its place in the recording; `None` while not recording.
    pub fn push(&mut self, op: &Op<TensorArg>) -> Option<u64> {
        let ops = self.0.as_mut()?;
        ops.push(op.clone());
        Some(ops.len() as u64 - 1)
    }

    /// Ends, and gives the ops to a recording of `queue`.
    ///
    /// # Errors
    /// `InvalidArgument` while not recording.
    pub fn end(&mut self, queue: QueueId) -> Result<RecordingRef> {
        let ops = self.0.take().ok_or_else(|| Error::invalid("end_recording without begin_recording"))?;
        Ok(Arc::new(OpList { queue, ops }))
    }

    /// Forgets what was recorded and stops.
    pub fn cancel(&mut self) {
        self.0 = None;
    }

    /// That `what`, which needs the queue to run, is not asked for while recording.
    ///
    /// # Errors
    /// `InvalidArgument` while recording.
    pub fn refuse(&self, what: &str) -> Result<()> {
        match &self.0 {
            Some(_) => Err(Error::invalid(format!("{what} while the queue is recording: end the recording first"))),
            None => Ok(()),
        }
    }
}
