//! The op vocabulary: one descriptor per op, generic over what its operands are.
//!
//! `Op<TensorSpec>` is asked ([`crate::Device::supports`]), `Op<TensorArg>` is run ([`crate::Queue::submit`]), and [`Op::spec`] maps one to
//! the other, so that asking and running cannot drift.
//!
//! # Conventions
//! - Every tensor is a matrix; a vector of n values is `[1, n]`. Indices are u32.
//! - Activations are packed rows in blocks: [`Copies::total`] blocks of equal height, block c at rows `c * T ..`. `live`, where given, is a u32
//!   `[1, 1]` tensor with the number of rows that count in each block: rows past it are neither read nor written, so row counts can be
//!   rounded up and a recorded step replayed.
//! - Arithmetic is f32 or better inside an op; results are rounded once to the output's type. Float operands of one op may differ in type
//!   unless the op says otherwise.
//! - An output must not overlap any other operand, except that it may be *exactly* the operand named under "Aliasing".
//! - Sizes of zero are valid: such an op writes what is left of its output and reads nothing.
//! - Indices read from device memory that are out of range are an execution error of the queue (or, where the op says so, skipped).

mod attention;
mod backward;
mod check;
mod forward;
mod loss;
mod matmul;
mod primitive;
mod update;

pub use attention::{Attention, AttentionBackward, AttentionShape, KvAppend, MaskedSoftmax, Pairing, Rope};
pub use backward::{LoraMatMulBackward, RmsNormBackward, SwiGluBackward};
pub use forward::{BoundaryDot, Embedding, RmsNorm, Spread, SwiGlu};
pub use loss::{ArgMax, CandidateScores, CrossEntropy, CrossEntropyBackward};
pub use matmul::{LoraMatMul, MatMul, Orientation, PerturbLoraMatMul};
pub use primitive::{
    Cast, Copy, Fill, GatherRows, Map, MapFunction, Mul, Perturb, PhiloxWords, Reduction, RowReduce, ScaledAdd, ScatterRows, SumSquares,
};
pub use update::{AdamW, HyperParams, Optimiser, Sgd, ZoUpdate};

use crate::{Error, Operand, Result, TensorArg, TensorSpec, WeightRef, WeightSpec};

/// An index that rows and labels use for "none": padding that is skipped.
pub const NO_INDEX: u32 = u32::MAX;

/// What the copies of an activation mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// A copy is the model's activation at theta + eps z_q.
    Value,
    /// Block 0 carries values; a copy carries the exact directional derivative along z_q (forward-mode differentiation).
    Tangent,
}

/// How the rows of an activation divide into blocks: the base and its perturbed copies.
///
/// Rows are `total() * T`; lengths, positions and labels describe one block. Which directions the copies stand for is in the noise
/// parameters (see [`crate::perturb`]): copy c of an op has direction word `params.direction + c`, counting perturbed copies from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Copies {
    /// Perturbed copies.
    pub count: u32,
    /// Whether block 0 is the unperturbed base. Always true in tangent form.
    pub has_base: bool,
    /// What a copy is.
    pub form: Form,
}

impl Copies {
    /// The base alone: an ordinary forward pass.
    pub const BASE: Self = Self { count: 0, has_base: true, form: Form::Value };

    /// `count` perturbed copies in value form, behind the base or alone.
    pub const fn value(count: u32, has_base: bool) -> Self {
        Self { count, has_base, form: Form::Value }
    }

    /// The base and `count` tangents.
    pub const fn tangent(count: u32) -> Self {
        Self { count, has_base: true, form: Form::Tangent }
    }

    /// Blocks of rows.
    pub const fn total(self) -> usize {
        self.count as usize + self.has_base as usize
    }

    /// Index of the first perturbed block.
    pub const fn first_copy(self) -> usize {
        self.has_base as usize
    }

    /// Whether block `index` carries a derivative.
    pub const fn is_tangent(self, block: usize) -> bool {
        matches!(self.form, Form::Tangent) && block > 0
    }
}

/// The class of an op, from the point of view of a planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpClass {
    /// What decompositions are made of.
    Primitive,
    /// Part of a forward pass; decomposes into primitives.
    Forward,
    /// Part of a backward pass; decomposes into primitives.
    Backward,
    /// Changes trained parameters; decomposes into primitives, or runs on the host.
    Update,
}

/// How an op uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Written without being read.
    Write,
    /// Read and written.
    Update,
}

impl Access {
    /// Whether the operand changes.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read)
    }
}

