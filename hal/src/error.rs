//! The one error type of the workspace.
//!
//! # For callers
//! Match on [`Error::kind`], which is stable; show the error with `Display`, which says what was wrong, where, and what to do.
//!
//! # For backend authors
//! Build an error from its kind and a message, then attach what you know: the op, the device, the native code with its text.

use alloc::{borrow::Cow, boxed::Box, string::String};
use core::fmt;

/// Result with [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// What went wrong, in terms a program can act on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device cannot run this op, type or shape; another device or a decomposition may.
    Unsupported,
    /// The caller broke the contract: shapes, types, overlap, a field out of range.
    InvalidArgument,
    /// Not enough memory, in bytes. `available` is `None` where the device cannot tell.
    OutOfMemory {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that were free.
        available: Option<u64>,
    },
    /// The device is gone; its queues and buffers are of no more use.
    DeviceLost,
    /// A driver or library is missing.
    BackendUnavailable {
        /// Names and paths that were tried.
        searched: Box<[String]>,
        /// What the user can do.
        hint: String,
    },
    /// A buffer, weight or event of another backend or memory space was handed in.
    ForeignBuffer,
    /// A wait ended before the work did.
    Timeout,
    /// An op failed while it ran. `poisoned` is true for later submits to the same queue, which never ran.
    Execution {
        /// Whether this is the echo of an earlier failure.
        poisoned: bool,
    },
    /// A file or a stream could not be read or written.
    Io,
    /// A file or message is malformed.
    Format,
    /// The user or the caller asked to stop.
    Cancelled,
}

/// An op as it is named in errors and traces: its kind, and a label of the caller such as `layers.3.q_proj`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpTag {
    /// The op's name, for example `matmul`.
    pub op: &'static str,
    /// Sequence number on its queue, where one was given.
    pub sequence: Option<u64>,
}

/// An error: its kind, its message, and the context known where it arose.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    op: Option<OpTag>,
    device: Option<String>,
    native: Option<(i64, String)>,
}

impl Error {
    /// An error of `kind`; `message` is lower case, without a full stop.
    #[cold]
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), op: None, device: None, native: None }))
    }

    /// [`ErrorKind::InvalidArgument`].
    #[cold]
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// [`ErrorKind::Unsupported`].
    #[cold]
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// [`ErrorKind::Format`].
    #[cold]
    pub fn format(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Format, message)
    }

    /// [`ErrorKind::Execution`], not poisoned.
    #[cold]
    pub fn execution(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Execution { poisoned: false }, message)
    }

    /// [`ErrorKind::Io`] about `path`.
    #[cfg(feature = "std")]
    #[cold]
    pub fn io(path: impl AsRef<std::path::Path>, source: std::io::Error) -> Self {
        let path = path.as_ref().display();
        let mut e = Self::new(ErrorKind::Io, alloc::format!("{path}: {source}"));
        if let Some(code) = source.raw_os_error() {
            e.0.native = Some((code.into(), String::new()));
        }
        e
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The message without context.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The op that failed, where one did.
    pub fn op(&self) -> Option<&OpTag> {
        self.0.op.as_ref()
    }

    /// Name of the device, where one is concerned.
    pub fn device(&self) -> Option<&str> {
        self.0.device.as_deref()
    }

    /// The native error code and its text.
    pub fn native(&self) -> Option<(i64, &str)> {
        self.0.native.as_ref().map(|(c, t)| (*c, t.as_str()))
    }

    /// Names the op, unless an inner layer already did.
    pub fn with_op(mut self, op: &'static str, sequence: Option<u64>) -> Self {
        self.0.op.get_or_insert(OpTag { op, sequence });
        self
    }

    /// Names the device, unless an inner layer already did.
    pub fn with_device(mut self, name: impl Into<String>) -> Self {
        self.0.device.get_or_insert_with(|| name.into());
        self
    }

    /// Adds the native code and text.
    pub fn with_native(mut self, code: i64, text: impl Into<String>) -> Self {
        self.0.native = Some((code, text.into()));
        self
    }

    /// Puts `context: ` before the message.
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.0.message = alloc::format!("{context}: {}", self.0.message).into();
        self
    }

    /// The error that submits after this one get: same op and text, marked poisoned.
    pub fn poisoned(&self) -> Self {
        let mut e = self.clone();
        if let ErrorKind::Execution { poisoned } = &mut e.0.kind {
            *poisoned = true;
        }
        e
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let i = &*self.0;
        if let Some(d) = &i.device {
            write!(f, "{d}: ")?;
        }
        if let Some(o) = &i.op {
            match o.sequence {
                Some(s) => write!(f, "{} (op {s} of its queue): ", o.op)?,
                None => write!(f, "{}: ", o.op)?,
            }
        }
        f.write_str(&i.message)?;
        match &i.kind {
            ErrorKind::OutOfMemory { requested, available: Some(a) } => write!(f, " ({requested} bytes requested, {a} available)")?,
            ErrorKind::OutOfMemory { requested, .. } => write!(f, " ({requested} bytes requested)")?,
            ErrorKind::BackendUnavailable { searched, hint } => write!(f, " (searched {}; {hint})", searched.join(", "))?,
            ErrorKind::Execution { poisoned: true } => f.write_str(" (an earlier op of this queue failed; reset the queue)")?,
            _ => {}
        }
        match &i.native {
            Some((code, text)) if !text.is_empty() => write!(f, " [native {code}: {text}]"),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl core::error::Error for Error {}
