//! The application runs, and is as short as it claims to be.

use std::process::Command;

#[test]
fn it_trains_and_generates() {
    let model = zofo_testkit::shared_or_skip!("models/stories260K/hf");
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.csv");
    let rows: String = (0..24).map(|i| ["1,war in the east\n", "2,a late goal\n"][i % 2]).collect();
    std::fs::write(&data, format!("label,text\n{rows}")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_downstream")).arg(model).arg(data).arg("the cup final").output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{out}{err}");
    let losses: Vec<f64> = out.lines().filter_map(|l| l.strip_prefix("step ")?.split("loss ").nth(1)?.parse().ok()).collect();
    assert_eq!(losses.len(), 8);
    assert!(losses[7] < losses[0], "{losses:?}");
    assert!(out.lines().last().unwrap().starts_with("the cup final:"), "{out}");
}

#[test]
fn it_is_short() {
    assert!(include_str!("../src/main.rs").lines().count() <= 40);
}
