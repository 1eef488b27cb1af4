//! What must not change a bit: how sequences are packed, how much room a batch has, how layers are split.

use zofo_hal::{DeviceRef, op::Copies};
use zofo_ops::{
    Runner,
    batch::{Capacity, MicroBatch, Sequence},
    llama::{Importer, Input, MemoryModel, SliceSpec, WeightSource},
    lora::{HostAdapter, Targets},
};

use crate::common::*;

#[test]
fn a_sequence_does_not_see_its_neighbours() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    for device in devices() {
        neighbours(device, &source, &host);
    }
}

fn neighbours(device: DeviceRef, source: &MemoryModel, host: &HostAdapter) {
    let config = source.config().clone();
    let mut rig = Rig::whole(device, source, host);
    let all = sequences(&config, &[9, 1, 6]);
    let together = rig.batch(&MicroBatch::pack(&config, &all).unwrap());
    let h = rig.slice.forward(&mut rig.runner, &together, &rig.adapters, Input::Tokens).unwrap();
    let losses = rig.slice.loss(&mut rig.runner, &together, &h, Copies::BASE, false).unwrap().losses;
    let (h, losses) = (rig.rows(&h, &together), rig.runner.read_f32(&losses).unwrap());
    let (mut row, mut label) = (0, 0);
    for s in &all {
        let alone = rig.batch(&MicroBatch::pack(&config, std::slice::from_ref(s)).unwrap());
        let out = rig.slice.forward(&mut rig.runner, &alone, &rig.adapters, Input::Tokens).unwrap();
        let alone_losses = rig.slice.loss(&mut rig.runner, &alone, &out, Copies::BASE, false).unwrap().losses;
        let alone_losses = rig.runner.read_f32(&alone_losses).unwrap();
        let out = rig.rows(&out, &alone);
        assert_eq!(bits(&out), bits(&h[row * config.hidden..][..out.len()]));
        assert_eq!(bits(&alone_losses[..alone.labels()]), bits(&losses[label..][..alone.labels()]));
        (row, label) = (row + alone.rows(), label + alone.labels());
    }
    assert!(losses[label..].iter().all(|l| *l == 0.0), "padding has no loss");
}

#[test]
fn room_to_spare_does_not_change_a_bit() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let batch = packed(&config, &[7, 5]);
    for device in devices() {
        let run = |capacity: Capacity| {
            let mut rig = Rig::whole(device.clone(), &source, &host);
            let batch = rig.batch_of(&batch, capacity);
            let loss = rig.forward_backward(&batch);
            (loss.to_bits(), rig.grads())
        };
        let exact = run(Capacity::exact(&batch));
        assert_eq!(exact, run(Capacity::of(&batch)));
        assert_eq!(exact, run(Capacity { rows: 64, sequences: 9, labels: 40 }));
    }
}

#[test]
fn buffers_are_used_again_for_the_next_batch() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let mut rig = Rig::whole(reference(), &source, &host);
    let batches = [packed(&config, &[7, 5]), packed(&config, &[3]), packed(&config, &[9, 2, 4])];
    let capacity = batches.iter().map(Capacity::of).reduce(Capacity::max).unwrap();
    let mut device = zofo_ops::batch::DeviceBatch::new(&mut rig.runner, capacity).unwrap();
    for batch in &batches {
        device.upload(&mut rig.runner, batch, 1.0 / batch.labels() as f32).unwrap();
        let again = rig.forward_backward(&device);
        let grads = rig.grads();
        let fresh = rig.batch(batch);
        assert_eq!(again.to_bits(), rig.forward_backward(&fresh).to_bits());
        assert_eq!(grads, rig.grads());
    }
}

#[test]
fn a_split_model_gives_the_bits_of_the_whole() {
    let source = tiny();
    let host = adapter(source.config(), &spec(2, Targets::ALL));
    for device in devices() {
        split(device, &source, &host);
    }
}

