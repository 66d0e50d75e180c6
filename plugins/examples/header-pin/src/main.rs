//! A gateway with one more tier.

use std::process::ExitCode;

use kvgate_header_pin::KIND;

fn main() -> ExitCode {
    kvgate::Gateway::new().tier(&KIND).main()
}
