//! Settings in a file.

use super::support::Place;

const FILE: &str = r#"
model = "../model"
out = "../from-file"
[data]
path = "../data.csv"
template = "{text}\nTopic:"
label_column = "label"
classes = ["World", "Sports"]
[train]
steps = 3
batch = 4
micro_batches = 2
directions = 2
threads = 1
lr = 2e-2
zo_optimiser = "sgd"
decay = true
eval_samples = 4
[[device]]
name = "left"
kind = "bp-free"
layers = 3
[[device]]
name = "right"
kind = "bp"
layers = 1
"#;

fn adapter(place: &Place, run: &str) -> Vec<u8> {
    std::fs::read(place.path(run).join("adapter/adapter_model.safetensors")).unwrap()
}

#[test]
fn a_file_says_what_the_command_line_says() {
    let place = Place::new();
    std::fs::create_dir(place.path("settings")).unwrap();
    place.write("settings/run.toml", FILE);
    let run = place.run(&["train", "--config", "settings/run.toml"]).ok();
    assert!(run.out.contains("left") && run.out.contains("step 3/3"), "{}", run.out);
    place.write("c.toml", &FILE[FILE.find("[[device]]").unwrap()..]);
    let same = ["--steps", "3", "--lr", "0.02", "--zo-optimizer", "sgd", "--decay", "--eval-samples", "4", "--cluster", "c.toml"];
    place.train(&[&same[..], &["--out", "from-line"]].concat()).ok();
    assert!(adapter(&place, "from-file") == adapter(&place, "from-line"));

    // The command line has the last word, before and behind.
    place.run(&["train", "--steps", "2", "--config", "settings/run.toml", "--decay=false", "--out", "short"]).ok();
    assert_eq!(place.json("short/summary.json")["steps"], 2);
    let options = &place.json("short/run.json")["options"];
    assert_eq!((&options["decay"], &options["lr"]), (&false.into(), &0.02.into()));

    // What is printed says the same from another folder.
    let printed = place.run(&["train", "--config", "settings/run.toml", "--print-config"]).ok().out;
    assert!(printed.contains("[train]") && printed.contains("[[device]]") && printed.contains("steps = 3"), "{printed}");
    std::fs::create_dir_all(place.path("far/away")).unwrap();
    place.write("far/away/printed.toml", &printed);
    place.run(&["train", "--config=far/away/printed.toml", "--out", "from-print"]).ok();
    assert!(adapter(&place, "from-file") == adapter(&place, "from-print"));
    assert_eq!(place.json("from-file/run.json"), place.json("from-print/run.json"));
}

#[test]
fn what_is_wrong_in_a_file_is_named() {
    let place = Place::new();
    for (text, parts) in [
        ("[train]\nlearning_rate = 1\n", &["c.toml: line 2", "there is no `learning_rate` in [train]"][..]),
        ("[train]\nstep = 1\n", &["did you mean `steps`?"]),
        ("[train]\nsteps = -1\n", &["c.toml: line 2: `steps`: invalid value '-1'"]),
        ("[train\n", &["c.toml", "line 1"]),
        ("[[device]]\nname = 'a'\nkind = 'bp'\nmemory = 'much'\n", &["c.toml", "line 4", "`much` is no size"]),
        ("[[device]]\nname = 'a'\nkind = 'bp'\n[[device]]\nname = 'a'\nkind = 'bp'\n", &["c.toml", "two devices"]),
        ("[train]\nrank = 0\n", &["rank is 0"]),
    ] {
        place.write("c.toml", text);
        place.train(&["--config", "c.toml"]).refused(2, parts);
    }
    place.train(&["--config", "nowhere.toml"]).refused(1, &["nowhere.toml"]);
    place.train(&["--config", "model"]).refused(2, &["model", "plain file"]);
    assert!(!place.path("runs").exists());
}
