//! The command `semel`. Everything it does is in the library beside it.

use std::process::ExitCode;

// No runtime is started here: the guard must stay a process of one thread (see `semel_server::guard`).
fn main() -> ExitCode {
    semel_server::cli::main()
}
