use super::attention::softmax;
use crate::{
    case::{Case, Expect},
    estimate::Est,
    host::HostTensor,
    model::{Blocks, FLOATS, Mat, TYPES, WEIGHTS, dot},
    rng::Rng,
    suite::Tests,
};
use zofo_hal::{
    DType, Uses,
    op::{ArgMax, CandidateScores, Copies, CrossEntropy, CrossEntropyBackward, NO_INDEX},
};

pub(super) fn tests(t: &mut Tests) {
    for types in &TYPES[..3] {
        for head in WEIGHTS {
            let name = format!("{}x{head}", types.name);
            t.cases(format!("cross_entropy/{name}/weight"), move |rng| losses(rng, types.x, head, true));
            t.cases(format!("cross_entropy/{name}/slope"), move |rng| slopes(rng, types.x, head, true));
            t.cases(format!("candidate_scores/{name}/weight"), move |rng| candidates(rng, types.x, head, true));
        }
        let x = types.x;
        t.cases(format!("cross_entropy/{x}/tensor"), move |rng| losses(rng, x, x, false));
        t.cases(format!("cross_entropy/{x}/tensor_slope"), move |rng| slopes(rng, x, x, false));
        t.cases(format!("candidate_scores/{x}/tensor"), move |rng| candidates(rng, x, x, false));
    }
    for dtype in FLOATS {
        t.cases(format!("cross_entropy_backward/{dtype}/rows"), move |rng| backwards(rng, dtype));
        t.cases(format!("argmax/{dtype}/ties"), move |rng| arg_maxes(rng, dtype));
    }
}

/// A head, some activations, and which of their rows carry labels; all other rows are unreadable.
struct Labelled {
    blocks: Blocks,
    h: HostTensor,
    head: HostTensor,
    rows: Vec<u32>,
    targets: Vec<u32>,
}

impl Labelled {
    fn random(rng: &mut Rng, x: DType, head: DType, copies: Copies, [t, d, vocabulary, labels]: [usize; 4], padding: usize) -> Self {
        let blocks = Blocks { copies, rows: t, live: None };
        let mut h = HostTensor::random(rng, x, blocks.total(), d, 1.0);
        let head = HostTensor::random(rng, head, vocabulary, d, 1.0);
        let mut rows = rng.distinct(labels, t);
        let mut targets: Vec<u32> = (0..labels).map(|_| rng.below(vocabulary) as u32).collect();
        rows.extend(vec![NO_INDEX; padding]);
        targets.extend(vec![0; padding]);
        for row in (0..blocks.total()).filter(|&r| !rows.contains(&(blocks.base(r) as u32))) {
            h.poison_row(row);
        }
        Self { blocks, h, head, rows, targets }
    }

    fn what(&self) -> String {
        format!(
            "d {}, vocabulary {}, {} labels and their padding, {}",
            self.h.cols,
            self.head.rows,
            self.rows.len(),
            self.blocks.describe()
        )
    }

    fn with_head(case: Case, head: HostTensor, uses: Option<Uses>) -> Case {
        match uses {
            Some(uses) => case.weight("head", head, uses),
            None => case.read("head", head),
        }
    }
}

fn logits(h: &Mat, row: usize, head: &Mat) -> Vec<Est> {
    (0..head.rows).map(|v| dot(h.cols, |i| h.at(row, i), |i| head.part(v, i)).done()).collect()
}

