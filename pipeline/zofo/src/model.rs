//! A base model with its tokenizer, and adapters for it.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use zofo_hal::{Error, ErrorKind, Result};
use zofo_ops::{
    config::ModelConfig,
    files::{GgufModel, ModelFiles, Tokenizer, read_adapter},
    llama::{ParamName, WeightSource, WeightTypes},
    lora::HostAdapter,
};

/// What a model may be.
const ACCEPTED: &str = "give a GGUF file, or a folder with config.json, model.safetensors and a tokenizer";

/// The GGUF file that `path` is, or the only one in the folder that it is; none where there is a `config.json`.
fn gguf_file(path: &Path) -> Result<Option<PathBuf>> {
    let is_gguf = |p: &Path| p.is_file() && p.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if is_gguf(path) {
        return Ok(Some(path.to_owned()));
    }
    if !path.is_dir() || path.join("config.json").exists() {
        return Ok(None);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| Error::io(path, e))? {
        let file = entry.map_err(|e| Error::io(path, e))?.path();
        if is_gguf(&file) {
            files.push(file);
        }
    }
    files.sort();
    match files.len() {
        0 | 1 => Ok(files.pop()),
        n => Err(Error::invalid(format!("{}: {n} GGUF files are here, {} among them; name one", path.display(), files[0].display()))),
    }
}

/// A base model and the tokenizer that its text goes through. Cheap to clone; weights are shared.
#[derive(Clone)]
pub struct Model {
    name: String,
    path: Option<PathBuf>,
    source: Arc<dyn WeightSource + Send + Sync>,
    tokenizer: Arc<Tokenizer>,
}

impl Model {
    /// Opens a GGUF file, or a folder: one in Hugging Face layout (`config.json`, safetensors, `tokenizer.json` or `tokenizer.model`), or one with a
    /// single GGUF file in it. `embedded` is the model that comes with the program.
    ///
    /// # Errors
    /// Those of [`ModelFiles::open`] and [`Tokenizer::open`], or of [`GgufModel::open`] and [`Tokenizer::from_gguf`]; `Format` where the tokenizer
    /// has more tokens than the model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        #[cfg(feature = "embedded")]
        if crate::embedded::is_name(path) {
            return crate::embedded::model();
        }
        let lies = |what: &str| Err(Error::new(ErrorKind::Io, format!("{}: {what}; {ACCEPTED}", path.display())));
        if !path.exists() {
            return lies("there is no such model");
        }
        let name = path.display().to_string();
        let mut model = match gguf_file(path)? {
            Some(file) => {
                let source = GgufModel::open(&file)?;
                let tokenizer = Tokenizer::from_gguf(source.file().metadata()).map_err(|e| e.context(file.display()))?;
                Self::new(name, Arc::new(source), Arc::new(tokenizer))?
            }
            None if path.is_dir() => Self::new(name, Arc::new(ModelFiles::open(path)?), Arc::new(Tokenizer::open(path)?))?,
            None => return lies("this file is no model that is read here"),
        };
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

    /// The same, opened again by this path.
    #[cfg(feature = "embedded")]
    pub(crate) fn at(mut self, path: PathBuf) -> Self {
        self.path = Some(path);
        self
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

    /// What was read as what, in a line: the kind of file, and how many weights were kept in the type they are stored in or converted.
    pub fn describe_weights(&self, types: &[WeightTypes]) -> String {
        let bytes: usize = types.iter().map(|t| t.bytes).sum();
        let each = types.iter().map(|t| match t.stored == t.held {
            true => format!("{} x {} as stored", t.parameters, t.stored),
            false => format!("{} x {} converted to {}", t.parameters, t.stored, t.held),
        });
        format!("{}: {}; {:.1} MB", self.source.origin(), each.collect::<Vec<_>>().join(", "), bytes as f64 / 1e6)
    }

    /// Whether every parameter is a number: for who meets a result that is none.
    ///
    /// # Errors
    /// `Format` naming the first tensor with a value that is infinite or not a number; those of reading.
    pub fn check_finite(&self) -> Result<()> {
        for name in ParamName::all(self.config()) {
            let tensor = self.source.require(name)?;
            let (cols, values) = (tensor.cols.max(1), tensor.to_f32()?);
            if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                return Err(Error::format(format!(
                    "{}: tensor `{name}` has the value {} in row {}, column {}; the file is damaged, or was converted into too small a type",
                    self.name,
                    values[i],
                    i / cols,
                    i % cols
                )));
            }
        }
        Ok(())
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
