//! Where a number z stands: direction, tensor, element. All plain words, checked when they are made.

use crate::{Error, Result};
use alloc::format;

/// What a set of directions is for; each has its own numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Domain {
    /// Directions that run to the loss or to the cut.
    #[default]
    Main = 0,
    /// Directions that stop at an exit head.
    Exit = 1,
}

/// One direction, packed in 32 bits: `domain (2) | micro-batch (14) | q (16)`, the domain on top.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Direction(u32);

impl Direction {
    /// Largest micro-batch number.
    pub const MAX_MICRO_BATCH: u32 = (1 << 14) - 1;
    /// Largest direction number.
    pub const MAX_Q: u32 = (1 << 16) - 1;

    /// Direction `q` of `micro_batch` (0 when one z serves the mini-batch).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) where a field overflows.
    pub fn new(domain: Domain, micro_batch: u32, q: u32) -> Result<Self> {
        if micro_batch > Self::MAX_MICRO_BATCH {
            return Err(Error::invalid(format!(
                "micro-batch {micro_batch} does not fit the 14 bits that a perturbation direction has for it (at most {}); use fewer micro-batches, or one z per mini-batch",
                Self::MAX_MICRO_BATCH
            )));
        }
        if q > Self::MAX_Q {
            return Err(Error::invalid(format!(
                "direction {q} does not fit the 16 bits that a perturbation direction has for it (at most {}); use fewer directions",
                Self::MAX_Q
            )));
        }
        Ok(Self((domain as u32) << 30 | micro_batch << 16 | q))
    }

    /// Takes a packed word apart and checks it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a domain that does not exist.
    pub fn from_word(word: u32) -> Result<Self> {
        if word >> 30 > Domain::Exit as u32 {
            return Err(Error::invalid(format!("perturbation direction {word:#010x} has domain {}, which does not exist", word >> 30)));
        }
        Ok(Self(word))
    }

    /// Direction `q + i` of the same domain and micro-batch: that of copy i, where `self` is the first copy's.
    ///
    /// # Errors
    /// As [`Direction::new`].
    pub fn copy(self, i: u32) -> Result<Self> {
        Self::new(self.domain(), self.micro_batch(), self.q().saturating_add(i))
    }

    /// The packed word: word 2 of the Philox counter.
    pub const fn word(self) -> u32 {
        self.0
    }

    /// What the direction is for.
    pub const fn domain(self) -> Domain {
        match self.0 >> 30 {
            0 => Domain::Main,
            _ => Domain::Exit,
        }
    }

    /// The micro-batch.
    pub const fn micro_batch(self) -> u32 {
        self.0 >> 16 & Self::MAX_MICRO_BATCH
    }

    /// The direction's number within its micro-batch.
    pub const fn q(self) -> u32 {
        self.0 & Self::MAX_Q
    }
}

/// A projection of a LLaMA layer that can carry an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// Query.
    Q = 0,
    /// Key.
    K = 1,
    /// Value.
    V = 2,
    /// Attention output.
    O = 3,
    /// Gate of the feed-forward network.
    Gate = 4,
    /// Up projection of the feed-forward network.
    Up = 5,
    /// Down projection of the feed-forward network.
    Down = 6,
}

impl Projection {
    /// All seven, in the order of their numbers.
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    /// Names in Hugging Face and PEFT files, in the order of [`Projection::ALL`].
    pub const NAMES: [&'static str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

    /// Its name in Hugging Face and PEFT files, such as `q_proj`.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The projection of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }
}

/// A factor of a low-rank adapter `x A^T B^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Factor {
    /// `[rank, in]`.
    A = 0,
    /// `[out, rank]`.
    B = 1,
}

/// An adapter tensor of the whole model, however it is split: `layer * 16 + projection * 2 + factor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(u32);

impl TensorId {
    /// Largest layer number.
    pub const MAX_LAYER: u32 = (1 << 28) - 1;

    /// Factor `factor` of the adapter of `projection` in layer `layer`, layers counted over the whole model.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) where the layer overflows 28 bits.
    pub fn new(layer: u32, projection: Projection, factor: Factor) -> Result<Self> {
        if layer > Self::MAX_LAYER {
            return Err(Error::invalid(format!(
                "layer {layer} does not fit the 28 bits that a tensor id has for it (at most {})",
                Self::MAX_LAYER
            )));
        }
        Ok(Self(layer * 16 + projection as u32 * 2 + factor as u32))
    }

