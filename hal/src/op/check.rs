//! Checks that op descriptors share.

use super::{Access, Copies, Form, Op, OperandRef};
use crate::{DType, Error, Home, Matrix, MemorySpace, Operand, QueueId, Result, TensorArg, TensorSpec};
use alloc::format;

/// `tensor` called `name` has this shape.
pub(crate) fn shape<T: Operand>(name: &str, tensor: &T, rows: usize, cols: usize) -> Result<()> {
    let s = tensor.spec();
    s.check().map_err(|e| e.context(name))?;
    if s.shape() != [rows, cols] {
        return Err(Error::invalid(format!("{name} is {s:?}, expected [{rows}, {cols}]")));
    }
    Ok(())
}

/// As [`shape`], of a float type.
pub(crate) fn float<T: Operand>(name: &str, tensor: &T, rows: usize, cols: usize) -> Result<()> {
    shape(name, tensor, rows, cols)?;
    if !tensor.spec().dtype.is_float() {
        return Err(Error::invalid(format!("{name} is {:?}, expected a float type", tensor.spec())));
    }
    Ok(())
}

/// As [`shape`], of type `dtype`.
pub(crate) fn typed<T: Operand>(name: &str, tensor: &T, dtype: DType, rows: usize, cols: usize) -> Result<()> {
    shape(name, tensor, rows, cols)?;
    if tensor.spec().dtype != dtype {
        return Err(Error::invalid(format!("{name} is {:?}, expected {dtype}", tensor.spec())));
    }
    Ok(())
}

/// A contiguous u32 vector of `n` indices.
pub(crate) fn indices<T: Operand>(name: &str, tensor: &T, n: usize) -> Result<()> {
    typed(name, tensor, DType::U32, 1, n)
}

/// The u32 scalar that holds the number of live rows.
pub(crate) fn live<T: Operand>(tensor: &Option<T>) -> Result<()> {
    tensor.as_ref().map_or(Ok(()), |t| typed("live", t, DType::U32, 1, 1))
}

/// An optional float tensor.
pub(crate) fn float_opt<T: Operand>(name: &str, tensor: &Option<T>, rows: usize, cols: usize) -> Result<()> {
    tensor.as_ref().map_or(Ok(()), |t| float(name, t, rows, cols))
}

/// A matrix of this shape: float tensor or any weight.
pub(crate) fn matrix<T: Operand>(name: &str, m: &Matrix<T>, rows: usize, cols: usize) -> Result<()> {
    match m {
        Matrix::Tensor(t) => float(name, t, rows, cols),
        Matrix::Weight(_) if m.shape() == [rows, cols] => Ok(()),
        Matrix::Weight(_) => Err(Error::invalid(format!("{name} is a {} weight {:?}, expected [{rows}, {cols}]", m.dtype(), m.shape()))),
    }
}

/// Rows of one block of an activation with `rows` rows.
pub(crate) fn block_rows(name: &str, rows: usize, copies: Copies) -> Result<usize> {
    if copies.form == Form::Tangent && !copies.has_base {
        return Err(Error::invalid("tangent form needs its base block"));
    }
    match copies.total() {
        0 => Err(Error::invalid("copies without a base and without a copy")),
        n if rows.is_multiple_of(n) => Ok(rows / n),
        n => Err(Error::invalid(format!("{name} has {rows} rows, not a multiple of {n} copies"))),
    }
}

fn overlaps(a: &TensorArg, b: &TensorArg) -> bool {
    if !alloc::sync::Arc::ptr_eq(&a.buffer, &b.buffer) || a.spec.is_empty() || b.spec.is_empty() {
        return false;
    }
    let (x, y) = (a.byte_range(), b.byte_range());
    if x.start >= y.end || y.start >= x.end {
        return false;
    }
    // Blocks of columns of one matrix interleave in memory without touching: same row pitch, disjoint columns.
    let pitch = a.spec.stride * a.spec.dtype.block().1;
    if pitch == b.spec.stride * b.spec.dtype.block().1 && pitch > 0 {
        let columns = |t: &TensorArg| (t.offset % pitch, t.offset % pitch + t.spec.cols * t.spec.dtype.block().1);
        let ((s, e), (u, v)) = (columns(a), columns(b));
        if e <= pitch && v <= pitch && (e <= u || v <= s) {
            return false;
        }
    }
    true
}

