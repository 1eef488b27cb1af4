//! `zofo plan` and `zofo simulate`.

use serde_json::Value;

use super::support::Place;

/// Two boards that only run forward and two that backpropagate, four equal layers, four micro-batches: HybridOP's worked example.
const TOY: &str = r#"{"layers": [{"work": 1.0}, {"work": 1.0}, {"work": 1.0}, {"work": 1.0}],
 "devices": [{"name": "npu0", "kind": "bp-free", "speed": 0.5, "fo_speed": 0.3333333333333333},
             {"name": "npu1", "kind": "bp-free", "speed": 0.5, "fo_speed": 0.3333333333333333},
             {"name": "gpu0", "kind": "bp", "speed": 1.0, "power_idle_w": 5, "power_busy_w": 10},
             {"name": "gpu1", "kind": "bp", "speed": 1.0}],
 "micro_batches": 4, "directions": 1, "estimator": "loss-difference"}"#;

fn place() -> Place {
    let place = Place::new();
    std::fs::write(place.path("costs.json"), TOY).unwrap();
    place
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn the_papers_example_takes_51_24_and_23() {
    let place = place();
    for (schedule, seconds) in [("gpipe", 51.0), ("hybridop-tail", 24.0), ("hybridop-head", 23.0), ("1f1b", 45.0)] {
        let run = place.run(&["simulate", "--costs", "costs.json", "--schedule", schedule, "--json"]).ok();
        let found = json(&run.out);
        assert!((found["makespan_s"].as_f64().unwrap() - seconds).abs() < 1e-9, "{schedule}: {}", run.out);
        assert_eq!(found["devices"].as_array().unwrap().len(), 4);
        for key in ["name", "busy_s", "peak_in_flight", "peak_memory_bytes"] {
            assert!(!found["devices"][0][key].is_null(), "{key}: {}", run.out);
        }
        let utilisation = found["utilisation"].as_f64().unwrap();
        assert!(utilisation > 0.0 && utilisation <= 1.0);
    }
    // A fixed partition in another order: without the boards that only run forward, 30.
    let given = TOY.replace("\"micro_batches\"", "\"partition\": [[\"gpu1\", 0, 2], [\"gpu0\", 2, 4]], \"micro_batches\"");
    std::fs::write(place.path("given.json"), given).unwrap();
    let run = place.run(&["simulate", "--costs", "given.json", "--schedule", "gpipe", "--json"]).ok();
    assert_eq!(json(&run.out)["makespan_s"], 30.0);
    let text = place.run(&["simulate", "--costs", "given.json", "--schedule", "gpipe"]).ok();
    assert!(text.out.contains("gpu1") && text.out.contains("0..2") && !text.out.contains("npu0"), "{}", text.out);
}

#[test]
fn a_plan_is_written_and_simulated_again() {
    let place = place();
    for planner in ["auto", "hybridop", "chimera", "interleaved-1f1b", "zb-h1", "gpipe-min-max", "single"] {
        let out = format!("{planner}.json");
        let run = place.run(&["plan", "--costs", "costs.json", "--planner", planner, "--json", "--out", &out]).ok();
        let plan = json(&run.out);
        for key in ["planner", "partition", "predicted_makespan_s", "lower_bound_s", "proven_optimal", "plan_seconds"] {
            assert!(!plan[key].is_null(), "{planner}: {key}");
        }
        assert_eq!(plan["planner"], planner);
        // One direction was asked for: nobody may leave the head untrained instead.
        assert!(plan["stages"].as_array().unwrap().iter().all(|s| s["role"] != "frozen"), "{planner}: {}", plan["stages"]);
        let again = place.run(&["simulate", "--plan", &out, "--json"]).ok();
        assert_eq!(json(&again.out)["makespan_s"], plan["predicted_makespan_s"], "{planner}");
    }
    // The best plan of all backpropagates on a board that cannot; asked for one that can train, the planner finds another.
    let run = place.run(&["plan", "--costs", "costs.json", "--out", "auto.json"]).ok();
    assert!(run.out.contains("it cannot train"), "{}", run.out);
    place.run(&["plan", "--costs", "costs.json", "--planner", "dapple", "--trainable"]).ok();
    place.run(&["plan", "--costs", "costs.json", "--planner", "hybridop-tail", "--trainable"]).refused(2, &["model of latency"]);
    let run = place.run(&["plan", "--costs", "costs.json", "--trainable", "--out", "trainable.json"]).ok();
    assert!(run.out.contains("zofo train --plan trainable.json"), "{}", run.out);
    // What a bp-free board would take to backpropagate is no way to train on it.
    let fast = TOY.replace("0.3333333333333333", "0.9");
    assert_ne!(fast, TOY);
    std::fs::write(place.path("fast.json"), fast).unwrap();
    place.run(&["plan", "--costs", "fast.json", "--trainable"]).ok();
    place.run(&["plan", "--costs", "fast.json", "--planner", "gpipe", "--trainable"]).ok();
    // Credits without a limit take no room.
    let mut plan = place.json("trainable.json");
    plan["credits"] = serde_json::json!([u64::MAX, u64::MAX, u64::MAX, u64::MAX]);
    std::fs::write(place.path("ample.json"), plan.to_string()).unwrap();
    place.run(&["simulate", "--plan", "ample.json"]).ok();
    place.run(&["train", "--plan", "ample.json", "--steps", "1", "--out", "ample"]).ok();
    plan["order"] = serde_json::json!([["F0@0"]]);
    std::fs::write(place.path("cut.json"), plan.to_string()).unwrap();
    place.run(&["train", "--plan", "cut.json", "--steps", "1"]).refused(2, &["cut.json"]);
    place.run(&["train", "--plan", "ample.json", "--print-config"]).refused(2, &["--print-config"]);
    let auto = place.run(&["plan", "--costs", "costs.json"]).ok();
    assert!(auto.out.contains("what each board brings") && auto.out.contains("without npu0"), "{}", auto.out);
    assert!(auto.out.lines().all(|l| l.chars().count() <= 80), "{}", auto.out);
    let run = place.run(&["simulate", "--plan", "auto.json", "--trace", "t.json", "--report", "r.html"]).ok();
    assert!(run.out.contains("t.json"), "{}", run.out);
    let trace = place.json("t.json");
    assert!(trace["traceEvents"].as_array().unwrap().iter().any(|e| e["ph"] == "X" && e["name"] == "F0"), "{trace}");
    let report = std::fs::read_to_string(place.path("r.html")).unwrap();
    assert!(report.starts_with("<!DOCTYPE html>") && report.contains("<rect") && report.contains("gpu0"));
    // What was written by the program is replaced, what was not is kept.
    place.run(&["simulate", "--plan", "auto.json", "--trace", "t.json"]).ok();
    place.run(&["simulate", "--plan", "auto.json", "--trace", "costs.json"]).refused(2, &[]);
    place.run(&["plan", "--costs", "costs.json", "--out", "costs.json"]).refused(2, &[]);
}

/// Two boards that backpropagate, the layers of the model of these tests.
const PAIR: &str = r#"{"layers": [{"work": 1.0}, {"work": 1.0}, {"work": 1.0}, {"work": 1.0}],
 "devices": [{"name": "left", "kind": "bp", "speed": 1.0}, {"name": "right", "kind": "bp", "speed": 1.0}], "micro_batches": 2}"#;

