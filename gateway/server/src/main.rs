//! The `kvgate` command.

fn main() -> std::process::ExitCode {
    kvgate::Gateway::new().main()
}
