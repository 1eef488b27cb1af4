use crate::{
    buffers::{copy, f32s, fill, read_f32, refuses, submit, vector},
    check::{Bench, Outcome, PATIENCE, ensure, upload},
    foreign::ForeignRecording,
    suite::Tests,
};
use std::sync::Arc;
use zofo_hal::{
    BufferRef, DType, ErrorKind, Op, RecordingRef, TensorArg, TensorSpec, Usage,
    op::{AdamW, HyperParams, Perturb, RmsNorm, ScaledAdd},
    perturb::{Direction, Domain, Factor, NoiseParams, Projection, Site, TensorId},
};

pub(super) fn tests(t: &mut Tests) {
    t.add("queue/recording/equals_eager", equals_eager);
    t.add("queue/recording/rules", rules);
    t.add("queue/recording/foreign", foreign);
    t.add("queue/recording/parameters", parameters);
}

/// Whether the device records at all.
fn begin(b: &Bench) -> Outcome<bool> {
    match b.queue.begin_recording() {
        Err(e) if *e.kind() == ErrorKind::Unsupported => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

fn equals_eager(b: &Bench) -> Outcome {
    let (x, y) = (f32s(&*b.queue, &[0.0; 100])?, f32s(&*b.queue, &[0.0; 100])?);
    if !begin(b)? {
        return Ok(());
    }
    submit(&*b.queue, &copy(&x, &y))?;
    submit(&*b.queue, &fill(&x, 8.0))?;
    let recording = b.queue.end_recording()?;
    ensure!(recording.len() == 2 && !recording.is_empty(), "two ops were recorded, the recording has {}", recording.len());
    ensure!(read_f32(&x)? == [0.0; 100] && read_f32(&y)? == [0.0; 100], "recording ran the ops");
    for (round, want) in [0.0, 8.0, 8.0].into_iter().enumerate() {
        b.queue.replay(&recording)?;
        ensure!(read_f32(&y)? == [want; 100], "replay {round} left {}, eager ops leave {want}", read_f32(&y)?[0]);
    }
    // Work before and after keeps its place in the order.
    submit(&*b.queue, &fill(&x, 1.0))?;
    b.queue.replay(&recording)?;
    submit(&*b.queue, &fill(&x, 2.0))?;
    ensure!(read_f32(&y)? == [1.0; 100] && read_f32(&x)? == [2.0; 100], "a replay ran out of order");
    Ok(())
}

fn rules(b: &Bench) -> Outcome {
    let queue = &b.queue;
    refuses("end_recording without a beginning", queue.end_recording(), &ErrorKind::InvalidArgument)?;
    let x = f32s(&**queue, &[1.0; 4])?;
    if !begin(b)? {
        return Ok(());
    }
    refuses("begin_recording while recording", queue.begin_recording(), &ErrorKind::InvalidArgument)?;
    refuses("alloc while recording", queue.alloc(4, Usage::Activations), &ErrorKind::InvalidArgument)?;
    refuses("map_read while recording", x.map_read(0..4), &ErrorKind::InvalidArgument)?;
    refuses("map_write while recording", x.map_write(0..4), &ErrorKind::InvalidArgument)?;
    refuses("synchronize while recording", queue.synchronize(PATIENCE), &ErrorKind::InvalidArgument)?;
    // A refused op is not recorded.
    let unequal = TensorArg::new(x.clone(), TensorSpec::vector(DType::F32, 3));
    refuses("a wrong op while recording", queue.submit(&zofo_hal::op::Copy::new(vector(&x), unequal).into()), &ErrorKind::InvalidArgument)?;
    let empty = queue.end_recording()?;
    ensure!(empty.is_empty(), "nothing was recorded, the recording has {} ops", empty.len());
    queue.replay(&empty)?;
    ensure!(read_f32(&x)? == [1.0; 4], "an empty recording changed a buffer");
    // A recording keeps its buffers alive, and minds their state.
    begin(b)?;
    submit(&**queue, &fill(&x, 5.0))?;
    let recording = queue.end_recording()?;
    let map = x.map_read(0..4)?;
    refuses("replay on a mapped buffer", queue.replay(&recording), &ErrorKind::InvalidArgument)?;
    drop(map);
    x.freeze()?;
    refuses("replay that writes a frozen buffer", queue.replay(&recording), &ErrorKind::InvalidArgument)?;
    ensure!(read_f32(&x)? == [1.0; 4], "a refused replay wrote");
    Ok(())
}

fn foreign(b: &Bench) -> Outcome {
    let x = f32s(&*b.queue, &[1.0; 4])?;
    if !begin(b)? {
        return Ok(());
    }
    submit(&*b.queue, &fill(&x, 5.0))?;
    let recording = b.queue.end_recording()?;
    let other = b.device.create_queue()?;
    refuses("replay of a recording of another queue", other.replay(&recording), &ErrorKind::ForeignBuffer)?;
    let stranger: RecordingRef = Arc::new(ForeignRecording);
    refuses("replay of a recording of another backend", b.queue.replay(&stranger), &ErrorKind::ForeignBuffer)
}

/// One op and the parameter buffer that a replay must read anew.
struct Parametrised {
    what: &'static str,
    op: Op<TensorArg>,
    parameter: BufferRef,
    values: [Vec<u8>; 3],
    state: Vec<(BufferRef, Vec<u8>)>,
}

const ROWS: usize = 5;
const COLS: usize = 12;

fn candidates(b: &Bench) -> Outcome<Vec<Parametrised>> {
    let queue = &*b.queue;
    let data = |k: f32| -> Vec<f32> { (0..ROWS * COLS).map(|i| ((i * 7 % 11) as f32 - 5.0) * k).collect() };
    let matrix = |b: &BufferRef| TensorArg::new(b.clone(), TensorSpec::new(DType::F32, ROWS, COLS));
    let bytes = |v: &[f32]| bytemuck::cast_slice(v).to_vec();
    let (x, y) = (f32s(queue, &data(0.25))?, f32s(queue, &data(-0.5))?);
    let gamma = f32s(queue, &[1.5; COLS])?;
    let mut list = Vec::new();

    let lives = [2u32, 5, 0].map(|n| n.to_le_bytes().to_vec());
    let live = |buffer: &BufferRef| TensorArg::new(buffer.clone(), TensorSpec::vector(DType::U32, 1));
    let (parameter, out) = (upload(queue, &lives[0])?, f32s(queue, &data(0.0))?);
    let op = ScaledAdd::new(matrix(&x), matrix(&out)).b(matrix(&y)).live(live(&parameter)).into();
    list.push(Parametrised { what: "live rows", op, parameter, values: lives.clone(), state: vec![(out, bytes(&data(0.0)))] });

    let (parameter, out) = (upload(queue, &lives[0])?, f32s(queue, &data(0.0))?);
    let op = RmsNorm::new(matrix(&x), vector(&gamma), matrix(&out), 1e-5).live(live(&parameter)).into();
    list.push(Parametrised { what: "live rows of a norm", op, parameter, values: lives, state: vec![(out, bytes(&data(0.0)))] });

    let direction = |q| Direction::new(Domain::Main, 0, q).expect("a small number");
    let noises = [(1, 3, 0, 0.1), (1, 4, 0, 0.1), (9, 4, 6, -0.5)]
        .map(|(seed, step, q, eps)| bytemuck::bytes_of(&NoiseParams::new(seed, step, direction(q), eps)).to_vec());
    let (parameter, out) = (upload(queue, &noises[0])?, f32s(queue, &data(0.0))?);
    let noise = TensorArg::new(parameter.clone(), TensorSpec::vector(DType::U32, NoiseParams::WORDS));
    let site = Site::new(TensorId::new(1, Projection::V, Factor::A)?, COLS as u32);
    let op = Perturb::new(noise, matrix(&out), site).a(matrix(&x)).into();
    list.push(Parametrised { what: "noise", op, parameter, values: noises, state: vec![(out, bytes(&data(0.0)))] });

    let hypers = [1, 2, 50].map(|t| bytemuck::bytes_of(&HyperParams::adamw(1e-2, (0.9, 0.99), 1e-8, 0.1, t, 0.5)).to_vec());
    let parameter = upload(queue, &hypers[0])?;
    let state = [data(1.0), data(0.0), data(0.0)];
    let [p, m, v] = [0, 1, 2].map(|i| f32s(queue, &state[i]));
    let (p, m, v) = (p?, m?, v?);
    let op = AdamW::new(matrix(&y), vector(&parameter), matrix(&p), matrix(&m), matrix(&v)).into();
    let state = [p, m, v].into_iter().zip(state.iter().map(|s| bytes(s))).collect();
    list.push(Parametrised { what: "hyper-parameters", op, parameter, values: hypers, state });
    Ok(list)
}

/// Replays see parameter buffers as they are when they run, and leave the bits that eager ops leave.
fn parameters(b: &Bench) -> Outcome {
    for c in candidates(b)?.iter().filter(|c| b.device.supports(&c.op.spec()).runs()) {
        let run = |go: &dyn Fn() -> Outcome| -> Outcome<Vec<Vec<u8>>> {
            let mut seen = Vec::new();
            for (buffer, initial) in &c.state {
                buffer.map_write(0..initial.len())?.copy_from_slice(initial);
            }
            for value in &c.values {
                c.parameter.map_write(0..value.len())?.copy_from_slice(value);
                go()?;
                for (buffer, initial) in &c.state {
                    seen.push(buffer.map_read(0..initial.len())?.to_vec());
                }
            }
            Ok(seen)
        };
        let eager = run(&|| Ok(b.queue.submit(&c.op).map(drop)?))?;
        if !begin(b)? {
            return Ok(());
        }
        b.queue.submit(&c.op)?;
        let recording = b.queue.end_recording()?;
        let replayed = run(&|| Ok(b.queue.replay(&recording)?))?;
        ensure!(eager == replayed, "{}: a replay after its parameters changed differs from the eager op ({})", c.what, c.op.name());
        ensure!(eager[0] != eager[c.state.len()], "{}: {} does not read its parameters", c.what, c.op.name());
    }
    Ok(())
}
