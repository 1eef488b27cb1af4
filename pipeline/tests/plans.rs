//! Cluster files, splits and plans.

use zofo_hal::DType;
use zofo_pipeline::{
    cluster::{Cluster, Kind, parse_size},
    costs::Costs,
    estimator::{EstimatorName, EstimatorSpec},
    ir::Role,
    journal::Entry,
    order::ScheduleName,
    plan::PlanRequest,
    planner::{Method, PlannerName, Problem},
};

const FILE: &str = r#"
[[device]]
name = "npu0"
kind = "bp-free"
compute = "f16"
memory = "4GiB"

[[device]]
name = "gpu0"
kind = "bp"
threads = 2
int8 = true
"#;

#[test]
fn a_file_is_read_and_written() {
    let c = Cluster::parse(FILE).unwrap();
    assert_eq!(c.devices[0].kind, Kind::BpFree);
    assert_eq!(c.devices[0].compute, Some(DType::F16));
    assert_eq!(c.devices[0].memory, Some(4 << 30));
    assert_eq!(c.devices[1].threads, Some(2));
    assert_eq!([c.devices[0].int8, c.devices[1].int8], [false, true]);
    assert_eq!(Cluster::parse(&c.to_toml()).unwrap(), c);
}

#[test]
fn nonsense_is_refused_with_its_place() {
    for (text, part) in [
        ("", "no device"),
        ("[[device]]\nname = \"a\"\nkind = \"tpu\"", "bp-free"),
        ("[[device]]\nname = \"a\"\nkind = \"bp\"\nspeed = 1", "speed"),
        ("[[device]]\nname = \"a\"\nkind = \"bp\"\ncompute = \"f64\"", "f32, f16 and bf16"),
        ("[[device]]\nname = \"a\"\nkind = \"bp\"\n[[device]]\nname = \"a\"\nkind = \"bp\"", "called `a`"),
        ("[[device]]\nname = \"a\"\nkind = \"bp\"\nlayers = 1\n[[device]]\nname = \"b\"\nkind = \"bp\"", "either all"),
        ("[[device]]\nname = \"a\"\nkind = \"bp\"\nmemory = \"4 apples\"", "512MiB"),
        ("[[device]", "line 1"),
    ] {
        let e = Cluster::parse(text).unwrap_err();
        assert!(e.message().contains(part), "{text}: {e}");
    }
}

#[test]
fn sizes() {
    assert_eq!(parse_size("512MiB").unwrap(), 512 << 20);
    assert_eq!(parse_size("1.5 GB").unwrap(), 1_500_000_000);
    assert_eq!(parse_size("17").unwrap(), 17);
    for bad in ["", "GiB", "1.2.3MB", "-1MB", "99999999999GiB"] {
        assert!(parse_size(bad).is_err(), "{bad}");
    }
}

#[test]
fn splits_are_even_or_as_given() {
    let mut c = Cluster::virtual_cpus(2, 2);
    assert_eq!(c.split(5).unwrap(), [2, 1, 1, 1]);
    assert!(c.split(3).unwrap_err().message().contains("4 devices but the model only 3 layers"));
    for (d, n) in c.devices.iter_mut().zip([1, 1, 1, 2]) {
        d.layers = Some(n);
    }
    assert_eq!(c.split(5).unwrap(), [1, 1, 1, 2]);
    assert!(c.split(6).unwrap_err().message().contains("5 layers together"));
}

#[test]
fn a_plan_gives_roles_by_what_is_downstream() {
    let e = EstimatorSpec::new(EstimatorName::CutTangent, 4);
    let plan = PlanRequest::new(&Cluster::virtual_cpus(2, 2), 5, 4, &e).plan().unwrap();
    assert_eq!(plan.name, ScheduleName::HybridopHead);
    assert_eq!(
        plan.stages.iter().map(|s| s.role).collect::<Vec<_>>(),
        [Role::ZerothOrder, Role::ZerothOrder, Role::FirstOrder, Role::FirstOrder]
    );
    assert_eq!(plan.stages[3].layers, 4..5);

    // A BP-capable device in front of a BP-free one cannot get a gradient: zeroth-order, whatever it is.
    let mut c = Cluster::virtual_cpus(1, 2);
    c.devices.swap(0, 1);
    let plan = PlanRequest::new(&c, 3, 1, &e).plan().unwrap();
    assert_eq!(plan.stages[0].role, Role::ZerothOrder);

    let c = Cluster::virtual_cpus(0, 2);
    assert_eq!(PlanRequest::new(&c, 2, 1, &e).plan().unwrap().name, ScheduleName::Gpipe);
    let c = Cluster::virtual_cpus(0, 1);
    assert_eq!(PlanRequest::new(&c, 2, 1, &e).plan().unwrap().name, ScheduleName::Single);
}

