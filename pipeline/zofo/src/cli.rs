//! Commands of the program. They translate arguments into library calls and results into text; nothing else is here.

mod args;
mod cache;
mod compare;
mod console;
mod data_args;
mod devices;
mod eval;
#[cfg(feature = "hub")]
mod fetch;
mod generate;
mod interrupt;
mod progress;
mod train;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use zofo::{Error, ErrorKind};

use args::{Cli, Command};

/// Exit code after an interrupt, as shells have it: 128 and SIGINT.
const INTERRUPTED: u8 = 130;

/// Why a command ends without success.
enum Failure {
    /// Arguments that cannot be: exit code 2.
    Usage(Error),
    /// Anything else that went wrong: exit code 1.
    Failed(Error),
    /// Stopped by the user, who was told what to do.
    Interrupted,
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

/// Arguments that the library refuses are wrong use; a broken file is not.
fn usage(e: Error) -> Failure {
    if *e.kind() == ErrorKind::InvalidArgument { Failure::Usage(e) } else { Failure::Failed(e) }
}

pub fn main() -> ExitCode {
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(e) => {
            // Help and version are no errors; writing them may fail where nobody reads.
            let _ = e.print();
            return ExitCode::from(e.exit_code() as u8);
        }
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(2);
        }
    };
    let given = matches.subcommand().map(|(_, m)| args::given(m)).unwrap_or_default();
    let result = match cli.command {
        Command::Devices(args) => devices::run(&args),
        #[cfg(feature = "hub")]
        Command::Fetch(args) => fetch::run(args),
        Command::Train(args) => train::run(*args, &given),
        Command::Eval(args) => eval::run(*args),
        Command::Compare(args) => compare::run(&args),
        Command::Generate(args) => generate::run(args),
    };
    match result {
        Ok(()) if console::lost() => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(Failure::Usage(e)) => {
            console::error(&e);
            ExitCode::from(2)
        }
        Err(Failure::Failed(e)) => {
            console::error(&e);
            ExitCode::from(1)
        }
    }
}
