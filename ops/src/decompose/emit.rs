//! What decompositions are written over.

use crate::{Runner, support};
use alloc::{collections::BTreeSet, format, vec, vec::Vec};
use zofo_hal::{
    DType, Device, Error, Matrix, Op, Operand, Result, Support, TensorArg, TensorSpec,
    op::{self, MapFunction, Orientation, Reduction},
};

/// Tensors with views.
pub(crate) trait View: Operand {
    /// Rows `first .. first + n`.
    fn rows_of(&self, first: usize, n: usize) -> Self;
    /// Columns `first .. first + n`.
    fn cols_of(&self, first: usize, n: usize) -> Self;
    /// The same contiguous elements in another shape.
    fn shaped(&self, rows: usize, cols: usize) -> Self;

    /// As the right-hand side of a product.
    fn matrix(&self) -> Matrix<Self> {
        Matrix::Tensor(self.clone())
    }

    /// `(rows, columns)`.
    fn size(&self) -> (usize, usize) {
        let s = self.spec();
        (s.rows, s.cols)
    }

    /// Element type.
    fn dtype(&self) -> DType {
        self.spec().dtype
    }
}

/// A view without elements stays where the whole was: further on there may be no buffer.
fn at_home(whole: &TensorArg, mut view: TensorArg) -> TensorArg {
    if view.spec.is_empty() {
        view.offset = whole.offset;
    }
    view
}

impl View for TensorArg {
    fn rows_of(&self, first: usize, n: usize) -> Self {
        at_home(self, self.rows(first, n))
    }
    fn cols_of(&self, first: usize, n: usize) -> Self {
        at_home(self, self.cols(first, n))
    }
    fn shaped(&self, rows: usize, cols: usize) -> Self {
        self.reshape(rows, cols)
    }
}

impl View for TensorSpec {
    fn rows_of(&self, _: usize, n: usize) -> Self {
        Self { rows: n, ..*self }
    }
    fn cols_of(&self, _: usize, n: usize) -> Self {
        Self { cols: n, ..*self }
    }
    fn shaped(&self, rows: usize, cols: usize) -> Self {
        Self::new(self.dtype, rows, cols)
    }
}

/// A small table that decompositions share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Constant {
    /// Identity matrix, f32 `[n, n]`.
    Identity(usize),
    /// `1, 2, ..., n`, f32 `[n, 1]`.
    Counting(usize),
}

impl Constant {
    /// `[rows, columns]`.
    pub(crate) fn shape(self) -> [usize; 2] {
        match self {
            Self::Identity(n) => [n, n],
            Self::Counting(n) => [n, 1],
        }
    }

    /// Row-major values.
    pub(crate) fn values(self) -> Vec<f32> {
        match self {
            Self::Identity(n) => {
                let mut v = vec![0.0; n * n];
                v.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
                v
            }
            Self::Counting(n) => (1..=n).map(|i| i as f32).collect(),
        }
    }
}

/// Which rows an element-wise op works on: the live ones of each of a number of blocks.
pub(crate) struct Rows<T> {
    /// Live rows of a block, u32 `[1, 1]`; absent means all.
    pub(crate) live: Option<T>,
    /// Blocks.
    pub(crate) blocks: usize,
}

impl<T: Clone> Rows<T> {
    /// Live rows of one block.
    pub(crate) fn live(live: &Option<T>) -> Self {
        Self { live: live.clone(), blocks: 1 }
    }

    /// Live rows of each of `blocks` blocks.
    pub(crate) fn blocks(live: &Option<T>, blocks: usize) -> Self {
        Self { live: live.clone(), blocks }
    }

    /// Every row.
    pub(crate) fn all() -> Self {
        Self { live: None, blocks: 1 }
    }
}

/// Where a decomposition's ops go.
pub(crate) trait Emit {
    /// Operands.
    type T: View;

