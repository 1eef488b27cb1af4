//! Primitives: what every device has, and what decompositions are made of.

use super::{check, descriptor};
use crate::{DType, Error, Operand, Result, perturb::Site};
use alloc::format;

descriptor! {
    /// `dst = src`, bit for bit; same type and shape, strides may differ. Exact.
    Copy, "copy", Primitive,
    reads {
        /// `[rows, cols]`, any type.
        src,
    },
    writes {
        /// Same type and shape.
        dst,
    },
}

impl<T: Operand> Copy<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.src.spec();
        check::typed("dst", &self.dst, s.dtype, s.rows, s.cols)
    }
}

descriptor! {
    /// `dst = value`, rounded to the type of `dst`; for u32 the value must be a whole number that f32 holds. Exact.
    Fill, "fill", Primitive,
    writes {
        /// `[rows, cols]`, any type.
        dst,
    },
    attributes {
        /// The value.
        value: f32,
    },
}

impl<T: Operand> Fill<T> {
    pub(super) fn check(&self) -> Result<()> {
        self.dst.spec().check()?;
        let v = self.value;
        if self.dst.spec().dtype == DType::U32 && !((0.0..4_294_967_296.0).contains(&v) && v == (v as u32) as f32) {
            return Err(Error::invalid(format!("{v} is not a u32")));
        }
        Ok(())
    }
}

descriptor! {
    /// `dst = src` in another float type, rounded to nearest even. Exact rounding.
    Cast, "cast", Primitive,
    reads {
        /// `[rows, cols]` float.
        src,
    },
    writes {
        /// Same shape, float.
        dst,
    },
}

impl<T: Operand> Cast<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.src.spec();
        check::float("src", &self.src, s.rows, s.cols)?;
        check::float("dst", &self.dst, s.rows, s.cols)
    }
}

descriptor! {
    /// `out = alpha a + beta b + gamma`, element-wise in f32, each operation rounded separately.
    ///
    /// Aliasing: `out` may be `a` or (unless it is broadcast) `b`.
    ScaledAdd, "scaled_add", Primitive,
    reads {
        /// `[rows, cols]` float.
        a,
    },
    reads_opt {
        /// `[rows, cols]`, `[1, cols]` or `[rows, 1]` float; absent means 0.
        b,
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[rows, cols]` float.
        out,
    },
    options {
        /// Factor of `a`.
        alpha: f32 = 1.0,
        /// Factor of `b`.
        beta: f32 = 1.0,
        /// Constant.
        gamma: f32 = 0.0,
        /// Blocks that `live` applies to.
        blocks: usize = 1,
    },
}

fn broadcastable<T: Operand>(name: &str, t: &T, rows: usize, cols: usize) -> Result<()> {
    match t.spec().shape() {
        [1, c] if c == cols => check::float(name, t, 1, cols),
        [r, 1] if r == rows => check::float(name, t, rows, 1),
        _ => check::float(name, t, rows, cols),
    }
}

fn blocks(rows: usize, blocks: usize) -> Result<()> {
    if blocks == 0 || !rows.is_multiple_of(blocks) {
        return Err(Error::invalid(format!("{rows} rows do not divide into {blocks} blocks")));
    }
    Ok(())
}

impl<T: Operand> ScaledAdd<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.out.spec();
        check::float("out", &self.out, s.rows, s.cols)?;
        check::float("a", &self.a, s.rows, s.cols)?;
        blocks(s.rows, self.blocks)?;
        check::live(&self.live)?;
        self.b.as_ref().map_or(Ok(()), |b| broadcastable("b", b, s.rows, s.cols))
    }
}

descriptor! {
    /// `out = a b`, element-wise with `b` broadcast over rows or columns; or `out += a b` with `accumulate`.
    ///
    /// Aliasing: `out` may be `a` or (unless it is broadcast) `b`; not with `accumulate`.
    Mul, "mul", Primitive,
    reads {
        /// `[rows, cols]` float.
        a,
        /// `[rows, cols]`, `[1, cols]` or `[rows, 1]` float.
        b,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    updates {
        /// `[rows, cols]` float; read only with `accumulate`.
        out,
    },
    options {
        /// Adds to `out` instead of replacing it.
        accumulate: bool = false,
        /// Blocks that `live` applies to.
        blocks: usize = 1,
    },
}

impl<T: Operand> Mul<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.out.spec();
        check::float("out", &self.out, s.rows, s.cols)?;
        check::float("a", &self.a, s.rows, s.cols)?;
        blocks(s.rows, self.blocks)?;
        check::live(&self.live)?;
        broadcastable("b", &self.b, s.rows, s.cols)
    }
}

/// A function of one real variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MapFunction {
    /// e^x
    Exp,
    /// ln x
    Ln,
    /// 1 / (1 + e^-x)
    Sigmoid,
    /// x / (1 + e^-x)
    Silu,
    /// 1 / sqrt x
    Rsqrt,
    /// 1 / x
    Recip,
    /// sqrt x
    Sqrt,
}

descriptor! {
    /// `out = f(scale x + shift)`, element-wise. Tolerance: 4 ulp of f32 before the final rounding.
    ///
    /// Aliasing: `out` may be `x`.
    Map, "map", Primitive,
    reads {
        /// `[rows, cols]` float.
        x,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[rows, cols]` float.
        out,
    },
    attributes {
        /// The function.
        function: MapFunction,
    },
    options {
        /// Factor of the argument.
        scale: f32 = 1.0,
        /// Added to the argument.
        shift: f32 = 0.0,
        /// Blocks that `live` applies to.
        blocks: usize = 1,
    },
}

