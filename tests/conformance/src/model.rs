//! What ops compute, written once over [`Est`]: helpers that the cases of several ops share.

use crate::{
    case::Expect,
    estimate::{Acc, Est, U},
    host::HostTensor,
    quantised,
};
use zofo_hal::{
    DType,
    op::{Copies, Form},
};

/// A matrix of estimates.
#[derive(Clone, Debug)]
pub struct Mat {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    v: Vec<Est>,
    size: Vec<f64>,
}

impl Mat {
    /// The exact values of a tensor.
    pub fn of(t: &HostTensor) -> Self {
        let v: Vec<Est> = t.values().into_iter().map(Est::from).collect();
        let size = match quantised::sizes(t) {
            Some(sizes) => sizes,
            None => v.iter().map(|v| v.v.abs()).collect(),
        };
        Self { rows: t.rows, cols: t.cols, v, size }
    }

    /// A weight in a product with activations of type `x`: for 16-bit ones a device may round quantised values to their type.
    pub fn met_by(t: &HostTensor, x: DType) -> Self {
        let mut w = Self::of(t);
        if t.dtype.is_quantised() {
            w.v.iter_mut().for_each(|v| *v = v.in_type(x));
        }
        w
    }

    /// Activations in a product with a weight of type `w`, where a device rounds them to 8 bits ([`zofo_hal::Features::int8_products`]).
    ///
    /// With m the largest magnitude of a block of 32, its numbers become `q m / 127`, q the nearest integer: off by half a step, m / 254. Of what f32
    /// adds, `127 / m`, its product with x and `m / 127` are rounded: 3 U relative to the number, which 4 U of m cover, and the other half of a step
    /// moves by as little. In the product the error of x meets every part of a weight's value alike, so it is an error of x and nothing else; scales
    /// and sums of codes take at most 8 roundings per block of 32 terms, for which [`Acc`] counts 32.
    pub fn in_8_bits(mut self, w: DType) -> Self {
        const BLOCK: usize = 32;
        if w.is_quantised() {
            for row in self.v.chunks_exact_mut(self.cols.max(1)) {
                for block in row.chunks_mut(BLOCK) {
                    let largest = block.iter().fold(0.0f64, |m, x| m.max(x.v.abs() + x.e));
                    block.iter_mut().for_each(|x| x.e += largest * (1.0 / 254.0 + 4.0 * U));
                }
            }
        }
        self
    }

    /// One element.
    pub fn at(&self, r: usize, c: usize) -> Est {
        self.v[r * self.cols + c]
    }

    /// One element with the size of its parts: more than its magnitude where a weight is a scale times a number minus a minimum, because a
    /// device may sum the two apart.
    pub fn part(&self, r: usize, c: usize) -> (Est, f64) {
        (self.at(r, c), self.size[r * self.cols + c])
    }

    /// Applies `f` to each element.
    pub fn map(mut self, f: impl Fn(usize, usize, Est) -> Est) -> Self {
        for r in 0..self.rows {
            for c in 0..self.cols {
                let i = r * self.cols + c;
                self.v[i] = f(r, c, self.v[i]);
                self.size[i] = self.v[i].v.abs();
            }
        }
        self
    }
}

/// `sum over i < n of x(i) w(i)`.
pub fn dot(n: usize, x: impl Fn(usize) -> Est, w: impl Fn(usize) -> (Est, f64)) -> Acc {
    let mut acc = Acc::default();
    for i in 0..n {
        acc.add_product(x(i), w(i));
    }
    acc
}

/// How the rows of a case divide: blocks of `rows` rows, of which `live` count.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// The blocks.
    pub copies: Copies,
    /// Rows of one block.
    pub rows: usize,
    /// Rows that count, where the op is told.
    pub live: Option<usize>,
}

impl Blocks {
    /// One block, all of it live.
    pub fn one(rows: usize) -> Self {
        Self { copies: Copies::BASE, rows, live: None }
    }

