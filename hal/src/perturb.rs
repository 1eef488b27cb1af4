//! The perturbation contract.

/// Placeholder while the module is being written.
#[derive(Clone, Copy, Debug)]
pub struct Site;
impl Site {
    /// Checks.
    pub fn check(&self, _rows: usize, _cols: usize) -> crate::Result<()> {
        Ok(())
    }
}
