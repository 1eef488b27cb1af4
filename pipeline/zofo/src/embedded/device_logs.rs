//! Device-log lines of edge devices, each with the class of its fault. Made, not stored: the same seed gives the same lines everywhere.
//!
//! ```text
//! 04:51 gw-11d7 WARN not sudden link lost; E47 coolant low because of fuse blown         power
//! 23:07:40 mot-5a3e INFO uptime 4 h, brief uplink down <- disk full (x3)                  storage
//! ```
//!
//! A line names two or three events of different classes, the newest first: often what it was not, then what came of it, then what began it. Its
//! class is that of the last. All of them turn up in every place, so which events a line names says little. The classes' words turn up in lines of
//! every class too, names are shared between classes (a bus, a cell, a coil, a drive, a fan, a head), and there are typing mistakes.
//!
//! Training and held-out lines share event names and nothing else: sentence patterns, ids and numbers are disjoint.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::shuffle::{Purpose, Stream};

/// Which lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Those to train on.
    Train,
    /// Those to score on.
    HeldOut,
}

/// A line and the index of its class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// The text.
    pub text: String,
    /// Index into [`words`].
    pub class: usize,
}

#[derive(Deserialize)]
struct Class {
    word: String,
    events: Vec<String>,
}

/// Pieces of lines for each split.
#[derive(Deserialize)]
struct Lists {
    train: Vec<String>,
    held_out: Vec<String>,
}

#[derive(Deserialize)]
struct Words {
    classes: Vec<Class>,
    parts: BTreeMap<String, Lists>,
}

impl Words {
    fn load() -> Self {
        const TEXT: &str = include_str!("../../assets/embedded/device_logs.json");
        serde_json::from_str(TEXT).expect("the committed word list is well-formed; a test reads it")
    }
}

/// The words of the classes, in the order of their indices.
pub fn words() -> Vec<String> {
    Words::load().classes.into_iter().map(|c| c.word).collect()
}

/// The first `count` lines of a split, all classes equally often but for a remainder.
pub fn lines(split: Split, count: usize, seed: u64) -> Vec<LogLine> {
    let words = Words::load();
    let stream = Stream::new(seed, Purpose::DeviceLogs, split as u32);
    let mut writer = Writer { words: &words, split, stream };
    (0..count)
        .map(|i| {
            let class = i % words.classes.len();
            LogLine { text: writer.line(class), class }
        })
        .collect()
}

struct Writer<'a> {
    words: &'a Words,
    split: Split,
    stream: Stream,
}

impl<'a> Writer<'a> {
    /// Whether something of this chance happens.
    fn chance(&mut self, chance: f64) -> bool {
        self.stream.unit() < chance
    }

    fn pick(&mut self, list: &'a [String]) -> &'a str {
        &list[self.stream.below(list.len())]
    }

    fn part(&mut self, name: &str) -> &'a str {
        let lists = &self.words.parts[name];
        self.pick(match self.split {
            Split::Train => &lists.train,
            Split::HeldOut => &lists.held_out,
        })
    }

    /// A number in `low ..= high`: multiples of three are held out.
    fn number(&mut self, low: usize, high: usize) -> usize {
        loop {
            let n = low + self.stream.below(high - low + 1);
            if n.is_multiple_of(3) == (self.split == Split::HeldOut) {
                return n;
            }
        }
    }

    /// Four hexadecimal digits, of which the first tells the splits apart.
    fn hex(&mut self) -> String {
        let first = match self.split {
            Split::Train => 0,
            Split::HeldOut => 0x8000,
        };
        format!("{:04x}", first + self.stream.below(0x8000))
    }

    fn time(&mut self) -> String {
        format!("{:02}:{:02}", self.stream.below(24), self.stream.below(60))
    }

    /// `count` classes other than `class`.
    fn others(&mut self, class: usize, count: usize) -> Vec<usize> {
        let mut rest: Vec<usize> = (0..self.words.classes.len()).filter(|c| *c != class).collect();
        shuffle(&mut rest, &mut self.stream);
        rest.truncate(count);
        rest
    }

    fn line(&mut self, class: usize) -> String {
        let mut clauses = self.incident(class);
        if self.chance(0.5) {
            let at = self.stream.below(clauses.len() + 1);
            clauses.insert(at, self.aside());
        }
        let mut text = self.header();
        for (i, clause) in clauses.iter().enumerate() {
            if i > 0 {
                text.push_str(self.part("joins"));
            }
            text.push_str(clause);
        }
        text
    }

    fn header(&mut self) -> String {
        let mut time = self.time();
        if self.chance(0.5) {
            time.push_str(&format!(":{:02}", self.stream.below(60)));
        }
        let (device, id, level) = (self.part("devices"), self.hex(), self.part("levels"));
        format!("{time} {device}-{id} {level} ")
    }

    /// What began it and what came of it, and often what it was not.
    fn incident(&mut self, class: usize) -> Vec<String> {
        let others = self.others(class, 2);
        let (cause, effect) = (self.event(class), self.event(others[0]));
        let relation = self.part("newest_first").replace("{c}", &cause).replace("{e}", &effect);
        let mut clauses = vec![self.mistyped(&relation)];
        if self.chance(0.7) {
            let excluded = self.event(others[1]);
            let clause = self.part("exclusions").replace("{x}", &excluded);
            clauses.insert(0, self.mistyped(&clause));
        }
        clauses
    }

    /// An event by name, mostly with a word or a code in front, or how often it came behind.
    fn event(&mut self, class: usize) -> String {
        let name = self.pick(&self.words.classes[class].events);
        match self.stream.below(5) {
            0 | 1 => format!("{} {name}", self.part("manners")),
            2 => format!("E{} {name}", self.number(10, 99)),
            3 => format!("{name} (x{})", self.number(2, 9)),
            _ => name.to_owned(),
        }
    }

    /// Something that says nothing about the fault.
    fn aside(&mut self) -> String {
        let (time, hex, number) = (self.time(), self.hex(), self.number(2, 99));
        self.part("asides").replace("{t}", &time).replace("{h}", &hex).replace("{d}", &number.to_string())
    }

    /// Now and then, two letters of a word change places or one is missing.
    fn mistyped(&mut self, text: &str) -> String {
        const CHANCE: f64 = 0.01;
        let words: Vec<String> = (text.split(' '))
            .map(|word| {
                if word.len() < 5 || !word.bytes().all(|b| b.is_ascii_alphabetic()) || !self.chance(CHANCE) {
                    return word.to_owned();
                }
                let mut letters: Vec<char> = word.chars().collect();
                let at = 1 + self.stream.below(letters.len() - 2);
                if self.chance(0.5) {
                    letters.swap(at, at + 1);
                } else {
                    letters.remove(at);
                }
                letters.into_iter().collect()
            })
            .collect();
        words.join(" ")
    }
}

fn shuffle<T>(items: &mut [T], stream: &mut Stream) {
    for i in (1..items.len()).rev() {
        items.swap(i, stream.below(i + 1));
    }
}
