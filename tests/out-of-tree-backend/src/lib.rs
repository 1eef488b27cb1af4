//! The smallest backend that passes `zofo-conformance`, as a template: see README.md.

#![warn(missing_docs)]

mod buffer;
mod device;
mod ops;
mod queue;

pub use device::ToyDevice;

use zofo_hal::{DeviceInfo, DeviceRef, Driver, Error, OpenOptions, Result};

/// Finds and opens toy devices; register it with `zofo_hal::Registry`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToyDriver;

impl Driver for ToyDriver {
    fn name(&self) -> &'static str {
        "toy"
    }

    // A real driver loads its library here, and answers `BackendUnavailable` with what it searched where there is none.
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![device::info()])
    }

    fn open(&self, index: usize, _options: &OpenOptions) -> Result<DeviceRef> {
        match index {
            0 => Ok(ToyDevice::open()),
            _ => Err(Error::invalid(format!("there is no toy device {index}; there is one, number 0"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zofo_hal::Registry;

    #[test]
    fn opens_by_name() {
        let mut registry = Registry::new();
        registry.register(Box::new(ToyDriver));
        let device = registry.open("toy", &OpenOptions::default()).unwrap();
        assert_eq!(device.info().name, "toy");
        assert!(registry.open("toy:1", &OpenOptions::default()).is_err());
    }
}
