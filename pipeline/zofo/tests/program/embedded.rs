//! What comes with the program.

use super::support::Place;

const SHORT: [&str; 11] = ["train", "--steps", "2", "--eval-samples", "10", "--directions", "2", "--threads", "1", "--out", "run"];

#[test]
fn training_needs_nothing_but_the_program() {
    let place = Place::empty();
    let outcome = place.run(&SHORT).ok();
    for part in ["macro-F1", "zofo generate --model embedded", "zofo eval --model embedded", "--data embedded", "zofo fetch smollm2-135m"] {
        assert!(outcome.out.contains(part), "`{}` does not mention `{part}`", outcome.out);
    }
    assert!(place.path("run/adapter/adapter_model.safetensors").is_file());
    let record = place.json("run/run.json");
    assert_eq!((record["model"].as_str(), record["data"]["path"].as_str()), (Some("embedded"), Some("embedded/train")));
    // It opens both by name; the learning rate has fallen to 0 at the last step, so that the run has no further ones.
    let again = place.run(&["train", "--resume", "run"]).ok();
    assert!(again.err.contains("nothing is left to do") && !again.err.contains("--steps"), "{}", again.err);
    place.run(&["train", "--resume", "run", "--steps", "9"]).refused(2, &["decay", "another run"]);
    let scored = place.run(&["eval", "--model", "embedded", "--adapter", "run", "--data", "embedded", "--limit", "10", "--json"]).ok();
    assert!(scored.out.contains("\"examples\":10") || scored.out.contains("\"examples\": 10"), "{}", scored.out);
    place
        .run(&[
            "generate",
            "--model",
            "embedded",
            "--adapter",
            "run",
            "--prompt",
            "08:00 cam-00a1 WARN link lost\\nFault:",
            "--max-tokens",
            "2",
        ])
        .ok();
}

#[test]
fn its_settings_give_way_to_those_of_the_command_line() {
    let place = Place::empty();
    let printed = place.run(&["train", "--lr", "0.125", "--print-config"]).ok().out;
    for part in ["lr = 0.125", "targets = ", "embedded"] {
        assert!(printed.contains(part), "{printed}");
    }
    // The name is what comes with the program, whatever lies beside it.
    place.write("embedded", "a file");
    place.run(&["train", "--model", "embedded", "--print-config"]).ok();
    place.run(&["train", "--model", "embedded", "--data", "absent.csv"]).refused(1, &["absent.csv"]);
}
