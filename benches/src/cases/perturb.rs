//! Numbers z: each tier of the generator on one thread, and the op on a device.

use crate::{Case, Id, Run, Subject, Unit, Work};
use std::hint::black_box;
use zofo_hal::{
    DType,
    op::Perturb,
    perturb::{Direction, Distribution, Factor, Noise, Projection, Site, TensorId, Tier},
};

/// Numbers at a time: they stay in the nearest cache but one.
const COUNT: usize = 1 << 16;
/// What the op perturbs.
const SHAPE: [usize; 2] = [2048, 576];

fn site(cols: usize) -> zofo_hal::Result<Site> {
    Ok(Site::new(TensorId::new(0, Projection::Q, Factor::A)?, cols as u32))
}

/// So many numbers; the traffic of writing them does not count.
fn work(count: usize) -> Work {
    Work::bytes(0).per(Unit::Elements(count as u64))
}

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (op, distribution) in [("gaussian", Distribution::Gaussian), ("rademacher", Distribution::Rademacher)] {
        let group = Id::group(op, "f32", &[COUNT]);
        for tier in Tier::available() {
            cases.push(Case::new(&group, format!("zofo-hal-{tier}"), work(COUNT), move || {
                let noise = Noise::new(1, 0, Direction::default(), site(COUNT)?.with(distribution), tier);
                let mut values = vec![0.0f32; COUNT];
                let run: Run = Box::new(move || {
                    noise.z_into(0, 0, &mut values);
                    black_box(&values);
                    Ok(())
                });
                Ok(run)
            }));
        }
        #[cfg(feature = "peers")]
        if distribution == Distribution::Gaussian {
            cases.push(Case::new(&group, "rand_distr", work(COUNT), || crate::peers::normals::prepare(COUNT)));
        }
    }
    let [rows, cols] = SHAPE;
    for s in subjects {
        cases.extend(s.op(&Id::group("perturb", "f32", &SHAPE), "", work(rows * cols), move |lab| {
            let (noise, a) = (lab.noise()?, lab.normals(DType::F32, rows, cols)?);
            Ok(Perturb::new(noise, lab.output(DType::F32, rows, cols)?, site(cols)?).a(a).into())
        }));
    }
    cases
}
