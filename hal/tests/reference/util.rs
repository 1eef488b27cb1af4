//! A device with its queue, and numbers to run on it.

use zofo_hal::op::Op;
use zofo_hal::reference::{Hostile, HostileConfig, Reference};
use zofo_hal::{
    DType, DeviceRef, Error, ErrorKind, Queue, TensorArg, TensorSpec, Usage, Uses, WeightData, WeightRef, WeightSpec, alloc_tensor,
};

pub struct Rig {
    pub device: DeviceRef,
    pub queue: Box<dyn Queue>,
}

/// Both reference devices.
pub fn rigs() -> [Rig; 2] {
    [Rig::new(), Rig::on(Hostile::new(HostileConfig::seeded(1)))]
}

impl Rig {
    pub fn new() -> Self {
        Self::on(Reference::new())
    }

    pub fn on(device: DeviceRef) -> Self {
        let queue = device.create_queue().unwrap();
        Self { device, queue }
    }

    pub fn alloc(&self, spec: TensorSpec) -> TensorArg {
        alloc_tensor(&*self.queue, spec, Usage::Activations).unwrap()
    }

    /// An f32 tensor that holds garbage.
    pub fn out(&self, rows: usize, cols: usize) -> TensorArg {
        self.alloc(TensorSpec::new(DType::F32, rows, cols))
    }

    pub fn f32(&self, rows: usize, cols: usize, values: &[f32]) -> TensorArg {
        let t = self.out(rows, cols);
        self.put(&t, values);
        t
    }

    pub fn u32(&self, values: &[u32]) -> TensorArg {
        self.words(1, values.len(), values)
    }

    pub fn words(&self, rows: usize, cols: usize, values: &[u32]) -> TensorArg {
        let t = self.alloc(TensorSpec::new(DType::U32, rows, cols));
        t.buffer.map_write(0..4 * values.len()).unwrap().cast::<u32>().copy_from_slice(values);
        t
    }

    /// A tensor of another float type.
    pub fn float(&self, dtype: DType, rows: usize, cols: usize, values: &[f32]) -> TensorArg {
        let (from, to) = (self.f32(rows, cols, values), self.alloc(TensorSpec::new(dtype, rows, cols)));
        self.run(zofo_hal::op::Cast::new(from, to.clone()));
        to
    }

    pub fn put(&self, t: &TensorArg, values: &[f32]) {
        assert_eq!(t.spec.len(), values.len());
        t.buffer.map_write(t.byte_range()).unwrap().cast::<f32>().copy_from_slice(values);
    }

    /// The elements of an f32 tensor without gaps.
    pub fn get(&self, t: &TensorArg) -> Vec<f32> {
        assert_eq!((t.spec.dtype, t.spec.stride), (DType::F32, t.spec.cols));
        t.buffer.map_read(t.byte_range()).unwrap().cast::<f32>().to_vec()
    }

    pub fn get_words(&self, t: &TensorArg) -> Vec<u32> {
        t.buffer.map_read(t.byte_range()).unwrap().cast::<u32>().to_vec()
    }

    /// The elements of a tensor of any float type, as f32.
    pub fn get_float(&self, t: &TensorArg) -> Vec<f32> {
        let out = self.out(t.spec.rows, t.spec.cols);
        self.run(zofo_hal::op::Cast::new(t.clone(), out.clone()));
        self.get(&out)
    }

    pub fn run(&self, op: impl Into<Op<TensorArg>>) {
        let op = op.into();
        self.queue.submit(&op).unwrap();
    }

    /// Submits an op that the queue must refuse.
    pub fn refused(&self, op: impl Into<Op<TensorArg>>) -> Error {
        self.queue.submit(&op.into()).expect_err("the op must be refused")
    }

    /// Runs an op that must fail, and clears the failure.
    pub fn fails(&self, op: impl Into<Op<TensorArg>>) -> Error {
        self.run(op);
        let e = self.queue.synchronize(None).expect_err("the op must fail");
        assert_eq!(*e.kind(), ErrorKind::Execution { poisoned: false });
        self.queue.reset().unwrap();
        e
    }

    pub fn weight(&self, dtype: DType, rows: usize, cols: usize, uses: Uses, bytes: &[u8]) -> WeightRef {
        self.device.import_weight(&WeightSpec { dtype, rows, cols, uses }, WeightData::Borrowed(bytes)).unwrap()
    }

    pub fn weight_f32(&self, rows: usize, cols: usize, uses: Uses, values: &[f32]) -> WeightRef {
        self.weight(DType::F32, rows, cols, uses, bytemuck::cast_slice(values))
    }
}

/// Uniform numbers in [-1, 1) with 16 bits, so that sums of a few products are exact in f32's neighbourhood.
pub fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    (0..10).for_each(|_| {
        next();
    });
    (0..n).map(|_| (next() >> 48) as f32 / 32768.0 - 1.0).collect()
}

pub fn assert_close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let scale = w.abs().max(1.0);
        assert!((f64::from(*g) - w).abs() <= tolerance * scale, "element {i}: {g} instead of {w}");
    }
}

/// One rounding to f32 of a number near 1.
pub const ROUNDING: f64 = 6e-8;

/// Tolerance of [`slope`]: with h = 1/32 the fourth-order term is about h^4 = 1e-6 times a fifth derivative, the rounding of f32 results about
/// 6e-8 / h = 2e-6 times the number of results summed; derivatives of order 10 and tens of results stay below 2e-4.
pub const SLOPE: f64 = 2e-4;

/// The derivative of `f` at 0 by the five-point formula.
pub fn slope(f: impl Fn(f32) -> f64) -> f64 {
    let h = 1.0 / 32.0;
    (8.0 * (f(h) - f(-h)) - (f(2.0 * h) - f(-2.0 * h))) / (12.0 * f64::from(h))
}

/// `x + step v`
pub fn moved(x: &[f32], step: f32, v: &[f32]) -> Vec<f32> {
    x.iter().zip(v).map(|(x, v)| x + step * v).collect()
}

pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// That every element of a tangent is the slope of the same element of a value.
pub fn assert_tangent(tangent: &[f32], value: impl Fn(f32) -> Vec<f32>) {
    let samples: Vec<(f32, Vec<f32>)> = [-2.0, -1.0, 1.0, 2.0].map(|k| (k / 32.0, value(k / 32.0))).into();
    for (i, t) in tangent.iter().enumerate() {
        let want = slope(|h| samples.iter().find(|(k, _)| *k == h).unwrap().1[i].into());
        assert!((f64::from(*t) - want).abs() <= SLOPE * want.abs().max(1.0), "element {i}: {t} instead of {want}");
    }
}

/// That `gradient` of `sum(weights * out(x))` agrees with the slope of that sum along a few directions.
pub fn assert_gradient(gradient: &[f32], x: &[f32], loss: impl Fn(&[f32]) -> f64) {
    for seed in 0..4 {
        let v = random(900 + seed, x.len());
        let (got, want) = (dot(gradient, &v), slope(|h| loss(&moved(x, h, &v))));
        assert!((got - want).abs() <= SLOPE * want.abs().max(1.0), "along direction {seed}: {got} instead of {want}");
    }
}
