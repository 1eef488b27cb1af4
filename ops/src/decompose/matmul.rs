//! Matrix products: plain, with LoRA, and with perturbed LoRA.

use super::emit::{Constant, Emit, Rows, View, pieces};
use zofo_hal::{
    Matrix, Result,
    op::{Form, LoraMatMul, MatMul, Orientation, Perturb, PerturbLoraMatMul},
    perturb::Site,
};

/// Columns of a product that go through the transposed weight at a time.
const TRANSPOSE_PIECE: usize = 128;

/// `a W` on a device that has only `x W^T`, or with a weight that was imported for that alone: rows of W^T come from `I W^T`, exactly.
pub(super) fn matmul<E: Emit>(e: &mut E, op: &MatMul<E::T>) -> Option<Result<()>> {
    (op.orientation == Orientation::Nn && matches!(op.b, Matrix::Weight(_))).then(|| through_transpose(e, op))
}

fn through_transpose<E: Emit>(e: &mut E, op: &MatMul<E::T>) -> Result<()> {
    let [k, n] = op.b.shape();
    let identity = e.constant(Constant::Identity(TRANSPOSE_PIECE))?;
    for (first, cols) in pieces(n, TRANSPOSE_PIECE) {
        let selection = e.zeros(cols, n)?;
        e.copy(&identity.rows_of(0, cols).cols_of(0, cols), &selection.cols_of(first, cols), &Rows::all())?;
        let transposed = e.f32(cols, k)?;
        e.product(Orientation::Nt, &selection, op.b.clone(), &transposed, (1.0, 0.0), &None)?;
        let part = MatMul::new(op.a.clone(), transposed.matrix(), op.out.cols_of(first, cols), Orientation::Nt);
        let bias = op.bias.as_ref().map(|b| b.cols_of(first, cols));
        e.emit(part.bias(bias).live(op.live.clone()).alpha(op.alpha).beta(op.beta).copies(op.copies))?;
    }
    Ok(())
}

pub(super) fn lora_matmul<E: Emit>(e: &mut E, op: &LoraMatMul<E::T>) -> Result<()> {
    let rows = Rows::blocks(&op.live, op.copies.total());
    let xa = e.f32(op.x.size().0, op.a.size().0)?;
    let nt = |a: &E::T, b: Matrix<E::T>, out: &E::T| {
        MatMul::new(a.clone(), b, out.clone(), Orientation::Nt).live(op.live.clone()).copies(op.copies)
    };
    e.emit(nt(&op.x, op.a.matrix(), &xa))?;
    let sum = e.accumulator(&op.out)?;
    e.emit(nt(&op.x, op.w.clone(), &sum).bias(op.bias.clone()))?;
    e.emit(nt(&xa, op.b.matrix(), &sum).alpha(op.scale).beta(1.0))?;
    e.finish(&sum, &op.out, &rows)?;
    op.xa.as_ref().map_or(Ok(()), |out| e.copy(&xa, out, &rows))
}

/// `factor + eps z` of copy `copy`, in f32, or the factor itself where it is not perturbed.
fn perturbed<E: Emit>(e: &mut E, noise: &E::T, factor: &E::T, site: Option<Site>, copy: u32) -> Result<E::T> {
    let Some(site) = site else { return Ok(factor.clone()) };
    let out = e.f32_like(factor)?;
    e.emit(Perturb::new(noise.clone(), out.clone(), site).a(factor.clone()).copy(copy))?;
    Ok(out)
}

/// z of copy `copy`.
fn direction<E: Emit>(e: &mut E, noise: &E::T, factor: &E::T, site: Site, copy: u32) -> Result<E::T> {
    let out = e.f32_like(factor)?;
    e.emit(Perturb::new(noise.clone(), out.clone(), site).copy(copy))?;
    Ok(out)
}

/// z takes device memory here, one factor of one copy at a time.
pub(super) fn perturb_lora_matmul<E: Emit>(e: &mut E, op: &PerturbLoraMatMul<E::T>) -> Result<()> {
    const NT: Orientation = Orientation::Nt;
    let (copies, live) = (op.copies, &op.live);
    let t = op.out.size().0 / copies.total();
    let (one, all) = (Rows::live(live), Rows::blocks(live, copies.total()));
    let block = |x: &E::T, b: usize| x.rows_of(b * t, t);
    let x = |b: usize| if op.shared_input { op.x.clone() } else { block(&op.x, b) };
    let (value, sum) = (copies.form == Form::Value, e.accumulator(&op.out)?);

    let base = MatMul::new(op.x.clone(), op.w.clone(), sum.clone(), NT).bias(op.bias.clone()).live(live.clone());
    if op.shared_input {
        let mut base = base;
        base.out = if copies.has_base { block(&sum, 0) } else { e.f32(t, op.out.size().1)? };
        let product = base.out.clone();
        e.emit(base)?;
        for b in copies.first_copy()..if value { copies.total() } else { 0 } {
            e.copy(&product, &block(&sum, b), &one)?;
        }
    } else {
        e.emit(base.copies(copies))?;
    }

    let xa = e.f32(t, op.a.size().0)?;
    if copies.has_base {
        e.product(NT, &x(0), op.a.matrix(), &xa, (1.0, 0.0), live)?;
        e.product(NT, &xa, op.b.matrix(), &block(&sum, 0), (op.scale, 1.0), live)?;
    }
    for copy in 0..copies.count {
        let b = copies.first_copy() + copy as usize;
        let (out, low) = (block(&sum, b), e.f32(t, op.a.size().0)?);
        if value {
            let factor_a = perturbed(e, &op.noise, &op.a, op.site_a, copy)?;
            e.product(NT, &x(b), factor_a.matrix(), &low, (1.0, 0.0), live)?;
            let factor_b = perturbed(e, &op.noise, &op.b, op.site_b, copy)?;
            e.product(NT, &low, factor_b.matrix(), &out, (op.scale, 1.0), live)?;
            continue;
        }
        // With a shared input dx = 0: its terms are left out, and the first of the others replaces what `out` and `low` hold.
        let mut kept = if op.shared_input { 0.0 } else { 1.0 };
        if !op.shared_input {
            e.product(NT, &x(b), op.a.matrix(), &low, (1.0, 0.0), live)?;
        }
        if let Some(site) = op.site_a {
            let z = direction(e, &op.noise, &op.a, site, copy)?;
            e.product(NT, &x(0), z.matrix(), &low, (1.0, kept), live)?;
        }
        if !op.shared_input || op.site_a.is_some() {
            e.product(NT, &low, op.b.matrix(), &out, (op.scale, kept), live)?;
            kept = 1.0;
        }
        if let Some(site) = op.site_b {
            let z = direction(e, &op.noise, &op.b, site, copy)?;
            e.product(NT, &xa, z.matrix(), &out, (op.scale, kept), live)?;
            kept = 1.0;
        }
        if kept == 0.0 {
            let zeros = e.zeros(t, out.size().1)?;
            e.copy(&zeros, &out, &one)?;
        }
    }
    e.finish(&sum, &op.out, &all)?;
    op.xa.as_ref().map_or(Ok(()), |out| e.copy(&xa, out, &one))
}
