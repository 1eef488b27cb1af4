//! What is measured: a name, what one run of it does, and how to get it ready.

use crate::ceiling::Ceilings;
use std::fmt;
use zofo_hal::Result;

/// The name of a case: the op, then who does it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Id {
    /// `op/types/shape`: cases of one group do the same work and are compared.
    pub group: String,
    /// `zofo-cpu`, `faer`, ...; behind a `+` the variant of a group that compares several.
    pub who: String,
}

impl Id {
    /// `op/types/shape` with the shape as `512x576x1536`.
    pub fn group(op: &str, types: &str, shape: &[usize]) -> String {
        let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
        format!("{op}/{types}/{}", sizes.join("x"))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.group, self.who)
    }
}

/// Which instructions could do the arithmetic of a case at best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// Fused multiply-add of f32.
    #[default]
    F32,
    /// Products of bf16 pairs, added up in f32.
    Bf16,
}

/// What a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Floating-point operations.
    Flops,
    /// Bytes that have to be read or written at least once.
    Bytes,
    /// Numbers generated.
    Elements(u64),
    /// Tokens of the batch, whatever is done with them.
    Tokens(u64),
    /// Ops submitted to a queue.
    Ops(u64),
}

/// What one run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations of the definition, not of an algorithm.
    pub flops: u64,
    /// Bytes that have to be read or written at least once.
    pub bytes: u64,
    /// What its rate counts.
    pub unit: Unit,
    /// What the processor could do it with.
    pub arithmetic: Arithmetic,
}

impl Work {
    /// Arithmetic, counted in FLOP/s.
    pub fn flops(flops: usize, bytes: usize) -> Self {
        Self { flops: flops as u64, bytes: bytes as u64, unit: Unit::Flops, arithmetic: Arithmetic::F32 }
    }

    /// Traffic, counted in bytes/s.
    pub fn bytes(bytes: usize) -> Self {
        Self { flops: 0, bytes: bytes as u64, unit: Unit::Bytes, arithmetic: Arithmetic::F32 }
    }

    /// The same counted in another unit.
    pub fn per(self, unit: Unit) -> Self {
        Self { unit, ..self }
    }

    /// The same for another kind of instructions.
    pub fn with(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// How much its rate counts.
    pub fn amount(&self) -> u64 {
        match self.unit {
            Unit::Flops => self.flops,
            Unit::Bytes => self.bytes,
            Unit::Elements(n) | Unit::Tokens(n) | Unit::Ops(n) => n,
        }
    }

    /// Seconds that a machine with these ceilings needs at least, and the ceiling that decides; `None` where nothing is counted.
    pub fn least(&self, ceilings: &Ceilings) -> Option<(f64, &'static str)> {
        let (peak, name) = match self.arithmetic {
            Arithmetic::F32 => (ceilings.fma, "fma"),
            // Where there are no such instructions, or slow ones, bf16 is better widened.
            Arithmetic::Bf16 => match ceilings.bf16.filter(|peak| *peak > ceilings.fma) {
                Some(peak) => (peak, "bf16"),
                None => (ceilings.fma, "fma"),
            },
        };
        let (compute, memory) = (self.flops as f64 / peak, self.bytes as f64 / ceilings.read);
        match (compute, memory) {
            (0.0, 0.0) => None,
            _ if compute >= memory => Some((compute, name)),
            _ => Some((memory, "memory")),
        }
    }
}

/// One run.
pub type Run = Box<dyn FnMut() -> Result<()>>;
/// Something to measure. Nothing is allocated before [`Case::prepare`].
pub struct Case {
    /// Its name.
    pub id: Id,
    /// What one run does.
    pub work: Work,
    prepare: Box<dyn Fn() -> Result<Run>>,
}

impl Case {
    /// A case.
    pub fn new(group: impl Into<String>, who: impl Into<String>, work: Work, prepare: impl Fn() -> Result<Run> + 'static) -> Self {
        Self { id: Id { group: group.into(), who: who.into() }, work, prepare: Box::new(prepare) }
    }

    /// Makes its operands. The first run fills pools and caches.
    ///
    /// # Errors
    /// What the device says.
    pub fn prepare(&self) -> Result<Run> {
        (self.prepare)()
    }
}
