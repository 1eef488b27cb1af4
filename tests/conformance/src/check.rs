//! Runs a case on a device and compares.

use crate::{
    case::{Args, Case, Expect, Operand, Role},
    estimate::Est,
    host::{self, HostTensor},
};
use std::{error::Error as StdError, ops::Range, sync::Arc, time::Duration};
use zofo_hal::{
    BufferRef, DType, DeviceRef, Error, ErrorKind, Features, Matrix, Op, Queue, Support, TensorArg, TensorSpec, Usage, WeightData,
    WeightSpec, reference::Reference,
};

/// Why a test failed.
pub type Failure = Box<dyn StdError + Send + Sync>;
/// What a test returns.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Fails a test with a formatted message unless a condition holds.
macro_rules! ensure {
    ($cond:expr, $($why:tt)+) => {
        // A name of its own: a comparison with NaN must count as one that does not hold.
        let holds: bool = $cond;
        if !holds {
            return Err(format!($($why)+).into());
        }
    };
}
pub(crate) use ensure;

/// Long enough for any op of the kit, short enough to end a hung run.
pub const PATIENCE: Option<Duration> = Some(Duration::from_secs(120));

/// Surrounds inputs: all ones, as in [`HostTensor::poison_row`].
const AROUND_INPUTS: [u8; 2] = [0xff, 0xff];
/// Fills and surrounds outputs: another NaN in every float type, because one that was read and written keeps its bits.
pub const AROUND_OUTPUTS: [u8; 2] = [0xfd, 0xff];
/// Bytes around an operand.
const MARGIN: usize = 64;

/// Where the operands of a case lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Each in a buffer of its own, rows without gaps.
    Apart,
    /// All in one buffer, each a block of columns of a wider matrix, at offsets aligned to no more than their element.
    Together,
}

/// A device under test with a queue, and the reference device beside it.
pub struct Bench {
    /// The device.
    pub device: DeviceRef,
    /// A queue of the device.
    pub queue: Box<dyn Queue>,
    reference: Box<dyn Queue>,
}

impl Bench {
    /// A new queue on `device`.
    pub fn new(device: DeviceRef) -> Outcome<Self> {
        let queue = device.create_queue()?;
        let reference: DeviceRef = Reference::new();
        Ok(Self { reference: reference.create_queue()?, device, queue })
    }

    /// Runs `case` in every layout on the device, and on the reference, and compares both with what is expected.
    pub fn check(&self, case: &Case) -> Outcome {
        let mut reference = None;
        for layout in [Layout::Apart, Layout::Together] {
            self.check_in(case, layout, &mut reference).map_err(|e| format!("{} ({layout:?}): {e}", case.what))?;
        }
        Ok(())
    }

    /// `reference` is filled once: layouts change nothing about the result.
    fn check_in(&self, case: &Case, layout: Layout, reference: &mut Option<Outputs>) -> Outcome {
        let Some(got) = execute(&*self.queue, case, layout)? else {
            return Ok(());
        };
        let reference = match reference {
            Some(outputs) => outputs,
            empty => {
                let outputs = execute(&*self.reference, case, layout).map_err(|e| format!("on the reference device: {e}"))?;
                empty.insert(outputs.ok_or("the reference device does not support this case")?)
            }
        };
        for operand in &case.operands {
            if let Role::Output(expect) = &operand.role {
                let (got, reference) = (output(&got, operand.name), output(reference, operand.name));
                self.compare(operand, expect, got, reference).map_err(|e| format!("{}: {e}", operand.name))?;
            }
        }
        if layout == Layout::Apart && self.device.features().deterministic {
            let again = execute(&*self.queue, case, layout)?.ok_or("supported once and not again")?;
            ensure!(same_bits(&got, &again), "two runs on the same bits differ, but the device says it is deterministic");
        }
        Ok(())
    }