/// Declares op descriptors: the struct, its constructor, setters for optional operands and options, and the walks over its operands.
///
/// `reads`, `updates` and `writes` are tensors, `matrices` are tensors or weights, `attributes` are required values, `options` have defaults.
/// The constructor takes operands in the order: reads, matrices, updates, writes, attributes.
macro_rules! descriptor {
    (
        $(#[$doc:meta])*
        $name:ident, $snake:literal, $class:ident
        $(, reads { $($(#[$rd:meta])* $r:ident),* $(,)? })?
        $(, reads_opt { $($(#[$rod:meta])* $ro:ident),* $(,)? })?
        $(, matrices { $($(#[$md:meta])* $m:ident),* $(,)? })?
        $(, updates { $($(#[$ud:meta])* $u:ident),* $(,)? })?
        $(, updates_opt { $($(#[$uod:meta])* $uo:ident),* $(,)? })?
        $(, writes { $($(#[$wd:meta])* $w:ident),* $(,)? })?
        $(, writes_opt { $($(#[$wod:meta])* $wo:ident),* $(,)? })?
        $(, attributes { $($(#[$ad:meta])* $a:ident : $at:ty),* $(,)? })?
        $(, options { $($(#[$od:meta])* $o:ident : $ot:ty = $ov:expr),* $(,)? })?
        $(,)?
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        pub struct $name<T: $crate::Operand> {
            $($($(#[$rd])* pub $r: T,)*)?
            $($($(#[$rod])* pub $ro: Option<T>,)*)?
            $($($(#[$md])* pub $m: $crate::Matrix<T>,)*)?
            $($($(#[$ud])* pub $u: T,)*)?
            $($($(#[$uod])* pub $uo: Option<T>,)*)?
            $($($(#[$wd])* pub $w: T,)*)?
            $($($(#[$wod])* pub $wo: Option<T>,)*)?
            $($($(#[$ad])* pub $a: $at,)*)?
            $($($(#[$od])* pub $o: $ot,)*)?
        }

        impl<T: $crate::Operand> $name<T> {
            /// The op's name in errors, traces and tables.
            pub const NAME: &'static str = $snake;
            /// The op's class.
            pub const CLASS: $crate::op::OpClass = $crate::op::OpClass::$class;

            /// The op with its required operands and attributes, in the order in which the fields are declared; the rest at their defaults.
            #[allow(clippy::too_many_arguments)]
            pub fn new($($($r: T,)*)? $($($m: impl Into<$crate::Matrix<T>>,)*)? $($($u: T,)*)? $($($w: T,)*)? $($($a: $at,)*)?) -> Self {
                Self {
                    $($($r,)*)? $($($ro: None,)*)? $($($m: $m.into(),)*)? $($($u,)*)? $($($uo: None,)*)?
                    $($($w,)*)? $($($wo: None,)*)? $($($a,)*)? $($($o: $ov,)*)?
                }
            }

            $($($(#[$rod])* pub fn $ro(mut self, tensor: impl Into<Option<T>>) -> Self { self.$ro = tensor.into(); self })*)?
            $($($(#[$uod])* pub fn $uo(mut self, tensor: impl Into<Option<T>>) -> Self { self.$uo = tensor.into(); self })*)?
            $($($(#[$wod])* pub fn $wo(mut self, tensor: impl Into<Option<T>>) -> Self { self.$wo = tensor.into(); self })*)?
            $($($(#[$od])* pub fn $o(mut self, value: $ot) -> Self { self.$o = value; self })*)?

            #[allow(unused_variables, unused_mut)]
            pub(crate) fn map<U: $crate::Operand>(
                &self,
                t: &mut dyn FnMut(&T) -> U,
                w: &mut dyn FnMut(&T::Weight) -> U::Weight,
            ) -> $name<U> {
                let mut matrix = |m: &$crate::Matrix<T>, t: &mut dyn FnMut(&T) -> U| match m {
                    $crate::Matrix::Tensor(x) => $crate::Matrix::Tensor(t(x)),
                    $crate::Matrix::Weight(x) => $crate::Matrix::Weight(w(x)),
                };
                $name {
                    $($($r: t(&self.$r),)*)?
                    $($($ro: self.$ro.as_ref().map(&mut *t),)*)?
                    $($($m: matrix(&self.$m, t),)*)?
                    $($($u: t(&self.$u),)*)?
                    $($($uo: self.$uo.as_ref().map(&mut *t),)*)?
                    $($($w: t(&self.$w),)*)?
                    $($($wo: self.$wo.as_ref().map(&mut *t),)*)?
                    $($($a: self.$a.clone(),)*)?
                    $($($o: self.$o.clone(),)*)?
                }
            }

            #[allow(unused_variables, unused_mut)]
            pub(crate) fn visit<'a>(&'a self, f: &mut dyn FnMut(&'static str, $crate::op::Access, $crate::op::OperandRef<'a, T>)) {
                use $crate::op::{Access, OperandRef};
                $($(f(stringify!($r), Access::Read, OperandRef::Tensor(&self.$r));)*)?
                $($(if let Some(x) = &self.$ro { f(stringify!($ro), Access::Read, OperandRef::Tensor(x)); })*)?
                $($(match &self.$m {
                    $crate::Matrix::Tensor(x) => f(stringify!($m), Access::Read, OperandRef::Tensor(x)),
                    $crate::Matrix::Weight(x) => f(stringify!($m), Access::Read, OperandRef::Weight(x)),
                })*)?
                $($(f(stringify!($u), Access::Update, OperandRef::Tensor(&self.$u));)*)?
                $($(if let Some(x) = &self.$uo { f(stringify!($uo), Access::Update, OperandRef::Tensor(x)); })*)?
                $($(f(stringify!($w), Access::Write, OperandRef::Tensor(&self.$w));)*)?
                $($(if let Some(x) = &self.$wo { f(stringify!($wo), Access::Write, OperandRef::Tensor(x)); })*)?
            }
        }

        impl<T: $crate::Operand> From<$name<T>> for $crate::op::Op<T> {
            fn from(op: $name<T>) -> Self {
                $crate::op::Op::$name(op)
            }
        }
    };
}
pub(crate) use descriptor;

/// An operand met on a walk over an op.
#[derive(Clone, Copy, Debug)]
pub enum OperandRef<'a, T: Operand> {
    /// A tensor.
    Tensor(&'a T),
    /// An imported weight.
    Weight(&'a T::Weight),
}

macro_rules! vocabulary {
    ($($name:ident),* $(,)?) => {
        /// Any op. New ones are added in minor releases: a backend answers `Unsupported` for those it does not know.
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub enum Op<T: Operand> {
            $($name($name<T>),)*
        }

        impl<T: Operand> Op<T> {
            /// Names of all ops, in the order of the support matrix.
            pub const NAMES: &'static [&'static str] = &[$($name::<TensorSpec>::NAME),*];

            /// The op's name.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => $name::<T>::NAME,)* }
            }

            /// The op's class.
            pub fn class(&self) -> OpClass {
                match self { $(Self::$name(_) => $name::<T>::CLASS,)* }
            }

            /// The op over other operands.
            fn map<U: Operand>(&self, t: &mut dyn FnMut(&T) -> U, w: &mut dyn FnMut(&T::Weight) -> U::Weight) -> Op<U> {
                match self { $(Self::$name(op) => Op::$name(op.map(t, w)),)* }
            }

            /// Walks over the operands: name, access, operand.
            pub fn visit<'a>(&'a self, f: &mut dyn FnMut(&'static str, Access, OperandRef<'a, T>)) {
                match self { $(Self::$name(op) => op.visit(f),)* }
            }

            /// Whether shapes, types and attributes fit together; what is read from device memory is not looked at.
            ///
            /// # Errors
            /// `InvalidArgument` that names the op, the operand and both shapes.
            pub fn check(&self) -> Result<()> {
                match self { $(Self::$name(op) => op.check(),)* }.map_err(|e| e.with_op(self.name(), None))
            }
        }
    };
}

vocabulary!(
    Copy,
    Fill,
    Cast,
    ScaledAdd,
    Mul,
    Map,
    RowReduce,
    GatherRows,
    ScatterRows,
    MaskedSoftmax,
    Perturb,
    PhiloxWords,
    SumSquares,
    ArgMax,
    MatMul,
    Embedding,
    RmsNorm,
    LoraMatMul,
    PerturbLoraMatMul,
    Rope,
    KvAppend,
    Attention,
    SwiGlu,
    CrossEntropy,
    CandidateScores,
    BoundaryDot,
    Spread,
    RmsNormBackward,
    LoraMatMulBackward,
    AttentionBackward,
    SwiGluBackward,
    CrossEntropyBackward,
    Sgd,
    AdamW,
    ZoUpdate,
);

impl Op<TensorArg> {
    /// The same op as a question.
    pub fn spec(&self) -> Op<TensorSpec> {
        self.map(&mut |t: &TensorArg| t.spec, &mut |w: &WeightRef| -> WeightSpec { w.spec() })
    }

    /// What every queue checks before it runs an op, so that a safe call can do no harm: [`Op::check`], that each tensor lies within its
    /// buffer and is aligned, that outputs overlap nothing they must not, and that `queue` may touch each buffer.
    ///
    /// # Errors
    /// `InvalidArgument` or `ForeignBuffer`, naming the operand.
    pub fn check_submit(&self, queue: crate::QueueId, space: crate::MemorySpace) -> Result<()> {
        self.check()?;
        check::operands(self, queue, space).map_err(|e: Error| e.with_op(self.name(), None))
    }
}