const PAIR_CLUSTER: &str = "[[device]]\nname = \"left\"\nkind = \"bp\"\n[[device]]\nname = \"right\"\nkind = \"bp\"\n";

#[test]
fn a_plan_is_trained_as_it_is() {
    let place = Place::new();
    place.write("costs.json", PAIR);
    place.write("pair.toml", PAIR_CLUSTER);
    let train = |args: &[&str]| place.train(&[&["--eval-samples", "0"], args].concat());
    let adapter = |run: &str| std::fs::read(place.path(run).join("adapter/adapter_model.safetensors")).unwrap();
    train(&["--cluster", "pair.toml", "--schedule", "gpipe", "--steps", "4", "--out", "line"]).ok();
    for planner in ["interleaved-1f1b", "zb-h1", "chimera", "hdp"] {
        let (file, half) = (format!("{planner}.json"), format!("{planner}-half"));
        let planned = place.run(&["plan", "--costs", "costs.json", "--planner", planner, "--out", &file]).ok();
        assert!(planned.out.contains(&format!("train it: zofo train --plan {file}")), "{}", planned.out);
        train(&["--plan", &file, "--cluster", "pair.toml", "--steps", "4", "--out", planner]).ok();
        let run = place.json(&format!("{planner}/plan.json"));
        assert_eq!(run["workers"][0]["order"], place.json(&file)["order"][0], "{planner}");
        // The same layers and micro-batches give the same bits in any order; pipelines side by side add them up in another one.
        if ["interleaved-1f1b", "zb-h1"].contains(&planner) {
            assert_eq!(adapter(planner), adapter("line"), "{planner}");
        }
        // A run goes on by the plan that it was started with.
        train(&["--plan", &file, "--steps", "2", "--out", &half]).ok();
        std::fs::remove_file(place.path(&file)).unwrap();
        place.run(&["train", "--resume", &half, "--steps", "4"]).ok();
        assert_eq!(adapter(&half), adapter(planner), "{planner}");
    }
}