fn same(a: &TensorArg, b: &TensorArg) -> bool {
    a.offset == b.offset && a.spec == b.spec
}

/// Ranges, alignment, homes and overlap of a whole op.
pub(crate) fn operands(op: &Op<TensorArg>, queue: QueueId, space: MemorySpace) -> Result<()> {
    let mut result = Ok(());
    op.visit(&mut |name, access, operand| {
        if result.is_ok() {
            result = match operand {
                OperandRef::Tensor(t) => tensor(name, access, t, queue, space).and_then(|()| {
                    let mut r = Ok(());
                    if access.writes() {
                        op.visit(&mut |other, other_access, o| {
                            if let OperandRef::Tensor(o) = o
                                && r.is_ok()
                                && !core::ptr::eq(o, t)
                                && overlaps(t, o)
                            {
                                let allowed = !other_access.writes() && same(t, o) && op.may_alias(name, other);
                                if !allowed {
                                    r = Err(Error::invalid(format!("{name} overlaps {other}")));
                                }
                            }
                        });
                    }
                    r
                }),
                OperandRef::Weight(w) if w.space() != space => Err(Error::new(
                    crate::ErrorKind::ForeignBuffer,
                    format!("{name} is a weight in {:?}, the queue works in {space:?}", w.space()),
                )),
                OperandRef::Weight(_) => Ok(()),
            };
        }
    });
    result
}

fn tensor(name: &str, access: Access, t: &TensorArg, queue: QueueId, space: MemorySpace) -> Result<()> {
    let s: TensorSpec = t.spec;
    let buffer = &t.buffer;
    s.check().map_err(|e| e.context(name))?;
    if buffer.space() != space {
        let m = format!("{name} is in {:?}, the queue works in {space:?}", buffer.space());
        return Err(Error::new(crate::ErrorKind::ForeignBuffer, m));
    }
    if !t.offset.is_multiple_of(s.dtype.block().1) {
        return Err(Error::invalid(format!("{name} starts at byte {}, which is misaligned for {}", t.offset, s.dtype)));
    }
    // An empty tensor touches nothing, so views of one may start anywhere.
    if !s.is_empty() && t.offset.checked_add(s.span_bytes()).is_none_or(|end| end > buffer.bytes()) {
        return Err(Error::invalid(format!("{name} {s:?} at byte {} does not fit its buffer of {} bytes", t.offset, buffer.bytes())));
    }
    match buffer.home() {
        Home::Frozen if access.writes() => Err(Error::invalid(format!("{name} is written but its buffer is frozen"))),
        Home::Queue(home) if home != queue => {
            Err(Error::invalid(format!("{name} belongs to {home:?}, not to {queue:?}: hand it over first")))
        }
        _ => Ok(()),
    }
}

impl Op<TensorArg> {
    /// Whether the written operand `out` may be exactly the operand `input`.
    fn may_alias(&self, out: &str, input: &str) -> bool {
        let pairs: &[(&str, &str)] = match self {
            Op::Mul(op) if op.accumulate => &[],
            Op::ScaledAdd(_) | Op::Mul(_) => &[("out", "a"), ("out", "b")],
            Op::Map(_) | Op::Rope(_) => &[("out", "x")],
            Op::MaskedSoftmax(_) => &[("out", "scores")],
            Op::Perturb(_) => &[("out", "a")],
            Op::RmsNorm(_) => &[("sum", "x"), ("sum", "residual")],
            Op::SwiGlu(_) => &[("out", "gate"), ("out", "up")],
            Op::RmsNormBackward(_) => &[("dx", "dresidual")],
            Op::SwiGluBackward(_) => &[("dgate", "gate"), ("dup", "up"), ("dgate", "dout"), ("dup", "dout")],
            _ => &[],
        };
        pairs.contains(&(out, input))
    }
}
