//! Prints embedded data, a line each with its class in front: `cargo run --example device_logs -- train 4000 > train.tsv`.
//! The split is `train` or `held-out`.

use std::{env, process::ExitCode};

use zofo::embedded::device_logs::{Split, lines, words};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let (split, count) = match &args[..] {
        [split, count] => (
            match split.as_str() {
                "train" => Some(Split::Train),
                "held-out" => Some(Split::HeldOut),
                _ => None,
            },
            count.parse().ok(),
        ),
        _ => (None, None),
    };
    let (Some(split), Some(count)) = (split, count) else {
        eprintln!("usage: device_logs train|held-out LINES");
        return ExitCode::from(2);
    };
    let words = words();
    for line in lines(split, count, 0) {
        println!("{}\t{}", words[line.class], line.text);
    }
    ExitCode::SUCCESS
}
