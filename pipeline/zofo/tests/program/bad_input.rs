//! What the program says to what it cannot use.

use super::support::{Place, TRAIN, config};

#[test]
fn wrong_arguments_end_with_2() {
    let place = Place::new();
    place.train(&["--rank", "0"]).refused(2, &["rank is 0", "between 1 and"]);
    place.train(&["--targets", "q,z"]).refused(2, &["`z`", "q, k, v, o, gate, up, down"]);
    place.train(&["--batch", "1"]).refused(2, &["1 sequences", "2 micro-batches"]);
    place.train(&["--compute", "f64"]).refused(2, &["f32, f16 and bf16"]);
    place.train(&["--estimator", "magic"]).refused(2, &["magic", "cut-tangent, guided"]);
    place.train(&["--template", "{text"]).refused(2, &["not closed"]);
    place.train(&["--schedule", "single"]).refused(2, &["single", "hybridop-head"]);
    place.train(&["--max-length", "1000"]).refused(2, &["1000", "at most 96"]);
    place.run(&["train", "--data", "data.csv"]).refused(2, &["--model is missing", "zofo train --model", "with neither"]);
    place.run(&["train", "--model", "model"]).refused(2, &["--data is missing"]);
    place.run(&["eval", "--model", "model"]).refused(2, &["--data is missing"]);
    place.run(&["fly"]).refused(2, &["fly"]);
    place.run(&["generate", "--model", "model", "--prompt", "a", "--temperature", "-1"]).refused(2, &["temperature"]);
    place.run(&["train", "--resume", "runs/1", "--rank", "3"]).refused(2, &["--rank cannot be given with --resume"]);
    assert!(!place.path("runs").exists(), "a run that cannot start leaves nothing behind");
}

#[test]
fn data_errors_name_the_line() {
    let place = Place::new();
    let refused = |data: &str, parts: &[&str]| {
        place.write("bad.csv", data);
        place.train(&["--data", "bad.csv", "--eval-samples", "0"]).refused(1, &[&["bad.csv"], parts].concat());
    };
    refused("label,text\n1,a\nWeather,b\n", &["line 3", "`Weather` is not in the class list World,Sports"]);
    refused("label,text\n1,a\n2,b,c\n", &["line 3", "3 fields, the header has 2"]);
    refused("label,text\n1,\"a \"b\" c\"\n", &["line 2", "behind a closing quote"]);
    refused("label,text\n", &["no rows"]);
    refused("", &["empty"]);
    place.write("bad.csv", b"label,text\n1,a\n2,\xff\n");
    place.train(&["--data", "bad.csv"]).refused(1, &["line 3", "UTF-8"]);
    place.write("bad.jsonl", "{\"label\":1,\"text\":\"a\"}\n{\"label\":");
    place.train(&["--data", "bad.jsonl"]).refused(1, &["line 2", "no JSON object"]);
    place.train(&["--data", "nowhere.csv"]).refused(1, &["nowhere.csv", "cannot be read"]);
    place.write("bad.txt", "x");
    place.train(&["--data", "bad.txt"]).refused(2, &["bad.txt", "csv, tsv, jsonl"]);
    place.train(&["--template", "{body}"]).refused(2, &["no column `body`", "label, text"]);
}

#[test]
#[cfg(unix)]
fn data_that_are_no_file_are_refused_at_once() {
    let place = Place::new();
    let made = std::process::Command::new("mkfifo").arg(place.path("pipe.csv")).status();
    if made.is_ok_and(|s| s.success()) {
        place.train(&["--data", "pipe.csv"]).refused(1, &["pipe.csv", "no plain file"]);
    }
    place.train(&["--data", "model", "--format", "csv"]).refused(1, &["model", "folder"]);
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let place = Place::new();
    let path = place.path("model/model.safetensors");
    let mut weights = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&weights[8..8 + header]).unwrap();
    let start = json["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    // Row 2, column 5 of 16.
    let at = 8 + header + start + 4 * (2 * 16 + 5);
    weights[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, weights).unwrap();
    let parts = ["model.layers.1.mlp.up_proj.weight", "NaN", "row 2, column 5"];
    place.train(&[]).refused(1, &parts);
    place.train(&["--eval-samples", "0"]).refused(1, &parts);
    let data = ["--data", "data.csv", "--label-column", "label", "--classes", "World,Sports"];
    place.run(&[&["eval", "--model", "model"], &data[..]].concat()).refused(1, &parts);
}