/// Two boards of unlike speed share stages; what is learnt is what one board learns alone, but for the order of sums.
#[test]
fn shared_stages_are_trained() {
    let place = Place::new();
    // Transfers of activations cost more than those of gradients here and less there, so that layers are shared in both ways.
    let layer = |activations: u32, trainable: u32| {
        format!("{{\"work\": 1.0, \"boundary_bytes\": {activations}, \"trainable_bytes\": {trainable}}}")
    };
    let layers = [layer(50, 1), layer(1, 400), layer(50, 1), layer(1, 400)].join(", ");
    let costs = format!(
        "{{\"layers\": [{layers}], \"devices\": [{{\"name\": \"left\", \"kind\": \"bp\", \"speed\": 1.0}}, {{\"name\": \"right\", \"kind\": \"bp\", \"speed\": 0.9}}],
          \"links\": {{\"latency_s\": 0.001, \"bytes_per_s\": 1000}}, \"micro_batches\": 2}}"
    );
    place.write("costs.json", &costs);
    place.write("pair.toml", PAIR_CLUSTER);
    let last = |run: &str| place.json(&format!("{run}/summary.json"))["loss_last"].as_f64().unwrap();
    let train = |args: &[&str]| place.train(&[&["--eval-samples", "0", "--steps", "6"], args].concat()).ok();
    place.run(&["plan", "--costs", "costs.json", "--planner", "single", "--out", "single.json"]).ok();
    train(&["--plan", "single.json", "--cluster", "pair.toml", "--out", "alone"]);
    for (planner, split) in [("dapple", "batch"), ("asteroid", "batch"), ("accpar", "tensor"), ("xronos", "tensor")] {
        let file = format!("{planner}.json");
        place.run(&["plan", "--costs", "costs.json", "--planner", planner, "--trainable", "--out", &file]).ok();
        let plan = place.json(&file);
        assert_eq!(
            (&plan["stages"][0]["split"], plan["stages"][0]["devices"].as_array().unwrap().len()),
            (&split.into(), 2),
            "{planner}: {plan}"
        );
        train(&["--plan", &file, "--cluster", "pair.toml", "--out", planner]);
        assert_eq!(place.json(&format!("{planner}/plan.json"))["workers"][0]["devices"], plan["stages"][0]["devices"], "{planner}");
        // Adam takes a step of the same length for the smallest gradient, whose sign the order of sums may turn.
        let (found, alone) = (last(planner), last("alone"));
        assert!((found / alone - 1.0).abs() < 1e-2, "{planner}: {found} and {alone}");
    }
    // Where all layers are shared by batch, so is the stage that is trained.
    let free = costs.replace("\"latency_s\": 0.001, \"bytes_per_s\": 1000", "\"latency_s\": 0.001");
    place.write("free.json", &free);
    place.run(&["plan", "--costs", "free.json", "--planner", "accpar", "--out", "batch.json"]).ok();
    assert_eq!(place.json("batch.json")["stages"][0]["batch_layers"], serde_json::json!([0, 1, 2, 3]));
    train(&["--plan", "batch.json", "--cluster", "pair.toml", "--out", "batch"]);
    assert_eq!(place.json("batch/plan.json")["stages"][0]["split"], "batch");
    // A device that gets no sequence is named.
    let shown =
        place.train(&["--eval-samples", "0", "--steps", "1", "--batch", "2", "--plan", "batch.json", "--cluster", "pair.toml"]).ok();
    assert!(shown.out.contains("idle most of the time") && shown.out.contains("--batch"), "{} {}", shown.out, shown.err);
    let types = place.json("accpar.json")["stages"][0]["batch_layers"].as_array().unwrap().len();
    assert!(types > 0 && types < 4, "both ways in one stage: {types}");
    assert!(place.json("accpar/plan.json")["stages"].as_array().unwrap().len() > 1);
    // A run goes on where it was stopped.
    let adapter = |run: &str| std::fs::read(place.path(run).join("adapter/adapter_model.safetensors")).unwrap();
    place.train(&["--eval-samples", "0", "--steps", "3", "--plan", "accpar.json", "--out", "half"]).ok();
    place.run(&["train", "--resume", "half", "--steps", "6"]).ok();
    assert_eq!(adapter("half"), adapter("accpar"));
}

