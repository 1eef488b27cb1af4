//! The perturbation contract: which number z is, given where it stands.
//!
//! z is a function, not a state: `z(seed, step, direction, tensor, element)`. Any device regenerates any tile of any direction from a few
//! words, in any order, on any shard, and gets the same bits. Nothing is stored and nothing is sent.
//!
//! # For callers
//! | step | type |
//! |---|---|
//! | name the tensor, and where the local matrix lies in it | [`TensorId`], [`Site`], checked once by [`Site::check`] |
//! | name the direction | [`Direction`] |
//! | choose the instruction set, once per device | [`Tier::detect`] |
//! | generate | [`Noise::z_into`], [`Noise::perturb_into`], [`Noise::accumulate`], [`Noise::words_into`] |
//!
//! ```
//! use zofo_hal::perturb::{Direction, Domain, Factor, Noise, Projection, Site, TensorId, Tier};
//! # fn main() -> zofo_hal::Result<()> {
//! let tensor = TensorId::new(3, Projection::Q, Factor::A)?;
//! let site = Site::new(tensor, 64); // an A of [rank, 64]
//! site.check(4, 64)?;
//! let noise = Noise::new(42, 0, Direction::new(Domain::Main, 0, 7)?, site, Tier::detect());
//! let mut row = [0.0; 64];
//! noise.z_into(2, 0, &mut row);
//! assert_eq!(row[5], noise.normal(2, 5));
//! # Ok(())
//! # }
//! ```
//!
//! # For backend authors
//! Three stages, each to be matched bit for bit.
//!
//! 1. **Words.** Philox4x32-10 ([`philox4x32_10`]) with `key = (seed lo, seed hi)` and `counter = (block, tensor, direction, step)`;
//!    word j of block b serves element `4 b + j`. `element = row * ld + col` of the unsharded row-major tensor, so a shard or a tile may
//!    start inside a block.
//! 2. **Distribution.** [`Distribution::Gaussian`]: words (0, 1) of a block give elements `4 b` and `4 b + 1`, words (2, 3) the other two:
//!    `radius(first) * cos(second)` and `radius(first) * sin(second)`, as [`normal`](mod@normal) writes them down.
//!    [`Distribution::Rademacher`]: the top bit of an element's own word is the sign of its 1.
//! 3. **Use.** `a + eps z = add(a, mul(eps, z))`, and an update is `acc = add(acc, mul(c_i, z_i))`, i ascending.
//!
//! Arithmetic is f32 add, mul and sqrt, each rounded separately to nearest even: no fused multiply-add, no division, and no subnormal in
//! an input, an intermediate or a result, so that devices that flush them agree too. CUDA: `__fadd_rn`, `__fmul_rn`, `__fsqrt_rn`,
//! `__int2float_rn`. A device that cannot do this receives z from its host.

mod address;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
// A target without vectors uses the scalar tier alone.
#[cfg_attr(not(any(target_arch = "x86_64", target_feature = "neon")), allow(dead_code, unused_imports, unused_macros))]
mod kernels;
#[cfg_attr(not(any(target_arch = "x86_64", target_feature = "neon")), allow(dead_code, unused_imports, unused_macros))]
mod lanes;
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
mod neon;
mod noise;
pub mod normal;
mod params;
#[cfg_attr(not(any(target_arch = "x86_64", target_feature = "neon")), allow(dead_code, unused_imports, unused_macros))]
mod philox;
mod scalar;
mod tier;

pub use address::{Direction, Distribution, Domain, Factor, Projection, Run, Site, TensorId};
pub use noise::Noise;
pub use params::NoiseParams;
pub use philox::philox4x32_10;
pub use tier::Tier;
