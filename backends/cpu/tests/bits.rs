//! A row's bits depend on that row alone: not on threads, rows beside it, or copies. Shapes are large enough to be split.
//! Every tier of this machine is tested, or with `ZOFO_CPU_ISA=avx2` that one alone.

mod tiers;

use std::sync::Arc;
use zofo_cpu::{CpuDevice, CpuOptions, Isa};
use zofo_hal::op::{
    Attention, AttentionShape, Copies, CrossEntropy, CrossEntropyBackward, LoraMatMul, LoraMatMulBackward, MatMul, Orientation,
    PerturbLoraMatMul, SwiGlu,
};
use zofo_hal::perturb::{Direction, Domain, Factor, NoiseParams, Projection, Site, TensorId};
use zofo_hal::{DType, Device, Op, Queue, TensorArg, TensorSpec, Usage, Uses, WeightData, WeightRef, WeightSpec, alloc_tensor};

fn device(isa: Isa, threads: usize, int8: bool) -> Arc<CpuDevice> {
    CpuDevice::new(CpuOptions { threads: Some(threads), isa: Some(isa), int8 }).unwrap()
}

/// Numbers in (-1, 1) that depend on `seed` and place.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A queue with what a test needs around it.
struct Host(Box<dyn Queue>, Arc<CpuDevice>);

impl Host {
    fn new(isa: Isa, threads: usize) -> Self {
        Self::on(device(isa, threads, false))
    }

    fn on(device: Arc<CpuDevice>) -> Self {
        Self(device.create_queue().unwrap(), device)
    }

    fn empty(&self, dtype: DType, rows: usize, cols: usize) -> TensorArg {
        alloc_tensor(&*self.0, TensorSpec::new(dtype, rows, cols), Usage::Activations).unwrap()
    }

    fn f32(&self, rows: usize, cols: usize, v: &[f32]) -> TensorArg {
        let t = self.empty(DType::F32, rows, cols);
        t.buffer.map_write(t.byte_range()).unwrap().cast::<f32>().copy_from_slice(&v[..rows * cols]);
        t
    }

    fn random(&self, rows: usize, cols: usize, seed: u64) -> TensorArg {
        self.f32(rows, cols, &values(rows * cols, seed))
    }

    fn u32(&self, v: &[u32]) -> TensorArg {
        let t = self.empty(DType::U32, 1, v.len());
        t.buffer.map_write(t.byte_range()).unwrap().cast::<u32>().copy_from_slice(v);
        t
    }

    fn weight(&self, dtype: DType, rows: usize, cols: usize) -> WeightRef {
        let spec = WeightSpec { dtype, rows, cols, uses: Uses::ALL };
        let v = values(rows * cols, 99);
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => v.iter().flat_map(|x| half_bf16(*x).to_le_bytes()).collect(),
            // A scale of 2^-7 before every 32 signed bytes.
            DType::Q8_0 => v.chunks(32).flat_map(|c| [0x00, 0x20].into_iter().chain(c.iter().map(|x| (x * 127.0) as i8 as u8))).collect(),
            _ => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        self.1.import_weight(&spec, WeightData::Borrowed(&bytes)).unwrap()
    }

    fn run(&self, op: impl Into<Op<TensorArg>>) {
        self.0.submit(&op.into()).unwrap();
        self.0.synchronize(None).unwrap();
    }

    fn bits(&self, t: &TensorArg) -> Vec<u32> {
        t.buffer.map_read(t.byte_range()).unwrap().cast::<u32>().to_vec()
    }
}