/// Two boards that only run forward share the directions of one stage.
#[test]
fn shared_directions_are_trained() {
    let place = Place::new();
    let costs = TOY
        .replace("\"micro_batches\": 4, \"directions\": 1", "\"micro_batches\": 2, \"directions\": 4")
        .replace("loss-difference", "cut-tangent");
    place.write("costs.json", costs);
    let step = |planner: &str| {
        let file = format!("{planner}.json");
        place.run(&["plan", "--costs", "costs.json", "--planner", planner, "--trainable", "--out", &file]).ok();
        place.train(&["--plan", &file, "--directions", "4", "--steps", "2", "--eval-samples", "0", "--out", planner]).ok();
        let first = std::fs::read_to_string(place.path(&format!("{planner}/metrics.jsonl"))).unwrap();
        json(first.lines().next().unwrap())["loss"].clone()
    };
    assert_eq!(step("direction-parallel"), step("hybridop"));
    let plan = place.json("direction-parallel.json");
    assert_eq!((&plan["stages"][0]["split"], plan["stages"][0]["devices"].as_array().unwrap().len()), (&"directions".into(), 2), "{plan}");
}

/// Boards that only run forward wait for the others at the end of a step, and take exit directions then.
#[test]
fn exit_directions_fill_idle_time() {
    let place = place();
    place.write("costs.json", TOY.replace("\"speed\": 0.5", "\"speed\": 4").replace("\"micro_batches\": 4", "\"micro_batches\": 2"));
    let plan = |args: &[&str]| {
        let all = [
            "plan",
            "--costs",
            "costs.json",
            "--estimator",
            "early-exit",
            "--trainable",
            "--planner",
            "hybridop",
            "--json",
            "--out",
            "plan.json",
        ];
        json(&place.run(&[&all[..], args].concat()).ok().out)
    };
    let time = |plan: &Value| plan["makespan_s"].as_f64().unwrap();
    let without = json(&place.run(&["plan", "--costs", "costs.json", "--planner", "hybridop", "--trainable", "--json"]).ok().out);
    let filled = plan(&[]);
    let q = filled["costs"]["exit_directions"].as_u64().unwrap();
    assert!(q > 0 && time(&filled) <= time(&without) * (1.0 + 1e-9), "{q}: {filled}");
    let more = (q + 1).to_string();
    assert!(time(&plan(&["--exit-directions", &more])) > time(&filled));
    plan(&[]);
    place.train(&["--plan", "plan.json", "--directions", "1", "--steps", "1", "--eval-samples", "0", "--out", "run"]).ok();
    let order = place.json("run/plan.json")["workers"][1]["order"].to_string();
    assert!(order.contains(&format!("X1[{}..{q}+base]", q - 1)), "{order}");
    place.run(&["plan", "--costs", "costs.json", "--exit-directions", "2"]).refused(2, &["only `early-exit`"]);
    place.train(&["--exit-directions", "2"]).refused(2, &["only `early-exit`"]);
    place.train(&["--plan", "plan.json", "--directions", "1", "--exit-directions", "99", "--steps", "1"]).refused(2, &["exit directions"]);
}