fn split(device: DeviceRef, source: &MemoryModel, host: &HostAdapter) {
    let config = source.config().clone();
    let batch = packed(&config, &[7, 5]);
    let mut whole = Rig::whole(device, source, host);
    let whole_batch = whole.batch(&batch);
    let loss = whole.forward_backward(&whole_batch);
    let expected = whole.grads();

    for cuts in [vec![0, 1, 2, 3, 4], vec![0, 2, 4], vec![0, 3, 4]] {
        let device = whole.runner.device().clone();
        let mut importer = Importer::new();
        let mut parts: Vec<Rig> = cuts
            .windows(2)
            .map(|c| {
                let spec = SliceSpec::new(&config, c[0]..c[1]).with_backward();
                Rig::with(Runner::new(device.clone()).unwrap(), &mut importer, source, &spec, host)
            })
            .collect();
        let batches: Vec<_> = parts.iter_mut().map(|p| p.batch(&batch)).collect();
        let t = batches[0].block_rows();

        let mut sent: Option<Vec<f32>> = None;
        let mut saved = Vec::new();
        let mut out = None;
        for (i, (part, batch)) in parts.iter_mut().zip(&batches).enumerate() {
            let input = sent.take().map(|h| part.runner.constant_f32(t, config.hidden, &h).unwrap());
            let input = input.as_ref().map_or(Input::Tokens, Input::Hidden);
            let (h, s) = part.slice.forward_saving(&mut part.runner, batch, &part.adapters, input, i > 0).unwrap();
            saved.push(s);
            sent = Some(part.runner.read_f32(&h).unwrap());
            out = Some(h);
        }
        let last = parts.last_mut().unwrap();
        let batch = batches.last().unwrap();
        let loss_out = last.slice.loss(&mut last.runner, batch, &out.unwrap(), Copies::BASE, true).unwrap();
        assert_eq!((loss_out.sums(&mut last.runner).unwrap()[0] / batch.labels() as f64).to_bits(), loss.to_bits());
        let dh = last.slice.loss_backward(&mut last.runner, batch, loss_out.saved.unwrap()).unwrap();
        let mut dh = Some(last.runner.read_f32(&dh).unwrap());
        let mut grads = Vec::new();
        for (part, batch) in parts.iter_mut().zip(&batches).rev() {
            let d = part.runner.constant_f32(t, config.hidden, &dh.take().unwrap()).unwrap();
            let dx = part.slice.backward(&mut part.runner, batch, &part.adapters, saved.pop().unwrap(), &d).unwrap();
            dh = dx.map(|d| part.runner.read_f32(&d).unwrap());
            let mut part = part.grads();
            part.append(&mut grads);
            grads = part;
        }
        assert!(dh.is_none());
        assert!(grads == expected, "cuts at {cuts:?}");
    }
}

/// The two parts of a backward pass, on whatever device and whether activations are recomputed, give the bits of the whole one.
#[test]
fn a_backward_pass_in_two_parts_is_the_whole_one() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let batch = packed(&config, &[7, 5]);
    for (device, spec) in devices().into_iter().flat_map(|d| {
        let spec = SliceSpec::whole(&config).with_backward();
        [(d.clone(), spec.clone()), (d, spec.with_recompute())]
    }) {
        let mut rig = Rig::new(device, &source, &spec, &host);
        let batch = rig.batch(&batch);
        rig.forward_backward(&batch);
        let expected = rig.grads();
        rig.adapters.zero_grad(&mut rig.runner).unwrap();
        let (h, saved) = rig.slice.forward_saving(&mut rig.runner, &batch, &rig.adapters, Input::Tokens, false).unwrap();
        let out = rig.slice.loss(&mut rig.runner, &batch, &h, Copies::BASE, true).unwrap();
        let dh = rig.slice.loss_backward(&mut rig.runner, &batch, out.saved.unwrap()).unwrap();
        let (dx, kept) = rig.slice.backward_input(&mut rig.runner, &batch, &rig.adapters, saved, &dh).unwrap();
        assert!(dx.is_none());
        assert!(rig.grads().iter().all(|(_, g)| g.iter().all(|g| *g == 0.0)), "weights come later");
        rig.slice.backward_weight(&mut rig.runner, &batch, &rig.adapters, kept).unwrap();
        assert!(rig.grads() == expected);
    }
}

#[test]
fn a_batch_without_labels_has_no_loss() {
    let source = tiny();
    let config = source.config().clone();
    let batch = MicroBatch::pack(&config, &[Sequence::unlabelled(vec![1, 2, 3])]).unwrap();
    for device in devices() {
        let mut rig = Rig::whole(device, &source, &Default::default());
        let batch = rig.batch_of(&batch, Capacity::exact(&batch));
        let h = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
        let out = rig.slice.loss(&mut rig.runner, &batch, &h, Copies::BASE, true).unwrap();
        assert_eq!(out.sums(&mut rig.runner).unwrap(), [0.0]);
        let dh = rig.slice.loss_backward(&mut rig.runner, &batch, out.saved.unwrap()).unwrap();
        assert!(rig.rows(&dh, &batch).iter().all(|g| *g == 0.0));
    }
}