    fn compare(&self, operand: &Operand, expect: &[Expect], got: &HostTensor, reference: &HostTensor) -> Outcome {
        let Features { exact_updates, int8_products: int8, .. } = self.device.features();
        let (dtype, size) = (got.dtype, got.dtype.block().1);
        for (i, expect) in expect.iter().enumerate() {
            let at = i * size..(i + 1) * size;
            let place = || format!("element ({}, {}) of {dtype}[{}, {}]", i / got.cols, i % got.cols, got.rows, got.cols);
            let value = |t: &HostTensor| host::decode(dtype, &t.bytes[at.clone()]);
            match *expect {
                Expect::Any => {}
                Expect::Untouched => {
                    let before = &operand.tensor.bytes[at.clone()];
                    ensure!(&got.bytes[at.clone()] == before, "{} was written ({}), but must not be", place(), value(got));
                    ensure!(&reference.bytes[at.clone()] == before, "{} was written by the reference device", place());
                }
                Expect::Reference => {
                    let (g, r) = (&got.bytes[at.clone()], &reference.bytes[at.clone()]);
                    ensure!(g == r, "{} is {} ({g:02x?}), the reference has {} ({r:02x?})", place(), value(got), value(reference));
                }
                Expect::Near(est) => within(est, dtype, value(got), value(reference)).map_err(|e| format!("{} {e}", place()))?,
                Expect::Product(est, eight) => {
                    let of_device = if int8 { eight } else { est };
                    within(est, dtype, value(reference), value(reference)).map_err(|e| format!("{} {e}", place()))?;
                    within(of_device, dtype, value(got), value(reference)).map_err(|e| format!("{} {e}", place()))?;
                }
                Expect::Sequence(exact, est) => {
                    let est = if exact_updates { Est::from(f64::from(exact)) } else { est };
                    within(est, dtype, value(got), exact.into()).map_err(|e| format!("{} {e}", place()))?;
                    ensure!(value(reference) == f64::from(exact), "{} is {} on the reference, not {exact}", place(), value(reference));
                }
            }
        }
        Ok(())
    }
}

/// Whether `got` is a correct result, and so is that of the reference: the second failing means that kit and reference disagree on the op.
fn within(est: Est, dtype: DType, got: f64, reference: f64) -> Outcome {
    let (low, high) = est.interval(dtype);
    let inside = |x: f64| (low <= x && x <= high) || (x.is_nan() && est.v.is_nan());
    ensure!(inside(reference), "is {reference:e} on the reference device, which the kit holds to be within [{low:e}, {high:e}]");
    ensure!(inside(got), "is {got:e}, the reference has {reference:e}, allowed is [{low:e}, {high:e}]");
    Ok(())
}

/// The outputs of a run.
pub type Outputs = Vec<(&'static str, HostTensor)>;

/// The output called `name`.
///
/// # Panics
/// If there is none: a bug of the case.
pub fn output<'a>(outputs: &'a Outputs, name: &str) -> &'a HostTensor {
    &outputs.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no output {name}")).1
}

/// Whether two runs gave the same bits.
pub fn same_bits(a: &Outputs, b: &Outputs) -> bool {
    a.iter().zip(b).all(|((_, a), (_, b))| a.bytes == b.bytes)
}

/// A piece of a buffer that an operand takes, and what the buffer held at first.
struct Place {
    buffer: usize,
    offset: usize,
    spec: TensorSpec,
}

impl Place {
    /// Byte range of row `r` in the buffer.
    fn row(&self, r: usize) -> Range<usize> {
        let size = self.spec.dtype.block().1;
        let start = self.offset + r * self.spec.stride * size;
        start..start + self.spec.cols * size
    }
}

/// Lays the tensors of a case out: a place per operand (`None` for weights) and the image of each buffer.
fn place(case: &Case, layout: Layout) -> (Vec<Option<Place>>, Vec<Vec<u8>>) {
    let (mut places, mut images): (Vec<Option<Place>>, Vec<Vec<u8>>) = (Vec::new(), Vec::new());
    for operand in &case.operands {
        let t = &operand.tensor;
        if matches!(operand.role, Role::Weight(_)) || operand.alias.is_some() {
            places.push(None);
            continue;
        }
        let size = t.dtype.block().1;
        let fill = if matches!(operand.role, Role::Output(_)) { AROUND_OUTPUTS } else { AROUND_INPUTS };
        let place = match layout {
            Layout::Apart => {
                images.push(Vec::new());
                Place { buffer: images.len() - 1, offset: MARGIN, spec: TensorSpec::new(t.dtype, t.rows, t.cols) }
            }
            Layout::Together => {
                if images.is_empty() {
                    images.push(Vec::new());
                }
                let offset = (images[0].len() + MARGIN).next_multiple_of(size) + size;
                Place { buffer: 0, offset, spec: TensorSpec::new(t.dtype, t.rows, t.cols).with_stride(t.cols + 3) }
            }
        };
        let image = &mut images[place.buffer];
        let end = place.offset + t.rows * place.spec.stride * size + MARGIN;
        image.extend((image.len()..end).map(|at| fill[at % 2]));
        for r in 0..t.rows {
            let dense = r * t.cols * size..(r + 1) * t.cols * size;
            image[place.row(r)].copy_from_slice(&t.bytes[dense]);
        }
        places.push(Some(place));
    }
    (places, images)
}

/// Puts `bytes` in a new buffer.
pub fn upload(queue: &dyn Queue, bytes: &[u8]) -> zofo_hal::Result<BufferRef> {
    let buffer = queue.alloc(bytes.len(), Usage::Activations)?;
    buffer.map_write(0..bytes.len())?.copy_from_slice(bytes);
    Ok(buffer)
}