    /// Takes a word and checks it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a projection that does not exist.
    pub fn from_word(word: u32) -> Result<Self> {
        if word >> 1 & 7 >= Projection::ALL.len() as u32 {
            return Err(Error::invalid(format!("tensor id {word:#x} has projection 7, which does not exist")));
        }
        Ok(Self(word))
    }

    /// The word: word 1 of the Philox counter.
    pub const fn word(self) -> u32 {
        self.0
    }

    /// The layer.
    pub const fn layer(self) -> u32 {
        self.0 >> 4
    }

    /// The projection.
    pub const fn projection(self) -> Projection {
        Projection::ALL[(self.0 >> 1 & 7) as usize]
    }

    /// The factor.
    pub const fn factor(self) -> Factor {
        match self.0 & 1 {
            0 => Factor::A,
            _ => Factor::B,
        }
    }
}

/// The law of z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Distribution {
    /// Standard normal, see [`normal`](mod@super::normal).
    #[default]
    Gaussian,
    /// -1 or 1 with equal probability: exact, and the cheapest.
    Rademacher,
}

/// Where a local matrix lies in its unsharded tensor, and the law of its z.
///
/// Element `(r, c)` of the local matrix is element `(row0 + r) * ld + col0 + c` of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// The tensor.
    pub tensor: TensorId,
    /// Row of the tensor at which the local matrix begins.
    pub row0: u32,
    /// Column of the tensor at which the local matrix begins.
    pub col0: u32,
    /// Columns of the unsharded tensor.
    pub ld: u32,
    /// The law of z.
    pub distribution: Distribution,
}

impl Site {
    /// A whole tensor of `ld` columns, Gaussian.
    pub const fn new(tensor: TensorId, ld: u32) -> Self {
        Self { tensor, row0: 0, col0: 0, ld, distribution: Distribution::Gaussian }
    }

    /// The shard that begins at `(row0, col0)`.
    pub const fn at(self, row0: u32, col0: u32) -> Self {
        Self { row0, col0, ..self }
    }

    /// The same place under another law.
    pub const fn with(self, distribution: Distribution) -> Self {
        Self { distribution, ..self }
    }

    /// Whether a local matrix of `rows` by `cols` lies inside the tensor's columns and its elements are numbered in 32 bits.
    ///
    /// The generators number elements modulo 2^32 and check nothing: whoever accepts a site calls this first.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument), with the offending numbers.
    pub fn check(&self, rows: usize, cols: usize) -> Result<()> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let (rows, cols) = (rows as u128, cols as u128);
        let (row0, col0, ld) = (u128::from(self.row0), u128::from(self.col0), u128::from(self.ld));
        if col0 + cols > ld {
            return Err(Error::invalid(format!(
                "perturbation site of tensor {:#x}: columns {col0}..{} reach past the {ld} columns of the unsharded tensor; check col0 and ld",
                self.tensor.word(),
                col0 + cols
            )));
        }
        let last = (row0 + rows - 1) * ld + col0 + cols - 1;
        if last > u128::from(u32::MAX) {
            return Err(Error::invalid(format!(
                "perturbation site of tensor {:#x}: element {last} (row {}, column {} at {ld} columns) does not fit 32 bits; a tensor of more than 2^32 elements cannot be perturbed",
                self.tensor.word(),
                row0 + rows - 1,
                col0 + cols - 1
            )));
        }
        Ok(())
    }

    /// Number of element `(row, col)` of the local matrix in its tensor, modulo 2^32.
    pub const fn element(&self, row: u32, col: u32) -> u32 {
        let row = self.row0.wrapping_add(row);
        row.wrapping_mul(self.ld).wrapping_add(self.col0.wrapping_add(col))
    }

    /// The runs of consecutive elements that make up a local matrix of `rows` by `cols`: one per row, or a single one where the matrix
    /// has all the tensor's columns. Long runs are generated faster than short ones.
    pub fn runs(&self, rows: usize, cols: usize) -> impl Iterator<Item = Run> + use<> {
        let whole = self.col0 == 0 && cols == self.ld as usize;
        let (count, len) = match (rows * cols, whole) {
            (0, _) => (0, 0),
            (all, true) => (1, all),
            (_, false) => (rows, cols),
        };
        (0..count).map(move |row| Run { row: row as u32, start: row * len, len })
    }
}

/// Consecutive elements of a tensor, see [`Site::runs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Row of the local matrix at whose first column the run begins.
    pub row: u32,
    /// Where the run begins in a packed row-major local matrix.
    pub start: usize,
    /// Elements.
    pub len: usize,
}