    /// Scratch with unspecified contents.
    fn temp(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<Self::T>;
    /// A shared table.
    fn constant(&mut self, constant: Constant) -> Result<Self::T>;
    /// Runs `op`, or asks whether it would run.
    fn emit(&mut self, op: impl Into<Op<Self::T>>) -> Result<()>;

    /// f32 scratch.
    fn f32(&mut self, rows: usize, cols: usize) -> Result<Self::T> {
        self.temp(DType::F32, rows, cols)
    }

    /// f32 scratch of the shape of `like`.
    fn f32_like(&mut self, like: &Self::T) -> Result<Self::T> {
        let (rows, cols) = like.size();
        self.f32(rows, cols)
    }

    /// `dst = value` everywhere.
    fn fill(&mut self, dst: &Self::T, value: f32) -> Result<()> {
        self.emit(op::Fill::new(dst.clone(), value))
    }

    /// f32 scratch of zeros.
    fn zeros(&mut self, rows: usize, cols: usize) -> Result<Self::T> {
        let t = self.f32(rows, cols)?;
        self.fill(&t, 0.0)?;
        Ok(t)
    }

    /// `dst = src` on `rows`, rounded where the types differ and bit for bit (the sign of zero included) where they do not.
    fn copy(&mut self, src: &Self::T, dst: &Self::T, rows: &Rows<Self::T>) -> Result<()> {
        if rows.live.is_some() {
            let ones = self.f32(1, src.size().1)?;
            self.fill(&ones, 1.0)?;
            return self.mul(src, &ones, dst, rows);
        }
        if src.dtype() == dst.dtype() {
            return self.emit(op::Copy::new(src.clone(), dst.clone()));
        }
        self.emit(op::Cast::new(src.clone(), dst.clone()))
    }

    /// An f32 copy of `src` that is 0 outside `rows`, so that what lies there cannot reach a product.
    fn clean(&mut self, src: &Self::T, rows: &Rows<Self::T>) -> Result<Self::T> {
        let t = self.f32_like(src)?;
        if rows.live.is_some() {
            self.fill(&t, 0.0)?;
        }
        self.copy(src, &t, rows)?;
        Ok(t)
    }

    /// Where a result of `out`'s shape is added up in f32: `out` itself, or scratch for [`Emit::finish`].
    fn accumulator(&mut self, out: &Self::T) -> Result<Self::T> {
        if out.dtype() == DType::F32 { Ok(out.clone()) } else { self.f32_like(out) }
    }

    /// Rounds the accumulator of `out` into it.
    fn finish(&mut self, accumulator: &Self::T, out: &Self::T, rows: &Rows<Self::T>) -> Result<()> {
        if out.dtype() == DType::F32 { Ok(()) } else { self.copy(accumulator, out, rows) }
    }

    /// `out = a b`, b broadcast.
    fn mul(&mut self, a: &Self::T, b: &Self::T, out: &Self::T, rows: &Rows<Self::T>) -> Result<()> {
        self.emit(op::Mul::new(a.clone(), b.clone(), out.clone()).live(rows.live.clone()).blocks(rows.blocks))
    }

    /// `out += a b`, b broadcast.
    fn mul_add(&mut self, a: &Self::T, b: &Self::T, out: &Self::T, rows: &Rows<Self::T>) -> Result<()> {
        self.emit(op::Mul::new(a.clone(), b.clone(), out.clone()).accumulate(true).live(rows.live.clone()).blocks(rows.blocks))
    }

    /// `out = alpha a`.
    fn scale(&mut self, a: &Self::T, alpha: f32, out: &Self::T, rows: &Rows<Self::T>) -> Result<()> {
        self.emit(op::ScaledAdd::new(a.clone(), out.clone()).alpha(alpha).live(rows.live.clone()).blocks(rows.blocks))
    }

    /// `out = a + beta b`, b broadcast.
    fn add(&mut self, a: &Self::T, b: &Self::T, beta: f32, out: &Self::T, rows: &Rows<Self::T>) -> Result<()> {
        self.emit(op::ScaledAdd::new(a.clone(), out.clone()).b(b.clone()).beta(beta).live(rows.live.clone()).blocks(rows.blocks))
    }

    /// `out = f(scale x + shift)`.
    fn map(&mut self, f: MapFunction, (scale, shift): (f32, f32), x: &Self::T, out: &Self::T, rows: &Rows<Self::T>) -> Result<()> {
        let op = op::Map::new(x.clone(), out.clone(), f).scale(scale).shift(shift);
        self.emit(op.live(rows.live.clone()).blocks(rows.blocks))
    }

    /// Sums or maxima of rows, f32 `[rows, 1]`.
    fn reduce(&mut self, reduction: Reduction, x: &Self::T, rows: &Rows<Self::T>) -> Result<Self::T> {
        let out = self.f32(x.size().0, 1)?;
        self.emit(op::RowReduce::new(x.clone(), out.clone(), reduction).live(rows.live.clone()).blocks(rows.blocks))?;
        Ok(out)
    }

    /// Row sums of `a b`, f32 `[rows, 1]`.
    fn row_dot(&mut self, a: &Self::T, b: &Self::T, rows: &Rows<Self::T>) -> Result<Self::T> {
        let products = self.f32_like(a)?;
        self.mul(a, b, &products, rows)?;
        self.reduce(Reduction::Sum, &products, rows)
    }

    /// `out = alpha op(a) op(b) + beta out` on the live rows of one block.
    fn product(
        &mut self,
        orientation: Orientation,
        a: &Self::T,
        b: Matrix<Self::T>,
        out: &Self::T,
        (alpha, beta): (f32, f32),
        live: &Option<Self::T>,
    ) -> Result<()> {
        let op = op::MatMul::new(a.clone(), b, out.clone(), orientation).alpha(alpha).beta(beta);
        self.emit(op.live(live.clone()))
    }

    /// Rows of `src` by index, in the type of `src`; 0 for [`op::NO_INDEX`].
    fn gather(&mut self, src: &Self::T, index: &Self::T) -> Result<Self::T> {
        let out = self.temp(src.dtype(), index.size().1, src.size().1)?;
        self.emit(op::GatherRows::new(src.clone(), index.clone(), out.clone()))?;
        Ok(out)
    }

    /// `dst[index[i]] = src[i]`.
    fn scatter(&mut self, src: &Self::T, index: &Self::T, dst: &Self::T) -> Result<()> {
        self.emit(op::ScatterRows::new(src.clone(), index.clone(), dst.clone()))
    }

    /// 1 for each live row of `n`, 0 past them; f32 `[n, 1]`.
    fn live_mask(&mut self, n: usize, live: &Option<Self::T>) -> Result<Self::T> {
        let (mask, ones) = (self.zeros(n, 1)?, self.f32(n, 1)?);
        self.fill(&ones, 1.0)?;
        self.copy(&ones, &mask, &Rows::live(live))?;
        Ok(mask)
    }

    /// The indices where `mask` (f32 `[n, 1]`) is 1, and 0 where it is 0: those must not be looked at, as anything may stand there.
    fn masked_indices(&mut self, index: &Self::T, mask: &Self::T) -> Result<Self::T> {
        let n = index.size().1;
        let out = self.temp(DType::U32, 1, n)?;
        for (first, n) in pieces(n, MASK_PIECE) {
            // Row i has its mask in column i and one half in the last, so its largest element is in column i or the last.
            let choice = self.f32(n, n + 1)?;
            self.fill(&choice.cols_of(n, 1), 0.5)?;
            let identity = self.constant(Constant::Identity(MASK_PIECE))?.rows_of(0, n).cols_of(0, n);
            self.mul(&identity, &mask.rows_of(first, n), &choice.cols_of(0, n), &Rows::all())?;
            let chosen = self.temp(DType::U32, 1, n)?;
            self.emit(op::ArgMax::new(choice, chosen.clone()))?;
            let from = self.temp(DType::U32, 1, n + 1)?;
            self.copy(&index.cols_of(first, n), &from.cols_of(0, n), &Rows::all())?;
            self.fill(&from.cols_of(n, 1), 0.0)?;
            let to = out.cols_of(first, n).shaped(n, 1);
            self.emit(op::GatherRows::new(from.shaped(n + 1, 1), chosen, to))?;
        }
        Ok(out)
    }

    /// Indices of live rows, 0 past them.
    fn live_indices(&mut self, index: &Self::T, live: &Option<Self::T>) -> Result<Self::T> {
        if live.is_none() {
            return Ok(index.clone());
        }
        let mask = self.live_mask(index.size().1, live)?;
        self.masked_indices(index, &mask)
    }

    /// Row i is 1 in column `index[i]` and 0 elsewhere; f32 `[n, width]`.
    ///
    /// There is no comparison among the primitives, but `exp(-200 (x - j)^2)` of whole numbers is 1 where they are equal and, being below
    /// the smallest f32, 0 elsewhere.
    fn one_hot(&mut self, index: &Self::T, width: usize) -> Result<Self::T> {
        if width >= 1 << 24 {
            return Err(Error::unsupported(format!("{width} entries are more than f32 can count")));
        }
        let counting = self.constant(Constant::Counting(width))?;
        let number = self.gather(&counting, index)?;
        let out = self.zeros(index.size().1, width)?;
        let all = Rows::all();
        self.add(&out, &number, 1.0, &out, &all)?;
        self.add(&out, &counting.shaped(1, width), -1.0, &out, &all)?;
        self.mul(&out, &out, &out, &all)?;
        self.map(MapFunction::Exp, (-200.0, 0.0), &out, &out, &all)?;
        Ok(out)
    }
}

/// Rows whose indices are masked at a time; bounds the square scratch of that.
const MASK_PIECE: usize = 128;

/// `(first, length)` of consecutive pieces of at most `size` of `n` things.
pub(crate) fn pieces(n: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    let size = size.max(1);
    (0..n).step_by(size).map(move |first| (first, size.min(n - first)))
}

impl Emit for Runner {
    type T = TensorArg;

