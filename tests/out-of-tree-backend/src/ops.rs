//! What runs here, and how. `supports` answers from the same match as `run`, so that asking and running cannot drift.

use crate::{buffer::ToyBuffer, device::ToyWeight};
use zofo_hal::{
    DType, Error, Lacking, Matrix, Op, Operand, Result, Support, TensorArg, TensorSpec,
    op::{Copies, GatherRows, MatMul, NO_INDEX, OperandRef, Orientation, ScaledAdd},
};

/// Whether the device runs `op`. The vocabulary grows: what is unknown is unsupported.
pub(crate) fn supports(op: &Op<TensorSpec>) -> Support {
    match op {
        Op::Copy(_) | Op::Fill(_) | Op::GatherRows(_) | Op::ScaledAdd(_) | Op::MatMul(_) => {}
        _ => return Support::lacking(Lacking::Op, format!("toy has no {}", op.name())),
    }
    let mut odd = None;
    op.visit(&mut |name, _, operand| {
        if let OperandRef::Tensor(t) = operand
            && !matches!(t.dtype, DType::F32 | DType::U32)
        {
            odd.get_or_insert((name, t.dtype));
        }
    });
    match odd {
        Some((name, dtype)) => Support::lacking(Lacking::DType, format!("{name} is {dtype}, toy computes in f32")),
        None => Support::Native,
    }
}

/// Runs an op that passed every check. An error here is one that only running could find.
pub(crate) fn run(op: &Op<TensorArg>) -> Result<()> {
    match op {
        Op::Copy(op) => write(&op.dst, &read(&op.src)?),
        Op::Fill(op) => {
            let word = if op.dst.spec.dtype == DType::U32 { op.value as u32 } else { op.value.to_bits() };
            write(&op.dst, &vec![word; op.dst.spec.len()])
        }
        Op::GatherRows(op) => gather_rows(op),
        Op::ScaledAdd(op) => scaled_add(op),
        Op::MatMul(op) => matmul(op),
        _ => Err(Error::execution("an op that supports() refuses was run")),
    }
}

/// The elements of a tensor, row-major and without gaps.
fn read(t: &TensorArg) -> Result<Vec<u32>> {
    Ok(ToyBuffer::of(&t.buffer)?.read(|bytes| {
        let row = |r: usize| {
            let start = t.offset + 4 * r * t.spec.stride;
            bytes[start..start + 4 * t.spec.cols].as_chunks().0.iter().map(|&b| u32::from_le_bytes(b))
        };
        // An empty tensor may lie anywhere, even past the end.
        (0..t.spec.rows).filter(|_| t.spec.cols > 0).flat_map(row).collect()
    }))
}

fn read_f32(t: &TensorArg) -> Result<Vec<f32>> {
    Ok(read(t)?.into_iter().map(f32::from_bits).collect())
}

/// The counterpart of [`read`]; gaps between rows are left alone.
fn write(t: &TensorArg, values: &[u32]) -> Result<()> {
    ToyBuffer::of(&t.buffer)?.write(|bytes| {
        for (r, row) in values.chunks(t.spec.cols.max(1)).enumerate() {
            let start = t.offset + 4 * r * t.spec.stride;
            bytes[start..start + 4 * row.len()].copy_from_slice(bytemuck::cast_slice(row));
        }
    });
    Ok(())
}

/// Writes row `r` alone.
fn write_row(t: &TensorArg, r: usize, values: impl Iterator<Item = f32>) -> Result<()> {
    write(&t.rows(r, 1), &values.map(f32::to_bits).collect::<Vec<_>>())
}

/// The rows that count: of `rows` rows in `blocks` blocks, the first `live` of each.
fn live_rows(live: &Option<TensorArg>, rows: usize, blocks: usize) -> Result<impl Iterator<Item = usize> + use<>> {
    let block = rows / blocks;
    let count = match live {
        Some(t) => read(t)?[0] as usize,
        None => block,
    };
    if count > block {
        return Err(Error::execution(format!("live is {count}, a block has {block} rows")));
    }
    Ok((0..rows).filter(move |r| r % block < count))
}

