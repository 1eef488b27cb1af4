//! `zofo devices`

use serde_json::json;
use zofo::devices::{self, DeviceReport};
use zofo_hal::DType;

use super::{Failure, args::DevicesArgs, console};

pub fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let backends = devices::list();
    if args.json {
        let missing: Vec<_> =
            backends.iter().filter_map(|b| Some(json!({"backend": b.backend, "error": b.devices.as_ref().err()?.to_string()}))).collect();
        let found: Vec<&DeviceReport> = backends.iter().filter_map(|b| b.devices.as_ref().ok()).flatten().collect();
        console::json(&json!({"devices": found, "unavailable": missing}));
        return Ok(());
    }
    let mut rows = vec![["device", "kind", "memory", "f32", "bf16", "f16", "what it is"].map(str::to_owned).to_vec()];
    for device in backends.iter().filter_map(|b| b.devices.as_ref().ok()).flatten() {
        let ops = |dtype| {
            let (native, runs, asked) = device.count(dtype);
            match runs {
                r if r < asked => format!("{r}/{asked} ops"),
                _ if native < asked => format!("all ops, {} emulated", asked - native),
                _ => "all ops".into(),
            }
        };
        let soc = device.soc.as_ref().map_or_else(String::new, |s| format!(" ({s})"));
        rows.push(vec![
            device.device.clone(),
            device.kind.into(),
            device.memory_bytes.map_or_else(|| "unknown".into(), console::bytes),
            ops(DType::F32),
            ops(DType::Bf16),
            ops(DType::F16),
            format!("{}{soc}", device.name),
        ]);
    }
    console::print(&console::table(&rows));
    for backend in &backends {
        if let Err(e) = &backend.devices {
            console::line(format!("{}: not available: {e}", backend.backend));
        }
    }
    Ok(())
}
