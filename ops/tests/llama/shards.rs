//! Members' parts of a model: who has what, cut out of a source and put together again.

use half::f16;
use proptest::prelude::*;
use zofo_hal::{
    DType,
    perturb::{Factor, Projection, TensorId},
};
use zofo_ops::{
    Runner,
    llama::{Cut, Importer, MemoryModel, ModelConfig, ParamName, Shard, ShardedSource, Slice, SliceSpec, WeightSource},
    lora::{HostAdapter, Targets},
};

use crate::common::*;

fn config(heads: usize, kv_heads: usize, intermediate: usize) -> ModelConfig {
    ModelConfig { heads, kv_heads, intermediate, ..MemoryModel::tiny_config() }
}

proptest! {
    /// Parts follow one another and make the whole; each is within one head, or one tile, of its share, unless that is less than one.
    #[test]
    fn parts_make_the_whole_and_follow_the_shares(
        kv_heads in 1_usize..5,
        group in 1_usize..9,
        tiles in 1_usize..60,
        odd in 0_usize..32,
        shares in prop::collection::vec(0.01_f64..10.0, 1..8),
    ) {
        let config = config(kv_heads * group, kv_heads, tiles * 32 + odd);
        let found = Shard::split(&config, &shares);
        if shares.len() > config.heads {
            prop_assert!(found.is_err());
            return Ok(());
        }
        let parts = found.unwrap();
        prop_assert_eq!(parts.len(), shares.len());
        let (mut head, mut column) = (0, 0);
        for part in &parts {
            part.check(&config).unwrap();
            prop_assert_eq!((part.heads.start, part.columns.start), (head, column));
            (head, column) = (part.heads.end, part.columns.end);
            prop_assert!(part.config(&config).validate().is_ok());
        }
        prop_assert_eq!((head, column), (config.heads, config.intermediate));
        let tile = if odd == 0 && tiles >= shares.len() { 32 } else { 1 };
        prop_assert!(parts.iter().all(|p| p.columns.len() % tile == 0));
        let sum: f64 = shares.iter().sum();
        let close = |total: usize, count: &dyn Fn(&Shard) -> usize| {
            let quotas: Vec<f64> = shares.iter().map(|s| total as f64 * s / sum).collect();
            quotas.iter().any(|q| *q < 1.0) || quotas.iter().zip(&parts).all(|(q, p)| (count(p) as f64 - q).abs() < 1.0 + 1e-9)
        };
        prop_assert!(close(config.heads, &|p| p.heads.len()));
        prop_assert!(close(config.intermediate / tile, &|p| p.columns.len() / tile));
    }
}

#[test]
fn adapters_are_taken_apart_and_put_together() {
    // The second cut goes through a group of three query heads.
    let config = config(6, 2, 24);
    let host = adapter(&config, &spec(3, Targets::ALL));
    for shares in [&[1.0][..], &[1.0, 1.0], &[1.0, 2.0], &[1.0, 3.0, 2.0]] {
        let parts = Shard::split(&config, shares).unwrap();
        let mut back = HostAdapter::init(&config, 0..config.layers, &spec(3, Targets::ALL), 77).unwrap();
        for part in &parts {
            let local = part.adapter(&config, &host).unwrap();
            local.check(&part.config(&config)).unwrap();
            part.put_adapter(&config, &local, &mut back).unwrap();
        }
        assert_eq!(back, host);
    }
    let part = &Shard::split(&config, &[1.0, 2.0]).unwrap()[1];
    let local = part.adapter(&config, &host).unwrap();
    let mut narrow = HostAdapter::init(&config, 0..4, &spec(2, Targets::ALL), 1).unwrap();
    assert!(part.put_adapter(&config, &local, &mut narrow).unwrap_err().to_string().contains("layer 0, q_proj"));
}

/// Members that each add 1 at every element of their parts: what is cut has it once, what is whole once per member, a key head once per
/// copy.
#[test]
fn every_gradient_is_added_in_its_place() {
    let config = config(6, 2, 24);
    let parts = Shard::split(&config, &[1.0, 2.0]).unwrap();
    assert_eq!(parts[1].heads, 2..6);
    let copies: Vec<usize> = parts.iter().map(|p| p.config(&config).kv_heads).collect();
    // Two heads of the first group in equal parts; one of it and three of the second, each with a copy.
    assert_eq!(copies, [1, 4]);
    for p in Projection::ALL {
        for factor in [Factor::A, Factor::B] {
            let id = TensorId::new(0, p, factor).unwrap();
            let (out, inp) = (ParamName::Weight(0, p).shape(&config).0, ParamName::Weight(0, p).shape(&config).1);
            let mut sum = vec![0.0; if factor == Factor::A { 2 * inp } else { out * 2 }];
            for part in &parts {
                let ones = vec![1.0; part.take(&config, id, 2, &sum).unwrap().len()];
                part.add(&config, id, 2, &ones, &mut sum).unwrap();
            }
            match (p, factor) {
                // A copy of the first key head at either member, and the second key head in three copies.
                (Projection::K | Projection::V, Factor::B) => {
                    let (first, second) = sum.split_at(sum.len() / 2);
                    assert!(first.iter().all(|x| *x == 2.0) && second.iter().all(|x| *x == 3.0), "{id:?}: {sum:?}");
                }
                (Projection::O | Projection::Down, Factor::B) => assert!(sum.iter().all(|x| *x == 2.0), "{id:?}"),
                (Projection::O | Projection::Down, Factor::A) | (_, Factor::B) => assert!(sum.iter().all(|x| *x == 1.0), "{id:?}"),
                _ => assert!(sum.iter().all(|x| *x == 2.0), "{id:?}"),
            }
            assert!(parts[0].add(&config, id, 2, &[1.0], &mut sum).is_err());
            assert!(parts[0].take(&config, id, 2, &sum[1..]).is_err());
        }
    }
}

