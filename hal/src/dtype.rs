//! Element types, the block-quantised ones of GGUF among them.

use core::fmt;

/// Element type of a tensor or weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    Bf16,
    /// Unsigned 32-bit: token ids, row indices, Philox words, parameters.
    U32,
    /// GGUF blocks of 32: f16 scale, 32 signed bytes.
    Q8_0,
    /// GGUF blocks of 32: f16 scale, 32 nibbles, zero at 8.
    Q4_0,
    /// GGUF blocks of 32: f16 scale and minimum, 32 nibbles.
    Q4_1,
    /// GGUF blocks of 32: f16 scale, 32 5-bit values, zero at 16.
    Q5_0,
    /// GGUF blocks of 32: f16 scale and minimum, 32 5-bit values.
    Q5_1,
    /// GGUF super-blocks of 256 with eight 6-bit scales and minimums.
    Q4K,
    /// GGUF super-blocks of 256 with sixteen 8-bit scales.
    Q6K,
}

impl DType {
    /// Every type, in declaration order.
    pub const ALL: [DType; 11] =
        [Self::F32, Self::F16, Self::Bf16, Self::U32, Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Q5_0, Self::Q5_1, Self::Q4K, Self::Q6K];

    /// `(elements, bytes)` of the smallest unit that stands alone.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 | Self::U32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
        }
    }

    /// Bytes of `elements` contiguous elements, or `None` where they fill no whole number of blocks or overflow.
    pub const fn bytes(self, elements: usize) -> Option<usize> {
        let (n, b) = self.block();
        if !elements.is_multiple_of(n) {
            return None;
        }
        (elements / n).checked_mul(b)
    }

    /// Whether this is one of the floating-point types an activation may have.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Whether this is a block-quantised weight type.
    pub const fn is_quantised(self) -> bool {
        self.block().0 != 1
    }

    /// The name used in files, tables and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q4K => "q4_k",
            Self::Q6K => "q6_k",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