impl<T: Operand> Map<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.x.spec();
        check::float("x", &self.x, s.rows, s.cols)?;
        blocks(s.rows, self.blocks)?;
        check::live(&self.live)?;
        check::float("out", &self.out, s.rows, s.cols)
    }
}

/// How a row becomes one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// Sum; 0 for an empty row.
    Sum,
    /// Largest; minus infinity for an empty row.
    Max,
}

descriptor! {
    /// `out[r] = reduce(x[r, :])`. Accumulates in f32 or better, in an order that depends on `cols` alone.
    RowReduce, "row_reduce", Primitive,
    reads {
        /// `[rows, cols]` float.
        x,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[rows, 1]` float.
        out,
    },
    attributes {
        /// Sum or maximum.
        reduction: Reduction,
    },
    options {
        /// Blocks that `live` applies to.
        blocks: usize = 1,
    },
}

impl<T: Operand> RowReduce<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.x.spec();
        check::float("x", &self.x, s.rows, s.cols)?;
        blocks(s.rows, self.blocks)?;
        check::live(&self.live)?;
        check::float("out", &self.out, s.rows, 1)
    }
}

descriptor! {
    /// `out[i] = src[index[i]]`; a row whose index is [`super::NO_INDEX`] becomes 0. Exact.
    GatherRows, "gather_rows", Primitive,
    reads {
        /// `[n, cols]`, any type.
        src,
        /// u32 `[1, rows]`, each below n or `NO_INDEX`.
        index,
    },
    writes {
        /// `[rows, cols]`, the type of `src`.
        out,
    },
}

impl<T: Operand> GatherRows<T> {
    pub(super) fn check(&self) -> Result<()> {
        let (s, o) = (self.src.spec(), self.out.spec());
        s.check()?;
        check::indices("index", &self.index, o.rows)?;
        check::typed("out", &self.out, s.dtype, o.rows, s.cols)
    }
}

descriptor! {
    /// `dst[index[i]] = src[i]`, or `+=` with `accumulate`; rows whose index is [`super::NO_INDEX`] are skipped. Indices are distinct. Exact
    /// (one f32 addition with `accumulate`).
    ScatterRows, "scatter_rows", Primitive,
    reads {
        /// `[rows, cols]`, any type.
        src,
        /// u32 `[1, rows]`, each below n or `NO_INDEX`.
        index,
    },
    updates {
        /// `[n, cols]`, the type of `src`.
        dst,
    },
    options {
        /// Adds instead of replacing; float types only.
        accumulate: bool = false,
    },
}

impl<T: Operand> ScatterRows<T> {
    pub(super) fn check(&self) -> Result<()> {
        let (s, d) = (self.src.spec(), self.dst.spec());
        s.check()?;
        check::indices("index", &self.index, s.rows)?;
        if self.accumulate && !s.dtype.is_float() {
            return Err(Error::invalid(format!("cannot accumulate {}", s.dtype)));
        }
        check::typed("dst", &self.dst, s.dtype, d.rows, s.cols)
    }
}

descriptor! {
    /// `out = a + eps z`, or `z` itself without `a`: add(a, mul(eps, z)) in f32, then one rounding to the type of `out`. Bit-exact on every
    /// device (see [`crate::perturb`]).
    ///
    /// Aliasing: `out` may be `a`.
    Perturb, "perturb", Primitive,
    reads {
        /// [`crate::perturb::NoiseParams`] as u32 `[1, 8]`.
        noise,
    },
    reads_opt {
        /// `[rows, cols]` float.
        a,
    },
    writes {
        /// `[rows, cols]` float.
        out,
    },
    attributes {
        /// Which part of which tensor this is.
        site: Site,
    },
    options {
        /// Added to the direction word.
        copy: u32 = 0,
    },
}

impl<T: Operand> Perturb<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.out.spec();
        check::indices("noise", &self.noise, 8)?;
        check::float("out", &self.out, s.rows, s.cols)?;
        check::float_opt("a", &self.a, s.rows, s.cols)?;
        self.site.check(s.rows, s.cols)
    }
}

descriptor! {
    /// The Philox word behind each element of a site. Exact.
    PhiloxWords, "philox_words", Primitive,
    reads {
        /// [`crate::perturb::NoiseParams`] as u32 `[1, 8]`.
        noise,
    },
    writes {
        /// u32 `[rows, cols]`.
        out,
    },
    attributes {
        /// Which part of which tensor this is.
        site: Site,
    },
    options {
        /// Added to the direction word.
        copy: u32 = 0,
    },
}

impl<T: Operand> PhiloxWords<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.out.spec();
        check::indices("noise", &self.noise, 8)?;
        check::typed("out", &self.out, DType::U32, s.rows, s.cols)?;
        self.site.check(s.rows, s.cols)
    }
}

descriptor! {
    /// `out = sum of x^2`; accumulates in f32 or better, in an order that depends on the shape alone.
    SumSquares, "sum_squares", Primitive,
    reads {
        /// `[rows, cols]` float.
        x,
    },
    writes {
        /// f32 `[1, 1]`.
        out,
    },
}

impl<T: Operand> SumSquares<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = self.x.spec();
        check::float("x", &self.x, s.rows, s.cols)?;
        check::typed("out", &self.out, DType::F32, 1, 1)
    }
}
