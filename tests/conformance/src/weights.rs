//! Importing weights.

use crate::{
    buffers::{f32s, read_f32, refuses, submit},
    check::{Bench, Outcome, PATIENCE, ensure},
    foreign::ForeignWeight,
    host::HostTensor,
    rng::Rng,
    suite::Tests,
};
use std::sync::Arc;
use zofo_hal::{
    DType, ErrorKind, Op, SharedBytes, Support, TensorArg, TensorSpec, Uses, WeightData, WeightRef, WeightSpec,
    op::{MatMul, Orientation},
};

pub(super) fn tests(t: &mut Tests) {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_float() || d.is_quantised()) {
        t.add(format!("weight/{dtype}/import"), move |b| import(b, dtype));
    }
    t.add("weight/f32/shared_bytes", shared_bytes);
    t.add("weight/f32/impostor", impostor);
}

fn import(b: &Bench, dtype: DType) -> Outcome {
    let block = dtype.block().0;
    let t = HostTensor::random(&mut Rng::new(7), dtype, 6, 2 * block, 1.0);
    let spec = WeightSpec { dtype, rows: t.rows, cols: t.cols, uses: Uses::ALL };
    let import = |spec: &WeightSpec, bytes: &[u8]| b.device.import_weight(spec, WeightData::Borrowed(bytes));
    if !b.device.dtype_usage(dtype).weight {
        return refuses(&format!("importing {dtype}, which dtype_usage denies,"), import(&spec, &t.bytes), &ErrorKind::Unsupported);
    }
    for uses in [Uses::FORWARD, Uses::TRAINING, Uses::ALL, Uses { nt: false, nn: false, gather: true }] {
        let spec = WeightSpec { uses, ..spec };
        let w = import(&spec, &t.bytes)?;
        ensure!(w.spec() == spec, "imported {spec:?}, it says {:?}", w.spec());
        ensure!(w.space() == b.device.space(), "a weight is in {:?}, its device in {:?}", w.space(), b.device.space());
        ensure!(w.bytes() > 0, "a weight of {} bytes takes none", t.bytes.len());
    }
    for (what, bytes) in [("too few", &t.bytes[1..]), ("no", &[][..]), ("too many", &[&t.bytes[..], &[0]].concat())] {
        refuses(&format!("importing {what} bytes"), import(&spec, bytes), &ErrorKind::InvalidArgument)?;
    }
    if block > 1 {
        let ragged = WeightSpec { cols: block + 1, ..spec };
        refuses("importing rows that are not whole blocks", import(&ragged, &t.bytes), &ErrorKind::InvalidArgument)?;
    }
    let huge = WeightSpec { rows: usize::MAX / 2, cols: 4 * block, ..spec };
    refuses("importing a size that overflows", import(&huge, &t.bytes), &ErrorKind::InvalidArgument)?;
    let empty = WeightSpec { rows: 0, ..spec };
    import(&empty, &[])?;
    Ok(())
}

fn product(b: &Bench, w: WeightRef) -> Outcome<Option<Vec<f32>>> {
    let (x, out) = (f32s(&*b.queue, &[1.0, 2.0, 3.0, 4.0])?, f32s(&*b.queue, &[0.0; 4])?);
    let row = |b| TensorArg::new(b, TensorSpec::vector(DType::F32, 4));
    let op: Op<TensorArg> = MatMul::new(row(x), w, row(out.clone()), Orientation::Nt).into();
    if let Support::Unsupported { .. } = b.device.supports(&op.spec()) {
        return Ok(None);
    }
    submit(&*b.queue, &op)?;
    b.queue.synchronize(PATIENCE)?;
    Ok(Some(read_f32(&out)?))
}

fn shared_bytes(b: &Bench) -> Outcome {
    if !b.device.dtype_usage(DType::F32).weight {
        return Ok(());
    }
    let spec = WeightSpec { dtype: DType::F32, rows: 4, cols: 4, uses: Uses::ALL };
    let identity: Vec<f32> = (0..16).map(|i| if i % 5 == 0 { 1.0 } else { 0.0 }).collect();
    // In a file, weights lie anywhere: at offsets that suit no vector load, or not even an f32.
    for offset in [0usize, 4, 6, 7] {
        let mut bytes = vec![0xff; offset];
        bytes.extend_from_slice(bytemuck::cast_slice(&identity));
        bytes.extend([0xff; 5]);
        let bytes: SharedBytes = Arc::new(bytes);
        let w = b.device.import_weight(&spec, WeightData::Shared(bytes.clone(), offset..offset + 64))?;
        if let Some(out) = product(b, w)? {
            ensure!(out == [1.0, 2.0, 3.0, 4.0], "x I = {out:?} with the weight at byte {offset} of shared bytes");
        }
        let outside = WeightData::Shared(bytes.clone(), offset + 6..offset + 70);
        refuses("a range outside the shared bytes", b.device.import_weight(&spec, outside), &ErrorKind::InvalidArgument)?;
    }
    Ok(())
}

fn impostor(b: &Bench) -> Outcome {
    match product(b, Arc::new(ForeignWeight(b.device.space()))) {
        Ok(None) => Ok(()),
        Ok(Some(out)) => Err(format!("a product with a weight of another backend gave {out:?}").into()),
        Err(e) => match e.downcast_ref::<zofo_hal::Error>() {
            Some(e) if *e.kind() == ErrorKind::ForeignBuffer => Ok(()),
            _ => Err(format!("a weight of another backend must be refused with ForeignBuffer, not with {e}").into()),
        },
    }
}