/// Random blocks of Q8_0: an f16 scale and 32 signed bytes.
fn q8_0(seed: u64, rows: usize, cols: usize) -> Vec<u8> {
    let values = noise(seed, rows * cols / 32 * 33);
    let block = |b: &[f32]| {
        let scale = f16::from_f32(b[0] / 64.0).to_le_bytes();
        scale.into_iter().chain(b[1..].iter().map(|x| (x * 127.0) as i8 as u8)).collect::<Vec<_>>()
    };
    values.chunks_exact(33).flat_map(block).collect()
}

#[test]
fn a_part_of_a_source_is_that_part_of_its_values() {
    let config =
        ModelConfig { hidden: 32, heads: 6, kv_heads: 2, head_dim: 16, intermediate: 96, qkv_bias: true, ..MemoryModel::tiny_config() };
    let floats = model(config.clone());
    let mut blocks = floats.clone();
    for (i, name) in ParamName::all(&config).into_iter().enumerate() {
        let (rows, cols) = name.shape(&config);
        if matches!(name, ParamName::Weight(..)) {
            blocks.set(name, DType::Q8_0, q8_0(i as u64, rows, cols));
        }
    }
    let halves = floats.rounded(DType::Bf16).unwrap();
    // Heads of 16 columns, two to a block: the first cut is on a block's edge, the second through a block.
    for (shard, kept) in [(Shard { heads: 2..6, columns: 32..96 }, true), (Shard { heads: 1..6, columns: 31..90 }, false)] {
        for source in [&floats, &halves, &blocks] {
            let part = ShardedSource::new(source, shard.clone()).unwrap();
            for name in ParamName::all(&config) {
                let (whole, found) = (source.require(name).unwrap(), part.require(name).unwrap());
                let cut = match name {
                    ParamName::Weight(_, p) => shard.weight(&config, p),
                    ParamName::Bias(_, p) => match shard.weight(&config, p) {
                        Cut::Rows(rows) => Cut::Cols(rows),
                        other => other,
                    },
                    _ => Cut::Whole,
                };
                let expected = cut.take((whole.rows, whole.cols), &whole.to_f32().unwrap()).unwrap();
                assert_eq!(bits(&found.to_f32().unwrap()), bits(&expected), "{name}");
                let widened = whole.dtype == DType::Q8_0 && !kept && matches!(name, ParamName::Weight(_, Projection::O | Projection::Down));
                assert_eq!(found.dtype, if widened { DType::F32 } else { whole.dtype }, "{name}");
                assert_eq!(found.part, cut);
            }
            assert!(
                ShardedSource::new(&part, Shard { heads: 0..1, columns: 0..8 })
                    .unwrap()
                    .require(ParamName::Weight(0, Projection::Q))
                    .is_err()
            );
        }
    }
    assert!(ShardedSource::new(&floats, Shard { heads: 2..7, columns: 0..96 }).is_err());
}

/// Members of one memory have parts of their own, and the same embedding.
#[test]
fn an_importer_keeps_members_apart() {
    let config = config(6, 2, 24);
    let source = model(config.clone());
    let device = reference();
    let mut importer = Importer::new();
    let parts = Shard::split(&config, &[1.0, 2.0]).unwrap();
    let load = |importer: &mut Importer, source: &dyn WeightSource| {
        Slice::load(&mut Runner::new(device.clone()).unwrap(), importer, source, &SliceSpec::whole(source.config())).unwrap()
    };
    let bytes_of = |config: &ModelConfig| {
        let matrices = Projection::ALL.map(|p| ParamName::Weight(0, p).shape(config));
        config.layers * matrices.iter().map(|(r, c)| 4 * r * c).sum::<usize>()
    };
    let mut expected = 4 * config.vocab * config.hidden;
    for part in &parts {
        load(&mut importer, &ShardedSource::new(&source, part.clone()).unwrap());
        expected += bytes_of(&part.config(&config));
        assert_eq!(importer.bytes(), expected);
    }
    load(&mut importer, &source);
    assert_eq!(importer.bytes(), expected + bytes_of(&config));
    for part in &parts {
        load(&mut importer, &ShardedSource::new(&source, part.clone()).unwrap());
    }
    assert_eq!(importer.bytes(), expected + bytes_of(&config), "everything is there already");
}
