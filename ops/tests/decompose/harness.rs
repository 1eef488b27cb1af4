//! Draws operands, runs a case on several devices, compares.

use half::{bf16, f16};
use zofo_hal::{
    Allow, DType, DeviceRef, Matrix, Op, Restricted, Support, TensorArg, TensorSpec, Usage, Uses, WeightData, WeightSpec,
    op::{Copies, OperandRef},
    reference::Reference,
};
use zofo_ops::{Runner, support};

/// SplitMix64 (Steele, Lea & Flood 2014): small, and the same everywhere.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0 .. n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// Uniform in `low ..= high`.
    pub fn range(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub fn coin(&mut self) -> bool {
        self.word() >> 63 == 1
    }

    /// Uniform in -1 .. 1.
    pub fn unit(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Mostly f32.
    pub fn float(&mut self) -> DType {
        [DType::F32, DType::F32, DType::F16, DType::Bf16][self.below(4)]
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut v: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            v.swap(i, self.below(i + 1));
        }
        v
    }
}

/// What a NaN-free pattern around and inside outputs looks like: no op writes it.
const SENTINEL: f32 = -777.0;

/// How the rows of a block are used.
#[derive(Clone)]
pub struct Rows {
    pub copies: Copies,
    /// Rows of a block.
    pub t: usize,
    /// Those that count.
    pub live: usize,
    pub tensor: Option<TensorArg>,
}

impl Rows {
    pub fn total(&self) -> usize {
        self.copies.total() * self.t
    }

    fn has(&self, row: usize) -> bool {
        row % self.t.max(1) < self.live
    }
}

/// One device, and the operands drawn for it.
pub struct Draw {
    pub rng: Rng,
    pub runner: Runner,
}

impl Draw {
    fn new(seed: u64, device: DeviceRef) -> Self {
        Self { rng: Rng::new(seed), runner: Runner::new(device).unwrap() }
    }

    /// A float tensor `[rows, cols]` of `f(row, column)`, with room before, between and behind the rows.
    pub fn tensor(&mut self, dtype: DType, rows: usize, cols: usize, mut f: impl FnMut(&mut Rng, usize) -> f32) -> TensorArg {
        let stride = cols + [0, 0, 3][self.rng.below(3)];
        let before = self.rng.below(3);
        let elements = before + rows * stride + 2;
        let all = self.runner.alloc(dtype, 1, elements, Usage::Activations).unwrap();
        let mut values = vec![SENTINEL; elements];
        for r in 0..rows {
            for c in 0..cols {
                values[before + r * stride + c] = f(&mut self.rng, r);
            }
        }
        self.runner.upload_f32(&all, &values).unwrap();
        let mut t = all;
        t.offset = before * dtype.block().1;
        t.spec = TensorSpec::new(dtype, rows, cols).with_stride(stride);
        t
    }

    /// Values in -1 .. 1.
    pub fn dense(&mut self, dtype: DType, rows: usize, cols: usize) -> TensorArg {
        self.tensor(dtype, rows, cols, |rng, _| rng.unit())
    }

    /// Values in -1 .. 1 in live rows, NaN in others.
    pub fn rows(&mut self, dtype: DType, rows: &Rows, cols: usize) -> TensorArg {
        let rows = rows.clone();
        self.tensor(dtype, rows.total(), cols, |rng, r| if rows.has(r) { rng.unit() } else { f32::NAN })
    }

    /// An output.
    pub fn out(&mut self, dtype: DType, rows: usize, cols: usize) -> TensorArg {
        self.tensor(dtype, rows, cols, |_, _| SENTINEL)
    }

    pub fn words(&mut self, rows: usize, cols: usize, values: &[u32]) -> TensorArg {
        let t = self.runner.alloc(DType::U32, rows, cols, Usage::Parameters).unwrap();
        self.runner.upload_u32(&t, values).unwrap();
        t
    }

    /// Indices below `n` for live rows of one block, junk for others.
    pub fn indices(&mut self, rows: &Rows, n: usize) -> TensorArg {
        let values: Vec<u32> = (0..rows.t).map(|r| if r < rows.live { self.rng.below(n) as u32 } else { 0xdead_beef }).collect();
        self.words(1, rows.t, &values)
    }

    /// Blocks with or without a live count.
    pub fn blocks(&mut self, copies: Copies) -> Rows {
        let t = self.rng.range(0, 9);
        let live = self.rng.below(t + 1);
        let tensor = self.rng.coin().then(|| self.words(1, 1, &[live as u32]));
        Rows { copies, t, live: if tensor.is_some() { live } else { t }, tensor }
    }

    /// Base alone, value form with or without base, tangent form.
    pub fn copies(&mut self) -> Copies {
        let n = self.rng.range(1, 3) as u32;
        [Copies::BASE, Copies::value(n, true), Copies::value(n, false), Copies::tangent(n)][self.rng.below(4)]
    }

