//! Weights: converted to f32 at import, as the formats define it.

use super::storage::Allocator;
use crate::{Error, ErrorKind, MemorySpace, Result, Weight, WeightData, WeightSpec, quant, sync::Mutex};
use alloc::{format, sync::Arc, vec, vec::Vec};
use core::any::Any;

/// A weight as a row-major f32 matrix.
pub(super) struct RefWeight {
    spec: WeightSpec,
    space: MemorySpace,
    values: Arc<[f32]>,
    allocator: Arc<Mutex<Allocator>>,
}

/// Converts the bytes of a weight to f32.
pub(super) fn values(spec: &WeightSpec, data: &WeightData<'_>) -> Result<Vec<f32>> {
    if spec.dtype == crate::DType::U32 {
        return Err(Error::unsupported("u32 is no weight type"));
    }
    let (expected, bytes) = (spec.host_bytes()?, data.bytes()?);
    if bytes.len() != expected {
        let m = format!("a {} weight [{}, {}] has {expected} bytes, not {}", spec.dtype, spec.rows, spec.cols, bytes.len());
        return Err(Error::invalid(m));
    }
    let mut values = vec![0.0; spec.rows * spec.cols];
    if !values.is_empty() {
        for (row, bytes) in values.chunks_exact_mut(spec.cols).zip(bytes.chunks_exact(expected / spec.rows)) {
            quant::dequantise_row(spec.dtype, bytes, row)?;
        }
    }
    Ok(values)
}

impl RefWeight {
    pub fn import(spec: &WeightSpec, data: &WeightData<'_>, space: MemorySpace, allocator: &Arc<Mutex<Allocator>>) -> Result<Self> {
        let values = values(spec, data)?;
        allocator.lock().take(values.len() * 4, "a weight")?;
        Ok(Self { spec: *spec, space, values: values.into(), allocator: allocator.clone() })
    }

    /// The values of a weight of this kind.
    pub fn of(weight: &dyn Weight) -> Result<Arc<[f32]>> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a weight of another backend: import it on this device");
        (weight as &dyn core::any::Any).downcast_ref::<Self>().map(|w| w.values.clone()).ok_or_else(foreign)
    }
}

impl Weight for RefWeight {
    fn spec(&self) -> WeightSpec {
        self.spec
    }
    fn bytes(&self) -> usize {
        self.values.len() * 4
    }
    fn space(&self) -> MemorySpace {
        self.space
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for RefWeight {
    fn drop(&mut self) {
        self.allocator.lock().give(self.values.len() * 4);
    }
}
