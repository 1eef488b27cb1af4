//! What is the CPU's own: options, memory that devices share, weights kept in place.

use std::{any::Any, ops::Range, sync::Arc};
use zofo_cpu::{CpuDevice, CpuDriver, CpuOptions, Isa};
use zofo_hal::op::{Copy, MatMul, Orientation};
use zofo_hal::{
    Buffer, BufferRef, DType, Device, Driver, ErrorKind, Home, MapRead, MapWrite, MemorySpace, OpenOptions, Result, SharedBytes, TensorArg,
    TensorSpec, Usage, Uses, WeightData, WeightSpec, alloc_tensor,
};

fn device(threads: usize) -> Arc<CpuDevice> {
    CpuDevice::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap()
}

#[test]
fn a_device_says_what_it_is() {
    let d = device(2);
    assert_eq!(d.info().name, format!("CPU, 2 threads, {}", d.isa()));
    assert_eq!((d.threads(), d.space()), (2, MemorySpace::HOST));
    assert!(CpuDevice::new(CpuOptions { threads: Some(0), ..CpuOptions::default() }).is_err());
    let eight = CpuDevice::new(CpuOptions { threads: Some(1), int8: true, ..CpuOptions::default() }).unwrap();
    assert!(eight.info().name.contains(", int8 by ") && eight.features().int8_products && !d.features().int8_products);
    assert_ne!(eight.info().fingerprint, device(1).info().fingerprint, "results differ, so must fingerprints");
    let foreign = if cfg!(target_arch = "aarch64") { Isa::Avx2 } else { Isa::Neon };
    let e = CpuDevice::new(CpuOptions { isa: Some(foreign), ..CpuOptions::default() }).err().unwrap();
    assert!(e.to_string().contains("scalar"), "{e}");
}

#[test]
fn the_driver_opens_one_cpu() {
    assert_eq!(CpuDriver.devices().unwrap().len(), 1);
    assert!(CpuDriver.open(0, &OpenOptions::default().threads(1)).is_ok());
    assert!(CpuDriver.open(1, &OpenOptions::default()).is_err());
}

#[test]
fn devices_share_weights_and_frozen_buffers() {
    let (a, b) = (device(1), device(2));
    let spec = WeightSpec { dtype: DType::F32, rows: 1, cols: 1, uses: Uses::FORWARD };
    let w = a.import_weight(&spec, WeightData::Borrowed(&3.0f32.to_le_bytes())).unwrap();
    let (qa, qb) = (a.create_queue().unwrap(), b.create_queue().unwrap());
    let one = TensorSpec::new(DType::F32, 1, 1);
    let x = alloc_tensor(&*qa, one, Usage::Activations).unwrap();
    x.buffer.map_write(0..4).unwrap().cast::<f32>()[0] = 2.0;
    let y = alloc_tensor(&*qb, one, Usage::Activations).unwrap();
    let op = MatMul::new(x.clone(), &w, y.clone(), Orientation::Nt).into();
    assert_eq!(qb.submit(&op).err().map(|e| e.kind().clone()), Some(ErrorKind::InvalidArgument));
    x.buffer.freeze().unwrap();
    qb.submit(&op).unwrap();
    assert_eq!(y.buffer.map_read(0..4).unwrap().cast::<f32>(), [6.0]);
}

#[test]
fn a_buffer_outlives_its_queue() {
    let d = device(1);
    let q = d.create_queue().unwrap();
    let b = q.alloc(16, Usage::Activations).unwrap();
    drop(q);
    drop(d);
    b.map_write(0..16).unwrap()[3] = 7;
    assert_eq!(b.map_read(3..4).unwrap()[0], 7);
}

struct File(Vec<u8>);

