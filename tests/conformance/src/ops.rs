//! Cases per op, in files named as those of the op vocabulary.

mod attention;
mod backward;
mod forward;
mod loss;
mod matmul;
mod primitive;
mod update;

use crate::suite::Tests;

/// Adds the tests of every op.
pub fn tests(tests: &mut Tests) {
    primitive::tests(tests);
    matmul::tests(tests);
    attention::tests(tests);
    forward::tests(tests);
    loss::tests(tests);
    backward::tests(tests);
    update::tests(tests);
}
