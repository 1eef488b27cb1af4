//! A model of random parameters that are made when they are asked for: nothing but the device holds them.

use crate::random;
use std::sync::Arc;
use zofo_hal::{DType, Result, WeightData};
use zofo_ops::llama::{Cut, ModelConfig, ParamName, SourceTensor, WeightSource};

/// Random matrices of one type, gains of 1.
pub struct Synthetic {
    config: ModelConfig,
    dtype: DType,
    names: Vec<ParamName>,
}

impl Synthetic {
    /// A model whose matrices are stored as `dtype`.
    pub fn new(config: ModelConfig, dtype: DType) -> Self {
        Self { names: ParamName::all(&config), config, dtype }
    }

    /// Bytes of all matrices, each counted once: what a pass over one token reads.
    pub fn bytes(&self) -> usize {
        let elements = self.names.iter().map(|name| name.shape(&self.config)).filter(|(rows, _)| *rows > 1).map(|(r, c)| r * c);
        let (count, size) = self.dtype.block();
        elements.sum::<usize>() / count * size
    }
}

impl WeightSource for Synthetic {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, name: ParamName) -> Result<Option<SourceTensor<'_>>> {
        let Some(seed) = self.names.iter().position(|n| *n == name) else {
            return Ok(None);
        };
        let (rows, cols) = name.shape(&self.config);
        let (dtype, bytes) = match rows {
            1 => (DType::F32, 1f32.to_le_bytes().repeat(cols)),
            _ => (self.dtype, random::weight(seed as u64, self.dtype, rows, cols)?),
        };
        let all = 0..bytes.len();
        let data = WeightData::Shared(Arc::new(bytes), all);
        Ok(Some(SourceTensor { dtype, rows, cols, data, part: Cut::Whole }))
    }
}
