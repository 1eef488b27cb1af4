//! From a cluster's entries to open devices.

use crate::{
    cluster::{Cluster, Kind},
    executor::StageDevice,
};
use zofo_hal::{Allow, DType, DeviceRef, Error, OpenOptions, Registry, Restricted, Result};

/// Opens the devices of `cluster`, in order. Entries that name the same backend, number of threads and `int8` are virtual devices over
/// one real device: they share its threads, its memory space and one copy of the base model. A bp-free entry gets the forward ops alone, unless
/// `exact` asks for backpropagation everywhere (the oracle, which is a test tool).
///
/// # Errors
/// Those of [`Registry::open`], with the entry's name; `Unsupported` for `int8` on a backend that has no such products.
pub fn open(registry: &Registry, cluster: &Cluster, default_compute: DType, exact: bool) -> Result<Vec<StageDevice>> {
    let mut real: Vec<(_, DeviceRef)> = Vec::new();
    let mut devices = Vec::with_capacity(cluster.devices.len());
    for entry in &cluster.devices {
        let key = (entry.backend.as_str(), entry.threads, entry.int8);
        let device = match real.iter().find(|(known, _)| *known == key) {
            Some((_, device)) => device.clone(),
            None => {
                let mut options = OpenOptions::default().int8(entry.int8);
                options.threads = entry.threads;
                let device = registry.open(&entry.backend, &options).map_err(|e| e.with_device(entry.name.clone()))?;
                if entry.int8 && !device.features().int8_products {
                    let m = format!("device `{}` has int8 = true, but backend `{}` has no products in 8 bits", entry.name, entry.backend);
                    return Err(Error::unsupported(m));
                }
                real.push((key, device.clone()));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::DeviceEntry;
    use zofo_hal::reference::ReferenceDriver;

    #[test]
    fn a_backend_without_8_bit_products_is_named_with_its_device() {
        let mut registry = Registry::new();
        registry.register(Box::new(ReferenceDriver));
        let mut entry = DeviceEntry::virtual_cpu("gpu7", Kind::Bp);
        entry.backend = "reference".to_string();
        let mut cluster = Cluster::new(vec![entry]);
        assert!(open(&registry, &cluster, DType::F32, false).is_ok());
        cluster.devices[0].int8 = true;
        let e = open(&registry, &cluster, DType::F32, false).err().unwrap();
        assert!(e.message().contains("gpu7") && e.message().contains("reference"), "{e}");
    }
}