fn losses(rng: &mut Rng, x: DType, head: DType, weight: bool) -> Vec<Case> {
    let block = head.block().0;
    let mut cases = Vec::new();
    for (sizes, padding) in [([4, 20, 11, 0], 0), ([1, 1, 1, 1], 0), ([5, 37, 40, 3], 2), ([7, 64, 131, 3], 1)] {
        for copies in [Copies::BASE, Copies::value(2, true), Copies::value(1, false), Copies::tangent(2)] {
            let mut sizes: [usize; 4] = sizes;
            sizes[1] = sizes[1].next_multiple_of(block);
            let l = Labelled::random(rng, x, head, copies, sizes, padding);
            let (hm, wm) = (Mat::of(&l.h), Mat::met_by(&l.head, l.h.dtype));
            let (t, count) = (sizes[0], l.rows.len());
            let mut expect = Vec::new();
            for copy in 0..copies.total() {
                for (&row, &target) in l.rows.iter().zip(&l.targets) {
                    if row == NO_INDEX {
                        expect.push(Est::ZERO.into());
                        continue;
                    }
                    let (row, target) = (row as usize, target as usize);
                    let values = logits(&hm, if copies.is_tangent(copy) { row } else { copy * t + row }, &wm);
                    let (probabilities, log) = softmax(&values);
                    expect.push(Expect::Near(if copies.is_tangent(copy) {
                        let d = logits(&hm, copy * t + row, &wm);
                        Est::sum(probabilities.iter().zip(&d).map(|(&p, &d)| p * d)) - d[target]
                    } else {
                        log - values[target]
                    }));
                }
            }
            let case = Case::new(l.what(), move |a| {
                CrossEntropy::new(a.t("h"), a.t("rows"), a.t("targets"), a.m("head"), a.t("losses")).copies(copies)
            })
            .read("h", l.h)
            .read("rows", HostTensor::indices(&l.rows))
            .read("targets", HostTensor::indices(&l.targets));
            let case = Labelled::with_head(case, l.head, weight.then_some(Uses::FORWARD));
            cases.push(case.write("losses", DType::F32, copies.total(), count, expect));
        }
    }
    cases
}

/// Losses together with their gradients.
fn slopes(rng: &mut Rng, x: DType, head: DType, weight: bool) -> Vec<Case> {
    let block = head.block().0;
    let mut cases = Vec::new();
    // The last has more columns than a tile of any backend, and rows enough for several.
    for (sizes, padding) in [([4, 20, 11, 0], 1), ([1, 1, 1, 1], 0), ([5, 37, 40, 3], 2), ([7, 64, 131, 3], 0), ([20, 32, 417, 17], 1)] {
        let mut sizes: [usize; 4] = sizes;
        sizes[1] = sizes[1].next_multiple_of(block);
        let l = Labelled::random(rng, x, head, Copies::BASE, sizes, padding);
        let (hm, wm) = (Mat::of(&l.h), Mat::met_by(&l.head, l.h.dtype));
        let (d, count) = (sizes[1], l.rows.len());
        let (mut losses, mut slope): (Vec<Expect>, Vec<Expect>) = (Vec::new(), Vec::new());
        for (&row, &target) in l.rows.iter().zip(&l.targets) {
            if row == NO_INDEX {
                losses.push(Est::ZERO.into());
                slope.extend((0..d).map(|_| Expect::from(Est::ZERO)));
                continue;
            }
            let (values, target) = (logits(&hm, row as usize, &wm), target as usize);
            let (p, log) = softmax(&values);
            losses.push((log - values[target]).into());
            slope.extend((0..d).map(|c| Expect::from(dot(wm.rows, |v| p[v], |v| wm.part(v, c)).done() - wm.at(target, c))));
        }
        let case = Case::new(l.what(), |a| {
            CrossEntropy::new(a.t("h"), a.t("rows"), a.t("targets"), a.m("head"), a.t("losses")).slope(a.t("slope"))
        })
        .read("h", l.h)
        .read("rows", HostTensor::indices(&l.rows))
        .read("targets", HostTensor::indices(&l.targets));
        let case = Labelled::with_head(case, l.head, weight.then_some(Uses::TRAINING));
        cases.push(case.write("losses", DType::F32, 1, count, losses).write("slope", DType::F32, count, d, slope));
    }
    cases
}

