//! The list of tests, and the harness that runs it against devices.

use crate::{
    case::Case,
    check::{Bench, Outcome},
    rng::Rng,
};
use libtest_mimic::{Arguments, Failed, Trial};
use std::{
    process::ExitCode,
    sync::{Arc, OnceLock},
};
use zofo_hal::{DeviceRef, ErrorKind};

type OnBench = dyn Fn(&Bench) -> Outcome + Send + Sync;
type OnDevice = dyn Fn(&DeviceRef) -> Outcome + Send + Sync;

pub(crate) enum Body {
    /// Shares the device with other tests, on a queue of its own.
    Shared(Box<OnBench>),
    /// Gets a device that nothing else uses, for what counts or breaks things.
    Alone(Box<OnDevice>),
}

/// Tests by name.
#[derive(Default)]
pub struct Tests(Vec<(String, Body)>);

impl Tests {
    /// Names and bodies.
    #[cfg(test)]
    pub(crate) fn list(&self) -> &[(String, Body)] {
        &self.0
    }

    /// A test that may share its device.
    pub fn add(&mut self, name: impl Into<String>, body: impl Fn(&Bench) -> Outcome + Send + Sync + 'static) {
        self.0.push((name.into(), Body::Shared(Box::new(body))));
    }

    /// A test that gets a device of its own.
    pub fn alone(&mut self, name: impl Into<String>, body: impl Fn(&DeviceRef) -> Outcome + Send + Sync + 'static) {
        self.0.push((name.into(), Body::Alone(Box::new(body))));
    }

    /// A test that runs cases one after the other; their data follow from its name.
    pub fn cases(&mut self, name: impl Into<String>, make: impl Fn(&mut Rng) -> Vec<Case> + Send + Sync + 'static) {
        let name = name.into();
        let mut rng = Rng::named(&name);
        let seed = rng.bits();
        self.add(name, move |bench| make(&mut Rng::new(seed)).iter().try_for_each(|case| bench.check(case)));
    }
}

type Factory = dyn Fn() -> zofo_hal::Result<DeviceRef> + Send + Sync;

/// A device under test: how to open it, and the one that tests share.
struct Subject {
    label: String,
    factory: Box<Factory>,
    shared: OnceLock<zofo_hal::Result<DeviceRef>>,
}

impl Subject {
    fn shared(&self) -> zofo_hal::Result<DeviceRef> {
        self.shared.get_or_init(|| (self.factory)()).clone()
    }

    /// The device for a test; `None` where this machine has none.
    fn device(&self, body: &Body) -> Result<Option<DeviceRef>, Failed> {
        let device = match body {
            Body::Shared(_) => self.shared(),
            Body::Alone(_) => (self.factory)(),
        };
        match device {
            Ok(device) => Ok(Some(device)),
            Err(e) if matches!(e.kind(), ErrorKind::BackendUnavailable { .. }) => Ok(None),
            Err(e) => Err(format!("the factory fails: {e:?}").into()),
        }
    }

    fn run(&self, name: &str, body: &Body) -> Result<(), Failed> {
        let Some(device) = self.device(body)? else {
            zofo_testkit::record_skip(&format!("conformance::{name}"), "no device");
            return Ok(());
        };
        let outcome = match body {
            Body::Shared(f) => Bench::new(device).and_then(|bench| f(&bench)),
            Body::Alone(f) => f(&device),
        };
        outcome.map_err(|e| e.to_string().into())
    }
}

/// Conformance of one or several devices, as the `main` of a test with `harness = false`.
///
/// ```no_run
/// # use std::process::ExitCode;
/// # fn open(_tier: &str) -> zofo_hal::Result<zofo_hal::DeviceRef> { unreachable!() }
/// fn main() -> ExitCode {
///     zofo_conformance::Suite::new().device("scalar", || open("scalar")).device("avx2", || open("avx2")).run()
/// }
/// ```
#[derive(Default)]
pub struct Suite(Vec<Arc<Subject>>);

impl Suite {
    /// No device yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device; its tests are called `label/op/types/case`. Where the factory answers `BackendUnavailable`, each is a counted skip.
    pub fn device(mut self, label: impl Into<String>, factory: impl Fn() -> zofo_hal::Result<DeviceRef> + Send + Sync + 'static) -> Self {
        self.0.push(Arc::new(Subject { label: label.into(), factory: Box::new(factory), shared: OnceLock::new() }));
        self
    }

    /// Runs the tests that the command line selects, with the options of Rust's own test harness.
    pub fn run(self) -> ExitCode {
        let mut args = Arguments::from_args();
        let mut trials = Vec::new();
        for subject in &self.0 {
            if !args.list
                && let Ok(device) = subject.shared()
                && device.limits().max_queues < 64
            {
                // Each test holds a few queues.
                args.test_threads = Some(1);
            }
            let mut tests = Tests::default();
            crate::tests(&mut tests);
            for (name, body) in tests.0 {
                let name = if subject.label.is_empty() { name } else { format!("{}/{name}", subject.label) };
                let subject = Arc::clone(subject);
                trials.push(Trial::test(name.clone(), move || subject.run(&name, &body)));
            }
        }
        libtest_mimic::run(&args, trials).exit_code()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use zofo_hal::Error;

    fn subject(kind: ErrorKind) -> Subject {
        let factory = move || Err(Error::new(kind.clone(), "no"));
        Subject { label: String::new(), factory: Box::new(factory), shared: OnceLock::new() }
    }

    /// A missing device is a skip, a broken one a failure.
    #[test]
    fn only_a_missing_backend_skips() {
        let missing = subject(ErrorKind::BackendUnavailable { searched: Box::default(), hint: String::new() });
        let broken = subject(ErrorKind::OutOfMemory { requested: 1, available: None });
        for body in [Body::Shared(Box::new(|_| Ok(()))), Body::Alone(Box::new(|_| Ok(())))] {
            assert!(missing.device(&body).unwrap().is_none());
            assert!(broken.device(&body).is_err());
        }
    }

    #[test]
    fn names_are_unique() {
        let mut tests = Tests::default();
        crate::tests(&mut tests);
        let names: HashSet<_> = tests.list().iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), tests.list().len());
    }
}
