//! Commands that succeed, and what they leave.

use serde_json::Value;

use super::support::Place;

#[test]
fn training_leaves_a_run_folder() {
    let place = Place::new();
    let run = place.train(&["--steps", "12", "--lr", "0.02", "--out", "run"]).ok();
    for part in [
        "npu0",
        "gpu1",
        "zeroth-order",
        "first-order",
        "step 1/12",
        "step 12/12",
        "macro-F1",
        "run/adapter",
        "F1 by class",
        "per label token",
        "(first and last 2 steps)",
        "eta ",
    ] {
        assert!(run.out.contains(part), "`{part}` is not in {}", run.out);
    }
    let with = "--model model --adapter run/adapter";
    assert!(run.out.contains(&format!("try it: zofo generate {with} --prompt '")), "{}", run.out);
    let data = r"--data data.csv --template '{text}\nTopic:' --label-column label --classes World,Sports --limit ";
    assert!(run.out.contains(&format!("score it (examples that it was trained on included): zofo eval {with} {data}")), "{}", run.out);
    let summary = place.json("run/summary.json");
    assert_eq!((&summary["run_folder"], &summary["adapter"]), (&"run".into(), &"run/adapter".into()));
    assert!(summary["f1_by_class"]["Sports"].is_f64(), "{summary}");
    for key in [
        "loss_first",
        "loss_last",
        "f1_before",
        "f1_after",
        "samples_per_second",
        "compute_utilisation",
        "peak_rss_bytes",
        "seconds",
        "eval_loss_before",
        "eval_loss_after",
    ] {
        assert!(summary[key].is_f64() || summary[key].is_u64(), "{key}: {summary}");
    }
    assert_eq!((&summary["steps"], &summary["times"], &summary["finished"]), (&12.into(), &"measured".into(), &true.into()));
    let (before, after) = (summary["eval_loss_before"].as_f64().unwrap(), summary["eval_loss_after"].as_f64().unwrap());
    assert!(after < 0.9 * before, "{before} -> {after}");
    let utilisation = summary["compute_utilisation"].as_f64().unwrap();
    assert!(utilisation > 0.0 && utilisation <= 1.0, "{utilisation}");

    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let steps: Vec<u64> = metrics.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=12).collect::<Vec<_>>(), "as on the screen");
    assert_eq!(std::fs::read_to_string(place.path("run/journal.txt")).unwrap().lines().count(), 12);
    let plan = place.json("run/plan.json");
    assert_eq!(plan["stages"][0]["layers"], serde_json::json!([0, 1]));
    assert_eq!(place.json("run/adapter/adapter_config.json")["peft_type"], "LORA");

    let trace = place.json("run/trace.json");
    assert_eq!(trace["otherData"]["times"], "measured");
    assert!(trace["traceEvents"].as_array().unwrap().iter().any(|e| e["name"] == "B0" && e["dur"].as_f64().unwrap() > 0.0), "{trace}");
    let report = std::fs::read_to_string(place.path("run/report.html")).unwrap();
    assert!(report.starts_with("<!DOCTYPE html>") && report.matches("<svg").count() == 2 && report.contains("macro-F1"), "{report}");
    let curves = std::fs::read_to_string(place.path("run/curves.svg")).unwrap();
    assert!(curves.starts_with("<svg ") && curves.contains("optimiser step"), "{curves}");

    // The scores of the summary are those of the program's own evaluation of the adapter.
    let data = ["--data", "data.csv", "--template", r"{text}\nTopic:", "--label-column", "label", "--classes", "World,Sports"];
    let eval = |more: &[&str]| place.run(&[&["eval", "--model", "model", "--json"], &data[..], more].concat()).ok();
    let (base, tuned) = (eval(&[]), eval(&["--adapter", "run/adapter"]));
    let loss = |o: &super::support::Outcome| serde_json::from_str::<Value>(&o.out).unwrap()["loss"].as_f64().unwrap();
    assert!(loss(&tuned) < loss(&base));
    assert_eq!(tuned.out, eval(&["--adapter", "run/adapter", "--threads", "1"]).out, "scores do not depend on threads");
    let text = place.run(&[&["eval", "--model", "model"], &data[..]].concat()).ok();
    assert!(text.out.contains("F1 by class") && text.out.contains("Sports"), "{}", text.out);

    let generate = ["generate", "--model", "model", "--adapter", "run/adapter", "--prompt", "a late goal\nTopic:", "--max-tokens", "8"];
    let text = place.run(&generate).ok();
    let mut other = generate;
    (other[4], other[6]) = ("run", r"a late goal\nTopic:");
    assert_eq!(text.out, place.run(&other).ok().out, "a run folder and escapes mean the same");
    let nothing = place.run(&["train", "--resume", "run"]).ok();
    assert!(nothing.err.contains("all of its 12 steps") && nothing.err.contains("--steps 24") && nothing.out.is_empty(), "{}", nothing.err);
    assert!(text.out.starts_with("a late goal\nTopic:") && text.out.ends_with('\n'), "{}", text.out);
    assert_eq!(text.out, place.run(&generate).ok().out);
}