#[test]
fn a_sequence_that_is_too_long_is_cut_or_refused() {
    let place = Place::new();
    let mut data = super::support::news(9);
    data.push_str(&format!("1,{}\n", "long ".repeat(40)));
    place.write("long.csv", data);
    let args = ["--data", "long.csv", "--steps", "3", "--eval-samples", "0"];
    place.train(&[&args[..], &["--no-truncate"]].concat()).refused(1, &["long.csv: line 11", "tokens", "allow truncation"]);
    place.train(&args).ok();
}

#[test]
fn models_that_cannot_be_used() {
    let place = Place::new();
    let change = |file: &str, bytes: &[u8], parts: &[&str]| {
        let path = place.path("model").join(file);
        let before = std::fs::read(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        place.train(&[]).refused(1, parts);
        std::fs::write(&path, before).unwrap();
    };
    let weights = std::fs::read(place.path("model").join("model.safetensors")).unwrap();
    change("model.safetensors", &weights[..weights.len() - 7], &["model.safetensors"]);
    change("model.safetensors", &weights[..5], &["model.safetensors"]);
    change("model.safetensors", &[0xff; 64], &["model.safetensors"]);
    let mut hostile = weights.clone();
    hostile[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    change("model.safetensors", &hostile, &["model.safetensors"]);
    let mut other = config();
    other["model_type"] = "mamba".into();
    change("config.json", other.to_string().as_bytes(), &["mamba", "llama, mistral, qwen2"]);
    let mut huge = config();
    huge["num_hidden_layers"] = (1u64 << 40).into();
    change("config.json", huge.to_string().as_bytes(), &["config.json"]);
    change("tokenizer.json", b"{", &["tokenizer.json"]);
    std::fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    place.train(&[]).refused(1, &["no tokenizer", "tokenizer.json"]);
    place.train(&["--model", "nowhere"]).refused(1, &["nowhere", "no such model"]);
    place.train(&["--model", "data.csv"]).refused(1, &["data.csv", "no model"]);
}

#[test]
fn clusters_that_cannot_be_used() {
    let place = Place::new();
    let refused = |devices: &[(&str, &str)], parts: &[&str]| {
        let device = |(name, kind): &(&str, &str)| format!("[[device]]\nname = \"{name}\"\n{kind}\n");
        place.write("c.toml", devices.iter().map(device).collect::<String>());
        place.train(&["--cluster", "c.toml"]).refused(2, parts);
    };
    let (free, bp) = ("kind = \"bp-free\"", "kind = \"bp\"");
    refused(&[("a", bp), ("b", free)], &["`b` is bp-free", "no stage has a gradient"]);
    refused(&[("a", free), ("b", bp), ("c", bp), ("d", bp), ("e", bp)], &["5 devices", "4 layers"]);
    refused(&[("a", "kind = \"bp\"\nlayers = 3")], &["3 layers", "the model has 4"]);
    refused(&[("a", "kind = \"bp\"\nbackend = \"abacus\"")], &["abacus", "cpu"]);
    // 16 x 16 for q and o, 16 x 8 for k and v, 3 x 16 x 24 for the feed-forward network, in f32, in four layers; 258 x 16 for the embedding.
    let bytes = 4 * (4 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 258 * 16);
    let memory = |n: usize| format!("{bp}\nmemory = {n}");
    refused(&[("small", &memory(bytes - 1))], &["`small`", &(bytes - 1).to_string(), &bytes.to_string()]);
    // The weights fit, what a step computes does not.
    place.write("c.toml", format!("[[device]]\nname = \"tight\"\n{}\n", memory(bytes)));
    place.train(&["--cluster", "c.toml"]).refused(1, &["`tight`", &bytes.to_string(), "activations of a step"]);
    place.write("c.toml", format!("[[device]]\nname = \"large\"\n{}\n", memory(100 * bytes)));
    place.train(&["--cluster", "c.toml", "--steps", "1", "--eval-samples", "0"]).ok();
    refused(&[], &["no device"]);
    place.write("c.toml", "[[device]");
    place.train(&["--cluster", "c.toml"]).refused(2, &["c.toml", "line 1"]);
    place.train(&["--cluster", "nowhere.toml"]).refused(1, &["nowhere.toml"]);
}

#[test]
fn folders_that_are_in_use() {
    let place = Place::new();
    place.write("model/extra", "x");
    place.train(&["--out", "model"]).refused(2, &["model", "is not empty"]);
    place.train(&["--out", "data.csv"]).refused(2, &["data.csv", "is a file"]);
    place.run(&["train", "--resume", "model"]).refused(1, &["no run folder"]);
    place.train(&["--steps", "1", "--eval-samples", "0", "--out", "run"]).ok();
    place.train(&["--out", "run"]).refused(2, &["holds a run already"]);
    std::fs::write(place.path("run/checkpoint/state"), "x").unwrap();
    place.run(&["train", "--resume", "run", "--steps", "2"]).refused(1, &["checkpoint"]);
    std::fs::write(place.path("run/run.json"), "{}").unwrap();
    place.run(&["train", "--resume", "run"]).refused(1, &["run.json"]);
}

#[test]
fn adapters_that_do_not_fit() {
    let place = Place::new();
    place.run(&["generate", "--model", "model", "--prompt", "a", "--adapter", "data.csv"]).refused(1, &["data.csv", "run folder"]);
    place.train(&["--steps", "1", "--eval-samples", "0", "--out", "run"]).ok();
    let path = place.path("run/adapter/adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    place.run(&["generate", "--model", "model", "--prompt", "a", "--adapter", "run/adapter"]).refused(1, &["adapter_model.safetensors"]);
}

#[test]
fn nobody_reading_is_no_panic() {
    use std::process::Stdio;
    let place = Place::new();
    for args in
        [&["--help"][..], &["devices"], &["generate", "--model", "model", "--prompt", "a"], &[&TRAIN[..], &["--steps", "4"]].concat()]
    {
        let mut child = place.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && !err.contains("panicked"), "{args:?}: {:?} {err}", output.status);
    }
}

#[test]
fn runs_that_cannot_go_on_as_asked() {
    let place = Place::new();
    place.train(&["--steps", "6", "--eval-samples", "0", "--out", "run"]).ok();
    place.run(&["train", "--resume", "run", "--steps", "4"]).refused(2, &["run", "has done 6 steps", "4 in all"]);
    place.run(&["train", "--resume", "run", "--config", "c.toml"]).refused(1, &["c.toml"]);
    place.write("c.toml", "");
    place.run(&["train", "--resume", "run", "--config", "c.toml"]).refused(2, &["--config cannot be given with --resume"]);
    std::fs::remove_file(place.path("run/journal.txt")).unwrap();
    let run = place.run(&["train", "--resume", "run", "--steps", "7"]).ok();
    assert!(run.out.contains("note: run/journal.txt: 0 of the 6 steps"), "{}", run.out);
    // As a process that trains in the folder would have it.
    let lock = std::fs::File::open(place.path("run/.lock")).unwrap();
    lock.lock().unwrap();
    place.run(&["train", "--resume", "run", "--steps", "8"]).refused(1, &["run", "another process is training in this folder"]);
}
