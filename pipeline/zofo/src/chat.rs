//! Conversations, written as a model was trained to see them: by the Jinja template that comes with it.
//!
//! Templates run as transformers runs them (`apply_chat_template`): blocks take their line's white space with them, Python's methods of strings,
//! lists and dictionaries are there, `raise_exception` refuses a conversation and `strftime_now` gives the date. Neither tools nor documents are
//! passed. A template is untrusted: steps, texts, recursion and length are bounded, and it reaches nothing outside itself. One hole is left:
//! minijinja 3.1 does not charge for lists added to lists, so a template that doubles a list over and over exhausts memory.

mod date;
mod json;

use std::{fmt, time::SystemTime};

use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind as JinjaKind, Value, syntax::SyntaxConfig};
use zofo_hal::{Error, ErrorKind, Result};
use zofo_ops::files::Tokenizer;

/// Longest template, in bytes. Those with tools take some ten thousand.
const MAX_TEMPLATE: usize = 1 << 16;
/// minijinja's unit: a step, or 64 bytes made. Some 60 MiB; a conversation takes a few thousand.
const FUEL: u64 = 1_000_000;
/// Nested loops, conditions and macro calls; the latter count several times.
const RECURSION: usize = 200;
/// Longest message of a template that is shown.
const MAX_SHOWN: usize = 300;
const NAME: &str = "chat template";

/// What somebody says in a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who: `system`, `user` or `assistant` to most templates.
    pub role: String,
    /// What.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// Instructions that stand before the conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }
}

/// The template of a model.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// The template that comes with the model of this tokenizer.
    ///
    /// # Errors
    /// `InvalidArgument` where there is none; those of [`ChatTemplate::new`].
    pub fn of(tokenizer: &Tokenizer) -> Result<Self> {
        let source = tokenizer.chat_template().ok_or_else(|| {
            Error::invalid(
                "this model comes with no chat template, so it was not trained for conversations; give it a text to continue instead",
            )
        })?;
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
        Self::new(source, text(tokenizer.bos()), text(tokenizer.eos()))
    }

    /// A template; `bos` and `eos` are how the tokens that begin and end a text are spelled.
    ///
    /// # Errors
    /// `Unsupported` where it is longer than 64 KiB or is not in the part of Jinja that is run here.
    pub fn new(source: &str, bos: Option<String>, eos: Option<String>) -> Result<Self> {
        if source.len() > MAX_TEMPLATE {
            return Err(Error::unsupported(format!(
                "the model's chat template has {} bytes; templates of up to {MAX_TEMPLATE} are run",
                source.len()
            )));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise);
        compile(&mut environment, source)?;
        let mut template = Self { environment, bos, eos };
        template.set_clock(SystemTime::now);
        Ok(template)
    }

    /// Gives the template this date instead of today's.
    pub fn at(mut self, now: SystemTime) -> Self {
        self.set_clock(move || now);
        self
    }

    fn set_clock(&mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) {
        self.environment.add_function("strftime_now", move |format: &str| {
            date::format(now(), format)
                .ok_or_else(|| JinjaError::new(JinjaKind::InvalidOperation, format!("the date format `{format}` is not supported")))
        });
    }

    /// The text of a conversation. With `add_generation_prompt` it ends where the model is to speak.
    ///
    /// # Errors
    /// `InvalidArgument` where the template refuses the conversation, with its reason; `Unsupported` where it needs a part of Jinja that is not
    /// here; `Format` where it fails or does too much.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let messages: Vec<_> =
            messages.iter().map(|m| Value::from_pairs([("role", m.role.as_str()), ("content", m.content.as_str())])).collect();
        let none = Value::from(());
        let mut context = vec![
            ("messages", Value::from(messages)),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("tools", none.clone()),
            ("documents", none),
        ];
        for (name, token) in [("bos_token", &self.bos), ("eos_token", &self.eos)] {
            context.extend(token.as_ref().map(|text| (name, Value::from(text.as_str()))));
        }
        let template = self.environment.get_template(NAME).map_err(failed)?;
        template.render(Value::from_pairs(context)).map_err(failed)
    }
}

/// Parses the template, on a stack of its own: a chain of operators is as deep as it is long, and the limit of recursion does not count it.
fn compile(environment: &mut Environment<'static>, source: &str) -> Result<()> {
    /// For each byte of the longest template, several times what parsing and compiling one operator takes. Touched only as far as it is used.
    const STACK: usize = MAX_TEMPLATE << 12;
    std::thread::scope(|scope| {
        let work = || environment.add_template_owned(NAME, source.to_owned()).map_err(failed);
        let thread = std::thread::Builder::new().name("zofo-template".into()).stack_size(STACK).spawn_scoped(scope, work);
        let thread = thread.map_err(|e| Error::execution(format!("no thread to read the chat template on: {e}")))?;
        thread.join().unwrap_or_else(|_| Err(Error::format("the chat template cannot be read")))
    })
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("bos", &self.bos).field("eos", &self.eos).finish_non_exhaustive()
    }
}

/// The tokens of a conversation up to where the model is to speak.
///
/// # Errors
/// Those of [`ChatTemplate::of`], [`ChatTemplate::render`] and [`Tokenizer::encode_chat`].
pub fn prompt(tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>> {
    let text = ChatTemplate::of(tokenizer)?.render(messages, true)?;
    tokenizer.encode_chat(&text)
}

/// A conversation that the template does not want.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

fn raise(message: String) -> Result<Value, JinjaError> {
    Err(JinjaError::new(JinjaKind::InvalidOperation, "raise_exception").with_source(Refused(message)))
}

/// The message comes from the model's file: it is shown without control characters, and not at any length.
fn shown(message: &dyn fmt::Display) -> String {
    message.to_string().chars().take(MAX_SHOWN).collect::<String>().escape_debug().to_string()
}

fn failed(e: JinjaError) -> Error {
    let mut cause: Option<&dyn std::error::Error> = Some(&e);
    while let Some(inner) = cause {
        if let Some(refused) = inner.downcast_ref::<Refused>() {
            return Error::invalid(format!("the model's chat template refuses this conversation: {}", shown(refused)));
        }
        cause = inner.source();
    }
    let (kind, what) = match e.kind() {
        JinjaKind::SyntaxError
        | JinjaKind::UnknownFilter
        | JinjaKind::UnknownFunction
        | JinjaKind::UnknownMethod
        | JinjaKind::UnknownTest
        | JinjaKind::TemplateNotFound => (ErrorKind::Unsupported, "needs what is not supported"),
        JinjaKind::OutOfFuel => (ErrorKind::Format, "does more work than a conversation takes"),
        _ => (ErrorKind::Format, "fails"),
    };
    Error::new(kind, format!("the model's chat template {what}: {}", shown(&e)))
}