    /// A tensor, or a weight imported for `uses`.
    pub fn matrix(&mut self, rows: usize, cols: usize, uses: Uses) -> Matrix<TensorArg> {
        let dtype = self.rng.float();
        if self.rng.coin() {
            return self.dense(dtype, rows, cols).into();
        }
        let mut bytes = Vec::new();
        for _ in 0..rows * cols {
            let v = self.rng.unit();
            match dtype {
                DType::F16 => bytes.extend(f16::from_f32(v).to_ne_bytes()),
                DType::Bf16 => bytes.extend(bf16::from_f32(v).to_ne_bytes()),
                _ => bytes.extend(v.to_ne_bytes()),
            }
        }
        let spec = WeightSpec { dtype, rows, cols, uses };
        self.runner.device().import_weight(&spec, WeightData::Borrowed(&bytes)).unwrap().into()
    }

    /// Cumulative lengths of `n` sequences within `rows`.
    pub fn cumulative(&mut self, n: usize, rows: usize) -> Vec<u32> {
        let mut ends: Vec<u32> = (0..n).map(|_| self.rng.below(rows + 1) as u32).collect();
        ends.sort_unstable();
        [0].into_iter().chain(ends).collect()
    }
}

/// A drawn op and how far results may be apart, see [`tolerance`].
pub struct Case {
    pub op: Op<TensorArg>,
    pub tolerance: f64,
}

/// `roundings` f32 roundings of intermediates of at most `magnitude`: what a decomposition adds to a native result, which has none.
pub fn tolerance(roundings: usize, magnitude: f64) -> f64 {
    roundings as f64 * magnitude / (1 << 24) as f64
}

pub fn case(op: impl Into<Op<TensorArg>>, tolerance: f64) -> Case {
    Case { op: op.into(), tolerance }
}

/// The buffers behind all written operands, whole.
fn outputs(draw: &mut Draw, op: &Op<TensorArg>) -> Vec<(&'static str, DType, Vec<f32>)> {
    let mut written: Vec<(&'static str, TensorArg)> = Vec::new();
    op.visit(&mut |name, access, operand| {
        if let OperandRef::Tensor(t) = operand
            && access.writes()
        {
            let size = t.spec.dtype.block().1;
            let whole = TensorSpec::vector(t.spec.dtype, t.buffer.bytes() / size);
            written.push((name, TensorArg::new(t.buffer.clone(), whole)));
        }
    });
    written.iter().map(|(name, t)| (*name, t.spec.dtype, draw.runner.read_f32(t).unwrap())).collect()
}

fn close(dtype: DType, a: f32, b: f32, tolerance: f64) -> bool {
    let unit = match dtype {
        DType::F16 => 2f64.powi(-10),
        DType::Bf16 => 2f64.powi(-7),
        _ => 2f64.powi(-23),
    };
    let (x, y) = (f64::from(a), f64::from(b));
    // Each side was rounded once to the output's type; subnormals of f16 are 2^-24 apart.
    let rounding = if tolerance == 0.0 { 0.0 } else { unit * x.abs().max(y.abs()) + 2f64.powi(-24) };
    a.to_bits() == b.to_bits() || a == b || (x - y).abs() <= tolerance + rounding
}

pub fn primitives(inner: DeviceRef) -> DeviceRef {
    Restricted::new(inner, Allow::Primitives, "primitives")
}

/// The devices that a case runs on besides the reference; each lacks every composite.
fn devices(seed: u64) -> Vec<DeviceRef> {
    let mut all: Vec<DeviceRef> = vec![primitives(Reference::new())];
    if seed.is_multiple_of(4) {
        let config = zofo_hal::reference::HostileConfig::seeded(seed);
        all.push(primitives(zofo_hal::reference::Hostile::new(config)));
    }
    all
}

/// Runs `n` draws of a case natively and decomposed.
pub fn compare(name: &str, n: u64, draw_case: impl Fn(&mut Draw) -> Case) {
    for seed in 0..n {
        let reference: DeviceRef = Reference::new();
        let mut native = Draw::new(seed, reference);
        let expected_case = draw_case(&mut native);
        let spec = expected_case.op.spec();
        native.runner.run(expected_case.op.clone()).unwrap_or_else(|e| panic!("{name} seed {seed}: native: {e}"));
        assert_eq!(native.runner.stats().decomposed, 0, "{name} ran natively");
        let expected = outputs(&mut native, &expected_case.op);
        for device in devices(seed) {
            let answer = support(&*device, &spec);
            assert!(matches!(answer, Support::Emulated { .. }), "{name} seed {seed}: {answer:?} for {spec:?}");
            let mut other = Draw::new(seed, device.clone());
            let case = draw_case(&mut other);
            let what = format!("{name} seed {seed} on {}: {:?}", device.info().fingerprint, case.op);
            let before = other.runner.stats().decomposed;
            other.runner.run(case.op.clone()).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(other.runner.stats().decomposed > before, "{what} was not decomposed");
            let got = outputs(&mut other, &case.op);
            for ((operand, dtype, expected), (_, _, got)) in expected.iter().zip(&got) {
                for (i, (a, b)) in expected.iter().zip(got).enumerate() {
                    assert!(close(*dtype, *a, *b, case.tolerance), "{what}\n{operand}[{i}]: native {a}, decomposed {b}");
                }
            }
            other.runner.close().unwrap();
        }
        native.runner.close().unwrap();
    }
}