fn gather_rows(op: &GatherRows<TensorArg>) -> Result<()> {
    let (src, cols) = (read(&op.src)?, op.src.spec.cols);
    let mut out = Vec::with_capacity(op.out.spec.len());
    for (i, index) in read(&op.index)?.into_iter().enumerate() {
        match index as usize {
            _ if index == NO_INDEX => out.extend(vec![0; cols]),
            row if row < op.src.spec.rows => out.extend_from_slice(&src[row * cols..(row + 1) * cols]),
            row => return Err(Error::execution(format!("index {i} is {row}, src has {} rows", op.src.spec.rows))),
        }
    }
    write(&op.out, &out)
}

fn scaled_add(op: &ScaledAdd<TensorArg>) -> Result<()> {
    let [rows, cols] = op.out.spec.shape();
    let a = read_f32(&op.a)?;
    let b = op.b.as_ref().map(|t| Ok((read_f32(t)?, t.spec))).transpose()?;
    for r in live_rows(&op.live, rows, op.blocks)? {
        let right = |c: usize| match &b {
            None => 0.0,
            Some((b, spec)) => {
                let (r, c) = (if spec.rows == 1 { 0 } else { r }, if spec.cols == 1 { 0 } else { c });
                b[r * spec.cols + c]
            }
        };
        // Each operation is rounded by itself: no fused multiply-add.
        let row: Vec<f32> = (0..cols).map(|c| op.alpha * a[r * cols + c] + op.beta * right(c) + op.gamma).collect();
        write_row(&op.out, r, row.into_iter())?;
    }
    Ok(())
}

fn matmul(op: &MatMul<TensorArg>) -> Result<()> {
    let [m, n] = op.out.spec.shape();
    let a = read_f32(&op.a)?;
    let b = match &op.b {
        Matrix::Tensor(t) => read_f32(t)?,
        Matrix::Weight(w) => ToyWeight::of(w)?.values.clone(),
    };
    let bias = op.bias.as_ref().map(read_f32).transpose()?;
    let before = if op.beta == 0.0 { vec![0.0; m * n] } else { read_f32(&op.out)? };
    let [a_cols, b_cols] = [op.a.spec().cols, op.b.shape()[1]];
    let tn = op.orientation == Orientation::Tn;
    let blocks = op.copies.total();
    // For `Tn` the packed rows are what is summed over, for the others they are the rows of the result.
    let (rows, sum): (Vec<usize>, Vec<usize>) = match tn {
        true => ((0..m).collect(), live_rows(&op.live, op.a.spec.rows, blocks)?.collect()),
        false => (live_rows(&op.live, m, blocks)?.collect(), (0..a_cols).collect()),
    };
    for r in rows {
        let biased = tn || !is_tangent(op.copies, r, m);
        let element = |c: usize| {
            let term = |k: usize| match op.orientation {
                Orientation::Nt => a[r * a_cols + k] * b[c * b_cols + k],
                Orientation::Nn => a[r * a_cols + k] * b[k * b_cols + c],
                Orientation::Tn => a[k * a_cols + r] * b[k * b_cols + c],
            };
            // In ascending order, whatever the number of rows: that is row invariance.
            let product: f32 = sum.iter().map(|&k| term(k)).sum();
            let bias = bias.as_ref().filter(|_| biased).map_or(0.0, |b| b[c]);
            op.alpha * product + op.beta * before[r * n + c] + bias
        };
        let row: Vec<f32> = (0..n).map(element).collect();
        write_row(&op.out, r, row.into_iter())?;
    }
    Ok(())
}

fn is_tangent(copies: Copies, row: usize, rows: usize) -> bool {
    copies.is_tangent(row / (rows / copies.total()))
}
