//! Keys and values of a GGUF file.

use std::collections::BTreeMap;

use zofo_hal::{Error, Result};

use super::reader::Reader;
use crate::files::mapped::MappedBytes;

/// Longest key, the format's own limit.
const MAX_KEY: usize = 65535;
/// Longest text read, in bytes. Chat templates take some ten thousand.
const MAX_TEXT: usize = 1 << 24;
/// Fewest bytes of a key with its value: the key's length, the value's type, one byte of value.
const LEAST_PAIR_BYTES: usize = 8 + 4 + 1;

/// Type of a number or flag in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scalar {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    U64,
    I64,
    F64,
}

impl Scalar {
    fn of(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    const fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// `bytes` has [`Scalar::bytes`] of them.
    fn number(self, bytes: &[u8]) -> Number {
        let mut raw = [0; 8];
        raw[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(raw);
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::Bool | Self::U64 => Number::Integer(unsigned.into()),
            Self::I8 => Number::Integer((unsigned as i8).into()),
            Self::I16 => Number::Integer((unsigned as i16).into()),
            Self::I32 => Number::Integer((unsigned as i32).into()),
            Self::I64 => Number::Integer((unsigned as i64).into()),
            Self::F32 => Number::Float(f32::from_bits(unsigned as u32).into()),
            Self::F64 => Number::Float(f64::from_bits(unsigned)),
        }
    }
}

const TEXT: u32 = 8;
const ARRAY: u32 = 9;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Number {
    Integer(i128),
    Float(f64),
}

#[derive(Clone, Debug)]
enum Value {
    Number(Number),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    /// Elements as stored: token tables are long, and most are looked at once or never.
    Numbers(Scalar, MappedBytes),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Number(Number::Integer(_)) => "an integer",
            Self::Number(Number::Float(_)) => "a float",
            Self::Flag(_) => "true or false",
            Self::Text(_) => "a text",
            Self::Texts(_) => "a list of texts",
            Self::Numbers(..) => "a list of numbers",
        }
    }
}

/// Metadata of a model. Whatever asks for a key says what it should be; a value of another type is a `Format` error that names the key.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: BTreeMap<String, Value>,
}

impl Metadata {
    pub(super) fn read(reader: &mut Reader<'_>, count: u64) -> Result<Self> {
        let mut entries = BTreeMap::new();
        for _ in 0..reader.check_count(count, LEAST_PAIR_BYTES, "metadata keys")? {
            let key = reader.text(MAX_KEY, "a metadata key")?.to_owned();
            let value = value(reader).map_err(|e| e.context(format_args!("metadata `{}`", key.escape_debug())))?;
            if entries.insert(key.clone(), value).is_some() {
                return Err(Error::format(format!("metadata `{}` is there twice", key.escape_debug())));
            }
        }
        Ok(Self { entries })
    }

    /// All keys, in alphabetical order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    fn get<'a, T>(&'a self, key: &str, wanted: &str, take: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.entries.get(key) else { return Ok(None) };
        match take(value) {
            Some(taken) => Ok(Some(taken)),
            None => Err(Error::format(format!("metadata `{key}` is {}, it should be {wanted}", value.kind()))),
        }
    }

    /// A text.
    ///
    /// # Errors
    /// `Format` where it is something else, as for all that follow.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.get(key, "a text", |v| if let Value::Text(t) = v { Some(t.as_str()) } else { None })
    }

    /// An integer of at least 0.
    pub fn count(&self, key: &str) -> Result<Option<u64>> {
        self.get(key, "an integer of at least 0", |v| match v {
            Value::Number(Number::Integer(n)) => u64::try_from(*n).ok(),
            _ => None,
        })
    }

    /// A number, integer or not.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "a number", |v| match v {
            Value::Number(Number::Integer(n)) => Some(*n as f64),
            Value::Number(Number::Float(x)) => Some(*x),
            _ => None,
        })
    }

    /// A truth value.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "true or false", |v| if let Value::Flag(b) = v { Some(*b) } else { None })
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        self.get(key, "a list of texts", |v| if let Value::Texts(t) = v { Some(t.as_slice()) } else { None })
    }

    /// A list of numbers.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.list(key, "a list of numbers", |n| match n {
            Number::Integer(n) => Some(n as f64),
            Number::Float(x) => Some(x),
        })
    }

    /// A list of integers.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.list(key, "a list of integers", |n| match n {
            Number::Integer(n) => i64::try_from(n).ok(),
            Number::Float(_) => None,
        })
    }

    fn list<T>(&self, key: &str, wanted: &str, element: impl Fn(Number) -> Option<T>) -> Result<Option<Vec<T>>> {
        self.get(key, wanted, |v| {
            let Value::Numbers(kind, bytes) = v else { return None };
            bytes.as_ref().chunks_exact(kind.bytes()).map(|b| element(kind.number(b))).collect()
        })
    }
}

fn value(reader: &mut Reader<'_>) -> Result<Value> {
    let kind = reader.u32("a value's type")?;
    match kind {
        TEXT => Ok(Value::Text(reader.text(MAX_TEXT, "a text")?.to_owned())),
        ARRAY => array(reader),
        _ => {
            let scalar = Scalar::of(kind).ok_or_else(|| Error::format(format!("its type {kind} is none of GGUF")))?;
            let bytes = reader.bytes(scalar.bytes(), "a value")?;
            match scalar {
                Scalar::Bool => Ok(Value::Flag(bytes != [0])),
                _ => Ok(Value::Number(scalar.number(bytes))),
            }
        }
    }
}

fn array(reader: &mut Reader<'_>) -> Result<Value> {
    let kind = reader.u32("the type of a list's elements")?;
    let count = reader.u64("the length of a list")?;
    match kind {
        TEXT => {
            // A text takes 8 bytes for its length, and three times that as a `String`: memory stays within a small multiple of the file.
            let count = reader.check_count(count, 8, "texts of a list")?;
            let texts = (0..count).map(|_| reader.text(MAX_TEXT, "a text of a list").map(str::to_owned));
            texts.collect::<Result<_>>().map(Value::Texts)
        }
        ARRAY => Err(Error::unsupported("it is a list of lists, which no model that is read here has")),
        _ => {
            let scalar = Scalar::of(kind).ok_or_else(|| Error::format(format!("its elements' type {kind} is none of GGUF")))?;
            let count = reader.check_count(count, scalar.bytes(), "elements of a list")?;
            // `check_count` found room for them.
            Ok(Value::Numbers(scalar, reader.shared(count * scalar.bytes(), "a list")?))
        }
    }
}
