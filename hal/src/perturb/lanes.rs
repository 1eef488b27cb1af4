//! What a kernel needs of a vector register, so that it is written once for every instruction set.

/// An instruction set. Its values are proofs that the CPU has it: each implementation's constructor is unsafe.
///
/// Arithmetic is rounded separately to nearest even; nothing here may contract `mul` and `add`.
pub(super) trait Lanes: Copy {
    /// [`Lanes::BLOCKS`] f32.
    type F: Copy;
    /// [`Lanes::BLOCKS`] u32, one per block, in an order that suits [`Lanes::store4`].
    type U: Copy;
    /// [`Lanes::BLOCKS`] words while Philox runs, laid out as the widening multiplication likes it.
    type P: Copy;
    /// 32-bit lanes of a register, and so Philox blocks per iteration.
    const BLOCKS: usize;

    /// Block numbers from `first` up, modulo 2^32.
    fn blocks(self, first: u32) -> Self::P;
    fn splat_p(self, x: u32) -> Self::P;
    fn xor_p(self, a: Self::P, b: Self::P) -> Self::P;
    /// `(high, low)` halves of the 64-bit product.
    fn product(self, a: Self::P, m: u32) -> (Self::P, Self::P);
    fn finish(self, a: Self::P) -> Self::U;

    fn splat(self, x: u32) -> Self::U;
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn and(self, a: Self::U, b: Self::U) -> Self::U;
    fn or(self, a: Self::U, b: Self::U) -> Self::U;
    fn xor(self, a: Self::U, b: Self::U) -> Self::U;
    fn shl1(self, a: Self::U) -> Self::U;
    fn shl2(self, a: Self::U) -> Self::U;
    fn shr1(self, a: Self::U) -> Self::U;
    /// Arithmetic shift right by 23.
    fn sar23(self, a: Self::U) -> Self::U;
    /// Signed conversion, to nearest even.
    fn float(self, a: Self::U) -> Self::F;
    fn bits(self, a: Self::F) -> Self::U;
    fn of_bits(self, a: Self::U) -> Self::F;

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn sqrt(self, a: Self::F) -> Self::F;
    /// Lanes of `b` where the top bit of `mask` is set, of `a` elsewhere.
    fn select(self, mask: Self::U, a: Self::F, b: Self::F) -> Self::F;

    /// [`Lanes::BLOCKS`] words in the order of memory.
    ///
    /// # Safety
    /// `from` must be readable for that many words.
    unsafe fn load(self, from: *const u32) -> Self::U;
    /// [`Lanes::BLOCKS`] numbers in the order of memory.
    ///
    /// # Safety
    /// `to` must be writable for that many numbers.
    unsafe fn store(self, a: Self::F, to: *mut f32);
    /// Blocks in ascending order, word by word: the transpose of `z`.
    ///
    /// # Safety
    /// `to` must be writable for `4 * BLOCKS` numbers.
    unsafe fn store4(self, z: [Self::F; 4], to: *mut f32);
}