#[test]
fn a_plan_for_something_else_is_not_trained() {
    let place = Place::new();
    let plan = |costs: &str, planner: &str| {
        place.write("costs.json", costs);
        place.run(&["plan", "--costs", "costs.json", "--planner", planner, "--out", "plan.json"]).ok()
    };
    let refused = |args: &[&str], parts: &[&str]| place.train(&[&["--plan", "plan.json"], args].concat()).refused(2, parts);
    plan(PAIR, "1f1b");
    place.write("other.toml", PAIR_CLUSTER.replace("left", "middle"));
    place.write("free.toml", PAIR_CLUSTER.replacen("\"bp\"", "\"bp-free\"", 1));
    refused(&["--micro-batches", "3"], &["micro-batches", "2 in the plan", "3 in this run"]);
    refused(&["--cluster", "other.toml"], &["`left`", "middle, right"]);
    refused(&["--cluster", "free.toml"], &["`left`", "bp-free"]);
    refused(&["--schedule", "gpipe"], &["schedule", "1f1b in the plan"]);
    place.write("given.toml", PAIR_CLUSTER.replacen("\n[[", "\nlayers = 1\n[[", 1) + "layers = 3\n");
    refused(&["--cluster", "given.toml"], &["`left`", "1 layers by the cluster and 2 by the plan"]);
    plan(&PAIR.replacen("{\"work\": 1.0}, ", "", 1), "1f1b");
    refused(&[], &["layers of the model", "3 in the plan", "4 in this run"]);
    let tail = plan(&TOY.replace("\"micro_batches\": 4", "\"micro_batches\": 2"), "hybridop-tail");
    assert!(tail.out.contains("it cannot train") && !tail.out.contains("train it:"), "{}", tail.out);
    refused(&[], &["model of latency"]);
    // What a plan says twice it says the same, and nothing that nobody reads.
    plan(PAIR, "1f1b");
    let edited = |key: &str, value: Value| {
        let mut file = place.json("plan.json");
        file[key] = value;
        place.write("edited.json", file.to_string());
        place.run(&["simulate", "--plan", "edited.json"])
    };
    edited("partition", serde_json::json!([["left", 0, 3], ["right", 3, 4]])).refused(1, &["edited.json", "`partition`"]);
    edited("chains", serde_json::json!([[0, 2, 0, 4294967298u64]])).refused(1, &["micro-batch 4294967298"]);
    edited("placement", serde_json::json!([0, 2])).refused(1, &["worker 2"]);
    edited("colour", "blue".into()).refused(1, &["edited.json", "no `colour`"]);
    edited("notes", serde_json::json!(["mine"])).ok();
    place.train(&["--plan", "plan.json", "--steps", "1", "--eval-samples", "0", "--out", "done"]).ok();
    place.run(&["simulate", "--plan", "done/plan.json"]).refused(1, &["--resume"]);
    // Zeroth-order stages learn as was planned.
    plan(&TOY.replace("\"micro_batches\": 4", "\"micro_batches\": 2").replace("loss-difference", "cut-tangent"), "hybridop");
    refused(&["--estimator", "guided", "--targets", "o"], &["estimator", "cut-tangent in the plan", "guided"]);
    refused(&["--directions", "4"], &["directions", "1 in the plan", "4 in this run"]);
    refused(&["--directions", "1", "--freeze-head"], &["trains the stages"]);
    place.train(&["--plan", "plan.json", "--directions", "1", "--steps", "1", "--eval-samples", "0"]).ok();
    plan(&TOY.replace("\"micro_batches\": 4", "\"micro_batches\": 2").replace("\"directions\": 1", "\"directions\": 0"), "hybridop");
    refused(&[], &["untrained", "2 directions"]);
    place.train(&["--plan", "plan.json", "--directions", "0", "--steps", "1", "--eval-samples", "0"]).ok();
}

#[test]
fn all_planners_side_by_side() {
    let place = place();
    let run = place.run(&["simulate", "--costs", "costs.json", "--compare", "all"]).ok();
    let first = run.out.lines().nth(1).unwrap();
    for name in ["auto", "gpipe", "chimera", "hybridop", "hybridop-tail", "single"] {
        assert!(run.out.lines().any(|l| l.starts_with(name)), "{name}: {}", run.out);
    }
    assert!(first.contains("1.00"), "the best comes first: {}", run.out);
    let run = place.run(&["simulate", "--costs", "costs.json", "--compare", "auto,gpipe", "--json"]).ok();
    let all = json(&run.out);
    let time = |i: usize| all["planners"][i]["simulated"]["makespan_s"].as_f64().unwrap();
    assert_eq!(all["planners"][0]["planner"], "auto");
    assert!(time(0) <= time(1));
}

