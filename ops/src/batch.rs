//! Micro-batches: packed sequences with their labels, on the host and in device parameter buffers.
//!
//! Sequences of different length lie one after the other; nothing is padded but the end. A device buffer has room for a *bucket* of rows,
//! sequences and labels, so that batches of about the same size run the same recorded ops: `live` says how many rows count, `cu_seqlens`
//! repeats its last entry, and label rows that stand for nothing are [`NO_INDEX`].

use alloc::{format, vec, vec::Vec};

use zofo_hal::{DType, Error, Result, TensorArg, Usage, op::NO_INDEX};

use crate::{config::ModelConfig, run::Runner};

/// Tokens of one text, and what is to be predicted behind each of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The token that should follow position i, or `None` where no loss is taken. As long as `ids`.
    pub labels: Vec<Option<u32>>,
}

impl Sequence {
    /// A text without labels, to be run and not trained on.
    pub fn unlabelled(ids: Vec<u32>) -> Self {
        let labels = vec![None; ids.len()];
        Self { ids, labels }
    }

    /// A text whose tokens from index `first` on are to be predicted, each from those before it. The first token of a text is never a target,
    /// so 0 and 1 mean the same: plain language modelling.
    pub fn predicting(ids: Vec<u32>, first: usize) -> Self {
        let labels = (1..=ids.len()).map(|next| ids.get(next).copied().filter(|_| next >= first)).collect();
        Self { ids, labels }
    }
}

/// Packed sequences on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MicroBatch {
    /// Token ids of all sequences, one after the other.
    pub ids: Vec<u32>,
    /// Sequence s has rows `cu_seqlens[s] .. cu_seqlens[s + 1]`.
    pub cu_seqlens: Vec<u32>,
    /// Position of each row in its sequence, from 0.
    pub positions: Vec<u32>,
    /// Rows that have a label, ascending as [`MicroBatch::pack`] lists them.
    pub label_rows: Vec<u32>,
    /// The token each of them should predict.
    pub targets: Vec<u32>,
}

impl MicroBatch {
    /// Packs sequences for a model.
    ///
    /// # Errors
    /// `InvalidArgument` where there is no sequence, one is empty or longer than the model's context, its labels are not as long as its ids,
    /// or a token is not in the vocabulary; with the number of the sequence.
    pub fn pack(config: &ModelConfig, sequences: &[Sequence]) -> Result<Self> {
        if sequences.is_empty() {
            return Err(Error::invalid("a micro-batch needs at least one sequence"));
        }
        let mut batch = Self { cu_seqlens: vec![0], ..Self::default() };
        for (number, sequence) in sequences.iter().enumerate() {
            batch.push(config, sequence).map_err(|e| e.context(format!("sequence {number}")))?;
        }
        Ok(batch)
    }

    fn push(&mut self, config: &ModelConfig, sequence: &Sequence) -> Result<()> {
        let (n, first) = (sequence.ids.len(), self.ids.len());
        if n == 0 {
            return Err(Error::invalid("it has no token; drop empty texts before packing"));
        }
        if sequence.labels.len() != n {
            return Err(Error::invalid(format!("{} labels for {n} tokens; give one label or none per token", sequence.labels.len())));
        }
        config.check_sequence(n)?;
        if let Some(id) = sequence.ids.iter().chain(sequence.labels.iter().flatten()).find(|id| **id as usize >= config.vocab) {
            return Err(Error::invalid(format!(
                "token {id} is not in the vocabulary of {}; text and model need the same tokenizer",
                config.vocab
            )));
        }
        let end = u32::try_from(first + n).ok().filter(|end| *end < NO_INDEX);
        let end = end.ok_or_else(|| Error::invalid(format!("{} rows are too many for one micro-batch", first + n)))?;
        self.ids.extend(&sequence.ids);
        self.positions.extend(0..n as u32);
        self.cu_seqlens.push(end);
        for (row, target) in (first as u32..).zip(&sequence.labels) {
            if let Some(target) = target {
                self.label_rows.push(row);
                self.targets.push(*target);
            }
        }
        Ok(())
    }

    /// A micro-batch of token 0 that takes all of `capacity`, as far as sequences of at most `longest` tokens do.
    pub fn filling(capacity: Capacity, longest: usize) -> Self {
        let sequences = capacity.sequences.clamp(1, capacity.rows.max(1));
        let rows = capacity.rows.clamp(1, sequences.saturating_mul(longest.max(1))) as u32;
        let sequences = (sequences as u32).min(rows);
        let cu_seqlens: Vec<u32> = (0..=sequences).map(|s| (u64::from(rows) * u64::from(s) / u64::from(sequences)) as u32).collect();
        let positions = cu_seqlens.windows(2).flat_map(|w| 0..w[1] - w[0]).collect();
        let label_rows: Vec<u32> = (0..rows.min(capacity.labels as u32)).collect();
        Self { ids: vec![0; rows as usize], cu_seqlens, positions, targets: vec![0; label_rows.len()], label_rows }
    }

