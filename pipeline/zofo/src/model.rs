//! A base model with its tokenizer, and adapters for it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use zofo_hal::{Error, ErrorKind, Result};
use zofo_ops::{
    config::ModelConfig,
    files::{ModelFiles, Tokenizer, read_adapter},
    llama::WeightSource,
    lora::HostAdapter,
};

/// A base model and the tokenizer that its text goes through. Cheap to clone; weights are shared.
#[derive(Clone)]
pub struct Model {
    name: String,
    path: Option<PathBuf>,
    source: Arc<dyn WeightSource + Send + Sync>,
    tokenizer: Arc<Tokenizer>,
}

impl Model {
    /// Opens a folder in Hugging Face layout: `config.json`, safetensors, `tokenizer.json` or `tokenizer.model`.
    ///
    /// # Errors
    /// Those of [`ModelFiles::open`] and [`Tokenizer::open`]; `Format` where the tokenizer has more tokens than the model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !path.exists() {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{}: there is no such model; give a folder with config.json, model.safetensors and a tokenizer", path.display()),
            ));
        }
        if path.is_file() {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{}: a model is a folder with config.json, model.safetensors and a tokenizer, not a file", path.display()),
            ));
        }
        let files = ModelFiles::open(path)?;
        let tokenizer = Tokenizer::open(path)?;
        let mut model = Self::new(path.display().to_string(), Arc::new(files), Arc::new(tokenizer))?;
        model.path = Some(path.canonicalize().map_err(|e| Error::io(path, e))?);
        Ok(model)
    }

    /// A model from anywhere; `name` is what adapters and errors call it.
    ///
    /// # Errors
    /// `Format` where the tokenizer has more tokens than the model.
    pub fn new(name: impl Into<String>, source: Arc<dyn WeightSource + Send + Sync>, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        let name = name.into();
        let vocab = source.config().vocab;
        if tokenizer.vocab_size() > vocab {
            return Err(Error::format(format!(
                "{name}: the tokenizer has {} tokens, the model only {vocab}; they do not belong together",
                tokenizer.vocab_size()
            )));
        }
        Ok(Self { name, path: None, source, tokenizer })
    }

    /// What adapters and errors call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it was opened.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        self.source.config()
    }

    /// Its parameters.
    pub fn source(&self) -> &Arc<dyn WeightSource + Send + Sync> {
        &self.source
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Reads an adapter for it: a folder in PEFT's format, or the folder of a run, which has one in `adapter`.
    ///
    /// # Errors
    /// `Io` where `folder` is neither; those of [`read_adapter`].
    pub fn read_adapter(&self, folder: &Path) -> Result<HostAdapter> {
        const CONFIG: &str = "adapter_config.json";
        let inner = folder.join("adapter");
        let folder = match () {
            () if folder.join(CONFIG).is_file() => folder,
            () if inner.join(CONFIG).is_file() => &inner,
            () => {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!(
                        "{}: no adapter is here (no {CONFIG}, and none in `adapter` below it); give an adapter folder or the run folder that \
                         `zofo train` wrote",
                        folder.display()
                    ),
                ));
            }
        };
        Ok(HostAdapter::from(&read_adapter(folder, self.config())?))
    }
}