    /// Rows of all blocks.
    pub fn total(&self) -> usize {
        self.copies.total() * self.rows
    }

    /// Whether `row` of all rows counts.
    pub fn is_live(&self, row: usize) -> bool {
        self.rows > 0 && row % self.rows < self.live.unwrap_or(self.rows)
    }

    /// Whether `row` of all rows is a derivative.
    pub fn is_tangent(&self, row: usize) -> bool {
        self.copies.is_tangent(row / self.rows)
    }

    /// The row of the base block that belongs to `row`.
    pub fn base(&self, row: usize) -> usize {
        row % self.rows
    }

    /// The op's `live` operand.
    pub fn live_tensor(&self) -> Option<HostTensor> {
        self.live.map(|n| HostTensor::indices(&[n as u32]))
    }

    /// `tensor` with its dead rows made unreadable.
    pub fn poisoned(&self, mut tensor: HostTensor) -> HostTensor {
        for row in (0..tensor.rows).filter(|&r| !self.is_live(r)) {
            tensor.poison_row(row);
        }
        tensor
    }

    /// What `cols` columns of output should hold: `f` on live rows, what they held on the others.
    pub fn expect(&self, cols: usize, mut f: impl FnMut(usize, usize) -> Est) -> Vec<Expect> {
        let mut out = Vec::with_capacity(self.total() * cols);
        for row in 0..self.total() {
            for col in 0..cols {
                out.push(if self.is_live(row) { Expect::Near(f(row, col)) } else { Expect::Untouched });
            }
        }
        out
    }

    /// As [`expect`](Self::expect), of a product whose left operand is one of two: as it is, and rounded to 8 bits.
    pub fn expect_product(&self, cols: usize, left: [&Mat; 2], mut f: impl FnMut(&Mat, usize, usize) -> Est) -> Vec<Expect> {
        let mut out = Vec::with_capacity(self.total() * cols);
        for row in 0..self.total() {
            for col in 0..cols {
                let [exact, rounded] = left.map(|x| if self.is_live(row) { f(x, row, col) } else { Est::ZERO });
                out.push(if self.is_live(row) { Expect::Product(exact, rounded) } else { Expect::Untouched });
            }
        }
        out
    }

    /// For the name of a case.
    pub fn describe(&self) -> String {
        let form = match self.copies.form {
            Form::Value => "value",
            Form::Tangent => "tangent",
        };
        let live = self.live.map_or(String::new(), |n| format!(", {n} live"));
        format!("{} {form} copies, base {}, {} rows each{live}", self.copies.count, self.copies.has_base, self.rows)
    }
}

/// The blocks that ops with copies are tried on: both forms, with and without a base, padded and not.
pub fn forms(rows: usize) -> Vec<Blocks> {
    let b = |copies, live| Blocks { copies, rows, live };
    vec![
        b(Copies::BASE, None),
        b(Copies::BASE, Some(rows.saturating_sub(2))),
        b(Copies::value(2, true), Some(rows.saturating_sub(1))),
        b(Copies::value(3, false), None),
        b(Copies::tangent(2), Some(rows.saturating_sub(1))),
    ]
}

/// Element types of a case: of its activations and of its outputs.
#[derive(Clone, Copy, Debug)]
pub struct Types {
    /// In test names.
    pub name: &'static str,
    /// Activations read.
    pub x: DType,
    /// Outputs.
    pub out: DType,
}

/// All combinations that are tried.
pub const TYPES: [Types; 5] = [
    Types { name: "f32", x: DType::F32, out: DType::F32 },
    Types { name: "f16", x: DType::F16, out: DType::F16 },
    Types { name: "bf16", x: DType::Bf16, out: DType::Bf16 },
    Types { name: "bf16-f32", x: DType::Bf16, out: DType::F32 },
    Types { name: "f32-f16", x: DType::F32, out: DType::F16 },
];

/// The float types of activations.
pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// Every type that a weight can have.
pub const WEIGHTS: [DType; 10] =
    [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q4K, DType::Q6K];