    /// Some of its sequences, as a micro-batch of their own; those that there are of the range.
    pub fn part(&self, sequences: core::ops::Range<usize>) -> Self {
        let end = sequences.end.min(self.sequences());
        let start = sequences.start.min(end);
        let at = |i: usize| self.cu_seqlens.get(i).copied().unwrap_or(0);
        let (first, last) = (at(start), at(end));
        let rows = first as usize..last as usize;
        let labelled: Vec<usize> = (0..self.labels()).filter(|i| (first..last).contains(&self.label_rows[*i])).collect();
        Self {
            ids: self.ids[rows.clone()].to_vec(),
            cu_seqlens: (start..=end).map(|i| at(i) - first).collect(),
            positions: self.positions[rows].to_vec(),
            label_rows: labelled.iter().map(|i| self.label_rows[*i] - first).collect(),
            targets: labelled.iter().map(|i| self.targets[*i]).collect(),
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.cu_seqlens.len().saturating_sub(1)
    }

    /// Labelled rows.
    pub fn labels(&self) -> usize {
        self.label_rows.len()
    }

    /// Tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0)
    }

    /// The last row of each sequence: where the next token, or a class, is scored.
    pub fn last_rows(&self) -> Vec<u32> {
        self.cu_seqlens.iter().skip(1).map(|end| end - 1).collect()
    }
}

/// How many rows, sequences and labels a [`DeviceBatch`] has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Capacity {
    /// Rows.
    pub rows: usize,
    /// Sequences.
    pub sequences: usize,
    /// Labelled rows.
    pub labels: usize,
}

impl Capacity {
    const ROWS: usize = 16;
    const SEQUENCES: usize = 4;
    const LABELS: usize = 16;

    /// The bucket that `batch` falls into.
    pub fn of(batch: &MicroBatch) -> Self {
        Self::bucket(batch.rows(), batch.sequences(), batch.labels())
    }

    /// The bucket that a micro-batch of `sequences` falls into.
    pub fn of_sequences(sequences: &[Sequence]) -> Self {
        let labels = sequences.iter().flat_map(|s| &s.labels).flatten().count();
        Self::bucket(sequences.iter().map(|s| s.ids.len()).sum(), sequences.len(), labels)
    }

    /// The bucket for so many rows, sequences and labelled rows.
    pub fn bucket(rows: usize, sequences: usize, labels: usize) -> Self {
        let up = |n: usize, to: usize| n.max(1).next_multiple_of(to);
        Self { rows: up(rows, Self::ROWS), sequences: up(sequences, Self::SEQUENCES), labels: up(labels, Self::LABELS) }
    }

    /// Exactly what `batch` needs, without rounding up.
    pub fn exact(batch: &MicroBatch) -> Self {
        Self { rows: batch.rows(), sequences: batch.sequences(), labels: batch.labels() }
    }

    /// Room for what either has room for.
    pub fn max(self, other: Self) -> Self {
        Self { rows: self.rows.max(other.rows), sequences: self.sequences.max(other.sequences), labels: self.labels.max(other.labels) }
    }

    /// Whether `batch` has a place in it.
    pub fn fits(&self, batch: &MicroBatch) -> bool {
        batch.rows() <= self.rows && batch.sequences() <= self.sequences && batch.labels() <= self.labels
    }
}

/// A micro-batch in parameter buffers of one queue. With T, S and R the capacity's rows, sequences and labels:
#[derive(Clone, Debug)]
pub struct DeviceBatch {
    /// Token ids, u32 `[1, T]`.
    pub ids: TensorArg,
    /// Positions, u32 `[1, T]`.
    pub positions: TensorArg,
    /// Ends of sequences, u32 `[1, S + 1]`.
    pub cu_seqlens: TensorArg,
    /// Labelled rows, u32 `[1, R]`.
    pub label_rows: TensorArg,
    /// Targets, u32 `[1, R]`.
    pub targets: TensorArg,
    /// Rows that count, u32 `[1, 1]`.
    pub live: TensorArg,
    /// Factor of the sum of losses, f32 `[1, 1]`: 1 over the label count of the mini-batch.
    pub loss_scale: TensorArg,
    capacity: Capacity,
    rows: usize,
    labels: usize,
    longest: usize,
}

