//! Losses together with their gradients: one pass of the head.
//!
//! The gradient of a loss is the mean of the head's rows under the softmax, less the target's row. Its sum over the vocabulary is kept relative to the
//! largest logit so far and taken down when a larger one comes, as attention does with its values (Milakov and Gimelshein 2018, Dao et al. 2022), so
//! logits need not be formed a second time once their sum is known.
//!
//! The rows of a head have much in common, which the gradient does not have: it is `sum_v p_v (W_v - W[target])`. So the target's row is taken away
//! as the others are added, tile by tile, and is left out itself. What is summed stays as small as what becomes of it.

use super::{Entries, Labels, largest, rescale};
use crate::{
    gemm::{Extent, Left, MT, NC, NR, Packing, PackingSlabs, Right, Tile, product},
    isa::tiered,
    kernels::Context,
    math,
    scratch::{Carver, Slab, Slabs},
    view::Mat,
};
use core::cmp::min;
use zofo_hal::{DType, Operand, Result, TensorArg, op::CrossEntropy};

pub(super) struct SlopeScratch {
    places: Slab<u32>,
    logits: Slabs<f32>,
    /// Weighted sums of the head's rows, and the rows of the targets.
    sums: [Slabs<f32>; 2],
    /// Per row: the maximum, the sum of exponentials below it but for the target's, the target's logit.
    state: Slabs<[f64; 3]>,
    pointers: Slabs<*const u8>,
    packing: PackingSlabs,
}

pub(super) fn scratch<T: Operand>(op: &CrossEntropy<T>, threads: usize, c: &mut Carver<'_>) -> SlopeScratch {
    let (labels, d) = (op.rows.spec().cols, op.h.spec().cols);
    let m = labels.min(MT);
    SlopeScratch {
        places: c.shared(labels),
        logits: c.workers(threads, m * NC),
        sums: [0; 2].map(|_| c.workers(threads, m * d.next_multiple_of(NR))),
        state: c.workers(threads, m),
        pointers: c.workers(threads, m),
        packing: Packing::carve(c, threads, m, NC),
    }
}

tiered! {
    /// Logits of columns `n0 ..` become exponentials below the largest of their row so far; what was summed below another moves down with it, and
    /// the target's row, as often as others come, is taken away.
    fn exponentials(tile: Tile, rows: [Tile; 2], state: Slab<[f64; 3]>, first: usize, count: usize, n0: usize, n: usize, labels: Labels) {
        let [sums, targets] = rows;
        for j in 0..count {
            let (_, _, target) = labels.at(first + j);
            // Safety: tiles and state are this thread's.
            let (x, state) = unsafe { (&mut tile.row(j)[..n], &mut state.part(j, 1).get_mut()[0]) };
            let here = (n0..n0 + n).contains(&target).then(|| target - n0);
            if let Some(at) = here {
                state[2] = x[at].into();
            }
            let [old, before] = if n0 == 0 { [f64::NEG_INFINITY, 0.0] } else { [state[0], state[1]] };
            let max = old.max(largest(x).into());
            let shift = max as f32;
            x.iter_mut().for_each(|x| *x = math::exp(*x - shift));
            if let Some(at) = here {
                x[at] = 0.0;
            }
            let others = math::sum(n, |i| x[i]);
            let shrink = rescale(old, max);
            *state = [max, before * shrink + f64::from(others), state[2]];
            // Safety: as above.
            let (sums, target) = unsafe { (sums.row(j), &*targets.row(j)) };
            match n0 {
                0 => sums.iter_mut().zip(target).for_each(|(s, t)| *s = -others * *t),
                _ => sums.iter_mut().zip(target).for_each(|(s, t)| *s = *s * shrink as f32 - others * *t),
            }
        }
    }
}

/// As [`super::cross_entropy`], with the slope into `out`.
///
/// # Safety
/// As for [`crate::kernels::run`].
pub(super) unsafe fn losses_and_slope(op: &CrossEntropy<TensorArg>, out: &TensorArg, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (h, rows, targets, losses) = unsafe { (Mat::of(&op.h)?, Mat::of(&op.rows)?, Mat::of(&op.targets)?, Mat::of(&op.losses)?) };
    // Safety: as above.
    let (out, entries) = unsafe { (Mat::of(out)?, Entries::of(&op.head)?) };
    // Safety: as above.
    let (forth, back) = unsafe { (Right::of(&op.head, false)?, Right::of(&op.head, true)?) };
    let [vocabulary, d] = op.head.shape();
    let s = scratch(op, cx.pool.threads(), &mut cx.carver());
    // Safety: the slab is this op's.
    let labels = unsafe { Labels::new(rows, targets, s.places, h.rows, vocabulary)? };
    losses.zero_row(0);
    cx.pool.split(out.rows, d, &|rows, _| rows.for_each(|r| out.zero_row(r)));
    if labels.len() == 0 {
        return Ok(());
    }
    let small = labels.len() * vocabulary * d < 1 << 20;
    let threads = if small { 1 } else { cx.pool.threads() };
    let rounds = labels.len().div_ceil(threads * MT);
    let per_task = labels.len().div_ceil(threads * rounds);
    // A task streams the whole head past its rows: nothing else keeps one chain of additions per element without a matrix of logits.
    cx.pool.run(labels.len().div_ceil(per_task), &|task, worker| {
        let first = task * per_task;
        let count = min(per_task, labels.len() - first);
        let (logits, packing, state) = (s.logits.of(worker), s.packing.of(worker), s.state.of(worker));
        let [sums, wanted] = s.sums.map(|s| Tile { acc: s.of(worker), ld: d.next_multiple_of(NR) });
        // Safety: slabs are the worker's; the head is read only; places in the list are distinct, so tasks write different rows.
        unsafe {
            (0..count).for_each(|j| entries.load(labels.at(first + j).2, &mut wanted.row(j)[..d]));
            let pointers = s.pointers.of(worker).part(0, count).get_mut();
            for n0 in (0..vocabulary).step_by(NC) {
                let n = min(NC, vocabulary - n0);
                let tile = Tile { acc: logits, ld: n.next_multiple_of(NR) };
                pointers.iter_mut().enumerate().for_each(|(j, p)| *p = h.at(labels.at(first + j).1, 0));
                let e = Extent { m: count, n0, n, k: d, right_k: 0, fresh: true };
                product(cx.gemm, &Left::Rows { rows: pointers, dtype: h.dtype }, &forth, e, tile, &packing);
                exponentials(cx.tier, tile, [sums, wanted], state, first, count, n0, n, labels);
                pointers.iter_mut().enumerate().for_each(|(j, p)| *p = tile.row(j).as_ptr().cast());
                let e = Extent { m: count, n0: 0, n: d, k: n, right_k: n0, fresh: false };
                product(cx.gemm, &Left::Rows { rows: pointers, dtype: DType::F32 }, &back, e, sums, &packing);
            }
            for (j, [max, others, logit]) in state.get()[..count].iter().enumerate() {
                let place = labels.at(first + j).0;
                let sum = others + libm::exp(logit - max);
                losses.store(0, place, &[(max + libm::log(sum) - logit) as f32]);
                let (slope, inverse) = (&mut sums.row(j)[..d], (1.0 / sum) as f32);
                slope.iter_mut().for_each(|s| *s *= inverse);
                out.store(place, 0, slope);
            }
        }
    });
    Ok(())
}
