//! An independent forward pass in f64 and the directional derivative of its loss: what estimators are measured against.
//!
//! Written from the model's definition, token by token; shares nothing with the product but the parameters and the rotary tables' recipe.
#![allow(dead_code)]

use std::collections::BTreeMap;
use zofo_hal::perturb::{Direction, Distribution, Domain, Factor, Noise, Projection, Site, TensorId, Tier};
use zofo_ops::{
    batch::Sequence,
    llama::{ParamName, WeightSource, rope_tables},
    lora::HostAdapter,
};

type Row = Vec<f64>;

/// `[rows, cols]`, row-major.
struct Mat {
    cols: usize,
    data: Vec<f64>,
}

impl Mat {
    fn of(source: &dyn WeightSource, name: ParamName) -> Self {
        let t = source.require(name).unwrap();
        Self { cols: t.cols, data: t.to_f32().unwrap().into_iter().map(f64::from).collect() }
    }

    fn row(&self, r: usize) -> &[f64] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// `self x`.
    fn apply(&self, x: &[f64]) -> Row {
        self.data.chunks(self.cols).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    }
}

fn norm(x: &[f64], gamma: &Mat, eps: f64) -> Row {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let r = 1.0 / (mean + eps).sqrt();
    x.iter().zip(&gamma.data).map(|(v, g)| v * r * g).collect()
}

