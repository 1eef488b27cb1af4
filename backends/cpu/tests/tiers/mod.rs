//! Which tiers are tested.

use std::env;
use zofo_cpu::Isa;

/// The tier that `ZOFO_CPU_ISA` names, or else every tier of this machine.
///
/// # Errors
/// The tiers to choose from, where this machine lacks the named one.
pub fn chosen() -> Result<Vec<Isa>, String> {
    match env::var("ZOFO_CPU_ISA") {
        Ok(name) => Isa::named(&name).map(|isa| vec![isa]).map_err(|e| format!("ZOFO_CPU_ISA: {}", e.message())),
        Err(_) => Ok(Isa::available()),
    }
}
