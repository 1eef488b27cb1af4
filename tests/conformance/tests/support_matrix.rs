//! `docs/ops.md` says what the devices say.

use std::{env, fs, path::Path};
use zofo_conformance::support_matrix;
use zofo_cpu::{CpuDevice, CpuOptions};
use zofo_hal::{Allow, DeviceRef, Restricted, reference::Reference};

const HEADING: &str = "\
# Which device runs which op

Generated from what the devices answer; `UPDATE_DOCS=1 cargo test -p zofo-conformance --test support_matrix` writes it anew. What an op
computes is in the documentation of `zofo_hal::op`. A composite op that a device lacks is decomposed by `zofo-ops` into primitives that it
has, so \u{2013} is not the last word for a model: it is the device's own answer.

\"Forward only\" and \"primitives only\" are the reference device behind `zofo_hal::Restricted`: what an accelerator without backward ops, and
one with nothing but primitives, looks like.

";

#[test]
fn the_page_is_up_to_date() {
    let devices: [(&str, DeviceRef); 4] = [
        ("reference", Reference::new()),
        ("forward only", Restricted::new(Reference::new(), Allow::Forward, "forward only")),
        ("primitives only", Restricted::new(Reference::new(), Allow::Primitives, "primitives only")),
        ("cpu", CpuDevice::new(CpuOptions::default()).unwrap()),
    ];
    let page = format!("{HEADING}{}", support_matrix(&devices));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ops.md");
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(committed, page, "docs/ops.md is out of date: run this test with UPDATE_DOCS=1 and commit the page");
}
