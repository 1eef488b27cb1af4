//! The devices of this host, as far as this build has backends for them.

mod survey;

use serde::Serialize;
use zofo_hal::{DType, DeviceKind, DeviceRef, OpenOptions, Registry, Result};

pub use survey::{Answer, OpSupport};

/// A registry of the backends that this build has.
pub fn registry() -> Registry {
    #[allow(unused_mut)]
    let mut registry = Registry::new();
    #[cfg(feature = "cpu")]
    registry.register(Box::new(zofo_cpu::CpuDriver));
    registry
}

/// Opens a device by name, for example `cpu` or `cpu:0`.
///
/// # Errors
/// Those of [`Registry::open`].
pub fn open(name: &str, threads: Option<usize>) -> Result<DeviceRef> {
    let mut options = OpenOptions::default();
    options.threads = threads;
    registry().open(name, &options)
}

/// What there is to say of a device.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DeviceReport {
    /// What it is opened by.
    pub device: String,
    /// `cpu`, `gpu`, `npu`.
    pub kind: &'static str,
    /// For people: with threads and SIMD tier, for a CPU.
    pub name: String,
    /// Processor model.
    pub soc: Option<String>,
    /// Total memory in bytes, where known.
    pub memory_bytes: Option<u64>,
    /// Names and versions of drivers.
    pub versions: Vec<(String, String)>,
    /// How each op of a training step runs.
    pub ops: Vec<OpSupport>,
}

impl DeviceReport {
    /// Ops that run with activations of type `compute`, natively and in all, and the number asked for.
    pub fn count(&self, compute: DType) -> (usize, usize, usize) {
        let of_type = || self.ops.iter().filter(|o| o.compute == compute.name());
        let native = of_type().filter(|o| o.answer == Answer::Native).count();
        let runs = of_type().filter(|o| o.answer != Answer::Unsupported).count();
        (native, runs, of_type().count())
    }
}

/// A backend, and its devices or why it has none.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendReport {
    /// Its name.
    pub backend: &'static str,
    /// Its devices.
    pub devices: Result<Vec<DeviceReport>>,
}

/// Looks at every device of every backend.
pub fn list() -> Vec<BackendReport> {
    let registry = registry();
    let look = |driver: &dyn zofo_hal::Driver| -> Result<Vec<DeviceReport>> {
        let count = driver.devices()?.len();
        (0..count).map(|i| report(format!("{}:{i}", driver.name()), &driver.open(i, &OpenOptions::default())?)).collect()
    };
    registry.drivers().map(|d| BackendReport { backend: d.name(), devices: look(d) }).collect()
}

fn report(device: String, opened: &DeviceRef) -> Result<DeviceReport> {
    let info = opened.info();
    let kind = match info.kind {
        DeviceKind::Cpu => "cpu",
        DeviceKind::Gpu => "gpu",
        DeviceKind::Npu => "npu",
        _ => "other",
    };
    let mut ops = Vec::new();
    for compute in survey::TYPES {
        ops.extend(survey::survey(&**opened, compute)?);
    }
    Ok(DeviceReport {
        device,
        kind,
        name: info.name.clone(),
        soc: info.soc.clone(),
        memory_bytes: opened.limits().memory_bytes,
        versions: info.versions.clone(),
        ops,
    })
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_trains_in_f32() {
        let backends = list();
        let devices = backends[0].devices.as_ref().unwrap();
        let (_, runs, asked) = devices[0].count(DType::F32);
        assert!(asked > 20);
        assert_eq!(runs, asked, "{:?}", devices[0].ops);
    }
}
