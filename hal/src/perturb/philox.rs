//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.3).

/// Multipliers of the two products of a round.
pub(super) const M: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];

/// Added to the key after each round: the golden ratio and the square root of 3, less 1, in 32 bits.
const BUMP: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The 128-bit product's halves that a round needs: `(high, low)`.
pub(super) const fn product(a: u32, b: u32) -> (u32, u32) {
    let p = a as u64 * b as u64;
    ((p >> 32) as u32, p as u32)
}

/// The keys of the ten rounds.
pub(super) const fn round_keys(key: [u32; 2]) -> [[u32; 2]; 10] {
    let mut keys = [key; 10];
    let mut i = 1;
    while i < 10 {
        keys[i] = [keys[i - 1][0].wrapping_add(BUMP[0]), keys[i - 1][1].wrapping_add(BUMP[1])];
        i += 1;
    }
    keys
}

/// The four words of one block.
///
/// ```
/// use zofo_hal::perturb::philox4x32_10;
/// assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
/// ```
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let keys = round_keys(key);
    let mut c = counter;
    let mut i = 0;
    while i < 10 {
        let (h0, l0) = product(c[0], M[0]);
        let (h1, l1) = product(c[2], M[1]);
        c = [h1 ^ c[1] ^ keys[i][0], l1, h0 ^ c[3] ^ keys[i][1], l0];
        i += 1;
    }
    c
}

/// Everything of a counter but its block, made ready for many blocks.
///
/// Words 1 to 3 of the counter are the same in every block, so half of the first round and half of the second are too; they are
/// computed here, once. With products `(h, l)` and the block's own product `(h0, l0) = M0 * block`, the state after round 2 is
/// `[hi(M1 * s) ^ a, lo(M1 * s), l0 ^ b, c]` where `s = h0 ^ third`.
pub(super) struct Stream {
    /// `[tensor, direction, step]`.
    pub tail: [u32; 3],
    /// `(seed lo, seed hi)`.
    pub key: [u32; 2],
    /// Keys of rounds 3 to 10.
    pub keys: [[u32; 2]; 8],
    pub third: u32,
    pub a: u32,
    pub b: u32,
    pub c: u32,
}

impl Stream {
    pub const fn new(key: [u32; 2], tensor: u32, direction: u32, step: u32) -> Self {
        let k = round_keys(key);
        let (h1, l1) = product(direction, M[1]);
        let (h0, l0) = product(h1 ^ tensor ^ k[0][0], M[0]);
        Self {
            tail: [tensor, direction, step],
            key,
            keys: [k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9]],
            third: step ^ k[0][1],
            a: l1 ^ k[1][0],
            b: h0 ^ k[1][1],
            c: l0,
        }
    }

    /// The words of block `block`, without the shortcut: the scalar tier and the yardstick of the others.
    pub const fn block(&self, block: u32) -> [u32; 4] {
        let [tensor, direction, step] = self.tail;
        philox4x32_10([block, tensor, direction, step], self.key)
    }
}
