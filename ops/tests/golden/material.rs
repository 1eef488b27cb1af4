//! The model and the devices that the golden tests run on.

use std::{fs, path::Path};

use serde_json::Value;
use zofo_ops::files::ModelFiles;

pub fn model(folder: &Path) -> ModelFiles {
    ModelFiles::open(folder).unwrap()
}

pub fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

pub fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}
