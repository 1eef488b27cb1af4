//! The set of backends an application linked.

use crate::{DeviceRef, Driver, Error, OpenOptions, Result};
use alloc::{boxed::Box, format, string::String, vec::Vec};

/// Drivers by name. Registration is explicit; nothing happens at link time.
#[derive(Default)]
pub struct Registry {
    drivers: Vec<Box<dyn Driver>>,
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a driver; a later one of the same name replaces the earlier.
    pub fn register(&mut self, driver: Box<dyn Driver>) {
        self.drivers.retain(|d| d.name() != driver.name());
        self.drivers.push(driver);
    }

    /// The drivers, in order of registration.
    pub fn drivers(&self) -> impl Iterator<Item = &dyn Driver> {
        self.drivers.iter().map(AsRef::as_ref)
    }

    /// Opens `name` or `name:index`, for example `cpu` or `cuda:1`.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown driver or index, and what [`Driver::open`] gives.
    pub fn open(&self, device: &str, options: &OpenOptions) -> Result<DeviceRef> {
        let (name, index) = match device.split_once(':') {
            Some((name, index)) => {
                let index = index.parse().map_err(|_| Error::invalid(format!("`{index}` in device `{device}` is not an index")))?;
                (name, index)
            }
            None => (device, 0),
        };
        let Some(driver) = self.drivers().find(|d| d.name() == name) else {
            let known: Vec<String> = self.drivers().map(|d| d.name().into()).collect();
            return Err(Error::invalid(format!("no backend is called `{name}`; this build has: {}", known.join(", "))));
        };
        driver.open(index, options)
    }
}