impl DeviceBatch {
    /// Buffers with room for `capacity`, holding nothing yet.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(runner: &mut Runner, capacity: Capacity) -> Result<Self> {
        let mut words = |n: usize| runner.alloc(DType::U32, 1, n, Usage::Parameters);
        Ok(Self {
            ids: words(capacity.rows)?,
            positions: words(capacity.rows)?,
            cu_seqlens: words(capacity.sequences + 1)?,
            label_rows: words(capacity.labels)?,
            targets: words(capacity.labels)?,
            live: words(1)?,
            loss_scale: runner.alloc(DType::F32, 1, 1, Usage::Parameters)?,
            capacity,
            rows: 0,
            labels: 0,
            longest: 0,
        })
    }

    /// A micro-batch in buffers of its bucket's size.
    ///
    /// # Errors
    /// As [`DeviceBatch::new`].
    pub fn from_host(runner: &mut Runner, batch: &MicroBatch, loss_scale: f32) -> Result<Self> {
        let mut device = Self::new(runner, Capacity::of(batch))?;
        device.upload(runner, batch, loss_scale)?;
        Ok(device)
    }

    /// Replaces the contents; `loss_scale` is 1 over the label count of the whole mini-batch, however it is split.
    ///
    /// # Errors
    /// `InvalidArgument` where the batch does not fit; the queue's sticky error.
    pub fn upload(&mut self, runner: &mut Runner, batch: &MicroBatch, loss_scale: f32) -> Result<()> {
        if !self.capacity.fits(batch) {
            return Err(Error::invalid(format!(
                "a micro-batch of {} rows, {} sequences and {} labels does not fit buffers for {:?}",
                batch.rows(),
                batch.sequences(),
                batch.labels(),
                self.capacity
            )));
        }
        let end = batch.rows() as u32;
        for (to, from, padding) in [
            (&self.ids, &batch.ids, 0),
            (&self.positions, &batch.positions, 0),
            (&self.cu_seqlens, &batch.cu_seqlens, end),
            (&self.label_rows, &batch.label_rows, NO_INDEX),
            (&self.targets, &batch.targets, 0),
        ] {
            let mut padded = from.clone();
            padded.resize(to.spec.cols, padding);
            runner.upload_u32(to, &padded)?;
        }
        runner.upload_u32(&self.live, &[end])?;
        runner.upload_f32(&self.loss_scale, &[loss_scale])?;
        (self.rows, self.labels, self.longest) = (batch.rows(), batch.labels(), batch.longest());
        Ok(())
    }

    /// What there is room for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Rows of one block of an activation: T.
    pub fn block_rows(&self) -> usize {
        self.capacity.rows
    }

    /// Rows that count.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Labelled rows that count.
    pub fn labels(&self) -> usize {
        self.labels
    }

    /// Tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ModelConfig {
        crate::llama::MemoryModel::tiny_config()
    }

    #[test]
    fn labels_are_the_next_tokens_from_the_first_target_on() {
        let s = Sequence::predicting(vec![5, 6, 7, 8], 2);
        assert_eq!(s.labels, [None, Some(7), Some(8), None]);
        assert_eq!(Sequence::predicting(vec![5, 6], 0), Sequence::predicting(vec![5, 6], 1));
    }

    #[test]
    fn sequences_lie_one_after_the_other() {
        let b = MicroBatch::pack(&config(), &[Sequence::predicting(vec![1, 2, 3], 0), Sequence::predicting(vec![4, 5], 0)]).unwrap();
        assert_eq!(b.ids, [1, 2, 3, 4, 5]);
        assert_eq!(b.cu_seqlens, [0, 3, 5]);
        assert_eq!(b.positions, [0, 1, 2, 0, 1]);
        assert_eq!(b.label_rows, [0, 1, 3]);
        assert_eq!(b.targets, [2, 3, 5]);
        assert_eq!(b.last_rows(), [2, 4]);
        assert_eq!(Capacity::of(&b), Capacity { rows: 16, sequences: 4, labels: 16 });
    }

    #[test]
    fn parts_are_what_packing_their_sequences_gives() {
        let all = [Sequence::predicting(vec![1, 2, 3], 0), Sequence::unlabelled(vec![4]), Sequence::predicting(vec![5, 6], 0)];
        let b = MicroBatch::pack(&config(), &all).unwrap();
        for (start, end) in [(0, 3), (0, 1), (1, 2), (1, 3), (2, 3)] {
            assert_eq!(b.part(start..end), MicroBatch::pack(&config(), &all[start..end]).unwrap(), "{start}..{end}");
        }
        assert_eq!(b.part(2..9), b.part(2..3));
        for nothing in [b.part(1..1), b.part(7..9), MicroBatch::default().part(0..1)] {
            assert_eq!((nothing.rows(), nothing.sequences(), nothing.labels()), (0, 0, 0));
        }
    }

    #[test]
    fn what_cannot_run_is_refused_with_its_place() {
        let config = config();
        let refused = |s: Sequence| {
            let e = MicroBatch::pack(&config, &[Sequence::unlabelled(vec![1]), s]).unwrap_err();
            assert_eq!(*e.kind(), zofo_hal::ErrorKind::InvalidArgument);
            alloc::string::ToString::to_string(&e)
        };
        assert!(refused(Sequence::default()).contains("sequence 1"));
        assert!(refused(Sequence::unlabelled(vec![config.vocab as u32])).contains("vocabulary"));
        assert!(refused(Sequence::unlabelled(vec![0; config.max_positions + 1])).contains("longer than"));
        assert!(refused(Sequence { ids: vec![1, 2], labels: vec![None] }).contains("1 labels for 2 tokens"));
        assert!(MicroBatch::pack(&config, &[]).is_err());
    }
}