#[test]
fn predictions_are_compared() {
    let place = Place::new();
    let test = "label,text\n1,war in the east\n2,a late goal\n2,the cup final\n1,vote of the senate\n";
    place.write("test.csv", test);
    let train = |out: &str, more: &[&str]| {
        place.train(&[&["--steps", "6", "--lr", "0.02", "--eval-data", "test.csv", "--out", out], more].concat()).ok();
    };
    train("a", &[]);
    train("b", &["--seed", "1"]);
    let rows = |name: &str| -> Vec<Value> {
        std::fs::read_to_string(place.path(name)).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    };
    let (before, after) = (rows("a/predictions_before.jsonl"), rows("a/predictions.jsonl"));
    let truths: Vec<_> = after.iter().map(|r| (r["line"].as_u64().unwrap(), r["truth"].as_str().unwrap())).collect();
    assert_eq!(truths, [(2, "World"), (3, "Sports"), (4, "Sports"), (5, "World")]);
    let summary = place.json("a/summary.json");
    for (rows, key) in [(&before, "eval_loss_before"), (&after, "eval_loss_after")] {
        let sum = |field: &str| rows.iter().map(|r| r[field].as_f64().unwrap()).sum::<f64>();
        assert_eq!(sum("loss") / sum("tokens"), summary[key].as_f64().unwrap(), "{key}");
    }

    // The program's own evaluation says the same of each example, bit for bit.
    let data = ["--data", "test.csv", "--template", r"{text}\nTopic:", "--label-column", "label", "--classes", "World,Sports"];
    let eval = |file: &str| place.run(&[&["eval", "--model", "model", "--adapter", "a", "--predictions", file], &data[..]].concat());
    eval("eval.jsonl").ok();
    assert_eq!(rows("eval.jsonl"), after);
    eval("nowhere/eval.jsonl").refused(2, &["nowhere/eval.jsonl", "does not exist"]);
    eval("model").refused(2, &["model", "is a folder"]);

    let text = place.run(&["compare", "a", "before=a/predictions_before.jsonl", "--baseline", "before", "--gap", "before", "b"]).ok().out;
    for part in ["4 examples", "macro-F1", "less before", "share of the gap from before to b", "a "] {
        assert!(text.contains(part), "`{part}` is not in {text}");
    }
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    let json = || place.run(&["compare", "a/", "b", "a/predictions_before.jsonl", "--json", "--svg", "both.svg"]).ok().out;
    let compared: Value = serde_json::from_str(&json()).unwrap();
    assert_eq!(compared["runs"][0]["f1"]["value"], summary["f1_after"]);
    assert_eq!((&compared["runs"][0]["name"], &compared["baseline"]), (&"a".into(), &"a".into()));
    assert_eq!(json(), json(), "draws do not change");
    assert!(std::fs::read_to_string(place.path("both.svg")).unwrap().contains(">b"));

    train("other", &["--eval-data", "data.csv"]);
    place.run(&["compare", "a", "other"]).refused(2, &["a and other are not of the same examples", "4 and 60"]);
    place.run(&["compare", "a", "data.csv"]).refused(1, &["data.csv", "line 1", "no prediction"]);
    place.run(&["compare", "model"]).refused(1, &["model", "no predictions are here"]);
    place.run(&["compare", "nowhere"]).refused(1, &["nowhere"]);
    place.run(&["compare", "a/predictions.jsonl", "--svg", "x.svg"]).refused(2, &["run folders"]);
    place.run(&["compare"]).refused(2, &["RUN"]);
}

#[test]
fn json_is_one_object() {
    let place = Place::new();
    let run = place.train(&["--steps", "2", "--json"]).ok();
    let summary: Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!(summary, place.json("runs/1/summary.json"));
    place.train(&["--steps", "1", "--json", "--eval-samples", "0"]).ok();
    assert!(place.path("runs/2/adapter").is_dir());
    let devices: Value = serde_json::from_str(&place.run(&["devices", "--json"]).ok().out).unwrap();
    assert_eq!(devices["devices"][0]["device"], "cpu:0");
    let out = place.run(&["generate", "--model", "model", "--prompt", "a", "--max-tokens", "3", "--json"]).ok();
    let generated: Value = serde_json::from_str(&out.out).unwrap();
    assert_eq!(generated["prompt_tokens"], 2);
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let place = Place::new();
    let bits = |run: &str, more: &[&str]| {
        place.train(&[&["--steps", "4", "--eval-samples", "0", "--out", run], more].concat()).ok();
        std::fs::read(place.path(run).join("adapter/adapter_model.safetensors")).unwrap()
    };
    let first = bits("a", &[]);
    assert!(first == bits("b", &[]));
    assert!(first == bits("c", &["--threads", "2"]), "bits do not depend on threads");
    assert!(first != bits("d", &["--seed", "1"]));
}