#[test]
fn a_model_on_boards_by_data_sheet() {
    let place = place();
    let boards = "[[device]]\nname = \"npu\"\nkind = \"bp-free\"\nboard = \"atlas-200i-dk-a2\"\n\
                  [[device]]\nname = \"gpu\"\nkind = \"bp\"\nflops = 1e12\n";
    std::fs::write(place.path("boards.toml"), boards).unwrap();
    let run = place.run(&["plan", "--model", "model", "--cluster", "boards.toml", "--tokens", "64", "--json"]).ok();
    assert!(json(&run.out)["predicted_makespan_s"].as_f64().unwrap() > 0.0);
    std::fs::write(place.path("boards.toml"), boards.replace("flops = 1e12\n", "")).unwrap();
    place.run(&["plan", "--model", "model", "--cluster", "boards.toml"]).refused(2, &["`gpu`", "board", "flops"]);
}

#[test]
fn bad_input_is_told_what_is_wrong() {
    let place = place();
    let with = |from: &str, to: &str, part: &str, command: &[&str]| {
        place.write("bad.json", TOY.replacen(from, to, 1));
        let run = place.run(&[command, &["--costs", "bad.json"]].concat());
        let code = run.code;
        assert!([1, 2].contains(&code), "{to}: {code}");
        run.refused(code, &[part]);
    };
    let plan = ["plan"];
    with("\"work\": 1.0", "\"work\": -1", "work of layer 0 is -1", &plan);
    with("\"work\": 1.0", "\"work\": NaN", "line 1", &plan);
    with("\"work\": 1.0", "\"work\": 1.0, \"memory\": 3", "memory", &plan);
    with("\"speed\": 0.5", "\"speed\": 0", "speed of device `npu0`", &plan);
    with("\"npu1\"", "\"npu0\"", "two devices are called `npu0`", &plan);
    with("\"micro_batches\": 4", "\"micro_batches\": 0", "micro_batches is 0", &plan);
    with("\"directions\": 1", "\"directions\": 70000", "65535", &plan);
    with("loss-difference", "magic", "cut-tangent", &plan);
    with("loss-difference", "oracle", "test tool", &plan);
    with("\"micro_batches\": 4", "\"micro_batches\": 4, \"partition\": [[\"gpu0\", 1, 4]]", "a gap", &plan);
    with("\"micro_batches\": 4", "\"micro_batches\": 4294967295", "actions", &["plan", "--planner", "gpipe"]);
    with("{\"layers\"", "{\"layer\"", "layer", &plan);
    with(", \"fo_speed\": 0.3333333333333333}", "}", "`npu0`", &["simulate", "--schedule", "gpipe"]);
    place.run(&["plan", "--costs", "costs.json", "--planner", "best"]).refused(2, &["asteroid", "auto"]);
    place.run(&["simulate", "--costs", "costs.json", "--schedule", "best"]).refused(2, &["zb-h1"]);
    place.run(&["simulate", "--costs", "costs.json"]).refused(2, &[]);
    place.run(&["plan"]).refused(2, &[]);
    place.run(&["plan", "--costs", "nowhere.json"]).refused(1, &[]);
    place.run(&["simulate", "--plan", "costs.json"]).refused(1, &[]);
    // A plan whose order was damaged.
    place.run(&["plan", "--costs", "costs.json", "--out", "p.json"]).ok();
    let text = std::fs::read_to_string(place.path("p.json")).unwrap();
    for (from, to) in [("\"F0@0\"", "\"F9@0\""), ("\"F0@0\"", "\"nonsense\""), ("\"F0@0\",", ""), ("\"role\":\"FO\"", "\"role\":\"XX\"")] {
        assert!(text.contains(from), "{from}");
        place.write("q.json", text.replacen(from, to, 1));
        place.run(&["simulate", "--plan", "q.json"]).refused(1, &["error: q.json"]);
    }
}