/// Parameters in f64.
pub struct Exact<'a> {
    source: &'a dyn WeightSource,
    params: BTreeMap<ParamName, Mat>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<'a> Exact<'a> {
    pub fn new(source: &'a dyn WeightSource) -> Self {
        let config = source.config();
        let params = ParamName::all(config).into_iter().map(|n| (n, Mat::of(source, n))).collect();
        let (cos, sin) = rope_tables(config, config.max_positions.min(512));
        Self { source, params, cos, sin }
    }

    fn linear(&self, layer: usize, p: Projection, lora: &BTreeMap<(usize, Projection), Lora>, x: &[f64]) -> Row {
        let mut y = self.params[&ParamName::Weight(layer, p)].apply(x);
        if let Some(m) = lora.get(&(layer, p)) {
            let u = m.a.apply(x);
            y.iter_mut().zip(m.b.apply(&u)).for_each(|(y, d)| *y += m.scale * d);
        }
        if let Some(bias) = self.params.get(&ParamName::Bias(layer, p)) {
            y.iter_mut().zip(&bias.data).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn rotate(&self, x: &mut [f64], position: usize) {
        let half = self.source.config().head_dim / 2;
        let (cos, sin) = (&self.cos[position * half..], &self.sin[position * half..]);
        for head in x.chunks_mut(2 * half) {
            for i in 0..half {
                let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                let (u, v) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (u * c - v * s, u * s + v * c);
            }
        }
    }

    fn loss(&self, lora: &BTreeMap<(usize, Projection), Lora>, sequence: &Sequence) -> f64 {
        let c = self.source.config();
        let eps = f64::from(c.rms_norm_eps);
        let embedding = &self.params[&ParamName::Embedding];
        let mut h: Vec<Row> = sequence.ids.iter().map(|id| embedding.row(*id as usize).to_vec()).collect();
        for l in 0..c.layers {
            let gamma = &self.params[&ParamName::InputNorm(l)];
            let x: Vec<Row> = h.iter().map(|h| norm(h, gamma, eps)).collect();
            let of = |p, rotated: bool| -> Vec<Row> {
                let mut rows: Vec<Row> = x.iter().map(|x| self.linear(l, p, lora, x)).collect();
                if rotated {
                    rows.iter_mut().enumerate().for_each(|(t, r)| self.rotate(r, t));
                }
                rows
            };
            let (q, k, v) = (of(Projection::Q, true), of(Projection::K, true), of(Projection::V, false));
            let d = c.head_dim;
            for t in 0..h.len() {
                let mut out = vec![0.0; c.heads * d];
                for head in 0..c.heads {
                    let kv = head / (c.heads / c.kv_heads) * d;
                    let query = &q[t][head * d..(head + 1) * d];
                    let scores: Row =
                        (0..=t).map(|s| query.iter().zip(&k[s][kv..kv + d]).map(|(a, b)| a * b).sum::<f64>() / (d as f64).sqrt()).collect();
                    let max = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
                    let e: Row = scores.iter().map(|s| (s - max).exp()).collect();
                    let sum: f64 = e.iter().sum();
                    for (s, e) in e.iter().enumerate() {
                        (0..d).for_each(|i| out[head * d + i] += e / sum * v[s][kv + i]);
                    }
                }
                let o = self.linear(l, Projection::O, lora, &out);
                h[t].iter_mut().zip(o).for_each(|(h, o)| *h += o);
            }
            let gamma = &self.params[&ParamName::PostAttentionNorm(l)];
            for h in &mut h {
                let x = norm(h, gamma, eps);
                let (gate, up) = (self.linear(l, Projection::Gate, lora, &x), self.linear(l, Projection::Up, lora, &x));
                let act: Row = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                h.iter_mut().zip(self.linear(l, Projection::Down, lora, &act)).for_each(|(h, y)| *h += y);
            }
        }
        let (gamma, head) = (&self.params[&ParamName::FinalNorm], &self.params[&ParamName::head_of(c)]);
        let mut loss = 0.0;
        for (h, label) in h.iter().zip(&sequence.labels) {
            let Some(label) = label else { continue };
            let logits = head.apply(&norm(h, gamma, eps));
            let max = logits.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            loss += max + logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln() - logits[*label as usize];
        }
        loss
    }

    /// Mean loss at `adapter + h z`, z given per tensor.
    fn shifted(&self, adapter: &HostAdapter, z: &BTreeMap<TensorId, Vec<f32>>, h: f64, batch: &[Sequence]) -> f64 {
        let mut lora = BTreeMap::new();
        for ((layer, p), m) in &adapter.modules {
            let moved = |values: &[f32], factor, cols| {
                let z = z.get(&TensorId::new(*layer as u32, *p, factor).unwrap());
                let at = |i: usize| z.map_or(0.0, |z| h * f64::from(z[i]));
                Mat { cols, data: values.iter().enumerate().map(|(i, v)| f64::from(*v) + at(i)).collect() }
            };
            let (a, b) = (moved(&m.a, Factor::A, m.a.len() / m.rank), moved(&m.b, Factor::B, m.rank));
            lora.insert((*layer, *p), Lora { a, b, scale: f64::from(m.scale) });
        }
        let labels: usize = batch.iter().map(|s| s.labels.iter().flatten().count()).sum();
        batch.iter().map(|s| self.loss(&lora, s)).sum::<f64>() / labels as f64
    }

    /// Mean loss.
    pub fn mean_loss(&self, adapter: &HostAdapter, batch: &[Sequence]) -> f64 {
        self.shifted(adapter, &BTreeMap::new(), 0.0, batch)
    }

    /// Slope of the mean loss along direction q of step 0, over the factors of `layers`: a central difference in f64 with step 1e-5, whose own
    /// error is about 1e-10 relative.
    pub fn slope(&self, adapter: &HostAdapter, layers: std::ops::Range<usize>, both: bool, seed: u64, q: u32, batch: &[Sequence]) -> f64 {
        let mut z = BTreeMap::new();
        for ((layer, p), m) in adapter.modules.iter().filter(|((l, _), _)| layers.contains(l)) {
            let factors = [(Factor::A, m.rank, m.a.len() / m.rank), (Factor::B, m.b.len() / m.rank, m.rank)];
            for (factor, rows, cols) in factors.into_iter().filter(|f| both || f.0 == Factor::B) {
                let id = TensorId::new(*layer as u32, *p, factor).unwrap();
                let site = Site::new(id, cols as u32).with(Distribution::Gaussian);
                let noise = Noise::new(seed, 0, Direction::new(Domain::Main, 0, q).unwrap(), site, Tier::detect());
                let mut values = vec![0.0; rows * cols];
                values.chunks_mut(cols).enumerate().for_each(|(r, row)| noise.z_into(r as u32, 0, row));
                z.insert(id, values);
            }
        }
        let h = 1e-5;
        (self.shifted(adapter, &z, h, batch) - self.shifted(adapter, &z, -h, batch)) / (2.0 * h)
    }
}

struct Lora {
    a: Mat,
    b: Mat,
    scale: f64,
}
