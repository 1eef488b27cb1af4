//! From a cluster's entries to open devices.

use crate::{
    cluster::{Cluster, Kind},
    executor::StageDevice,
};
use zofo_hal::{Allow, DType, DeviceRef, OpenOptions, Registry, Restricted, Result};

/// Opens the devices of `cluster`, in order. Entries that name the same backend and number of threads are virtual devices over one real
/// device: they share its threads, its memory space and one copy of the base model. A bp-free entry gets the forward ops alone, unless
/// `exact` asks for backpropagation everywhere (the oracle, which is a test tool).
///
/// # Errors
/// Those of [`Registry::open`], with the entry's name.
pub fn open(registry: &Registry, cluster: &Cluster, default_compute: DType, exact: bool) -> Result<Vec<StageDevice>> {
    let mut real: Vec<(&str, Option<usize>, DeviceRef)> = Vec::new();
    let mut devices = Vec::with_capacity(cluster.devices.len());
    for entry in &cluster.devices {
        let found = real.iter().find(|(b, t, _)| *b == entry.backend && *t == entry.threads);
        let device = match found {
            Some((_, _, device)) => device.clone(),
            None => {
                let options = entry.threads.map_or_else(OpenOptions::default, |n| OpenOptions::default().threads(n));
                let device = registry.open(&entry.backend, &options).map_err(|e| e.with_device(entry.name.clone()))?;
                real.push((&entry.backend, entry.threads, device.clone()));
                device
            }
        };
        let device: DeviceRef = match entry.kind {
            Kind::BpFree if !exact => Restricted::new(device, Allow::Forward, entry.name.clone()),
            _ => device,
        };
        devices.push(StageDevice::new(device, entry.compute.unwrap_or(default_compute)));
    }
    Ok(devices)
}