fn backwards(rng: &mut Rng, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (t, d, labels, padding) in [(4, 20, 0, 1), (1, 1, 1, 0), (5, 37, 3, 2), (7, 64, 7, 0)] {
        let mut slope = HostTensor::random(rng, DType::F32, labels + padding, d, 1.0);
        (labels..labels + padding).for_each(|row| slope.poison_row(row));
        let mut rows = rng.distinct(labels, t);
        rows.extend(vec![NO_INDEX; padding]);
        let (m, scale) = (Mat::of(&slope), 0.3f32);
        let place = |r: usize| rows.iter().position(|row| *row as usize == r);
        let at = |r: usize, c: usize| place(r).map_or(Est::ZERO, |i| m.at(i, c) * Est::from(f64::from(scale)));
        let expect = (0..t).flat_map(|r| (0..d).map(move |c| (r, c))).map(|(r, c)| at(r, c).into()).collect();
        let what = format!("[{t}, {d}], {labels} labels and {padding} rows of padding");
        cases.push(
            Case::new(what, |a| CrossEntropyBackward::new(a.t("slope"), a.t("rows"), a.t("scale"), a.t("dh")))
                .read("slope", slope)
                .read("rows", HostTensor::indices(&rows))
                .read("scale", HostTensor::f32s(&[scale]))
                .write("dh", out, t, d, expect),
        );
    }
    cases
}

fn candidates(rng: &mut Rng, x: DType, head: DType, weight: bool) -> Vec<Case> {
    let block = head.block().0;
    let mut cases = Vec::new();
    for (sizes, k) in [([4, 20, 11, 0], 2), ([3, 20, 11, 2], 0), ([1, 1, 1, 1], 1), ([5, 37, 40, 3], 4), ([6, 64, 99, 6], 7)] {
        let mut sizes: [usize; 4] = sizes;
        sizes[1] = sizes[1].next_multiple_of(block);
        let l = Labelled::random(rng, x, head, Copies::BASE, sizes, 0);
        let choice: Vec<u32> = (0..k).map(|_| rng.below(sizes[2]) as u32).collect();
        let (hm, wm) = (Mat::of(&l.h), Mat::of(&l.head));
        let pairs = l.rows.iter().flat_map(|&r| choice.iter().map(move |&c| (r as usize, c as usize)));
        let expect = pairs.map(|(r, c)| dot(sizes[1], |i| hm.at(r, i), |i| wm.part(c, i)).done().into()).collect();
        let case = Case::new(l.what(), |a| CandidateScores::new(a.t("h"), a.t("rows"), a.t("candidates"), a.m("head"), a.t("out")))
            .read("h", l.h)
            .read("rows", HostTensor::indices(&l.rows))
            .read("candidates", HostTensor::indices(&choice));
        let gather = Uses { gather: true, ..Uses::default() };
        cases.push(Labelled::with_head(case, l.head, weight.then_some(gather)).write("out", DType::F32, l.rows.len(), k, expect));
    }
    cases
}

fn arg_maxes(rng: &mut Rng, dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols) in [(0, 0), (0, 5), (1, 1), (6, 7), (5, 300)] {
        // Few distinct values, so that there are ties; a NaN in some rows.
        let x = HostTensor::from_fn(dtype, rows, cols, |r, c| match (r, c) {
            (1 | 4, c) if c == cols / 2 || c == cols - 1 => f64::NAN,
            _ => rng.below(4) as f64 - 2.0,
        });
        let values = x.values();
        let best = |row: &[f64]| {
            let better = |best: usize, c: usize| !row[best].is_nan() && (row[c].is_nan() || row[c] > row[best]);
            (1..row.len()).fold(0, |best, c| if better(best, c) { c } else { best })
        };
        let expect = values.chunks(cols.max(1)).map(|row| Expect::Near((best(row) as f64).into())).collect();
        cases.push(Case::new(format!("[{rows}, {cols}]"), |a| ArgMax::new(a.t("x"), a.t("out"))).read("x", x).write(
            "out",
            DType::U32,
            1,
            rows,
            expect,
        ));
    }
    cases
}
