//! Batches of real text: sequences of unlike lengths, packed one after the other, against the same padded to the longest of their batch.

use super::{
    loaded::{FirstOrder, Labels, Loaded, SEED, Types},
    model::Flops,
};
use crate::{Case, Run, Subject, Unit, random, shapes};
use zofo_hal::Result;
use zofo_ops::batch::{DeviceBatch, Sequence};

/// Tokens of rows of AG News with their answers; `peers/lengths.py` counted them.
const AG_NEWS: &str = include_str!("ag_news.txt");

/// How sequences of unlike lengths are laid out.
#[derive(Clone, Copy)]
enum Layout {
    Packed,
    Padded,
}

impl Layout {
    const ALL: [(&'static str, Self); 2] = [("packed", Self::Packed), ("padded", Self::Padded)];

    /// Sequences of random tokens; those of the padding have no label.
    fn sequences(self, lengths: &[usize], labels: Labels) -> Result<Vec<Sequence>> {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let sequence = |n: &usize| {
            let mut sequence = labels.on(random::tokens(SEED, *n, shapes::VOCAB)?);
            if matches!(self, Self::Padded) {
                sequence.ids.resize(longest, 0);
                sequence.labels.resize(longest, None);
            }
            Ok(sequence)
        };
        lengths.iter().map(sequence).collect()
    }
}

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let lengths: Vec<usize> = AG_NEWS.split_whitespace().map(|n| n.parse().expect("a number of tokens")).collect();
    let tokens = Unit::Tokens(lengths.iter().sum::<usize>() as u64);
    let types = Types::F32;
    let mut cases = Vec::new();
    let mut add = |op: &str, labels: Labels, work, prepare: fn(Loaded, Vec<DeviceBatch>) -> Result<Run>| {
        for (s, (variant, layout)) in subjects.iter().flat_map(|s| Layout::ALL.map(|l| (s, l))) {
            let (group, who) = (format!("{op}/{}/ag-news-{}", types.weights, lengths.len()), format!("{}+{variant}", s.who));
            let (device, lengths) = (s.device.clone(), lengths.clone());
            cases.push(Case::new(group, who, types.work(work).per(tokens), move || {
                let mut model = Loaded::new(&device, &shapes::model(), types)?;
                let mut batch = |part: &[usize]| model.batch(&layout.sequences(part, labels)?);
                let batches = lengths.chunks(shapes::SEQUENCES).map(&mut batch).collect::<Result<_>>()?;
                prepare(model, batches)
            }));
        }
    };
    let (all, last) = (Flops::of(&lengths, Labels::All), Flops::of(&lengths, Labels::Last));
    add("forward-loss", Labels::All, all.forward(), forward_loss);
    add("fo-step-qv-last", Labels::Last, last.first_order(), first_order);
    cases
}

fn forward_loss(mut model: Loaded, batches: Vec<DeviceBatch>) -> Result<Run> {
    Ok(Box::new(move || batches.iter().try_for_each(|batch| model.forward_loss(batch))))
}

fn first_order(model: Loaded, batches: Vec<DeviceBatch>) -> Result<Run> {
    let mut model = FirstOrder::new(model)?;
    Ok(Box::new(move || batches.iter().try_for_each(|batch| model.step(batch))))
}
