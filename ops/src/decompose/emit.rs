//! What decompositions are written over.

use crate::{Runner, support};
use alloc::{collections::BTreeSet, format, vec, vec::Vec};
use zofo_hal::{
    DType, Device, Error, Matrix, Op, Operand, Result, Support, TensorArg, TensorSpec,
    op::{self, MapFunction, NO_INDEX, Orientation, Reduction},
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

impl View for TensorArg {
    fn rows_of(&self, first: usize, n: usize) -> Self {
        self.rows(first, n)
    }
    fn cols_of(&self, first: usize, n: usize) -> Self {
        self.cols(first, n)
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
    /// Row l holds `0 .. l`, then [`NO_INDEX`]; u32 `[n + 1, n]`. Its row `live` names the live ones of n rows.
    Live(usize),
}

/// Row-major values of a constant.
pub(crate) enum Values {
    /// Float.
    F32(Vec<f32>),
    /// Index.
    U32(Vec<u32>),
}

impl Constant {
    /// `[rows, columns]`.
    pub(crate) fn shape(self) -> [usize; 2] {
        match self {
            Self::Identity(n) => [n, n],
            Self::Counting(n) => [n, 1],
            Self::Live(n) => [n + 1, n],
        }
    }

    /// Type and shape.
    pub(crate) fn spec(self) -> TensorSpec {
        let [rows, cols] = self.shape();
        TensorSpec::new(if matches!(self, Self::Live(_)) { DType::U32 } else { DType::F32 }, rows, cols)
    }

    /// Row-major values.
    pub(crate) fn values(self) -> Values {
        match self {
            Self::Identity(n) => {
                let mut v = vec![0.0; n * n];
                v.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
                Values::F32(v)
            }
            Self::Counting(n) => Values::F32((1..=n).map(|i| i as f32).collect()),
            Self::Live(n) => {
                Values::U32((0..=n).flat_map(|live| (0..n).map(move |i| if i < live { i as u32 } else { NO_INDEX })).collect())
            }
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

    /// An f32 copy of `src` whose rows past `live` are 0, so that what lies there cannot reach a product.
    fn clean(&mut self, src: &Self::T, live: &Option<Self::T>) -> Result<Self::T> {
        let t = self.f32_like(src)?;
        if live.is_some() {
            self.fill(&t, 0.0)?;
        }
        self.copy(src, &t, &Rows::live(live))?;
        Ok(t)
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

    /// Rows of `src` by index, in the type of `src`; 0 for [`NO_INDEX`].
    fn gather(&mut self, src: &Self::T, index: &Self::T) -> Result<Self::T> {
        let out = self.temp(src.dtype(), index.size().1, src.size().1)?;
        self.emit(op::GatherRows::new(src.clone(), index.clone(), out.clone()))?;
        Ok(out)
    }

    /// `dst[index[i]] = src[i]`.
    fn scatter(&mut self, src: &Self::T, index: &Self::T, dst: &Self::T) -> Result<()> {
        self.emit(op::ScatterRows::new(src.clone(), index.clone(), dst.clone()))
    }

    /// The indices of live rows, 0 in place of those past them, which must not be looked at.
    fn live_indices(&mut self, index: &Self::T, live: &Option<Self::T>) -> Result<Self::T> {
        let Some(live) = live else { return Ok(index.clone()) };
        let n = index.size().1;
        if n == 0 {
            return Ok(index.clone());
        }
        let table = self.constant(Constant::Live(n))?;
        let rows = self.gather(&table, live)?;
        let kept = self.gather(&index.shaped(n, 1), &rows)?;
        Ok(kept.shaped(1, n))
    }
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
        self.temp(constant.spec().dtype, rows, cols)
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
