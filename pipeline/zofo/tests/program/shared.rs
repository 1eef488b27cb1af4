//! The real, if tiny, stories260K and real news.

use zofo_testkit::shared_or_skip;

use super::support::Place;

#[test]
fn stories260k_goes_on_as_upstream() {
    let model = shared_or_skip!("models/stories260K/hf");
    let place = Place::empty();
    let model = model.to_str().unwrap();
    let out = place.run(&["generate", "--model", model, "--prompt", "Once upon a time", "--max-tokens", "60"]).ok();
    // The text that stories260K's page at its source has for temperature 0.
    let upstream =
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball.";
    assert!(out.out.starts_with(upstream), "{}", out.out);
}

#[test]
fn stories260k_learns_from_news() {
    let model = shared_or_skip!("models/stories260K/hf");
    let train = shared_or_skip!("data/ag_news/train.csv");
    let test = shared_or_skip!("data/ag_news/test.csv");
    let place = Place::empty();
    let run = place.run(&[
        "train",
        "--model",
        model.to_str().unwrap(),
        "--data",
        train.to_str().unwrap(),
        "--template",
        r"{content}\nTopic:",
        "--label-column",
        "label",
        "--classes",
        "World,Sports,Business,Sci/Tech",
        "--limit",
        "500",
        "--eval-data",
        test.to_str().unwrap(),
        "--eval-template",
        r"{description}\nTopic:",
        "--eval-label-column",
        "class",
        "--eval-samples",
        "24",
        "--max-length",
        "64",
        "--steps",
        "20",
        "--directions",
        "2",
        "--lr",
        "0.003",
        "--out",
        "run",
    ]);
    run.ok();
    let summary = place.json("run/summary.json");
    let loss = |key: &str| summary[key].as_f64().unwrap();
    assert!(loss("loss_last") < loss("loss_first"), "{summary}");
    assert!(loss("eval_loss_after") < loss("eval_loss_before"), "{summary}");
}