    fn temp(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<TensorArg> {
        self.scratch(dtype, rows, cols)
    }

    fn constant(&mut self, constant: Constant) -> Result<TensorArg> {
        self.shared(constant)
    }

    fn emit(&mut self, op: impl Into<Op<TensorArg>>) -> Result<()> {
        self.run(op)
    }
}

/// Walks a decomposition on shapes and asks the device about each op.
pub(crate) struct Plan<'a> {
    device: &'a dyn Device,
    ops: BTreeSet<&'static str>,
}

impl<'a> Plan<'a> {
    /// For `device`.
    pub(crate) fn new(device: &'a dyn Device) -> Self {
        Self { device, ops: BTreeSet::new() }
    }

    /// Names of the ops met.
    pub(crate) fn ops(&self) -> Vec<&'static str> {
        self.ops.iter().copied().collect()
    }
}

impl Emit for Plan<'_> {
    type T = TensorSpec;

    fn temp(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<TensorSpec> {
        let spec = TensorSpec::new(dtype, rows, cols);
        spec.check()?;
        if spec.span_bytes() as u64 > self.device.limits().max_buffer_bytes {
            return Err(Error::unsupported(format!("an intermediate {spec:?} is larger than the device's largest buffer")));
        }
        Ok(spec)
    }

    fn constant(&mut self, constant: Constant) -> Result<TensorSpec> {
        let [rows, cols] = constant.shape();
        self.f32(rows, cols)
    }

    fn emit(&mut self, op: impl Into<Op<TensorSpec>>) -> Result<()> {
        let op = op.into();
        self.ops.insert(op.name());
        match support(self.device, &op) {
            Support::Unsupported { reason, .. } => Err(Error::unsupported(reason).context(op.name())),
            _ => Ok(()),
        }
    }
}