/// Runs a case. Whatever device it is, this checks that asking and running agree, that no byte changed but those of outputs, and that a
/// refused op leaves the queue usable. `None` where the device does not support the case.
pub fn execute(queue: &dyn Queue, case: &Case, layout: Layout) -> Outcome<Option<Outputs>> {
    let (places, images) = place(case, layout);
    let buffers = images.iter().map(|image| upload(queue, image)).collect::<Result<Vec<_>, _>>()?;
    let mut args = Args(Vec::new());
    for (operand, place) in case.operands.iter().zip(&places) {
        match (&operand.role, place) {
            (Role::Weight(uses), _) => {
                let t = &operand.tensor;
                let spec = WeightSpec { dtype: t.dtype, rows: t.rows, cols: t.cols, uses: *uses };
                let claimed = queue.device().dtype_usage(t.dtype).weight;
                match queue.device().import_weight(&spec, WeightData::Borrowed(&t.bytes)) {
                    Ok(w) => {
                        ensure!(w.spec() == spec, "a weight imported as {spec:?} says it is {:?}", w.spec());
                        args.push_weight(operand.name, w);
                    }
                    Err(e) if !claimed && *e.kind() == ErrorKind::Unsupported => return Ok(None),
                    Err(e) => return Err(format!("importing {spec:?} (dtype_usage says weight: {claimed}): {e:?}").into()),
                }
            }
            (_, Some(p)) => {
                let arg = TensorArg { buffer: Arc::clone(&buffers[p.buffer]), offset: p.offset, spec: p.spec };
                args.0.push((operand.name, Matrix::Tensor(arg)));
            }
            (_, None) => {}
        }
    }
    for operand in &case.operands {
        if let Some(input) = operand.alias {
            let shared = args.m(input);
            args.0.push((operand.name, shared));
        }
    }
    let op = (case.build)(&args);
    let support = queue.device().supports(&op.spec());
    let submitted = queue.submit(&op);
    if let Support::Unsupported { reason, .. } = support {
        refused(queue, &op, submitted, &reason)?;
        return Ok(None);
    }
    submitted?;
    queue.synchronize(PATIENCE)?;
    let mut after = Vec::new();
    for (buffer, image) in buffers.iter().zip(&images) {
        after.push(buffer.map_read(0..image.len())?.to_vec());
    }
    collect(case, &places, &images, after).map(Some)
}

/// What must follow when `supports` said no.
fn refused(queue: &dyn Queue, op: &Op<TensorArg>, submitted: Result<u64, Error>, reason: &str) -> Outcome {
    match submitted {
        Err(e) if *e.kind() == ErrorKind::Unsupported => {}
        Err(e) => return Err(format!("supports() says Unsupported ({reason}), submit fails with {e:?}").into()),
        Ok(_) => return Err(format!("supports() says Unsupported ({reason}), but submit took {}", op.name()).into()),
    }
    queue.synchronize(PATIENCE).map_err(|e| format!("an unsupported op stuck to the queue: {e:?}"))?;
    Ok(())
}

/// Takes the outputs out of the images, and checks that nothing else changed.
fn collect(case: &Case, places: &[Option<Place>], before: &[Vec<u8>], mut after: Vec<Vec<u8>>) -> Outcome<Outputs> {
    let mut outputs = Outputs::new();
    for operand in &case.operands {
        if let Role::Output(_) = operand.role {
            let owner = operand.alias.unwrap_or(operand.name);
            let index = case.operands.iter().position(|o| o.name == owner).expect("an operand");
            let p = places[index].as_ref().expect("a placed operand");
            let mut t = operand.tensor.clone();
            let pitch = t.cols * t.dtype.block().1;
            for r in 0..t.rows {
                let row = p.row(r);
                t.bytes[r * pitch..(r + 1) * pitch].copy_from_slice(&after[p.buffer][row.clone()]);
                after[p.buffer][row.clone()].copy_from_slice(&before[p.buffer][row]);
            }
            outputs.push((operand.name, t));
        }
    }
    for (index, (before, after)) in before.iter().zip(&after).enumerate() {
        if let Some(byte) = before.iter().zip(after).position(|(b, a)| b != a) {
            let near = case.operands.iter().zip(places).filter_map(|(o, p)| p.as_ref().map(|p| (o.name, p)));
            let near: Vec<String> = near
                .filter(|(_, p)| p.buffer == index)
                .map(|(name, p)| format!("{name} {:?} at {}..{}", p.spec, p.offset, p.offset + p.spec.span_bytes()))
                .collect();
            return Err(format!("byte {byte} changed, which belongs to no output; the buffer holds {}", near.join(", ")).into());
        }
    }
    Ok(outputs)
}
