//! GGUF files of keys alone, in memory.

use std::path::Path;

use zofo_ops::files::{MappedBytes, gguf::Gguf};

#[derive(Clone, Debug)]
pub enum Value {
    Count(u32),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
    Integers(Vec<i32>),
}

/// Keys and values in the order in which they are written.
#[derive(Clone, Debug, Default)]
pub struct Keys(pub Vec<(String, Value)>);

impl Keys {
    /// With `key` set, in its old place where it was there.
    pub fn with(mut self, key: &str, value: Value) -> Self {
        match self.0.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key.into(), value)),
        }
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.0.retain(|(k, _)| k != key);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend(0u64.to_le_bytes());
        out.extend((self.0.len() as u64).to_le_bytes());
        for (key, value) in &self.0 {
            text(&mut out, key);
            match value {
                Value::Count(n) => scalar(&mut out, 4, &n.to_le_bytes()),
                Value::Flag(b) => scalar(&mut out, 7, &[u8::from(*b)]),
                Value::Text(t) => {
                    out.extend(8u32.to_le_bytes());
                    text(&mut out, t);
                }
                Value::Texts(all) => {
                    list(&mut out, 8, all.len());
                    all.iter().for_each(|t| text(&mut out, t));
                }
                Value::Floats(all) => {
                    list(&mut out, 6, all.len());
                    all.iter().for_each(|x| out.extend(x.to_le_bytes()));
                }
                Value::Integers(all) => {
                    list(&mut out, 5, all.len());
                    all.iter().for_each(|x| out.extend(x.to_le_bytes()));
                }
            }
        }
        out
    }

    pub fn gguf(&self) -> Gguf {
        Gguf::parse(Path::new("keys.gguf"), MappedBytes::from(self.bytes())).unwrap()
    }
}

fn scalar(out: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.bytes());
}

fn list(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend(9u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}
