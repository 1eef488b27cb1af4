//! Commands of the program. They translate arguments into library calls and results into text; nothing else is here.

mod args;
mod cache;
mod compare;
mod config;
mod console;
mod data_args;
mod devices;
mod eval;
#[cfg(feature = "hub")]
mod fetch;
mod generate;
mod interrupt;
mod output;
mod plan;
mod progress;
mod simulate;
mod train;
mod train_args;

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
    let arguments: Vec<_> = std::env::args_os().collect();
    let (arguments, cluster) = match config::expand(&arguments, &train_args::train_command()) {
        Ok(expanded) => expanded,
        Err(e) => return end(Err(usage(e))),
    };
    let matches = match Cli::command().try_get_matches_from(arguments) {
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
    let result = match cli.command {
        Command::Devices(args) => devices::run(&args),
        #[cfg(feature = "hub")]
        Command::Fetch(args) => fetch::run(args),
        Command::Train(args) => {
            let own = matches.subcommand_matches("train").unwrap_or(&matches);
            train::run(*args, own, cluster)
        }
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Eval(args) => eval::run(*args),
        Command::Compare(args) => compare::run(&args),
        Command::Completions(args) => {
            completions(args.shell);
            Ok(())
        }
        Command::Generate(args) => generate::run(args),
    };
    end(result)
}

/// Says what went wrong, and gives the exit code.
fn end(result: Result<(), Failure>) -> ExitCode {
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

/// Prints the script that completes commands and options in a shell.
fn completions(shell: clap_complete::Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "zofo", &mut script);
    console::print(&String::from_utf8_lossy(&script));
}
