//! Ctrl-C ends with a checkpoint that goes on bit for bit.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
};

use serde_json::Value;

use super::support::{Place, TRAIN};

fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Losses in exact bits, by step.
fn losses(place: &Place, run: &str) -> Vec<(u64, u64)> {
    let metrics = std::fs::read_to_string(place.path(run).join("metrics.jsonl")).unwrap();
    let line = |l: &str| {
        let v: Value = serde_json::from_str(l).unwrap();
        (v["step"].as_u64().unwrap(), v["loss"].as_f64().unwrap().to_bits())
    };
    metrics.lines().map(line).collect()
}

#[test]
#[cfg(unix)]
fn a_run_goes_on_bit_for_bit() {
    let place = Place::new();
    // Far more steps than are done before the signal arrives.
    let args = [&TRAIN[..], &["--steps", "1000000", "--eval-samples", "4", "--out", "stopped"]].concat();
    let mut child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("step 1/") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "the run ended by itself");
    }
    interrupt(&child);
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{rest}{err}");
    assert!(err.contains("zofo train --resume stopped"), "{err}");
    let stopped = place.json("stopped/summary.json");
    assert_eq!(stopped["finished"], false);
    let done = stopped["steps"].as_u64().unwrap();
    assert!(done >= 1);
    assert!(place.path("stopped/adapter/adapter_model.safetensors").is_file());

    let steps = (done + 5).to_string();
    place.run(&["train", "--resume", "stopped", "--steps", &steps]).ok();
    place.train(&["--steps", &steps, "--eval-samples", "4", "--out", "whole"]).ok();
    let adapter = |run: &str| std::fs::read(place.path(run).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(adapter("stopped") == adapter("whole"), "the adapters differ");
    assert_eq!(losses(&place, "stopped"), losses(&place, "whole"));
    let journal = |run: &str| std::fs::read(place.path(run).join("journal.txt")).unwrap();
    assert!(journal("stopped") == journal("whole"), "the journals differ");
    let (resumed, whole) = (place.json("stopped/summary.json"), place.json("whole/summary.json"));
    for key in ["loss_first", "loss_last", "f1_before", "f1_after", "eval_loss_before", "eval_loss_after", "steps", "finished"] {
        assert_eq!(resumed[key], whole[key], "{key}");
    }
}

#[test]
#[cfg(unix)]
fn a_second_interrupt_ends_at_once() {
    let place = Place::new();
    // A step of many directions takes long enough for a second signal.
    let args = [&TRAIN[..], &["--steps", "1000000", "--eval-samples", "0", "--directions", "2048", "--out", "run"]].concat();
    let mut child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("gpu1") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "the run ended by itself");
    }
    let mut err = BufReader::new(child.stderr.take().unwrap());
    interrupt(&child);
    // The handler has the first one once it has said so.
    line.clear();
    err.read_line(&mut line).unwrap();
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130), "{line}");
}
