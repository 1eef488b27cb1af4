//! The program; see `zofo --help`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
