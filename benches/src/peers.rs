//! Other libraries, on the same operands' shapes and the same number of threads.

#[cfg(feature = "peers-candle")]
pub mod candle;
#[cfg(feature = "peers")]
pub mod matmul;
#[cfg(feature = "peers")]
pub mod normals;

use crate::threads;

/// The number of threads that a library reads from variable `name`, where it says one.
#[cfg(feature = "peers")]
fn variable(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// Whether a library that would use `own` threads may take part; says why not.
fn takes_part(who: &str, own: usize, hint: &str) -> bool {
    let same = own == threads();
    if !same {
        eprintln!("{who} is left out: it would use {own} threads, the others {}; set {hint}", threads());
    }
    same
}