fn half_bf16(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

fn tiers_under_test() -> Vec<Isa> {
    tiers::chosen().unwrap_or_else(|e| panic!("{e}"))
}

/// Runs `f` with one thread and with two, on every tier, and compares what it gives.
fn same_on_two_threads(f: impl Fn(&Host) -> Vec<Vec<u32>>) {
    for isa in tiers_under_test() {
        let (one, two) = (f(&Host::new(isa, 1)), f(&Host::new(isa, 2)));
        assert!(one == two, "{isa}: one thread and two give different bits");
    }
}

#[test]
fn products() {
    same_on_two_threads(|h| {
        let mut out = Vec::new();
        for dtype in [DType::F32, DType::Bf16, DType::Q8_0] {
            let w = h.weight(dtype, 352, 320);
            let (x, y) = (h.random(67, 320, 1), h.empty(DType::F32, 67, 352));
            h.run(MatMul::new(x, &w, y.clone(), Orientation::Nt));
            let dx = h.empty(DType::F32, 67, 320);
            h.run(MatMul::new(y.clone(), &w, dx.clone(), Orientation::Nn));
            out.extend([h.bits(&y), h.bits(&dx)]);
        }
        let (a, b, g) = (h.random(300, 64, 2), h.random(300, 330, 3), h.empty(DType::F32, 64, 330));
        h.run(MatMul::new(a, b, g.clone(), Orientation::Tn));
        out.push(h.bits(&g));
        out
    });
}

#[test]
fn rows_alone_and_among_others() {
    for isa in tiers_under_test() {
        let h = Host::new(isa, 2);
        for dtype in [DType::F32, DType::Bf16, DType::Q8_0] {
            for (orientation, k, n) in [(Orientation::Nt, 320, 352), (Orientation::Nn, 352, 320)] {
                let w = h.weight(dtype, 352, 320);
                let (x, y) = (h.random(131, k, 1), h.empty(DType::F32, 131, n));
                h.run(MatMul::new(x.clone(), &w, y.clone(), orientation));
                let whole = h.bits(&y);
                // Every kind of leftover of every tier's micro-kernel.
                for (first, rows) in [(0, 1), (130, 1), (17, 2), (40, 3), (60, 5), (77, 11), (5, 100)] {
                    let part = h.empty(DType::F32, rows, n);
                    h.run(MatMul::new(x.rows(first, rows), &w, part.clone(), orientation));
                    assert!(h.bits(&part) == whole[first * n..(first + rows) * n], "{isa} {dtype} {orientation:?} rows {first}+{rows}");
                }
            }
        }
    }
}

#[test]
fn products_in_8_bits() {
    let mut first: Option<Vec<u32>> = None;
    for isa in tiers_under_test() {
        let exact = Host::new(isa, 1);
        let (one, two) = (Host::on(device(isa, 1, true)), Host::on(device(isa, 2, true)));
        let run = |h: &Host, rows: std::ops::Range<usize>| {
            let (w, x) = (h.weight(DType::Q8_0, 352, 320), h.random(131, 320, 1));
            let y = h.empty(DType::F32, rows.len(), 352);
            h.run(MatMul::new(x.rows(rows.start, rows.len()), &w, y.clone(), Orientation::Nt));
            h.bits(&y)
        };
        let whole = run(&two, 0..131);
        assert!(whole == run(&one, 0..131), "{isa}: one thread and two give different bits");
        for rows in [0..1, 130..131, 17..19, 40..43, 60..65, 77..88, 5..105] {
            assert!(run(&two, rows.clone()) == whole[rows.start * 352..rows.end * 352], "{isa} rows {rows:?}");
        }
        assert!(whole == *first.get_or_insert_with(|| whole.clone()), "{isa} gives other bits than the tier before");
        assert!(whole != run(&exact, 0..131), "{isa}: nothing is rounded to 8 bits");
        // Backward products are as ever.
        let back = |h: &Host| {
            let (w, dx) = (h.weight(DType::Q8_0, 352, 320), h.empty(DType::F32, 9, 320));
            h.run(MatMul::new(h.random(9, 352, 2), &w, dx.clone(), Orientation::Nn));
            h.bits(&dx)
        };
        assert!(back(&two) == back(&exact), "{isa}: a backward product is rounded");
    }
}

fn noise(h: &Host, copies: u32) -> TensorArg {
    let direction = Direction::new(Domain::Main, 1, 0).unwrap();
    assert!(direction.copy(copies).is_ok());
    h.u32(bytemuck::cast_slice(&[NoiseParams::new(7, 3, direction, 1e-2)]))
}

#[test]
fn perturbed_copies() {
    let (t, inputs, outputs, rank) = (37, 160, 176, 5);
    let site = |factor, ld| Some(Site::new(TensorId::new(2, Projection::V, factor).unwrap(), ld));
    same_on_two_threads(|h| {
        let w = h.weight(DType::F32, outputs, inputs);
        let mut all = Vec::new();
        for (copies, shared) in [
            (Copies::value(4, true), false),
            (Copies::tangent(4), false),
            (Copies::value(4, true), true),
            (Copies::tangent(4), true),
            (Copies::value(3, false), false),
        ] {
            let rows = copies.total() * t;
            let x = h.random(if shared { t } else { rows }, inputs, 4);
            let (a, b) = (h.random(rank, inputs, 5), h.random(outputs, rank, 6));
            let out = h.empty(DType::F32, rows, outputs);
            let op = PerturbLoraMatMul::new(x, a.clone(), b.clone(), noise(h, 4), &w, out.clone(), 0.5, copies)
                .site_a(site(Factor::A, inputs as u32))
                .site_b(site(Factor::B, rank as u32))
                .shared_input(shared);
            h.run(op);
            all.push(h.bits(&out));
        }
        // The base block is the plain layer, bit for bit, in both forms.
        let (x, out) = (h.random(t, inputs, 4), h.empty(DType::F32, t, outputs));
        h.run(LoraMatMul::new(x, h.random(rank, inputs, 5), h.random(outputs, rank, 6), &w, out.clone(), 0.5));
        let plain = h.bits(&out);
        assert!(all[..4].iter().all(|a| a[..plain.len()] == plain), "a base block is not the plain layer");
        // The shared input is what separate copies of it give.
        let (spread, out) = (values(t * inputs, 4).repeat(5), h.empty(DType::F32, 5 * t, outputs));
        let op = PerturbLoraMatMul::new(
            h.f32(5 * t, inputs, &spread),
            h.random(rank, inputs, 5),
            h.random(outputs, rank, 6),
            noise(h, 4),
            &w,
            out.clone(),
            0.5,
            Copies::value(4, true),
        )
        .site_a(site(Factor::A, inputs as u32))
        .site_b(site(Factor::B, rank as u32));
        h.run(op);
        assert!(h.bits(&out) == all[2], "a shared input is not its copies");
        all
    });
}

#[test]
fn losses_and_gradients() {
    let (t, d, vocabulary) = (70, 48, 4500);
    same_on_two_threads(|h| {
        let head = h.weight(DType::F32, vocabulary, d);
        let labels: Vec<u32> = (0..60).map(|i| if i % 7 == 3 { u32::MAX } else { i + 5 }).collect();
        let targets: Vec<u32> = (0..60).map(|i| i * 74 % vocabulary as u32).collect();
        let (rows, targets, slope) = (h.u32(&labels), h.u32(&targets), h.empty(DType::F32, 60, d));
        let x = h.random(3 * t, d, 8);
        let losses = h.empty(DType::F32, 3, 60);
        let op = CrossEntropy::new(x.clone(), rows.clone(), targets.clone(), &head, losses.clone());
        h.run(op.copies(Copies::tangent(2)));
        let base = h.empty(DType::F32, 1, 60);
        h.run(CrossEntropy::new(x.rows(0, t), rows.clone(), targets, &head, base.clone()).slope(slope.clone()));
        let dh = h.empty(DType::F32, t, d);
        h.run(CrossEntropyBackward::new(slope.clone(), rows, h.f32(1, 1, &[0.125]), dh.clone()));
        vec![h.bits(&losses), h.bits(&base), h.bits(&slope), h.bits(&dh)]
    });
}

#[test]
fn layers() {
    let (t, inputs, outputs, rank) = (150, 128, 144, 4);
    same_on_two_threads(|h| {
        let w = h.weight(DType::Bf16, outputs, inputs);
        let (da, db, dx) = (h.random(rank, inputs, 1), h.random(outputs, rank, 2), h.random(t, inputs, 3));
        let op = LoraMatMulBackward::new(
            h.random(t, inputs, 4),
            h.random(t, rank, 5),
            h.random(rank, inputs, 6),
            h.random(outputs, rank, 7),
            h.random(t, outputs, 8),
            &w,
            da.clone(),
            db.clone(),
            2.0,
        );
        // In two parts the same bits as in one.
        let again = [h.random(rank, inputs, 1), h.random(outputs, rank, 2), h.random(t, inputs, 3)];
        let mut parts = op.clone();
        (parts.da, parts.db) = (again[0].clone(), again[1].clone());
        h.run(parts.clone().dx(again[2].clone()).beta(1.0).factors(false));
        h.run(parts);
        h.run(op.dx(dx.clone()).beta(1.0));
        for (part, whole) in again.iter().zip([&da, &db, &dx]) {
            assert_eq!(h.bits(part), h.bits(whole));
        }
        let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 32, scale: 0.2, causal: true };
        let cu = h.u32(&[0, 30, 30, 100, 150]);
        let (q, k, v, o) = (h.random(t, 128, 1), h.random(t, 64, 2), h.random(t, 64, 3), h.empty(DType::F32, t, 128));
        h.run(Attention::new(q, k, v, cu.clone(), cu, o.clone(), shape));
        let y = h.empty(DType::F32, t, 512);
        h.run(SwiGlu::new(h.random(t, 512, 1), h.random(t, 512, 2), y.clone()));
        [da, db, dx, o, y].iter().map(|x| h.bits(x)).collect()
    });
}
