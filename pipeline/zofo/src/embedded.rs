//! A small model and a data set for it that come with the program, so that training runs anywhere at once, without a network.
//!
//! The model is a LLaMA of 0.9 million parameters (4 layers, hidden size 128, 768 byte-level BPE tokens, f16), pre-trained for this project on text
//! that the project makes: `tools/pretrain` has the script, what it was trained on and what it reached. It knows the language of device logs
//! and next to nothing else.
//!
//! The data are device-log lines with the class of their fault ([`device_logs`]): 4000 to train on and 400 held out, of five classes. Counting
//! words does not get far: on 4000 held-out lines, a logistic regression over the words of all training lines has a macro-F1 of 0.39, one over
//! words and pairs of words 0.53 (chance is 0.20; `tools/pretrain/bag_of_words.py`).

pub mod device_logs;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use zofo_hal::{Error, ErrorKind, Result};
use zofo_ops::files::{Checkpoint, ModelFiles, Tokenizer, config::parse_config};

use crate::{
    data::{Classes, DataSpec, Format},
    model::Model,
    options::{OptimiserName, TrainOptions},
};
use device_logs::Split;

/// The name of both, where a model or data can be named.
pub const NAME: &str = "embedded";

/// Lines to train on.
pub const TRAIN_LINES: usize = 4000;
/// Lines held out.
pub const HELD_OUT_LINES: usize = 400;
/// Decides the lines.
const SEED: u64 = 0;

/// The column with the text.
pub(crate) const TEXT: &str = "text";
/// The column with the class.
pub(crate) const LABEL: &str = "fault";

/// Whether `path` stands for what is embedded. A folder of that name is `./embedded`.
pub(crate) fn is_name(path: &Path) -> bool {
    path == Path::new(NAME)
}

/// The model.
///
/// # Errors
/// None but those of memory: a test reads the committed files.
pub fn model() -> Result<Model> {
    static CONFIG: &[u8] = include_bytes!("../assets/embedded/config.json");
    static WEIGHTS: &[u8] = include_bytes!("../assets/embedded/model.safetensors");
    static TOKENIZER: &[u8] = include_bytes!("../assets/embedded/tokenizer.json");
    let read = || {
        let config = parse_config(Path::new("config.json"), CONFIG)?;
        let files = ModelFiles::from_parts(config, &Checkpoint::from_bytes("model.safetensors", WEIGHTS.into())?)?;
        Model::new(NAME, Arc::new(files), Arc::new(Tokenizer::from_tokenizer_json(TOKENIZER)?))
    };
    read().map(|model| model.at(PathBuf::from(NAME))).map_err(|e| e.context("the embedded model"))
}

/// Training and held-out data.
///
/// # Errors
/// None: a test makes them.
pub fn data() -> Result<(DataSpec, DataSpec)> {
    let classes: Classes = device_logs::words().join(",").parse()?;
    let spec = |split| {
        let spec = DataSpec::new(Path::new(NAME).join(file(split))).format(Format::Embedded).text(TEXT);
        Ok(spec.template("{text}\nFault:")?.labels(LABEL, classes.clone()))
    };
    Ok((spec(Split::Train)?, spec(Split::HeldOut)?))
}

/// Settings for training the embedded model on the embedded data in about a minute on two cores. Unlike those of [`TrainOptions`], they are for a
/// model a hundred times smaller than others: all projections are adapted, at a learning rate ten times as high that falls to 0, in larger batches
/// with fewer random directions.
pub fn options() -> TrainOptions {
    TrainOptions {
        targets: Some("all".into()),
        steps: 300,
        batch: 16,
        directions: 2,
        lr: 8e-3,
        zo_optimiser: Some(OptimiserName::AdamW),
        zo_lr: Some(1e-3),
        warmup: 10,
        decay: true,
        ..TrainOptions::default()
    }
}

fn file(split: Split) -> &'static str {
    match split {
        Split::Train => "train",
        Split::HeldOut => "held-out",
    }
}

/// The lines that `path`, one of [`data`], stands for.
pub(crate) fn lines(path: &Path) -> Result<Vec<device_logs::LogLine>> {
    for (split, count) in [(Split::Train, TRAIN_LINES), (Split::HeldOut, HELD_OUT_LINES)] {
        if path == Path::new(NAME).join(file(split)) {
            return Ok(device_logs::lines(split, count, SEED));
        }
    }
    Err(Error::new(ErrorKind::Io, format!("no such data are embedded; there are {NAME}/train and {NAME}/held-out")))
}

#[cfg(test)]
mod tests;