#[test]
fn every_estimator_and_a_frozen_head() {
    let place = Place::new();
    let mut losses = Vec::new();
    for (i, (estimator, more)) in [
        ("cut-tangent", &[][..]),
        ("guided", &["--targets", "o,down"]),
        ("cut-difference", &["--two-sided"]),
        ("loss-difference", &["--zo-optimizer", "sgd"]),
        ("early-exit", &[]),
        ("oracle", &[]),
        ("cut-tangent", &["--freeze-head"]),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("run{i}");
        place.train(&[&["--steps", "2", "--estimator", estimator, "--eval-samples", "4", "--out", &out], more].concat()).ok();
        losses.push(place.json(&format!("{out}/summary.json"))["loss_first"].as_f64().unwrap());
    }
    assert!(losses.iter().all(|l| (l - losses[0]).abs() < 0.05 * losses[0]), "the first batch is the same: {losses:?}");
}

#[test]
fn plain_text_and_other_clusters() {
    let place = Place::new();
    place.write("text.jsonl", "{\"body\":\"once upon\"}\n{\"body\":\"a time\"}\n\n".repeat(10));
    let one = "[[device]]\nname = \"one\"\nkind = \"bp\"\n";
    for (name, cluster, schedule) in [
        ("single", one.to_owned(), "single"),
        ("gpipe", [one, "[[device]]\nname = \"two\"\nkind = \"bp\"\n"].concat(), "gpipe"),
        (
            "hybrid",
            ["[[device]]\nname = \"npu\"\nkind = \"bp-free\"\ncompute = \"bf16\"\nlayers = 3\n", one, "layers = 1\n"].concat(),
            "hybridop-head",
        ),
    ] {
        place.write("c.toml", cluster);
        let args = ["train", "--model", "model", "--data", "text.jsonl", "--text-column", "body", "--cluster", "c.toml", "--out", name];
        place.run(&[&args[..], &["--steps", "3", "--batch", "4", "--directions", "2"]].concat()).ok();
        let summary = place.json(&format!("{name}/summary.json"));
        assert_eq!(summary["schedule"], schedule);
        assert!(summary["f1_after"].is_null() && summary["eval_loss_after"].is_f64(), "{summary}");
    }
}

#[test]
fn evaluation_data_of_their_own() {
    let place = Place::new();
    place.write("test.csv", "title,body,class\n-,a late goal,Sports\n-,war in the east,World\n-,the cup final,Sports\n");
    let eval = ["--eval-data", "test.csv", "--eval-template", r"{body}\nTopic:", "--eval-label-column", "class"];
    place.train(&[&["--steps", "1", "--out", "run"], &eval[..]].concat()).ok();
    assert_eq!(place.json("run/summary.json")["eval_examples"], 3);
}

#[test]
fn help_has_examples() {
    let place = Place::empty();
    for command in ["devices", "train", "eval", "compare", "generate", "completions"] {
        let help = place.run(&[command, "--help"]).ok();
        assert!(help.out.contains("Examples:") && help.out.contains(&format!("zofo {command}")), "{}", help.out);
        assert!(help.out.lines().all(|l| l.chars().count() <= 80) && !help.out.contains('\u{1b}'), "{}", help.out);
    }
    for (shell, part) in
        [("bash", "_zofo"), ("zsh", "#compdef zofo"), ("fish", "complete -c zofo"), ("powershell", "Register-ArgumentCompleter")]
    {
        let script = place.run(&["completions", shell]).ok().out;
        assert!(script.contains(part) && script.contains("freeze-head"), "{script}");
    }
    assert!(place.run(&["--version"]).ok().out.starts_with("zofo "));
    let devices = place.run(&["devices"]).ok();
    assert!(devices.out.contains("cpu:0") && devices.out.contains("all ops"), "{}", devices.out);
}

#[test]
fn a_message_goes_through_the_model_s_chat_template() {
    let place = Place::new();
    let ids = |args: &[&str]| {
        let all = [&["generate", "--model", "model", "--max-tokens", "6", "--json"], args].concat();
        let out: Value = serde_json::from_str(&place.run(&all).ok().out).unwrap();
        (out["prompt_tokens"].clone(), out["ids"].clone())
    };
    let message = ["--chat", "--prompt", "late goal", "--system", "Sum up."];
    place.run(&[&["generate", "--model", "model"], &message[..]].concat()).refused(2, &["no chat template"]);
    place.run(&["generate", "--model", "model", "--prompt", "a", "--system", "b"]).refused(2, &["--chat"]);
    let template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    place.write("model/chat_template.jinja", template);
    assert_eq!(ids(&message), ids(&["--prompt", r"system: Sum up.\nuser: late goal\n"]));
    // The reply stands alone.
    let reply = place.run(&["generate", "--model", "model", "--max-tokens", "1", "--chat", "--prompt", "late goal"]).ok();
    assert!(!reply.out.contains("late goal"), "{}", reply.out);
}