impl AsRef<[u8]> for File {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn tables_stay_where_they_are_and_weights_of_products_take_their_rows_alone() {
    let d = device(1);
    let file: SharedBytes = Arc::new(File(vec![0; 34 * 4 + 3]));
    let before = d.memory();
    // At an odd offset, as in a file.
    for (dtype, cols) in [(DType::Q8_0, 64), (DType::Bf16, 34)] {
        let bytes = dtype.bytes(cols).unwrap() * 2;
        let table = WeightSpec { dtype, rows: 2, cols, uses: Uses { gather: true, ..Uses::default() } };
        let t = d.import_weight(&table, WeightData::Shared(file.clone(), 3..3 + bytes)).unwrap();
        assert_eq!(t.bytes(), bytes);
        assert_eq!(Arc::strong_count(&file), 2);
    }
    assert_eq!(d.memory(), before, "nothing is allocated for shared bytes in place");
    // Panels of 16 rows: quantised ones stay as small as they are.
    let spec = WeightSpec { dtype: DType::Q8_0, rows: 2, cols: 64, uses: Uses::ALL };
    let w = d.import_weight(&spec, WeightData::Shared(file.clone(), 3..139)).unwrap();
    assert_eq!(w.bytes(), 16 * 68);
    assert_eq!(Arc::strong_count(&file), 1);
}

#[test]
fn bytes_that_do_not_fit_are_refused() {
    let d = device(1);
    let spec = |dtype, cols| WeightSpec { dtype, rows: 2, cols, uses: Uses::FORWARD };
    for (spec, bytes, kind) in [
        (spec(DType::F32, 4), 31, ErrorKind::InvalidArgument),
        (spec(DType::Q4K, 100), 144, ErrorKind::InvalidArgument),
        (spec(DType::U32, 4), 32, ErrorKind::Unsupported),
        (spec(DType::F32, usize::MAX / 8), 32, ErrorKind::InvalidArgument),
    ] {
        let e = d.import_weight(&spec, WeightData::Borrowed(&vec![0; bytes])).err().unwrap();
        assert_eq!(e.kind(), &kind, "{e}");
    }
}

#[test]
fn a_steady_state_allocates_nothing() {
    let d = device(2);
    let q = d.create_queue().unwrap();
    let spec = TensorSpec::new(DType::F32, 64, 64);
    let [a, b, c] = [(); 3].map(|()| alloc_tensor(&*q, spec, Usage::Activations).unwrap());
    let op = MatMul::new(a, b, c.clone(), Orientation::Nt).into();
    q.reserve(d.workspace(&zofo_hal::Op::spec(&op))).unwrap();
    let before = d.memory();
    for _ in 0..5 {
        q.submit(&op).unwrap();
    }
    assert_eq!(d.memory(), before);
    q.close().unwrap();
    assert!(d.memory().in_use < before.in_use, "the workspace goes with its queue");
}

#[test]
fn ops_of_a_mapped_buffer_are_refused_on_every_thread() {
    let d = device(1);
    let q = d.create_queue().unwrap();
    let spec = TensorSpec::new(DType::F32, 1, 4);
    let (a, b) = (alloc_tensor(&*q, spec, Usage::Activations).unwrap(), alloc_tensor(&*q, spec, Usage::Activations).unwrap());
    let op = Copy::new(a.clone(), b.clone()).into();
    let guard = a.buffer.map_read(0..16).unwrap();
    std::thread::scope(|s| s.spawn(|| assert!(q.submit(&op).is_err())).join().unwrap());
    drop(guard);
    q.submit(&op).unwrap();
}

/// A buffer that claims more than the one it stands for.
struct Impostor(BufferRef);

impl Buffer for Impostor {
    fn bytes(&self) -> usize {
        1 << 40
    }
    fn space(&self) -> MemorySpace {
        self.0.space()
    }
    fn usage(&self) -> Usage {
        self.0.usage()
    }
    fn home(&self) -> Home {
        self.0.home()
    }
    fn freeze(&self) -> Result<()> {
        self.0.freeze()
    }
    fn map_read(&self, range: Range<usize>) -> Result<MapRead<'_>> {
        self.0.map_read(range)
    }
    fn map_write(&self, range: Range<usize>) -> Result<MapWrite<'_>> {
        self.0.map_write(range)
    }
    fn as_any(&self) -> &dyn Any {
        self.0.as_any()
    }
}

#[test]
fn what_stands_for_a_buffer_is_not_one() {
    let d = device(1);
    let q = d.create_queue().unwrap();
    let real = alloc_tensor(&*q, TensorSpec::new(DType::F32, 1, 1), Usage::Activations).unwrap();
    let claimed = TensorArg::new(Arc::new(Impostor(real.buffer.clone())), TensorSpec::new(DType::F32, 1024, 1024));
    let e = q.submit(&zofo_hal::op::Fill::new(claimed, 1.0).into()).unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::ForeignBuffer, "{e}");
}

/// Sizes whose product or number overflows are refused, not wrapped.
#[test]
fn absurd_sizes_are_refused() {
    let d = device(1);
    let q = d.create_queue().unwrap();
    let t = alloc_tensor(&*q, TensorSpec::new(DType::F32, 1, 4), Usage::Activations).unwrap();
    for spec in [
        TensorSpec::new(DType::F32, usize::MAX, 0),
        TensorSpec::new(DType::F32, 2, 1).with_stride(usize::MAX),
        TensorSpec::new(DType::F32, 1 << 62, 4),
    ] {
        let mut bad = t.clone();
        bad.spec = spec;
        let e = q.submit(&zofo_hal::op::Fill::new(bad, 1.0).into()).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::InvalidArgument, "{spec:?}: {e}");
    }
    assert!(CpuDevice::new(CpuOptions { threads: Some(1 << 20), ..CpuOptions::default() }).is_err());
}
