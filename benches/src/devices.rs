//! Which devices are measured: a table of factories, and the choice of the environment.

use crate::{Case, Lab, Run, Work};
use std::{env, sync::OnceLock};
use zofo_cpu::{CpuDevice, CpuOptions, Isa};
use zofo_hal::{DeviceRef, Error, Op, Result, TensorArg};

/// A kind of device.
pub struct Factory {
    /// Its name in `ZOFO_BENCH_DEVICES`; results are those of `zofo-NAME`.
    pub name: String,
    /// Opens one with a number of host threads.
    pub open: Box<dyn Fn(usize) -> Result<DeviceRef>>,
}

impl Factory {
    fn new(name: impl Into<String>, open: impl Fn(usize) -> Result<DeviceRef> + 'static) -> Self {
        Self { name: name.into(), open: Box::new(open) }
    }
}

/// Every kind of device. A new backend is one more line; the first one is measured unless the environment says otherwise.
pub fn factories() -> Vec<Factory> {
    let eight = |int8, name| Factory::new(name, move |threads| cpu(threads, chosen_isa()?, int8));
    let mut all = vec![eight(false, "cpu"), eight(true, "cpu-int8")];
    all.extend(Isa::ALL.map(|isa| Factory::new(format!("cpu-{isa}"), move |threads| cpu(threads, Some(isa), false))));
    all
}

/// The tier that `ZOFO_CPU_ISA` names.
fn chosen_isa() -> Result<Option<Isa>> {
    env::var("ZOFO_CPU_ISA").ok().map(|name| Isa::named(&name).map_err(|e| e.context("ZOFO_CPU_ISA"))).transpose()
}

fn cpu(threads: usize, isa: Option<Isa>, int8: bool) -> Result<DeviceRef> {
    Ok(CpuDevice::new(CpuOptions { threads: Some(threads), isa, int8 })?)
}

/// Threads of every contestant: `ZOFO_BENCH_THREADS`, or the physical cores that the process may use.
///
/// # Panics
/// If the variable is no number, or there is no CPU device.
pub fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| match env::var("ZOFO_BENCH_THREADS") {
        Ok(n) => n.parse().ok().filter(|n| *n > 0).unwrap_or_else(|| panic!("ZOFO_BENCH_THREADS is `{n}`; it must be a number above 0")),
        Err(_) => physical_cores(),
    })
}

/// The physical cores that the process may use, as the CPU backend counts them.
pub(crate) fn physical_cores() -> usize {
    CpuDevice::new(CpuOptions::default()).expect("a CPU device").threads()
}

/// A device to measure.
#[derive(Clone)]
pub struct Subject {
    /// `zofo-cpu`, ...
    pub who: String,
    /// The device.
    pub device: DeviceRef,
}

/// The devices that `ZOFO_BENCH_DEVICES` names (`cpu,cpu-avx2`; `all` are those that open here), or else the first of the table.
///
/// # Errors
/// `InvalidArgument` for a name that is not in the table; what opening a named device gives.
pub fn selected() -> Result<Vec<Subject>> {
    let table = factories();
    let open = |f: &Factory| Ok(Subject { who: format!("zofo-{}", f.name), device: (f.open)(threads())? });
    let names = match env::var("ZOFO_BENCH_DEVICES") {
        Ok(names) if names == "all" => return Ok(table.iter().filter_map(|f| open(f).ok()).collect()),
        Ok(names) => names,
        Err(_) => return Ok(vec![open(&table[0])?]),
    };
    let find = |name: &str| {
        let known = || table.iter().map(|f| f.name.as_str()).collect::<Vec<_>>().join(", ");
        let unknown = || Error::invalid(format!("ZOFO_BENCH_DEVICES: `{name}` is not among {}, all", known()));
        open(table.iter().find(|f| f.name == name).ok_or_else(unknown)?)
    };
    names.split(',').map(|name| find(name.trim())).collect()
}

impl Subject {
    /// The same kind of device with one thread, where it has more and is of the table.
    pub fn single_threaded(&self) -> Option<DeviceRef> {
        let name = self.who.strip_prefix("zofo-")?;
        let factory = factories().into_iter().find(|f| f.name == name).filter(|_| threads() > 1)?;
        (factory.open)(1).ok()
    }

    /// A case that runs one op, or none where the device lacks it. `variant` tells cases of one group apart that are all this device's.
    pub fn op(&self, group: &str, variant: &str, work: Work, build: impl Fn(&mut Lab) -> Result<Op<TensorArg>> + 'static) -> Option<Case> {
        let who = if variant.is_empty() { self.who.clone() } else { format!("{}+{variant}", self.who) };
        let asked = Lab::asking(&self.device).and_then(|mut lab| build(&mut lab));
        let runs = asked.and_then(|op| op.check().map(|()| self.device.supports(&op.spec()).runs()));
        match runs {
            Ok(true) => {}
            Ok(false) => {
                eprintln!("{group}/{who}: the device does not have this op");
                return None;
            }
            // Shown where it is run.
            Err(e) => return Some(Case::new(group, who, work, move || Err(e.clone()))),
        }
        let device = self.device.clone();
        let prepare = move || -> Result<Run> {
            let mut lab = Lab::new(&device)?;
            let op = build(&mut lab)?;
            let runner = lab.into_runner();
            Ok(Box::new(move || {
                runner.queue().submit(&op)?;
                runner.queue().synchronize(None)
            }))
        };
        Some(Case::new(group, who, work, prepare))
    }
}