#[test]
fn a_planners_plan_is_taken_up_as_it_is() {
    let costs = r#"{"layers": [{"work": 1}, {"work": 1}, {"work": 1}, {"work": 1}], "micro_batches": 4,
        "devices": [{"name": "gpu1", "kind": "bp", "speed": 1}, {"name": "gpu0", "kind": "bp", "speed": 1}]}"#;
    let (p, cluster) = (Problem::new(Costs::parse(costs).unwrap()).unwrap(), Cluster::virtual_cpus(0, 3));
    let e = EstimatorSpec::new(EstimatorName::CutTangent, 4);
    let request = PlanRequest::new(&cluster, 4, 4, &e);
    for planner in [PlannerName::Interleaved, PlannerName::Chimera, PlannerName::ZbH1] {
        let outcome = planner.propose(&p, &Method::FROZEN).unwrap().outcome;
        let plan = request.adopt(&p, &outcome, EstimatorName::CutTangent).unwrap();
        assert_eq!((&plan.schedule, plan.name), (&outcome.schedule, outcome.name));
        assert_eq!(plan.devices(), ["gpu1", "gpu0"], "those of the plan, in its order");
        assert!(plan.stages.iter().zip(&outcome.layout.stages).all(|(a, b)| a.layers == b.layers && a.role == b.role));
        let shallow = PlanRequest::new(&cluster, 5, 4, &e).adopt(&p, &outcome, EstimatorName::CutTangent).unwrap_err();
        assert!(shallow.message().contains("4 in the plan, 5 in this run"), "{shallow}");
    }
}

#[test]
fn placements_without_a_gradient_are_refused_by_name() {
    let e = EstimatorSpec::new(EstimatorName::CutTangent, 4);
    let err = PlanRequest::new(&Cluster::virtual_cpus(2, 0), 4, 1, &e).plan().unwrap_err();
    assert!(err.message().contains("npu1") && err.message().contains("hybridop-tail"), "{err}");
    let mut request = PlanRequest::new(&Cluster::virtual_cpus(1, 1), 4, 1, &e).plan();
    assert!(request.is_ok());
    let c = Cluster::virtual_cpus(1, 1);
    let mut r = PlanRequest::new(&c, 4, 1, &e);
    r.schedule = Some(ScheduleName::Gpipe);
    request = r.plan();
    let err = request.unwrap_err();
    assert!(err.message().contains("gpipe") && err.message().contains("npu0"), "{err}");
}

#[test]
fn estimator_settings_are_checked() {
    for (name, _) in EstimatorName::ALL {
        assert_eq!(EstimatorName::parse(name).unwrap().name(), name);
    }
    assert!(EstimatorName::parse("cut").unwrap_err().message().contains("cut-tangent"));
    let mut e = EstimatorSpec::new(EstimatorName::LossDifference, 2);
    e.check(DType::F32).unwrap();
    assert_eq!(e.check(DType::Bf16).unwrap_err().kind(), &zofo_hal::ErrorKind::Unsupported);
    assert_eq!(e.check(DType::F16).unwrap_err().kind(), &zofo_hal::ErrorKind::Unsupported);
    (e.two_sided, e.eps) = (true, EstimatorSpec::default_eps(DType::Bf16, true));
    e.check(DType::Bf16).unwrap();
    for (compute, two_sided) in [(DType::F32, false), (DType::F32, true), (DType::F16, false), (DType::F16, true), (DType::Bf16, true)] {
        (e.two_sided, e.eps) = (two_sided, EstimatorSpec::default_eps(compute, two_sided));
        e.check(compute).unwrap();
    }
    e.eps = 0.0;
    assert!(e.check(DType::F32).is_err());
    let mut t = EstimatorSpec::new(EstimatorName::CutTangent, 2);
    t.check(DType::F16).unwrap();
    t.two_sided = true;
    assert!(t.check(DType::F32).is_err());
    t.two_sided = false;
    t.directions = 1 << 16;
    assert!(t.check(DType::F32).is_err());
}

#[test]
fn slopes_and_outliers() {
    let mut e = EstimatorSpec::new(EstimatorName::LossDifference, 2);
    e.eps = 0.5;
    assert_eq!(e.slope(1.0, None), 2.0);
    assert_eq!(e.slope(1.0, Some(-3.0)), 4.0);
    assert_eq!(EstimatorSpec::new(EstimatorName::CutTangent, 2).slope(1.25, None), 1.25);
    e.winsorise = Some(3.0);
    let mut g = [1.0, 2.0, 3.0, 2.0, 100.0];
    e.winsorise(&mut g);
    // Median 2, median absolute deviation 1: the limit is 2 + 3 * 1.4826.
    assert_eq!(g[..4], [1.0, 2.0, 3.0, 2.0]);
    assert!((g[4] - (2.0 + 3.0 * 1.4826)).abs() < 1e-12, "{g:?}");
}

#[test]
fn the_journal_keeps_every_bit() {
    let e = Entry::new(6, 1e-3, vec![0, 1, 0x0001_0000], vec![0.1, -0.0, f32::from_bits(0x0000_0001)]);
    let back = Entry::parse(&e.to_line()).unwrap();
    assert_eq!(back, e);
    assert_eq!(back.coefficients[1].to_bits(), (-0.0f32).to_bits());
    for bad in ["", "step", "step x lr", "step 1 lr 0", "step 1 lr zz g", "step 1 lr 0 g 1"] {
        assert!(Entry::parse(bad).is_err(), "{bad}");
    }
}
