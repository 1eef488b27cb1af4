//! A model folder as a source of weights.

use alloc::{string::String, sync::Arc};

use zofo_hal::{Result, WeightData};

use super::{Cut, ParamName, SourceTensor, WeightSource, linear_name};
use crate::{
    config::ModelConfig,
    files::{ModelFiles, TensorView},
};

impl WeightSource for ModelFiles {
    fn config(&self) -> &ModelConfig {
        self.config()
    }

    fn tensor(&self, name: ParamName) -> Result<Option<SourceTensor<'_>>> {
        let view = match name {
            ParamName::Embedding => Some(self.embed()),
            ParamName::FinalNorm => Some(self.final_norm()),
            ParamName::Head => self.lm_head(),
            ParamName::InputNorm(l) => Some(&self.layer(l)?.input_norm),
            ParamName::PostAttentionNorm(l) => Some(&self.layer(l)?.post_attention_norm),
            ParamName::Weight(l, p) => Some(&self.layer(l)?.linear(linear_name(p)).weight),
            ParamName::Bias(l, p) => self.layer(l)?.linear(linear_name(p)).bias.as_ref(),
        };
        Ok(view.map(tensor))
    }

    fn origin(&self) -> String {
        "safetensors".into()
    }
}

/// The mapped bytes are handed on as they are: a device of this host may use them in place.
fn tensor(view: &TensorView) -> SourceTensor<'_> {
    let (rows, cols) = match view.shape[..] {
        [rows, cols] => (rows, cols),
        _ => (1, view.elements()),
    };
    let data = WeightData::Shared(Arc::new(view.bytes.clone()), 0..view.bytes.len());
    SourceTensor { dtype: view.dtype, rows, cols, data, part: Cut::Whole }
}
